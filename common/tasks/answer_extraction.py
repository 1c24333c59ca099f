r"""Extracts the final answer from a completion.

The first rule that applies decides:
  1. Only the text after the last </think> counts; an unclosed <think> means no answer.
  2. Inside the last <answer>...</answer>, rules 3 to 5 apply.
  3. The last balanced \boxed{...} or \fbox{...}. It is read as mathematics, so units in it need
     \text{...}.
  4. After the last ####, on the same line: the expression it starts with or, if it starts with
     words, its first number.
  5. An <answer>, or a one-line completion without prose, is read like the line of rule 4.
  6. A closing "the answer is B" or "Option (B)": one capital letter or, in a text without numbers,
     any word.
  7. The last number, unless it is part of an expression: 10^3, 2\sqrt{3}, x/2, x > 4 and (3, 4)
     give no answer.
An empty or unclosed marker means no answer; later rules are not tried.
"""

import re

from common.tasks.answer_numbers import PROSE, clean, find_numbers, is_part_of_expression, last_number, plain_number
from common.tasks.thinking import after_thought

_EXPRESSION_END = re.compile(rf"{PROSE.pattern}|[.!?](?=\s|$)")
_BOX_TOKEN = re.compile(r"\\(?:boxed|fbox)(?: *(?P<box>\{)|\s+(?P<bare>[^\s{}$\\]+))|\\.|[{}]", re.DOTALL)
_STATED = re.compile(
    r"(?:\b(?i:answer|option|choice)(?i: is)?|\u7b54\u6848[\u662f\u4e3a\u70ba]?)[ *_:]*\(?([^\W\d_]+)\)?$"
)
CHOICES = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZ")  # letters of multiple choice


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
    """Final answer of a completion, in the normal form of `clean`; None without one."""
    text = after_thought(text)
    if text is None:
        return None
    has_tag = "<answer>" in text
    if has_tag:
        text = text[: max(text.rfind("</answer>"), 0)].rpartition("<answer>")[2].partition("</answer>")[0]
    if "\\boxed" in text or "\\fbox" in text:
        return clean(last_boxed(text) or "") or None
    if "####" in text:
        return _leading_expression(text.rpartition("####")[2].strip().partition("\n")[0])
    line = clean(text)
    has_prose = "\n" in text.strip() or (PROSE.search(line) and not line.isalpha())
    stated = None if has_tag else _STATED.search(line[-80:])
    if stated and (stated[1] in CHOICES or not any(char.isdecimal() for char in line)):
        return stated[1]
    return _leading_expression(text) if has_tag or not has_prose else last_number(text)


def _leading_expression(text: str) -> str | None:
    text = clean(text)
    if head := clean(_EXPRESSION_END.split(text, maxsplit=1)[0].rstrip(" ,;:(*=-")):
        return head
    plain, numbers = find_numbers(text)
    if numbers:
        return None if is_part_of_expression(plain, numbers[0]) else plain_number(numbers[0])
    return text or None
