"""Guards detect collapse: a metric that stays outside its healthy range for many steps.

GUARDS in a script maps a metric of metrics.jsonl to its healthy range (least, most); None is no
limit. A metric triggers after `collapse_steps` steps in a row outside its range. `on_collapse` says
what happens then:

- "warn" prints one warning, and another only after the metric has recovered in between;
- "stop" saves and ends the run with EXIT_CODE;
- "off" disables all guards.

A step without the metric (absent, or null in metrics.jsonl) is ignored.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

from common.base import distributed, storage
from common.base.checks import require
from common.run.metrics import Log

EXIT_CODE = 3  # the run collapsed: a restart with the same options would not help
DEFAULT_REMEDY = "lower learning_rate, and resume from a checkpoint of before"
REMEDIES = {
    "clip_fraction": "updates go too far from the rollout: lower learning_rate or num_minibatches",
    "completion_length": "does the reward pay for short answers, or for long ones? " + DEFAULT_REMEDY,
    "entropy": "the policy says always the same, or noise: raise kl_coef, " + DEFAULT_REMEDY,
    "reward_std": "the rewards of every group are equal: is the task too hard, too easy, or the reward function blind?",
    "truncated": "answers do not end: raise max_new_tokens, or " + DEFAULT_REMEDY,
    "unscored": "look at the reward function or its service, and at the answers of the data",
}


class Watch:
    """Checks the metrics of a run against its guards; all ranks reach the same verdict.

    A resumed run reads its history from metrics.jsonl, so its verdict equals that of a run without
    interruption.

    Attributes:
        collapsed: why the run has to stop; "" if it can go on.
    """

    def __init__(self, guards: dict[str, tuple[float | None, float | None]], cfg: Any, log: Log, start: int):
        """Reads the metrics of earlier steps; a collective.

        Args:
            guards: GUARDS of the script.
            cfg: Config of the script.
            log: prints warnings.
            start: steps that an earlier run completed.

        Raises:
            ValueError: a range is not two numbers in order.
        """
        self._ranges = {name: _range(name, limits) for name, limits in guards.items() if cfg.on_collapse != "off"}
        self._cfg, self._log, self._names_checked, self.collapsed = cfg, log, False, ""
        # (step, value) of the current streak of steps outside the range, by metric
        self._outside: dict[str, list[tuple[int, float]]] = {name: [] for name in self._ranges}
        if distributed.rank() == 0 and self._ranges and start:  # other ranks may lack the file
            for line in _step_lines(Path(cfg.out_dir) / "metrics.jsonl", start):
                self._count(line)
        self._outside = distributed.gather_objects(self._outside)[0]

    def check(self, line: dict[str, Any]) -> bool:
        """Checks the metrics of a step; returns whether to save and end the run.

        Args:
            line: from `Log.end_step`, equal on every rank.

        Raises:
            ValueError: a guarded metric does not exist.
        """
        # without an update, half of the metrics are absent
        if not self._names_checked and line.get("skipped_updates") != 1.0:
            numbers = [name for name, value in line.items() if value is None or isinstance(value, (int, float))]
            unknown = sorted(self._ranges.keys() - set(numbers))
            rule = f"must be metrics of a step: {', '.join(numbers)}"
            require(not unknown, f"GUARDS has {unknown}", rule, "correct the name")
            self._names_checked = True
        reasons = []
        for name in self._count(line):
            (first, _), (least, most) = self._outside[name][0], self._ranges[name]
            recent = ", ".join(f"{value:.4g}" for _, value in self._outside[name][-3:])
            text = (
                f"step {line['step']}: {name} has been outside {least:g} to {most:g} since step {first}, lastly "
                f"{recent}: has the run collapsed? {REMEDIES.get(name, DEFAULT_REMEDY)}"
            )
            if self._cfg.on_collapse == "stop":
                reasons.append(text)
            elif len(self._outside[name]) == self._cfg.collapse_steps:
                self._log.print_above_bar(f"warning: {text}; samples.jsonl shows what it says, GUARDS are the limits")
        self.collapsed = "; ".join(reasons)
        return bool(reasons)

    def exit_if_collapsed(self) -> None:
        """Ends the process with EXIT_CODE if the run has collapsed. All ranks call it last.

        Raises:
            SystemExit: the run has collapsed.
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
        """Extends the streaks by a step; returns metrics whose streak is long enough."""
        for name, (least, most) in self._ranges.items():
            value = line.get(name)
            if value is None or not math.isfinite(value):  # written as null
                continue
            if least <= value <= most:
                self._outside[name].clear()
            else:
                self._outside[name].append((line["step"], value))
        lasted = {name for name, steps in self._outside.items() if len(steps) >= self._cfg.collapse_steps}
        return [name for name in self._ranges if name in lasted and self._outside[name][-1][0] == line["step"]]


def _range(name: str, limits: Any) -> tuple[float, float]:
    """Limits as two numbers; None becomes -inf or inf."""
    pair = limits if isinstance(limits, (tuple, list)) and len(limits) == 2 else ("", "")
    least, most = (end if limit is None else limit for limit, end in zip(pair, (-math.inf, math.inf), strict=True))
    valid = all(isinstance(limit, (int, float)) for limit in (least, most)) and least <= most
    require(valid, f"GUARDS has {name!r}: {limits!r}", "must be (least, most), two numbers", "None is no limit")
    return least, most


def _step_lines(path: Path, start: int) -> list[dict[str, Any]]:
    """Lines of steps up to `start`, without those of evaluations and checkpoints."""
    texts = storage.read_lines(path) if path.exists() else []
    lines = [json.loads(text) for text in texts]
    return [line for line in lines if line["step"] <= start and "learning_rate" in line]
