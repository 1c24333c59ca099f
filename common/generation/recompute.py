"""Decoding without a cache, for models whose caches give other log-probabilities than their forward pass.

Every token costs a forward pass over all tokens before it: slow, but as right as training.

Dims: P prompts, G completions per prompt, B = P * G sequences, T new tokens at most.
"""

from collections.abc import Generator, Sequence

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from common.generation.runner import NOT_FINITE
from common.generation.stopping import Stopping
from common.maths.sampling import Sampling, distribution, draw
from common.model import merging
from common.model.head import vocabulary_logits, wide_weight
from common.model.images import Images
from common.model.logprobs import LogProbs
from common.model.modes import eval_mode


class Recompute:
    """Decodes completions with one model by recomputing them."""

    name = "without a cache (every token recomputes its sequence: slow)"
    takes_drafts = False

    def __init__(self, model: PreTrainedModel, end_ids: Sequence[int], suppressed_ids: Sequence[int] = ()):
        """Chooses how sequences are computed together.

        Args:
            model: any transformers causal language model.
            end_ids: every token that ends a completion.
            suppressed_ids: tokens that are never drawn.
        """
        self.model, self.policy, self.rows = model, LogProbs(model, 1.0), 0
        self.end = torch.tensor(list(end_ids), device=model.device)
        self.suppressed = torch.tensor(list(suppressed_ids), dtype=torch.long, device=model.device)

    def release(self) -> None:
        """Nothing is kept between rollouts."""

    @torch.no_grad()
    def decode(
        self,
        prompts: Sequence[list[int]],
        group_size: int,
        uniforms: torch.Tensor,
        sampling: Sampling,
        max_rows: int = 0,
        images: Images | None = None,
        stopping: Stopping | None = None,
    ) -> Generator[None, None, tuple[torch.Tensor, torch.Tensor]]:
        """Completions of every prompt; see `engine.Engine.decode`."""
        model, device, (B, T) = self.model, self.model.device, uniforms.shape
        if images is not None:
            raise ValueError(f"{type(model).__name__}: must be sampled from with a cache, because there are images")
        uniforms, weight = uniforms.to(device), wide_weight(model)
        tokens_BT, logps_BT = torch.full((B, T), -1, device=device), torch.zeros(B, T, device=device)
        sequences = [torch.tensor(ids) for ids in prompts for _ in range(group_size)]
        with eval_mode(model), merging.merged(model):
            for rows in torch.arange(B).split(max_rows or B):
                for t in range(T):
                    logits = vocabulary_logits(model, self._last_states([sequences[i] for i in rows]), weight)
                    if not logits.isfinite().all():
                        raise FloatingPointError(NOT_FINITE)
                    logits = distribution(logits, sampling, t, self.end, self.suppressed)
                    tokens, logps = draw(logits, uniforms[rows, t], greedy=sampling.temperature == 0)
                    tokens_BT[rows, t], logps_BT[rows, t] = tokens, logps
                    running = ~torch.isin(tokens, self.end)
                    if stopping:
                        running &= ~torch.tensor(stopping.ended(tokens_BT[rows], 1), device=device)
                    for i, token in zip(rows.tolist(), tokens.cpu(), strict=True):
                        sequences[i] = torch.cat([sequences[i], token[None]])
                    rows = rows[running.cpu()]
                    yield
                    if not len(rows):
                        break
        return tokens_BT, logps_BT

    def _last_states(self, sequences: Sequence[torch.Tensor]) -> torch.Tensor:
        """Last hidden state of each sequence, [b, H]."""
        device = self.model.device
        ids = pad_sequence(list(sequences), True, 0, padding_side="left").to(device)
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        one = torch.ones_like(lengths)  # a token to be predicted, which no state sees
        return self.policy.states(ids, lengths, torch.zeros(len(ids), 1, dtype=torch.long, device=device), one)[0]
