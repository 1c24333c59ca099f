"""The model that is trained, wherever it lives, and the reference that a KL term holds it to."""

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from common.base import background, devices
from common.generation.batches import RolloutBatch
from common.model import logprobs, lora, models
from common.model.images import Images
from common.run import checkpoint
from common.training import sharding


class Policy:
    """A causal language model on one device, in replicas on several, or sharded over ranks.

    Attributes:
        start_model: what the run began with: built-in model, hub id or folder.
        tokenizer: of the model.
        model: the weights that the optimizer steps; sharded with `fsdp`.
        whole: the same in one piece, to save and to sample from; `sync` updates it.
        trained: one replica per device that trains; the first is `model`.
        copies: replicas that only sample; `refresh_copies` updates them.
        samplers: replicas that sample.
        wrapped: one per replica in `trained`: the module that the loss calls.
        home: device of `model`.
        devices: those of `trained`.
        sharded: whether weights are sharded over the ranks.
        outdated: whether an optimizer step has changed `model` since `trained` was refreshed.
    """

    kind = "policy"

    def __init__(
        self,
        cfg: Any,
        gpus: devices.Layout | None = None,
        resumed: Path | None = None,
        train_entropy: bool = False,
    ):
        """Loads the policy.

        Args:
            cfg: a `settings.RLSettings` with `policy_model`.
            gpus: where it lives; one GPU or the CPU by default.
            resumed: checkpoint to take the weights from.
            train_entropy: whether the loss has an entropy term.
        """
        self.load(cfg, cfg.policy_model, gpus or devices.layout(cfg.device, policy=(0,)), resumed)
        self.wrap(functools.partial(logprobs.LogProbs, temperature=cfg.temperature, compile=cfg.compile,
                                    train_entropy=train_entropy))  # fmt: skip

    def load(self, cfg: Any, name: str, gpus: devices.Layout, resumed: Path | None, **usual: Any) -> None:
        """Loads the model and copies it to every device that trains or samples.

        Args:
            cfg: a `settings.Settings`.
            name: built-in model, hub id or folder.
            gpus: where it lives.
            resumed: checkpoint to take the weights from.
            **usual: usual learning rates, for `models.warn_learning_rate`.
        """
        self.start_model, source = name, str(resumed or name)
        self.tokenizer, self.model = models.load_policy(source, gpus.home, cfg.dtype, cfg.gradient_checkpointing,
                                                        lora.options(cfg))  # fmt: skip
        models.warn_learning_rate(cfg.learning_rate, self.model, **usual)
        self.home, self.devices, self.sharded = gpus.home, gpus.trained, sharding.enabled(cfg)
        replicas = models.replicate(self.model, (*gpus.trained, *gpus.copies), len(gpus.trained))
        self.trained, self.copies = replicas[: len(gpus.trained)], replicas[len(gpus.trained) :]
        self.samplers, self.whole, self.outdated = [replicas[i] for i in gpus.sampling], self.model, True

    def wrap(self, wrapper: Callable[[nn.Module], nn.Module]) -> None:
        """Decides what the loss calls, then shards the weights if `fsdp` is set; before there is an optimizer.

        Args:
            wrapper: a replica -> the module that the loss calls.
        """
        self.wrapper = wrapper
        self.wrapped = [wrapper(replica) for replica in self.trained]
        if self.sharded:
            self.whole = sharding.shard(self.wrapped[0], self.home)
            self.samplers = [self.whole]

    @property
    def packed(self) -> bool:
        """Whether sequences are computed one behind the other, without padding."""
        return self.wrapped[0].packed

    def __call__(self, micro: RolloutBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies of a micro-batch, by the replica that it was dealt to.

        Args:
            micro: m sequences. In the first minibatch, `old_logps` is filled with what this pass finds: no update has
                come since the rollout, so the ratio is exactly 1.

        Returns:
            [m, C] and [m, C] fp32, nats.
        """
        logps_mC, entropy_mC = self.wrapped[micro.replica or 0](*micro.tokens)
        if micro.old_logps is None:
            micro.old_logps = logps_mC.detach()
        return logps_mC, entropy_mC

    @functools.cached_property
    def unsharded(self) -> "Policy":
        """The policy for a rank that computes alone, as in an evaluation; itself where nothing is sharded."""
        if not self.sharded:
            return self
        plain = copy.copy(self)
        plain.wrapped, plain.sharded = [self.wrapper(self.whole)], False
        return plain

    def refresh_trained(self) -> None:
        """After an optimizer step: copies the new weights to the other replicas that train."""
        if self.outdated:
            models.refresh(self.trained)
        self.outdated = False

    def refresh_copies(self) -> None:
        """Before sampling: copies the weights to the replicas that only sample."""
        models.refresh([self.model, *self.copies])

    def sync(self) -> None:
        """After the last optimizer step of an update: brings `trained` and `whole` up to date; a collective."""
        self.refresh_trained()
        sharding.gather(self.model, self.whole)

    def fill_logps(self, micros: Iterable[RolloutBatch], field: str, tokens: int) -> None:
        """Writes log-probabilities into micro-batches, without gradients; see `logprobs.fill`.

        Args:
            micros: micro-batches.
            field: "old_logps".
            tokens: of a micro-batch, at most.
        """
        logprobs.fill(micros, field, self.wrapped, self.devices, tokens)


class Reference:
    """The frozen starting model; with LoRA, the policy with its adapters disabled. Empty without `kl_coef`."""

    def __init__(self, cfg: Any, policy: Policy, gpus: devices.Layout | None = None, resumed: Path | None = None):
        """Loads the reference.

        Args:
            cfg: a `settings.RewardSettings` with `kl_coef`.
            policy: what is trained.
            gpus: where it lives; by default, where the policy does.
            resumed: checkpoint that may hold a refreshed reference.
        """
        self.policy, self.frozen, self.wrapped = policy, None, []
        self.refresh_every = getattr(cfg, "reference_refresh", 0)
        if cfg.kl_coef > 0 and cfg.lora_rank:
            self.devices = policy.devices
            self.wrapped = [policy.wrapper(replica, train_entropy=False, adapters=False) for replica in policy.trained]
        elif cfg.kl_coef > 0:
            self.devices = (gpus.reference if gpus else policy.home,)
            source = checkpoint.reference(resumed, cfg) if self.refresh_every else policy.start_model
            self.frozen = models.load_frozen(source, self.devices[0], cfg.dtype)
            # what runs in a thread beside the policy must not compile
            self.wrapped = [policy.wrapper(self.frozen, train_entropy=False, compile=cfg.compile and not self.apart)]
            if policy.sharded:
                sharding.shard_frozen(self.wrapped[0], policy.home)

    @property
    def apart(self) -> bool:
        """Whether it has a GPU of its own, and works at the same time as the policy."""
        return self.frozen is not None and self.devices[0] not in self.policy.devices

    @property
    def to_save(self) -> nn.Module | None:
        """What checkpoints keep of it, because it changes during the run; None if it is the starting model."""
        return self.frozen if self.refresh_every else None

    def fill_logps(self, micros: Sequence[RolloutBatch], tokens: int, images: Images | None = None) -> None:
        """Writes `ref_logps` into micro-batches; see `logprobs.fill`.

        Args:
            micros: micro-batches.
            tokens: of a micro-batch, at most.
            images: features of its own vision tower, where that differs from the policy's by now.
        """
        if self.wrapped:
            logprobs.fill(micros, "ref_logps", self.wrapped, self.devices, tokens, images)

    def refresh(self, step: int) -> None:
        """Every `reference_refresh` steps, the policy becomes the reference.

        Args:
            step: from 1.
        """
        if self.refresh_every and step % self.refresh_every == 0:
            models.refresh([self.policy.model, self.frozen])


def fill_logps(
    minibatches: Sequence[Sequence[RolloutBatch]],
    policy: Policy,
    reference: Reference,
    tokens: int,
    images: Images | None = None,
) -> None:
    """Fills `ref_logps`, and `old_logps` of all minibatches but the first, which finds its own in the update.

    Args:
        minibatches: micro-batches by minibatch.
        policy: gives `old_logps`.
        reference: gives `ref_logps`; at the same time if it has a GPU of its own.
        tokens: of a micro-batch, at most.
        images: for the reference, as in `Reference.fill_logps`.
    """
    micros = list(chain(*minibatches))
    work = reference.fill_logps, micros, tokens, images
    ahead = background.start(*work) if reference.apart else None
    policy.fill_logps(chain(*minibatches[1:]), "old_logps", tokens)
    if ahead:
        ahead.result()
    else:
        reference.fill_logps(*work[1:])
