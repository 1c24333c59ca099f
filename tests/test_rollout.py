"""Tests of common/rollout.py: what is sampled, from which distribution, and how it reaches the update."""

import copy
import dataclasses
import math

import pytest
import torch
from conftest import build_model
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from common import logprobs, losses, models
from common.rollout import RolloutBatch, generate, mask_after_end, sample

FAMILIES = ["qwen2", "gpt2"]
PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15, 16, 17], [20]]
NEVER = [999]  # an end token no model here can sample
FREE = dict(max_new_tokens=12, temperature=1.0, end_ids=NEVER, pad_id=0)


@pytest.fixture(scope="module")
def policies():
    torch.set_num_threads(1)
    return {family: build_model(family).eval() for family in FAMILIES}


def flat_model(vocabulary=200) -> Qwen2ForCausalLM:
    """A model whose distributions are close to uniform."""
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(vocab_size=vocabulary, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                    num_attention_heads=4, num_key_value_heads=2, eos_token_id=None, pad_token_id=0, bos_token_id=None)
    ).eval()  # fmt: skip


def make_batch(lengths, group_size=1, prompt_lengths=None) -> RolloutBatch:
    """A rollout with these completion lengths; the ids tell the row: 100 * row + position."""
    B, C = len(lengths), max(1, *lengths)
    prompt_lengths = prompt_lengths or [1 + i // group_size for i in range(B)]
    Q = max(prompt_lengths)
    places = 100 * torch.arange(B)[:, None]
    prompt_mask = torch.arange(Q) >= Q - torch.tensor(prompt_lengths)[:, None]
    completion_mask = torch.arange(C) < torch.tensor(lengths)[:, None]
    return RolloutBatch(
        prompt_ids=(places + torch.arange(Q)) * prompt_mask, prompt_mask=prompt_mask,
        completion_ids=(places + torch.arange(C)) * completion_mask, completion_mask=completion_mask,
        lengths=torch.tensor(lengths), truncated=torch.zeros(B, dtype=torch.bool), rows=torch.arange(B),
    )  # fmt: skip


def completions(batch) -> list[list[int]]:
    return [ids[:n] for ids, n in zip(batch.completion_ids.tolist(), batch.lengths.tolist(), strict=True)]


def assert_follows(counts, probabilities, total):
    """Chi-square test of counts against probabilities; the sum of rare outcomes counts as one."""
    expected = probabilities.double() * total
    often = expected >= 5
    observed = torch.cat([counts[often].double(), counts[~often].double().sum()[None]])
    expected = torch.cat([expected[often], expected[~often].sum()[None]]).clamp(min=1e-9)
    statistic = ((observed - expected) ** 2 / expected)[expected > 1].sum().item()
    degrees = int((expected > 1).sum()) - 1
    assert degrees >= 5
    assert statistic < degrees + 4 * math.sqrt(2 * degrees)


# --- greedy, against transformers ---


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(policies, family):
    model = policies[family]
    free = generate([model], PROMPTS, group_size=1, **{**FREE, "temperature": 0})
    end = free.completion_ids[0, 5].item()  # ends one row early: the rows then stop at different times
    ours = generate([model], PROMPTS, group_size=1, **{**FREE, "temperature": 0, "end_ids": [3, end]})
    theirs = model.generate(ours.prompt_ids, attention_mask=ours.prompt_mask.long(), do_sample=False,
                            max_new_tokens=12, eos_token_id=[3, end], pad_token_id=0)  # fmt: skip
    theirs = theirs[:, ours.prompt_ids.shape[1] :]
    assert torch.equal(ours.completion_ids, theirs[:, : ours.completion_ids.shape[1]])
    assert ours.lengths[0] <= 6 and len(set(ours.completion_ids.flatten().tolist())) > 3


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_the_argmax_of_the_log_probs(policies, family):
    batch = generate([policies[family]], PROMPTS, group_size=1, **{**FREE, "temperature": 0})
    for prompt, completion in zip(PROMPTS, completions(batch), strict=True):
        with torch.no_grad():
            logits = policies[family](input_ids=torch.tensor([prompt + completion])).logits[0]
        assert logits.argmax(-1)[len(prompt) - 1 : -1].tolist() == completion


# --- shape of a rollout ---


def test_completions_of_a_prompt_stand_side_by_side(policies):
    batch = generate([policies["qwen2"]], PROMPTS, group_size=4, **FREE)
    assert len(batch) == 12 and batch.rows.tolist() == list(range(12))
    for i in range(12):
        assert batch.prompt_ids[i][batch.prompt_mask[i]].tolist() == PROMPTS[i // 4]
        assert batch.prompt_ids[i][~batch.prompt_mask[i]].eq(0).all()
        assert batch.prompt_mask[i, -1]  # padding is on the left
    assert batch.prompt_mask.dtype == batch.completion_mask.dtype == batch.truncated.dtype == torch.bool
    assert batch.completion_ids.dtype == batch.prompt_ids.dtype == torch.int64


@pytest.mark.parametrize("family", FAMILIES)
def test_an_end_token_cuts_a_completion_and_changes_nothing_before_it(policies, family):
    sampling = dict(group_size=16, seed=4, step=2)
    free = generate([policies[family]], PROMPTS, **FREE, **sampling)
    values, counts = free.completion_ids.unique(return_counts=True)
    end_ids = values[counts.argsort(descending=True)[:2]].tolist()  # frequent ones: rows end at many different times
    batch = generate([policies[family]], PROMPTS, **{**FREE, "end_ids": end_ids}, **sampling)
    for long, short, mask, truncated in zip(free.completion_ids.tolist(), completions(batch), batch.completion_mask,
                                            batch.truncated.tolist(), strict=True):  # fmt: skip
        ends = [t for t, token in enumerate(long) if token in end_ids]
        assert short == (long[: ends[0] + 1] if ends else long)
        assert truncated == (not ends)
        assert mask.sum() == len(short) and mask[: len(short)].all()
    assert len(set(batch.lengths.tolist())) > 4
    assert batch.completion_ids[~batch.completion_mask].eq(0).all()
    assert batch.completion_ids.shape[1] == batch.lengths.max()


def test_mask_after_end_honours_every_end_token():
    ids = torch.tensor([[7, 8, 5, 9, 9], [2, 5, 2, 5, 2], [7, 8, 9, 9, 5], [7, 8, 9, 9, 9]])
    mask, truncated = mask_after_end(ids, [2, 5])
    assert mask.int().tolist() == [[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1], [1, 1, 1, 1, 1]]
    assert truncated.tolist() == [False, False, False, True]


def test_a_pad_token_that_ends_completions_counts_as_end():
    # some chat models name their pad token among the end tokens
    mask, truncated = mask_after_end(torch.tensor([[7, 8, 0, 0, 0]]), [3, 0])
    assert mask.int().tolist() == [[1, 1, 1, 0, 0]] and not truncated.any()


@pytest.mark.parametrize("group_size", [1, 64])
def test_small_and_large_groups(policies, group_size):
    batch = generate([policies["qwen2"]], PROMPTS[:2], group_size=group_size, **FREE)
    assert len(batch) == 2 * group_size
    assert batch.prompt_mask.sum(1).tolist() == [4] * group_size + [9] * group_size
    # one prompt's completions are the same whatever the group size
    small = generate([policies["qwen2"]], PROMPTS[:2], group_size=1, **FREE)
    assert torch.equal(batch.completion_ids[:1], small.completion_ids[:1])


@pytest.mark.parametrize("family", FAMILIES)
def test_all_sequences_may_end_at_the_first_token(policies, family):
    calls = []
    hook = policies[family].get_decoder().register_forward_pre_hook(lambda *args: calls.append(1))
    batch = generate([policies[family]], PROMPTS, group_size=2, **{**FREE, "end_ids": range(64)})
    hook.remove()
    assert batch.completion_ids.shape == (6, 1) and batch.completion_mask.all()
    assert batch.lengths.tolist() == [1] * 6 and not batch.truncated.any()
    assert len(calls) == 1  # and nothing is computed after that


def test_no_sequence_may_end(policies):
    batch = generate([policies["qwen2"]], PROMPTS, group_size=2, **{**FREE, "max_new_tokens": 5})
    assert batch.truncated.all() and batch.completion_mask.all()
    assert batch.lengths.tolist() == [5] * 6 and batch.completion_ids.shape == (6, 5)


def test_a_single_new_token(policies):
    batch = generate([policies["gpt2"]], PROMPTS, group_size=2, **{**FREE, "max_new_tokens": 1})
    assert batch.completion_ids.shape == (6, 1) and batch.truncated.all()


# --- the distribution sampled from ---


@pytest.mark.parametrize("family", FAMILIES)
def test_first_and_second_tokens_follow_the_softmax_at_the_temperature(policies, family):
    model, temperature, number = policies[family], 0.7, 8000
    batch = generate([model], [PROMPTS[0]], group_size=number, max_new_tokens=2, temperature=temperature, end_ids=NEVER,
                     pad_id=0, seed=1)  # fmt: skip
    with torch.no_grad():
        ids = torch.tensor([PROMPTS[0]]).repeat(64, 1)
        first = (model(input_ids=ids[:1]).logits[0, -1] / temperature).softmax(-1)
        second = (model(input_ids=torch.cat([ids, torch.arange(64)[:, None]], 1)).logits[:, -1] / temperature).softmax(
            -1
        )
    counts = [batch.completion_ids[:, t].bincount(minlength=64) for t in range(2)]
    assert_follows(counts[0], first, number)
    assert_follows(counts[1], first @ second, number)
    favourite = int(first.argmax())  # and the second token depends on the first one of its own row
    after = batch.completion_ids[batch.completion_ids[:, 0] == favourite, 1]
    assert_follows(after.bincount(minlength=64), second[favourite], len(after))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_sample_inverts_the_cumulative_distribution(temperature):
    logits = torch.tensor([1.0, -2.0, 0.5, 3.0, -torch.inf])
    grid = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    shares = sample(logits.expand(10_000, -1), grid, temperature).bincount(minlength=5) / 10_000
    torch.testing.assert_close(shares, (logits / temperature).softmax(-1), rtol=0, atol=2e-4)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_a_token_of_probability_zero_is_never_drawn(uniform):
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf]])
    drawn = sample(logits, torch.tensor([uniform], dtype=torch.float64), 1.0).item()
    assert drawn == (1 if uniform == 0.0 else 2)


def test_every_row_uses_its_own_random_number():
    logits = torch.zeros(3, 4)  # a quarter each
    assert sample(logits, torch.tensor([0.1, 0.6, 0.9], dtype=torch.float64), 1.0).tolist() == [0, 2, 3]


def test_temperature_zero_takes_the_likeliest_token():
    logits = torch.tensor([[0.0, 5.0, 5.1], [9.0, 0.0, 0.0]])
    assert sample(logits, torch.tensor([0.0, 0.999], dtype=torch.float64), 0).tolist() == [2, 0]


def test_the_whole_vocabulary_can_be_sampled():
    batch = generate([flat_model()], [[5, 6, 7]], group_size=4000, max_new_tokens=1, temperature=1.0, end_ids=NEVER,
                     pad_id=0)  # fmt: skip
    # near uniform, each of 200 tokens is missed with probability e^-20; a top-k of 50 would give 50
    assert batch.completion_ids.unique().numel() == 200


def test_settings_in_the_generation_config_are_ignored(policies):
    plain = generate([policies["qwen2"]], PROMPTS, group_size=4, **FREE)
    model = copy.deepcopy(policies["qwen2"])
    model.generation_config.update(do_sample=True, top_k=1, top_p=0.1, min_p=0.5, temperature=0.01,
                                   repetition_penalty=9.0, max_new_tokens=2, eos_token_id=list(range(64)))  # fmt: skip
    assert torch.equal(generate([model], PROMPTS, group_size=4, **FREE).completion_ids, plain.completion_ids)


# --- random numbers ---


def test_members_of_a_group_differ(policies):
    batch = generate([policies["qwen2"]], PROMPTS[:1], group_size=16, **FREE)
    assert len({tuple(row) for row in completions(batch)}) == 16


def test_the_same_seed_and_step_give_the_same_tokens(policies):
    def tokens(**which):
        return tuple(map(tuple, completions(generate([policies["qwen2"]], PROMPTS, group_size=4, **FREE, **which))))

    again = tokens(seed=3, step=7)
    assert again == tokens(seed=3, step=7)
    others = [dict(seed=3, step=8), dict(seed=4, step=7), dict(seed=7, step=3), dict(seed=0, step=0), dict(seed=-1)]
    assert len({again, *(tokens(**which) for which in others)}) == 6


def test_sampling_leaves_the_global_random_state_alone(policies):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = generate([policies["qwen2"]], PROMPTS, group_size=2, **FREE)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert torch.equal(
        generate([policies["qwen2"]], PROMPTS, group_size=2, **FREE).completion_ids, first.completion_ids
    )


def test_the_same_prompt_twice_gets_different_completions(policies):
    # in one process, and in two processes that each hold one of them
    batch = generate([policies["qwen2"]], [PROMPTS[0]] * 2, group_size=4, **FREE)
    by_rank = [
        generate([policies["qwen2"]], [PROMPTS[0]], group_size=4, **FREE, prompt_numbers=[rank]) for rank in range(2)
    ]
    assert not torch.equal(by_rank[0].completion_ids, by_rank[1].completion_ids)
    assert torch.equal(batch.completion_ids, torch.cat([part.completion_ids for part in by_rank]))


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_together_or_one_by_one_give_the_same_tokens(policies, family):
    sampling = {**FREE, "end_ids": [3, 30, 31]}
    together = completions(generate([policies[family]], PROMPTS, group_size=4, **sampling))
    apart = []
    for number in (2, 0, 1):
        part = generate([policies[family]], [PROMPTS[number]], group_size=4, **sampling, prompt_numbers=[number])
        apart.append((number, completions(part)))
    assert together == [row for _, rows in sorted(apart) for row in rows]


@pytest.mark.parametrize(("num_prompts", "num_replicas"), [(9, 4), (3, 4), (3, 2), (1, 4), (5, 2)])
def test_replicas_give_the_same_tokens_as_one_model(policies, num_prompts, num_replicas):
    prompts = [PROMPTS[i % 3] + [i + 25] for i in range(num_prompts)]
    replicas = models.replicate(policies["qwen2"], (torch.device("cpu"),) * num_replicas)
    one = generate(replicas[:1], prompts, group_size=2, **FREE, seed=1)
    several = generate(replicas, prompts, group_size=2, **FREE, seed=1)
    for field in dataclasses.fields(RolloutBatch):
        a, b = getattr(one, field.name), getattr(several, field.name)
        assert a is b is None or torch.equal(a, b), field.name


def test_every_replica_takes_part(policies):
    replicas = models.replicate(policies["qwen2"], (torch.device("cpu"),) * 2)
    rows = []
    for replica in replicas:
        replica.get_decoder().register_forward_pre_hook(
            lambda module, args, kwargs: rows.append((module, len(kwargs["input_ids"]))), with_kwargs=True
        )
    generate(replicas, PROMPTS, group_size=2, **{**FREE, "max_new_tokens": 1})
    for replica in replicas:
        replica.get_decoder()._forward_pre_hooks.clear()
        replica.get_decoder()._forward_pre_hooks_with_kwargs.clear()
    assert sorted(n for _, n in rows) == [1, 2] and len({id(module) for module, _ in rows}) == 2


def test_an_error_in_a_replica_reaches_the_caller(policies):
    broken = copy.deepcopy(policies["qwen2"])
    with torch.no_grad():
        broken.model.norm.weight.fill_(torch.nan)
    with pytest.raises(FloatingPointError):
        generate([policies["qwen2"], broken], PROMPTS, group_size=2, **FREE)


def test_new_weights_change_the_output(policies):
    model = copy.deepcopy(policies["qwen2"])
    before = generate([model], PROMPTS, group_size=4, **FREE)
    assert torch.equal(generate([model], PROMPTS, group_size=4, **FREE).completion_ids, before.completion_ids)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    assert not torch.equal(generate([model], PROMPTS, group_size=4, **FREE).completion_ids, before.completion_ids)


# --- the model is left as it was ---


def checkpoint_activations(model):
    # renamed in transformers 5.24
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def flags(model):
    return {
        "modes": [module.training for module in model.modules()],
        "config": model.config.to_dict(),
        "generation config": model.generation_config.to_dict(),
        "checkpointing": [getattr(module, "gradient_checkpointing", None) for module in model.modules()],
        "gradients": [p.requires_grad for p in model.parameters()],
    }


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_mode_and_settings_come_back_also_after_an_error(policies, family, raises, training):
    model = copy.deepcopy(policies[family]).train(training)
    checkpoint_activations(model)
    model.train(training)
    before, seen = flags(model), []

    def look(module, args):
        seen.append(module.training)
        if raises and len(seen) == 3:
            raise RuntimeError("out of memory")

    model.get_decoder().register_forward_pre_hook(look)
    if raises:
        with pytest.raises(RuntimeError, match="out of memory"):
            generate([model], PROMPTS, group_size=2, **FREE)
    else:
        generate([model], PROMPTS, group_size=2, **FREE)
    assert not any(seen)  # no dropout while sampling
    assert flags(model) == before


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing_keeps_the_cache_and_the_tokens(policies, family):
    expected = generate([policies[family]], PROMPTS, group_size=2, **FREE)
    model = copy.deepcopy(policies[family])  # GPT-2 with its dropout of 0.1
    checkpoint_activations(model)
    model.train()
    shapes = []
    model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    batch = generate([model], PROMPTS, group_size=2, **FREE)
    assert torch.equal(batch.completion_ids, expected.completion_ids)
    assert shapes == [(3, 9)] + [(6, 1)] * 11  # each prompt once per group, then one token at a time
    assert not batch.completion_ids.requires_grad


def test_sequences_that_ended_are_no_longer_computed(policies):
    free = generate([policies["qwen2"]], PROMPTS, group_size=8, **FREE)
    end_ids = free.completion_ids[:, 1].unique()[:-1].tolist()  # nearly all end at the second token
    sizes = []
    hook = (
        policies["qwen2"]
        .get_decoder()
        .register_forward_pre_hook(
            lambda module, args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True
        )
    )
    generate([policies["qwen2"]], PROMPTS, group_size=8, **{**FREE, "end_ids": end_ids})
    hook.remove()
    assert sizes[1] <= 24 and sizes[-1] <= 12 and sizes == [3, *sorted(sizes[1:], reverse=True)]


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_broken_weights_stop_the_rollout(policies, family, temperature):
    model = copy.deepcopy(policies[family]).train()
    norm = model.model.norm if family == "qwen2" else model.transformer.ln_f
    with torch.no_grad():
        norm.weight[3] = torch.nan
    with pytest.raises(FloatingPointError, match="not finite"):
        generate([model], PROMPTS, group_size=2, **{**FREE, "temperature": temperature})
    assert model.training


def test_an_overflow_in_the_middle_of_a_completion_stops_the_rollout(policies):
    model = copy.deepcopy(policies["gpt2"])
    with torch.no_grad():
        model.transformer.wpe.weight[14] = torch.nan  # no prompt is that long
    with pytest.raises(FloatingPointError, match="not finite"):
        generate([model], PROMPTS, group_size=2, **FREE)
    generate([model], PROMPTS, group_size=2, **{**FREE, "max_new_tokens": 3})  # nor is any completion here


# --- text ---


@pytest.mark.parametrize(("ids", "end_ids", "text"), [
    ([2, 4, 17, 3, 0, 0], [3], "<im_start> user 2"),  # end and padding go, other special tokens stay
    ([17, 18, 6, 12, 0, 0], [12], "2 3 \n"),  # another end token than the tokenizer's
    ([17, 18, 0, 0, 0, 0], [0, 3], "2 3"),  # the pad token is among the end tokens
    ([17, 3, 18, 19, 20, 21], [999], "2 <im_end> 3 4 5 6"),  # cut off by the limit: the last token is no end token
    ([17, 0, 18, 3, 0, 0], [3], "2 3"),  # a sampled pad token
    ([3, 0, 0, 0, 0, 0], [3], ""),
])  # fmt: skip
def test_texts(tokenizer, ids, end_ids, text):
    ids = torch.tensor([ids])
    mask, truncated = mask_after_end(ids, end_ids)
    batch = dataclasses.replace(make_batch([6]), completion_ids=ids, completion_mask=mask, lengths=mask.sum(1),
                                truncated=truncated)  # fmt: skip
    assert batch.texts(tokenizer) == [text]


def test_texts_of_completions_left_out_of_the_loss_are_whole(tokenizer):
    ids = torch.tensor([[17, 18, 3, 0], [17, 18, 19, 20]])
    mask, truncated = mask_after_end(ids, [3])
    batch = dataclasses.replace(make_batch([3, 4]), completion_ids=ids, completion_mask=mask, lengths=mask.sum(1),
                                truncated=truncated)  # fmt: skip
    batch.drop(torch.tensor([True, True]))
    assert batch.texts(tokenizer) == ["2 3", "2 3 4 5"]


def test_the_sampled_ids_are_kept_where_text_is_not_their_inverse():
    # bytes as tokens: two tokens make one character, and encoding the text may give other tokens
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: i for i, symbol in enumerate([*alphabet, "he"])}
    backend = Tokenizer(tokenizer_models.BPE(vocab=vocabulary, merges=[("h", "e")]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
    h, e = vocabulary["h"], vocabulary["e"]
    half = tokenizer.encode("é")[:1]
    ids = torch.tensor([[h, e], [h, *half]])
    batch = dataclasses.replace(make_batch([2, 2]), completion_ids=ids, truncated=torch.tensor([True, True]))
    assert tokenizer.encode("he") == [vocabulary["he"]]
    assert batch.texts(tokenizer) == ["he", "h\N{REPLACEMENT CHARACTER}"]
    assert batch.tokens[2].tolist() == [[h, e], [h, *half]]


# --- from rollout to update ---


def test_select_keeps_rows_together_and_trims_padding():
    batch = make_batch([3, 1, 5, 2], prompt_lengths=[2, 4, 1, 3])
    batch.advantages = torch.tensor([0.0, 1.0, 2.0, 3.0])
    batch.old_logps = -(batch.completion_ids + 1.0)
    part = batch.select(torch.tensor([3, 0]))
    assert part.rows.tolist() == [3, 0] and part.advantages.tolist() == [3.0, 0.0]
    assert part.prompt_ids.tolist() == [[300 + 1, 302, 303], [0, 2, 3]]  # columns 1 to 3 of 4
    assert part.prompt_ids.shape == part.prompt_mask.shape == (2, 3)
    assert part.completion_ids.tolist() == [[300, 301, 0], [0, 1, 2]]
    assert part.completion_mask.int().tolist() == [[1, 1, 0], [1, 1, 1]]
    assert torch.equal(part.old_logps, -(part.completion_ids + 1.0))
    assert part.lengths.tolist() == [2, 3] and part.ref_logps is None
    assert batch.prompt_ids.shape == (4, 4)  # the whole is left as it was


def test_select_of_rows_without_tokens_keeps_one_column():
    part = make_batch([3, 0, 0]).select(torch.tensor([1, 2]))
    assert part.completion_ids.shape == part.completion_mask.shape == (2, 1)
    assert not part.completion_mask.any() and part.num_trained == 0


def test_drop_takes_rows_out_of_the_loss_only():
    # one finished with 4 tokens, one cut off at 8: the mean over tokens divides by 4, lengths stay 4 and 8
    batch = make_batch([4, 8])
    batch.truncated = torch.tensor([False, True])
    batch.drop(batch.truncated)
    assert batch.completion_mask.sum() == 4 and batch.num_trained == 1
    assert batch.lengths.tolist() == [4, 8]


@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("num_minibatches", [1, 2, 3, 4, 11])
def test_minibatches_hold_every_row_once(num_minibatches, micro_batch_size):
    lengths = [3, 1, 5, 2, 2, 9, 1, 4, 7, 3, 6]
    batch = make_batch(lengths)
    cut = batch.minibatches(num_minibatches, micro_batch_size)
    assert len(cut) == num_minibatches
    rows = [[row for micro in minibatch for row in micro.rows.tolist()] for minibatch in cut]
    assert sorted(row for part in rows for row in part) == list(range(11))
    sizes = [len(part) for part in rows]
    assert max(sizes) - min(sizes) <= 1
    for minibatch in cut:
        assert all(1 <= len(micro) <= micro_batch_size for micro in minibatch)
        for micro in minibatch:
            assert micro.lengths.tolist() == [lengths[row] for row in micro.rows]
            # the ids tell the row, so nothing went astray
            assert (micro.completion_ids // 100)[micro.completion_mask].tolist() == [
                row for row in micro.rows.tolist() for _ in range(lengths[row])
            ]
            assert micro.completion_ids.shape[1] == micro.lengths.max()  # no column of pure padding


@pytest.mark.parametrize("num_minibatches", [1, 2, 4])
def test_every_minibatch_sees_every_prompt_equally_often(num_minibatches):
    group_size, generator = 4, torch.Generator().manual_seed(0)
    batch = make_batch(torch.randint(1, 9, (12,), generator=generator).tolist(), group_size)
    for minibatch in batch.minibatches(num_minibatches, 5):
        prompts = torch.cat([micro.rows for micro in minibatch]) // group_size
        assert prompts.bincount().tolist() == [group_size // num_minibatches] * 3


def test_sequences_of_similar_length_share_a_micro_batch():
    (minibatch,) = make_batch([9, 1, 8, 2, 9, 1, 8, 2]).minibatches(1, 2)
    assert [sorted(micro.lengths.tolist()) for micro in minibatch] == [[9, 9], [8, 8], [2, 2], [1, 1]]


def test_rows_carry_values_computed_for_the_whole_rollout_to_their_sequences():
    batch = make_batch([3, 1, 5, 2, 4, 6], group_size=3)
    advantages = torch.arange(6) * 1.5
    for micro in [micro for minibatch in batch.minibatches(3, 1) for micro in minibatch]:
        assert advantages[micro.rows].item() == (micro.completion_ids[0, 0] // 100).item() * 1.5


def test_parts_of_a_part_keep_the_place_in_the_rollout():
    batch = make_batch([3, 1, 5, 2])
    assert batch.select(torch.tensor([3, 1, 2])).select(torch.tensor([2, 0])).rows.tolist() == [2, 3]


def gspo_gradient(model, batch, advantages, micro_batch_size, num_minibatches):
    """Gradient of the GSPO loss, added up over everything, with values met by `rows`."""
    policy = logprobs.LogProbs(model, 1.0)
    model.zero_grad()
    for minibatch in batch.minibatches(num_minibatches, micro_batch_size):
        for micro in minibatch:
            C = micro.completion_ids.shape[1]
            logps, _ = policy(*micro.tokens)
            old_logps = logps.detach() + 0.05 * torch.sin(micro.rows[:, None] + torch.arange(C))
            ratio = losses.sequence_ratio(logps, old_logps, micro.completion_mask)
            surrogate = losses.clipped_surrogate(ratio, advantages[micro.rows], 0.5, 0.5)
            (-surrogate.sum() / len(batch)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_does_not_depend_on_the_micro_batch_size(policies, family):
    model = policies[family]
    batch = generate([model], PROMPTS[:2], group_size=4, **{**FREE, "end_ids": [3, 30, 31, 32, 33, 34, 35]})
    advantages = torch.tensor([1.0, -2.0, 0.5, 3.0, -0.7, 1.3, -1.1, 0.2])  # all different
    whole = gspo_gradient(model, batch, advantages, 8, 1)
    # the same, row by row, without any cutting
    model.zero_grad()
    for i, completion in enumerate(completions(batch)):
        ids = torch.tensor([PROMPTS[i // 4] + completion])
        logps = model(input_ids=ids).logits[0].log_softmax(-1)[-len(completion) - 1 : -1]
        logps = logps[range(len(completion)), completion]
        gap = -0.05 * torch.sin(i + torch.arange(len(completion)))
        weight = gap.mean().exp() * advantages[i] / (8 * len(completion))  # s_i A_i / (G |y_i|), over the batch
        (-weight * logps.sum()).backward()
    by_hand = {name: p.grad.clone() for name, p in model.named_parameters()}
    size = max(g.abs().max() for g in whole.values())
    assert len(set(batch.lengths.tolist())) > 2 and size > 0.1
    for name in whole:
        torch.testing.assert_close(by_hand[name], whole[name], rtol=0, atol=1e-5 * size.item())
    for micro_batch_size in (4, 2, 1):
        for num_minibatches in (1, 2):
            part = gspo_gradient(model, batch, advantages, micro_batch_size, num_minibatches)
            for name in whole:
                torch.testing.assert_close(part[name], whole[name], rtol=0, atol=1e-5 * size.item())
    model.zero_grad()


def test_log_probs_of_a_rollout_belong_to_the_tokens_sampled(policies):
    # sampling and training use the same temperature and positions: a token sampled at 0.05 is nearly always the best
    model = policies["gpt2"]
    batch = generate([model], PROMPTS, group_size=4, **{**FREE, "temperature": 0.05})
    logps, _ = logprobs.LogProbs(model, 0.05)(*batch.tokens)
    assert logps[batch.completion_mask].exp().mean() > 0.8
