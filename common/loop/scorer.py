"""Scores completions, and assigns advantages to them."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from common.base import devices, distributed
from common.generation.batches import RolloutBatch
from common.maths import advantages
from common.model import sources
from common.model.reward_models import RewardModel
from common.run import checkpoint, interrupts
from common.tasks import answers, data, rewards, scoring
from common.tasks.data import Example
from common.tasks.reward_client import RewardService
from common.tasks.scoring import Scored


class Scorer:
    """Scores completions with reward functions, a reward model or a reward service."""

    def __init__(
        self,
        cfg: Any,
        tokenizer: Any,
        functions: Sequence[tuple[Callable, float]],
        gpus: devices.Layout | None = None,
        resumed: Path | None = None,
        examples: Sequence[Example] = (),
    ):
        """Loads the reward model or connects to the service that the configuration names.

        Args:
            cfg: a `settings.RLSettings`.
            tokenizer: of the policy.
            functions: pairs of reward function and weight.
            gpus: device of the reward model; default: the first GPU, or the CPU.
            resumed: checkpoint; the service must be the one that it was saved with.
            examples: all rows of the run; the reward functions are checked against them.

        Raises:
            ValueError: a reward function has an argument that does not exist; see `scoring.check`.
        """
        if not cfg.reward_url:
            check_functions(functions, examples)
        self.cfg, self.tokenizer, self.functions, self.model, self.service = cfg, tokenizer, functions, None, None
        if cfg.reward_model:
            device = (gpus or devices.layout(cfg.device, policy=(0,), reward=None)).reward
            self.model = RewardModel(cfg.reward_model, device, sources.pick_dtype(cfg.dtype, device))
        if cfg.reward_url:
            self.service = find_service(cfg, resumed)

    @property
    def notes(self) -> dict[str, Any]:
        """What a checkpoint records: a resumed run refuses another service, evaluate.py names the rewards."""
        names = scoring.names(function for function, _ in self.functions)
        return {"reward_service": self.service.fingerprint if self.service else None, "rewards": names}

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each reward function, and of the reward model, by name."""
        names = scoring.names(function for function, _ in self.functions)
        weights = dict(zip(names, (weight for _, weight in self.functions), strict=True))
        return weights | ({"reward_model": self.cfg.reward_model_weight} if self.model else {})

    def score(self, examples_P: Sequence[Example], batch: RolloutBatch, step: int = 0) -> Scored:
        """Scores completions.

        Args:
            examples_P: prompts.
            batch: B completions, equally many per prompt.
            step: of the training, for reward functions.

        Returns:
            Texts, rewards [B], and rewards [B] by function, reward model or part of a service.
        """
        group_size = len(batch) // len(examples_P)
        arguments = collate(examples_P, batch, self.tokenizer, step, self.cfg.stops)
        completions_B, functions, extra = arguments["completions"], self.functions, {}
        if self.service:
            functions, extra = (), self.service.scores(arguments, group_size)
        elif self.model:
            scores_B = self.model.scores(arguments["prompts"], completions_B)
            extra = {"reward_model": (scores_B, self.cfg.reward_model_weight)}
        return Scored(completions_B, *scoring.score(functions, arguments, extra))


def check_functions(functions: scoring.Functions, examples: Sequence[Example]) -> None:
    """Checks reward functions against the rows that they will score.

    Prints how many gold answers `math_match` cannot grade, if a function calls it.

    Args:
        functions: pairs of reward function and weight.
        examples: all rows of the run.

    Raises:
        ValueError: as in `scoring.check`.
    """
    for columns in {tuple(example.columns): None for example in examples}:  # those of each source of data
        scoring.check(functions, columns)
    if distributed.rank() == 0 and any(_calls_math_match(function) for function, _ in functions):
        golds: dict[str, int] = {}
        for example in examples:
            if example.answer is not None and example.columns.get("accepted") is None:
                golds.setdefault(example.answer, example.index)
        if rows := answers.ungradable(list(golds)):
            gold = list(golds)[rows[0]]
            print(f"warning: math_match cannot grade {len(rows)} of {len(golds)} different gold answers, such as row "
                  f"{golds[gold]}: {gold!r:.80}; these rows are unscored")  # fmt: skip


def _calls_math_match(function: Callable) -> bool:
    """Whether a function is `math_match` or names it in its code."""
    function = getattr(function, "func", function)  # of a functools.partial
    code = getattr(function, "__code__", None)
    return function is rewards.math_match or (code is not None and "math_match" in code.co_names)


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


def collate(
    examples_P: Sequence[Example], batch: RolloutBatch, tokenizer: Any, step: int = 0, stops: Sequence[str] = ()
) -> dict[str, Any]:
    """Arguments of reward functions by name; see common/tasks/scoring.py.

    Args:
        examples_P: prompts.
        batch: B completions, equally many per prompt.
        tokenizer: of the policy.
        step: of the training.
        stops: texts at which completions stop, which are cut off.
    """
    group_size = len(batch) // len(examples_P)
    repeated = [example for example in examples_P for _ in range(group_size)]
    answers_B, columns = data.collate_columns(examples_P, group_size)
    texts_B = batch.texts(tokenizer, stops)
    return {
        "prompts": [example.prompt for example in repeated],
        "completions": [example.reply_start + text for example, text in zip(repeated, texts_B, strict=True)],
        "answers": answers_B,
        "completion_tokens": batch.lengths.tolist(),
        "completion_ids": [ids.tolist() for ids in batch.completions],
        "step": step,
        **columns,
    }


def add_overlong_penalty(cfg: Any, scored: Scored, batch: RolloutBatch) -> None:
    """Adds DAPO's penalty for completions near the length limit to `scored`, in place.

    A no-op without `overlong_cache`. Call it after dynamic sampling, which compares the rewards of
    the task alone.

    Source: arXiv 2503.14476, Eq. 13.
    """
    if cfg.overlong_cache:
        penalty_B = rewards.overlong_penalty(batch.lengths, cfg.max_new_tokens, cfg.overlong_cache)
        scored.rewards, scored.by_function["overlong"] = scored.rewards + penalty_B, penalty_B


def group_advantages(
    rewards_PG: torch.Tensor, scale: str, scored: Scored | None = None, weights: Mapping[str, float] | None = None
) -> torch.Tensor:
    """Advantages of this rank's groups; those that compare groups compare the groups of all ranks; a collective.

    Args:
        rewards_PG: [P, G] fp32, NaN for unscored completions.
        scale: as in `advantages.group_advantages`, or "gdpo".
        scored: with "gdpo": rewards by function.
        weights: with "gdpo": of the functions, by name, such as `Scorer.weights`; those without one count once.
    """
    rewards_AG = torch.cat(distributed.gather_objects(rewards_PG))  # of the A prompts of all ranks
    if scale != "gdpo":
        return distributed.own_share(advantages.group_advantages(rewards_AG, scale))
    parts = distributed.gather_objects(scored.by_function)
    names = sorted({name for part in parts for name in part})
    missing = torch.full(rewards_PG.shape, torch.nan)
    rewards_FAG = torch.stack([torch.cat([part.get(name, missing).view(missing.shape) for part in parts])
                               for name in names])  # fmt: skip
    rewards_FAG = torch.where(rewards_AG.isfinite(), rewards_FAG, torch.nan)
    weights_F = torch.tensor([(weights or {}).get(name, 1.0) for name in names])
    return distributed.own_share(advantages.decoupled_advantages(rewards_FAG, weights_F))


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
    if cfg.advantage_scale == "reinforce_pp":
        normalise_tokens(cfg, minibatches)


def normalise_tokens(cfg: Any, minibatches: Sequence[Sequence[RolloutBatch]], eps: float = 1e-4) -> None:
    """REINFORCE++: an advantage for every token, normalised over all trained tokens of all ranks; a collective.

    With `kl_estimator` "in_reward", a token is charged for the KL to the reference from there on.

    Args:
        cfg: Config of a GRPO script.
        minibatches: micro-batches with advantages [m], which become [m, C].
        eps: added to the standard deviation.

    Source: arXiv 2501.03262.
    """
    micros = list(chain(*minibatches))
    for micro in micros:
        kl_mC = torch.zeros_like(micro.rollout_logps)
        if cfg.kl_coef > 0 and cfg.kl_estimator == "in_reward":
            kl_mC = micro.rollout_logps - micro.ref_logps
        micro.advantages = advantages.token_returns(micro.advantages, kl_mC, micro.completion_mask, cfg.kl_coef)
    count = distributed.sum_over_ranks(sum(micro.num_tokens for micro in micros))
    mean = distributed.sum_over_ranks(sum(_total(micro.advantages, micro) for micro in micros)) / max(1, count)
    squares = sum(_total((micro.advantages - mean).square(), micro) for micro in micros)
    std = (distributed.sum_over_ranks(squares) / max(1, count - 1)) ** 0.5
    for micro in micros:
        micro.advantages = torch.where(micro.completion_mask, (micro.advantages - mean) / (std + eps), 0.0)


def _total(values_mC: torch.Tensor, micro: RolloutBatch) -> float:
    """Sum over the trained tokens of a micro-batch, in fp64: results do not depend on how a batch is cut."""
    return torch.where(micro.completion_mask, values_mC.double(), 0.0).sum().item()
