"""Prompts in turn, without most of those whose last groups had equal rewards: GRESO (arXiv 2506.02177).

A group whose completions are all right or all wrong has equal rewards, so no gradient, and the next group of the same
prompt is likely to be like it. Dynamic sampling finds that out by sampling; GRESO predicts it and skips the prompt.

Streak:   z of a row is the number of its most recent groups in a row with equal rewards; 0 for a new row.
Skip:     the row is skipped with probability 1 - max(p^z, LEAST), before anything is sampled. p is `p_easy` if its last
          group was all right and `p_hard` if it was all wrong.
Explore:  both begin at START. After each step, from the second pass over the data on, p falls by DELTA if the share of
          its kind among the groups of the step is at least its target, and rises by DELTA otherwise.
Values:   a tenth of the groups may have equal rewards, twice as many hard ones as easy ones, because hard prompts
          become solvable as training goes on. The authors' code, github.com/Infini-AI-Lab/GRESO at b277843, lets a
          quarter have them and moves p by 0.01; all else is as there.
Dims:     N rows, K rows with different prompt or answer, P prompts of this rank, G completions of each
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from common.base import distributed
from common.base.checks import require
from common.maths import advantages
from common.tasks.curriculum import find, first_values, row_key
from common.tasks.data import Example, PromptStream
from common.tasks.scoring import Scored

START, DELTA = 0.5, 0.02  # of p_easy and p_hard
LOWEST, HIGHEST = 0.05, 0.95
TARGET_EASY, TARGET_HARD = 0.1 / 3, 0.1 * 2 / 3
LEAST = 0.01  # a row comes at least this often, however long its streak: the policy may have changed


class Greso(PromptStream):
    """Endless batches of prompts in the order of `PromptStream`, some of them skipped.

    `position` counts skipped rows, too. It and what `state_dict` returns are the state. What is
    skipped is a function of both, and of the seed: equal on all ranks, for any number of ranks, and
    after a resume.
    """

    def __init__(self, *options: Any, state: Mapping[str, torch.Tensor] | None = None, **named: Any):
        """Starts the stream.

        Args:
            *options: As in `PromptStream`.
            state: From `state_dict`. What belongs to rows that are gone is ignored, and so is the
                state of a `Curriculum`.
            **named: As in `PromptStream`.

        Raises:
            ValueError: As in `PromptStream`.
        """
        super().__init__(*options, **named)
        keys_N = torch.tensor([row_key(example) for example in self.examples])
        self._keys_K, self._slots_N = keys_N.unique(return_inverse=True)
        self._streaks_K = torch.zeros(len(self._keys_K), dtype=torch.int64)  # z where all right, -z where all wrong
        self.p_easy = self.p_hard = START
        if state and "streaks" in state:
            slots, known = find(self._keys_K, state["keys"])
            self._streaks_K[slots] = state["streaks"][known]
            self.p_easy, self.p_hard = state["explore"].tolist()
        self._learned: list[tuple[int, int]] = []  # of this step and rank: key, and 1: all right, -1: all wrong, 0
        self._asked = False
        self._u_epoch, self._u_N = -1, torch.empty(0)
        self._begin_step()

    @property
    def skip_probability(self) -> torch.Tensor:
        """Probability that a row is skipped when its turn comes, fp64 [N]."""
        z_K = self._streaks_K.abs()
        p_K = torch.full(z_K.shape, self.p_hard, dtype=torch.float64).masked_fill(self._streaks_K > 0, self.p_easy)
        return (1 - p_K.pow(z_K).clamp(min=LEAST))[self._slots_N]

    def next(self) -> list[Example]:
        """As in `PromptStream`."""
        self._begin_step()
        return super().next()

    def learn(self, examples: Sequence[Example], scored: Scored, among: Sequence[bool] | None = None) -> None:
        """Notes which groups had equal rewards; `end_step` takes it into account.

        Equal rewards are those without a gradient, on any scale. All are right if the mean value of
        the first reward function that applies, from 0 to 1, is at least one half. A group with
        fewer than two scored completions says nothing and is left out.

        Args:
            examples: P prompts of this rank.
            scored: Their completions, equally many per prompt.
            among: One flag per prompt; others are left out. None: all.
        """
        self._asked = True
        rewards_PG = scored.rewards.view(len(examples), -1)
        equal_P = advantages.equal_groups(rewards_PG).tolist()
        known_P = (rewards_PG.isfinite().sum(1) >= 2).tolist()
        easy_P = (first_values(scored).view_as(rewards_PG).nanmean(1) >= 0.5).tolist()
        for i, example in enumerate(examples):
            if known_P[i] and (among is None or among[i]):
                self._learned.append((row_key(example), (1 if easy_P[i] else -1) if equal_P[i] else 0))

    def end_step(self) -> dict[str, float]:
        """Updates streaks and the probabilities of exploration; a collective.

        Not earlier, so that a step that is interrupted begins again with the same prompts.

        Returns:
            Metrics: `skipped_prompts`, the share of the rows of this step that were skipped, and
            `p_easy` and `p_hard`, which the next step uses.

        Raises:
            ValueError: `learn` was not called.
        """
        require(self._asked, "curriculum = 'greso'", "this script does not say how its prompts did",
                "call prompts.learn(examples_P, scored) after the scores are there")  # fmt: skip
        # sorted: a row that comes twice in a step counts in the same order on any number of ranks
        learned = sorted(entry for part in distributed.gather_objects(self._learned) for entry in part)
        self._learned, self._asked = [], False
        streaks: dict[int, int] = {}
        for key, outcome in learned:
            slots, _ = find(self._keys_K, torch.tensor([key]))
            before = streaks.get(key, self._streaks_K[slots].item())
            streaks[key] = outcome * (abs(before) + 1)
        if streaks:
            slots, _ = find(self._keys_K, torch.tensor(list(streaks)))
            self._streaks_K[slots] = torch.tensor(list(streaks.values()))
        # in the first pass all rows come, so less exploration would not change the shares
        if learned and self._first >= len(self.examples):
            outcomes = [outcome for _, outcome in learned]
            self.p_easy = _adapted(self.p_easy, outcomes.count(1) / len(outcomes) >= TARGET_EASY)
            self.p_hard = _adapted(self.p_hard, outcomes.count(-1) / len(outcomes) >= TARGET_HARD)
        share = len(self._skipped) / max(1, self.position - self._first)
        return {"skipped_prompts": share, "p_easy": self.p_easy, "p_hard": self.p_hard}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What was learned so far.

        Returns:
            `keys`, int64 [S], and `streaks`, int64 [S], of the rows that may be skipped, negative
            for those that are all wrong; `explore`, fp64 [2], with p_easy and p_hard. Keys are
            hashes of prompt and answer, so they stay valid if rows are added or removed.
        """
        known_K = self._streaks_K != 0
        explore = torch.tensor([self.p_easy, self.p_hard], dtype=torch.float64)
        return {"keys": self._keys_K[known_K], "streaks": self._streaks_K[known_K], "explore": explore}

    def _begin_step(self) -> None:
        self._first, self._skip_N = self.position, self.skip_probability
        self._skipped: list[Example] = []  # of this step
        self._reused = 0  # of them

    def _take(self, count: int) -> list[Example]:
        """The next rows that are not skipped.

        A step skips at most as many rows as there are. Then it takes those that it skipped, the first
        one first, so that it ends even if nearly all rows are skipped.
        """
        taken: list[Example] = []
        while len(taken) < count:
            if len(self._skipped) == len(self.examples):
                taken.append(self._skipped[self._reused % len(self._skipped)])
                self._reused += 1
                continue
            example = self._example_at(self.position)
            epoch, offset = divmod(self.position, len(self.examples))
            self.position += 1
            skipped = self._u(epoch, offset) < self._skip_N[self._order[offset]]
            (self._skipped if skipped else taken).append(example)
        return taken

    def _u(self, epoch: int, offset: int) -> torch.Tensor:
        """The number, uniform in [0, 1), that decides at this place of an epoch."""
        if epoch != self._u_epoch:
            # not the seed of the epoch's order, of which the numbers would be a function
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch + 2**31) % 2**32)
            self._u_N = torch.rand(len(self.examples), generator=generator, dtype=torch.float64)
            self._u_epoch = epoch
        return self._u_N[offset]


def _adapted(p: float, enough: bool) -> float:
    """Next p of a kind of prompts, of which there were enough or too few."""
    return max(p - DELTA, LOWEST) if enough else min(p + DELTA, HIGHEST)
