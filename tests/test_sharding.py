"""Tests of common/sharding.py and of runs with --fsdp: the same training, in parts; and of runs on several machines."""

import dataclasses
import json
import os
import shutil
import socket
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, build_model, read_lines
from safetensors import safe_open
from test_grpo import drop
from test_parity import assert_close
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM

from common import distributed, layouts, logprobs, optim, plan, rollout, sharding

CPU = torch.device("cpu")
FSDP = dict(fsdp=True, micro_batch_tokens=60)


def batch(rows: int, lengths: list[int]) -> rollout.RolloutBatch:
    tokens = torch.full((rows, max(lengths)), -1)
    for i, n in enumerate(lengths):
        tokens[i, :n] = torch.arange(n) + 5 + i
    return rollout.assemble([[4, 5, 6]] * rows, 1, tokens, torch.zeros(tokens.shape), 0, [3])


class Echo(logprobs.LogProbs):
    """Takes a number more, as a loss takes what a teacher said."""

    def forward(self, said, *tokens):
        self.seen = said.dtype
        return super().forward(*tokens)


def at_work(rank: int, ranks: int, port: int, folder: str) -> None:
    """What every rank does in `test_parts`: three steps, sharded and beside it whole."""
    place = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks, MASTER_PORT=port)
    os.environ.update({name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"})
    torch.set_num_threads(1)
    distributed.start(CPU, 1)
    report = {}
    plain, model = build_model("qwen2").train(), build_model("qwen2").train()
    expected, policy = logprobs.LogProbs(plain, 0.7), logprobs.LogProbs(model, 0.7)
    whole = sharding.shard(policy, CPU)
    own = sum(p.to_local().numel() for p in model.parameters())
    report["share"] = own / sum(p.numel() for p in plain.parameters())
    report["sharded"] = [isinstance(policy, FSDPModule), isinstance(expected, FSDPModule)]
    optimizer, other = (
        optim.AdamW(m, 1e-2, weight_decay=0.1, offload=o) for m, o in ((model, "always"), (plain, "none"))
    )
    both = batch(5, [6, 2, 5, 4, 3])
    (mine,) = both.select(torch.arange(rank, 5, ranks)).minibatches(1, 9, True)
    report["before"] = len(mine)
    sharding.even([mine])
    report["after"], report["trained"] = len(mine), [micro.num_trained for micro in mine]
    report["moved"] = []
    for _ in range(3):
        before = [p.clone() for p in whole.parameters()]
        for micro in mine:
            (policy(*micro.tokens)[0] ** 2 * micro.completion_mask).sum().backward()
        (expected(*both.tokens)[0] ** 2).sum().backward()
        norms = optimizer.step(1.0).item(), other.step(1.0).item()
        assert abs(norms[0] - norms[1]) < 1e-5 * norms[1], norms
        sharding.gather(model, whole)
        report["moved"].append(max((p - q).abs().max().item() for p, q in zip(before, whole.parameters(), strict=True)))
    pairs = zip(whole.parameters(), plain.parameters(), strict=True)
    report["difference"] = max((p - q).abs().max().item() for p, q in pairs)
    with torch.no_grad():  # the weights of now, not those gathered before the last step
        apart = policy(*both.tokens)[0] - expected(*both.tokens)[0]
    report["forward"] = apart.abs().max().item()
    state, theirs = optimizer.state_dict(), other.state_dict()
    report["keys"] = (state.keys() == theirs.keys()) if rank == 0 else len(state)
    optimizer.load_state_dict(theirs)
    state = optimizer.state_dict()
    report["kept"] = sum(optimizer._whole(i, "exp_avg").numel() for i in range(len(optimizer.params)))
    echo = Echo(build_model("qwen2").bfloat16(), 0.7)
    sharding.shard(echo, CPU)
    report["logps"] = str(echo(torch.ones(2), *both.tokens)[0].dtype)
    report["seen"] = str(echo.seen)
    report["loaded"] = rank > 0 or all(torch.equal(state[key], theirs[key]) for key in theirs)
    Path(folder, f"{rank}.json").write_text(json.dumps(report))
    distributed.shutdown()


@pytest.mark.parametrize("ranks", [2, 3])
def test_parts_train_as_the_whole_does(launcher, tmp_path, ranks):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher.run_function(at_work, ranks, (port, str(tmp_path)))
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    assert sum(report["share"] for report in reports) == pytest.approx(1.0)
    assert all(report["share"] < 1 / ranks + 0.1 for report in reports)
    assert len({report["after"] for report in reports}) == 1 < len({report["before"] for report in reports})
    assert sum(sum(report["trained"]) for report in reports) == 5
    for rank, report in enumerate(reports):
        assert report["sharded"] == [True, False] and report["loaded"]
        assert report["keys"] is True if rank == 0 else report["keys"] == 0
        assert (report["kept"] > 0) == (rank == 0)  # on other ranks the whole state would only take memory
        # what the loss is given is not rounded to the dtype of the layers
        assert report["seen"] == report["logps"] == "torch.float32"
        assert min(report["moved"]) > 1e-4
        # Adam makes much of the rounding of small gradients: a step is up to 1e-2
        assert report["difference"] < 1e-4 and report["forward"] < 1e-3


@pytest.mark.parametrize(
    "one, script, options",
    [
        ("gspo", "gspo_ddp", {}),
        ("grpo", "grpo_ddp", dict(kl_coef=0.0, optimizer_offload="always", gradient_checkpointing=True)),
        ("gkd", "gkd_ddp", {}),
        ("similarity_grpo", "similarity_grpo", dict(similarity_model="ngrams")),
    ],
)
def test_a_sharded_run_is_the_run_of_one_process(launcher, one, script, options):
    expected = launcher.trained(one, steps=4, **options)
    run = launcher.trained(script, 2, steps=4, **FSDP, **options)
    measured = ("similarity_share",)  # of the time
    assert_close(drop(run, measured), drop(expected, measured), metrics=2e-4, weights=2e-6)
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


def test_sharded_runs_resume_with_any_number_of_ranks(launcher, tmp_path):
    once = dict(eval_every=0, save_every=1)
    straight = launcher.trained("gspo", steps=4, **once)
    for script, ranks, steps, options in (
        ("gspo_ddp", 2, 1, FSDP), ("gspo", 1, 2, {}), ("gspo_ddp", 4, 3, FSDP), ("gspo_ddp", 2, 4, {}),
    ):  # fmt: skip
        run = launcher.run(launcher.copy(script), tmp_path, ranks, steps=steps, **once, **options).succeeded()
    assert_close(run, straight, metrics=2e-4, weights=2e-6)


def test_a_resumed_run_samples_from_the_masters(launcher, tmp_path):
    """In another dtype than it was saved in, weights are those of the optimizer's file, not the rounded ones."""
    script, options = launcher.copy("gspo_ddp"), dict(eval_every=0, save_every=1)
    launcher.run(script, tmp_path / "one", 2, steps=1, dtype="bf16", **options).succeeded()
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    whole = launcher.run(script, tmp_path / "one", 2, steps=2, dtype="fp32", **options).succeeded()
    parts = launcher.run(script, tmp_path / "other", 2, steps=2, dtype="fp32", **options, **FSDP).succeeded()
    assert parts.steps[1]["rollout_mismatch"] < 1e-5 and whole.steps[1]["rollout_mismatch"] < 1e-5
    assert_close(parts, whole, metrics=2e-4, weights=2e-6)


# ---- what turns it on ----


@dataclasses.dataclass(frozen=True)
class Options:
    fsdp: bool = True
    dtype: str = "auto"
    lora_rank: int = 0
    reference_refresh: int = 0
    param_offload: bool = False


@pytest.mark.parametrize(
    "field, value", [("dtype", "fp16"), ("lora_rank", 8), ("reference_refresh", 2), ("param_offload", True)]
)
def test_what_cannot_be_sharded_is_refused(field, value):
    with pytest.raises(ValueError, match=f"fsdp = True, {field} = "):
        sharding.wanted(Options(**{field: value}))


def test_one_process_is_not_sharded(monkeypatch):
    assert not sharding.wanted(Options())
    monkeypatch.setattr(distributed, "num_ranks", lambda: 2)
    assert sharding.wanted(Options()) and not sharding.wanted(Options(fsdp=False))
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert sharding.wanted(Options(fsdp=False))
    with pytest.raises(ValueError, match="ACCELERATE_USE_FSDP = true, dtype"):
        sharding.wanted(Options(fsdp=False, dtype="fp16"))


def test_a_launcher_that_was_told_to_shard_is_planned_for(monkeypatch, model_folders):
    argv = ["--policy_model", str(model_folders["qwen2"])]
    module, cfg = layouts.load(ROOT / "gspo" / "gspo_ddp.py", argv)
    roles = layouts.all_ranks(module, cfg, 2)

    def weights(cfg):
        return plan.of(cfg, roles, ranks=2).gpus[0].always["copy to sample"]

    assert weights(cfg) == 0 < weights(dataclasses.replace(cfg, fsdp=True))
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert weights(cfg) == weights(dataclasses.replace(cfg, fsdp=True))


def test_deepspeed_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ValueError, match="--fsdp true"):
        distributed.start(CPU, 1)


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


# ---- several machines ----


def test_two_machines_are_two_ranks_of_one(launcher, tmp_path):
    """Two launchers, each with one process, as on two machines: every process has local rank 0."""
    expected = launcher.trained("gspo_ddp", 2, steps=6)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torchrun, script = Path(sys.executable).with_name("torchrun"), launcher.copy("gspo_ddp")
    runs = []
    for node in range(2):
        where = [f"--nnodes=2 --node_rank={node} --nproc_per_node=1 --master_addr=127.0.0.1 --master_port={port}"]
        command = [torchrun, *where[0].split()]
        runs.append(launcher.command(command, script, tmp_path / "run", steps=6))
    for run in runs:
        run.wait().succeeded()
    assert_close(runs[0], expected, metrics=1e-4, weights=1e-6)
    assert read_lines(tmp_path / "run" / "metrics.jsonl")[-1]["step"] == 6
