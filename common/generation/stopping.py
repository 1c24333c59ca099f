"""Texts that end a completion, such as "\\nQ:" for a base model that goes on with the next question."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase


def find(text: str, stops: Sequence[str]) -> int:
    """Place of the first stop string in a text; -1 without one.

    Args:
        text: of a completion.
        stops: none of them is empty.
    """
    return min((place for stop in stops if (place := text.find(stop)) >= 0), default=-1)


class Stopping:
    """Finds stop strings among sampled tokens; a token may hold a part of one, or more than one."""

    def __init__(self, stops: Sequence[str], tokenizer: PreTrainedTokenizerBase):
        """Takes the stop strings, and the tokenizer that decodes the tokens."""
        self.stops, self.tokenizer = tuple(stops), tokenizer
        # a token is at least one byte of UTF-8; 8 more tokens, because the first ones may decode to something else
        self.window = max((len(stop.encode()) for stop in stops), default=0) + 8

    def length(self, ids: Sequence[int]) -> int | None:
        """Number of tokens up to the one that completes the first stop string; None without one.

        Args:
            ids: tokens of a completion.
        """
        if find(self._decode(ids), self.stops) < 0:
            return None
        short, long = 0, len(ids)  # the first `short` tokens hold no stop string, the first `long` do
        while long - short > 1:
            middle = (short + long) // 2
            found = find(self._decode(ids[:middle]), self.stops) >= 0
            short, long = (short, middle) if found else (middle, long)
        return long

    def ended(self, tokens_BT: torch.Tensor, new: int) -> list[bool]:
        """Which completions hold a stop string that ends in their last tokens.

        Args:
            tokens_BT: [B, T] int64, the completions so far, -1 after the end.
            new: tokens that were not looked at before.
        """
        rows = [[token for token in row if token >= 0] for row in tokens_BT.tolist()]
        tails = [find(self._decode(row[-self.window - new :]), self.stops) >= 0 for row in rows]
        return [near and self.length(row) is not None for near, row in zip(tails, rows, strict=True)]

    def cut(self, tokens_BT: torch.Tensor, logps_BT: torch.Tensor) -> torch.Tensor:
        """Cuts completions behind their first stop string, in place.

        Args:
            tokens_BT: [B, T] int64, -1 after the end.
            logps_BT: [B, T] fp32.

        Returns:
            [B] bool on the CPU, which were cut or ended there.
        """
        lengths = [self.length([token for token in row if token >= 0]) for row in tokens_BT.tolist()]
        for row, length in enumerate(lengths):
            if length is not None:
                tokens_BT[row, length:], logps_BT[row, length:] = -1, 0.0
        return torch.tensor([length is not None for length in lengths], dtype=torch.bool)

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
