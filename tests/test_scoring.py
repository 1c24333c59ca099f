"""The contract of reward functions: what they are given, what they may return, what is refused."""

import asyncio
import functools
import json
import math
import re
import sys
from decimal import Decimal
from math import nan
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import ROOT

from common.base import background
from common.loop.scorer import check_functions
from common.tasks import rewards, scoring
from common.tasks.data import Example
from common.tasks.scoring import Scored, names


def score(functions, completions, answers, columns, extra=None):
    return scoring.score(functions, {"completions": completions, "answers": answers, **columns}, extra)


def constant(values, name="constant"):
    """A reward function that returns `values`."""

    def function(completions, answers, **columns):
        return values

    function.__name__ = name
    return function


def run_score(values, size=4):
    return score([(constant(values), 1.0)], [f"completion {i}" for i in range(size)], ["1"] * size, {})


def test_score_adds_weighted_values_and_passes_the_columns():
    def uses_columns(completions, answers, completion_tokens, **columns):
        assert columns == {"level": ["x", "y"], "answer": answers}
        return [float(n) for n in completion_tokens]

    columns = {"completion_tokens": [3, 5], "level": ["x", "y"]}
    extra = {"reward_model": (torch.tensor([0.25, -1.0], dtype=torch.bfloat16), 2.0)}
    functions = [(uses_columns, 0.5), (rewards.exact_match, 1.0)]
    total, parts = score(functions, ["a", "b"], ["a", "a"], columns, extra)
    assert total.tolist() == [0.5 * 3 + 1 + 0.5, 0.5 * 5 + 0 - 2]
    expected = {"uses_columns": [3, 5], "exact_match": [1, 0], "reward_model": [0.25, -1]}
    assert {name: part.tolist() for name, part in parts.items()} == expected
    assert {total.dtype} | {part.dtype for part in parts.values()} == {torch.float32}
    assert score([], ["a", "b"], ["a", "a"], {}, extra)[0].tolist() == [0.5, -2]


def test_values_of_any_number_type_become_floats_that_json_can_write():
    mixed = [np.float32(1), np.int64(0), True, torch.tensor(0.5)]
    for values in (mixed, np.array([1, 0, 1, 0.5]), torch.tensor([1, 0, 1, 0.5])):
        assert json.dumps(run_score(values)[0].tolist()) == "[1.0, 0.0, 1.0, 0.5]"


def test_nan_is_unscored_and_stays_in_its_row():
    assert run_score([1.0, nan, 0.0, 1.0])[0].tolist() == pytest.approx([1, nan, 0, 1], nan_ok=True)
    functions = [(constant([nan, 1], "first"), 1.0), (constant([1, nan], "second"), 1.0)]
    assert score(functions, ["a", "b"], ["1", "1"], {})[0].isnan().all()
    # a function that only reports cannot drop a row
    functions = [(constant([1, 1], "used"), 1.0), (constant([nan, 1], "reported"), 0.0)]
    assert score(functions, ["a", "b"], ["1", "1"], {})[0].tolist() == [1, 1]


@pytest.mark.parametrize(("values", "got"), [
    ([1.0] * 7, "7 values"), (torch.ones(1, 8), "1 values"), (torch.tensor(1.0), "one float"), (None, "one NoneType"),
    ("11111111", "one str"), ({i: 1.0 for i in range(8)}, "one dict"), ((1.0 for _ in range(8)), "one generator"),
])  # fmt: skip
def test_wrong_number_of_values_is_refused(values, got):
    with pytest.raises(ValueError, match=f"constant returned {got}, expected 8"):
        run_score(values, size=8)


@pytest.mark.parametrize("bad", [
    "1.0", [1.0], 1j, 10**400, 1e39, -math.inf, np.complex64(1), np.float16("inf"), torch.ones(1), np.ones(1),
    torch.tensor(math.inf), Decimal("1.0"),
])  # fmt: skip
def test_value_that_is_no_finite_number_is_refused(bad):
    with pytest.raises(ValueError, match=r"(?s)constant is .* in row 2, 'completion 2': .*finite"):
        run_score([1.0, 0.0, bad, 1.0])
    with pytest.raises(ValueError, match=r"(?s)model_x is .* in row 1, 'b'"):
        score([], ["a", "b"], ["1", "1"], {}, {"model_x": ([0.0, bad], 1.0)})


@pytest.mark.parametrize("error", [KeyError("level"), SystemExit(0)])
def test_exception_names_the_function_and_keeps_its_cause(error):
    function = mock.Mock(side_effect=error, __name__="fails")
    work = background.start(score, [(function, 1.0)], ["a", "b"], ["1", "1"], {})  # as the loops call it
    with pytest.raises(RuntimeError, match=f"reward fails raised {type(error).__name__} on rows 0 to 1") as caught:
        work.result()
    assert caught.value.__cause__ is error
    function.side_effect = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        score([(function, 1.0)], ["a", "b"], ["1", "1"], {})


def test_a_reward_function_may_change_its_arguments():
    def greedy(completions, answers, level, accepted, **columns):
        assert (completions, answers, level) == (["a", "b"], ["1", "2"], [3, 4])
        accepted[0].append("b")  # the list of one row, which all rows of its group share
        assert accepted[1] == ["a"]
        completions[0], answers[1] = "changed", "changed"
        level.clear()
        columns["info"][0]["x"] = 2
        return [1.0, 0.0]

    completions, answers, shared = ["a", "b"], ["1", "2"], ["a"]
    columns = {"level": [3, 4], "accepted": [shared, shared], "info": [{"x": 1}, None]}
    score([(greedy, 1.0), (functools.partial(greedy), 1.0)], completions, answers, columns)
    assert (completions, answers, shared) == (["a", "b"], ["1", "2"], ["a"])
    assert columns == {"level": [3, 4], "accepted": [["a"], ["a"]], "info": [{"x": 1}, None]}


def test_sums_beyond_fp32_are_refused_and_names_weights_and_columns_are_checked():
    def big(value, weight=1.0):
        return constant([0.0, value], f"gives {value}"), weight

    # the last: not even where the next function would bring back a number
    for functions in ([big(3e38, 2.0)], [big(3e38), big(2e38)], [big(3e38, 2.0), big(-3e38, 2.0)]):
        with pytest.raises(ValueError, match=r"gives .e\+38 times weight .* exceeds fp32 .* row 1"):
            score(functions, ["a", "b"], ["1", "1"], {})
    one = (constant([1.0]), 1.0)
    with pytest.raises(ValueError, match="at least one function"):
        score([], ["a"], ["1"], {})
    with pytest.raises(ValueError, match=r"constant: .* rename"):
        score([one], ["a"], ["1"], {}, {"constant": ([1.0], 1.0)})
    with pytest.raises(ValueError, match="constant has weight inf"):
        score([(one[0], math.inf)], ["a"], ["1"], {})
    for answers, columns in [(["1"], {"level": [1, 2]}), (["1", "2"], {})]:
        with pytest.raises(ValueError, match=r"column (level|answers) has 2 values for 1 completions"):
            score([one], ["a"], answers, columns)


ROWS = {"prompts": ["2 + 2?", "3?"], "completions": ["4", "5"], "answers": ["4", "3"], "completion_tokens": [2, 1],
        "completion_ids": [[9, 1], [1]], "step": 7, "level": ["x", "y"]}  # fmt: skip


def swapped(prompts, completions, **kwargs):
    return [float((prompt, text) == ("2 + 2?", "4")) for prompt, text in zip(prompts, completions, strict=True)]


def of_trl(completions, answer, **kwargs):
    assert "completion_ids" not in kwargs and kwargs["step"] == 7
    return [float(text == gold) for text, gold in zip(completions, answer, strict=True)]


def keywords_only(*, level, step, completion_ids):
    return [step + len(ids) + (letter == "x") for letter, ids in zip(level, completion_ids, strict=True)]


class Judge:
    def __call__(self, completions, threshold=2, *rest):
        return [threshold] * len(completions)


@pytest.mark.parametrize(("function", "values"), [
    (swapped, [1, 0]), (of_trl, [1, 0]), (keywords_only, [10, 8]), (Judge(), [2, 2]), (rewards.math_match, [1, 0]),
    (lambda completions: [3, 4], [3, 4]), (functools.partial(Judge(), threshold=5), [5, 5]),
    (rewards.length_reward(2), [1, 0.5]),
    # what a partial sets is not replaced by a column of that name
    (functools.partial(lambda completions, level: [level] * len(completions), level=9), [9, 9]),
])  # fmt: skip
def test_arguments_go_by_name_in_any_order(function, values):
    scoring.check([(function, 1.0)], ["level"])
    assert scoring.score([(function, 1.0)], ROWS)[0].tolist() == values


@pytest.mark.parametrize(("function", "argument", "hint"), [
    (lambda texts, golds: [], "texts", "completions, answers"),
    (lambda completions, difficulty: [], "difficulty", "level"),
    (lambda completions, trainer_state: [], "trainer_state", "step"),
    (lambda data_source, solution_str, ground_truth, extra_info=None: [], "data_source", "answers"),
    (lambda completions, /: [], "completions", "by name"),
    (functools.partial(lambda level, other: [], 1), "other", "level"),
    (map, "read", "function of your own"), (lambda solution: [], "solution", "answers"),
])  # fmt: skip
def test_a_function_that_cannot_be_called_is_refused_with_the_names_that_exist(function, argument, hint):
    with pytest.raises(ValueError, match=f"(?s){argument}.*{hint}"):
        scoring.check([(swapped, 1.0), (function, 1.0)], ["level"])


@pytest.mark.parametrize("functions", [
    (swapped, 1.0), [swapped], swapped, [(swapped,)], [(1.0, swapped)], {swapped: 1.0}, None, [("swapped", 1.0)],
    [(swapped, "1")], [(swapped, None)],
])  # fmt: skip
def test_rewards_that_are_no_pairs_of_function_and_weight_are_refused(functions):
    with pytest.raises(ValueError, match=r"pairs of function and weight|weight .* finite number"):
        scoring.check(functions, ["level"])


def test_what_other_toolkits_pass_is_named_when_a_function_misses_it():
    for completions in (["4", "5"], ["", "5"]):
        with pytest.raises(RuntimeError, match=r"(TypeError|IndexError).*a completion is text"):
            scoring.score([(lambda completions: [c[0]["content"] for c in completions], 1.0)],
                          ROWS | {"completions": completions})  # fmt: skip
    with pytest.raises(RuntimeError, match=r"KeyError.*'trainer_state'.*step, level"):
        scoring.score([(lambda completions, **kwargs: kwargs["trainer_state"], 1.0)], ROWS)


def test_none_leaves_a_function_out_of_a_row_and_nan_the_row_out_of_the_loss():
    first, second = constant([2.0, None, None, nan], "first"), constant([None, 3.0, None, 1.0], "second")
    total, by_function = score([(first, 1.0), (second, 2.0)], list("abcd"), ["1"] * 4, {})
    assert total.tolist() == pytest.approx([2, 6, nan, nan], nan_ok=True)  # third: nothing applies
    assert by_function["first"].tolist() == pytest.approx([2, nan, nan, nan], nan_ok=True)
    # what only reports does not make a row scored
    assert score([(first, 1.0), (second, 0.0)], list("abcd"), ["1"] * 4, {})[0].isnan().tolist() == [0, 1, 1, 1]
    # a reward model counts where no function applies
    total, _ = score([(first, 1.0)], list("abcd"), ["1"] * 4, {}, {"model": ([1.0] * 4, 1.0)})
    assert total.tolist() == pytest.approx([3, 1, 1, nan], nan_ok=True)


def test_coroutines_are_awaited_together_also_under_an_event_loop():
    met = asyncio.Barrier(3)

    async def judge(completions, delay=0.0, **kwargs):
        async with asyncio.timeout(30):
            await met.wait()  # returns once all three are awaited
        return [1.0] * len(completions)

    class Slow:
        async def __call__(self, completions):
            return await judge(completions)

    functions = [(judge, 1.0), (Slow(), 1.0), (functools.partial(judge, delay=1.0), 1.0), (swapped, 1.0)]
    assert scoring.score(functions, ROWS)[0].tolist() == [4, 3]

    async def notebook():
        return scoring.score([(broken, 1.0)], ROWS)

    async def broken(completions):
        raise ConnectionError("no judge")

    with pytest.raises(RuntimeError, match="reward broken raised ConnectionError on rows 0 to 1: no judge"):
        asyncio.run(notebook())

    async def leaves(completions):
        sys.exit(0)  # would end the run as if it were done

    with pytest.raises(RuntimeError, match="reward leaves raised SystemExit"):
        scoring.score([(leaves, 1.0)], ROWS)
    with pytest.raises(RuntimeError, match="reward lambda raised ZeroDivisionError"):  # and no warning of the other
        scoring.score([(judge, 1.0), (lambda completions: 1 / 0, 1.0)], ROWS)


def test_names_are_the_same_in_every_process():
    unnamed = mock.Mock(__name__=None)
    functions = [swapped, functools.partial(functools.partial(of_trl)), Judge(), Judge(), lambda: 0, swapped, unnamed]
    assert names(functions) == ["swapped", "of_trl", "Judge", "Judge_2", "lambda", "swapped_2", "Mock"]
    assert list(scoring.score([(Judge(), 1.0), (Judge(), 0.0)], ROWS)[1]) == ["Judge", "Judge_2"]


def test_a_part_that_a_service_gives_for_some_rows_only_is_missing_elsewhere():
    scored = Scored(["a", "b"], torch.ones(2), {"service": torch.ones(2), "old": torch.ones(2)})
    scored.put([1], Scored(["c"], torch.zeros(1), {"service": torch.zeros(1), "new": torch.ones(1)}))
    found = {name: values.tolist() for name, values in scored.by_function.items()}
    expected = {"service": [1, 0], "old": [1, nan], "new": [nan, 1]}
    assert scored.completions == ["a", "c"] and found.keys() == expected.keys()
    assert all(found[name] == pytest.approx(values, nan_ok=True) for name, values in expected.items())


def test_the_examples_of_the_page_work(monkeypatch):
    class Client:
        def __init__(self, **options):
            self.chat = self.completions = self

        async def create(self, model, messages):
            said = "Yes." if "Reply: 4" in messages[0]["content"] else "no"
            return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=said))])

    monkeypatch.setitem(sys.modules, "openai", SimpleNamespace(AsyncOpenAI=Client))
    found = {}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "rewards.md").read_text(), re.DOTALL):
        exec(block, found)
    functions = (*found["REWARDS"], (found["judge"], 10.0))
    total, by_function = scoring.score(functions, {**ROWS, "prompts": ["ask: 2 + 2?", "3?"]})
    assert total.tolist() == [1 + 10, 0] and by_function["judge"].tolist() == [1, 0]
    assert by_function["polite"].isnan().tolist() == [False, True]


def test_gold_answers_that_cannot_be_graded_are_counted_at_the_start_with_one_of_them(capsys):
    golds = ["18 cm", "see the figure", "80元", "see the figure", "", None, r"\frac{1}{2}"]
    rows = [Example(i, "?", [1], gold, {"level": 1}) for i, gold in enumerate(golds)]
    rows.append(Example(7, "?", [1], "see below", {"level": 1, "accepted": ["3"]}))

    def reward(completions, answers, **columns):
        return rewards.math_match(completions, answers, **columns)

    for function in (reward, functools.partial(reward), rewards.math_match):
        check_functions([(function, 1.0)], rows)
        said = capsys.readouterr().out
        assert "cannot grade 2 of 5 different gold answers" in said and "row 1: 'see the figure'" in said
    check_functions([(swapped, 1.0)], rows)  # another measure: its own business
    check_functions([(rewards.math_match, 1.0)], rows[::2])
    assert "cannot grade 1 of 4" in capsys.readouterr().out
