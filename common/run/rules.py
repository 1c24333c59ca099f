"""Rules for the options that training scripts share; each script adds its own in `__post_init__`.

Every rule raises a ValueError. Nothing here imports torch: a wrong option is answered at once.
"""

import math
from typing import Any, Literal, get_args, get_origin, get_type_hints

from common.base import settings
from common.base.checks import above_zero, at_least, one_of, require, require_numbers, require_url, warn
from common.maths.sampling_options import Sampling


def check(cfg: Any) -> None:
    """Checks the options of any training script, a `settings.Settings`."""
    require_numbers(vars(cfg))
    kinds = get_type_hints(type(cfg))
    one_of(cfg, **{name: get_args(kind) for name, kind in kinds.items() if get_origin(kind) is Literal})
    at_least(cfg, 0, *(name for name, kind in kinds.items() if kind in (int, float)))  # never negative
    at_least(cfg, 1, "steps", "batch_size", "group_size", "num_minibatches", "max_new_tokens")
    at_least(cfg, 1, "max_prompt_tokens", "save_every", "keep_checkpoints", "eval_examples", "collapse_steps")
    above_zero(cfg, "temperature")
    require(cfg.max_grad_norm > 0, f"max_grad_norm = {cfg.max_grad_norm}", "must be above 0", "inf: no clipping")
    check_lora(cfg)
    check_measures(cfg)
    settings.stop_strings(cfg.stop_strings)
    settings.template_kwargs(getattr(cfg, "chat_template_kwargs", ""))  # posters have none
    Sampling(cfg.temperature, cfg.top_p, cfg.top_k, cfg.min_p)  # checks its arguments
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
    for name in ("reward_url", "teacher_url"):
        if getattr(cfg, name, ""):
            require_url(name, getattr(cfg, name))


def check_supervised(cfg: Any) -> None:
    """Checks the options of supervised fine-tuning, in addition to `check`: nothing is sampled but in evaluations."""
    check(cfg)
    at_least(cfg, 2, "max_tokens")
    for name, off in (("drafts", False), ("print_samples", False), ("truncated", "keep")):
        value = getattr(cfg, name)
        require(value == off, f"{name} = {value!r}", "the replies are given, not sampled",
                f"leave it at {off!r}")  # fmt: skip


def check_measures(cfg: Any) -> None:
    """Checks the schedule of the learning rate, and the options of evaluations."""
    require(cfg.lr_end <= 1, f"lr_end = {cfg.lr_end}", "is a share of learning_rate, 0 to 1", "0.1 is usual, or 0")
    require(cfg.lr_schedule != "constant" or cfg.lr_end == 0, f"lr_end = {cfg.lr_end}, lr_schedule = 'constant'",
            "the rate does not fall", "set lr_schedule to 'linear' or 'cosine', or leave this at 0")  # fmt: skip
    evaluates = bool(cfg.eval_data and cfg.eval_every)
    given = f"eval_data = {cfg.eval_data!r}, eval_every = {cfg.eval_every}"
    require(evaluates or not cfg.early_stop, f"early_stop = {cfg.early_stop}, {given}", "there is no evaluation",
            "set both, or leave early_stop at 0")  # fmt: skip
    require(evaluates or not cfg.eval_columns, f"eval_by = {cfg.eval_by!r}, {given}", "there is no evaluation",
            "set both, or leave eval_by empty")  # fmt: skip
    require(bool(cfg.best_by) or not cfg.early_stop, f"early_stop = {cfg.early_stop}, best_by = ''",
            "no measure says what is best", "set best_by, or leave early_stop at 0")  # fmt: skip
    require(cfg.best_by != "-", "best_by = '-'", "must name a measure",
            "such as 'eval_reward', or '-eval_answer_nll' if the lowest is best")  # fmt: skip


def check_lora(cfg: Any) -> None:
    """Checks the options of adapters; missing fields have their defaults."""
    rank, alpha, bits = getattr(cfg, "lora_rank", 0), getattr(cfg, "lora_alpha", 1.0), getattr(cfg, "load_bits", 0)
    require(rank >= 0, f"lora_rank = {rank}", "must be at least 0", "0 trains all weights, 16 is usual for adapters")
    require(alpha > 0, f"lora_alpha = {alpha}", "must be above 0", "twice lora_rank is usual")
    require(bits in (0, 4, 8), f"load_bits = {bits}", "must be 0, 4 or 8", "choose one of these")
    require(rank > 0 or not bits, f"load_bits = {bits}, lora_rank = 0", "weights in few bits cannot be trained",
            "set lora_rank, or leave load_bits at 0")  # fmt: skip
    require(not bits or not getattr(cfg, "param_offload", False), f"load_bits = {bits}, param_offload = True",
            "weights in few bits stay on the GPU", "leave one of them off")  # fmt: skip
    if not rank:
        return
    names = getattr(cfg, "lora_targets", "all-linear")
    require(any(part.strip() for part in names.split(",")), f"lora_targets = {names!r}", "must name layers",
            "give 'all-linear', or names")  # fmt: skip
    refresh = getattr(cfg, "reference_refresh", 0)
    require(not refresh, f"reference_refresh = {refresh}, lora_rank = {rank}", "with adapters the reference stays the "
            "starting model", "leave one of them at 0")  # fmt: skip
    require(not getattr(cfg, "fsdp", False), f"fsdp = True, lora_rank = {rank}", "fsdp shards what is trained, and "
            "with LoRA that is little", "leave one off; load_bits makes the frozen weights smaller")  # fmt: skip


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
    require(cfg.advantage_scale != "maxrl" or not cfg.overlong_cache,
            f"advantage_scale = 'maxrl', overlong_cache = {cfg.overlong_cache}", "it divides by the mean reward, which "
            "penalties would make negative", "leave one of them off")  # fmt: skip
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


def check_distillation(cfg: Any) -> None:
    """Checks the options of a GKD script, in addition to `check`."""
    check(cfg)
    at_least(cfg, 1, "n_server_workers")
    above_zero(cfg, "loss_temperature", "teacher_patience")
    require(cfg.lmbda <= 1, f"lmbda = {cfg.lmbda}", "is a share, at most 1", "1: on-policy in every step")
    require(0 < cfg.beta < 1, f"beta = {cfg.beta}", "must be between 0 and 1; the loss jumps at the ends",
            "set loss to forward_kl (0) or reverse_kl (1)")  # fmt: skip
    check_self_distillation(cfg)
    if cfg.other_tokenizer != "refuse":
        given = f"other_tokenizer = {cfg.other_tokenizer!r}"
        require(cfg.teacher_model != "student" and not cfg.teacher_prompt, f"{given}, teacher_model = "
                f"{cfg.teacher_model!r}, teacher_prompt = {cfg.teacher_prompt!r}", "a teacher with another tokenizer "
                "is another model, and reads the prompts of the data", "leave it at 'refuse'")  # fmt: skip
        require(not cfg.teacher_url, f"{given}, teacher_url = {cfg.teacher_url!r}", "a server takes tokens of its own "
                "tokenizer only", "set teacher_model instead")  # fmt: skip
        require(cfg.other_tokenizer == "spans" or cfg.loss == "reverse_kl", f"{given}, loss = {cfg.loss!r}",
                "ULD is a loss of its own", "leave loss at 'reverse_kl', or set this to 'spans'")  # fmt: skip
        if cfg.other_tokenizer == "uld" and not cfg.off_policy:
            warn(
                "other_tokenizer = 'uld' with lmbda = 1: sorted probabilities say how sure to be, not of which token; "
                "the answers of off-policy steps do: set lmbda below 1, or other_tokenizer to 'spans'"
            )
    if cfg.loss == "opd":
        require(not cfg.off_policy, f"loss = 'opd', lmbda = {cfg.lmbda}, lmbda_ramp = {cfg.lmbda_ramp}",
                "its tokens must be the student's own", "set lmbda 1 and lmbda_ramp 0")  # fmt: skip
        require(cfg.loss_temperature == cfg.temperature, f"loss = 'opd', loss_temperature = {cfg.loss_temperature}",
                f"must be that of the samples, temperature = {cfg.temperature}", "set both to the same")  # fmt: skip


def check_self_distillation(cfg: Any) -> None:
    """Checks what the teacher of a GKD script reads, and whether it can follow the student."""
    refresh, itself, remedy = cfg.teacher_refresh, cfg.teacher_model == "student", "leave teacher_refresh at 0"
    at_least(cfg, 1, "max_teacher_prompt_tokens")
    if cfg.teacher_prompt:
        settings.prompt_parts(cfg.teacher_prompt)
    require(not itself or not cfg.teacher_url, f"teacher_model = 'student', teacher_url = {cfg.teacher_url!r}",
            "a server has a model of its own", "leave one of them out")  # fmt: skip
    given = f"teacher_refresh = {refresh}"
    require(itself or not refresh, f"{given}, teacher_model = {cfg.teacher_model!r}", "the student is copied into a "
            "teacher that began as the student", f"set teacher_model to 'student', or {remedy}")  # fmt: skip
    require(not refresh or not cfg.lora_rank, f"{given}, lora_rank = {cfg.lora_rank}", "with adapters the teacher "
            "stays the starting model", f"{remedy}, or train all weights")  # fmt: skip
    require(not refresh or not cfg.seq_kd, f"{given}, seq_kd = True", "the teacher's own answers are generated once, "
            "and it changes", f"{remedy}, or seq_kd off")  # fmt: skip


def no_longer_than_completions(cfg: Any, name: str) -> None:
    """Requires the field `name`, a number of tokens, to be at most `max_new_tokens`."""
    value, limit = getattr(cfg, name), cfg.max_new_tokens
    require(value <= limit, f"{name} = {value}", f"must be at most max_new_tokens = {limit}", "lower it")


CLIPPED = ("grpo", "dapo", "dr_grpo", "gspo", "gspo_token", "luspo")  # losses that clip a ratio
ONE_RATIO = ("gspo", "luspo", "gmpo", "vespo")  # losses with one ratio for a sequence, and so one advantage


def check_grpo(cfg: Any) -> None:
    """Checks the options of a GRPO script, in addition to `check_rl`."""
    check_rl(cfg)
    require(cfg.dual_clip == 0 or cfg.dual_clip > 1, f"dual_clip = {cfg.dual_clip}", "must be above 1",
            "3 is usual; 0 switches it off")  # fmt: skip
    require(cfg.dual_clip == 0 or cfg.loss in CLIPPED, f"dual_clip = {cfg.dual_clip}, loss = {cfg.loss!r}",
            f"only {', '.join(CLIPPED)} clip a ratio", "leave dual_clip at 0")  # fmt: skip
    corrected, cap = cfg.sampler_correction != "none", cfg.sampler_cap
    require(cap > 1, f"sampler_cap = {cap}", "must be above 1", "2 is usual for tokens")
    require(not (corrected and cfg.sampler_is_old), f"sampler_correction = {cfg.sampler_correction!r}, loss = "
            f"{cfg.loss!r}, old_logps = {cfg.old_logps!r}", "ratios start from the sampler, so there is nothing to "
            "correct", "leave sampler_correction at 'none'")  # fmt: skip
    if cfg.sampler_is_old and cfg.loss in ("gspo", "gspo_token", "luspo"):
        warn(f"old_logps = 'sampler', loss = {cfg.loss!r}: in 16 bits, the log-probabilities of sampler and trainer "
             "differ by more than its clip range")  # fmt: skip
    check_advantage(cfg)
    if cfg.kl_coef > 0 and cfg.kl_estimator == "k1":
        warn("kl_estimator = 'k1' has no gradient but noise: nothing is regularised; 'in_reward' does")


def check_advantage(cfg: Any) -> None:
    """Checks that the kind of advantages fits rewards, loss and KL."""
    given = f"advantage_scale = {cfg.advantage_scale!r}"
    by_token = cfg.advantage_scale == "reinforce_pp"
    require(not by_token or cfg.loss not in ONE_RATIO, f"{given}, loss = {cfg.loss!r}", "it gives every token an "
            "advantage of its own, and this loss takes one per sequence", "take dapo, or gspo_token")  # fmt: skip
    require(by_token or cfg.kl_estimator != "in_reward", f"kl_estimator = 'in_reward', {given}", "the KL becomes "
            "part of the advantages of tokens", "set advantage_scale to 'reinforce_pp'")  # fmt: skip
    require(cfg.advantage_scale != "gdpo" or not cfg.reward_url, f"{given}, reward_url = {cfg.reward_url!r}", "a "
            "service returns one score, and this normalises each reward function", "take 'group'")  # fmt: skip


def check_similarity(cfg: Any) -> None:
    """Checks the options of similarity groups, in the Config of grpo/similarity_grpo.py."""
    at_least(cfg, 1, "similarity_max_tokens", "similarity_batch")
    require(cfg.similarity_method not in ("within", "balanced") or cfg.scale == "group",
            f"advantage_scale = {cfg.scale!r}", f"{cfg.similarity_method!r} has a std of its own",
            "leave it at 'auto', and loss not 'dr_grpo'")  # fmt: skip
    for name in ("similarity_lambda", "similarity_rarity"):
        value = getattr(cfg, name)
        require(value <= 1, f"{name} = {value}", "is a share, at most 1", "lower it")
    require(cfg.scale not in ("gdpo", "reinforce_pp"), f"advantage_scale = {cfg.scale!r}", "similarity enters a single "
            "reward, relative to its group", "take 'group' or 'batch', or grpo.py")  # fmt: skip
    try:
        known = cfg.similarity_threshold == "auto" or math.isfinite(float(cfg.similarity_threshold))
    except ValueError:
        known = False
    require(
        known, f"similarity_threshold = {cfg.similarity_threshold!r}", "must be a cosine", "0.9 is usual, or 'auto'"
    )
