"""Tests of common/attention.py: which models it serves, that it changes nothing for others, and packed sequences."""

import copy
import dataclasses
import functools
import itertools

import pytest
import torch
from conftest import TINY, tiny_model
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from common import attention
from common.attention import FULL, NAME, Packed, decoder_layers, install

CPU = torch.device("cpu")
SEQUENCES = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15, 16, 17], [20], [21, 22]]


def hidden_states(model, **kwargs) -> torch.Tensor:
    with torch.no_grad():
        return model.get_decoder()(**kwargs).last_hidden_state


def packed(model, sequences) -> torch.Tensor:
    """Hidden states of sequences that stand in one row."""
    ids, positions = [token for ids in sequences for token in ids], [i for ids in sequences for i in range(len(ids))]
    way = attention.inputs(CPU, Packed.of([len(ids) for ids in sequences], CPU))
    return hidden_states(model, input_ids=torch.tensor([ids]), position_ids=torch.tensor([positions]), **way)[0]


def alone(model, sequences) -> torch.Tensor:
    return torch.cat([hidden_states(model, input_ids=torch.tensor([ids]), use_cache=False)[0] for ids in sequences])


def left_padded(sequences) -> dict[str, torch.Tensor]:
    """What any code that knows nothing of this attention would pass."""
    width = max(map(len, sequences))
    ids = torch.tensor([[0] * (width - len(s)) + s for s in sequences])
    mask = torch.tensor([[0] * (width - len(s)) + [1] * len(s) for s in sequences])
    return dict(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))


# --- models it serves ---


@pytest.mark.parametrize("kind", TINY)
def test_packed_sequences_are_sequences_alone(kind):
    model = tiny_model(kind)
    expected = alone(model, SEQUENCES)  # by transformers' own attention
    support = install(model)
    assert support.reason == "" and support.window == FULL and model.config._attn_implementation == NAME
    torch.testing.assert_close(packed(model, SEQUENCES), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(packed(model, SEQUENCES[2:3]), expected[13:14], rtol=0, atol=1e-5)
    assert [layer.module for layer in support.layers] == [
        module for module in model.modules() if type(module).__name__.endswith("Attention")
    ]
    heads = {"llama": (2, 8, 2), "qwen3": (2, 16, 2), "gpt2": (4, 8, 1)}
    if kind in heads:
        assert {(x.num_heads, x.head_size, x.queries_per_key) for x in support.layers} == {heads[kind]}


@pytest.mark.parametrize("kind", TINY)
def test_every_transformer_block_is_found_once(kind):
    model = tiny_model(kind, num_hidden_layers=3)
    blocks = decoder_layers(model, install(model))
    assert len(blocks) == len({id(block) for block in blocks}) == 3
    assert blocks == [m for m in model.modules() if type(m).__name__.endswith(("DecoderLayer", "Block"))]
    assert all(isinstance(block, GradientCheckpointingLayer) for block in blocks)


def test_blocks_without_attention_are_left_out():
    model = tiny_model("llama", num_hidden_layers=3)
    support = install(model)
    some = dataclasses.replace(support, layers=support.layers[::2])
    assert decoder_layers(model, some) == [model.model.layers[0], model.model.layers[2]]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", TINY)
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
        assert torch.equal(hidden_states(model, **kwargs), expected)
        torch.manual_seed(2)
        assert torch.equal(hidden_states(model, **kwargs), expected) == (not training)  # dropout is at work


def test_generate_of_transformers_still_works():
    plain = tiny_model("llama")
    model = copy.deepcopy(plain)
    install(model)
    options = dict(do_sample=False, max_new_tokens=8, pad_token_id=0)
    ids, mask = (left_padded(SEQUENCES)[name] for name in ("input_ids", "attention_mask"))
    assert torch.equal(model.generate(ids, attention_mask=mask, **options),
                       plain.generate(ids, attention_mask=mask, **options))  # fmt: skip


def test_installing_again_changes_nothing():
    model = tiny_model("qwen2")
    assert install(model) == install(model)
    torch.testing.assert_close(packed(model, SEQUENCES), alone(tiny_model("qwen2"), SEQUENCES), rtol=0, atol=1e-5)
    assert model.config._attn_implementation == NAME


def test_a_copy_has_the_attention_too():
    model = tiny_model("qwen2")
    install(model)
    torch.testing.assert_close(packed(copy.deepcopy(model), SEQUENCES), packed(model, SEQUENCES), rtol=0, atol=0)


def test_a_saved_model_does_not_tell(tmp_path):
    plain = tiny_model("llama")
    model = copy.deepcopy(plain)
    install(model)
    plain.save_pretrained(tmp_path / "plain")
    model.save_pretrained(tmp_path / "installed")
    files = [path.name for path in sorted((tmp_path / "plain").iterdir())]
    assert "config.json" in files and files == [path.name for path in sorted((tmp_path / "installed").iterdir())]
    for name in files:
        assert (tmp_path / "installed" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "installed")
    assert loaded.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(("kind", "options", "window"), [
    ("mistral", dict(sliding_window=6), 6),
    ("mistral", dict(sliding_window=4096), 4096),
    ("qwen2", dict(use_sliding_window=True, sliding_window=6, layer_types=["full_attention", "sliding_attention"]), 6),
    ("qwen2", dict(use_sliding_window=False, sliding_window=6), FULL),
])  # fmt: skip
def test_up_to_its_window_a_model_attends_to_everything(kind, options, window):
    model = tiny_model(kind, **options)
    expected = alone(model, SEQUENCES)
    support = install(model)
    assert support.reason == "" and support.window == window
    error = (packed(model, SEQUENCES) - expected).abs().amax(1)
    long = torch.tensor([len(s) > window for s in SEQUENCES]).repeat_interleave(torch.tensor(list(map(len, SEQUENCES))))
    assert error[~long].max() < 1e-5
    assert long.any() == (window == 6) and (not long.any() or error[long].max() > 1e-2)


# --- models it does not serve ---

UNSERVED = {
    "falcon": ({}, "its attention does not go through the attention interface of transformers"),
    "lfm2": (dict(layer_types=["conv", "full_attention"]), "it has layers of another kind (conv)"),
    "mixtral": ({}, "it is a mixture of experts"),
    "qwen3_moe": (dict(num_experts=2, num_experts_per_tok=2, moe_intermediate_size=16), "it is a mixture of experts"),
    "gemma2": (dict(head_dim=8), "it has soft-capped attention"),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", UNSERVED)
def test_a_model_it_does_not_serve_is_left_as_it_was(kind, training):
    options, reason = UNSERVED[kind]
    model = tiny_model(kind, **options).train(training)
    before, sequences = model.config._attn_implementation, left_padded(SEQUENCES)
    torch.manual_seed(1)
    expected = hidden_states(model, **sequences)
    support = install(model)
    assert support.reason == reason and support.layers == ()
    assert model.config._attn_implementation == before != NAME and model.training == training
    torch.manual_seed(1)
    assert torch.equal(hidden_states(model, **sequences), expected)


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


def broken(model):
    model.model.norm.weight.data.fill_(torch.nan)


@pytest.mark.parametrize(("change", "reason"), [
    (other_heads, "its layers differ in their number of heads"),
    (a_layer_without_attention, "1 of its 2 layers are plain attention"),
    (a_convolution, "packed sequences give hidden states that differ by "),
    (broken, "packed sequences give hidden states that differ by nan"),
])  # fmt: skip
def test_a_model_that_turns_out_to_be_different_is_left_as_it_was(change, reason):
    model = tiny_model("llama")
    change(model)
    expected = hidden_states(model, **left_padded(SEQUENCES))
    support = install(model)
    assert support.reason.startswith(reason) and support.layers == ()
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(hidden_states(model, **left_padded(SEQUENCES)).nan_to_num(), expected.nan_to_num())


def test_a_model_whose_attention_has_sinks_is_left_as_it_was():
    model = tiny_model("llama")
    for layer in model.model.layers:  # transformers' own attention ignores them: the numbers would agree
        layer.self_attn.forward = functools.partial(layer.self_attn.forward, s_aux=torch.zeros(4))
    assert install(model).reason == "it has attention sinks" and model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(("asked", "odd"), [
    (dict(), []),
    (dict(softcap=None, s_aux=None, position_bias=None, dropout=0.0, is_causal=True), []),
    (dict(softcap=30.0), ["soft-capped attention"]),
    (dict(s_aux=torch.zeros(4)), ["attention sinks"]),
    (dict(position_bias=torch.zeros(1)), ["a position bias"]),
])  # fmt: skip
def test_what_a_layer_asks_of_its_attention_is_written_down(asked, odd):
    probe, query, key = attention.Probe.of([2], CPU), torch.zeros(1, 6, 2, 8), torch.zeros(1, 2, 2, 8)
    probe.record(None, query, key, key, asked)
    assert probe.odd == odd and probe.window == FULL
    assert probe.seen == [attention.Layer(None, 2, 8, 3)]


def test_keys_and_values_of_different_sizes_are_written_down():
    query, key = torch.zeros(1, 4, 2, 8), torch.zeros(1, 2, 2, 8)
    for other in ((query, key, torch.zeros(1, 2, 2, 4)), (torch.zeros(1, 4, 2, 16), key, key)):
        probe = attention.Probe.of([2], CPU)
        probe.record(None, *other, {})
        assert probe.odd == ["keys and values of different sizes"]


def test_the_shortest_window_counts():
    probe, query = attention.Probe.of([2], CPU), torch.zeros(1, 2, 2, 8)
    for window in (None, 9, 5, 7):
        probe.record(None, query, query, query, {"sliding_window": window})
    assert probe.window == 5 and len(probe.seen) == 4


# --- packed attention itself ---


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
    assert actual.shape == (1, 9, heads[0], D)
    begin = 0
    for length in lengths:
        for t, h in itertools.product(range(begin, begin + length), range(heads[0])):
            g = h * heads[1] // heads[0]
            weights = (key[0, g, begin : t + 1] @ query[0, h, t] * scaling).softmax(0)
            torch.testing.assert_close(actual[0, t, h], weights @ value[0, g, begin : t + 1], rtol=0, atol=1e-6)
        begin += length


def test_rotary_positions_that_depend_on_the_batch_are_refused():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = tiny_model("llama", max_position_embeddings=16, rope_parameters=rope)
    assert "longest sequence" in attention.install(model).reason
    assert not attention.install(tiny_model("llama", rope_parameters={**rope, "rope_type": "linear"})).reason
