"""Prompts drawn by the recent success of the policy: most often those that it solves about half of the time.

A group whose completions are all right or all wrong has equal rewards, so no gradient. The variance of a reward that
is 1 with probability p is p (1 - p), which is largest at p = 1/2.

Success:   p of a row is the mean of its completions, where those of earlier steps count KEPT times as much with every
           step that draws the row again. PRIOR completions with p = 1/2 are added, so a new row is tried.
           Rows may share one p: those with the same value in a column, such as "level".
Weight:    w = FLOOR + (1 - FLOOR) 4 p (1 - p), from FLOOR to 1.
Draw:      every step draws its rows without replacement, the next one with probability proportional to w: the rows
           with the smallest -log(u) / w, u uniform. This is Gumbel top-k (arXiv 1903.06059) over log w.
Dims:      N rows, K rows or values with a success of their own
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from common.base import distributed
from common.base.checks import require
from common.tasks.data import Example, PromptStream
from common.tasks.scoring import Scored

FLOOR = 0.05  # a row that seems solved or hopeless still comes, 20 times more rarely: the policy may have changed
KEPT = 0.5  # with a group of 8, p follows about the last 16 completions of a row
PRIOR = 1.0  # completions; the first group outweighs it
MOST_VALUES, MOST_CHARACTERS = 20, 60  # of a column, to report each of its values; of a label


class Curriculum(PromptStream):
    """Endless batches of prompts, drawn by recent success.

    The state is `position` and what `state_dict` returns. Draws are a function of both, and of the
    seed: they are equal on all ranks, for any number of ranks, and after a resume.
    """

    def __init__(self, *options: Any, by: str, state: Mapping[str, torch.Tensor] | None = None, **named: Any):
        """Starts the stream.

        Args:
            *options: As in `PromptStream`.
            by: "row", or the name of a column: rows with the same value in it share one success.
            state: From `state_dict`. What belongs to rows or values that are gone is ignored.
            **named: As in `PromptStream`.

        Raises:
            ValueError: The data have no such column, or one value in it; as in `PromptStream`.
        """
        super().__init__(*options, **named)
        columns = list(dict.fromkeys(name for example in self.examples for name in example.columns))
        require(by == "row" or by in columns, f"curriculum = {by!r}", "must be 'row' or a column of the training data, "
                "or 'greso'", f"they have {', '.join(columns) or 'none'}")  # fmt: skip
        self.by = by
        keys_N = torch.tensor([self._key(example) for example in self.examples])
        self._keys_K, self._slots_N = keys_N.unique(return_inverse=True)
        self._names: dict[int, str] = {}  # of the values, by key
        if by != "row":
            for key, example in zip(keys_N.tolist(), self.examples, strict=True):
                self._names.setdefault(key, f"[{by}={example.columns.get(by)}]")
        require(by == "row" or len(self._keys_K) > 1, f"curriculum = {by!r}", "all rows have the same value in this "
                "column, so there is nothing to choose from", "name another column, or 'row'")  # fmt: skip
        self._seen = torch.zeros(len(self._keys_K), 2, dtype=torch.float64)  # [K, 2]: sum of rewards, completions
        if state and "seen" in state:  # else it is the state of another kind of stream
            slots, known = find(self._keys_K, state["keys"])
            self._seen[slots] = state["seen"][known]
        self._learned: list[tuple[int, float, int]] = []  # of this step and rank: key, sum of rewards, completions
        self._asked = False
        self._first, self._order, self._times_N = self.position, [], torch.empty(0)

    @property
    def success(self) -> torch.Tensor:
        """Recent success p of each row or value with one of its own, fp64 [K]."""
        return (self._seen[:, 0] + PRIOR / 2) / (self._seen[:, 1] + PRIOR)

    @property
    def weights(self) -> torch.Tensor:
        """Weight w of each row in the draw, fp64 [N]."""
        p_K = self.success
        return (FLOOR + (1 - FLOOR) * 4 * p_K * (1 - p_K))[self._slots_N]

    def next(self) -> list[Example]:
        """As in `PromptStream`."""
        self._first, self._order = self.position, []
        # only the low 32 bits of a seed count; the factor keeps the positions of neighbouring seeds apart
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.position) % 2**32)
        u_N = torch.rand(len(self.examples), generator=generator, dtype=torch.float64)
        self._times_N = -torch.log1p(-u_N) / self.weights
        return super().next()

    def learn(self, examples: Sequence[Example], scored: Scored, among: Sequence[bool] | None = None) -> None:
        """Notes how well the policy did; `end_step` takes it into account.

        A completion counts with the value of the first reward function that applies to it, from 0
        to 1: a bonus for format or length is no success. Unscored completions are left out.

        Args:
            examples: P prompts of this rank.
            scored: Their completions, equally many per prompt.
            among: One flag per prompt; others are skipped. None: all.
        """
        self._asked = True
        values_PG = first_values(scored).view(len(examples), -1).double()
        for i, (example, values_G) in enumerate(zip(examples, values_PG, strict=True)):
            if among is None or among[i]:
                known = values_G[~values_G.isnan()]
                self._learned.append((self._key(example), known.sum().item(), len(known)))

    def end_step(self) -> dict[str, float]:
        """Updates the success of all prompts of the step; a collective.

        Not earlier, so that a step that is interrupted begins again with the same prompts.

        Returns:
            Metrics. By row: `curriculum_seen`, the share of rows drawn so far, and
            `curriculum_success`, their mean p. By a column with at most MOST_VALUES short values:
            `share[column=value]` of the prompts of the step, and p as `success[column=value]`.

        Raises:
            ValueError: `learn` was not called.
        """
        require(self._asked, f"curriculum = {self.by!r}", "this script does not say how its prompts did",
                "call prompts.learn(examples_P, scored) after the scores are there")  # fmt: skip
        # sorted: sums do not depend on which rank had which prompt
        learned = sorted(entry for part in distributed.gather_objects(self._learned) for entry in part)
        self._learned, self._asked = [], False
        drawn: dict[int, int] = {}
        new: dict[int, list[float]] = {}
        for key, total, count in learned:
            drawn[key] = drawn.get(key, 0) + 1
            if count:
                old = new.get(key, [0.0, 0.0])
                new[key] = [old[0] + total, old[1] + count]
        if new:
            slots, _ = find(self._keys_K, torch.tensor(list(new)))
            self._seen[slots] = KEPT * self._seen[slots] + torch.tensor(list(new.values()), dtype=torch.float64)
        most = max(map(len, self._names.values()), default=0)
        if not (0 < len(self._names) <= MOST_VALUES and most <= MOST_CHARACTERS):
            seen_K = self._seen[:, 1] > 0
            mean = self.success[seen_K].mean().item() if seen_K.any() else 0.5
            return {"curriculum_seen": seen_K.double().mean().item(), "curriculum_success": mean}
        success = dict(zip(self._keys_K.tolist(), self.success.tolist(), strict=True))
        names = sorted(self._names.items(), key=lambda item: item[1])
        share = {f"share{name}": drawn.get(key, 0) / len(learned) for key, name in names}
        return share | {f"success{name}": success[key] for key, name in names}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What was learned so far: `keys`, int64 [S], and `seen`, fp64 [S, 2]; empty at first.

        Keys are hashes of prompt and answer, or of the value, so they stay valid if rows are added
        or removed.
        """
        seen_K = self._seen[:, 1] > 0
        return {"keys": self._keys_K[seen_K], "seen": self._seen[seen_K]} if seen_K.any() else {}

    def _key(self, example: Example) -> int:
        """Hash of what shares one success with this row, int64."""
        return row_key(example) if self.by == "row" else _hash(f"{self.by}={example.columns.get(self.by)}")

    def _example_at(self, position: int) -> Example:
        """The row of this place in the order of the step; replaced prompts take the places after the batch."""
        place = (position - self._first) % len(self.examples)
        if place >= len(self._order):  # sorting a million rows takes longer than finding the first
            count = min(len(self.examples), max(self.batch_size, 2 * place))
            self._order = self._times_N.topk(count, largest=False).indices.tolist()
        return self.examples[self._order[place]]


def row_key(example: Example) -> int:
    """Hash of prompt and answer, int64: it stays valid if rows are added, removed or reordered.

    Args:
        example: A row; rows that repeat another one have its key.
    """
    return _hash(f"{example.prompt!r} {example.answer!r}")


def _hash(text: str) -> int:
    digest = hashlib.blake2b(text.encode(errors="backslashreplace"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def find(known_K: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Looks up keys, some of which may be unknown.

    Args:
        known_K: int64 [K], ascending.
        keys: int64 [S].

    Returns:
        The places of the known ones in `known_K`, and which ones are known, bool [S].
    """
    slots = torch.searchsorted(known_K, keys).clamp(max=len(known_K) - 1)
    known = known_K[slots] == keys
    return slots[known], known


def first_values(scored: Scored) -> torch.Tensor:
    """Value of each completion by the first function that applies to it, fp32 [B] in [0, 1]; NaN = unscored.

    Args:
        scored: B completions.
    """
    values_B = torch.full_like(scored.rewards, torch.nan)
    for own_B in scored.by_function.values():
        values_B = torch.where(values_B.isnan(), own_B, values_B)
    return torch.where(scored.rewards.isnan(), torch.nan, values_B.clamp(0, 1))
