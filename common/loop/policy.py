"""The trained model on all its devices, and the frozen reference of the KL term."""

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
from common.model import logprobs, lora, models, passes
from common.model.images import Images
from common.run import checkpoint
from common.training import sharding


class Policy:
    """A causal language model: on one device, replicated on several, or sharded over ranks.

    Attributes:
        start_model: built-in model, hub id or folder that the run started from.
        tokenizer: of the model.
        model: the weights that the optimizer updates; sharded with `fsdp`.
        whole: the unsharded model, to save and to sample from; `sync` updates it.
        trained: one replica per device that trains; the first is `model`.
        copies: replicas that only sample; `refresh_copies` updates them.
        samplers: replicas that sample.
        wrapped: the module that the loss calls, one per replica in `trained`.
        home: device of `model`.
        devices: devices of `trained`.
        sharded: whether weights are sharded over the ranks.
        outdated: whether `model` has changed since `trained` was refreshed.
    """

    kind = "policy"  # for messages

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
            gpus: its devices; default: the first GPU, or the CPU.
            resumed: checkpoint to load weights from.
            train_entropy: the loss has an entropy term, so entropies need gradients.
        """
        self.load(cfg, cfg.policy_model, gpus or devices.layout(cfg.device, policy=(0,)), resumed)
        self.wrap(functools.partial(logprobs.LogProbs, temperature=cfg.temperature, compile=cfg.compile,
                                    train_entropy=train_entropy))  # fmt: skip

    def load(self, cfg: Any, name: str, gpus: devices.Layout, resumed: Path | None, **usual: Any) -> None:
        """Loads the model and copies it to every device that trains or samples.

        Args:
            cfg: a `settings.Settings`.
            name: built-in model, hub id or folder.
            gpus: its devices.
            resumed: checkpoint to load weights from.
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
        """Wraps each replica, then shards with `fsdp`; call it before creating an optimizer.

        Args:
            wrapper: turns a replica into the module that the loss calls.
        """
        self.wrapper = wrapper
        self.wrapped = [wrapper(replica) for replica in self.trained]
        if self.sharded:
            self.whole = sharding.shard(self.wrapped[0], self.home)
            self.samplers = [self.whole]

    def packs(self, batch: RolloutBatch) -> bool:
        """Whether the forward pass packs the sequences of a batch without padding.

        Args:
            batch: all sequences of a step, or a micro-batch.
        """
        return self.wrapped[0].packs(batch.longest)

    def __call__(self, micro: RolloutBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies of a micro-batch, on the replica that it was dealt to.

        Args:
            micro: m sequences. If `old_logps` is None, as in the first minibatch, it is set to the
                result: the weights are still those of the rollout, so the ratio is exactly 1.

        Returns:
            [m, C] and [m, C] fp32, nats.
        """
        logps_mC, entropy_mC = self.wrapped[micro.replica or 0](*micro.tokens)
        if micro.old_logps is None:
            micro.old_logps = logps_mC.detach()
        return logps_mC, entropy_mC

    @functools.cached_property
    def unsharded(self) -> "Policy":
        """The policy without collectives, for an evaluation; itself if weights are not sharded."""
        if not self.sharded:
            return self
        plain = copy.copy(self)
        plain.wrapped, plain.sharded = [self.wrapper(self.whole)], False
        return plain

    def refresh_trained(self) -> None:
        """Copies weights to the other replicas that train, if they have changed."""
        if self.outdated:
            models.refresh(self.trained)
        self.outdated = False

    def refresh_copies(self) -> None:
        """Copies weights to the replicas that only sample; call it before sampling."""
        models.refresh([self.model, *self.copies])

    def sync(self) -> None:
        """Updates `trained` and `whole` after the last optimizer step; a collective."""
        self.refresh_trained()
        sharding.gather(self.model, self.whole)

    def fill_logps(self, micros: Iterable[RolloutBatch], field: str, tokens: int) -> None:
        """Writes log-probabilities into micro-batches that have none, without gradients; see `passes.fill`.

        Args:
            micros: to write into.
            field: "old_logps".
            tokens: maximum size of a micro-batch.
        """
        missing = [micro for micro in micros if getattr(micro, field) is None]
        passes.fill(missing, field, self.wrapped, self.devices, tokens)


class Reference:
    """The frozen starting model; with LoRA, the policy with its first adapters; empty without kl_coef."""

    def __init__(self, cfg: Any, policy: Policy, gpus: devices.Layout | None = None, resumed: Path | None = None):
        """Loads the reference.

        Args:
            cfg: a `settings.RewardSettings` with `kl_coef`.
            policy: the trained model.
            gpus: its device; default: that of the policy.
            resumed: checkpoint that may contain a refreshed reference.
        """
        self.policy, self.frozen, self.wrapped = policy, None, []
        self.refresh_every = getattr(cfg, "reference_refresh", 0)
        if cfg.kl_coef > 0 and cfg.lora_rank:
            self.devices = policy.devices
            lora.keep_start(policy.trained, policy.start_model)
            self.wrapped = [policy.wrapper(replica, train_entropy=False, adapters=False) for replica in policy.trained]
        elif cfg.kl_coef > 0:
            self.devices = (gpus.reference if gpus else policy.home,)
            source = checkpoint.reference(resumed, cfg) if self.refresh_every else policy.start_model
            self.frozen = models.load_frozen(source, self.devices[0], cfg.dtype)
            # compilation is not safe in a thread beside the policy
            compile = cfg.compile and not self.has_own_gpu
            self.wrapped = [policy.wrapper(self.frozen, train_entropy=False, compile=compile)]
            if policy.sharded:
                sharding.shard_frozen(self.wrapped[0], policy.home)
            elif self.wrapped[0].compiled:  # code compiled for weights with gradients then serves these, too
                self.frozen.get_decoder().requires_grad_()

    @property
    def has_own_gpu(self) -> bool:
        """Whether it has a GPU of its own, and so computes in parallel with the policy."""
        return self.frozen is not None and self.devices[0] not in self.policy.devices

    @property
    def to_save(self) -> nn.Module | None:
        """The reference if checkpoints must contain it, because it changes; None if it does not."""
        return self.frozen if self.refresh_every else None

    def fill_logps(self, micros: Sequence[RolloutBatch], tokens: int, images: Images | None = None) -> None:
        """Writes `ref_logps` into micro-batches; see `passes.fill`.

        Args:
            micros: to write into.
            tokens: maximum size of a micro-batch.
            images: features of its own vision tower, if the policy's is trained.
        """
        if self.wrapped:
            passes.fill(micros, "ref_logps", self.wrapped, self.devices, tokens, images)

    def refresh(self, step: int) -> None:
        """Copies the policy's weights into the reference, every `reference_refresh` steps."""
        if self.refresh_every and step % self.refresh_every == 0:
            models.refresh([self.policy.model, self.frozen])


def fill_logps(
    minibatches: Sequence[Sequence[RolloutBatch]],
    policy: Policy,
    reference: Reference,
    tokens: int,
    images: Images | None = None,
) -> None:
    """Fills `ref_logps`, and `old_logps` of all minibatches but the first; its update fills them.

    Args:
        minibatches: micro-batches by minibatch.
        policy: computes `old_logps`.
        reference: computes `ref_logps`, in parallel if it has a GPU of its own.
        tokens: maximum size of a micro-batch.
        images: as in `Reference.fill_logps`.
    """
    micros = list(chain(*minibatches))
    work = reference.fill_logps, micros, tokens, images
    ahead = background.start(*work) if reference.has_own_gpu else None
    policy.fill_logps(chain(*minibatches[1:]), "old_logps", tokens)
    if ahead:
        ahead.result()
    else:
        reference.fill_logps(*work[1:])
