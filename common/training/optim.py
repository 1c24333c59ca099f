"""AdamW that keeps fp32 master weights for parameters in bf16 or fp16, and steps without waiting for the GPU.

Its state (masters and moments, 12 bytes per bf16 parameter) can wait in CPU memory while completions are sampled, or
live there for good: then a step streams it through the GPU a bucket at a time. Of parameters that FSDP2 has sharded,
each rank keeps and updates its own part.
"""

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from common.base.devices import host_memory

BUCKET_ELEMENTS = 2**26  # gradients in bf16 or fp16 are cast to fp32 this many at a time (256 MiB)
STREAM_ELEMENTS = 2**24  # of a state in CPU memory this many are on the GPU at once (192 MiB), three times over
ALIGNED = 64  # elements
OFFLOAD = ("none", "rollout", "always")
FIRST_LOSS_SCALE, GOOD_STEPS = 2.0**16, 1000  # fp16: halved at every overflow, doubled after so many good steps


def warmup(step: int, warmup_steps: int) -> float:
    """Factor of the learning rate: linear warm-up, then constant.

    Args:
        step: rollout step, from 1.
        warmup_steps: steps until the factor is 1; 0 for none.

    Returns:
        A number in (0, 1].
    """
    return min(1.0, step / max(1, warmup_steps))


class AdamW:
    """AdamW over fp32 master weights.

    A bf16 weight of 0.02 cannot move by less than 6e-5, sixty times an update at learning rate 1e-6: without masters,
    training at RL learning rates is rounded away.

    Attributes:
        params: the parameters trained; of a model that FSDP2 has sharded, distributed tensors.
        learning_rate: of the next step.
        offloaded: whether the state is in CPU memory.
    """

    def __init__(
        self,
        model: nn.Module,
        learning_rate: float,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        offload: str = "none",
    ):
        """Sets up the state for every trainable parameter.

        Args:
            model: the unwrapped model, on one device; parameter names become the names in a checkpoint.
            learning_rate: can be changed before each step through the attribute of that name.
            betas: decay of the running mean and variance.
            weight_decay: decoupled, applied to every parameter.
            offload: where the state is: "none", on the parameters' device; "rollout", in CPU memory from `make_room` to
                the next step; "always", in CPU memory.

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
        self._plain = {i for i, p in enumerate(self.params) if p.dtype == torch.float32}  # are their own masters
        self._sharded = any(isinstance(p, DTensor) for p in self.params)
        self._device, self._host, self.offloaded, self._offload = self.params[0].device, None, False, offload
        self._state = {key: [None] * len(named) for key in ("master", "exp_avg", "exp_avg_sq")}  # keys of a checkpoint
        if offload == "none":
            for tensors, i in self._slots():
                tensors[i] = torch.empty_like(self._own(i), dtype=torch.float32)
        else:  # made there: on the GPU there may be no room, not even for a moment
            self._reserve_host()
        for tensors, i in self._slots():
            if tensors is self._state["master"]:
                tensors[i].copy_(self._own(i))
            else:
                tensors[i].zero_()
        elements = STREAM_ELEMENTS if offload == "always" else BUCKET_ELEMENTS
        self._buckets = _cut([self._own(i).numel() for i in range(len(named))], elements)
        # fp16 gradients below 6e-8 vanish: the loss is scaled up, and the scale finds its own size
        self._dynamic = any(p.dtype == torch.float16 for p in self.params)
        # what a step decides on stays on the device: to read it would make the host wait
        self._scale = torch.full((), FIRST_LOSS_SCALE if self._dynamic else 1.0, device=self._device)
        self._good_steps = torch.zeros((), dtype=torch.int32, device=self._device)
        self._steps = torch.zeros((), device=self._device)
        self._norm = torch.zeros((), device=self._device)  # of the last step; once not finite it stays, until check()
        self._loss = torch.zeros((), device=self._device)  # likewise, of all ranks
        self._losses: list[torch.Tensor] = []  # since the last step, each on its device: no GPU waits for another
        self._overflows = torch.zeros((), device=self._device)  # steps skipped in fp16, until check()

    @property
    def masters(self) -> list[torch.Tensor]:
        """The fp32 weights, this rank's part of each; of fp32 parameters their own memory."""
        return [self._get("master", i) for i in range(len(self.params))]

    @property
    def loss_scale(self) -> float:
        """What `scale` multiplies by; to read it waits for the GPU."""
        return self._scale.item()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call backward() on: multiplied by the loss scale, which is 1 except in fp16.

        It is remembered until the next step, which is skipped if the loss is not finite, whatever the gradient is.
        """
        self._losses.append(loss.detach())
        return loss * self._scale.to(loss.device, non_blocking=True) if self._dynamic else loss

    @torch.no_grad()
    def step(self, max_grad_norm: float) -> torch.Tensor:
        """Clips the gradient, takes one step, and clears the gradients; `onload`s first what is offloaded.

        The step is skipped where the gradient is not finite. In fp16 that halves the loss scale; in other dtypes all
        later steps are skipped too, until `check` reports it. A loss that is not finite, on any rank, has that effect
        in every dtype: no loss scale can help. A collective where there are several ranks.

        Args:
            max_grad_norm: the global gradient norm is scaled down to this; above 0, inf for never.

        Returns:
            0-dim fp32 on the parameters' device: gradient norm before clipping; inf or NaN where the step was skipped.
        """
        if self._offload != "always":
            self.onload()
        norm = self._grad_norm()
        self._loss = torch.where(self._loss.isfinite(), self._sum_losses(), self._loss)
        if self._dynamic:
            norm = norm.nan_to_num(math.inf, math.inf)
            self._overflows += 1.0 - norm.isfinite().float()
        else:
            norm = self._norm = torch.where(self._norm.isfinite(), norm, self._norm)
        # the kernel divides by grad_scale, does nothing if found_inf is exactly 1, and leaves it to us to count steps
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
            lowered = [(_piece(self._own(i), a, b), m) for (i, a, b), m in pairs if i not in self._plain]
            if lowered:
                torch._foreach_copy_([p for p, _ in lowered], [m for _, m in lowered])
            for i, _, end in bucket:
                if end == self._own(i).numel():
                    self.params[i].grad = None
        for param in self.params:  # those of which this rank has no part
            param.grad = None
        if self._dynamic:
            torch._amp_update_scale_(self._scale, self._good_steps, found_inf, 2.0, 0.5, GOOD_STEPS)
        return norm

    def check(self) -> int:
        """Reports the steps since the last call that failed; waits for the GPU, so once per rollout step is enough.

        Returns:
            Steps that were skipped since the last call because fp16 gradients overflowed.

        Raises:
            FloatingPointError: a loss or a gradient was not finite, and weights and state are those before that step;
                or, in fp16, not even a loss scale of 1 is small enough. Steps are taken again after it was raised.
        """
        loss, norm, scale, overflows = torch.stack([self._loss, self._norm, self._scale, self._overflows]).tolist()
        for kept in (self._loss, self._norm, self._overflows):
            kept.zero_()
        if math.isfinite(loss) and self._dynamic and scale < 1.0:
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

    def make_room(self) -> float:
        """Moves the state out of the way of a rollout, if the optimizer was told to.

        Returns:
            GiB moved.
        """
        return self.offload() if self._offload == "rollout" else 0.0

    @torch.no_grad()
    def offload(self) -> float:
        """Moves masters and Adam state to CPU memory, pinned if they are on a GPU; fp32 parameters stay.

        Returns:
            GiB moved.
        """
        if self.offloaded:
            return 0.0
        before = [(tensors[i], tensors, i) for tensors, i in self._slots()]
        self._reserve_host()
        for tensor, tensors, i in before:
            tensors[i].copy_(tensor, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # from here on the CPU may read the copies
        return self._host.nbytes / 2**30

    @torch.no_grad()
    def onload(self) -> None:
        """Moves back what `offload` moved, bit for bit."""
        if not self.offloaded:
            return
        for tensors, i in self._slots():  # later kernels wait for the copies, the host need not
            tensors[i] = tensors[i].to(self._device, non_blocking=True, copy=True)
        self.offloaded = False

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Masters and Adam state by parameter name, a flat dict of tensors, which later steps change.

        Of sharded parameters the whole tensors, in CPU memory of rank 0; a collective then, and empty on other ranks.
        """
        steps = self._steps.cpu()
        state = {"loss_scale": torch.tensor([self.loss_scale, self._good_steps.item()], dtype=torch.float64)}
        for i, name in enumerate(self.names):
            state[f"master/{name}"] = self._whole(i, "master")
            if steps > 0:
                state[f"step/{name}"] = steps.clone()  # safetensors refuses memory that is shared
                state |= {f"{key}/{name}": self._whole(i, key) for key in ("exp_avg", "exp_avg_sq")}
        return {} if self._sharded and dist.get_rank() > 0 else state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Restores what `state_dict` gave; also while offloaded, or with another device, dtype or number of ranks.

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
        steps = state.get(f"step/{self.names[0]}", torch.zeros(()))  # all have the same; absent before the first step
        for key in self._state:
            for i, name in enumerate(self.names):
                if key == "master" or steps > 0:
                    self._get(key, i).copy_(self._part(i, state[f"{key}/{name}"]))
                else:
                    self._get(key, i).zero_()
        for i, master in enumerate(self.masters):
            self._own(i).copy_(master)
        self._steps.copy_(steps)
        for kept in (self._loss, self._norm, self._overflows):
            kept.zero_()
        self._losses.clear()
        loss_scale, good_steps = state["loss_scale"].tolist()
        if self._dynamic and loss_scale > 1.0:  # 1 was saved without fp16: the fresh scale stays
            self._scale.fill_(loss_scale)
            self._good_steps.fill_(int(good_steps) % GOOD_STEPS)

    def _sum_losses(self) -> torch.Tensor:
        """What `scale` was called with since the last step, added up over micro-batches and ranks."""
        losses = [loss.to(self._device, torch.float32, non_blocking=True).reshape(()) for loss in self._losses]
        self._losses.clear()
        total = torch.stack([torch.zeros_like(self._loss), *losses]).sum()
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(total)
        return total

    def _grad_norm(self) -> torch.Tensor:
        """Norm of the gradient without the loss scale, summed in fp32; what has no gradient counts as zero."""
        grads = [_local(p.grad) for p in self.params if p.grad is not None]
        grads = [grad for grad in grads if grad.numel()]
        norms = torch._foreach_norm(grads, 2, dtype=torch.float32) if grads else [torch.zeros_like(self._norm)]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        if self._sharded:
            dist.all_reduce(squares := norm**2)
            norm = squares.sqrt()
        return norm / self._scale

    def _fp32_grads(self, bucket: list[tuple[int, int, int]], masters: list[torch.Tensor]) -> list[torch.Tensor]:
        """Gradients as the kernel needs them: fp32, laid out like the masters, and zero where there is none."""
        grads, casts = [], []
        for (i, start, end), master in zip(bucket, masters, strict=True):
            own, grad = self._own(i), self.params[i].grad
            if grad is None:
                grads.append(torch.zeros_like(master))
                continue
            grad = _local(grad)
            if grad.stride() != own.stride():  # the kernels do not look at strides
                grad = torch.empty_like(own, dtype=grad.dtype).copy_(grad)
            grads.append(_piece(grad, start, end))
            if grad.dtype != torch.float32:
                casts.append((torch.empty_like(master), grads.pop()))
                grads.append(casts[-1][0])
        if casts:
            torch._foreach_copy_([cast for cast, _ in casts], [grad for _, grad in casts])
        return grads

    def _resident(self) -> Iterator[list[list[torch.Tensor]]]:
        """Masters, means and variances of each bucket, where they are."""
        for bucket in self._buckets:
            yield [[_piece(self._get(key, i), a, b) for i, a, b in bucket] for key in self._state]

    def _streamed(self) -> Iterator[list[list[torch.Tensor]]]:
        """The same on the GPU, from CPU memory and back: the next one comes and the last one goes meanwhile."""
        if self._device.type != "cuda":
            yield from self._resident()
            return
        now, come, go = torch.cuda.current_stream(self._device), *(torch.cuda.Stream(self._device) for _ in range(2))
        places, gone = list(self._resident()), []

        def fetch(k: int) -> tuple[list[list[torch.Tensor]], torch.cuda.Event]:
            if k >= 2:
                gone[k - 2].synchronize()  # or all buckets would be on the GPU at once
            with torch.cuda.stream(come):
                there = [[x.to(self._device, non_blocking=True) for x in xs] for xs in places[k]]
                return there, come.record_event()

        ahead = fetch(0)
        for k, place in enumerate(places):
            there, came = ahead
            if k + 1 < len(places):
                ahead = fetch(k + 1)
            now.wait_event(came)
            yield there
            go.wait_stream(now)
            with torch.cuda.stream(go):
                for to, values in zip(place, there, strict=True):
                    for host, value in zip(to, values, strict=True):
                        if host.data_ptr() != value.data_ptr():  # fp32 parameters are on the GPU
                            host.copy_(value, non_blocking=True)
                        value.record_stream(go)
                        value.record_stream(now)
                gone.append(go.record_event())
        torch.cuda.synchronize(self._device)  # from here on the CPU may read the state

    def _reserve_host(self) -> None:
        """Gives every tensor of the state a place in CPU memory, made once, in the layout of its parameter."""
        slots = self._slots()
        if self._host is None:
            self._host = host_memory(sum(self._own(i).numel() for _, i in slots), self._device)
        start = 0
        for tensors, i in slots:
            own = self._own(i)
            tensors[i] = self._host.as_strided(own.shape, own.stride(), start)
            start += tensors[i].numel()
        self.offloaded = True

    def _slots(self) -> list[tuple[list[torch.Tensor | None], int]]:
        """Where the tensors stand that can be offloaded: all but the masters that are parameters."""
        every = range(len(self.params))
        return [(ts, i) for key, ts in self._state.items() for i in every if key != "master" or i not in self._plain]

    def _own(self, i: int) -> torch.Tensor:
        """The part of parameter i that this rank has, in its own memory; asked for anew, since that may have moved."""
        return _local(self.params[i].detach())

    def _get(self, key: str, i: int) -> torch.Tensor:
        """The part of the state of parameter i that this rank has."""
        return self._own(i) if key == "master" and i in self._plain else self._state[key][i]

    def _whole(self, i: int, key: str) -> torch.Tensor:
        """The state of parameter i, all of it; a collective if it is sharded."""
        param, own = self.params[i], self._get(key, i)
        if not isinstance(param, DTensor):
            return own.detach()
        place = param.device_mesh, param.placements
        shape = dict(run_check=False, shape=param.shape, stride=param.stride())
        whole = DTensor.from_local(own.to(self._device), *place, **shape).full_tensor()
        return whole.cpu() if dist.get_rank() == 0 else whole.new_empty(0)  # on other ranks it would only take memory

    def _part(self, i: int, whole: torch.Tensor) -> torch.Tensor:
        """What this rank has of the tensor that belongs to parameter i."""
        param = self.params[i]
        if not isinstance(param, DTensor):
            return whole
        whole = whole.to(self._device)
        return distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None).to_local()


def _local(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _piece(x: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """Elements of a dense tensor in the order of memory, as a view of one dimension."""
    return x.as_strided((end - start,), (1,), x.storage_offset() + start)


def _cut(sizes: list[int], most: int) -> list[list[tuple[int, int, int]]]:
    """Parameters by number, and pieces of them, that are updated together: number, first element, last one plus 1.

    Pieces begin at multiples of ALIGNED, so that kernels read them as fast, and round them as they would the whole.
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
