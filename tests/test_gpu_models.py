"""Hybrids and mixtures of experts on a GPU: the fused step of linear attention, states under CUDA graphs."""

import copy

import pytest
import torch

from common.generation import delta_rule
from common.generation.paths import Path
from common.generation.rollout import Sampler
from common.model.logprobs import LogProbs
from scripts.dev import families

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
OPTIONS = dict(end_ids=list(range(0, 97, 9)), pad_id=0, max_new_tokens=40)
# Each layer of bf16 rounds to 2^-9 some ten times; in four layers and a spread of logits of 2 that moves a
# log-probability by about 0.05. A wrong state moves it by the spread.
MEAN = 0.2


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 90, (n,), generator=generator).tolist() for n in (3, 17, 9, 30, 1, 22)]


@pytest.mark.parametrize(("b", "Hk", "H", "K", "V"), [(5, 2, 4, 8, 8), (64, 16, 16, 128, 128), (7, 16, 32, 128, 128),
                                                     (3, 2, 6, 20, 24)])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_step_is_that_of_transformers(b, Hk, H, K, V, dtype):
    from transformers.models.qwen3_5 import modeling_qwen3_5

    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape, kind=dtype):
        return torch.randn(shape, generator=generator, device="cuda").to(kind)

    # parts of one wider tensor, as the layer splits them
    wide = random(b, 1, 2 * Hk * K + H * V)
    query, key, value = wide.split([Hk * K, Hk * K, H * V], dim=-1)
    query, key, value = query.view(b, 1, Hk, K), key.view(b, 1, Hk, K), value.view(b, 1, H, V)
    decay, beta = -random(b, 1, H, kind=torch.float32).abs(), random(b, 1, H).sigmoid()
    state = random(b, H, K, V, kind=torch.float32)
    more = dict(g=decay, beta=beta, output_final_state=True, use_qk_l2norm_in_kernel=True)
    repeated = (x.repeat_interleave(H // Hk, dim=2) for x in (query, key))
    expected, after = getattr(modeling_qwen3_5, delta_rule.NAME)(*repeated, value, initial_state=state.clone(), **more)
    found, place = delta_rule.step(query, key, value, initial_state=state, **more)
    assert place is state and found.dtype == dtype
    assert (state - after).abs().max() < 1e-5  # fp32 sums over K terms of size 1
    assert (found.float() - expected.float()).abs().max() <= torch.finfo(dtype).eps * 4 * expected.abs().max()


@pytest.mark.parametrize("rollout_batch", [0, 12])
@pytest.mark.parametrize(("name", "compile"), [
    ("qwen3_5_text", True), ("qwen3_5_text", False), ("qwen3_next", False), ("olmo_hybrid", False), ("lfm2", False),
    ("granitemoehybrid", True), ("nemotron_h", False), ("jamba", False), ("bamba", False), ("falcon_h1", False),
    ("zamba2", False), ("qwen3_moe", True), ("qwen3_moe", False), ("mixtral", False), ("deepseek_v3", False),
])  # fmt: skip
def test_rollouts_by_graphs_have_the_log_probabilities_of_training(name, compile, rollout_batch):
    model = families.build(name).to("cuda", torch.bfloat16)
    sampler = Sampler([model], **OPTIONS, compile=compile, rollout_batch=rollout_batch)
    fused = name in ("qwen3_5_text", "qwen3_next", "olmo_hybrid")
    assert sampler.path == Path(engine=True, kernels=fused)
    first = sampler.generate(prompts(), group_size=4, temperature=1.0)
    assert sampler.engines[0].runner.graphs and first.lengths.min() < first.lengths.max()
    again = sampler.generate(prompts(), group_size=4, temperature=1.0)  # by graphs that are there already
    assert again.completions[0].tolist() == first.completions[0].tolist()
    with torch.no_grad():
        logps, _ = LogProbs(copy.deepcopy(model), 1.0)(*first.tokens)
    difference = (logps - first.rollout_logps).abs()[first.completion_mask]
    assert difference.mean() < MEAN, difference.mean()


def test_the_fused_step_leaves_transformers_as_it_was():
    from transformers.models.qwen3_5 import modeling_qwen3_5

    before = getattr(modeling_qwen3_5, delta_rule.NAME)
    sampler = Sampler([families.build("qwen3_5_text").to("cuda", torch.bfloat16)], **OPTIONS, compile=False)
    sampler.generate(prompts(), group_size=2, temperature=1.0)
    assert getattr(modeling_qwen3_5, delta_rule.NAME) is before


def test_steps_that_wait_for_the_host_are_no_graphs():
    model = families.build("phimoe").to("cuda", torch.bfloat16)
    sampler = Sampler([model], **OPTIONS, compile=False)
    assert sampler.path == Path(engine=True, graphs=False)
    sampler.generate(prompts(), group_size=2, temperature=1.0)
    assert not sampler.engines[0].runner.graphs
