"""Plans the memory of a training run on each GPU without loading a model: whether it fits, and what to change if not.

    python scripts/plan_memory.py gspo/gspo.py --policy_model Qwen/Qwen2.5-0.5B-Instruct            this machine's GPUs
    python scripts/plan_memory.py gspo/gspo_ddp.py --policy_model models/7b --gpu-gib 24 --ranks 2  two GPUs of 24 GiB
    python scripts/plan_memory.py gspo/gspo_multigpu.py --gpu-gib 24 --gpu-gib 24 --gpu-gib 16      a size for each GPU

The script is followed by its own options. A model may also be the path of a config.json, or a folder that holds only
that file. The last lines say how large micro-batches can be and how many completions are sampled at once. CPU memory,
used by offloaded states and models, is compared with this machine's, or with --cpu-gib.
Exit code: 0 the run fits, 1 it does not, 2 an option is wrong or there is no GPU to compare with.
"""

import argparse
import contextlib
import io
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def option_parser() -> argparse.ArgumentParser:
    """The options of the command line."""
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
        usage="%(prog)s SCRIPT [flags of the script] [--gpu-gib GIB] [--cpu-gib GIB] [--ranks N]",
    )  # fmt: skip
    found.add_argument("--gpu-gib", "--gpu_gib", type=float, action="append", default=[], metavar="GIB", help="memory "
                        "of every GPU, or repeated for each GPU (default: free memory of those here)")  # fmt: skip
    found.add_argument("--cpu-gib", "--cpu_gib", type=float, metavar="GIB", help="CPU memory (default: "
                        "this machine's, unless --gpu-gib is given)")  # fmt: skip
    found.add_argument("--ranks", type=int, default=1, metavar="N", help="processes that torchrun starts")
    return found


if __name__ == "__main__":
    option_parser().parse_known_args()  # answers --help and wrong options before torch is imported, which takes seconds

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.base import console, devices
from common.base.checks import require
from common.base.devices import GIB
from common.planning import advice, layouts, plan
from common.training import sharding


def main(argv: Sequence[str]) -> int:
    """Prints the plan and its verdict; returns the exit code."""
    console.protect()
    parser = option_parser()
    own, rest = parser.parse_known_args(argv)
    if not rest or rest[0].startswith("-"):
        parser.error("which training script? Give its path first, then its flags")
    try:
        for name, given in (("gpu", own.gpu_gib), ("cpu", [] if own.cpu_gib is None else [own.cpu_gib])):
            for gib in given:
                require(0 < gib < math.inf, f"--{name}-gib {gib}", "must be a number above 0", "give the GiB that are "
                        "there, 24 for instance")  # fmt: skip
        module, cfg = layouts.load(rest[0], rest[1:])
        startable(module, cfg, own.ranks)
        roles = layouts.all_ranks(module, cfg, own.ranks)
        # the script may have built-in models of its own
        model = module.toys.find(cfg.policy_model) if hasattr(module, "toys") else ""
        on_cpu = cfg.device == "cpu"
        if on_cpu:
            roles = [dict.fromkeys(roles[0], (0,))] * own.ranks
        planned = plan.of(cfg, roles, ranks=own.ranks, model=model, on_gpu=not on_cpu)
        capacity = {} if on_cpu else sizes(own.gpu_gib, planned, cfg)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if on_cpu:
        total = planned.gpus[0].always.total() / GIB
        print(f"on the CPU; weights and optimizer of all processes take {total:.2f} GiB of its memory")
        return 0
    if not capacity:
        print(planned)
        print("no GPU here to compare with: --gpu-gib 24 asks about cards of that size")
        return 2
    here = math.inf if own.gpu_gib else plan.host_bytes()
    host = here if own.cpu_gib is None else own.cpu_gib * GIB
    planned = planned.for_capacity(capacity, host)
    if not cfg.micro_batch_tokens:
        planned = planned.with_largest_micro_batches()
    print(planned)
    start = f"torchrun --nproc_per_node={own.ranks}" if own.ranks > 1 else "python"
    return verdict(planned, f"{start} {shlex.join(rest)}")


def startable(module: Any, cfg: Any, ranks: int) -> None:
    """Checks what the script checks when it starts with this many ranks.

    Raises:
        ValueError: the script would refuse to start.
    """
    require(ranks >= 1, f"--ranks {ranks}", "must be at least 1", "give the number of processes, one for each GPU")
    if layouts.is_per_rank(module):
        require(cfg.batch_size % ranks == 0, f"batch_size = {cfg.batch_size}", f"must be a multiple of the {ranks} "
                "ranks", f"{ranks * max(1, cfg.batch_size // ranks)} would do")  # fmt: skip
        rows = cfg.batch_size * (1 if getattr(cfg, "off_policy", False) else cfg.group_size) // ranks
        require(rows >= cfg.num_minibatches, f"num_minibatches = {cfg.num_minibatches}",
                f"must be at most the {rows} completions of a rank", "lower it, or raise batch_size")  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):  # its messages assume one process
        sharding.enabled(cfg)


def sizes(given: list[float], planned: plan.Plan, cfg: object) -> dict[int, float]:
    """Bytes that the run may use on each GPU, by number.

    Args:
        given: GiB, one size for all GPUs or one for each; empty: the free memory of this machine's GPUs.
        planned: plan that names the GPUs.
        cfg: the Config, with an optional `memory_limit`.

    Returns:
        Bytes by GPU number; empty if there is no GPU.

    Raises:
        ValueError: the number of sizes does not match, or a GPU does not exist.
    """
    numbers = sorted(planned.gpus)
    limit = getattr(cfg, "memory_limit", 0.0) * GIB or float("inf")
    if given:
        require(len(given) in (1, len(numbers)), f"--gpu-gib {' '.join(map(str, given))}",
                f"must be one size, or one for each of the GPUs {', '.join(map(str, numbers))}", "change it, --ranks, "
                "or the GPU numbers at the top of the script")  # fmt: skip
        each = given * len(numbers) if len(given) == 1 else given
        return {number: min(gib * GIB, limit) for number, gib in zip(numbers, each, strict=True)}
    found = torch.cuda.device_count()
    require(found == 0 or max(numbers) < found, f"the script names GPUs {', '.join(map(str, numbers))}",
            f"{found} are visible", "edit the numbers at its top, lower --ranks, or give --gpu-gib")  # fmt: skip
    return {i: min(devices.free_bytes(torch.device("cuda", i)), limit) for i in numbers if found}


def verdict(planned: plan.Plan, command: str) -> int:
    """Prints whether a plan fits and how much more would, or what to change; returns the exit code."""
    if not planned.fits():
        better = planned.advice()
        print(f"it does not fit; {better}")
        if better.changes:
            print(f"    {command} {advice.flags(better.changes)}")
            print(f"then {_most(better.plan)}")
            _unknown(better.plan)
        return 1
    print(f"it fits; {_most(planned)}")
    _unknown(planned)
    return 0


def _unknown(planned: plan.Plan) -> None:
    """Prints a note if the run needs CPU memory that was not compared."""
    if planned.pinned and planned.host_capacity == math.inf:
        print("CPU memory is not compared: --cpu-gib 64 asks about a machine with 64 GiB of it")


def _most(planned: plan.Plan) -> str:
    """The largest micro-batch and number of concurrent completions that fit."""
    cfg = planned.cfg
    tokens, most = planned.largest()
    rows = cfg.batch_size * cfg.group_size
    at_once = f"all {rows}" if most >= rows else f"{most} of {rows}"
    return (
        f"micro_batch_tokens can be up to {tokens}; {at_once} completions of a step (batch_size {cfg.batch_size} x "
        f"group_size {cfg.group_size}) are sampled at once{f', and {most} could be' if most > rows else ''}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
