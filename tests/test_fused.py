"""Fused decode steps on the CPU, in Triton's interpreter and fp32: the plain forward pass, the draw, what is served."""

import itertools
import types

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from common.fused import blocks, step, tiles
from common.generation import runner
from common.generation.flash_cache import FlashCache
from common.generation.scheduler import Group, Row, Space
from common.maths.sampling import Sampling, distribution, draw
from common.model import attention
from scripts.dev import families

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernels run in test_gpu.py"),
    pytest.mark.skipif(step.triton is None, reason="needs the package triton"),
]
CPU = torch.device("cpu")
ENDS, SUPPRESSED = [1, 2, 3], [0, 7]
T = 40  # new tokens at most
SIZES = dict(vocab_size=300, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
             head_dim=16)  # fmt: skip


def build(kind: str, **sizes) -> torch.nn.Module:
    """A model of two layers whose norms and biases are not those of a new one, and whose logits spread."""
    torch.manual_seed(0)
    sizes = dict(num_hidden_layers=2, bos_token_id=None, pad_token_id=0, eos_token_id=1) | SIZES | sizes
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes), trust_remote_code=False).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(weight + 0.2 * torch.randn_like(weight) if "norm" in name or "bias" in name else 4 * weight)
    return model


class Batch:
    """Rows in the middle of a rollout: their caches as `model` fills them, the last token not yet in them."""

    @torch.no_grad()
    def __init__(self, model, lengths, counts, group_size):
        generator = torch.Generator().manual_seed(1)

        def tokens(n: int) -> list[int]:
            return torch.randint(4, model.config.vocab_size, (n,), generator=generator).tolist()

        self.model, self.support, self.b = model, attention.install(model), len(counts)
        self.cache = FlashCache(self.support.layers, torch.float32, CPU)
        self.cache.reserve(Space(self.b, self.b, len(lengths), group_size, max(lengths), T))
        rows = [Row(i, self.b - 1 - i, 0) for i in range(self.b)]  # slots in another order than rows
        groups = [
            Group(p, p, n, p * group_size, rows[p * group_size : (p + 1) * group_size]) for p, n in enumerate(lengths)
        ]
        self.cache.arrange(groups, self.b)
        self.state, self.kept = runner.RowState(self.b, CPU), []
        logits = []
        for group in groups:
            prompt, slot = tokens(group.length), self.cache.prompt_start(group)
            for row, start in zip(group.rows, self.cache.starts(group), strict=True):
                new, i, n = tokens(counts[row.sequence]), row.sequence, group.length
                out = model(torch.tensor([prompt + new]), use_cache=True)
                logits.append(out.logits[0, -1])
                self.kept.append([(x.keys[0, :, -1], x.values[0, :, -1]) for x in out.past_key_values.layers])
                for pools, layer in zip(self.cache.pools, out.past_key_values.layers, strict=True):
                    for pool, x in zip(pools, (layer.keys[0], layer.values[0]), strict=True):
                        pool[slot : slot + n], pool[start : start + len(new) - 1] = x.transpose(0, 1)[:-1].split(
                            (n, len(new) - 1)
                        )
                values = new[-1], len(new), i, start, n, 0, 0, slot
                self.state.table[:, i] = torch.tensor(values)
        self.expected = torch.stack(logits)

    def step(self, end_ids=ENDS, suppressed_ids=SUPPRESSED) -> step.Step:
        fused = step.Step(self.model, self.support, end_ids, suppressed_ids)
        fused.reserve(self.b, self.cache.space.longest + T)
        return fused


def assert_agrees(batch: Batch) -> None:
    fused = batch.step()
    logits = fused.logits(batch.b, batch.state.table, batch.cache, Sampling())
    # two layers of sums of up to 300 terms, in another order, and logits of size 1
    assert (logits - batch.expected).abs().max() < 1e-5 * batch.expected.abs().max()
    assert not fused.buffers.heads_arrived.any() and not fused.buffers.tiles_arrived.any()  # ready for the next step
    for row, layers in enumerate(batch.kept):
        place = batch.state.start[row] + batch.state.count[row] - 1
        for pools, written in zip(batch.cache.pools, layers, strict=True):
            for pool, x in zip(pools, written, strict=True):
                assert (pool[place] - x).abs().max() < 1e-5 * x.abs().max()


@pytest.mark.parametrize(("kind", "lengths", "counts", "group_size", "sizes"), [
    ("llama", (5, 2, 70), [1, 2, 3, 4, 1, 9, 2, 5, 2, 2, 30, 1], 4, {}),
    ("qwen2", (5, 130), [1, 2, 3, 1, 9, 2], 3, dict(num_attention_heads=7, num_key_value_heads=1, head_dim=32)),
    ("qwen3", (5, 20), [1, 2, 3, 4, 5, 6], 3, dict(tie_word_embeddings=True)),
    ("mistral", (3,), [38], 1, dict(hidden_size=80, intermediate_size=200, vocab_size=129)),
])  # fmt: skip
def test_a_step_gives_the_logits_of_the_plain_forward_pass_and_keeps_its_keys(kind, lengths, counts, group_size, sizes):
    assert_agrees(Batch(build(kind, **sizes), lengths, counts, group_size))


@pytest.mark.parametrize("setting", [
    "parts", "shared", "large", "some rows",
    *(pytest.param(setting, marks=pytest.mark.parity) for setting in ("shared parts", "many rows")),
])  # fmt: skip
def test_other_ways_to_cut_a_step_give_the_same(monkeypatch, setting):
    if "parts" in setting:
        monkeypatch.setattr(step, "PART_TOKENS", 16)
    if "shared" in setting:
        monkeypatch.setattr(step, "LONG_PROMPT", 1)
    if setting == "large":
        monkeypatch.setattr(tiles, "LARGE", 1)
        monkeypatch.setattr(tiles, "SOME", 4)
        monkeypatch.setattr(step, "SOME", 4)
    rows = {"some rows": 18, "many rows": 66}.get(setting, 6)
    counts = [1 + 7 * i % T for i in range(rows)]
    sizes = dict(num_attention_heads=6, vocab_size=130)
    assert_agrees(Batch(build("qwen2", **sizes), (9, 3) if "rows" in setting else (40, 3), counts, rows // 2))


@pytest.mark.parametrize(("sampling", "suppressed"), [
    (Sampling(), SUPPRESSED), (Sampling(0.7, min_new_tokens=5), []), (Sampling(0.0), SUPPRESSED),
])  # fmt: skip
def test_a_draw_is_that_of_sampling_and_is_recorded_as_the_runner_records_it(sampling, suppressed):
    batch = Batch(build("llama"), (5, 2), [1, 2, 3, 40, 1, 9, 39, 4], 4)
    batch.state.done[5] = 1
    fused, generator = batch.step(list(range(4, 300, 2)), suppressed), torch.Generator().manual_seed(2)
    uniforms = torch.rand(8 * T, dtype=torch.float64, generator=generator)
    # what the runner does with the same logits
    plain = types.SimpleNamespace(
        state=runner.RowState(8, CPU), out_tokens=torch.full((8 * T + 1,), -1), out_logps=torch.zeros(8 * T + 1),
        uniforms=uniforms, end=torch.arange(4, 300, 2), healthy=torch.ones((), dtype=torch.bool), cache=batch.cache,
    )  # fmt: skip
    plain.state.table.copy_(batch.state.table)
    suppressed_ids = torch.tensor(suppressed, dtype=torch.long)

    def eager(logits, random, count, sampling):
        return draw(distribution(logits, sampling, count, plain.end, suppressed_ids), random, sampling.temperature == 0)

    logits = fused.logits(8, batch.state.table, batch.cache, sampling)
    runner.Runner._record(plain, logits, slice(0, 8), sampling, eager)
    tokens, logps, healthy = torch.full((8 * T + 1,), -1), torch.zeros(8 * T + 1), torch.ones((), dtype=torch.bool)
    fused.draw(8, batch.state.table, uniforms, tokens, logps, healthy, T, sampling)
    assert healthy and torch.equal(batch.state.table, plain.state.table) and torch.equal(tokens, plain.out_tokens)
    assert (logps - plain.out_logps).abs().max() < 1e-5
    assert {0, 1} == set(batch.state.done.tolist()) and (tokens[:-1] >= 0).sum() == 7


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_weight_that_is_not_finite_is_found(value):
    batch = Batch(build("llama"), (5,), [1, 2], 2)
    with torch.no_grad():
        batch.model.model.layers[1].mlp.down_proj.weight[3, 5] = value
    fused, healthy = batch.step(), torch.ones((), dtype=torch.bool)
    fused.logits(2, batch.state.table, batch.cache, Sampling())
    places = torch.full((2 * T + 1,), -1), torch.zeros(2 * T + 1)
    fused.draw(2, batch.state.table, torch.rand(2 * T, dtype=torch.float64), *places, healthy, T, Sampling())
    assert not healthy


def test_parameters_that_were_replaced_are_read_again():
    model = build("llama")
    batch, other = Batch(model, (5,), [1, 2], 2), build("llama", initializer_range=0.03)
    fused = batch.step()
    for name, weight in other.named_parameters():
        module, _, last = name.rpartition(".")
        setattr(model.get_submodule(module), last, torch.nn.Parameter(weight.detach().clone()))
    fused.read()
    batch = Batch(model, (5,), [1, 2], 2)
    logits = fused.logits(2, batch.state.table, batch.cache, Sampling())
    assert (logits - batch.expected).abs().max() < 1e-5 * batch.expected.abs().max()


def test_other_distributions_are_left_to_the_runner():
    fused = step.Step.__new__(step.Step)
    assert fused.draws(Sampling(0.5, min_new_tokens=3)) and fused.draws(Sampling(0.0))
    assert not any(
        fused.draws(Sampling(**{name: value})) for name, value in (("top_p", 0.9), ("top_k", 5), ("min_p", 0.1))
    )


def reason(model: torch.nn.Module) -> str:
    return blocks.reason_of_parts(model.to(torch.bfloat16), attention.install(model))


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "seed_oss"])
def test_families_of_these_parts_are_served(kind):
    assert reason(build(kind)) == ""


@pytest.mark.parametrize(("kind", "part"), [
    ("gemma", "activation is GELU"), ("gpt2", "decoder"), ("qwen3_moe", "linear layers"), ("phi3", "linear layers"),
    ("olmo2", "post_feedforward_layernorm"), ("olmo", "norms"), ("llama", "heads have 8 dimensions"),
    ("cohere", "no post_attention_layernorm"),
])  # fmt: skip
def test_families_of_other_parts_are_not_and_the_reason_names_the_part(kind, part):
    assert part in reason(families.build(kind))


def test_weights_in_other_dtypes_and_models_on_a_cpu_are_not_served():
    model = build("llama")
    support = attention.install(model)
    assert "float32" in blocks.reason_of_parts(model, support)
    assert "GPU" in blocks.reason_against(model.to(torch.bfloat16), support)


def test_adapters_are_read_through_to_the_weights_that_they_are_merged_into():
    from peft import LoraConfig, get_peft_model

    model = build("llama").to(torch.bfloat16)
    inner = model.model.layers[0].self_attn.q_proj.weight
    wrapped = get_peft_model(model, LoraConfig(target_modules="all-linear", r=2))
    support = attention.install(wrapped)
    assert blocks.reason_of_parts(wrapped, support) == ""
    assert blocks.read(wrapped, support).blocks[0].q is inner


def test_tiles_fit_into_the_shared_memory_of_a_gpu_and_a_gpu_with_less_is_not_served(monkeypatch):
    for name in tiles.TILES:
        for b, H, shared in itertools.product((1, 64, 256), (896, 1536, 3584), (tiles.SHARED_BYTES, 2**18)):
            t = tiles.tile(name, b, H, shared)
            assert t.stages >= 2  # one would be read while it is written
            assert t.stages * (t.BM + t.BN * (2 if name == "gate_up" else 1)) * t.BK * 2 <= shared
    model = types.SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    for size, reason in ((64 * 2**10, "96 KiB of shared memory"), (99 * 2**10, "float32")):
        monkeypatch.setattr(blocks, "shared_memory", lambda device, found=size: found)
        assert reason in blocks.reason_against(model, None)
