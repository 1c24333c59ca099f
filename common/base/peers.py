"""Which rank is missing, if a collective failed."""

import os
import socket
import time
from pathlib import Path

import torch.distributed as dist

EXIT_SECONDS = 3.0  # a killed process closes its connections shortly before it is gone


class Peers:
    """Host, process id and progress of every rank, kept in their common store for error messages."""

    def __init__(self, rank: int, num_ranks: int, store: dist.Store, timeout_minutes: float):
        """Publishes host and process id of this rank.

        Args:
            rank: of this process.
            num_ranks: number of processes.
            store: shared by all ranks.
            timeout_minutes: of collectives, for the message.
        """
        self.rank, self.num_ranks, self.store, self.timeout_minutes = rank, num_ranks, store, timeout_minutes
        self.count = 0
        self.store.set(f"meeting{rank}", "0")  # first: `missing` reads it as soon as the next key exists
        self.store.set(f"process{rank}", f"{os.getpid()} {socket.gethostname()}")

    def arrive(self) -> None:
        """Publishes that this rank has reached its next collective."""
        self.count += 1
        self.store.set(f"meeting{self.rank}", str(self.count))

    def missing(self) -> str:
        """The ranks whose process is gone, or else those that did not reach this collective, as text; "" if unknown.

        Processes on other machines cannot be checked.
        """
        try:
            if not self.store.check([f"process{rank}" for rank in range(self.num_ranks)]):
                return "a rank did not come as far as its first meeting"
            processes = [self.store.get(f"process{rank}").decode().split(" ", 1) for rank in range(self.num_ranks)]
            counts = [int(self.store.get(f"meeting{rank}")) for rank in range(self.num_ranks)]
        except RuntimeError:  # torch.distributed.DistError: rank 0, which owned the store, is gone
            return "" if self.rank == 0 else "rank 0 is gone, or cut off"
        here = [(rank, int(pid)) for rank, (pid, host) in enumerate(processes) if host == socket.gethostname()]
        end = time.monotonic() + EXIT_SECONDS
        while not (gone := [(rank, pid) for rank, pid in here if not is_alive(pid)]) and time.monotonic() < end:
            time.sleep(0.05)
        if gone:
            return ", ".join(f"rank {rank} (process {pid}) is gone" for rank, pid in gone)
        late = [rank for rank, count in enumerate(counts) if count < self.count]
        named = ", ".join(f"rank {rank} (process {processes[rank][0]} on {processes[rank][1]})" for rank in late)
        in_time = f"did not come within {self.timeout_minutes:g} minutes; if it is only slow, raise TIMEOUT_MINUTES"
        return f"{named} {in_time}" if late else ""


def is_alive(pid: int) -> bool:
    """Whether a process of this machine runs; a zombie does not.

    Args:
        pid: of the process.
    """
    if Path("/proc/self").exists():
        try:
            return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
        except (FileNotFoundError, ProcessLookupError):
            return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
