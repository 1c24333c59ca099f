"""Memory of decoder blocks as common/planning/blocks.py measures it, compared with real tensors of tiny models."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from common.planning import blocks, footprint, shapes

SMALL = dict(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=512)  # fmt: skip
EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32)
LINEAR = dict(head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
              linear_value_head_dim=16)  # fmt: skip
MAMBA = dict(mamba_n_heads=8, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=1, mamba_chunk_size=16)
FAMILIES = {
    "qwen2": {},
    "qwen3": dict(head_dim=16),
    "gpt2": dict(n_embd=64, n_layer=4, n_head=4),
    "gemma3_text": dict(head_dim=16, sliding_window=8),
    "qwen3_moe": dict(head_dim=16, **EXPERTS),
    "mixtral": dict(num_local_experts=8),
    "deepseek_v3": dict(n_routed_experts=8, n_group=2, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=32,
                        kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16,
                        num_key_value_heads=4),
    "qwen3_5_text": LINEAR,
    "qwen3_next": LINEAR | EXPERTS | dict(shared_expert_intermediate_size=32),
    "lfm2": dict(layer_types=["conv", "full_attention", "conv", "conv"]),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
                  num_experts=4, mamba_d_state=8, mamba_dt_rank=8),
    "granitemoehybrid": MAMBA | dict(layer_types=["mamba", "attention", "mamba", "mamba"], num_local_experts=4,
                                     num_experts_per_tok=2, shared_intermediate_size=32),
    "nemotron_h": dict(layers_block_type=["mamba", "attention", "mamba", "moe"], head_dim=16, mamba_num_heads=8,
                       mamba_head_dim=16, ssm_state_size=8, n_groups=2, chunk_size=16, n_routed_experts=4,
                       num_experts_per_tok=2, moe_intermediate_size=32, moe_shared_expert_intermediate_size=32,
                       n_group=1, topk_group=1),
    "falcon_h1": MAMBA | dict(mamba_d_ssm=128),
}  # fmt: skip
HYBRIDS = [kind for kind, own in FAMILIES.items() if {"layer_types", "mamba_d_state", "ssm_state_size",
                                                     "linear_num_key_heads"} & own.keys()]  # fmt: skip
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def config_of(kind: str, **options):
    own = SMALL | FAMILIES[kind] | options
    drop = {"num_hidden_layers"} if kind == "nemotron_h" else set()
    return AutoConfig.for_model(kind, **{name: value for name, value in own.items() if name not in drop})


def real(kind: str, dtype: str, **options) -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_of(kind, **options)).to(DTYPES[dtype]).eval()


@pytest.fixture
def shape_of(tmp_path):
    """Shape of a family, read from a folder that holds nothing but its config."""

    def read(kind: str, **options) -> shapes.Shape:
        folder = tmp_path / f"{kind}-{len(list(tmp_path.iterdir()))}"
        config_of(kind, **options).save_pretrained(folder)
        return shapes.of(str(folder))

    return read


def run(model: torch.nn.Module, ids: torch.Tensor, cache: DynamicCache) -> None:
    decoder = model.get_decoder()
    given = blocks._cached(decoder)[1]
    decoder(input_ids=ids, **{name: cache if isinstance(value, DynamicCache) else value for name, value in given.items()})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", FAMILIES)
def test_the_cache_takes_what_is_planned(shape_of, kind, dtype):
    """Allocated by transformers after a prompt and a decode step; a sliding window may hold fewer tokens."""
    shape, rows, tokens = shape_of(kind), 3, 7
    model = real(kind, dtype)
    cache = DynamicCache(config=model.get_decoder().config)
    with torch.no_grad():
        for length in (tokens - 1, 1):
            run(model, torch.ones(rows, length, dtype=torch.long), cache)
    held = sum(x.nbytes for layer in cache.layers for value in vars(layer).values() for x in tensors(value))
    planned = shape.blocks.cache(DTYPES[dtype])
    assert held == rows * (planned.row + tokens * planned.token)
    assert (planned.row > 0) == (kind in HYBRIDS) and not (planned.row and shape.plain)
    if shape.plain:
        assert planned.token == shape.layers * shape.keys * DTYPES[dtype].itemsize


def tensors(value) -> list[torch.Tensor]:
    if isinstance(value, dict | list | tuple):
        return [x for part in (value.values() if isinstance(value, dict) else value) for x in tensors(part)]
    return [value] if isinstance(value, torch.Tensor) and value.dim() > 1 else []


def kept_by_blocks(model: torch.nn.Module, rows: int, length: int) -> int:
    """Bytes of unique storages that autograd saves in decoder blocks, without parameters."""
    own, found, inside = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}, False

    def enter(*_):
        nonlocal inside
        inside = True

    def leave(*_):
        nonlocal inside
        inside = False

    for block in blocks.decoder_blocks(model.get_decoder()):
        block.register_forward_pre_hook(enter)
        block.register_forward_hook(leave)

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if inside and storage.data_ptr() not in own:
            found[storage.data_ptr()] = (storage.nbytes(), x)  # held, so that no other takes its address
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        model.get_decoder()(input_ids=torch.randint(64, (rows, length)), use_cache=False)
    return sum(size for size, _ in found.values())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", FAMILIES)
def test_blocks_keep_what_is_planned(shape_of, kind, dtype):
    planned = shape_of(kind).blocks.measure(4, 96, DTYPES[dtype]).kept
    assert planned == pytest.approx(kept_by_blocks(real(kind, dtype), 4, 96), rel=0.1)
