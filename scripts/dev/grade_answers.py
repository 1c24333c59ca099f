"""Grades judged pairs with our grader and with Math-Verify alone; prints error rates by kind.

Run:   python scripts/dev/grade_answers.py
       python scripts/dev/grade_answers.py my_pairs.jsonl --failures

A pair is {"completion", "gold", "right": 0 or 1, "kind"}. "paid" counts wrong answers that are paid,
"missed" right answers that are not; a pair without a score counts as not paid. Math-Verify runs
`verify(parse(gold), parse(completion))` with its default settings. Its LaTeX is between dollar signs,
so a text in which it finds nothing is parsed again with dollar signs around it.
"""

import argparse
import json
import sys
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from common.tasks.answers import batch_matches

DEFAULT = ROOT / "tests" / "data" / "answers.jsonl"


def read_pairs(path: Path) -> list[dict]:
    """The judged pairs of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def ours(pairs: list[dict]) -> list[float]:
    """Scores of our grader; NaN where a gold answer cannot be graded."""
    return batch_matches([p["completion"] for p in pairs], [[p["gold"]] for p in pairs], seconds=60.0)


def math_verify_alone(pairs: list[dict]) -> list[float]:
    """Scores of Math-Verify with its default settings."""
    from math_verify import parse, verify  # an optional package

    def read(text: str) -> list:
        return parse(text) or parse(f"${text}$")

    return [float(verify(read(p["gold"]), read(p["completion"]))) for p in pairs]


def table(pairs: list[dict], scores: dict[str, list[float]]) -> str:
    """Markdown table of errors by kind: "paid / wrong pairs" and "missed / right pairs"."""
    rows = defaultdict(list)
    for i, pair in enumerate(pairs):
        rows[pair["kind"]].append(i)
    rows["all"] = list(range(len(pairs)))
    lines = ["| kind | pairs | " + " | ".join(f"{name}: paid | missed" for name in scores) + " |"]
    lines.append("|---" * (2 + 2 * len(scores)) + "|")
    for kind, members in rows.items():
        cells = [kind, str(len(members))]
        for values in scores.values():
            for right in (0, 1):
                judged = [values[i] == 1 for i in members if pairs[i]["right"] == right]
                cells.append(f"{sum(paid != bool(right) for paid in judged)} / {len(judged)}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Prints the table, and the failures of our grader if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", type=Path, nargs="?", default=DEFAULT, help=f"JSON lines (default: {DEFAULT})")
    parser.add_argument("--failures", action="store_true", help="also print every pair that our grader gets wrong")
    args = parser.parse_args()
    pairs = read_pairs(args.pairs)
    scores = {"ours": ours(pairs), "Math-Verify": math_verify_alone(pairs)}
    print(table(pairs, scores))
    print(f"\nmath-verify {version('math-verify')}, sympy {version('sympy')}, Python {sys.version.split()[0]}")
    if args.failures:
        for pair, score in zip(pairs, scores["ours"], strict=True):
            if score != pair["right"]:
                print(f"{score} for {json.dumps(pair, ensure_ascii=False)}")


if __name__ == "__main__":
    main()
