"""What a run will take of a GPU's memory, said before it starts.

Weights, optimizer state, cache and logits are counted; activations are an estimate. The cache is that of all of a
step's completions: where it does not fit, the decode engine takes fewer at a time. Dims as in poster_grpo.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from common import head, images
from common.data import Example
from common.devices import GIB
from common.optim import AdamW

LIVE_LOGITS = 4  # fp32 copies of a chunk of logits that are alive at once


@dataclass(frozen=True)
class Plan:
    """Bytes by what they are for.

    Attributes:
        longest: tokens of the longest prompt.
        visual: of them, those of images.
        pictures: most images of a prompt.
        always: what is there all the time, by name.
        rollout: on top of that, while completions are sampled.
        update: on top of that, in a forward and backward pass.
        free: memory of the GPU that the run can have; 0 on a CPU.
    """

    longest: int
    visual: int
    pictures: int
    always: dict[str, int]
    rollout: dict[str, int]
    update: dict[str, int]
    free: int

    @classmethod
    def of(cls, model: nn.Module, optimizer: AdamW, examples: Sequence[Example], rows: int, cfg: Any) -> "Plan":
        """Plans a run.

        Args:
            model: the policy, on its device.
            optimizer: for it.
            examples: all that will be used.
            rows: completions of a step on this GPU.
            cfg: the Config of the script.
        """
        text, size = model.config.get_text_config(), model.dtype.itemsize
        longest = max(examples, key=lambda e: len(e.prompt_ids))
        visual, num_images = 0, 0
        if images.is_vlm(model.config):
            counts = [e.prompt_ids.count(model.config.image_token_id) for e in examples]
            visual, num_images = max(counts), max(len(e.columns["images"]) for e in examples)
        Q, T = len(longest.prompt_ids), cfg.max_new_tokens
        L, H, V = text.num_hidden_layers, text.hidden_size, text.vocab_size
        head_dim = getattr(text, "head_dim", None) or H // text.num_attention_heads
        per_token = 2 * L * text.num_key_value_heads * head_dim * size

        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        trained = sum(p.numel() for p in optimizer.params)
        masters = 0 if size == 4 else 4 * trained
        levels = 1 + len(getattr(getattr(model.config, "vision_config", None), "deepstack_visual_indexes", ()))
        features = rows // cfg.group_size * visual * H * levels * size
        always = {
            "weights": weights * (2 if cfg.kl_coef > 0 else 1),
            "masters and Adam": masters + 8 * trained,
            "gradients": trained * size,
            "image features": features,
        }
        free = 0
        if model.device.type == "cuda":
            free = torch.cuda.mem_get_info(model.device)[0] + torch.cuda.memory_reserved(model.device)
        num_prompts = rows // cfg.group_size  # whose part of the cache a group shares
        rollout = {"KV cache": (num_prompts * Q + rows * T) * per_token, "logits": LIVE_LOGITS * 4 * V * rows}

        tokens = max(Q + T, min(cfg.micro_batch_tokens, rows * (Q + T)))
        # what a layer keeps for its backward pass, by measurement; a compiled one computes a part of it again
        compiled = cfg.compile and model.device.type == "cuda"
        per_layer = 9.5 * H + 3.4 * text.intermediate_size if compiled else 13 * H + 5 * text.intermediate_size
        layer = int(tokens * per_layer * size)
        kept = int(tokens * H * size * L + 2.6 * layer) if cfg.gradient_checkpointing else L * layer
        update = {"activations": kept, "logits": LIVE_LOGITS * 4 * V * min(tokens, head.CHUNK_TOKENS)}
        return cls(Q, visual, num_images, always, rollout, update, free)

    @property
    def peak(self) -> int:
        """Bytes of the phase that takes most."""
        return sum(self.always.values()) + max(sum(self.rollout.values()), sum(self.update.values()))

    def __str__(self) -> str:
        def listed(parts: dict[str, int]) -> str:
            return ", ".join(f"{name} {number / GIB:.2f}" for name, number in parts.items() if number)

        seen = f", {self.visual} of them of up to {self.pictures} images" if self.pictures else ""
        lines = [
            f"plan: prompts up to {self.longest} tokens{seen}",
            f"  GiB always: {listed(self.always)}",
            f"  and in the rollout: {listed(self.rollout)}; or in the update: {listed(self.update)}",
        ]
        total = f"  together at most about {self.peak / GIB:.2f}"
        if self.free:
            total += f" of {self.free / GIB:.1f} GiB"
        if self.free and self.peak > self.free:
            total += (
                ": that does not fit. Try gradient_checkpointing, a smaller micro_batch_tokens or max_prompt_tokens, "
                "max_pixels, or a smaller model"
            )
        return "\n".join([*lines, total])
