"""Whatever a policy writes is read without an error, in linear time, and earns nothing but what it says."""

import math
import re
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.tasks import answer_numbers, rewards
from common.tasks.answers import answers_match, normal_answer, numbers_match

pytestmark = pytest.mark.fuzz
# derandomized: a failure comes from a change, not from the day
FUZZ = dict(deadline=None, derandomize=True, database=None)
PIECES = [
    "<think>", "</think>", "<answer>", "</answer>", "#### ", "\\boxed{", "\\fbox{", "\\boxed ", "\\frac{1}{2}",
    "\\frac", "\\text{ m}", "\\text{", "\\left(", "\\{", "\\}", "\\%", "\\!", "{,}", " and ", " or ", "the answer is ",
    "Paris", "1,234", "1,23", "1/2", "2 1/2", "0/0", "1e5", "1e999", ".5", "0.\\bar{3}", "\\overline{12}",
    "\\times 10^{3}", "x 10^", " in ",
    *"-+%=<{}()[],. $73x\\\n\0\ud800\u2028\xb2\xbd\u2212\u3001\u0667\uff17\u200f\u202e\ufeff\xa0\u202f\u066b\u597d",
]  # fmt: skip
PIECED = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
TEXT = PIECED | st.text(max_size=20) | st.text("0123456789,./-+%eE \u0667\uff17\xa0\\{}()[]", max_size=20)


@settings(max_examples=150, **FUZZ)
@given(text=TEXT, answer=TEXT)
def test_any_text_is_read_and_compared(text, answer):
    found, boxed, number = rewards.extract_answer(text), rewards.last_boxed(text), rewards.last_number(text)
    assert found is None or (found == found.strip() != "")
    assert boxed is None or (boxed in text and ("\\boxed" in text or "\\fbox" in text))
    assert found is None or text.rfind("<think>") <= text.rfind("</think>")  # thinking that never closes has no answer
    assert number is None or re.fullmatch(r"-?[\d./eE +-]+%?", number)
    value = answer_numbers.to_fraction(text)
    assert value is None or answer_numbers.to_fraction(str(value)) == value
    assert (normal_answer(text) is None) == (found is None)
    for score in (numbers_match(text, answer), numbers_match(text, text), *rewards.format_reward([text], [answer])):
        assert score in (0, 1) or math.isnan(score)
    assert numbers_match(text, "7") in (0, 1) and answers_match(text, "7") in (0, 1)  # a good gold answer always scores
    assert answers_match(text, "Paris") in (0, 1) and answers_match(text, "(1, 2)") in (0, 1)


@settings(max_examples=120, **FUZZ)
@given(text=TEXT, number=st.integers(0, 10**6).map(str), place=st.integers(0, 20), is_put=st.booleans())
def test_nothing_is_earned_without_the_digits_or_the_word(text, number, place, is_put):
    text = text[:place] + number * is_put + text[place:]
    plain = unicodedata.normalize("NFKC", text)
    digits = "".join(str(unicodedata.digit(char)) for char in plain if char.isdecimal())
    if not set("/%eE.\u066b\u2044") & set(plain) and "frac" not in plain:  # what can make a number of other digits
        assert number in digits or answers_match(text, number) == numbers_match(text, number) == 0
    assert digits or answers_match(text, number) == numbers_match(text, number) == 0
    assert "Paris" in text or answers_match(text, "Paris") == 0
    assert ("1" in digits and "2" in digits) or answers_match(text, "(1, 2)") == answers_match(text, "1, 2") == 0


WHOLE = st.integers(-(10**9), 10**9)
FORMS = ["{}", "{:,}", "{}.00", "{:,}.0", "{}/1", "+{}", "{}e0", "{}00%"]
AROUND = ["{}", "{}.", "**{}**", "\u201c{}\u201d", "$x = {}$", "#### {}", "#### {} eggs", "\\fbox{{{}}}",
          "<answer>{}</answer>", "<think>7</think> <answer>\\boxed{{{}}}</answer>", "7.\n\nit is {}."]  # fmt: skip


@settings(max_examples=120, **FUZZ)
@given(WHOLE, WHOLE, st.sampled_from(FORMS), st.booleans(), st.sampled_from(AROUND))
def test_a_number_is_right_however_it_is_written_and_no_other_is(number, other, form, widen, around):
    if number < 0 and form.startswith("+"):
        form = "{}"
    written = form.format(number)
    full_width = "".join(chr(ord(char) + 0xFEE0) for char in written)
    text = around.format(full_width if widen else written)
    assert answers_match(text, str(number)) == numbers_match(text, str(number)) == 1
    assert normal_answer(text) == str(number)
    assert answers_match(text, str(other)) == numbers_match(text, str(other)) == float(other == number)


# Read in linear time, each takes a fraction of a second; a pattern that is quadratic in one of them takes minutes.
SIZE = 50_000
REPEATED = [
    "{", "(", "\\", "\\boxed ", "-1", ", and ", "1,", "9,999", "1/2/3/4/", "1 1/", "1\xbd", "1~", "1e", "a ", "x=",
    "三", "1万", "一点", "one ", "twenty-", "$1", "1:", "not 1 ", "is ", "answer is ", "1 to ", "1 or ", "x = 1, ",
    "选", "1 cm^", "\\bm{", "\\bm{{a}", "\\bm{{{a}", "\\bm{{a}}", "1 and ", "(1, 2) ", "January 1 ", "1. ", "百分之",
    "maybe ", "=", "A)", "B. ", "so ", "=1", "1=", "18 m ", "not ", "x\\in ", "(1,", "1}, {", "或", "x_1=1,", "half a ",
    "1\\pm", "\\cup ", "^", "a^", "^ ", "-^", "!", ")^(",
    "1 \\text{", "1 \\frac{1}{1", "\u200f", "\xb2", "\u221a", "1\\ ", "1x10^", "1.1\\overline{", "1_", "1-", "1 mm",
]  # fmt: skip


def test_long_texts_are_read_in_linear_time():
    for piece in REPEATED:
        text = piece * (SIZE // len(piece))
        assert answers_match(text + "x1", "7") == 0
        assert answers_match(f"we have x a{text[:200]}: 5 apples", "7") == 0  # before a number that may be claimed
        assert rewards.last_number(f"a{text[:200]}, 5") in (None, "5")
        assert answers_match(f"\\boxed{{{text[:1900]}}}", "8") == 0  # a text that is read as one value
        assert rewards.format_reward([f"<think>{text}</think>"], ["7"]) == [0.0]
    assert answers_match("1, " * SIZE, "(1, 2)") == answers_match("{" + "1," * SIZE + "}", "(1, 2)") == 0
    assert rewards.last_number(",999" * SIZE + "9") == "9999"  # no separators after all, which shows at the end only
    rewards.last_number("1 a" * SIZE), rewards.last_boxed("\\boxed{" * SIZE), answer_numbers.to_fraction("1," * SIZE)


def test_deep_nesting_and_long_numbers_are_read_in_linear_time():
    boxes = "\\boxed{" * 10_000 + "7" + "}" * 10_000
    assert rewards.last_boxed(boxes) == rewards.last_boxed(boxes[:-1]) == "7" and answers_match(boxes, "7") == 1
    assert answers_match("\\boxed{" + "{" * SIZE + "7" + "}" * SIZE + "}", "7") == 0
    assert answers_match("(" * SIZE + "1, 2" + ")" * SIZE, "(1, 2)") == 0
    assert answers_match("7" * SIZE, "7") == 0
    assert answers_match(f"<think>{'1/2, ' * SIZE}</think>7", "7") == 1
    assert math.isnan(numbers_match("7", "7" * SIZE))  # longer than a number can be
    assert rewards.format_reward(["<think>" * SIZE, "<think>" + "</think>" * SIZE], ["7"] * 2) == [0.0, 0.0]
