"""Tests of common/generation/drafts.py: completions and their distribution are those of decoding without drafts."""

import collections
import copy
import dataclasses
import itertools
import math
from array import array
from types import SimpleNamespace

import pytest
import torch
from conftest import build_tokenizer, tiny_model
from test_engine import OPTIONS, PROMPTS, as_on_gpu, in_single, tiny  # noqa: F401
from test_rollout import Letters, assert_same, completions, in_double  # noqa: F401
from test_states import built

from common import loop
from common.generation import drafts
from common.generation.drafts import Earlier, continuation
from common.generation.rollout import Sampler
from common.generation.stopping import Stopping
from common.tasks.data import Example


def generate(sampler, earlier=(), group_size=4, prompts=PROMPTS, temperature=1.0, seed=3):
    return sampler.generate(prompts, group_size=group_size, temperature=temperature, seed=seed, earlier=earlier)


def earlier_of(batch) -> list[list[array]]:
    """The completions of a batch, as a later pass takes them."""
    earlier, numbers = Earlier(), range(len(PROMPTS))
    earlier.put(numbers, batch.completions)
    return earlier.of(numbers)


def watched(sampler) -> tuple[list[list[int]], list[int]]:
    """Lengths of the drafts in each pass over them, and rows of each decode step."""
    runner, passes, steps = sampler.engines[0].runner, [], []
    extend, step = runner.extend, runner._step

    def look(tried, sampling):
        passes.append([draft.new for draft in tried])
        return extend(tried, sampling)

    def look_at_step(b, sampling, longest=0):
        steps.append(b)
        step(b, sampling, longest)

    runner.extend, runner._step = look, look_at_step
    return passes, steps


def assert_not_changed_by_drafts(sampler, earlier, **how):
    """With drafts and without, a sampler gives the same; returns the batch with drafts."""
    plain, drafted = generate(sampler, **how), generate(sampler, earlier, **how)
    assert plain.drafted is None and (drafted.drafted <= drafted.lengths).all()
    assert_same(dataclasses.replace(drafted, drafted=None), plain)
    return drafted


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize(("kind", "group_size", "rollout_batch"), [
    pytest.param("qwen2", 4, 0, marks=pytest.mark.parity), ("qwen2", 4, 9), ("qwen2", 1, 3),
    pytest.param("gpt2", 4, 9, marks=pytest.mark.families),
])  # fmt: skip
def test_drafts_change_no_completion(as_on_gpu, monkeypatch, gpu, kind, group_size, rollout_batch):  # noqa: F811
    monkeypatch.setattr(drafts, "FIRST", 3)
    monkeypatch.setattr(drafts, "WORTH", 1)  # several passes
    sampler = Sampler([tiny(kind)], **OPTIONS, rollout_batch=rollout_batch)
    sampler = as_on_gpu(sampler) if gpu else sampler
    same, greedy, other = (
        earlier_of(generate(sampler, (), group_size, temperature=temperature, seed=seed))
        for temperature, seed in ((1.0, 3), (0, 3), (1.0, 4))
    )
    for temperature, earlier in ((1.0, same), (1.0, other), (0, greedy), (0, other), (0.5, greedy)):
        how = dict(group_size=group_size, temperature=temperature)
        batch = assert_not_changed_by_drafts(sampler, earlier, **how)
        if (earlier is greedy and temperature == 0) or (earlier is same and group_size == 1):
            assert batch.drafted.tolist() == (batch.lengths - 1).tolist()  # the first token comes from the prompt
    assert generate(sampler, [[] for _ in PROMPTS], group_size).drafted.tolist() == [0] * len(PROMPTS) * group_size


def test_rows_that_drafts_complete_take_no_decode_step():
    sampler = Sampler([tiny("qwen2")], **OPTIONS)
    earlier = earlier_of(generate(sampler, temperature=0))
    passes, steps = watched(sampler)
    batch = generate(sampler, earlier, temperature=0)
    assert passes == [[n - 1 for n in batch.lengths.tolist() if n > 1]] and not steps
    half = [[ids[: 1 + len(ids) // 2] for ids in group] for group in earlier]  # behind those, decoding goes on
    assert generate(sampler, half, temperature=0).drafted.sum() < batch.drafted.sum()
    assert sum(steps) == sum(n - 1 - n // 2 for n in batch.lengths.tolist())


@pytest.mark.parametrize("options", [
    dict(min_new_tokens=5), dict(top_p=0.6, top_k=20), dict(min_p=0.2, suppressed_ids=[5, 9, 33]),
    dict(max_new_tokens=5), dict(max_new_tokens=1), dict(end_ids=[999]),
    dict(stopping=Stopping(("cab", "bb"), Letters())),
])  # fmt: skip
def test_what_limits_completions_limits_drafts(options):
    free = Sampler([tiny("qwen2")], **OPTIONS)
    sampler = Sampler([tiny("qwen2")], **OPTIONS | options, rollout_batch=12)
    for drafted_by, seed in ((sampler, 3), (sampler, 4), (free, 3)):  # also drafts that do not keep to the limits
        assert_not_changed_by_drafts(sampler, earlier_of(generate(drafted_by, seed=seed)))


def test_a_row_ends_at_an_end_token_or_stop_string_inside_its_draft():
    options = OPTIONS | dict(end_ids=[999], max_new_tokens=60)
    earlier = earlier_of(generate(Sampler([tiny("qwen2")], **options), temperature=0))
    batch = assert_not_changed_by_drafts(
        Sampler([tiny("qwen2")], **options | dict(end_ids=OPTIONS["end_ids"])), earlier, temperature=0
    )
    assert any(1 < n < 60 for n in batch.lengths.tolist())
    sampler = Sampler([tiny("qwen2")], **options, stopping=Stopping(("cab",), Letters()))
    half = [[ids[:50] for ids in group] for group in earlier]
    _, steps = watched(sampler)
    batch = generate(sampler, half, temperature=0)
    assert batch.lengths.max() < 20 and not steps


def test_replicas_draw_along_their_share_of_the_drafts():
    one = Sampler([tiny("qwen2")], **OPTIONS)
    two = Sampler([copy.deepcopy(tiny("qwen2")) for _ in range(2)], **OPTIONS)
    earlier = earlier_of(generate(one))
    assert_same(generate(two, earlier), generate(one, earlier))


def test_a_draft_over_broken_weights_ends_the_rollout():
    model, how = copy.deepcopy(tiny("gpt2")), dict(prompts=[[5, 6]], group_size=1)
    sampler, places = Sampler([model], end_ids=[999], pad_id=0, max_new_tokens=2), model.transformer.wpe.weight.data
    plain, good = generate(sampler, **how), places.clone()
    earlier = [sorted(array("i", ids.tolist()) for ids in plain.completions)]
    places[2] = torch.nan  # of the only token that the draft reads
    with pytest.raises(FloatingPointError, match="not finite"):
        generate(sampler, earlier, **how)
    places.copy_(good)
    assert_not_changed_by_drafts(sampler, earlier, **how)


@pytest.mark.parametrize(("kind", "ignored"), [("qwen2", False), ("lfm2", True)])
def test_where_drafts_are_not_served_a_line_says_so(capsys, in_single, kind, ignored):  # noqa: F811
    model = built(kind) if ignored else tiny_model(kind)
    policy = SimpleNamespace(
        samplers=[model], model=model, tokenizer=build_tokenizer(), wrapped=[None], home=model.device,
        refresh_copies=lambda: None,
    )  # fmt: skip
    sampling = dict(max_new_tokens=6, min_new_tokens=0, temperature=0, top_p=1.0, top_k=0, min_p=0.0, stops=())
    cfg = SimpleNamespace(**sampling, drafts=True, rollout_batch=0, compile=False, group_size=2, batch_size=2, seed=0)
    sampler = loop.Sampler(cfg, policy)
    assert ("drafts are ignored: only the decode engine" in capsys.readouterr().out) == ignored
    examples = [Example(row, "", ids, None, {}) for row, ids in enumerate(PROMPTS[:2])]
    first, second = sampler.rollout(examples, 1), sampler.rollout(examples[::-1], 2)
    assert torch.equal(first.completion_ids, second.completion_ids.view(2, 2, -1).flip(0).flatten(0, 1))
    if ignored:
        assert first.drafted is second.drafted is None
    else:
        assert not first.drafted.any() and torch.equal(second.drafted, second.lengths - 1)


def test_prompts_beyond_a_window_take_the_place_of_others_that_had_drafts(in_single):  # noqa: F811
    sampler = Sampler([tiny_model("mistral", sliding_window=20)], end_ids=[], pad_id=0, max_new_tokens=6)
    assert sampler.takes_drafts
    batch = generate(sampler, [[], []], prompts=[[5], [6]], group_size=2)
    other = generate(sampler, [[]], prompts=[[7] * 18], group_size=2)  # sampled by transformers, without drafts
    assert batch.put(torch.tensor([0, 1]), other).drafted.tolist() == [0] * 4


def test_the_distribution_is_the_policys_whatever_the_drafts(in_single):  # noqa: F811
    # all completions of up to three tokens, of 10; the drafts are another policy's
    small = dict(vocab_size=10, num_hidden_layers=1, eos_token_id=3, initializer_range=0.5)
    policy = tiny_model("qwen2", **small)
    drafter = copy.deepcopy(policy)
    drafter.lm_head.weight.data += 0.3 * torch.randn(drafter.lm_head.weight.shape)
    options = dict(end_ids=[3], pad_id=0, max_new_tokens=3)
    num_samples, prompt = 8192, [5, 1, 6]
    earlier = Earlier()
    drawn = Sampler([drafter], **options).generate([prompt], group_size=64, temperature=1.0, seed=1)
    earlier.put([0], drawn.completions)
    batch = Sampler([policy], **options).generate(
        [prompt], group_size=num_samples, temperature=1.0, seed=2, earlier=earlier.of([0])
    )
    assert 0.05 < batch.drafted.sum() / batch.lengths.sum() < 0.95
    counts = collections.Counter(map(tuple, completions(batch)))
    with torch.no_grad():
        every = torch.tensor([[*prompt, *ids] for ids in itertools.product(range(10), repeat=3)])
        logps = policy(input_ids=every).logits[:, 2:-1].double().log_softmax(-1)
        logps = logps.gather(-1, every[:, 3:, None]).squeeze(-1)
    expected = {}
    for ids, row in zip(every[:, 3:].tolist(), logps.tolist(), strict=True):
        n = ids.index(3) + 1 if 3 in ids else 3
        expected[tuple(ids[:n])] = num_samples * math.exp(sum(row[:n]))
    assert sum(expected.values()) == pytest.approx(num_samples)
    frequent = [ids for ids, mean in expected.items() if mean >= 5]
    pairs = [(counts[ids], expected[ids]) for ids in frequent]
    pairs.append((num_samples - sum(count for count, _ in pairs), num_samples - sum(mean for _, mean in pairs)))
    statistic, freedom = sum((count - mean) ** 2 / mean for count, mean in pairs), len(pairs) - 1
    # Laurent and Massart 2000, Lemma 1: a chi-square variable is above this with a probability below e^-15
    assert freedom > 20 and statistic < freedom + 2 * math.sqrt(15 * freedom) + 2 * 15


def test_a_continuation_begins_with_the_text_and_is_the_common_one():
    earlier = sorted(array("i", ids) for ids in ([1, 2, 3], [1, 2, 4, 5], [1, 2, 4, 6], [1, 2], [7, 1], [1, 3]))
    for text, expected in (([1, 2], [1, 2, 4, 5]), ([1, 2, 4], [1, 2, 4, 6]), ([7], [7, 1]), ([1, 2, 3], None),
                           ([7, 1], None), ([8], None), ([0], None), ([1, 2, 4, 5, 6], None)):  # fmt: skip
        found = continuation(earlier, array("i", text))
        assert (found and found.tolist()) == expected
    assert continuation([], array("i", [1])) is None


def test_the_newest_completions_are_kept_up_to_a_number_of_tokens():
    earlier = Earlier(most_tokens=10)
    earlier.put(["a", "b"], [torch.tensor(ids) for ids in ([2, 1], [1], [4, 4, 4], [3])])
    found = [[ids.tolist() for ids in group] for group in earlier.of(["b", "c", "a"])]
    assert found == [[[3], [4, 4, 4]], [], [[1], [2, 1]]] and earlier.num_tokens == 7
    earlier.put(["a"], [torch.tensor([5] * 3)])
    assert earlier.of(["a"]) == [[array("i", [5] * 3)]] and earlier.num_tokens == 7
    earlier.put(["c"], [torch.tensor([6] * 4)])  # b is the oldest
    assert earlier.of(["a", "b", "c"]) == [[array("i", [5] * 3)], [], [array("i", [6] * 4)]] and earlier.num_tokens == 7
    earlier.put(["d"], [torch.tensor([6] * 11)])
    assert earlier.of(["a", "c", "d"]) == [[], [], []] and earlier.num_tokens == 0


def test_a_run_takes_drafts_from_its_second_pass_on_and_samples_the_same(launcher, tmp_path, sums_file):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(sums_file.read_text(encoding="utf-8").splitlines(keepends=True)[:4]), encoding="utf-8")
    how = dict(train_data=data, eval_every=0, sample_every=1, temperature=0.25)  # four rows: every step is a pass
    plain = launcher.run("gspo", tmp_path / "plain", steps=4, **how).succeeded()
    for steps in (2, 4):  # a resumed run has none
        drafted = launcher.run("gspo", tmp_path / "drafted", steps=steps, drafts=True, **how).succeeded()
    first, second, third, fourth = (line["draft_accepted"] for line in drafted.steps)
    assert first == third == 0 and 0 < second < 1 and 0 < fourth < 1
    assert [sample["completion"] for sample in drafted.samples] == [sample["completion"] for sample in plain.samples]
    assert not any("draft_accepted" in line for line in plain.steps)
