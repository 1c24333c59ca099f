"""Options of sampling and their ranges; needs no torch, so that the command line can check them at once."""

import dataclasses

COLDEST = 1e-6  # lowest temperature above 0; one token has all of the probability


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The distribution tokens are drawn from; by default the plain softmax at `temperature` over the whole vocabulary.

    Attributes:
        temperature: divides the logits; 0 takes the most likely token.
        top_p: keeps the most likely tokens up to this total probability.
        top_k: keeps this many of the most likely tokens; 0: all.
        min_p: keeps tokens at least this fraction as likely as the most likely one.
        min_new_tokens: no end token before this many tokens.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    min_new_tokens: int = 0

    def __post_init__(self):
        warm = self.temperature == 0 or self.temperature >= COLDEST
        rules = {"temperature": (warm, f"0, or {COLDEST} or more: logits divided by less overflow"),
                 "top_p": (0 < self.top_p <= 1, "in (0, 1]"), "top_k": (self.top_k >= 0, "0 or more"),
                 "min_p": (0 <= self.min_p <= 1, "in [0, 1]"),
                 "min_new_tokens": (self.min_new_tokens >= 0, "0 or more")}  # fmt: skip
        for name, (kept, rule) in rules.items():
            if not kept:
                raise ValueError(f"{name} = {getattr(self, name)}: must be {rule}")
