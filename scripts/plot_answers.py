"""Plots how many distinct correct answers models give, and pass@k over k.

Run:   python scripts/evaluate.py runs/plain0/checkpoint-000120 --data test.jsonl --samples 64 >> answers.jsonl
       python scripts/plot_answers.py answers.jsonl --out answers.png      after one evaluation per model
Needs: pip install matplotlib
Reads: lines printed by evaluate.py --samples. Run folders that differ only in a trailing number (plain0, plain1) are
       seeds of one method: they share a colour, and one curve shows their mean.
"""

import argparse
import json
import re
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.base import console, storage

try:
    import matplotlib

    matplotlib.use("Agg")  # the default backend may need a display
    import matplotlib.pyplot as plt
except ImportError as error:
    raise ImportError("Drawing needs one more package: pip install matplotlib") from error

# Colour-blind safe colours, and markers for greyscale prints
STYLES = (("#777777", "s"), ("#0072B2", "o"), ("#D55E00", "D"), ("#009E73", "^"), ("#CC79A7", "v"), ("#E69F00", "P"),
          ("#56B4E9", "X"), ("#000000", "*"))  # fmt: skip


def method(model: str) -> str:
    """Name of the method: the run folder without its trailing seed number, or the model's name."""
    path = Path(model)
    return re.sub(r"\d+$", "", path.parent.name) if path.name.startswith("checkpoint-") else path.name


def read(paths: list[Path]) -> dict[str, list[dict]]:
    """Reads evaluations by method, in order of first appearance.

    Raises:
        ValueError: a line was not printed by evaluate.py --samples.
    """
    found: dict[str, list[dict]] = defaultdict(list)
    for path in paths:
        for number, line in enumerate(storage.read_lines(path), start=1):
            try:
                result = json.loads(line)
                if result["distinct_correct"] is None:
                    raise ValueError("no prompt could be scored")
                found[method(result["model"])].append(result)
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}, line {number}: {error!r}; expected a line of evaluate.py --samples N: remove what is not"
                ) from error
    return found


def attempts(result: dict) -> dict[int, float]:
    """pass@k by k."""
    return {int(name.removeprefix("pass@")): value for name, value in result.items() if name.startswith("pass@")}


def draw(found: dict[str, list[dict]], out: Path) -> None:
    """Draws both panels into the PNG file `out`, 1200 x 480 pixels."""
    plt.rcParams.update({"font.size": 10, "axes.titlesize": 11, "axes.titleweight": "bold"})
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.8), dpi=100, layout="constrained")
    for (color, marker), (name, results) in zip(STYLES, found.items(), strict=False):
        accuracy, distinct = ([result[key] for result in results] for key in ("accuracy", "distinct_correct"))
        seeds = f" ({len(results)} seeds)" if len(results) > 1 else ""
        left.scatter(accuracy, distinct, s=60, color=color, marker=marker, label=name + seeds, zorder=3)
        tries = [attempts(result) for result in results]
        shared = sorted(set.intersection(*(set(by_k) for by_k in tries)))
        right.plot(shared, [sum(by_k[k] for by_k in tries) / len(tries) for k in shared], color=color, marker=marker)
    left.set(title="Different right answers per prompt", xlabel="accuracy of a sample", ylabel="among the samples")
    left.set_ylim(bottom=0)
    right.set(title="pass@k, mean over seeds", xlabel="attempts k", ylabel="share of prompts solved")
    right.set_xscale("log", base=2)
    right.xaxis.set_major_formatter(lambda k, place: f"{k:g}")
    for axis in (left, right):
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*left.get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    """Reads the evaluations and draws them."""
    console.protect()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path, help="JSONL printed by evaluate.py --samples N")
    parser.add_argument(
        "--out", type=Path, default=Path("answers.png"), help="PNG file to write (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    found = read(args.files)
    if not 1 <= len(found) <= len(STYLES):
        raise ValueError(f"{len(found)} methods, {sorted(found)}: from 1 to {len(STYLES)} can be told apart")
    draw(found, args.out)
    print(f"{args.out} written: {', '.join(found)}")


if __name__ == "__main__":
    main()
