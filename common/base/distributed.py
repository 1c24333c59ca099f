"""Collectives and shared errors of all ranks; every function also works in a single process.

Numbers travel between GPUs through NCCL. Python objects travel between CPUs through gloo, so that
no rank waits for its GPU.
"""

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from common.base import wire
from common.base.peers import Peers

BUCKET_ELEMENTS = 2**26  # gradients per all-reduce
OUTAGE_EXIT_CODE = 75  # a run saved after an outage of a service: start it again (EX_TEMPFAIL)

_peers: Peers | None = None  # set by `start`
_phase = ""  # the phase of this rank, for the error when other ranks do not arrive


class OutageError(RuntimeError):
    """A service stays unavailable. All ranks raise this and save together; no prompt is skipped."""


def start(device: torch.device, timeout_minutes: float) -> tuple[int, int]:
    """Joins the process group of a torchrun or accelerate launch; a no-op in a single process.

    Args:
        device: of this process.
        timeout_minutes: how long ranks wait for one another.

    Returns:
        Rank and number of ranks.

    Raises:
        ValueError: the launcher was told to use DeepSpeed.
    """
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() in ("true", "1"):
        raise ValueError(
            "ACCELERATE_USE_DEEPSPEED is set: the scripts take their optimizer steps themselves, which ZeRO would have "
            "to do; use FSDP2, which shards the same: --fsdp true, or a configuration of scripts/accelerate/"
        )
    # accelerate launch sets it for FSDP; transformers would then load weights on rank 0 only
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized():
        if device.type == "cuda":
            torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(minutes=timeout_minutes))
        global _peers
        store = dist.PrefixStore("peers", dist.distributed_c10d._get_default_store())
        _peers = Peers(rank(), num_ranks(), store, timeout_minutes)
    return rank(), num_ranks()


def shards(cfg: Any) -> bool:
    """Whether a script shards its weights: by its option `fsdp`, or because accelerate says so.

    A Config without the option never shards.
    """
    launched = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("true", "1")
    return hasattr(cfg, "fsdp") and (cfg.fsdp or launched)


def rank() -> int:
    """Rank of this process, 0 if it is alone; before `start`, the rank from torchrun."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else int(os.environ.get("RANK", 0))


def num_ranks() -> int:
    """Number of ranks, 1 in a single process."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def print_main(*values: Any, file: TextIO | None = None) -> None:
    """Prints on rank 0 only, by default to standard output."""
    if rank() == 0:
        print(*values, file=file, flush=True)


def gather_objects(value: Any) -> list[Any]:
    """`value` of every rank, in rank order; a collective.

    Args:
        value: anything that `wire.encode` accepts. Tensors come back on the CPU.

    Raises:
        RuntimeError: other ranks exited or did not arrive in time; the message names them.
    """
    if num_ranks() == 1:
        return [value]
    body = torch.frombuffer(bytearray(wire.encode(value)), dtype=torch.uint8)
    with _naming_missing_ranks():
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(num_ranks())]
        dist.all_gather(sizes, torch.tensor([len(body)]))
        longest = int(max(sizes))
        bodies = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
        dist.all_gather(bodies, torch.nn.functional.pad(body, (0, longest - len(body))))
    return [wire.decode(other[: int(size)].numpy().tobytes()) for other, size in zip(bodies, sizes, strict=True)]


@contextmanager
def _naming_missing_ranks() -> Iterator[None]:
    """Surrounds collectives; if one fails, the error names the ranks that are missing."""
    if _peers is not None:
        _peers.arrive()
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError):  # a failure of this rank
        raise
    except RuntimeError as error:  # every backend raises this
        missing = _peers.missing() if _peers is not None else ""
        where = f" in phase {_phase!r}" if _phase else ""
        raise RuntimeError(
            f"rank {rank()} waited{where} for the others: {missing or 'one of them is gone, or cut off'}; look at the "
            f"output of that rank, then run the same command: the run goes on from its checkpoint ({error})"
        ) from error


def sum_over_ranks(value: float) -> float:
    """Sum of a number over all ranks; a collective."""
    return sum(gather_objects(value))


def own_share(values: torch.Tensor) -> torch.Tensor:
    """Rows [n, ...] of this rank, from those of all ranks [num_ranks * n, ...] in order."""
    return values.chunk(num_ranks())[rank()]


def any_rank(flag: bool) -> bool:
    """Whether the flag is set on any rank; a collective."""
    return any(gather_objects(flag))


def sum_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Sums gradients over all ranks, in place; a collective.

    Args:
        parameters: in the same order on every rank. A missing gradient counts as 0. Parameters that
            FSDP2 shards are skipped: it has summed their gradients already.
    """
    if num_ranks() == 1:
        return
    bucket: list[torch.Tensor] = []
    size = 0
    with _naming_missing_ranks():
        for parameter in parameters:
            if isinstance(parameter, DTensor):
                continue
            if parameter.grad is None:  # e.g. the vision tower on a rank without images
                parameter.grad = torch.zeros_like(parameter)
            if bucket and (size + parameter.numel() > BUCKET_ELEMENTS or bucket[0].dtype != parameter.dtype):
                _sum_bucket(bucket)
                bucket, size = [], 0
            bucket.append(parameter.grad)
            size += parameter.numel()
        if bucket:
            _sum_bucket(bucket)


def _sum_bucket(gradients: list[torch.Tensor]) -> None:
    """Sums one bucket of gradients in a single all-reduce."""
    if len(gradients) == 1 and gradients[0].is_contiguous():  # no copy of the largest
        dist.all_reduce(gradients[0])
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


@contextmanager
def share_errors(phase: str, collective: bool = False) -> Iterator[None]:
    """Makes all ranks raise if one fails in the block; the errors of the others name it.

    Otherwise the ranks that did not fail would wait in their next collective until it times out.
    The block must not contain collectives, unless `collective` is set.

    Args:
        phase: name of the block, for the message.
        collective: the block contains collectives, those of FSDP2. Other ranks may be waiting in
            them, so an error is not shared: it ends this process, and the launcher ends the others.

    Raises:
        RuntimeError: on the ranks that did not fail; OutageError if the failure was one.
    """
    global _phase
    _phase = phase
    if collective:
        yield
        return
    error = None
    try:
        yield
    except Exception as caught:  # raised below, after one collective
        error = caught
    reports = gather_objects(
        None if error is None else (isinstance(error, OutageError), f"{type(error).__name__}: {error}")
    )
    failures = {number: report for number, report in enumerate(reports) if report}
    broken = {number: report for number, report in failures.items() if not report[0]}  # no outage
    if error is not None and not (broken and isinstance(error, OutageError)):
        raise error
    for number, (is_outage, text) in (broken or failures).items():
        kind = OutageError if is_outage else RuntimeError  # an outage only if all can save
        raise kind(f"rank {number} failed in phase '{phase}': {text}")


def shutdown(code: int = 0) -> None:
    """Exits with `code` on all ranks, as their last call; a no-op in a single process.

    The process group is not destroyed. Gloo's threads may release Python objects during interpreter
    shutdown, which aborts the process; and the group's destructor waits for a thread that may be
    waiting for the GIL.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    gather_objects(None)  # rank 0 may own the store; leave together
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
