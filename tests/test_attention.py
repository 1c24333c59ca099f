"""Tests of common/model/attention.py: which models it serves, that it changes nothing for others, and packed
sequences.
"""

import copy
import dataclasses
import itertools

import pytest
import torch
from bounds import assert_rounded, rounding
from conftest import TINY, tiny_model
from torch.nn import functional as F
from transformers.modeling_layers import GradientCheckpointingLayer

from common.model import attention
from common.model.attention import FULL, NAME, Packed, decoder_layers, install

CPU = torch.device("cpu")
# Roundings through a tiny model: in each of two layers seven products over at most 64 terms, two norms over 32 and
# attention over up to 16 positions
ROUNDINGS = 2 * (7 * 64 + 2 * 32 + 2 * 16)
ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
SEQUENCES = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15, 16, 17], [20], [21, 22]]


def hidden_states(model, **kwargs) -> torch.Tensor:
    with torch.no_grad():
        return model.get_decoder()(**kwargs).last_hidden_state


def packed(model, sequences) -> torch.Tensor:
    """Hidden states of sequences that stand in one row."""
    ids, positions = [token for ids in sequences for token in ids], [i for ids in sequences for i in range(len(ids))]
    path = attention.inputs(CPU, Packed.of([len(ids) for ids in sequences], CPU))
    return hidden_states(model, input_ids=torch.tensor([ids]), position_ids=torch.tensor([positions]), **path)[0]


def alone(model, sequences) -> torch.Tensor:
    return torch.cat([hidden_states(model, input_ids=torch.tensor([ids]), use_cache=False)[0] for ids in sequences])


def left_padded(sequences) -> dict[str, torch.Tensor]:
    """What any code that knows nothing of this attention would pass."""
    width = max(map(len, sequences))
    ids = torch.tensor([[0] * (width - len(s)) + s for s in sequences])
    mask = torch.tensor([[0] * (width - len(s)) + [1] * len(s) for s in sequences])
    return dict(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))


@pytest.mark.parametrize("kind", TINY)
def test_packed_sequences_are_sequences_alone(kind):
    model = tiny_model(kind, num_hidden_layers=2)
    expected = alone(model, SEQUENCES)  # by transformers' own attention
    support = install(model)
    assert support.not_packed == support.not_cached == "" and support.window == FULL
    assert model.config._attn_implementation == NAME
    copied = copy.deepcopy(model)
    assert install(model) == support  # once more changes nothing
    for one in (model, copied):
        assert_rounded(packed(one, SEQUENCES), expected, ROUNDINGS)
        assert_rounded(packed(one, SEQUENCES[2:3]), expected[13:14], ROUNDINGS)
    assert [layer.module for layer in support.layers] == [
        module for module in model.modules() if type(module).__name__.endswith("Attention")
    ]
    blocks = decoder_layers(model, support)
    assert blocks == [m for m in model.modules() if type(m).__name__.endswith(("DecoderLayer", "Block"))]
    assert len(blocks) == 2 and all(isinstance(block, GradientCheckpointingLayer) for block in blocks)
    assert decoder_layers(model, dataclasses.replace(support, layers=support.layers[1:])) == blocks[1:]


@pytest.mark.parametrize(("kind", "training"), [("llama", True), ("gpt2", True), ("qwen2", False), ("gemma", False)])
def test_ordinary_calls_give_what_they_gave_before(kind, training):
    dropout = dict(attn_pdrop=0.3) if kind == "gpt2" else dict(attention_dropout=0.3)
    plain = tiny_model(kind, **dropout).train(training)
    model = copy.deepcopy(plain)
    install(model)
    assert model.training == training and plain.config._attn_implementation == "sdpa"
    rows = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]]).bool()
    for kwargs in (left_padded(SEQUENCES), dict(input_ids=torch.tensor([SEQUENCES[1]])),
                   dict(input_ids=torch.tensor([SEQUENCES[0]] * 2), attention_mask=rows)):  # fmt: skip
        torch.manual_seed(1)
        expected = hidden_states(plain, **kwargs)
        torch.manual_seed(1)
        assert torch.equal(hidden_states(model, **kwargs), expected)  # the same operations
        torch.manual_seed(2)
        assert torch.equal(hidden_states(model, **kwargs), expected) == (not training)  # dropout is at work
        if not training:
            found, expected = (x.generate(**kwargs, do_sample=False, max_new_tokens=4) for x in (model, plain))
            assert torch.equal(found, expected)


def test_a_saved_model_does_not_tell(tmp_path):
    plain = tiny_model("llama")
    model = copy.deepcopy(plain)
    install(model)
    files = []
    for folder, one in ((tmp_path / "plain", plain), (tmp_path / "installed", model)):
        one.save_pretrained(folder)
        files.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert "config.json" in files[0] and files[0] == files[1]


@pytest.mark.parametrize(("kind", "options", "window"), [
    ("mistral", dict(sliding_window=6), 6),
    ("qwen2", dict(use_sliding_window=True, sliding_window=6, layer_types=["full_attention", "sliding_attention"]), 6),
    ("qwen2", dict(use_sliding_window=False, sliding_window=6), FULL),
    ("phimoe", dict(num_local_experts=2, sliding_window=6), 6),  # tells the mask alone
    ("llama", dict(rope_parameters={**ROPE, "rope_type": "linear"}), FULL),
])  # fmt: skip
def test_up_to_its_window_a_model_attends_to_everything(kind, options, window):
    model = tiny_model(kind, **options)
    expected = alone(model, SEQUENCES)
    support = install(model)
    assert support.not_packed == support.not_cached == "" and support.window == window
    error = (packed(model, SEQUENCES) - expected).abs().amax(1)
    long = torch.tensor([len(s) > window for s in SEQUENCES]).repeat_interleave(torch.tensor(list(map(len, SEQUENCES))))
    assert error[~long].max() <= rounding(ROUNDINGS, expected.abs().max().item())
    assert long.any() == (window == 6) and (not long.any() or error[long].max() > 1e-2)


def other_heads(model):
    layer = tiny_model("llama", num_key_value_heads=4).model.layers[1]
    model.model.layers[1] = layer
    layer.self_attn.config = model.config


def a_layer_without_attention(model):
    model.model.layers[1].self_attn.forward = lambda hidden_states, **kwargs: (hidden_states, None)


def a_convolution(model):
    def mix(module, args, out):
        return out + F.pad(out, (0, 0, 1, 0))[:, :-1]  # every token sees the one before it

    model.model.layers[0].mlp.register_forward_hook(mix)


@pytest.mark.parametrize(("kind", "options", "change", "reason"), [
    ("falcon", {}, None, "does not go through the attention interface"),
    ("diffllama", {}, None, "attend more than once per token"),
    ("gemma2", dict(head_dim=8), None, "soft"),  # capped; transformers or we say it
    ("llama", {}, other_heads, "differ in their number of heads"),
    ("llama", {}, a_layer_without_attention, "1 of its 2 attention layers"), ("llama", {}, a_convolution, "differ by "),
    ("llama", {}, lambda model: model.model.norm.weight.data.fill_(torch.nan), "differ by nan"),
])  # fmt: skip
@pytest.mark.parametrize("training", [False, True])
def test_a_model_it_does_not_serve_is_left_as_it_was(kind, options, change, reason, training):
    model = tiny_model(kind, **options).train(training)
    if change:
        change(model)
    before, results = model.config._attn_implementation, []
    for _ in range(2):
        torch.manual_seed(1)
        results.append(hidden_states(model, **left_padded(SEQUENCES)).nan_to_num())
        support = install(model)
        assert reason in support.not_packed and support.not_cached == support.not_packed and support.layers == ()
        assert model.config._attn_implementation == before != NAME and model.training == training
    assert torch.equal(*results)  # the same operations


EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)


@pytest.mark.parametrize(("kind", "options"), [("mixtral", dict(sliding_window=None)), ("qwen3_moe", EXPERTS),
    ("llama", dict(rope_parameters=ROPE, max_position_embeddings=16))])  # fmt: skip
def test_experts_and_positions_that_depend_on_the_length_are_packed(kind, options):
    # up to the length where positions change; `positions.longest_sequence` says it
    model = tiny_model(kind, **options)
    expected = alone(model, SEQUENCES)
    support = install(model)
    assert support.not_packed == support.not_cached == "" and support.kept == ()
    assert_rounded(packed(model, SEQUENCES), expected, ROUNDINGS)


def test_layers_with_a_state_are_kept_apart_from_those_that_attend():
    model = tiny_model("lfm2", layer_types=["conv", "full_attention"])
    support = install(model)
    assert "keep a state (conv)" in support.not_packed and support.not_cached == ""
    assert model.config._attn_implementation == NAME and len(support.layers) == 1
    (state,) = support.kept  # one convolution over 32 channels and 3 tokens, in fp32
    assert (state.layer, state.kind, state.shape, state.bytes_per_row) == (0, "conv", (32, 3), 384)


def test_what_a_layer_asks_of_its_attention_is_written_down():
    query, key, zeros = torch.zeros(1, 6, 2, 8), torch.zeros(1, 2, 2, 8), torch.zeros(4)
    nothing = dict(softcap=None, s_aux=None, position_bias=None, dropout=0.0, is_causal=True)
    for value, asked, odd in (
        (key, nothing, []), (key, dict(softcap=30.0), ["soft-capped attention"]),
        (key, dict(s_aux=zeros), ["attention sinks"]), (key, dict(position_bias=zeros), ["a position bias"]),
        (key[..., :4], {}, []), (torch.zeros(1, 2, 2, 9), {}, ["values wider than keys"]),
        (key[:, :1], {}, ["values wider than keys"]),  # nor fewer heads of values
    ):  # fmt: skip
        probe = attention.Probe.of([2], CPU)
        probe.record(None, query, key, value, asked)
        assert probe.unsupported == odd and probe.window == FULL and probe.seen == [attention.Layer(None, 2, 8, 3)]
    for window in (None, 9, 5, 7):  # the shortest counts
        probe.record(None, query, key, key, {"sliding_window": window})
    assert probe.window == 5 and len(probe.seen) == 5


@pytest.mark.parametrize(("lengths", "longest"), [([4, 9, 1], 16), ([1], 1), ([8, 8], 8), ([3, 2, 2, 17], 32)])
def test_packed_knows_where_sequences_begin(lengths, longest):
    way = Packed.of(lengths, CPU)
    assert way.offsets.tolist() == [0, *itertools.accumulate(lengths)] and way.offsets.dtype == torch.int32
    assert way.longest == longest and way.lengths == lengths


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
def test_packed_attention_is_its_definition(heads):
    generator, lengths, D, scaling = torch.Generator().manual_seed(0), [3, 1, 5], 8, 0.3
    query, key, value = (torch.randn(1, n, 9, D, generator=generator) for n in (heads[0], heads[1], heads[1]))
    actual = Packed.of(lengths, CPU).attend(None, query, key, value, scaling)
    row = torch.arange(3).repeat_interleave(torch.tensor(lengths))
    mask = (row[:, None] == row) & torch.ones(9, 9).tril().bool()
    key, value = (x[0].double().repeat_interleave(heads[0] // heads[1], 0) for x in (key, value))
    scores = (query[0].double() @ key.transpose(1, 2) * scaling).masked_fill(~mask, -torch.inf)
    # a product over D, a softmax and a sum over at most 5 positions
    assert_rounded(actual[0].transpose(0, 1), scores.softmax(-1) @ value, terms=D + 5 + 5 + 8)


# tokens of each sequence in the row, where it begins and how many tokens it shares: two prompts of 4 and 1 tokens
LENGTHS, HEADS, SHARED = [6, 3, 1, 3, 5, 0], [0, 0, 9, 9, 9, 9], [0, 4, 0, 1, 1, 1]


def varlen(query, key, value, query_ends, key_ends, most_queries, most_keys, *, scale, window_size, **_):
    """`varlen_attn` as its documentation defines it: the last query sees the last key."""
    assert window_size == (-1, 0)
    sides = [(torch.arange(len(x)), ends) for x, ends in ((query, query_ends), (key, key_ends))]
    rows, lefts = zip(*((row, ends[row + 1] - place) for place, ends in sides
                        for row in [torch.searchsorted(ends, place, right=True) - 1]), strict=True)  # fmt: skip
    mask = (rows[0][:, None] == rows[1]) & (lefts[0][:, None] <= lefts[1])
    mask &= (lefts[0][:, None] <= most_queries) & (lefts[1] <= most_keys)
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
def test_sequences_that_share_a_prompt_attend_to_it_and_to_themselves(monkeypatch, heads, flash):
    monkeypatch.setattr(attention, "on_flash", lambda x: flash)
    monkeypatch.setattr(attention, "varlen_attn", varlen)
    generator, D, scaling = torch.Generator().manual_seed(0), 8, 0.3
    query, key, value = (torch.randn(1, n, 18, D, generator=generator) for n in (heads[0], heads[1], heads[1]))
    key.requires_grad_()
    way = attention.Shared.of(LENGTHS, CPU, HEADS, SHARED)
    actual = way.attend(None, query, key, value, scaling)
    (gradient,) = torch.autograd.grad((actual * actual.detach().sin()).sum(), key)
    row = torch.arange(6).repeat_interleave(torch.tensor(LENGTHS))
    mask = (row[:, None] == row) & torch.ones(18, 18).tril().bool()
    mask[6:9, :4] = mask[10:, 9] = True
    wide, kv = key.detach().double().requires_grad_(), []
    for x in (wide, value.double()):
        kv.append(x[0].repeat_interleave(heads[0] // heads[1], 0))
    scores = (query[0].double() @ kv[0].transpose(1, 2) * scaling).masked_fill(~mask, -torch.inf)
    expected = (scores.softmax(-1) @ kv[1]).transpose(0, 1)
    # a product over D, a softmax and a sum over at most 7 positions
    assert_rounded(actual[0].detach(), expected.detach(), terms=D + 7 + 7 + 8)
    (exact,) = torch.autograd.grad((expected * actual[0].detach().double().sin()).sum(), wide)
    assert_rounded(gradient, exact, terms=4 * (D + 7 + 7 + 8), magnitude=exact.abs().max().item())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("heads", [(8, 8), (14, 2)])
def test_flash_attention_of_shared_prompts_is_that_of_the_cpu(heads):
    lengths, shared = [300 + 200, 1, 77, 256, 0, 130, 129], [0, 300, 300, 300, 300, 0, 1]
    starts = [0] * 5 + [834] * 2
    generator, N = torch.Generator().manual_seed(0), sum(lengths)
    tensors = [torch.randn(1, n, N, 64, generator=generator).bfloat16() for n in (heads[0], heads[1], heads[1])]
    weight, found = torch.randn(1, N, heads[0], 64, generator=generator), []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        q, k, v = (x.detach().to(device, dtype).requires_grad_() for x in tensors)
        way = attention.Shared.of(lengths, torch.device(device), starts, shared)
        out = way.attend(None, q, k, v, 0.125)
        (out * weight.to(out)).sum().backward()
        found.append([x.detach().float().cpu() for x in (out, q.grad, k.grad, v.grad)])
    for exact, ours in zip(*found, strict=True):  # bf16 on the CPU: 0.008; a mask aligned to the first key: 0.7
        assert (ours - exact).norm() <= 0.01 * exact.norm()
