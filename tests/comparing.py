"""Compares runs that should differ by rounding only: metrics and weights, within bounds derived from their settings.

Where the bounds come from. A gradient is the result of about `TERMS` roundings (forward and backward pass of a tiny
model, sum over the tokens of a minibatch), so two computations of it differ by a share `noise = rounding(TERMS)` of its
usual size. AdamW divides by the size of the gradient. An element of usual size moves by nearly the same step in both
runs; one whose gradient is itself of the size of the noise may move by a whole learning rate either way. With gradients
spread like a normal distribution, the mean difference of a step is
`0.8 * noise * (1 + log(1 / noise))` learning rates (0.8: density of |gradient / std| at 0), which is `share` below.
No element moves by more than one learning rate a step in runs this short. A wrong sign, row or seed moves the mean by
about one learning rate, which is a thousand times as much.

Metrics follow the weights: a level, such as the entropy, differs by less than `share`; a change, such as the KL to the
old policy, by up to twice as much, and a squared norm likewise.

Two outcomes are discrete: which token is drawn, and whether a ratio is beyond a clip limit. Where a random number or a
ratio lies within rounding of a limit, which happens in one run of about 10,000, one row goes the other way, and from
there on the runs are different ones, each right. If one row of the step explains the difference, the comparison ends
there, with a warning; a second one in the same process is a fault.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from bounds import rounding

if TYPE_CHECKING:
    import torch
    from conftest import Run

FORWARD = (
    2 * (4 * 32 + 2 * 64 + 32) + 64
)  # of a tiny model: two layers (width 32, hidden 64, context 32), softmax of 64
TERMS = 2 * FORWARD + 320  # and back, and the sum over the tokens of a minibatch
# beginnings of the names of metrics that differ from run to run
MEASURED = ("seconds", "tokens_per_second", "memory_gib", "host_memory_gib", "embedding_seconds", "similarity_share")
DRAWN = ("completion_length", "truncated", "unscored", "zero_std", "resampled", "reward")  # follow from the tokens
INTERVAL = re.compile("eval_.*_(low|high)")
CLIPPED = ("clip_fraction", "out_of_range")
ENDED: list[str] = []  # comparisons of this process that ended early


def comparable(lines: Iterable[dict]) -> list[dict]:
    """Lines of metrics.jsonl without what no two runs have in common, durations and memory, and without the ends of
    intervals, which follow from the same values as their means."""
    kept = [line for line in lines if "seconds_save" not in line]
    return [{k: v for k, v in line.items() if not k.startswith(MEASURED) and not INTERVAL.fullmatch(k)}
            for line in kept]  # fmt: skip


def share() -> float:
    """Mean difference of one AdamW step of two runs that differ by rounding, in learning rates."""
    noise = rounding(TERMS)
    return 0.8 * noise * (1 + math.log(1 / noise))


def config_of(run: Run) -> dict:
    """The settings in force."""
    return json.loads((run.out_dir / "config.json").read_text())


def updates(config: Mapping) -> int:
    """Optimizer steps of a whole run."""
    return config["steps"] * config.get("num_minibatches", 1) * config.get("epochs", 1)


def metric_differences(lines: list[dict], expected: list[dict], config: Mapping) -> tuple[list[str], bool]:
    """What differs by more than rounding explains, and whether the comparison ended at a discrete outcome."""
    if [(line["step"], *sorted(line)) for line in lines] != [(line["step"], *sorted(line)) for line in expected]:
        names = {name for line in lines for name in line} ^ {name for line in expected for name in line}
        return [f"{len(lines)} lines and {len(expected)}, or other metrics in them: {sorted(names)}"], False
    rows = config["batch_size"] * config.get("group_size", 1)
    for line, other in zip(lines, expected, strict=True):
        differ = {name for name in line if not _close(name, line[name], other[name])}
        discrete = {name for name in differ if name.startswith((*DRAWN, "eval_reward", *CLIPPED))}
        if discrete and all(_one_row(name, line[name], other[name], rows, config) for name in discrete):
            text = f"step {line['step']}: one row went the other way within rounding ({', '.join(sorted(discrete))})"
            ENDED.append(text)
            if len(ENDED) > 1:
                return [f"{text}; once in a test run is chance, but before: {ENDED[:-1]}"], False
            warnings.warn(f"{text}; what follows is not compared", stacklevel=2)
            return [], True
        if differ:
            return [
                f"step {line['step']}: {name} {line[name]!r}, not {other[name]!r}" for name in sorted(differ)
            ], False
    return [], False


def _close(name: str, value, expected) -> bool:
    """Whether two values of a metric differ by rounding, or are the same list, text or None."""
    if value == expected or not all(isinstance(x, (int, float)) for x in (value, expected)):
        return value == expected
    if name.startswith((*DRAWN, *CLIPPED)):  # counts, and means of rewards summed in another order
        return math.isclose(value, expected, rel_tol=rounding(64), abs_tol=rounding(64))
    # a KL to almost the same distribution is what is left of numbers around 1; other means, of rows of either sign
    absolute = rounding(8) if "kl" in name else rounding(16, 2.0)
    return math.isclose(value, expected, rel_tol=4 * share(), abs_tol=absolute)


def _one_row(name: str, value: float, expected: float, rows: int, config: Mapping) -> bool:
    """Whether one row of the step, gone another way, can explain the difference."""
    most = {"completion_length": config["max_new_tokens"], "zero_std": config.get("group_size", 1), "resampled": rows}
    size = 4.0 if "reward" in name else most.get(name, 1.0)  # rewards of the tests lie within 4 of one another
    count = config["eval_examples"] if name.startswith("eval") else rows
    return abs(value - expected) <= 1.01 * size / count


def weight_differences(
    weights: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], config: Mapping
) -> list[str]:
    """Tensors that differ by more than rounding explains; a few elements may be a whole step off."""
    if weights.keys() != expected.keys():
        return [f"other tensors: {sorted(weights.keys() ^ expected.keys())}"]
    steps = config["learning_rate"] * updates(config)
    found = []
    for name, weight in weights.items():
        difference = (weight.float() - expected[name].float()).abs()
        if name.endswith("c_attn.bias"):  # a bias of all keys has no gradient but rounding: every element may move
            difference = difference.view(3, -1)[[0, 2]]
        mean = steps * (share() + 4 / difference.numel())
        if not (difference.max() <= 2 * steps and difference.mean() <= mean):
            found.append(f"{name}: {difference.max():.3g} at most, {difference.mean():.3g} on average, not {mean:.3g}")
    return found


def assert_close(run: Run, other: Run, evaluations: bool = True) -> None:
    """The same metrics, without those of evaluations if asked, and the same weights, up to rounding."""
    lines, expected = (comparable(one.lines if evaluations else one.steps) for one in (run, other))
    assert lines
    config = config_of(other)
    found, ended = metric_differences(lines, expected, config)
    assert not found, found
    if not ended:
        found = weight_differences(run.weights(), other.weights(), config)
        assert not found, found
