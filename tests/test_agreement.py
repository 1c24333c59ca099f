"""What rounding explains where two ways of computing one model differ."""

import copy
import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from common.model import agreement

ROWS = ([1001, 1002, 1003, 1004], [1005, 1003, 1001])


def deep_model(scale: float) -> LlamaForCausalLM:
    """Forty layers in bf16; the larger their weights, the more they amplify a rounding error."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=40, num_attention_heads=4)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=2048, num_key_value_heads=2, **sizes)).eval()
    with torch.no_grad():
        for weight in model.model.layers.parameters():
            if weight.dim() == 2:
                weight.mul_(scale)
    return model.bfloat16()


@pytest.mark.parametrize("scale", [1.0, 4.0, 16.0])
def test_the_measured_rounding_error_is_that_of_the_dtype(scale):
    model = deep_model(scale)
    exact = agreement.plain_states(copy.deepcopy(model).double(), ROWS)
    error = agreement.largest_error(agreement.plain_states(model, ROWS), exact)
    measured = agreement.measured_rounding(model, ROWS)
    assert error < agreement.MARGIN * measured < 12 * error  # each of the two passes compared has an error
    assert not model.get_input_embeddings()._forward_hooks


def test_a_model_that_amplifies_rounding_is_allowed_more_but_never_what_a_wrong_mask_gives():
    calm, wild = deep_model(1.0), deep_model(16.0)
    assert agreement.allowed(0.05, wild, ROWS) == agreement.allowed(0.2, calm, ROWS) == agreement.rounding(calm) == 0.1
    assert 0.2 < agreement.allowed(0.2, wild, ROWS) <= agreement.LARGEST
    together = agreement.plain_states(wild, [[*ROWS[0], *ROWS[1]]])[0].split([4, 3])  # the second sees the first
    wrong = agreement.largest_error(together, agreement.plain_states(wild, ROWS))
    assert wrong > 2 * agreement.allowed(wrong, wild, ROWS)
    assert agreement.allowed(math.nan, wild, ROWS) == agreement.allowed(math.inf, wild, ROWS) == 0.1


@pytest.mark.parametrize("size", [10, 19, 64, 1500, 32000])
def test_checks_read_ordinary_tokens_of_the_vocabulary(size):
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=size, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    )
    ids = agreement.token_ids(model, range(10))
    assert len(set(ids)) == 10 and min(ids) >= 0 and max(ids) < size
    assert size < 2000 or min(ids) == agreement.FIRST
