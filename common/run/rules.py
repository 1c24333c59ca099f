"""Rules for the options that training scripts share; each script adds its own in `__post_init__`.

Every rule raises a ValueError.
"""

from typing import Any, Literal, get_args, get_origin, get_type_hints

from common.base.checks import above_zero, at_least, one_of, require, require_numbers
from common.base.distributed import print_main
from common.maths import sampling
from common.model import lora
from common.tasks import chat_templates


def check(cfg: Any) -> None:
    """Checks the options of any training script, a `settings.Settings`."""
    require_numbers(vars(cfg))
    kinds = get_type_hints(type(cfg))
    one_of(cfg, **{name: get_args(kind) for name, kind in kinds.items() if get_origin(kind) is Literal})
    at_least(cfg, 0, *(name for name, kind in kinds.items() if kind in (int, float)))  # never negative
    at_least(cfg, 1, "steps", "batch_size", "group_size", "num_minibatches", "micro_batch_tokens", "max_new_tokens")
    at_least(cfg, 1, "max_prompt_tokens", "save_every", "keep_checkpoints", "eval_examples", "collapse_steps")
    above_zero(cfg, "temperature")
    require(cfg.max_grad_norm > 0, f"max_grad_norm = {cfg.max_grad_norm}", "must be above 0", "inf: no clipping")
    lora.check(cfg)
    chat_templates.parse_arguments(getattr(cfg, "chat_template_kwargs", ""))  # posters have none
    sampling.Sampling(cfg.temperature, cfg.top_p, cfg.top_k, cfg.min_p)  # checks its arguments
    rows, what = cfg.batch_size * cfg.group_size, "completions of a step"
    if getattr(cfg, "off_policy", False):
        rows, what = cfg.batch_size, "answers of an off-policy step"
    require(rows >= cfg.num_minibatches, f"num_minibatches = {cfg.num_minibatches}",
            f"must be at most the {rows} {what}", "lower it, or raise batch_size")  # fmt: skip
    no_longer_than_completions(cfg, "min_new_tokens")
    require(
        not cfg.eval_data or (cfg.train_data == "toy") == (cfg.eval_data == "toy"),
        f"train_data = {cfg.train_data!r}, eval_data = {cfg.eval_data!r}",
        "one is the built-in task, one is not",
        "set eval_data to held-out rows of the same task, or to ''",
    )


def check_rl(cfg: Any) -> None:
    """Checks the options of reinforcement learning, in addition to `check`.

    Args:
        cfg: a `settings.RLSettings`, or a `settings.RewardSettings` with `epochs`.
    """
    check(cfg)
    at_least(cfg, 2, "group_size")  # a group of one has no baseline
    at_least(cfg, 1, "epochs")
    above_zero(cfg, "reward_patience")
    if not hasattr(cfg, "reward_model"):
        return
    no_longer_than_completions(cfg, "overlong_cache")
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
    """Requires the field `name`, a number of tokens, to be at most `max_new_tokens`."""
    value, limit = getattr(cfg, name), cfg.max_new_tokens
    require(value <= limit, f"{name} = {value}", f"must be at most max_new_tokens = {limit}", "lower it")


def check_grpo(cfg: Any) -> None:
    """Checks the options of a GRPO script, in addition to `check_rl`."""
    check_rl(cfg)
    above_zero(cfg, "cispo_cap")
    require(cfg.dual_clip == 0 or cfg.dual_clip > 1, f"dual_clip = {cfg.dual_clip}", "must be above 1",
            "3 is usual; 0 switches it off")  # fmt: skip
    require(cfg.dual_clip == 0 or cfg.loss != "cispo", f"dual_clip = {cfg.dual_clip}", "the loss 'cispo' holds all "
            "tokens with cispo_cap", "leave this at 0")  # fmt: skip
    if cfg.kl_coef > 0 and cfg.kl_estimator == "k1":
        print_main("warning: kl_estimator = 'k1' has no gradient but noise: nothing is regularised")
