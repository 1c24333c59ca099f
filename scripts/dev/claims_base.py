"""What the claims share: a row of the table, and the task of copying digits.

Dims:  B completions, C completion tokens, V vocabulary
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass
class Row:
    """One line of the table."""

    number: int
    claim: str  # and its source
    measured: str
    acceptance: str
    holds: bool | None  # None: reported only


def spread(values: Iterable[float], digits: int = 2) -> str:
    """Mean over the runs, with the smallest and the largest: "1.00 (0.90-1.10)"."""
    values = list(values)
    mean = sum(values) / len(values)
    return f"{mean:.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


# --- a policy that copies digits ---

DIGITS = 10  # prompt d asks for three or more copies of digit d and then the end token
END, BEGIN, MAX_TOKENS = 10, 11, 24
COPIES = 3  # that the reward asks for


def write_digits(table: torch.Tensor, prompts_B: torch.Tensor, rng: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Completions sampled from a table of logits [prompts, token before, V].

    Returns:
        Tokens [B, C], the token before each [B, C], mask [B, C] and rewards [B].
    """
    tokens_BC = torch.full((len(prompts_B), MAX_TOKENS), END)
    before_BC, mask_BC = torch.full_like(tokens_BC, BEGIN), torch.zeros_like(tokens_BC, dtype=torch.bool)
    probs, previous, going_B = table.softmax(-1), before_BC[:, 0], torch.ones_like(prompts_B, dtype=torch.bool)
    for c in range(MAX_TOKENS):
        drawn = torch.multinomial(probs[prompts_B, previous], 1, generator=rng)[:, 0]
        before_BC[:, c], mask_BC[:, c] = previous, going_B
        tokens_BC[:, c] = previous = torch.where(going_B, drawn, END)
        going_B = going_B & (drawn != END)
    digits_B = prompts_B % DIGITS  # each run has ten rows of the table
    copies_B = ((tokens_BC == digits_B[:, None]) & mask_BC).sum(1)
    return tokens_BC, before_BC, mask_BC, ((copies_B >= COPIES) & ~going_B).float()
