r"""Finds the answer of a completion: where it stands, and which text it is.

The first rule that applies decides:
  1. Only the text after the last thought counts; a thought that is not closed has no answer.
  2. Inside the last <answer>...</answer>, rules 3 to 6 apply.
  3. The last balanced \boxed{...} or \fbox{...}.
  4. After the last ####, on the same line.
  5. The last stated answer: "the answer is 18", "Answer: B", "B is correct", 答案是, 答：, 故选B,
     unless the text corrects itself after it ("wait", 不对) or goes on to compute.
  6. What the last sentence says after "is", ":", 是 or 为, if that is one value; else the last
     number that is claimed (answer_prose.py). One line without prose is the answer as a whole.
An empty or unclosed marker means no answer; later rules are not tried.

The last marker counts, not the first: a policy may correct itself, and must not be paid for the
best of several guesses. So a base model that goes on with another question after its answer is
graded by its last one: give the sampler stop strings such as "\nQ:".

If the text of rules 2, 4 and 5 is not one value, its first clause with a number decides: "4 each,
so that 3 children get all" is 4.
"""

import re

from common.tasks.answer_phrases import affirmed
from common.tasks.answer_prose import first_claim, is_denied, is_question, last_claim, sentences
from common.tasks.answer_text import PROSE, ascii_signs, clean
from common.tasks.answer_values import CHOICES, Choice, Items, Label, Word, digits, read
from common.tasks.thinking import after_thought

_BOX_TOKEN = re.compile(r"\\(?:boxed|fbox)(?: *(?P<box>\{)|\s+(?P<bare>[^\s{}$\\]+))|\\.|[{}]", re.DOTALL)
_STATED = re.compile(
    r"\b(?i:answer|result|solution|choice|option)s?\b[*_]*"
    r"(?:[ \t]*(?:is|are|was|would be|should be|must be|:|=|->)[*_]*)+(?!\s*\w+ing\b)"
    r"|\b(?i:answer|option|choice|choose|pick|select)\b[ *_]+(?=[($\\]*[A-Z]\)?(?![\w']))"
    r"|(?:答案|解集|(?:最终|最后)?结果|答)(?:应?该?[是为选:得]|等于|】|\])+|选(?:择)?(?:项)?[\s:]*(?=[($\\]*[A-Z](?![a-z]))"
)
_CORRECT_LETTER = re.compile(
    r"(?<![\w'])\(?([A-Z])\)? (?:is|must be|would be) (?:the )?(?:correct|right|best|answer)\b"
    r"|(?<![a-zA-Z'])([A-H](?:(?:, ?|和|与| and )[A-H])*) ?(?:选?项)?(?:都|均|是)*(?:正确|对)"
    r"|(?<![\w'])([A-H](?:, ?[A-H])*,? and [A-H]) are (?:both |all )?(?:correct|right)"
)
_CORRECTED = re.compile(r"\b(?:wait|actually|correction|sorry|oops|mistake)\b|不对|更正|等等|错了", re.IGNORECASE)
_CONTINUED = re.compile(r"=|^\W*(?:so|thus|therefore|hence|then|altogether|in total|所以|因此)\b", re.IGNORECASE)
_COPULA = re.compile(
    r"\b(?:is|are|was|were|equals?|be|becomes?|gives)\b(?! not\b|n't)"
    r"|(?<!\d):(?!\d)|(?<![<>!=])=(?!=)|(?<!不)(?:等于|是|为)"
)
_LEADING_LETTER = re.compile(rf"[\s*_(]*([{CHOICES}])(?:\)|(?=[\s*.,:;)]|项|$))(?! (?!because |since )[a-z])")
_LEADING_VERDICT = re.compile(
    r"[\s*_]*(yes|no|true|false|correct|incorrect|对|错|正确|错误|是的|不是)[*_]*(?=[\s]*[,.!;\n]|\s*$)", re.IGNORECASE
)
_CONCLUDED = re.compile(
    r"(?i:(?:so|hence|thus|therefore|then),? (?:it(?:'s| is) |option |choice )?|所以,? ?|因此,? ?)\(?([A-H])\)?"
)
_CLOSING_VERDICT = re.compile(
    r"(?:no (?:real |integer )?solutions?|does not exist|无(?:实数)?解|没有解|不存在"
    r"|(?<!不)(?:正确|错误|成立)|不正确|不对|不成立)的?$",
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
    """Final answer of a completion, then words that answer a gold answer in words or letters.

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
    is_expression = "\n" not in text.strip() and (not PROSE.search(line) or (len(line) < 200 and read(line)))
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
        return next(filter(None, letters[-1].groups()))
    if last is None or _CORRECTED.search(text, last.end()):
        return None
    rest = text[last.end() : last.end() + _TAIL].lstrip(" *_:\n")
    said, *others = sentences(rest) or [""]
    is_final = _LEADING_LETTER.match(said) or not any(map(_CONTINUED.search, others))
    return said if said and is_final else None


def _decided(text: str) -> str | None:
    """The answer in a text that stands where an answer should: all of it, or what it begins with."""
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
    if parts and is_question(parts[-1]):
        return _present(last_claim(text))
    closing = clean(parts[-1][-_TAIL:]) if parts else ""
    if letter := _CONCLUDED.fullmatch(closing):
        return [letter[1]]
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
