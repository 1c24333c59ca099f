"""The check that a rollout is right: log-probabilities while decoding against those of the plain forward pass.

Every path that may serve a model is tried on short prompts of different lengths, with several
completions of each that end at different tokens, and with more prompts than are decoded at once.
"""

import math
import warnings
from collections.abc import Callable, Generator, Sequence

import torch
from transformers import PreTrainedModel

from common.maths.sampling import Sampling, distribution, uniforms
from common.model import agreement
from common.model.modes import eval_mode

NEW_TOKENS, GROUP_SIZE = 8, 4  # in a group of two, the second may never outlive the first
MAX_ROWS = 2 * GROUP_SIZE  # the third prompt waits
PROMPTS = ([7, 4, 9, 3, 5], [6, 8], [9, 3, 4, 6, 8, 5, 9, 7, 3, 4, 8])  # numbers for `agreement.token_ids`
END_EVERY = 5  # every fifth token of the vocabulary ends a completion

Decode = Callable[..., Generator[None, None, tuple[torch.Tensor, torch.Tensor]]]


def end_ids(model: PreTrainedModel) -> list[int]:
    """Tokens that end a completion of the check."""
    return list(range(0, model.get_output_embeddings().weight.shape[0], END_EVERY))


@torch.no_grad()
def differ(
    model: PreTrainedModel, decode: Decode, suppressed_ids: Sequence[int], longest: int = 0
) -> tuple[float, float]:
    """Decodes on a path, and compares log-probabilities with those of the plain forward pass.

    Args:
        model: a transformers causal language model.
        decode: as `engine.Engine.decode`, with the tokens of `end_ids` and the suppressed ones.
        suppressed_ids: tokens that are never drawn.
        longest: tokens of the longest prompt; 0: a few.

    Returns:
        The difference in nats, mean over the tokens of the worst prompt, and how much rounding
        allows; infinite if only the path is not finite, NaN if the plain pass is not either.
    """
    long = PROMPTS[0] * (1 + longest // len(PROMPTS[0]))
    numbers = [long[: max(longest, len(PROMPTS[0]))], *PROMPTS[1:]]
    prompts = [agreement.token_ids(model, row) for row in numbers]
    sampling = Sampling(1.0, 1.0, 0, 0.0, 0)
    steps = decode(prompts, GROUP_SIZE, uniforms(0, 0, range(len(prompts)), GROUP_SIZE, NEW_TOKENS), sampling, MAX_ROWS)
    try:
        while True:
            next(steps)
    except StopIteration as done:
        tokens_BT, logps_BT = done.value
    except FloatingPointError:
        with eval_mode(model):
            plain_is_finite = all(x.isfinite().all() for x in agreement.plain_states(model, prompts))
        return math.inf if plain_is_finite else math.nan, 0.0
    ends, suppressed = (torch.tensor(list(x), device=model.device).long() for x in (end_ids(model), suppressed_ids))
    differences, spreads, rows = [], [], []
    with eval_mode(model):
        for b, tokens_T in enumerate(tokens_BT):
            prompt, new = prompts[b // GROUP_SIZE], tokens_T[tokens_T >= 0]
            rows.append([*prompt, *new.tolist()])
            row = torch.tensor(rows[-1:], device=model.device)
            logits = model(input_ids=row, use_cache=False).logits[0, len(prompt) - 1 : -1].float().to(model.device)
            spreads.append(logits.std())
            plain = distribution(logits, sampling, 0, ends, suppressed).log_softmax(-1)
            plain = plain.gather(-1, new[:, None]).squeeze(-1)
            differences.append((plain - logps_BT[b, : len(new)]).abs())
    by_prompt = [torch.cat(differences[i : i + GROUP_SIZE]).mean() for i in range(0, len(differences), GROUP_SIZE)]
    error, spread = torch.stack(by_prompt).amax().item(), torch.stack(spreads).mean().item()
    # a relative error of hidden states moves a logit by that share of their spread, a
    # log-probability by twice as much
    allowed = agreement.allowed(error / (2 * spread) if spread else error, model, rows[::GROUP_SIZE])
    return error, 2 * allowed * spread + 1e-5


def forbid_syncs(step: Callable) -> Callable:
    """A decode step that raises RuntimeError where it would wait for the host, and so cannot be a CUDA graph.

    Args:
        step: of one token.
    """

    def wrapped(*args, **kwargs):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch calls this mode a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            return step(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return wrapped
