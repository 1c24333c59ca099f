r"""Finds the answer of a completion: where it stands, and which text it is.

The first rule that applies decides:
  1. Only the text after the last thought counts; a thought that is not closed means no answer.
  2. Inside the last <answer>...</answer>, rules 3 to 6 apply.
  3. The last balanced \boxed{...} or \fbox{...}.
  4. After the last ####, on the same line.
  5. The last stated answer: "the answer is 18", "Answer: B", "B is correct", 答案是, 答：, 故选B, unless the
     text corrects itself after it ("wait", 不对).
  6. What the last sentence says after "is", "=", ":", 是 or 为, if that is one value; else the last number
     that is claimed (answer_prose.py).
An empty or unclosed marker means no answer; later rules are not tried. The last marker counts, not the
first: a policy may correct itself, and must not be paid for the best of several guesses. So a base model
that goes on with another question after its answer is graded by its last one: give the sampler stop
strings such as "\nQ:".

In the text of rules 2, 4 and 5 that is not one value, the first clause with a number decides: "4 each, so
that 3 children get all" is 4.
"""

import re

from common.tasks.answer_prose import first_claim, is_denied, last_claim, sentences
from common.tasks.answer_text import PROSE, ascii_signs, clean
from common.tasks.answer_values import CHOICES, Choice, Items, Label, Word, affirmed, digits, read
from common.tasks.thinking import after_thought

_BOX_TOKEN = re.compile(r"\\(?:boxed|fbox)(?: *(?P<box>\{)|\s+(?P<bare>[^\s{}$\\]+))|\\.|[{}]", re.DOTALL)
_STATED = re.compile(
    r"\b(?:answer|result|solution|choice|option)s?\b[*_]*(?:[ \t]*(?:is|are|was|would be|should be|must be|:|=|->)[*_]*)+(?!\s*\w+ing\b)"
    r"|\b(?:answer|option|choice)[ *_]+(?=\(?[A-Z]\)?(?![\w']))"
    r"|(?:\u7b54\u6848|\u89e3\u96c6|(?:\u6700\u7ec8|\u6700\u540e)?\u7ed3\u679c|\u7b54)(?:\u5e94?\u8be5?[\u662f\u4e3a\u9009:\u5f97]|\u7b49\u4e8e|\u3011|\])+"
    r"|(?<![\u4e0d\u672a\u6ca1\u522b\u80fd\u9898\u6311\u5019\u5f53])\u9009(?:\u62e9)?(?:\u9879)?[\s:]*(?=[($\\]*[A-Z](?![a-z]))",
    re.IGNORECASE,
)  # fmt: skip
_CORRECT_LETTER = re.compile(
    r"(?<![\w'])\(?([A-Z])\)? (?:is|must be|would be) (?:the )?(?:correct|right|best)\b(?! only)"
    r"|(?<![\w'])([A-Z]) ?(?:\u9879)?(?:\u662f?\u6b63\u786e|\u662f\u5bf9\u7684)"
)
_CORRECTED = re.compile(r"\b(?:wait|actually|correction|sorry|oops|mistake)\b|\u4e0d\u5bf9|\u66f4\u6b63|\u7b49\u7b49|\u9519\u4e86", re.IGNORECASE)
_COPULA = re.compile(
    r"\b(?:is|are|was|were|equals?|be|becomes?|gives)\b(?! not\b|n't)|(?<!\d):(?!\d)|(?<![<>!=])=(?!=)|(?<![\u4e0d])(?:\u7b49\u4e8e|\u662f|\u4e3a)"
)
_LEADING_LETTER = re.compile(rf"[\s*_(]*([{CHOICES}])(?:\)|(?=[\s*.,:;)]|\u9879|$))(?! [a-z])")
_LEADING_VERDICT = re.compile(r"[\s*_]*(yes|no|true|false|correct|incorrect|\u5bf9|\u9519|\u6b63\u786e|\u9519\u8bef|\u662f\u7684|\u4e0d\u662f)[*_]*(?=[\s]*[,.!;\n]|\s*$)", re.IGNORECASE)
_CLOSING_VERDICT = re.compile(
    r"(?:no (?:real |integer )?solutions?|does not exist|\u65e0(?:\u5b9e\u6570)?\u89e3|\u6ca1\u6709\u89e3|\u4e0d\u5b58\u5728|(?<!\u4e0d)(?:\u6b63\u786e|\u9519\u8bef|\u6210\u7acb)|\u4e0d\u6b63\u786e|\u4e0d\u5bf9|\u4e0d\u6210\u7acb)\u7684?$",
    re.IGNORECASE,
)
_TAIL = 2000  # characters from a statement on, and of the last sentence, that are read


def last_boxed(text: str) -> str | None:
    r"""Contents of the last balanced \boxed{...}, \fbox{...} or `\boxed 42`; or None."""
    starts, last = [], (-1, -1)  # starts: of the contents of each open brace, -1 if it is no box
    for token in _BOX_TOKEN.finditer(text):
        if token["bare"]:
            last = max(last, token.span("bare"))
        elif token["box"] or token[0] == "{":
            starts.append(token.end() if token["box"] else -1)
        elif token[0] == "}" and starts:
            last = max(last, (starts.pop(), token.start()))
    return text[slice(*last)] if last[0] >= 0 else None


def extract_answer(text: str) -> str | None:
    """Final answer of a completion, in normal form, with its unit; None without one."""
    found = extract_answers(text)
    answer = read(found[0]) if found else None
    return answer.text if answer and not answer.letter else (found or [None])[0]


def extract_answers(text: str) -> list[str]:
    """Final answer of a completion, then words that answer it if the gold answer is a word or a choice.

    Returns:
        Texts in the normal form of `clean`; empty without an answer.
    """
    text = after_thought(text)
    if text is None:
        return []
    has_tag = "<answer>" in text
    if has_tag:
        text = text[: max(text.rfind("</answer>"), 0)].rpartition("<answer>")[2].partition("</answer>")[0]
    if "\\boxed" in text or "\\fbox" in text:
        return _present(_decided(last_boxed(text) or ""))
    if "####" in text:
        return _present(_decided(text.rpartition("####")[2].strip().partition("\n")[0]))
    text = ascii_signs(text)
    stated = _stated(text)
    if stated is not None and (answer := _decided(stated)):
        value = read(answer)
        is_word = value is not None and isinstance(value.value, Word)
        if not is_word or not any(char.isdecimal() for char in text):
            return [answer]
        return _present(last_claim(text), answer)
    line = clean(text)
    is_expression = "\n" not in text.strip() and (not PROSE.search(line) or len(line) < 200 and read(line))
    if has_tag or is_expression:
        value = read(line)
        is_word = value is not None and isinstance(value.value, Word)
        return _present(_decided(text), *(_in_prose(text) if is_word else []))
    return _in_prose(text)


def _present(*answers: str | None) -> list[str]:
    return [answer for answer in answers if answer]


def _stated(text: str) -> str | None:
    """What the last statement of an answer says."""
    last = None
    for match in _STATED.finditer(text):
        if not is_denied(text[max(0, match.start() - 40) : match.start()]):
            last = match
    letters = [m for m in _CORRECT_LETTER.finditer(text) if last is None or m.start() > last.start()]
    if letters and not _CORRECTED.search(text, letters[-1].end()):
        return letters[-1][1] or letters[-1][2]
    if last is None or _CORRECTED.search(text, last.end()):
        return None
    rest = text[last.end() : last.end() + _TAIL].lstrip(" *_:\n")
    return next(iter(sentences(rest)), None)


def _decided(text: str) -> str | None:
    """The answer in a text that stands where an answer should: all of it, its first letter, or its first number."""
    whole = clean(text)
    if not whole or read(whole):
        return whole or None
    if letter := _LEADING_LETTER.match(text):
        return letter[1]
    if verdict := _LEADING_VERDICT.match(text):
        return verdict[1]
    kept = affirmed(whole)
    if kept != whole and read(kept):
        return kept
    claim = first_claim(kept)
    return claim if claim or any(char.isdecimal() for char in digits(whole)) else _first_clause(kept)


def _first_clause(text: str) -> str | None:
    clause = clean(re.split(r"[,;.](?:\s|$|(?=[^\x00-\x7f]))", text)[0])
    return clause if read(clause) else None


def _in_prose(text: str) -> list[str]:
    parts = sentences(text)
    closing = clean(parts[-1][-_TAIL:]) if parts else ""
    copulas = [copula for copula in _COPULA.finditer(closing) if not is_denied(closing[: copula.start()])]
    predicate = clean(closing[copulas[-1].end() :]) if copulas else ""
    value = read(predicate) if predicate else None
    claim = last_claim(text)
    if value and not isinstance(value.value, Word | Choice):
        has_digit = any(char.isdecimal() for char in digits(predicate))
        is_result = copulas[-1][0] != "=" or isinstance(value.value, Items | Label)
        if is_result and (has_digit or claim is None):
            return [predicate]
    words = [predicate] if value and isinstance(value.value, Word | Choice) else []
    if verdict := _CLOSING_VERDICT.search(closing):
        words.insert(0, verdict[0])
    elif verdict := _LEADING_VERDICT.match(text):
        words.append(verdict[1])
    return _present(claim, *words)
