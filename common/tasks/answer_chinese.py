"""Chinese numerals and forms as ASCII.

三分之二 is 2/3, 百分之五十 is 50%, 二又三分之一 is 2 1/3, 负三 is -3, 1.2万 is 12000, 三点五 is 3.5, 八成
is 80%, 2024年1月5日 is 2024-1-5, 下午3点半 is 15:30 and 3比5 is 3:5.

A single 一 or 三 is often no number (一起, 三角形), so in running text a numeral counts if it has
several characters or stands where a result stands: after 是, 有, 剩 or the like, and before a
measure word or the end.
"""

import re
from fractions import Fraction

_DIGITS = {char: str("〇一二三四五六七八九".index(char)) for char in "〇一二三四五六七八九"}
_DIGITS |= dict(zip("零壹贰两叁肆伍陆柒捌玖", "01223456789", strict=True))
_SCALES = {
    "亿": 10**8,
    "億": 10**8,
    "万": 10**4,
    "萬": 10**4,
    "千": 1000,
    "仟": 1000,
    "百": 100,
    "佰": 100,
    "十": 10,
    "拾": 10,
}
_NUMERAL = f"[{''.join(_DIGITS)}{''.join(_SCALES)}]"
_DECIMAL = rf"{_NUMERAL}{{1,4}}点[{''.join(_DIGITS)}]{{1,9}}[万亿]?(?![分钟半刻])"  # 三点五, but 三点五分 is a time
_N = rf"(?:(?<![\d.])\d{{1,20}}(?:\.\d{{1,20}})?|{_DECIMAL}|{_NUMERAL}{{1,30}})"
_UNIT_OF_1000 = "[米克瓦卡帕焦伏赫字]"
_UNIT_AHEAD = f"(?!{_UNIT_OF_1000})"  # 千米 is a kilometre
_FRACTION = re.compile(rf"(?:(?P<whole>{_N})又)?(?P<below>{_N})分之(?P<above>{_N})")
_TENTHS = re.compile(rf"({_N})成([{''.join(_DIGITS)}])?(?![为功立本绩员熟长就果分都])")
_SCALE = rf"(?:[亿億万萬百]|千{_UNIT_AHEAD})"
_WITH_SCALE = (
    rf"\d{{1,20}}(?:,\d{{3}}){{0,6}}(?:\.\d{{1,20}})? ?{_SCALE}(?:(?:\d{{1,9}}(?:\.\d{{1,9}})?)?{_SCALE}){{0,4}}"
)
_NUMBER = re.compile(rf"(?<![\d.,]){_WITH_SCALE}(?:\d{{1,4}}(?!\d*[年月日点]))?|{_DECIMAL}|{_NUMERAL}{{1,30}}")
_DOZENS = re.compile(r"(?<![\d.,])(\d{1,20}(?:\.\d{1,9})?) ?打(?![折开工印算电扫球包字架人破造\d一二三四五六七八九])")
_MINUTES = re.compile(r"(?<=\d)分(?=\d{1,2}(?:\.\d{1,9})?秒)|(?:小时|时)零?\d{1,2}分(?!钟|之|[\d米])")
_YEAR, _SHORT = rf"({_NUMERAL}{{2,4}}|\d{{2,4}})", rf"({_NUMERAL}{{1,3}}|\d{{1,2}})"
_DATE = re.compile(rf"(?:{_YEAR} ?年 ?)?{_SHORT} ?月 ?{_SHORT} ?[日号]")
_TIME = re.compile(
    rf"(上午|早上|凌晨|中午|下午|晚上|傍晚)?{_SHORT} ?(?:[点时](?:{_SHORT}分|(半|整|一刻|三刻))|点(?=$|[\s,.;钟]))"
)
_IS_ORDINAL = re.compile(r"(?:第|初|星期|礼拜|周|之|唯|统|万)$")
_RESULT_BEFORE = re.compile(r"(?:[是为有剩下余得到于要需共买卖多少付花用收用重长高宽深约负]|还剩|答案|[:=]) ?$")
_RESULT_AFTER = re.compile(
    r"(?:$|[\s,.;!?)]|[个只本支张人名位条块辆件朵棵箱瓶元角天年月日时分秒周次倍米克斤公千厘毫平立吨升度岁页组种套双对袋包盒杯碗台间层排行列题道篇首枚颗粒根把串盘片头匹座栋])"
)
_NOT_ALONE = re.compile(
    r"[一十](?=[共起样定些般直切旦边半面分]|个人$)|三角|四边|四周|[千百]分|千万(?!元)|万一|[一二三四五六七八九][一二三四五六七八九](?![一二三四五六七八九〇零])"
)


def to_ascii(text: str, *, everywhere: bool) -> str:
    """Rewrites Chinese numerals and forms.

    Args:
        text: a text in the normal form of `clean`.
        everywhere: whether every numeral counts, as in a box; in running text only those that are
            surely numbers do.
    """
    if text.isascii():
        return text
    text = text.replace("一半", "1/2") if everywhere else text
    text = re.sub(r"(?:周|礼拜|星期)([一二三四五六日天])", lambda m: "星期" + m[1].replace("天", "日"), text)
    text = re.sub(r"(\d)%?比(\d)", r"\1:\2", _dates(text))
    text = re.sub(rf"百分之({_N})", lambda m: f"{_text(value(m[1]))}%", text)
    text = _FRACTION.sub(_as_fraction, text)
    text = _TENTHS.sub(lambda m: f"{_text(value(m[1]) * 10 + (value(m[2]) if m[2] else 0))}%", text)
    text = _NUMBER.sub(lambda m: _as_number(m, everywhere), text)
    text = _DOZENS.sub(lambda m: _text(value(m[1]) * 12), text)
    text = _MINUTES.sub(r"\g<0>钟", text)
    text = re.sub(r"(?:负的?|零下) ?(?=\d)", "-", text)
    text = re.sub(r"(?<=\d)又(?=\d+/\d)", " ", text)
    text = re.sub(r"(?<=\d)(个|小时|年|天|倍)半", lambda m: f".5{m[1]}", text)
    return text


def value(numeral: str) -> Fraction:
    """Value of a numeral such as 一百零八, 12, 1.2万 or 三点五."""
    numeral = numeral.replace(",", "").strip()
    if "点" in numeral and numeral[-1] in "万亿":
        return value(numeral[:-1]) * _SCALES[numeral[-1]]
    if "点" in numeral:
        whole, _, decimals = numeral.partition("点")
        digits = "".join(_DIGITS[char] for char in decimals)
        return value(whole) + Fraction(int(digits), 10 ** len(digits))
    if not any(char in _SCALES for char in numeral):  # 二〇二四, digit by digit
        return Fraction("".join(_DIGITS.get(char, char) for char in numeral) or 0)
    for char, scale in _SCALES.items():
        before, found, after = numeral.rpartition(char)
        if found:
            is_short = len(after) == 1 and after not in _SCALES and scale > 10  # 三百五 is 350
            rest = value(after) * (scale // 10 if is_short else 1) if after else 0
            return (value(before) if before else 1) * scale + rest
    raise AssertionError(numeral)


def _text(number: Fraction) -> str:
    """A number as digits; exact, because all denominators here are powers of ten."""
    if number.denominator == 1:
        return str(number.numerator)
    places = len(str(number.denominator))
    return f"{number.numerator / number.denominator:.{places}f}".rstrip("0") if places < 15 else str(number)


def _as_fraction(match: re.Match) -> str:
    whole = f"{_text(value(match['whole']))} " if match["whole"] else ""
    above, below = value(match["above"]), value(match["below"])
    if above.denominator * below.denominator != 1:
        return match[0]
    return f" {whole}{above}/{below} "


def _as_number(match: re.Match, everywhere: bool) -> str:
    numeral, before = match[0], match.string[max(0, match.start() - 4) : match.start()]
    is_pure = not any(char.isdecimal() for char in numeral)
    if before.endswith("星期") or (is_pure and re.match("角|边形|维|棱|几", match.string[match.end() :])):
        return numeral
    if is_pure and not everywhere:
        if _IS_ORDINAL.search(before) or _NOT_ALONE.match(match.string, match.start()):
            return numeral
        is_result = _RESULT_BEFORE.search(before) and _RESULT_AFTER.match(match.string, match.end())
        if len(numeral) == 1 and not is_result:
            return numeral
    if is_pure and len(numeral) == 2 and _NOT_ALONE.fullmatch(numeral):
        return numeral  # 三四 is three or four
    if numeral[-1] == "千" and len(numeral) > 1 and re.match(_UNIT_OF_1000, match.string[match.end() :]):
        return f"{_text(value(numeral[:-1]))}千"  # 三千克 is 3 kg
    if numeral[0] in "亿億万萬千仟百佰":  # no 一 in front: 千 in 千米, 百 in 百度
        return numeral
    return _text(value(numeral))


def _dates(text: str) -> str:
    """2024年1月5日 as 2024-1-5 and 下午3点30分 as 15:30."""
    text = _DATE.sub(lambda m: "-".join(_text(value(part)) for part in m.groups() if part), text)
    return _TIME.sub(_as_time, text)


def _as_time(match: re.Match) -> str:
    part, hour, minute, word = match.groups()
    hours = int(value(hour)) + (12 if part in ("下午", "晚上", "傍晚") and value(hour) < 12 else 0)
    minutes = int(value(minute)) if minute else {"半": 30, "一刻": 15, "三刻": 45}.get(word, 0)
    return f"{hours}:{minutes:02d}"
