"""AdamW with fp32 master weights for bf16 and fp16 parameters, dynamic loss scaling, offloading and FSDP2 shards.

A step never waits for the GPU. The state (masters and moments, 12 bytes per bf16 parameter) can be offloaded to CPU
memory during rollouts, or stay there: then a step streams it through the GPU, one bucket at a time. Of parameters
sharded by FSDP2, each rank keeps and updates its own shard.
"""

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from common.base.devices import host_memory

BUCKET_ELEMENTS = 2**26  # bf16 and fp16 gradients cast to fp32 at a time (256 MiB)
STREAM_ELEMENTS = 2**24  # of an offloaded state in one streamed bucket (192 MiB); three of them are on the GPU at once
ALIGNED = 64  # elements
OFFLOAD = ("none", "rollout", "always")
SCHEDULES = ("constant", "linear", "cosine")
FIRST_LOSS_SCALE, GOOD_STEPS = 2.0**16, 1000  # fp16: halved at every overflow, doubled after so many steps without one


def schedule(step: int, steps: int, warmup_steps: int, kind: str = "constant", end: float = 0.0) -> float:
    """Factor in [0, 1] of the learning rate: linear warm-up, then constant or a decay to the last step.

    Args:
        step: rollout step, from 1.
        steps: the last step.
        warmup_steps: steps until the factor is 1; 0 for none.
        kind: "constant"; "linear"; "cosine", half a period of it (Loshchilov and Hutter, arXiv 1608.03983, Eq. 5).
        end: factor at the last step, in [0, 1]; unused if constant.

    Raises:
        ValueError: another kind.
    """
    if kind not in SCHEDULES:
        raise ValueError(f"kind = {kind!r}: must be one of {SCHEDULES}")
    if kind == "constant" or step <= warmup_steps:
        return min(1.0, step / max(1, warmup_steps))
    done = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
    left = 1.0 - done if kind == "linear" else (1.0 + math.cos(math.pi * done)) / 2
    return end + (1.0 - end) * left


class AdamW:
    """AdamW over fp32 master weights.

    A bf16 weight of 0.02 cannot move by less than 6e-5, sixty times an update at learning rate 1e-6: without masters,
    rounding would undo updates at RL learning rates.

    Attributes:
        params: the trained parameters; DTensors if FSDP2 has sharded the model.
        learning_rate: of the next step.
        offloaded: whether the state is in CPU memory.
    """

    def __init__(
        self,
        model: nn.Module,
        learning_rate: float,
        weight_decay: float = 0.0,
        offload: str = "none",
        betas: tuple[float, float] = (0.9, 0.999),
    ):
        """Sets up the state for every trainable parameter.

        Args:
            model: the unwrapped model, on one device; its parameter names are the names in a checkpoint.
            learning_rate: the attribute of that name may be changed before each step.
            weight_decay: decoupled, applied to every parameter.
            offload: when the state is in CPU memory: "none", never; "rollout", from
                `offload_for_rollout` to the next step; "always".
            betas: decay of the running mean and variance.

        Raises:
            ValueError: no parameter requires a gradient, or another value of `offload`.
        """
        if offload not in OFFLOAD:
            raise ValueError(f"offload = {offload!r}: must be one of {OFFLOAD}")
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if not named:
            raise ValueError("0 parameters to train: at least one must have requires_grad")
        self.names = [name for name, _ in named]
        self.params = [p for _, p in named]
        self.learning_rate = learning_rate
        self._rule = dict(beta1=betas[0], beta2=betas[1], weight_decay=weight_decay, eps=1e-8, amsgrad=False)
        self._fp32 = {i for i, p in enumerate(self.params) if p.dtype == torch.float32}  # need no master copy
        self._sharded = any(isinstance(p, DTensor) for p in self.params)
        self._device, self._host, self.offloaded, self._mode = self.params[0].device, None, False, offload
        self._state = {key: [None] * len(named) for key in ("master", "exp_avg", "exp_avg_sq")}  # keys of a checkpoint
        if offload == "none":
            for tensors, i in self._slots():
                tensors[i] = torch.empty_like(self._local(i), dtype=torch.float32)
        else:  # allocated there from the start: the GPU may have no room, not even for a moment
            self._reserve_host()
        for tensors, i in self._slots():
            if tensors is self._state["master"]:
                tensors[i].copy_(self._local(i))
            else:
                tensors[i].zero_()
        elements = STREAM_ELEMENTS if offload == "always" else BUCKET_ELEMENTS
        self._buckets = _make_buckets([self._local(i).numel() for i in range(len(named))], elements)
        # fp16 gradients below 6e-8 underflow: the loss is scaled up, by a factor that adapts
        self._scales_loss = any(p.dtype == torch.float16 for p in self.params)
        # 0-dim tensors on the device: to read them would sync
        self._scale = torch.full((), FIRST_LOSS_SCALE if self._scales_loss else 1.0, device=self._device)
        self._good_steps = torch.zeros((), dtype=torch.int32, device=self._device)
        self._steps = torch.zeros((), device=self._device)
        self._norm = torch.zeros(
            (), device=self._device
        )  # of the last step; stays once it is not finite, until check()
        self._loss = torch.zeros((), device=self._device)  # the same, summed over ranks
        self._losses: list[torch.Tensor] = []  # since the last step, each on its own device, without a sync
        self._overflows = torch.zeros((), device=self._device)  # steps skipped in fp16 since check()

    @property
    def masters(self) -> list[torch.Tensor]:
        """The fp32 weights, of sharded ones this rank's shard; fp32 parameters are their own masters."""
        return [self._state_of("master", i) for i in range(len(self.params))]

    @property
    def loss_scale(self) -> float:
        """The factor of `scale`; reading it syncs with the GPU."""
        return self._scale.item()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiplies a loss by the loss scale (1 except in fp16); call backward() on the result.

        The next step is skipped if the loss is not finite, whatever the gradient is.
        """
        self._losses.append(loss.detach())
        return loss * self._scale.to(loss.device, non_blocking=True) if self._scales_loss else loss

    @torch.no_grad()
    def step(self, max_grad_norm: float) -> torch.Tensor:
        """Clips the gradient, takes one step, and clears the gradients; a collective if there are several ranks.

        An offloaded state is moved back first, unless it is always offloaded. If the gradient is not finite, the step
        is skipped. In fp16 that halves the loss scale; in other dtypes all later steps are skipped too, until `check`
        reports it. A loss that is not finite on any rank has that effect in every dtype, since no loss scale can help.

        Args:
            max_grad_norm: upper limit of the global gradient norm, above 0; inf: no clipping.

        Returns:
            0-dim fp32 on the parameters' device: gradient norm before clipping; inf or NaN if the step was skipped.
        """
        if self._mode != "always":
            self.onload()
        norm = self._grad_norm()
        self._loss = torch.where(self._loss.isfinite(), self._sum_losses(), self._loss)
        if self._scales_loss:
            norm = norm.nan_to_num(math.inf, math.inf)
            self._overflows += 1.0 - norm.isfinite().float()
        else:
            norm = self._norm = torch.where(self._norm.isfinite(), norm, self._norm)
        # the kernel divides by grad_scale, does nothing if found_inf is exactly 1, and does not count steps
        found_inf = 1.0 - (norm.isfinite() & self._loss.isfinite()).float()
        grad_scale = self._scale * (norm / max_grad_norm).clamp(min=1.0)
        self._steps += 1.0 - found_inf
        state = self._streamed() if self.offloaded else self._resident()
        for bucket, (masters, means, variances) in zip(self._buckets, state, strict=True):
            torch._fused_adamw_(
                masters, self._fp32_grads(bucket, masters), means, variances, [], [self._steps] * len(bucket),
                lr=self.learning_rate, grad_scale=grad_scale, found_inf=found_inf, maximize=False, **self._rule,
            )  # fmt: skip
            pairs = zip(bucket, masters, strict=True)
            rounded = [(_flat_slice(self._local(i), a, b), m) for (i, a, b), m in pairs if i not in self._fp32]
            if rounded:
                torch._foreach_copy_([p for p, _ in rounded], [m for _, m in rounded])
            for i, _, end in bucket:
                if end == self._local(i).numel():
                    self.params[i].grad = None
        for param in self.params:  # also those of which this rank has no shard
            param.grad = None
        if self._scales_loss:
            torch._amp_update_scale_(self._scale, self._good_steps, found_inf, 2.0, 0.5, GOOD_STEPS)
        return norm

    def check(self) -> int:
        """Reports steps that failed since the last call; syncs with the GPU, so call it once per rollout step.

        Returns:
            Steps skipped since the last call because fp16 gradients overflowed.

        Raises:
            FloatingPointError: a loss or a gradient was not finite, and weights and state are those before that step;
                or, in fp16, gradients overflow even at a loss scale of 1. After it was raised, steps are taken again.
        """
        loss, norm, scale, overflows = torch.stack([self._loss, self._norm, self._scale, self._overflows]).tolist()
        for kept in (self._loss, self._norm, self._overflows):
            kept.zero_()
        if math.isfinite(loss) and self._scales_loss and scale < 1.0:
            raise FloatingPointError(
                f"loss scale {scale}: fp16 gradients overflow at every loss scale from 1 up; use dtype bf16 or fp32"
            )
        name, value = ("gradient norm", norm) if math.isfinite(loss) else ("loss", loss)
        if not math.isfinite(value):
            raise FloatingPointError(
                f"{name} is {value}, not finite: the step was not taken, the weights are unchanged since; look at the "
                "batch, and resume from the last checkpoint with a lower learning_rate, or in dtype fp32"
            )
        return int(overflows)

    def offload_for_rollout(self) -> float:
        """Offloads the state before a rollout if the option `offload` is "rollout"; returns GiB moved."""
        return self.offload() if self._mode == "rollout" else 0.0

    @torch.no_grad()
    def offload(self) -> float:
        """Moves masters and Adam state to CPU memory, pinned for a GPU; fp32 parameters stay. Returns GiB moved."""
        if self.offloaded:
            return 0.0
        before = [(tensors[i], tensors, i) for tensors, i in self._slots()]
        self._reserve_host()
        for tensor, tensors, i in before:
            tensors[i].copy_(tensor, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # before the CPU reads the copies
        return self._host.nbytes / 2**30

    @torch.no_grad()
    def onload(self) -> None:
        """Moves back what `offload` moved, bit for bit."""
        if not self.offloaded:
            return
        for tensors, i in self._slots():  # no sync: later kernels are queued behind the copies
            tensors[i] = tensors[i].to(self._device, non_blocking=True, copy=True)
        self.offloaded = False

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Masters and Adam state as a flat dict by parameter name; later steps change the tensors.

        If the model is sharded, it is a collective: rank 0 gets full tensors in CPU memory, the others an empty dict.
        """
        steps = self._steps.cpu()
        state = {"loss_scale": torch.tensor([self.loss_scale, self._good_steps.item()], dtype=torch.float64)}
        for i, name in enumerate(self.names):
            state[f"master/{name}"] = self._full(i, "master")
            if steps > 0:
                state[f"step/{name}"] = steps.clone()  # safetensors refuses shared memory
                state |= {f"{key}/{name}": self._full(i, key) for key in ("exp_avg", "exp_avg_sq")}
        return {} if self._sharded and dist.get_rank() > 0 else state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Restores a state; device, dtype, number of ranks and offloading may differ from when it was saved.

        Args:
            state: from `state_dict`.

        Raises:
            ValueError: it belongs to a model with other parameters.
        """
        saved = {key.removeprefix("master/"): t.shape for key, t in state.items() if key.startswith("master/")}
        own = {name: param.shape for name, param in zip(self.names, self.params, strict=True)}
        if saved != own:
            odd = sorted(name for name in saved.keys() | own.keys() if saved.get(name) != own.get(name))
            raise ValueError(
                f"optimizer state of another model: {len(saved)} parameters saved, {len(own)} to train, "
                f"{odd[:3]} differ; resume with the policy_model of the run"
            )
        steps = state.get(f"step/{self.names[0]}", torch.zeros(()))  # the same for all; absent before the first step
        for key in self._state:
            for i, name in enumerate(self.names):
                if key == "master" or steps > 0:
                    self._state_of(key, i).copy_(self._shard(i, state[f"{key}/{name}"]))
                else:
                    self._state_of(key, i).zero_()
        for i, master in enumerate(self.masters):
            self._local(i).copy_(master)
        self._steps.copy_(steps)
        for kept in (self._loss, self._norm, self._overflows):
            kept.zero_()
        self._losses.clear()
        loss_scale, good_steps = state["loss_scale"].tolist()
        if self._scales_loss and loss_scale > 1.0:  # 1: saved without fp16, so keep the initial scale
            self._scale.fill_(loss_scale)
            self._good_steps.fill_(int(good_steps) % GOOD_STEPS)

    def _sum_losses(self) -> torch.Tensor:
        """Losses passed to `scale` since the last step, summed over micro-batches and ranks."""
        losses = [loss.to(self._device, torch.float32, non_blocking=True).reshape(()) for loss in self._losses]
        self._losses.clear()
        total = torch.stack([torch.zeros_like(self._loss), *losses]).sum()
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(total)
        return total

    def _grad_norm(self) -> torch.Tensor:
        """Gradient norm, summed in fp32 and without the loss scale; a missing gradient counts as zero."""
        grads = [_to_local(p.grad) for p in self.params if p.grad is not None]
        grads = [grad for grad in grads if grad.numel()]
        norms = torch._foreach_norm(grads, 2, dtype=torch.float32) if grads else [torch.zeros_like(self._norm)]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        if self._sharded:
            dist.all_reduce(squares := norm**2)
            norm = squares.sqrt()
        return norm / self._scale

    def _fp32_grads(self, bucket: list[tuple[int, int, int]], masters: list[torch.Tensor]) -> list[torch.Tensor]:
        """Gradients of a bucket for the kernel: fp32, with the strides of the masters, zeros if there is none."""
        grads, casts = [], []
        for (i, start, end), master in zip(bucket, masters, strict=True):
            local, grad = self._local(i), self.params[i].grad
            if grad is None:
                grads.append(torch.zeros_like(master))
                continue
            grad = _to_local(grad)
            if grad.stride() != local.stride():  # the kernel ignores strides
                grad = torch.empty_like(local, dtype=grad.dtype).copy_(grad)
            grads.append(_flat_slice(grad, start, end))
            if grad.dtype != torch.float32:
                casts.append((torch.empty_like(master), grads.pop()))
                grads.append(casts[-1][0])
        if casts:
            torch._foreach_copy_([cast for cast, _ in casts], [grad for _, grad in casts])
        return grads

    def _resident(self) -> Iterator[list[list[torch.Tensor]]]:
        """Masters, means and variances of each bucket, on the device where they are stored."""
        for bucket in self._buckets:
            yield [[_flat_slice(self._state_of(key, i), a, b) for i, a, b in bucket] for key in self._state]

    def _streamed(self) -> Iterator[list[list[torch.Tensor]]]:
        """The same on the GPU, streamed: while a bucket is updated, the next one arrives and the last one leaves."""
        if self._device.type != "cuda":
            yield from self._resident()
            return
        compute = torch.cuda.current_stream(self._device)
        upload, download = torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)
        host, downloaded = list(self._resident()), []

        def fetch(k: int) -> tuple[list[list[torch.Tensor]], torch.cuda.Event]:
            if k >= 2:
                downloaded[k - 2].synchronize()  # or all buckets would be on the GPU at once
            with torch.cuda.stream(upload):
                on_gpu = [[x.to(self._device, non_blocking=True) for x in xs] for xs in host[k]]
                return on_gpu, upload.record_event()

        following = fetch(0)
        for k, on_host in enumerate(host):
            on_gpu, uploaded = following
            if k + 1 < len(host):
                following = fetch(k + 1)
            compute.wait_event(uploaded)
            yield on_gpu
            download.wait_stream(compute)
            with torch.cuda.stream(download):
                for targets, values in zip(on_host, on_gpu, strict=True):
                    for target, value in zip(targets, values, strict=True):
                        if target.data_ptr() != value.data_ptr():  # fp32 parameters are on the GPU
                            target.copy_(value, non_blocking=True)
                        value.record_stream(download)
                        value.record_stream(compute)
                downloaded.append(download.record_event())
        torch.cuda.synchronize(self._device)  # before the CPU reads the state

    def _reserve_host(self) -> None:
        """Makes the state views of one CPU buffer, which is allocated once, with the strides of the parameters."""
        slots = self._slots()
        if self._host is None:
            self._host = host_memory(sum(self._local(i).numel() for _, i in slots), self._device)
        start = 0
        for tensors, i in slots:
            local = self._local(i)
            tensors[i] = self._host.as_strided(local.shape, local.stride(), start)
            start += tensors[i].numel()
        self.offloaded = True

    def _slots(self) -> list[tuple[list[torch.Tensor | None], int]]:
        """List and index of every tensor of the state; not of fp32 parameters, which are no copies."""
        every = range(len(self.params))
        return [(ts, i) for key, ts in self._state.items() for i in every if key != "master" or i not in self._fp32]

    def _local(self, i: int) -> torch.Tensor:
        """Parameter i, or this rank's shard of it; not cached, since an `Offloader` may move it."""
        return _to_local(self.params[i].detach())

    def _state_of(self, key: str, i: int) -> torch.Tensor:
        """The state of parameter i, or this rank's shard of it."""
        return self._local(i) if key == "master" and i in self._fp32 else self._state[key][i]

    def _full(self, i: int, key: str) -> torch.Tensor:
        """The full state of parameter i; a collective if it is sharded."""
        param, local = self.params[i], self._state_of(key, i)
        if not isinstance(param, DTensor):
            return local.detach()
        place = param.device_mesh, param.placements
        shape = dict(run_check=False, shape=param.shape, stride=param.stride())
        full = DTensor.from_local(local.to(self._device), *place, **shape).full_tensor()
        return full.cpu() if dist.get_rank() == 0 else full.new_empty(0)  # only rank 0 saves it

    def _shard(self, i: int, full: torch.Tensor) -> torch.Tensor:
        """Shards a full tensor like parameter i, and returns the shard of this rank."""
        param = self.params[i]
        if not isinstance(param, DTensor):
            return full
        full = full.to(self._device)
        return distribute_tensor(full, param.device_mesh, param.placements, src_data_rank=None).to_local()


def _to_local(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _flat_slice(x: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """Elements of a dense tensor in memory order, as a one-dimensional view."""
    return x.as_strided((end - start,), (1,), x.storage_offset() + start)


def _make_buckets(sizes: list[int], most: int) -> list[list[tuple[int, int, int]]]:
    """Divides parameters into buckets of at most `most` elements, which are updated together.

    Slices begin at multiples of ALIGNED, so that kernels are as fast on them and round like on the whole parameter.

    Returns:
        For each bucket: (number of the parameter, first element, last element + 1).
    """
    buckets, room = [], 0
    for i, size in enumerate(sizes):
        start = 0
        while start < size:
            if room < min(ALIGNED, size - start):
                buckets.append([])
                room = most
            end = size if size - start <= room else start + room // ALIGNED * ALIGNED
            buckets[-1].append((i, start, end))
            room -= end - start
            start = end
    return buckets
