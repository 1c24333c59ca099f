"""Options that training scripts inherit: machine, run, rewards.

A script changes a default by redefining the field. The comment of a field is its --help text.
"""

import json
from dataclasses import dataclass
from string import Formatter
from typing import Any, Literal

from common.base.checks import require

Loss = Literal["grpo", "dapo", "dr_grpo", "cispo", "dppo", "sapo", "gspo", "gspo_token", "luspo", "gmpo", "vespo"]
Diversity = Literal["discount", "advantage", "dra", "within", "darling", "uarl", "balanced", "mmr", "unlikeliness"]
Advantage = Literal["auto", "group", "batch", "none", "rloo", "maxrl", "lite_ppo", "reinforce_pp", "gdpo"]


def stop_strings(text: str) -> tuple[str, ...]:
    """Reads the option `stop_strings`: a JSON list of texts, or "".

    Raises:
        ValueError: it is no such list, or a text is empty.
    """
    stops = _json(text or "[]")
    holds = isinstance(stops, list) and all(isinstance(stop, str) and stop for stop in stops)
    example = json.dumps([(text or "").strip("[]{}'\" ") or "END"])
    require(holds, f"stop_strings = {text!r}", "must be a JSON list of texts, none of them empty", f"such as {example}")
    return tuple(stops)


def prompt_parts(template: str) -> list[tuple[str, str | None]]:
    """Reads the option `teacher_prompt`: text with names of columns in braces; {{ and }} are literal braces.

    Returns:
        Pieces of text, each with the name of the column that follows it, None for none.

    Raises:
        ValueError: it names no column, or braces hold something else.
    """
    given, example = f"teacher_prompt = {template!r}", "such as '{prompt} The answer is {answer}.'"
    try:
        parsed = list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{given}: {error}; write names of columns in braces, {example}, and braces twice") from None
    named = [part for part in parsed if part[1] is not None]
    bare = all(name.strip() and not spec and not conversion for _, name, spec, conversion in named)
    require(bool(named) and bare, given, "must hold names of columns in braces, and nothing else in these",
            f"{example}; write literal braces twice")  # fmt: skip
    return [(text, name) for text, name, _, _ in parsed]


def teacher_name(cfg: Any) -> str:
    """The model that a teacher in this process is loaded from; "student" stands for the student's first weights."""
    return cfg.student_model if cfg.teacher_model == "student" else cfg.teacher_model


def column_names(text: str) -> tuple[str, ...]:
    """Reads the option `eval_by`: names separated by commas, each once."""
    return tuple(dict.fromkeys(filter(None, (name.strip() for name in text.split(",")))))


def template_kwargs(text: str) -> dict[str, Any]:
    """Reads the option `chat_template_kwargs`: a JSON object, or "".

    Raises:
        ValueError: it is no object.
    """
    arguments = _json(text or "{}")
    require(isinstance(arguments, dict), f"chat_template_kwargs = {text!r}", "must be a JSON object",
            'write it like {"enable_thinking": false}')  # fmt: skip
    return arguments


def _json(text: str) -> Any:
    """The value, or None if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


@dataclass(frozen=True)
class Settings:
    """Machine and run: data, sampling, memory, checkpoints, logging."""

    max_prompt_tokens: int = 512  # longer prompts are dropped and counted

    min_new_tokens: int = 0  # no end token before this many tokens
    stop_strings: str = ""  # JSON list of texts that end a completion, such as '["\\nQ:"]'; "": the end tokens alone do
    truncated: Literal["keep", "mask"] = "keep"  # completions cut off by max_new_tokens: "mask" excludes them
    top_p: float = 1.0  # nucleus sampling: keep the likeliest tokens up to this probability; below 1 biases ratios
    top_k: int = 0  # sample from this many of the likeliest tokens; 0: all; otherwise biases ratios
    min_p: float = 0.0  # drop tokens below this fraction of the top token's probability; above 0 biases ratios
    drafts: bool = False  # try a prompt's completions of its last pass as its new ones; the samples stay the same
    rollout_batch: int = 0  # completions sampled at once per GPU, at least one group; 0: as many as memory holds

    micro_batch_tokens: int = 0  # tokens of a forward pass; changes memory and speed only; 0: as many as fit, to 32768
    warmup_steps: int = 5  # steps of linear warm-up, then lr_schedule to the last step
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"  # it is stretched if a resume raises steps
    lr_end: float = 0.0  # share of learning_rate at the last step, 0 to 1; unless lr_schedule is "constant"
    weight_decay: float = 0.0  # decoupled
    max_grad_norm: float = 1.0  # gradient clipping; inf: none

    device: Literal["auto", "cuda", "cpu"] = "auto"  # "auto": the GPUs at the top of the script, if there are any
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"  # 16 bits keep fp32 masters; "auto": bf16, fp32 on a CPU
    lora_rank: int = 0  # rank of LoRA adapters, which are trained instead of the weights; 0: train all weights
    lora_alpha: float = 32.0  # adapters are scaled by lora_alpha / lora_rank
    lora_targets: str = "all-linear"  # layers with adapters: "all-linear" (all but the head), or names: "q_proj,v_proj"
    load_bits: int = 0  # with LoRA: quantize the frozen weights to 8 or 4 bits (bitsandbytes); 0: as dtype says
    gradient_checkpointing: bool = False  # recompute activations: less memory, a third more time in the update
    optimizer_offload: Literal["none", "rollout", "always"] = "none"  # when AdamW's state is in CPU memory
    fsdp: bool = False  # torchrun: shard weights, gradients and AdamW's state over the ranks (FSDP2)
    memory_limit: float = 0.0  # GiB that this run may take on each GPU; 0: all free memory
    force: bool = False  # start even if the plan predicts that memory will not suffice
    compile: bool = True  # torch.compile on GPUs: faster steps, a slower first one

    resume: str = "auto"  # "auto": newest complete checkpoint in out_dir; "none": start anew; or a checkpoint folder
    keep_checkpoints: int = 2  # older ones are deleted, but for the best
    best_by: str = "eval_reward"  # out_dir/best leads to the checkpoint where it is highest; "-name": lowest; "": none
    early_stop: int = 0  # evaluations in a row without a new best after which the run saves and ends; 0: never
    eval_by: str = ""  # columns of eval_data, "level,topic": eval_reward for each of their values, too
    sample_every: int = 10  # steps between entries in samples.jsonl; 0: never
    print_samples: bool = False  # print these entries, too
    on_collapse: Literal["warn", "stop", "off"] = "warn"  # if a metric leaves its GUARDS; "stop" saves and ends the run
    collapse_steps: int = 10  # steps in a row that a metric has to be outside its range
    profile: int = 0  # steps to trace with the torch profiler, from the third on, into out_dir/profile/

    @property
    def eval_columns(self) -> tuple[str, ...]:
        """The columns in `eval_by`."""
        return column_names(self.eval_by)

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts of `stop_strings`."""
        return stop_strings(self.stop_strings)


@dataclass(frozen=True)
class PromptSettings(Settings):
    """Prompts given as text, and answers to them."""

    apply_chat_template: bool = True  # a text prompt becomes one user message, if the tokenizer has a template
    system_prompt: str = ""  # opens every chat without a system turn of its own
    chat_template_kwargs: str = ""  # arguments of the chat template, JSON: '{"enable_thinking": false}'
    eval_samples: int = 0  # completions per prompt for eval_pass_at_k and eval_majority_of_k, sampled as in training

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """The arguments in `chat_template_kwargs`."""
        return template_kwargs(self.chat_template_kwargs)


@dataclass(frozen=True)
class RewardSettings(Settings):
    """Reward service."""

    reward_url: str = ""  # a service instead of REWARDS, "http://127.0.0.1:8899": common/tasks/reward_client.py
    reward_patience: float = 900.0  # seconds to wait for an unavailable service; then the run saves, exit code 75
    allow_reward_change: bool = False  # resume even if the service scores differently than before


@dataclass(frozen=True)
class RLSettings(RewardSettings, PromptSettings):
    """Reward model, length penalty, dynamic sampling and reference."""

    reward_model: str = ""  # sequence classifier with one output, hub id or folder; its score is added to REWARDS
    reward_model_weight: float = 1.0  # weight of its score in the sum
    overlong_cache: int = 0  # last tokens before max_new_tokens, where a penalty grows to -1 (DAPO, Eq. 13); 0: none
    curriculum: str = ""  # "row" or a column: prompts by recent success; "greso": skips solved, hopeless; "": in turn
    old_logps: Literal["auto", "trainer", "sampler"] = "auto"  # ratios start from these; the sampler's save a pass
    dynamic_sampling: int = 0  # rounds in which new prompts replace groups with equal rewards (DAPO); 0: none
    reference_refresh: int = 0  # steps between copies of the policy into the reference; 0: never

    @property
    def sampler_is_old(self) -> bool:
        """Whether ratios start from the sampler's log-probabilities; "auto": with "dppo", as in its paper."""
        return self.old_logps == "sampler" or (self.old_logps == "auto" and getattr(self, "loss", "") == "dppo")
