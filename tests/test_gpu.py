"""What only a GPU can show; every test is skipped where there are fewer than it needs."""

import copy
import gc
import sys
from pathlib import Path

import pytest
import torch
from conftest import TINY, build_model, build_tokenizer, tiny_model
from safetensors.torch import load_file
from test_checkpoint import Config, save

from common import checkpoint, logprobs, losses, models, optim
from common.cache import FlashCache, SdpaCache
from common.embedder import Embedder
from common.rollout import RolloutBatch, Sampler, deal

FAMILIES = ["qwen2", "gpt2"]
PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15, 16, 17], [20], [21, 22, 23, 24, 25]]
OPTIONS = dict(end_ids=[3], pad_id=0, max_new_tokens=12)
MIXED = dict(end_ids=[3, 40, 41, 42, 43, 44], pad_id=0, max_new_tokens=40)  # rows end at many different times
FIXED = dict(end_ids=[999], pad_id=0, max_new_tokens=20)  # and here all at once
TORCHRUN = [Path(sys.executable).with_name("torchrun"), "--nproc_per_node=2"]
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


def rollout(model, prompts=PROMPTS, group_size=4, temperature=1.0, seed=0, compile=False, **options) -> RolloutBatch:
    """What a new sampler gives, for one model or a list of replicas."""
    replicas = model if isinstance(model, list) else [model]
    sampler = Sampler(replicas, **{**OPTIONS, **options}, compile=compile)
    return sampler.generate(prompts, group_size=group_size, temperature=temperature, seed=seed)


def flash_sampler(model, compile=False, **options) -> Sampler:
    """A sampler that decodes by CUDA graphs."""
    sampler = Sampler([model], **options, compile=compile)
    engine = sampler.engines[0]
    assert isinstance(engine.cache, FlashCache) and engine.use_graphs and bool(engine.compiled_layers) == compile
    return sampler


def generate(sampler, prompts=PROMPTS, group_size=4, temperature=1.0, **which) -> RolloutBatch:
    return sampler.generate(prompts, group_size=group_size, temperature=temperature, **which)


def completions(batch) -> list[list[int]]:
    return [ids[:n] for ids, n in zip(batch.completion_ids.tolist(), batch.lengths.tolist(), strict=True)]


def assert_log_probs(model, batch, temperature=1.0) -> None:
    """Against a forward pass over each sequence alone, by transformers' attention and with logits in fp32."""
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("sdpa")
    differences = []
    for i, completion in enumerate(completions(batch)):
        prompt = batch.prompt_ids[i][batch.prompt_mask[i]].tolist()
        with torch.no_grad():
            ids = torch.tensor([prompt + completion], device=model.device)
            hidden = plain.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[0, len(prompt) - 1 : -1]
            logps = (logprobs.vocabulary_logits(plain, hidden) / temperature).log_softmax(-1)
        expected = logps.gather(1, ids[0, len(prompt) :, None]).squeeze(1)
        differences.append(expected - batch.rollout_logps[i, : len(completion)])
        assert not batch.rollout_logps[i, len(completion) :].any()
    largest = max(difference.abs().max().item() for difference in differences)
    mean = sum(difference.mean().item() for difference in differences) / len(differences)
    # bf16 keeps 8 bits, and logits of these models are large; a wrong key or position would give 1 and more
    limits = (1e-4, 1e-4) if model.dtype == torch.float32 else (0.25, 0.02)
    assert largest < limits[0] and abs(mean) < limits[1], (largest, mean)


def micro_batches(model, minibatches: int = 2, micro_batch_tokens: int = 40):
    """A rollout of the model as the update sees it, advantages and old log-probabilities included."""
    policy = logprobs.LogProbs(model, 1.0)
    batch = rollout(model)
    micros = [m for part in batch.minibatches(minibatches, micro_batch_tokens, policy.packed) for m in part]
    assert len(micros) > minibatches
    logprobs.fill(micros, "old_logps", policy, model.device)
    for micro in micros:
        micro.advantages = torch.linspace(-1, 1, len(batch), device=model.device)[micro.rows.to(model.device)]
    return micros


# ---- one GPU ----


@needs(1)
@pytest.mark.parametrize("kind", TINY)
def test_greedy_rollout_is_that_of_transformers(cuda, kind):
    plain = tiny_on(cuda, kind, torch.float32)
    sampler = Sampler([copy.deepcopy(plain)], **MIXED)
    assert isinstance(sampler.engines[0].cache, SdpaCache)
    batch = generate(sampler, group_size=1, temperature=0)
    expected = plain.generate(input_ids=batch.prompt_ids, attention_mask=batch.prompt_mask.long(), do_sample=False,
                              max_new_tokens=40, eos_token_id=MIXED["end_ids"], pad_token_id=0)[:, 9:]  # fmt: skip
    assert batch.completion_ids.device == cuda
    for own, theirs in zip(completions(batch), expected.tolist(), strict=True):
        assert own == theirs[: len(own)] and not any(theirs[len(own) :])
    few = generate(Sampler([copy.deepcopy(plain)], **MIXED, rollout_batch=2), group_size=1, temperature=0)
    assert completions(few) == completions(batch)


@needs(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_gpu_samples_what_the_cpu_samples(model_folders, cuda, family):
    on_gpu = rollout(policy_on(model_folders[family], cuda), seed=1)
    on_cpu = rollout(policy_on(model_folders[family], torch.device("cpu")), seed=1)
    assert on_gpu.completion_ids.tolist() == on_cpu.completion_ids.tolist()
    assert on_gpu.truncated.tolist() == on_cpu.truncated.tolist()
    assert (on_gpu.rollout_logps.cpu() - on_cpu.rollout_logps).abs().max() <= 1e-4


@needs(1)
@pytest.mark.parametrize("rollout_batch", [0, 5, 16])
def test_rows_that_ended_and_prompts_that_wait_change_nothing_in_fp32(cuda, rollout_batch):
    # without graphs, rows that ended are computed until the next look
    model = tiny_on(cuda, "qwen2", torch.float32)
    batch = rollout(model, PROMPTS * 3, **MIXED, rollout_batch=rollout_batch)
    on_cpu = rollout(tiny_model("qwen2"), PROMPTS * 3, **MIXED)
    assert completions(batch) == completions(on_cpu) and len(set(batch.lengths.tolist())) > 10
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
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_are_those_of_the_cpu(model_folders, cuda, family):
    on_cpu, on_gpu = (policy_on(model_folders[family], device) for device in (torch.device("cpu"), cuda))
    for micro in micro_batches(on_cpu):
        expected = logprobs.LogProbs(on_cpu, 1.0)(*micro.tokens)
        actual = logprobs.LogProbs(on_gpu, 1.0)(*(t.to(cuda) for t in micro.tokens))
        for one, other in zip(actual, expected, strict=True):
            assert (one.cpu() - other).abs().max() <= 1e-4


@needs(1)
def test_masters_move_where_bf16_weights_cannot(model_folders, cuda):
    model = policy_on(model_folders["qwen2"], cuda, "bf16")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = optim.AdamW(model, 1e-7)
    assert all(master.dtype == torch.float32 and master.device == cuda for master in optimizer.masters)
    masters = [master.clone() for master in optimizer.masters]
    for _ in range(3):
        logps, _ = logprobs.LogProbs(model, 1.0)(*micro_batches(model)[0].tokens)
        logps.sum().backward()
        assert 0 < optimizer.step(1.0) < float("inf")
    moved = [(a - b).abs().max().item() for a, b in zip(optimizer.masters, masters, strict=True)]
    assert 1e-7 < max(moved) <= 4e-7
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    for name, p in model.named_parameters():
        large = before[name].abs() > 0.01  # where numbers of bf16 are 3e-5 apart and more
        assert torch.equal(p[large], before[name][large])


@needs(1)
def test_a_checkpoint_of_a_gpu_comes_back(model_folders, cuda, tmp_path):
    model = policy_on(model_folders["qwen2"], cuda, "bf16")
    optimizer = optim.AdamW(model, 1e-3)
    logprobs.LogProbs(model, 1.0)(*micro_batches(model)[0].tokens)[0].sum().backward()
    optimizer.step(1.0)
    folder = save(tmp_path, 1, model, optimizer)
    drawn = torch.rand(4, device=cuda)
    torch.rand(100, device=cuda)
    loaded = policy_on(folder, cuda, "bf16")
    restored = optim.AdamW(loaded, 1e-3)
    checkpoint.load(folder, restored, Config())
    assert torch.equal(torch.rand(4, device=cuda), drawn)
    before, after = optimizer.state_dict(), restored.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name].cpu(), after[name].cpu()) for name in before)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))


# ---- one GPU, half precision: flash attention and CUDA graphs ----

COMPILED = [("qwen2", True), ("gpt2", True)]


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
    sizes = {key[0] for key in sampler.engines[0].graphs}
    assert len(sizes) > 1 and max(sizes) == (12 if rollout_batch else 48)
    assert sampler.engines[0].name.startswith("flash attention, shared prompts, CUDA graphs")


@needs(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_greedy_rows_of_a_group_are_the_same_in_half_precision(cuda, dtype):
    batch = generate(flash_sampler(tiny_on(cuda, "qwen2", dtype), **MIXED), group_size=8, temperature=0)
    rows = completions(batch)
    for i in range(len(PROMPTS)):
        assert rows[8 * i : 8 * i + 8] == [rows[8 * i]] * 8


@needs(1)
@pytest.mark.parametrize(("kind", "compile"), [("qwen2", False), ("gpt2", False), *COMPILED])
def test_the_same_seed_gives_the_same_tokens_twice(cuda, kind, compile):
    model = tiny_on(cuda, kind)
    sampler = flash_sampler(model, compile, **MIXED)
    first = generate(sampler, seed=3, step=7)
    other = generate(sampler, seed=3, step=8)
    assert completions(other) != completions(first)
    generate(sampler, PROMPTS[:3], group_size=1, temperature=0)  # an evaluation in between
    for again in (sampler, flash_sampler(model, compile, **MIXED)):
        batch = generate(again, seed=3, step=7)
        assert completions(batch) == completions(first)
        assert torch.equal(batch.rollout_logps, first.rollout_logps)
    sampler.engines[0].release()
    assert completions(generate(sampler, seed=3, step=7)) == completions(first)


@needs(1)
@pytest.mark.parametrize(("kind", "compile"), [("qwen2", False), *COMPILED])
def test_weights_changed_in_place_change_the_output_without_another_capture(cuda, kind, compile):
    model = tiny_on(cuda, kind)
    sampler = flash_sampler(model, compile, **FIXED)
    before, graphs = generate(sampler), dict(sampler.engines[0].graphs)
    assert completions(generate(sampler)) == completions(before)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)).to(p))
    after = generate(sampler)
    assert graphs and sampler.engines[0].graphs == graphs
    assert completions(after) != completions(before)
    assert completions(after) == completions(generate(flash_sampler(model, compile, **FIXED)))
    assert_log_probs(model, after)
    model.get_input_embeddings().weight.data = model.get_input_embeddings().weight.data.clone()  # and elsewhere
    assert completions(generate(sampler)) == completions(after)
    assert not set(graphs.values()) & set(sampler.engines[0].graphs.values())


@needs(1)
@pytest.mark.parametrize("options", [dict(top_k=5), dict(top_p=0.7), dict(min_p=0.2), dict(min_new_tokens=6),
                                     dict(suppressed_ids=[5, 9, 20, 21, 22])], ids=str)  # fmt: skip
@pytest.mark.parametrize("compile", [False, True])
def test_no_forbidden_token_is_drawn(cuda, options, compile):
    batch = generate(flash_sampler(tiny_on(cuda, "qwen2"), compile, **MIXED, **options), group_size=16)
    ends, suppressed = set(MIXED["end_ids"]), set(options.get("suppressed_ids", ()))
    rows, start = completions(batch), options.get("min_new_tokens", 0)
    assert not any(suppressed & {*row} or ends & {*row[:start]} for row in rows)
    logps = batch.rollout_logps[batch.sampled_mask]
    assert logps.isfinite().all() and logps.max() <= 1e-5
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
def test_memory_that_is_released_is_free(cuda):
    sampler = flash_sampler(larger_model(cuda), **{**FIXED, "max_new_tokens": 256})
    engine = sampler.engines[0]
    generate(sampler, group_size=16)
    engine.release()
    free = allocated()
    for _ in range(2):
        generate(sampler, group_size=16)
        # 64 rows of 256 tokens, and 4 prompts of 9
        assert (64 * 256 + 4 * 9) * 2048 <= engine.cache_bytes <= allocated() - free
        engine.release()
        assert engine.cache_bytes == 0 and not engine.graphs
        assert allocated() <= free + MIB


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
    # one graph for each size of the batch: 64, 32, 16, 8; bounds are powers of two
    assert len(sampler.engines[0].graphs) <= 4 * 2


@needs(1)
def test_a_group_that_does_not_fit_is_refused(cuda):
    sampler = flash_sampler(larger_model(cuda), **{**FIXED, "max_new_tokens": 2**20})
    with pytest.raises(ValueError, match="lower one of them"):
        generate(sampler, PROMPTS[:1], group_size=2**7)  # 256 GiB
    assert completions(generate(flash_sampler(larger_model(cuda), **FIXED)))


@needs(1)
@pytest.mark.parametrize("engine", [True, False])
def test_adapters_are_merged_where_graphs_read(cuda, engine):
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)
    model = peft.get_peft_model(tiny_on(cuda, "qwen2"), lora)
    base = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    before, places = {name: p.clone() for name, p in base.items()}, [p.data_ptr() for p in base.values()]
    sampler = flash_sampler(model, **FIXED)
    if not engine:
        sampler.engines = [None]
    for _ in range(2):
        merged = flash_sampler(copy.deepcopy(model).merge_and_unload(), **FIXED)
        if not engine:
            merged.engines = [None]
        assert completions(generate(sampler)) == completions(generate(merged))
        assert all(torch.equal(p, before[name]) for name, p in base.items())
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


# ---- two GPUs, one process ----


@needs(2)
@pytest.mark.parametrize("rows", [5, 3, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_two_replicas_gather_the_gradient_of_one(model_folders, cuda, family, rows):
    model = policy_on(model_folders[family], cuda)
    other = copy.deepcopy(model)
    batch = rollout(model).select(3 * torch.arange(rows))
    batch.advantages = torch.linspace(-1, 2, rows, device=cuda)
    devices = (cuda, torch.device("cuda", 1))
    replicas = models.replicate(other, devices, trained=2)
    for policies in ([logprobs.LogProbs(model, 1.0)], [logprobs.LogProbs(replica, 1.0) for replica in replicas]):
        (micros,) = batch.minibatches(1, 1000, policies[0].packed, devices=devices[: len(policies)])
        assert [micro.device for micro in micros] == list(devices[: min(rows, len(policies))])
        logprobs.fill(micros, "old_logps", policies, devices)
        for micro in micros:
            logps, _ = policies[micro.replica](*micro.tokens)
            assert logps.device == micro.old_logps.device == micro.device and torch.equal(logps, micro.old_logps)
            (logps * micro.advantages[:, None]).sum().backward()
    models.sum_gradients(replicas)
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-5, atol=1e-5 * p.grad.abs().max().item(),
                                   msg=lambda m, n=name: f"{n}: {m}")  # fmt: skip


@needs(2)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_two_replicas_sample_what_one_samples_and_follow_its_weights(model_folders, cuda, dtype):
    model = policy_on(model_folders["qwen2"], cuda, dtype)
    devices = (cuda, torch.device("cuda", 1))
    replicas = models.replicate(model, devices)
    assert tuple(replica.device for replica in replicas) == devices and replicas[0] is model
    sampler = Sampler(replicas, **OPTIONS, compile=False)
    for _ in range(2):
        two = generate(sampler)
        assert two.completion_ids.device == two.rollout_logps.device == cuda
        assert_log_probs(model, two)
        if dtype == "fp32":
            assert two.completion_ids.tolist() == rollout(model).completion_ids.tolist()
        else:  # the share of each GPU, as one GPU computes it
            one = Sampler([model], **OPTIONS, compile=False)
            for share in deal([len(ids) + 4 * 12 for ids in PROMPTS], 2):  # as the sampler counts
                alone = generate(one, [PROMPTS[i] for i in share], prompt_numbers=share)
                rows = torch.tensor([4 * i + g for i in share for g in range(4)])
                assert completions(alone) == completions(two.select(rows))
        # then with other weights
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p) * 0.05)
        models.refresh(replicas)
        for p, q in zip(model.parameters(), replicas[1].parameters(), strict=True):
            assert torch.equal(p.cpu(), q.cpu()) and not q.requires_grad


# ---- the scripts; each starts a process of its own, since a fork cannot use CUDA after its parent did ----


def run_script(launcher, command, script, out_dir, **options):
    options = {"device": "cuda", "dtype": "fp32", "steps": 3, **options}
    return launcher.command(command, script, out_dir, **options).wait(300).succeeded()


@pytest.fixture(scope="module")
def one_gpu(launcher, tmp_path_factory):
    """gspo.py on one GPU."""
    return run_script(launcher, [sys.executable], launcher.copy("gspo"), tmp_path_factory.mktemp("one") / "run")


def assert_like(run, one_gpu, gpus: int) -> None:
    """The same rewards at every step, and weights that differ by rounding only."""
    for line, expected in zip(run.steps, one_gpu.steps, strict=True):
        for name in ("reward", "completion_length", "truncated", "unscored"):
            assert line[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), (line["step"], name)
        assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-2)
    assert_peaks(run, gpus)
    weights, expected = run.weights(), one_gpu.weights()
    assert weights.keys() == expected.keys()
    for name in weights:  # Adam makes whole steps out of the rounding of a gradient close to 0: of few weights
        difference = (weights[name] - expected[name]).abs()
        assert difference.max() <= 1e-3 and difference.mean() <= 5e-5, name


def assert_peaks(run, gpus: int) -> None:
    for line in run.steps:
        assert len(line["memory_gib"]) == gpus and all(0 < peak < 70 for peak in line["memory_gib"])


@needs(1)
def test_gspo_runs_on_one_gpu(launcher, one_gpu):
    assert [line["step"] for line in one_gpu.steps] == [1, 2, 3] and one_gpu.checkpoints
    assert_peaks(one_gpu, 1)
    assert all(line["grad_norm"] > 0 for line in one_gpu.steps)
    on_cpu = launcher.trained("gspo", steps=3)
    assert one_gpu.steps[0]["reward"] == pytest.approx(on_cpu.steps[0]["reward"])


@needs(1)
def test_gspo_runs_in_bf16_by_default_and_resumes(launcher, tmp_path):
    script = launcher.copy("gspo")
    for steps in (2, 4):
        run = run_script(launcher, [sys.executable], script, tmp_path, dtype="auto", steps=steps)
    assert [line["step"] for line in run.steps] == [1, 2, 3, 4]
    assert {weight.dtype for weight in run.weights().values()} == {torch.bfloat16}
    masters = load_file(tmp_path / "checkpoint-000004" / "optimizer.safetensors")
    assert {t.dtype for name, t in masters.items() if name.startswith("master/")} == {torch.float32}


@needs(2)
def test_gspo_multigpu_is_gspo(launcher, one_gpu, tmp_path):
    ids = {"REFERENCE_GPU_ID = 2": "REFERENCE_GPU_ID = 1", "REWARD_GPU_ID = 2": "REWARD_GPU_ID = 1"}
    run = run_script(launcher, [sys.executable], launcher.copy("gspo_multigpu", edits=ids), tmp_path)
    assert_like(run, one_gpu, gpus=2)


@needs(2)
def test_gspo_ddp_is_gspo(launcher, one_gpu, tmp_path):
    run = run_script(launcher, TORCHRUN, launcher.copy("gspo_ddp"), tmp_path)
    assert_like(run, one_gpu, gpus=2)


@needs(2)
def test_visible_devices_are_counted_from_0(launcher, one_gpu, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "1")
        run = run_script(launcher, [sys.executable], launcher.copy("gspo"), tmp_path)
    assert_like(run, one_gpu, gpus=1)


@needs(2)
@pytest.mark.parametrize("script, command", [("grpo_multigpu", [sys.executable]), ("grpo_ddp", TORCHRUN)])
def test_grpo_on_two_gpus_is_grpo_on_one(launcher, tmp_path, script, command):
    options = dict(dynamic_sampling=1, kl_estimator="rho_k3", reference_refresh=2, entropy_coef=0.01)
    one = run_script(launcher, [sys.executable], launcher.copy("grpo"), tmp_path / "one", **options)
    multigpu = {"REFERENCE_GPU_ID = 2": "REFERENCE_GPU_ID = 1", "REWARD_GPU_ID = 2": "REWARD_GPU_ID = 1"}
    copy = launcher.copy(script, edits=multigpu if script == "grpo_multigpu" else {})
    run = run_script(launcher, command, copy, tmp_path / "two", **options)
    assert [line["resampled"] for line in run.steps] == [line["resampled"] for line in one.steps]
    assert_like(run, one, gpus=2)


# ---- similarity groups ----


@needs(2)
def test_similarity_groups_on_two_gpus_are_those_on_one(launcher, tmp_path):
    options = dict(similarity_model="ngrams", kl_coef=0.0)
    one = run_script(launcher, [sys.executable], launcher.copy("similarity_grpo"), tmp_path / "one", **options)
    two = run_script(launcher, TORCHRUN, launcher.copy("similarity_grpo"), tmp_path / "two", **options)
    assert_like(two, one, gpus=2)
    for name in ("clusters", "singletons", "cosine"):
        assert [line[name] for line in two.steps] == pytest.approx([line[name] for line in one.steps], rel=1e-4)


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> str:
    """A sentence-transformers folder of 40 M random parameters."""
    from sentence_transformers import SentenceTransformer
    from transformers import BertConfig, BertModel

    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=64, hidden_size=512, num_hidden_layers=12, num_attention_heads=8)).save_pretrained(
        folder
    )
    build_tokenizer().save_pretrained(folder)
    model = SentenceTransformer(str(folder), device="cpu")
    model.save(str(folder / "saved"))
    return str(folder / "saved")


TEXTS = [f"what is {a} + {b} ? {'. ' * c}" for a in range(4) for b in range(4) for c in (0, 5)]


@needs(1)
@pytest.mark.parametrize("offload", [False, True])
def test_the_embedder_is_in_fp16_on_a_gpu_and_leaves_it_when_asked(bert, cuda, offload):
    expected = Embedder(bert, ["cpu"])(TEXTS, 8)
    before = torch.cuda.memory_allocated(cuda)
    embed = Embedder(bert, [cuda], offload=offload)
    for _ in range(3):
        found = embed(TEXTS, 8)
        assert found.device.type == "cpu" and found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=0, atol=5e-3)
        held = torch.cuda.memory_allocated(cuda) - before
        assert held < MIB if offload else held > 50 * MIB
    assert next(embed.models[0].parameters()).dtype == torch.float16


@needs(2)
def test_two_gpus_share_the_embedding_by_prompt(bert, cuda):
    one = Embedder(bert, [cuda])(TEXTS, 8)
    two = Embedder(bert, [cuda, torch.device("cuda", 1)])(TEXTS, 8)
    torch.testing.assert_close(two, one, rtol=0, atol=2e-3)


@needs(1)
def test_tiny_models_are_built_alike_everywhere(model_folders):
    # the tests above compare GPUs through files: both sides must have read the same model
    expected = build_model("qwen2").state_dict()
    saved = load_file(model_folders["qwen2"] / "model.safetensors")
    assert all(torch.equal(weight, expected[name]) for name, weight in saved.items())
