"""Compares the answer of a completion with the gold answer; docs/grader.md has the grammar.

Start here: `answers_match`, and `batch_matches` for whole batches. The parts, in reading order:
  answer_extraction.py    where the answer of a completion stands
  answer_prose.py         what a sentence claims: negations, bounds, alternatives
  answer_values.py        an answer as a value: number with unit, choice, list, label, word, formula
  answer_text.py, answer_phrases.py, answer_numbers.py, answer_units.py, answer_labels.py,
  answer_words.py, answer_chinese.py    characters, phrases, numbers, and what belongs to them
  math_verify_process.py, math_verify_server.py    comparing formulas

Both answers are read by the same rules. They are equal if they are
  - the same exact number, in units that agree: 1,234 = 1234.00, 1/2 = 0.5, 60% = 0.6 but not 60, 18
    million is not 18, 18 cm is 0.18 m and not 18 m; without a unit a number equals one with any;
  - lists with the same brackets and equal elements, in order for (...) and [...];
  - the same date, time, ratio or range; the same word or verdict; the same letters of a choice;
  - equal mathematics, if the gold answer is a formula. Only a number answers a number: "95 + 65"
    does not answer 160, or a policy would learn to repeat the question.
"18 or 19", "not 18", "at least 18" and "x^2 = 18" do not answer 18.
"""

import functools
import math
import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from common.tasks.answer_extraction import extract_answer, extract_answers
from common.tasks.answer_units import same_quantity
from common.tasks.answer_values import MAX_READ, Answer, Choice, Formula, Items, Label, Number, Word, read
from common.tasks.math_verify_process import Verdicts, evaluate

Ask = Callable[[str, str | None], bool]
_MARKERS = ("<answer>", "####", "\\boxed", "\\fbox")
_INTERVAL = re.compile(r"[<>]|\\(?:le|ge|in)(?![a-zA-Z])")


def answers_match(completion: str, answer: str, *, limit: float = 5.0) -> float:
    """Compare the answer of a completion with the gold answer.

    Args:
        completion: text of the model.
        answer: gold answer: a bare value, or a worked solution that marks it with ####, a box or
            <answer>.
        limit: seconds for Math-Verify; an answer that needs longer, or more memory or recursion
            than the process allows, is wrong.

    Returns:
        1.0 or 0.0. NaN for every completion if the gold answer is prose or cannot be parsed, and
        NaN if the Math-Verify process died of anything but its time limit. For gold answers in
        several words use `exact_match`.
    """
    return batch_matches([completion], [[answer]], seconds=limit)[0]


def any_answer_matches(completion: str, accepted: Sequence[str | int | float], *, limit: float = 5.0) -> float:
    """Compare the answer of a completion with several right answers.

    Args:
        completion: text of the model.
        accepted: the right answers, at least one; texts are gold answers as in `answers_match`.
        limit: seconds for Math-Verify, for all right answers together.

    Returns:
        1.0 if the completion's answer equals one of them by the rules of `answers_match`, else 0.0.
        NaN for every completion if one of them cannot be graded, because completions that match it
        would count as wrong; and NaN if the Math-Verify process died of anything but its time
        limit.

    Raises:
        ValueError: `accepted` is not a list, is empty, or holds anything but texts and finite
            numbers.
    """
    return batch_matches([completion], [accepted_texts(accepted)], seconds=limit)[0]


def batch_matches(completions: Sequence[str], golds: Sequence[Sequence[str]], *, seconds: float = 2.0) -> list[float]:
    """Compare the answers of a batch with their gold answers, in bounded time.

    All formulas of the batch are compared by Math-Verify together, each distinct pair once, in
    parallel (`math_verify_process.evaluate` says what hostile formulas can and cannot do).

    Args:
        completions: B texts.
        golds: B lists of right answers, of which one has to match.
        seconds: for Math-Verify, for the whole batch; its start is not counted.

    Returns:
        B values as in `any_answer_matches`: 0.0 for a formula that needs too long, NaN for one whose
        turn does not come in time.
    """
    questions: dict[tuple[str, str | None], None] = {}
    rows = [
        (_found(completion), [_gold(answer) for answer in row])
        for completion, row in zip(completions, golds, strict=True)
    ]

    def collect(gold: str, found: str | None) -> bool:
        questions[gold, found] = None
        return False

    for found, right in rows:
        _score(found, right, collect)
    verdicts = evaluate(list(questions), seconds) if questions else {}
    return [_verdict(found, right, verdicts) for found, right in rows]


def ungradable(golds: Sequence[str], seconds: float = 5.0) -> list[int]:
    """Rows whose gold answer `math_match` cannot grade: empty, prose, or not parsable.

    Args:
        golds: gold answers, as in `answers_match`.
        seconds: for Math-Verify, for all rows together; only formulas need it.

    Returns:
        Row numbers, ascending. A formula that is not parsed in time counts as gradable.
    """
    read_golds = [_gold(gold) for gold in golds]
    formulas = {(text, None): None for gold in read_golds if gold for text in _formulas(gold)}
    verdicts = evaluate(list(formulas), seconds) if formulas else {}
    return [
        row for row, gold in enumerate(read_golds)
        if gold is None or not all(verdicts.get((text, None), True) is not False for text in _formulas(gold))
    ]  # fmt: skip


def numbers_match(completion: str, answer: str) -> float:
    """Compare the answer of a completion with a gold answer that is a number, without Math-Verify.

    Args:
        completion: text of the model.
        answer: gold answer, as in `answers_match`.

    Returns:
        1.0 if both are the same exact number in units that agree, else 0.0; NaN for a gold answer
        that is not a number.
    """
    gold = _gold(answer)
    if gold is None or not isinstance(gold.value, Number):
        return math.nan
    return float(_any_equal(_found(completion), gold, lambda gold, found: False))


def normal_answer(completion: str) -> str | None:
    """Canonical answer of a completion, for counting: "49", "x = 49.0" and "It is 49 cm" are 49.

    Returns:
        A number as an exact integer or fraction without its unit, any other answer as
        `extract_answer` reads it; None without one. Only numbers have one form: equal expressions
        that are written differently count as different answers.
    """
    found = extract_answer(completion)
    answer = None if found is None else read(found)
    return str(answer.value.value) if answer and isinstance(answer.value, Number) else found


def accepted_texts(accepted: Sequence[str | int | float]) -> list[str]:
    """A list of right answers as texts; `any_answer_matches` says which lists are refused."""
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


@functools.lru_cache(maxsize=1024)
def _found(completion: str) -> tuple[Answer, ...]:
    """The completion's answer, and words that answer it too."""
    answers = [read(text) for text in extract_answers(completion)]
    return tuple(answer for answer in answers if answer)


@functools.lru_cache(maxsize=65536)  # a gold answer is read again for every completion of its group
def _gold(answer: str) -> Answer | None:
    text = extract_answer(answer) if any(marker in answer for marker in _MARKERS) else answer
    return read(text) if text else None


def _formulas(answer: Answer) -> list[str]:
    """The formulas in an answer, which Math-Verify has to parse."""
    if isinstance(answer.value, Items):
        return [text for element in answer.value.elements for text in _formulas(element)]
    return [answer.value.text] if isinstance(answer.value, Formula) else []


def _score(found: tuple[Answer, ...], right: list[Answer | None], ask: Ask) -> float:
    if None in right:
        return math.nan
    is_gradable = [ask(text, None) for gold in right for text in _formulas(gold)]
    is_equal = [_any_equal(found, gold, ask) for gold in right]
    return float(any(is_equal)) if all(is_gradable) else math.nan


def _verdict(found: tuple[Answer, ...], right: list[Answer | None], verdicts: Verdicts) -> float:
    def look_up(gold: str, value: str | None) -> bool:
        verdict = verdicts[gold, value]
        if verdict is None:
            raise ChildProcessError
        return verdict

    try:
        return _score(found, right, look_up)
    except ChildProcessError:
        return math.nan


def _any_equal(found: tuple[Answer, ...], gold: Answer, ask: Ask) -> bool:
    if not found:
        return False
    words = found[1:] if isinstance(gold.value, Word | Choice) else ()
    return any([_are_equal(answer, gold, ask) for answer in (found[0], *words)])


def _are_equal(found: Answer, gold: Answer, ask: Ask) -> bool:
    """Whether two answers are equal; asks every question that may matter."""
    if (found.letter and gold.letter and found.letter != gold.letter) or (
        found.name and gold.name and found.name != gold.name
    ):
        return False
    left, right = found.value, gold.value
    if isinstance(right, Choice) or (gold.letter and isinstance(left, Choice)):
        letters = right.letters if isinstance(right, Choice) else frozenset(gold.letter)
        return left == Choice(letters) or frozenset(found.letter) == letters or found.text == gold.text
    if isinstance(left, Items) and left.alternatives and _is_one_value(left):
        return any([_are_equal(element, gold, ask) for element in left.elements])
    if isinstance(left, Items) and isinstance(right, Items):
        return _are_equal_lists(left, right, ask)
    if isinstance(right, Number):
        if isinstance(left, Label) and (hour := re.fullmatch(r"(\d+) ?[ap]\.? ?m\.?", found.text, re.IGNORECASE)):
            return right == Number(Fraction(hour[1]))
        return isinstance(left, Number) and same_quantity(*left, *right)
    if isinstance(right, Label | Word):
        has_no_base = isinstance(left, Number) and found.text == right.text.partition("_")[0]
        return left == right or has_no_base or _squeezed(found.text) == _squeezed(gold.text)
    if isinstance(left, Label | Word | Choice):
        return _squeezed(found.text) == _squeezed(gold.text)
    return _are_equal_formulas(found, gold, ask)


def _are_equal_formulas(found: Answer, gold: Answer, ask: Ask) -> bool:
    left, right = found.value, gold.value
    if Items in (type(left), type(right)):  # an interval may answer an inequality, and the other way round
        inequality, interval = (found, gold) if isinstance(right, Items) else (gold, found)
        return bool(_INTERVAL.search(inequality.text)) and ask(inequality.text, interval.text)
    if left.unit.dimensions and right.unit.dimensions and left.unit != right.unit:
        return False
    if isinstance(left, Number):
        return ask(right.text, str(left.value))
    if _squeezed(left.text) == _squeezed(right.text):
        return True
    if max(len(left.text), len(right.text)) > MAX_READ:
        return False
    has_relation = gold.name and not found.name and "=" in left.text  # y = 2x is 2x - y = 0
    return ask(gold.text if has_relation else right.text, left.text)


def _are_equal_lists(found: Items, gold: Items, ask: Ask) -> bool:
    left, right = list(found.elements), list(gold.elements)
    if len(left) != len(right):
        return False
    names = {element.name for element in left}
    if found.opening == "" and gold.opening == "(" and len(names - {""}) == len(left):  # x = 1, y = 2 is (1, 2)
        left.sort(key=lambda element: element.name)
    elif (found.opening, found.closing) != (gold.opening, gold.closing):
        return False
    is_ordered, unmatched = gold.opening in ("(", "["), list(range(len(right)))
    if is_ordered:
        equal = {(i, i): _are_equal(left[i], right[i], ask) for i in unmatched}
    else:
        equal = {(i, j): _are_equal(left[i], right[j], ask) for i in unmatched for j in unmatched}
    for i in range(len(left)):
        candidates = unmatched[:1] if is_ordered else unmatched
        match = next((j for j in candidates if equal[i, j]), None)
        if match is None:
            return False
        unmatched.remove(match)
    return True


def _is_one_value(items: Items) -> bool:
    """Whether alternatives are one value written differently, as in "1.5 hours or 90 minutes"."""
    first, *others = items.elements
    numbers = all(isinstance(element.value, Number) for element in items.elements)
    return numbers and all(
        element.text != first.text and same_quantity(*element.value, *first.value) for element in others
    )


def _squeezed(text: str) -> str:
    return re.sub(r"(?<!\d) | (?!\d)", "", text)
