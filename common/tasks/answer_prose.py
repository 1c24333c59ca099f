r"""Finds the answer in sentences: the last number that is claimed, with its unit.

A number is no claim if it is
  - negated: "not 18", "18 is wrong", 不是18; the number before it in the sentence counts instead;
  - a part of an expression, of a list in brackets, or of an equation for anything but a name:
    10^3, x/2, 5 + 3, (3, 4), x^2 = 18, "16 plus 2", "half of 36";
  - a bound: "at least 18", "18 or more", x > 18, 18以上;
  - supposed, asked or said by others: "if it were 18", "Is it 18?", "some would say 18";
  - given, beside another number: the 4 of "45 miles at the end of those 4 hours".
If the last number is one of these kinds (other than negated, supposed or given), the sentence
claims nothing.
"18 or 19" and "18 and 19" claim a list, "18 to 20" a range.
"""

import re
from typing import NamedTuple

from common.tasks.answer_labels import LABEL
from common.tasks.answer_numbers import find_numbers, is_part_of_expression, plain_number
from common.tasks.answer_text import clean
from common.tasks.answer_units import ENDS_NOUN, leading_unit
from common.tasks.answer_values import digits, is_computation, is_name
from common.tasks.answer_words import to_digits

_SENTENCE_END = re.compile(
    r"\n+|(?<=[.!?;])(?<!\bsq\.)(?<!\bft\.)(?<!\bcu\.)(?<!\b[Nn]o\.)(?<!approx\.)(?:\s+|(?=[^\x00-\x7f]))"
    r"|(?<=[^\x00-\x7f])[.!?;]"
)
_NOT_BEFORE = re.compile(
    r"(?:\b(?:not|never|cannot|neither|nor|no way|impossible|unlikely|rather than|instead of"
    r"|reject|eliminate|discard|exclude|rule out)\b|n't\b)(?!\s*only)[^,.;:]{0,40}$"
    r"|(?:[不未](?:可能|会|应该?|能|必|一定|见得|至于)?(?:会|能|就)?(?:是|等于|为)|难道|并非|绝非|而非|没有|排除|舍去)[^,.;:是为而]{0,8}$",
    re.IGNORECASE,
)
_COPULA = re.compile(r"\b(?:is|are|was|were|gives?|makes?|has|have|but)\b(?! not| never)|=|而是|但")
_NOT_CLAUSE = re.compile(
    r"not true|not the case|n't think|not think|not believe|n't believe|doubt|false that|wrong (?:that|to)"
    r"|(?:wrong|incorrect) (?:answer|result|value)|错误的?(?:答案|结果)"
    r"|(?<!of )\b(?:anyone|whoever|someone|some|many|most|people|students?|those|one|you) (?:who )?(?:\w+ )?"
    r"(?:says?|said|answers?|answered|thinks?|thought|guess(?:es|ed)?|claim(?:s|ed)?)\b"
    r"|\b(?:he|she|they) (?:thought|guessed|claimed)\b"
    r"|(?:有(?:的|些)?人|有(?:的|些)?同学)(?:说|认为|以为)|误(?:以为|认为)",
    re.IGNORECASE,
)
_SUPPOSED = re.compile(
    r"(?:\b(?:if|whether|suppose|supposing|assume|assuming|unless)\b|如果|假如|假设|若|是否)"
    r"(?!.*(?:\bthen\b|\bthere\b|\bget|\bleft with\b|\bwe (?:are|have)\b|\d[^=]{0,9}=))", re.IGNORECASE | re.DOTALL,
)  # fmt: skip
_QUESTION = re.compile(r"\?[\s\"'*)\u201d]*$|[吗呢]$")
_OFFER = re.compile(r"\b(?:would you like|do you want|shall I|should I|can I help|let me know)\b", re.IGNORECASE)
_GIVEN_BEFORE = re.compile(
    r"\d (?:in|out of)(?: (?:every|all))? $|\b(?:of|for|in|at|from|with|among|over|after|during) (?:all )?"
    r"(?:the|these|those|his|her|their|its|our|my|your) (?:[a-z]+ )?$", re.IGNORECASE,
)  # fmt: skip
_ASIDE = re.compile(
    r"(?<=[a-z]{3})(?<!minus)(?<!plus)(?<!times)(?<!than)(?<! by)(?<! of)(?<!mod)(?<!modulo) "
    r"\((?:\d{1,9}(?:\.\d{1,9})? ?(?:[-+*/x]|\\times|\\div) ?){1,9}\d{1,9}(?:\.\d{1,9})?\)"
)  # 160 minutes (100 + 60)
_CHANCE = re.compile(r"\b(?:probability|chances?|odds|likelihood)\b", re.IGNORECASE)
_DENIED = re.compile(
    r"(?:\bnot|n't|\bcannot|\bnever|\bnor)\s*(?:\w+ ?){0,2}$"
    r"|\b(?:no way|impossible|unlikely)\b[^,.;]{0,40}$"
    r"|(?:\b(?:wrong|incorrect)|错误的?)\s*$|[不没别未非](?:[能应会可是要必]|应该|可能|可以|一定|见得|至于)?$",
    re.IGNORECASE,
)
_NOT_AFTER = re.compile(
    r"(?:(?: [a-z]+)?|,? (?:which|(?:but|and) (?:that|this|it)))(?:'s| )"
    r"(?:(?:is|are|was|were|would be|seems|looks)?(?: \w+ly)? (?:wrong|incorrect|false|impossible|too )"
    r"|(?:is not|not|isn't|was not|wasn't|are not|aren't|can't be|cannot be)(?=$|[,.;]| (?:the |an? )?(?:\w+ )?"
    r"(?:answer|correct|right|solution|result|true|it|possible|valid|enough|acceptable)\b))"
    r"|[^,.;:\d]{0,4}(?:不对|不正确|是错|不是|错误|不成立)"
    r"|[^,.;:\d]{0,4}, ?[但可]?(?:这|那|它)(?:个?(?:答案|结果))?(?:显然)?是?(?:错|不对|不正确|不成立)",
    re.IGNORECASE,
)
_BOUND_BEFORE = re.compile(
    r"(?:\b(?:at least|at most|(?:more|less|fewer|greater|larger|smaller|higher|lower|bigger) than|over|under|up to"
    r"|below|above|exceed(?:s|ing)?|nearly|almost|(?:minimum|maximum) of|half(?: of)?|twice|double|triple"
    r"|(?:square|cube)(?: root)? of"
    r"|(?:multiple|factor|divisor|reciprocal|inverse|opposite|third|quarter) of"
    r"|plus|minus|times|divided by|multiplied by|modulo|mod|to the power(?: of)?"
    r"|(?:differs?|different|apart|aside) from|except(?: for)?|other than|excluding|(?:capped|limited) (?:at|to)"
    r"|as (?:many|much|few|little|high|low|large|small|long) as)(?: about| around| roughly)?|\d/\d{1,9} of"
    r"|至少|至多|最多|最少|大于|小于|超过|不到|不足|少于|多于|低于|高于|接近|近) ?$",
    re.IGNORECASE,
)
_BOUND_AFTER = re.compile(
    r" ?(?:[a-z]+ )?(?:(?:more|less|fewer) than|as \w+ as) (?:[a-zA-Z]\b|\d|twice|(?:the|a|some) number)"
    r"| ?\+(?!\d)| (?:plus|minus|times (?:\d|[b-zB-Z]\b)|divided by|multiplied by|squared(?! \w+)|cubed|factorial"
    r"|to the power|mod)\b|[^,.;:\d]{0,15}?(?:\bat (?:most|least)\b|\b(?:min|max)(?:imum)?\b"
    r"|\bor (?:more|less|fewer|higher|lower|above|below|over|under|so)\b|\band (?:above|below|over|up)\b"
    r"|\b(?:upwards?|onwards?|give or take)\b|以上|以下|以内|开外|往上|(?:不到|不足|不满)(?=$|[,.;])"
    r"|多(?=[个人元岁]|$))"
    r"| of (?:(?:an?|the|some|that|this) (?:number|value|sum|product|difference|quantity|result)|[a-z]|\d+)\b"
    r"| tops(?=$|[,.;])| ?的(?:最[大小])?(?:公?[倍因约]数|[一两]|平方|立方|算术|倒数|相反|绝对|阶乘)",
    re.IGNORECASE,
)  # fmt: skip
_OPERATOR_BEFORE = re.compile(
    r"[\w)}\]%] ?(?:[-+*/^x]|\\(?:times|div|cdot)) ?$|[\w)}\]%] ?\\(?:times|div|cdot) $|[-+*] ?\($|\d[a-zA-Z]$"
)
_OPERATOR_AFTER = re.compile(
    r" ?(?:[+*]|\^(?! ?\\circ)|\\(?:times|div|cdot)) ?[\w\\(]"
    r"| ?-(?= ?\d)| ?- ?[a-zA-Z\\](?![a-zA-Z])|[a-zA-Z]?!|/\d| ?x ?\d"
)
_ATTACHED = re.compile(r"([a-zA-Z]{1,2})(?![a-zA-Z])")
_UNIT_POWER = re.compile(r"(?:[a-zA-Z]{1,12}|[\u4e00-\u9fff]|\}) ?\^ ?\{? ?$")
# After its first part ^ is only an operator: as a letter, too, a row of ^ has exponentially many readings
_LEFT_SIDE = re.compile(r"((?:[\w\\^{}().|'!-]+|[-+*/])(?: ?(?:[-+*/=]|\^+) ?[\w\\{}().|'!]+)*) ?(?:=|\\approx) ?$")
_JOINED = re.compile(
    r"([^,.;:=\d]{0,24}?),? ?(?P<join>\bor\b|\band\b|\bto\b|\bthrough\b|或者?|[和与及到至]|~)"
    r" ?(?:maybe |perhaps |possibly |even |about |else |\w ?= ?)?|, ?(?P<hedge>maybe|perhaps|possibly|要么|也许|可能) ?"
)
_UNIT_AFTER = re.compile(r"[^,;:!?()=\d]{0,40}(?:(?<=[\w}]) ?\^ ?\{?-?[1-4]\}?[^,;:!?()=\d]{0,24})?")
_UNIT_WORD = re.compile(r"[\w/.$%'^{}\\\u20ac\xa3\xa5-]+")
_OTHER_GUESS = re.compile(r"[(,;] ?(?:or|maybe|perhaps|possibly|或|也许|可能)[^,.;]{0,12}\d")
_CONTEXT = 80  # characters looked at before and after a number


class _Token(NamedTuple):
    start: int
    end: int
    text: str
    is_label: bool


def sentences(text: str) -> list[str]:
    """The sentences and lines of a text that are not blank, without offers to go on."""
    return [part for part in _SENTENCE_END.split(text) if part.strip() and not _OFFER.search(part)]


def last_claim(text: str) -> str | None:
    """The last number, label or list that a text claims, with its unit; None without one."""
    for sentence in reversed(sentences(text)):
        has_numbers, claim = sentence_claim(sentence)
        if has_numbers:
            return claim
    return None


def last_number(text: str) -> str | None:
    """Last number that a text claims, without its unit; `a/b` and `%` are kept."""
    numbers = find_numbers(last_claim(text) or "")[1]
    return plain_number(numbers[0]) if len(numbers) == 1 else None


def first_claim(text: str) -> str | None:
    """The claim of the first clause with a number; None if it has several numbers."""
    if _OTHER_GUESS.search(text):
        return None
    for clause in re.split(r"[,;:](?!\d)|\.(?=\s)|\n| \(", text[:2000]):
        tokens = _tokens(_plain(clause))[1]
        if tokens:
            is_single = len(tokens) == 1 or "=" in clause
            return sentence_claim(clause)[1] if is_single else None
    return None


def sentence_claim(sentence: str) -> tuple[bool, str | None]:
    """Whether a sentence holds numbers, and what it claims."""
    plain = _ASIDE.sub("", _plain(sentence))
    if _CHANCE.search(plain):
        plain = digits(plain)
        plain = re.sub(r"(?<![\d.,/])(\d{1,9}) (?:in|out of)(?: every)? (?=\d{1,9}(?![\d.,/%]*\d))", r"\1/", plain)
    plain, tokens = _tokens(plain)
    if tokens and is_question(sentence):
        return True, None
    for index in reversed(range(len(tokens))):
        token, before = tokens[index], plain[max(0, tokens[index].start - _CONTEXT) : tokens[index].start]
        after = plain[token.end : token.end + _CONTEXT]
        if _UNIT_POWER.search(before) and re.search(r"\d ?[^\d]{1,14}$", before):  # the 2 of 42 cm^2
            continue
        if _is_negated(before, after) or (index and _GIVEN_BEFORE.search(before)):
            continue
        if token.is_label:
            return True, token.text
        if not _is_claimed(plain, token, before, after):
            return True, None
        claim = token.text + _unit_after(token, after)
        return True, _with_previous(plain, tokens[:index], token, claim)
    return bool(tokens), None


def _plain(sentence: str) -> str:
    return find_numbers(digits(clean(sentence), everywhere=False))[0]


def _tokens(text: str) -> tuple[str, list[_Token]]:
    """The text as its numbers are read, and its numbers and labels, whose places are those in the text returned."""
    plain, numbers = find_numbers(text)
    labels = [
        _Token(*match.span(), match[0], True) for match in LABEL.finditer(plain) if not _is_difference(plain, match)
    ]
    tokens, at = [], 0
    for number in numbers:
        while at < len(labels) and labels[at].start <= number.start():
            tokens.append(labels[at])
            at += 1
        if not tokens or number.start() >= tokens[-1].end:
            tokens.append(_Token(*number.span(), plain_number(number), False))
    return plain, [*tokens, *labels[at:]]


def _is_difference(plain: str, label: re.Match) -> bool:
    """Whether digits with dashes are a computation, as in 16-3-4=9 or x = 10-5."""
    return bool(re.match(r" ?[=+*/]", plain[label.end() :][:2])) or plain[: label.start()].rstrip()[-1:] in "+*/^"


def is_denied(before: str) -> bool:
    """Whether what follows is denied: "I do not think that", "cannot", 不."""
    clause = re.split("[,;.]", before)[-1]
    return bool(_NOT_CLAUSE.search(clause) or _SUPPOSED.search(clause[-24:]) or _DENIED.search(clause))


def is_question(sentence: str) -> bool:
    """Whether a sentence asks, so that it claims nothing."""
    return bool(_QUESTION.search(sentence.rstrip()))


def _is_negated(before: str, after: str) -> bool:
    negation = _NOT_BEFORE.search(before)
    if negation and not _COPULA.search(negation[0]):
        return True
    clause = re.split("[,;]", before)[-1]
    return bool(_NOT_AFTER.match(after) or _NOT_CLAUSE.search(clause) or _SUPPOSED.search(clause))


def _is_claimed(plain: str, token: _Token, before: str, after: str) -> bool:
    number = re.compile(re.escape(plain[token.start : token.end])).match(plain, token.start)
    if is_part_of_expression(plain, number) or _BOUND_BEFORE.search(before) or _BOUND_AFTER.match(after):
        return False
    has_sign = plain[token.start] in "+-"
    if (_OPERATOR_BEFORE.search(before) and not has_sign) or _OPERATOR_AFTER.match(after):
        return False
    attached = _ATTACHED.match(after)
    if attached and attached[1] not in ("st", "nd", "rd", "th") and not leading_unit(after)[0].dimensions:
        return False
    left = _LEFT_SIDE.search(before)
    has_unit = bool(re.match(r" ?[a-zA-Z$]", after))
    sides = re.split(" ?= ?", left[1].strip()) if left else []
    return all(not side or is_name(side) or is_computation(side, has_unit=has_unit) for side in sides)


def _unit_after(token: _Token, after: str) -> str:
    if token.text.endswith("%"):
        return ""
    words = []
    for word in re.split(r"(?<!sq)(?<!ft)\.(?:\s|$)", _UNIT_AFTER.match(after)[0])[0].split():
        is_end = word.lower() in ENDS_NOUN - {"per"} and not (words and words[-1].lower().startswith(("sq", "cu")))
        if is_end or not _UNIT_WORD.fullmatch(word) or to_digits(word, everywhere=True) != word:
            break
        words.append(word)
    text = "".join(f" {word}" for word in words)
    is_unit = leading_unit(text.strip())[0].dimensions or not re.match(" [a-zA-Z]{1,2}(?![a-zA-Z])", text)
    return text if is_unit else ""


def _with_previous(plain: str, previous: list[_Token], token: _Token, claim: str) -> str | None:
    """The claim, or the list or compound quantity that it ends."""
    if not previous:
        return claim
    between = plain[previous[-1].end : token.start]
    first = previous[-1].text
    unit = leading_unit(between.strip())[0]
    if unit.dimensions and re.fullmatch(r" ?[^\d,.;:=]{1,16},? ?(?:and )?", between):
        own = leading_unit(claim.removeprefix(token.text).strip())[0]
        if own.dimensions == unit.dimensions and own.size < unit.size:  # 2 hours and 30 minutes
            claim = f"{first} {between.strip().removesuffix('and').strip(' ,')} {claim}"
            return _with_previous(plain, previous[:-1], previous[-1], claim)
    if re.fullmatch(r",? ?[a-zA-Z] ?= ?", between) and re.search(
        r"(?<![\w^*/+-])[a-zA-Z] ?= ?$", plain[: previous[-1].start][-8:]
    ):
        return f"{first}, {claim}"  # x = 2, y = 3
    if re.search(r"[是有为] ?$", plain[: previous[-1].start]) and re.fullmatch(
        r"\D{0,4}, ?[^\d,]{1,4}[是有为] ?", between
    ):
        return f"{first}, {claim}"  # 鸡有2只, 兔有3只
    joined = _JOINED.fullmatch(between)
    if not joined or len((joined[1] or "").split()) > 3:
        return claim
    join = joined["join"] or "or"
    if join in ("or", "或", "或者"):
        return f"{first}{(joined[1] or '').rstrip(' ,')} or {claim}"
    if join in ("and", "和", "与", "及"):
        return f"{first}{joined[1].rstrip(' ,')}, {claim}"
    return f"{first}~{claim}"
