"""Tests of common/devices.py: GPU ids against the GPUs there are, without needing any."""

import re

import pytest
import torch

from common import devices
from common.devices import DistillationLayout, distillation_layout, distillation_layout_of_rank, layout, layout_of_rank

CPU = torch.device("cpu")


def gpu(number) -> torch.device:
    return torch.device("cuda", number)


@pytest.fixture
def visible(monkeypatch):
    """Sets the number of GPUs that the process sees."""

    def set_number(number):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: number)

    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return set_number


# --- one process ---


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_ids_become_devices(visible, device):
    visible(4)
    gpus = layout((1, 0), 2, 3, device)
    assert gpus.policy == (gpu(1), gpu(0)) and gpus.reference == gpu(2) and gpus.reward == gpu(3)
    assert gpus.all == [gpu(1), gpu(0), gpu(2), gpu(3)]


def test_roles_may_share_a_gpu(visible):
    visible(2)
    gpus = layout((0, 1), 1, 1)
    assert gpus.reference == gpus.reward == gpu(1)
    assert gpus.all == [gpu(0), gpu(1)]


def test_more_gpus_than_needed_are_fine(visible):
    visible(8)
    assert layout((0,), 0, 0).all == [gpu(0)]


def test_auto_without_a_gpu_is_the_cpu_and_says_so(visible, capsys):
    visible(0)
    gpus = layout((0, 1), 2, 3, "auto")
    assert gpus.policy == (CPU,) and gpus.reference == gpus.reward == CPU and gpus.all == [CPU]
    assert "no GPU visible: running on the CPU" in capsys.readouterr().out


@pytest.mark.parametrize("number", [0, 4])
def test_the_cpu_on_request_says_nothing(visible, capsys, number):
    visible(number)
    assert layout((0, 1), 2, 3, "cpu").all == [CPU]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("policy", "reference", "reward", "needed", "found"), [
    ((0, 1), 2, 2, 3, 1), ((0, 1), 2, 2, 3, 2), ((0, 1, 2, 3), 0, 0, 4, 3), ((0,), 1, 0, 2, 1), ((0,), 0, 5, 6, 3),
    ((3,), 0, 0, 4, 1), ((0, 1, 2), 3, 3, 4, 2),
])  # fmt: skip
@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_too_few_gpus_says_how_many_and_what_to_change(visible, policy, reference, reward, needed, found, device):
    visible(found)
    with pytest.raises(ValueError, match=f"needs {needed} GPUs .*{found} visible") as error:
        layout(policy, reference, reward, device)
    message = str(error.value)
    assert "--device cpu" in message
    proposed = dict(re.findall(r"^ *(POLICY_GPU_IDS|REFERENCE_GPU_ID|REWARD_GPU_ID) = (.*)$", message, re.MULTILINE))
    ids = {name: eval(text) for name, text in proposed.items()}  # they are lines of Python to paste
    fitting = layout(ids["POLICY_GPU_IDS"], ids["REFERENCE_GPU_ID"], ids["REWARD_GPU_ID"], device)
    assert all(device.index < found for device in fitting.all)


def test_a_gpu_asked_for_and_none_there_is_an_error(visible):
    visible(0)
    with pytest.raises(ValueError, match=r"needs 1 GPUs .* 0 visible(.|\n)*--device cpu"):
        layout((0,), 0, 0, "cuda")


@pytest.mark.parametrize("ids", [
    ((0, 0), 1, 1), ((0, 1, 0), 1, 1), ((-1,), 0, 0), ((0,), -1, 0), ((0,), 0, -2), ((), 0, 0), (("0",), 0, 0),
    ((0,), 1.0, 0), ((0,), None, 0), ((0), 0, 0), (None, 0, 0), ((0,), (1,), 0), ((True,), 0, 0),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("found", [0, 3])
def test_ids_that_cannot_be_are_refused_on_every_machine(visible, ids, found):
    visible(found)
    with pytest.raises(ValueError, match=r"POLICY_GPU_IDS = .*REFERENCE_GPU_ID = .*REWARD_GPU_ID = .*edit these lines"):
        layout(*ids)


@pytest.mark.parametrize("device", ["gpu", "cuda:1", ""])
def test_an_unknown_device_is_refused(visible, device):
    visible(2)
    with pytest.raises(ValueError, match=r"must be auto, cuda or cpu"):
        layout((0,), 0, 0, device)


@pytest.mark.parametrize(("rollout", "sampling", "replicas"), [
    (None, (0, 1, 2, 3), (0, 1, 2, 3)), ((3, 1), (3, 1), (0, 1, 3)), ((4,), (4,), (0, 1, 4)), ((), (), (0, 1)),
])  # fmt: skip
def test_gpus_that_sample(visible, rollout, sampling, replicas):
    visible(5)
    gpus = layout((0, 1), 2, 3, rollout=rollout)
    assert gpus.rollout == tuple(map(gpu, sampling)) and gpus.replicas == list(map(gpu, replicas))
    assert set(gpus.all) == {gpu(i) for i in (0, 1, 2, 3, *sampling)}
    assert layout((0, 1), 2, 2, "cpu", rollout).rollout == ((CPU,) if sampling else ())


def test_gpus_that_sample_have_to_be_there(visible):
    visible(3)
    for rollout in ((1, 1), (-1,), ("0",)):
        with pytest.raises(ValueError, match=re.escape(f"ROLLOUT_GPU_IDS = {rollout}: must be GPU numbers")):
            layout((0, 1), 2, 2, rollout=rollout)
    with pytest.raises(ValueError, match=r"needs 4 GPUs .*3 visible(.|\n)*\n    ROLLOUT_GPU_IDS = None\n"):
        layout((0, 1), 2, 2, rollout=(3,))


# --- one process of several ---


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_has_the_gpu_of_its_local_rank(visible, monkeypatch, rank):
    visible(3)
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    gpus = layout_of_rank(None, None)
    assert gpus.policy == (gpu(rank),) and gpus.reference == gpus.reward == gpu(rank)
    gpus = layout_of_rank(2, None, "cuda")
    assert gpus.policy == (gpu(rank),) and gpus.reference == gpu(2) and gpus.reward == gpu(rank)


def test_without_torchrun_there_is_one_process(visible):
    visible(2)
    assert layout_of_rank(1, None) == devices.Layout((gpu(0),), gpu(1), gpu(0))


def test_ranks_on_the_cpu(visible, monkeypatch):
    visible(0)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert layout_of_rank(None, None) == devices.Layout((CPU,), CPU, CPU)
    visible(1)
    assert layout_of_rank(None, None, "cpu") == devices.Layout((CPU,), CPU, CPU)


@pytest.mark.parametrize("rank", [0, 3])
def test_more_processes_than_gpus_is_an_error_on_every_rank(visible, monkeypatch, rank):
    visible(1)
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"4 process\(es\).*need 4 GPUs, 1 visible.*lower torchrun --nproc_per_node"):
        layout_of_rank(None, None)


def test_a_reference_gpu_that_is_not_there_is_an_error(visible, monkeypatch):
    visible(2)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"need 3 GPUs, 2 visible"):
        layout_of_rank(2, None)


@pytest.mark.parametrize("constant", [-1, "1", 1.0, (1,)], ids=repr)
def test_a_constant_of_a_rank_that_is_no_gpu_number_is_named(visible, constant):
    visible(2)
    said = f"REFERENCE_GPU_ID = None, REWARD_GPU_ID = {constant!r}: must be None, or a GPU number from 0; edit"
    with pytest.raises(ValueError, match=re.escape(said)):
        layout_of_rank(None, constant)
    with pytest.raises(ValueError, match=re.escape(f"TEACHER_GPU_ID = {constant!r}: must be None")):
        distillation_layout_of_rank(constant)


# --- distillation ---


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_ids_of_a_distillation_become_devices(visible, device):
    visible(5)
    gpus = distillation_layout((1, 0), (2,), (3, 4, 0), device)
    assert gpus == DistillationLayout((gpu(1), gpu(0)), (gpu(2),), (gpu(3), gpu(4), gpu(0)))
    assert gpus.all == [gpu(1), gpu(0), gpu(2), gpu(3), gpu(4)]


def test_student_and_teacher_may_share_a_gpu_and_the_student_samples_itself(visible):
    visible(1)
    gpus = distillation_layout((0,), None, (0,))
    assert gpus == DistillationLayout((gpu(0),), None, (gpu(0),)) and gpus.all == [gpu(0)]


def test_a_teacher_elsewhere_has_no_gpu(visible):
    visible(2)
    assert distillation_layout((0,), (1,), ()) == DistillationLayout((gpu(0),), (gpu(1),), ())


@pytest.mark.parametrize(("device", "found"), [("auto", 0), ("cpu", 0), ("cpu", 4)])
@pytest.mark.parametrize(("rollout", "expected"), [(None, None), ((2, 3), (CPU,))])
def test_a_distillation_on_the_cpu(visible, capsys, device, found, rollout, expected):
    visible(found)
    gpus = distillation_layout((0, 1), rollout, (4,), device)
    assert gpus == DistillationLayout((CPU,), expected, (CPU,)) and gpus.all == [CPU]
    assert ("no GPU visible: running on the CPU" in capsys.readouterr().out) == (device == "auto")


@pytest.mark.parametrize("ids", [
    ((), None, (0,)), ((0, 0), None, (1,)), ((0,), (1, 1), (0,)), ((0,), None, (1, 1)), ((-1,), None, (0,)),
    ((0,), (-1,), (0,)), ((0,), None, (-2,)), ((0,), (), (0,)), ((0, 1), (1,), (2,)), (("0",), None, (0,)),
    ((0,), None, (1.5,)), ((0,), (None,), (1,)), ((0), None, (1,)), ((0,), 1, (1,)), ((0,), None, None),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("found", [0, 3])
def test_ids_that_cannot_be_are_refused_with_all_that_were_given(visible, ids, found):
    visible(found)
    given = f"STUDENT_GPU_IDS = {ids[0]}, ROLLOUT_GPU_IDS = {ids[1]}, TEACHER_GPU_IDS = {ids[2]}: must be GPU numbers"
    for device in ("auto", "cpu"):
        with pytest.raises(ValueError, match=re.escape(given)):
            distillation_layout(*ids, device)


@pytest.mark.parametrize(("ids", "found"), [
    (((0,), None, (1,)), 1), (((0, 1), (2,), (3,)), 2), (((0,), (4,), (1,)), 3), (((7,), None, ()), 4),
    (((0, 1, 2, 3), None, (3,)), 3),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_too_few_gpus_for_a_distillation_says_how_many_and_what_to_change(visible, ids, found, device):
    visible(found)
    needed = max(i for role in ids for i in role or ()) + 1
    with pytest.raises(ValueError, match=f"needs {needed} GPUs .*{found} visible") as error:
        distillation_layout(*ids, device)
    message = str(error.value)
    assert "--device cpu" in message
    proposed = re.findall(r"^ *(STUDENT|ROLLOUT|TEACHER)_GPU_IDS = (.*)$", message, re.MULTILINE)
    assert [name for name, _ in proposed] == ["STUDENT", "ROLLOUT", "TEACHER"]
    fitting = distillation_layout(*(eval(text) for _, text in proposed), device)  # lines of Python to paste
    assert all(device.index < found for device in fitting.all)


def test_a_distillation_that_asks_for_a_gpu_and_finds_none_is_an_error(visible):
    visible(0)
    with pytest.raises(ValueError, match=r"needs 2 GPUs .* 0 visible(.|\n)*--device cpu"):
        distillation_layout((0,), None, (1,), "cuda")
    with pytest.raises(ValueError, match=r"device = 'gpu': must be auto, cuda or cpu"):
        distillation_layout((0,), None, (1,), "gpu")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_a_distillation(visible, monkeypatch, rank):
    visible(3)
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert distillation_layout_of_rank(None) == DistillationLayout((gpu(rank),), None, (gpu(rank),))
    assert distillation_layout_of_rank(2) == DistillationLayout((gpu(rank),), None, (gpu(2),))
    assert distillation_layout_of_rank(None, "cpu") == DistillationLayout((CPU,), None, (CPU,))
    with pytest.raises(ValueError, match=r"need 4 GPUs, 3 visible.*set TEACHER_GPU_ID to None"):
        distillation_layout_of_rank(3)


# --- measuring ---


def test_the_cpu_is_left_out_of_waiting_and_memory():
    devices.synchronize([CPU])
    assert devices.peak_memory_gib([CPU]) == []


def test_peak_memory_is_per_gpu_in_gib_and_starts_anew(monkeypatch):
    peaks, reset = {gpu(0): 3 * 2**30, gpu(1): 2**29}, []
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", peaks.__getitem__)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    assert devices.peak_memory_gib([gpu(0), CPU, gpu(1)]) == [3.0, 0.5]
    assert reset == [gpu(0), gpu(1)]


def test_waiting_reaches_every_gpu(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    devices.synchronize([gpu(0), CPU, gpu(1)])
    assert waited == [gpu(0), gpu(1)]


# --- a role with a constant of its own ---


def test_a_role_has_the_gpus_named_or_that_of_the_policy(visible):
    visible(4)
    assert devices.role("SIMILARITY_GPU_IDS", None, gpu(2)) == [gpu(2)]
    assert devices.role("SIMILARITY_GPU_IDS", (3, 1), gpu(0)) == [gpu(3), gpu(1)]
    assert devices.role("SIMILARITY_GPU_IDS", (3, 1), torch.device("cpu")) == [torch.device("cpu")]


@pytest.mark.parametrize("ids", [(), (0, 0), (2,), (-1,), ("0",), 1])
def test_a_role_without_its_gpu_is_an_error(visible, ids):
    visible(2)
    with pytest.raises(ValueError, match=re.escape(f"SIMILARITY_GPU_IDS = {ids}: must be None, or different GPU")):
        devices.role("SIMILARITY_GPU_IDS", ids, gpu(0))
