"""GPU ids at the top of a script -> devices, checked before anything is loaded."""

import dataclasses
import os
import weakref
from typing import Any

import torch

from common.base.distributed import print_main

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where each role lives. Ids are those the process sees: CUDA_VISIBLE_DEVICES renumbers them from 0."""

    policy: tuple[torch.device, ...]  # the first also holds the optimizer
    reference: torch.device
    reward: torch.device
    rollout: tuple[torch.device, ...] = ()  # those that sample, where a script lets others than the policy's do so

    @property
    def all(self) -> list[torch.device]:
        """Every device once, in the order of the roles."""
        return list(dict.fromkeys([*self.policy, self.reference, self.reward, *self.rollout]))

    @property
    def replicas(self) -> list[torch.device]:
        """Those with a copy of the policy: those that train it, then those that only sample."""
        return list(dict.fromkeys([*self.policy, *self.rollout]))


def layout(
    policy: tuple[int, ...],
    reference: int,
    reward: int,
    device: str = "auto",
    rollout: tuple[int, ...] | None = (),
) -> Layout:
    """Checks the GPU ids of a script and turns them into devices.

    Args:
        policy: GPU ids of the policy replicas.
        reference: GPU id of the frozen reference.
        reward: GPU id of the reward model.
        device: "cuda" (the GPUs named), "cpu" (everything on the CPU), or "auto" (the GPUs named if this machine has
            any GPU, else the CPU, which is said).
        rollout: GPU ids that sample; None: all of those above; empty: the script has no such constant.

    Returns:
        The devices of each role.

    Raises:
        ValueError: ids that cannot be, or fewer GPUs visible than named; it says how many are needed, how many there
            are, and which lines to change.
    """
    if device not in ("auto", "cuda", "cpu"):
        raise ValueError(f"device = {device!r}: must be auto, cuda or cpu")
    roles = (policy, (reference,), (reward,), () if rollout is None else rollout)
    if not policy or not all(map(_are_numbers, roles)):
        given = f", ROLLOUT_GPU_IDS = {rollout}" if rollout else ""
        raise ValueError(
            f"POLICY_GPU_IDS = {policy}, REFERENCE_GPU_ID = {reference}, REWARD_GPU_ID = {reward}{given}: must be GPU "
            "numbers from 0, in a tuple such as (0,) where there may be several, at least one for the policy and none "
            "twice in a role; edit these lines at the top of the script"
        )
    sampling = tuple(dict.fromkeys([*policy, reference, reward])) if rollout is None else rollout
    ids = [*policy, reference, reward, *sampling]
    found = torch.cuda.device_count()
    if device == "cpu" or (device == "auto" and found == 0):
        if device == "auto":
            print_main("no GPU visible: running on the CPU; with --device cuda that is an error")
        cpu = torch.device("cpu")
        return Layout((cpu,), cpu, cpu, (cpu,) if sampling else ())
    needed = max(ids) + 1
    if found < needed:
        last = max(0, found - 1)
        fitting = tuple(range(max(1, min(len(policy), last))))
        raise ValueError(
            f"this layout needs {needed} GPUs (ids {sorted(set(ids))}), {found} visible. Edit the lines at the top of "
            f"the script, for {max(1, found)} GPU(s) to\n"
            f"    POLICY_GPU_IDS = {fitting}\n    REFERENCE_GPU_ID = {last}\n    REWARD_GPU_ID = {last}\n"
            f"{'    ROLLOUT_GPU_IDS = None' + chr(10) if rollout else ''}or pass --device cpu to run without GPUs"
        )
    cuda = [torch.device("cuda", i) for i in range(needed)]
    return Layout(tuple(cuda[i] for i in policy), cuda[reference], cuda[reward], tuple(cuda[i] for i in sampling))


@dataclasses.dataclass(frozen=True)
class DistillationLayout:
    """Where each role of a distillation lives, by the ids that the process sees."""

    student: tuple[torch.device, ...]  # the first also holds gradients and optimizer
    rollout: tuple[torch.device, ...] | None  # None: the student's, whose weights are then the ones sampled from
    teacher: tuple[torch.device, ...]  # its layers are spread over them

    @property
    def all(self) -> list[torch.device]:
        """Every device once, in the order of the roles."""
        return list(dict.fromkeys([*self.student, *(self.rollout or ()), *self.teacher]))


def distillation_layout(
    student: tuple[int, ...], rollout: tuple[int, ...] | None, teacher: tuple[int, ...], device: str = "auto"
) -> DistillationLayout:
    """Checks the GPU ids of a distillation script and turns them into devices.

    Args:
        student: GPU ids of the student's replicas.
        rollout: GPU ids of the copies that sample; None: the student's GPUs sample.
        teacher: GPU ids that the teacher is spread over; empty: it is elsewhere.
        device: as in `layout`.

    Raises:
        ValueError: as in `layout`; or a GPU that is to train and to hold a copy that samples.
    """
    if device not in ("auto", "cuda", "cpu"):
        raise ValueError(f"device = {device!r}: must be auto, cuda or cpu")
    roles = {"STUDENT_GPU_IDS": student, "ROLLOUT_GPU_IDS": rollout, "TEACHER_GPU_IDS": teacher}
    given = ", ".join(f"{name} = {ids}" for name, ids in roles.items())
    copies = () if rollout is None else rollout
    holds = all(map(_are_numbers, (student, copies, teacher))) and not set(student) & set(copies)
    if not student or (rollout is not None and not copies) or not holds:
        raise ValueError(
            f"{given}: must be GPU numbers from 0, in tuples such as (0,), at least one for the student, none twice in "
            "a role, and none both for the student and for rollouts (ROLLOUT_GPU_IDS = None samples on the student's "
            "GPUs); edit these lines at the top of the script"
        )
    ids = {*student, *copies, *teacher}
    found = torch.cuda.device_count()
    if device == "cpu" or (device == "auto" and found == 0):
        if device == "auto":
            print_main("no GPU visible: running on the CPU; with --device cuda that is an error")
        cpu = (torch.device("cpu"),)
        return DistillationLayout(cpu, rollout and cpu, cpu)
    if found <= max(ids):
        last = max(0, found - 1)
        raise ValueError(
            f"this layout needs {max(ids) + 1} GPUs (ids {sorted(ids)}), {found} visible. Edit the lines at the top of "
            f"the script, for {max(1, found)} GPU(s) to\n    STUDENT_GPU_IDS = {tuple(range(max(1, last)))}\n"
            f"    ROLLOUT_GPU_IDS = None\n    TEACHER_GPU_IDS = {(last,)}\nor pass --device cpu to run without GPUs"
        )
    student, rollout, teacher = (ids and tuple(torch.device("cuda", i) for i in ids) for ids in roles.values())
    return DistillationLayout(student, rollout, teacher)


def layout_of_rank(
    reference: int | None,
    reward: int | None,
    device: str = "auto",
    constants: str = "REFERENCE_GPU_ID and REWARD_GPU_ID",
) -> Layout:
    """The layout of one process of a torchrun: its policy is on the GPU of its local rank.

    Args:
        reference: GPU id of the frozen reference, one copy per process there; None: the process's own GPU.
        reward: GPU id of the reward model, likewise.
        device: as in `layout`.
        constants: how the script names the first two, for the message.

    Raises:
        ValueError: as in `layout`; the number of processes per machine counts as the number of policy GPUs.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    own = [local_rank if id_ is None else id_ for id_ in (reference, reward)]
    if not all(_are_numbers((id_,)) for id_ in own):
        named = zip(constants.split(" and "), (reference, reward), strict=False)  # a script may have the first only
        given = ", ".join(f"{name} = {id_!r}" for name, id_ in named)
        raise ValueError(f"{given}: must be None, or a GPU number from 0; edit the line at the top of the script")
    found, needed = torch.cuda.device_count(), max(processes - 1, *own) + 1
    if found < needed and (device == "cuda" or (device == "auto" and found)):
        raise ValueError(
            f"{processes} process(es) on this machine and GPU ids {sorted({*range(processes), *own})} need {needed} "
            f"GPUs, {found} visible: lower torchrun --nproc_per_node, set {constants} to None, or pass "
            "--device cpu"
        )
    gpus = layout(tuple(range(processes)), *own, device)
    return gpus if gpus.policy[0].type == "cpu" else dataclasses.replace(gpus, policy=(gpus.policy[local_rank],))


def distillation_layout_of_rank(teacher: int | None, device: str = "auto") -> DistillationLayout:
    """The layout of one process of a torchrun: its student is on the GPU of its local rank.

    Args:
        teacher: GPU id of the teacher, one copy per process there; None: the process's own GPU.
        device: as in `layout`.

    Raises:
        ValueError: as in `layout_of_rank`.
    """
    gpus = layout_of_rank(teacher, None, device, "TEACHER_GPU_ID")
    return DistillationLayout(gpus.policy, None, (gpus.reference,))


def role(name: str, ids: tuple[int, ...] | None, home: torch.device) -> list[torch.device]:
    """The devices of a role that has a constant of its own.

    Args:
        name: of the constant, for the message.
        ids: GPU ids; None: the device of the policy.
        home: the device of the policy; on a CPU every role is there.

    Raises:
        ValueError: a GPU named twice or not there, or none named.
    """
    if ids is None or home.type == "cpu":
        return [home]
    found = torch.cuda.device_count()
    if not _are_numbers(ids) or not ids or max(ids) >= found:
        raise ValueError(
            f"{name} = {ids}: must be None, or different GPU numbers below the {found} visible; edit the line at the "
            "top of the script"
        )
    return [torch.device("cuda", i) for i in ids]


def _are_numbers(ids: Any) -> bool:
    """Whether these are GPU numbers, each once: a tuple or list of integers from 0. (0) is none: it lacks a comma."""
    return isinstance(ids, (tuple, list)) and all(type(i) is int and i >= 0 for i in ids) and len(set(ids)) == len(ids)


def synchronize(devices: list[torch.device]) -> None:
    """Waits for the GPUs among `devices`, so that a clock read afterwards is true."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def peak_memory_gib(devices: list[torch.device]) -> list[float]:
    """Peak memory allocated by tensors since the last call, per GPU.

    Args:
        devices: GPUs, or the CPU, which is left out.

    Returns:
        GiB per GPU; empty on the CPU.
    """
    gpus = [d for d in devices if d.type == "cuda"]
    peaks = [round(torch.cuda.max_memory_allocated(gpu) / GIB, 3) for gpu in gpus]
    for gpu in gpus:
        torch.cuda.reset_peak_memory_stats(gpu)
    return peaks


_limits: dict[int, int] = {}  # bytes that this process may take, by GPU number


def limit_memory(devices: list[torch.device], gib: float) -> None:
    """Keeps this process below a share of each GPU's memory, whatever else is free.

    Args:
        devices: GPUs, or the CPU, which is left out.
        gib: GiB of each; 0: no limit.
    """
    for device in devices:
        if gib and device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            _limits[device.index] = int(min(gib * GIB, total))
            torch.cuda.set_per_process_memory_fraction(_limits[device.index] / total, device)


def free_bytes(device: torch.device) -> int:
    """Bytes that this process can still allocate, below its limit: what is free, and what torch holds without use.

    Args:
        device: a GPU.
    """
    allocated = torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - allocated
    return min(free, _limits.get(device.index, free + allocated) - allocated)


def host_memory(elements: int, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A block of CPU memory for copies; pinned, and thus fast, where the device is a GPU.

    Args:
        elements: of the block.
        device: what it is copied from.
        dtype: of the elements.
    """
    block = torch.empty(elements, dtype=dtype)
    if device.type == "cuda" and elements:
        # pin_memory=True would round up to a power of two: 2.0 GiB became 4.0
        cudart = torch.cuda.cudart()
        torch.cuda.check_error(cudart.cudaHostRegister(block.data_ptr(), block.nbytes, 0))
        weakref.finalize(block, cudart.cudaHostUnregister, block.data_ptr())
    return block
