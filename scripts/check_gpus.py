"""Checks the GPUs that a process sees, who else uses them, and which role a training script gives to each.

Run:   python scripts/check_gpus.py                                       the GPUs and whether they work
       python scripts/check_gpus.py gspo/gspo_multigpu.py --kl_coef 0.1   a script with its options
       torchrun --nproc_per_node=2 scripts/check_gpus.py gspo/gspo_ddp.py
       python scripts/check_gpus.py --bandwidth                           also the bandwidth of copies
Options, before the script: --bandwidth, --no-probe, --timeout SECONDS.

No model is loaded. Several ranks all-reduce 64 MiB over NCCL, or gloo on CPUs, and check the sum. Exit code: 0 the
script can start, 1 it cannot, and the last lines say why and what to change, 2 the command line is wrong. Other
processes on a GPU cause a warning. "GPU" is the number that the process uses, "nvidia-smi" that of the card, since
CUDA_VISIBLE_DEVICES renumbers them. Example output for two ranks on cards 2 and 3, the second of which is in use:

    rank  local rank  of  host   pid   CUDA_VISIBLE_DEVICES  GPUs  current  torch         CUDA  driver
    0     0           2   node1  4121  2,3                   2     cuda:0   2.11.0+cu130  13.0  580.95.05
    1     1           2   node1  4122  2,3                   2     cuda:1   2.11.0+cu130  13.0  580.95.05

    GPU  nvidia-smi  PCI bus           name         GiB    free GiB  UUID          others
    0    2           00000000:4B:00.0  NVIDIA H200  140.0  140.0     GPU-5d0c7a1e
    1    3           00000000:5C:00.0  NVIDIA H200  140.0  98.0      GPU-91b2e0f4  pid 811 python3 41.2 GiB

    gspo/gspo_ddp.py
    rank  role     GPU  nvidia-smi  name         free GiB
    0     policy   0    2           NVIDIA H200  140.0
    0     rollout  0    2           NVIDIA H200  140.0
    1     policy   1    3           NVIDIA H200  98.0
    1     rollout  1    3           NVIDIA H200  98.0

    all-reduce of 64 MiB by 2 ranks over nccl: right, ... GB/s

    direct copies from GPU (row) to GPU (column)
    GPU  0    1
    0         yes
    1    yes

    warning: host node1, GPU 1 (3 in nvidia-smi): used by pid 811 python3 41.2 GiB; less is left for a run
"""

import argparse
import dataclasses
import math
import os
import socket
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any


def option_parser() -> argparse.ArgumentParser:
    """The options of the command line."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--bandwidth", action="store_true", help="measure the bandwidth of copies")
    found.add_argument("--no-probe", "--no_probe", action="store_true", help="no all-reduce and no copies")
    found.add_argument("--timeout", type=float, default=60.0, help="seconds for an all-reduce (default: %(default)s)")
    found.add_argument("script", nargs="?", help="training script")
    found.add_argument("flags", nargs=argparse.REMAINDER, help="options of the script")
    return found


if __name__ == "__main__":
    option_parser().parse_args()  # answers --help and wrong options before torch is imported, which takes seconds

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.base import console, distributed
from common.base.devices import GIB
from common.planning import cards, layouts, probes
from common.planning.cards import Card, Machine

IN_USE = GIB  # memory taken before we start that counts as used by others


@dataclass(frozen=True)
class Process:
    """What one rank sees.

    Attributes:
        ranks: world size.
        visible: CUDA_VISIBLE_DEVICES; None: not set.
        versions: of torch, its CUDA, and the driver.
        current: default device.
        gpus: by number.
        roles: GPU numbers by role of the script; empty without a script, no numbers on the CPU.
        problems: why a run would not start.
    """

    host: str
    pid: int
    rank: int
    local_rank: int
    ranks: int
    visible: str | None
    versions: tuple[str, str, str]
    current: str
    gpus: tuple[Card, ...]
    roles: dict[str, tuple[int, ...]]
    problems: tuple[str, ...]

    def card(self, number: int) -> Card | None:
        """The GPU with this number; None if there is none."""
        return self.gpus[number] if 0 <= number < len(self.gpus) else None

    @property
    def trained(self) -> tuple[int, ...]:
        """Numbers of the GPUs that this rank trains on, which no other rank may use."""
        return self.roles.get("policy") or self.roles.get("student") or (() if self.roles else (self.local_rank,))


def look(machine: Machine, module: ModuleType | None = None, cfg: Any = None) -> Process:
    """Describes this process.

    Args:
        machine: from `cards.query`.
        module: of the training script, if there is one.
        cfg: its Config.
    """
    rank, local_rank, ranks = (int(os.environ.get(name, at)) for name, at in
                               (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)))  # fmt: skip
    visible, found, wrong, seen, current, roles = os.environ.get("CUDA_VISIBLE_DEVICES"), 0, [], [], "cpu", {}
    try:
        found = torch.cuda.device_count()
        if 0 < local_rank < found:
            torch.cuda.set_device(local_rank)  # as training does
        seen = cards.visible(machine)
        current = f"cuda:{torch.cuda.current_device()}" if found else current
    except RuntimeError as error:
        wrong.append(f"{found} GPU(s): CUDA does not start, {error}; see whether nvidia-smi works")
    wrong.append(cards.why_hidden(visible, machine, found, torch.version.cuda))
    if module is not None:
        try:
            roles = layouts.roles(module, cfg, int(os.environ.get("LOCAL_WORLD_SIZE", 1)), local_rank)
            layouts.check(module, cfg)
        except ValueError as error:
            wrong.append(str(error))
        if cfg.device == "cpu" or (cfg.device == "auto" and not found):
            roles = dict.fromkeys(roles, ())
    elif 0 < found <= local_rank:
        wrong.append(f"LOCAL_RANK = {local_rank}: every rank takes the GPU of this number, and it sees {found}; "
                     f"lower --nproc_per_node to {found}")  # fmt: skip
    versions = torch.__version__, torch.version.cuda or "none", machine.driver or "unknown"
    return Process(socket.gethostname(), os.getpid(), rank, local_rank, ranks, visible, versions, current,
                   tuple(seen), roles, tuple(filter(None, wrong)))  # fmt: skip


def problems(processes: Sequence[Process]) -> list[str]:
    """Why a run would not start: problems of each process, and GPUs that several would train on."""
    ranks_of: dict[str, list[int]] = {}
    for process in processes:
        for problem in process.problems:
            ranks_of.setdefault(problem, []).append(process.rank)
    found = [text if len(processes) == 1 else f"on rank {_and(ranks)}: {text}" for text, ranks in ranks_of.items()]
    owners: dict[tuple[str, str], list[int]] = {}
    for process in processes:
        for card in filter(None, map(process.card, set(process.trained))):
            owners.setdefault((process.host, card.uuid), []).append(process.rank)
    for (host, uuid), ranks in owners.items():
        if len(ranks) > 1:
            found.append(f"ranks {_and(ranks)} on {host}, all with {uuid}: each must train on a GPU of its own; start "
                         "them with torchrun, which numbers them, and the same CUDA_VISIBLE_DEVICES")  # fmt: skip
    return found


def warnings(processes: Sequence[Process], machine_error: str = "") -> list[str]:
    """Warnings about GPUs in use, and about nvidia-smi if it failed with `machine_error`."""
    found = [f"nvidia-smi does not work: {machine_error}"] if machine_error else []
    for (host, _), card in {(p.host, card.uuid): card for p in processes for card in p.gpus}.items():
        used = card.total - card.free
        if card.users or used > IN_USE:
            who = _and(card.users) if card.users else f"others, {used / GIB:.1f} GiB"
            where = f"host {host}, GPU {card.number} ({card.physical} in nvidia-smi)"
            found.append(f"{where}: used by {who}; less is left for a run")
    return found


def _and(parts: Iterable[Any]) -> str:
    return " and ".join(map(str, parts))


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A text table with aligned columns under the names in `head`."""
    lines = [[*head], *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def report(processes: Sequence[Process], script: str = "") -> str:
    """The tables of processes, GPUs, and roles if there is a script."""
    seen = [(p.rank, p.local_rank, p.ranks, p.host, p.pid, "not set" if p.visible is None else p.visible or "''",
             len(p.gpus), p.current, *p.versions) for p in processes]  # fmt: skip
    parts = [table(("rank", "local rank", "of", "host", "pid", "CUDA_VISIBLE_DEVICES", "GPUs", "current", "torch",
                    "CUDA", "driver"), seen)]  # fmt: skip
    groups: dict[tuple, list[Process]] = {}  # ranks that number the same GPUs alike
    for process in processes:
        groups.setdefault((process.host, *(card.uuid for card in process.gpus)), []).append(process)
    for members in groups.values():
        listed = [(c.number, c.physical, c.bus, c.name, f"{c.total / GIB:.1f}", f"{c.free / GIB:.1f}", c.uuid,
                   ", ".join(c.users)) for c in members[0].gpus]  # fmt: skip
        if listed:
            title = f"as rank {_and(p.rank for p in members)} on {members[0].host} numbers them:\n"
            head = ("GPU", "nvidia-smi", "PCI bus", "name", "GiB", "free GiB", "UUID", "others")
            parts.append((title if len(groups) > 1 else "") + table(head, listed))
    rows = [(p.rank, role, *_place(p, number)) for p in processes for role, numbers in p.roles.items()
            for number in numbers or (None,)]  # fmt: skip
    if rows:
        parts.append(f"{script}\n" + table(("rank", "role", "GPU", "nvidia-smi", "name", "free GiB"), rows))
    return "\n\n".join(parts)


def _place(process: Process, number: int | None) -> tuple[str, ...]:
    if number is None:
        return "cpu", "", "", ""
    card = process.card(number)
    if card is None:
        return str(number), "", "not there", ""
    return str(number), card.physical, card.name, f"{card.free / GIB:.1f}"


def probe(processes: Sequence[Process], on_cpu: bool, fast: bool, seconds: float) -> tuple[list[str], list[str]]:
    """Tests communication between the GPUs; a collective.

    Args:
        processes: all ranks.
        on_cpu: whether the script would run on the CPU.
        fast: also measure the bandwidth of copies.
        seconds: limit for an all-reduce.

    Returns:
        Texts to print, and problems.
    """
    own, said, wrong = processes[distributed.rank()], [], []
    on_cpu = on_cpu or not all(process.gpus for process in processes)
    if len(processes) > 1:
        results = distributed.gather_objects(probes.all_reduce(torch.device("cpu" if on_cpu else own.current), seconds))
        wrong += [text for right, text in results if not right][:1]
        said += [results[0][1]] if not wrong else []
    if own.rank == 0 and not on_cpu and len(own.gpus) > 1:
        head = [str(gpu.number) for gpu in own.gpus]
        rows = [[number, *row] for number, row in zip(head, probes.peer_access(own.gpus), strict=True)]
        said.append("direct copies from GPU (row) to GPU (column)\n" + table(("GPU", *head), rows))
    if own.rank == 0 and not on_cpu and fast:
        gpus = [gpu for gpu in own.gpus if gpu.free > 4 * probes.COPIED]
        head = [str(gpu.number) for gpu in gpus]
        rows = [[number, *row] for number, row in zip(head, probes.bandwidth(gpus), strict=True)]
        title = "copies in GiB/s, from and to pinned CPU memory, and to each GPU\n"
        said.append(title + table(("GPU", "from CPU", "to CPU", *head), rows))
    return said, wrong


def advice(processes: Sequence[Process], module: ModuleType | None, script: str) -> list[str]:
    """Hints about the way this was started: no GPU, or one process for a script that needs one per GPU."""
    found = len(processes[0].gpus)
    if module is None and not found:
        return ["no GPU: training scripts run on the CPU, which is for the built-in models"]
    if module is not None and layouts.is_per_rank(module) and len(processes) == 1 and found != 1:
        return [f"{script} is one process per GPU, and this is one process; to check N of them:\n"
                f"    torchrun --nproc_per_node={found or 2} scripts/check_gpus.py {script}"]  # fmt: skip
    return []


def main(argv: Sequence[str] | None = None) -> int:
    """Checks everything and prints on rank 0; returns the exit code, on every rank."""
    console.protect()
    parser = option_parser()
    args = parser.parse_args(argv)
    if not 0 < args.timeout < math.inf:
        parser.error(f"--timeout {args.timeout:g}: must be a number of seconds above 0; 60 is usual")
    if own := {"--bandwidth", "--no-probe", "--no_probe", "--timeout"} & {flag.split("=")[0] for flag in args.flags}:
        parser.error(f"{' '.join(own)} behind {args.script}: options of this tool stand before the script")
    module, cfg = None, None
    if args.script:
        try:
            module, cfg = layouts.load(args.script, args.flags)
        except ValueError as error:
            parser.error(str(error))
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        meeting = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        with probes.watchdog(args.timeout, f"all ranks must meet at {meeting}; see whether all were started"):
            dist.init_process_group("gloo")
    machine = cards.query()
    distributed.gather_objects(None)  # a barrier: no rank uses a GPU before all have listed its users
    found = distributed.gather_objects(dataclasses.asdict(look(machine, module, cfg)))
    processes = [Process(**{**own, "gpus": tuple(Card(**gpu) for gpu in own["gpus"])}) for own in found]
    distributed.print_main(report(processes, args.script or ""))
    wrong = problems(processes)
    if not wrong and not args.no_probe:
        on_cpu = any(() in process.roles.values() for process in processes)
        said, wrong = probe(processes, on_cpu, args.bandwidth, args.timeout)
        for text in said:
            distributed.print_main(f"\n{text}")
    notes = [f"warning: {text}" for text in warnings(processes, machine.error)]
    lines = [*advice(processes, module, args.script), *notes, *(f"error: {text}" for text in wrong)]
    if lines:
        distributed.print_main("\n" + "\n".join(lines))
    return int(bool(wrong))


if __name__ == "__main__":
    code = main()
    distributed.shutdown(code)
    sys.exit(code)
