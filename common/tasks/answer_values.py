r"""Reads an answer as a value: number with unit, choice, list, label, word or formula.

What is none of these is prose and no value, and so is a negated text ("not 18"). A text that gives
alternatives ("18 or 19") is a list, so it never equals one of them.
"""

import functools
import itertools
import re
from fractions import Fraction
from typing import NamedTuple

from common.tasks import answer_chinese, answer_words
from common.tasks.answer_labels import normal_label
from common.tasks.answer_numbers import find_numbers, to_fraction
from common.tasks.answer_phrases import relations, split_and, split_or, verdict, without_about, without_lead_in
from common.tasks.answer_text import CURRENCY, clean, split_outside
from common.tasks.answer_units import NO_UNIT, Unit, leading_unit


class Number(NamedTuple):
    """An exact number and its unit."""

    value: Fraction
    unit: Unit = NO_UNIT


class Choice(NamedTuple):
    """Letters of a multiple choice."""

    letters: frozenset[str]


class Items(NamedTuple):
    r"""A tuple, interval, set, union of intervals (`\cup`) or bare list, whose brackets are empty.

    `alternatives` are joined by "or".
    """

    opening: str
    elements: tuple["Answer", ...]
    closing: str
    alternatives: bool = False


class Label(NamedTuple):
    """A date, time, ratio, range or number with a base, in normal form."""

    text: str


class Word(NamedTuple):
    """A word or a verdict, in normal form."""

    text: str


class Formula(NamedTuple):
    """Mathematics that only Math-Verify can compare."""

    text: str
    unit: Unit = NO_UNIT


class Answer(NamedTuple):
    """A value, and how it was given.

    Attributes:
        value: what is compared.
        text: the text that was read, in normal form.
        name: left side: x of "x = 4".
        letter: letter in front: B of "(B) 42".
    """

    value: Number | Choice | Items | Label | Word | Formula
    text: str
    name: str = ""
    letter: str = ""


CHOICES = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_LETTER_FIRST = re.compile(rf"\(?([{CHOICES}])(?:[).:]|\))\s?(\S.*)")
_LETTER = re.compile(
    r"(?:(?:option|choice|answer) |选项? ?)?\(?([A-Z])\)?[.:]?\s?(?:选?项|is (?:correct|right))?", re.IGNORECASE
)
_LETTERS = re.compile(r"\(?[A-Z]\)?(?:(?:, ?(?:and )?| and | ?& ?|和| )\(?[A-Z]\)?)+|[A-H]{2,8}")
_BRACKETED = re.compile(r"([(\[\]]|\\?\{)(.*?)(\)|\]|\[|\\?\})", re.DOTALL)
_NAMES = (
    r"\\?[a-zA-Z]+'*(?:_(?:\w|\{[\w\\ ,]+\}))?", r"\|[A-Z]{2}\|", r"\\overline ?\{[A-Z]{2}\}", r"[A-Z]{2,4}",
    r"m?\\(?:angle|measuredangle|triangle) ?[A-Z0-9]{1,3}", r"\([a-zA-Z](?:, ?[a-zA-Z])+\)",
    r"\\frac ?\{d\w?\} ?\{d\w\}",
    r"\\?(?!sin|cos|tan|log|ln|exp|abs|sqrt|max|min|gcd)[a-zA-Z]+'*(?:_\w)?(?:\^\{-1\})? ?[(\[][^()\[\]]*[)\]]",  # f(2)
    r"[A-Za-z]{3,}(?: [A-Za-z()]+)*", r"[\w \u4e00-\u9fff]*[\u4e00-\u9fff][\w \u4e00-\u9fff]*",
)  # fmt: skip
_NAME = re.compile("|".join(f"(?:{name})" for name in _NAMES))
_PRODUCT = re.compile(r"[a-z]{2}(?:_.*)?|\\(?:sin|cos|tan|log|ln|sqrt|times|cdot)")  # ab is a times b
_SUPPOSES = re.compile(r"(?:if|suppos\w+|assum\w+|unless|whether)\b|如果|假如|假设|若", re.IGNORECASE)
_PROSE_WORD = re.compile(
    r"(?<![\\a-zA-Z])(?:[a-zA-Z]{3,}|(?:it|is|so|to|of|as|at|an|we|or|if|be|in|on|by|no)(?![a-zA-Z]))|[\u3040-\u9fff\uac00-\ud7af]"
)
_PLAIN_WORD = re.compile(r"(?:the |an? )?([^\W\d_]+(?:[-'][^\W\d_]+)*?)[的了]?", re.IGNORECASE)
_NO_PROSE = re.compile(
    r"\\(?:begin|end) ?\{[a-z]+\*?\}|\b(?:arc)?(?:sin|cos|tan|cot|sec|csc|log|exp|mod|max|min|lim|gcd|lcm)\b"
)
_SENTENCE = re.compile(r"[是为有均都]|.{9}")  # more than a word in Chinese
_WITH_UNIT = re.compile(
    r"(.*?[\d)}\]a-zA-Z])(?: ?(?=\\mathrm \{|\^ ?\\circ|[\u4e00-\u9fff])| (?=[a-zA-Z]{2}|[$\u20ac\xa3\xa5]))(.{1,30})"
)
_INEQUALITY = re.compile(r"[a-z] ?(<|>|\\(?:leq?|geq?)(?:slant)?(?![a-zA-Z])) ?([^<>=,]+)")
_OPERATION = re.compile(r"\\[a-zA-Z]|[-+*/] ?[a-zA-Z]{1,2}(?![a-zA-Z])")  # 18 / x has a variable, no unit
_NO_UNIT_WORD = re.compile(
    r"^[ ,]*(?:plus|minus|times(?= [b-zB-Z]\b| \d)|divided|multiplied|squared|cubed|factorial|choose|mod|to the power"
    r"|or|and|than|is|of|which|who|that)\b|\b(?:than|twice|as) (?:[a-zA-Z]$|\d|twice|half|(?:a|the|some) number)"
    r"|\b(?:min|max)(?:imum)?\b|\bat (?:most|least)\b"
    r"|\b(?:or|and) (?:more|less|fewer|above|below|over|under|so)\b"
    r"|\b(?:upwards?|onwards?|give or take)\b|^ ?tops$"
    r"|以[上下内]|^[多几余]|^\+$|(?:不到|不足|不满|开外|往上)$"
    r"|^ ?的(?:最[大小])?(?:公?[倍因约]数|[一两]|平方|立方|算术|倒数|相反|绝对|阶乘)",
    re.IGNORECASE,
)  # fmt: skip
_UNIT_TEXT = re.compile(r"(?:[^\W\d]|[ /.$%\u20ac\xa3\xa5\u20b9'\-\u4e00-\u9fff]|\^ ?\{?-?[1-4]\}?|\^ ?\\circ|\\cdot)+")
_PLAIN_UNITS = re.compile(r"(?:(?:sq(?:uare|\.)?|cu(?:bic|\.)?) )?units?(?: (?:squared|cubed))?")
_COMPOUND = re.compile(r",? ?(?:and )?(\d+(?:\.\d+)?) ?")  # the 30 of 2 hours and 30 minutes
_WITH_BASE = re.compile(r"(\d\w*?)_(?:(\d+)|\{ ?(\d+) ?\})")  # 101_2 is not 101_3
MAX_READ = 1000  # characters; a longer answer is compared as text


def digits(text: str, *, everywhere: bool = True) -> str:
    """A text in the normal form of `clean` with Chinese and English numerals as digits."""
    return answer_words.to_digits(answer_chinese.to_ascii(text, everywhere=everywhere), everywhere=everywhere)


@functools.lru_cache(maxsize=256)  # extraction reads a text up to three times in a row
def read(text: str) -> Answer | None:
    """Value of a text that is an answer as a whole; None for prose, a negation or an empty text."""
    text = clean(text)
    if len(text) > MAX_READ:
        return Answer(Formula(text), text)
    if word := verdict(text):
        return Answer(Word(word), text)
    text = without_lead_in(text)
    return _read(text, 0) if text else None


def _read(text: str, depth: int) -> Answer | None:
    if word := verdict(text):
        return Answer(Word(word), text)
    if choice := _choice(text):
        return Answer(choice, text)
    if letter := _LETTER_FIRST.fullmatch(text):
        rest = _read(without_lead_in(clean(letter[2])), depth + 1) if depth < 2 else None
        return rest._replace(letter=letter[1]) if rest else Answer(Choice(frozenset(letter[1])), text)
    if "\\pm" in text and text.count("\\pm") == 1 and depth < 3:
        signs = [re.sub(r"\\pm ?", sign, text) for sign in "+-"]
        text = ", ".join(re.sub(r"(^|=) ?\+", r"\1", signed) for signed in signs)
    text = digits(text)
    if re.match(r"[a-zA-Z] ?[^a-zA-Z]|[a-zA-Z] |at |no |up |[mlgfou]\w+ ", text):
        text = relations(text)
    if (based := _WITH_BASE.fullmatch(text)) and "10" in (based[2], based[3]):
        text = based[1]
    elif based:
        return Answer(Label(f"{based[1]}_{based[2] or based[3]}"), text)
    if label := normal_label(text):
        return Answer(Label(label), text)
    if number := _number(text):
        return Answer(number, text)
    if depth < 4 and (items := _items(text, depth)):
        return Answer(items, text)
    if equation := _equation(text, depth):
        return equation
    word = _PLAIN_WORD.fullmatch(text)
    if word and (len(word[1]) > 2 if word[1].isascii() else not _SENTENCE.search(word[1])):
        return Answer(Word(word[1].casefold()), text)
    return _formula(text)


def _choice(text: str) -> Choice | None:
    if (letter := _LETTER.fullmatch(text)) and letter[1].isupper():
        return Choice(frozenset(letter[1]))
    if not _LETTERS.fullmatch(text):
        return None
    letters = re.findall("[A-Z]", text)
    is_run = text.isalpha() and letters != sorted(set(letters))  # BAC is a name
    return None if is_run or len(set(letters)) < len(letters) else Choice(frozenset(letters))


def _number(text: str) -> Number | None:
    plain, numbers = find_numbers(re.sub(r"\\mathrm \{(\w)\}", r"\1", text))
    if not numbers or numbers[0].start() != 0:
        return None
    rest = plain[numbers[0].end() :]
    value = to_fraction(numbers[0][0])
    if value is None or not rest.strip():
        return None if value is None else Number(value)
    is_variable = re.fullmatch(r"[a-zA-Z](?:\^.*)?|\^ ?[^\\ ].*", rest)  # 18m in mathematics is a product
    if (amount := _compound(value, rest.strip())) is not None:
        return amount
    rest = rest.strip()
    if is_variable or not _UNIT_TEXT.fullmatch(rest) or _NO_UNIT_WORD.search(rest):
        return None
    unit, _ = leading_unit(rest)
    is_word = (len(rest) > 2 or not rest.isascii() or rest in CURRENCY) and not _OPERATION.match(rest)
    return Number(value, unit) if unit.dimensions or is_word else None


def _compound(value: Fraction, rest: str) -> Number | None:
    """A quantity in several units, from the largest to the smallest: 2 hours 30 minutes."""
    first, *others = _COMPOUND.split(rest)
    units = [leading_unit(text) for text in (first, *others[1::2])]
    if len(units) < 2 or not units[0][0].dimensions or any(after for _, after in units[:-1]):
        return None
    if any(
        small.dimensions != large.dimensions or small.size >= large.size
        for (large, _), (small, _) in itertools.pairwise(units)
    ):
        return None
    parts = zip(others[::2], units[1:], strict=True)
    return Number(value + sum(Fraction(part) * unit.size for part, (unit, _) in parts) / units[0][0].size, units[0][0])


def _items(text: str, depth: int) -> Items | None:
    if "\\cup" in text and len(parts := re.split(r"\\cup(?![a-zA-Z])", text)) > 1:
        return _as_items("\\cup", [re.sub(r"^.*?\\in(?![a-zA-Z])", "", part) for part in parts], "", depth)
    bracketed = _BRACKETED.fullmatch(text)
    elements = split_outside(bracketed[2], ",") if bracketed else []
    if len(elements) > 1 or (elements and bracketed[1] not in ("{", "]")):  # {18} means 18 in LaTeX
        return _as_items(bracketed[1].lstrip("\\"), elements, bracketed[3].lstrip("\\"), depth)
    alternatives = split_or(text)
    if len(alternatives) > 1 and all(rays := [_ray(part) for part in alternatives]):  # x < 2 or x > 5
        return _as_items("\\cup", rays, "", depth)
    if len(alternatives) > 1:
        return _as_items("", alternatives, "", depth, alternatives=True)
    elements = split_and(text)
    return _as_items("", elements, "", depth) if len(elements) > 1 and to_fraction(text) is None else None


def _ray(inequality: str) -> str | None:
    """An inequality of one variable and a number as an interval: x < 2 as (-oo, 2)."""
    if not (match := _INEQUALITY.fullmatch(inequality.strip())):
        return None
    sign, end = match[1].strip(), match[2].strip()
    is_below = sign in ("<", "\\le", "\\leq", "\\leqslant")
    closing = "]" if is_below and sign != "<" else ")"
    return rf"(-\infty, {end}{closing}" if is_below else rf"{'(' if sign == '>' else '['}{end}, \infty)"


def _as_items(opening: str, texts: list[str], closing: str, depth: int, alternatives: bool = False) -> Items | None:
    elements = [_read(without_about(clean(text)), depth + 1) for text in texts]
    has_article = any(re.match("(?:the|an?) [a-z]", text.strip(), re.IGNORECASE) for text in texts)
    if None in elements or has_article or len({isinstance(element.value, Word) for element in elements}) > 1:
        return None
    opening, closing = {"{": "", "]": "("}.get(opening, opening), {"}": "", "[": ")"}.get(closing, closing)
    return Items(opening, tuple(elements), closing, alternatives)


def _equation(text: str, depth: int) -> Answer | None:
    text = re.sub(r"\\approx(?![a-zA-Z])", "=", text)
    parts = [part.strip() for part in re.split(r"(?<![<>!=\\:])=(?!=)", text)]
    if re.match(r"\\in(?![a-zA-Z])", text[1:].lstrip()):
        parts = [text[0], text[1:].lstrip()[3:].strip()]
    if len(parts) < 2 or not all(parts) or depth > 3:
        return None
    first, *middle, last = parts
    if is_name(last) and not middle and _number(first):  # 18 = x
        first, last = last, first
    has_digits = all(any(char.isdecimal() for char in side) for side in (*middle, *([] if is_name(first) else [first])))
    if not middle and _number(first) and has_digits and is_computation(last) and not _number(last):  # 18 = 9 * 2
        return Answer(_number(first), text)
    if not has_digits or not (is_name(first) or is_computation(first)) or not all(map(is_computation, middle)):
        return None
    right = _read(without_about(last), depth + 1)
    name = first if re.fullmatch(r"\\?[a-zA-Z]|[a-zA-Z]_\w|\\[a-z]+", first) else ""
    return right._replace(name=name or right.name, text=text) if right else None


def is_name(text: str) -> bool:
    """Whether a left side only names the value: x, f(2), AB or a word, but not x^2, 2x or x + y."""
    return bool(_NAME.fullmatch(text)) and not _PRODUCT.fullmatch(text) and not _SUPPOSES.match(text)


def is_computation(text: str, *, has_unit: bool = False) -> bool:
    """Whether a left side has no variables: "3 + 4 apples", but not "x + 4" or "2y".

    Args:
        text: the left side.
        has_unit: whether the right side has a unit, so that the m of "3m" is one too.
    """
    text = re.sub(r"(?<=[\d\w] )x(?= [\d$])|(?<=\d)x(?=\d)|\\[a-zA-Z]+|\^\\circ", " ", text)
    for letters in re.finditer(r"(?<![a-zA-Z])[a-zA-Z]{1,2}(?![a-zA-Z])", text):
        is_apart = letters.start() > 1 and text[letters.start() - 1] in " /" and text[letters.start() - 2] != "+"
        is_unit = bool(leading_unit(letters[0])[0].dimensions) and (len(letters[0]) == 2 or is_apart or has_unit)
        if not is_unit and letters[0].lower() not in ("of", "to", "by", "is", "in", "an", "a", "sq"):
            return False
    return True


def _formula(text: str) -> Answer | None:
    whole, unit = text, NO_UNIT
    if "=" not in text and (tail := _WITH_UNIT.fullmatch(text)):
        text = tail[1].strip() if _PLAIN_UNITS.fullmatch(tail[2]) else text
        found, rest = leading_unit(re.sub(r"\\mathrm \{(\w)\}", r"\1", tail[2]))
        if found.dimensions and not rest:
            text, unit = tail[1].strip(), found
    if not text or _PROSE_WORD.search(_NO_PROSE.sub("", text)):
        return None
    return Answer(Formula(text.strip(CURRENCY + " "), unit), whole)
