"""Tests whether the GPUs of a run work together: a checked all-reduce with a timeout, and the bandwidth of copies."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from common.base import devices
from common.base.devices import GIB
from common.planning.cards import Card

REDUCED = 2**24  # fp32 elements in the all-reduce, 64 MiB
COPIED = 2**28  # bytes of a measured copy


@contextlib.contextmanager
def watchdog(seconds: float, message: str) -> Iterator[None]:
    """Ends the process with a message if the block takes too long: a hanging collective cannot be cancelled.

    Args:
        seconds: time limit.
        message: value, rule, remedy.
    """
    timer = threading.Timer(seconds, fail, [f"no answer within {seconds:g} s: {message}"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def fail(message: str) -> NoReturn:
    """Ends this process at once, from any thread; torchrun then stops the other ranks.

    Args:
        message: value, rule, remedy.
    """
    print(f"error: {message}", file=sys.stderr, flush=True)
    os._exit(1)


def all_reduce(device: torch.device, seconds: float) -> tuple[bool, str]:
    """All-reduces 64 MiB and checks the sum; a collective.

    Args:
        device: of this rank; GPUs use NCCL, CPUs gloo.
        seconds: time limit.

    Returns:
        Whether the sum was right, and a line that says so, with the bus bandwidth: size / time * 2 (ranks - 1) / ranks.
    """
    backend, ranks = ("nccl" if device.type == "cuda" else "gloo"), dist.get_world_size()
    remedy = "copies between GPUs may be broken here: try NCCL_P2P_DISABLE=1; NCCL_DEBUG=INFO shows where it stands"
    what = f"all-reduce of {4 * REDUCED // 2**20} MiB by {ranks} ranks over {backend}"
    with watchdog(seconds, f"{what} must end; {remedy if backend == 'nccl' else 'see whether the ranks are alive'}"):
        try:
            group = dist.new_group(backend=backend)
            numbers = torch.full((REDUCED,), dist.get_rank() + 1.0, device=device)
            dist.all_reduce(numbers, group=group)
            right = bool((numbers == ranks * (ranks + 1) / 2).all())
            taken = _seconds(lambda: dist.all_reduce(numbers, group=group), [device])
        except RuntimeError as error:
            fail(f"{what} failed: {error}; {remedy}")
    speed = 4 * REDUCED / 1e9 / taken * 2 * (ranks - 1) / ranks
    return right, f"{what}: " + (f"right, {speed:.1f} GB/s" if right else f"the sum is wrong; {remedy}")


def _seconds(work: Callable[[], Any], used: Sequence[torch.device], times: int = 4) -> float:
    """Time of one call, after one call to warm up."""
    work()
    devices.synchronize(used)
    start = time.perf_counter()
    for _ in range(times):
        work()
    devices.synchronize(used)
    return (time.perf_counter() - start) / times


def peer_access(gpus: Sequence[Card]) -> list[list[str]]:
    """Which GPUs can copy to each other directly, without CPU memory in between.

    Args:
        gpus: of this process.

    Returns:
        "yes" or "no" from each GPU (row) to each (column); "" on the diagonal.
    """
    numbers = [gpu.number for gpu in gpus]
    can_access = torch.cuda.can_device_access_peer
    return [["" if a == b else "yes" if can_access(a, b) else "no" for b in numbers] for a in numbers]


def bandwidth(gpus: Sequence[Card]) -> list[list[str]]:
    """Measured bandwidth of copies.

    Args:
        gpus: of this process, with room for a copy.

    Returns:
        A row per GPU, in GiB/s: from pinned CPU memory, to pinned CPU memory, and to each GPU; "" to itself.
    """
    host = torch.empty(COPIED, dtype=torch.uint8, pin_memory=True)
    data = [torch.empty(COPIED, dtype=torch.uint8, device=torch.device("cuda", gpu.number)) for gpu in gpus]

    def speed(target: torch.Tensor, source: torch.Tensor) -> str:
        if target is source:
            return ""
        used = [target.device, source.device]
        return f"{COPIED / GIB / _seconds(lambda: target.copy_(source, non_blocking=True), used):.1f}"

    return [[speed(own, host), speed(host, own), *(speed(other, own) for other in data)] for own in data]
