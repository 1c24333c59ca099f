"""What must hold for the options that training scripts share; each script has rules of its own beside these."""

from typing import Any

from common.base.checks import above_zero, at_least, one_of, require, require_numbers
from common.maths import sampling
from common.model import lora, sources
from common.training import optim


def check(cfg: Any) -> None:
    """Requires what must hold for the fields that all scripts share.

    Args:
        cfg: a Config.

    Raises:
        ValueError: a rule is broken.
    """
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
    one_of(cfg, truncated=("keep", "mask"), dtype=("auto", *sources.DTYPES), device=("auto", "cuda", "cpu"))
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
