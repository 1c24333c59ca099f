"""Tests of common/offpolicy.py: the mix of on- and off-policy steps, and completions not sampled by the student."""

import itertools
import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from conftest import build_tokenizer
from tokenizers.processors import TemplateProcessing

from common import distributed, offpolicy, teachers
from common.data import Example
from common.offpolicy import TeacherAnswers, draw, share

CPU = torch.device("cpu")
RECIPE = dict(teacher="t", data="d", system="", template=True, seed=3, temperature=1.0, max_new_tokens=4)
FILE = "teacher_answers-rank0.jsonl"


def examples(*indices, answer="1 2") -> list[Example]:
    return [Example(index=i, prompt="", prompt_ids=[20 + i, 21], answer=answer, columns={}) for i in indices]


# --- the mix ---


def test_the_draw_is_a_function_of_seed_and_step():
    steps = range(1, 201)
    first = [draw(0, step, 0.5) for step in steps]
    torch.manual_seed(99)
    assert [draw(0, step, 0.5) for step in steps] == first
    assert [draw(0, step, 0.5) for step in reversed(steps)] == first[::-1]  # as after a resume
    other = [draw(1, step, 0.5) for step in steps]
    assert 60 < sum(a == b for a, b in zip(first, other, strict=True)) < 140
    assert 60 < sum(a == b for a, b in itertools.pairwise(first)) < 140  # neighbours do not go together


def test_all_ranks_draw_alike(monkeypatch):
    drawn = []
    for rank in range(3):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        monkeypatch.setattr(distributed, "num_ranks", lambda: 3)
        drawn.append([draw(0, step, 0.5) for step in range(1, 50)])
    assert drawn[0] == drawn[1] == drawn[2]


@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_steps_are_on_policy_as_often_as_they_should(probability):
    count = sum(draw(7, step, probability) for step in range(1, 4001))
    assert abs(count - 4000 * probability) <= 4 * (4000 * probability * (1 - probability)) ** 0.5


def test_a_larger_share_keeps_the_steps_that_were_on_policy():
    for step in range(1, 200):
        assert draw(0, step, 0.3) <= draw(0, step, 0.6)


@pytest.mark.parametrize(("step", "lmbda", "ramp", "expected"), [
    (1, 0.5, 0, 0.5), (1, 1.0, 10, 0.1), (5, 0.8, 10, 0.4), (10, 0.8, 10, 0.8), (11, 0.8, 10, 0.8), (1, 1.0, 1, 1.0),
    (3, 0.0, 10, 0.0),
])  # fmt: skip
def test_the_share_grows_from_0(step, lmbda, ramp, expected):
    assert share(step, lmbda, ramp) == pytest.approx(expected)


# --- batches ---


def test_answers_end_and_are_cut_off_at_the_limit(tokenizer):
    rows = [example for answer in ("1", "1 2", "1 2 3", "") for example in examples(0, answer=answer)]
    one, two, three = (tokenizer.convert_tokens_to_ids(word) for word in "123")
    assert offpolicy.answers(rows, tokenizer, 3, 64) == [[one, 3], [one, two, 3], [one, two, three], [3]]
    assert offpolicy.answers(rows, tokenizer, 99, 64)[2] == [one, two, three, 3]


def test_ids_that_only_one_side_has_are_refused(tokenizer):
    (two,) = tokenizer.convert_tokens_to_ids(["2"])
    rows = [*examples(0, answer="1"), *examples(7, answer="1 2")]
    assert offpolicy.answers(rows, tokenizer, 9, two + 1)[1] == [two - 1, two, 3]
    with pytest.raises(ValueError, match=rf"row 7: its answer holds token id {two}, .* first {two} ids"):
        offpolicy.answers(rows, tokenizer, 9, two)
    teachers.require_shared(examples(0, 1), 22)
    with pytest.raises(ValueError, match=r"row 5: its prompt holds token id 25, .* first 25 ids"):
        teachers.require_shared(examples(0, 5), 25)


def test_a_tokenizer_that_adds_tokens_adds_none_to_answers():
    tokenizer = build_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<im_start> $A", special_tokens=[("<im_start>", 2)]
    )
    assert tokenizer("1")["input_ids"][0] == 2
    assert offpolicy.answers(examples(0, answer="1"), tokenizer, 9, 64) == [
        [*tokenizer.convert_tokens_to_ids(["1"]), 3]
    ]


def test_a_batch_of_given_completions():
    completions = [[30, 31, 3], [32, 33, 34, 35], [36, 9], [3]]  # 3 and 9 end a completion; the second was cut off
    prompts = [[5, 6], [7], [8, 9, 10], [11, 12]]
    batch = offpolicy.batch(prompts, completions, 0, [3, 9], CPU)
    assert batch.completion_ids.tolist() == [[30, 31, 3, 0], [32, 33, 34, 35], [36, 9, 0, 0], [3, 0, 0, 0]]
    mask = [[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]
    assert batch.completion_mask.int().tolist() == batch.sampled_mask.int().tolist() == mask
    assert batch.prompt_ids.tolist() == [[0, 5, 6], [0, 0, 7], [8, 9, 10], [0, 11, 12]]
    assert batch.prompt_mask.int().tolist() == [[0, 1, 1], [0, 0, 1], [1, 1, 1], [0, 1, 1]]
    assert batch.lengths.tolist() == [3, 4, 2, 1] and batch.prompt_lengths.tolist() == [2, 1, 3, 2]
    assert batch.truncated.tolist() == [False, True, False, False]
    assert batch.num_tokens == 10 and batch.num_trained == 4 and batch.rows.tolist() == [0, 1, 2, 3]
    assert batch.rollout_logps.dtype == torch.float32 and not batch.rollout_logps.any()
    batch.drop(batch.truncated)
    assert batch.num_tokens == 6 and not batch.completion_mask[1].any() and batch.sampled_mask[1].all()


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


def test_without_an_end_token_no_answer_can_end():
    tokenizer = build_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match=r"the tokenizer has no end token: .*set eos_token"):
        offpolicy.answers(examples(0), tokenizer, 9, 64)


def test_the_pad_token_may_stand_in_a_completion():
    batch = offpolicy.batch([[5], [6]], [[30, 0, 31, 3], [0]], 0, [3], CPU)
    assert batch.lengths.tolist() == [4, 1] and batch.truncated.tolist() == [False, True]
    assert batch.sampled_mask.int().tolist() == [[1, 1, 1, 1], [1, 0, 0, 0]]


# --- completions of the teacher ---


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


def asked(known) -> list[list[int]]:
    return [call[0] for call in known.teacher.calls]


def test_only_missing_rows_are_asked_for(tmp_path):
    known = cached(tmp_path)
    assert known.get(examples(4, 2)) == [[304, 3], [302, 3]]
    assert known.get(examples(2, 5, 4)) == [[302, 3], [305, 3], [304, 3]]
    assert known.get(examples(5, 4)) == [[305, 3], [304, 3]]
    assert known.teacher.calls == [([4, 2], 3, 1.0, 4), ([5], 3, 1.0, 4)]


def test_a_row_that_a_step_holds_twice_is_asked_for_once(tmp_path):
    known = cached(tmp_path)
    assert known.get(examples(4, 4, 1, 4)) == [[304, 3], [304, 3], [301, 3], [304, 3]]
    assert asked(known) == [[4, 1]]
    lines = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    checks = [line.pop("check") for line in lines[1:]]
    assert lines == [RECIPE, {"index": 4, "completion_ids": [304, 3]}, {"index": 1, "completion_ids": [301, 3]}]
    assert checks == [cached(tmp_path)._check(line) for line in lines[1:]] and checks[0] != checks[1]


def test_a_later_run_reads_them(tmp_path):
    folder = tmp_path / "not" / "there"
    cached(folder).get(examples(1, 2))
    known = cached(folder)
    assert known.get(examples(2, 3, 1)) == [[302, 3], [303, 3], [301, 3]] and asked(known) == [[3]]
    again = cached(folder)
    again.get(examples(1, 2, 3))
    assert asked(again) == []
    heads = Counter("teacher" in json.loads(line) for line in (folder / FILE).read_text().splitlines())
    assert heads == {True: 1, False: 3}


@pytest.mark.parametrize("cut", [1, 5, 30])
def test_a_line_that_a_kill_cut_off_is_asked_for_again(tmp_path, cut):
    cached(tmp_path).get(examples(1, 2))
    whole = (tmp_path / FILE).read_text()
    (tmp_path / FILE).write_text(whole[:-cut])
    known = cached(tmp_path)
    assert known.get(examples(1, 2)) == [[301, 3], [302, 3]] and asked(known) == [[2]]
    assert (tmp_path / FILE).read_text() == whole


def test_a_file_cut_off_in_its_first_line_begins_anew(tmp_path):
    (tmp_path / FILE).write_text('{"teacher": "t", "da')
    known = cached(tmp_path)
    known.get(examples(1))
    assert asked(known) == [[1]]
    assert json.loads((tmp_path / FILE).read_text().splitlines()[0]) == RECIPE


def replaced(old: bytes, new: bytes):
    def change(data: bytes) -> bytes:
        assert data.count(old) == 1
        return data.replace(old, new)

    return change


@pytest.mark.parametrize("damage", [
    replaced(b"[302, 3]", b"[309, 3]"),  # edited by hand
    replaced(b"[302, 3]", b"[302, NaN]"),
    replaced(b'"index": 2', b'"index": 7'),  # another prompt's
    replaced(b"[302, 3]", b"[302]"),
    replaced(b'{"index": 2', b'{"inde\n{"index": 2'),  # the beginning of another row before it
    replaced(b'{"index": 2, "completion_ids": [302', b"\x00\xff\x00"),  # a block that was never written
    replaced(b'{"index": 2', b'[{"index": 2'),
    replaced(b'{"index": 2', 100_000 * b"["),
], ids=range(8))  # fmt: skip
def test_a_damaged_row_is_never_used(damage, tmp_path, capsys):
    cached(tmp_path).get(examples(1, 2, 3))
    (tmp_path / FILE).write_bytes(damage((tmp_path / FILE).read_bytes()))
    for calls in ([[2]], []):
        known = cached(tmp_path)
        assert known.get(examples(1, 2, 3)) == [[301, 3], [302, 3], [303, 3]] and 7 not in known.known
        calls = calls if b'"inde\n' not in (tmp_path / FILE).read_bytes() else []  # there the row itself is whole
        assert asked(known) == calls
        said = capsys.readouterr().out
        assert f"warning: {tmp_path / FILE}: 1 rows are damaged, or were edited: those are generated again" in said


def test_rows_of_another_recipe_do_not_pass_for_ones_of_this(tmp_path):
    for folder, seed in (("a", 3), ("b", 4)):
        cached(tmp_path / folder, seed=seed).get(examples(1))
    head = (tmp_path / "a" / FILE).read_bytes().split(b"\n")[0]
    (tmp_path / "a" / FILE).write_bytes(head + b"\n" + (tmp_path / "b" / FILE).read_bytes().split(b"\n")[1] + b"\n")
    known = cached(tmp_path / "a")
    assert known.get(examples(1)) == [[301, 3]] and asked(known) == [[1]]


def test_runs_that_share_a_folder_at_the_same_time_do_not_disturb_each_other(tmp_path):
    first, second, other = cached(tmp_path), cached(tmp_path), cached(tmp_path, seed=4)  # none finds a file
    first.get(examples(1, 2))
    with open(tmp_path / FILE, "ab") as file:
        file.write(b'{"index": 9, "compl')  # that run is killed
    second.get(examples(2, 3))
    with pytest.raises(ValueError, match=rf"{FILE} was generated otherwise \(seed 3 -> 4\)"):
        other.get(examples(5))
    heads = Counter("teacher" in json.loads(line) for line in (tmp_path / FILE).read_text().splitlines())
    assert heads == {True: 1, False: 4}
    third = cached(tmp_path)
    assert third.get(examples(1, 2, 3)) == [[301, 3], [302, 3], [303, 3]] and asked(third) == []


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
    known = cached(tmp_path)
    assert known.get(examples(1, 0, 2)) == [[301, 3], [300, 3], [302, 3]] and asked(known) == [[2]]
    assert other.read_text() == before


@pytest.mark.parametrize(("name", "value"), [
    ("seed", 4), ("teacher", "u"), ("temperature", 0.7), ("max_new_tokens", 9),
])  # fmt: skip
def test_another_recipe_is_refused_and_the_change_named(tmp_path, name, value):
    cached(tmp_path).get(examples(1))
    with pytest.raises(ValueError, match=rf"{FILE} was generated otherwise \({name} \S+ -> {value!r}\): delete"):
        cached(tmp_path, **{name: value})
    assert cached(tmp_path).get(examples(1)) == [[301, 3]]


def test_a_teacher_that_fails_leaves_the_file_as_it_was(tmp_path):
    known = cached(tmp_path)
    known.get(examples(1))
    before = (tmp_path / FILE).read_text()

    def fail(*args, **options):
        raise distributed.OutageError("gone")

    known.teacher = SimpleNamespace(generate=fail)
    with pytest.raises(distributed.OutageError):
        known.get(examples(1, 2))
    assert (tmp_path / FILE).read_text() == before and known.get(examples(1)) == [[301, 3]]


def test_a_recipe_changes_with_the_weights_and_with_any_prompt():
    def recipe(rows, weights="w", shared=64):
        return offpolicy.recipe(SimpleNamespace(name="t", weights=weights, shared=shared), rows, 3, 1.0, 4)

    rows = examples(0, 1, 2)
    first = recipe(rows)
    assert first == recipe(examples(0, 1, 2)) and first["teacher"] == "t" and first["seed"] == 3
    assert recipe(rows, "other")["weights"] != first["weights"]
    assert recipe(rows, shared=63) != first  # a student with fewer ids
    moved, edited = examples(0, 2, 1), examples(0, 1, 2)
    edited[1].prompt_ids.append(21)
    shifted = [
        Example(index=i, prompt="", prompt_ids=ids, answer=None, columns={})
        for i, ids in enumerate(([20, 21, 21], [21], [22, 21]))
    ]  # the same tokens, cut otherwise
    digests = {recipe(r)["prompts"] for r in (rows, moved, edited, shifted, rows[:2])}
    assert len(digests) == 5
