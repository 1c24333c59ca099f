"""What must hold of a value, and the form that every error about a setting has: value, rule, remedy."""

import ipaddress
import math
from collections.abc import Mapping, Sequence
from typing import Any

MAY_BE_INFINITE = ("max_grad_norm", "similarity_kappa")  # fields in which inf means something
LARGEST = 2**31 - 1  # of whole numbers: seeds, positions and token ids go through types of 32 bits


def require(holds: bool, value: str, rule: str, remedy: str) -> None:
    """Raises a ValueError in the form every configuration error has.

    Args:
        holds: whether the rule is kept.
        value: what was given, "batch_size = 0".
        rule: what must hold, "must be at least 1".
        remedy: what to change, "set batch_size to the prompts of one step".

    Raises:
        ValueError: `holds` is false.
    """
    if not holds:
        raise ValueError(f"{value}: {rule}; {remedy}")


def at_least(cfg: Any, least: float, *names: str) -> None:
    """Requires fields of a Config to be no smaller than a number.

    Args:
        cfg: a dataclass instance.
        least: the smallest value allowed.
        *names: its fields.

    Raises:
        ValueError: one of them is smaller.
    """
    for name in names:
        value = getattr(cfg, name)
        require(value >= least, f"{name} = {value}", f"must be at least {least}", "raise it")


def above_zero(cfg: Any, *names: str) -> None:
    """Requires fields of a Config to be positive.

    Args:
        cfg: a dataclass instance.
        *names: its fields.

    Raises:
        ValueError: one of them is not.
    """
    for name in names:
        value = getattr(cfg, name)
        require(value > 0, f"{name} = {value}", "must be above 0", "raise it")


def require_numbers(values: Mapping[str, Any]) -> None:
    """Requires numbers that can be computed with: NaN passes many comparisons, and infinity most of them.

    Args:
        values: of the fields of a Config, by name.

    Raises:
        ValueError: a float that is not finite, or an integer of more than 32 bits.
    """
    for name, value in values.items():
        if isinstance(value, float):
            holds = math.isfinite(value) or (value == math.inf and name in MAY_BE_INFINITE)
            require(holds, f"{name} = {value}", "must be a finite number", "give one")
        elif isinstance(value, int):
            require(abs(value) <= LARGEST, f"{name} = {value}", f"must be at most {LARGEST}", "lower it")


def one_of(cfg: Any, **choices: Sequence[str]) -> None:
    """Requires fields of a Config to have one of the values they can have.

    Args:
        cfg: a dataclass instance.
        **choices: values by field.

    Raises:
        ValueError: one of them has another.
    """
    for name, allowed in choices.items():
        value = getattr(cfg, name)
        require(value in allowed, f"{name} = {value!r}", f"must be one of {tuple(allowed)}", "choose one of these")


def is_loopback(host: str) -> bool:
    """Whether a host is this machine, seen by nobody else.

    Args:
        host: name or address.
    """
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name
        return host == "localhost"
