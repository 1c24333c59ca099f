"""Tests of common/rollout.py: what is sampled, from which distribution, and how it reaches the update."""

import copy
import dataclasses
import itertools
import math
import re

import pytest
import torch
from conftest import build_model, tiny_model
from test_sampling import reference
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from common import attention, logprobs, losses, merging, models
from common.engine import Engine
from common.rollout import RolloutBatch, Sampler, assemble
from common.sampling import Sampling

FAMILIES = ["qwen2", "gpt2"]
# who decodes: the engine, or, for models that it does not serve, loops over the cache of transformers
EACH_WAY = pytest.mark.parametrize(("family", "engine"), [("qwen2", True), ("gpt2", True), ("gpt2", False)])
PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15, 16, 17], [20]]
NEVER = [999]  # an end token no model here can sample
OPTIONS = dict(end_ids=NEVER, pad_id=0, max_new_tokens=12)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def policies():
    torch.set_num_threads(1)
    return {family: build_model(family).eval() for family in FAMILIES}


def flat_model(vocabulary=200) -> Qwen2ForCausalLM:
    """A model whose distributions are close to uniform."""
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(vocab_size=vocabulary, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                    num_attention_heads=4, num_key_value_heads=2, eos_token_id=None, pad_token_id=0, bos_token_id=None)
    ).eval()  # fmt: skip


def make_sampler(replicas, engine=True, **options) -> Sampler:
    """A sampler for one model or a list of replicas."""
    replicas = replicas if isinstance(replicas, list) else [replicas]
    sampler = Sampler(replicas, **{**OPTIONS, **options})
    assert len(sampler.engines) == len(replicas) and all(isinstance(one, Engine) for one in sampler.engines)
    if not engine:
        sampler.engines = [None] * len(replicas)
    return sampler


def rollout(replicas, prompts=PROMPTS, engine=True, group_size=1, temperature=1.0, seed=0, step=0, prompt_numbers=None,
            **options) -> RolloutBatch:  # fmt: skip
    """What a new sampler gives."""
    return make_sampler(replicas, engine, **options).generate(
        prompts, group_size=group_size, temperature=temperature, seed=seed, step=step, prompt_numbers=prompt_numbers
    )


def completions(batch) -> list[list[int]]:
    return [ids[:n] for ids, n in zip(batch.completion_ids.tolist(), batch.lengths.tolist(), strict=True)]


def assert_equal(batch, other):
    """Bit for bit, in every field."""
    for field in dataclasses.fields(RolloutBatch):
        a, b = getattr(batch, field.name), getattr(other, field.name)
        assert a is b is None or torch.equal(a, b), field.name


def calls(model) -> list[dict]:
    """The arguments of every call of the decoder from now on."""
    seen = []
    model.get_decoder().register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True)
    return seen


def full_logits(model, prompt, completion) -> torch.Tensor:
    """What the model itself computes for every token of a completion."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].float()


def make_batch(lengths, group_size=1, prompt_lengths=None) -> RolloutBatch:
    """A rollout with these completion lengths; the ids tell the row: 100 * row + position."""
    B, C = len(lengths), max(lengths)
    prompt_lengths = prompt_lengths or [1 + i // group_size for i in range(B)]
    Q = max(prompt_lengths)
    places = 100 * torch.arange(B)[:, None]
    prompt_mask = torch.arange(Q) >= Q - torch.tensor(prompt_lengths)[:, None]
    mask = torch.arange(C) < torch.tensor(lengths)[:, None]
    return RolloutBatch(
        prompt_ids=(places + torch.arange(Q)) * prompt_mask, prompt_mask=prompt_mask,
        completion_ids=(places + torch.arange(C)) * mask, sampled_mask=mask, completion_mask=mask.clone(),
        rollout_logps=-0.5 * (places + torch.arange(C)) * mask, prompt_lengths=torch.tensor(prompt_lengths),
        lengths=torch.tensor(lengths), truncated=torch.zeros(B, dtype=torch.bool),
        trained=torch.ones(B, dtype=torch.bool), rows=torch.arange(B),
    )  # fmt: skip


def assert_follows(counts, probabilities, total):
    """Chi-square test of counts against probabilities; the sum of rare outcomes counts as one."""
    expected = probabilities.double() * total
    often = expected >= 5
    observed = torch.cat([counts[often].double(), counts[~often].double().sum()[None]])
    expected = torch.cat([expected[often], expected[~often].sum()[None]]).clamp(min=1e-9)
    statistic = ((observed - expected) ** 2 / expected)[expected > 1].sum().item()
    degrees = int((expected > 1).sum()) - 1
    assert degrees >= 5
    assert statistic < degrees + 4 * math.sqrt(2 * degrees)


# --- greedy, against transformers ---


@EACH_WAY
def test_greedy_tokens_are_those_of_transformers(policies, family, engine):
    plain, model = build_model(family).eval(), policies[family]
    free = rollout(model, engine=engine, temperature=0)
    end = free.completion_ids[0, 5].item()  # ends one row early: the rows then stop at different times
    ours = rollout(model, engine=engine, temperature=0, end_ids=[3, end])
    theirs = plain.generate(ours.prompt_ids, attention_mask=ours.prompt_mask.long(), do_sample=False,
                            max_new_tokens=12, eos_token_id=[3, end], pad_token_id=0)  # fmt: skip
    theirs = theirs[:, ours.prompt_ids.shape[1] :]
    assert torch.equal(ours.completion_ids, theirs[:, : ours.completion_ids.shape[1]])
    assert ours.lengths[0] <= 6 and len(set(ours.completion_ids.flatten().tolist())) > 3


@EACH_WAY
def test_greedy_tokens_are_the_argmax_of_the_log_probs(policies, family, engine):
    batch = rollout(policies[family], engine=engine, temperature=0)
    for prompt, completion in zip(PROMPTS, completions(batch), strict=True):
        assert full_logits(policies[family], prompt, completion).argmax(-1).tolist() == completion


# --- who decodes ---

UNSERVED = {
    "mixtral": ({}, "it is a mixture of experts"),
    "gemma2": (dict(head_dim=8), "it has soft-capped attention"),
    "falcon": ({}, "its attention does not go through the attention interface of transformers"),
    "mistral": (dict(sliding_window=8), "it has sliding windows of 8 tokens"),
}


@pytest.mark.parametrize("kind", UNSERVED)
def test_models_the_engine_does_not_serve_are_sampled_over_the_cache_of_transformers(capsys, kind):
    options, reason = UNSERVED[kind]
    plain = tiny_model(kind, **options)
    model, ends = copy.deepcopy(plain), [3, 40, 41, 42]
    sampler = Sampler([model], end_ids=ends, pad_id=0, max_new_tokens=12)
    assert sampler.engines == [None]
    assert lines(capsys) == [f"rollout: over the cache of transformers, because {reason}"]
    greedy = sampler.generate(PROMPTS, group_size=1, temperature=0)
    for prompt, completion in zip(PROMPTS, completions(greedy), strict=True):
        ids = plain.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False,
                             max_new_tokens=12, eos_token_id=ends, pad_token_id=0)  # fmt: skip
        assert completion == ids[0, len(prompt) :].tolist()
    sampled = sampler.generate(PROMPTS, group_size=4, temperature=1.0)
    assert len(set(sampled.lengths.tolist())) > 1
    for i, completion in enumerate(completions(sampled)):
        expected = full_logits(plain, PROMPTS[i // 4], completion).log_softmax(-1)[range(len(completion)), completion]
        torch.testing.assert_close(sampled.rollout_logps[i, : len(completion)], expected, rtol=0, atol=1e-4)
    alone = sampler.generate(PROMPTS[1:2], group_size=4, temperature=1.0, prompt_numbers=[1])
    assert completions(alone) == completions(sampled)[4:8]
    assert lines(capsys) == []  # it is said once


@pytest.mark.parametrize(("window", "served"), [(None, (True, True)), (21, (True, True)), (20, (True, False)),
                                                (12, (False, False))])  # fmt: skip
def test_windows_shorter_than_a_sequence_are_left_to_transformers(window, served):
    plain = tiny_model("mistral", sliding_window=window)
    model = copy.deepcopy(plain)
    sampler, seen = Sampler([model], **OPTIONS), calls(model)
    for prompts, engine in zip((PROMPTS[::2], PROMPTS), served, strict=True):  # of 4 tokens at most, of 9
        seen.clear()
        batch = sampler.generate(prompts, group_size=1, temperature=0)
        assert all(("rl" in call) == engine for call in seen)
        for prompt, completion in zip(prompts, completions(batch), strict=True):
            assert full_logits(plain, prompt, completion).argmax(-1).tolist() == completion


def lines(capsys) -> list[str]:
    """What was printed, on either stream."""
    captured = capsys.readouterr()
    return [line for line in (captured.out + captured.err).splitlines() if line]


@pytest.mark.parametrize("rank", [0, 1])
def test_it_is_said_once_and_by_one_rank_how_completions_are_sampled(policies, capsys, monkeypatch, rank):
    monkeypatch.setenv("RANK", str(rank))
    sampler = Sampler(models.replicate(policies["qwen2"], (CPU, CPU)), **OPTIONS)
    expected = ["rollout: PyTorch's attention over a static cache (cpu, float32: no flash kernel)"]
    assert lines(capsys) == (expected if rank == 0 else [])
    for _ in range(2):
        sampler.generate(PROMPTS, group_size=2, temperature=1.0)
    assert lines(capsys) == []


# --- shape of a rollout ---


@EACH_WAY
def test_completions_of_a_prompt_stand_side_by_side(policies, family, engine):
    batch = rollout(policies[family], engine=engine, group_size=4)
    assert len(batch) == 12 and batch.rows.tolist() == list(range(12))
    for i in range(12):
        assert batch.prompt_ids[i][batch.prompt_mask[i]].tolist() == PROMPTS[i // 4]
        assert batch.prompt_ids[i][~batch.prompt_mask[i]].eq(0).all()
        assert batch.prompt_mask[i, -1]  # padding is on the left
    assert batch.prompt_lengths.tolist() == [4] * 4 + [9] * 4 + [1] * 4
    assert batch.trained.all() and torch.equal(batch.completion_mask, batch.sampled_mask)
    bools = batch.prompt_mask, batch.completion_mask, batch.sampled_mask, batch.truncated, batch.trained
    assert {x.dtype for x in bools} == {torch.bool} and batch.rollout_logps.dtype == torch.float32
    integers = batch.completion_ids, batch.prompt_ids, batch.lengths, batch.prompt_lengths, batch.rows
    assert {x.dtype for x in integers} == {torch.int64}
    assert not batch.completion_ids.requires_grad and not batch.rollout_logps.requires_grad


@EACH_WAY
def test_an_end_token_cuts_a_completion_and_changes_nothing_before_it(policies, family, engine):
    which = dict(engine=engine, group_size=16, seed=4, step=2)
    free = rollout(policies[family], **which)
    values, counts = free.completion_ids.unique(return_counts=True)
    end_ids = values[counts.argsort(descending=True)[:2]].tolist()  # frequent ones: rows end at many different times
    batch = rollout(policies[family], **which, end_ids=end_ids)
    for long, short, mask, truncated in zip(free.completion_ids.tolist(), completions(batch), batch.sampled_mask,
                                            batch.truncated.tolist(), strict=True):  # fmt: skip
        ends = [t for t, token in enumerate(long) if token in end_ids]
        assert short == (long[: ends[0] + 1] if ends else long)
        assert truncated == (not ends)
        assert mask.sum() == len(short) and mask[: len(short)].all()
    assert len(set(batch.lengths.tolist())) > 4
    assert batch.completion_ids[~batch.sampled_mask].eq(0).all() and not batch.rollout_logps[~batch.sampled_mask].any()
    assert batch.completion_ids.shape[1] == batch.lengths.max()
    expected = torch.where(batch.sampled_mask, free.rollout_logps[:, : batch.lengths.max()], 0.0)
    torch.testing.assert_close(batch.rollout_logps, expected, rtol=0, atol=1e-5)


@EACH_WAY
def test_a_pad_token_that_ends_completions_counts_as_end(policies, family, engine):
    # some chat models name their pad token among the end tokens
    which = dict(engine=engine, group_size=16)
    pad_id = rollout(policies[family], **which).completion_ids.flatten().mode().values.item()
    one, other = (rollout(policies[family], **which, end_ids=[pad_id], pad_id=pad) for pad in (0, pad_id))
    assert torch.equal(one.lengths, other.lengths) and torch.equal(one.truncated, other.truncated)
    assert torch.equal(one.sampled_mask, other.sampled_mask) and not one.truncated.all()
    assert completions(one) == completions(other)


@EACH_WAY
@pytest.mark.parametrize("group_size", [1, 3, 64])
def test_small_and_large_groups(policies, family, engine, group_size):
    batch = rollout(policies[family], PROMPTS[:2], engine, group_size=group_size, end_ids=[3, 30, 31])
    assert len(batch) == 2 * group_size
    assert batch.prompt_mask.sum(1).tolist() == [4] * group_size + [9] * group_size
    # one prompt's completions are the same whatever the group size
    two = completions(rollout(policies[family], PROMPTS[:2], engine, group_size=2, end_ids=[3, 30, 31]))
    n = min(2, group_size)
    assert completions(batch)[:n] == two[:n] and completions(batch)[group_size:][:n] == two[2:][:n]


@EACH_WAY
def test_all_sequences_may_end_at_the_first_token(policies, family, engine):
    model = copy.deepcopy(policies[family])
    sampler = make_sampler(model, engine, end_ids=range(64))
    seen = calls(model)
    batch = sampler.generate(PROMPTS, group_size=2, temperature=1.0)
    assert batch.completion_ids.shape == (6, 1) and batch.sampled_mask.all()
    assert batch.lengths.tolist() == [1] * 6 and not batch.truncated.any()
    assert len(seen) == 1  # and nothing is computed after that


@EACH_WAY
def test_no_sequence_may_end(policies, family, engine):
    batch = rollout(policies[family], engine=engine, group_size=2, max_new_tokens=5)
    assert batch.truncated.all() and batch.sampled_mask.all()
    assert batch.lengths.tolist() == [5] * 6 and batch.completion_ids.shape == (6, 5)


@EACH_WAY
def test_a_single_new_token(policies, family, engine):
    batch = rollout(policies[family], engine=engine, group_size=2, max_new_tokens=1)
    assert batch.completion_ids.shape == (6, 1) and batch.truncated.all()
    longer = rollout(policies[family], engine=engine, group_size=2, end_ids=range(64), max_new_tokens=9)
    assert batch.lengths.tolist() == longer.lengths.tolist() == [1] * 6


@EACH_WAY
def test_no_completion_ends_before_min_new_tokens(policies, family, engine):
    end_ids, which = [3, *range(30, 45)], dict(engine=engine, group_size=8)
    free = rollout(policies[family], **which, end_ids=end_ids)
    assert (free.lengths < 5).any()
    batch = rollout(policies[family], **which, end_ids=end_ids, min_new_tokens=5)
    assert batch.lengths.min() == 6  # the sixth token may be one of them
    assert not any(token in end_ids for row in completions(batch) for token in row[:5])
    assert batch.truncated.tolist() == [row[-1] not in end_ids for row in completions(batch)]
    to_the_end = rollout(policies[family], **which, end_ids=end_ids, min_new_tokens=12)
    assert to_the_end.lengths.tolist() == [12] * 24 and to_the_end.truncated.all()


def test_waiting_completions_are_the_same(policies):
    batch = rollout(policies["qwen2"], group_size=4, end_ids=[3, 30, 31])
    for rollout_batch in (1, 4, 9, 100):
        other = rollout(policies["qwen2"], group_size=4, end_ids=[3, 30, 31], rollout_batch=rollout_batch)
        assert completions(other) == completions(batch)
        assert torch.equal(other.rows, batch.rows) and torch.equal(other.prompt_ids, batch.prompt_ids)


# --- the distribution sampled from ---


@EACH_WAY
@pytest.mark.parametrize("options", [dict(temperature=0.7), dict(temperature=1.3, top_k=20, top_p=0.9)], ids=str)
def test_first_and_second_tokens_follow_the_distribution(policies, family, engine, options):
    model, how, number = policies[family], Sampling(**options), 8000
    batch = rollout(model, [PROMPTS[0]], engine, group_size=number, max_new_tokens=2, seed=1, **options)
    with torch.no_grad():
        ids = torch.tensor([PROMPTS[0]]).repeat(64, 1)
        first = model(input_ids=ids[:1]).logits[:, -1]
        second = model(input_ids=torch.cat([ids, torch.arange(64)[:, None]], 1)).logits[:, -1]
    first, second = (torch.tensor([reference(row, 0, [], [], how) for row in x.tolist()]) for x in (first, second))
    counts = [batch.completion_ids[:, t].bincount(minlength=64) for t in range(2)]
    assert_follows(counts[0], first[0], number)
    assert_follows(counts[1], first[0] @ second, number)
    favourite = int(first.argmax())  # and the second token depends on the first one of its own row
    after = batch.completion_ids[batch.completion_ids[:, 0] == favourite, 1]
    assert_follows(after.bincount(minlength=64), second[favourite], len(after))


@EACH_WAY
@pytest.mark.parametrize("options", [
    dict(), dict(temperature=0.6), dict(temperature=2.0), dict(top_k=5), dict(top_p=0.6), dict(min_p=0.3),
    dict(suppressed_ids=[7, 30, 31, 40, 41, 42, 50, 60]), dict(min_new_tokens=4), dict(temperature=0),
    dict(temperature=0.8, top_k=20, top_p=0.9, min_p=0.05, suppressed_ids=[30, 31], min_new_tokens=2),
    dict(temperature=0, suppressed_ids=[7, 30, 31], min_new_tokens=3),
], ids=str)  # fmt: skip
def test_log_probs_are_those_of_the_distribution_sampled_from(policies, family, engine, options):
    model, end_ids = policies[family], [3, *range(20, 28)]
    batch = rollout(model, engine=engine, group_size=6, end_ids=end_ids, **options)
    how = Sampling(**{name: value for name, value in options.items() if name != "suppressed_ids"})
    which = end_ids, options.get("suppressed_ids", []), how
    for i, completion in enumerate(completions(batch)):
        logits = full_logits(model, PROMPTS[i // 6], completion).tolist()
        probabilities = [reference(row, t, *which) for t, row in enumerate(logits)]
        drawn = torch.tensor([row[token] for row, token in zip(probabilities, completion, strict=True)])
        assert (drawn > 0).all()  # no token that cannot be drawn
        if how.temperature == 0:  # the log-probability is that among all tokens allowed
            allowed = dataclasses.replace(how, temperature=1.0)
            drawn = torch.tensor([reference(row, t, *which[:2], allowed)[token]
                                  for t, (row, token) in enumerate(zip(logits, completion, strict=True))])  # fmt: skip
        torch.testing.assert_close(batch.rollout_logps[i, : len(completion)], drawn.log(), rtol=0, atol=1e-4)
    if options:
        assert completions(batch) != completions(rollout(model, engine=engine, group_size=6, end_ids=end_ids))


@EACH_WAY
def test_the_whole_vocabulary_can_be_sampled(family, engine):
    batch = rollout(flat_model(), [[5, 6, 7]], engine, group_size=4000, max_new_tokens=1)
    # near uniform, each of 200 tokens is missed with probability e^-20; a top-k of 50 would give 50
    assert batch.completion_ids.unique().numel() == 200


@EACH_WAY
def test_settings_in_the_generation_config_are_ignored(policies, family, engine):
    plain = rollout(policies[family], engine=engine, group_size=4)
    model = copy.deepcopy(policies[family])
    model.generation_config.update(do_sample=True, top_k=1, top_p=0.1, min_p=0.5, temperature=0.01,
                                   repetition_penalty=9.0, max_new_tokens=2, eos_token_id=list(range(64)))  # fmt: skip
    assert_equal(rollout(model, engine=engine, group_size=4), plain)


@pytest.mark.parametrize(("name", "value"), [("top_p", 0.0), ("top_k", -1), ("min_p", 2.0), ("min_new_tokens", -1)])
def test_options_without_meaning_are_refused(policies, name, value):
    with pytest.raises(ValueError, match=f"{name} = {value}: must be"):
        make_sampler(policies["qwen2"], **{name: value})


# --- random numbers ---


def test_members_of_a_group_differ(policies):
    batch = rollout(policies["qwen2"], PROMPTS[:1], group_size=16)
    assert len({tuple(row) for row in completions(batch)}) == 16


@EACH_WAY
def test_the_same_seed_and_step_give_the_same_tokens(policies, family, engine):
    def tokens(**which):
        return tuple(map(tuple, completions(rollout(policies[family], engine=engine, group_size=4, **which))))

    again = tokens(seed=3, step=7)
    assert again == tokens(seed=3, step=7)
    others = [dict(seed=3, step=8), dict(seed=4, step=7), dict(seed=7, step=3), dict(seed=0, step=0), dict(seed=-1)]
    assert len({again, *(tokens(**which) for which in others)}) == 6


@EACH_WAY
def test_sampling_leaves_the_global_random_state_alone(policies, family, engine):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = rollout(policies[family], engine=engine, group_size=2)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert_equal(rollout(policies[family], engine=engine, group_size=2), first)


def test_the_same_prompt_twice_gets_different_completions(policies):
    # in one process, and in two processes that each hold one of them
    batch = rollout(policies["qwen2"], [PROMPTS[0]] * 2, group_size=4)
    by_rank = [rollout(policies["qwen2"], [PROMPTS[0]], group_size=4, prompt_numbers=[rank]) for rank in range(2)]
    assert not torch.equal(by_rank[0].completion_ids, by_rank[1].completion_ids)
    assert torch.equal(batch.completion_ids, torch.cat([part.completion_ids for part in by_rank]))


@EACH_WAY
def test_prompts_together_or_one_by_one_give_the_same_tokens(policies, family, engine):
    which = dict(engine=engine, group_size=4, end_ids=[3, 30, 31])
    together = completions(rollout(policies[family], **which))
    apart = []
    for number in (2, 0, 1):
        part = rollout(policies[family], [PROMPTS[number]], **which, prompt_numbers=[number])
        apart.append((number, completions(part)))
    assert together == [row for _, rows in sorted(apart) for row in rows]


# --- replicas ---


@pytest.mark.parametrize("engine", [True, False])
@pytest.mark.parametrize(("num_prompts", "num_replicas"), [(9, 4), (3, 4), (3, 2), (1, 4), (5, 2)])
def test_replicas_give_the_same_tokens_as_one_model(policies, num_prompts, num_replicas, engine):
    prompts = [PROMPTS[i % 3] + [i + 25] for i in range(num_prompts)]
    replicas = models.replicate(policies["qwen2"], (CPU,) * num_replicas)
    which = dict(engine=engine, group_size=2, seed=1, end_ids=[3, 30, 31])
    one, several = (rollout(some, prompts, **which) for some in (replicas[:1], replicas))
    torch.testing.assert_close(several.rollout_logps, one.rollout_logps, rtol=0, atol=1e-5)
    assert_equal(dataclasses.replace(several, rollout_logps=one.rollout_logps), one)


@pytest.mark.parametrize("engine", [True, False])
def test_every_replica_takes_part(policies, engine):
    replicas = models.replicate(copy.deepcopy(policies["qwen2"]), (CPU,) * 2)
    sampler = make_sampler(replicas, engine, max_new_tokens=3)
    seen = []
    for i, replica in enumerate(replicas):
        replica.get_decoder().register_forward_pre_hook(
            lambda module, args, kwargs, i=i: seen.append((i, tuple(kwargs["input_ids"].shape))), with_kwargs=True
        )
    sampler.generate(PROMPTS, group_size=2, temperature=1.0)
    # the longest prompt, and the two others; then, in turn, a token for each of their completions
    assert [call for call in seen if call[1][1] == 1 and call[1][0] > 1] == [(0, (2, 1)), (1, (4, 1))] * 2
    assert len(seen) == 6


def test_replicas_follow_new_weights(policies):
    model = copy.deepcopy(policies["qwen2"])
    replicas = models.replicate(model, (CPU,) * 2)
    sampler = make_sampler(replicas)
    before = sampler.generate(PROMPTS, group_size=2, temperature=1.0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    models.refresh(replicas)
    after = sampler.generate(PROMPTS, group_size=2, temperature=1.0)
    assert completions(after) == completions(rollout(model, group_size=2)) != completions(before)


@pytest.mark.parametrize("broken_before", [True, False])
def test_an_error_in_a_replica_reaches_the_caller(policies, broken_before):
    replicas = [policies["qwen2"], copy.deepcopy(policies["qwen2"])]
    sampler = make_sampler(replicas)
    with torch.no_grad():
        replicas[1].model.norm.weight.fill_(torch.nan)
    if broken_before:
        sampler = Sampler(replicas, **OPTIONS)
        assert sampler.engines[1] is None
    with pytest.raises(FloatingPointError):
        sampler.generate(PROMPTS, group_size=2, temperature=1.0)


@pytest.mark.parametrize("engine", [True, False])
def test_an_error_in_a_replica_leaves_the_others_as_they_were(policies, engine):
    replicas = [copy.deepcopy(policies["qwen2"]).train() for _ in range(2)]
    sampler = make_sampler(replicas, engine)
    seen = []

    def fail(*args):
        seen.append(1)
        if len(seen) == 3:
            raise RuntimeError("out of memory")

    replicas[1].get_decoder().register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory") as caught:
        sampler.generate(PROMPTS, group_size=2, temperature=1.0)
    for replica in replicas:  # also while the error is handled, when a script may save its policy
        assert all(module.training for module in replica.modules()) and not traces(replica)
    del caught


# --- from one rollout to the next ---


@EACH_WAY
def test_new_weights_change_the_output(policies, family, engine):
    model = copy.deepcopy(policies[family])
    sampler = make_sampler(model, engine)
    before = sampler.generate(PROMPTS, group_size=4, temperature=1.0)
    assert_equal(sampler.generate(PROMPTS, group_size=4, temperature=1.0), before)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    after = sampler.generate(PROMPTS, group_size=4, temperature=1.0)
    assert completions(after) != completions(before)
    assert_equal(after, rollout(model, engine=engine, group_size=4))
    for p in model.parameters():  # weights that moved, as after loading
        p.data = 0.9 * p.data
    assert_equal(sampler.generate(PROMPTS, group_size=4, temperature=1.0), rollout(model, engine=engine, group_size=4))


@EACH_WAY
def test_training_and_evaluation_share_a_sampler(policies, family, engine):
    sampler = make_sampler(policies[family], engine, end_ids=[3, 30, 31])
    long = [[i % 60 + 1 for i in range(30)], [7] * 25]
    for step in range(3):
        for prompts, which in ((PROMPTS, dict(group_size=4, temperature=0.8, step=step)),
                               (long, dict(group_size=1, temperature=0))):  # fmt: skip
            batch = sampler.generate(prompts, **which)
            other = rollout(policies[family], prompts, engine, **which, end_ids=[3, 30, 31])
            assert completions(batch) == completions(other)
            torch.testing.assert_close(batch.rollout_logps, other.rollout_logps, rtol=0, atol=1e-5)
        for one in filter(None, sampler.engines):
            one.release()


def test_a_batch_stays_as_it_is_when_the_next_one_is_sampled(policies):
    sampler = make_sampler(policies["qwen2"])
    batch = sampler.generate(PROMPTS, group_size=4, temperature=1.0)
    kept = copy.deepcopy(batch)
    sampler.generate(PROMPTS[::-1], group_size=4, temperature=1.0, seed=9)
    assert_equal(batch, kept)


# --- the model is left as it was ---


def checkpoint_activations(model):
    # renamed in transformers 5.24
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def flags(model):
    return {
        "modes": [module.training for module in model.modules()],
        "config": model.config.to_dict(),
        "generation config": model.generation_config.to_dict(),
        "checkpointing": [getattr(module, "gradient_checkpointing", None) for module in model.modules()],
        "gradients": [p.requires_grad for p in model.parameters()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "attention": model.config._attn_implementation,
    }


def traces(model) -> list[str]:
    """What the engine puts on modules while it decodes."""
    return [name for module in model.modules() for name in vars(module) if name.startswith("rl_")]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("raises", [0, 1, 3])
@EACH_WAY
def test_mode_and_settings_come_back_also_after_an_error(policies, family, engine, raises, training):
    model = copy.deepcopy(policies[family]).train(training)
    checkpoint_activations(model)
    model.train(training)
    sampler = make_sampler(model, engine)
    before, seen, attached = flags(model), [], []

    def look(module, args):
        seen.append(module.training)
        attached.extend(traces(model))
        if raises == len(seen):
            raise RuntimeError("out of memory")

    model.get_decoder().register_forward_pre_hook(look)
    if raises:
        with pytest.raises(RuntimeError, match="out of memory"):
            sampler.generate(PROMPTS, group_size=2, temperature=1.0)
    else:
        sampler.generate(PROMPTS, group_size=2, temperature=1.0)
    assert seen and not any(seen)  # no dropout while sampling
    assert bool(attached) == engine and not traces(model)
    assert flags(model) == before and before["attention"] == attention.NAME


@pytest.mark.parametrize("raises", [False, True])
@EACH_WAY
def test_ordinary_calls_of_the_model_give_what_they_gave_before(policies, tmp_path, family, engine, raises):
    plain = build_model(family).eval()
    model = copy.deepcopy(plain)
    sampler = make_sampler(model, engine)
    if raises:
        hook = model.get_decoder().register_forward_pre_hook(lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            sampler.generate(PROMPTS, group_size=2, temperature=1.0)
        hook.remove()
    else:
        sampler.generate(PROMPTS, group_size=2, temperature=1.0)
    ids = torch.tensor([[0, 0, 0, 5, 6, 7], [9, 10, 11, 12, 13, 14]])
    mask = torch.tensor([[0, 0, 0, 1, 1, 1], [1] * 6])
    for kwargs in (dict(attention_mask=mask), dict(attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)),
                   dict()):  # fmt: skip
        with torch.no_grad():
            assert torch.equal(model(input_ids=ids, **kwargs).logits, plain(input_ids=ids, **kwargs).logits)
    for one in (model, plain):
        one.save_pretrained(tmp_path / str(one is plain))
    saved, expected = ((tmp_path / name / "config.json").read_text() for name in ("False", "True"))
    assert saved == expected and attention.NAME not in saved


@EACH_WAY
def test_gradient_checkpointing_keeps_the_cache_and_the_tokens(policies, family, engine):
    expected = rollout(policies[family], engine=engine, group_size=2)
    model = copy.deepcopy(policies[family])  # GPT-2 with its dropout of 0.1
    checkpoint_activations(model)
    model.train()
    sampler = make_sampler(model, engine)
    seen = calls(model)
    batch = sampler.generate(PROMPTS, group_size=2, temperature=1.0)
    assert_equal(batch, expected)
    # each prompt once per group, without padding in the engine; then one token at a time
    assert [tuple(call["input_ids"].shape) for call in seen] == [(1, 14) if engine else (3, 9)] + [(6, 1)] * 11


@EACH_WAY
def test_sequences_that_ended_are_no_longer_computed(policies, family, engine):
    model = copy.deepcopy(policies[family])
    free = rollout(model, engine=engine, group_size=8)
    end_ids = sorted({*free.completion_ids[:, 1].tolist()} - {*free.completion_ids[0].tolist()})
    sampler = make_sampler(model, engine, end_ids=end_ids)
    seen = calls(model)
    lengths = sampler.generate(PROMPTS, group_size=8, temperature=1.0).lengths
    sizes = [len(call["input_ids"]) for call in seen]
    assert lengths[0] == 12 and (lengths > 2).sum() < 12  # most end at the second token, the first one does not
    assert sizes[1] <= 24 and sizes[-1] <= 12 and sizes[1:] == sorted(sizes[1:], reverse=True)
    # the engine closes every gap at once; whether the first token is the last, it sees after one step
    assert not engine or sum(sizes[1:]) <= (lengths.clamp(min=2) - 1).sum()


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("broken_before", [True, False])
@EACH_WAY
def test_broken_weights_stop_the_rollout(policies, family, engine, broken_before, temperature):
    model = copy.deepcopy(policies[family]).train()
    sampler = make_sampler(model, engine)
    norm = model.model.norm if family == "qwen2" else model.transformer.ln_f
    with torch.no_grad():
        norm.weight[3] = torch.nan
    if broken_before:
        sampler = Sampler([model], **OPTIONS)
    with pytest.raises(FloatingPointError, match="not finite"):
        sampler.generate(PROMPTS, group_size=2, temperature=temperature)
    assert all(module.training for module in model.modules()) and not traces(model)


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("engine", [True, False])
def test_an_overflow_in_the_middle_of_a_completion_stops_the_rollout(policies, engine, temperature):
    model = copy.deepcopy(policies["gpt2"])
    with torch.no_grad():
        model.transformer.wpe.weight[14] = torch.nan  # no prompt is that long
    with pytest.raises(FloatingPointError, match="not finite"):
        rollout(model, engine=engine, group_size=2, temperature=temperature)
    rollout(model, engine=engine, group_size=2, temperature=temperature, max_new_tokens=3)  # nor is any completion here


# --- adapters ---


def with_adapters(dtype=torch.float32):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)
    return peft.get_peft_model(tiny_model("qwen2").to(dtype), lora)


def base_weights(model) -> dict[str, torch.Tensor]:
    return {name: p for name, p in model.named_parameters() if not p.requires_grad}


@pytest.mark.parametrize("engine", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_policy_with_adapters_samples_as_if_they_were_merged(dtype, engine):
    model = with_adapters(dtype).train()
    merged = copy.deepcopy(model).merge_and_unload().eval()
    base = base_weights(model)
    before, places = {name: p.clone() for name, p in base.items()}, {name: p.data_ptr() for name, p in base.items()}
    sampler, names = make_sampler(model, engine, end_ids=[3, 40, 41]), [name for name, _ in model.named_parameters()]
    for temperature in (1.0, 0, 0.7):
        batch = sampler.generate(PROMPTS, group_size=4, temperature=temperature)
        assert_equal(batch, rollout(merged, engine=engine, group_size=4, temperature=temperature, end_ids=[3, 40, 41]))
    # the base weights are back, bit for bit and where they were
    assert [name for name, _ in model.named_parameters()] == names
    for name, p in base_weights(model).items():
        assert p is base[name] and p.data_ptr() == places[name] and torch.equal(p, before[name]), name
    assert all(module.training for module in model.modules()) and not traces(model)


@pytest.mark.parametrize("engine", [True, False])
def test_adapters_train_as_if_nothing_had_been_sampled(engine):
    model = with_adapters()
    untouched = copy.deepcopy(model)
    batch = rollout(model, engine=engine, group_size=2)
    gradients = []
    for one in (model, untouched):
        logps, _ = logprobs.LogProbs(one, 1.0)(*batch.tokens)
        logps[batch.completion_mask].sum().backward()
        gradients.append({name: p.grad for name, p in one.named_parameters() if p.requires_grad})
    assert len(gradients[0]) == 12 and all(grad.abs().max() > 0 for grad in gradients[0].values())
    for name, grad in gradients[0].items():
        assert torch.equal(grad, gradients[1][name]), name
    # what was sampled are the tokens of the model that is trained
    torch.testing.assert_close(logps[batch.sampled_mask], batch.rollout_logps[batch.sampled_mask], rtol=0, atol=1e-4)
    # and the next rollout samples from the adapters as they are by then
    torch.optim.SGD(model.parameters(), 0.1).step()
    merged = copy.deepcopy(model).merge_and_unload()
    after = rollout(model, engine=engine, group_size=2)
    assert_equal(after, rollout(merged, engine=engine, group_size=2))
    assert completions(after) != completions(batch)


@pytest.mark.parametrize("engine", [True, False])
def test_with_adapters_switched_off_the_base_model_is_sampled_from(engine):
    model, base = with_adapters(), tiny_model("qwen2")
    sampler = make_sampler(model, engine)
    with model.disable_adapter():
        off = sampler.generate(PROMPTS, group_size=4, temperature=1.0)
    on = sampler.generate(PROMPTS, group_size=4, temperature=1.0)
    assert_equal(off, rollout(base, engine=engine, group_size=4))
    assert completions(on) != completions(off)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("engine", [True, False])
def test_adapters_are_taken_out_again_after_an_error(engine, dtype):
    model = with_adapters(dtype)
    sampler = make_sampler(model, engine)
    before, seen = {name: p.clone() for name, p in base_weights(model).items()}, []

    def fail(module, args):
        changed = [name for name, p in base_weights(model).items() if not torch.equal(p, before[name])]
        seen.append(len(changed))
        if len(seen) == 3:
            raise RuntimeError("out of memory")

    model.get_decoder().register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        sampler.generate(PROMPTS, group_size=2, temperature=1.0)
    assert seen == [6, 6, 6]  # three weights in each of two layers were merged
    assert all(torch.equal(p, before[name]) for name, p in base_weights(model).items())
    assert not any(getattr(module, "merged", False) for module in model.modules())


def test_merged_adapters_does_nothing_without_adapters(policies):
    before = copy.deepcopy(policies["qwen2"].state_dict())
    with merging.merged(policies["qwen2"]):
        pass
    assert all(torch.equal(p, before[name]) for name, p in policies["qwen2"].state_dict().items())


# --- text ---


@pytest.mark.parametrize(("ids", "length", "truncated", "text"), [
    ([2, 4, 17, 3, 0, 0], 4, False, "<im_start> user 2"),  # end and padding go, other special tokens stay
    ([17, 18, 6, 12, 0, 0], 4, False, "2 3 \n"),  # another end token than the tokenizer's
    ([17, 18, 0, 0, 0, 0], 3, False, "2 3"),  # the pad token is among the end tokens
    ([17, 3, 18, 19, 20, 21], 6, True, "2 <im_end> 3 4 5 6"),  # cut off by the limit: the last token is no end token
    ([17, 0, 18, 3, 0, 0], 4, False, "2 3"),  # a sampled pad token
    ([3, 0, 0, 0, 0, 0], 1, False, ""),
])  # fmt: skip
def test_texts(tokenizer, ids, length, truncated, text):
    batch = dataclasses.replace(make_batch([6]), completion_ids=torch.tensor([ids]), lengths=torch.tensor([length]),
                                truncated=torch.tensor([truncated]))  # fmt: skip
    assert batch.texts(tokenizer) == [text]


def test_texts_of_completions_left_out_of_the_loss_are_whole(tokenizer):
    ids = torch.tensor([[17, 18, 3, 0], [17, 18, 19, 20]])
    batch = dataclasses.replace(make_batch([3, 4]), completion_ids=ids, truncated=torch.tensor([False, True]))
    batch.drop(torch.tensor([True, True]))
    assert batch.texts(tokenizer) == ["2 3", "2 3 4 5"]


def test_the_sampled_ids_are_kept_where_text_is_not_their_inverse():
    # bytes as tokens: two tokens make one character, and encoding the text may give other tokens
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: i for i, symbol in enumerate([*alphabet, "he"])}
    backend = Tokenizer(tokenizer_models.BPE(vocab=vocabulary, merges=[("h", "e")]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
    h, e = vocabulary["h"], vocabulary["e"]
    half = tokenizer.encode("é")[:1]
    ids = torch.tensor([[h, e], [h, *half]])
    batch = dataclasses.replace(make_batch([2, 2]), completion_ids=ids, truncated=torch.tensor([True, True]))
    assert tokenizer.encode("he") == [vocabulary["he"]]
    assert batch.texts(tokenizer) == ["he", "h\N{REPLACEMENT CHARACTER}"]
    assert batch.tokens[2].tolist() == [[h, e], [h, *half]]


# --- from rollout to update ---


def test_prompts_and_completions_are_put_together():
    tokens = torch.tensor([[30, 31, 3, -1, -1], [32, -1, -1, -1, -1], [33, 34, 35, 0, -1], [3, -1, -1, -1, -1]])
    logps = -torch.arange(20.0).view(4, 5)
    batch = assemble([[5, 6, 7], [8]], 2, tokens, logps, 9, [3, 2])
    assert batch.prompt_ids.tolist() == [[5, 6, 7], [5, 6, 7], [9, 9, 8], [9, 9, 8]]
    assert batch.prompt_mask.int().tolist() == [[1, 1, 1], [1, 1, 1], [0, 0, 1], [0, 0, 1]]
    # no wider than the longest, whatever the limit was
    assert batch.completion_ids.tolist() == [[30, 31, 3, 9], [32, 9, 9, 9], [33, 34, 35, 0], [3, 9, 9, 9]]
    assert batch.sampled_mask.int().tolist() == [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]
    assert torch.equal(batch.completion_mask, batch.sampled_mask)
    assert torch.equal(batch.rollout_logps, logps[:, :4])
    assert batch.lengths.tolist() == [3, 1, 4, 1] and batch.prompt_lengths.tolist() == [3, 3, 1, 1]
    assert batch.truncated.tolist() == [False, True, True, False]
    assert batch.trained.all() and batch.rows.tolist() == [0, 1, 2, 3] and len(batch) == 4
    assert batch.tokens[3] is batch.lengths and batch.teacher_states is None


def test_a_batch_moves_but_for_what_the_host_needs():
    batch = make_batch([3, 1, 2], prompt_lengths=[1, 1, 1])
    batch.teacher_states, batch.advantages = torch.ones(3, 3, 4), torch.arange(3.0)
    moved = batch.to(torch.device("meta"))
    on_cpu = {"prompt_lengths", "lengths", "truncated", "trained", "rows"}
    for field in dataclasses.fields(RolloutBatch):
        own, other = getattr(batch, field.name), getattr(moved, field.name)
        if own is None or field.name in on_cpu:
            assert other is own
        else:
            assert other.device.type == "meta" and other.shape == own.shape and other.dtype == own.dtype
    assert_equal(batch.to(CPU), batch)
    parts = moved.minibatches(1, 5, True)[0]
    assert [part.teacher_states.shape for part in parts] == [(1, 3, 4), (2, 2, 4)]
    moved.drop(torch.tensor([True, False, False]))
    assert batch.num_trained == 3 and moved.num_trained == 2


def test_what_a_teacher_said_goes_with_its_rows():
    batch = make_batch([3, 1, 2])
    batch.teacher_states = batch.completion_ids[..., None] + torch.tensor([0.0, 0.5])
    assert batch.said == (batch.teacher_states,)
    part = batch.select(torch.tensor([2, 1]))
    assert torch.equal(part.teacher_states, part.completion_ids[..., None] + torch.tensor([0.0, 0.5]))
    assert part.teacher_states.shape == (2, 2, 2)
    batch.teacher_ids, batch.teacher_logps = batch.teacher_states.int(), batch.teacher_states
    batch.teacher_tail_logp, batch.teacher_token_logps = batch.completion_ids.float(), batch.rollout_logps
    batch.teacher_states = None
    assert [x.shape for x in batch.select(torch.tensor([1])).said] == [(1, 1, 2), (1, 1, 2), (1, 1), (1, 1)]


def test_select_keeps_rows_together_and_trims_padding():
    batch = make_batch([3, 1, 5, 2], prompt_lengths=[2, 4, 1, 3])
    batch.advantages = torch.tensor([0.0, 1.0, 2.0, 3.0])
    batch.old_logps = -(batch.completion_ids + 1.0)
    batch.truncated = torch.tensor([True, False, False, False])
    batch.drop(torch.tensor([False, False, False, True]))
    part = batch.select(torch.tensor([3, 0]))
    assert part.rows.tolist() == [3, 0] and part.advantages.tolist() == [3.0, 0.0]
    assert part.prompt_ids.tolist() == [[300 + 1, 302, 303], [0, 2, 3]]  # columns 1 to 3 of 4
    assert part.prompt_mask.int().tolist() == [[1, 1, 1], [0, 1, 1]]
    assert part.completion_ids.tolist() == [[300, 301, 0], [0, 1, 2]]
    assert part.sampled_mask.int().tolist() == [[1, 1, 0], [1, 1, 1]]
    assert part.completion_mask.int().tolist() == [[0, 0, 0], [1, 1, 1]]
    assert torch.equal(part.old_logps, -(part.completion_ids + 1.0))
    assert torch.equal(part.rollout_logps, -0.5 * part.completion_ids)
    assert part.lengths.tolist() == [2, 3] and part.prompt_lengths.tolist() == [3, 2] and part.ref_logps is None
    assert part.truncated.tolist() == [False, True] and part.trained.tolist() == [False, True]
    assert batch.prompt_ids.shape == (4, 4) and batch.completion_ids.shape == (4, 5)  # the whole is left as it was


def test_select_of_rows_left_out_of_the_loss_keeps_their_tokens():
    batch = make_batch([3, 2, 1])
    batch.drop(torch.tensor([False, True, True]))
    part = batch.select(torch.tensor([1, 2]))
    assert part.completion_ids.tolist() == [[100, 101], [200, 0]] and part.sampled_mask.sum() == 3
    assert part.completion_mask.shape == (2, 2) and not part.completion_mask.any() and part.num_trained == 0


def test_drop_takes_rows_out_of_the_loss_only():
    # one finished with 4 tokens, one cut off at 8: the mean over tokens divides by 4, lengths stay 4 and 8
    batch = make_batch([4, 8])
    before = copy.deepcopy(batch)
    batch.truncated = torch.tensor([False, True])
    batch.drop(batch.truncated)
    assert batch.completion_mask.sum() == 4 and batch.num_trained == 1 and batch.trained.tolist() == [True, False]
    assert batch.lengths.tolist() == [4, 8]
    # what is computed stays the same, so that nothing is rounded in another way
    for one, other in zip(batch.tokens, before.tokens, strict=True):
        assert torch.equal(one, other)
    assert [micro.rows.tolist() for micro in batch.minibatches(1, 12, True)[0]] == [
        micro.rows.tolist() for micro in before.minibatches(1, 12, True)[0]
    ]
    batch.drop(torch.tensor([True, False]))  # what was dropped stays dropped
    assert batch.num_trained == 0 and not batch.completion_mask.any()


@pytest.mark.parametrize("packed", [True, False])
def test_nothing_of_this_waits_for_a_gpu(packed):
    # tensors without data stand for those on a GPU: to look at one would be an error
    batch = make_batch([3, 1, 5, 2, 4], prompt_lengths=[2, 4, 1, 3, 3])
    batch.advantages = torch.zeros(5)
    on_cpu = {"prompt_lengths", "lengths", "truncated", "trained", "rows"}
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        if value is not None and field.name not in on_cpu:
            setattr(batch, field.name, value.to("meta"))
    batch.drop(torch.tensor([False, True, False, False, True]))
    assert batch.num_trained == 3 and batch.completion_mask.device.type == "meta"
    for micro in batch.minibatches(2, 9, packed)[0]:
        assert micro.completion_ids.shape == (len(micro), micro.lengths.max())
        assert micro.prompt_ids.shape == (len(micro), micro.prompt_lengths.max())
        assert micro.advantages.shape == (len(micro),)


@pytest.mark.parametrize("train_entropy", [True, False])
def test_forward_and_backward_passes_wait_for_no_gpu(policies, train_entropy):
    # the host gives several GPUs their work in turn: again, to look at a tensor without data would be an error
    policy = logprobs.LogProbs(copy.deepcopy(policies["qwen2"]), 1.0, train_entropy=train_entropy).to("meta")
    batch = make_batch([3, 1, 5, 2, 4], prompt_lengths=[2, 4, 1, 3, 3]).to(torch.device("meta"))
    for micro in batch.minibatches(1, 20, True)[0]:
        logps_mC, entropy_mC = policy(*micro.tokens)
        ratio_m = losses.sequence_ratio(logps_mC, logps_mC.detach(), micro.completion_mask)
        (ratio_m.sum() + entropy_mC.sum() * train_entropy).backward()
        assert logps_mC.shape == micro.completion_ids.shape
    assert policy.model.model.layers[0].mlp.up_proj.weight.grad.is_meta


def size_of(micro, packed) -> int:
    """Tokens in a forward pass."""
    lengths = micro.prompt_lengths + micro.lengths
    return int(lengths.sum() if packed else len(lengths) * lengths.max())


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("micro_batch_tokens", [1, 12, 17, 30, 1000])
@pytest.mark.parametrize("num_minibatches", [1, 2, 3, 4, 11])
def test_minibatches_hold_every_row_once(num_minibatches, micro_batch_tokens, packed):
    lengths, prompt_lengths = [3, 1, 5, 2, 2, 9, 1, 4, 7, 3, 6], [2, 3, 1, 8, 2, 6, 5, 5, 2, 1, 4]
    batch = make_batch(lengths, prompt_lengths=prompt_lengths)
    cut = batch.minibatches(num_minibatches, micro_batch_tokens, packed)
    assert len(cut) == num_minibatches
    rows = [[row for micro in minibatch for row in micro.rows.tolist()] for minibatch in cut]
    assert sorted(row for part in rows for row in part) == list(range(11))
    for k, part in enumerate(rows):
        assert sorted(part) == list(range(k, 11, num_minibatches))
        total = [lengths[row] + prompt_lengths[row] for row in part]
        assert total == sorted(total, reverse=True)
    for minibatch in cut:
        for micro in minibatch:
            assert len(micro) == 1 or size_of(micro, packed) <= micro_batch_tokens
            assert micro.lengths.tolist() == [lengths[row] for row in micro.rows]
            assert micro.prompt_lengths.tolist() == [prompt_lengths[row] for row in micro.rows]
            # the ids tell the row, so nothing went astray
            assert (micro.completion_ids // 100)[micro.completion_mask].tolist() == [
                row for row in micro.rows.tolist() for _ in range(lengths[row])
            ]
            assert (micro.prompt_ids // 100)[micro.prompt_mask].tolist() == [
                row for row in micro.rows.tolist() for _ in range(prompt_lengths[row])
            ]
            assert micro.completion_ids.shape[1] == micro.lengths.max()  # no column of pure padding
            assert micro.prompt_ids.shape[1] == micro.prompt_lengths.max()
        for micro, following in itertools.pairwise(minibatch):  # none is smaller than it must be
            more = batch.select(torch.cat([micro.rows, following.rows[:1]]))
            assert size_of(more, packed) > micro_batch_tokens


@pytest.mark.parametrize("num_minibatches", [1, 2, 4])
def test_every_minibatch_sees_every_prompt_equally_often(num_minibatches):
    group_size, generator = 4, torch.Generator().manual_seed(0)
    batch = make_batch(torch.randint(1, 9, (12,), generator=generator).tolist(), group_size)
    for minibatch in batch.minibatches(num_minibatches, 25, True):
        prompts = torch.cat([micro.rows for micro in minibatch]) // group_size
        assert prompts.bincount().tolist() == [group_size // num_minibatches] * 3


@pytest.mark.parametrize(("rows", "num_minibatches", "expected"), [
    (8, 2, [range(4), range(4, 8)]), (5, 2, [range(3), range(3, 5)]), (3, 3, [[0], [1], [2]]), (4, 1, [range(4)]),
])  # fmt: skip
def test_minibatches_that_are_blocks_hold_neighbouring_rows(rows, num_minibatches, expected):
    batch = make_batch([1 + (3 * i) % 7 for i in range(rows)])
    minibatches = batch.minibatches(num_minibatches, 12, True, in_turn=False)
    found = [sorted(torch.cat([micro.rows for micro in minibatch]).tolist()) for minibatch in minibatches]
    assert found == [list(block) for block in expected]


@pytest.mark.parametrize(("packed", "expected"), [
    (False, [[9, 9], [8, 8], [2, 2, 1, 1]]),  # 2 * 10 and 4 * 3; one more row would make it 3 * 9
    (True, [[9, 9], [8, 8], [2, 2, 1, 1]]),
])  # fmt: skip
def test_sequences_of_similar_length_share_a_micro_batch(packed, expected):
    batch = make_batch([9, 1, 8, 2, 9, 1, 8, 2], prompt_lengths=[1] * 8)
    (minibatch,) = batch.minibatches(1, 20, packed)
    assert [micro.lengths.tolist() for micro in minibatch] == expected


def test_padding_counts_where_it_is_computed():
    batch = make_batch([9, 1, 1, 1, 1, 1], prompt_lengths=[1] * 6)  # 10 tokens, and 5 times 2
    packed, padded = (batch.minibatches(1, 20, packed)[0] for packed in (True, False))
    assert [len(micro) for micro in packed] == [6] and [len(micro) for micro in padded] == [2, 4]


@pytest.mark.parametrize("packed", [True, False])
def test_no_forward_pass_of_the_update_has_more_tokens_than_allowed(policies, packed):
    # long prompts with short completions, and the other way round
    prompts, model = [[7] * 20, [8], [9] * 19, [5, 6]], copy.deepcopy(policies["qwen2"])
    batch = rollout(model, prompts, max_new_tokens=20)
    batch.lengths = torch.tensor([2, 20, 2, 20])
    batch.sampled_mask = batch.completion_mask = torch.arange(20) < batch.lengths[:, None]
    policy, seen = logprobs.LogProbs(model, 1.0), calls(model)
    policy.packed = packed
    (minibatch,) = batch.minibatches(1, 60, packed)
    for micro in minibatch:
        policy(*micro.tokens)
    sizes = [call["input_ids"].numel() for call in seen]
    assert len(sizes) == len(minibatch) < len(batch) and max(sizes) <= 60


def test_rows_carry_values_computed_for_the_whole_rollout_to_their_sequences():
    batch = make_batch([3, 1, 5, 2, 4, 6], group_size=3)
    advantages = torch.arange(6) * 1.5
    for micro in [micro for minibatch in batch.minibatches(3, 1, True) for micro in minibatch]:
        assert advantages[micro.rows].item() == (micro.completion_ids[0, 0] // 100).item() * 1.5


def test_parts_of_a_part_keep_the_place_in_the_rollout():
    batch = make_batch([3, 1, 5, 2])
    assert batch.select(torch.tensor([3, 1, 2])).select(torch.tensor([2, 0])).rows.tolist() == [2, 3]


def gspo_gradient(model, batch, advantages, num_minibatches, micro_batch_tokens, packed):
    """Gradient of the GSPO loss, added up over everything, with values met by `rows`."""
    policy = logprobs.LogProbs(model, 1.0)
    assert policy.packed
    policy.packed = packed
    model.zero_grad()
    for minibatch in batch.minibatches(num_minibatches, micro_batch_tokens, packed):
        for micro in minibatch:
            C = micro.completion_ids.shape[1]
            logps, _ = policy(*micro.tokens)
            old_logps = logps.detach() + 0.05 * torch.sin(micro.rows[:, None] + torch.arange(C))
            ratio = losses.sequence_ratio(logps, old_logps, micro.completion_mask)
            surrogate = losses.clipped_surrogate(ratio, advantages[micro.rows], 0.5, 0.5)
            (-surrogate.sum() / len(batch)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_does_not_depend_on_micro_batches_or_packing(policies, family):
    model = policies[family]
    batch = rollout(model, PROMPTS[:2], group_size=4, end_ids=[3, 30, 31, 32, 33, 34, 35])
    advantages = torch.tensor([1.0, -2.0, 0.5, 3.0, -0.7, 1.3, -1.1, 0.2])  # all different
    whole = gspo_gradient(model, batch, advantages, 1, 1000, True)
    # the same, row by row, without any cutting
    model.zero_grad()
    for i, completion in enumerate(completions(batch)):
        ids = torch.tensor([PROMPTS[i // 4] + completion])
        logps = model(input_ids=ids).logits[0].log_softmax(-1)[-len(completion) - 1 : -1]
        logps = logps[range(len(completion)), completion]
        gap = -0.05 * torch.sin(i + torch.arange(len(completion)))
        weight = gap.mean().exp() * advantages[i] / (8 * len(completion))  # s_i A_i / (G |y_i|), over the batch
        (-weight * logps.sum()).backward()
    by_hand = {name: p.grad.clone() for name, p in model.named_parameters()}
    size = max(g.abs().max() for g in whole.values())
    assert len(set(batch.lengths.tolist())) > 2 and size > 0.1
    for name in whole:
        torch.testing.assert_close(by_hand[name], whole[name], rtol=0, atol=1e-5 * size.item())
    for micro_batch_tokens, packed in ((1000, False), (50, True), (50, False), (30, True), (1, True), (1, False)):
        for num_minibatches in (1, 2):
            part = gspo_gradient(model, batch, advantages, num_minibatches, micro_batch_tokens, packed)
            for name in whole:
                torch.testing.assert_close(part[name], whole[name], rtol=0, atol=1e-5 * size.item())
    model.zero_grad()


@EACH_WAY
def test_log_probs_of_a_rollout_belong_to_the_tokens_sampled(policies, family, engine):
    # sampling and training use the same temperature and positions
    model = policies[family]
    batch = rollout(model, engine=engine, group_size=4, temperature=0.7, end_ids=[3, 30, 31])
    logps, _ = logprobs.LogProbs(model, 0.7)(*batch.tokens)
    torch.testing.assert_close(logps.detach(), batch.rollout_logps, rtol=0, atol=1e-4)
    # a token sampled at 0.05 is nearly always the best
    batch = rollout(model, engine=engine, group_size=4, temperature=0.05)
    logps, _ = logprobs.LogProbs(model, 0.05)(*batch.tokens)
    assert logps[batch.completion_mask].exp().mean() > 0.8


@pytest.mark.parametrize("rollout_batch", [1, 4, 7, 100])
def test_the_fallback_also_decodes_no_more_rows_at_once_than_allowed(rollout_batch):
    model = tiny_model("qwen2")
    seen, prompts = calls(model), [[5, 6, 7], [8], [9, 10], [11, 12, 13, 14]]
    free = rollout(model, prompts, engine=False, group_size=3)
    whole = max(call["input_ids"].shape[0] for call in seen)
    seen.clear()
    batch = rollout(model, prompts, engine=False, group_size=3, rollout_batch=rollout_batch)
    assert completions(batch) == completions(free) and whole == 12
    assert max(call["input_ids"].shape[0] for call in seen) == min(12, max(3, rollout_batch // 3 * 3))


def test_sequences_longer_than_the_windows_are_said_once(capsys):
    model = tiny_model("mistral", sliding_window=24)
    sampler = Sampler([model], end_ids=[999], pad_id=0, max_new_tokens=12)
    assert sampler.engines[0] is not None and "static cache" in capsys.readouterr().err
    sampler.generate([[5, 6]], group_size=1, temperature=0)
    assert not capsys.readouterr().err
    for _ in range(2):
        sampler.generate([[5] * 13], group_size=1, temperature=0)
    assert capsys.readouterr().err.count("25 tokens are longer than its sliding windows of 24") == 1


@EACH_WAY
def test_sequences_longer_than_the_positions_of_the_policy_are_refused_or_warned_of(policies, capsys, family, engine):
    model = policies[family]
    places, sampler = model.config.max_position_embeddings, make_sampler(model, engine)
    prompts = [[5] * (places - 12), [6, 7]]
    assert sampler.generate(prompts, group_size=1, temperature=0).lengths.tolist() == [12, 12]
    assert "positions" not in capsys.readouterr().out
    prompts[0].append(5)
    said = rf"sequences of up to {places + 1} tokens \(prompt and max_new_tokens\)"
    if family == "gpt2":  # learned ones
        with pytest.raises(ValueError, match=f"{said}: the policy has {places} positions; lower max_prompt_tokens"):
            sampler.generate(prompts, group_size=1, temperature=0)
    else:
        for _ in range(2):
            sampler.generate(prompts, group_size=1, temperature=0)
        assert len(re.findall(f"warning: {said}, but the policy was made for {places}", capsys.readouterr().out)) == 1


def test_a_token_that_the_policy_does_not_have_is_refused(policies):
    # of a tokenizer with more tokens; on a GPU the embedding would end the process
    sampler = make_sampler(policies["qwen2"], True)
    sampler.require_fit([[5, 63]])
    for refuse in (sampler.require_fit, lambda prompts: sampler.generate(prompts, group_size=2, temperature=1.0)):
        with pytest.raises(
            ValueError, match="prompt 1 of 2 has token 64, but the policy has 64: its tokenizer has more"
        ):
            refuse([[5, 6], [7, 64, 8]])


# ---- replacing rows ----


@pytest.mark.parametrize("lengths", [[2, 6], [9, 1], [3, 3]], ids=str)
def test_rows_put_into_a_batch_are_those_of_the_other_and_the_rest_stays(lengths):
    batch, other = make_batch([3, 5, 2, 4]), make_batch(lengths, prompt_lengths=[7, 2])
    other = dataclasses.replace(other, truncated=torch.tensor([True, False]))
    rows = torch.tensor([3, 1])
    result = batch.put(rows, other)
    expected = completions(batch)
    expected[3], expected[1] = completions(other)
    assert completions(result) == expected
    assert result.completion_ids.shape[1] == max(map(len, expected)) and result.prompt_ids.shape[1] == 7
    prompts = [ids[mask].tolist() for ids, mask in zip(result.prompt_ids, result.prompt_mask, strict=True)]
    own = [ids[mask].tolist() for ids, mask in zip(batch.prompt_ids, batch.prompt_mask, strict=True)]
    own[3], own[1] = [ids[mask].tolist() for ids, mask in zip(other.prompt_ids, other.prompt_mask, strict=True)]
    assert prompts == own
    assert result.rows.tolist() == [0, 1, 2, 3] and result.truncated.tolist() == [False, False, False, True]
    assert result.sampled_mask.sum(1).tolist() == result.lengths.tolist() == list(map(len, expected))
    assert torch.equal(result.rollout_logps[0, :3], batch.rollout_logps[0, :3])
    # nothing is left of what was longer
    shrunk = batch.put(torch.tensor([1, 3]), make_batch([1, 1], prompt_lengths=[1, 1]))
    assert shrunk.completion_ids.shape[1] == 3 and shrunk.prompt_ids.shape[1] == 3


def test_tokens_in_the_loss_are_counted():
    batch = make_batch([3, 5, 2, 4])
    assert (batch.num_trained, batch.num_tokens) == (4, 14)
    batch.drop(torch.tensor([False, True, False, False]))
    assert (batch.num_trained, batch.num_tokens) == (3, 9)
