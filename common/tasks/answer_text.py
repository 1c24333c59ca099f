r"""Normal form of an answer's text: characters, LaTeX markup, markdown and quotation marks.

Full-width forms, one-character fractions, superscripts, signs of mathematics, Arabic
separators and no-break spaces are read like their ASCII or LaTeX forms. Fonts, sizes and spacing of
LaTeX are dropped. A currency sign moves behind its number: $18 becomes 18 dollars.
"""

import re
import unicodedata

_FRACTION_CHARACTERS = (0xBC, 0xBD, 0xBE, *range(0x2150, 0x215F))  # one half, one quarter, ...
_REPLACEMENTS = {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}  # full-width forms of ASCII
_REPLACEMENTS |= str.maketrans(
    "\u2212\u2010\u2011\u2013\u3002\u066b\u066c\u066a\u2044\u2215\uffe5\u301c", "----..,%//\xa5~"
) | {0x2236: ":"}  # minus sign, hyphens, dash; CJK stop; Arabic signs; slashes; yen; wave dash; ratio
_REPLACEMENTS |= {0x3001: ", ", 0x2014: ", "}  # CJK comma and long dash: never in numbers
_REPLACEMENTS |= {
    code: unicodedata.normalize("NFKC", chr(code)).replace("\u2044", "/") for code in _FRACTION_CHARACTERS
}
# invisible: soft hyphen, byte order mark, zero width characters, marks of the writing direction
_REPLACEMENTS |= dict.fromkeys([0xAD, 0xFEFF, *range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x206A)])
_REPLACEMENTS |= {
    ord(sign): f"{name} " for sign, name in {
        "\u221e": r"\infty", "\u2264": r"\le", "\u2265": r"\ge", "\u2260": r"\ne", "\u2248": r"\approx",
        "\xb7": r"\cdot", "\xb1": r"\pm", "\xd7": r"\times", "\xf7": r"\div", "\u03c0": r"\pi", "\xb0": r"^\circ",
        "\u2220": r"\angle", "\u25b3": r"\triangle", "\u2234": "", "\u2235": "", "\u2a7d": r"\le", "\u2a7e": r"\ge",
        "\u339c": " mm", "\u339d": " cm", "\u339e": " km", "\u338f": " kg", "\u33a0": " cm^2", "\u33a1": " m^2",
        "\u222a": r"\cup", "\u2229": r"\cap", "\u2208": r"\in", "\u2205": r"\emptyset", "\u2103": r"^\circ C",
    }.items()
}  # fmt: skip
_FULL_WIDTH_COMMA = re.compile(r"\uff0c(?!\d{3}(?!\d))")  # 1\uff0c280 is a number
_SUPERSCRIPTS = str.maketrans("\u2070\xb9\xb2\xb3\u2074\u2075\u2076\u2077\u2078\u2079\u207b", "0123456789-")
_SUPERSCRIPT_RUN = re.compile(f"[{''.join(map(chr, _SUPERSCRIPTS))}]+")
_SUBSCRIPT = re.compile("(?<=[a-zA-Z])[\u2080-\u2089]")
_SQUARE_ROOT = re.compile(r"\u221a ?(?:(\d+|[a-zA-Z])|\(([^()]{1,40})\))")
_BEFORE_FRACTION_CHARACTER = re.compile(r"(?<=\d)(?=[\xbc-\xbe\u2150-\u215e])")  # 1\xbd is 1 1/2
_THOUSANDS_SPACE = re.compile(r"(?<=\d)(?<!\d{4})(?:[\xa0\u2009\u202f~]|\\[ ;:,])(?=\d{3}(?!\d))")
_SPACING = re.compile(
    r"\\(?:[ ,;:]|(?:quad|qquad|enspace|enskip|thinspace|medspace|thickspace)(?![a-zA-Z])"
    r"|[hv]?phantom ?\{[^{}]*\}|[hv]space\*? ?\{[^{}]*\})|~(?!\d)"
)
_NOTHING = re.compile(
    r"(?<!\\)\\(?:[()\[\]!]"
    r"|(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|scriptstyle|limits|rm|bf|it|bfseries"
    r"|tiny|small|normalsize|large|Large|LARGE|huge|Huge)(?![a-zA-Z]))"
)
_TEXT_FONT = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal|up)?|mathrm|mbox|hbox|emph|underline|operatorname"
    r"|textcolor ?\{[^{}]{0,20}\}|color ?\{[^{}]{0,20}\})\{([^{}]*)\}"
)
_BRACED = r"[^{}]*(?:\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}[^{}]*)*"  # a text with braces in braces
_MATH_FONT = re.compile(rf"\\(?:math(?:bf|it|sf|tt|normal)|boldsymbol|bm|pmb|ensuremath) ?\{{({_BRACED})\}}")
_MATH = re.compile(r"(?<!\\)\$([^$\n]{1,300})(?<!\\)\$")
_STRAY_DOLLAR = re.compile(r"(?<!\\)\$(?! ?[-+]?[\d.])")
_LETTER_UNITS = tuple("msghtL")
_MARKUP = ' *`_~,;:"\u201c\u201d\u201e\u2018\u2019\xab\xbb\u300c\u300d'  # markup and quotation marks around an answer
CURRENCY = "$\u20ac\xa3\xa5\u20b9"
_CURRENCY_FIRST = re.compile(
    rf"([{CURRENCY}]) ?(-?(?:\d+(?:,\d{{3}})*(?:\.\d+)?|\.\d+)"
    r"(?:[ -]?(?:hundred|thousand|million|billion|trillion)s?\b|(?:[kKMB]|bn)(?!\w)|[\u4e07\u4ebf])?)"
    r"(?![\d.,]*[\d\\^*+({a-zA-Z])"
)
PROSE = re.compile(
    r"(?<![\w\\{])[^\W\d_]{2,}(?=[\s.,;:!?*\"')]|-[^\W\d_]{2}|$)|[\u3040-\u9fff\uac00-\ud7af]"
)  # a word, or CJK


def clean(text: str) -> str:
    r"""Normal form: no math delimiters, fonts or markup; `\dfrac` as `\frac`."""
    text = _THOUSANDS_SPACE.sub("", ascii_signs(text)).replace("{,}", ",")
    if "\\" in text or "~" in text:
        text = _NOTHING.sub("", _SPACING.sub(" ", text))
        for _ in range(2):  # a font in a font
            text = _MATH_FONT.sub(r"\1", _TEXT_FONT.sub(_as_words, text))
        text = re.sub(r"\\[dtc]frac", r"\\frac", text).replace("\\%", "%")
        text = re.sub(
            r"\\(?:leq|leqslant)(?![a-zA-Z])", r"\\le", re.sub(r"\\(?:geq|geqslant)(?![a-zA-Z])", r"\\ge", text)
        )
        text = text.replace("\\varnothing", "\\emptyset")
        text = re.sub(r"\\degree(?![a-zA-Z])|\^ ?\{ ?\\circ ?\}", r"^\\circ", text)
    if "$" in text:
        text = _MATH.sub(lambda m: m[0] if PROSE.search(m[1]) or m[1][-1] in " +-*/=" else m[1], text)
        text = _STRAY_DOLLAR.sub("", text).replace("\\$", "$")
    text = _CURRENCY_FIRST.sub(lambda m: f"{m[2]} {m[1].replace('$', 'dollars')}", " ".join(text.split()))
    text = text.strip(_MARKUP).rstrip(f"{_MARKUP}.?\u2026")
    excess = sum(map(text.count, ")]}")) - sum(map(text.count, "([{"))  # brackets that were opened before the answer
    text = text[: max(len(text) - max(excess, 0), len(text.rstrip(")]}")))]
    for _ in range(3 if len(text) < 2000 else 0):
        if text[:1] + text[-1:] in ("()", "''", "{}") and len(split_outside(text[1:-1], ",")) == 1:
            text = text[1:-1].strip(_MARKUP)
    return text


def ascii_signs(text: str) -> str:
    """Full-width forms and signs of mathematics as ASCII or LaTeX; invisible characters removed."""
    if text.isascii():
        return text
    text = _THOUSANDS_SPACE.sub("", _BEFORE_FRACTION_CHARACTER.sub(" ", text))
    text = _SUPERSCRIPT_RUN.sub(lambda m: f"^{{{m[0].translate(_SUPERSCRIPTS)}}}", text)
    text = _SUBSCRIPT.sub(lambda m: f"_{ord(m[0]) - 0x2080}", text)
    text = _SQUARE_ROOT.sub(lambda m: rf"\sqrt{{{m[1] or m[2]}}}", text)
    return _FULL_WIDTH_COMMA.sub(", ", text).translate(_REPLACEMENTS)


def _as_words(match: re.Match) -> str:
    content = match[1]
    if content.strip() in _LETTER_UNITS:  # h is an hour in \\text{h}, and a variable without it
        return rf" \mathrm {{{content.strip()}}}"
    return f" {content} " if content[:1].isalpha() or content[:1] == " " else content


def split_outside(text: str, separator: str) -> list[str]:
    """Splits at a character outside brackets; an unmatched closing bracket gives an empty list."""
    depth, cuts = 0, [-1]
    for i, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if depth < 0:
            return []
        if char == separator and depth == 0:
            cuts.append(i)
    return [text[start + 1 : end] for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True)]
