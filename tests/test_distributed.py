"""Tests of common/base/distributed.py: alone, and in two processes that talk through gloo on the CPU."""

import json
import os
import re
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from bounds import assert_rounded
from conftest import Run, build_model, fork, reward

from common.base import distributed
from common.base.distributed import OutageError, any_rank, gather_objects, num_ranks, rank, share_errors, sum_over_ranks
from common.generation import rollout
from common.maths import losses
from common.model import logprobs
from common.run import interrupts
from common.training import optim

TIME_LIMIT = 120  # seconds, for both processes together; a hang would take the 30 minutes of the process group


def batch_of_eight():
    """Ids, mask and advantages: prompts of 5 tokens, completions of 7 or 4; rows 5 and 7 have nothing to train on."""
    ids, mask = torch.randint(4, 50, (8, 12), generator=torch.Generator().manual_seed(0)), torch.ones(8, 12).bool()
    mask[4:, 9:] = False
    mask[[5, 7], 5:] = False
    return ids, mask, torch.linspace(-1, 2, 8)


def loss_of_rows(policy, rows) -> torch.Tensor:
    """Their share of the loss over the batch of eight."""
    ids, mask, advantages = batch_of_eight()
    completion_mask = mask[rows, 5:]
    logps, _ = policy(ids[rows, :5], mask[rows, :5], ids[rows, 5:], completion_mask)
    ratio = losses.sequence_ratio(logps, logps.detach() - 0.01, completion_mask)
    return -torch.where(completion_mask.any(1), ratio * advantages[rows], 0.0).sum() / 8


def backward_of_rank(policy, number) -> None:
    """One of two ranks: every other row, in three forwards or in two; the last one of rank 1 holds rows 5 and 7."""
    for rows in torch.arange(number, 8, 2).split([1, 1, 2] if number == 0 else [2, 2]):
        loss_of_rows(policy, rows).backward()


def talk(number: int, folder: Path) -> None:
    """One of two processes that meet in a folder and report there, each with outputs of its own."""
    torch.set_num_threads(1)
    for stream in (1, 2):
        os.dup2(os.open(folder / f"output-{number}-{stream}", os.O_WRONLY | os.O_CREAT), stream)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=number, world_size=2,
                            timeout=timedelta(minutes=30))  # fmt: skip

    report = {"rank": distributed.rank(), "num_ranks": distributed.num_ranks()}
    report["gathered"] = gather_objects({"number": number})
    report["sum"] = sum_over_ranks(number + 0.5)
    report["any"] = [any_rank(False), any_rank(number == 1), any_rank(number == 0), any_rank(True)]
    distributed.print_main("said by the main process only", number)
    distributed.print_main("said aside by the main process only", number, file=sys.stderr)

    def attempt(name, failing):
        try:
            with share_errors(name):
                if number in failing:
                    raise failing[number]
            report[name] = "went on"
        except Exception as error:
            report[name] = f"{type(error).__name__}: {error}"

    attempt("nobody", {})
    attempt("second", {1: ZeroDivisionError("bad reward 7")})
    attempt("first", {0: KeyError("answer")})
    attempt("both", {0: OSError("disk full"), 1: ValueError("no answer")})
    outage = distributed.OutageError("teacher gone")
    attempt("outage", {1: outage})
    attempt("outages", {0: distributed.OutageError("gone here too"), 1: outage})
    attempt("outage and error", {0: outage, 1: ValueError("no answer")})
    attempt("afterwards", {})

    for checkpointing in (False, True):
        model = build_model("gpt2").train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        if checkpointing:
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        backward_of_rank(logprobs.LogProbs(model, 1.0), number)
        distributed.sum_gradients(model.parameters())
        gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
        optim.AdamW(model, 1e-2).step(1.0)
        torch.save((gradients, model.state_dict()), folder / f"trained-{number}-{checkpointing}.pt")

    (folder / f"report-{number}.json").write_text(json.dumps(report))
    with share_errors("last phase"):
        if number == 1:
            raise ArithmeticError("nothing caught this")
    print("not reached")


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """What two processes left behind: reports, exit codes, (stdout, stderr), seconds, folder."""
    folder = tmp_path_factory.mktemp("ranks")
    start = time.monotonic()
    run = Run(fork(talk, [(number, folder) for number in range(2)]), [], folder).wait(TIME_LIMIT)
    seconds = time.monotonic() - start
    outputs = [[(folder / f"output-{number}-{stream}").read_text() for stream in (1, 2)] for number in range(2)]
    reports = [folder / f"report-{number}.json" for number in range(2)]
    assert all(report.exists() for report in reports), outputs
    reports = [json.loads(report.read_text()) for report in reports]
    return SimpleNamespace(reports=reports, codes=run.codes, outputs=outputs, seconds=seconds, folder=folder)


def test_alone_there_is_one_rank_and_together_changes_nothing(capsys):
    assert (rank(), num_ranks()) == (0, 1)
    assert gather_objects("mine") == ["mine"] and sum_over_ranks(2.5) == 2.5
    assert any_rank(True) is True and any_rank(False) is False
    distributed.print_main("step", 3)
    distributed.print_main("rollout:", "fast", file=sys.stderr)
    assert capsys.readouterr() == ("step 3\n", "rollout: fast\n")
    with share_errors("score"):
        pass
    for error in (KeyError("answer"), OutageError("gone"), KeyboardInterrupt(), SystemExit()):
        with pytest.raises(type(error)) as raised, share_errors("score"):
            raise error
        assert raised.value is error


def test_an_outage_saves_and_ends_the_run_and_nothing_else_does(monkeypatch, capsys):
    calls = []
    monkeypatch.setattr(distributed, "shutdown", lambda code: calls.append(f"shut down {code}"))
    with pytest.raises(SystemExit) as stopped, interrupts.save_on_outage(lambda: calls.append("saved")):
        raise OutageError("the teacher stays away")
    assert stopped.value.code == distributed.OUTAGE_EXIT_CODE == 75
    assert calls == ["saved", "shut down 75"]
    assert capsys.readouterr().err.startswith("the teacher stays away\nsaved; the same command goes on")
    with pytest.raises(ZeroDivisionError), interrupts.save_on_outage(lambda: 1 / 0):  # one that cannot be saved
        raise OutageError("gone")
    calls.clear()
    for error in (RuntimeError, KeyboardInterrupt):
        with pytest.raises(error), interrupts.save_on_outage(lambda: calls.append("saved")):
            raise error
    with interrupts.save_on_outage(lambda: calls.append("saved")):
        calls.append("went on")
    assert calls == ["went on"]


def test_processes_meet_over_both_networks(monkeypatch):
    """GPUs over NCCL, and what hosts decide on over gloo: no GPU is waited for. They meet once more at the end."""
    calls = []
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, timeout: calls.append((backend, timeout.seconds)))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(device))
    monkeypatch.setattr(distributed, "Peers", lambda *_: None)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", dist.HashStore)
    gpu = torch.device("cuda", 1)
    distributed.start(gpu, 2)
    assert calls == []  # one process alone
    monkeypatch.setenv("WORLD_SIZE", "2")
    distributed.start(gpu, 2)
    distributed.start(torch.device("cpu"), 3)
    assert calls == [gpu, ("cpu:gloo,cuda:nccl", 120), ("gloo", 180)]
    calls.clear()
    monkeypatch.setattr(distributed, "gather_objects", lambda value: calls.append("met"))
    monkeypatch.setattr(os, "_exit", lambda code: calls.append(f"exit {code}"))
    distributed.shutdown(75)
    assert calls == []  # one process alone
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    distributed.shutdown(75)
    assert calls == ["met", "exit 75"]


def test_values_of_all_ranks_arrive_in_order_on_all_ranks_and_only_the_main_one_prints(two_processes):
    for number, report in enumerate(two_processes.reports):
        assert (report["rank"], report["num_ranks"]) == (number, 2)
        assert report["gathered"] == [{"number": 0}, {"number": 1}]
        assert report["sum"] == 2.0  # 0.5 + 1.5
        assert report["any"] == [False, True, True, True]
    (out, err), others = two_processes.outputs
    assert "said by the main process only 0\n" in out and "said aside by the main process only 0\n" in err
    assert not [output for output in others if "said " in output]


@pytest.mark.parametrize(("phase", "first", "second"), [  # what rank 0 sees, and rank 1
    ("nobody", "went on", "went on"),
    ("second", "RuntimeError: rank 1 failed in phase 'second': ZeroDivisionError: bad reward 7",
     "ZeroDivisionError: bad reward 7"),
    ("first", "KeyError: 'answer'", "RuntimeError: rank 0 failed in phase 'first': KeyError: 'answer'"),
    ("both", "OSError: disk full", "ValueError: no answer"),  # each its own
    ("outage", "OutageError: rank 1 failed in phase 'outage': OutageError: teacher gone", "OutageError: teacher gone"),
    ("outages", "OutageError: gone here too", "OutageError: teacher gone"),
    # beside an error an outage is none: who saved would wait for the rank that failed
    ("outage and error", "RuntimeError: rank 1 failed in phase 'outage and error': ValueError: no answer",
     "ValueError: no answer"),
    ("afterwards", "went on", "went on"),
])  # fmt: skip
def test_a_failure_or_an_outage_on_one_rank_stops_all_and_is_named(two_processes, phase, first, second):
    assert [report[phase] for report in two_processes.reports] == [first, second]
    # an uncaught one ends both processes; neither waits for the other until the group's timeout, 30 minutes
    assert two_processes.codes == [1, 1] and two_processes.seconds < TIME_LIMIT
    (out, err), (other_out, other_err) = two_processes.outputs
    assert "RuntimeError: rank 1 failed in phase 'last phase': ArithmeticError: nothing caught this" in err
    assert "ArithmeticError: nothing caught this" in other_err and "not reached" not in out + other_out


@pytest.mark.parametrize("checkpointing", [False, True])
def test_two_ranks_have_the_gradient_and_the_weights_of_one(two_processes, checkpointing):
    # a rank with nothing to train on in its last forward, so none may wait for it
    model = build_model("gpt2").eval()  # dropout off
    loss_of_rows(logprobs.LogProbs(model, 1.0), torch.arange(8)).backward()
    folder = two_processes.folder
    ranks = [torch.load(folder / f"trained-{number}-{checkpointing}.pt") for number in range(2)]
    (gradients, weights), (other_gradients, other_weights) = ranks
    for name, p in model.named_parameters():
        # two layers of four products of 32 to 128 terms, forwards and backwards, over 8 rows of 12 tokens
        terms = 2 * 2 * (3 * 32 + 128) + 8 * 12
        assert_rounded(gradients[name], p.grad, terms, magnitude=max(1.0, p.grad.abs().max().item()))
        # one sum, which both have
        assert torch.equal(gradients[name], other_gradients[name])
        assert torch.equal(weights[name], other_weights[name]) and not torch.equal(weights[name], p)


class OneSided:
    """On rank 1 no reward of the second step counts, and the fifth step is not scored at all."""

    __name__ = "reward"
    calls = 0

    def __call__(self, completions, answers, **columns):
        self.calls += 1
        if rank() == 1 and self.calls == 2:
            return [float("nan")] * len(completions)
        if rank() == 1 and self.calls == 5:
            raise ZeroDivisionError("the grader is down")
        return reward(completions, answers)


def cut_off_on_one_rank(module) -> None:
    """Of the third rollout, all completions of rank 1 are cut off; the weights are printed after every step."""
    generate, check = rollout.Sampler.generate, optim.AdamW.check

    def generate_and_cut(self, *arguments, step=0, **options):
        batch = generate(self, *arguments, step=step, **options)
        batch.truncated[:] = rank() == 1 and step == 3
        return batch

    def check_and_print(self):
        overflows = check(self)
        print("policy", [p.detach().double().sum().item() for p in self.params])
        return overflows

    rollout.Sampler.generate, optim.AdamW.check = generate_and_cut, check_and_print


@pytest.mark.parity
@pytest.mark.parametrize("script", ["similarity_grpo", "gkd_ddp"])  # the first has the loop of grpo_ddp
def test_a_rank_without_anything_to_train_on_takes_the_steps_of_the_others(launcher, tmp_path, script):
    options = dict(similarity_model="ngrams") if script == "similarity_grpo" else {}
    options |= dict(rewards=[OneSided()], prepare=cut_off_on_one_rank)
    run = launcher.run(script, tmp_path, 2, timeout=60, steps=6, eval_every=0, truncated="mask", **options)
    assert all(run.codes) and "rank 1 failed in phase 'score': RuntimeError: reward reward raised Zero" in run.output
    assert [line["skipped_updates"] for line in run.steps] == [0.0] * 4
    assert all(line["grad_norm"] > 0 for line in run.steps)
    assert 0.5 <= run.steps[1]["unscored"] < 1.0 and [line["truncated"] for line in run.steps] == [0.0, 0.0, 0.5, 0.0]
    said = re.findall(r"policy \[.*", run.output)  # by rank
    assert len(said) == 8 and said[:4] == said[4:] and len(set(said)) == 4
