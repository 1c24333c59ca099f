"""Prompts drawn by recent success: how often, equally on all ranks, and as before after a resume."""

import json
import math
import threading

import pytest
import torch
from comparing import assert_close, comparable
from conftest import assert_equal_weights, read_lines

from common.base import distributed
from common.run import checkpoint
from common.tasks.curriculum import FLOOR, Curriculum
from common.tasks.data import Example, PromptStream
from common.tasks.scoring import Scored

NAN = math.nan


def rows(count, levels=None):
    return [Example(i, f"prompt {i}", [i], str(i), {"level": i % levels} if levels else {}) for i in range(count)]


def scored(values_PG, **others):
    """Scored completions with these values of one reward function, and of others by name."""
    values_B = torch.tensor(values_PG).flatten()
    found = {"reward": values_B} | {name: torch.tensor(values).flatten() for name, values in others.items()}
    return Scored([""] * len(values_B), values_B.clone(), found)


def taught(examples, successes, batch_size=1, by="row", **options):
    """A stream that has seen 10,000 completions of each prompt, a share of them right."""
    stream = Curriculum(examples, batch_size, 0, by=by, **options)
    for example, p in zip(examples, successes, strict=True):
        stream.learn([example], scored([[p] * 10_000]))
    stream.end_step()
    return stream


def test_success_is_a_mean_in_which_earlier_steps_count_half():
    examples = rows(3)
    stream = Curriculum(examples, 1, 0, by="row")
    assert stream.success.tolist() == [0.5] * 3 and stream.weights.tolist() == [1.0] * 3  # new ones are tried
    stream.learn(examples[:1], scored([[1.0, 1.0, 1.0, 0.0]]))
    assert stream.success.tolist() == [0.5] * 3  # until the step is done
    stream.end_step()
    stream.learn(examples[:1], scored([[0.0, 0.0, 0.0, 1.0]]))
    stream.learn(examples[1:2], scored([[NAN, 0.0, NAN, 0.0]]))  # two of them are scored
    metrics = stream.end_step()
    first, second = (3 / 2 + 1 + 1 / 2) / (4 / 2 + 4 + 1), (1 / 2) / (2 + 1)
    assert sorted(stream.success.tolist()) == pytest.approx(sorted([first, second, 0.5]), abs=1e-15)
    assert metrics == {
        "curriculum_seen": pytest.approx(2 / 3),
        "curriculum_success": pytest.approx((first + second) / 2),
    }
    weight = stream.weights.tolist()[1]
    assert weight == pytest.approx(FLOOR + (1 - FLOOR) * 4 * second * (1 - second), abs=1e-15)


@pytest.mark.parametrize(("values", "others", "success"), [
    ([[3.0, -2.0]], {}, 0.5),  # from 0 to 1
    ([[0.0, 0.0]], {"format": [[1.0, 1.0]]}, 0.0),  # a bonus is no success
    ([[NAN, 0.0]], {"other": [[1.0, NAN]]}, 0.5),  # where the first does not apply, the next does
])  # fmt: skip
def test_the_first_reward_function_that_applies_says_what_a_success_is(values, others, success):
    examples, given = rows(1), scored(values, **others)
    given.rewards = torch.zeros(2)  # scored, whatever the sum is
    stream = Curriculum(examples, 1, 0, by="row")
    stream.learn(examples, given)
    stream.end_step()
    assert stream.success.item() == pytest.approx((2 * success + 0.5) / 3)


def test_what_was_not_scored_or_not_chosen_changes_nothing():
    examples = rows(2)
    stream = Curriculum(examples, 2, 0, by="row")
    stream.learn(examples, scored([[NAN, NAN], [1.0, 1.0]]), among=[True, False])
    assert stream.end_step() == {"curriculum_seen": 0.0, "curriculum_success": 0.5} and not stream.state_dict()


def test_a_script_that_says_nothing_about_its_prompts_is_told_what_to_write():
    stream = Curriculum(rows(2), 1, 0, by="row")
    stream.next()
    with pytest.raises(ValueError, match=r"curriculum = 'row'.*prompts\.learn\(examples_P, scored\)"):
        stream.end_step()


def test_rows_are_drawn_in_proportion_to_their_weights():
    successes = [0.0, 0.02, 0.1, 0.3, 0.5, 0.8, 1.0]
    examples, draws = rows(len(successes)), 6000
    stream = taught(examples, successes)
    counts = torch.zeros(len(successes))
    for _ in range(draws):
        counts[stream.next()[0].index] += 1
    share = stream.weights / stream.weights.sum()
    assert ((counts - draws * share).abs() <= 6 * (draws * share * (1 - share)).sqrt()).all()
    assert counts.min() > 0 and stream.weights.max() / stream.weights.min() > 19


def test_rows_of_a_batch_differ_and_the_second_is_drawn_from_the_others():
    stream, pairs, draws = taught(rows(4), [0.0, 0.1, 0.3, 0.5], batch_size=2), {}, 6000
    for _ in range(draws):
        one, other = stream.next()
        pairs[one.index, other.index] = pairs.get((one.index, other.index), 0) + 1
    w = stream.weights
    for i in range(4):
        assert (i, i) not in pairs
        for j in set(range(4)) - {i}:
            p = (w[i] / w.sum() * w[j] / (w.sum() - w[i])).item()
            assert abs(pairs.get((i, j), 0) - draws * p) <= 6 * (draws * p * (1 - p)) ** 0.5


def test_rows_alike_in_a_column_share_their_success_and_the_metrics_show_it():
    examples = rows(30, levels=3)
    stream = Curriculum(examples, 6, 0, by="level")
    stream.learn([examples[0], examples[3], examples[1]], scored([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]]))
    metrics = stream.end_step()
    assert metrics == pytest.approx({
        "share[level=0]": 2 / 3, "share[level=1]": 1 / 3, "share[level=2]": 0,
        "success[level=0]": 3.5 / 5, "success[level=1]": 0.5 / 3, "success[level=2]": 0.5,
    })  # fmt: skip
    p = torch.tensor([3.5 / 5, 0.5 / 3, 0.5], dtype=torch.float64).repeat(10)
    torch.testing.assert_close(stream.weights, FLOOR + (1 - FLOOR) * 4 * p * (1 - p), rtol=1e-14, atol=0)
    many = Curriculum(rows(30, levels=21), 1, 0, by="level")
    many.learn([many.examples[0]], scored([[1.0]]))
    assert set(many.end_step()) == {"curriculum_seen", "curriculum_success"}


def test_a_column_that_the_data_lack_is_named_with_those_that_they_have():
    with pytest.raises(ValueError, match=r"curriculum = 'levels': must be 'row' or a column .*; they have level$"):
        Curriculum(rows(4, levels=2), 1, 0, by="levels")
    with pytest.raises(ValueError, match=r"curriculum = 'level': all rows have the same value .*name another column"):
        Curriculum(rows(4, levels=1), 1, 0, by="level")


def test_values_that_are_long_are_not_reported_one_by_one():
    for text, names in (("x", {"share[level=x 0]", "success[level=x 1]"}), ("x" * 99, {"curriculum_seen"})):
        examples = [Example(i, f"prompt {i}", [i], str(i), {"level": f"{text} {i % 2}"}) for i in range(4)]
        stream = Curriculum(examples, 1, 0, by="level")
        stream.learn(examples[:1], scored([[1.0]]))
        assert names <= stream.end_step().keys()


class Ranks:
    """Streams of several ranks, whose collectives meet in threads."""

    def __init__(self, monkeypatch, count):
        self.count, self.barrier, self.local, self.slots = count, threading.Barrier(count), threading.local(), {}
        monkeypatch.setattr(distributed, "gather_objects", self.gather)

    def gather(self, value):
        self.slots[self.local.rank] = value
        self.barrier.wait(20)
        values = [self.slots[rank] for rank in range(self.count)]
        self.barrier.wait(20)
        return values

    def run(self, function):
        """Results of function(rank), by rank."""
        results = [None] * self.count

        def work(rank):
            self.local.rank = rank
            results[rank] = function(rank)

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return results


def values_of(examples, round_=0):
    """Values that depend on the row, and are no dyadic fractions: the order of a sum would show."""
    return scored([[((e.index + 3) * (g + 7 + round_) % 11) / 11 for g in range(4)] for e in examples])


def drive(stream, steps, resampled=True):
    """What happens in the steps of a script; the rows of this rank in each."""
    seen = []
    for _ in range(steps):
        examples = stream.next()
        for round_ in range(2 if resampled else 0):
            unwanted = [e.index % 3 == round_ for e in examples]
            stream.learn(examples, values_of(examples, round_), among=unwanted)
            stream.replace(examples, unwanted)
        stream.learn(examples, values_of(examples))
        stream.end_step()
        seen.append([e.index for e in examples])
    return seen


@pytest.mark.parametrize("by", ["row", "level"])
@pytest.mark.parametrize("count", [2, 4])
def test_any_number_of_ranks_draws_and_learns_the_same(monkeypatch, by, count):
    alone = Curriculum(rows(40, levels=4), 8, 3, by=by)
    batches = drive(alone, 5)
    ranks = Ranks(monkeypatch, count)
    streams = [Curriculum(rows(40, levels=4), 8, 3, rank=r, num_ranks=count, by=by) for r in range(count)]
    found = ranks.run(lambda rank: drive(streams[rank], 5))
    assert [[part[step] for part in found] for step in range(5)] == [
        [batch[rank::count] for rank in range(count)] for batch in batches
    ]
    for stream in streams:
        assert stream.position == alone.position > 5 * 8
        assert torch.equal(stream.success, alone.success)


@pytest.mark.parametrize("by", ["row", "level"])
def test_a_stream_goes_on_from_its_state_bit_for_bit(by):
    examples = rows(40, levels=4)
    straight, first = (Curriculum(examples, 8, 3, by=by) for _ in range(2))
    before = drive(first, 3)
    first.learn(first.next(), values_of(examples[:8]))  # of a step that is not finished
    position = first.position - 8
    second = Curriculum(examples, 8, 3, position, by=by, state=first.state_dict())
    assert before + drive(second, 4) == drive(straight, 7)
    assert torch.equal(second.success, straight.success) and second.position == straight.position


def test_what_was_learned_follows_its_rows_when_the_data_change():
    examples = rows(6)
    state = taught(examples, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]).state_dict()
    moved = [
        Example(i, e.prompt, e.prompt_ids, e.answer, {"level": i % 2})
        for i, e in enumerate([*examples[::-2], *rows(9)[6:]])
    ]
    stream = Curriculum(moved, 1, 0, by="row", state=state)
    weights = taught(examples, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]).weights
    assert torch.equal(stream.weights[:3], weights[[5, 3, 1]]) and stream.weights[3:].tolist() == [1.0] * 3
    # another way to divide the rows begins anew
    assert Curriculum(moved, 1, 0, by="level", state=state).success.tolist() == [0.5] * 2


def test_replaced_prompts_are_the_next_of_the_draw_and_come_again_only_when_all_were_drawn():
    stream = taught(rows(10), [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0, 0.5, 0.5, 0.5], batch_size=4)
    batch = stream.next()
    drawn = [example.index for example in batch]
    for _ in range(2):
        stream.replace(batch, [True, True, True, False])
        drawn += [example.index for example in batch[:3]]
    assert sorted(drawn) == list(range(10)) and stream.position == 10
    stream.replace(batch, [True] * 4)
    assert [example.index for example in batch] == drawn[:4]


def informative(make, seed, steps=150):
    """Share of groups with unequal rewards in a simulated run, and its mean success on all rows in the end.

    A row of difficulty d is solved with probability sigmoid(skill - d). Skill grows with every group with a gradient.
    """
    examples = [Example(i, str(i), [i], str(i), {"level": i % 8}) for i in range(400)]
    difficulty, generator = torch.arange(400) % 8 * 2.0, torch.Generator().manual_seed(seed)
    stream, skill, useful = make(examples, 16, seed), 0.0, 0
    for _ in range(steps):
        batch = stream.next()
        p = torch.sigmoid(skill - difficulty[[e.index for e in batch]])
        values_PG = (torch.rand(16, 8, generator=generator) < p[:, None]).float()
        right = values_PG.sum(1)
        groups = ((right > 0) & (right < 8)).sum().item()
        useful, skill = useful + groups, skill + 0.005 * groups
        stream.learn(batch, Scored([""] * 128, values_PG.flatten(), {"reward": values_PG.flatten()}))
        stream.end_step()
    return useful / (16 * steps), torch.sigmoid(skill - difficulty).mean().item()


@pytest.mark.parametrize("by", ["row", "level"])
def test_more_groups_have_a_gradient_and_the_policy_learns_more(by):
    for seed in range(3):
        share, success = informative(PromptStream, seed)
        better, learned = informative(lambda *options: Curriculum(*options, by=by), seed)
        assert better > share + (0.15 if by == "level" else 0.03) and learned > success


def levels(completions, answers, level, **columns):
    """A reward that depends on the level: 0 is always solved, 3 never, and what lies between now and then."""
    return [float(len(text) % 3 < (3, 2, 1, 0)[n]) for text, n in zip(completions, level, strict=True)]


@pytest.fixture
def levels_file(launcher, tmp_path):
    """The rows of the launcher's task with a column of levels."""
    path = tmp_path / "levels.jsonl"
    found = read_lines(launcher.defaults["train_data"])
    path.write_text("".join(json.dumps(row | {"level": i % 4}) + "\n" for i, row in enumerate(found)))
    return path


@pytest.mark.parametrize("by", [pytest.param("row", marks=pytest.mark.parity), "level"])
def test_a_run_that_is_resumed_is_one_that_was_not(launcher, levels_file, tmp_path, by):
    options = dict(train_data=levels_file, curriculum=by, dynamic_sampling=1, eval_data="", rewards=[levels])
    straight = launcher.run("gspo", tmp_path / "straight", steps=6, **options).succeeded()
    for steps in (3, 6):
        run = launcher.run("gspo", tmp_path / "parts", steps=steps, **options).succeeded()
    assert comparable(run.lines) == comparable(straight.lines) and run.samples == straight.samples
    assert_equal_weights(run.weights(6), straight.weights(6))
    name = "success[level=3]" if by == "level" else "curriculum_success"
    assert name in run.steps[-1] and run.steps[-1][name] == straight.steps[-1][name]
    if by == "level":
        last = run.steps[-1]
        assert last["success[level=0]"] > 0.9 and last["success[level=3]"] < 0.1
        shares = [[line[f"share[level={n}]"] for n in range(4)] for line in run.steps]
        assert all(sum(share) == pytest.approx(1) for share in shares)


@pytest.mark.parity
def test_a_curriculum_begins_and_ends_in_the_middle_of_a_run(launcher, levels_file, tmp_path):
    options = dict(train_data=levels_file, eval_data="", save_every=1, rewards=[levels])
    for steps, by in ((1, ""), (2, "level"), (3, ""), (4, "row")):
        run = launcher.run("grpo", tmp_path / "run", steps=steps, curriculum=by, **options).succeeded()
        saved = checkpoint.curriculum(run.out_dir / run.checkpoints[-1])
        assert bool(saved) == bool(by) and "data have changed" not in run.output
        assert ("success[level=0]" in run.steps[-1]) == (by == "level")


@pytest.mark.parity
def test_two_ranks_train_on_the_prompts_of_one(launcher, levels_file, tmp_path):
    options = dict(train_data=levels_file, curriculum="level", dynamic_sampling=1, eval_data="", rewards=[levels])
    once = launcher.run("gspo", tmp_path / "one", steps=4, **options).succeeded()
    both = launcher.run("gspo_ddp", tmp_path / "two", 2, steps=4, **options).succeeded()
    assert_close(both, once)
