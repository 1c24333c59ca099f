"""Tests of common/base/devices.py: GPU ids against the GPUs there are, without needing any."""

import re

import pytest
import torch

from common.base import devices
from common.base.devices import Layout, layout

CPU = torch.device("cpu")


def gpu(number) -> torch.device:
    return torch.device("cuda", number)


def gpus(*numbers) -> tuple[torch.device, ...]:
    return tuple(map(gpu, numbers))


@pytest.fixture
def visible(monkeypatch):
    """Sets the number of GPUs that the process sees, and which of several processes it is."""
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def see(number, rank=None, ranks=1):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
        if rank is not None:
            monkeypatch.setenv("LOCAL_RANK", str(rank))
            monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
            monkeypatch.setenv("WORLD_SIZE", str(ranks))

    return see


def rl(policy=(0,), rollout=None, reference=None, reward=None, device="auto"):
    return layout(device, policy=policy, rollout=rollout, reference=reference, reward=reward)


def gkd(student=(0,), rollout=None, teacher=None, device="auto"):
    return layout(device, student=student, rollout=rollout, teacher=teacher)


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_ids_become_devices(visible, device):
    visible(8)
    found = rl((1, 0), None, 2, 3, device)
    assert found == Layout(gpus(1, 0), sampling=(0, 1), reference=gpu(2), reward=gpu(3))
    assert found.all == [*gpus(1, 0, 2, 3)] and found.home == gpu(1)
    assert rl((0, 1), None, 1, 1, device).all == [*gpus(0, 1)]  # roles may share a GPU
    found = gkd((1, 0), (2,), (3, 4, 0), device)
    assert found == Layout(gpus(1, 0), gpus(2), (2,), teacher=gpus(3, 4, 0)) and set(found.all) == {
        *gpus(0, 1, 2, 3, 4)
    }
    found = gkd((0,), None, None, device)  # the student samples itself, beside its teacher
    assert found == Layout(gpus(0), teacher=gpus(0)) and found.all == [gpu(0)]
    assert gkd((0,), (1,), ()) == Layout(gpus(0), gpus(1), (1,))  # a teacher elsewhere
    similar = layout(device, policy=(0,), embedder=(1, 2))
    assert similar.embedder == gpus(1, 2) and similar.of("embedder") == gpus(1, 2) and similar.of("policy") == gpus(0)


@pytest.mark.parametrize(("device", "found"), [("auto", 0), ("cpu", 0), ("cpu", 4)])
def test_everything_is_on_the_cpu_on_request_and_on_auto_without_a_gpu_which_is_said(visible, capsys, device, found):
    visible(found)
    one = rl((0, 1), (0, 1, 2), 2, 3, device)
    assert one == Layout((CPU,), reference=CPU, reward=CPU) and one.all == [CPU]
    # GPUs that only sample stand for a copy that does
    for rollout, copies, sampling in ((None, (), (0,)), ((2, 3), (CPU,), (1,))):
        one = gkd((0, 1), rollout, (4,), device)
        assert one == Layout((CPU,), copies, sampling, teacher=(CPU,)) and one.all == [CPU]
    assert capsys.readouterr().out.count("no GPU visible") == (3 if device == "auto" else 0)


NAMES = {
    rl: ("POLICY_GPU_IDS", "ROLLOUT_GPU_IDS", "REFERENCE_GPU_ID", "REWARD_GPU_ID"),
    gkd: ("STUDENT_GPU_IDS", "ROLLOUT_GPU_IDS", "TEACHER_GPU_IDS"),
}


@pytest.mark.parametrize(("function", "ids", "found"), [
    (rl, ((0, 1), None, 2, 2), 0), (rl, ((0, 1), (0, 1, 2), 2, 2), 2), (rl, ((0, 1, 2, 3), None, 0, 0), 3),
    (rl, ((0,), None, 1, 0), 1), (rl, ((0,), None, None, 5), 3), (rl, ((0,), (3,), 0, 0), 2),
    (gkd, ((0,), None, (1,)), 0), (gkd, ((0, 1), (2,), (3,)), 2), (gkd, ((0,), (4,), (1,)), 3),
])  # fmt: skip
@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_too_few_gpus_says_how_many_and_what_to_change(visible, function, ids, found, device):
    visible(found)
    needed = max(i for role in ids for i in (role if isinstance(role, tuple) else (role or 0,))) + 1
    with pytest.raises(ValueError, match=rf"needs {needed} GPUs .*{found} visible(.|\n)*--device cpu") as error:
        function(*ids, "cuda" if found == 0 else device)
    proposed = dict(re.findall(r"^ *(\w+_GPU_IDS?) = (.*)$", str(error.value), re.MULTILINE))
    assert tuple(proposed) == NAMES[function]
    visible(max(1, found))
    fitting = function(*map(eval, proposed.values()), device)  # they are lines of Python to paste
    assert all(device.index < max(1, found) for device in fitting.all)
    with pytest.raises(ValueError, match="device = 'cuda:1': must be auto, cuda or cpu"):
        function(*map(eval, proposed.values()), "cuda:1")


@pytest.mark.parametrize(("function", "ids"), [
    *((rl, ids) for ids in [
        ((0, 1, 0), None, 1, 1), ((-1,), None, 0, 0), ((0,), None, 0, -2), ((), None, 0, 0), (("0",), None, 0, 0),
        ((0,), None, 1.0, 0), ((0), None, 0, 0), ((0,), None, (1,), 0), ((True,), None, 0, 0), ((0,), (1, 1), 0, 0),
        ((0,), (-1,), 0, 0), ((0,), (), 0, 0)]),
    *((gkd, ids) for ids in [
        ((), None, (0,)), ((0,), (1, 1), (0,)), ((0,), None, (1, 1)), ((0,), (-1,), (0,)), ((0,), (), (0,)),
        ((0,), None, (1.5,)), ((0,), 1, (1,)), ((0,), None, 1)]),
])  # fmt: skip
@pytest.mark.parametrize("found", [0, 3])
def test_ids_that_cannot_be_are_refused_on_every_machine(visible, function, ids, found):
    visible(found)
    given = ", ".join(f"{name} = {value!r}" for name, value in zip(NAMES[function], ids, strict=True))
    for device in ("auto", "cpu"):
        with pytest.raises(ValueError, match=re.escape(given) + ".*must be GPU numbers"):
            function(*ids, device)


def test_a_gpu_does_not_both_train_a_student_and_hold_a_copy_of_it(visible):
    visible(4)
    with pytest.raises(ValueError, match=r"STUDENT_GPU_IDS = \(0, 1\), ROLLOUT_GPU_IDS = \(1,\).*cannot both train"):
        gkd((0, 1), (1,), (2,))
    assert rl((0, 1), (1, 2)).sampling == (1, 2)  # a policy that is trained may sample beside copies


def test_gpus_that_sample(visible):
    visible(5)
    for rollout, sampling, copies in ((None, (0, 1), ()), ((4, 1), (1, 4), (4,)), ((0, 1, 2), (0, 1, 2), (2,))):
        found = rl((0, 1), rollout, 2, 3)
        assert found.rollout == gpus(*sampling) and found.copies == gpus(*copies)
        assert set(found.all) == {*gpus(0, 1, 2, 3, *sampling)}
    visible(3)
    with pytest.raises(ValueError, match=r"needs 4 GPUs .*3 visible(.|\n)*\n    ROLLOUT_GPU_IDS = None\n"):
        rl((0, 1), (3,), 2, 2)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_has_the_gpu_of_its_local_rank(visible, rank):
    visible(4, rank, ranks=3)
    own = gpu(rank)
    assert rl(None) == Layout((own,), reference=own, reward=own)
    assert rl(None, None, 2, None, "cuda") == Layout((own,), reference=gpu(2), reward=own)
    assert gkd(None) == Layout((own,), teacher=(own,))
    assert gkd(None, None, (3,)) == Layout((own,), teacher=gpus(3))
    assert rl(None, device="cpu") == Layout((CPU,), reference=CPU, reward=CPU)
    visible(0)
    assert rl(None) == Layout((CPU,), reference=CPU, reward=CPU)
    for rollout, policy, said in (((1,), None, "each samples on its own"), (None, (0, 1), "3 processes.*same GPUs")):
        with pytest.raises(ValueError, match=said):
            rl(policy, rollout)


@pytest.mark.parametrize("rank", [0, 3])
def test_more_processes_than_gpus_is_an_error_on_every_rank(visible, rank):
    visible(2)
    assert rl(None, None, 1) == Layout(
        gpus(0), reference=gpu(1), reward=gpu(0)
    )  # without torchrun there is one process
    visible(1, rank, ranks=4)
    with pytest.raises(ValueError, match=r"4 process.*need 4 GPUs, 1 visible.*--nproc_per_node"):
        rl(None)
    visible(2, 0, ranks=2)
    with pytest.raises(ValueError, match=r"need 3 GPUs, 2 visible.*set REFERENCE_GPU_ID to None"):
        rl(None, None, 2)
    with pytest.raises(ValueError, match=r"need 4 GPUs, 2 visible.*set TEACHER_GPU_IDS to None"):
        gkd(None, None, (3,))


def test_waiting_and_peak_memory_are_per_gpu_and_leave_the_cpu_out(monkeypatch):
    peaks, reset, waited = {gpu(0): 3 * 2**30, gpu(1): 2**29}, [], []
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", peaks.__getitem__)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    places = [gpu(0), CPU, gpu(1)]
    assert devices.peak_memory_gib(places) == [3.0, 0.5] and reset == [*gpus(0, 1)]  # it starts anew
    devices.synchronize(places)
    assert waited == [*gpus(0, 1)]
    assert devices.peak_memory_gib([CPU]) == []
