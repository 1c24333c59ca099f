"""Tests of common/generation/drafts.py: what is tried, and that completions are those of decoding without drafts."""

import dataclasses
import itertools
from array import array

import pytest
import torch
from test_engine import OPTIONS, PROMPTS, as_on_gpu, tiny  # noqa: F401
from test_rollout import assert_same, completions, in_double  # noqa: F401

from common.generation import drafts
from common.generation.drafts import Former, continuation
from common.generation.rollout import Sampler


def generate(sampler, former=(), group_size=4, prompts=PROMPTS, temperature=1.0, seed=3):
    return sampler.generate(prompts, group_size=group_size, temperature=temperature, seed=seed, former=former)


def kept(batch, num_prompts=len(PROMPTS)):
    former = Former()
    former.put(range(num_prompts), batch.completions)
    return former.of(range(num_prompts))


def watched(sampler):
    """Rows and tokens of each pass over drafts."""
    runner, passes = sampler.engines[0].runner, []
    extend = runner.extend

    def look(tried, sampling):
        passes.append([draft.new for draft in tried])
        return extend(tried, sampling)

    runner.extend = look
    return passes


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize(("group_size", "rollout_batch"), [(4, 0), (4, 9), (1, 3)])
def test_completions_are_those_without_drafts(as_on_gpu, gpu, group_size, rollout_batch):  # noqa: F811
    sampler = Sampler([tiny("qwen2")], **OPTIONS, rollout_batch=rollout_batch)
    sampler = as_on_gpu(sampler) if gpu else sampler
    same = generate(sampler, (), group_size)
    other = generate(sampler, (), group_size, seed=4)
    for temperature, former in ((1.0, kept(same)), (1.0, kept(other)), (0, kept(same))):
        plain = generate(sampler, (), group_size, temperature=temperature)
        passes = watched(sampler)
        drafted = generate(sampler, former, group_size, temperature=temperature)
        assert_same(dataclasses.replace(drafted, drafted=None), plain)
        assert passes
        print(passes, drafted.drafted, drafted.lengths)
