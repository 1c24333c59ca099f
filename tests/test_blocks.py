"""Memory of decoder blocks as common/planning/blocks.py measures it, compared with real tensors of tiny models."""

import pytest
import torch
from conftest import ROOT
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from common.model import lora, states
from common.planning import blocks, footprint, layouts, plan, shapes

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
def folder_of(tmp_path):
    """A folder that holds nothing but the config of a family."""

    def write(kind: str, **options) -> str:
        folder = tmp_path / f"{kind}-{len(list(tmp_path.iterdir()))}"
        config_of(kind, **options).save_pretrained(folder)
        return str(folder)

    return write


@pytest.fixture
def shape_of(folder_of):
    """Shape of a family, from its config alone."""
    return lambda kind, **options: shapes.of(folder_of(kind, **options))


BOTH = [(kind, "bf16") for kind in FAMILIES] + [(kind, "fp32") for kind in ("qwen3", "mixtral", "qwen3_5_text")]
ONE_OF_EACH = {("gpt2", "bf16"), ("mixtral", "bf16"), ("qwen3", "fp32"), ("qwen3_5_text", "bf16"), ("jamba", "bf16")}


@pytest.mark.parametrize(("kind", "dtype"), BOTH)
@pytest.mark.families
def test_the_cache_takes_what_is_planned(shape_of, kind, dtype):
    """Allocated by transformers after a prompt and a decode step; a sliding window may hold fewer tokens."""
    shape, rows, tokens = shape_of(kind), 3, 7
    model = real(kind, dtype)
    cache = DynamicCache(config=model.get_decoder().config)
    name = states.argument(model.get_decoder())
    with torch.no_grad():
        for length in (tokens - 1, 1):
            model.get_decoder()(input_ids=torch.ones(rows, length, dtype=torch.long), **{name: cache}, use_cache=True)
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


@pytest.mark.parametrize(
    ("kind", "dtype"), [pytest.param(*x, marks=[] if x in ONE_OF_EACH else pytest.mark.families) for x in BOTH]
)
def test_blocks_keep_what_is_planned(shape_of, kind, dtype):
    planned = shape_of(kind).blocks.measure(4, 96, DTYPES[dtype]).kept
    assert planned == pytest.approx(kept_by_blocks(real(kind, dtype), 4, 96), rel=0.1)


@pytest.mark.parametrize("kind", ["qwen2", "gpt2", "qwen3_5_text"])
def test_blocks_with_adapters_keep_what_is_planned(shape_of, kind):
    planned = shape_of(kind).blocks.measure(4, 96, torch.bfloat16, adapters=True).kept
    adapted = lora.add(real(kind, "bf16"), lora.Options(1, 1.0))
    assert planned == pytest.approx(kept_by_blocks(adapted, 4, 96), rel=0.1)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "qwen3_5_text", "granitemoehybrid"])
@pytest.mark.families
def test_a_backward_pass_takes_what_is_planned(shape_of, kind, checkpointing):
    rows, length, H = 16, 128, SMALL["hidden_size"]
    planned = shape_of(kind).blocks.measure(rows, length, torch.bfloat16)
    model, ids = real(kind, "bf16").train(), torch.randint(64, (rows, length))
    decoder = model.get_decoder()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    if checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    with blocks.Allocated() as allocated:
        decoder(input_ids=ids, use_cache=False).last_hidden_state.sum().backward()
    kept = planned.kept
    if checkpointing:
        kept = planned.layer + 2 * rows * length * H * len(blocks.decoder_blocks(decoder))
    last = rows * length * H * (4 + 2)  # the last norm
    assert allocated.peak == pytest.approx(kept + planned.at_work + last, rel=0.1)


def test_a_plan_counts_states_for_each_row_and_experts_for_each_token(folder_of):
    def gpu(folder: str, **options) -> footprint.Gpu:
        sizes = dict(batch_size=4, group_size=8, max_new_tokens=100, max_prompt_tokens=28) | options
        given = [f"--{name}={value}" for name, value in (sizes | dict(policy_model=folder)).items()]
        module, cfg = layouts.load(ROOT / "gspo/gspo.py", given)
        return plan.of(cfg, layouts.all_ranks(module, cfg)).gpus[0]

    folder = folder_of("qwen3_5_text")
    hybrid, held = gpu(folder), shapes.of(folder).blocks.cache(torch.bfloat16)
    assert hybrid.parts("rollout")["states"] == 32 * held.row > 0 and hybrid.step > 0
    assert hybrid.cache == held.token * (28 + 8 * 100)
    longer = gpu(folder, max_new_tokens=200)
    assert longer.states == hybrid.states and longer.cache > hybrid.cache
    # more experts take weights, not activations; more experts per token take activations
    some, more, busy = (
        gpu(folder_of("qwen3_moe", **options)) for options in ({}, dict(num_experts=16), dict(num_experts_per_tok=4))
    )
    assert some.states == 0 and more.always["weights"] > 1.5 * some.always["weights"] == 1.5 * busy.always["weights"]
    activations = [x.phases["loss"]["activations"] for x in (some, more, busy)]
    assert activations[1] == pytest.approx(activations[0], rel=0.03) and activations[2] > 1.2 * activations[0]


@pytest.mark.families
def test_models_without_attention_and_with_mlps_of_several_sizes_have_a_shape(tmp_path):
    sizes = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=8)
    AutoConfig.for_model("mamba", **sizes).save_pretrained(tmp_path / "mamba")
    shape = shapes.of(str(tmp_path / "mamba"))
    assert (shape.keys, shape.plain) == (0, False) and shape.blocks.cache(torch.bfloat16).row > 0
    inner = dict(hidden_size_per_layer_input=8, vocab_size_per_layer_input=64, intermediate_size=[64, 128])
    AutoConfig.for_model("gemma3n_text", **sizes, **inner, num_kv_shared_layers=0).save_pretrained(tmp_path / "nested")
    assert (shapes.of(str(tmp_path / "nested")).inner, shapes.of(str(tmp_path / "nested")).plain) == (128, False)


def test_what_cannot_be_measured_is_said():
    def fails() -> torch.nn.Module:
        raise RuntimeError("no such kernel\nat length")

    for measure in (lambda b: b.measure(1, 8, torch.bfloat16), lambda b: b.cache(torch.bfloat16)):
        with pytest.raises(ValueError, match=r"^model 'odd': RuntimeError: no such kernel; .*be planned") as raised:
            measure(blocks.Blocks("odd", fails))
        assert "\n" not in str(raised.value)
    empty = AutoModelForCausalLM.from_config(config_of("qwen2", num_hidden_layers=0))
    with pytest.raises(ValueError, match="no decoder blocks"):
        blocks.Blocks("empty", lambda: empty.to("meta")).measure(1, 8, torch.bfloat16)
