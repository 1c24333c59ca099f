"""Moves an idle model out of GPU memory, into pinned CPU memory."""

import torch
from torch import nn

from common.base.devices import GIB, host_memory, synchronize


class Offloader:
    """Moves the weights of a model between GPU and CPU memory.

    A frozen model keeps its CPU copy, so that only its first `offload` copies anything. Trained weights are copied both
    ways. CUDA graphs that hold addresses of the weights must be captured again after `onload`.

    Attributes:
        offloaded: whether the weights are in CPU memory.
    """

    def __init__(self, model: nn.Module, keep: list[torch.Tensor] | None = None):
        """Collects the parameters; nothing moves yet.

        Args:
            model: on one device, or spread over several.
            keep: parameters that always stay on the GPU, such as a head that is in constant use.
        """
        kept = {id(x) for x in keep or ()}
        self.params = sorted((p for p in model.parameters() if id(p) not in kept), key=lambda p: str(p.dtype))
        self.frozen = not any(p.requires_grad for p in self.params)
        self.devices = [p.device for p in self.params]
        self._blocks: list[torch.Tensor] = []  # one per dtype; the memory is pinned as long as these live
        self._host_copies: list[torch.Tensor] = []  # views of the blocks, one for each parameter
        self.offloaded = False

    @torch.no_grad()
    def offload(self) -> float:
        """Moves the weights to the CPU.

        Returns:
            GiB that this freed on the GPUs, by torch's allocator; on a CPU, GiB moved; 0 if they were there already.
        """
        if self.offloaded:
            return 0.0
        before = self._allocated()
        first = not self._host_copies
        if first:
            self._reserve()
        if first or not self.frozen:
            self._copy_to_host()
        for p, host in zip(self.params, self._host_copies, strict=True):
            p.data = host
        self.offloaded = True
        if before is None:
            return sum(block.nbytes for block in self._blocks) / GIB
        return (before - self._allocated()) / GIB

    @torch.no_grad()
    def onload(self) -> None:
        """Moves the weights back, bit for bit."""
        if not self.offloaded:
            return
        for p, device, host in zip(self.params, self.devices, self._host_copies, strict=True):
            p.data = host.to(device, non_blocking=True, copy=True)
        synchronize(list(dict.fromkeys(self.devices)))  # the next offload may overwrite the CPU copies at once
        self.offloaded = False

    def _reserve(self) -> None:
        """Allocates a block of CPU memory per dtype, and in it a view for each parameter, with its strides."""
        for dtype in dict.fromkeys(p.dtype for p in self.params):
            own = [p for p in self.params if p.dtype == dtype]  # adjacent: they are sorted by dtype
            block, start = host_memory(sum(p.numel() for p in own), self.devices[0], dtype), 0
            for p in own:
                self._host_copies.append(block.as_strided(p.shape, p.stride(), start))
                start += p.numel()
            self._blocks.append(block)

    def _copy_to_host(self) -> None:
        for p, host in zip(self.params, self._host_copies, strict=True):
            host.copy_(p.data, non_blocking=True)
        synchronize(list(dict.fromkeys(self.devices)))  # before the CPU reads the copies

    def _allocated(self) -> int | None:
        """Bytes allocated on the GPUs of the model; None on a CPU."""
        gpus = [device for device in dict.fromkeys(self.devices) if device.type == "cuda"]
        return sum(torch.cuda.memory_allocated(gpu) for gpu in gpus) if gpus else None
