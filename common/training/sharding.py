"""FSDP2: weights, gradients and AdamW's state in parts, one on each rank, for models that are too big for one GPU.

Every rank keeps its part of each weight in fp32, which is AdamW's master. A decoder layer is gathered in half precision
while it computes and let go afterwards, and its gradient is added up over the ranks in fp32. To sample, every GPU needs
all weights anyway: it holds a plain copy in half precision, gathered before each rollout, which is also what is saved.
So a run takes 16 bytes per parameter divided by the ranks, and 2 bytes more on each.
"""

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers.modeling_layers import GradientCheckpointingLayer

from common.base import distributed
from common.base.checks import require
from common.model.logprobs import LogProbs


def wanted(cfg: Any) -> bool:
    """Whether a run shards: its option `fsdp`, or a launcher that was told to (accelerate launch).

    Args:
        cfg: the Config of a script for several ranks.

    Raises:
        ValueError: it cannot.
    """
    if not distributed.shards(cfg):
        return False
    given = "fsdp = True" if cfg.fsdp else "ACCELERATE_USE_FSDP = true"
    require(cfg.dtype != "fp16", f"{given}, dtype = 'fp16'", "shards are fp32, layers bf16 or fp32",
            "set dtype to 'auto' or 'bf16'")  # fmt: skip
    require(cfg.lora_rank == 0, f"{given}, lora_rank = {cfg.lora_rank}", "what is sharded is what is trained, which is "
            "little with LoRA", "leave one of them off")  # fmt: skip
    refreshed = getattr(cfg, "reference_refresh", 0)
    require(not refreshed, f"{given}, reference_refresh = {refreshed}", "a sharded reference stays as it is",
            "leave one of them off")  # fmt: skip
    require(not getattr(cfg, "param_offload", False), f"{given}, param_offload = True", "shards stay where they are",
            "leave one of them off")  # fmt: skip
    if distributed.num_ranks() == 1:
        print(f"{given}: there is one process, so nothing is sharded")
    return distributed.num_ranks() > 1


def shard(policy: LogProbs, device: torch.device) -> nn.Module:
    """Shards a policy over all ranks, in place.

    Args:
        policy: the model inside is on the device, the same on every rank.
        device: of this rank.

    Returns:
        A plain copy of the model in its dtype, to sample from and to save; `gather` brings it up to date.
    """
    whole = copy.deepcopy(policy.model).requires_grad_(False)
    _shard(policy, device, policy.model.dtype, torch.float32)
    return whole


def shard_frozen(policy: LogProbs, device: torch.device) -> None:
    """Shards a model that is not trained, such as a reference, in its own dtype.

    Args:
        policy: as in `shard`.
        device: of this rank.

    Raises:
        ValueError: the model is on another device.
    """
    where = policy.model.device
    require(where == device, f"REFERENCE_GPU_ID: the reference is on {where}", "with fsdp every rank has a part of it",
            "set REFERENCE_GPU_ID to None")  # fmt: skip
    _shard(policy, device, policy.model.dtype, policy.model.dtype)


def _shard(policy: LogProbs, device: torch.device, compute: torch.dtype, storage: torch.dtype) -> None:
    mesh = init_device_mesh(device.type, (distributed.num_ranks(),))
    # reshard: what stays gathered would not be gathered again, and be the weights of before the update
    how = dict(mesh=mesh, reshard_after_forward=True)
    # inputs as they are: what a loss is given beside tokens, weights and log-probabilities of a teacher, is fp32
    how["mp_policy"] = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    blocks = [m for m in policy.model.get_decoder().modules() if isinstance(m, GradientCheckpointingLayer)]
    if policy.compiled:  # hooks that gather weights stay outside of what is compiled, or they would break it up
        for block in blocks:
            block._compiled_call_impl = None
            block.forward = torch.compile(block.forward, dynamic=True)
    for module in [*blocks, policy]:  # one after the other: never all of the model in fp32
        for parameter in module.parameters():
            if not hasattr(parameter, "device_mesh"):
                parameter.data = parameter.data.to(storage)
        fully_shard(module, **how)
        module.set_gradient_divide_factor(1.0)  # shares of the loss add up; a mean would divide them again
        module.set_force_sum_reduction_for_comms(True)  # or gloo would be asked for a scaled sum, which it has not


@torch.no_grad()
def gather(model: nn.Module, whole: nn.Module) -> None:
    """Copies the weights of a sharded model into the plain copy that `shard` gave; a collective.

    Args:
        model: the transformers model that was sharded.
        whole: of the same kind; or the model itself, where nothing is sharded: then nothing happens.
    """
    if model is whole:
        return
    for parts, target in zip(model.parameters(), whole.parameters(), strict=True):
        target.copy_(parts.to(target.dtype).full_tensor())


def even(minibatches: list[list[Any]]) -> None:
    """Gives every rank the same number of micro-batches, since all of them compute each layer together; a collective.

    Args:
        minibatches: of this rank, lists of micro-batches (`batches.RolloutBatch`); where others have more, rows that
            are not trained are added.
    """
    counts = distributed.gather_objects([len(micros) for micros in minibatches])
    for micros, most in zip(minibatches, map(max, zip(*counts, strict=True)), strict=True):
        for _ in range(most - len(micros)):
            filler = micros[-1].select(torch.arange(1))
            filler.drop(torch.ones(1, dtype=torch.bool))
            micros.append(filler)
