"""Reward functions to use or to copy; scoring.py says what they are given and what they return."""

import math
import re
from collections.abc import Callable
from typing import Any

import torch

from common.tasks import thinking
from common.tasks.answer_extraction import extract_answer, last_boxed
from common.tasks.answer_prose import last_number
from common.tasks.answers import accepted_texts, answers_match, batch_matches, numbers_match

__all__ = [
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
]


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
