"""Guards: does a metric stay outside its healthy range for many steps? Then the run has probably collapsed.

A script has a dictionary GUARDS, from a metric of metrics.jsonl to the range (least, most) it should stay in, None for
no limit; and two options. `on_collapse` "warn" prints a line when a metric has been outside for `collapse_steps` steps
in a row, and again only after it has been inside; "stop" saves and ends the run with EXIT_CODE; "off" looks at nothing.
A step in which a metric is not known (absent, or null in metrics.jsonl) does not count, neither way.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

from common.base import distributed
from common.base.checks import require
from common.run.metrics import Log

EXIT_CODE = 3  # of a run that was stopped for a collapse: another start with the same options would not help
USUAL = "lower learning_rate, and resume from a checkpoint of before"
REMEDIES = {
    "clip_fraction": "updates go too far from the rollout: lower learning_rate or num_minibatches",
    "completion_length": "does the reward pay for short answers, or for long ones? " + USUAL,
    "entropy": "the policy says always the same, or noise: raise kl_coef, " + USUAL,
    "reward_std": "the rewards of every group are equal: is the task too hard, too easy, or the reward function blind?",
    "truncated": "answers do not end: raise max_new_tokens, or " + USUAL,
    "unscored": "look at the reward function or its service, and at the answers of the data",
}


class Watch:
    """Follows the metrics of a run; decides alike on all ranks, and in a resumed run as in one that went straight on.

    Attributes:
        collapsed: what to say when the run ends, because it collapsed; "" as long as it goes on.
    """

    def __init__(self, guards: dict[str, tuple[float | None, float | None]], cfg: Any, log: Log, start: int):
        """Reads what happened before; called by all ranks.

        Args:
            guards: GUARDS of a script.
            cfg: its Config.
            log: of the run.
            start: steps done before.

        Raises:
            ValueError: a range that holds nothing.
        """
        self._ranges = {name: _range(name, limits) for name, limits in guards.items() if cfg.on_collapse != "off"}
        self._cfg, self._log, self._spelled, self.collapsed = cfg, log, False, ""
        self._outside: dict[str, list[tuple[int, float]]] = {name: [] for name in self._ranges}
        if distributed.rank() == 0 and self._ranges and start:  # the others may not see the file
            for line in _lines(Path(cfg.out_dir) / "metrics.jsonl", start):
                self._count(line)
        self._outside = distributed.gather_objects(self._outside)[0]

    def see(self, line: dict[str, Any]) -> bool:
        """Looks at a step.

        Args:
            line: from `Log.end_step`, the same on every rank.

        Returns:
            Whether the run is to be saved and ended.

        Raises:
            ValueError: a guarded metric does not exist.
        """
        if not self._spelled and line.get("skipped_updates") != 1.0:  # without an update half of the metrics are absent
            numbers = [name for name, value in line.items() if value is None or isinstance(value, (int, float))]
            odd = sorted(self._ranges.keys() - set(numbers))
            rule = f"must be metrics of a step: {', '.join(numbers)}"
            require(not odd, f"GUARDS has {odd}", rule, "correct the name")
            self._spelled = True
        reasons = []
        for name in self._count(line):
            (first, _), (least, most) = self._outside[name][0], self._ranges[name]
            recent = ", ".join(f"{value:.4g}" for _, value in self._outside[name][-3:])
            text = (
                f"step {line['step']}: {name} has been outside {least:g} to {most:g} since step {first}, lastly "
                f"{recent}: has the run collapsed? {REMEDIES.get(name, USUAL)}"
            )
            if self._cfg.on_collapse == "stop":
                reasons.append(text)
            elif len(self._outside[name]) == self._cfg.collapse_steps:
                self._log.say(f"warning: {text}; samples.jsonl shows what it says, GUARDS are the limits")
        self.collapsed = "; ".join(reasons)
        return bool(reasons)

    def leave(self) -> None:
        """Ends the process if the run has collapsed; called last, by all ranks.

        Raises:
            SystemExit: with EXIT_CODE.
        """
        if self.collapsed:
            distributed.print_main(
                f"stopped at {self.collapsed}; saved. samples.jsonl shows what it says, GUARDS are the limits; to go "
                "back, set resume to an older checkpoint, to go on all the same, on_collapse to 'warn'",
                file=sys.stderr,
            )
            distributed.shutdown(EXIT_CODE)
            raise SystemExit(EXIT_CODE)

    def _count(self, line: dict[str, Any]) -> list[str]:
        """The metrics that this step finds outside for `collapse_steps` steps in a row, or more."""
        for name, (least, most) in self._ranges.items():
            value = line.get(name)
            if value is None or not math.isfinite(value):  # a file has null for what is not finite
                continue
            if least <= value <= most:
                self._outside[name].clear()
            else:
                self._outside[name].append((line["step"], value))
        lasted = {name for name, steps in self._outside.items() if len(steps) >= self._cfg.collapse_steps}
        return [name for name in self._ranges if name in lasted and self._outside[name][-1][0] == line["step"]]


def _range(name: str, limits: Any) -> tuple[float, float]:
    """Limits as numbers, in which None is none."""
    pair = limits if isinstance(limits, (tuple, list)) and len(limits) == 2 else ("", "")
    least, most = (end if limit is None else limit for limit, end in zip(pair, (-math.inf, math.inf), strict=True))
    holds = all(isinstance(limit, (int, float)) for limit in (least, most)) and least <= most
    require(holds, f"GUARDS has {name!r}: {limits!r}", "must be (least, most), two numbers", "None is no limit")
    return least, most


def _lines(path: Path, start: int) -> list[dict[str, Any]]:
    """The lines of the steps up to `start`, those of evaluations and checkpoints left out."""
    texts = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    lines = [json.loads(text) for text in texts]
    return [line for line in lines if line["step"] <= start and "learning_rate" in line]
