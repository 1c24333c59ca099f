"""Prompts skipped after groups with equal rewards (GRESO): how often, equally on all ranks, and after a resume."""

import json
import math

import pytest
import torch
from comparing import assert_close, comparable
from conftest import assert_equal_weights, read_lines
from test_curriculum import Ranks, levels, rows, scored

from common.run import checkpoint
from common.tasks import greso
from common.tasks.curriculum import Curriculum
from common.tasks.data import Example, PromptStream
from common.tasks.greso import DELTA, HIGHEST, LEAST, LOWEST, TARGET_EASY, TARGET_HARD, Greso
from common.tasks.scoring import Scored

NAN = math.nan
RIGHT, WRONG, MIXED = [1.0, 1.0], [0.0, 0.0], [0.0, 1.0]


def taught(examples, groups, times=1, batch_size=1, **options):
    """A stream that has seen these rewards of each prompt so many times."""
    stream = Greso(examples, batch_size, 0, **options)
    for _ in range(times):
        stream.learn(examples, scored(groups))
        stream.end_step()
    return stream


def skips(stream):
    return stream.skip_probability.tolist()


def test_the_probability_of_a_skip_grows_with_every_group_of_equal_rewards():
    examples = rows(4)
    stream = Greso(examples, 1, 0)
    assert skips(stream) == [0.0] * 4
    for z in range(1, 10):
        stream.learn(examples[:3], scored([RIGHT, WRONG, MIXED]))
        assert skips(stream)[0] == 1 - max(0.5 ** (z - 1), LEAST)  # until the step is done
        stream.end_step()
        assert skips(stream) == [1 - max(0.5**z, LEAST)] * 2 + [0.0] * 2
    stream.learn(examples[:1], scored([MIXED]))
    stream.end_step()
    assert skips(stream) == [0.0, 1 - LEAST, 0.0, 0.0]
    stream.p_easy, stream.p_hard = 0.7, 0.4
    stream.learn(examples[:3], scored([RIGHT, MIXED, WRONG]))
    stream.end_step()
    assert skips(stream) == pytest.approx([0.3, 0.0, 0.6, 0.0], abs=1e-15)


@pytest.mark.parametrize(("group", "values", "streak"), [
    ([3.0, 3.0], None, 1), ([-1.0, -1.0], None, -1), ([0.5, 0.5], None, 1), ([0.4, 0.4], None, -1),
    ([3.0, 3.1], None, 0), ([NAN, 1.0, 1.0], None, 1), ([NAN, 1.0, 0.0], None, 0),
    ([1.2, 1.2], [0.0, 0.0], -1),  # a bonus makes no success
    ([0.2, 0.2], [NAN, 1.0], 1),  # where the first function does not apply, the next does
])  # fmt: skip
def test_equal_rewards_on_any_scale_are_what_counts(group, values, streak):
    examples, given = rows(1), scored([values or group], other=[group])
    given.rewards = torch.tensor(group)
    stream = Greso(examples, 1, 0)
    stream.learn(examples, given)
    stream.end_step()
    assert stream.state_dict()["streaks"].tolist() == [streak] * bool(streak)


@pytest.mark.parametrize("group", [[NAN, NAN], [NAN, 1.0], [0.0, NAN]])
def test_a_group_with_fewer_than_two_scores_says_nothing(group):
    examples = rows(2)
    stream = taught(examples, [RIGHT, WRONG])
    before, stream.position = skips(stream), 2 * len(examples)
    stream.next()
    stream.learn(examples, scored([group, group]))
    metrics = stream.end_step()
    assert skips(stream) == before and (metrics["p_easy"], metrics["p_hard"]) == (0.5, 0.5)


def test_exploration_follows_the_shares_of_solved_and_hopeless_groups():
    examples = rows(24)
    stream, groups = Greso(examples, 24, 0), [RIGHT] * 2 + [WRONG] + [MIXED] * 21
    assert TARGET_EASY <= 2 / 24 and TARGET_HARD > 1 / 24
    for step in range(4):
        stream.next()
        stream.learn(examples, scored(groups))
        metrics = stream.end_step()
        # nothing could be skipped in the first pass
        assert metrics["p_easy"] == pytest.approx(0.5 - step * DELTA)
        assert metrics["p_hard"] == pytest.approx(0.5 + step * DELTA)
    for _ in range(100):
        stream.next()
        stream.learn(examples, scored(groups))
        metrics = stream.end_step()
    assert metrics["p_easy"] == LOWEST and metrics["p_hard"] == HIGHEST


def test_without_equal_rewards_prompts_come_as_without_a_curriculum():
    examples, plain = rows(10), PromptStream(rows(10), 4, 3)
    stream = taught(examples, [MIXED] * 10, batch_size=4)
    stream.seed = 3
    for _ in range(8):  # batches cross the end of an epoch
        batch, expected = stream.next(), plain.next()
        assert batch == expected
        assert stream.replace(batch, [True, False] * 2) == plain.replace(expected, [True, False] * 2)
        assert batch == expected and stream.position == plain.position
        stream.learn(batch, scored([MIXED] * 4))
        assert stream.end_step()["skipped_prompts"] == 0


def test_prompts_come_in_the_order_of_the_data_as_often_as_their_probability_says():
    examples, draws = rows(10), 6000
    stream = taught(examples, [RIGHT] * 2 + [WRONG] * 2 + [MIXED] * 6)
    plain, counts = PromptStream(examples, 1, 0), torch.zeros(10, dtype=torch.float64)
    order = [plain.next()[0].index for _ in range(2 * draws)]
    for _ in range(draws):
        before = stream.position
        (example,) = stream.next()
        assert order[stream.position - 1] == example.index and stream.position > before
        counts[example.index] += 1
    q = stream.skip_probability
    expected = stream.position / 10 * (1 - q)
    assert ((counts - expected).abs() <= 6 * (expected * q).sqrt() + 1).all()


def test_when_all_are_skipped_the_first_that_was_comes_back(monkeypatch):
    monkeypatch.setattr(greso, "LEAST", 0.0)  # nothing would ever come
    examples = rows(12)
    stream = taught(examples, [RIGHT] * 12, times=60, batch_size=8)
    order = [example.index for example in PromptStream(examples, 12, 0).next()]
    batch = stream.next()
    assert [example.index for example in batch] == order[:8] and stream.position == 12
    stream.replace(batch, [True] * 8)
    assert [example.index for example in batch] == order[8:] + order[:4] and stream.position == 12
    stream.learn(batch, scored([RIGHT] * 8))
    assert stream.end_step()["skipped_prompts"] == 1.0


@pytest.mark.parametrize("count", [1, 2, 8])
def test_hopeless_data_never_stop_a_run(count):
    examples = rows(8)
    stream = taught(examples, [WRONG] * 8, times=30, batch_size=count)
    for _ in range(50):
        batch, before = stream.next(), stream.position
        assert len(batch) == count
        stream.replace(batch, [True] * count)
        assert stream.position - before <= 8 + count
        stream.learn(batch, scored([WRONG] * count))
        stream.end_step()


def groups_of(examples, round_=0):
    """Groups that depend on the row: a third all right, a third all wrong, and a third that changes."""
    by_kind = (RIGHT, WRONG, MIXED if round_ else RIGHT)
    return scored([by_kind[example.index % 3] for example in examples])


def drive(stream, steps, resampled=True):
    """The rows of this rank in each step of a script, and the metrics."""
    seen = []
    for _ in range(steps):
        examples = stream.next()
        for round_ in range(2 if resampled else 0):
            unwanted = [example.index % 3 == round_ for example in examples]
            stream.learn(examples, groups_of(examples, round_), among=unwanted)
            stream.replace(examples, unwanted)
        stream.learn(examples, groups_of(examples, stream.position % 2))
        seen.append(([example.index for example in examples], stream.end_step()))
    return seen


@pytest.mark.parametrize("count", [2, 4])
def test_any_number_of_ranks_skips_and_learns_the_same(monkeypatch, count):
    alone = Greso(rows(40), 8, 3)
    steps = drive(alone, 30)
    assert any(metrics["skipped_prompts"] > 0.3 for _, metrics in steps) and alone.p_easy < 0.5
    ranks = Ranks(monkeypatch, count)
    streams = [Greso(rows(40), 8, 3, rank=r, num_ranks=count) for r in range(count)]
    found = ranks.run(lambda rank: drive(streams[rank], 30))
    for step, (batch, metrics) in enumerate(steps):
        assert [part[step] for part in found] == [(batch[rank::count], metrics) for rank in range(count)]
    for stream in streams:
        assert stream.position == alone.position and skips(stream) == skips(alone)


@pytest.mark.parametrize("done", [3, 11, 24])
def test_a_stream_goes_on_from_its_state_bit_for_bit(done):
    examples = rows(40)
    straight, first = (Greso(examples, 8, 3) for _ in range(2))
    before = drive(first, done)
    position = first.position
    first.learn(first.next(), groups_of(examples[:8]))  # of a step that is not finished
    second = Greso(examples, 8, 3, position, state=first.state_dict())
    assert before + drive(second, 12) == drive(straight, done + 12)
    assert skips(second) == skips(straight) and second.position == straight.position


def test_what_was_learned_follows_its_rows_when_the_data_change():
    examples = rows(6)
    state = taught(examples, [RIGHT, WRONG, MIXED] * 2, times=2).state_dict()
    moved = [Example(i, e.prompt, e.prompt_ids, e.answer, {}) for i, e in enumerate([*examples[::-2], *rows(9)[6:]])]
    assert skips(Greso(moved, 1, 0, state=state)) == [0.0, 0.75, 0.75, 0.0, 0.0, 0.0]


def test_the_state_of_another_curriculum_is_no_state():
    examples = rows(6)
    greso = taught(examples, [RIGHT] * 6)
    other = Curriculum(examples, 1, 0, by="row")
    other.learn(examples, scored([RIGHT] * 6))
    other.end_step()
    assert skips(Greso(examples, 1, 0, state=other.state_dict())) == [0.0] * 6
    assert Curriculum(examples, 1, 0, by="row", state=greso.state_dict()).success.tolist() == [0.5] * 6


def test_a_script_that_says_nothing_about_its_prompts_is_told_what_to_write():
    stream = Greso(rows(2), 1, 0)
    stream.next()
    with pytest.raises(ValueError, match=r"curriculum = 'greso'.*prompts\.learn\(examples_P, scored\)"):
        stream.end_step()


def test_other_names_are_refused_with_those_that_exist():
    with pytest.raises(ValueError, match=r"curriculum = 'Greso': must be 'row' or a column .* or 'greso'; they have"):
        Curriculum(rows(4, levels=2), 1, 0, by="Greso")


def simulated(make, solved, hopeless, useful, steps=300, seed=0):
    """Shares of all right and of all wrong groups in the last 100 steps of 16 x 8, and how often each row came."""
    p_N = torch.tensor([1.0] * solved + [0.0] * hopeless + [0.5] * useful)
    generator, stream = torch.Generator().manual_seed(seed), make(rows(len(p_N)), 16, seed)
    right, counts = [], torch.zeros(len(p_N))
    for _ in range(steps):
        batch = stream.next()
        rows_P = torch.tensor([example.index for example in batch])
        values_PG = (torch.rand(16, 8, generator=generator) < p_N[rows_P][:, None]).float()
        counts.index_add_(0, rows_P, torch.ones(16))
        right.append(values_PG.sum(1))
        stream.learn(batch, Scored([""] * 128, values_PG.flatten(), {"reward": values_PG.flatten()}))
        stream.end_step()
    late = torch.stack(right[-100:])
    return (late == 8).float().mean().item(), (late == 0).float().mean().item(), counts


@pytest.mark.parametrize(("solved", "hopeless", "easy", "hard"), [
    (200, 0, TARGET_EASY, 0), (0, 200, 0, TARGET_HARD), (100, 100, TARGET_EASY, TARGET_HARD),
])  # fmt: skip
def test_groups_without_gradient_fall_to_the_targets_and_no_prompt_is_forgotten(solved, hopeless, easy, hard):
    for seed in range(3):
        all_right, all_wrong, counts = simulated(Greso, solved, hopeless, 100, seed=seed)
        # where 100 rows are useful, a pass takes six steps, and rows that are tried again weigh more
        assert all_right == pytest.approx(easy, abs=0.04) and all_wrong == pytest.approx(hard, abs=0.05)
        assert (counts[:200] >= 2).double().mean() > 0.9  # also solved and hopeless rows come again
    uniform = sum(simulated(PromptStream, solved, hopeless, 100)[:2])
    assert uniform > 0.6


@pytest.fixture
def levels_file(launcher, tmp_path):
    """Eight rows of the launcher's task in four levels, so that several passes take few steps."""
    path = tmp_path / "levels.jsonl"
    found = read_lines(launcher.defaults["train_data"])[:8]
    path.write_text("".join(json.dumps(row | {"level": i % 4}) + "\n" for i, row in enumerate(found)))
    return path


@pytest.mark.parametrize("dynamic_sampling", [0, 1])
def test_a_run_that_is_resumed_is_one_that_was_not(launcher, levels_file, tmp_path, dynamic_sampling):
    options = dict(train_data=levels_file, curriculum="greso", dynamic_sampling=dynamic_sampling, eval_data="",
                   rewards=[levels])  # fmt: skip
    straight = launcher.run("grpo", tmp_path / "straight", steps=8, **options).succeeded()
    for steps in (5, 8):
        run = launcher.run("grpo", tmp_path / "parts", steps=steps, **options).succeeded()
    assert comparable(run.lines) == comparable(straight.lines) and run.samples == straight.samples
    assert_equal_weights(run.weights(8), straight.weights(8))
    assert any(line["skipped_prompts"] > 0 for line in run.steps)
    assert all({"p_easy", "p_hard"} <= line.keys() for line in run.steps)


@pytest.mark.parity
def test_it_begins_and_ends_in_the_middle_of_a_run(launcher, levels_file, tmp_path):
    options = dict(train_data=levels_file, eval_data="", save_every=1, rewards=[levels])
    for steps, by in ((1, ""), (2, "greso"), (3, "row"), (4, "greso"), (5, "")):
        run = launcher.run("grpo", tmp_path / "run", steps=steps, curriculum=by, **options).succeeded()
        saved = checkpoint.curriculum(run.out_dir / run.checkpoints[-1])
        assert bool(saved) == bool(by) and ("streaks" in saved) == (by == "greso")
        assert ("p_easy" in run.steps[-1]) == (by == "greso")


@pytest.mark.parity
def test_two_ranks_train_on_the_prompts_of_one(launcher, levels_file, tmp_path):
    options = dict(train_data=levels_file, curriculum="greso", dynamic_sampling=1, eval_data="", rewards=[levels])
    once = launcher.run("gspo", tmp_path / "one", steps=6, **options).succeeded()
    both = launcher.run("gspo_ddp", tmp_path / "two", 2, steps=6, **options).succeeded()
    assert_close(both, once)
