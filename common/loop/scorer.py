"""Rewards of completions, and the advantages that follow from them."""

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
    """Scores completions by functions of the script, a reward model or a reward service."""

    def __init__(
        self,
        cfg: Any,
        tokenizer: Any,
        functions: Sequence[tuple[Callable, float]],
        gpus: devices.Layout | None = None,
        resumed: Path | None = None,
    ):
        """Loads the reward model, or finds the service, that the configuration names.

        Args:
            cfg: a `settings.RLSettings`.
            tokenizer: of the policy.
            functions: reward functions and their weights.
            gpus: where a reward model lives; one GPU or the CPU by default.
            resumed: checkpoint; the run goes on with the service that it began with.
        """
        self.cfg, self.tokenizer, self.functions, self.model, self.service = cfg, tokenizer, functions, None, None
        if cfg.reward_model:
            device = (gpus or devices.layout(cfg.device, policy=(0,), reward=None)).reward
            self.model = RewardModel(cfg.reward_model, device, sources.pick_dtype(cfg.dtype, device))
        if cfg.reward_url:
            self.service = find_service(cfg, resumed)

    @property
    def notes(self) -> dict[str, Any]:
        """What a checkpoint keeps, to refuse another service when the run is resumed."""
        return {"reward_service": self.service.fingerprint if self.service else None}

    def score(self, examples_P: Sequence[Example], batch: RolloutBatch) -> Scored:
        """Scores completions.

        Args:
            examples_P: prompts.
            batch: completions, an equal number for each prompt.

        Returns:
            Their texts, rewards [B], and rewards by function, reward model or part of a service.
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
    """The reward service that a configuration names; a collective. Waits for it, then saves nothing and exits with 75.

    Args:
        cfg: a `settings.RewardSettings`.
        resumed: checkpoint; unless `allow_reward_change` is set, the service must be the one it was saved with.
    """
    fingerprint = None if cfg.allow_reward_change else checkpoint.notes(resumed).get("reward_service")
    with interrupts.save_on_outage(), distributed.share_errors("find the reward service"):
        return RewardService(cfg.reward_url, patience_s=cfg.reward_patience, fingerprint=fingerprint)


def collate(examples_P: Sequence[Example], batch: RolloutBatch, tokenizer: Any) -> tuple[list[str], list, dict]:
    """What reward functions are given: completions as text, answers and columns, one entry per completion.

    Args:
        examples_P: prompts.
        batch: completions, an equal number for each prompt.
        tokenizer: of the policy.
    """
    answers_B, columns = data.collate_columns(examples_P, len(batch) // len(examples_P))
    columns["completion_tokens"] = batch.lengths.tolist()
    return batch.texts(tokenizer), answers_B, columns


def add_overlong_penalty(cfg: Any, scored: Scored, batch: RolloutBatch) -> None:
    """Adds DAPO's penalty for completions near the limit to rewards, in place.

    Called after dynamic sampling, which looks at the reward of the task alone.

    Args:
        cfg: a `settings.RLSettings`; nothing happens without `overlong_cache`.
        scored: of the batch.
        batch: completions.

    Source: arXiv 2503.14476, Eq. 13.
    """
    if cfg.overlong_cache:
        penalty_B = rewards.overlong_penalty(batch.lengths, cfg.max_new_tokens, cfg.overlong_cache)
        scored.rewards, scored.by_function["overlong"] = scored.rewards + penalty_B, penalty_B


def group_advantages(rewards_PG: torch.Tensor, scale: str) -> torch.Tensor:
    """`advantages.group_advantages` of this rank's groups; the scale "batch" is that of all ranks; a collective.

    Args:
        rewards_PG: [P, G] fp32, NaN where a completion could not be scored.
        scale: "group", "batch" or "none".
    """
    everyones = torch.cat(distributed.gather_objects(rewards_PG))
    return distributed.own_share(advantages.group_advantages(everyones, scale))


def assign_advantages(
    cfg: Any,
    advantages_PG: torch.Tensor,
    scored: Scored,
    batch: RolloutBatch,
    minibatches: Sequence[Sequence[RolloutBatch]],
) -> None:
    """Writes advantages into micro-batches, and takes rows out of the loss that were not scored, or are truncated.

    Args:
        cfg: a `settings.Settings`; truncated completions leave the loss with `truncated = "mask"`.
        advantages_PG: [P, G] fp32.
        scored: of the batch.
        batch: completions.
        minibatches: micro-batches by minibatch, cut from the batch.
    """
    advantages_B = advantages_PG.flatten()
    left_out_B = scored.rewards.isnan() | (batch.truncated.cpu() & (cfg.truncated == "mask"))
    for micro in (micro for minibatch in minibatches for micro in minibatch):
        micro.advantages = advantages_B[micro.rows].to(micro.device)
        micro.drop(left_out_B[micro.rows])
