"""What only GPUs can show; every test says how many it needs."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import REWARD, REWARD_LINE, ROOT, build_model, read_lines
from safetensors.torch import load_file
from torch import nn

from common import logprobs, losses, models, optim, rollout

FAMILIES = ["qwen2", "gpt2"]
PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15, 16, 17], [18]]
GPU = torch.device("cuda", 0)


def marked(gpus: int):
    found = torch.cuda.device_count()
    skip = pytest.mark.skipif(found < gpus, reason=f"needs {gpus} GPU(s), {found} found")
    return lambda function: pytest.mark.gpu(skip(function))


@pytest.fixture(autouse=True)
def exact_matmul():
    """TF32, which bf16 models switch on for their head, is not for comparisons in fp32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def sampled(model, temperature=1.0, replicas=None, group_size=4):
    return rollout.generate(
        replicas or [model], PROMPTS, group_size=group_size, max_new_tokens=12, temperature=temperature, end_ids=[3],
        pad_id=0, seed=1, step=2,
    )  # fmt: skip


@marked(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_those_of_generate(family):
    model = build_model(family).to(GPU).eval()
    batch = sampled(model, temperature=0, group_size=1)
    for row, prompt in enumerate(PROMPTS):
        expected = model.generate(
            torch.tensor([prompt], device=GPU), max_new_tokens=12, do_sample=False, pad_token_id=0
        )
        completion = batch.completion_ids[row][batch.completion_mask[row]]
        assert completion.tolist() == expected[0, len(prompt) :].tolist()


@marked(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_gpu_and_cpu_sample_the_same_tokens_and_agree_on_their_log_probs(family):
    cpu = build_model(family).eval()
    gpu = copy.deepcopy(cpu).to(GPU)
    one, other = sampled(cpu), sampled(gpu)
    assert torch.equal(one.completion_ids, other.completion_ids.cpu())
    logps, _ = logprobs.LogProbs(cpu, 0.7)(*one.tokens)
    on_gpu, _ = logprobs.LogProbs(gpu, 0.7)(*other.tokens)
    torch.testing.assert_close(on_gpu.cpu(), logps, atol=1e-4, rtol=0)


@marked(1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_ratio_is_exactly_one(model_folders, family, dtype):
    _, model = models.load_policy(str(model_folders[family]), GPU, dtype)
    policy = logprobs.LogProbs(model, 1.0)
    micros = [micro for minibatch in sampled(model).minibatches(2, 3) for micro in minibatch]
    logprobs.fill(micros, "old_logps", policy, GPU)
    for micro in micros:
        logps, _ = policy(*micro.tokens)
        assert logps.requires_grad and logps.dtype == torch.float32
        assert (losses.sequence_ratio(logps, micro.old_logps, micro.completion_mask) == 1).all()


@marked(1)
def test_bf16_weights_follow_their_fp32_masters():
    layer = nn.Linear(4, 4, bias=False).to(GPU, torch.bfloat16)
    nn.init.constant_(layer.weight, 0.02)
    optimizer = optim.AdamW(layer, learning_rate=1e-6)
    for _ in range(100):
        layer.weight.grad = torch.ones_like(layer.weight)
        optimizer.step(max_grad_norm=1.0)
    master = optimizer.state_dict()["master/weight"]
    torch.testing.assert_close(master, torch.full_like(master, 0.02 - 1e-4), atol=2e-5, rtol=0)
    assert torch.equal(layer.weight, master.bfloat16())


@marked(2)
@pytest.mark.parametrize("rows", [5, 3, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_data_parallel_with_rows_that_do_not_divide_equals_one_gpu(family, rows):
    model = build_model(family).to(GPU).eval()
    batch = sampled(model).select(torch.arange(rows))
    single = logprobs.LogProbs(model, 1.0)
    gradients = []
    outputs = []
    for policy in (single, nn.DataParallel(single, device_ids=[0, 1])):
        model.zero_grad()
        logps, _ = policy(*batch.tokens)
        logps.sum().backward()
        outputs.append(logps.detach())
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-5, rtol=0)
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@marked(2)
def test_two_gpus_sample_what_one_samples_and_follow_its_weights():
    model = build_model("qwen2").to(GPU).eval()
    replicas = models.replicate(model, (GPU, torch.device("cuda", 1)))
    assert torch.equal(sampled(model).completion_ids, sampled(model, replicas=replicas).completion_ids)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(-1)
    models.refresh(replicas)
    for one, other in zip(model.parameters(), replicas[1].parameters(), strict=True):
        assert torch.equal(one.cpu(), other.cpu())
    assert torch.equal(sampled(model).completion_ids, sampled(model, replicas=replicas).completion_ids)


@marked(2)
def test_the_three_scripts_take_the_same_steps(model_folders, sums_file, tmp_path):
    copies = ROOT / "tests" / f".copies-gpu-{os.getpid()}"
    copies.mkdir()
    launchers = {
        "gspo": [sys.executable],
        "gspo_multigpu": [sys.executable],
        "gspo_ddp": [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=29533"],
    }
    options = dict(policy_model=model_folders["qwen2"], train_data=sums_file, eval_data=sums_file, steps=3, batch_size=4,
                   group_size=4, max_new_tokens=8, micro_batch_size=3, num_minibatches=2, kl_coef=0.1, dtype="fp32",
                   device="cuda", learning_rate=2e-4, save_every=3)  # fmt: skip
    try:
        lines, weights = {}, {}
        for name, launcher in launchers.items():
            text = (ROOT / "gspo" / f"{name}.py").read_text().replace(REWARD_LINE, REWARD)
            text = text.replace("_GPU_ID = 2 ", "_GPU_ID = 1 ")
            (copies / f"{name}.py").write_text(text)
            arguments = [f"--{key}={value}" for key, value in options.items()]
            command = [*launcher, str(copies / f"{name}.py"), *arguments, f"--out_dir={tmp_path / name}"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
            lines[name] = [line for line in read_lines(tmp_path / name / "metrics.jsonl") if "reward" in line]
            weights[name] = load_file(Path(tmp_path) / name / "checkpoint-000003" / "model.safetensors")
    finally:
        for file in copies.iterdir():
            file.unlink()
        copies.rmdir()
    for name in ("gspo_multigpu", "gspo_ddp"):
        assert [line["reward"] for line in lines[name]] == [line["reward"] for line in lines["gspo"]], json.dumps(lines)
        assert len(lines[name][0]["memory_gib"]) == 2 and min(lines[name][0]["memory_gib"]) > 0
        for key, value in weights["gspo"].items():
            torch.testing.assert_close(weights[name][key], value, atol=1e-3, rtol=1e-3)
