"""What only a GPU can show of policies with images; every test is skipped where there is none."""

import subprocess
import sys

import pytest
import torch
from conftest import ROOT, read_lines
from test_images import FAMILIES, batch_of, folders, picture, sampler_of  # noqa: F401

from common.model import images, logprobs, models

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def load(folder, dtype: str):
    _, model = models.load_policy(str(folder), torch.device("cuda", 0), dtype)
    return images.load_processor(folder), model


@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_decode_what_the_cache_of_transformers_does(family, folders):  # noqa: F811
    processor, model = load(folders[family], "fp32")
    prompts, pictures = batch_of(processor)
    seen = images.Images.of(model, processor, prompts, pictures)
    how = dict(group_size=3, temperature=1.0, seed=1, images=seen)
    ours = sampler_of(processor, model, max_new_tokens=12, compile=False).generate(prompts, **how)
    theirs = sampler_of(processor, model, fallback=True, max_new_tokens=12, compile=False).generate(prompts, **how)
    assert torch.equal(ours.completion_ids, theirs.completion_ids)
    torch.testing.assert_close(ours.rollout_logps, theirs.rollout_logps, atol=2e-3, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_graphs_agree_with_the_log_probs_of_the_update(family, folders):  # noqa: F811
    processor, model = load(folders[family], "bf16")
    prompts, pictures = batch_of(processor)
    sampler = sampler_of(processor, model, max_new_tokens=12, compile=False)
    policy = logprobs.LogProbs(model, 1.0, suppressed_ids=images.vision_ids(model))
    for seed in range(2):  # the second rollout replays graphs of the first, with other images
        pictures = [[picture(*own.size, seed=50 * seed + k) for k, own in enumerate(row)] for row in pictures]
        seen = images.Images.of(model, processor, prompts, pictures)
        batch = sampler.generate(prompts, group_size=4, temperature=1.0, seed=seed, images=seen)
        assert sampler.engines[0].runner.use_graphs
        logps = policy(*batch.tokens)[0]
        assert ((logps - batch.rollout_logps).abs() * batch.completion_mask).max() < 0.1
        others = policy(*batch.tokens[:4], seen.repeat(4).select(torch.arange(12).roll(0)))[0]
        assert torch.equal(others, logps)


@pytest.mark.parametrize("trained", [False, True])
def test_compiled_gradients_are_the_plain_ones(trained, folders):  # noqa: F811
    results = []
    for compile in (False, True):
        processor, model = load(folders["qwen2_5_vl"], "fp32")
        if not trained:
            images.freeze_vision(model)
        prompts, pictures = batch_of(processor)
        seen = images.Images.of(model, processor, prompts, pictures)
        sampler = sampler_of(processor, model, compile=False)
        batch = sampler.generate(prompts, group_size=2, temperature=1.0, images=seen)
        policy = logprobs.LogProbs(model, 1.0, compile, suppressed_ids=images.vision_ids(model))
        batch.images.refresh(model, batch.images.prompts)
        policy(*batch.tokens)[0].sum().backward()
        batch.images.backward()
        results.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert results[0].keys() == results[1].keys() and any("visual" in name for name in results[0]) == trained
    for name, gradient in results[0].items():
        torch.testing.assert_close(results[1][name], gradient, atol=1e-4 * gradient.abs().max().item(), rtol=1e-3)


@pytest.mark.parametrize("policy", ["toy-poster", "toy-poster-vlm"])
def test_the_script_runs_and_takes_what_it_planned(policy, tmp_path):
    command = [sys.executable, "grpo/poster/poster_grpo.py", "--policy_model", policy, "--steps", "2",
               "--eval_data", "", "--compile", "false", "--out_dir", str(tmp_path / "run")]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = (line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "learning_rate" in line)
    assert first["reward_parse_ok"] > 0.5 and second["rollout_mismatch"] < 0.05
    assert f"plan: {policy}, " in done.stdout
