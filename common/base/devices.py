"""GPU constants at the top of a script -> devices, checked before anything is loaded."""

import dataclasses
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from common.base.checks import require
from common.base.distributed import print_main

GIB = 2**30
CONSTANTS = {  # the line of a script that places a role
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
    """Which device each role of a process uses. CUDA_VISIBLE_DEVICES renumbers GPUs from 0.

    Attributes:
        trained: one replica of the policy or student on each; the first also holds the optimizer.
        copies: replicas that only sample.
        sampling: indices into (*trained, *copies) of the replicas that sample.
        reference: device of the frozen reference.
        reward: device of the reward model.
        teacher: devices that the teacher's layers are spread over; empty if it is served elsewhere.
        embedder: one copy of the embedding model on each.
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
        """Devices of a role.

        Args:
            role: a key of CONSTANTS.
        """
        found = self.trained if role in ("policy", "student") else getattr(self, role)
        return found if isinstance(found, tuple) else (found,)


def gpu_numbers(
    roles: Mapping[str, Sequence[int] | int | None], local_rank: int = 0, ranks: int = 1
) -> dict[str, tuple[int, ...]]:
    """GPU numbers of every role, as a machine with enough GPUs would use them.

    Args:
        roles: values of a script's constants by role (keys of CONSTANTS), the trained role first. None means for the
            trained role: one process per GPU, each on the GPU of its local rank; for "rollout": the trained replicas
            sample; for other roles: the first GPU of the trained role.
        local_rank: rank of the process on this machine.
        ranks: processes of the run.

    Returns:
        Numbers by role.

    Raises:
        ValueError: a constant that is no GPU number or tuple of them, or a combination that cannot work.
    """
    trained = next(iter(roles))
    lines = {role: f"{CONSTANTS[role]} = {value!r}" for role, value in roles.items()}
    one = ("reference", "reward")
    given = {role: (value,) if role in one else value for role, value in roles.items() if value is not None}
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
    usual = {role: own if role in (trained, "rollout") else own[:1] for role in roles}
    return {role: tuple(given.get(role, usual[role])) for role in roles}


def layout(device: str = "auto", **roles: Sequence[int] | int | None) -> Layout:
    """Checks the GPU constants of a script and turns them into devices.

    Args:
        device: "cuda" (the GPUs named), "cpu" (everything on the CPU), or "auto" (the GPUs named if this machine has
            any, else the CPU, with a message).
        **roles: as in `gpu_numbers`.

    Raises:
        ValueError: as in `gpu_numbers`; or fewer GPUs are visible than named: how many are needed, how many there are,
            and the lines to change.
    """
    require(device in ("auto", "cuda", "cpu"), f"device = {device!r}", "must be auto, cuda or cpu", "choose one")
    local_rank, processes, ranks = (
        int(os.environ.get(name, usual))
        for name, usual in (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1), ("WORLD_SIZE", 1))
    )
    numbers = gpu_numbers(roles, local_rank, max(ranks, processes))
    trained = next(iter(roles))
    visible = torch.cuda.device_count()
    if device == "cpu" or (device == "auto" and visible == 0):
        if device == "auto":
            print_main("no GPU visible: running on the CPU; with --device cuda that is an error")
        cpu = torch.device("cpu")
        # one replica, and one copy if the GPUs that sample are all others
        apart = not set(numbers[trained]) & set(numbers.get("rollout", numbers[trained]))
        places = {role: (cpu,) * bool(ids) for role, ids in numbers.items()}
        copies, sampling = (cpu,) * apart, (int(apart),)
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
    """Requires as many GPUs as are named; otherwise proposes lines for the GPUs there are."""
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
