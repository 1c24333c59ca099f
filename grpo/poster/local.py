"""Rewards without a service: the CPU formula inside the training process, for first runs and tests."""

import math
from collections.abc import Mapping
from typing import Any

from grpo.poster import assessors, reward
from grpo.poster.fonts import Fonts

PARTS = ("structure", "accuracy", "visual", "format", "hygiene", "parse_ok")


class LocalRewards:
    """Rewards with the interface of `common.tasks.reward_client.RewardService`."""

    def __init__(self, coord_space: str):
        """Loads the built-in font.

        Args:
            coord_space: of the policy's boxes, "px" or "rel1000".
        """
        self.coord_space, self.fonts, self.fingerprint = coord_space, Fonts(), f"local-{reward.VERSION}"

    def scores(self, arguments: Mapping[str, Any], group_size: int) -> dict[str, tuple[list[float], float]]:
        """Scores completions; the result is the argument `extra` of `scoring.score`.

        Args:
            arguments: of reward functions: `completions`, ground truths as JSON in `answers`;
                `extra_info` may hold the input images.
            group_size: unused.

        Returns:
            "service": the scores with weight 1; parts of the reward by name, with weight 0.
        """
        results = []
        rows = zip(arguments["completions"], arguments["answers"], arguments["extra_info"], strict=True)
        for completion, answer, extra in rows:
            given = enumerate(extra.get("images", ()), 1)
            pictures = {f"image_{k}": assessors.image(reference, "") for k, reference in given} or None
            results.append(reward.score(completion, answer, fonts=self.fonts, images=pictures,
                                        coord_space=self.coord_space))  # fmt: skip
        named = {"service": ([result["score"] for result in results], 1.0)}
        return named | {part: ([float(result.get(part, math.nan)) for result in results], 0.0) for part in PARTS}
