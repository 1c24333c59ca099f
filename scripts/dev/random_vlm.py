"""Saves a vision-language model of a real shape with random weights, to measure memory and time without a download.

Run: python scripts/dev/random_vlm.py --shape 7b --output models/vlm-7b
     python grpo/poster/poster_grpo.py --policy_model models/vlm-7b --steps 3 --eval_data ""
It has the tokenizer of the built-in poster policies, which makes prompts longer than the model's own would.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from common.base import checks, config
from common.base.checks import require
from grpo.poster import toys

# Qwen2.5-VL-Instruct, from its config.json files; heads have 128 dimensions
SHAPES = {
    "3b": dict(hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16,
               num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True),
    "7b": dict(hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
               num_key_value_heads=4, vocab_size=152064, tie_word_embeddings=False),
    "tiny": dict(hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=2,
                 num_key_value_heads=1, vocab_size=512, tie_word_embeddings=True),
}  # fmt: skip
VISION = dict(depth=32, hidden_size=1280, intermediate_size=3420, num_heads=16, patch_size=14, spatial_merge_size=2,
              temporal_patch_size=2, window_size=112, fullatt_block_indexes=[7, 15, 23, 31])  # fmt: skip
TINY_VISION = dict(depth=2, hidden_size=64, intermediate_size=128, num_heads=2, fullatt_block_indexes=[1])


@dataclass(frozen=True)
class Config:
    """A vision-language model of a real shape with random weights."""

    shape: str = "7b"  # "3b" or "7b": Qwen2.5-VL-Instruct; "tiny"
    output: str = "models/vlm-7b"  # folder to write
    dtype: str = "bf16"  # of the saved weights
    seed: int = 0  # of the weights

    def __post_init__(self):
        checks.one_of(self, shape=SHAPES, dtype=("bf16", "fp32"))
        require(not Path(self.output).exists(), f"output = {self.output!r}", "is there already", "give another folder")


def main(cfg: Config) -> None:
    """Builds the model, on a GPU if there is one: drawing billions of numbers takes minutes on a CPU."""
    tokenizer = toys.build_tokenizer()
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    vision_ids = dict(zip(names, tokenizer.convert_tokens_to_ids(toys.VISION), strict=True))
    shape = SHAPES[cfg.shape]
    half = shape["hidden_size"] // shape["num_attention_heads"] // 2
    sections = [half // 4, 3 * half // 8, half - half // 4 - 3 * half // 8]
    text = dict(**shape, max_position_embeddings=128_000, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
                rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections})  # fmt: skip
    vision = VISION | (TINY_VISION if cfg.shape == "tiny" else {}) | {"out_hidden_size": shape["hidden_size"]}
    model_config = Qwen2_5_VLConfig(text_config=text, vision_config=vision,
                                    tie_word_embeddings=shape["tie_word_embeddings"], **vision_ids)  # fmt: skip
    torch.manual_seed(cfg.seed)
    torch.set_default_dtype({"bf16": torch.bfloat16, "fp32": torch.float32}[cfg.dtype])
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen2_5_VLForConditionalGeneration(model_config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(cfg.output)
    processor = toys.build_processor(tokenizer)
    processor.image_processor.size = {"shortest_edge": 56 * 56, "longest_edge": 12_845_056}  # areas, as shipped
    processor.save_pretrained(cfg.output)
    print(f"{cfg.output}: {model.num_parameters() / 1e9:.2f} billion parameters")


if __name__ == "__main__":
    main(config.parse(Config))
