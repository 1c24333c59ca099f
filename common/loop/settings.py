"""Options that training scripts inherit: machine, run, rewards. A script changes a default by naming it again."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Settings:
    """Machine and run: data, sampling, memory, checkpoints, logging."""

    max_prompt_tokens: int = 512  # longer prompts are dropped, with a count

    min_new_tokens: int = 0  # no end token before
    truncated: Literal["keep", "mask"] = "keep"  # completions cut off: "mask" leaves them out of the loss
    top_p: float = 1.0  # sample from the likeliest tokens with this probability; below 1 ratios are biased
    top_k: int = 0  # sample from this many of the likeliest tokens; 0: all; ratios are biased
    min_p: float = 0.0  # leave out tokens this many times less likely than the likeliest; ratios are biased
    rollout_batch: int = 0  # completions sampled at once per GPU, but one group at least; 0: as many as memory holds

    micro_batch_tokens: int = 8192  # prompt and completion tokens in one forward per GPU; for memory and speed only
    warmup_steps: int = 5  # steps of linear warm-up, then constant
    weight_decay: float = 0.0  # decoupled
    max_grad_norm: float = 1.0  # the gradient is scaled down to this norm; inf: never

    device: Literal["auto", "cuda", "cpu"] = "auto"  # "auto": the GPUs at the top of the script, if there are any
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"  # 16 bits keep fp32 masters; "auto": bf16, fp32 on a CPU
    lora_rank: int = 0  # train adapters of this rank and leave the weights alone (LoRA); 0: train all weights
    lora_alpha: float = 32.0  # what adapters add is multiplied by lora_alpha / lora_rank
    lora_targets: str = "all-linear"  # layers that get one: "all-linear" (all but the head), or names, "q_proj,v_proj"
    load_bits: int = 0  # with LoRA: hold the weights in 8 or 4 bits (bitsandbytes); 0: as dtype says
    gradient_checkpointing: bool = False  # recompute activations: less memory, a third more time in the update
    optimizer_offload: Literal["none", "rollout", "always"] = "none"  # when AdamW's state is in CPU memory
    fsdp: bool = False  # torchrun: shard weights, gradients and AdamW's state over the ranks (FSDP2)
    memory_limit: float = 0.0  # GiB of each GPU that this run may take; 0: all that is free
    force: bool = False  # start although the plan says that memory will not suffice
    compile: bool = True  # torch.compile on GPUs: faster steps, some seconds in the first

    resume: str = "auto"  # "auto": newest complete checkpoint in out_dir; "none": start anew; or a checkpoint folder
    keep_checkpoints: int = 2  # older ones are deleted
    sample_every: int = 10  # steps between entries in samples.jsonl; 0: never
    print_samples: bool = False  # show them on the console too
    on_collapse: Literal["warn", "stop", "off"] = "warn"  # a metric leaves GUARDS: "stop" saves and ends the run
    collapse_steps: int = 10  # steps in a row that it has to be outside
    profile: int = 0  # steps to trace with the torch profiler, from the third on, into out_dir/profile/


@dataclass(frozen=True)
class PromptSettings(Settings):
    """Prompts given as text."""

    apply_chat_template: bool = True  # a prompt given as text becomes one user message, if the tokenizer has a template
    system_prompt: str = ""  # put before prompts given as text


@dataclass(frozen=True)
class RewardSettings(Settings):
    """Reward service."""

    reward_url: str = ""  # a service in place of REWARDS, "http://127.0.0.1:8899": common/tasks/reward_client.py
    reward_patience: float = 900.0  # seconds to wait while it is away; then the run saves and exits with code 75
    allow_reward_change: bool = False  # resume although the service scores in another way than it did


@dataclass(frozen=True)
class RLSettings(RewardSettings, PromptSettings):
    """Reward model, and what happens to completions before the loss."""

    reward_model: str = ""  # sequence classifier with one output, hub id or folder; its score joins REWARDS
    reward_model_weight: float = 1.0  # weight of its score in the sum
    overlong_cache: int = 0  # tokens before max_new_tokens over which a penalty grows to -1 (DAPO, Eq. 13); 0: none
    dynamic_sampling: int = 0  # rounds in which new prompts replace groups with equal rewards; 0: none
    reference_refresh: int = 0  # every so many steps the policy becomes the reference; 0: never
