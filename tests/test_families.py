"""scripts/dev/families.py: tiny models of every causal family, and the check that finds those that are not causal."""

import math
import runpy

import pytest
import torch
from conftest import ROOT

families = runpy.run_path(str(ROOT / "scripts" / "dev" / "families.py"))
build, leak, NAMES = families["build"], families["leak"], families["names"]()
# Attention with all heads' keys, latent, windowed, with sinks; state spaces; delta rules; convolutions; experts
KINDS = ["gpt2", "falcon", "gemma2", "deepseek_v3", "mistral-window", "gpt_oss", "phi3-longrope", "jamba", "mamba2",
         "qwen3_next", "lfm2_moe", "rwkv"]  # fmt: skip
REST = [name for name in [*NAMES, *families["VARIANTS"]] if name not in KINDS]


@pytest.mark.parametrize("name", [*KINDS, *(pytest.param(name, marks=pytest.mark.families) for name in REST)])
def test_a_family_is_small_causal_and_tells_tokens_apart(name):
    model = build(name)
    assert sum(p.numel() for p in model.parameters()) < 2_000_000
    assert leak(model) <= 1e-5
    with torch.no_grad():
        logits = model(input_ids=torch.arange(3, 27)[None], use_cache=False).logits
    assert 1 < logits.std(-1).mean() < 3


BIDIRECTIONAL = {"bert": dict(is_decoder=False), "xlnet": dict(attn_type="bi"), "doge": dict(is_moe=True)}


@pytest.mark.parametrize(
    ("family", "changes"), [(family, changes) for family, changes in BIDIRECTIONAL.items() if family in NAMES]
)
def test_later_tokens_seen_by_earlier_ones_are_found(family, changes):
    assert leak(build(family, **changes)) > 1e-3


def test_a_logit_that_is_not_finite_is_no_agreement():
    model = build("llama")
    model.lm_head.weight.data[5] = math.inf
    assert math.isnan(leak(model))


def test_a_hybrid_has_every_kind_of_layer():
    kinds = {name: set(families["config"](name).layer_types) for name in ("jamba", "bamba", "qwen3_next", "lfm2_moe")}
    assert {*kinds["jamba"]} == {*kinds["bamba"]} == {*kinds["qwen3_next"]} == {"linear_attention", "full_attention"}
    assert kinds["lfm2_moe"] == {"conv", "full_attention"}
    assert set(families["config"]("nemotron_h").layer_types) == {"linear_attention", "moe", "full_attention", "mlp"}


def test_weights_depend_on_the_seed_alone():
    torch.manual_seed(1)
    first = build("llama", seed=3).state_dict()
    state = torch.random.get_rng_state()
    again, other = build("llama", seed=3).state_dict(), build("llama", seed=4).state_dict()
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_changes_reach_the_language_model():
    assert families["config"]("gemma3", sliding_window=8).text_config.sliding_window == 8
    assert families["config"]("mistral-window").sliding_window == 8


@pytest.mark.parametrize("name", ["no-such-family", *families["NOT_CAUSAL"]])
def test_what_cannot_be_built_is_refused_with_the_reason(name):
    with pytest.raises(ValueError, match=families["NOT_CAUSAL"].get(name, "no family of causal language models")):
        build(name)
