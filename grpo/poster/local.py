"""Rewards without a service: the CPU formula inside the training process, for first runs and tests."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from common.base.distributed import print_main
from grpo.poster import assessors, reward
from grpo.poster.fonts import Fonts, missing_text

PARTS = ("structure", "accuracy", "visual", "format", "hygiene", "parse_ok", "missing_glyphs")


class LocalRewards:
    """Rewards with the interface of `common.tasks.reward_client.RewardService`."""

    def __init__(self, coord_space: str, font_paths: Sequence[str] = ()):
        """Loads the fonts.

        Args:
            coord_space: of the policy's boxes, "px" or "rel1000".
            font_paths: font files to use before the built-in font.

        Raises:
            ValueError: a file is not a font.
        """
        self.coord_space, self.fonts = coord_space, Fonts(font_paths)
        self.fingerprint = f"local-{reward.VERSION} {self.fonts.identity}"
        self._warned = False

    def scores(self, arguments: Mapping[str, Any], group_size: int) -> dict[str, tuple[list[float], float]]:
        """Scores completions; the result is the argument `extra` of `scoring.score`.

        Args:
            arguments: of reward functions: `completions`, ground truths as JSON in `answers`;
                `extra_info` may hold the input images.
            group_size: unused.

        Returns:
            "service": the scores with weight 1; parts of the reward by name, with weight 0. The first characters that
            no font has are printed as a warning.
        """
        results = []
        rows = zip(arguments["completions"], arguments["answers"], arguments["extra_info"], strict=True)
        for completion, answer, extra in rows:
            given = enumerate(extra.get("images", ()), 1)
            pictures = {f"image_{k}": assessors.image(reference, "") for k, reference in given} or None
            results.append(reward.score(completion, answer, fonts=self.fonts, images=pictures,
                                        coord_space=self.coord_space))  # fmt: skip
        missing = "".join(result["details"].get("missing_characters", "") for result in results)
        if missing and not self._warned:
            self._warned = True
            print_main(f"warning: posters: {missing_text(missing)}; the metric reward_missing_glyphs counts them")
        named = {"service": ([result["score"] for result in results], 1.0)}
        return named | {part: ([float(result.get(part, math.nan)) for result in results], 0.0) for part in PARTS}
