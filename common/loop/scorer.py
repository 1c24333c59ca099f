"""Scores completions, and assigns advantages to them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from common.base import devices, distributed
from common.generation.batches import RolloutBatch
from common.maths import advantages
from common.model import sources
from common.model.reward_models import RewardModel
from common.run import checkpoint, interrupts
from common.tasks import data, rewards
from common.tasks.data import Example
from common.tasks.reward_client import RewardService
from common.tasks.rewards import Scored


class Scorer:
    """Scores completions with reward functions, a reward model or a reward service."""

    def __init__(
        self,
        cfg: Any,
        tokenizer: Any,
        functions: Sequence[tuple[Callable, float]],
        gpus: devices.Layout | None = None,
        resumed: Path | None = None,
    ):
        """Loads the reward model or connects to the service that the configuration names.

        Args:
            cfg: a `settings.RLSettings`.
            tokenizer: of the policy.
            functions: pairs of reward function and weight.
            gpus: device of the reward model; default: the first GPU, or the CPU.
            resumed: checkpoint; the service must be the one that it was saved with.
        """
        self.cfg, self.tokenizer, self.functions, self.model, self.service = cfg, tokenizer, functions, None, None
        if cfg.reward_model:
            device = (gpus or devices.layout(cfg.device, policy=(0,), reward=None)).reward
            self.model = RewardModel(cfg.reward_model, device, sources.pick_dtype(cfg.dtype, device))
        if cfg.reward_url:
            self.service = find_service(cfg, resumed)

    @property
    def notes(self) -> dict[str, Any]:
        """What a checkpoint records, so that a resumed run can refuse another service."""
        return {"reward_service": self.service.fingerprint if self.service else None}

    def score(self, examples_P: Sequence[Example], batch: RolloutBatch) -> Scored:
        """Scores completions.

        Args:
            examples_P: prompts.
            batch: B completions, equally many per prompt.

        Returns:
            Texts, rewards [B], and rewards [B] by function, reward model or part of a service.
        """
        group_size = len(batch) // len(examples_P)
        completions_B, answers_B, columns = collate(examples_P, batch, self.tokenizer)
        functions, extra = self.functions, {}
        if self.service:
            functions, extra = (), self.service.scores(completions_B, answers_B, columns, group_size)
        elif self.model:
            prompts_B = [example.prompt for example in examples_P for _ in range(group_size)]
            extra = {"reward_model": (self.model.scores(prompts_B, completions_B), self.cfg.reward_model_weight)}
        return Scored(completions_B, *rewards.score(functions, completions_B, answers_B, columns, extra=extra))


def find_service(cfg: Any, resumed: Path | None) -> RewardService:
    """Connects to the reward service that a configuration names; a collective.

    Exits with code 75 if the service stays unavailable for `reward_patience` seconds.

    Args:
        cfg: a `settings.RewardSettings`.
        resumed: checkpoint; the service must be the one that it was saved with, unless
            `allow_reward_change` is set.
    """
    fingerprint = None if cfg.allow_reward_change else checkpoint.notes(resumed).get("reward_service")
    with interrupts.save_on_outage(), distributed.share_errors("find the reward service"):
        return RewardService(cfg.reward_url, patience_s=cfg.reward_patience, fingerprint=fingerprint)


def collate(examples_P: Sequence[Example], batch: RolloutBatch, tokenizer: Any) -> tuple[list[str], list, dict]:
    """Arguments of reward functions, one entry per completion: texts, answers and columns."""
    answers_B, columns = data.collate_columns(examples_P, len(batch) // len(examples_P))
    columns["completion_tokens"] = batch.lengths.tolist()
    starts_B = [example.reply_start for example in examples_P for _ in range(len(batch) // len(examples_P))]
    texts_B = [start + text for start, text in zip(starts_B, batch.texts(tokenizer), strict=True)]
    return texts_B, answers_B, columns


def add_overlong_penalty(cfg: Any, scored: Scored, batch: RolloutBatch) -> None:
    """Adds DAPO's penalty for completions near the length limit to `scored`, in place.

    A no-op without `overlong_cache`. Call it after dynamic sampling, which compares the rewards of
    the task alone.

    Source: arXiv 2503.14476, Eq. 13.
    """
    if cfg.overlong_cache:
        penalty_B = rewards.overlong_penalty(batch.lengths, cfg.max_new_tokens, cfg.overlong_cache)
        scored.rewards, scored.by_function["overlong"] = scored.rewards + penalty_B, penalty_B


def group_advantages(rewards_PG: torch.Tensor, scale: str) -> torch.Tensor:
    """Advantages of this rank's groups; the scale "batch" is that of all ranks; a collective.

    Args:
        rewards_PG: [P, G] fp32, NaN for unscored completions.
        scale: "group", "batch" or "none".
    """
    rewards_AG = torch.cat(distributed.gather_objects(rewards_PG))  # of the A prompts of all ranks
    return distributed.own_share(advantages.group_advantages(rewards_AG, scale))


def assign_advantages(
    cfg: Any,
    advantages_PG: torch.Tensor,
    scored: Scored,
    batch: RolloutBatch,
    minibatches: Sequence[Sequence[RolloutBatch]],
) -> None:
    """Writes advantages into micro-batches; masks unscored rows, and truncated ones by option.

    Args:
        cfg: a `settings.Settings`; `truncated = "mask"` masks truncated rows.
        advantages_PG: [P, G] fp32.
        scored: rewards of the batch.
        batch: P * G completions.
        minibatches: micro-batches by minibatch, cut from the batch.
    """
    advantages_B = advantages_PG.flatten()
    left_out_B = scored.rewards.isnan() | (batch.truncated.cpu() & (cfg.truncated == "mask"))
    for micro in (micro for minibatch in minibatches for micro in minibatch):
        micro.advantages = advantages_B[micro.rows].to(micro.device)
        micro.drop(left_out_B[micro.rows])
