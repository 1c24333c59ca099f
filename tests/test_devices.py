"""Tests of common/base/devices.py: GPU ids against the GPUs there are, without needing any."""

import re

import pytest
import torch

from common.base import devices
from common.base.devices import DistillationLayout, Layout, distillation_layout, layout, layout_of_rank

CPU = torch.device("cpu")


def gpu(number) -> torch.device:
    return torch.device("cuda", number)


def gpus(*numbers) -> tuple[torch.device, ...]:
    return tuple(map(gpu, numbers))


@pytest.fixture
def visible(monkeypatch):
    """Sets the number of GPUs that the process sees, and which of several processes it is."""
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def see(number, rank=None, ranks=1):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
        if rank is not None:
            monkeypatch.setenv("LOCAL_RANK", str(rank))
            monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))

    return see


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_ids_become_devices(visible, device):
    visible(8)
    found = layout((1, 0), 2, 3, device)
    assert found == Layout(gpus(1, 0), gpu(2), gpu(3)) and found.all == [*gpus(1, 0, 2, 3)]
    assert layout((0, 1), 1, 1, device).all == [*gpus(0, 1)]  # roles may share a GPU
    found = distillation_layout((1, 0), (2,), (3, 4, 0), device)
    assert found == DistillationLayout(gpus(1, 0), gpus(2), gpus(3, 4, 0)) and found.all == [*gpus(1, 0, 2, 3, 4)]
    found = distillation_layout((0,), None, (0,), device)  # the student samples itself
    assert found == DistillationLayout(gpus(0), None, gpus(0)) and found.all == [gpu(0)]
    assert distillation_layout((0,), (1,), ()) == DistillationLayout(gpus(0), gpus(1), ())  # a teacher elsewhere


@pytest.mark.parametrize(("device", "found"), [("auto", 0), ("cpu", 0), ("cpu", 4)])
def test_everything_is_on_the_cpu_on_request_and_on_auto_without_a_gpu_which_is_said(visible, capsys, device, found):
    visible(found)
    one = layout((0, 1), 2, 3, device)
    assert one == Layout((CPU,), CPU, CPU) and one.all == [CPU]
    for rollout, expected in ((None, None), ((2, 3), (CPU,))):
        one = distillation_layout((0, 1), rollout, (4,), device)
        assert one == DistillationLayout((CPU,), expected, (CPU,)) and one.all == [CPU]
    assert capsys.readouterr().out.count("no GPU visible") == (3 if device == "auto" else 0)


NAMES = {
    layout: ("POLICY_GPU_IDS", "REFERENCE_GPU_ID", "REWARD_GPU_ID"),
    distillation_layout: ("STUDENT_GPU_IDS", "ROLLOUT_GPU_IDS", "TEACHER_GPU_IDS"),
}


@pytest.mark.parametrize(("function", "ids", "found"), [
    (layout, ((0, 1), 2, 2), 0), (layout, ((0, 1), 2, 2), 2), (layout, ((0, 1, 2, 3), 0, 0), 3),
    (layout, ((0,), 1, 0), 1), (layout, ((0,), 0, 5), 3), (distillation_layout, ((0,), None, (1,)), 0),
    (distillation_layout, ((0, 1), (2,), (3,)), 2), (distillation_layout, ((0,), (4,), (1,)), 3),
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
    *((layout, ids) for ids in [
        ((0, 1, 0), 1, 1), ((-1,), 0, 0), ((0,), 0, -2), ((), 0, 0), (("0",), 0, 0), ((0,), 1.0, 0), ((0), 0, 0),
        ((0,), (1,), 0), ((True,), 0, 0)]),
    *((distillation_layout, ids) for ids in [
        ((), None, (0,)), ((0,), (1, 1), (0,)), ((0,), None, (1, 1)), ((0,), (-1,), (0,)), ((0,), (), (0,)),
        ((0, 1), (1,), (2,)), ((0,), None, (1.5,)), ((0,), 1, (1,)), ((0,), None, None)]),
])  # fmt: skip
@pytest.mark.parametrize("found", [0, 3])
def test_ids_that_cannot_be_are_refused_on_every_machine(visible, function, ids, found):
    visible(found)
    given = ", ".join(f"{name} = {value}" for name, value in zip(NAMES[function], ids, strict=True))
    for device in ("auto", "cpu"):
        with pytest.raises(ValueError, match=re.escape(given) + ".*must be GPU numbers"):
            function(*ids, device)


def test_gpus_that_sample(visible):
    visible(5)
    for rollout, sampling, replicas in (
        (None, (0, 1, 2, 3), (0, 1, 2, 3)),
        ((4, 1), (4, 1), (0, 1, 4)),
        ((), (), (0, 1)),
    ):
        found = layout((0, 1), 2, 3, rollout=rollout)
        assert found.rollout == gpus(*sampling) and found.replicas == [*gpus(*replicas)]
        assert set(found.all) == {*gpus(0, 1, 2, 3, *sampling)}
        assert layout((0, 1), 2, 2, "cpu", rollout).rollout == ((CPU,) if sampling else ())
    visible(3)
    for rollout in ((1, 1), (-1,)):
        with pytest.raises(ValueError, match=re.escape(f"ROLLOUT_GPU_IDS = {rollout}: must be GPU numbers")):
            layout((0, 1), 2, 2, rollout=rollout)
    with pytest.raises(ValueError, match=r"needs 4 GPUs .*3 visible(.|\n)*\n    ROLLOUT_GPU_IDS = None\n"):
        layout((0, 1), 2, 2, rollout=(3,))


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_has_the_gpu_of_its_local_rank(visible, rank):
    visible(4, rank, ranks=3)
    own = gpu(rank)
    assert layout_of_rank(None, None) == Layout((own,), own, own)
    assert layout_of_rank(2, None, "cuda") == Layout((own,), gpu(2), own)
    assert devices.distillation_layout_of_rank(None) == DistillationLayout((own,), None, (own,))
    assert devices.distillation_layout_of_rank(3) == DistillationLayout((own,), None, gpus(3))
    assert layout_of_rank(None, None, "cpu") == Layout((CPU,), CPU, CPU)
    assert devices.distillation_layout_of_rank(None, "cpu") == DistillationLayout((CPU,), None, (CPU,))
    visible(0)
    assert layout_of_rank(None, None) == Layout((CPU,), CPU, CPU)


@pytest.mark.parametrize("rank", [0, 3])
def test_more_processes_than_gpus_is_an_error_on_every_rank(visible, rank):
    visible(2)
    assert layout_of_rank(1, None) == Layout(gpus(0), gpu(1), gpu(0))  # without torchrun there is one process
    visible(1, rank, ranks=4)
    with pytest.raises(ValueError, match=r"4 process.*need 4 GPUs, 1 visible.*--nproc_per_node"):
        layout_of_rank(None, None)
    visible(2, 0, ranks=2)
    with pytest.raises(ValueError, match=r"need 3 GPUs, 2 visible.*REFERENCE_GPU_ID and REWARD_GPU_ID to None"):
        layout_of_rank(2, None)
    with pytest.raises(ValueError, match=r"need 4 GPUs, 2 visible.*set TEACHER_GPU_ID to None"):
        devices.distillation_layout_of_rank(3)


@pytest.mark.parametrize("constant", [-1, 1.0], ids=repr)
def test_a_constant_of_a_rank_that_is_no_gpu_number_is_named(visible, constant):
    visible(2)
    with pytest.raises(ValueError, match=re.escape(f"REFERENCE_GPU_ID = None, REWARD_GPU_ID = {constant!r}: must be")):
        layout_of_rank(None, constant)
    with pytest.raises(ValueError, match=re.escape(f"TEACHER_GPU_ID = {constant!r}: must be None")):
        devices.distillation_layout_of_rank(constant)


def test_a_role_has_the_gpus_named_or_that_of_the_policy(visible):
    visible(4)
    assert devices.role("SIMILARITY_GPU_IDS", None, gpu(2)) == [gpu(2)]
    assert devices.role("SIMILARITY_GPU_IDS", (3, 1), gpu(0)) == [gpu(3), gpu(1)]
    assert devices.role("SIMILARITY_GPU_IDS", (3, 1), CPU) == [CPU]
    visible(2)
    for ids in ((), (0, 0), (2,), 1):
        with pytest.raises(ValueError, match=re.escape(f"SIMILARITY_GPU_IDS = {ids}: must be None, or different GPU")):
            devices.role("SIMILARITY_GPU_IDS", ids, gpu(0))


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
