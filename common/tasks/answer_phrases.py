"""Phrases around an answer: lead-ins, "about", negations, "or", "and", verdicts, comparisons."""

import re

from common.tasks.answer_text import clean, split_outside

_LEAD_IN = re.compile(
    r"^(?:(?:so|thus|hence|therefore|then|and),? |所以|因此)?"
    r"(?:(?:the|my|our)? ?(?:final |correct |right )?(?:answer|result|choice)s?(?: is| are|:| =)"
    r"|答案?(?:是|为|:|应为)|(?:it|this|that|they|there)(?:'s| is| are| equals) ?)?",
    re.IGNORECASE,
)
_ABOUT = re.compile(
    r"^(?:(?:about|approximately|approx\.?|around|roughly|exactly|only|just|precisely|a total of|maybe|perhaps|possibly"
    r"|probably|要么|也许|可能|大?约|共)\s*|~ ?|\\(?:approx|sim)(?![a-zA-Z]) ?|= ?)+",
    re.IGNORECASE,
)
_NEGATED = re.compile(
    r"\b(?:not|never|isn't|aren't|wasn't|doesn't|cannot|can't|won't|rather than|instead of|neither|nor"
    r"|no way|impossible|unlikely)\b"
    r"|\b(?:is|are|was|be) (?:wrong|incorrect|false)\b|\b(?:wrong|incorrect)$"
    r"|不是|不等于|不为|并非|不能|不选|而非|不对|是错|错误",
    re.IGNORECASE,
)
_TAKEN_BACK = re.compile(
    r"[,;.] (?:but |and |which )?(?:(?:that|this|it)(?:'s| is| was| would be) |is |was )"
    r"(?:\w+ly )?(?:wrong|incorrect|false|not (?:right|correct|true))"
    r"|[,;.] ?[但可]?(?:这|那|它)(?:个?(?:答案|结果))?(?:显然)?是?(?:错|不对|不正确|不成立)"
)
_CLAUSE = re.compile(
    r"[,;.] (?=\D)|; ?|, ?(?=[\u4e00-\u9fff])| (?=but |rather than |instead of |and not )|(?=而是|而非)"
)
_AND = re.compile(r",? and |; ?|,? ?& ?|[和与及]")
_OR = re.compile(
    r",? ?(?<![a-zA-Z])or (?:maybe |perhaps |possibly |else )?|或者?"
    r"|, ?(?:(?:maybe|perhaps|possibly) |要么|也许|可能)|\\l?or(?![a-zA-Z])"
)
_VERDICTS = {
    "true": "true yes correct right 对 对的 正确 是 是的 真 成立 没错 √ ✓",
    "false": "false no incorrect wrong untrue not-true not-correct not-right 错 错误 不对 不正确 不是 不成立 否 假 ✗ "
    r"\times",
    "none": "none no-solution no-solutions does-not-exist dne undefined 无解 没有解 不存在",
}
_VERDICT_OF = {phrase.replace("-", " "): name for name, phrases in _VERDICTS.items() for phrase in phrases.split()}
_RELATIONS = (
    (
        r"(?:is |must be )?(?:at least|not? less than|greater than or equal to)"
        r"|大于(?:或|)等于|不小于|不少于|不低于",
        r"\ge ",
    ),
    (
        r"(?:is |must be )?(?:at most|not? more than|less than or equal to|up to)"
        r"|小于(?:或|)等于|不大于|不超过|不多于",
        r"\le ",
    ),
    (r"(?:is |must be )?(?:more|greater|larger) than|over(?= -?\d)|大于", ">"),
    (r"(?:is |must be )?(?:less|fewer|smaller) than|under(?= -?\d)|小于", "<"),
    ("不等于", r"\ne "),
    ("等于", "="),
)


def verdict(text: str) -> str | None:
    """Whether a text says "true", "false" or "none", as "correct", 错误 and "no solution" do."""
    return _VERDICT_OF.get(re.sub(r"^(?:the |an? )|[的了]$", "", text.casefold().strip()))


def without_lead_in(text: str) -> str:
    """A text without "so the answer is" in front of it, and without its negated clauses."""
    return affirmed(without_about(_LEAD_IN.sub("", text)))


def without_about(text: str) -> str:
    """A text without "about" or the like in front of it."""
    return clean(_ABOUT.sub("", text))


def affirmed(text: str) -> str:
    """The clauses of a text that are not negated: "It is 6" of "It is 6, not 18"."""
    if not _NEGATED.search(text):
        return text
    if taken_back := _TAKEN_BACK.search(text):
        text = text[taken_back.end() :].partition(", ")[2]
    return clean(", ".join(clause for clause in _CLAUSE.split(text) if clause and not _NEGATED.search(clause)))


def split_or(text: str) -> list[str]:
    """Alternatives of a text, as of "18, 19 or 20"; empty if it gives none."""
    parts = [part for part in _OR.split(re.sub("^either |^要么", "", text)) if part.strip(" ,")]
    return [piece for part in parts for piece in split_outside(part, ",")] if len(parts) > 1 else []


def split_and(text: str) -> list[str]:
    """Elements of a bare list."""
    return split_outside(_AND.sub(", ", text), ",")


def relations(text: str) -> str:
    """x大于3 and "x is at least 3" as x>3 and x>=3."""
    for words, sign in _RELATIONS:
        text = re.sub(words, lambda _, sign=sign: sign, text, flags=re.IGNORECASE)
    return text
