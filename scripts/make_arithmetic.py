"""Writes a two-digit arithmetic task as train.jsonl and test.jsonl, which share no problem.

Run:   python scripts/make_arithmetic.py data/arithmetic
       python scripts/make_arithmetic.py data/arithmetic --train 1024 --test 128 --seed 1
Rows:  {"prompt": "What is 47 + 38? Answer with the number only.", "answer": "85"}

Every pair a >= b of 10..99 gives one addition and one subtraction, 8190 problems in all. 47 + 38 and 38 + 47 count as
one problem, in random order, so that no test answer appears in a training row. Subtractions are a - b with a >= b: no
answer is negative, so a scorer that ignores signs makes no difference.
"""

import argparse
import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.base import console

PROMPT = "What is {problem}? Answer with the number only."


def make_rows(count: int, seed: int) -> list[dict[str, str]]:
    """Draws `count` distinct problems, additions and subtractions.

    Raises:
        ValueError: fewer problems exist.
    """
    rng = random.Random(seed)
    rows = []
    for a in range(10, 100):
        for b in range(10, a + 1):
            left, right = (a, b) if rng.random() < 0.5 else (b, a)
            rows.append({"prompt": PROMPT.format(problem=f"{left} + {right}"), "answer": str(a + b)})
            rows.append({"prompt": PROMPT.format(problem=f"{a} - {b}"), "answer": str(a - b)})
    if count > len(rows):
        raise ValueError(f"--train plus --test is {count}; only {len(rows)} different problems exist: ask for fewer.")
    rng.shuffle(rows)
    return rows[:count]


def main(argv: list[str] | None = None) -> None:
    """Writes both files."""
    console.protect()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_folder", metavar="OUT_FOLDER", type=Path, help="folder for train.jsonl and test.jsonl")
    parser.add_argument("--train", type=int, default=4096, help="rows in train.jsonl (default: %(default)s)")
    parser.add_argument("--test", type=int, default=256, help="rows in test.jsonl (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same files (default: %(default)s)")
    args = parser.parse_args(argv)
    for option, count in (("--train", args.train), ("--test", args.test)):
        if count < 1:
            raise ValueError(f"{option}={count} must be at least 1: an empty file is no data set.")

    rows = make_rows(args.train + args.test, args.seed)
    args.out_folder.mkdir(parents=True, exist_ok=True)
    # Test rows come first, so that the test set of a seed does not depend on --train
    for name, part in (("test.jsonl", rows[: args.test]), ("train.jsonl", rows[args.test :])):
        path = args.out_folder / name
        path.write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
        print(f"{path}: {len(part)} rows, the first: {json.dumps(part[0])}")


if __name__ == "__main__":
    main()
