"""FSDP2: weights, gradients and AdamW's state sharded over the ranks, for models that do not fit on one GPU.

Each rank keeps its shard of every weight in fp32, which serves as AdamW's master. A decoder layer is all-gathered in
half precision for its computation and resharded afterwards; its gradient is reduce-scattered in fp32. Sampling needs
all weights on every GPU: each holds a full copy in half precision, gathered before each rollout, which is also saved.
Memory per rank: 16 bytes per parameter divided by the number of ranks, plus 2 bytes per parameter.
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


def enabled(cfg: Any) -> bool:
    """Whether a run shards, by its option `fsdp` or by `accelerate launch` with FSDP.

    Args:
        cfg: a `settings.Settings`.

    Raises:
        ValueError: another option is incompatible with sharding.
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
        policy: its model is on the device, with the same weights on every rank.
        device: of this rank.

    Returns:
        A full copy of the model in its dtype, to sample from and to save; `gather` updates it.
    """
    full = copy.deepcopy(policy.model).requires_grad_(False)
    _shard(policy, device, policy.model.dtype, torch.float32)
    return full


def shard_frozen(policy: LogProbs, device: torch.device) -> None:
    """Shards a frozen model, such as a reference, in its own dtype.

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
    # reshard, or the block keeps its pre-update weights
    how = dict(mesh=mesh, reshard_after_forward=True)
    # do not cast inputs: weights of tokens and log-probabilities of a teacher are fp32
    how["mp_policy"] = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    blocks = [m for m in policy.model.get_decoder().modules() if isinstance(m, GradientCheckpointingLayer)]
    if policy.compiled:  # only the forward of a block: hooks that gather weights would be graph breaks
        for block in blocks:
            block._compiled_call_impl = None
            block.forward = torch.compile(block.forward, dynamic=True)
    for module in [*blocks, policy]:  # block by block, so that the full model never exists in fp32
        for parameter in module.parameters():
            if not hasattr(parameter, "device_mesh"):
                parameter.data = parameter.data.to(storage)
        fully_shard(module, **how)
        module.set_gradient_divide_factor(1.0)  # losses are divided by global counts already: sum, do not average
        module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum


@torch.no_grad()
def gather(model: nn.Module, full: nn.Module) -> None:
    """Copies the weights of a sharded model into the full copy that `shard` returned; a collective.

    Args:
        model: the transformers model that was sharded.
        full: its copy; or the model itself if nothing is sharded: then this is a no-op.
    """
    if model is full:
        return
    for sharded, target in zip(model.parameters(), full.parameters(), strict=True):
        target.copy_(sharded.to(target.dtype).full_tensor())


def pad_micro_batches(minibatches: list[list[Any]]) -> None:
    """Pads the lists of micro-batches to the same length on all ranks, which gather each layer together; a collective.

    Args:
        minibatches: of this rank, lists of micro-batches (`batches.RolloutBatch`); padded with untrained rows.
    """
    counts = distributed.gather_objects([len(micros) for micros in minibatches])
    for micros, most in zip(minibatches, map(max, zip(*counts, strict=True)), strict=True):
        for _ in range(most - len(micros)):
            filler = micros[-1].select(torch.arange(1))
            filler.drop(torch.ones(1, dtype=torch.bool))
            micros.append(filler)
