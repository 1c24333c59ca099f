"""Computes the gradients of a minibatch over micro-batches, replicas and ranks."""

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
from common.planning import plan as planning
from common.run import interrupts
from common.run.metrics import StepMetrics
from common.training import sharding
from common.training.budgets import Budget
from common.training.optim import AdamW


@dataclasses.dataclass(frozen=True)
class Counts:
    """Loss denominators of a minibatch over all ranks, so that the shares of micro-batches add up.

    Attributes:
        sequences: number of trained sequences.
        tokens: number of trained completion tokens.
    """

    sequences: int = 1
    tokens: int = 1

    def of(self, aggregation: str, length: int = 1) -> int:
        """The denominator of `losses.aggregate`.

        Args:
            aggregation: "seq_mean", "seq_sum", "token_mean" or "constant".
            length: with "constant", tokens that each sequence counts as.
        """
        return {"token_mean": self.tokens, "constant": self.sequences * length}.get(aggregation, self.sequences)


@dataclasses.dataclass(frozen=True)
class Stats:
    """Metrics of a micro-batch: means by name, and their weight in tokens or sequences."""

    weight: int
    means: dict[str, torch.Tensor]


class Trainer:
    """Cuts batches into micro-batches, which are halved if memory runs out; computes gradients."""

    def __init__(
        self,
        cfg: Any,
        policy: Policy,
        optimizer: AdamW,
        log: StepMetrics | None = None,
        plan: Any = "",
        release: Callable[[], None] | None = None,
    ):
        """Starts with micro-batches of `micro_batch_tokens`.

        Args:
            cfg: a `settings.Settings`.
            policy: the trained model.
            optimizer: of the policy.
            log: receives metrics; default: one without files.
            plan: predicted memory: what `micro_batch_tokens` = 0 stands for, and the error if a single sequence does
                not fit.
            release: frees caches if memory runs out, such as `Sampler.release_for_update`.
        """
        self.cfg, self.policy, self.optimizer = cfg, policy, optimizer
        self.log = StepMetrics() if log is None else log
        tokens = planning.micro_batch_tokens(cfg, plan)
        self.budget = Budget(tokens, str(plan), redo=not policy.sharded, release=release, packs=policy.packs)

    @property
    def micro_batch_tokens(self) -> int:
        """Maximum number of prompt and completion tokens of a micro-batch."""
        return self.budget.tokens

    def minibatches(self, batch: RolloutBatch, in_turn: bool = True) -> list[list[RolloutBatch]]:
        """Cuts a batch into minibatches of micro-batches; see `RolloutBatch.minibatches`.

        A collective if the policy is sharded: all ranks get the same number of micro-batches.

        Args:
            batch: to cut.
            in_turn: minibatch k takes every num_minibatches-th sequence; False: a contiguous block.

        Returns:
            Micro-batches by minibatch, dealt to the replicas.
        """
        devices = self.policy.devices if len(self.policy.devices) > 1 else ()
        packed = self.policy.packs(batch)
        minibatches = batch.minibatches(
            self.cfg.num_minibatches, self.micro_batch_tokens, packed, in_turn=in_turn, devices=devices
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
            Whether to take an optimizer step; False if all sequences of all ranks are masked, which
            would be 0 / 0.
        """
        policy, log = self.policy, self.log
        own = sum(micro.num_trained for micro in minibatch), sum(micro.num_tokens for micro in minibatch)
        counts = Counts(*map(sum, zip(*distributed.gather_objects(own), strict=True)))
        log.add(skipped_updates=float(counts.sequences == 0))
        if counts.sequences == 0:
            return False

        def add_gradients(micro: RolloutBatch) -> None:
            share, stats = loss(policy, micro, self.cfg, counts)
            self.optimizer.scale(share).backward()
            log.add(stats.weight, **stats.means)

        policy.refresh_trained()
        with distributed.share_errors("update", policy.sharded):
            images = minibatch[0].images
            if images:  # new features, if the vision tower is trained
                images.refresh(policy.whole, torch.cat([micro.images.prompts for micro in minibatch]))
            self.budget.run(minibatch, add_gradients, self.optimizer, log, policy.trained)
            if images:
                images.backward()
        models.sum_gradients(policy.trained)
        distributed.sum_gradients(self.optimizer.params)
        policy.outdated = True  # the caller takes an optimizer step next
        return True

    def finish_update(self, step: int, minibatches: Sequence[Sequence[RolloutBatch]]) -> None:
        """Checks the optimizer steps of an update and syncs the policy; a collective.

        Args:
            step: from 1.
            minibatches: micro-batches by minibatch.

        Raises:
            FloatingPointError: a loss or gradient was not finite. Weights have not changed since;
                the micro-batches are saved in `out_dir`.
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
    outside: tuple[torch.Tensor, torch.Tensor],
    counts: Counts,
    dual_clip: float = 0.0,
) -> Stats:
    """Metrics of a policy-gradient loss on a micro-batch: means over sequences or tokens, as the ratio is one of them.

    Args:
        micro: m sequences.
        loss: scalar, share of the minibatch loss.
        logps_mC: [m, C] fp32, under the policy.
        entropy_mC: [m, C] fp32.
        ratio: [m] of sequences or [m, C] of tokens, fp32.
        outside: which ratios are above and below the clip range, see `losses.outside`.
        counts: of the minibatch.
        dual_clip: cap of the ratio where the advantage is negative; 0: none.
    """
    mask_mC, by_token = micro.completion_mask, ratio.dim() == 2
    mode, trained = ("token_mean", mask_mC) if by_token else ("seq_mean", mask_mC.any(1))
    total, count = counts.of(mode), trained.sum().clamp(min=1)
    means = losses.clip_stats(ratio, micro.advantages, outside, trained, dual_clip)
    logps_mC, mismatch_mC = logps_mC.detach(), micro.old_logps - micro.rollout_logps
    by_name = {"entropy": entropy_mC.detach(), "kl_old": losses.kl_estimate(micro.old_logps, logps_mC, "k3")}
    if micro.ref_logps is not None:
        by_name["kl_ref"] = losses.kl_estimate(logps_mC, micro.ref_logps, "k3")
    for name, values_mC in by_name.items():
        means[name] = losses.aggregate(values_mC, mask_mC, mode, count)
    mismatch = mismatch_mC.abs() if by_token else losses.masked_mean(mismatch_mC, mask_mC).abs()
    means["rollout_mismatch"] = torch.where(trained, mismatch, 0.0).sum() / count
    means["loss"] = loss.detach() * total / count
    return Stats(micro.num_tokens if by_token else micro.num_trained, means)


def token_stats(micro: RolloutBatch, loss: torch.Tensor, values: dict[str, torch.Tensor], counts: Counts) -> Stats:
    """Metrics of a micro-batch as means over its trained tokens.

    Args:
        micro: m sequences.
        loss: scalar, share of the minibatch loss.
        values: per-token metrics [m, C] by name.
        counts: of the minibatch.
    """
    mask_mC = micro.completion_mask
    count = mask_mC.sum().clamp(min=1)
    sums = (torch.stack(list(values.values()), dim=-1).detach() * mask_mC[..., None]).sum((0, 1)) / count
    means = dict(zip(values, sums, strict=True)) | {"loss": loss.detach() * counts.tokens / count}
    return Stats(micro.num_tokens, means)
