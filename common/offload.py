"""Moving a model out of GPU memory while it is idle, into pinned memory of the CPU."""

import torch
from torch import nn

from common.devices import GIB, synchronize
from common.optim import host_memory


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
        self.params = [p for p in model.parameters() if id(p) not in kept]
        self.frozen = not any(p.requires_grad for p in self.params)
        self.devices = [p.device for p in self.params]
        self._host: list[torch.Tensor] = []
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
        if not self._host:
            for dtype in dict.fromkeys(p.dtype for p in self.params):
                size = sum(p.numel() for p in self.params if p.dtype == dtype)
                self._host.append(host_memory(size, self.devices[0], dtype))
            blocks, starts = {block.dtype: block for block in self._host}, {block.dtype: 0 for block in self._host}
            self._places = []
            for p in self.params:
                # as_strided: weights keep the layout they have
                self._places.append(blocks[p.dtype].as_strided(p.shape, p.stride(), starts[p.dtype]))
                starts[p.dtype] += p.numel()
            self._copy_to_host()
        elif not self.frozen:
            self._copy_to_host()
        for p, place in zip(self.params, self._places, strict=True):
            p.data = place
        self.away = True
        if before is None:
            return sum(block.nbytes for block in self._host) / GIB
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

    def _copy_to_host(self) -> None:
        for p, place in zip(self.params, self._places, strict=True):
            place.copy_(p.data, non_blocking=True)
        synchronize(list(dict.fromkeys(self.devices)))  # from here on the CPU may read the copies

    def _allocated(self) -> int | None:
        gpus = [device for device in dict.fromkeys(self.devices) if device.type == "cuda"]
        return sum(torch.cuda.memory_allocated(gpu) for gpu in gpus) if gpus else None
