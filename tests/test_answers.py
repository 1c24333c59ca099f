"""The grader on judged pairs: it pays no wrong answer, and misses no right one."""

import json
import math
from pathlib import Path

import pytest

from common.tasks import answers, rewards
from common.tasks.answer_chinese import value
from common.tasks.answer_extraction import extract_answer
from common.tasks.answer_prose import last_claim
from common.tasks.answers import answers_match, batch_matches, normal_answer, numbers_match

PAIRS = [json.loads(line) for line in (Path(__file__).parent / "data" / "answers.jsonl").read_text().splitlines()]
SCORES = {}


def scores():
    """Scores of all pairs, in one batch."""
    if not SCORES:
        values = batch_matches([p["completion"] for p in PAIRS], [[p["gold"]] for p in PAIRS], seconds=120.0)
        SCORES.update(enumerate(values))
    return SCORES


@pytest.mark.parametrize("kind", sorted({pair["kind"] for pair in PAIRS}))
def test_judged_pairs(kind):
    wrong = [(scores()[i], p) for i, p in enumerate(PAIRS) if p["kind"] == kind and scores()[i] != p["right"]]
    assert not wrong


def test_numeric_match_grades_the_same_pairs_alike_where_the_gold_is_a_number():
    compared = 0
    for i, pair in enumerate(PAIRS):
        score = numbers_match(pair["completion"], pair["gold"])
        compared += not math.isnan(score)
        assert math.isnan(score) or score == scores()[i], pair
    assert compared > 300


@pytest.mark.parametrize(("numeral", "number"), [
    ("一千零一十", 1010), ("三百五", 350), ("1万2千", 12000), ("3亿5000万", 350_000_000), ("二〇二四", 2024),
    ("十万零五", 100_005),
])  # fmt: skip
def test_chinese_numerals(numeral, number):
    assert value(numeral) == number


@pytest.mark.parametrize(("text", "claim"), [  # LaTeX that gives way to digits changes the places of what follows
    ("$0.\\overline{12}3the ", None), ("$1\\frac{1}{2}10\\frac{1}{2}", "10 1/2"), ("3x10^3\\times 10^{3}", None),
    ("one in ten$ 0.\\frac{1}{2}三1", "1"),
])  # fmt: skip
def test_a_text_whose_numbers_change_when_they_are_read_again(text, claim):
    assert last_claim(text) == claim and answers_match(text, "7") == numbers_match(text, "7") == 0


def test_a_completion_that_runs_on_is_graded_by_its_last_marker():
    text = "#### 4\nQ: 1+1=?\nA: #### 2"
    assert [answers_match(text, gold) for gold in ("4", "2")] == [0, 1]
    assert answers_match(text.partition("\nQ:")[0], "4") == 1  # as a stop string cuts it


def test_a_thought_that_the_prompt_opened_and_nobody_closed_has_no_answer():
    text = "<think>\n17 + 25 is 42. Let me check"
    assert extract_answer(text) is None and answers_match(text, "42") == numbers_match(text, "42") == 0
    assert rewards.math_match([text, text + "</think> 42"], ["42"] * 2) == [0, 1]


@pytest.mark.parametrize(
    "text", ["so it is 42 cm", "\\boxed{42\\text{ kg}}", "x = 42", "答案是四十二", "#### $42", "forty-two"]
)
def test_answers_with_units_and_words_are_counted_as_one(text):
    assert normal_answer(text) == "42"


def test_an_answer_in_another_unit_is_wrong_also_among_accepted_ones():
    assert answers.any_answer_matches("18 m", ["18 cm", "7"]) == 0
    assert answers.any_answer_matches("0.18 m", ["18 cm", "7"]) == 1
