"""A text or vision-language policy for posters."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from common.base import devices
from common.base.checks import require
from common.loop import Policy, Reference
from common.model import images, logprobs
from common.model.images import Images
from common.tasks.data import Example


class PosterPolicy(Policy):
    """A `Policy` that may see images.

    Attributes:
        processor: of a policy that sees images; None: it does not.
        suppressed_ids: vision tokens, which are never sampled and have no probability.
    """

    def __init__(
        self, cfg: Any, name: str, gpus: devices.Layout, resumed: Path | None = None, processor: Any | None = None
    ):
        """Loads the policy.

        Args:
            cfg: the Config of grpo/poster/poster_grpo.py.
            name: model to begin with, hub id or folder.
            gpus: where it lives.
            resumed: checkpoint to take the weights from.
            processor: see above.

        Raises:
            ValueError: a vision tower that is to be trained, with adapters or shards.
        """
        self.load(cfg, name, gpus, resumed)
        self.processor, self.suppressed_ids = processor, images.vision_ids(self.model)
        if processor:
            processor.tokenizer = self.tokenizer  # whose padding may have been repaired; it is saved with the policy
            if cfg.freeze_vision:
                images.freeze_vision(self.model)
        require(not processor or cfg.freeze_vision or not (self.sharded or cfg.lora_rank), "freeze_vision = False",
                "with fsdp or lora_rank the vision tower stays as it is", "set it, or leave those off")  # fmt: skip
        self.wrap(functools.partial(logprobs.LogProbs, temperature=cfg.temperature, compile=cfg.compile,
                                    suppressed_ids=self.suppressed_ids))  # fmt: skip
        self.trains_vision = bool(processor) and not cfg.freeze_vision

    def see(self, examples: Sequence[Example], pictures: Sequence[Sequence[Image.Image]]) -> Images | None:
        """Vision features of prompts, computed once per prompt; None for a policy without images.

        Args:
            examples: P prompts.
            pictures: input images of each.
        """
        return self._seen_by(self.whole, examples, pictures) if self.processor else None

    def seen_by(
        self, reference: Reference, examples: Sequence[Example], pictures: Sequence[Sequence[Image.Image]]
    ) -> Images | None:
        """Vision features for a reference, if its vision tower is another one than the policy's by now.

        Args:
            reference: of the run.
            examples: P prompts.
            pictures: input images of each.
        """
        if not self.trains_vision or reference.frozen is None:
            return None
        return self._seen_by(reference.frozen, examples, pictures)

    def _seen_by(self, model: Any, examples, pictures) -> Images:
        return Images.of(model, self.processor, [e.prompt_ids for e in examples], pictures)
