"""English number words as digits: seventy-two, two thirds, 18 million, minus 18, 60 percent.

In running text a number word counts if it has several parts ("twenty five") or follows a verb such
as "is" or "has": in "18 apples for the two of them" only 18 does.
"""

import re
from fractions import Fraction

_ONES = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen"""
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_SMALL = {word: value for value, word in enumerate(_ONES.split())}
_SMALL |= {word: 10 * value for value, word in enumerate(_TENS.split(), 2)}
_LARGE = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "lakh": 10**5, "crore": 10**7}
_GROUPS = {"hundred": 100, "dozen": 12}
_PARTS = {word: value for value, word in enumerate(
    ["half", "third", "quarter", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"], 2
)} | {"fourth": 4, "hundredth": 100, "thousandth": 1000}  # fmt: skip
_LETTERS = {"k": 10**3, "K": 10**3, "M": 10**6, "MM": 10**6, "mn": 10**6, "mln": 10**6, "mil": 10**6, "B": 10**9}
_LETTERS |= {"bn": 10**9, "T": 10**12}
_DECIMAL_PLACES = {"tenth": 10, "hundredth": 100, "thousandth": 1000}

_SMALL_WORD = "|".join(sorted(_SMALL, key=len, reverse=True))
_SCALE_WORD = "|".join([*_LARGE, *_GROUPS])
_WORDS = re.compile(
    rf"(?<![\w\\-])(?:an?[ -](?={_SCALE_WORD}))?(?:{_SMALL_WORD}|(?:(?<=[aA] )|(?<=[aA]n ))(?:{_SCALE_WORD}))"
    rf"(?:(?:[ -]|[ -]and[ -])(?:{_SMALL_WORD}|(?:{_SCALE_WORD})s?)){{0,12}}(?!\w)", re.IGNORECASE,
)  # fmt: skip
_AND_A_HALF = re.compile(rf"\b({_SMALL_WORD}|\d{{1,9}}) ([a-z]+) and a half\b", re.IGNORECASE)  # one hour and a half
_NUMBER = r"(?<![\w.,])\d{1,20}(?:,\d{3}){0,6}(?:\.\d{1,20})?"
_SCALED = re.compile(rf"({_NUMBER})[ -]?({_SCALE_WORD})s?\b(?:[ -]({_SCALE_WORD})s?\b)?", re.IGNORECASE)
_LETTERED = re.compile(rf"({_NUMBER})(?: ?(k|mn|mln|mil|bn)|(K|MM?|B|T))(?=$|[\s,;!?)]|\.(?:\s|$))")
_PLACES = re.compile(rf"({_NUMBER}) (tenth|hundredth|thousandth)s\b", re.IGNORECASE)
_PART_WORD = "halves|" + "|".join(rf"{word}s?" for word in _PARTS)
_FRACTION = re.compile(
    rf"(?<![\w.-])(?:(\d+|{_SMALL_WORD})[ -]and[ -])?({_SMALL_WORD}|an?)[ -]({_PART_WORD})\b|^half$", re.IGNORECASE
)  # words only: 3 quarters are coins
_PART_OF_UNIT = re.compile(
    r"(?<![\d/])(?:(\d{1,4}/\d{1,4}) of|(?<!and )(?<!a )\bhalf) an? "
    r"(?=(?:second|minute|hour|day|week|month|year|inch|foot|yard|mile|meter|metre|kilometer"
    r"|liter|litre|gallon|pint|quart|cup|pound|ounce|kilogram|gram|ton|dollar|cent|degree)\b)", re.IGNORECASE,
)  # fmt: skip
_BELOW_ZERO = re.compile(
    r"(?<![\w.-])(\d{1,20}(?:\.\d{1,20})?)((?: ?degrees?| ?\^\\circ ?)?(?: ?[CF])?) below zero", re.IGNORECASE
)
_AFTER_VERB = re.compile(
    r"(?:\b(?:is|are|was|were|be|equals?|has|have|had|gets?|got|makes?|leaves?|needs?|takes?|costs?|only|exactly|total"
    r"|remaining|minus|negative)|[:=]) ?$", re.IGNORECASE,
)  # fmt: skip
_IS_ONE = re.compile(r"(?:\b(?:is|equals?|are|be)|[:=]) ?$", re.IGNORECASE)
_NO_NUMBER_AFTER = re.compile(r" (?:of|more|way|another|reason|thing|answer|solution)\b", re.IGNORECASE)


def to_digits(text: str, *, everywhere: bool) -> str:
    """Rewrites number words, scale words, "percent" and "minus" in front of a number.

    Args:
        text: a text in the normal form of `clean`.
        everywhere: whether every number word counts, as in a box.
    """
    if not re.search(r"[a-zA-Z]", text):
        return text
    has_digits = any(char.isdecimal() for char in text)

    def rewrite(match: re.Match) -> str:
        words = re.split(r"[ -]", match[0].lower())
        before = text[max(0, match.start() - 12) : match.start()]
        is_stated = _AFTER_VERB.search(before) and not _NO_NUMBER_AFTER.match(text, match.end())
        if words == ["one"] and not everywhere:  # "only one person", "one of them"
            return "1" if _IS_ONE.search(before) and re.match(r"$|[.,;!]", text[match.end() :]) else match[0]
        if not (everywhere or len(words) > 1 or is_stated or not has_digits):
            return match[0]
        return str(_value(words))

    text = re.sub(r"\bhalf a dozen\b", "6", text, flags=re.IGNORECASE)
    if "below zero" in text:
        text = _BELOW_ZERO.sub(r"-\1\2", text)
    text = _AND_A_HALF.sub(lambda m: f"{m[1]} and a half {m[2]}", text)
    text = _PART_OF_UNIT.sub(lambda m: f"{m[1] or '1/2'} ", _FRACTION.sub(_as_fraction, text))
    text = _SCALED.sub(_as_scaled, _WORDS.sub(rewrite, text))
    if not re.search(r"[+*^\\=]", text):  # 18k is a product there
        text = _LETTERED.sub(lambda m: _times(m[1], _LETTERS[(m[2] or m[3]).strip()]), text)
    text = _PLACES.sub(lambda m: _times(m[1], Fraction(1, _DECIMAL_PLACES[m[2].lower()])), text)
    text = re.sub(r"(?<=\d) ?(?:‰|per (?:thousand|mill?e?)\b)", "e-3", text)
    text = re.sub(r"(?<=\d)(?: ?-?per ?cent\b| pct\b)", "%", text, flags=re.IGNORECASE)
    return re.sub(r"(?<![\w)}] )(?<![\w)}])\b(?:minus|negative) (?=[\d.$])", "-", text, flags=re.IGNORECASE)


def _value(words: list[str]) -> int:
    total = current = 0
    for word in words:
        word = word if word in _SMALL else word.removesuffix("s")
        if word in _LARGE:
            total, current = total + (current or 1) * _LARGE[word], 0
        elif word in _GROUPS:
            current = (current or 1) * _GROUPS[word]
        elif word in _SMALL:
            current += _SMALL[word]
    return total + current


def _times(number: str, factor: int | Fraction) -> str:
    value = Fraction(number.replace(",", "")) * factor
    return str(value)


def _as_scaled(match: re.Match) -> str:
    scales = _LARGE | _GROUPS
    return _times(match[1], scales[match[2].lower()] * (scales[match[3].lower()] if match[3] else 1))


def _as_fraction(match: re.Match) -> str:
    if not match[3]:
        return "1/2"
    word = match[3].lower().removesuffix("s").replace("halve", "half")
    whole = f"{_SMALL.get(match[1].lower(), match[1])} " if match[1] else ""
    return f"{whole}{_SMALL.get(match[2].lower(), 1)}/{_PARTS[word]}"
