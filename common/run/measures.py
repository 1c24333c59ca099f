"""Measures of an evaluation: means over the rows of all ranks, with 95 % intervals."""

import math
from collections.abc import Iterable, Mapping, Sequence

from common.base import distributed
from common.tasks import accuracy
from common.tasks.data import Example
from common.tasks.scoring import Scored

ENDS = ("_low", "_high")  # of the names of the ends of an interval


def mean_rewards(
    parts: Iterable[Scored],
    examples: Sequence[Example] = (),
    columns: Sequence[str] = (),
    accuracies: Iterable[Mapping[str, float]] = (),
) -> dict[str, float]:
    """Mean rewards of an evaluation over all ranks, NaN if nothing was scored; a collective.

    Args:
        parts: scored completions of this rank, possibly none; unscored ones are left out, and
            counted in a warning.
        examples: their rows, one for each completion; only for `columns`.
        columns: of the rows; rewards are also averaged over the rows with the same value.
        accuracies: of the sampled completions of each prompt by name, such as `eval_pass_at_4`.

    Returns:
        `eval_reward` with its 95 % interval, `eval_reward_<name>` of each reward function if there
        are several, `eval_reward[<column>=<value>]`, and the means of `accuracies` with theirs.
    """
    values, rewards = [], []
    for part in parts:
        rewards += part.rewards.tolist()
        names = part.by_function if len(part.by_function) > 1 else ()
        values += [{f"eval_reward_{name}": x} for name in names for x in part.by_function[name].tolist()]
    missing = distributed.sum_over_ranks(sum(map(math.isnan, rewards)))
    if missing:
        count = distributed.sum_over_ranks(len(rewards))
        distributed.print_main(f"warning: evaluation: {missing:.0f} of {count:.0f} rewards are NaN and left out")
    means = {"eval_reward": math.nan} | mean_values([{"eval_reward": x} for x in rewards], intervals=True)
    means |= mean_values(values) | mean_by_column(rewards, examples, columns)
    return means | mean_values(accuracies, intervals=True)


def mean_by_column(rewards: Sequence[float], examples: Sequence[Example], columns: Sequence[str]) -> dict[str, float]:
    """Mean rewards over the rows with the same value of a column, over all ranks; a collective.

    Args:
        rewards: of this rank, one for each example; NaN is left out.
        examples: of this rank.
        columns: of the rows, as in `accuracy.labels`.

    Returns:
        `eval_reward[<column>=<value>]`, sorted by name. Rows without a value are in none.
    """
    rows = []
    for example, reward in zip(examples, rewards, strict=True) if columns else ():
        rows.append({f"eval_reward{label}": reward for label in accuracy.labels(example.columns, columns)})
    return dict(sorted(mean_values(rows).items()))


def mean_values(rows: Iterable[Mapping[str, float]], intervals: bool = False) -> dict[str, float]:
    """Means over all ranks by name; NaN is left out, and so is a name without values; a collective.

    Args:
        rows: values of this rank by name; a row need not have every name.
        intervals: also the ends of the 95 % interval of each mean, `<name>_low` and `<name>_high`.
    """
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            if not math.isnan(value):
                values.setdefault(name, []).append(value)
    by_rank = distributed.gather_objects(values)
    means = {}
    for name in dict.fromkeys(name for own in by_rank for name in own):
        found = [value for own in by_rank for value in own.get(name, ())]
        means[name] = sum(found) / len(found)
        if intervals:
            means |= zip((f"{name}{end}" for end in ENDS), accuracy.interval(found), strict=True)
    return means


def with_interval(name: str, values: Mapping[str, float]) -> str:
    """A measure with its interval, if it has one, as text."""
    low, high = (values.get(f"{name}{end}", math.nan) for end in ENDS)
    return f"{name} {values[name]:.3f}" + ("" if math.isnan(low) else f" [{low:.3f}, {high:.3f}]")
