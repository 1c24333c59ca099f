"""AdamW that keeps fp32 master weights for parameters in bf16 or fp16."""

import torch
from torch import nn


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
            model: the unwrapped model; parameter names become the names in a checkpoint.
            learning_rate: can be changed before each step through the attribute of that name.
            betas: decay of the running mean and variance.
            weight_decay: decoupled, applied to every parameter.
        """
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.names = [name for name, _ in named]
        self.params = [p for _, p in named]
        self.learning_rate = learning_rate
        self.masters = [p if p.dtype == torch.float32 else p.detach().float() for p in self.params]
        self._inner = torch.optim.AdamW(self.masters, lr=learning_rate, betas=betas, weight_decay=weight_decay)
        # fp16 gradients below 6e-8 vanish: the loss is scaled up, and the scale finds its own size
        half = any(p.dtype == torch.float16 for p in self.params)
        self.loss_scale = 2.0**16 if half else 1.0
        self._dynamic, self._good_steps = half, 0

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call backward() on: multiplied by the loss scale, which is 1 except in fp16."""
        return loss * self.loss_scale

    @torch.no_grad()
    def step(self, max_grad_norm: float) -> float:
        """Clips the gradient, takes one step, and clears the gradients.

        Args:
            max_grad_norm: the global gradient norm is scaled down to this.

        Returns:
            Gradient norm before clipping; infinity where an fp16 overflow made it skip the step and halve the scale.

        Raises:
            FloatingPointError: the gradient is not finite; weights and state are untouched.
        """
        for param, master in zip(self.params, self.masters, strict=True):
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            master.grad = grad.float() / self.loss_scale if self._dynamic else grad.float()
        norm = torch.nn.utils.get_total_norm([m.grad for m in self.masters])
        grad_norm = norm.item()
        finite = grad_norm - grad_norm == 0.0  # inf - inf and nan - nan are nan
        if not finite and not self._dynamic:
            raise FloatingPointError(f"gradient norm is {grad_norm}: the step was not taken, the weights are unchanged")
        if finite:
            torch.nn.utils.clip_grads_with_norm_(self.masters, max_grad_norm, norm)
            for group in self._inner.param_groups:
                group["lr"] = self.learning_rate
            self._inner.step()
            lowered = [(p, m) for p, m in zip(self.params, self.masters, strict=True) if p is not m]
            if lowered:
                torch._foreach_copy_([p for p, _ in lowered], [m for _, m in lowered])
        self._adapt_scale(finite)
        for param, master in zip(self.params, self.masters, strict=True):
            param.grad = master.grad = None
        return grad_norm if finite else float("inf")

    def _adapt_scale(self, finite: bool) -> None:
        if not self._dynamic:
            return
        self._good_steps = self._good_steps + 1 if finite else 0
        if not finite:
            self.loss_scale /= 2
            if self.loss_scale < 1.0:
                raise FloatingPointError("fp16 gradients overflow at every loss scale: use dtype bf16 or fp32")
        elif self._good_steps % 1000 == 0:
            self.loss_scale *= 2

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Masters and Adam state by parameter name, a flat dict of tensors."""
        state = {"loss_scale": torch.tensor([self.loss_scale, float(self._good_steps)], dtype=torch.float64)}
        for name, master in zip(self.names, self.masters, strict=True):
            state[f"master/{name}"] = master.detach()
            for key, value in self._inner.state.get(master, {}).items():
                state[f"{key}/{name}"] = value
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Restores what `state_dict` gave; also after a change of device or dtype.

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
        for name, param, master in zip(self.names, self.params, self.masters, strict=True):
            master.copy_(state[f"master/{name}"])
            param.copy_(master)
            if f"step/{name}" in state:  # absent before the first step
                moments = {key: state[f"{key}/{name}"].to(master.device).clone() for key in ("exp_avg", "exp_avg_sq")}
                self._inner.state[master] = {"step": state[f"step/{name}"].clone(), **moments}
        loss_scale, good_steps = state["loss_scale"].tolist()
        if self._dynamic and loss_scale > 1.0:  # 1 was saved without fp16: the fresh scale stays
            self.loss_scale, self._good_steps = loss_scale, int(good_steps)
