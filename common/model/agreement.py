"""How well two ways of computing one model agree, and what rounding allows.

Dims: N tokens, H hidden size, V vocabulary.
"""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from common.model.modes import eval_mode

# short sequences of different lengths, as numbers for `token_ids`; how many of their tokens are a prompt, and which
# have the same
ROWS = ([7, 4], [3, 9, 4, 6, 8, 5, 9, 7, 3, 4, 8], [5, 8, 6, 3, 7], [3, 9, 4, 6, 7, 5])
PROMPT_LENGTHS = (1, 4, 2, 4)
GROUPS = (0, 1, 2, 1)
# Size of a rounding error in the last hidden states, relative to theirs: measured 0.03 in the 28
# layers of a 7B model in bf16, and 1e-5 in fp32
ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.1}
MARGIN, LARGEST = 3.0, 0.3  # times the measured error; a row that sees another one differs by 0.6 and more
FIRST = 1000  # in the vocabulary of every common tokenizer, pieces of words come here
FEW = 20_000_000  # parameters: up to so many, `require_saveable` compares values


def token_ids(model: nn.Module, numbers: Sequence[int]) -> list[int]:
    """Ids of ordinary tokens for a check.

    Special tokens, which come first or last, may never have been trained. In SmolLM2-135M in bf16 a
    rounding error in their embeddings moves the last hidden states by 20 % and more, in those of
    pieces of words by 2 % (docs/models.md).

    Args:
        model: a transformers causal language model.
        numbers: 0 to 9, one for each token; equal ones give equal ids.
    """
    size = model.get_output_embeddings().weight.shape[0]
    first = max(0, min(FIRST, size // 2, size - 10))
    return [first + number for number in numbers]


def rounding(model: nn.Module) -> float:
    """The largest relative difference of hidden states that rounding explains in most models.

    Args:
        model: a transformers causal language model.
    """
    return ROUNDING.get(model.get_output_embeddings().weight.dtype, 0.1)


def allowed(error: float, model: nn.Module, rows: Sequence[Sequence[int]]) -> float:
    """The largest relative difference of hidden states that rounding explains in this model.

    It is measured if `error` is larger than `rounding`.

    Args:
        error: of a path, relative.
        model: a transformers causal language model.
        rows: token ids that the error was found with.
    """
    usual = rounding(model)
    if error <= usual or not math.isfinite(error):
        return usual
    with eval_mode(model):
        return max(usual, min(LARGEST, MARGIN * measured_rounding(model, rows)))


@torch.no_grad()
def measured_rounding(model: nn.Module, rows: Sequence[Sequence[int]], draws: int = 4) -> float:
    """Rounding error of the last hidden states, relative: the largest of a few draws.

    Every draw changes the embeddings by up to one unit in the last place, so that all operations
    behind them round differently (Monte Carlo arithmetic, Parker 1997, UCLA CSD-970002).

    Args:
        model: a transformers causal language model, in eval mode.
        rows: token ids.
        draws: of the changes.
    """
    generator = torch.Generator().manual_seed(0)

    def change(module: nn.Module, inputs: Any, embedded: torch.Tensor) -> torch.Tensor:
        units = 2 * torch.rand(embedded.shape, generator=generator) - 1
        scale = 1 + torch.finfo(embedded.dtype).eps * units.to(embedded.device)
        return (embedded.float() * scale).to(embedded.dtype)

    expected, errors = plain_states(model, rows), []
    hook = model.get_input_embeddings().register_forward_hook(change)
    try:
        for _ in range(draws):
            errors.append(largest_error(plain_states(model, rows), expected))
    finally:
        hook.remove()
    return max(errors)


@torch.no_grad()
def plain_states(model: nn.Module, rows: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Last hidden states of rows, each computed alone: without padding, cache, or other rows.

    Args:
        model: a transformers causal language model, in eval mode.
        rows: token ids.

    Returns:
        [N, H] for each row.

    Raises:
        ValueError: the model does not hold its decoder where transformers' `get_decoder` looks.
    """
    decoder, states = model.get_decoder(), []
    for row in rows:
        try:
            output = decoder(input_ids=torch.tensor([list(row)], device=model.device), use_cache=False)
            states.append(output.last_hidden_state[0])
        except (AttributeError, TypeError) as error:
            raise ValueError(
                f"{type(model).__name__}: its decoder, a {type(decoder).__name__}, must give last hidden states, but "
                f"fails ({error}); use another model"
            ) from error
    return states


def largest_error(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Relative difference of hidden states, the mean over the tokens of the worst row; NaN if any is not finite.

    A mean, because in a mixture of experts rounding may send a single token to another expert.

    Args:
        found: [N, H] for each row.
        expected: the same.
    """
    errors = [
        ((x.float() - y.float()).norm(dim=-1) / y.float().norm(dim=-1)).mean()
        for x, y in zip(found, expected, strict=True)
    ]
    return torch.stack(errors).amax().item()  # amax propagates NaN


def require_repeatable(model: nn.Module, states: Callable[[], torch.Tensor]) -> None:
    """Requires that a forward pass in train mode draws no random numbers.

    Args:
        model: a transformers causal language model, as it is trained.
        states: computes the same rows with it at every call.

    Raises:
        ValueError: results depend on the seed.
    """

    def seeded(seed: int) -> torch.Tensor:
        with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
            torch.manual_seed(seed)
            return states()

    one = seeded(0)
    # kernels that round at random differ with the same seed too
    if torch.equal(one, seeded(1)) or not torch.equal(one, seeded(0)) or not one.isfinite().all():
        return
    found = _noise(model.config.get_text_config().to_dict())
    raise ValueError(
        f"{type(model).__name__}: two forward passes over the same rows differ, because the model draws random numbers "
        "in training; the ratio of the first update would not be 1. Set gradient_checkpointing to false, or to 0 in "
        f"the model's config.json: {', '.join(f'{name} = {value}' for name, value in found.items()) or 'its noise'}"
    )


@torch.no_grad()
def require_saveable(model: PreTrainedModel) -> None:
    """Requires that a model can be saved and loaded again, without writing it.

    transformers renames, splits and fuses weights when it saves and loads them. Here that happens
    without their values, or with them if they are few.

    Args:
        model: a transformers model, not wrapped by peft, not quantized.

    Raises:
        ValueError: weights would be lost or changed.
    """
    try:
        wrong = _lost(model, with_values=model.num_parameters() < FEW)
    except NotImplementedError:  # a conversion that needs values
        wrong = _lost(model, with_values=True)
    if wrong:
        raise ValueError(
            f"{type(model).__name__}: saved and loaded again, {len(wrong)} of its weights would be lost or changed "
            f"({wrong[0]}); use another model, or another version of transformers"
        )


def _lost(model: PreTrainedModel, with_values: bool) -> list[str]:
    """Names of weights that saving and loading would lose or change."""
    weights = {name: x.cpu() if with_values else x.to("meta") for name, x in model.state_dict().items()}
    options = dict(config=copy.deepcopy(model.config), dtype=model.dtype, output_loading_info=True)
    options |= {} if with_values else {"device_map": {"": "meta"}}
    try:
        saved = dict(revert_weight_conversion(model, weights))
        again, found = type(model).from_pretrained(None, state_dict=saved, trust_remote_code=False, **options)
    except (RuntimeError, ValueError, KeyError) as error:
        if isinstance(error, NotImplementedError) and not with_values:
            raise
        return [f"{type(error).__name__}: {error}"]
    wrong = {str(name) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for name in found[kind]}
    if with_values:
        wrong |= {name for name, x in again.state_dict().items() if not torch.equal(x, weights[name])}
    return sorted(wrong)


def require_gradient(model: nn.Module, states: Callable[[], torch.Tensor]) -> None:
    """Requires that a backward pass works, if the model is trained; leaves no gradients behind.

    Args:
        model: a transformers causal language model, as it is trained.
        states: computes hidden states of a few rows with it.

    Raises:
        ValueError: a kernel has no backward pass, the gradient does not reach the first layer, or it
            is not finite.
    """
    # the embedding first: other weights may be unused, such as XLNet's for masks
    weights = [model.get_input_embeddings().weight, *model.get_decoder().parameters()]
    first = next((p for p in weights if p.requires_grad), None)
    if first is None:  # only the head is trained, or nothing
        return
    try:
        with torch.enable_grad():
            hidden = states().float().mean()
            (gradient,) = torch.autograd.grad(hidden, first, allow_unused=True) if hidden.requires_grad else (None,)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"{type(model).__name__}: must have a backward pass, but it fails here ({error}); remove or upgrade the "
            "package whose kernel this is"
        ) from error
    if gradient is None:
        raise ValueError(
            f"{type(model).__name__}: the gradient must reach its first layers, but a part of its code is not "
            "differentiable, so that they would never learn; use another model"
        )
    if not gradient.isfinite().all():
        raise ValueError(
            f"{type(model).__name__}: must have finite gradients, but those of a few tokens are not; take dtype bf16 "
            "or fp32, or another model"
        )


def _noise(config: dict[str, Any]) -> dict[str, float]:
    """Rates of dropout and other noise in a config and its parts."""
    found = {}
    for name, value in config.items():
        if isinstance(value, dict):
            found |= _noise(value)
        elif isinstance(value, float) and value > 0 and any(word in name for word in ("drop", "noise", "jitter")):
            found[name] = value
    return found
