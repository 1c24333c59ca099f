"""State of the random number generators of this process (Python, NumPy, torch, CUDA) as tensors."""

import random

import numpy as np
import torch


def seed(number: int) -> None:
    """Seeds every generator, as transformers' `set_seed`, whose import takes the time of loading peft.

    Args:
        number: not negative.
    """
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)  # CUDA's too


def capture() -> dict[str, torch.Tensor]:
    """The state of every generator, by name."""
    version, words, gauss = random.getstate()
    _, keys, place, has_gauss, cached = np.random.get_state()
    state = {
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "python_gauss": torch.tensor([float("nan") if gauss is None else gauss], dtype=torch.float64),
        "numpy": torch.tensor([*keys.tolist(), place, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    for i in range(torch.cuda.device_count()):
        state[f"cuda{i}"] = torch.cuda.get_rng_state(i)
    return state


def restore(state: dict[str, torch.Tensor]) -> None:
    """Restores what `capture` returned.

    Args:
        state: empty for a rank that the saved run did not have: its generators stay as they are.
    """
    if not state:
        return
    version, *words = state["python"].tolist()
    gauss = state["python_gauss"].item()
    random.setstate((version, tuple(words), None if gauss != gauss else gauss))
    *keys, place, has_gauss = state["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), place, has_gauss, state["numpy_gauss"].item()))
    torch.set_rng_state(state["torch"])
    for i in range(torch.cuda.device_count()):
        if f"cuda{i}" in state:
            torch.cuda.set_rng_state(state[f"cuda{i}"], i)
