"""Reward functions, and the checks on the values that they return.

A reward function is `f(completions: list[str], answers: list[str], **columns: list) ->
list[float]`, with one value per completion. `columns` are the other columns of the data, and
`completion_tokens`: sampled tokens per row, end token included. NaN means that a row cannot be
scored: it is dropped from the loss and counted. Any other failure raises.
"""

import copy
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from common.tasks import thinking
from common.tasks.answer_extraction import extract_answer, last_boxed
from common.tasks.answer_prose import last_number
from common.tasks.answers import accepted_texts, answers_match, batch_matches, numbers_match

__all__ = [
    "Scored",
    "answers_match",
    "exact_match",
    "extract_answer",
    "format_reward",
    "last_boxed",
    "last_number",
    "length_reward",
    "math_match",
    "numeric_match",
    "overlong_penalty",
    "score",
]

_FP32_MAX = torch.finfo(torch.float32).max


def math_match(completions: list[str], answers: list[str], **columns: list) -> list[float]:
    """1 if the answer of a completion matches the gold answer, else 0; NaN if that cannot be graded.

    Args:
        completions: B texts.
        answers: B gold answers; read where the column `accepted` holds None or is missing.
        columns: `accepted`, optional: B lists of right answers, texts or numbers, of which one has
            to match.

    docs/grader.md says how answers are read and compared. Comparing all formulas of the batch takes
    at most 2 s; pairs that are not decided by then are wrong. For another limit, call
    `answers.batch_matches` in a reward function of your own.

    Raises:
        ValueError: as in `any_answer_matches`.
    """
    golds_B = []
    for row, (answer, accepted) in enumerate(zip(answers, columns.get("accepted", [None] * len(answers)), strict=True)):
        try:
            golds_B.append([answer] if accepted is None else accepted_texts(accepted))
        except ValueError as error:
            raise ValueError(f"row {row}, whose answer is {answer!r:.80}: {error}") from error
    return batch_matches(completions, golds_B)


def numeric_match(completions: list[str], answers: list[str], **columns: list) -> list[float]:
    """1 if both answers are the same exact number, else 0; NaN if the gold answer is no number."""
    return [numbers_match(completion, answer) for completion, answer in zip(completions, answers, strict=True)]


def exact_match(completions: list[str], answers: list[str], **columns: list) -> list[float]:
    """1 if the whole completion is the gold answer, except for white space at both ends, else 0."""
    return [float(text.strip() == answer.strip()) for text, answer in zip(completions, answers, strict=True)]


def format_reward(completions: list[str], answers: list[str], **columns: list) -> list[float]:
    """1 for <think>...</think> <answer>...</answer>, each tag once, and no other text, else 0.

    Any pair of `thinking.TAGS` may stand around the thought. A thought that the prompt opens is the
    beginning of the completion, and counts as opened there.
    """
    return [float(_has_format(text)) for text in completions]


def _has_format(text: str) -> bool:
    pair = next((pair for pair in thinking.TAGS if text.lstrip().startswith(pair[0])), None)
    if pair is None or any(text.count(tag) != 1 for tag in (*pair, "<answer>", "</answer>")):
        return False
    thought, _, reply = text.partition(pair[1])
    return "answer>" not in thought and bool(re.fullmatch(r"\s*<answer>.*</answer>\s*", reply, re.DOTALL))


def length_reward(target: int, width: int | None = None, tokenizer: Any = None) -> Callable[..., list[float]]:
    """Makes a reward function: 1 at `target` tokens, falling linearly to 0 at a distance of `width`.

    Args:
        target: best length in tokens, end token included.
        width: distance from `target`, to either side, at which the reward reaches 0; default
            `target`.
        tokenizer: counts the tokens if the column `completion_tokens` is missing.

    Raises:
        ValueError: target or width is below 1 or not finite; when called, there is neither the
            column nor a tokenizer.
    """
    width = target if width is None else width
    if not 1 <= target < math.inf or not 1 <= width < math.inf:
        raise ValueError(f"target = {target}, width = {width}: both are numbers of tokens, at least 1")

    def length_reward(
        completions: list[str], answers: list[str], completion_tokens: list[int] | None = None, **columns: list
    ) -> list[float]:
        if completion_tokens is None and tokenizer is None:
            raise ValueError("no column completion_tokens: lengths are tokens, so pass the column or a tokenizer")
        if completion_tokens is None:
            completion_tokens = [len(tokenizer.encode(text, add_special_tokens=False)) for text in completions]
        return [max(0.0, 1.0 - abs(length - target) / width) for length in completion_tokens]

    return length_reward


def overlong_penalty(lengths: torch.Tensor, max_new_tokens: int, cache: int) -> torch.Tensor:
    """Soft length penalty: 0 up to max_new_tokens - cache, then linearly to -1 at the limit.

    Args:
        lengths: [B] int64, tokens sampled, end token included.
        max_new_tokens: the limit.
        cache: tokens over which the penalty grows.

    Returns:
        [B] fp32, from -1 to 0.

    Source: arXiv 2503.14476, Eq. 13, with L_max = max_new_tokens and L_cache = cache.
    """
    return ((max_new_tokens - cache - lengths).float() / cache).clamp(-1.0, 0.0)


@dataclass
class Scored:
    """Completions with their rewards.

    Attributes:
        completions: B texts.
        rewards: [B] fp32 on the CPU, NaN = unscored.
        by_function: unweighted values [B] fp32 of each reward function and reward model, by name.
    """

    completions: list[str]
    rewards: torch.Tensor
    by_function: dict[str, torch.Tensor]

    def put(self, rows: Sequence[int], other: "Scored") -> None:
        """Replaces some rows by those of another, in place.

        Args:
            rows: b row numbers.
            other: b completions, scored by the same functions.
        """
        for row, completion in zip(rows, other.completions, strict=True):
            self.completions[row] = completion
        self.rewards[rows] = other.rewards
        for name, values in other.by_function.items():
            self.by_function[name][rows] = values


def score(
    functions: Sequence[tuple[Callable[..., Any], float]],
    completions: list[str],
    answers: list[str],
    columns: Mapping[str, list],
    extra: Mapping[str, tuple[Any, float]] | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Calls every reward function, checks its values and sums them with their weights.

    Args:
        functions: pairs (reward function, weight); weight 0 only reports.
        completions: B texts.
        answers: B gold answers.
        columns: other columns by name, B values each.
        extra: scores of reward models by name, as pairs (B values, weight).

    Returns:
        Weighted sum, fp32 [B], and the values by `__name__`, fp32 [B] each; on the CPU, NaN =
        unscored.

    Raises:
        ValueError: a wrong number of values; a value or sum that is not a finite fp32 number; a
            duplicate name; no rewards.
        RuntimeError: a reward function raised or exited; the error is its cause.
    """
    rewards = [(getattr(function, "__name__", repr(function)), function, weight) for function, weight in functions]
    rewards += [(name, values, weight) for name, (values, weight) in (extra or {}).items()]
    names = [name for name, _, _ in rewards]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"rewards {names}: at least one, each with its own name; set function.__name__")
    for name, column in {"answers": answers, **columns}.items():
        if len(column) != len(completions):
            raise ValueError(
                f"column {name} has {len(column)} values for {len(completions)} completions: pass one each"
            )

    total_B, scores = torch.zeros(len(completions)), {}
    for name, reward, weight in rewards:
        if not math.isfinite(weight):
            raise ValueError(f"reward {name} has weight {weight}: must be finite; 0 only reports it")
        values = _call(reward, name, completions, answers, columns) if callable(reward) else reward
        scores[name] = _checked(name, values, completions)
        total_B += weight * scores[name] if weight else 0.0
        if total_B.isinf().any():
            row = int(total_B.isinf().nonzero()[0])
            raise ValueError(f"reward {name} times weight {weight} exceeds fp32 in the sum of row {row}: scale it down")
    return total_B, scores


def _call(
    function: Callable[..., Any], name: str, completions: list[str], answers: list[str], columns: Mapping[str, list]
) -> Any:
    # Copies, because a function may change them: they are logged, passed to the next function, and
    # used again.
    copies = {key: [copy.deepcopy(x) if isinstance(x, (list, dict)) else x for x in xs] for key, xs in columns.items()}
    try:
        return function(list(completions), list(answers), **copies)
    except (Exception, SystemExit) as error:  # SystemExit would end the run without an error
        rows = f"rows 0 to {len(completions) - 1}"
        raise RuntimeError(f"reward {name} raised {type(error).__name__} on {rows}: {error}") from error


def _checked(name: str, values: Any, completions: list[str]) -> torch.Tensor:
    """Values of one reward, fp32 [B] on the CPU, or a ValueError that names reward and row."""
    values = values.tolist() if hasattr(values, "tolist") else values  # a tensor or an array
    if not isinstance(values, (list, tuple)) or len(values) != len(completions):
        got = f"{len(values)} values" if isinstance(values, (list, tuple)) else f"one {type(values).__name__}"
        raise ValueError(
            f"reward {name} returned {got}, expected {len(completions)}: return a list, one per completion"
        )
    values = [value.item() if getattr(value, "ndim", None) == 0 else value for value in values]
    for row, value in enumerate(values):
        if not isinstance(value, Real) or abs(value) > _FP32_MAX:
            excerpt = f"row {row}, {completions[row][:80]!r}"
            raise ValueError(f"reward {name} is {value!r} in {excerpt}: must be a finite number, or NaN for unscored")
    return torch.tensor([float(value) for value in values], dtype=torch.float32)
