"""Scores posters with the reward service or in this process, and evaluates policies."""

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from common.base import distributed
from common.generation.batches import RolloutBatch
from common.loop import Sampler
from common.loop.scorer import check_functions, collate, find_service
from common.run import measures
from common.tasks import scoring
from common.tasks.data import Example
from common.tasks.scoring import Scored
from grpo.poster.examples import open_images
from grpo.poster.local import LocalRewards
from grpo.poster.policy import PosterPolicy

THUMBNAIL = 384  # pixels on the long side of input images sent to the service


class PosterScorer:
    """Scores posters; the reward functions of the script add to the score."""

    def __init__(
        self, cfg: Any, tokenizer: Any, functions: scoring.Functions, resumed: Path | None = None,
        examples: Sequence[Example] = (),
    ):  # fmt: skip
        """Connects to the reward service, if the configuration names one.

        Args:
            cfg: Config of grpo/poster/poster_grpo.py.
            tokenizer: of the policy.
            functions: pairs of reward function and weight.
            resumed: checkpoint; the service must be the one that it was saved with.
            examples: all rows of the run; the reward functions are checked against them.
        """
        check_functions(functions, examples)
        self.cfg, self.tokenizer, self.functions = cfg, tokenizer, functions
        self.service = find_service(cfg, resumed) if cfg.reward_url else LocalRewards(cfg.coord_space, cfg.fonts)

    @property
    def notes(self) -> dict[str, Any]:
        """What a checkpoint records: a resumed run refuses another service, evaluate.py names the rewards."""
        names = ["poster", *scoring.names(function for function, _ in self.functions)]
        return {"reward_service": self.service.fingerprint if self.cfg.reward_url else None, "rewards": names}

    def score(
        self, examples_P: Sequence[Example], pictures_P: Sequence[Sequence[Image.Image | None]], batch: RolloutBatch,
        step: int = 0,
    ) -> Scored:  # fmt: skip
        """Scores completions.

        Args:
            examples_P: prompts.
            pictures_P: input images of each prompt.
            batch: B completions, equally many per prompt.
            step: of the training, for reward functions.

        Returns:
            Their texts, rewards [B], and parts of the reward [B] by name.
        """
        group_size = len(batch) // len(examples_P)
        arguments = collate(examples_P, batch, self.tokenizer, step, self.cfg.stops)
        if self.cfg.send_images:
            extra_P = [{**e.columns["extra_info"], "images": [*map(encode_image, e.columns["images"], pictures)]}
                       for e, pictures in zip(examples_P, pictures_P, strict=True)]  # fmt: skip
            arguments["extra_info"] = [extra for extra in extra_P for _ in range(group_size)]
        parts = self.service.scores(arguments, group_size)
        return Scored(arguments["completions"], *scoring.score(self.functions, arguments, parts))


def encode_image(ref: str, picture: Image.Image | None) -> str:
    """Encodes an input image for the service: a synthetic one as its name, others as a thumbnail.

    Args:
        ref: name of the image in its record.
        picture: the opened image; may be None for a synthetic one.

    Returns:
        The name, or a PNG in base64.
    """
    if ref.startswith("synthetic:"):
        return ref
    small, file = picture.copy(), io.BytesIO()
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    small.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def evaluate(
    cfg: Any,
    sampler: Sampler,
    policy: PosterPolicy,
    scorer: PosterScorer,
    examples: Sequence[Example],
    step: int = 0,
) -> dict[str, float]:
    """Mean reward of greedy completions, of its parts, and by the columns of `eval_by`, over all ranks; a collective.

    Args:
        cfg: Config of grpo/poster/poster_grpo.py.
        sampler: samples completions.
        policy: computes the features of input images.
        scorer: scores completions.
        examples: of this rank.
        step: steps done, for reward functions.
    """
    sums: dict[str, tuple[float, int]] = {}
    rewards: list[float] = []
    with distributed.share_errors("evaluate"):
        # smaller parts with images, whose features take memory
        size = max(1, cfg.batch_size * cfg.group_size // (4 if policy.processor else 1))
        for part in [examples[i : i + size] for i in range(0, len(examples), size)]:
            pictures = open_images(part, cfg.eval_data, policy.processor)
            batch = sampler.sample(part, temperature=0, images=policy.vision_features(part, pictures))
            scored = scorer.score(part, pictures, batch, step)
            rewards += scored.rewards.tolist()
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
    means = measures.mean_values([{"eval_reward": reward} for reward in rewards], intervals=True)
    means |= {f"eval_{name}": total / count for name, (total, count) in pairs.items() if count}
    return dict(sorted(means.items())) | measures.mean_by_column(rewards, examples, cfg.eval_columns)
