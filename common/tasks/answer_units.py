"""Units after a number: what they measure, and whether two of them agree.

Units of the table are converted: 0.18 m is 18 cm, 1800 cents are $18. Products, quotients and
powers of them are units too: km/h, 千米/时, miles per hour, sq ft, 平方厘米. Any other words are
what is counted: "18 red apples" agrees with "18 apples", and not with "18 oranges".
"""

import re
from fractions import Fraction
from typing import NamedTuple

# dimension: names and size in the first unit of the line
_TABLE = """
m: m metre metres meter meters 米 1, km kilometre kilometres kilometer kilometers 千米 公里 1000, dm 分米 1/10
m: cm centimetre centimetres centimeter centimeters 厘米 1/100
m: mm millimetre millimetres millimeter millimeters 毫米 1/1000
m: inch inches 127/5000, ft foot feet 381/1250, yd yard yards 1143/1250, mi mile miles 201168/125
kg: kg kilogram kilograms kilo kilos 千克 公斤 1, g gram grams 克 1/1000, mg milligram milligrams 毫克 1/1000000
kg: t ton tons tonne tonnes 吨 1000, lb lbs pound pounds 45359237/100000000, oz ounce ounces 45359237/1600000000, 斤 1/2
s: s sec secs second seconds 秒 秒钟 1, min mins minute minutes 分钟 60, h hr hrs hour hours 小时 时 3600
s: day days 天 86400, week weeks wk wks 周 星期 604800, ms millisecond milliseconds 1/1000
month: month months 个月 1, year years yr yrs 年 12
$: $ dollar dollars usd buck bucks 美元 1, cent cents ¢ 1/100
¥: ¥ yuan rmb cny 元 圆 块钱 人民币 1, 角 1/10
€: € euro euros eur 欧元 1
£: £ gbp 英镑 1
₹: ₹ rs rupee rupees 1
°: ^\\circ ° degree degrees 度 °c 摄氏度 1
°F: °f 1
rad: rad rads radian radians 弧度 1
L: L l litre litres liter liters 升 1/1000, mL ml millilitre millilitres milliliter milliliters 毫升 1/1000000
L: gal gallon gallons 473176473/125000000000, qt quart quarts 473176473/500000000000
L: pint pints 473176473/1000000000000, cup cups 473176473/2000000000000
N: N newton newtons 牛 牛顿 1, kN 1000
J: J joule joules 焦 焦耳 1, kJ 1000, cal 523/125, kcal 4184
W: W watt watts 瓦 1, kW 千瓦 1000, kWh 3600000
Pa: Pa pascal pascals 帕 1, kPa 1000, atm 101325
V: V volt volts 伏 1
A: A amp amps ampere amperes 安 1
Hz: Hz hertz 赫兹 1, kHz 1000, MHz 1000000
K: K kelvin kelvins 1
mol: mol mole moles 摩尔 1
B: KB kb 1000, MB mb 1000000, GB gb 1000000000, TB tb 1000000000000
ohm: ohm ohms 欧姆 1
mph: mph 1397/3125, kph kmh 5/18
"""
_AS_DIMENSIONS = {"L": {"m": 3}, "mph": {"m": 1, "s": -1}}


def _read_table() -> dict[str, tuple[str, Fraction]]:
    units = {}
    for line in _TABLE.strip().splitlines():
        dimension, _, entries = line.partition(": ")
        for entry in entries.split(","):
            *names, size = entry.split()
            units |= {name: (dimension, Fraction(size)) for name in names}
    return units


_UNITS = _read_table()
_CHINESE = "|".join(sorted((name for name in _UNITS if name[0] > "\u3000"), key=len, reverse=True))
_POWER = r"(?: ?\^ ?(?:\{ ?(-?[1-4]) ?\}|(-?[1-4]))|( squared| cubed))?"
_ATOM = re.compile(
    rf"(?:(square|sq\.?|cubic|cu\.?) |(平方|立方))?"
    rf"(?:({_CHINESE})|(\^ ?\\circ ?[CF]?(?![a-zA-Z])|[$€£¥₹¢]|[a-zA-Z]+\.?)){_POWER}", re.IGNORECASE,
)  # fmt: skip
_PER = re.compile(
    r" ?(?:/|\bper\b|\ban?(?= (?:hour|day|week|month|year|minute|second)\b)|每|\\cdot|\*|(?<=[a-z]) (?=[a-z]))[ ]?"
)
_CLASSIFIERS = (
    "个只本支枝张人名位条辆件朵棵箱瓶块组种套双对袋包盒杯碗台间层排行列题道篇首枚颗粒根把串盘片头匹座栋次倍份步岁分页项"
)
_NOUN = re.compile(r"[^\W\d_]+(?:['-][^\W\d_]+)*")
_STOP_WORDS = """in on at for from to with by is are was were be or so as which that who when because since if than then
will would can could has have had do does did after before during of not per"""
_FILLERS = """more less fewer left total altogether each remaining the a an and here now units unit square squares piece
pieces pcs items item extra other others different possible ways only all about away too respectively"""
ENDS_NOUN = frozenset(_STOP_WORDS.split())
_NO_NOUN = frozenset(_FILLERS.split())


class Unit(NamedTuple):
    """Unit of a number.

    Attributes:
        size: size in the base units of its dimensions; 1 for counted things.
        dimensions: powers of base units, as (("m", 1), ("s", -1)); empty for counted things.
        nouns: words for what is counted.
    """

    size: Fraction = Fraction(1)
    dimensions: tuple[tuple[str, int], ...] = ()
    nouns: frozenset[str] = frozenset()


NO_UNIT = Unit()


def same_quantity(value: Fraction, unit: Unit, gold_value: Fraction, gold_unit: Unit) -> bool:
    """Whether two quantities are equal; a quantity without a unit equals one with any."""
    if NO_UNIT in (unit, gold_unit):
        return value == gold_value
    if unit.dimensions or gold_unit.dimensions:
        return unit.dimensions == gold_unit.dimensions and value * unit.size == gold_value * gold_unit.size
    return value == gold_value and _share_noun(unit.nouns, gold_unit.nouns)


def _share_noun(left: frozenset[str], right: frozenset[str]) -> bool:
    if left & right:
        return True
    chinese = [{char for noun in nouns for char in noun if char > "\u3000"} for nouns in (left, right)]
    return bool(chinese[0] & chinese[1])


def leading_unit(text: str) -> tuple[Unit, str]:
    """Unit at the start of a text, and the text after it."""
    powers, size, place, sign = {}, Fraction(1), 0, 1
    while atom := _ATOM.match(text, place):
        known = _look_up(atom)
        if known is None:
            break
        dimension, factor = known
        power = sign * _power(atom)
        for base, exponent in _AS_DIMENSIONS.get(dimension, {dimension: 1}).items():
            powers[base] = powers.get(base, 0) + exponent * power
        size, place = size * factor**power, atom.end()
        per = _PER.match(text, place)
        if not per:
            break
        following = _ATOM.match(text, per.end())
        if not following or _look_up(following) is None:
            break
        place, sign = per.end(), -1 if per[0].strip() not in ("\\cdot", "*", "") else 1
    if place:
        return Unit(size, tuple(sorted((base, power) for base, power in powers.items() if power))), text[place:].strip()
    return Unit(nouns=_nouns(text)), ""


def _look_up(atom: re.Match) -> tuple[str, Fraction] | None:
    name = (atom[3] or re.sub(r"\^ ?\\circ ?", "°", atom[4])).rstrip(".")
    name = "inch" if name == "in" and atom[1] else name  # in is a unit after sq only
    if name in _UNITS:
        return _UNITS[name]
    return _UNITS.get(name.lower()) if len(name) > 1 else None


def _power(atom: re.Match) -> int:
    words = " ".join(part.lower() for part in (atom[1], atom[2], atom[7]) if part)
    if words:
        return 2 if words.startswith(("sq", "平方")) or "squared" in words else 3
    return int(atom[5] or atom[6] or 1)


def _nouns(text: str) -> frozenset[str]:
    """Words for what is counted: {"red", "apple"} of "red apples left in the basket"."""
    nouns = []
    for word in _NOUN.findall(text[:80]):
        if word.lower() in ENDS_NOUN:
            break
        if word[0] > "\u2e80":
            word = re.split("[是为在的了和与就都也要]", word)[0].lstrip(_CLASSIFIERS)
        elif word.lower() in _NO_NOUN:
            continue
        if word:
            nouns.append(word.lower().rstrip("s") if len(word) > 3 else word.lower())
    return frozenset(nouns[:4])
