"""Scores of posters, by the reward service or in this process, and evaluations."""

import base64
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from common.base import distributed
from common.generation.batches import RolloutBatch
from common.loop import Sampler
from common.loop.scorer import collate, find_service
from common.tasks import rewards
from common.tasks.data import Example
from common.tasks.rewards import Scored
from grpo.poster.examples import open_images
from grpo.poster.local import LocalRewards
from grpo.poster.policy import PosterPolicy

THUMBNAIL = 384  # pixels, long side of the copies of input images that go to the service


class PosterScorer:
    """Scores posters; functions of the script add to the score."""

    def __init__(
        self, cfg: Any, tokenizer: Any, functions: Sequence[tuple[Callable, float]], resumed: Path | None = None
    ):
        """Finds the reward service, if the configuration names one.

        Args:
            cfg: the Config of grpo/poster/poster_grpo.py.
            tokenizer: of the policy.
            functions: reward functions and their weights.
            resumed: checkpoint; the run goes on with the service that it began with.
        """
        self.cfg, self.tokenizer, self.functions = cfg, tokenizer, functions
        self.service = find_service(cfg, resumed) if cfg.reward_url else LocalRewards(cfg.coord_space)

    @property
    def notes(self) -> dict[str, Any]:
        """What a checkpoint keeps, to refuse another service when the run is resumed."""
        return {"reward_service": self.service.fingerprint if self.cfg.reward_url else None}

    def score(
        self, examples_P: Sequence[Example], pictures_P: Sequence[Sequence[Image.Image | None]], batch: RolloutBatch
    ) -> Scored:
        """Scores completions.

        Args:
            examples_P: prompts.
            pictures_P: their input images.
            batch: completions, an equal number for each prompt.

        Returns:
            Their texts, rewards [B], and the parts of the reward by name.
        """
        group_size = len(batch) // len(examples_P)
        completions_B, answers_B, columns = collate(examples_P, batch, self.tokenizer)
        if self.cfg.send_images:
            extra_P = [{**e.columns["extra_info"], "images": [*map(sent, e.columns["images"], pictures)]}
                       for e, pictures in zip(examples_P, pictures_P, strict=True)]  # fmt: skip
            columns["extra_info"] = [extra for extra in extra_P for _ in range(group_size)]
        parts = self.service.scores(completions_B, answers_B, columns, group_size)
        return Scored(completions_B, *rewards.score(self.functions, completions_B, answers_B, columns, extra=parts))


def sent(reference: str, picture: Image.Image | None) -> str:
    """An input image as the service takes it: a synthetic one by its name, others as a small copy.

    Args:
        reference: of the image in its record.
        picture: opened.
    """
    if reference.startswith("synthetic:"):
        return reference
    small, file = picture.copy(), io.BytesIO()
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    small.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def evaluate(
    cfg: Any, sampler: Sampler, policy: PosterPolicy, scorer: PosterScorer, examples: Sequence[Example]
) -> dict[str, float]:
    """Mean reward of greedy completions and means of its parts, over the examples of all ranks; a collective.

    Args:
        cfg: the Config of grpo/poster/poster_grpo.py.
        sampler: gives the completions.
        policy: sees the input images.
        scorer: scores them.
        examples: of this rank.
    """
    sums: dict[str, tuple[float, int]] = {}
    with distributed.share_errors("evaluate"):
        # images of many prompts take memory
        size = max(1, cfg.batch_size * cfg.group_size // (4 if policy.processor else 1))
        for part in [examples[i : i + size] for i in range(0, len(examples), size)]:
            pictures = open_images(part, cfg.eval_data, policy.processor)
            batch = sampler.sample_one(part, temperature=0, images=policy.see(part, pictures))
            scored = scorer.score(part, pictures, batch)
            for name, values in {"reward": scored.rewards, **scored.by_function}.items():
                known = values[~values.isnan()]
                total, count = sums.get(name, (0.0, 0))
                sums[name] = total + known.sum().item(), count + len(known)
    by_rank = distributed.gather_objects(sums)
    names = sorted({name for own in by_rank for name in own} - {"service"})
    pairs = {name: [sum(own.get(name, (0, 0))[k] for own in by_rank) for k in range(2)] for name in names}
    count = distributed.sum_over_ranks(len(examples))
    if missing := count - pairs.get("reward", [0, 0])[1]:
        distributed.print_main(f"warning: evaluation: {missing} of {count} rewards are NaN and left out")
    return {f"eval_{name}": total / count for name, (total, count) in pairs.items() if count}
