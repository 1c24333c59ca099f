"""Tiny random causal language models of every family that transformers has, to test what must hold for all of them.

Run: python scripts/dev/families.py phi3 jamba     (or no names: all) A line gives parameters,
seconds, standard deviation of the logits, and how far later tokens move earlier logits.

A model is its family's default configuration with small sizes, and holds a layer of every kind that
the family has. `VARIANTS` are further configurations that matter: sliding windows, rotary positions
that depend on the length, noise.
"""

import sys
import time
from pathlib import Path

import torch
import transformers
from packaging.version import Version
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from common.base.checks import require

# Fields of configurations by what they count; a field that a family lacks is left out
SIZES = {
    97: "vocab_size decoder_vocab_size pronunciation_vocab_size shape_vocab_size vocab_size_per_layer_input "
        "unpadded_vocab_size",
    256: "max_position_embeddings n_positions n_ctx max_seq_len context_length model_max_length sliding_window "
         "sliding_window_size window_size attention_window_size local_attention attention_chunk_size keep_window_size "
         "max_target_positions max_source_positions local_attention_window_len mem_len",
    64: "lru_width mamba_d_ssm shared_intermediate_size index_topk",  # rows of a sweep are shorter than the last
    48: "intermediate_size ffn_hidden_size d_ff dff dim_ff n_inner feed_forward_size intermediate_size_mlp ffn_dim "
        "d_inner encoder_ffn_dim decoder_ffn_dim dense_intermediate_size shared_experts_intermediate_size",
    32: "hidden_size n_embd d_model embedding_dim embedding_size emb_dim attention_hidden_size output_embedding_size "
        "pronunciation_embed_dim shape_embed_dim word_embed_proj_dim input_embedding_size out_hidden_size "
        "hidden_size_global adapter_in_dim adapter_out_dim adapter_input_size output_channels mlp_dim "
        "ext_pw_out_channel depthwise_separable_out_channel nemo_conv_channels downsample_hidden_size input_size",
    24: "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size "
        "expert_ffn_hidden_size",
    16: "q_lora_rank kv_lora_rank o_lora_rank qk_head_dim mamba_head_dim mamba_d_head mamba_headdim chunk_size "
        "mamba_chunk_size max_inference_chunksize d_rel rel_extent adapter_rank image_size block_size laurel_rank "
        "gated_norm_rank ffn_round_up_to_multiple_of block_multiple_of router_hidden_size local_attn_chunk_length "
        "lsh_attn_chunk_length swa_head_dim index_head_dim indexer_head_dim",
    8: "head_dim d_kv dim_head d_head kv_channels attention_head_dim attention_head_size qk_nope_head_dim "
       "qk_rope_head_dim v_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim mamba_d_state "
       "ssm_state_size state_size hidden_size_per_layer_input patch_size index_block_size indexer_budget "
       "query_pre_attn_scalar",
    4: "num_hidden_layers n_layer n_layers num_layers num_blocks depth encoder_layers decoder_layers "
       "num_decoder_layers num_encoder_layers num_attention_heads n_head n_heads num_heads encoder_attention_heads "
       "decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads "
       "linear_num_value_heads linear_num_heads mamba_n_heads mamba_num_heads num_experts num_local_experts "
       "n_routed_experts moe_num_experts mamba_dt_rank time_step_rank rotary_dim index_n_heads indexer_n_heads "
       "hc_lowrank zero_expert_num",
    2: "num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads linear_num_key_heads num_experts_per_tok "
       "num_experts_per_token moe_topk moe_top_k top_k_experts moe_k n_mamba_heads mamba_expand expand "
       "num_dense_layers eos_token_id indexer_compress_ratio hc_mult hc_count o_groups loop_gate_rank "
       "index_topk_blocks",
    1: "n_shared_experts num_shared_experts first_k_dense_replace n_group num_expert_group topk_group n_groups "
       "mamba_n_groups mamba_ngroups bos_token_id indexer_kv_heads",
    0: "pad_token_id num_nextn_predict_layers",
}  # fmt: skip
SMALL = {field: size for size, fields in SIZES.items() for field in fields.split()}

SCALE = 8  # of the usual initial weights, whose logits hardly depend on the tokens

HYBRID = ["linear_attention", "full_attention"] * 2
SLIDING = ["sliding_attention", "full_attention"] * 2
EXPERTS = ["dense", *["sparse"] * 3]
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
MROPE = ROPE | {"mrope_section": [2, 1, 1]}
# What the sizes do not say: layers of every kind, and sizes that depend on one another
CHANGES: dict[str, dict] = {
    "bailing_hybrid": dict(layer_group_size=2),
    "bamba": dict(attn_layer_indices=[1, 3]),
    "blt": dict(encoder_hash_byte_group_vocab=50),
    "cohere cohere2": dict(logit_scale=0.5),
    "cohere2_moe": dict(logit_scale=0.5, mlp_layer_types=EXPERTS),
    "cohere_compass_text": dict(
        layer_types=SLIDING, rope_parameters={"sliding_attention": MROPE, "full_attention": None}),
    "dbrx": dict(attn_config={"rope_theta": 10_000.0, "clip_qkv": 8.0}),
    "deepseek_v4": dict(
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"] * 2,
        num_hidden_layers=6, mlp_layer_types=["hash_moe", *["moe"] * 5],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}),
    "dory": dict(layer_types=SLIDING, n_input_layers=1, n_recurrent_layers=2, n_output_layers=1),
    "dots3_note_text": dict(
        swa_num_attention_heads=4, swa_num_key_value_heads=4, swa_q_lora_rank=16, swa_kv_lora_rank=16, head_dim=16,
        swa_head_dim=16, swa_qk_nope_head_dim=8, swa_v_head_dim=8),
    "flint qwen2_moe qwen3_moe qwen3_next": dict(mlp_only_layers=[0]),
    "gemma2": dict(attn_logit_softcapping=2.0, final_logit_softcapping=10.0),
    "gemma3n_text": dict(num_kv_shared_layers=2, laurel_rank=8),
    "gemma4_text gemma4_unified_text": dict(global_head_dim=16),
    "glm_moe_dsa": dict(indexer_types=["full", "shared"] * 2),
    "gpt_neo": dict(attention_types=[[["global", "local"], 2]]),
    "granite granite_swa granitemoe granitemoe_swa granitemoeshared granitemoehybrid": dict(
        embedding_multiplier=2.0, logits_scaling=2.0, residual_multiplier=0.7, attention_multiplier=0.25),
    "granitemoehybrid": dict(layer_types=HYBRID),
    "inkling2_text inkling2_loop_text": dict(n_layers_per_attn_res_block=2),
    "inkling2_loop_text": dict(loop_layer_index_start=2, loop_layer_index_end=4),
    "inkling_text": dict(mlp_layer_types=EXPERTS),
    # layers 0 to 3: state space with experts, attention, state space, attention with experts
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1, expert_layer_period=3, expert_layer_offset=0),
    "laguna": dict(layer_types=SLIDING, num_attention_heads_per_layer=[4, 8, 4, 8]),
    "lfm2 lfm2_moe": dict(layer_types=["conv", "full_attention"] * 2),
    "llama4_text": dict(interleave_moe_layer_step=2, moe_layers=[1, 3]),
    "mamba2": dict(head_dim=16),
    "mellum": dict(layer_types=SLIDING, mlp_layer_types=EXPERTS),
    "minimax_m3_vl_text": dict(layer_types=["full_attention", "minimax_m3_sparse"] * 2, mlp_layer_types=EXPERTS),
    "qwen4_exp_text": dict(
        ple_layer_ids=[1], ple_embed_dim=32, heads_per_ngram=2, ngram_vocab_size_base=50, split_ngram_parts=1,
        make_ngram_vocab_size_divisible_by=8),
    "reformer": dict(axial_pos_embds=False, attn_layers=["local", "lsh"] * 2),
    "xlm": dict(causal=True),
    "xlnet": dict(attn_type="uni"),
    "xlstm": dict(hidden_size=64, embedding_dim=64, qk_dim_factor=1.0, autocast_kernel_dtype="float32"),
    "xmod": dict(default_language="en_XX"),
    "zamba zamba2": dict(
        attention_hidden_size=64, attention_head_dim=16, num_key_value_heads=4,
        layers_block_type=["linear_attention", "hybrid"] * 2),
    "zamba2": dict(mamba_headdim=32),
    "zaya": dict(num_experts_per_tok=1, layer_types=["hybrid", "hybrid_sliding"] * 2),
}  # fmt: skip

DYNAMIC = ROPE | {"rope_type": "dynamic", "factor": 4.0}
YARN = ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = ROPE | {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0],
                   "original_max_position_embeddings": 64, "factor": 4.0}  # fmt: skip
VARIANTS: dict[str, tuple[str, dict]] = {
    "bloom-dropout": ("bloom", dict(hidden_dropout=0.1, attention_dropout=0.1)),
    "cohere-qk_norm": ("cohere", dict(use_qk_norm=True)),
    "dbrx-noise": ("dbrx", dict(ffn_config={"moe_jitter_eps": 0.1})),
    "falcon-alibi": ("falcon", dict(alibi=True)),
    "falcon-dropout": ("falcon", dict(hidden_dropout=0.1, attention_dropout=0.1)),
    "falcon-new": ("falcon", dict(new_decoder_architecture=True)),
    "gemma4_text-experts": ("gemma4_text", dict(enable_moe_block=True)),
    "gemma4_text-shared": ("gemma4_text", dict(num_kv_shared_layers=2)),
    "gpt_neox-sequential": ("gpt_neox", dict(use_parallel_residual=False)),
    "granitemoehybrid-rope": ("granitemoehybrid", dict(position_embedding_type="rope")),
    "llama-dynamic": ("llama", dict(max_position_embeddings=64, rope_parameters=DYNAMIC)),
    "llama-yarn": ("llama", dict(rope_parameters=YARN)),
    "minimax-noise": ("minimax", dict(router_jitter_noise=0.1)),
    "mixtral-noise": ("mixtral", dict(router_jitter_noise=0.1)),
    "opt-post_norm": ("opt", dict(do_layer_norm_before=False)),
    "phi3-longrope": ("phi3", dict(original_max_position_embeddings=64, rope_parameters=LONGROPE)),
    "phi4_multimodal-longrope": (
        "phi4_multimodal", dict(original_max_position_embeddings=64, rope_parameters=LONGROPE)),
    "phimoe-longrope": ("phimoe", dict(rope_parameters=LONGROPE | {"short_mscale": 1.0, "long_mscale": 1.2})),
    "phimoe-noise": ("phimoe", dict(router_jitter_noise=0.1, input_jitter_noise=0.1)),
    "stablelm-parallel": ("stablelm", dict(use_parallel_residual=True, qk_layernorm=True)),
    "zamba2-blocks": ("zamba2", dict(num_mem_blocks=2, use_shared_attention_adapter=True, use_mem_rope=True)),
}  # fmt: skip
WINDOWS = {  # families with sliding windows, by what names the size of the window
    "sliding_window": "afmoe beam cohere2 cohere2_moe cohere_compass_text cwm deepseek_v4 doge dory dots1 "
        "dots3_note_text exaone4 exaone_moe flint gemma2 gemma3 gemma3_text gemma3n_text gemma4_text "
        "gemma4_unified_text gpt_oss granite_swa granitemoe_swa kolibri1 laguna lara_mini lfm3 mellum mimo_v2_flash "
        "minimax ministral ministral3 mistral mixtral modernbert-decoder olmo3 phi3 phimoe qwen2 qwen2_moe qwen3 "
        "qwen3_moe smollm3 starcoder2 vaultgemma zaya",
    "sliding_window_size": "inkling_text inkling2_text inkling2_loop_text",
    "attention_window_size": "recurrent_gemma",
    "attention_chunk_size": "llama4_text",
    "window_size": "gpt_neo",
}  # fmt: skip
for field, families in WINDOWS.items():
    VARIANTS |= {f"{family}-window": (family, {field: 8}) for family in families.split()}
for family in ("dots1", "qwen2", "qwen2_moe", "qwen3", "smollm3"):
    VARIANTS[f"{family}-window"][1].update(use_sliding_window=True, layer_types=SLIDING)
VARIANTS["qwen3_moe-window"][1].update(use_sliding_window=True)

# Some are found by `leak`, not by their names
NOT_CAUSAL: dict[str, str] = {
    "cpmant": "every token of a prompt attends to every other",
    "gemma3n": "its vision tower needs the package timm; gemma3n_text is its language model",
    "gemma4_assistant": "drafts from the hidden states and keys of another model",
    "gemma4_unified_assistant": "drafts from the hidden states and keys of another model",
    "musicgen": "codes of sound, several at a position, not text",
    "musicgen_melody": "codes of sound, several at a position, not text",
    "prophetnet": "logits of earlier positions depend on later tokens: 7e-4 at random weights, also in fp64",
}
if Version(transformers.__version__) < Version("5.24"):  # seen in 5.17: masks are not causal, whatever is_decoder says
    NOT_CAUSAL |= dict.fromkeys(
        ("big_bird", "doge", "megatron-bert", "rembert", "roformer"), "not causal before transformers 5.24"
    )
KNOWN = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VARIANTS = {name: varied for name, varied in VARIANTS.items() if varied[0] in KNOWN - set(NOT_CAUSAL)}


def _layers(values: list) -> list:
    """Four layers with every kind in turn; dense MLPs first, so that experts follow every kind of attention."""
    kinds = list(dict.fromkeys(values))
    return [kinds[0], *kinds[1:], *kinds[-1:] * 4][:4] if "dense" in kinds else (kinds * 4)[:4]


def _small(kind: type[PreTrainedConfig], family: str) -> dict:
    """Arguments for a small configuration of a class."""
    default = kind()
    fields = default.to_dict()
    small = {field: SMALL[field] for field in fields if field in SMALL}
    if "kv_lora_rank" in fields:  # latent attention has keys of every head
        small["num_key_value_heads"] = small["num_attention_heads"]
    if "is_decoder" in fields:
        small["is_decoder"] = True
    for field, value in fields.items():
        if isinstance(value, list) and field not in SMALL and len(value) == fields.get("num_hidden_layers"):
            small[field] = _layers(value)
        elif field in kind.sub_configs and value is not None:
            part = getattr(default, field)
            small[field] = {"model_type": part.model_type, **_small(type(part), part.model_type)}
    for families, changes in CHANGES.items():
        if family in families.split():
            small = _merged(small, changes)
    return small


def _merged(fields: dict, changes: dict) -> dict:
    """Fields with changes; those of a part of the configuration one by one."""
    parts = {k: fields[k] | v for k, v in changes.items() if isinstance(v, dict) and isinstance(fields.get(k), dict)}
    return fields | changes | parts


def names() -> list[str]:
    """Families that are causal models of text here, in alphabetical order."""
    return sorted(KNOWN - set(NOT_CAUSAL))


def config(name: str, **changes) -> PreTrainedConfig:
    """The small configuration of a family or a variant.

    Args:
        name: one of `names()` or `VARIANTS`.
        **changes: fields that differ; those of the language model, where images or sounds have
            parts of their own.

    Returns:
        A configuration for `AutoModelForCausalLM.from_config`.

    Raises:
        ValueError: there is no such family, or it is in `NOT_CAUSAL`.
    """
    family, varied = VARIANTS.get(name, (name, {}))
    require(family in KNOWN, f"name = {name!r}", "no family of causal language models", "see names() and VARIANTS")
    require(family not in NOT_CAUSAL, f"name = {name!r}", NOT_CAUSAL.get(family, ""), "see names() and VARIANTS")
    kind = CONFIG_MAPPING[family]
    small = _small(kind, family)
    if "text_config" in small:
        small["text_config"] = _merged(small["text_config"], varied | changes)
    else:
        small = _merged(small, varied | changes)
    return kind(**small)


def build(name: str, seed: int = 0, **changes) -> PreTrainedModel:
    """A tiny model with random weights, in fp32 and eval mode, whose logits differ clearly between tokens.

    Args:
        name: one of `names()` or `VARIANTS`.
        seed: of the weights.
        **changes: fields of the configuration that differ.

    Returns:
        The model, on the CPU.

    Raises:
        ValueError: there is no such family, or it is in `NOT_CAUSAL`.
    """
    settings = config(name, **changes)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32, trust_remote_code=False).eval()
        for weight_name, weight in model.named_parameters():
            if weight.ndim > 1 and not weight_name.endswith("A_log"):
                weight *= SCALE
            elif weight.ndim == 1:
                weight += 0.1 * torch.randn_like(weight)
        head = model.get_output_embeddings()
        ids = torch.arange(3, model.config.get_text_config(decoder=True).vocab_size)[None, :24]
        head.weight *= 2 / model(input_ids=ids, use_cache=False).logits.std(-1).mean()
    return model


@torch.no_grad()
def leak(model: PreTrainedModel, length: int = 24) -> float:
    """How far the logits at earlier positions move when the last token changes: 0 for a causal model, up to rounding.

    Args:
        model: a language model in eval mode.
        length: of the two rows compared, in tokens.

    Returns:
        The largest difference of a logit; NaN if a logit is not finite.
    """
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(3, vocabulary, (2, length), generator=torch.Generator().manual_seed(0))
    rows = []
    for _ in range(2):
        rows.append(model(input_ids=ids, use_cache=False).logits[:, :-1])
        ids[:, -1] = 3 + (ids[:, -1] - 2) % (vocabulary - 3)
    return (rows[0] - rows[1]).abs().max().item()


def main(chosen: list[str]) -> int:
    """Prints a line for every family and variant, or for those given; returns how many could not be built."""
    logging.set_verbosity_error()
    failed = 0
    for name in chosen or [*names(), *VARIANTS]:
        try:
            build(name)  # imports what the family needs
            start = time.perf_counter()
            model = build(name)
            seconds = time.perf_counter() - start
            with torch.no_grad():
                spread = model(input_ids=torch.arange(3, 27)[None], use_cache=False).logits.std(-1).mean()
            print(f"{name} {model.num_parameters()} {seconds:.2f} {spread:.2f} {leak(model):.1e}", flush=True)
        except Exception as e:
            failed += 1
            print(f"{name} FAIL {type(e).__name__} {str(e)[:300]!r}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
