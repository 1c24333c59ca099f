"""Writes tasks of the package reasoning-gym, in levels of difficulty, as train.jsonl and test.jsonl.

Run:   pip install reasoning-gym      (this script needs it, training does not; written for version 0.1.25)
       python scripts/make_reasoning_gym.py --out data/reasoning
       python scripts/make_reasoning_gym.py --out data/sums --tasks chain_sum --levels 1,2 --examples 2000
Rows:  {"question": "State the final answer to the following arithmetic problem: 5 + 7 - 8 =\\nAnswer with the number
        only.", "answer": "4", "task": "chain_sum", "level": 1, "task_level": "chain_sum 1"}

Every answer is a number or a word, which `rewards.math_match` grades as the scorer of the package does. Both files
alternate between tasks and levels, so that their first rows hold all of them. No question of a task comes twice, in
one file or in both. `--curriculum task_level` draws the rows of each task and level by their recent success.
"""

import argparse
import itertools
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.base import console

try:
    import reasoning_gym
except ImportError as error:
    raise ImportError("the tasks are those of the package reasoning-gym: pip install reasoning-gym") from error

NUMBER, WORD = "Answer with the number only.", "Answer with the word only."
# name: how to answer, and the options of the package for level 1, 2, ...
TASKS = {
    "chain_sum": (NUMBER, (
        dict(min_terms=2, max_terms=3, min_digits=1, max_digits=1),
        dict(min_terms=2, max_terms=2, min_digits=2, max_digits=2),
        dict(min_terms=3, max_terms=3, min_digits=2, max_digits=2),
        dict(min_terms=3, max_terms=4, min_digits=3, max_digits=3),
    )),
    "spell_backward": (WORD, (
        dict(min_word_len=3, max_word_len=4),
        dict(min_word_len=5, max_word_len=6),
        dict(min_word_len=7, max_word_len=8),
        dict(min_word_len=9, max_word_len=10),
    )),
    "letter_counting": (NUMBER, (  # "1" is right in 74 to 21 % of the rows: a policy may learn to say that
        dict(min_words=2, max_words=3),
        dict(min_words=4, max_words=6),
        dict(min_words=8, max_words=10),
        dict(min_words=14, max_words=18),
    )),
    "basic_arithmetic": (NUMBER, (
        dict(min_terms=2, max_terms=3, min_digits=1, max_digits=1, allow_parentheses=False, allow_negation=False),
        dict(min_terms=2, max_terms=3, min_digits=1, max_digits=2, allow_negation=False),
        dict(min_terms=3, max_terms=4, min_digits=2, max_digits=2),
        dict(min_terms=4, max_terms=5, min_digits=2, max_digits=3),
    )),
    "simple_equations": (NUMBER, (
        dict(min_terms=2, max_terms=2, max_value=9, operators=("+", "-"), operators_weights=[0.5, 0.5]),
        dict(min_terms=2, max_terms=2, max_value=20),
        dict(min_terms=2, max_terms=3, max_value=50),
        dict(min_terms=3, max_terms=4, max_value=100),
    )),
}  # fmt: skip
DEFAULT = "chain_sum,basic_arithmetic,simple_equations"
MOST_TRIES = 30  # for each row that is wanted, until no new question is expected


def questions(task: str, level: int, split: str, seed: int, count: int) -> Iterator[tuple[str, str]]:
    """Questions and answers of the package, `MOST_TRIES` times as many as wanted, some of them equal.

    Args:
        task: one of TASKS.
        level: from 1.
        split: "train" or "test", which have random numbers of their own.
        seed: of both.
        count: questions that are wanted.
    """
    # question i of a data set comes from its seed + i: seeds that lie close together would share most questions
    far = random.Random(f"{task} {level} {split} {seed}").getrandbits(48)
    how, options = TASKS[task]
    size = MOST_TRIES * count
    found = reasoning_gym.create_dataset(task, seed=far, size=size, **options[level - 1])
    for i in range(size):
        yield f"{found[i]['question'].strip()}\n{how}", found[i]["answer"]


def make_rows(
    tasks: list[str], levels: list[int], split: str, seed: int, count: int, seen: set[str]
) -> list[dict[str, str | int]]:
    """Draws `count` rows of each task and level, in turn, whose questions are not in `seen`, and adds them to it.

    Raises:
        ValueError: a task has fewer questions of a level.
    """
    parts = []
    for task, level in itertools.product(tasks, levels):
        rows: dict[str, dict[str, str | int]] = {}
        for question, answer in questions(task, level, split, seed, count):
            if len(rows) == count:
                break
            if question not in seen:
                rows.setdefault(question, {"question": question, "answer": answer, "task": task, "level": level,
                                           "task_level": f"{task} {level}"})  # fmt: skip
        if len(rows) < count:
            option = {"train": "--examples", "test": "--test"}[split]
            raise ValueError(
                f"{option}={count}: level {level} of {task} has hardly more than {len(rows)} further questions; ask "
                "for fewer"
            )
        seen.update(rows)
        parts.append(list(rows.values()))
    return [row for turn in zip(*parts, strict=True) for row in turn]


def chosen(tasks: str, levels: str) -> tuple[list[str], list[int]]:
    """Reads --tasks and --levels.

    Raises:
        ValueError: a task or level does not exist, or there is none.
    """
    names = list(dict.fromkeys(name.strip() for name in tasks.split(",") if name.strip()))
    if not names or not set(names) <= TASKS.keys():
        raise ValueError(f"--tasks={tasks}: must be names of {', '.join(TASKS)}; for another task add it to TASKS")
    known = [str(level) for level in range(1, min(len(TASKS[name][1]) for name in names) + 1)]
    numbers = list(dict.fromkeys(level.strip() for level in levels.split(","))) if levels else known
    if not set(numbers) <= set(known):
        raise ValueError(f"--levels={levels}: must be of {', '.join(known)}; choose some of these")
    return names, [int(level) for level in numbers]


def main(argv: list[str] | None = None) -> None:
    """Writes both files."""
    console.protect()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for train.jsonl and test.jsonl")
    parser.add_argument("--tasks", default=DEFAULT, help=f"of {', '.join(TASKS)} (default: %(default)s)")
    parser.add_argument("--levels", default="", help="such as 1,2 (default: all)")
    parser.add_argument("--examples", type=int, default=400, help="training rows of each task and level (%(default)s)")
    parser.add_argument("--test", type=int, default=20, help="test rows of each task and level (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same files (%(default)s)")
    args = parser.parse_args(argv)
    for option, count in (("--examples", args.examples), ("--test", args.test)):
        if count < 1:
            raise ValueError(f"{option}={count} must be at least 1: an empty file is no data set.")
    tasks, levels = chosen(args.tasks, args.levels)

    args.out.mkdir(parents=True, exist_ok=True)
    seen: set[str] = set()
    # Test rows come first, so that the test set of a seed does not depend on --examples
    for split, count in (("test", args.test), ("train", args.examples)):
        rows = make_rows(tasks, levels, split, args.seed, count, seen)
        path = args.out / f"{split}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{path}: {len(rows)} rows, the first: {json.dumps(rows[0])}")


if __name__ == "__main__":
    main()
