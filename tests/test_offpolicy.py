"""Tests of common/distill/offpolicy.py: the mix of on- and off-policy steps, and completions not sampled by the
student.
"""

import errno
import itertools
import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from conftest import build_tokenizer
from tokenizers.processors import TemplateProcessing

from common.base import distributed
from common.distill import offpolicy, teachers
from common.distill.offpolicy import TeacherAnswers, draw, share
from common.tasks import data
from common.tasks.data import Example

CPU = torch.device("cpu")
RECIPE = dict(teacher="t", data="d", system="", template=True, seed=3, temperature=1.0, max_new_tokens=4)
FILE = "teacher_answers-rank0.jsonl"


def examples(*indices, answer="1 2") -> list[Example]:
    return [Example(index=i, prompt="", prompt_ids=[20 + i, 21], answer=answer, columns={}) for i in indices]


def test_the_draw_is_a_function_of_seed_and_step(monkeypatch):
    steps = range(1, 401)
    first, other = ([draw(seed, step, 0.5) for step in steps] for seed in (0, 1))
    torch.manual_seed(99)
    monkeypatch.setattr(distributed, "rank", lambda: 2)
    monkeypatch.setattr(distributed, "num_ranks", lambda: 3)
    assert [draw(0, step, 0.5) for step in reversed(steps)] == first[::-1]  # as after a resume, and on another rank
    # neither seeds nor neighbours go together: of n draws n / 2 agree, give or take 6 standard deviations of n^0.5 / 2
    for pairs in (zip(first, other, strict=True), itertools.pairwise(first)):
        assert abs(sum(a == b for a, b in pairs) - 200) <= 6 * 400**0.5 / 2


def test_steps_are_on_policy_as_often_as_they_should():
    drawn = {p: [draw(7, step, p) for step in range(1, 4001)] for p in (0.0, 0.1, 0.9, 1.0)}
    for p, one in drawn.items():
        assert abs(sum(one) - 4000 * p) <= 6 * (4000 * p * (1 - p)) ** 0.5  # standard deviations
    assert all(a <= b for a, b in zip(drawn[0.1], drawn[0.9], strict=True))  # a larger share keeps what was on-policy


@pytest.mark.parametrize(("step", "lmbda", "ramp", "expected"), [
    (1, 0.5, 0, 0.5), (1, 1.0, 10, 0.1), (5, 0.8, 10, 0.4), (10, 0.8, 10, 0.8), (11, 0.8, 10, 0.8),
])  # fmt: skip
def test_the_share_grows_from_0(step, lmbda, ramp, expected):
    assert share(step, lmbda, ramp) == pytest.approx(expected)


def test_answers_end_are_cut_off_at_the_limit_and_hold_no_ids_of_one_side(tokenizer):
    rows = [example for answer in ("1", "1 2", "1 2 3", "") for example in examples(7, answer=answer)]
    one, two, three = (tokenizer.convert_tokens_to_ids(word) for word in "123")
    assert offpolicy.answers(rows, tokenizer, 3, three + 1) == [[one, 3], [one, two, 3], [one, two, three], [3]]
    assert offpolicy.answers(rows, tokenizer, 99, 64)[2] == [one, two, three, 3]
    with pytest.raises(ValueError, match=rf"row 7: its answer holds token id {three}, .* first {three} ids"):
        offpolicy.answers(rows, tokenizer, 9, three)
    teachers.require_shared(examples(0, 1), 22)
    with pytest.raises(ValueError, match=r"row 5: its prompt holds token id 25, .* first 25 ids"):
        teachers.require_shared(examples(0, 5), 25)


def test_a_tokenizer_that_adds_tokens_adds_none_to_answers_and_needs_an_end_token():
    tokenizer = build_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<im_start> $A", special_tokens=[("<im_start>", 2)])
    (one,) = tokenizer.convert_tokens_to_ids(["1"])
    assert tokenizer("1")["input_ids"] == [2, one]
    assert offpolicy.answers(examples(0, answer="1"), tokenizer, 9, 64) == [[one, 3]]
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match=r"no end token: .*set eos_token"):
        offpolicy.answers(examples(0), tokenizer, 9, 64)


def test_answers_go_on_from_an_opened_thought_and_those_that_do_not_close_it_are_warned_of(tokenizer, capsys):
    one = tokenizer.convert_tokens_to_ids("1")
    rows = [replace(row, reply_start="what ") for row in examples(4, answer="what 1") + examples(5, answer="1")]
    assert offpolicy.answers(rows, tokenizer, 9, 64) == [[one, 3]] * 2
    rows = [
        replace(row, reply_start="<think>\n") for answer in ("a</think>b", "b") for row in examples(6, answer=answer)
    ]
    starts, answers, numbers = ([getattr(row, name) for row in rows] for name in ("reply_start", "answer", "index"))
    data.warn_unclosed([starts[0], ""], [answers[0], "1"], [6, 0])
    assert capsys.readouterr().out == ""
    data.warn_unclosed(starts, answers, numbers)
    assert re.search("1 rows, such as row 6, .*enable_thinking", capsys.readouterr().out)


def test_a_batch_of_given_completions():
    # 3 and 9 end a completion; the second and the last were cut off, and in two stands the pad token, 0
    completions = [[30, 31, 3], [32, 33, 34, 35], [36, 9], [3], [30, 0, 31, 3], [0]]
    prompts = [[5, 6], [7], [8, 9, 10], [11, 12], [5], [6]]
    batch = offpolicy.batch(prompts, completions, 0, [3, 9], CPU)
    assert batch.completion_ids.tolist() == [ids + [0] * (4 - len(ids)) for ids in completions]
    mask = [[1] * len(ids) + [0] * (4 - len(ids)) for ids in completions]
    assert batch.completion_mask.int().tolist() == mask
    assert batch.prompt_ids.tolist() == [[0] * (3 - len(ids)) + ids for ids in prompts]
    assert [ids.tolist() for ids in batch.prompts] == prompts
    assert batch.lengths.tolist() == [3, 4, 2, 1, 4, 1] and batch.prompt_lengths.tolist() == [2, 1, 3, 2, 1, 1]
    assert batch.truncated.tolist() == [False, True, False, False, False, True]
    assert batch.num_tokens == 15 and batch.num_trained == 6 and batch.rows.tolist() == [0, 1, 2, 3, 4, 5]
    assert batch.rollout_logps.dtype == torch.float32 and not batch.rollout_logps.any()
    batch.drop(batch.truncated)
    assert batch.num_tokens == 10 and not batch.completion_mask[1].any() and len(batch.completions[1]) == 4


def test_what_follows_an_end_token_is_left_out(tokenizer):
    # an answer that was written with the end of its turn, and another end token than the tokenizer's
    one, two = tokenizer.convert_tokens_to_ids(["1", "2"])
    given = offpolicy.answers([*examples(0, answer="1 <im_end> 2"), *examples(1, answer="1 user 2")], tokenizer, 9, 64)
    assert given == [[one, 3, two, 3], [one, 4, two, 3]]
    batch = offpolicy.batch([[5], [6]], given, 0, [3, 4], CPU)
    assert batch.completion_ids.tolist() == [[one, 3], [one, 4]] and batch.num_tokens == 4
    assert not batch.truncated.any() and batch.completion_mask.all()
    cut = offpolicy.batch([[5], [6]], [[7, 8, 5, 9, 9], [9]], 0, [2, 5], CPU)
    assert cut.completion_mask.int().tolist() == [[1, 1, 1], [1, 0, 0]] and cut.truncated.tolist() == [False, True]


class Teacher:
    """Counts what it is asked for; its completions tell the row."""

    def __init__(self):
        self.calls = []

    def generate(self, prompts, numbers, *, seed, temperature, max_new_tokens):
        assert [prompt[0] for prompt in prompts] == [20 + number for number in numbers]
        self.calls.append((list(numbers), seed, temperature, max_new_tokens))
        return [[100 * seed + number, 3] for number in numbers]


def cached(folder, **changes) -> TeacherAnswers:
    return TeacherAnswers(str(folder), Teacher(), {**RECIPE, **changes})


def assert_asked(known: TeacherAnswers, rows: list[int], numbers: list[list[int]]):
    """The teacher's completions of these rows, for which it was asked for those."""
    assert known.get(examples(*rows)) == [[300 + row, 3] for row in rows]
    assert [call[0] for call in known.teacher.calls] == numbers


def test_only_missing_rows_are_asked_for(tmp_path):
    folder = tmp_path / "not" / "there"
    known = cached(folder)
    assert_asked(known, [4, 4, 1, 4], [[4, 1]])  # once, also if a step holds them twice
    lines = [json.loads(line) for line in (folder / FILE).read_text().splitlines()]
    checks = [line.pop("check") for line in lines[1:]]
    assert lines == [RECIPE, {"index": 4, "completion_ids": [304, 3]}, {"index": 1, "completion_ids": [301, 3]}]
    assert checks == [known._check(line) for line in lines[1:]] and checks[0] != checks[1]
    assert_asked(known, [1, 5, 4], [[4, 1], [5]])
    assert known.teacher.calls == [([4, 1], 3, 1.0, 4), ([5], 3, 1.0, 4)]
    assert_asked(cached(folder), [5, 6, 1], [[6]])  # a later run reads them
    assert_asked(cached(folder), [1, 4, 5, 6], [])
    assert (folder / FILE).read_text().count("\n") == 5


@pytest.mark.parametrize("cut", [1, 5, 30])
def test_a_line_that_a_kill_cut_off_is_asked_for_again(tmp_path, cut):
    cached(tmp_path).get(examples(1, 2))
    whole = (tmp_path / FILE).read_text()
    (tmp_path / FILE).write_text(whole[:-cut])
    assert_asked(cached(tmp_path), [1, 2], [[2]])
    assert (tmp_path / FILE).read_text() == whole
    (tmp_path / FILE).write_text(whole[:cut])  # in the first line
    assert_asked(cached(tmp_path), [1, 2], [[1, 2]])
    assert (tmp_path / FILE).read_text() == whole


@pytest.mark.parametrize(("old", "new"), [
    (b"[302, 3]", b"[309, 3]"),  # edited by hand
    (b'"index": 2', b'"index": 7'),  # another prompt's
    (b'{"index": 2', b'{"inde\n{"index": 2'),  # the beginning of another row before it
    (b'{"index": 2, "completion_ids": [302', b"\x00\xff\x00"),  # a block that was never written
    (b'{"index": 2', b'[{"index": 2'), (b'{"index": 2', 100_000 * b"["),
], ids=range(6))  # fmt: skip
def test_a_damaged_row_is_never_used(old, new, tmp_path, capsys):
    cached(tmp_path).get(examples(1, 2, 3))
    whole = (tmp_path / FILE).read_bytes()
    assert whole.count(old) == 1
    (tmp_path / FILE).write_bytes(whole.replace(old, new))
    for calls in ([] if b"\n" in new else [[2]], []):  # behind the beginning of another the row itself is whole
        known = cached(tmp_path)
        assert_asked(known, [1, 2, 3], calls)
        assert 7 not in known.known
        assert f"{tmp_path / FILE}: 1 rows are damaged" in capsys.readouterr().out


def test_rows_of_another_recipe_do_not_pass_for_ones_of_this(tmp_path):
    for folder, seed in (("a", 3), ("b", 4)):
        cached(tmp_path / folder, seed=seed).get(examples(1))
    head = (tmp_path / "a" / FILE).read_bytes().split(b"\n")[0]
    (tmp_path / "a" / FILE).write_bytes(head + b"\n" + (tmp_path / "b" / FILE).read_bytes().split(b"\n")[1] + b"\n")
    assert_asked(cached(tmp_path / "a"), [1], [[1]])


def test_runs_that_share_a_folder_at_the_same_time_do_not_disturb_each_other(tmp_path):
    first, second, other = cached(tmp_path), cached(tmp_path), cached(tmp_path, seed=4)  # none finds a file
    first.get(examples(1, 2))
    with open(tmp_path / FILE, "ab") as file:
        file.write(b'{"index": 9, "compl')  # that run is killed
    second.get(examples(2, 3))
    with pytest.raises(ValueError, match=rf"{FILE} was generated otherwise \(seed 3 -> 4\)"):
        other.get(examples(5))
    text = (tmp_path / FILE).read_text()
    assert text.count('"teacher"') == 1 and text.count("\n") == 5
    assert_asked(cached(tmp_path), [1, 2, 3], [])


def test_rows_written_at_the_same_time_stay_whole(tmp_path):
    def append_many(run: int, known: TeacherAnswers) -> None:
        for i in range(30):
            row = {"index": 1000 * run + i, "completion_ids": [i] * 5000}  # longer than what is written at once
            known._append([row | {"check": known._check(row)}])

    with ThreadPoolExecutor(4) as threads:  # each opens the file for itself, as processes do
        list(threads.map(append_many, range(4), [cached(tmp_path) for _ in range(4)]))
    known = cached(tmp_path).known
    assert len(known) == 120 and all(ids == [index % 1000] * 5000 for index, ids in known.items())
    assert (tmp_path / FILE).read_bytes().count(b'"teacher"') == 1


def test_files_of_all_ranks_are_read_and_each_rank_writes_its_own(tmp_path, monkeypatch):
    for rank in range(2):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        cached(tmp_path).get(examples(rank))
    assert sorted(path.name for path in tmp_path.iterdir()) == [FILE, FILE.replace("0", "1")]
    other = tmp_path / FILE.replace("0", "1")
    other.write_text(other.read_text() + '{"index": 5, "comp')  # that rank is writing
    before = other.read_text()
    monkeypatch.setattr(distributed, "rank", lambda: 2)
    assert_asked(cached(tmp_path), [1, 0, 2], [[2]])
    assert other.read_text() == before


@pytest.mark.parametrize(("name", "value"), [("teacher", "u"), ("temperature", 0.7)])
def test_another_recipe_is_refused_and_the_change_named(tmp_path, name, value):
    cached(tmp_path).get(examples(1))
    with pytest.raises(ValueError, match=rf"{FILE} was generated otherwise \({name} \S+ -> {value!r}\): delete"):
        cached(tmp_path, **{name: value})
    assert_asked(cached(tmp_path), [1], [])


def test_a_teacher_that_fails_leaves_the_file_as_it_was(tmp_path):
    known = cached(tmp_path)
    known.get(examples(1))
    before, known.teacher = (tmp_path / FILE).read_text(), None
    with pytest.raises(AttributeError):
        known.get(examples(1, 2))
    assert (tmp_path / FILE).read_text() == before and known.get(examples(1)) == [[301, 3]]


@pytest.mark.parametrize(("code", "rows"), [(errno.ENOLCK, 2), (errno.EIO, 0)])  # a disk without locks is used
def test_answers_that_cannot_be_kept_are_used_all_the_same(tmp_path, monkeypatch, capsys, code, rows):
    monkeypatch.setattr(offpolicy.fcntl, "flock", Mock(side_effect=OSError(code, "said by the disk")))
    assert_asked(cached(tmp_path), [1], [[1]])
    assert (tmp_path / FILE).read_text().count("\n") == rows
    warned = f"warning: {tmp_path / FILE} could not be written: [Errno {code}] said by the disk; the run goes on"
    assert (warned in capsys.readouterr().err) == (rows == 0)


def test_a_recipe_changes_with_the_weights_and_with_any_prompt():
    def recipe(rows, weights="w", shared=64):
        return offpolicy.recipe(SimpleNamespace(name="t", weights=weights, shared=shared), rows, 3, 1.0, 4)

    rows, first = examples(0, 1, 2), recipe(examples(0, 1, 2))
    assert first == recipe(rows) and first["teacher"] == "t" and first["seed"] == 3
    assert recipe(rows, "other")["weights"] != first["weights"]
    assert recipe(rows, shared=63) != first  # a student with fewer ids
    moved, edited, joined = examples(0, 2, 1), examples(0, 1, 2), examples(0)
    edited[1].prompt_ids.append(21)
    joined[0].prompt_ids.extend([1, 21, 21])  # the same numbers as in two rows, cut otherwise
    digests = {recipe(r)["prompts"] for r in (rows, moved, edited, joined, rows[:2])}
    assert len(digests) == 5
