"""AdamW that keeps fp32 master weights for parameters in bf16 or fp16, and steps without waiting for the GPU."""

import math
import weakref

import torch
from torch import nn

BUCKET_ELEMENTS = 2**26  # gradients in bf16 or fp16 are cast to fp32 this many at a time (256 MiB), or one parameter
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
    """

    def __init__(
        self,
        model: nn.Module,
        learning_rate: float,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ):
        """Sets up the state for every trainable parameter.

        Args:
            model: the unwrapped model, on one device; parameter names become the names in a checkpoint.
            learning_rate: can be changed before each step through the attribute of that name.
            betas: decay of the running mean and variance.
            weight_decay: decoupled, applied to every parameter.

        Raises:
            ValueError: no parameter requires a gradient.
        """
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if not named:
            raise ValueError("0 parameters to train: at least one must have requires_grad")
        self.names = [name for name, _ in named]
        self.params = [p for _, p in named]
        self.learning_rate = learning_rate
        self._rule = dict(beta1=betas[0], beta2=betas[1], weight_decay=weight_decay, eps=1e-8, amsgrad=False)
        self.masters = [p if p.dtype == torch.float32 else p.detach().float() for p in self.params]
        means, variances = ([torch.zeros_like(master.detach()) for master in self.masters] for _ in range(2))
        self._state = {"master": self.masters, "exp_avg": means, "exp_avg_sq": variances}  # keys of a checkpoint
        self._buckets, room = [], 0  # numbers of the parameters that are updated together
        for i, param in enumerate(self.params):
            if param.numel() > room:
                self._buckets.append([])
                room = BUCKET_ELEMENTS
            self._buckets[-1].append(i)
            room -= param.numel()
        self._device, self._host, self.offloaded = self.params[0].device, None, False
        # fp16 gradients below 6e-8 vanish: the loss is scaled up, and the scale finds its own size
        self._dynamic = any(p.dtype == torch.float16 for p in self.params)
        # what a step decides on stays on the device: to read it would make the host wait
        self._scale = torch.full((), FIRST_LOSS_SCALE if self._dynamic else 1.0, device=self._device)
        self._good_steps = torch.zeros((), dtype=torch.int32, device=self._device)
        self._steps = torch.zeros((), device=self._device)
        self._norm = torch.zeros((), device=self._device)  # of the last step; once not finite it stays, until check()

    @property
    def loss_scale(self) -> float:
        """What `scale` multiplies by; to read it waits for the GPU."""
        return self._scale.item()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call backward() on: multiplied by the loss scale, which is 1 except in fp16."""
        return loss * self._scale if self._dynamic else loss

    @torch.no_grad()
    def step(self, max_grad_norm: float) -> torch.Tensor:
        """Clips the gradient, takes one step, and clears the gradients; `onload`s first what is offloaded.

        The step is skipped where the gradient is not finite. In fp16 that halves the loss scale; in other dtypes all
        later steps are skipped too, until `check` reports it.

        Args:
            max_grad_norm: the global gradient norm is scaled down to this; above 0, inf for never.

        Returns:
            0-dim fp32 on the parameters' device: gradient norm before clipping; inf or NaN where the step was skipped.
        """
        self.onload()
        norm = self._grad_norm()
        if self._dynamic:
            norm = norm.nan_to_num(math.inf, math.inf)
        else:
            norm = self._norm = torch.where(self._norm.isfinite(), norm, self._norm)
        # the kernel divides by grad_scale, does nothing if found_inf is exactly 1, and leaves it to us to count steps
        found_inf = 1.0 - norm.isfinite().float()
        grad_scale = self._scale * (norm / max_grad_norm).clamp(min=1.0)
        self._steps += 1.0 - found_inf
        for bucket in self._buckets:
            params = [self.params[i] for i in bucket]
            masters, means, variances = ([tensors[i] for i in bucket] for tensors in self._state.values())
            torch._fused_adamw_(
                masters, _fp32_grads(params, masters), means, variances, [], [self._steps] * len(bucket),
                lr=self.learning_rate, grad_scale=grad_scale, found_inf=found_inf, maximize=False, **self._rule,
            )  # fmt: skip
            lowered = [(p, m) for p, m in zip(params, masters, strict=True) if p is not m]
            if lowered:
                torch._foreach_copy_([p for p, _ in lowered], [m for _, m in lowered])
            for param in params:
                param.grad = None
        if self._dynamic:
            torch._amp_update_scale_(self._scale, self._good_steps, found_inf, 2.0, 0.5, GOOD_STEPS)
        return norm

    def check(self) -> None:
        """Reports the steps since the last call that failed; waits for the GPU, so once per rollout step is enough.

        Raises:
            FloatingPointError: a gradient was not finite, and weights and state are those before that step; or, in
                fp16, not even a loss scale of 1 is small enough. Steps are taken again after it was raised.
        """
        value = self._scale.item() if self._dynamic else self._norm.item()
        if self._dynamic and value < 1.0:
            raise FloatingPointError(
                f"loss scale {value}: fp16 gradients overflow at every loss scale from 1 up; use dtype bf16 or fp32"
            )
        if not math.isfinite(value):
            self._norm.zero_()
            raise FloatingPointError(
                f"gradient norm is {value}, not finite: the step was not taken, the weights are unchanged since; "
                "resume from the last checkpoint with a lower learning_rate, or in dtype fp32"
            )

    @torch.no_grad()
    def offload(self) -> float:
        """Moves masters and Adam state to CPU memory, pinned if they are on a GPU; fp32 parameters stay.

        Returns:
            GiB moved.
        """
        if self.offloaded:
            return 0.0
        slots = self._slots()
        if self._host is None:
            self._host = host_memory(sum(tensors[i].numel() for tensors, i in slots), self._device)
        start = 0
        for tensors, i in slots:
            host = self._host.as_strided(tensors[i].shape, tensors[i].stride(), start)
            start += host.numel()
            tensors[i] = host.copy_(tensors[i], non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # from here on the CPU may read the copies
        self.offloaded = True
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
        """Masters and Adam state by parameter name, a flat dict of tensors, which later steps change."""
        steps = self._steps.cpu()
        state = {"loss_scale": torch.tensor([self.loss_scale, self._good_steps.item()], dtype=torch.float64)}
        for i, name in enumerate(self.names):
            state[f"master/{name}"] = self.masters[i].detach()
            if steps > 0:
                state[f"step/{name}"] = steps.clone()  # safetensors refuses memory that is shared
                state |= {f"{key}/{name}": self._state[key][i] for key in ("exp_avg", "exp_avg_sq")}
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Restores what `state_dict` gave; also after a change of device or dtype, and while offloaded.

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
        for key, tensors in self._state.items():
            for name, tensor in zip(self.names, tensors, strict=True):
                tensor.copy_(state[f"{key}/{name}"] if key == "master" or steps > 0 else torch.zeros(()))
        for param, master in zip(self.params, self.masters, strict=True):
            param.copy_(master)
        self._steps.copy_(steps)
        self._norm.zero_()
        loss_scale, good_steps = state["loss_scale"].tolist()
        if self._dynamic and loss_scale > 1.0:  # 1 was saved without fp16: the fresh scale stays
            self._scale.fill_(loss_scale)
            self._good_steps.fill_(int(good_steps) % GOOD_STEPS)

    def _grad_norm(self) -> torch.Tensor:
        """Norm of the gradient without the loss scale, summed in fp32; what has no gradient counts as zero."""
        grads = [p.grad for p in self.params if p.grad is not None]
        norms = torch._foreach_norm(grads, 2, dtype=torch.float32) if grads else [torch.zeros_like(self._norm)]
        return torch.linalg.vector_norm(torch.stack(norms)) / self._scale

    def _slots(self) -> list[tuple[list[torch.Tensor], int]]:
        """Where the tensors stand that can be offloaded: all but the masters that are parameters."""
        return [(ts, i) for ts in self._state.values() for i, p in enumerate(self.params) if ts[i] is not p]


def _fp32_grads(params: list[torch.Tensor], masters: list[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients as the kernel needs them: fp32, laid out like the masters, and zero where there is none."""
    grads, casts = [], []
    for param, master in zip(params, masters, strict=True):
        grad = torch.zeros_like(master) if param.grad is None else param.grad
        if grad.dtype != torch.float32 or grad.stride() != master.stride():  # the CPU kernel does not look at strides
            grad = torch.empty_like(master)
            casts.append((grad, param.grad))
        grads.append(grad)
    if casts:
        torch._foreach_copy_([cast for cast, _ in casts], [grad for _, grad in casts])
    return grads


def host_memory(elements: int, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A block of CPU memory for copies; pinned, and thus fast, where the device is a GPU.

    Args:
        elements: of the block.
        device: what it is copied from.
        dtype: of the elements.
    """
    block = torch.empty(elements, dtype=dtype)
    if device.type == "cuda" and elements:
        # pin_memory=True would round up to a power of two: 2.0 GiB became 4.0
        cudart = torch.cuda.cudart()
        torch.cuda.check_error(cudart.cudaHostRegister(block.data_ptr(), block.nbytes, 0))
        weakref.finalize(block, cudart.cudaHostUnregister, block.data_ptr())
    return block
