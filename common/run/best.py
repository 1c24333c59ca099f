"""Which evaluation of a run was the best, and how many have come since: out_dir/best and early stopping.

Every checkpoint holds this state in its notes. Evaluations after it are taken from metrics.jsonl: a run that was killed
between an evaluation and a save knows its result, and one that goes back to an earlier checkpoint, whose metrics.jsonl
has been cut, knows nothing of the branch that was left.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from common.base.checks import require


class Best:
    """The best evaluation so far.

    Attributes:
        step: after which it was made; None if there is none.
        value: of the measure.
        since: evaluations after it.
        last: step of the last evaluation; -1 if there was none.
    """

    def __init__(
        self,
        by: str,
        early_stop: int = 0,
        saved: Mapping[str, Any] | None = None,
        evaluations: Iterable[Mapping[str, Any]] = (),
    ):
        """Takes up the state of a checkpoint.

        Args:
            by: name of the measure; with a minus in front the lowest is best; "": there is no best.
            early_stop: evaluations in a row without a new best after which `exhausted` is true; 0: never.
            saved: `notes` of the checkpoint; not used if they are of another measure.
            evaluations: lines of metrics.jsonl up to the start, in order.
        """
        self.by, self.early_stop, self.step, self.value, self.since, self.last = by, early_stop, None, math.nan, 0, -1
        if saved and saved["by"] == by:
            self.step, self.since, self.last = saved["step"], saved["since"], saved["last"]
            self.value = math.nan if self.step is None else saved["value"]
        for line in evaluations:
            if line["step"] > self.last:
                self._count(line["step"], line.get(self.name))

    @property
    def name(self) -> str:
        """Of the measure, without a minus."""
        return self.by.removeprefix("-")

    @property
    def notes(self) -> dict[str, Any]:
        """The state as JSON values."""
        value = None if self.step is None else self.value
        return {"by": self.by, "step": self.step, "value": value, "since": self.since, "last": self.last}

    @property
    def exhausted(self) -> bool:
        """Whether as many evaluations as `early_stop` have brought no new best."""
        return 0 < self.early_stop <= self.since

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Takes an evaluation into account: `self.step` is `step` if it is a new best. A tie or NaN is none.

        Args:
            step: after which it was made.
            values: of all measures, by name.

        Raises:
            ValueError: no evaluation has had this measure. Without `early_stop`, eval_reward may be missing: where no
                row has an answer, nothing can be scored.
        """
        optional = self.name == "eval_reward" and not self.early_stop
        require(not self.by or self.step is not None or self.name in values or optional, f"best_by = {self.by!r}",
                f"the evaluation has no such measure: it has {sorted(values)}",
                "name one of these, with a minus in front if the lowest is best")  # fmt: skip
        self._count(step, values.get(self.name))

    def _count(self, step: int, value: float | None) -> None:
        """The same without the check; None: not finite, or missing."""
        if not self.by:
            return
        sign, self.last = -1 if self.by.startswith("-") else 1, step
        known = value is not None and math.isfinite(value)
        if known and (self.step is None or sign * value > sign * self.value):
            self.step, self.value, self.since = step, value, 0
        else:
            self.since += 1
