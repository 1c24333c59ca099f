"""Prints what runs took and what they reached: one row per run, and a total.

Run:   python scripts/report_runs.py runs/sft runs/gspo runs/gkd
       python scripts/report_runs.py runs/gspo --json      one JSON object with `runs` and `total`
Reads: RUN/metrics.jsonl and RUN/config.json, also while the run is still going on.
steps     those that are finished
samples   completions trained on: batch_size * group_size * steps, or batch_size * steps without group_size
tokens    of the completions: tokens_per_second * seconds, summed over the steps
seconds   of the steps, of saving, and of the evaluations as far as metrics.jsonl holds their time; without the start
GiB       peak memory of the fullest GPU
first, best, last      eval_reward of the evaluations; "-": none
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.base import console
from common.base.checks import require

SUMS = ("steps", "samples", "tokens", "seconds")
NUMBERS = ("step", "seconds", "tokens_per_second", "eval_reward")
EVALS = {"first": "first_eval_reward", "best": "best_eval_reward", "last": "last_eval_reward"}


def is_number(value: Any) -> bool:
    """Whether a measure is a number, or null for one that was not finite."""
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def read_lines(run: Path) -> dict[int, dict[str, Any]]:
    """The lines of RUN/metrics.jsonl by step; lines of one step are merged, later values win.

    Args:
        run: output folder of a training script.

    Returns:
        Metrics by step, ascending. `seconds_outside` holds the times of lines that are not a step's, by name.

    Raises:
        FileNotFoundError: the run has no metrics.jsonl.
        ValueError: a line other than the last is not a JSON object with a step.
    """
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; RUN must be the output folder of a training script: check it.")
    texts = path.read_text(encoding="utf-8", errors="replace").split("\n")
    found: dict[int, dict[str, Any]] = {}
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
            if not all(map(is_number, (line[name] for name in line if name in NUMBERS or name.startswith("seconds_")))):
                raise TypeError("a measure is no number")
            if not all(map(is_number, line.get("memory_gib") or ())):
                raise TypeError("memory_gib holds other things than numbers")
            row = found.setdefault(line["step"] + 0, {"seconds_outside": {}})  # raises unless the step is a number
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, json.JSONDecodeError) and not any(later.strip() for later in texts[number:]):
                print(f"note: {path}: the last line is cut off and was skipped.", file=sys.stderr)
                continue
            raise ValueError(
                f"{path}, line {number} is {text[:60]!r}; it must be a JSON object with a step and numbers: repair or "
                "delete it."
            ) from error
        if "seconds" not in line:  # a checkpoint or an evaluation; `seconds` of a step is the sum of its own
            row["seconds_outside"] |= {name: line[name] for name in line if name.startswith("seconds_")}
        row |= line
    return dict(sorted(found.items()))


def samples_per_step(run: Path) -> int:
    """Completions of one step, from RUN/config.json.

    Args:
        run: output folder of a training script.

    Raises:
        ValueError: the file is missing, is not JSON, or has no batch_size.
    """
    path = run / "config.json"
    try:
        options = json.loads(path.read_text(encoding="utf-8"))
        sizes = options["batch_size"], options.get("group_size", 1)
        if not all(isinstance(size, int) for size in sizes):
            raise TypeError(f"sizes are {sizes}")
        return sizes[0] * sizes[1]
    except (OSError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path}: {type(error).__name__} ({error}); it must hold the options of the run, with batch_size: "
            "copy it from where the run was trained."
        ) from error


def summarise(run: Path) -> dict[str, Any]:
    """What a run took and reached.

    Args:
        run: output folder of a training script.

    Returns:
        By name: run, steps, samples, tokens, seconds, memory_gib, and the first, best and last eval_reward; None
        where nothing was measured.

    Raises:
        FileNotFoundError: as in `read_lines`.
        ValueError: as in `read_lines` and `samples_per_step`, or the run has finished no step.
    """
    rows = read_lines(run)
    steps = [row for row in rows.values() if row.get("seconds") is not None]
    require(bool(steps), f"{run / 'metrics.jsonl'} holds no finished step", "a run needs one to be reported",
            "report it once it has taken one")  # fmt: skip
    outside = [value for row in rows.values() for value in row["seconds_outside"].values() if value is not None]
    memory = [gib for row in steps for gib in row.get("memory_gib") or ()]
    rewards = [row["eval_reward"] for row in rows.values() if row.get("eval_reward") is not None]
    return {
        "run": str(run),
        "steps": len(steps),
        "samples": samples_per_step(run) * len(steps),
        "tokens": round(sum((row.get("tokens_per_second") or 0) * row["seconds"] for row in steps)),
        "seconds": sum(row["seconds"] for row in steps) + sum(outside),
        "memory_gib": max(memory, default=None),
        "first_eval_reward": rewards[0] if rewards else None,
        "best_eval_reward": max(rewards, default=None),
        "last_eval_reward": rewards[-1] if rewards else None,
    }


def total_of(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums over runs of what they took, and the highest of their peaks of memory."""
    memory = [report["memory_gib"] for report in reports if report["memory_gib"] is not None]
    return {name: sum(report[name] for report in reports) for name in SUMS} | {"memory_gib": max(memory, default=None)}


def table(reports: list[dict[str, Any]]) -> str:
    """A row per run and one of the total, with columns as wide as they need."""
    cells = [["run", *SUMS, "GiB", *EVALS]]
    for report in [*reports, {"run": "total"} | total_of(reports)]:
        memory, rewards = report["memory_gib"], [report.get(name) for name in EVALS.values()]
        took = [*(f"{report[name]:,}" for name in SUMS[:-1]), f"{report['seconds']:,.1f}"]
        reached = ["-" if reward is None else f"{reward:.3f}" for reward in rewards]
        cells.append([report["run"], *took, "-" if memory is None else f"{memory:.2f}", *reached])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for name, *numbers in cells:
        padded = [number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *padded]))
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Prints the table, or JSON."""
    console.protect()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="output folder of a training script")
    parser.add_argument("--json", action="store_true", help="one JSON object in place of the table")
    args = parser.parse_args(argv)
    reports = [summarise(run) for run in args.runs]
    print(json.dumps({"runs": reports, "total": total_of(reports)}) if args.json else table(reports))


if __name__ == "__main__":
    main()
