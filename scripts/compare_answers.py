"""Compares models that answered the same prompts: accuracy, and difference and ratio to one of them, with intervals.

Run:   python scripts/evaluate.py MODEL --data test.jsonl --out a.jsonl       for each model
       python scripts/compare_answers.py a.jsonl b.jsonl c.jsonl              b and c against a
       python scripts/compare_answers.py a.jsonl b.jsonl c.jsonl --of b.jsonl
Reads: files that scripts/evaluate.py --out wrote, of the same rows; with --samples N, the N answers to a row count as
their mean. Only rows that all models have a score for are compared.
accuracy   share of right answers, with the 95 % interval of common/tasks/accuracy.py
change     difference to the file of --of; ratio: accuracy divided by its accuracy; "-": it has none
p          two-sided, that the difference is 0: a sign test of the rows that only one of the two answers better
Intervals of change and ratio are paired: the rows are drawn RESAMPLES times with replacement, each with the answers of
all models (percentile bootstrap, Efron 1979).
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.base import console, storage
from common.base.checks import require
from common.tasks import accuracy

RESAMPLES, SEED = 10_000, 0


def read_scores(path: Path) -> dict[int, float]:
    """Share of right answers by row, of the rows that were scored.

    Args:
        path: file that scripts/evaluate.py wrote.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is not one of evaluate.py.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; write it with scripts/evaluate.py MODEL --out {path}")
    rows: dict[int, list[float | None]] = {}
    for number, text in enumerate(storage.read_lines(path, errors="replace"), start=1):
        try:
            line = json.loads(text)
            score = None if line["score"] is None else float(line["right"])
            rows.setdefault(line["row"], []).append(score)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}, line {number} is {text[:60]!r}; it must be a line that evaluate.py --out wrote: write it anew"
            ) from error
    return {row: sum(scores) / len(scores) for row, scores in rows.items() if None not in scores}


def compare(scores_FR: np.ndarray, base: int) -> list[dict[str, float | tuple[float, float] | None]]:
    """Accuracy of each model, and its difference and ratio to one of them.

    Args:
        scores_FR: [F, R] fp64, share of right answers of F models to R rows.
        base: number of the model that the others are compared with.

    Returns:
        For each model `accuracy`, `change` and `ratio` with `<name>_interval`, and `p`. The ratio is None where the
        base has no right answer in the rows, or in more than one in 40 of the resampled ones.
    """
    rng, R = np.random.default_rng(SEED), scores_FR.shape[1]
    means = np.stack([scores_FR[:, rng.integers(0, R, R)].mean(1) for _ in range(RESAMPLES)])
    found = []
    for own, drawn in zip(scores_FR, means.T, strict=True):
        difference = own - scores_FR[base]
        better, worse = int((difference > 0).sum()), int((difference < 0).sum())
        row = {"accuracy": own.mean(), "accuracy_interval": accuracy.interval(own.tolist())}
        row |= {"change": difference.mean(), "change_interval": ends(drawn - means[:, base])}
        row |= {"ratio": None, "ratio_interval": None, "p": sign_test(better, worse)}
        known = means[:, base] > 0
        if scores_FR[base].any() and known.mean() > 0.975:
            row["ratio"] = own.mean() / scores_FR[base].mean()
            row["ratio_interval"] = ends(drawn[known] / means[known, base])
        found.append(row)
    return found


def ends(values: np.ndarray) -> tuple[float, float]:
    """The central 95 % of the values."""
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def sign_test(better: int, worse: int) -> float:
    """Two-sided p of `better` or a more extreme number out of both, if each is as likely as the other."""
    from scipy.stats import binomtest  # here, since importing it takes a second

    return float(binomtest(better, better + worse).pvalue) if better + worse else 1.0


def main(argv: list[str] | None = None) -> None:
    """Prints the table."""
    console.protect()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="files that evaluate.py --out wrote")
    parser.add_argument("--of", type=Path, help="the one that the others are compared with (default: the first)")
    args = parser.parse_args(argv)
    base = args.of or args.files[0]
    try:
        require(base in args.files, f"--of {base}", "must be one of the files", "add it to them")
        scores = [read_scores(path) for path in args.files]
        rows = sorted(set.intersection(*(set(own) for own in scores)))
        sizes = {str(path): len(own) for path, own in zip(args.files, scores, strict=True)}
        require(bool(rows), f"scored rows: {sizes}", "the files share no row", "evaluate all models on the same data")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if any(size != len(rows) for size in sizes.values()):
        print(f"note: compared on the {len(rows)} rows that all have: {sizes}", file=sys.stderr)
    table = compare(np.array([[own[row] for row in rows] for own in scores]), args.files.index(base))
    print(f"| {len(rows)} rows | accuracy | change | ratio | p |\n|---|---|---|---|---|")
    for path, row in zip(args.files, table, strict=True):
        cells = [path.stem, shown(row, "accuracy"), "-", "-", "-"]
        if path != base:
            cells[2:] = [shown(row, "change", "+"), shown(row, "ratio", digits=2), f"{row['p']:.2g}"]
        print(f"| {' | '.join(cells)} |")


def shown(row: dict, name: str, sign: str = "", digits: int = 3) -> str:
    """A number and its interval."""
    if row[name] is None:
        return "-"
    low, high = row[f"{name}_interval"]
    return f"{row[name]:{sign}.{digits}f} [{low:{sign}.{digits}f}, {high:{sign}.{digits}f}]"


if __name__ == "__main__":
    main()
