"""Plots the metrics of one or several runs in one figure.

Run:   python scripts/plot_run.py runs/grpo --out grpo.png
       python scripts/plot_run.py runs/grpo runs/gspo runs/dr_grpo --out compare.png      overlaid, one colour per run
Needs: pip install matplotlib
Reads: RUN/metrics.jsonl, one JSON object per step, also while the run is still going on. A single run with several
reward functions gets a curve for each.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.base import console

try:
    import matplotlib

    matplotlib.use("Agg")  # the default backend may need a display
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise ImportError("Drawing needs one more package: pip install matplotlib") from error

# One panel per row: metric names and titles. A panel shows the first name that any run has, for all runs: a KL to the
# reference and one to the rollout policy must not share an axis.
PANELS = (
    {"reward": "Reward"},
    {"completion_length": "Completion length (tokens)"},
    {"clip_fraction": "Clip fraction", "divergence": "Loss (nats per token)", "nll": "Loss (nats per token)"},
    {
        "kl_ref": "KL to reference (nats)",
        "kl_old": "KL to rollout policy (nats)",
        "reverse_kl": "KL to teacher (nats)",
        "token_accuracy": "Token accuracy",
    },
    {"entropy": "Entropy (nats per token)"},
    {"grad_norm": "Gradient norm"},
    {"seconds": "Time per step (s)"},
    {"memory_gib": "Peak memory, fullest GPU (GiB)", "host_memory_gib": "Peak memory, host (GiB)"},
)
WINDOW = 5  # steps in the rolling mean
UNSMOOTHED = {"seconds", "memory_gib", "host_memory_gib"}  # a mean would smear single slow steps
FROM_ZERO = UNSMOOTHED | {"clip_fraction"}  # a truncated axis exaggerates small changes
# Colour-blind safe, one per run
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MUTED = "#777777"
STEPS = (1, 2, 2.5, 5, 10)  # tick distances, times a power of ten
EVAL_MARKER = {"linestyle": "", "marker": "D", "markersize": 6.5, "markeredgecolor": "white", "zorder": 3}


def read_metrics(run: Path) -> list[dict]:
    """Reads RUN/metrics.jsonl sorted by step; lines of one step are merged, later values win.

    Raises:
        FileNotFoundError: the run has no metrics.jsonl.
        ValueError: the file holds no step, or a line other than the last is broken.
    """
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; RUN must be the output folder of a training script: check it.")
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    rows = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            row["step"] + 0  # raises unless the step is a number
            rows[row["step"]] = rows.get(row["step"], {}) | row  # an evaluation is a separate line
        except json.JSONDecodeError as error:
            if any(later.strip() for later in lines[number:]):
                raise ValueError(f"{path}, line {number} is not JSON ({error}); delete or repair that line.") from error
            print(f"note: {path}: the last line is cut off and was skipped (a run that still writes, or was killed).")
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number} is not an object with a step; is this a metrics file?") from error
    if not rows:
        raise ValueError(f"{path} holds no finished step; draw the run once it has taken one.")
    return [rows[step] for step in sorted(rows)]


def series(rows: list[dict], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps at which `name` was logged and its values, both [N]; a list counts by its maximum."""
    values = [max(row[name], default=None) if isinstance(row.get(name), list) else row.get(name) for row in rows]
    pairs = [(row["step"], value) for row, value in zip(rows, values, strict=True) if value is not None]
    for step, value in pairs:
        if not isinstance(value, (int, float)):
            raise ValueError(f"{name} = {value!r} in step {step}: metrics are numbers; is this a metrics file?")
    steps, values = np.array(pairs, dtype=float).reshape(-1, 2).T
    return steps, values


def rolling_mean(values: np.ndarray) -> np.ndarray:
    """Mean [N] of each value and up to WINDOW - 1 values before it."""
    return np.array([values[max(0, i - WINDOW + 1) : i + 1].mean() for i in range(len(values))])


def draw_panel(axis: plt.Axes, titles: dict[str, str], runs: dict[str, list[dict]]) -> None:
    """Draws one metric of all runs that logged it, in steps or evaluations, into a panel."""
    logged = {key for rows in runs.values() for row in rows for key, value in row.items() if value not in (None, [])}
    name = next((name for name in titles if {name, f"eval_{name}"} & logged), None)
    axis.set_title(titles[name or next(iter(titles))], loc="left")
    axis.spines[["top", "right"]].set_visible(False)
    if name is None:
        axis.set(xticks=[], yticks=[])
        axis.text(0.5, 0.5, "not logged", transform=axis.transAxes, ha="center", va="center", color=MUTED)
        return
    for color, rows in zip(COLORS, runs.values(), strict=False):
        steps, values = series(rows, name)
        marker = "." if len(steps) == 1 else ""  # a line through one point is invisible
        if name not in UNSMOOTHED and len(values):
            axis.plot(steps, values, color=color, alpha=0.22, linewidth=0.9)
            values = rolling_mean(values)
        axis.plot(steps, values, color=color, linewidth=1.2 if name in UNSMOOTHED else 1.8, marker=marker)
        axis.plot(*series(rows, f"eval_{name}"), color=color, **EVAL_MARKER)
        draw_interval(axis, rows, f"eval_{name}", color)
    if name == "reward" and len(runs) == 1:
        draw_functions(axis, next(iter(runs.values())))
    axis.grid(alpha=0.25)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=STEPS, integer=True))
    axis.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=STEPS))
    if name in FROM_ZERO:
        axis.set_ylim(0, 1.1 * axis.get_ylim()[1])


def draw_interval(axis: plt.Axes, rows: list[dict], name: str, color: str) -> None:
    """Adds the 95 % interval of an evaluated metric as a light band, if the run has logged it."""
    known = [row for row in rows if row.get(f"{name}_low") is not None and row.get(f"{name}_high") is not None]
    if known:
        (steps, low), (_, high) = series(known, f"{name}_low"), series(known, f"{name}_high")
        axis.fill_between(steps, low, high, color=color, alpha=0.12, linewidth=0)


def draw_functions(axis: plt.Axes, rows: list[dict]) -> None:
    """Adds the values of each reward function to the reward of a run, if it has several."""
    logged = dict.fromkeys(name for row in rows for name in row if name.startswith("reward_") and name != "reward_std")
    names = [name for name in logged if len(series(rows, name)[0])]
    if len(names) < 2:
        return
    for color, name in zip(COLORS[1:], names, strict=False):  # the first colour is the run's
        steps, values = series(rows, name)
        axis.plot(steps, rolling_mean(values), color=color, linewidth=1.1, label=name.removeprefix("reward_"))
        axis.plot(*series(rows, f"eval_{name}"), color=color, **{**EVAL_MARKER, "markersize": 4.5})
    axis.legend(fontsize=7.5, frameon=False, title=f"functions, mean of {WINDOW} steps", title_fontsize=7.5)


def draw(runs: dict[str, list[dict]], out: Path) -> None:
    """Draws all panels of all runs into the PNG file `out`, 1400 x 700 pixels."""
    plt.rcParams.update({"font.size": 9.5, "axes.titlesize": 10.5, "axes.titleweight": "bold"})
    figure, axes = plt.subplots(2, 4, figsize=(14, 7), dpi=100, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08, wspace=0.02, hspace=0.04)
    for axis, titles in zip(axes.flat, PANELS, strict=True):
        draw_panel(axis, titles, runs)
    for axis in axes[1]:
        axis.set_xlabel("step")
    entries = {name: plt.Line2D([], [], color=color, linewidth=2.5) for name, color in zip(runs, COLORS, strict=False)}
    entries[f"mean of {WINDOW} steps"] = plt.Line2D([], [], color=MUTED, linewidth=1.8)
    entries["each step"] = plt.Line2D([], [], color=MUTED, linewidth=0.9, alpha=0.5)
    if any(len(series(rows, "eval_reward")[0]) for rows in runs.values()):
        interval = any(len(series(rows, "eval_reward_low")[0]) for rows in runs.values())
        entries["evaluation, 95 % interval" if interval else "evaluation"] = plt.Line2D(
            [], [], color=MUTED, **EVAL_MARKER
        )
    figure.legend(entries.values(), entries.keys(), loc="outside upper center", ncols=6, frameon=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial{out.suffix}")  # replaces an earlier picture only when complete
    figure.savefig(partial)
    partial.replace(out)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    """Reads the runs and draws them."""
    console.protect()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="output folder of a training script")
    parser.add_argument("--out", type=Path, default=Path("plot.png"), help="PNG file to write (default: %(default)s)")
    args = parser.parse_args(argv)
    if len(args.runs) > len(COLORS):
        raise ValueError(f"{len(args.runs)} runs in one picture; at most {len(COLORS)} can be told apart: draw fewer.")
    names = [run.resolve().name for run in args.runs]
    if len(set(names)) < len(names):  # seed0/grpo and seed1/grpo would share a legend entry
        names = [str(run) for run in args.runs]
    runs = {name: read_metrics(run) for name, run in zip(names, args.runs, strict=True)}
    draw(runs, args.out)
    for name, rows in runs.items():
        print(f"{name}: {len(rows)} steps, up to step {rows[-1]['step']}")
    print(f"{args.out} written")


if __name__ == "__main__":
    main()
