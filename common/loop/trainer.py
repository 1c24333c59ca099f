"""Gradients of a minibatch, whatever it is cut into and wherever it is computed."""

import dataclasses
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch

from common.base import distributed
from common.generation.batches import RolloutBatch
from common.loop.policy import Policy
from common.maths import losses
from common.model import models
from common.run import interrupts
from common.run.metrics import StepMetrics
from common.training import sharding
from common.training.budgets import Budget
from common.training.optim import AdamW


@dataclasses.dataclass(frozen=True)
class Counts:
    """Denominators of a minibatch, over all its micro-batches and ranks, so that their shares of the loss add up.

    Attributes:
        sequences: trained sequences.
        tokens: trained completion tokens.
    """

    sequences: int = 1
    tokens: int = 1

    def of(self, aggregation: str, length: int = 1) -> int:
        """The denominator of `losses.aggregate`.

        Args:
            aggregation: "seq_mean", "token_mean" or "constant".
            length: tokens that every sequence counts for with "constant".
        """
        return {"seq_mean": self.sequences, "token_mean": self.tokens, "constant": self.sequences * length}[aggregation]


@dataclasses.dataclass(frozen=True)
class Stats:
    """Metrics of a micro-batch: means by name, and the number of tokens or sequences that they are means of."""

    weight: int
    means: dict[str, torch.Tensor]


class Trainer:
    """Cuts batches into micro-batches and computes their gradients; in smaller ones when memory runs out."""

    def __init__(
        self,
        cfg: Any,
        policy: Policy,
        optimizer: AdamW,
        log: StepMetrics | None = None,
        plan: Any = "",
        release: Callable[[], None] | None = None,
    ):
        """Starts with `micro_batch_tokens`.

        Args:
            cfg: a `settings.Settings`.
            policy: what is trained.
            optimizer: of its weights.
            log: takes the metrics; by default one without files.
            plan: expected memory of the run, for the message when nothing helps.
            release: frees memory that can be made again, such as `Sampler.release_for_update`.
        """
        self.cfg, self.policy, self.optimizer = cfg, policy, optimizer
        self.log = StepMetrics() if log is None else log
        self.budget = Budget(cfg.micro_batch_tokens, str(plan), redo=not policy.sharded, release=release)

    @property
    def micro_batch_tokens(self) -> int:
        """Prompt and completion tokens of a micro-batch, at most."""
        return self.budget.tokens

    def minibatches(self, batch: RolloutBatch, in_turn: bool = True) -> list[list[RolloutBatch]]:
        """Cuts a batch, see `RolloutBatch.minibatches`; a collective if the policy is sharded: ranks get equally many.

        Args:
            batch: completions.
            in_turn: minibatch k holds every num_minibatches-th sequence; False: a block of them.

        Returns:
            Micro-batches by minibatch, dealt to the replicas.
        """
        devices = self.policy.devices if len(self.policy.devices) > 1 else ()
        minibatches = batch.minibatches(
            self.cfg.num_minibatches, self.micro_batch_tokens, self.policy.packed, in_turn=in_turn, devices=devices
        )
        if self.policy.sharded:
            sharding.pad_micro_batches(minibatches)
        return minibatches

    def forward_backward(self, minibatch: list[RolloutBatch], loss: Callable) -> bool:
        """Sums the gradients of a minibatch over micro-batches, replicas and ranks; a collective.

        Args:
            minibatch: micro-batches.
            loss: (policy, micro, cfg, counts) -> share of the minibatch loss, `Stats`.

        Returns:
            False if no rank has anything to train on: then no optimizer step is taken, rather than 0 / 0.
        """
        policy, log = self.policy, self.log
        own = sum(micro.num_trained for micro in minibatch), sum(micro.num_tokens for micro in minibatch)
        counts = Counts(*map(sum, zip(*distributed.gather_objects(own), strict=True)))
        log.add(skipped_updates=float(counts.sequences == 0))
        if counts.sequences == 0:
            return False

        def one(micro: RolloutBatch) -> None:
            share, stats = loss(policy, micro, self.cfg, counts)
            self.optimizer.scale(share).backward()
            log.add(stats.weight, **stats.means)

        policy.refresh_trained()
        with distributed.share_errors("update", policy.sharded):
            images = minibatch[0].images
            if images:  # features of the present weights, if the vision tower is trained
                images.refresh(policy.whole, torch.cat([micro.images.prompts for micro in minibatch]))
            self.budget.run(minibatch, one, self.optimizer, log, policy.trained)
            if images:
                images.backward()
        models.sum_gradients(policy.trained)
        distributed.sum_gradients(self.optimizer.params)
        policy.outdated = True  # once the optimizer has stepped
        return True

    def finish_update(self, step: int, minibatches: Sequence[Sequence[RolloutBatch]]) -> None:
        """Checks the optimizer steps of an update, and copies new weights to all replicas; a collective.

        Args:
            step: from 1.
            minibatches: micro-batches by minibatch.

        Raises:
            FloatingPointError: a loss or gradient was not finite. No weight has moved since, and the
                micro-batches are saved in `out_dir`.
        """
        with interrupts.keep_batch(self.cfg.out_dir, step, list(chain(*minibatches))):
            self.log.add(overflows=self.optimizer.check())
        self.policy.sync()


def policy_stats(
    micro: RolloutBatch,
    loss: torch.Tensor,
    logps_mC: torch.Tensor,
    entropy_mC: torch.Tensor,
    ratio: torch.Tensor,
    clip_range: tuple[float, float],
    counts: Counts,
    dual_clip: float = 0.0,
    by_token: bool = True,
) -> Stats:
    """Metrics of a policy gradient.

    Args:
        micro: m sequences.
        loss: scalar, their share of the minibatch loss.
        logps_mC: [m, C] fp32, under the policy.
        entropy_mC: [m, C] fp32.
        ratio: [m] or [m, C] fp32, of sequences or tokens.
        clip_range: epsilon_low and epsilon_high.
        counts: of the minibatch.
        dual_clip: largest ratio that counts where the advantage is negative; 0: none.
        by_token: means over tokens; False: over sequences.
    """
    mask_mC = micro.completion_mask
    of_ratio = mask_mC if ratio.dim() == 2 else mask_mC.any(1)
    mode, trained = ("token_mean", mask_mC) if by_token else ("seq_mean", mask_mC.any(1))
    total, count = counts.of(mode), trained.sum().clamp(min=1)
    means = losses.clip_stats(ratio, micro.advantages, *clip_range, of_ratio, dual_clip)
    logps_mC, mismatch_mC = logps_mC.detach(), micro.old_logps - micro.rollout_logps
    reported = {"entropy": entropy_mC.detach(), "kl_old": losses.kl_estimate(micro.old_logps, logps_mC, "k3")}
    if micro.ref_logps is not None:
        reported["kl_ref"] = losses.kl_estimate(logps_mC, micro.ref_logps, "k3")
    for name, values_mC in reported.items():
        means[name] = losses.aggregate(values_mC, mask_mC, mode, count)
    mismatch = mismatch_mC.abs() if by_token else losses.masked_mean(mismatch_mC, mask_mC).abs()
    means["rollout_mismatch"] = torch.where(trained, mismatch, 0.0).sum() / count
    means["loss"] = loss.detach() * total / count
    return Stats(micro.num_tokens if by_token else micro.num_trained, means)


def token_stats(micro: RolloutBatch, loss: torch.Tensor, values: dict[str, torch.Tensor], counts: Counts) -> Stats:
    """Means over the trained tokens of a micro-batch.

    Args:
        micro: m sequences.
        loss: scalar, their share of the minibatch loss.
        values: [m, C] by name.
        counts: of the minibatch.
    """
    mask_mC = micro.completion_mask
    count = mask_mC.sum().clamp(min=1)
    sums = (torch.stack(list(values.values()), dim=-1).detach() * mask_mC[..., None]).sum((0, 1)) / count
    means = dict(zip(values, sums, strict=True)) | {"loss": loss.detach() * counts.tokens / count}
    return Stats(micro.num_tokens, means)
