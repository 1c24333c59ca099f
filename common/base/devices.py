"""Turns the GPU constants at the top of a script into devices, and checks them before loading.

Also: GPU synchronization, peak and free memory, a memory limit, and pinned CPU memory.
"""

import dataclasses
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from common.base.checks import require
from common.base.distributed import print_main

GIB = 2**30
CONSTANTS = {  # role -> constant of a script that names its GPUs
    "policy": "POLICY_GPU_IDS",
    "student": "STUDENT_GPU_IDS",
    "rollout": "ROLLOUT_GPU_IDS",
    "reference": "REFERENCE_GPU_ID",
    "reward": "REWARD_GPU_ID",
    "teacher": "TEACHER_GPU_IDS",
    "embedder": "SIMILARITY_GPU_IDS",
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """The device of each role in a process. CUDA_VISIBLE_DEVICES renumbers GPUs from 0.

    Attributes:
        trained: each holds a replica of the policy or student; the first also holds the optimizer.
        copies: each holds a replica that only samples.
        sampling: indices into (*trained, *copies) of the replicas that sample.
        reference: holds the frozen reference.
        reward: holds the reward model.
        teacher: the teacher's layers are spread over these; empty if a server holds the teacher.
        embedder: each holds a copy of the embedding model.
    """

    trained: tuple[torch.device, ...]
    copies: tuple[torch.device, ...] = ()
    sampling: tuple[int, ...] = (0,)
    reference: torch.device | None = None
    reward: torch.device | None = None
    teacher: tuple[torch.device, ...] = ()
    embedder: tuple[torch.device, ...] = ()

    @property
    def home(self) -> torch.device:
        """Device of the optimizer and of gathered results."""
        return self.trained[0]

    @property
    def rollout(self) -> tuple[torch.device, ...]:
        """Devices that sample."""
        return tuple((*self.trained, *self.copies)[i] for i in self.sampling)

    @property
    def all(self) -> list[torch.device]:
        """Every device once."""
        frozen = [d for d in (self.reference, self.reward, *self.teacher) if d is not None]
        return list(dict.fromkeys([*self.trained, *frozen, *self.copies, *self.embedder]))

    def of(self, role: str) -> tuple[torch.device, ...]:
        """Devices of a role, a key of CONSTANTS."""
        devices = self.trained if role in ("policy", "student") else getattr(self, role)
        return devices if isinstance(devices, tuple) else (devices,)


def gpu_numbers(
    roles: Mapping[str, Sequence[int] | int | None], local_rank: int = 0, ranks: int = 1
) -> dict[str, tuple[int, ...]]:
    """GPU numbers of every role, assuming that the machine has enough GPUs.

    Args:
        roles: the script's constants by role (keys of CONSTANTS), the trained role first. None
            means, for the trained role: one process per GPU, each on the GPU of its local rank; for
            "rollout": the trained GPUs sample; for other roles: the first trained GPU.
        local_rank: rank of the process on this machine.
        ranks: number of processes in the run.

    Raises:
        ValueError: a constant is not a GPU number or a tuple of them; or they contradict.
    """
    trained = next(iter(roles))
    lines = {role: f"{CONSTANTS[role]} = {value!r}" for role, value in roles.items()}
    single = ("reference", "reward")
    given = {role: (value,) if role in single else value for role, value in roles.items() if value is not None}
    valid = all(_are_numbers(ids) and (ids or role == "teacher") for role, ids in given.items())
    remedy = "edit these lines at the top of the script"
    require(valid, ", ".join(lines.values()), "must be GPU numbers from 0, none twice in a role, in tuples such as "
            "(0,) for ..._GPU_IDS; or None", remedy)  # fmt: skip
    if trained in given:
        require(ranks == 1, f"{lines[trained]}, {ranks} processes", "every process would use the same GPUs",
                f"start the script with python; or set {CONSTANTS[trained]} to None, one process per GPU")  # fmt: skip
    else:
        require("rollout" not in given, f"{lines[trained]}, {lines.get('rollout')}", "with one process per GPU, each "
                "samples on its own", "set ROLLOUT_GPU_IDS to None")  # fmt: skip
    own = given.get(trained, (local_rank,))
    shared = trained == "student" and set(own) & set(given.get("rollout", ()))
    require(not shared, ", ".join(lines.values()), "a GPU cannot both train the student and hold a copy that samples",
            f"set ROLLOUT_GPU_IDS to None to sample on the student's GPUs; {remedy}")  # fmt: skip
    defaults = {role: own if role in (trained, "rollout") else own[:1] for role in roles}
    return {role: tuple(given.get(role, defaults[role])) for role in roles}


def layout(device: str = "auto", **roles: Sequence[int] | int | None) -> Layout:
    """Checks the GPU constants of a script and turns them into devices.

    Args:
        device: "cuda": the named GPUs; "cpu": everything on the CPU; "auto": the named GPUs if any
            GPU is visible, else the CPU, with a message.
        **roles: as in `gpu_numbers`.

    Raises:
        ValueError: as in `gpu_numbers`; or fewer GPUs are visible than needed. The message gives
            both numbers and the lines to change.
    """
    require(device in ("auto", "cuda", "cpu"), f"device = {device!r}", "must be auto, cuda or cpu", "choose one")
    local_rank, processes, ranks = (
        int(os.environ.get(name, default))
        for name, default in (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1), ("WORLD_SIZE", 1))
    )
    numbers = gpu_numbers(roles, local_rank, max(ranks, processes))
    trained = next(iter(roles))
    visible = torch.cuda.device_count()
    if device == "cpu" or (device == "auto" and visible == 0):
        if device == "auto":
            print_main("no GPU visible: running on the CPU; with --device cuda that is an error")
        cpu = torch.device("cpu")
        # one replica, and one copy if no trained GPU samples
        separate = not set(numbers[trained]) & set(numbers.get("rollout", numbers[trained]))
        places = {role: (cpu,) * bool(ids) for role, ids in numbers.items()}
        copies, sampling = (cpu,) * separate, (int(separate),)
    else:
        _require_visible(roles, numbers, processes, visible)
        places = {role: tuple(torch.device("cuda", i) for i in ids) for role, ids in numbers.items()}
        rollout = places.get("rollout", places[trained])
        copies = tuple(d for d in rollout if d not in places[trained])
        sampling = tuple(i for i, d in enumerate((*places[trained], *copies)) if d in rollout)
    return Layout(
        places[trained], copies, sampling,
        *(places[role][0] if role in places else None for role in ("reference", "reward")),
        *(places.get(role, ()) for role in ("teacher", "embedder")),
    )  # fmt: skip


def _require_visible(roles: Mapping[str, Any], numbers: Mapping[str, tuple[int, ...]], processes: int, visible: int):
    """Requires that all named GPUs are visible; the error proposes lines for the visible ones."""
    trained = next(iter(roles))
    per_rank = roles[trained] is None
    ids = {i for own in numbers.values() for i in own} | set(range(processes) if per_rank else ())
    needed = max(ids) + 1
    if needed <= visible:
        return
    if per_rank:
        named = [CONSTANTS[role] for role in roles if roles[role] is not None and role != trained]
        instead = f"set {' and '.join(named)} to None, " if named else ""
        raise ValueError(
            f"{processes} process(es) on this machine and GPU ids {sorted(ids)} need {needed} GPUs, {visible} visible: "
            f"lower torchrun --nproc_per_node, {instead}or pass --device cpu"
        )
    last = max(0, visible - 1)
    fitting = {role: last if CONSTANTS[role].endswith("ID") else (last,) for role in roles}
    fitting |= {trained: tuple(range(max(1, min(len(numbers[trained]), last)))), "rollout": None, "embedder": None}
    if trained == "policy":  # whose own GPUs may sample beside others; None would leave the others idle
        fitting["rollout"] = tuple(i for i in numbers.get("rollout", ()) if i < visible) or None
    lines = [
        f"    {CONSTANTS[role]} = {fitting[role] if roles[role] not in (None, ()) else roles[role]}" for role in roles
    ]
    raise ValueError(
        f"this layout needs {needed} GPUs (ids {sorted(ids)}), {visible} visible. Edit the lines at the top of the "
        f"script, for {max(1, visible)} GPU(s) to\n" + "\n".join(lines) + "\nor pass --device cpu to run without GPUs"
    )


def _are_numbers(ids: Any) -> bool:
    """Whether `ids` is a tuple or list of distinct integers from 0; (0) is just an integer."""
    return isinstance(ids, (tuple, list)) and all(type(i) is int and i >= 0 for i in ids) and len(set(ids)) == len(ids)


def synchronize(devices: list[torch.device]) -> None:
    """Waits until the GPUs among `devices` are idle, so that timing includes their work."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def peak_memory_gib(devices: list[torch.device]) -> list[float]:
    """Peak GiB of tensors since the last call, per GPU; the CPU is skipped."""
    gpus = [d for d in devices if d.type == "cuda"]
    peaks = [round(torch.cuda.max_memory_allocated(gpu) / GIB, 3) for gpu in gpus]
    for gpu in gpus:
        torch.cuda.reset_peak_memory_stats(gpu)
    return peaks


_limits: dict[int, int] = {}  # GPU number -> bytes that this process may allocate


def limit_memory(devices: list[torch.device], gib: float) -> None:
    """Limits the memory that this process may allocate on each GPU; the CPU is skipped.

    Args:
        devices: GPUs or the CPU.
        gib: GiB per GPU; 0: no limit.
    """
    for device in devices:
        if gib and device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            _limits[device.index] = int(min(gib * GIB, total))
            torch.cuda.set_per_process_memory_fraction(_limits[device.index] / total, device)


def free_bytes(device: torch.device) -> int:
    """Bytes that this process can still allocate on a GPU: free memory and torch's unused cache.

    Never more than `limit_memory` leaves.
    """
    allocated = torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - allocated
    return min(free, _limits.get(device.index, free + allocated) - allocated)


def host_memory(elements: int, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Allocates CPU memory to copy from `device` into; pinned if that is a GPU, for fast copies.

    Args:
        elements: length of the returned 1-D tensor.
        device: where copies come from.
        dtype: of the returned tensor.
    """
    block = torch.empty(elements, dtype=dtype)
    if device.type == "cuda" and elements:
        # pin_memory=True rounds the size up to a power of two: 2.0 GiB became 4.0
        cudart = torch.cuda.cudart()
        torch.cuda.check_error(cudart.cudaHostRegister(block.data_ptr(), block.nbytes, 0))
        weakref.finalize(block, cudart.cudaHostUnregister, block.data_ptr())
    return block
