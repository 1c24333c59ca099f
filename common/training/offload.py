"""Moving a model out of GPU memory while it is idle, into pinned memory of the CPU."""

import torch
from torch import nn

from common.base.devices import GIB, host_memory, synchronize


class Offload:
    """The weights of a model, on the GPU or in CPU memory.

    A frozen model has its copy on the CPU from its first move on: to leave the GPU then costs nothing. Weights that are
    trained are copied both ways. Where CUDA graphs hold addresses of the weights, they are captured again afterwards.
    """

    def __init__(self, model: nn.Module, keep: list[torch.Tensor] | None = None):
        """Looks at the weights; nothing moves yet.

        Args:
            model: on one device, or spread over several.
            keep: parameters that stay, such as a head that is needed all the time.
        """
        kept = {id(x) for x in keep or ()}
        self.params = sorted((p for p in model.parameters() if id(p) not in kept), key=lambda p: str(p.dtype))
        self.frozen = not any(p.requires_grad for p in self.params)
        self.devices = [p.device for p in self.params]
        self._blocks: list[torch.Tensor] = []  # of CPU memory, which is pinned as long as these live
        self._places: list[torch.Tensor] = []  # in them, one for each of the parameters
        self.away = False

    @torch.no_grad()
    def off(self) -> float:
        """Moves the weights to the CPU.

        Returns:
            GiB that are free on the GPUs since, by the count of torch's allocator; on a CPU, GiB moved.
        """
        if self.away:
            return 0.0
        before = self._allocated()
        first = not self._places
        if first:
            self._reserve()
        if first or not self.frozen:
            self._copy_to_host()
        for p, place in zip(self.params, self._places, strict=True):
            p.data = place
        self.away = True
        if before is None:
            return sum(block.nbytes for block in self._blocks) / GIB
        return (before - self._allocated()) / GIB

    @torch.no_grad()
    def on(self) -> None:
        """Moves the weights back, bit for bit."""
        if not self.away:
            return
        for p, device, place in zip(self.params, self.devices, self._places, strict=True):
            p.data = place.to(device, non_blocking=True, copy=True)
        synchronize(list(dict.fromkeys(self.devices)))  # the next copy to the CPU may come at once
        self.away = False

    def _reserve(self) -> None:
        """A block of CPU memory for each dtype, and in it a place for every weight, in the layout that it has."""
        for dtype in dict.fromkeys(p.dtype for p in self.params):
            own = [p for p in self.params if p.dtype == dtype]  # side by side: they are sorted
            block, start = host_memory(sum(p.numel() for p in own), self.devices[0], dtype), 0
            for p in own:
                self._places.append(block.as_strided(p.shape, p.stride(), start))
                start += p.numel()
            self._blocks.append(block)

    def _copy_to_host(self) -> None:
        for p, place in zip(self.params, self._places, strict=True):
            place.copy_(p.data, non_blocking=True)
        synchronize(list(dict.fromkeys(self.devices)))  # from here on the CPU may read the copies

    def _allocated(self) -> int | None:
        gpus = [device for device in dict.fromkeys(self.devices) if device.type == "cuda"]
        return sum(torch.cuda.memory_allocated(gpu) for gpu in gpus) if gpus else None
