"""Command line of a script from its Config dataclass: one option per field, the trailing comment is its help."""

import argparse
import ast
import dataclasses
import difflib
import inspect
import io
import ipaddress
import json
import math
import sys
import textwrap
import tokenize
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

T = TypeVar("T")
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


def check(cfg: Any) -> None:
    """Requires what must hold for the fields that all scripts share.

    Args:
        cfg: a Config.

    Raises:
        ValueError: a rule is broken.
    """
    from common import lora, models, optim, sampling

    require_numbers(vars(cfg))
    at_least(cfg, 1, "steps", "batch_size", "group_size", "num_minibatches", "micro_batch_tokens", "max_new_tokens")
    at_least(cfg, 1, "max_prompt_tokens", "save_every", "keep_checkpoints", "eval_examples")
    at_least(cfg, 0, "min_new_tokens", "rollout_batch", "learning_rate", "warmup_steps", "weight_decay")
    at_least(cfg, 0, "eval_every", "sample_every", "profile", "seed")
    above_zero(cfg, "temperature")
    if hasattr(cfg, "on_collapse"):  # not in scripts that were copied before there were guards
        at_least(cfg, 1, "collapse_steps")
        one_of(cfg, on_collapse=("warn", "stop", "off"))
    require(cfg.max_grad_norm > 0, f"max_grad_norm = {cfg.max_grad_norm}", "must be above 0", "inf: no clipping")
    one_of(cfg, truncated=("keep", "mask"), dtype=("auto", *models.DTYPES), device=("auto", "cuda", "cpu"))
    one_of(cfg, optimizer_offload=optim.OFFLOAD)
    at_least(cfg, 0, "memory_limit")
    lora.check(cfg)
    sampling.Sampling(cfg.temperature, cfg.top_p, cfg.top_k, cfg.min_p)  # has rules of its own
    rows = cfg.batch_size * cfg.group_size
    require(
        rows >= cfg.num_minibatches,
        f"num_minibatches = {cfg.num_minibatches}",
        f"must be at most the {rows} completions of a step",
        "lower it, or raise batch_size",
    )
    no_longer_than_completions(cfg, "min_new_tokens")
    require(
        not cfg.eval_data or (cfg.train_data == "toy") == (cfg.eval_data == "toy"),
        f"train_data = {cfg.train_data!r}, eval_data = {cfg.eval_data!r}",
        "one is the built-in task, one is not",
        "set eval_data to held-out rows of the same task, or to ''",
    )


def check_rl(cfg: Any) -> None:
    """Requires what must hold for the fields that the reinforcement learning scripts share, those of `check` too.

    Args:
        cfg: a Config.

    Raises:
        ValueError: a rule is broken.
    """
    check(cfg)
    at_least(cfg, 2, "group_size")  # a group of one has no baseline
    at_least(cfg, 0, "overlong_cache", "dynamic_sampling", "kl_coef", "reference_refresh")
    no_longer_than_completions(cfg, "overlong_cache")
    above_zero(cfg, "reward_patience")
    require(
        not (cfg.reward_url and cfg.reward_model),
        f"reward_url = {cfg.reward_url!r}, reward_model = {cfg.reward_model!r}",
        "the service scores alone",
        "leave one of them empty",
    )
    require(
        cfg.kl_coef > 0 or not cfg.reference_refresh,
        f"reference_refresh = {cfg.reference_refresh}",
        "there is no reference while kl_coef is 0",
        "set kl_coef, or leave this at 0",
    )


def no_longer_than_completions(cfg: Any, name: str) -> None:
    """Requires a number of tokens to be at most `max_new_tokens`.

    Args:
        cfg: a Config.
        name: of its field.

    Raises:
        ValueError: it is larger.
    """
    value, limit = getattr(cfg, name), cfg.max_new_tokens
    require(value <= limit, f"{name} = {value}", f"must be at most max_new_tokens = {limit}", "lower it")


def is_loopback(host: str) -> bool:
    """Whether a host is this machine, seen by nobody else.

    Args:
        host: name or address.
    """
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def comments(cls: type) -> dict[str, str]:
    """The trailing comment of every field of a dataclass.

    Args:
        cls: a dataclass whose source can be read.

    Returns:
        Field name -> comment without the "#"; "" for a field without one.
    """
    source = textwrap.dedent(inspect.getsource(cls))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    by_line = {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}
    fields = [node for node in ast.parse(source).body[0].body if isinstance(node, ast.AnnAssign)]
    return {node.target.id: by_line.get(node.end_lineno, "") for node in fields}


def parse(cls: type[T], argv: Sequence[str] | None = None) -> T:
    """Reads a Config from the command line: `--name value` is the same as editing the field's line.

    Args:
        cls: a dataclass with fields of type str, int, float or bool.
        argv: the arguments; those of the process by default.

    Returns:
        An instance of `cls`.

    Raises:
        SystemExit: an unknown option (the closest name is suggested), or a value that breaks a rule; code 2.
    """
    parser = argparse.ArgumentParser(description=cls.__doc__, allow_abbrev=False)
    helps, types = comments(cls), get_type_hints(cls)
    for field in dataclasses.fields(cls):
        text = f"{helps.get(field.name, '')} (default: {field.default!r})".replace("%", "%%").strip()
        kind = types[field.name]
        if kind is bool:
            parser.add_argument(f"--{field.name}", type=_bool, nargs="?", const=True, default=field.default, help=text)
        else:
            parser.add_argument(f"--{field.name}", type=kind, default=field.default, help=text)
    argv = [_underscored(arg) for arg in (sys.argv[1:] if argv is None else argv)]
    values, unknown = parser.parse_known_args(argv)
    if unknown:
        close = difflib.get_close_matches(unknown[0].split("=")[0].lstrip("-"), helps, n=1)
        parser.error(f"unknown option {unknown[0]}" + (f"; did you mean --{close[0]}?" if close else ""))
    try:
        require_numbers(vars(values))
        return cls(**vars(values))
    except ValueError as error:
        parser.error(str(error))


def save(cfg: Any, out_dir: str) -> None:
    """Writes the configuration of a run to `config.json` in its folder; rank 0 does, the others do nothing.

    Args:
        cfg: a dataclass instance.
        out_dir: of the run.
    """
    from common import distributed  # imports torch, which a server without a model does not need

    if distributed.rank() > 0:
        return
    Path(out_dir).mkdir(parents=True, exist_ok=True)
    (Path(out_dir) / "config.json").write_text(json.dumps(dataclasses.asdict(cfg), indent=1) + "\n", encoding="utf-8")


def changed(old: dict[str, Any], cfg: Any) -> list[str]:
    """What differs between a saved configuration and the present one.

    Args:
        old: the saved fields.
        cfg: a dataclass instance.

    Returns:
        One line "name: old -> new" per field that differs.
    """
    new = dataclasses.asdict(cfg)
    names = [name for name in new if name in old and old[name] != new[name]]
    return [f"{name}: {old[name]!r} -> {new[name]!r}" for name in names]


def _bool(text: str) -> bool:
    if text.lower() in ("true", "1", "yes", "on"):
        return True
    if text.lower() in ("false", "0", "no", "off"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is not a truth value: use true or false")


def _underscored(arg: str) -> str:
    """--learning-rate=1e-6 as --learning_rate=1e-6."""
    if not arg.startswith("--"):
        return arg
    name, equals, value = arg.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value
