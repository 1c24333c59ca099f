"""What only a GPU can show; every test is skipped where there are fewer than it needs."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from conftest import build_model
from safetensors.torch import load_file
from test_checkpoint import Config, save
from torch import nn

from common import checkpoint, logprobs, losses, models, optim
from common.rollout import generate

FAMILIES = ["qwen2", "gpt2"]
PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15, 16, 17], [20], [21, 22, 23, 24, 25]]
SAMPLING = dict(group_size=4, max_new_tokens=12, temperature=1.0, end_ids=[3], pad_id=0)
TORCHRUN = [Path(sys.executable).with_name("torchrun"), "--nproc_per_node=2"]
pytestmark = pytest.mark.gpu


def needs(gpus: int):
    return pytest.mark.skipif(torch.cuda.device_count() < gpus, reason=f"needs {gpus} GPU(s)")


@pytest.fixture(scope="module")
def cuda() -> torch.device:
    return torch.device("cuda", 0)


def policy_on(folder, device, dtype="fp32"):
    return models.load_policy(str(folder), device, dtype)[1]


def micro_batches(model, minibatches: int = 2, micro_batch_size: int = 3):
    """A rollout of the model as the update sees it, advantages and old log-probabilities included."""
    batch = generate([model], PROMPTS, **SAMPLING)
    micros = [m for minibatch in batch.minibatches(minibatches, micro_batch_size) for m in minibatch]
    logprobs.fill(micros, "old_logps", logprobs.LogProbs(model, 1.0), model.device)
    for micro in micros:
        micro.advantages = torch.linspace(-1, 1, len(batch), device=model.device)[micro.rows.to(model.device)]
    return micros


# ---- one GPU ----


@needs(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_rollout_is_that_of_transformers(model_folders, cuda, family):
    model = policy_on(model_folders[family], cuda).eval()
    batch = generate([model], PROMPTS, **{**SAMPLING, "temperature": 0, "group_size": 1})
    width = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in PROMPTS], device=cuda)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in PROMPTS], device=cuda)
    expected = model.generate(input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=12, eos_token_id=3,
                              pad_token_id=0)[:, width:]  # fmt: skip
    assert batch.completion_ids.device == cuda
    for own, theirs, length in zip(batch.completion_ids, expected, batch.lengths.tolist(), strict=True):
        assert own[:length].tolist() == theirs[:length].tolist()


@needs(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_gpu_samples_what_the_cpu_samples(model_folders, cuda, family):
    on_gpu = generate([policy_on(model_folders[family], cuda)], PROMPTS, **SAMPLING, seed=1)
    on_cpu = generate([policy_on(model_folders[family], torch.device("cpu"))], PROMPTS, **SAMPLING, seed=1)
    assert on_gpu.completion_ids.tolist() == on_cpu.completion_ids.tolist()
    assert on_gpu.truncated.tolist() == on_cpu.truncated.tolist()


@needs(1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_before_the_first_update_every_ratio_is_exactly_1(model_folders, cuda, family, dtype):
    model = policy_on(model_folders[family], cuda, dtype)
    policy = logprobs.LogProbs(model, 1.0)
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


# ---- two GPUs, one process ----


@needs(2)
@pytest.mark.parametrize("rows", [5, 3, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_data_parallel_is_one_gpu(model_folders, cuda, family, rows):
    model = policy_on(model_folders[family], cuda)
    other = copy.deepcopy(model)
    micro = micro_batches(model, minibatches=1, micro_batch_size=rows)[0]
    weights = torch.linspace(-1, 2, rows, device=cuda)[:, None]
    results = []
    for policy in (logprobs.LogProbs(model, 1.0), nn.DataParallel(logprobs.LogProbs(other, 1.0), device_ids=[0, 1])):
        logps, entropy = policy(*micro.tokens)
        assert logps.shape == entropy.shape == micro.completion_ids.shape and logps.device == cuda
        (logps * weights).sum().backward()
        results.append((logps.detach(), entropy.detach()))
    for one, two in zip(*results, strict=True):
        assert (one - two).abs().max() <= 1e-5
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-5, atol=1e-5 * p.grad.abs().max().item(),
                                   msg=lambda m, n=name: f"{n}: {m}")  # fmt: skip


@needs(2)
def test_two_replicas_sample_what_one_samples_and_follow_its_weights(model_folders, cuda):
    model = policy_on(model_folders["qwen2"], cuda)
    devices = (cuda, torch.device("cuda", 1))
    replicas = models.replicate(model, devices)
    assert tuple(replica.device for replica in replicas) == devices and replicas[0] is model
    for _ in range(2):
        one, two = generate([model], PROMPTS, **SAMPLING), generate(replicas, PROMPTS, **SAMPLING)
        assert two.completion_ids.device == cuda and two.completion_ids.tolist() == one.completion_ids.tolist()
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


@needs(1)
def test_tiny_models_are_built_alike_everywhere(model_folders):
    # the tests above compare GPUs through files: both sides must have read the same model
    expected = build_model("qwen2").state_dict()
    saved = load_file(model_folders["qwen2"] / "model.safetensors")
    assert all(torch.equal(weight, expected[name]) for name, weight in saved.items())
