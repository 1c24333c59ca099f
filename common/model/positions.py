"""The longest sequences that a model's positions allow."""

import torch
from torch import nn


def longest_sequence(model: nn.Module) -> tuple[int | None, str]:
    """The longest sequence whose log-probabilities depend on nothing but its own tokens, and why.

    Learned positions end there. Dynamic and LongRoPE positions change beyond it: for all tokens of
    all rows that are computed together, and in the middle of a rollout.

    Args:
        model: a transformers causal language model, wrapped by peft or not.

    Returns:
        Tokens, None without a limit; and a clause for messages.
    """
    config = model.config.get_text_config()
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]  # one per type of layer
    places, limits = getattr(config, "max_position_embeddings", None), []
    for kind in kinds:
        if (name := kind.get("rope_type")) in ("longrope", "dynamic"):
            limit = kind.get("original_max_position_embeddings", places) if name == "longrope" else places
            reason = f"beyond {limit} tokens its rotary positions ({name}) depend on the other rows of a batch"
            limits.append((limit, reason))
    if isinstance(top := getattr(config, "index_topk", None), int):
        reason = f"beyond {top} tokens its sparse attention (index_topk) depends on the other rows of a batch"
        limits.append((top, reason))
    if not limits and places is not None and places > 0 and _has_table(model, places):
        limits.append((places, f"the model has {places} positions"))
    return min(limits, default=(None, ""))


def _has_table(model: nn.Module, positions: int) -> bool:
    """Whether a model without rotary positions holds a tensor with a row for each position, and up to two for padding.

    State spaces, alibi, and attention without positions hold none.
    """
    if any("rotary" in type(module).__name__.lower() for module in model.modules()):
        return False
    own = (x for module in model.modules() for x in vars(module).values() if isinstance(x, torch.Tensor))
    tensors = [*model.parameters(), *model.buffers(), *own]
    return any(positions <= size <= positions + 2 for x in tensors for size in x.shape)
