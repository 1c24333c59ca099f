"""Tests of scripts/check_gpus.py, common/planning/cards.py and common/planning/probes.py: a made-up machine, and two
real ranks.
"""

import dataclasses
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from conftest import ROOT
from test_tools import load_script

from common.base.devices import GIB
from common.planning import cards, probes

CPU = torch.device("cpu")
GPUS = """\
0, GPU-aaaa1111, 00000000:1b:00.0, 81920, 80000, 580.95.05, NVIDIA A100, 80GB
1, GPU-bbbb2222, 00000000:2C:00.0, 81920, 40960, 580.95.05, NVIDIA A100, 80GB
2, GPU-bbcc3333, 00000000:3D:00.0, 81920, 81920, 580.95.05, NVIDIA A100, 80GB
"""
APPS = "GPU-bbbb2222, 811, 39936, /usr/bin/python3\nGPU-bbbb2222, 812, [N/A], [Not Found]\n"
LISTING = """\
GPU 0: NVIDIA A100 (UUID: GPU-aaaa1111)
GPU 1: NVIDIA A100 (UUID: GPU-bbbb2222)
GPU 2: NVIDIA A100 (UUID: GPU-bbcc3333)
  MIG 1g.10gb     Device  0: (UUID: MIG-dddd4444)
  MIG 2g.20gb     Device  1: (UUID: MIG-eeee5555)
"""
MACHINE, NONE = cards.parse(GPUS, APPS, LISTING), cards.Machine()
check = load_script("check_gpus")


def seen(uuid, bus, total=80):
    """What torch says of a GPU."""
    return SimpleNamespace(uuid=uuid, name="NVIDIA A100", total_memory=total * GIB, pci_domain_id=0, pci_bus_id=bus,
                           pci_device_id=0)  # fmt: skip


ONE, TWO, THREE = ALL_SEEN = [seen("aaaa1111", 0x1B), seen("bbbb2222", 0x2C), seen("bbcc3333", 0x3D)]


@pytest.fixture
def machine(monkeypatch):
    """Makes torch see GPUs, and nvidia-smi say something."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def make(properties, said=MACHINE, visible=None):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(properties))
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: (9 * GIB, properties[i].total_memory))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(cards, "query", lambda: said)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return make


def test_answers_of_nvidia_smi_are_read(tmp_path, monkeypatch):
    first, second, _ = MACHINE.rows
    assert (first.index, first.uuid, first.bus) == ("0", "GPU-aaaa1111", "00000000:1B:00.0")
    assert (first.name, first.total, first.free) == ("NVIDIA A100, 80GB", 80 * GIB, 80000 * 2**20)
    assert MACHINE.driver == "580.95.05"
    assert MACHINE.users == {second.uuid: [("811", 39 * GIB, "/usr/bin/python3"), ("812", 0, "[Not Found]")]}
    assert MACHINE.slices == {"MIG-dddd4444": ("2", "1g.10gb"), "MIG-eeee5555": ("2", "2g.20gb")}
    unknown = cards.parse(GPUS.replace("81920, 80000", "[N/A], [N/A]"), "", "").rows[0]
    assert (unknown.total, unknown.free) == (0, 0)
    # it is run where there is one
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cards.query() == NONE == cards.parse("", "", "")
    program, shell = tmp_path / "nvidia-smi", "#!/bin/sh\n"
    answers = f"--query-gpu=*) echo '{GPUS}' ;; --query-compute*) echo '{APPS}' ;; *) echo '{LISTING}' ;;"
    program.write_text(f"{shell}case $1 in {answers} esac")
    program.chmod(0o755)
    assert cards.query() == MACHINE
    program.write_text(shell + "echo 'Failed to initialize NVML:\nDriver/library version mismatch'; exit 18")
    assert cards.query() == cards.Machine(error="Failed to initialize NVML: Driver/library version mismatch")


def test_gpus_are_matched_whatever_their_order_and_this_process_is_no_other_user(machine, monkeypatch):
    machine([THREE, TWO, seen("????", 0x1B)])
    last, middle, first = cards.visible(MACHINE)
    assert (last.number, last.physical, last.uuid, last.free) == (0, "2", "GPU-bbcc3333", 80 * GIB)
    assert (middle.physical, middle.free) == ("1", 40 * GIB)
    assert middle.users == ("pid 811 python3 39.0 GiB", "pid 812 [Not Found]")
    assert (first.physical, first.uuid, first.free) == ("0", "GPU-aaaa1111", 80000 * 2**20)  # by its PCI address
    monkeypatch.setattr(cards.os, "getpid", lambda: 811)
    assert cards.visible(MACHINE)[1].users == ("pid 812 [Not Found]",)


def test_memory_is_asked_of_cuda_only_without_nvidia_smi_and_for_a_mig_slice(machine, monkeypatch):
    machine([seen("eeee5555", 0x3D, total=20)])
    [card] = cards.visible(MACHINE)
    assert (card.physical, card.uuid) == ("2 MIG 2g.20gb", "MIG-eeee5555")
    assert (card.total, card.free) == (20 * GIB, 9 * GIB)
    machine([ONE])
    [card] = cards.visible(NONE)
    assert (card.physical, card.uuid, card.bus) == ("?", "GPU-aaaa1111", "00000000:1B:00.0")
    assert (card.total, card.free, card.users) == (80 * GIB, 9 * GIB, ())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: pytest.fail("takes memory of the GPU"))
    [card] = cards.visible(cards.parse(GPUS.replace("80000", "0"), "", ""))  # which is full
    assert (card.free, card.total) == (0, 80 * GIB)


@pytest.mark.parametrize(("visible", "shown", "wrong"), [
    (None, ["GPU-aaaa1111", "GPU-bbbb2222", "GPU-bbcc3333"], ""), ("2, 0", ["GPU-bbcc3333", "GPU-aaaa1111"], ""),
    ("GPU-bbb", ["GPU-bbbb2222"], ""), ("MIG-eeee5555", ["MIG-eeee5555"], ""), ("", [], ""), ("-1", [], ""),
    ("1,7,0", ["GPU-bbbb2222"], "'7' is no GPU"), ("GPU-bb", [], "'GPU-bb' is no GPU"),
    ("1,1", [], "'1' stands there twice"),
])  # fmt: skip
def test_what_cuda_makes_of_the_variable(visible, shown, wrong):
    found = cards.resolve(visible, MACHINE)
    assert found[0] == shown and found[1].startswith(wrong) and bool(found[1]) == bool(wrong)


@pytest.mark.parametrize(("visible", "found", "built", "said"), [
    ("", 0, "13.0", "CUDA_VISIBLE_DEVICES = '': it hides the 3 GPU(s) of this machine; unset it"),
    ("0,3", 1, "13.0", "CUDA_VISIBLE_DEVICES = '0,3': '3' is no GPU of this machine"), ("0,1", 2, "13.0", ""),
    (None, 0, None, "built without CUDA"), (None, 0, "13.0", "torch sees none of 3 GPU(s): must be one for CUDA 13.0"),
])  # fmt: skip
def test_why_gpus_are_not_seen(visible, found, built, said):
    message = cards.why_hidden(visible, MACHINE, found, built)
    assert said in message and bool(message) == bool(said)
    assert cards.why_hidden(visible, NONE, 0, built) == ""  # a machine without GPUs is no mistake


def rows(printed, head):
    """Lines below a heading, as lists of their words."""
    after = re.split(rf"^{head}.*\n", printed, flags=re.MULTILINE)[1]
    return [line.split() for line in after.split("\n\n")[0].splitlines()]


@pytest.fixture
def said(capsys):
    """What the check prints that ends with this code."""

    def run(*argv, code):
        assert check.main([*argv]) == code
        return capsys.readouterr().out

    return run


def test_a_layout_that_fits_and_one_that_does_not(machine, said):
    def places():
        return {(role, number): rest for _, role, number, *rest in rows(printed, "rank  role ")}

    machine(ALL_SEEN)
    printed = said("--no-probe", "gspo/gspo_multigpu.py", "--kl_coef", "0.1", code=0)
    process = dict(zip(("rank", "local", "of", "host"), rows(printed, "rank  local rank")[0], strict=False))
    assert process["of"] == "1" and "not set" in printed and "580.95.05" in printed
    assert places()["policy", "1"] == ["1", "NVIDIA", "A100", "40.0"]
    assert places()["reference", "2"] == ["2", "NVIDIA", "A100", "80.0"] and ("reward", "2") not in places()
    assert re.search(r"warning: host \S+, GPU 1 \(1 in nvidia-smi\): used by pid 811 python3 39.0 GiB and", printed)
    assert "GPU 2 (2 in nvidia-smi)" not in printed and "error" not in printed
    machine([THREE, ONE], visible="2,0")
    printed = said("gspo/gspo_multigpu.py", "--kl_coef", "0.1", code=1)
    assert [places()[role][0] for role in (("policy", "0"), ("policy", "1"))] == ["2", "0"]
    assert places()["reference", "2"] == ["not", "there"]
    assert "error: this layout needs 3 GPUs (ids [0, 1, 2]), 2 visible" in printed


def test_gpus_that_are_hidden_absent_or_do_not_start_are_said(machine, monkeypatch, said, capsys):
    machine([], visible="")
    assert "error: CUDA_VISIBLE_DEVICES = '': it hides the 3 GPU(s)" in said(code=1)
    # a machine without GPUs is fine until a script wants one
    machine([], said=NONE)
    assert "no GPU: training scripts run on the CPU" in said(code=0)
    for script in ("gspo/gspo.py", "gkd/sft.py"):
        assert ["0", "policy", "cpu"] in rows(said(script, code=0), "rank  role ")
    assert "needs 1 GPUs (ids [0]), 0 visible" in said("gspo/gspo.py", "--device", "cuda", code=1)
    machine(ALL_SEEN)
    # a script for torchrun that is started alone says how to ask for more
    printed = said("--no-probe", "gspo/gspo_ddp.py", code=0)
    assert "torchrun --nproc_per_node=3 scripts/check_gpus.py gspo/gspo_ddp.py" in printed
    with pytest.raises(SystemExit) as left:
        check.main(["gkd/teacher_server.py"])
    assert left.value.code == 2 and "must be a training script" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "get_device_properties", Mock(side_effect=RuntimeError("not yet initialized")))
    assert "error: 3 GPU(s): CUDA does not start, not yet initialized" in said(code=1)


def test_two_ranks_may_not_train_on_one_gpu_and_may_number_them_differently(machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: None)

    def ranks(*properties):
        """What ranks see that each have GPUs of their own, on one host."""
        processes = []
        for rank, (local_rank, gpus) in enumerate(properties):
            machine(gpus)
            for name, value in (("RANK", rank), ("LOCAL_RANK", local_rank), ("WORLD_SIZE", len(properties))):
                monkeypatch.setenv(name, str(value))
            processes.append(check.look(MACHINE))
        return processes

    same = ranks((0, [ONE, TWO]), (1, [ONE, TWO]))
    assert check.problems(same) == []
    [said] = check.problems(ranks((0, [ONE, TWO]), (1, [TWO, ONE])))
    assert said.startswith("ranks 0 and 1 on ") and "all with GPU-aaaa1111" in said
    [said] = check.problems(ranks((0, [ONE]), (1, [ONE]), (0, [TWO])))
    assert said.startswith("on rank 1: LOCAL_RANK = 1: ") and "it sees 1" in said
    elsewhere = [dataclasses.replace(p, host=f"node{p.rank}") for p in ranks((0, [ONE]), (0, [ONE]))]
    assert check.problems(elsewhere) == []
    same, other = check.report(same), check.report(ranks((0, [ONE, TWO]), (1, [TWO, ONE])))
    assert same.count("PCI bus") == 1 and "numbers them" not in same and other.count("PCI bus") == 2
    assert [row[:2] for row in rows(other.split("as rank 1")[1], "GPU ")] == [["0", "1"], ["1", "0"]]
    # memory that is gone without a known user
    machine([ONE])
    [said] = check.warnings([check.look(NONE)] * 2)  # 9 of 80 GiB are free
    assert "GPU 0 (? in nvidia-smi): used by others, 71.0 GiB" in said
    assert "nvidia-smi does not work: a reason" in check.warnings([], "a reason")


def test_what_hangs_is_ended_with_a_message(monkeypatch, capsys):
    left, ended = [], threading.Event()
    monkeypatch.setattr(probes.os, "_exit", lambda code: (left.append(code), ended.set()))
    with probes.watchdog(0.01, "all must meet; start them"):
        assert ended.wait(30)
    assert left == [1] and "error: no answer within 0.01 s: all must meet; start them" in capsys.readouterr().err
    before = set(threading.enumerate())
    with probes.watchdog(60, ""):
        [timer] = set(threading.enumerate()) - before
    timer.join(30)
    assert left == [1] and not timer.is_alive()


def test_an_all_reduce_that_is_wrong_in_one_number_or_fails_is_an_error(monkeypatch, capsys):
    def reduced(work):
        """One of two ranks; what comes from the other is up to `work`."""
        for name, value in dict(get_world_size=2, get_rank=0, new_group=None).items():
            monkeypatch.setattr(probes.dist, name, lambda value=value, **_: value)
        monkeypatch.setattr(probes.dist, "all_reduce", lambda numbers, group: work(numbers))
        return probes.all_reduce(CPU, 60)

    right, said = reduced(lambda numbers: numbers.fill_(3.0))
    assert right and re.fullmatch(r"all-reduce of 64 MiB by 2 ranks over gloo: right, [\d.]+ GB/s", said)
    right, said = reduced(lambda numbers: numbers.fill_(3.0)[-1:].fill_(1.0))
    assert not right and "the sum is wrong" in said and "NCCL_P2P_DISABLE=1" in said
    monkeypatch.setattr(probes.os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as ended:
        reduced(Mock(side_effect=RuntimeError("unhandled cuda error")))
    assert ended.value.code == 1 and "over gloo failed: unhandled cuda error" in capsys.readouterr().err


def test_a_wrong_sum_of_any_rank_fails_the_check_and_pairs_of_gpus_are_printed(machine, monkeypatch):
    machine([], said=NONE)
    monkeypatch.setattr(probes, "all_reduce", lambda device, seconds: (True, "right"))
    for other, found in (((False, "wrong"), ([], ["wrong"])), ((True, "right"), (["right"], []))):
        monkeypatch.setattr(check.distributed, "gather_objects", lambda own, other=other: [own, other])
        assert check.probe([check.look(NONE)] * 2, True, False, 60) == found
    machine(ALL_SEEN)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: {a, b} != {0, 2})
    monkeypatch.setattr(probes, "bandwidth", lambda gpus: [["1", "2", *("3" for _ in gpus)] for _ in gpus])
    (reach, speed), wrong = check.probe([check.look(MACHINE)], False, True, 60)
    assert rows(reach, "GPU ") == [["0", "yes", "no"], ["1", "yes", "yes"], ["2", "no", "yes"]] and not wrong
    assert rows(speed, "GPU ") == [[str(i), "1", "2", "3", "3", "3"] for i in range(3)]


def starter(folder, script):
    """A file that checks a script when it is run with the flags of that."""
    path = folder / "start_gspo.py"
    given = ["check_gpus.py", "--bandwidth", "--timeout", "90", f"{ROOT}/gspo/{script}.py"]
    run = f"runpy.run_path('{ROOT}/scripts/check_gpus.py', run_name='__main__')"
    path.write_text(f"import runpy, sys\nsys.argv = {given} + sys.argv[1:]\n{run}\n")
    return path


@pytest.mark.tools
@pytest.mark.parametrize(("script", "code"), [("gspo_ddp", 0), ("gspo_multigpu", 1)])
def test_two_ranks_report_once_and_agree(launcher, tmp_path, script, code):
    run = launcher.run(starter(tmp_path, script), tmp_path, ranks=2)
    assert run.codes == [code, code], run.output
    assert "rank" not in run.output_files[1].read_text()  # rank 0 says it all
    found = rows(run.output, "rank  local rank")
    assert [row[:3] for row in found] == [["0", "0", "2"], ["1", "1", "2"]]
    assert [row[4] for row in found] == [str(process.pid) for process in run.processes]
    if code == 0:
        places = [row[:3] for row in rows(run.output, "rank  role ")]
        assert places == [[rank, role, "cpu"] for rank in "01" for role in ("policy", "rollout", "reference")]
        assert "all-reduce of 64 MiB by 2 ranks over gloo: right" in run.output
    else:
        assert "error: on rank 0 and 1: POLICY_GPU_IDS = (0, 1), 2 processes: every process would" in run.output


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")
def test_copies_have_a_speed():
    gpus = cards.visible(cards.query())
    for i, row in enumerate(probes.bandwidth(gpus)):
        assert all(float(cell) > 0.1 for place, cell in enumerate(row) if place != i + 2) and row[i + 2] == ""


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_two_ranks_on_gpus(launcher, tmp_path):
    torchrun = [Path(sys.executable).with_name("torchrun"), "--standalone", "--nproc_per_node=2"]
    run = launcher.command(torchrun, starter(tmp_path, "gspo_ddp"), tmp_path, device="cuda").wait(200).succeeded()
    assert "all-reduce of 64 MiB by 2 ranks over nccl: right" in run.output and "copies in GiB/s" in run.output
    assert [row[:3] for row in rows(run.output, "rank  role ")][::3] == [["0", "policy", "0"], ["1", "policy", "1"]]
