"""Train and eval mode of a model: training without randomness, and rollouts that leave no trace."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


def train_mode(model: nn.Module) -> nn.Module:
    """Prepares a model for training without randomness: eval mode, but for gradient checkpointing.

    Dropout, router noise and sampled experts depend on train mode, whatever they are called; with
    any of them the ratio of the first update would not be 1.

    Args:
        model: changed in place.

    Returns:
        The model.
    """
    model.eval()
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True  # transformers checkpoints in train mode only
    return model


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Switches to eval mode and back: in train mode, gradient checkpointing disables the cache."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training
