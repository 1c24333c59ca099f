"""Which completions are decoded when: the host logic of the decode engine, without torch and without a model.

Prompts wait until there is room for their group, decode steps run in short stretches between host
checks, and rows that have ended leave the batch when that pays.
"""

import dataclasses
import itertools
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

CHECK_EVERY = 16  # decode steps between host checks on a GPU; each check syncs
PREFILL_TOKENS = 16384  # prompt tokens in one forward pass
SMALLEST_BATCH = 8  # graphs are captured for this many rows, twice as many, and so on


@dataclasses.dataclass(frozen=True)
class Space:
    """What a rollout needs room for.

    Attributes:
        rows: completions decoded at once.
        batch: rows of the largest batch, padding rows included.
        prompts: prompts held at once, each counted once per group.
        group_size: rows of a prompt.
        longest: tokens of the longest prompt.
        tokens: upper bound on the new tokens of a completion.
    """

    rows: int
    batch: int
    prompts: int
    group_size: int
    longest: int
    tokens: int


class Row(NamedTuple):
    """One completion in the batch."""

    sequence: int  # its number in the rollout
    slot: int  # its place in the cache
    born: int  # decode step at which its first token was drawn; earlier, if it drew several at once


class Group(NamedTuple):
    """The rows of one prompt, which stand side by side in the batch."""

    prompt: int  # its number in the rollout
    slot: int  # its place in the cache
    length: int  # tokens of the prompt
    first: int  # place of the first row in the batch
    rows: list[Row]

    @property
    def places(self) -> slice:
        """Places of the rows in the batch."""
        return slice(self.first, self.first + len(self.rows))


class Draft(NamedTuple):
    """What a row of the batch may go on with."""

    group: Group
    member: int  # number of the row in its group
    count: int  # tokens drawn so far
    tokens: Sequence[int]  # those, and the ones to be tried

    @property
    def place(self) -> int:
        """Place of the row in the batch."""
        return self.group.first + self.member

    @property
    def new(self) -> int:
        """Tokens to be tried."""
        return len(self.tokens) - self.count


class Scheduler:
    """The batch of one rollout over time.

    Attributes:
        rows: the batch, in order.
        step: decode steps done; whoever runs them adds them up.
    """

    def __init__(self, prompt_lengths: Sequence[int], space: Space, check_every: int, smallest: int):
        """Starts with an empty batch; all prompts wait.

        Args:
            prompt_lengths: tokens of each prompt of the rollout.
            space: what there is room for.
            check_every: decode steps between host checks.
            smallest: batches are padded to this many rows, twice as many, and so on, the sizes that graphs are
                captured for; 0: to none.
        """
        self.prompt_lengths, self.space, self.check_every, self.smallest = prompt_lengths, space, check_every, smallest
        self.rows: list[Row] = []
        self.step = 0
        self._waiting = deque(range(len(prompt_lengths)))
        self._free_rows = list(range(space.rows))[::-1]
        self._free_prompts = list(range(space.prompts))[::-1]
        self._prompt_slots: dict[int, int] = {}

    @property
    def unfinished(self) -> bool:
        """Whether any completion is still to be decoded."""
        return bool(self._waiting or self.rows)

    @property
    def batch_size(self) -> int:
        """Rows computed per step, padding rows included."""
        return self._padded_size(len(self.rows))

    @property
    def longest(self) -> int:
        """Tokens of the longest row, prompt included, as if none had ended."""
        return max(self.prompt_lengths[self._prompt(row)] + self.step - row.born for row in self.rows)

    @property
    def steps_until_check(self) -> int:
        """Decode steps until the next host check, or until every row has reached its limit."""
        return min(self.check_every, max(self.space.tokens - 1 - (self.step - row.born) for row in self.rows))

    def admit(self) -> list[Group]:
        """Lets prompts into the batch once there is room for a good part of one.

        Returns:
            Their groups, which are the last ones of the batch.
        """
        size, waiting = self.space.group_size, len(self._waiting)
        free_groups = (self.space.rows - len(self.rows)) // size
        room = min(free_groups, self.space.prompts - len(self._prompt_slots), waiting)
        if not room or (self.rows and room * size < min(self.space.rows // 4, waiting * size)):
            return []
        for _ in range(room):
            prompt = self._waiting.popleft()
            self._prompt_slots[prompt] = self._free_prompts.pop()
            self.rows += [Row(prompt * size + i, self._free_rows.pop(), self.step) for i in range(size)]
        return self.groups()[-room:]

    def draw_ahead(self, tokens: Sequence[int]) -> None:
        """Notes how many tokens each of the last rows of the batch drew besides one in each decode step."""
        first = len(self.rows) - len(tokens)
        self.rows[first:] = [row._replace(born=row.born - n) for row, n in zip(self.rows[first:], tokens, strict=True)]

    def groups(self) -> list[Group]:
        """The batch by prompts."""
        groups, first = [], 0
        for prompt, rows in itertools.groupby(self.rows, self._prompt):
            groups.append(Group(prompt, self._prompt_slots[prompt], self.prompt_lengths[prompt], first, list(rows)))
            first += len(groups[-1].rows)
        return groups

    def close_gaps(self, ended: Sequence[bool]) -> list[int] | None:
        """Removes ended rows, if that makes the batch smaller or makes room for waiting prompts.

        Args:
            ended: of each row of the batch.

        Returns:
            Places of the rows that stay, ascending; None if the batch stays as it is.
        """
        kept = [i for i, over in enumerate(ended) if not over]
        smaller = self._padded_size(len(kept)) < self.batch_size
        if len(kept) == len(self.rows) or not (smaller or self._waiting or not kept):
            return None
        self._free_rows += [row.slot for row, over in zip(self.rows, ended, strict=True) if over]
        self.rows = [self.rows[i] for i in kept]
        for prompt in self._prompt_slots.keys() - set(map(self._prompt, self.rows)):
            self._free_prompts.append(self._prompt_slots.pop(prompt))
        return kept

    def _prompt(self, row: Row) -> int:
        return row.sequence // self.space.group_size

    def _padded_size(self, rows: int) -> int:
        if not self.smallest:
            return rows
        size = self.smallest
        while size < rows:
            size *= 2
        return min(size, self.space.batch)


def prefill_parts(groups: list[Group]) -> list[list[Group]]:
    """Groups whose prompts go into one forward pass: PREFILL_TOKENS together, or a single longer prompt."""
    parts: list[list[Group]] = []
    total = PREFILL_TOKENS + 1
    for group in groups:
        if total + group.length > PREFILL_TOKENS:
            parts.append([])
            total = 0
        parts[-1].append(group)
        total += group.length
    return parts
