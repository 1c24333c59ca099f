"""Accuracy and its interval; over several samples of a prompt: pass@k, majority vote, number of right answers."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from common.base.checks import require
from common.tasks.answers import normal_answer

Z = 1.96  # standard deviations of a normal distribution within which 95 % of it lie
MOST_VALUES, MOST_CHARACTERS = 50, 40  # different values of a column that are reported; of a value in a label


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of k samples is correct.

    Args:
        num_samples: n, samples of one prompt.
        num_right: c, correct samples, 0 to n.
        k: attempts, 1 to n.

    Returns:
        1 - C(n - c, k) / C(n, k), in [0, 1]. Chen et al. 2021, arXiv 2107.03374, Eq. 1.

    Raises:
        ValueError: k or c is out of range.
    """
    if not 0 <= num_right <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(
            f"pass@{k} of {num_samples} samples with {num_right} right: k is 1 to the number of samples, and no more "
            "can be right than were drawn; take more samples"
        )
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)  # exact integers up to the division


def majority_is_right(completions: Sequence[str], right: Sequence[bool]) -> float:
    """1 if the most frequent answer of a prompt's samples is right, else 0; also 0 if none has an answer.

    Answers are compared by value; of equally frequent ones, the first sampled counts.

    Args:
        completions: samples of one prompt.
        right: whether each is correct.
    """
    found = [normal_answer(completion) for completion in completions]
    counts = Counter(answer for answer in found if answer is not None)
    return float(bool(counts) and right[found.index(counts.most_common(1)[0][0])])


def effective_number(answers: Sequence[str]) -> float:
    """exp(entropy) of the answers' frequencies: 1 for a single answer, n for n equally frequent ones.

    Raises:
        ValueError: there are no answers.
    """
    if not answers:
        raise ValueError("effective number of 0 answers: at least one is needed; leave out prompts without any")
    shares = [count / len(answers) for count in Counter(answers).values()]
    return math.exp(-sum(share * math.log(share) for share in shares))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % confidence interval of the mean of independent values.

    Args:
        values: n of them, such as 1 for each right row and 0 for each wrong one.

    Returns:
        Lower and upper end. If all values are 0 or 1, the score interval of Wilson 1927 (Journal of the American
        Statistical Association 22, p. 209-212), which is right for few values and for shares near 0 and 1, too; else
        mean +- 1.96 s / sqrt(n), with s the standard deviation of a sample. NaN if one value of another kind, or none,
        leaves s unknown.
    """
    n = len(values)
    if n and all(value in (0, 1) for value in values):
        share, z2 = sum(values) / n, Z * Z / n
        half = math.sqrt(share * (1 - share) * z2 + z2 * z2 / 4)
        return max(0.0, (share + z2 / 2 - half) / (1 + z2)), min(1.0, (share + z2 / 2 + half) / (1 + z2))
    if n < 2:
        return math.nan, math.nan
    center = sum(values) / n
    half = Z * math.sqrt(sum((value - center) ** 2 for value in values) / (n - 1) / n)
    return center - half, center + half


def labels(row: Mapping[str, Any], columns: Sequence[str]) -> list[str]:
    """Labels of the groups that a row counts in, such as "[level=3]": one for each column with a value.

    Args:
        row: columns of the data by name.
        columns: names; "a.b" is the entry b of the objects in column a.
    """
    found = []
    for column in columns:
        value: Any = row.get(column)
        if value is None and "." in column:
            value = row
            for part in column.split("."):
                value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None:
            found.append(f"[{column}={' '.join(str(value).split())[:MOST_CHARACTERS]}]")
    return found


def require_columns(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], option: str = "eval_by") -> None:
    """Requires columns that tell rows apart.

    Args:
        rows: all that are evaluated, by name of the column.
        columns: as in `labels`.
        option: that names them, for the errors.

    Raises:
        ValueError: no row has a value in a column, or there are more than MOST_VALUES different ones.
    """
    for column in columns:
        values = {label for row in rows for label in labels(row, [column])}
        known = sorted({name for row in rows for name in row})
        require(bool(values), f"{option} = {column!r}", "no row evaluated has a value in this column", f"name one of "
                f"{known}" if known else "leave it empty: the data has prompts and answers only")  # fmt: skip
        require(len(values) <= MOST_VALUES, f"{option} = {column!r}", f"the column has {len(values)} different values, "
                f"and at most {MOST_VALUES} are reported", "name another one, or evaluate fewer rows")  # fmt: skip


def mean(values: Iterable[float]) -> float | None:
    """Mean of the values; None if there are none."""
    values = list(values)
    return sum(values) / len(values) if values else None
