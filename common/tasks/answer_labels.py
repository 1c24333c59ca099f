"""Dates, times, ratios and ranges: digits that are a name, not a number.

Math-Verify would subtract or divide them: 2024-01-05, 7:30, 3:5, 18-20. They are compared as
written, but for leading zeros and these forms: January 5, 2024 is 2024-1-5, 7:30 pm is 19:30, "18
to 20" and "between 18 and 20" are 18~20.
"""

import re

_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
_MONTH = (
    r"(jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?"
    r"|nov(?:ember)?|dec(?:ember)?)\b\.?"
)
_DAY = r"(\d{1,2})(?:st|nd|rd|th)?"
_NUMBER = r"-?\d{1,20}(?:,\d{3}){0,6}(?:\.\d{1,20})?(?:/\d{1,20})?%?"
_UNIT = r"(?: ?[a-zA-Z$%\u4e00-\u9fff]{1,12}){0,2}?"
_TO = r"(?: ?[~到至] ?| to | through |(?<=\d) ?-{1,2} ?(?=\d))"
_FORMS = (
    ("date", rf"\b{_MONTH} {_DAY},?(?: (\d{{4}}))?(?!\d)"),
    ("date", rf"\b{_DAY}(?: of)? {_MONTH},?(?: (\d{{4}}))?(?!\d)"),
    ("time", r"\d{1,2}(?: ?: ?[0-5]\d)+ ?(?:[ap]\.? ?m\b\.?)?"),
    ("time", r"\b\d{1,2} ?[ap]\.?m\b\.?"),
    ("ratio", r"(?<![\d.])\d+(?:\.\d+)?(?: ?: ?\d+(?:\.\d+)?)+"),
    ("date", r"(?<!\d)\d+(?: ?- ?\d+){2,}|(?<!\d)\d+(?:/\d+){2,}"),
    ("range", rf"\bbetween ({_NUMBER}){_UNIT} and ({_NUMBER})"),
    ("range", rf"(?<![\w.,])(?:from )?({_NUMBER}){_UNIT}{_TO}({_NUMBER})"),
)  # fmt: skip
_MAX_LENGTH = 80
LABEL = re.compile("|".join(re.sub(r"\((?!\?)", "(?:", form) for _, form in _FORMS), re.IGNORECASE)


def normal_label(text: str) -> str | None:
    """Normal form of a date, time, ratio or range; None for any other text."""
    if len(text) > _MAX_LENGTH:
        return None
    for kind, form in _FORMS:
        match = re.fullmatch(
            rf"(?:on |at |from )?{form}(?P<unit> ?(?:[a-zA-Z$%]{{2,12}}|[\u4e00-\u9fff]{{1,4}}|\$))?",
            text,
            re.IGNORECASE,
        )
        if match and (kind == "range" or not match["unit"]):
            return _NORMAL[kind](match)
    return None


def _date(match: re.Match) -> str:
    parts = [part for part in match.groups() if part]
    month = next((part for part in parts if part[:1].isalpha()), None)
    if month is None:  # year first is never ambiguous, 3/4/2020 is
        return _without_zeros(re.sub(r"^(\d{4})/(\d+)/(\d+)$", r"\1-\2-\3", match[0]))
    numbers = [int(part) for part in parts if part.isdecimal()]  # day, or day and year
    return "-".join(map(str, [*numbers[1:], _MONTHS.index(month[:3].lower()) + 1, numbers[0]]))


def _time(match: re.Match) -> str:
    text = re.sub("[ .]", "", match[0]).lower()
    hour, *rest = re.sub("[apm]", "", text).split(":")
    if text[-1] == "m":
        hour = str(int(hour) % 12 + (12 if text[-2] == "p" else 0))
    return _without_zeros(":".join([hour, *(rest or ["00"])]))


def _range(match: re.Match) -> str:
    low, high = (part for part in match.groups()[:2])
    return f"{low}~{high}".replace(",", "")


def _without_zeros(text: str) -> str:
    return re.sub(r"(?<!\d)0+(?=\d)", "", text.replace(" ", ""))


_NORMAL = {"date": _date, "time": _time, "ratio": lambda match: _without_zeros(match[0]), "range": _range}
