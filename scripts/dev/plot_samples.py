"""Compares settings by the completions that they sample, with the mean and the spread over seeds.

Run:   python scripts/dev/plot_samples.py runs/uniform-* runs/greso-* runs/dynamic-* --out samples.png --after 50
Needs: pip install matplotlib
Reads: RUN/metrics.jsonl and RUN/config.json. Folders that differ in a number at the end only, such as greso-0 and
greso-1, are seeds of one setting.
Draws: greedy `eval_reward`, and the share of groups with equal rewards, over the completions sampled. Those that
dynamic sampling replaces count, too; a replaced group is one with equal rewards. The line is the mean over seeds, the
band reaches from the lowest to the highest one.
Prints, per setting, mean and standard deviation over seeds:
completions   sampled in all steps, evaluations not included
equal         share of the groups sampled after step `--after` that have equal rewards
trained       share of the groups trained on after that step that have equal rewards: `zero_std`
skipped       share of the rows skipped after that step, with `curriculum greso`
at N          `eval_reward` where the setting with the fewest completions ends, and at the marks before
"""

import argparse
import itertools
import re
import sys
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]
import plot_run
import report_runs
from plot_run import plt

from common.base import console
from common.base.checks import require

POINTS = 200  # of a curve
WINDOW = 10  # steps in the rolling mean of the shares
MARKS = (0.25, 0.5, 1.0)  # of the fewest completions, where eval_reward is printed


def read(run: Path) -> dict[str, np.ndarray]:
    """Columns of a run by name, each with one entry per step, and its evaluations.

    Args:
        run: output folder of a training script of GSPO, GRPO or GKD.

    Returns:
        `step`, `sampled` (completions so far), `equal`, `trained`, `skipped`, `eval_at` (completions before an
        evaluation) and `eval`.

    Raises:
        ValueError: the run has no evaluation.
    """
    rows, size = plot_run.read_metrics(run), report_runs.samples_per_step(run)
    steps = [row for row in rows if any(row.get(name) is not None for name in ("zero_std", "learning_rate"))]
    replaced = np.array([row.get("resampled") or 0.0 for row in steps])
    trained = np.array([row.get("zero_std", np.nan) for row in steps], dtype=float)  # none in distillation
    sampled, step = np.cumsum(size * (1 + replaced)), np.array([row["step"] for row in steps])
    at, values = plot_run.series(rows, "eval_reward")
    require(len(at) > 0, f"{run} has no eval_reward", "settings are compared by it", "set eval_every")
    return {
        "step": step,
        "sampled": sampled,
        "equal": (replaced + trained) / (1 + replaced),
        "trained": trained,
        "skipped": np.array([row.get("skipped_prompts") or 0.0 for row in steps]),
        "eval_at": np.interp(at, [0, *step], [0, *sampled]),
        "eval": values,
    }


def rolling(values: np.ndarray) -> np.ndarray:
    """Mean [N] of each value and up to WINDOW - 1 values before it."""
    return np.array([values[max(0, i - WINDOW + 1) : i + 1].mean() for i in range(len(values))])


def summary(runs: list[dict[str, np.ndarray]], after: int, marks: list[float]) -> list[str]:
    """One row of the table.

    Args:
        runs: seeds of one setting.
        after: step up to which nothing counts for the shares.
        marks: completions at which `eval_reward` is printed.
    """
    cells = [f"{np.mean([run['sampled'][-1] for run in runs]):,.0f}"]
    for name in ("equal", "trained", "skipped"):
        shares = []
        for run in runs:
            late = run["step"] > after
            groups = np.diff(run["sampled"], prepend=0)[late] if name == "equal" else None
            shares.append(np.average(run[name][late], weights=groups))
        cells.append(f"{np.mean(shares):.3f} ± {np.std(shares, ddof=len(shares) > 1):.3f}")
    for mark in marks:
        reached = [np.interp(mark, run["eval_at"], run["eval"]) for run in runs]
        cells.append(f"{np.mean(reached):.3f} ± {np.std(reached, ddof=len(reached) > 1):.3f}")
    return cells


def draw(settings: dict[str, list[dict[str, np.ndarray]]], out: Path) -> None:
    """Draws both panels into the PNG file `out`."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), dpi=110, layout="constrained")
    styles = itertools.product(("-", "--", ":"), plot_run.COLORS)
    for (style, color), (name, runs) in zip(styles, settings.items(), strict=False):
        grid = np.linspace(0, min(run["eval_at"][-1] for run in runs), POINTS)
        reached = np.array([np.interp(grid, run["eval_at"], run["eval"]) for run in runs])
        equal = np.array([np.interp(grid, run["sampled"], rolling(run["equal"])) for run in runs])
        for axis, curves in zip(axes, (reached, equal), strict=True):
            axis.plot(grid, curves.mean(0), color=color, linestyle=style, linewidth=1.8, label=name)
            axis.fill_between(grid, curves.min(0), curves.max(0), color=color, alpha=0.15, linewidth=0)
    axes[0].set_title("eval_reward", loc="left")
    axes[1].set_title(f"Share of groups with equal rewards, mean of {WINDOW} steps", loc="left")
    for axis in axes:
        axis.set_xlabel("completions sampled")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    axes[0].legend(frameon=False, fontsize=8 if len(settings) > 6 else None, ncols=1 + len(settings) // 7)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    """Reads the runs, prints the table and draws the curves."""
    console.protect()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="output folder of a training script")
    parser.add_argument("--out", type=Path, default=Path("samples.png"), help="PNG file (default: %(default)s)")
    parser.add_argument("--after", type=int, default=0, help="last step of the first pass (default: %(default)s)")
    args = parser.parse_args(argv)
    settings: dict[str, list[dict[str, np.ndarray]]] = {}
    for path in args.runs:
        run = read(path)
        require(run["step"][-1] > args.after, f"--after {args.after}", f"{path} ends at step {run['step'][-1]}",
                "lower it")  # fmt: skip
        settings.setdefault(re.sub(r"[-_]?\d+$", "", path.resolve().name), []).append(run)
    fewest = min(run["eval_at"][-1] for runs in settings.values() for run in runs)
    marks = [mark * fewest for mark in MARKS]
    table = [["setting", "seeds", "completions", "equal", "trained", "skipped", *(f"at {mark:,.0f}" for mark in marks)]]
    table += [[name, str(len(runs)), *summary(runs, args.after, marks)] for name, runs in settings.items()]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    draw(settings, args.out)
    print(f"{args.out} written")


if __name__ == "__main__":
    main()
