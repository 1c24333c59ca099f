"""A text or vision-language policy for posters."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn

from common.base import devices
from common.base.checks import require
from common.distill.distillation import CrossEntropy
from common.generation.batches import RolloutBatch
from common.loop import Policy, Reference, supervised
from common.model import images, logprobs
from common.model.images import Images
from common.tasks.data import Example


class PosterPolicy(Policy):
    """A `Policy` for text, or for text and images.

    Attributes:
        processor: of a vision-language policy; None: a text policy.
        suppressed_ids: vision tokens, which are never sampled and have probability 0.
        trains_vision: whether the vision tower is trained.
    """

    def __init__(
        self, cfg: Any, name: str, gpus: devices.Layout, resumed: Path | None = None, processor: Any | None = None
    ):
        """Loads the policy.

        Args:
            cfg: Config of grpo/poster/poster_grpo.py.
            name: hub id or folder of the starting model.
            gpus: its devices.
            resumed: checkpoint to load weights from.
            processor: of a vision-language policy; None: a text policy.

        Raises:
            ValueError: the vision tower cannot be trained with LoRA or FSDP.
        """
        self.load(cfg, name, gpus, resumed)
        self.processor, self.suppressed_ids = processor, images.vision_ids(self.model)
        if processor:
            processor.tokenizer = self.tokenizer  # saved with the policy, padding repaired
            if cfg.freeze_vision:
                images.freeze_vision(self.model)
        require(not processor or cfg.freeze_vision or not (self.sharded or cfg.lora_rank), "freeze_vision = False",
                "with fsdp or lora_rank the vision tower stays as it is", "set it, or leave those off")  # fmt: skip
        self.wrap(self.loss_wrapper(cfg))
        self.trains_vision = bool(processor) and not cfg.freeze_vision

    def loss_wrapper(self, cfg: Any) -> Callable[[nn.Module], nn.Module]:
        """What turns the model into the module that the loss calls."""
        return functools.partial(logprobs.LogProbs, temperature=cfg.temperature, compile=cfg.compile,
                                 suppressed_ids=self.suppressed_ids)  # fmt: skip

    def vision_features(self, examples: Sequence[Example], pictures: Sequence[Sequence[Image.Image]]) -> Images | None:
        """Vision features of P prompts, computed once per prompt; None for a text policy.

        Args:
            examples: P prompts.
            pictures: input images of each prompt.
        """
        return self._features(self.whole, examples, pictures) if self.processor else None

    def reference_features(
        self, reference: Reference, examples: Sequence[Example], pictures: Sequence[Sequence[Image.Image]]
    ) -> Images | None:
        """Vision features from the reference's own vision tower; None if it equals the policy's.

        Args:
            reference: of the run.
            examples: P prompts.
            pictures: input images of each prompt.
        """
        if not self.trains_vision or reference.frozen is None:
            return None
        return self._features(reference.frozen, examples, pictures)

    def _features(self, model: Any, examples, pictures) -> Images:
        """Vision features from the vision tower of `model`."""
        return Images.of(model, self.processor, [e.prompt_ids for e in examples], pictures)


class SupervisedPosterPolicy(PosterPolicy):
    """A `PosterPolicy` whose forward pass computes the cross-entropy of given posters."""

    def loss_wrapper(self, cfg: Any) -> Callable[[nn.Module], nn.Module]:
        """What turns the model into the module that the loss calls."""
        return functools.partial(CrossEntropy, compile=cfg.compile)

    def cross_entropy(
        self, micro: RolloutBatch, weights_mC: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Cross-entropy of a micro-batch; see `supervised.SFTPolicy.cross_entropy`."""
        return supervised.cross_entropy(self.wrapped[micro.replica or 0], micro, weights_mC)
