r"""Normal form of an answer's text, and exact values of the numbers in it.

Quotation marks and markup around an answer are removed. Full-width forms, one-character fractions,
superscripts, signs of mathematics, Arabic marks and no-break spaces in numbers are read like their
ASCII or LaTeX forms.
"""

import re
import unicodedata
from fractions import Fraction

_FRACTION_CHARACTERS = (0xBC, 0xBD, 0xBE, *range(0x2150, 0x215F))  # one half, one quarter, ...
_REPLACEMENTS = {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}  # full-width forms of ASCII
_REPLACEMENTS |= str.maketrans(
    "\u2212\u2010\u2011\u2013\u3002\u066b\u066c\u066a\u2044\u2215", "----..,%//"
)  # minus sign, hyphens and dash; CJK stop; Arabic decimal point, thousands and percent; fraction slashes
_REPLACEMENTS[0x3001] = ", "  # the CJK comma stands in lists, never in numbers
_REPLACEMENTS |= {
    code: unicodedata.normalize("NFKC", chr(code)).replace("\u2044", "/") for code in _FRACTION_CHARACTERS
}
# invisible: soft hyphen, byte order mark, zero width characters, marks of the writing direction
_REPLACEMENTS |= dict.fromkeys([0xAD, 0xFEFF, *range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x206A)])
_REPLACEMENTS |= {
    ord(sign): f"{name} " for sign, name in {
        "\u221e": r"\infty", "\u2264": r"\le", "\u2265": r"\ge", "\u2260": r"\ne", "\u2248": r"\approx",
        "\xb7": r"\cdot", "\xb1": r"\pm", "\xd7": r"\times", "\u03c0": r"\pi", "\xb0": r"^\circ", "\u222a": r"\cup",
        "\u2229": r"\cap", "\u2208": r"\in", "\u2205": r"\emptyset",
    }.items()
}  # fmt: skip
_SUPERSCRIPTS = str.maketrans("\u2070\xb9\xb2\xb3\u2074\u2075\u2076\u2077\u2078\u2079\u207b", "0123456789-")
_SUPERSCRIPT_RUN = re.compile(f"[{''.join(map(chr, _SUPERSCRIPTS))}]+")
_SQUARE_ROOT = re.compile(r"\u221a ?(?:(\d+|[a-zA-Z])|\(([^()]{1,40})\))")
_BEFORE_FRACTION_CHARACTER = re.compile(r"(?<=\d)(?=[\xbc-\xbe\u2150-\u215e])")  # 1\xbd is 1 1/2
_THOUSANDS_SPACE = re.compile(r"(?<=\d)(?<!\d{4})(?:[\xa0\u2009\u202f~]|\\[ ;:])(?=\d{3}(?!\d))")
_MARKUP = ' *`_~,;:"\u201c\u201d\u201e\u2018\u2019\xab\xbb\u300c\u300d'  # markup and quotation marks around an answer
_REMOVED = re.compile(r"\\?[$€£¥]|(?<!\\)\\(?:(?:left|right)(?![a-zA-Z])|[()\[\],!])")  # currency, delimiters, spacing
_AND_OR = re.compile(r",? ?\\text\{ ?(?:and|or) ?\} ?|,? (?:and|or) ")
_TEXT_WORD = re.compile(r"^\\(?:text|textbf|mathrm|mathbf)\{ ?([^{} ]*) ?\}$")
PROSE = re.compile(
    r"(?<![\w\\{])[^\W\d_]{2,}(?=[\s.,;:!?*\"')]|-[^\W\d_]{2}|$)|[\u3040-\u9fff\uac00-\ud7af]"
)  # a word, or CJK
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


def clean(text: str) -> str:
    r"""Normal form: no currency, math delimiters or markup; `\dfrac` as `\frac`; "a and b" as "a, b"."""
    text = _THOUSANDS_SPACE.sub("", _BEFORE_FRACTION_CHARACTER.sub(" ", text))
    text = _SUPERSCRIPT_RUN.sub(lambda m: f"^{{{m[0].translate(_SUPERSCRIPTS)}}}", text)
    text = _SQUARE_ROOT.sub(lambda m: rf"\sqrt{{{m[1] or m[2]}}}", text)
    text = _REMOVED.sub("", " ".join(text.translate(_REPLACEMENTS).split()))
    text = re.sub(r"\\[dtc]frac", r"\\frac", text).replace("{,}", ",").replace("\\%", "%")
    if not PROSE.search(listed := _AND_OR.sub(", ", text)):
        text = listed
    text = text.strip(_MARKUP).rstrip(f"{_MARKUP}.\u2026")
    excess = sum(map(text.count, ")]}")) - sum(map(text.count, "([{"))  # brackets that were opened before the answer
    text = text[: max(len(text) - max(excess, 0), len(text.rstrip(")]}")))]
    text = _TEXT_WORD.sub(r"\1", text)
    is_wrapped = text[:1] + text[-1:] in ("()", "''") and len(split_commas(text[1:-1])) == 1
    return text[1:-1].strip() if is_wrapped else text


def split_commas(text: str) -> list[str]:
    """Splits at commas outside brackets; an unmatched closing bracket gives an empty list."""
    depth, cuts = 0, [-1]
    for i, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if depth < 0:
            return []
        if char == "," and depth == 0:
            cuts.append(i)
    return [text[start + 1 : end] for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True)]


def find_numbers(text: str) -> tuple[str, list[re.Match]]:
    r"""Text with \frac{1}{2} as 1/2, 2 \times 10^3 as 2e3, 0.\overline{3} as 3/9; and its numbers."""
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


def last_number(text: str) -> str | None:
    """Last number of a text, as `plain_number` writes it; `a/b` and `%` are kept.

    None without a number, or if the last one is part of an expression, like the 3 of 10^3.
    Exponents of units, like the 2 of cm^2, are skipped.
    """
    text, numbers = find_numbers(_UNIT_POWER.sub(r"\1", clean(text)))
    return plain_number(numbers[-1]) if numbers and not is_part_of_expression(text, numbers[-1]) else None
