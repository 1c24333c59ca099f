r"""Compares the answer of a completion with the gold answer.

Start here: `answers_match`. Extraction is in answer_extraction.py, numbers in answer_numbers.py,
Math-Verify in math_verify_process.py.

Two answers are equal if they are
  - the same text, where words may differ in case;
  - the same exact number: 1,234 = 1234.00, 1/2 = 0.5, 1.5\times10^3 = 1500, 0.\overline{3} = 1/3
    and 60% = 0.6, but 60% != 60 and 0.33 != 1/3;
  - lists with the same brackets and equal elements, in order for (...) and [...], in any order for
    {...} and lists without brackets;
  - equal mathematics according to Math-Verify, if the gold answer is not a number.
"x = 4" answers 4 and "(B) 42" answers B; "95 + 65" does not answer 160, or a policy would learn to
repeat the question. Dates, times, scores and ranges in digits are compared as written. Units are
ignored: 42 kg answers 42 cm.
"""

import functools
import math
import re
import time
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from common.tasks.answer_extraction import CHOICES, extract_answer
from common.tasks.answer_numbers import PROSE, clean, split_commas, to_fraction
from common.tasks.math_verify_process import ask_math_verify

_UNIT = re.compile(
    r"(?<=\d)(?: |\\ )*(?:\\(?:text|mathrm)\{[^{}]*\}(?:\^(?:\d|\{ ?\d ?\}))?|\^(?:\\circ|\{ ?\\circ ?\}))$"
)  # 18\text{ dollars}, 18\text{ m}^2, 18^\circ
_BRACKETED = re.compile(r"(\(|\[|\\?\{)(.*?)(\)|\]|\\?\})")
_LEADING_CHOICE = re.compile(r"(?:\\(?:text|textbf|textrm|mathrm|mathbf)\{ ?)?\(?([A-Z])[).:] ?\S")  # (B) 42, or B. 42
# Digits that Math-Verify would subtract or divide: dates, phone numbers, scores and ranges, times.
_DIGIT_LABEL = re.compile(
    r"\d+(?: ?- ?\d+)+|\d+(?:/\d+){2,}|\d{1,2}(?: ?: ?[0-5]\d)+ ?(?:(?:\\text\{ ?)?[aApP]\.?[mM]\.? ?\}?)?"
)
_WITH_BASE = re.compile(r"(\d\w*?)_(?:(\d+)|\{ ?(\d+) ?\})")  # 101_2 is not 101_3


def answers_match(completion: str, answer: str, *, limit: float = 5.0) -> float:
    """Compare the answer of a completion with the gold answer.

    Args:
        completion: text of the model.
        answer: gold answer: a bare value, or a worked solution that marks it with ####, a box or <answer>.
        limit: seconds for one evaluation by Math-Verify; an answer that needs longer, or more
            memory or recursion than the process allows, is wrong.

    Returns:
        1.0 or 0.0. NaN for every completion if the gold answer is prose or cannot be parsed, and
        NaN if the Math-Verify process died of anything but its time limit. For gold answers in
        words use `exact_match`.
    """
    gold = _gold(answer)
    try:
        if gold is None or not _is_gradable(gold, limit):
            return math.nan
        found = extract_answer(completion)
        return float(found is not None and _are_equal(found, gold, limit))
    except ChildProcessError:
        return math.nan


def any_answer_matches(completion: str, accepted: Sequence[str | int | float], *, limit: float = 5.0) -> float:
    """Compare the answer of a completion with several right answers.

    Args:
        completion: text of the model.
        accepted: the right answers, at least one; texts are gold answers as in `answers_match`.
        limit: as in `answers_match`. After the first evaluation that needs longer no other right
            answer is tried, or a hostile completion would cost the limit once per right answer.

    Returns:
        1.0 if the completion's answer equals one of them by the rules of `answers_match`, else 0.0.
        NaN for every completion if one of them cannot be graded, because completions that match it
        would count as wrong; and NaN if the Math-Verify process died of anything but its time
        limit.

    Raises:
        ValueError: `accepted` is not a list, is empty, or holds anything but texts and finite
            numbers.
    """
    texts = _accepted_texts(accepted)
    numbers = [_gold_number(text) for text in texts]
    others = [_gold(text) for text, number in zip(texts, numbers, strict=True) if number is None]
    try:
        if not all(gold is not None and _is_gradable(gold, limit) for gold in others):
            return math.nan
        found = extract_answer(completion)
        if found is None:
            return 0.0
        number = _number_in(found)
        if found in others or (number is not None and number in numbers):
            return 1.0
        for gold in others:
            start = time.monotonic()
            if _are_equal(found, gold, limit):
                return 1.0
            if time.monotonic() - start >= limit:
                break
        return 0.0
    except ChildProcessError:
        return math.nan


def numbers_match(completion: str, answer: str) -> float:
    """Compare the answer of a completion with a gold answer that is a number, without Math-Verify.

    Args:
        completion: text of the model.
        answer: gold answer, as in `answers_match`.

    Returns:
        1.0 if both are the same exact number, else 0.0; NaN for a gold answer that is not a number.
    """
    gold = _gold_number(answer)
    return math.nan if gold is None else float(to_fraction(_right_side(extract_answer(completion) or "")) == gold)


def normal_answer(completion: str) -> str | None:
    """Canonical answer of a completion, for counting: "49", "x = 49.0" and "It is 49" are all 49.

    Returns:
        A number as an exact integer or fraction, any other answer as `extract_answer` reads it;
        None without one. Only numbers have one form: equal expressions that are written differently
        count as different answers.
    """
    found = extract_answer(completion)
    number = None if found is None else _number_in(found)
    return found if number is None else str(number)


def _accepted_texts(accepted: Sequence[str | int | float]) -> list[str]:
    if not isinstance(accepted, (list, tuple)) or not accepted:
        raise ValueError(
            f"accepted is {accepted!r:.80}: must be a list of at least one right answer; write it as "
            '["14", "21"], or null in a row where `answer` is the only one'
        )
    texts = []
    for value in accepted:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf
        if not is_number and not isinstance(value, str):
            raise ValueError(f"accepted holds {value!r:.80}: a right answer is a text or a finite number; correct it")
        texts.append(str(value))
    return texts


@functools.lru_cache(maxsize=4096)  # a gold answer is read again for every completion of its group
def _gold_number(answer: str) -> Fraction | None:
    return to_fraction(_gold(answer) or "")


@functools.lru_cache(maxsize=4096)
def _gold(answer: str) -> str | None:
    is_marked = any(marker in answer for marker in ("<answer>", "####", "\\boxed", "\\fbox"))
    gold = extract_answer(answer) if is_marked else clean(answer)
    if not gold or (not gold.isalpha() and any(len(word) > 2 for word in PROSE.findall(gold))):
        return None  # empty, or prose such as "see figure", which Math-Verify would read as a product of letters
    return gold


def _is_gradable(gold: str, limit: float) -> bool:
    if gold_list := _as_list(gold):
        return all(_is_gradable(clean(element), limit) for element in gold_list.elements)
    if gold.isalpha() or _DIGIT_LABEL.fullmatch(gold) or _WITH_BASE.fullmatch(gold):
        return True
    return to_fraction(gold) is not None or ask_math_verify(gold, None, limit)


def _are_equal(found: str, gold: str, limit: float) -> bool:
    if found == gold:
        return True
    found_list, gold_list = _as_list(found), _as_list(gold)
    if found_list or gold_list:
        return bool(found_list and gold_list) and _are_equal_lists(found_list, gold_list, limit)
    if _DIGIT_LABEL.fullmatch(gold):
        return _normal_label(_right_side(found)) == _normal_label(gold)
    found = _UNIT.sub("", found if "=" in gold else _right_side(found))
    if gold.isalpha() or not found:
        choice = _LEADING_CHOICE.match(found) if gold in CHOICES else None
        return (choice[1] if choice else found) == gold or (len(gold) > 1 and found.casefold() == gold.casefold())
    if base := _WITH_BASE.fullmatch(gold):
        found_base = _WITH_BASE.fullmatch(found)
        return found == base[1] or (found_base is not None and _normal_label(found) == _normal_label(gold))
    found_number, gold_number = to_fraction(found), to_fraction(gold)
    if gold_number is not None:
        # Only a number answers a number: Math-Verify would evaluate 95 + 65, and reward repeating
        # the question.
        return found_number == gold_number
    # Math-Verify reads 1,234 as a set and 5% as 5, so it gets numbers as exact fractions.
    return ask_math_verify(gold, found if found_number is None else str(found_number), limit)


def _normal_label(text: str) -> str:
    r"""Normal form of a date or time: 2024-01-05 as 2024-1-5, 7:30\text{ PM} as 7:30pm."""
    return re.sub(r"(?<!\d)0+(?=\d)", "", re.sub(r"\\text|[ {}.]", "", text)).lower()


def _number_in(found: str) -> Fraction | None:
    """The number in an answer, such as 4 in "x = 4", as `_are_equal` reads it; None without one."""
    return None if _as_list(found) else to_fraction(_UNIT.sub("", _right_side(found)))


class _List(NamedTuple):
    """A tuple, interval, set or bare list, whose brackets are empty."""

    opening: str
    elements: list[str]
    closing: str


def _are_equal_lists(found: _List, gold: _List, limit: float) -> bool:
    if (found.opening, found.closing, len(found.elements)) != (gold.opening, gold.closing, len(gold.elements)):
        return False
    is_ordered, unmatched = gold.opening in ("(", "["), [clean(element) for element in gold.elements]
    for element in map(clean, found.elements):
        candidates = unmatched[:1] if is_ordered else unmatched
        match = next((other for other in candidates if _are_equal(element, other, limit)), None)
        if match is None:
            return False
        unmatched.remove(match)
    return True


def _as_list(text: str) -> _List | None:
    bracketed = _BRACKETED.fullmatch(text)
    elements = split_commas(bracketed[2]) if bracketed else []
    if len(elements) > 1 or (elements and bracketed[1] != "{"):  # in LaTeX, braces around one thing mean nothing
        return _List(bracketed[1].lstrip("\\"), elements, bracketed[3].lstrip("\\"))
    elements = split_commas(text)
    if len(elements) > 1 and to_fraction(text) is None:
        return _List("", elements, "")
    right = _right_side(text)  # (x, y) = (1, 2)
    return _as_list(right) if right != text else None


def _right_side(text: str) -> str:
    return re.split(r"(?<![<>!])=|\\approx(?![a-zA-Z])", text)[-1].strip()


def ungradable(golds: Sequence[str], seconds: float = 5.0) -> list[int]:
    """Rows whose gold answer cannot be graded."""
    return []
