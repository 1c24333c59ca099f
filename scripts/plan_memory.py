"""Does a model fit, and what to change if not: a training run's memory on each GPU, planned without loading anything.

    python scripts/plan_memory.py gspo/gspo.py --policy_model Qwen/Qwen2.5-0.5B-Instruct           for the GPUs here
    python scripts/plan_memory.py gspo/gspo_ddp.py --policy_model models/7b --gpu-gib 24 --ranks 2    for two cards
    python scripts/plan_memory.py gspo/gspo_multigpu.py --gpu-gib 24 --gpu-gib 24 --gpu-gib 16    one size for each GPU

After the script come its own flags, as it takes them. A model may also be a folder with nothing but its config.json, or
the path of that file. Rules of thumb such as 4 prompts x 8 completions from 48 GB on are only that: the last lines say
what fits. Exit code: 0 it fits, 1 it does not, 2 a wrong option, or no GPU to compare with.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import devices, layouts, plan
from common.config import require
from common.devices import GIB


def main(argv: Sequence[str]) -> int:
    """Prints the plan and what follows from it.

    Args:
        argv: the arguments.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
        usage="%(prog)s SCRIPT [flags of the script] [--gpu-gib GIB] [--ranks N]",
    )  # fmt: skip
    parser.add_argument("--gpu-gib", "--gpu_gib", type=float, action="append", default=[], metavar="GIB", help="memory "
                        "of each GPU, or once for each of them (default: what is free on those here)")  # fmt: skip
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="processes that torchrun starts here")
    own, rest = parser.parse_known_args(argv)
    if not rest or rest[0].startswith("-"):
        parser.error("which training script? Give its path first, then its flags")
    module, cfg = layouts.load(rest[0], rest[1:])
    try:
        roles = layouts.all_ranks(module, cfg, own.ranks)
        # built-in models of a script's own
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
    planned = planned.within(capacity)
    print(planned)
    return verdict(planned)


def sizes(given: list[float], planned: plan.Plan, cfg: object) -> dict[int, float]:
    """Bytes of each GPU that a run may take.

    Args:
        given: GiB, of all GPUs or one after the other; empty: those of this machine.
        planned: the plan, which knows what GPUs the script names.
        cfg: the Config, which may have a limit.

    Returns:
        By number; empty if there is no GPU.

    Raises:
        ValueError: neither one size nor one for each GPU; or a GPU that is not there.
    """
    numbers = sorted(planned.gpus)
    limit = getattr(cfg, "memory_limit", 0.0) * GIB or float("inf")
    if given:
        require(min(given) > 0 and len(given) in (1, len(numbers)), f"--gpu-gib {' '.join(map(str, given))}",
                f"must be one size, or one for each of the GPUs {', '.join(map(str, numbers))}", "change it, --ranks, "
                "or the GPU numbers at the top of the script")  # fmt: skip
        each = given * len(numbers) if len(given) == 1 else given
        return {number: min(gib * GIB, limit) for number, gib in zip(numbers, each, strict=True)}
    found = torch.cuda.device_count()
    require(found == 0 or max(numbers) < found, f"the script names GPUs {', '.join(map(str, numbers))}",
            f"{found} are visible", "edit the numbers at its top, lower --ranks, or give --gpu-gib")  # fmt: skip
    return {i: min(devices.free_bytes(torch.device("cuda", i)), limit) for i in numbers if found}


def verdict(planned: plan.Plan) -> int:
    """Prints whether a plan fits, how much more would, or what to change.

    Args:
        planned: for GPUs of known size.

    Returns:
        The exit code.
    """
    if not planned.fits():
        advice = planned.advice()
        print(f"it does not fit; {advice}")
        if advice.changes:
            print(f"then {_most(advice.plan)}")
        return 1
    print(f"it fits; {_most(planned)}")
    return 0


def _most(planned: plan.Plan) -> str:
    """How much more would fit."""
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
