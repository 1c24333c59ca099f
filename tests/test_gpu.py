"""What only a GPU can show; every test is skipped where there are fewer than it needs."""

import copy
import dataclasses
import gc
import math
import sys
from pathlib import Path

import pytest
import torch
from bounds import assert_rounded, rounding
from comparing import TERMS, assert_close, config_of
from conftest import TINY, assert_equal_weights, build_tokenizer, tiny_model
from safetensors.torch import load_file
from test_rollout import Letters

from common.fused import tiles
from common.generation import drafts
from common.generation.batches import RolloutBatch, deal
from common.generation.flash_cache import FlashCache
from common.generation.rollout import Sampler
from common.generation.sdpa_cache import SdpaCache
from common.generation.stopping import Stopping, find
from common.loop import Policy, Reference
from common.maths import losses
from common.model import head, logprobs, models, passes
from common.run import checkpoint
from common.tasks.embedder import Embedder
from common.training import optim
from gspo import gspo

FAMILIES = ["qwen2", "gpt2"]
PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15, 16, 17], [20], [21, 22, 23, 24, 25]]
OPTIONS = dict(end_ids=[3], pad_id=0, max_new_tokens=12)
MIXED = dict(end_ids=[3, 40, 41, 42, 43, 44], pad_id=0, max_new_tokens=40)  # rows end at many different times
FIXED = dict(end_ids=[999], pad_id=0, max_new_tokens=20)  # and here all at once
TORCHRUN = [Path(sys.executable).with_name("torchrun"), "--standalone", "--nproc_per_node=2"]  # on a free port
MIB = 2**20
pytestmark = pytest.mark.gpu


def needs(gpus: int):
    return pytest.mark.skipif(torch.cuda.device_count() < gpus, reason=f"needs {gpus} GPU(s)")


@pytest.fixture(scope="module")
def cuda() -> torch.device:
    return torch.device("cuda", 0)


def policy_on(folder, device, dtype="fp32"):
    return models.load_policy(str(folder), device, dtype)[1]


def tiny_on(device, kind, dtype=torch.bfloat16, **options):
    """A tiny model, with matrix products as `models.load_policy` sets them."""
    half = dtype != torch.float32
    torch.set_float32_matmul_precision("high" if half else "highest")
    return tiny_model(kind, initializer_range=0.2 if half else 0.3, **options).to(device, dtype)


def flash_sampler(model, compile=False, **options) -> Sampler:
    """A sampler that decodes by CUDA graphs."""
    sampler = Sampler([model], **options, compile=compile)
    runner = sampler.engines[0].runner
    assert isinstance(runner.cache, FlashCache) and runner.use_graphs
    assert bool(runner.compiled_layers) == (compile and not runner.fused)
    return sampler


def generate(sampler, prompts=PROMPTS, group_size=4, temperature=1.0, **which) -> RolloutBatch:
    return sampler.generate(prompts, group_size=group_size, temperature=temperature, **which)


def completions(batch) -> list[list[int]]:
    return [ids[:n] for ids, n in zip(batch.completion_ids.tolist(), batch.lengths.tolist(), strict=True)]


def assert_log_probs(model, batch, temperature=1.0) -> None:
    """Against a forward pass over each sequence alone, by transformers' attention and with logits in fp32."""
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("sdpa")
    differences, magnitude = [], 0.0
    for i, completion in enumerate(completions(batch)):
        prompt = batch.prompts[i].tolist()
        with torch.no_grad():
            ids = torch.tensor([prompt + completion], device=model.device)
            hidden = plain.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[0, len(prompt) - 1 : -1]
            logits = head.vocabulary_logits(plain, hidden) / temperature
        expected = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None]).squeeze(1)
        differences.append(expected - batch.rollout_logps[i, : len(completion)])
        magnitude = max(magnitude, logits.abs().max().item())
        assert not batch.rollout_logps[i, len(completion) :].any()
    largest = max(difference.abs().max().item() for difference in differences)
    mean = sum(difference.mean().item() for difference in differences) / len(differences)
    # Half precision is rounded to eight times in each of two layers, and summed in fp32. A wrong key or position would
    # give several units. A bound is 8 standard deviations; errors of one completion may have one sign.
    terms = TERMS if model.dtype == torch.float32 else 2 * 8
    bound = rounding(terms, magnitude, model.dtype)
    assert largest < bound and abs(mean) < 6 / 8 * bound / math.sqrt(len(differences)), (largest, mean, bound)


def micro_batches(model):
    """A rollout of the model as the update sees it, old log-probabilities included."""
    policy = logprobs.LogProbs(model, 1.0)
    batch = generate(Sampler([model], **OPTIONS, compile=False), seed=0)
    micros = [m for part in batch.minibatches(2, 40, policy.packed) for m in part]
    assert len(micros) > 2
    passes.fill(micros, "old_logps", policy, model.device)
    return micros


@needs(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind, rollout_batch", [("qwen2", 0), ("qwen2", 16), ("gpt2", 0)])
def test_drafts_change_no_distribution_on_the_gpu(cuda, monkeypatch, kind, rollout_batch, dtype):
    monkeypatch.setattr(drafts, "FIRST", 5)
    monkeypatch.setattr(drafts, "WORTH", 1)  # several passes
    model, prompts = tiny_on(cuda, kind, dtype), PROMPTS * 3
    options = dict(**MIXED, rollout_batch=rollout_batch)
    sampler = Sampler([model], **options) if dtype == torch.float32 else flash_sampler(model, **options)
    earlier = drafts.Earlier()
    earlier.put(range(12), generate(sampler, prompts, seed=0).completions)
    for seed in (0, 1):
        plain = generate(sampler, prompts, seed=seed)
        batch = generate(sampler, prompts, seed=seed, earlier=earlier.of(range(12)))
        assert_log_probs(model, batch)
        assert dtype == torch.bfloat16 or completions(batch) == completions(plain)
        # drawn along its own completions; in half precision a row leaves its draft where a token rounds differently
        assert seed or batch.drafted.sum() > 0.3 * batch.lengths.sum()


@needs(1)
@pytest.mark.parametrize("kind, rollout_batch", [*((kind, 0) for kind in TINY), ("qwen2", 5), ("qwen2", 16)])
def test_the_gpu_samples_what_the_cpu_samples_with_its_log_probabilities(cuda, kind, rollout_batch):
    # without graphs, rows that ended are computed until the next look, and prompts wait where the batch is cut
    on_gpu, on_cpu = tiny_on(cuda, kind, torch.float32), tiny_model(kind)
    sampler = Sampler([on_gpu], **MIXED, rollout_batch=rollout_batch)
    assert isinstance(sampler.engines[0].runner.cache, SdpaCache)
    for temperature in (0, 1.0):
        batch = generate(sampler, PROMPTS * 3, temperature=temperature, seed=0)
        plain = Sampler([on_cpu], **MIXED, compile=False)
        expected = generate(plain, PROMPTS * 3, temperature=temperature, seed=0)
        assert batch.completion_ids.device == cuda and completions(batch) == completions(expected)
        assert batch.truncated.tolist() == expected.truncated.tolist()
    assert len(set(batch.lengths.tolist())) > 10
    assert_log_probs(on_gpu, batch)
    for micro in micro_batches(on_cpu):
        expected = logprobs.LogProbs(on_cpu, 1.0)(*micro.tokens)  # and entropies
        actual = logprobs.LogProbs(on_gpu, 1.0)(*micro.to(cuda).tokens)
        for one, other in zip(actual, expected, strict=True):
            assert_rounded(one.cpu(), other, TERMS)


@needs(1)
@pytest.mark.parametrize("rollout_batch", [0, 16])
def test_stop_strings_end_rows_between_host_checks(cuda, rollout_batch):
    options, letters, stops = dict(MIXED, rollout_batch=rollout_batch), Letters(), ("cab", "bb")
    on_gpu = tiny_on(cuda, "qwen2", torch.float32)
    free = generate(Sampler([on_gpu], **options), PROMPTS * 3, seed=0)
    stopped = generate(Sampler([on_gpu], **options, stopping=Stopping(stops, letters)), PROMPTS * 3, seed=0)
    cut = [next((n for n in range(len(ids)) if find(letters.decode(ids[:n]), stops) >= 0), len(ids))
           for ids in completions(free)]  # fmt: skip
    assert completions(stopped) == [ids[:n] for ids, n in zip(completions(free), cut, strict=True)] != completions(free)
    # with graphs, whose batches differ: every completion is whole, and the log-probabilities are right
    model = tiny_on(cuda, "qwen2")
    batch = generate(flash_sampler(model, **options, stopping=Stopping(stops, letters)), PROMPTS * 3, seed=0)
    for ids, truncated in zip(completions(batch), batch.truncated.tolist(), strict=True):
        assert find(letters.decode(ids[:-1]), stops) < 0
        ended = find(letters.decode(ids), stops) >= 0 or ids[-1] in MIXED["end_ids"]
        assert truncated == (not ended) and (ended or len(ids) == MIXED["max_new_tokens"])
    assert_log_probs(model, batch)


@needs(1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_before_the_first_update_every_ratio_is_exactly_1(model_folders, cuda, family, dtype):
    model = policy_on(model_folders[family], cuda, dtype)
    policy = logprobs.LogProbs(model, 1.0, compile=False)
    assert policy.packed
    for micro in micro_batches(model):
        logps, _ = policy(*micro.tokens)  # with gradients, as the update does
        assert logps.requires_grad and logps.dtype == torch.float32
        ratio = losses.sequence_ratio(logps, micro.old_logps, micro.completion_mask)
        assert ratio.tolist() == [1.0] * len(micro)


@needs(1)
def test_a_reference_runs_the_code_that_was_compiled_for_the_policy(model_folders, cuda):
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    cfg = gspo.Config(policy_model=str(model_folders["qwen2"]), dtype="bf16", kl_coef=0.1)
    policy = Policy(cfg)
    reference = Reference(cfg, policy)
    batch = generate(Sampler([policy.model], **OPTIONS, compile=False), seed=0)
    micros = [m for part in batch.minibatches(2, 40, True) for m in part]
    graphs = []
    for fill in (lambda: policy.fill_logps(micros, "old_logps", 40), lambda: reference.fill_logps(micros, 40)):
        fill()
        graphs.append(counters["stats"]["unique_graphs"])
    assert policy.wrapped[0].compiled and graphs[0] == graphs[1] > 0
    assert all(torch.equal(micro.old_logps, micro.ref_logps) and micro.old_logps.any() for micro in micros)
    assert not any(p.grad is not None for p in reference.frozen.parameters())


Settings = dataclasses.make_dataclass("Settings", [("keep_checkpoints", int, 2), ("learning_rate", float, 1e-3)])


@needs(1)
def test_a_checkpoint_of_a_gpu_comes_back(model_folders, cuda, tmp_path):
    model = policy_on(model_folders["qwen2"], cuda, "bf16")
    optimizer = optim.AdamW(model, 1e-3)
    assert {(master.dtype, master.device) for master in optimizer.masters} == {(torch.float32, cuda)}
    logprobs.LogProbs(model, 1.0)(*micro_batches(model)[0].tokens)[0].sum().backward()
    optimizer.step(1.0)
    folder = tmp_path / "checkpoint-000001"
    checkpoint.save(str(tmp_path), 1, model, build_tokenizer(), optimizer, 12, Settings())
    drawn = torch.rand(4, device=cuda)
    torch.rand(100, device=cuda)
    loaded = policy_on(folder, cuda, "bf16")
    restored = optim.AdamW(loaded, 1e-3)
    checkpoint.load(folder, restored, Settings())
    assert torch.equal(torch.rand(4, device=cuda), drawn)
    assert_equal_weights(*({k: v.cpu() for k, v in own.state_dict().items()} for own in (optimizer, restored)))
    assert_equal_weights(model.state_dict(), loaded.state_dict())


PLAIN, COMPILED = ([(family, compile) for family in FAMILIES] for compile in (False, True))


@needs(1)
@pytest.mark.parametrize("rollout_batch", [0, 12])
@pytest.mark.parametrize(("kind", "compile"), [*((kind, False) for kind in TINY), *COMPILED])
def test_log_probabilities_in_bf16_are_those_of_a_full_forward_pass(cuda, kind, compile, rollout_batch):
    model = tiny_on(cuda, kind)
    sampler = flash_sampler(model, compile, **MIXED, rollout_batch=rollout_batch)
    for temperature in (1.0, 0.7):
        batch = generate(sampler, PROMPTS * 2, group_size=6, temperature=temperature)
        assert_log_probs(model, batch, temperature)
        # mixed lengths: the batch got smaller, and no row went on after its end
        ends = set(MIXED["end_ids"])
        assert len(set(batch.lengths.tolist())) > 5 and not any(ends & {*row[:-1]} for row in completions(batch))
        assert batch.truncated.tolist() == [row[-1] not in ends for row in completions(batch)]
    sizes = {key[0] for key in sampler.engines[0].runner.graphs}
    assert len(sizes) > 1 and max(sizes) == (12 if rollout_batch else 48)
    assert sampler.engines[0].name.startswith("flash attention, shared prompts, CUDA graphs")


@needs(1)
@pytest.mark.parametrize(("kind", "lengths", "group_size", "large"), [
    ("llama", (3, 17, 9), 4, False), ("qwen2", (700, 20), 8, False), ("mistral", (60,), 70, False),
    ("qwen3", (5, 80), 40, False), ("qwen2", (5, 80), 40, True),
])  # fmt: skip
def test_fused_steps_have_the_log_probabilities_of_a_full_forward_pass(
    cuda, monkeypatch, kind, lengths, group_size, large
):
    if large:  # products of cuBLAS
        monkeypatch.setattr(tiles, "LARGE", 1)
    sizes = dict(head_dim=32, hidden_size=128, intermediate_size=320, max_position_embeddings=1024)
    model, generator = tiny_on(cuda, kind, **sizes), torch.Generator().manual_seed(0)
    prompts = [torch.randint(4, 40, (n,), generator=generator).tolist() for n in lengths]
    sampler = flash_sampler(model, **MIXED)
    assert sampler.engines[0].name.endswith("fused blocks")
    for temperature in (1.0, 0.7):
        batch = generate(sampler, prompts, group_size, temperature)
        assert_log_probs(model, batch, temperature)
        assert len(set(batch.lengths.tolist())) > 3
    rows = completions(generate(sampler, prompts, group_size, temperature=0))
    assert all(rows[i : i + group_size] == [rows[i]] * group_size for i in range(0, len(rows), group_size))
    assert completions(generate(sampler, prompts, group_size, 0.7)) == completions(batch)
    # other distributions are drawn by PyTorch from the same logits
    rows = completions(generate(flash_sampler(model, **MIXED, top_k=3), prompts, group_size))
    assert all(len({row[0] for row in rows[i : i + group_size]}) <= 3 for i in range(0, len(rows), group_size))


@needs(1)
@pytest.mark.parametrize(("kind", "compile", "dtype"), [
    ("qwen2", False, torch.float16), *((*model, torch.bfloat16) for model in [*PLAIN, *COMPILED]),
])  # fmt: skip
def test_the_same_seed_gives_the_same_tokens_and_weights_changed_in_place_others(cuda, kind, compile, dtype):
    model = tiny_on(cuda, kind, dtype)
    sampler = flash_sampler(model, compile, **MIXED)
    first = generate(sampler, seed=3, step=7)
    assert completions(generate(sampler, seed=3, step=8)) != completions(first)
    rows = completions(generate(sampler, group_size=8, temperature=0))  # an evaluation in between
    assert all(rows[i : i + 8] == [rows[i]] * 8 for i in range(0, len(rows), 8))
    for again in (sampler, flash_sampler(model, compile, **MIXED)):
        batch = generate(again, seed=3, step=7)
        assert completions(batch) == completions(first)
        assert torch.equal(batch.rollout_logps, first.rollout_logps)
    sampler.engines[0].release()
    assert completions(generate(sampler, seed=3, step=7)) == completions(first)
    # without another capture
    sampler = flash_sampler(model, compile, **FIXED)
    before, graphs = generate(sampler), dict(sampler.engines[0].runner.graphs)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)).to(p))
    after = generate(sampler)
    assert graphs and sampler.engines[0].runner.graphs == graphs and completions(after) != completions(before)
    assert completions(after) == completions(generate(flash_sampler(model, compile, **FIXED)))
    if dtype == torch.bfloat16:
        assert_log_probs(model, after)
    model.get_input_embeddings().weight.data = model.get_input_embeddings().weight.data.clone()  # and elsewhere
    assert completions(generate(sampler)) == completions(after)
    assert not set(graphs.values()) & set(sampler.engines[0].runner.graphs.values())


@needs(1)
@pytest.mark.parametrize("options", [dict(top_k=5), dict(top_p=0.7), dict(min_p=0.2), dict(min_new_tokens=6),
                                     dict(suppressed_ids=[5, 9, 20, 21, 22])], ids=str)  # fmt: skip
@pytest.mark.parametrize("compile", [False, True])
def test_no_forbidden_token_is_drawn(cuda, options, compile):
    batch = generate(flash_sampler(tiny_on(cuda, "qwen2"), compile, **MIXED, **options), group_size=16)
    ends, suppressed = set(MIXED["end_ids"]), set(options.get("suppressed_ids", ()))
    rows, start = completions(batch), options.get("min_new_tokens", 0)
    assert not any(suppressed & {*row} or ends & {*row[:start]} for row in rows)
    logps = batch.rollout_logps[batch.completion_mask]
    assert logps.isfinite().all() and logps.max() <= rounding(64, magnitude=4)  # a sum over the vocabulary
    if "top_k" in options:  # of the 16 rows of a group no more than 5 begin differently
        assert all(len({row[0] for row in rows[i : i + 16]}) <= 5 for i in range(0, len(rows), 16))


def allocated() -> int:
    """Bytes of all tensors on the GPU."""
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def larger_model(device):
    """2 KiB of cache per token."""
    return tiny_on(device, "qwen3", head_dim=64, num_hidden_layers=4, max_position_embeddings=1024)


@needs(1)
@pytest.mark.parametrize("length", [64, 192, 704])
def test_attention_with_a_mask_has_finite_gradients(model_folders, cuda, length):
    """With cuDNN's attention they are NaN at these lengths on H100 and H200, where scores are below -88.7."""
    policy_on(model_folders["qwen2"], cuda, "bf16")  # which turns it off
    query, key, value = torch.randn(3, 1, 2, length, 64, device=cuda).bfloat16()
    query[..., 0], key[..., 0] = 32.0, -32.0  # scores of about -128
    inputs = [x.requires_grad_() for x in (query, key, value)]
    mask = torch.ones(length, length, dtype=torch.bool, device=cuda).tril()
    torch.nn.functional.scaled_dot_product_attention(*inputs, attn_mask=mask).sum().backward()
    assert all(x.grad.isfinite().all() for x in inputs)


@needs(1)
def test_memory_that_is_released_is_free(cuda):
    sampler = flash_sampler(larger_model(cuda), **{**FIXED, "max_new_tokens": 256})
    engine = sampler.engines[0]
    for _ in range(2):  # cuBLAS keeps a workspace of 32 MiB for each stream that it is first used on
        generate(sampler, group_size=16)
        engine.release()
    free = allocated()
    for _ in range(2):
        generate(sampler, group_size=16)  # 64 rows of 256 tokens, and 4 prompts of 9
        assert (64 * 256 + 4 * 9) * 2048 <= engine.cache_bytes <= allocated() - free
        engine.release()
        assert engine.cache_bytes == 0 and not engine.runner.graphs
        assert allocated() <= free + MIB
    # and a group that does not fit is refused
    sampler = flash_sampler(larger_model(cuda), **{**FIXED, "max_new_tokens": 2**20})
    with pytest.raises(ValueError, match="lower one of them"):
        generate(sampler, PROMPTS[:1], group_size=2**7)  # 256 GiB
    assert completions(generate(flash_sampler(larger_model(cuda), **FIXED)))


@needs(1)
@pytest.mark.parametrize("compile", [False, True])
def test_memory_does_not_grow_from_rollout_to_rollout(cuda, compile):
    sampler = flash_sampler(larger_model(cuda), compile, **{**MIXED, "max_new_tokens": 64})
    generator, peaks = torch.Generator().manual_seed(0), []
    lengths = [[100] * 8, *(torch.randint(1, 100, (8,), generator=generator).tolist() for _ in range(19))]
    for step in range(2):
        for i, numbers in enumerate(lengths):
            prompts = [[4 + (i + k) % 50] * n for k, n in enumerate(numbers)]
            generate(sampler, prompts, group_size=8, step=step)
        peaks.append((allocated(), torch.cuda.memory_reserved()))
    assert peaks[1][0] <= peaks[0][0] + MIB and peaks[1][1] <= peaks[0][1] + 32 * MIB
    # one graph for each size of the batch: 64, 32, ..., 1; bounds are powers of two
    assert len(sampler.engines[0].runner.graphs) <= 7 * 2


@needs(1)
@pytest.mark.parametrize("engine", [True, False])
def test_adapters_are_merged_where_graphs_read(cuda, engine):
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)
    model = peft.get_peft_model(tiny_on(cuda, "qwen2"), lora)
    base = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    before, places = {name: p.clone() for name, p in base.items()}, [p.data_ptr() for p in base.values()]
    sampler = flash_sampler(model, **FIXED)
    for _ in range(2):
        merged = flash_sampler(copy.deepcopy(model).merge_and_unload(), **FIXED)
        if not engine:
            sampler.engines = merged.engines = [None]
        assert completions(generate(sampler)) == completions(generate(merged))
        assert_equal_weights(base, before)
        assert [p.data_ptr() for p in base.values()] == places
        with torch.no_grad():
            for p in model.parameters():
                if p.requires_grad:
                    p.mul_(-1.5)


@needs(1)
@pytest.mark.parametrize("compile", [False, True])
def test_broken_weights_stop_the_rollout_and_leave_the_gpu_usable(cuda, compile):
    model = tiny_on(cuda, "gpt2")
    sampler = flash_sampler(model, compile, **FIXED)
    before, good = generate(sampler), model.transformer.wpe.weight.data.clone()
    for place in (0, 15):  # of every prompt; of completions only
        model.transformer.wpe.weight.data[place] = torch.nan
        for temperature in (0, 1.0):
            with pytest.raises(FloatingPointError, match="not finite"):
                generate(sampler, temperature=temperature)
        model.transformer.wpe.weight.data.copy_(good)
        assert completions(generate(sampler)) == completions(before)


@needs(2)
def test_two_replicas_sample_what_one_samples_and_follow_its_weights(model_folders, cuda):
    model = policy_on(model_folders["qwen2"], cuda, "bf16")
    devices = (cuda, torch.device("cuda", 1))
    replicas = models.replicate(model, devices)
    assert tuple(replica.device for replica in replicas) == devices and replicas[0] is model
    sampler = Sampler(replicas, **OPTIONS, compile=False)
    for _ in range(2):
        two = generate(sampler)
        assert two.completion_ids.device == two.rollout_logps.device == cuda
        assert_log_probs(model, two)
        # the share of each GPU, as one GPU computes it
        one = Sampler([model], **OPTIONS, compile=False)
        for share in deal([len(ids) + 4 * 12 for ids in PROMPTS], 2):  # as the sampler counts
            alone = completions(generate(one, [PROMPTS[i] for i in share], prompt_numbers=share))
            assert alone == completions(two.select(torch.tensor([4 * i + g for i in share for g in range(4)])))
        # then with other weights
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p) * 0.05)
        models.refresh(replicas)
        assert_equal_weights(*({k: v.cpu() for k, v in replica.state_dict().items()} for replica in replicas))
        assert not any(q.requires_grad for q in replicas[1].parameters())


def run_script(launcher, command, script, out_dir, **options):
    """Starts a process of its own, since a fork cannot use CUDA after its parent did."""
    options = {"device": "cuda", "dtype": "fp32", "steps": 3, **options}
    return launcher.command(command, script, out_dir, **options).wait(300).succeeded()


@pytest.fixture(scope="module")
def one_gpu(launcher, tmp_path_factory):
    """gspo.py on one GPU."""
    return run_script(launcher, [sys.executable], launcher.copy("gspo"), tmp_path_factory.mktemp("one") / "run")


def assert_peaks(run, gpus: int) -> None:
    for line in run.steps:
        assert len(line["memory_gib"]) == gpus and all(0 < peak < 70 for peak in line["memory_gib"])


@needs(1)
def test_gspo_runs_on_one_gpu_and_in_bf16_by_default_where_it_resumes(launcher, one_gpu, tmp_path):
    assert [line["step"] for line in one_gpu.steps] == [1, 2, 3] and one_gpu.checkpoints
    assert_peaks(one_gpu, 1)
    assert all(line["grad_norm"] > 0 for line in one_gpu.steps)
    on_cpu = launcher.trained("gspo", steps=3)
    assert one_gpu.steps[0]["reward"] == pytest.approx(on_cpu.steps[0]["reward"])
    script = launcher.copy("gspo")
    for steps in (2, 4):
        run = run_script(launcher, [sys.executable], script, tmp_path, dtype="auto", steps=steps)
    assert [line["step"] for line in run.steps] == [1, 2, 3, 4]
    assert {weight.dtype for weight in run.weights().values()} == {torch.bfloat16}
    masters = load_file(tmp_path / "checkpoint-000004" / "optimizer.safetensors")
    assert {t.dtype for name, t in masters.items() if name.startswith("master/")} == {torch.float32}


@needs(1)
@pytest.mark.parametrize("gib", [0, 4])
def test_micro_batches_are_as_large_as_memory_allows(launcher, tmp_path, gib):
    rows = dict(batch_size=40, group_size=16, num_minibatches=1, max_new_tokens=64, eval_every=0)
    options = dict(micro_batch_tokens=0, dtype="auto", memory_limit=gib, **rows)
    for steps in (1, 2):
        run = run_script(launcher, [sys.executable], launcher.copy("gspo"), tmp_path, steps=steps, **options)
        tokens = config_of(run)["micro_batch_tokens"]
        assert f"micro_batch_tokens = 0: micro-batches of up to {tokens} tokens" in run.output
        assert tokens > 8192 and "out of memory" not in run.output
    assert all(peak < 0.85 * (gib or 70) for line in run.steps for peak in line["memory_gib"])


SECOND = dict(ROLLOUT_GPU_IDS=(0, 1), REFERENCE_GPU_ID=1, REWARD_GPU_ID=1)
GRPO = dict(dynamic_sampling=1, kl_estimator="rho_k3", reference_refresh=2, entropy_coef=0.01)
NGRAMS = dict(similarity_model="ngrams", kl_coef=0.0)


@needs(2)
@pytest.mark.parametrize(("one", "script", "command", "constants", "options"), [
    ("gspo", "gspo_multigpu", [sys.executable], SECOND, {}),
    ("gspo", "gspo_ddp", TORCHRUN, {}, {}),
    ("grpo", "grpo_multigpu", [sys.executable], SECOND, GRPO),
    ("grpo", "grpo_ddp", TORCHRUN, {}, GRPO),
    ("similarity_grpo", "similarity_grpo", TORCHRUN, {}, NGRAMS),
])  # fmt: skip
def test_a_run_on_two_gpus_is_that_on_one(launcher, tmp_path, one, script, command, constants, options):
    expected = run_script(launcher, [sys.executable], launcher.copy(one), tmp_path / "one", **options)
    run = run_script(launcher, command, launcher.copy(script, **constants), tmp_path / "two", **options)
    assert_close(run, expected)
    assert_peaks(run, 2)


@needs(2)
def test_visible_devices_are_counted_from_0(launcher, one_gpu, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    run = run_script(launcher, [sys.executable], launcher.copy("gspo"), tmp_path)
    assert_close(run, one_gpu)
    assert_peaks(run, 1)


EMBEDDED = 12 * 8  # roundings to fp16, eight in each of twelve layers
TEXTS = [f"what is {a} + {b} ? {'. ' * c}" for a in range(4) for b in range(4) for c in (0, 5)]


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> str:
    """A sentence-transformers folder of 40 M random parameters."""
    from sentence_transformers import SentenceTransformer
    from transformers import BertConfig, BertModel

    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    config = BertConfig(vocab_size=64, hidden_size=512, num_hidden_layers=12, num_attention_heads=8)
    BertModel(config).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    SentenceTransformer(str(folder), device="cpu").save(str(folder / "saved"))
    return str(folder / "saved")


@needs(1)
@pytest.mark.parametrize("offload", [False, True])
def test_the_embedder_is_in_fp16_on_a_gpu_and_leaves_it_when_asked(bert, cuda, offload):
    expected = Embedder(bert, ["cpu"])(TEXTS, 8)
    before = torch.cuda.memory_allocated(cuda)
    embed = Embedder(bert, [cuda], offload=offload)
    for _ in range(3):
        found = embed(TEXTS, 8)
        assert found.device.type == "cpu" and found.dtype == torch.float32
        assert_rounded(found, expected, EMBEDDED, dtype=torch.float16)
        held = torch.cuda.memory_allocated(cuda) - before
        assert held < MIB if offload else held > 50 * MIB
    assert next(embed.models[0].parameters()).dtype == torch.float16


@needs(2)
def test_two_gpus_share_the_embedding_by_prompt(bert, cuda):
    two = Embedder(bert, [cuda, torch.device("cuda", 1)])(TEXTS, 8)
    assert_rounded(two, Embedder(bert, [cuda])(TEXTS, 8), EMBEDDED, dtype=torch.float16)
