r"""Reads the answer out of a completion and compares it with the gold answer.

Where the answer is (`extract_answer`), first rule that applies:
  1. only text after the last </think> counts; thinking that never closes has no answer
  2. inside the last <answer>...</answer>, where rules 3 to 5 apply
  3. the last balanced \boxed{...} or \fbox{...}; it holds mathematics, so units in it need \text{...}
  4. after the last ####, on that line: the expression it starts with, or if it starts with words its first number
  5. an <answer>, or a one-line completion without prose, is read like the line of rule 4
  6. a closing "the answer is B" or "Option (B)": one capital letter or, in a text without numbers, any word
  7. the last number, if it stands for itself: 10^3, 2\sqrt{3}, x/2, x > 4 and (3, 4) hold no number that is the answer
A marker left empty or open means "no answer"; the rules below it are not tried. Quotation marks and markup around an
answer go; full-width forms, one-character fractions, superscripts and signs of mathematics, Arabic marks and no-break
spaces in numbers are read as if plain.

When answers are equal (`answers_match`): same text, for words whatever the case; or the same exact number, where
1,234 = 1234.00, 1/2 = 0.5, 1.5\times10^3 = 1500, 0.\overline{3} = 1/3 and 60% = 0.6, but 60% != 60 and 0.33 != 1/3; or
lists with the same brackets and equal elements, in order for (...) and [...], in any order for {...} and bare lists;
or, where the gold answer is not a number, equal mathematics according to Math-Verify. "x = 4" answers 4 and "(B) 42"
answers B; "95 + 65" does not answer 160, or a policy would learn to repeat the question. Dates, times, scores and
ranges in digits are compared as they are written. Units are not compared: 42 kg answers 42 cm.
Several right answers (`any_answer_matches`): a completion is right if its one answer equals any of them.
"""

import functools
import importlib.util
import inspect
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
import unicodedata
from collections.abc import Sequence
from fractions import Fraction

_VULGAR = (0xBC, 0xBD, 0xBE, *range(0x2150, 0x215F))  # one-half and its like, in one character
_PLAIN = {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}  # full-width forms of ASCII
_PLAIN |= str.maketrans(
    "\u2212\u2010\u2011\u2013\u3002\u066b\u066c\u066a\u2044\u2215", "----..,%//"
)  # minus sign, hyphens and dash; CJK stop; Arabic decimal point, thousands and percent; fraction slashes
_PLAIN[0x3001] = ", "  # the CJK comma stands in lists, never in numbers
_PLAIN |= {code: unicodedata.normalize("NFKC", chr(code)).replace("\u2044", "/") for code in _VULGAR}
# soft hyphen, byte order mark, zero width, direction of writing: nobody sees them
_PLAIN |= dict.fromkeys([0xAD, 0xFEFF, *range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x206A)])
_PLAIN |= {
    ord(sign): f"{name} " for sign, name in {
        "\u221e": r"\infty", "\u2264": r"\le", "\u2265": r"\ge", "\u2260": r"\ne", "\u2248": r"\approx",
        "\xb7": r"\cdot", "\xb1": r"\pm", "\xd7": r"\times", "\u03c0": r"\pi", "\xb0": r"^\circ", "\u222a": r"\cup",
        "\u2229": r"\cap", "\u2208": r"\in", "\u2205": r"\emptyset",
    }.items()
}  # fmt: skip
_RAISED = str.maketrans("\u2070\xb9\xb2\xb3\u2074\u2075\u2076\u2077\u2078\u2079\u207b", "0123456789-")
_POWER = re.compile(f"[{''.join(map(chr, _RAISED))}]+")  # superscripts
_ROOT = re.compile(r"\u221a ?(?:(\d+|[a-zA-Z])|\(([^()]{1,40})\))")
_BEFORE_VULGAR = re.compile(r"(?<=\d)(?=[\xbc-\xbe\u2150-\u215e])")  # 1\xbd is 1 1/2
_THOUSANDS_SPACE = re.compile(r"(?<=\d)(?<!\d{4})(?:[\xa0\u2009\u202f~]|\\[ ;:])(?=\d{3}(?!\d))")
_AROUND = ' *`_~,;:"\u201c\u201d\u201e\u2018\u2019\xab\xbb\u300c\u300d'  # markup and quotation marks around an answer
_DELETED = re.compile(r"\\?[$€£¥]|(?<!\\)\\(?:(?:left|right)(?![a-zA-Z])|[()\[\],!])")  # currency, delimiters, spacing
_AND_OR = re.compile(r",? ?\\text\{ ?(?:and|or) ?\} ?|,? (?:and|or) ")
_TEXT_WORD = re.compile(r"^\\(?:text|textbf|mathrm|mathbf)\{ ?([^{} ]*) ?\}$")
_UNIT = re.compile(
    r"(?<=\d)(?: |\\ )*(?:\\(?:text|mathrm)\{[^{}]*\}(?:\^(?:\d|\{ ?\d ?\}))?|\^(?:\\circ|\{ ?\\circ ?\}))$"
)  # 18\text{ dollars}, 18\text{ m}^2, 18^\circ
_PROSE = re.compile(
    r"(?<![\w\\{])[^\W\d_]{2,}(?=[\s.,;:!?*\"')]|-[^\W\d_]{2}|$)|[\u3040-\u9fff\uac00-\ud7af]"
)  # a word, or CJK
_EXPRESSION_END = re.compile(rf"{_PROSE.pattern}|[.!?](?=\s|$)")
_BOX_TOKEN = re.compile(r"\\(?:boxed|fbox)(?: *(?P<box>\{)|\s+(?P<bare>[^\s{}$\\]+))|\\.|[{}]", re.DOTALL)
_BRACKETED = re.compile(r"(\(|\[|\\?\{)(.*?)(\)|\]|\\?\})")
_LATEX_FRACTION = re.compile(r"(\d ?)?\\frac ?(?:\{ ?(-?\d+) ?\}|(\d)) ?(?:\{ ?(\d+) ?\}|(\d))")
_NUMBER = re.compile(
    r"""(?:(?<![\w)\]}.])[-+])?                                     # after a digit, letter or bracket it is an operator
    (?: (?:\d+\ )? (?<!/)\d+/\d+ (?!\d|/\d|\.\d)                    # 1/2 and 2 1/2, but no date
      | (?: (?<!\d,)\d{1,3}(?:,\d{3})+(?!,?\d) | \d+ ) (?:\.\d+)? (?:[eE][-+]?\d{1,3}(?!\d))?    # 1,234.5 but not 1,23
      | (?<![\w.])\.\d+ )
    (?:\ ?%)?""",
    re.VERBOSE,
)
_SCIENTIFIC = re.compile(
    r"(?<![\d.,/^])([1-9](?:\.\d+)?) ?(?:\\times|\\cdot|[x*]) ?10 ?\^ ?(?:\{ ?([-+]?\d{1,3}) ?\}|([-+]?\d{1,3})(?!\d))"
)
_REPEATING = re.compile(
    r"(?<![\d.,])(\d{0,15})\.(\d{0,15})(?:\\(?:overline|bar|dot) ?\{ ?(\d{1,15}) ?\}|\((\d{1,15})\))"
)
_UNIT_POWER = re.compile(
    r"(?<=\d)((?: |\\ )?(?:\\(?:text|mathrm)\{ ?)?(?:[a-zA-Z]{2,12}|m)(?:/[a-zA-Z]{1,4})? ?\}?) ?"
    r"\^ ?(?:[23]|\{ ?[23] ?\})"
)
# What stands directly before or after a number that is a part of an expression: exponents and bases, roots,
# numerators and denominators, indices, factors of a constant, bounds. Arrows (=> 42) and tags (<b>42</b>) are none.
_PART_BEFORE = re.compile(
    r"""(?: \^\ ?[{(]?  |  [\w})]_\{?  |  [a-zA-Z)}]/  |  \}\ ?\{  |  (?<![</\w])\w+\ ?>=?  |  (?<!<)<=?
      | \\(?:sqrt|frac|overline|bar|dot|log|ln|sin|cos|tan)(?:\ ?\[\d+\])?\ ?[{(]?
      | \\(?:le|leq|leqslant|ge|geq|geqslant|ne|neq|lt|gt) )\ ?$""",
    re.VERBOSE,
)
_PART_AFTER = re.compile(
    r"""\ ?(?: \^(?!\ ?\{?\ ?\\circ)  |  /[(\\]  |  /[xyz](?!\w)  |  <(?=\ )
      | \\(?:sqrt|pi|frac|cdot|times|log|ln|sin|cos|tan|le|leq|ge|geq|ne|neq|lt|gt)(?![a-zA-Z]) )""",
    re.VERBOSE,
)
_STATED = re.compile(
    r"(?:\b(?i:answer|option|choice)(?i: is)?|\u7b54\u6848[\u662f\u4e3a\u70ba]?)[ *_:]*\(?([^\W\d_]+)\)?$"
)
_CHOICE = re.compile(r"(?:\\(?:text|textbf|textrm|mathrm|mathbf)\{ ?)?\(?([A-Z])[).:] ?\S")  # (B) 42, or B. 42
# Digits that Math-Verify would subtract or divide: dates, phone numbers, scores and ranges, times.
_LABEL = re.compile(
    r"\d+(?: ?- ?\d+)+|\d+(?:/\d+){2,}|\d{1,2}(?: ?: ?[0-5]\d)+ ?(?:(?:\\text\{ ?)?[aApP]\.?[mM]\.? ?\}?)?"
)
_BASE = re.compile(r"(\d\w*?)_(?:(\d+)|\{ ?(\d+) ?\})")  # 101_2 is no 101_3
_LETTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZ")  # of choices
_MAX_NUMBER_LENGTH = 1000  # characters; int() refuses huge texts, so a longer number is compared as text


# Reading an answer


def clean(text: str) -> str:
    r"""Normal form of an answer: no currency, math delimiters or markup; `\dfrac` as `\frac`; "a and b" as "a, b"."""
    text = _THOUSANDS_SPACE.sub("", _BEFORE_VULGAR.sub(" ", text))
    text = _POWER.sub(lambda m: f"^{{{m[0].translate(_RAISED)}}}", text)
    text = _ROOT.sub(lambda m: rf"\sqrt{{{m[1] or m[2]}}}", text)
    text = _DELETED.sub("", " ".join(text.translate(_PLAIN).split()))
    text = re.sub(r"\\[dtc]frac", r"\\frac", text).replace("{,}", ",").replace("\\%", "%")
    if not _PROSE.search(listed := _AND_OR.sub(", ", text)):
        text = listed
    text = text.strip(_AROUND).rstrip(f"{_AROUND}.\u2026")
    excess = sum(map(text.count, ")]}")) - sum(map(text.count, "([{"))  # what they close was opened before the answer
    text = text[: max(len(text) - max(excess, 0), len(text.rstrip(")]}")))]
    text = _TEXT_WORD.sub(r"\1", text)
    is_wrapped = text[:1] + text[-1:] in ("()", "''") and len(_split_commas(text[1:-1])) == 1
    return text[1:-1].strip() if is_wrapped else text


def _numbers(text: str) -> tuple[str, list[re.Match]]:
    r"""The text with \frac{1}{2} as 1/2, 2 \times 10^3 as 2e3 and 0.\overline{3} as 3/9, and the numbers in it."""
    text = _LATEX_FRACTION.sub(lambda m: f"{m[1] or ''} {m[2] or m[3]}/{m[4] or m[5]} ".lstrip(), clean(text))
    text = _REPEATING.sub(_as_ratio, _SCIENTIFIC.sub(lambda m: f"{m[1]}e{m[2] or m[3]}", text))
    text = " ".join(text.split())
    return text, list(_NUMBER.finditer(text))


def _as_ratio(match: re.Match) -> str:
    r"""0.1\overline{6} as 15/90."""
    fixed, period = match[1] + match[2], match[3] or match[4]
    return f"{int(fixed + period) - int(fixed or 0)}/{(10 ** len(period) - 1) * 10 ** len(match[2])}"


def _is_part(text: str, match: re.Match) -> bool:
    """Whether a number is a piece of a larger expression, so that it answers nothing: see `_PART_BEFORE`."""
    before, after = text[max(0, match.start() - 60) : match.start()], text[match.end() : match.end() + 60]
    if _PART_BEFORE.search(before) or _PART_AFTER.match(after):
        return True
    # (3, 4) and [2, \infty), but not (40 apples, that is 42); -1 % 61 = 60: no bracket in sight
    inside = max(before.rfind("("), before.rfind("[")), min(after.find(")") % 61, after.find("]") % 61)
    if inside[0] < max(before.rfind(")"), before.rfind("]"), 0) or inside[1] == 60:
        return False
    listed = before[inside[0] + 1 :] + "0" + after[: inside[1]]
    return "," in listed and not _PROSE.search(listed)


def _plain_number(match: re.Match) -> str:
    return match[0].replace(",", "").replace(" %", "%").lstrip("+")


def to_fraction(text: str) -> Fraction | None:
    """Exact value of a text that is one number and nothing else; None for any other text."""
    text, numbers = _numbers(text) if len(text) <= _MAX_NUMBER_LENGTH else (text, [])
    if len(numbers) != 1 or numbers[0][0] != text:
        return None
    number = _plain_number(numbers[0])
    try:
        size = sum(Fraction(part) for part in number.strip("-%").split())  # two parts in 2 1/2
    except ZeroDivisionError:
        return None
    return size * (-1 if number.startswith("-") else 1) / (100 if number.endswith("%") else 1)


def last_number(text: str) -> str | None:
    """Last number of a text: digits as written, without thousands separators or plus sign; `a/b` and `%` are kept.

    None without a number, or if the last one is a part of an expression: the 3 of 10^3. That of cm^2 is in a unit.
    """
    text, numbers = _numbers(_UNIT_POWER.sub(r"\1", clean(text)))
    return _plain_number(numbers[-1]) if numbers and not _is_part(text, numbers[-1]) else None


def last_boxed(text: str) -> str | None:
    r"""Contents of the last balanced \boxed{...}, \fbox{...} or `\boxed 42`; None if there is none."""
    starts, last = [], (-1, -1)  # where the contents of each open brace start; -1 if it is no box
    for token in _BOX_TOKEN.finditer(text):
        if token["bare"]:
            last = max(last, token.span("bare"))
        elif token["box"] or token[0] == "{":
            starts.append(token.end() if token["box"] else -1)
        elif token[0] == "}" and starts:
            last = max(last, (starts.pop(), token.start()))
    return text[slice(*last)] if last[0] >= 0 else None


def extract_answer(text: str) -> str | None:
    """Answer of a completion in the normal form of `clean`, by the rules at the top of this file; None without one."""
    text = text.rpartition("</think>")[2]
    if "<think>" in text:
        return None
    has_tag = "<answer>" in text
    if has_tag:
        text = text[: max(text.rfind("</answer>"), 0)].rpartition("<answer>")[2].partition("</answer>")[0]
    if "\\boxed" in text or "\\fbox" in text:
        return clean(last_boxed(text) or "") or None
    if "####" in text:
        return _leading_expression(text.rpartition("####")[2].strip().partition("\n")[0])
    line = clean(text)
    has_prose = "\n" in text.strip() or (_PROSE.search(line) and not line.isalpha())
    stated = None if has_tag else _STATED.search(line[-80:])
    if stated and (stated[1] in _LETTERS or not any(char.isdecimal() for char in line)):
        return stated[1]
    return _leading_expression(text) if has_tag or not has_prose else last_number(text)


def _leading_expression(text: str) -> str | None:
    text = clean(text)
    if head := clean(_EXPRESSION_END.split(text, maxsplit=1)[0].rstrip(" ,;:(*=-")):
        return head
    plain, numbers = _numbers(text)
    if numbers:
        return None if _is_part(plain, numbers[0]) else _plain_number(numbers[0])
    return text or None


# Comparing two answers


def answers_match(completion: str, answer: str, *, limit: float = 5.0) -> float:
    """Compare the answer of a completion with the gold answer.

    Args:
        completion: text of the model.
        answer: gold answer: a bare value, or a worked solution that marks it with ####, a box or <answer>.
        limit: time for one evaluation by Math-Verify, in seconds; an answer that needs longer, or more memory or depth
            than the process has, is wrong.

    Returns:
        1.0 or 0.0. NaN, whatever the completion, if the gold answer is prose or cannot be parsed; and NaN if the
        Math-Verify process died of anything but its time limit. For gold answers in words use `exact_match`.
    """
    gold = _gold(answer)
    try:
        if gold is None or not _is_gradable(gold, limit):
            return math.nan
        found = extract_answer(completion)
        return float(found is not None and _same(found, gold, limit))
    except ChildProcessError:
        return math.nan


def any_answer_matches(completion: str, accepted: Sequence[str | int | float], *, limit: float = 5.0) -> float:
    """Compare the answer of a completion with several right answers.

    Args:
        completion: text of the model.
        accepted: the right answers, at least one; texts are gold answers as in `answers_match`.
        limit: as in `answers_match`. The first right answer whose evaluation needs longer is the last one tried, or
            one hostile text would cost the limit as often as there are right answers.

    Returns:
        1.0 if the completion's answer equals one of them by the rules of `answers_match`, else 0.0. NaN, whatever the
        completion, if one of them cannot be graded: the completions that it makes right would count as wrong. NaN too
        if the Math-Verify process died of anything but its time limit.

    Raises:
        ValueError: `accepted` is no list, is empty, or holds anything but texts and finite numbers.
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
        if found in others or (number is not None and number in numbers):  # read once, not once per right answer
            return 1.0
        for gold in others:
            start = time.monotonic()
            if _same(found, gold, limit):
                return 1.0
            if time.monotonic() - start >= limit:
                break
        return 0.0
    except ChildProcessError:
        return math.nan


def normal_answer(completion: str) -> str | None:
    """Answer of a completion in a form to count with: "49", "49.", "x = 49.0" and "The number is 49" are all 49.

    Returns:
        A number as an exact integer or fraction, any other answer as `extract_answer` reads it; None without one.
        Equal mathematics written in two ways is two answers: only numbers have one form.
    """
    found = extract_answer(completion)
    number = None if found is None else _number_in(found)
    return found if number is None else str(number)


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


@functools.lru_cache(maxsize=4096)  # the right answers of a row come back with every completion of its group
def _gold_number(answer: str) -> Fraction | None:
    return to_fraction(_gold(answer) or "")


@functools.lru_cache(maxsize=4096)
def _gold(answer: str) -> str | None:
    is_marked = any(marker in answer for marker in ("<answer>", "####", "\\boxed", "\\fbox"))
    gold = extract_answer(answer) if is_marked else clean(answer)
    if not gold or (not gold.isalpha() and any(len(word) > 2 for word in _PROSE.findall(gold))):
        return None  # empty, or prose such as "see figure", which Math-Verify would read as a product of letters
    return gold


def _is_gradable(gold: str, limit: float) -> bool:
    if gold_list := _as_list(gold):
        return all(_is_gradable(clean(element), limit) for element in gold_list[1])
    if gold.isalpha() or _LABEL.fullmatch(gold) or _BASE.fullmatch(gold):
        return True
    return to_fraction(gold) is not None or _math_verify(gold, None, limit)


def _same(found: str, gold: str, limit: float) -> bool:
    if found == gold:
        return True
    found_list, gold_list = _as_list(found), _as_list(gold)
    if found_list or gold_list:
        return bool(found_list and gold_list) and _same_list(found_list, gold_list, limit)
    if _LABEL.fullmatch(gold):
        return _as_label(_right_side(found)) == _as_label(gold)
    found = _UNIT.sub("", found if "=" in gold else _right_side(found))
    if gold.isalpha() or not found:
        choice = _CHOICE.match(found) if gold in _LETTERS else None
        return (choice[1] if choice else found) == gold or (len(gold) > 1 and found.casefold() == gold.casefold())
    if base := _BASE.fullmatch(gold):
        found_base = _BASE.fullmatch(found)
        return found == base[1] or (found_base is not None and _as_label(found) == _as_label(gold))
    found_number, gold_number = to_fraction(found), to_fraction(gold)
    if gold_number is not None:
        # Only a number answers a number: Math-Verify would work out 95 + 65, and pay for repeating the question.
        return found_number == gold_number
    # Math-Verify takes 1,234 for a set and 5% for 5, so a number reaches it as an exact fraction.
    return _math_verify(gold, found if found_number is None else str(found_number), limit)


def _as_label(text: str) -> str:
    r"""2024-01-05 and 2024-1-5 alike, 7:30 PM and 7:30\text{ pm} too."""
    return re.sub(r"(?<!\d)0+(?=\d)", "", re.sub(r"\\text|[ {}.]", "", text)).lower()


def _number_in(found: str) -> Fraction | None:
    """The number that `_same` compares with a gold number: 4 for "x = 4"; None if the answer is anything else."""
    return None if _as_list(found) else to_fraction(_UNIT.sub("", _right_side(found)))


def _same_list(found: tuple[str, list[str], str], gold: tuple[str, list[str], str], limit: float) -> bool:
    if (found[0], len(found[1]), found[2]) != (gold[0], len(gold[1]), gold[2]):
        return False
    is_ordered, unmatched = gold[0] in ("(", "["), [clean(element) for element in gold[1]]
    for element in map(clean, found[1]):
        candidates = unmatched[:1] if is_ordered else unmatched
        match = next((other for other in candidates if _same(element, other, limit)), None)
        if match is None:
            return False
        unmatched.remove(match)
    return True


def _as_list(text: str) -> tuple[str, list[str], str] | None:
    """Opening bracket, elements as written, closing bracket of a tuple, interval, set or bare list; None: no list."""
    bracketed = _BRACKETED.fullmatch(text)
    elements = _split_commas(bracketed[2]) if bracketed else []
    if len(elements) > 1 or (elements and bracketed[1] != "{"):  # LaTeX puts braces around one thing for no reason
        return bracketed[1].lstrip("\\"), elements, bracketed[3].lstrip("\\")
    elements = _split_commas(text)
    if len(elements) > 1 and to_fraction(text) is None:
        return "", elements, ""
    right = _right_side(text)  # (x, y) = (1, 2)
    return _as_list(right) if right != text else None


def _split_commas(text: str) -> list[str]:
    """Parts between the commas outside all brackets; nothing if a bracket closes that was not opened."""
    depth, cuts = 0, [-1]
    for i, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if depth < 0:
            return []
        if char == "," and depth == 0:
            cuts.append(i)
    return [text[start + 1 : end] for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True)]


def _right_side(text: str) -> str:
    return re.split(r"(?<![<>!])=|\\approx(?![a-zA-Z])", text)[-1].strip()


# Math-Verify, in a process that can be killed (POSIX)


def _grade_lines() -> None:
    """Main loop of the Math-Verify process: one JSON line [gold, found, seconds] in, true or false out.

    The process runs the source of this function and nothing else. The timer has its default action, so the kernel
    ends the process inside any computation, also when the trainer is gone; an idle one ends with its input.
    """
    import sys

    sys.path[:] = [folder for folder in sys.path if folder]  # no file in the working folder may pose as a package
    import contextlib
    import json
    import resource
    import signal

    from math_verify import LatexExtractionConfig, parse, verify

    def expression(text: str) -> list:
        # First match and no fallback: anything else would be a part of the text, and a part must earn nothing.
        options = {"fallback_mode": "no_fallback", "extraction_mode": "first_match", "parsing_timeout": None}
        return parse(f"${text}$", [LatexExtractionConfig()], **options)

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    with contextlib.suppress(ValueError, OSError):  # where the system sets its own limit
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))  # bytes, or a power tower takes the host's memory
    replies, sys.stdout = sys.stdout, sys.stderr  # what a parser prints must not pass for a reply
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        gold, found, seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            parsed = expression(gold)
            reply = bool(parsed) and (found is None or bool(verify(parsed, expression(found), timeout_seconds=None)))
        except (MemoryError, RecursionError):  # limits like that of time: unscored, such a text would cost nothing
            reply = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(reply), file=replies, flush=True)


class _Grader:
    """The one Math-Verify process of this process: started by the first question, and again after it has ended."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.child: subprocess.Popen | None = None

    def start(self) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError("comparing expressions needs the package math-verify: pip install math-verify")
        # A fresh interpreter, since multiprocessing would run the user's script again; in a session of its own, since
        # Ctrl-C is for the trainer only.
        code = f"{inspect.getsource(_grade_lines)}\n_grade_lines()"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        self.child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, **pipes)
        if not self.child.stdout.readline():
            status = self.child.wait()
            raise RuntimeError(f"Math-Verify process ended at its start, status {status}: try `import math_verify`")

    def ask(self, gold: str, found: str | None, limit: float) -> bool:
        """Whether `found` equals `gold` as mathematics or, if `found` is None, whether `gold` can be parsed."""
        if not 0 < limit < math.inf:
            raise ValueError(f"limit = {limit} seconds: must be positive and finite; 5.0 suits most answers")
        with self.lock:
            if self.child is None or self.child.poll() is not None:
                self.start()
            reply = ""
            try:
                print(json.dumps([gold, found, limit]), file=self.child.stdin, flush=True)
                reply = self.child.stdout.readline()
            except BrokenPipeError:
                pass  # ended since poll(); the status below says why
            finally:
                if not reply:  # on Ctrl-C too, or the late reply would answer the next question
                    self.child.kill()
                    self.child.wait()
            if not reply and self.child.returncode != -signal.SIGALRM:
                raise ChildProcessError(f"Math-Verify process ended with status {self.child.returncode}")
        return reply == "true\n"


_grader = _Grader()
os.register_at_fork(after_in_child=_grader.__init__)  # two processes on one pipe would read each other's replies


@functools.lru_cache(maxsize=4096)  # a gold answer comes back with every completion of its group
def _math_verify(gold: str, found: str | None, limit: float) -> bool:
    return _grader.ask(gold, found, limit)
