"""Writes a task with several correct answers per prompt as train.jsonl and test.jsonl, which share no problem.

Run:   python scripts/make_numbers.py data/numbers
       python scripts/make_numbers.py data/numbers --train 1024 --test 128 --seed 1
Rows:  {"prompt": [..., {"role": "user", "content": "Name a two-digit multiple of 7."}],
        "answer": "14", "accepted": ["14", "21", ...]}

Every prompt asks for a number from 10 to 99 with a property of one of five kinds. 4 to 89 numbers have it: `accepted`
lists all of them, `answer` is the first. A policy can give one of them or many; `scripts/evaluate.py --samples 8` shows
which. The kinds alternate in both files until they run out (there are only about 40 digit sums). No two rows have the
same correct numbers, so a test row is never a paraphrase of a training row.
"""

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.base import console

PROMPT = "Name a two-digit {what}."
# Few-shot turns before every prompt. Without them a small chat model gives long explanations and is almost never
# correct: RL would first have to teach it to answer briefly.
EXAMPLES = (
    ("multiple of 5", "35"),
    ("number greater than 60 and less than 75", "68"),
    ("number that ends in the digit 4", "84"),
    ("number whose digits add up to 8", "17"),
    ("odd number greater than 10 and less than 40", "23"),
)
NUMBERS = range(10, 100)
LEAST_ANSWERS = 4  # fewer leave no room for diversity

Property = tuple[str, Callable[[int], bool]]  # the words after "Name a two-digit", and the test for a number


def multiples() -> Iterator[Property]:
    """Multiples of d, all or those above or below a bound."""
    for d in range(2, 23):
        yield f"multiple of {d}", lambda n, d=d: n % d == 0
        for a in range(10, 100, 10):
            yield f"multiple of {d} greater than {a}", lambda n, d=d, a=a: n % d == 0 and n > a
            yield f"multiple of {d} less than {a}", lambda n, d=d, a=a: n % d == 0 and n < a


def ranges() -> Iterator[Property]:
    """Numbers above a and below b."""
    for a in range(10, 95):
        for b in range(a + 5, 100):
            yield f"number greater than {a} and less than {b}", lambda n, a=a, b=b: a < n < b


def last_digits() -> Iterator[Property]:
    """Numbers with the last digit d, all or those above or below a bound."""
    for d in range(10):
        yield f"number that ends in the digit {d}", lambda n, d=d: n % 10 == d
        for a in range(10, 100, 5):
            yield (f"number greater than {a} that ends in the digit {d}", lambda n, d=d, a=a: n % 10 == d and n > a)
            yield f"number less than {a} that ends in the digit {d}", lambda n, d=d, a=a: n % 10 == d and n < a


def digit_sums() -> Iterator[Property]:
    """Numbers whose digits add up to s, or to more or less than s."""
    for s in range(1, 19):
        yield f"number whose digits add up to {s}", lambda n, s=s: sum(divmod(n, 10)) == s
        yield f"number whose digits add up to more than {s}", lambda n, s=s: sum(divmod(n, 10)) > s
        yield f"number whose digits add up to less than {s}", lambda n, s=s: sum(divmod(n, 10)) < s


def parities() -> Iterator[Property]:
    """Even or odd numbers above a and below b."""
    for a in range(10, 92):
        for b in range(a + 9, 100):
            yield f"even number greater than {a} and less than {b}", lambda n, a=a, b=b: a < n < b and n % 2 == 0
            yield f"odd number greater than {a} and less than {b}", lambda n, a=a, b=b: a < n < b and n % 2 == 1


KINDS = (multiples, ranges, last_digits, digit_sums, parities)


def user_turn(what: str) -> dict[str, str]:
    """The question as a chat message."""
    return {"role": "user", "content": PROMPT.format(what=what)}


def make_rows(count: int, seed: int) -> list[dict[str, str | list]]:
    """Draws `count` rows, no two with the same correct numbers, alternating between the kinds until they run out.

    Raises:
        ValueError: fewer rows exist.
    """
    rng = random.Random(seed)
    examples, seen, rows_by_kind = dict(EXAMPLES), set(), []
    turns = [turn for what, answer in EXAMPLES for turn in (user_turn(what), {"role": "assistant", "content": answer})]
    for kind in KINDS:
        rows = []
        for what, is_right in kind():
            accepted = [str(number) for number in NUMBERS if is_right(number)]
            if len(accepted) < LEAST_ANSWERS or tuple(accepted) in seen:
                continue
            seen.add(tuple(accepted))  # "multiple of 9 greater than 10" equals "multiple of 9"
            if what not in examples:
                rows.append({"prompt": [*turns, user_turn(what)], "answer": accepted[0], "accepted": accepted})
        rng.shuffle(rows)
        rows_by_kind.append(rows)
    total = sum(map(len, rows_by_kind))
    if count > total:
        raise ValueError(f"--train plus --test is {count}; only {total} different problems exist: ask for fewer.")
    rows = []
    while len(rows) < count:
        rows += [kind.pop() for kind in rows_by_kind if kind]
    return rows[:count]


def main(argv: list[str] | None = None) -> None:
    """Writes both files."""
    console.protect()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_folder", metavar="OUT_FOLDER", type=Path, help="folder for train.jsonl and test.jsonl")
    parser.add_argument("--train", type=int, default=512, help="rows in train.jsonl (default: %(default)s)")
    parser.add_argument("--test", type=int, default=64, help="rows in test.jsonl (default: %(default)s)")
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
