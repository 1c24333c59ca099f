"""Tests of common/model/states.py: what layers without attention keep of a row, and that it stays with its row."""

import copy
import functools
import runpy

import pytest
import torch
from conftest import ROOT

from common.model import attention, states

zoo = runpy.run_path(str(ROOT / "scripts" / "dev" / "families.py"))
KNOWN = set(zoo["names"]())
NAMES = [name for name in ("lfm2", "qwen3_5_text", "nemotron_h", "falcon_h1") if name in KNOWN]
MORE = [name for name in ("jamba", "bamba", "granitemoehybrid", "qwen3_next", "zamba2") if name in KNOWN]
EACH = pytest.mark.parametrize("name", [*NAMES, *(pytest.param(name, marks=pytest.mark.families) for name in MORE)])
IDS = torch.tensor([[5, 9, 3, 7, 8, 4], [6, 6, 5, 3, 9, 11], [20, 4, 4, 8, 3, 5]])
ROUNDING = 1e-3  # of hidden states, relative; a state of another row moves them by more than 0.1


@functools.cache
def built(name):
    torch.set_num_threads(1)
    return zoo["build"](name)


def decoder_of(name):
    """A decoder whose attention takes paths, and its states."""
    model = copy.deepcopy(built(name))
    return model.get_decoder(), attention.install(model).kept


class Growing:
    """Attention over keys and values that are kept as they come, of all rows."""

    def __init__(self):
        self.kept = {}

    def attend(self, module, query, key, value, scaling):
        before = self.kept.get(module)
        key, value = (
            (key, value)
            if before is None
            else (torch.cat([x, y], 2) for x, y in zip(before, (key, value), strict=True))
        )
        self.kept[module] = key, value
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(key.shape[2] - query.shape[2])
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2)

    def select(self, rows):
        self.kept = {module: tuple(x[rows] for x in pair) for module, pair in self.kept.items()}


@torch.no_grad()
def call(decoder, ids, start, path, cached):
    positions = torch.arange(start, start + ids.shape[1]).expand(len(ids), -1)
    inputs = attention.inputs(ids.device, path) | cached
    return decoder(input_ids=ids, position_ids=positions, **inputs).last_hidden_state


def filled(decoder, kept, ids, rows, size):
    """A pool with the states of prompts in these places, and the attention that belongs to them."""
    pool, path, cache = states.Pool(decoder, kept), Growing(), states.cache_for(decoder)
    assert pool.reserve(size) and not pool.reserve(size)
    call(decoder, ids, 0, path, {pool.argument: cache, "use_cache": True})
    pool.write(cache, len(rows) // len(ids), torch.tensor(rows))
    return pool, path


def error(found, expected):
    return ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max().item()


@EACH
def test_one_token_at_a_time_gives_the_states_of_a_row_read_at_once(name):
    decoder, kept = decoder_of(name)
    with torch.no_grad():
        expected = decoder(input_ids=IDS, use_cache=False).last_hidden_state
    # the prompts stand in other places than they come, among more rows than are decoded
    order = [2, 0, 1]
    pool, path = filled(decoder, kept, IDS[:, :3], order, 5)
    back = torch.tensor(order).argsort()
    path.select(back)
    addresses = [tensor.data_ptr() for tensor in pool.tensors]
    for t in range(3, 6):
        found = call(decoder, IDS[back, t : t + 1], t, path, pool.read(3))
        assert error(found[:, 0], expected[back, t]) <= ROUNDING
    assert [tensor.data_ptr() for tensor in pool.tensors] == addresses  # updated in place, for graphs
    assert not any(tensor[3:].any() for tensor in pool.tensors)  # rows that are not decoded stay as they were


@EACH
def test_completions_of_a_prompt_begin_at_its_state_and_part(name):
    decoder, kept = decoder_of(name)
    pool, path = filled(decoder, kept, IDS[:2, :3], [0, 1, 2, 3], 4)
    for tensor in pool.tensors:
        assert torch.equal(tensor[0], tensor[1]) and torch.equal(tensor[2], tensor[3])
        assert not torch.equal(tensor[0], tensor[2])
    path.select(torch.tensor([0, 0, 1, 1]))
    rows = torch.cat([IDS[[0, 0, 1, 1], :3], torch.tensor([[30, 31], [40, 41], [50, 51], [60, 61]])], 1)
    with torch.no_grad():
        expected = decoder(input_ids=rows, use_cache=False).last_hidden_state
    for t in (3, 4):
        found = call(decoder, rows[:, t : t + 1], t, path, pool.read(4))[:, 0]
        assert error(found, expected[:, t]) <= ROUNDING
    assert error(found[[1, 0, 3, 2]], expected[:, 4]) > 0.1  # they do differ


@EACH
def test_memory_is_what_the_states_say_and_is_given_back(name):
    decoder, kept = decoder_of(name)
    pool = states.Pool(decoder, kept)
    assert kept and pool.reserve(4) and {state.kind for state in kept} <= {"conv", "recurrent"}
    assert sum(tensor.nbytes for tensor in pool.tensors) == 4 * pool.bytes_per_row > 0
    first = [tensor.data_ptr() for tensor in pool.tensors]
    assert not pool.reserve(3) and [tensor.data_ptr() for tensor in pool.tensors] == first
    assert pool.reserve(5) and all(len(tensor) == 5 for tensor in pool.tensors)
    pool.release()
    assert pool.tensors == [] and pool.reserve(1)


@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt2"])
def test_a_model_of_attention_alone_keeps_no_state(name):
    decoder = built(name).get_decoder()
    assert states.kept_by(decoder) == ()
    pool = states.Pool(decoder, ())
    assert not pool.reserve(9) and pool.read(3) == {} and pool.bytes_per_row == 0
    assert states.num_attention_layers(decoder) == 4


@EACH
def test_layers_that_attend_are_counted(name):
    decoder, kept = decoder_of(name)
    both = getattr(decoder.config, "layer_types", None) or []
    expected = sum(kind in ("full_attention", "sliding_attention", "hybrid", "hybrid_sliding") for kind in both)
    assert states.num_attention_layers(decoder) == (expected or decoder.config.num_hidden_layers)
    assert {state.layer for state in kept} <= set(range(decoder.config.num_hidden_layers))
