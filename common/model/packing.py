"""Rows that share a prompt: how many tokens they are, how they are cut, and where they stand in a packed row."""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass
class Sizes:
    """Lengths and groups of rows, on the host.

    Attributes:
        prompts: tokens of each prompt.
        completions: tokens of each completion.
        groups: rows with equal numbers have the same prompt.
        packed: a prompt is computed once per group, padding is not; False: every row is padded to the longest.
    """

    prompts: list[int]
    completions: list[int]
    groups: list[int]
    packed: bool = True

    def of(self, row: int) -> int:
        """Tokens of one row.

        Args:
            row: its number.
        """
        return self.prompts[row] + self.completions[row]

    def added(self, row: int, part: list[int]) -> int:
        """Tokens that a row adds to a forward pass.

        Args:
            row: its number.
            part: the rows before it, in an order of `ordered`.
        """
        if self.packed:
            return self.completions[row] if part and self.groups[part[-1]] == self.groups[row] else self.of(row)
        return self.of(part[0] if part else row)

    def ordered(self, rows: Sequence[int]) -> list[int]:
        """The longest rows first; if packed, each with the others of its group.

        Args:
            rows: numbers.
        """
        groups, longest = self.groups if self.packed else range(len(self.groups)), {}
        for row in rows:
            longest[groups[row]] = max(longest.get(groups[row], 0), self.of(row))
        return sorted(rows, key=lambda row: (-longest[groups[row]], groups[row], -self.of(row)))

    def parts(self, rows: Sequence[int], limit: int) -> list[list[int]]:
        """Cuts rows into forward passes.

        Args:
            rows: numbers.
            limit: tokens of a pass, at most; a longer row is alone.
        """
        parts: list[list[int]] = []
        size = limit
        for row in self.ordered(rows):
            size += self.added(row, parts[-1] if parts else [])
            if size > limit:
                parts.append([])
                size = self.of(row)
            parts[-1].append(row)
        return parts


def pack(prompts: Sequence[int], completions: Sequence[int], groups: Sequence[int]) -> tuple[list[int], ...]:
    """Order of rows in a packed row, where the first row of a group alone has its prompt.

    Args:
        prompts: tokens of each prompt.
        completions: tokens of each completion.
        groups: rows with equal numbers have the same prompt.

    Returns:
        For each row, in that order: its number; where the prompt of its group begins; tokens of the prompt that it
        leaves to the first row; tokens of its own.

    Raises:
        ValueError: prompts of one group differ in length.
    """
    if len(set(zip(groups, prompts, strict=True))) > len(set(groups)):
        raise ValueError(
            f"rows of groups {list(groups)} have prompts of {list(prompts)} tokens: a group must have one prompt; give "
            "every prompt another number"
        )
    heads: dict[int, int] = {}
    packed, start = [], 0
    for i in sorted(range(len(groups)), key=groups.__getitem__):
        left = prompts[i] if groups[i] in heads else 0
        packed.append((i, heads.setdefault(groups[i], start), left, prompts[i] + completions[i] - left))
        start += packed[-1][-1]
    return tuple(map(list, zip(*packed, strict=True)))
