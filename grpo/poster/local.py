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
        self._warned = 0  # 1: of characters of the policy, 2: of the ground truth

    def scores(self, arguments: Mapping[str, Any], group_size: int) -> dict[str, tuple[list[float], float]]:
        """Scores completions; the result is the argument `extra` of `scoring.score`.

        Args:
            arguments: of reward functions: `completions`, ground truths as JSON in `answers`;
                `extra_info` may hold the input images.
            group_size: unused.

        Returns:
            "service": the scores with weight 1; parts of the reward by name, with weight 0. Characters that no font
            has are printed as a warning, once, and once more if those of a ground truth come later.
        """
        results = []
        rows = zip(arguments["completions"], arguments["answers"], arguments["extra_info"], strict=True)
        for completion, answer, extra in rows:
            given = enumerate(extra.get("images", ()), 1)
            pictures = {f"image_{k}": assessors.image(reference, "") for k, reference in given} or None
            results.append(reward.score(completion, answer, fonts=self.fonts, images=pictures,
                                        coord_space=self.coord_space))  # fmt: skip
        missing = "".join(result["details"].get("missing_characters", "") for result in results)
        level = 2 if any("truth_glyphs_missing" in result["warnings"] for result in results) else 1
        if missing and self._warned < level:
            self._warned = level
            print_main(f"warning: posters: {missing_text(missing)}; the metric reward_missing_glyphs counts them")
        named = {"service": ([result["score"] for result in results], 1.0)}
        return named | {part: ([float(result.get(part, math.nan)) for result in results], 0.0) for part in PARTS}
