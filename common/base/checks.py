"""Checks of settings. Every error about a setting has the same form: value, rule, remedy."""

import ipaddress
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

MAY_BE_INFINITE = ("max_grad_norm", "similarity_kappa")  # fields where inf is a valid value
LARGEST = 2**31 - 1  # of integers: seeds, positions and token ids are stored in 32 bits


def require(holds: bool, value: str, rule: str, remedy: str) -> None:
    """Raises a ValueError in the form every configuration error has.

    Args:
        holds: whether the value obeys the rule.
        value: such as "batch_size = 0".
        rule: such as "must be at least 1".
        remedy: such as "set batch_size to the prompts of one step".

    Raises:
        ValueError: `holds` is false.
    """
    if not holds:
        raise ValueError(f"{value}: {rule}; {remedy}")


def at_least(cfg: Any, least: float, *names: str) -> None:
    """Requires fields of a Config to be at least `least`.

    Args:
        cfg: a dataclass instance.
        least: the smallest allowed value.
        *names: of the fields.

    Raises:
        ValueError: a field is smaller.
    """
    for name in names:
        value = getattr(cfg, name)
        require(value >= least, f"{name} = {value}", f"must be at least {least}", "raise it")


def above_zero(cfg: Any, *names: str) -> None:
    """Requires fields of a Config to be positive.

    Args:
        cfg: a dataclass instance.
        *names: of the fields.

    Raises:
        ValueError: a field is not.
    """
    for name in names:
        value = getattr(cfg, name)
        require(value > 0, f"{name} = {value}", "must be above 0", "raise it")


def require_numbers(values: Mapping[str, Any]) -> None:
    """Requires finite numbers, since NaN and infinity pass many comparisons.

    Args:
        values: of a Config, by field name.

    Raises:
        ValueError: a float is not finite, or an integer has more than 32 bits.
    """
    for name, value in values.items():
        if isinstance(value, float):
            holds = math.isfinite(value) or (value == math.inf and name in MAY_BE_INFINITE)
            require(holds, f"{name} = {value}", "must be a finite number", "give one")
        elif isinstance(value, int):
            require(abs(value) <= LARGEST, f"{name} = {value}", f"must be at most {LARGEST}", "lower it")


def one_of(cfg: Any, **choices: Sequence[str]) -> None:
    """Requires fields of a Config to have one of a list of values.

    Args:
        cfg: a dataclass instance.
        **choices: allowed values by field.

    Raises:
        ValueError: a field has another value.
    """
    for name, allowed in choices.items():
        value = getattr(cfg, name)
        require(value in allowed, f"{name} = {value!r}", f"must be one of {tuple(allowed)}", "choose one of these")


def require_url(name: str, url: str) -> None:
    """Requires the address of a service, such as "http://127.0.0.1:8899"; a path may follow.

    Args:
        name: of the option, for the message.
        url: its value.

    Raises:
        ValueError: no such address.
    """
    shown = url if "@" not in url else f"...@{url.rpartition('@')[2]}"  # passwords stay out of logs
    given, remedy = f"{name} = {shown!r}", "give an address such as http://127.0.0.1:8899"
    require(url.isprintable() and " " not in url, given, "must have no spaces and no control characters", remedy)
    try:
        parts = urlsplit(url)
        port = parts.port  # only this checks its digits
        (parts.hostname or "").encode("idna")
    except ValueError as error:  # UnicodeError is one
        raise ValueError(f"{given}: must be an address, but {error}; {remedy}") from error
    require(parts.scheme in ("http", "https"), given, "must begin with http:// or https://", remedy)
    require(bool(re.fullmatch(r"[\w:][\w.:-]*", parts.hostname or "")), given, "must name a host", remedy)
    numeric = re.fullmatch(r"(.*\.)?(\d+|0x[0-9a-f]*)", parts.hostname)  # no name of a host ends like this
    require(not numeric or _is_ip(parts.hostname), given, "is not an address of four numbers up to 255", remedy)
    require(port != 0 and not parts.netloc.endswith(":"), given, "the port must be from 1 to 65535", remedy)
    require("@" not in parts.netloc, given, "must hold no user and no password", "leave them out: the token of the "
            "service stands in the environment")  # fmt: skip
    require("?" not in url and "#" not in url, given, "the service's own paths follow it", "leave out what stands "
            "after ? or #")  # fmt: skip


def _is_ip(host: str) -> bool:
    try:
        return bool(ipaddress.ip_address(host))
    except ValueError:
        return False


def warn(text: str) -> None:
    """Prints a warning about an option; under torchrun on rank 0 only."""
    if os.environ.get("RANK", "0") == "0":
        print(f"warning: {text}", flush=True)


def is_loopback(host: str) -> bool:
    """Whether a host name or address is loopback, which other machines cannot reach."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name
        return host == "localhost"
