"""Tests of common/generation/rollout.py: what is sampled, from which distribution, and how it reaches the update."""

import contextlib
import copy
import dataclasses
import itertools
import math
import re

import pytest
import torch
from bounds import assert_rounded, rounding
from conftest import build_model, tiny_model
from test_sampling import reference

from common.generation.batches import RolloutBatch, TeacherOutput, assemble
from common.generation.engine import Engine
from common.generation.rollout import Sampler
from common.generation.stopping import Stopping
from common.maths import losses
from common.maths.sampling import Sampling, uniforms
from common.model import attention, head, logprobs, models

FAMILIES = ["qwen2", pytest.param("gpt2", marks=pytest.mark.families)]
# who decodes: the engine, or, for models that it does not serve, loops over the cache of transformers
EACH_WAY = pytest.mark.parametrize(
    ("family", "engine"), [("qwen2", True), ("gpt2", False), pytest.param("gpt2", True, marks=pytest.mark.families)]
)
PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15, 16, 17], [20]]
NEVER = [999]  # an end token no model here can sample
OPTIONS = dict(end_ids=NEVER, pad_id=0, max_new_tokens=12)
ON_HOST = {"prompt_lengths", "lengths", "truncated", "trained", "rows", "group"}
CPU, META = torch.device("cpu"), torch.device("meta")
# What still rounds to fp32: five norms over 32 numbers each, and the logarithm of the sum. Log-probabilities reach -16
NORMS = dict(terms=5 * (32 + 8), magnitude=16.0, dtype=torch.float32)


@contextlib.contextmanager
def fp64():
    """Models and their heads in fp64: close to a border of the distribution, rounding to fp32 changes the token."""
    before = torch.get_default_dtype()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "mm", lambda a, b: a.double() @ b.double())
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


@pytest.fixture(scope="module", autouse=True)
def in_double():
    with fp64():
        yield


@pytest.fixture(scope="module")
def policies():
    torch.set_num_threads(1)
    return {family: build_model(family).eval() for family in ("qwen2", "gpt2")}


def make_sampler(replicas, engine=True, **options) -> Sampler:
    """A sampler for one model or a list of replicas."""
    replicas = replicas if isinstance(replicas, list) else [replicas]
    sampler = Sampler(replicas, **{**OPTIONS, **options})
    assert len(sampler.engines) == len(replicas) and all(isinstance(one, Engine) for one in sampler.engines)
    if not engine:
        sampler.engines = [None] * len(replicas)
    return sampler


def rollout(replicas, prompts=PROMPTS, engine=True, group_size=1, temperature=1.0, seed=0, step=0, prompt_numbers=None,
            **options) -> RolloutBatch:  # fmt: skip
    """What a new sampler gives."""
    return make_sampler(replicas, engine, **options).generate(
        prompts, group_size=group_size, temperature=temperature, seed=seed, step=step, prompt_numbers=prompt_numbers
    )


def completions(batch) -> list[list[int]]:
    return [ids.tolist() for ids in batch.completions]


def prompts_of(batch) -> list[list[int]]:
    return [ids.tolist() for ids in batch.prompts]


def assert_equal(batch, other):
    """In every field, bit for bit: for the same operations in the same order."""
    tensors, others = batch.state_dict(), other.state_dict()
    differ = [name for name, tensor in tensors.items() if not torch.equal(tensor, others[name])]
    assert tensors.keys() == others.keys() and not differ


def assert_same(batch, other):
    """Equal but for the rounding of log-probabilities."""
    assert_rounded(batch.rollout_logps, other.rollout_logps, **NORMS)
    assert_equal(dataclasses.replace(batch, rollout_logps=other.rollout_logps), other)


def calls(model) -> list[dict]:
    """The arguments of every call of the decoder from now on."""
    seen = []
    model.get_decoder().register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True)
    return seen


def fail_at(model, number) -> list[bool]:
    """From now on the decoder fails in its call of this number; its mode in every call."""
    seen = []

    def look(module, args):
        seen.append(module.training)
        if len(seen) == number:
            raise RuntimeError("out of memory")

    model.get_decoder().register_forward_pre_hook(look)
    return seen


def move(model):
    """Changes all weights where they are."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))


def full_logits(model, prompt, completion) -> torch.Tensor:
    """What the model itself computes for every token of a completion."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]


def lines(capsys) -> list[str]:
    """What was printed, on either stream."""
    captured = capsys.readouterr()
    return [line for line in (captured.out + captured.err).splitlines() if line]


def make_batch(lengths, group_size=1, prompt_lengths=None) -> RolloutBatch:
    """A rollout with these completion lengths; the ids tell the row: 100 * row + position."""
    B, C = len(lengths), max(lengths)
    prompt_lengths = prompt_lengths or [1 + i // group_size for i in range(B)]
    Q = max(prompt_lengths)
    places = 100 * torch.arange(B)[:, None]
    mask = torch.arange(C) < torch.tensor(lengths)[:, None]
    return RolloutBatch(
        prompt_ids=(places + torch.arange(Q)) * (torch.arange(Q) >= Q - torch.tensor(prompt_lengths)[:, None]),
        completion_ids=(places + torch.arange(C)) * mask, completion_mask=mask,
        rollout_logps=-0.5 * (places + torch.arange(C)) * mask, prompt_lengths=torch.tensor(prompt_lengths),
        lengths=torch.tensor(lengths), truncated=torch.zeros(B, dtype=torch.bool),
        trained=torch.ones(B, dtype=torch.bool), rows=torch.arange(B), group=torch.arange(B) // group_size,
    )  # fmt: skip


UNSERVED = {
    "falcon": ({}, "attention interface of transformers"), "mistral": (dict(sliding_window=8), "windows of 8 tokens"),
    "diffllama": ({}, "attend more than once per token"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["falcon", "mistral", "diffllama"])
def test_models_the_engine_does_not_serve_are_sampled_over_the_cache_of_transformers(capsys, kind):
    options, reason = UNSERVED[kind]
    plain, ends = tiny_model(kind, **options), [3, 40, 41, 42]
    sampler = Sampler([copy.deepcopy(plain)], end_ids=ends, pad_id=0, max_new_tokens=12)
    assert sampler.engines == [None]
    (said,) = lines(capsys)
    assert "over the cache of transformers" in said and reason in said
    greedy = sampler.generate(PROMPTS, group_size=1, temperature=0)
    for prompt, completion in zip(PROMPTS, completions(greedy), strict=True):
        theirs = plain.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12, eos_token_id=ends)
        assert completion == theirs[0, len(prompt) :].tolist()
    sampled = sampler.generate(PROMPTS, group_size=4, temperature=1.0)
    assert len(set(sampled.lengths.tolist())) > 1
    for i, completion in enumerate(completions(sampled)):
        expected = full_logits(plain, PROMPTS[i // 4], completion).log_softmax(-1)[range(len(completion)), completion]
        assert_rounded(sampled.rollout_logps[i, : len(completion)], expected, **NORMS)
    assert lines(capsys) == []  # it is said once


@pytest.mark.parametrize(("window", "served"), [(21, (True, True)), (20, (True, False)), (12, (False, False))])
def test_windows_shorter_than_a_sequence_are_left_to_transformers(capsys, window, served):
    plain = tiny_model("mistral", sliding_window=window)
    model = copy.deepcopy(plain)
    sampler, seen = Sampler([model], **OPTIONS), calls(model)
    lines(capsys)
    for prompts, engine in zip((PROMPTS[::2], PROMPTS, PROMPTS), (*served, served[1]), strict=True):  # of 4 tokens, 9
        seen.clear()
        batch = sampler.generate(prompts, group_size=1, temperature=0)
        assert all(("rl" in call) == engine for call in seen)
        for prompt, completion in zip(prompts, completions(batch), strict=True):
            assert full_logits(plain, prompt, completion).argmax(-1).tolist() == completion
    said = [line for line in lines(capsys) if "of up to 21 tokens" in line and f"sliding windows of {window}" in line]
    assert len(said) == (served == (True, False))  # once, when it begins


@EACH_WAY
def test_an_end_token_cuts_a_completion_and_changes_nothing_before_it(policies, family, engine):
    which = dict(engine=engine, group_size=16, seed=4, step=2)
    free = rollout(policies[family], **which)
    values, counts = free.completion_ids.unique(return_counts=True)
    end_ids = values[counts.argsort(descending=True)[:2]].tolist()  # frequent ones: rows end at many different times
    batch = rollout(policies[family], **which, end_ids=end_ids)
    for long, short, mask, truncated in zip(free.completion_ids.tolist(), completions(batch), batch.completion_mask,
                                            batch.truncated.tolist(), strict=True):  # fmt: skip
        ends = [t for t, token in enumerate(long) if token in end_ids]
        assert short == (long[: ends[0] + 1] if ends else long) and truncated == (not ends)
        assert mask.sum() == len(short) and mask[: len(short)].all()
    assert len(set(batch.lengths.tolist())) > 4 and batch.completion_ids.shape[1] == batch.lengths.max()
    assert not any(x[~batch.completion_mask].any() for x in (batch.completion_ids, batch.rollout_logps))
    expected = torch.where(batch.completion_mask, free.rollout_logps[:, : batch.lengths.max()], 0.0)
    assert_rounded(batch.rollout_logps, expected, **NORMS)


@EACH_WAY
@pytest.mark.parametrize(("tokens", "end_ids", "length"), [(9, range(64), 1), (1, NEVER, 1), (5, NEVER, 5)], ids=str)
def test_all_sequences_may_end_at_the_first_token_or_none(policies, family, engine, tokens, end_ids, length):
    model = copy.deepcopy(policies[family])
    sampler = make_sampler(model, engine, max_new_tokens=tokens, end_ids=end_ids)
    seen = calls(model)
    batch = sampler.generate(PROMPTS, group_size=2, temperature=1.0)
    assert batch.lengths.tolist() == [length] * 6 and batch.truncated.tolist() == [end_ids is NEVER] * 6
    assert batch.completion_ids.shape == (6, length) and batch.completion_mask.all()
    assert len(seen) == length  # nothing is computed after the last token


@EACH_WAY
@pytest.mark.parametrize("options", [
    dict(temperature=0.8, top_k=20, top_p=0.9, min_p=0.05, suppressed_ids=[30, 31], min_new_tokens=2),
    dict(temperature=0, suppressed_ids=[7, 30, 31], min_new_tokens=3), dict(temperature=0.6),
    *(pytest.param(options, marks=pytest.mark.families) for options in (dict(top_p=0.6), dict(min_new_tokens=4))),
], ids=str)  # fmt: skip
def test_log_probs_are_those_of_the_distribution_sampled_from(policies, family, engine, options):
    model, end_ids = policies[family], [3, *range(20, 28)]
    batch = rollout(model, engine=engine, group_size=3, seed=5, step=7, end_ids=end_ids, **options)
    how = Sampling(**{name: value for name, value in options.items() if name != "suppressed_ids"})
    which, close = (end_ids, options.get("suppressed_ids", [])), rounding(**NORMS)
    random_BT = uniforms(5, 7, range(3), 3, 12).tolist()
    for i, completion in enumerate(completions(batch)):
        logps = []
        for t, row in enumerate(full_logits(model, PROMPTS[i // 3], completion).tolist()):
            probabilities = reference(row, t, *which, how)
            probability = probabilities[completion[t]]
            assert probability > 0  # no token that cannot be drawn
            if how.temperature == 0:  # the log-probability is that among all tokens allowed
                probability = reference(row, t, *which, dataclasses.replace(how, temperature=1.0))[completion[t]]
            else:  # the token that its own random number stands for
                before = sum(probabilities[: completion[t]])
                assert before - close <= random_BT[i][t] <= before + probability + close
            logps.append(math.log(probability))
        assert_rounded(batch.rollout_logps[i, : len(completion)], logps, **NORMS)
    assert completions(batch) != completions(rollout(model, engine=engine, group_size=3, end_ids=end_ids))


@EACH_WAY
def test_settings_in_the_generation_config_are_ignored(policies, family, engine):
    model = copy.deepcopy(policies[family])
    model.generation_config.update(do_sample=True, top_k=1, top_p=0.1, min_p=0.5, temperature=0.01,
                                   repetition_penalty=9.0, max_new_tokens=2, eos_token_id=list(range(64)))  # fmt: skip
    assert_equal(rollout(model, engine=engine, group_size=4), rollout(policies[family], engine=engine, group_size=4))


def test_completions_of_a_group_or_of_a_prompt_that_comes_twice_differ(policies):
    before = torch.get_rng_state()
    batch = rollout(policies["qwen2"], PROMPTS[:1], group_size=16)
    assert len({tuple(row) for row in completions(batch)}) == 16
    assert torch.equal(torch.get_rng_state(), before)
    # in one process, and in two processes that each hold one of them
    batch = rollout(policies["qwen2"], [PROMPTS[0]] * 2, group_size=4)
    by_rank = [rollout(policies["qwen2"], [PROMPTS[0]], group_size=4, prompt_numbers=[rank]) for rank in range(2)]
    assert not torch.equal(by_rank[0].completion_ids, by_rank[1].completion_ids)
    assert torch.equal(batch.completion_ids, torch.cat([part.completion_ids for part in by_rank]))


@EACH_WAY
def test_prompts_together_or_one_by_one_give_the_same_tokens(policies, family, engine):
    # and groups of any size
    which = dict(engine=engine, end_ids=[3, 30, 31])
    batch = rollout(policies[family], group_size=4, **which)
    together = completions(batch)
    assert prompts_of(batch) == [PROMPTS[i // 4] for i in range(12)]  # completions of a prompt stand side by side
    assert not batch.completion_ids.requires_grad and not batch.rollout_logps.requires_grad
    for number, group_size in ((2, 1), (0, 4), (1, 64)):
        apart = rollout(policies[family], [PROMPTS[number]], group_size=group_size, prompt_numbers=[number], **which)
        n = min(4, group_size)
        assert len(apart) == group_size
        assert completions(apart)[:n] == together[4 * number : 4 * number + n]


@pytest.mark.parametrize("rollout_batch", [1, 7, 100])
def test_the_fallback_computes_no_more_rows_than_allowed_and_few_that_have_ended(policies, rollout_batch):
    model, prompts = copy.deepcopy(policies["qwen2"]), [[5, 6, 7], [8], [9, 10], [11, 12, 13, 14]]
    which = dict(end_ids=list(range(30)), max_new_tokens=6, min_new_tokens=2)
    sampler = make_sampler(model, False, rollout_batch=rollout_batch, **which)
    seen = calls(model)
    batch = sampler.generate(prompts, group_size=3, temperature=1.0)
    sizes = [len(call["input_ids"]) for call in seen]
    assert max(sizes) == min(12, max(3, rollout_batch // 3 * 3))
    if rollout_batch == 100:  # one pass over the prompts, then all rows, then ever fewer
        assert sizes[1:] == sorted(sizes[1:], reverse=True) and sizes[-1] <= 6 and batch.lengths.max() > 3
    assert_same(batch, rollout(model, prompts, False, group_size=3, **which))


@pytest.mark.parametrize(("num_prompts", "num_replicas", "engine"), [(9, 4, True), (3, 4, True), (5, 2, False)])
def test_replicas_give_the_same_tokens_as_one_model(policies, num_prompts, num_replicas, engine):
    prompts = [PROMPTS[i % 3] + [i + 25] for i in range(num_prompts)]
    replicas = models.replicate(policies["qwen2"], (CPU,) * num_replicas)
    which = dict(engine=engine, group_size=2, seed=1, end_ids=[3, 30, 31], max_new_tokens=6)
    assert_same(rollout(replicas, prompts, **which), rollout(replicas[:1], prompts, **which))


@pytest.mark.parametrize("engine", [True, False])
def test_every_replica_takes_part(policies, capsys, engine):
    model, seen = copy.deepcopy(policies["qwen2"]), []
    replicas = models.replicate(model, (CPU,) * 2)
    sampler = make_sampler(replicas, engine, max_new_tokens=3)
    (said,) = lines(capsys)  # once for all
    assert "static cache (cpu, float64" in said
    for i, replica in enumerate(replicas):
        replica.get_decoder().register_forward_pre_hook(
            lambda module, args, kwargs, i=i: seen.append((i, tuple(kwargs["input_ids"].shape))), with_kwargs=True
        )
    before = sampler.generate(PROMPTS, group_size=2, temperature=1.0)
    # the longest prompt, and the two others; then, in turn, a token for each of their completions
    assert [call for call in seen if call[1][1] == 1 and call[1][0] > 1] == [(0, (2, 1)), (1, (4, 1))] * 2
    assert len(seen) == 6
    move(model)
    models.refresh(replicas)
    after = sampler.generate(PROMPTS, group_size=2, temperature=1.0)
    assert completions(after) == completions(rollout(model, group_size=2, max_new_tokens=3)) != completions(before)


@EACH_WAY
def test_training_and_evaluation_share_a_sampler(policies, family, engine):
    model = copy.deepcopy(policies[family])
    sampler = make_sampler(model, engine, end_ids=[3, 30, 31])
    for _ in range(2):
        for prompts, which in ((PROMPTS, dict(group_size=4, temperature=0.8)),
                               ([list(range(1, 31)), [7] * 25], dict(group_size=1, temperature=0))):  # fmt: skip
            batch = sampler.generate(prompts, **which)
            kept = copy.deepcopy(batch)
            assert_same(batch, rollout(model, prompts, engine, **which, end_ids=[3, 30, 31]))
            sampler.generate(PROMPTS[::-1], group_size=2, temperature=1.0, seed=9)
            assert_equal(batch, kept)  # the next rollout leaves it as it is
        for one in filter(None, sampler.engines):
            one.release()
        move(model)  # new weights, where the old ones were
        model.lm_head.weight.data = 0.9 * model.lm_head.weight.data  # and elsewhere, as after loading


def flags(model):
    modules = list(model.modules())
    return {
        "modes": [module.training for module in modules], "attributes": [sorted(vars(module)) for module in modules],
        "config": model.config.to_dict(), "generation config": model.generation_config.to_dict(),
        "checkpointing": [getattr(module, "gradient_checkpointing", None) for module in modules],
        "gradients": [p.requires_grad for p in model.parameters()], "attention": model.config._attn_implementation,
    }  # fmt: skip


def traces(model) -> list[str]:
    """What the engine puts on modules while it decodes."""
    return [name for module in model.modules() for name in vars(module) if name.startswith("rl_")]


@pytest.mark.parametrize(("raises", "training"), [(0, True), (1, True), (3, True), (3, False)])
@EACH_WAY
def test_mode_and_settings_come_back_also_after_an_error(policies, family, engine, raises, training):
    replicas, attached = [copy.deepcopy(policies[family]) for _ in range(2)], []  # GPT-2 with its dropout of 0.1
    for model in replicas:  # renamed in transformers 5.24
        checkpoint = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        checkpoint({"use_reentrant": False})
        model.train(training)
    sampler, before = make_sampler(replicas, engine), flags(replicas[1])
    shapes = calls(replicas[1])
    replicas[1].get_decoder().register_forward_pre_hook(lambda *args: attached.extend(traces(replicas[1])))
    modes = fail_at(replicas[1], raises)
    with pytest.raises(RuntimeError, match="out of memory") if raises else contextlib.nullcontext() as caught:
        batch = sampler.generate(PROMPTS, group_size=2, temperature=1.0)
    # also while the error is handled, when a script may save its policy
    assert [flags(model) for model in replicas] == [before] * 2 and before["attention"] == attention.NAME
    assert not traces(replicas[0]) and not traces(replicas[1]) and bool(attached) == engine
    assert modes and not any(modes)  # no dropout while sampling
    del caught
    if not raises:  # the cache is in use all the same: each prompt is read once, then one token at a time
        assert_same(batch, rollout(policies[family], engine=engine, group_size=2))
        expected = [(1, 5) if engine else (2, 4)] + [(4, 1)] * 11
        assert [tuple(call["input_ids"].shape) for call in shapes] == expected


@EACH_WAY
def test_ordinary_calls_of_the_model_give_what_they_gave_before(family, engine):
    plain = build_model(family).eval()
    model = copy.deepcopy(plain)
    sampler = make_sampler(model, engine)
    hook = model.get_decoder().register_forward_pre_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sampler.generate(PROMPTS, group_size=2, temperature=1.0)
    hook.remove()
    ids = torch.tensor([[0, 0, 0, 5, 6, 7], [9, 10, 11, 12, 13, 14]])
    mask = torch.tensor([[0, 0, 0, 1, 1, 1], [1] * 6])
    for _ in ("after an error", "after a rollout"):
        for kwargs in (dict(), dict(attention_mask=mask),
                       dict(attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))):  # fmt: skip
            with torch.no_grad():  # the same operations in the same order
                assert torch.equal(model(input_ids=ids, **kwargs).logits, plain(input_ids=ids, **kwargs).logits)
        sampler.generate(PROMPTS, group_size=2, temperature=1.0)
    saved = model.config.to_json_string()
    assert saved == plain.config.to_json_string() and attention.NAME not in saved


@pytest.mark.parametrize(("broken_before", "temperature"), [(True, 1.0), (False, 0), (False, 1.0)])
@EACH_WAY
def test_broken_weights_stop_the_rollout(policies, family, engine, broken_before, temperature):
    healthy, model = policies[family], copy.deepcopy(policies[family]).train()
    sampler = make_sampler([healthy, model], engine)
    with torch.no_grad():
        if family == "qwen2":
            model.model.norm.weight[3] = torch.nan
        else:
            model.transformer.wpe.weight[10] = torch.nan  # later than any prompt
    if broken_before:
        sampler = Sampler([healthy, model], **OPTIONS)
        assert (sampler.engines[1] is None) == (family == "qwen2")
    with pytest.raises(FloatingPointError, match="not finite"):
        sampler.generate(PROMPTS, group_size=2, temperature=temperature)
    assert all(module.training for module in model.modules()) and not traces(model)


def with_adapters(dtype=torch.float64):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)
    model = peft.get_peft_model(tiny_model("qwen2"), lora)
    for name, p in model.named_parameters():  # of 8 bits behind the point products and sums are exact in fp32
        p.data = ((p.data * 2**8).round() / 2**8).to(p.dtype if "lora" in name else dtype)
    return model


@pytest.mark.parametrize(("dtype", "engine"), [(torch.float64, True), (torch.bfloat16, True), (torch.bfloat16, False)])
def test_a_policy_with_adapters_samples_as_if_they_were_merged(dtype, engine):
    model, changed = with_adapters(dtype).train(), []
    merged = copy.deepcopy(model).merge_and_unload().eval()
    base = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    before, places = {name: p.clone() for name, p in base.items()}, {name: p.data_ptr() for name, p in base.items()}
    names = [name for name, _ in model.named_parameters()]

    def assert_the_base_is_back():
        """Bit for bit, and where it was."""
        assert [name for name, _ in model.named_parameters()] == names
        for name, p in model.named_parameters():
            if name in base:
                assert p is base[name] and p.data_ptr() == places[name] and torch.equal(p, before[name]), name
        assert all(module.training for module in model.modules()) and not traces(model)
        assert not any(getattr(module, "merged", False) for module in model.modules())

    sampler = make_sampler(model, engine, end_ids=[3, 40, 41])
    for temperature in (1.0, 0):
        batch = sampler.generate(PROMPTS, group_size=2, temperature=temperature)
        assert_equal(batch, rollout(merged, engine=engine, group_size=2, temperature=temperature, end_ids=[3, 40, 41]))
        assert_the_base_is_back()
    model.get_decoder().register_forward_pre_hook(
        lambda *args: changed.append(sum(not torch.equal(p, before[name]) for name, p in base.items()))
    )
    fail_at(model, 3)
    with pytest.raises(RuntimeError, match="out of memory"):
        sampler.generate(PROMPTS, group_size=2, temperature=1.0)
    assert changed == [6, 6, 6]  # three weights in each of two layers
    assert_the_base_is_back()


@pytest.mark.parametrize(("ids", "length", "truncated", "text"), [
    ([2, 4, 17, 3, 0, 0], 4, False, "<im_start> user 2"),  # end and padding go, other special tokens stay
    ([17, 18, 6, 12, 0, 0], 4, False, "2 3 \n"),  # another end token than the tokenizer's
    ([17, 18, 0, 0, 0, 0], 3, False, "2 3"),  # the pad token is among the end tokens
    ([17, 3, 18, 19, 20, 21], 6, True, "2 <im_end> 3 4 5 6"),  # cut off by the limit: the last token is no end token
    ([17, 0, 18, 3, 0, 0], 4, False, "2 3"),  # a sampled pad token
    ([3, 0, 0, 0, 0, 0], 1, False, ""),
])  # fmt: skip
def test_texts(tokenizer, ids, length, truncated, text):
    batch = dataclasses.replace(make_batch([6]), completion_ids=torch.tensor([ids]), lengths=torch.tensor([length]),
                                truncated=torch.tensor([truncated]))  # fmt: skip
    assert batch.texts(tokenizer) == [text] and batch.tokens[2].tolist() == [ids]  # text is not their inverse
    batch.drop(torch.tensor([True]))
    assert batch.texts(tokenizer) == [text]  # whole, also out of the loss


def test_prompts_and_completions_are_put_together():
    tokens = torch.tensor([[30, 31, 3, -1, -1], [32, -1, -1, -1, -1], [33, 34, 35, 0, -1], [9, -1, -1, -1, -1]])
    logps = -torch.arange(20.0).view(4, 5)
    batch = assemble([[5, 6, 7], [8]], 2, tokens, logps, 9, [3, 9])  # some chat models end with their pad token
    assert batch.prompt_ids.tolist() == [[5, 6, 7], [5, 6, 7], [9, 9, 8], [9, 9, 8]]
    assert prompts_of(batch) == [[5, 6, 7], [5, 6, 7], [8], [8]]
    # no wider than the longest, whatever the limit was
    assert batch.completion_ids.tolist() == [[30, 31, 3, 9], [32, 9, 9, 9], [33, 34, 35, 0], [9, 9, 9, 9]]
    assert batch.completion_mask.int().tolist() == [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]
    assert torch.equal(batch.rollout_logps, logps[:, :4])
    assert completions(batch) == [[30, 31, 3], [32], [33, 34, 35, 0], [9]]
    assert batch.lengths.tolist() == [3, 1, 4, 1] and batch.prompt_lengths.tolist() == [3, 3, 1, 1]
    assert batch.truncated.tolist() == [False, True, True, False]
    assert batch.trained.all() and batch.rows.tolist() == [0, 1, 2, 3] and len(batch) == 4
    assert batch.group.tolist() == [0, 0, 1, 1] and batch.size == 4 + 9  # a prompt counts once
    assert {x.dtype for x in (batch.completion_mask, batch.truncated, batch.trained)} == {torch.bool}
    integers = batch.completion_ids, batch.prompt_ids, batch.lengths, batch.prompt_lengths, batch.rows
    assert {x.dtype for x in integers} == {torch.int64}
    assert batch.tokens[3] is batch.lengths and batch.teacher is None


@pytest.mark.parametrize("packed", [True, False])
def test_what_moves_to_a_gpu_is_cut_without_waiting_for_it(packed):
    # tensors without data stand for those on a GPU: to look at one would be an error
    batch = make_batch([3, 1, 5, 2, 4], prompt_lengths=[2, 4, 1, 3, 3])
    batch.teacher, batch.advantages = TeacherOutput(states=torch.ones(5, 5, 7)), torch.arange(5.0)
    moved = batch.to(META)
    for field in dataclasses.fields(RolloutBatch):
        own, other = getattr(batch, field.name), getattr(moved, field.name)
        if field.name == "teacher":
            own, other = own.states, other.states
        if own is None or field.name in ON_HOST:
            assert other is own
        else:
            assert other.device.type == "meta" and other.shape == own.shape and other.dtype == own.dtype
    assert_equal(batch.to(CPU), batch)
    moved.drop(torch.tensor([False, True, False, False, True]))
    assert batch.num_trained == 5 and moved.num_trained == 3
    for micro in moved.minibatches(2, 9, packed)[0]:
        assert micro.completion_ids.shape == micro.completion_mask.shape == (len(micro), micro.lengths.max())
        assert micro.prompt_ids.shape == (len(micro), micro.prompt_lengths.max())
        assert micro.advantages.shape == (len(micro),)
        assert micro.teacher.states.shape == (len(micro), micro.lengths.max(), 7)


def test_forward_and_backward_passes_wait_for_no_gpu(policies):
    # the host gives several GPUs their work in turn
    policy = logprobs.LogProbs(copy.deepcopy(policies["qwen2"]), 1.0, train_entropy=True).to(META)
    batch = make_batch([3, 1, 5, 2, 4], prompt_lengths=[2, 4, 1, 3, 3]).to(META)
    for micro in batch.minibatches(1, 20, True)[0]:
        logps_mC, entropy_mC = policy(*micro.tokens)
        ratio_m = losses.sequence_ratio(logps_mC, logps_mC.detach(), micro.completion_mask)
        (ratio_m.sum() + entropy_mC.sum()).backward()
        assert logps_mC.shape == micro.completion_ids.shape
    assert policy.model.model.layers[0].mlp.up_proj.weight.grad.is_meta


def test_select_keeps_rows_together_and_trims_padding():
    batch = make_batch([3, 1, 5, 2], prompt_lengths=[2, 4, 1, 3])
    batch.advantages = torch.tensor([0.0, 1.0, 2.0, 3.0])
    batch.old_logps = -(batch.completion_ids + 1.0)
    states = batch.completion_ids[..., None] + torch.tensor([0.0, 0.5])
    batch.teacher = TeacherOutput(states=states)
    batch.truncated = torch.tensor([True, False, False, False])
    batch.drop(torch.tensor([False, False, False, True]))
    part = batch.select(torch.tensor([3, 0]))
    assert part.rows.tolist() == [3, 0] and part.advantages.tolist() == [3.0, 0.0]
    assert part.prompt_ids.tolist() == [[300 + 1, 302, 303], [0, 2, 3]]  # columns 1 to 3 of 4
    assert prompts_of(part) == [[301, 302, 303], [2, 3]] and completions(part) == [[300, 301], [0, 1, 2]]
    assert part.completion_ids.tolist() == [[300, 301, 0], [0, 1, 2]]
    assert part.completion_mask.int().tolist() == [[0, 0, 0], [1, 1, 1]]  # dropped rows keep their tokens
    assert torch.equal(part.old_logps, -(part.completion_ids + 1.0))
    assert torch.equal(part.rollout_logps, -0.5 * part.completion_ids)
    assert torch.equal(part.teacher.tensors[0], part.completion_ids[..., None] + torch.tensor([0.0, 0.5]))
    assert part.lengths.tolist() == [2, 3] and part.prompt_lengths.tolist() == [3, 2] and part.ref_logps is None
    assert part.truncated.tolist() == [False, True] and part.trained.tolist() == [False, True]
    assert batch.prompt_ids.shape == (4, 4) and batch.completion_ids.shape == (4, 5)  # the whole is left as it was
    assert part.select(torch.tensor([1])).rows.tolist() == [0]  # the place in the rollout
    pair = dict(tail_logp=batch.completion_ids.float(), token_logps=batch.rollout_logps)
    batch.teacher = TeacherOutput(ids=states.int(), logps=states, **pair)
    part = batch.select(torch.tensor([1]))
    assert [x.shape for x in part.teacher.tensors] == [(1, 1, 2), (1, 1, 2), (1, 1), (1, 1)]
    assert_equal(RolloutBatch.from_state_dict(part.state_dict()), part)


def test_drop_takes_rows_out_of_the_loss_only():
    # one finished with 4 tokens, one cut off at 8: the mean over tokens divides by 4, lengths stay 4 and 8
    batch = make_batch([4, 8])
    before = copy.deepcopy(batch)
    batch.truncated = torch.tensor([False, True])
    assert (batch.num_trained, batch.num_tokens) == (2, 12)
    batch.drop(batch.truncated)
    assert batch.completion_mask.sum() == 4 and batch.trained.tolist() == [True, False]
    assert (batch.num_trained, batch.num_tokens) == (1, 4) and batch.lengths.tolist() == [4, 8]
    # what is computed stays the same, so that nothing is rounded in another way
    assert all(own is other or torch.equal(own, other) for own, other in zip(batch.tokens, before.tokens, strict=True))
    cut, uncut = (one.minibatches(1, 12, True)[0] for one in (batch, before))
    assert [micro.rows.tolist() for micro in cut] == [micro.rows.tolist() for micro in uncut]
    batch.drop(torch.tensor([True, False]))  # what was dropped stays dropped
    assert batch.num_trained == 0 and not batch.completion_mask.any()


def size_of(micro, packed) -> int:
    """Tokens in a forward pass."""
    lengths = micro.prompt_lengths + micro.lengths
    return int(lengths.sum() if packed else len(lengths) * lengths.max())


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("micro_batch_tokens", [1, 17, 30, 1000])
@pytest.mark.parametrize("num_minibatches", [1, 2, 11])
def test_minibatches_hold_every_row_once(num_minibatches, micro_batch_tokens, packed):
    lengths, prompt_lengths = [3, 1, 5, 2, 2, 9, 1, 4, 7, 3, 6], [2, 3, 1, 8, 2, 6, 5, 5, 2, 1, 4]
    batch = make_batch(lengths, prompt_lengths=prompt_lengths)
    cut = batch.minibatches(num_minibatches, micro_batch_tokens, packed)
    assert len(cut) == num_minibatches
    for k, minibatch in enumerate(cut):
        part = [row for micro in minibatch for row in micro.rows.tolist()]
        assert sorted(part) == list(range(k, 11, num_minibatches))
        total = [lengths[row] + prompt_lengths[row] for row in part]
        assert total == sorted(total, reverse=True)
        for micro in minibatch:
            rows = micro.rows.tolist()
            assert len(micro) == 1 or size_of(micro, packed) <= micro_batch_tokens
            assert micro.lengths.tolist() == [lengths[row] for row in rows]
            assert micro.prompt_lengths.tolist() == [prompt_lengths[row] for row in rows]
            # the ids tell the row, so nothing went astray
            assert torch.equal(micro.completion_ids[micro.completion_mask], torch.cat(micro.completions))
            for ids, tokens, sizes in ((micro.completion_ids, micro.completions, micro.lengths),
                                       (micro.prompt_ids, micro.prompts, micro.prompt_lengths)):  # fmt: skip
                assert (torch.cat(tokens) // 100).tolist() == micro.rows.repeat_interleave(sizes).tolist()
                assert ids.shape[1] == sizes.max()  # no column of pure padding
        for micro, following in itertools.pairwise(minibatch):  # none is smaller than it must be
            more = batch.select(torch.cat([micro.rows, following.rows[:1]]))
            assert size_of(more, packed) > micro_batch_tokens


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize("micro_batch_tokens", [1, 12, 20, 1000])
@pytest.mark.parametrize("num_minibatches", [1, 2, 3])
def test_groups_stand_together_where_a_prompt_is_computed_once(num_minibatches, micro_batch_tokens, num_replicas):
    lengths = [3, 1, 5, 2, 2, 9, 1, 4, 7, 3, 6, 5]
    batch = make_batch(lengths, group_size=4, prompt_lengths=[6] * 4 + [1] * 4 + [3] * 4)
    devices = (CPU,) * num_replicas if num_replicas > 1 else ()
    cut = batch.minibatches(num_minibatches, micro_batch_tokens, True, devices=devices)
    for k, minibatch in enumerate(cut):
        rows = [row for micro in minibatch for row in micro.rows.tolist()]
        assert sorted(rows) == list(range(k, 12, num_minibatches))  # as without groups
        for micro in minibatch:
            groups = [group for group, _ in itertools.groupby(micro.group.tolist())]
            assert len(groups) == len(set(groups)) and micro.group.tolist() == [row // 4 for row in micro.rows.tolist()]
            assert micro.size == sum(6 - 5 * (g == 1) - 3 * (g == 2) for g in groups) + sum(micro.lengths.tolist())
            assert len(micro) == 1 or micro.size <= micro_batch_tokens
        for number in range(num_replicas):
            own = [micro for micro in minibatch if micro.replica in (number, None)]
            assert own
            for micro, following in itertools.pairwise(own):  # none is smaller than it must be
                assert batch.select(torch.cat([micro.rows, following.rows[:1]])).size > micro_batch_tokens
    if micro_batch_tokens == 1000 and num_replicas == 1:
        assert [micro.size for (micro,) in cut] == [
            10 + sum(lengths[k::num_minibatches]) for k in range(num_minibatches)
        ]


def test_rows_that_take_the_place_of_others_are_groups_of_their_own():
    batch, other = make_batch([3, 1, 5, 2], group_size=2), make_batch([2, 4], group_size=2)
    assert batch.put(torch.tensor([2, 3]), other).group.tolist() == [0, 0, 2, 2]
    saved = batch.state_dict()
    assert RolloutBatch.from_state_dict(saved).group.tolist() == [0, 0, 1, 1]
    del saved["group"]  # a checkpoint of an earlier version
    assert RolloutBatch.from_state_dict(saved).group.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(("rows", "expected"), [(8, [[0, 1, 2, 3], [4, 5, 6, 7]]), (5, [[0, 1, 2], [3, 4]])])
def test_minibatches_that_are_blocks_hold_neighbouring_rows(rows, expected):
    minibatches = make_batch([1 + (3 * i) % 7 for i in range(rows)]).minibatches(2, 12, True, in_turn=False)
    assert [sorted(row for micro in minibatch for row in micro.rows.tolist()) for minibatch in minibatches] == expected


@pytest.mark.parametrize(("lengths", "packed", "expected"), [
    ([9, 1, 8, 2, 9, 1, 8, 2], False, [[9, 9], [8, 8], [2, 2, 1, 1]]),  # 2 * 10, 4 * 3; with one more row 3 * 9
    ([9, 1, 1, 1, 1, 1], True, [[9, 1, 1, 1, 1, 1]]),  # 10 tokens, and 5 times 2
    ([9, 1, 1, 1, 1, 1], False, [[9, 1], [1, 1, 1, 1]]),  # padding counts where it is computed
])  # fmt: skip
def test_sequences_of_similar_length_share_a_micro_batch(lengths, packed, expected):
    (minibatch,) = make_batch(lengths, prompt_lengths=[1] * len(lengths)).minibatches(1, 20, packed)
    assert [micro.lengths.tolist() for micro in minibatch] == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_does_not_depend_on_micro_batches_or_packing(policies, family):
    model = copy.deepcopy(policies[family])
    batch = rollout(model, PROMPTS[:2], group_size=4, end_ids=[3, 30, 31, 32, 33, 34, 35])
    advantages = torch.tensor([1.0, -2.0, 0.5, 3.0, -0.7, 1.3, -1.1, 0.2])  # all different
    # row by row, without any cutting
    for i, completion in enumerate(completions(batch)):
        ids = torch.tensor([PROMPTS[i // 4] + completion])
        logps = model(input_ids=ids).logits[0].log_softmax(-1)[-len(completion) - 1 : -1]
        gap = -0.05 * torch.sin(i + torch.arange(len(completion)))
        weight = gap.mean().exp() * advantages[i] / (8 * len(completion))  # s_i A_i / (G |y_i|), over the batch
        (-weight * logps[range(len(completion)), completion].sum()).backward()
    by_hand = {name: p.grad.clone() for name, p in model.named_parameters()}
    size = max(g.abs().max() for g in by_hand.values()).item()
    assert len(set(batch.lengths.tolist())) > 2 and size > 0.1
    policy, tokens = logprobs.LogProbs(model, 1.0), int(batch.lengths.sum())
    assert policy.packed
    for num_minibatches, micro_batch_tokens, packed in ((1, 1000, True), (2, 30, False), (2, 1, True)):
        policy.packed = packed
        model.zero_grad()
        for micro in itertools.chain(*batch.minibatches(num_minibatches, micro_batch_tokens, packed)):
            logps, _ = policy(*micro.tokens)  # what is known of a sequence is met by `rows`
            old_logps = logps.detach() + 0.05 * torch.sin(micro.rows[:, None] + torch.arange(logps.shape[1]))
            ratio = losses.sequence_ratio(logps, old_logps, micro.completion_mask)
            (-losses.clipped_surrogate(ratio, advantages[micro.rows], 0.5, 0.5).sum() / len(batch)).backward()
        for name, p in model.named_parameters():
            # fp32 is what passes through the head: sums over the vocabulary, 32 numbers, all tokens
            assert_rounded(p.grad, by_hand[name], terms=64 + 32 + tokens, magnitude=size, dtype=torch.float32)


@EACH_WAY
def test_log_probs_of_a_rollout_belong_to_the_tokens_sampled(policies, family, engine):
    # sampling and training use the same temperature and positions
    batch = rollout(policies[family], engine=engine, group_size=4, temperature=0.7, end_ids=[3, 30, 31])
    logps, _ = logprobs.LogProbs(policies[family], 0.7)(*batch.tokens)
    assert_rounded(logps, batch.rollout_logps, **NORMS)


@EACH_WAY
def test_sequences_longer_than_the_positions_of_the_policy_are_refused_or_warned_of(policies, capsys, family, engine):
    model = policies[family]
    places, sampler = model.config.max_position_embeddings, make_sampler(model, engine)
    prompts = [[5] * (places - 12), [6, 7]]
    assert sampler.generate(prompts, group_size=1, temperature=0).lengths.tolist() == [12, 12]
    assert "positions" not in capsys.readouterr().out
    prompts[0].append(5)
    if family == "gpt2":  # learned ones
        with pytest.raises(ValueError, match=f"up to {places + 1} tokens .* {places} positions; lower max_prompt_tok"):
            sampler.generate(prompts, group_size=1, temperature=0)
    else:
        for _ in range(2):
            sampler.generate(prompts, group_size=1, temperature=0)
        assert len(re.findall(f"warning: .* {places + 1} tokens .* made for {places}", capsys.readouterr().out)) == 1


def test_a_token_that_the_policy_does_not_have_is_refused(policies):
    # of a tokenizer with more tokens; on a GPU the embedding would end the process
    sampler = make_sampler(policies["qwen2"])
    sampler.require_fit([[5, 63]])
    for refuse in (sampler.require_fit, lambda prompts: sampler.generate(prompts, group_size=2, temperature=1.0)):
        with pytest.raises(ValueError, match="prompt 1 of 2 has token 64, but the policy has 64: its tokenizer"):
            refuse([[5, 6], [7, 64, 8]])


@pytest.mark.parametrize("lengths", [[2, 6], [9, 1], [1, 1]], ids=str)
def test_rows_put_into_a_batch_are_those_of_the_other_and_the_rest_stays(lengths):
    batch, other = make_batch([3, 5, 2, 4]), make_batch(lengths, prompt_lengths=[7, 2])
    other = dataclasses.replace(other, truncated=torch.tensor([True, False]))
    result = batch.put(torch.tensor([3, 1]), other)
    expected, prompts = completions(batch), prompts_of(batch)
    (expected[3], expected[1]), (prompts[3], prompts[1]) = completions(other), prompts_of(other)
    assert completions(result) == expected and prompts_of(result) == prompts
    # nothing is left of what was longer
    assert result.completion_ids.shape[1] == max(map(len, expected)) and result.prompt_ids.shape[1] == 7
    assert result.rows.tolist() == [0, 1, 2, 3] and result.truncated.tolist() == [False, False, False, True]
    assert result.completion_mask.sum(1).tolist() == result.lengths.tolist() == list(map(len, expected))
    assert torch.equal(result.rollout_logps[0, :3], batch.rollout_logps[0, :3])


def test_rows_with_drafts_and_rows_without_make_a_batch_without():
    batch, other, row = make_batch([3, 5]), make_batch([2]), torch.tensor([0])
    batch.drafted = torch.tensor([1, 2])
    assert batch.put(row, other).drafted is other.put(row, batch.select(row)).drafted is None
    other.drafted = torch.tensor([0])
    assert batch.put(row, other).drafted.tolist() == [0, 2]


class Letters:
    """Decodes every token to none, one, two or three of three letters, so that texts meet across tokens."""

    pad_token_id = 0

    def decode(self, ids, **options) -> str:
        return "".join(("abc" * 2)[token % 3 :][: token % 4] for token in ids)


@pytest.mark.parametrize("stops", [("cab", "bb"), ("bca",), ("a",)])
@EACH_WAY
def test_a_completion_ends_at_its_first_stop_string(policies, family, engine, stops):
    letters, options = Letters(), dict(group_size=4, end_ids=[3, 11, 27], engine=engine, rollout_batch=4)
    free = rollout(policies[family], max_new_tokens=24, **options)
    model = copy.deepcopy(policies[family])
    sampler = make_sampler(model, engine, max_new_tokens=24, end_ids=[3, 11, 27], rollout_batch=4,
                           stopping=Stopping(stops, letters))  # fmt: skip
    seen = calls(model)
    stopped = sampler.generate(PROMPTS, group_size=4, temperature=1.0)
    expected, ended = [], []
    for ids, truncated in zip(completions(free), free.truncated.tolist(), strict=True):
        prefixes = [n for n in range(1, len(ids) + 1) if any(stop in letters.decode(ids[:n]) for stop in stops)]
        expected.append(ids[: prefixes[0]] if prefixes else ids)
        ended.append(bool(prefixes) or not truncated)
    assert completions(stopped) == expected and expected != completions(free)
    assert stopped.truncated.tolist() == [not over for over in ended]
    width = stopped.rollout_logps.shape[1]
    kept = torch.arange(width) < stopped.lengths[:, None]
    # other rows beside them: the same numbers but for rounding
    assert_rounded(stopped.rollout_logps, torch.where(kept, free.rollout_logps[:, :width], 0.0), **NORMS)
    for text, ids, over in zip(stopped.texts(letters, stops), expected, ended, strict=True):
        whole = letters.decode(ids)
        places = [whole.find(stop) for stop in stops if stop in whole]
        assert text == (whole[: min(places)] if places else letters.decode(ids[:-1] if over else ids))
    if stops == ("a",):  # rows that stop leave the batch: each needs a prefill and few steps
        assert len(seen) < 3 * 12
