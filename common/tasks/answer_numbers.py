"""Numbers in a text, and their exact values."""

import re
from fractions import Fraction

from common.tasks.answer_text import PROSE, clean

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
# Text directly before or after a number that makes it part of an expression: exponents and bases,
# roots, numerators and denominators, indices, factors of a constant, bounds; but not arrows (=> 42)
# and tags (<b>42</b>).
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
_LIST_BEFORE = re.compile(r"[(\[]([^()\[\]]*)\Z")  # from the innermost open bracket to the number
_LIST_AFTER = re.compile(r"([^)\]]*)[)\]]")  # from the number to the closing bracket
_MAX_CONTEXT = 60  # characters before and after a number
_MAX_NUMBER_LENGTH = 1000  # characters; int() refuses long texts, so a longer number is compared as text


def find_numbers(text: str) -> tuple[str, list[re.Match]]:
    r"""Text with \frac{1}{2} as 1/2, 2 \times 10^3 as 2e3, 0.\bar{3} as 3/9; and its numbers."""
    text = _LATEX_FRACTION.sub(lambda m: f"{m[1] or ''} {m[2] or m[3]}/{m[4] or m[5]} ".lstrip(), clean(text))
    text = _REPEATING.sub(_as_ratio, _SCIENTIFIC.sub(lambda m: f"{m[1]}e{m[2] or m[3]}", text))
    text = " ".join(text.split())
    return text, list(_NUMBER.finditer(text))


def _as_ratio(match: re.Match) -> str:
    r"""0.1\overline{6} as 15/90."""
    fixed, period = match[1] + match[2], match[3] or match[4]
    return f"{int(fixed + period) - int(fixed or 0)}/{(10 ** len(period) - 1) * 10 ** len(match[2])}"


def is_part_of_expression(text: str, number: re.Match) -> bool:
    """Whether a number is part of a larger expression or of a list, so that it is no answer."""
    before = text[max(0, number.start() - _MAX_CONTEXT) : number.start()]
    after = text[number.end() : number.end() + _MAX_CONTEXT]
    if _PART_BEFORE.search(before) or _PART_AFTER.match(after):
        return True
    opened, closed = _LIST_BEFORE.search(before), _LIST_AFTER.match(after)
    if not opened or not closed:
        return False
    elements = f"{opened[1]}0{closed[1]}"  # the number itself may hold commas
    return "," in elements and not PROSE.search(elements)  # (3, 4), but not (40 apples, that is 42)


def plain_number(number: re.Match) -> str:
    """A number found in a text, without thousands separators or plus sign."""
    return number[0].replace(",", "").replace(" %", "%").lstrip("+")


def to_fraction(text: str) -> Fraction | None:
    """Exact value of a text that is exactly one number; None for any other text."""
    text, numbers = find_numbers(text) if len(text) <= _MAX_NUMBER_LENGTH else (text, [])
    if len(numbers) != 1 or numbers[0][0] != text:
        return None
    number = plain_number(numbers[0])
    try:
        size = sum(Fraction(part) for part in number.strip("-%").split())  # two parts in 2 1/2
    except ZeroDivisionError:
        return None
    return size * (-1 if number.startswith("-") else 1) / (100 if number.endswith("%") else 1)
