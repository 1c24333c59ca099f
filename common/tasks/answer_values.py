r"""Reads the text of an answer as a value: number with unit, choice, list, label, word or formula.

What is none of these is prose and no value. A text that is negated ("not 18") is none either, and a text
that gives alternatives ("18 or 19") is a list, so it never equals one of them.
"""

import re
from fractions import Fraction
from typing import NamedTuple

from common.tasks import answer_chinese, answer_words
from common.tasks.answer_labels import normal_label
from common.tasks.answer_numbers import find_numbers, to_fraction
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
_LEAD_IN = re.compile(
    r"^(?:(?:so|thus|hence|therefore|then|and),? |\u6240\u4ee5|\u56e0\u6b64)?(?:(?:the|my|our)? ?(?:final |correct |right )?(?:answer|result|choice)s?"
    r"(?: is| are|:| =)|\u7b54\u6848?(?:\u662f|\u4e3a|:|\u5e94\u4e3a)|(?:it|this|that|they|there) (?:is|are|equals) ?)?", re.IGNORECASE,
)  # fmt: skip
_ABOUT = re.compile(
    r"^(?:(?:about|approximately|approx\.?|around|roughly|exactly|only|just|precisely|a total of|\u5927?\u7ea6|\u5171)\s*"
    r"|~ ?|\\(?:approx|sim)(?![a-zA-Z]) ?|= ?)+", re.IGNORECASE,
)  # fmt: skip
NEGATED = re.compile(
    r"\b(?:not|never|isn't|aren't|wasn't|doesn't|cannot|can't|won't|rather than|instead of|neither|nor|wrong|incorrect)\b"
    r"|\u4e0d\u662f|\u4e0d\u7b49\u4e8e|\u4e0d\u4e3a|\u5e76\u975e|\u4e0d\u80fd|\u4e0d\u9009|\u800c\u975e|\u4e0d\u5bf9|\u9519", re.IGNORECASE,
)  # fmt: skip
_CLAUSE = re.compile(r"[,;.] (?=\D)|; ?|, ?(?=[\u4e00-\u9fff])| (?=but |rather than |instead of |and not )|(?=\u800c\u662f|\u800c\u975e)")
_LETTER_FIRST = re.compile(rf"\(?([{CHOICES}])(?:[).:]|\))\s?(\S.*)")
_LETTER = re.compile(r"(?:(?:option|choice|answer) |\u9009\u9879? ?)?\(?([A-Z])\)?[.:]?\s?(?:\u9879|is (?:correct|right))?", re.IGNORECASE)
_LETTERS = re.compile(r"\(?[A-Z]\)?(?:(?:, ?(?:and )?| and | ?& ?|\u548c| )\(?[A-Z]\)?)+|[A-H]{2,8}")
_BRACKETED = re.compile(r"([(\[\]]|\\?\{)(.*?)(\)|\]|\[|\\?\})", re.DOTALL)
_AND = re.compile(r",? and |,? ?& ?|[\u548c\u4e0e\u53ca]|(?<=\d) ?\u4ee5\u53ca ?")
_OR = re.compile(r",? ?(?:or|\u6216\u8005?) (?:maybe |perhaps |possibly |else )?|\u6216\u8005?|, ?(?:maybe|perhaps|possibly|or) ")
_NAMES = (
    r"\\?[a-zA-Z]+'*(?:_(?:\w|\{[\w\\ ,]+\}))?", r"\|[A-Z]{2}\|", r"\\overline ?\{[A-Z]{2}\}", r"[A-Z]{2,4}",
    r"m?\\(?:angle|measuredangle|triangle) ?[A-Z0-9]{1,3}", r"\\?(?!sin|cos|tan|log|ln|exp|abs|sqrt|max|min|gcd)[a-zA-Z]+'*(?:_\w)?(?:\^\{-1\})? ?[(\[][^()\[\]]*[)\]]",
    r"\([a-zA-Z](?:, ?[a-zA-Z])+\)", r"\\frac ?\{d\w?\} ?\{d\w\}", r"[A-Za-z]{3,}(?: [A-Za-z()]+)*", r"[\w \u4e00-\u9fff]*[\u4e00-\u9fff][\w \u4e00-\u9fff]*",
)  # fmt: skip
_NAME = re.compile("|".join(f"(?:{name})" for name in _NAMES))
_PRODUCT = re.compile(r"[a-z]{2}(?:_.*)?|\\(?:sin|cos|tan|log|ln|sqrt|times|cdot)")  # ab is a times b
_VERDICTS = {
    "true": "true yes correct right 对 正确 是 真 √ ✓ 成立 是的 对的 没错",
    "false": "false no incorrect wrong 错 错误 否 假 ✗ 不对 不正确 不是 不成立 不 not-true not-correct not-right untrue",
    "none": "no-solution no-solutions 无解 没有解 none does-not-exist dne 不存在 undefined",
}  # fmt: skip
VERDICTS = {phrase.replace("-", " "): name for name, phrases in _VERDICTS.items() for phrase in phrases.split()}
_RELATION_WORDS = (
    (r"(?:is |must be )?(?:at least|no less than|not less than|greater than or equal to)", r"\\ge "),
    (r"(?:is |must be )?(?:at most|no more than|not more than|less than or equal to|up to)", r"\\le "),
    (r"(?:is |must be )?(?:more|greater|larger) than|over(?= -?\d)", "> "), (r"(?:is |must be )?(?:less|fewer|smaller) than|under(?= -?\d)", "< "),
)  # fmt: skip
_PROSE_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{3,}|[\u3040-\u9fff\uac00-\ud7af]")
_PLAIN_WORD = re.compile(r"(?:the |an? )?([^\W\d_]+(?:[-'][^\W\d_]+)*?)[\u7684\u4e86]?", re.IGNORECASE)
_NO_PROSE = re.compile(
    r"\\(?:begin|end) ?\{[a-z]+\*?\}|\b(?:arc)?(?:sin|cos|tan|cot|sec|csc|log|exp|mod|max|min|lim|gcd|lcm)\b"
)
_SENTENCE = re.compile(r"[\u662f\u4e3a\u6709\u5747\u90fd]|.{9}")  # more than a word in Chinese
_WITH_UNIT = re.compile(
    r"(.*?[\d)}\]a-zA-Z])(?: ?(?=\\mathrm \{|\^ ?\\circ|[\u4e00-\u9fff])| (?=[a-zA-Z]{2}|[$\u20ac\xa3\xa5]))(.{1,30})"
)
_NO_UNIT_WORD = re.compile(
    r"^[ ,]*(?:plus|minus|times|divided|multiplied|squared|cubed|factorial|choose|mod|to the power|or|and|than|is|of|which|who|that)\b"
    r"|\b(?:than|twice) (?:[a-zA-Z]$|\d|twice|half)|\b(?:or|and) (?:more|less|fewer|above|below|over|under|so)\b"
    r"|\u4ee5[\u4e0a\u4e0b\u5185]|^\+$", re.IGNORECASE,
)  # fmt: skip
_UNIT_TEXT = re.compile(r"(?:[^\W\d]|[ /.$%\u20ac\xa3\xa5\u20b9'\-\u4e00-\u9fff]|\^ ?\{?-?[1-4]\}?|\^ ?\\circ|\\cdot)+")
_COMPOUND = re.compile(r"(.+?),? ?(?:and )?(\d+(?:\.\d+)?) ?(\D+)")
_WITH_BASE = re.compile(r"(\d\w*?)_(?:(\d+)|\{ ?(\d+) ?\})")  # 101_2 is not 101_3
_MAX_READ = 2000  # characters; a longer answer is compared as text


def digits(text: str, *, everywhere: bool = True) -> str:
    """A text in the normal form of `clean` with Chinese and English numerals as digits."""
    return answer_words.to_digits(answer_chinese.to_ascii(text, everywhere=everywhere), everywhere=everywhere)


def read(text: str) -> Answer | None:
    """Value of a text that is an answer as a whole; None for prose, a negation or an empty text."""
    text = clean(text)
    if len(text) > _MAX_READ:
        return Answer(Formula(text), text)
    if verdict := VERDICTS.get(_plain(text)):
        return Answer(Word(verdict), text)
    text = affirmed(clean(_ABOUT.sub("", _LEAD_IN.sub("", text))))
    return _read(text, 0) if text else None


def _plain(text: str) -> str:
    return re.sub(r"^(?:the |an? )|[\u7684\u4e86]$", "", text.casefold().strip())


def affirmed(text: str) -> str:
    """The clauses of a text that are not negated: "It is 6" of "It is 6, not 18"."""
    if not NEGATED.search(text):
        return text
    return clean(", ".join(clause for clause in _CLAUSE.split(text) if clause and not NEGATED.search(clause)))


def _read(text: str, depth: int) -> Answer | None:
    if verdict := VERDICTS.get(_plain(text)):
        return Answer(Word(verdict), text)
    if letter := _LETTER_FIRST.fullmatch(text):
        rest = read(letter[2]) if depth < 2 else None
        return rest._replace(letter=letter[1]) if rest else Answer(Choice(frozenset(letter[1])), text)
    if choice := _choice(text):
        return Answer(choice, text)
    if "\\pm" in text and text.count("\\pm") == 1 and depth < 3:
        signs = [re.sub(r"\\pm ?", sign, text) for sign in "+-"]
        text = ", ".join(re.sub(r"(^|=) ?\+", r"\1", signed) for signed in signs)
    text = digits(text)
    if re.match(r"[a-zA-Z] ?[^a-zA-Z]|[a-zA-Z] |at |no |up |[mlgfou]\w+ ", text):
        text = relations(text)
    if based := _WITH_BASE.fullmatch(text):
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
    is_variable = re.fullmatch(r"[a-zA-Z](?:\^.*)?", rest)  # 18m in mathematics is a product
    if compound := _COMPOUND.fullmatch(rest.strip()):
        units = [leading_unit(compound[1])[0], leading_unit(compound[3])[0]]
        if not leading_unit(compound[1])[1] and units[0].dimensions and units[0].dimensions == units[1].dimensions and units[1].size < units[0].size:
            return Number(value + Fraction(compound[2]) * units[1].size / units[0].size, units[0])
    rest = rest.strip()
    if is_variable or not _UNIT_TEXT.fullmatch(rest) or _NO_UNIT_WORD.search(rest):
        return None
    unit, _ = leading_unit(rest)
    is_word = len(rest) > 2 or not rest.isascii() or rest in CURRENCY
    return Number(value, unit) if unit.dimensions or is_word else None


def _items(text: str, depth: int) -> Items | None:
    if "\\cup" in text and len(parts := re.split(r"\\cup(?![a-zA-Z])", text)) > 1:
        return _as_items("\\cup", [re.sub(r"^.*?\\in(?![a-zA-Z])", "", part) for part in parts], "", depth)
    bracketed = _BRACKETED.fullmatch(text)
    elements = split_outside(bracketed[2], ",") if bracketed else []
    if len(elements) > 1 or (elements and bracketed[1] not in ("{", "]")):  # {18} means 18 in LaTeX
        return _as_items(bracketed[1].lstrip("\\"), elements, bracketed[3].lstrip("\\"), depth)
    alternatives = _split_alternatives(text)
    if len(alternatives) > 1:
        return _as_items("", alternatives, "", depth, alternatives=True)
    elements = split_outside(_AND.sub(", ", text), ",")
    return _as_items("", elements, "", depth) if len(elements) > 1 and to_fraction(text) is None else None


def _split_alternatives(text: str) -> list[str]:
    parts = [part for part in _OR.split(re.sub("^either ", "", text)) if part.strip(" ,")]
    return [piece for part in parts for piece in split_outside(part, ",")] if len(parts) > 1 else []


def _as_items(opening: str, texts: list[str], closing: str, depth: int, alternatives: bool = False) -> Items | None:
    elements = [_read(cleaned, depth + 1) if (cleaned := clean(_ABOUT.sub("", clean(text)))) else None for text in texts]
    if None in elements or len({isinstance(element.value, Word) for element in elements}) > 1:
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
    if not (is_name(first) or is_computation(first)) or not all(map(is_computation, middle)):
        return None
    right = _read(clean(_ABOUT.sub("", last)), depth + 1)
    name = first if re.fullmatch(r"\\?[a-zA-Z]|[a-zA-Z]_\w|\\[a-z]+", first) else ""
    return right._replace(name=name or right.name, text=text) if right else None


def is_name(text: str) -> bool:
    """Whether a left side only names the value: x, f(2), AB or a word, but not x^2, 2x or x + y."""
    return bool(_NAME.fullmatch(text)) and not _PRODUCT.fullmatch(text)


def is_computation(text: str) -> bool:
    """Whether a left side holds numbers only: "3 + 4", but not "x + 4" or "2y"."""
    text = re.sub(r"(?<=\d) ?x ?(?=\d)|\\[a-zA-Z]+|\^\\circ", " ", text)
    return any(char.isdecimal() for char in text) and not re.search(r"(?<![a-zA-Z])[a-zA-Z]{1,2}(?![a-zA-Z])", re.sub(
        r"(?<=\d) (?:cm|mm|km|kg|ft|in|mi|m|g|h|s|L|hr|lb|oz)(?![a-zA-Z])|\b(?:of|to|by|is)\b", " ", text))  # fmt: skip


def _formula(text: str) -> Answer | None:
    whole, unit = text, NO_UNIT
    if "=" not in text and (tail := _WITH_UNIT.fullmatch(text)):
        found, rest = leading_unit(re.sub(r"\\mathrm \{(\w)\}", r"\1", tail[2]))
        if found.dimensions and not rest:
            text, unit = tail[1].strip(), found
    if not text or _PROSE_WORD.search(_NO_PROSE.sub("", text)):
        return None
    return Answer(Formula(text.strip(CURRENCY + " "), unit), whole)


def relations(text: str) -> str:
    """x大于3 and "x is at least 3" as x>3 and x>=3."""
    text = answer_chinese.relations(text)
    for words, sign in _RELATION_WORDS:
        text = re.sub(words, sign, text, flags=re.IGNORECASE)
    return text
