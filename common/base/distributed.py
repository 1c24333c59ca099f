"""What the loop needs from a process group; every function also works, and does nothing, in a single process."""

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

BUCKET_ELEMENTS = 2**26  # gradients that travel at once
OUTAGE_EXIT_CODE = 75  # of a run that saved and gave up waiting for a service: start it again later (EX_TEMPFAIL)

_peers: Peers | None = None  # of this process, once `start` has joined the others
_phase = ""  # what this rank does, for the message when others do not come


class OutageError(RuntimeError):
    """A service that a run needs stays away. All ranks raise it, so that they save together; nothing was skipped."""


def start(device: torch.device, timeout_minutes: float) -> tuple[int, int]:
    """Joins the other processes of a torchrun or accelerate launch; does nothing in a single process.

    Args:
        device: of this process; numbers travel between GPUs by NCCL, and what hosts decide on between CPUs by gloo, so
            that no GPU has to be waited for.
        timeout_minutes: how long ranks wait for one another.

    Returns:
        Number of this process, and how many there are.

    Raises:
        ValueError: the launcher was told to use DeepSpeed.
    """
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() in ("true", "1"):
        raise ValueError(
            "ACCELERATE_USE_DEEPSPEED is set: the scripts take their optimizer steps themselves, which ZeRO would have "
            "to do; use FSDP2, which shards the same: --fsdp true, or a configuration of scripts/accelerate/"
        )
    # accelerate launch sets it for FSDP: transformers would load weights on rank 0 alone, for Accelerate to send on
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
    """Whether a script is to shard what it trains: its option `fsdp`, or a launcher that was told to.

    Args:
        cfg: a Config; one without that option does not shard.
    """
    launched = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("true", "1")
    return hasattr(cfg, "fsdp") and (cfg.fsdp or launched)


def rank() -> int:
    """Number of this process, 0 in a single process; before the process group starts, what torchrun says."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else int(os.environ.get("RANK", 0))


def num_ranks() -> int:
    """Number of processes, 1 in a single process."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def print_main(*values: Any, file: TextIO | None = None) -> None:
    """Prints on rank 0 only.

    Args:
        *values: as for print.
        file: standard output by default.
    """
    if rank() == 0:
        print(*values, file=file, flush=True)


def gather_objects(value: Any) -> list[Any]:
    """`value` of every rank, in rank order; a collective.

    Args:
        value: what `wire.encode` takes. Tensors come back on the CPU.

    Raises:
        RuntimeError: other ranks are gone, or did not come in time; it names them.
    """
    if num_ranks() == 1:
        return [value]
    body = torch.frombuffer(bytearray(wire.encode(value)), dtype=torch.uint8)
    with _meeting():
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(num_ranks())]
        dist.all_gather(sizes, torch.tensor([len(body)]))
        longest = int(max(sizes))
        bodies = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
        dist.all_gather(bodies, torch.nn.functional.pad(body, (0, longest - len(body))))
    return [wire.decode(other[: int(size)].numpy().tobytes()) for other, size in zip(bodies, sizes, strict=True)]


@contextmanager
def _meeting() -> Iterator[None]:
    """Says which ranks were waited for, if the collectives in the block fail."""
    if _peers is not None:
        _peers.arrive()
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError):  # of this rank
        raise
    except RuntimeError as error:  # what every backend raises
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
    """Rows of this rank, of a tensor that has those of all ranks, one after the other.

    Args:
        values: [num_ranks * n, ...].
    """
    return values.chunk(num_ranks())[rank()]


def any_rank(flag: bool) -> bool:
    """Whether the flag is set on any rank; a collective."""
    return any(gather_objects(flag))


def sum_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Adds up gradients over all ranks, in place; a collective.

    Args:
        parameters: the same on every rank, in the same order; where a rank has no gradient, it counts as 0. Gradients
            of parameters that FSDP2 has sharded are sums already.
    """
    if num_ranks() == 1:
        return
    bucket: list[torch.Tensor] = []
    size = 0
    with _meeting():
        for parameter in parameters:
            if isinstance(parameter, DTensor):
                continue
            if parameter.grad is None:  # such as the vision tower on a rank without images
                parameter.grad = torch.zeros_like(parameter)
            if bucket and (size + parameter.numel() > BUCKET_ELEMENTS or bucket[0].dtype != parameter.dtype):
                _sum_bucket(bucket)
                bucket, size = [], 0
            bucket.append(parameter.grad)
            size += parameter.numel()
        if bucket:
            _sum_bucket(bucket)


def _sum_bucket(gradients: list[torch.Tensor]) -> None:
    if len(gradients) == 1 and gradients[0].is_contiguous():  # such as the embedding's: no copy of the largest one
        dist.all_reduce(gradients[0])
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


@contextmanager
def share_errors(phase: str, collective: bool = False) -> Iterator[None]:
    """All ranks leave the block, or all raise: the one that failed its own error, the others one that names it.

    Without this, the ranks that did not fail would wait in their next collective until its timeout. The block must hold
    no collective itself.

    Args:
        phase: what the block does, for the message.
        collective: the block does hold collectives, those of FSDP2, in which the other ranks may wait by then: an error
            is raised as it is, the process ends, and the launcher ends the others.

    Raises:
        RuntimeError: on the ranks that did not fail; OutageError if that is what failed on the others.
    """
    global _phase
    _phase = phase
    if collective:
        yield
        return
    error = None
    try:
        yield
    except Exception as caught:  # held for one collective, then raised
        error = caught
    failures = gather_objects(
        None if error is None else (isinstance(error, OutageError), f"{type(error).__name__}: {error}")
    )
    broken = {number: said for number, said in enumerate(failures) if said and not said[0]}
    if error is not None and not (broken and isinstance(error, OutageError)):
        raise error
    for number, (is_outage, text) in (broken or {n: said for n, said in enumerate(failures) if said}).items():
        kind = OutageError if is_outage else RuntimeError  # an outage only if all can go on to save
        raise kind(f"rank {number} failed in phase '{phase}': {text}")


def shutdown(code: int = 0) -> None:
    """Ends the process, if it is one of several: to be called last, when all ranks have done their work.

    Gloo's threads let go of Python objects whenever they get to it. One that does so while the interpreter shuts down
    aborts the process; and the destructor of the group waits for a thread that may wait for Python's lock. So nothing
    is shut down: what was printed is flushed, and the process exits.

    Args:
        code: exit code of the process.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    gather_objects(None)  # rank 0 may hold what the others meet at
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
