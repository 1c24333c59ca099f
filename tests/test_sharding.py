"""Tests of common/training/sharding.py and of runs with --fsdp: the same training, in parts; and of runs on several
machines.
"""

import dataclasses
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from bounds import rounding
from comparing import assert_close
from conftest import ROOT, build_model, read_lines
from safetensors import safe_open
from test_teacher_server import free_port
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM

from common.base import distributed
from common.generation import batches
from common.model import logprobs
from common.planning import layouts, plan
from common.training import optim, sharding

CPU = torch.device("cpu")
FSDP = dict(fsdp=True, micro_batch_tokens=60)
DECAY = dict(weight_decay=0.1)
FORWARD_TERMS = 2 * (6 * 32 + 64) + 32  # sums in two layers and the head of the model


def batch(rows: int, lengths: list[int]) -> batches.RolloutBatch:
    tokens = torch.full((rows, max(lengths)), -1)
    for i, n in enumerate(lengths):
        tokens[i, :n] = torch.arange(n) + 5 + i
    return batches.assemble([[4, 5, 6]] * rows, 1, tokens, torch.zeros(tokens.shape), 0, [3])


class Echo(logprobs.LogProbs):
    """Takes a number more, as a loss takes what a teacher said."""

    def forward(self, said, *tokens):
        self.seen = said.dtype
        return super().forward(*tokens)


def at_work(rank: int, ranks: int, port: int) -> None:
    """What every rank does in the test below: three steps, sharded and beside it whole."""
    place = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks, MASTER_PORT=port)
    os.environ.update({name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"})
    torch.set_num_threads(1)
    distributed.start(CPU, 1)
    plain, model = build_model("qwen2").train(), build_model("qwen2").train()
    expected, policy = logprobs.LogProbs(plain, 0.7), logprobs.LogProbs(model, 0.7)
    whole = sharding.shard(policy, CPU)
    assert isinstance(policy, FSDPModule) and not isinstance(expected, FSDPModule)
    own, total = sum(p.to_local().numel() for p in model.parameters()), sum(p.numel() for p in plain.parameters())
    assert own < (1 / ranks + 0.1) * total and sum(distributed.gather_objects(own)) == total

    both = batch(5, [6, 2, 5, 4, 3])
    (mine,) = both.select(torch.arange(rank, 5, ranks)).minibatches(1, 9, True)
    assert len(set(distributed.gather_objects(len(mine)))) > 1
    sharding.pad_micro_batches([mine])
    assert len(set(distributed.gather_objects(len(mine)))) == 1
    assert sum(distributed.gather_objects(sum(micro.num_trained for micro in mine))) == 5

    optimizer, other = optim.AdamW(model, 1e-2, offload="always", **DECAY), optim.AdamW(plain, 1e-2, **DECAY)
    for each in (optimizer, other):
        each._rule["eps"] = 1e-2  # with 1e-8, Adam makes much of the rounding of small gradients
    for _ in range(3):
        before = [p.clone() for p in whole.parameters()]
        for micro in mine:
            (policy(*micro.tokens)[0] ** 2 * micro.completion_mask).sum().backward()
        (expected(*both.tokens)[0] ** 2).sum().backward()
        with torch.no_grad():
            stale = policy(*both.tokens)[0]
        norm, whole_norm = optimizer.step(1.0).item(), other.step(1.0).item()
        assert norm == pytest.approx(whole_norm, rel=rounding(2 * FORWARD_TERMS + total))  # a sum over all gradients
        sharding.gather(model, whole)
        assert largest_difference(before, whole.parameters()) > 1e-3
    # learning rate and eps of Adam are equal, so weights are as far apart as gradients of norm 1 in three steps
    assert largest_difference(whole.parameters(), plain.parameters()) < 3 * rounding(2 * FORWARD_TERMS)
    with torch.no_grad():  # the weights of now, not those gathered before the last step
        logps, theirs = policy(*both.tokens)[0], expected(*both.tokens)[0]
    assert (logps - theirs).abs().max() < 0.01 * (logps - stale).abs().max()

    state, theirs = optimizer.state_dict(), other.state_dict()
    assert state.keys() == (theirs.keys() if rank == 0 else set())
    optimizer.load_state_dict(theirs)
    state = optimizer.state_dict()
    assert rank > 0 or all(torch.equal(state[key], theirs[key]) for key in theirs)
    held = sum(optimizer._full(i, "exp_avg").numel() for i in range(len(optimizer.params)))
    assert (held > 0) == (rank == 0)  # on other ranks the whole state would only take memory
    # what the loss is given is not rounded to the dtype of the layers
    echo = Echo(build_model("qwen2").bfloat16(), 0.7)
    sharding.shard(echo, CPU)
    assert echo(torch.ones(2), *both.tokens)[0].dtype == echo.seen == torch.float32
    distributed.shutdown()


def largest_difference(ones, others) -> float:
    return max((p - q).abs().max().item() for p, q in zip(ones, others, strict=True))


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.parity)])
def test_parts_train_as_the_whole_does(launcher, ranks):
    launcher.run_function(at_work, ranks, (free_port(),))


@pytest.mark.parity
@pytest.mark.parametrize(("one", "script", "options"), [
    ("gspo", "gspo_ddp", {}), ("gkd", "gkd_ddp", {}),
    ("grpo", "grpo_ddp", dict(kl_coef=0.0, optimizer_offload="always", gradient_checkpointing=True)),
    ("similarity_grpo", "similarity_grpo", dict(similarity_model="ngrams")),
])  # fmt: skip
def test_a_sharded_run_is_the_run_of_one_process(launcher, one, script, options):
    expected = launcher.trained(one, steps=4, **options)
    run = launcher.trained(script, 2, steps=4, **FSDP, **options)
    assert_close(run, expected)
    folder = run.out_dir / run.checkpoints[-1]
    model = AutoModelForCausalLM.from_pretrained(folder)  # an ordinary folder
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    with (
        safe_open(folder / "optimizer.safetensors", "pt") as ours,
        safe_open(expected.out_dir / expected.checkpoints[-1] / "optimizer.safetensors", "pt") as theirs,
    ):
        assert set(ours.keys()) == set(theirs.keys())
        masters = {name: ours.get_tensor(f"master/{name}") for name, _ in model.named_parameters()}
    assert all(torch.equal(p, masters[name]) for name, p in model.named_parameters())


@pytest.mark.parity
def test_sharded_runs_resume_with_any_number_of_ranks(launcher, tmp_path):
    once = dict(eval_every=0, save_every=1)
    straight = launcher.trained("gspo", steps=4, **once)
    for script, ranks, steps, options in (
        ("gspo_ddp", 2, 1, FSDP), ("gspo", 1, 2, {}), ("gspo_ddp", 4, 3, FSDP), ("gspo_ddp", 2, 4, {}),
    ):  # fmt: skip
        run = launcher.run(script, tmp_path, ranks, steps=steps, **once, **options).succeeded()
    assert_close(run, straight)


@pytest.mark.parity
def test_a_resumed_run_samples_from_the_masters(launcher, tmp_path):
    """In another dtype than it was saved in, weights are those of the optimizer's file, not the rounded ones."""
    script, options = "gspo_ddp", dict(eval_every=0, save_every=1)
    launcher.run(script, tmp_path / "one", 2, steps=1, dtype="bf16", **options).succeeded()
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    whole = launcher.run(script, tmp_path / "one", 2, steps=2, dtype="fp32", **options).succeeded()
    parts = launcher.run(script, tmp_path / "other", 2, steps=2, dtype="fp32", **options, **FSDP).succeeded()
    assert parts.steps[1]["rollout_mismatch"] < 1e-5 and whole.steps[1]["rollout_mismatch"] < 1e-5
    assert_close(parts, whole)


def options(**fields) -> SimpleNamespace:
    plain = dict(fsdp=True, dtype="auto", lora_rank=0, reference_refresh=0, param_offload=False)
    return SimpleNamespace(**plain | fields)


@pytest.mark.parametrize(("field", "value"), [("dtype", "fp16"), ("lora_rank", 8), ("reference_refresh", 2),
                                              ("param_offload", True)])  # fmt: skip
def test_what_cannot_be_sharded_is_refused(field, value, monkeypatch):
    with pytest.raises(ValueError, match=f"fsdp = True, {field} = "):
        sharding.enabled(options(**{field: value}))
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match=f"ACCELERATE_USE_FSDP = true, {field} = "):
        sharding.enabled(options(**{field: value, "fsdp": False}))


def test_one_process_is_not_sharded(monkeypatch):
    assert not sharding.enabled(options())
    monkeypatch.setattr(distributed, "num_ranks", lambda: 2)
    assert sharding.enabled(options()) and not sharding.enabled(options(fsdp=False))
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert sharding.enabled(options(fsdp=False))
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ValueError, match="--fsdp true"):
        distributed.start(CPU, 1)


def test_a_launcher_that_was_told_to_shard_is_planned_for(monkeypatch, model_folders):
    def weights(cfg):
        return plan.of(cfg, roles, ranks=2).gpus[0].always["copy to sample"]

    module, cfg = layouts.load(ROOT / "gspo" / "gspo_ddp.py", ["--policy_model", str(model_folders["qwen2"])])
    roles = layouts.all_ranks(module, cfg, 2)
    sharded = weights(dataclasses.replace(cfg, fsdp=True))
    assert weights(cfg) == 0 < sharded
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert weights(cfg) == sharded


@pytest.mark.tools
@pytest.mark.parametrize("path", sorted((ROOT / "scripts" / "accelerate").glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_reads_its_configurations(path):
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    args = launch_command_parser().parse_args(["--config_file", str(path), "gspo/gspo_ddp.py"])
    env = prepare_multi_gpu_env(_validate_launch_command(args)[0])
    assert (env.get("ACCELERATE_USE_FSDP") == "true") == path.stem.startswith("fsdp")
    assert env["ACCELERATE_MIXED_PRECISION"] == "no"
    expected = 16 if path.stem == "two_machines" else int(path.stem.split("_")[1].removesuffix("gpus"))
    assert args.num_processes == expected and args.num_machines == (2 if path.stem == "two_machines" else 1)


@pytest.mark.parity
def test_two_machines_are_two_ranks_of_one(launcher, tmp_path):
    """Two launchers, each with one process, as on two machines: every process has local rank 0."""
    expected = launcher.trained("gspo_ddp", 2, steps=6)
    script, runs = launcher.copy("gspo_ddp"), []
    where = ["--nnodes=2", "--nproc_per_node=1", "--master_addr=127.0.0.1", f"--master_port={free_port()}"]
    for node in range(2):
        command = [Path(sys.executable).with_name("torchrun"), f"--node_rank={node}", *where]
        runs.append(launcher.command(command, script, tmp_path / "run", steps=6))
    for run in runs:
        run.wait().succeeded()
    assert_close(runs[0], expected)
    assert read_lines(tmp_path / "run" / "metrics.jsonl")[-1]["step"] == 6
