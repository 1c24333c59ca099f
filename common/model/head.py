"""The output head: logits, and log-probabilities of tokens without materialising all logits.

Logits are computed in chunks of CHUNK_TOKENS tokens. Two autograd functions differ in when the
gradient is computed: `_RecomputedHead` computes the logits again in backward; `_FrozenHead`
finishes with them in forward.

Dims: b rows, H hidden size, V vocabulary, N tokens, n of them in one chunk.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn import functional as F

from common.base.checks import require
from common.model import agreement
from common.model.modes import eval_mode

CHUNK_TOKENS = 1024  # tokens projected to the vocabulary at once: 0.6 GiB of fp32 logits at V = 151,936
SUPPRESSED_LOGIT = -1e9  # probability 0 at any temperature, and its square is still finite
SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")  # in configs
SCALES = (  # in configs
    "logits_scaling", "logit_scale", "lm_head_multiplier", "output_multiplier", "logits_mup_width_multiplier",
)  # fmt: skip
_scales: WeakKeyDictionary[nn.Module, float] = WeakKeyDictionary()
LARGEST_GRADIENT = 2.0**14  # gradients of logits are scaled to this maximum: fp16 holds 6e-8 to 65,504


def vocabulary_logits(model: nn.Module, hidden: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    """Next-token logits in fp32; not differentiable in half precision on a GPU.

    Rounding the logits to bf16 alone would move a sequence's ratio by more than GSPO's clip range.

    Args:
        model: a transformers causal language model.
        hidden: [b, H], last hidden states.
        weight: the result of `wide_weight`, to cast the weight once for many calls.

    Returns:
        [b, V] fp32.
    """
    head = model.get_output_embeddings()
    weight = head.weight if weight is None else weight
    return project(scaled(model, hidden), weight, getattr(head, "bias", None), softcap_of(model))


def scaled(model: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Hidden states whose product with the head's weight are the model's logits.

    Args:
        model: a transformers causal language model.
        hidden: [..., H], last hidden states.
    """
    return hidden if (scale := scale_of(model)) == 1 else hidden * scale


def wide_weight(model: nn.Module) -> torch.Tensor | None:
    """The head's weight in fp32 for `vocabulary_logits`; None if that needs no cast.

    Args:
        model: a transformers causal language model.
    """
    weight = model.get_output_embeddings().weight
    return None if on_tensor_cores(weight) else weight.float()


def token_logps(
    model: nn.Module,
    hidden: torch.Tensor,
    ids: torch.Tensor,
    temperature: float,
    compile: bool = False,
    train_entropy: bool = False,
    suppressed_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability and entropy of tokens.

    Args:
        model: a transformers causal language model.
        hidden: [N, H], the hidden states that predict the tokens.
        ids: [N] int64.
        temperature: divides the logits.
        compile: compile everything but the matrix products.
        train_entropy: make the entropy differentiable.
        suppressed_ids: int64, tokens with probability 0; `ids` must hold none of them.

    Returns:
        [N] and [N] fp32, nats.
    """
    output = model.get_output_embeddings()
    head = output.weight, output.bias
    options = temperature, softcap_of(model), compile, train_entropy, suppressed_ids
    return logps_from_weight(scaled(model, hidden), *head, ids, *options)


def logps_from_weight(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    bias_V: torch.Tensor | None,
    ids_N: torch.Tensor,
    temperature: float,
    softcap: float | None,
    compile: bool,
    train_entropy: bool = False,
    suppressed_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`token_logps` for the weight and bias of a head."""
    steps = _ChunkSteps(temperature, softcap, compile, train_entropy, suppressed_ids)
    head_is_frozen = not (weight_VH.requires_grad or (bias_V is not None and bias_V.requires_grad))
    use_frozen = head_is_frozen and hidden_NH.requires_grad and not train_entropy
    return (_FrozenHead if use_frozen else _RecomputedHead).apply(hidden_NH, weight_VH, bias_V, ids_N, steps)


def scale_of(model: nn.Module) -> float:
    """The factor between a linear head and a model's logits, 1.0 for most; measured once per model.

    Families give it different names, and some multiply where others divide, so it is the number in
    the config that four tokens agree with.

    Args:
        model: a transformers causal language model.

    Raises:
        ValueError: no number in the config agrees.
    """
    if model not in _scales:
        _scales[model] = _measure_scale(model)
    return _scales[model]


@torch.no_grad()
def _measure_scale(model: nn.Module) -> float:
    config = model.config.get_text_config()
    given = {name: getattr(config, name, None) for name in SCALES}
    values = [float(value) for value in given.values() if isinstance(value, (int, float)) and value not in (0, 1)]
    if not values or softcap_of(model) is not None:
        return 1.0
    ids, head = torch.tensor([[1, 2, 3, 4]], device=model.device), model.get_output_embeddings()
    with eval_mode(model), torch.compiler.set_stance("force_eager"):
        own = model(input_ids=ids, use_cache=False).logits[0].float().to(head.weight.device)  # a model may be spread
        hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[0].to(head.weight.device)
    linear = project(hidden, operand(head.weight), head.bias, None)
    measured = ((own * linear).sum() / (linear * linear).sum()).item()
    candidates = [1.0, *values, *(1 / value for value in values)]
    nearest = min(candidates, key=lambda scale: abs(scale - measured))
    require(
        abs(nearest - measured) <= 0.02 * abs(measured),
        f"{type(model).__name__}: its logits are {measured:.4g} times those of a linear head",
        f"must be 1, or one of {given} in its config or its inverse",
        "use another model",
    )
    return nearest


def softcap_of(model: nn.Module) -> float | None:
    """The tanh soft cap on a model's logits, if it has one."""
    config = model.config.get_text_config()
    return next((cap for name in SOFT_CAPS if (cap := getattr(config, name, None))), None)


def on_tensor_cores(x: torch.Tensor) -> bool:
    """Whether products of this tensor can be returned in fp32 without casting it first."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Matrix product with fp32 output."""
    if on_tensor_cores(a) and a.dtype == b.dtype:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a.float(), b.float())


def add_mm(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Adds a @ b to `total` in fp32: partial sums rounded to bf16 would bias the gradient."""
    if on_tensor_cores(a) and a.dtype == b.dtype:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(a.float(), b.float())


def operand(weight: torch.Tensor) -> torch.Tensor:
    """The weight in the dtype that `mm` multiplies in: cast once, not for every chunk."""
    return weight if on_tensor_cores(weight) else weight.float()


def project(
    hidden_nH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None, softcap: float | None
) -> torch.Tensor:
    """Logits [n, V] in fp32; a weight from `operand` is not cast again."""
    logits_nV = mm(hidden_nH, weight_VH.t())
    if bias_V is not None:
        logits_nV += bias_V
    return logits_nV if softcap is None else logits_nV.div_(softcap).tanh_().mul_(softcap)


# `_stats` and `_logit_gradient` are compiled on a GPU: then each reads the logits once or twice and
# writes no matrix but its result. Uncompiled, their in-place operations save memory; they change no
# argument.


def _stats(logits_nV: torch.Tensor, ids_n: torch.Tensor, temperature: float) -> tuple[torch.Tensor, ...]:
    """Log-probability, entropy, and log of the softmax's denominator, [n] each."""
    scaled_nV = logits_nV / temperature
    top_n1 = scaled_nV.amax(-1, keepdim=True)
    ids_n1 = ids_n[:, None]
    token_n1 = scaled_nV.gather(-1, ids_n1) - top_n1
    weights_nV = scaled_nV.sub_(top_n1).exp_()
    # both sums in one pass over the logits: with weights w and total W, entropy is
    # log W - sum(w log w) / W
    total_n1 = weights_nV.sum(-1, keepdim=True)
    spread_n1 = torch.special.entr(weights_nV).sum(-1, keepdim=True)  # entr(0) is 0
    log_n1 = total_n1.log()
    return tuple(x.squeeze(-1) for x in (token_n1 - log_n1, log_n1 + spread_n1 / total_n1, log_n1 + top_n1))


def _logit_gradient(
    logits_nV, temperature, softcap, dtype, ids_n, lse_n, factor_n, entropy_n=None, entropy_factor_n=None
) -> torch.Tensor:
    """Gradient with respect to the logits before the soft cap, [n, V].

    `factor_n` is the incoming gradient of the log-probability divided by the temperature,
    `entropy_factor_n` that of the entropy H. With respect to a scaled logit, the log-probability
    has the derivative 1 - p for the token itself and -p for any other; the entropy has -p (log p +
    H).
    """
    probs_nV = (logits_nV / temperature).sub_(lse_n[:, None]).exp_()
    change_nV = None
    if entropy_n is not None:
        change_nV = torch.special.entr(probs_nV).sub_(probs_nV * entropy_n[:, None]).mul_(entropy_factor_n[:, None])
    # the one is added before rounding to half precision, where 1 - p would vanish for likely tokens
    is_token_nV = torch.arange(logits_nV.shape[-1], device=ids_n.device) == ids_n[:, None]
    grad_nV = probs_nV.neg_().add_(is_token_nV).mul_(factor_n[:, None])
    if change_nV is not None:
        grad_nV = grad_nV.add_(change_nV)
    if softcap is not None:
        grad_nV = grad_nV.mul_(1 - (logits_nV / softcap) ** 2)
    return grad_nV.to(dtype)


@functools.cache
def kernel(function: Callable, compile: bool) -> Callable:
    """The function, compiled for any number of tokens if asked for, once per process."""
    return torch.compile(function, dynamic=True) if compile else function


@dataclasses.dataclass(frozen=True)
class _ChunkSteps:
    """What both autograd functions compute for one chunk, and the options for it."""

    temperature: float
    softcap: float | None
    compile: bool
    train_entropy: bool
    suppressed_ids: torch.Tensor | None

    def logits(self, hidden_nH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None) -> torch.Tensor:
        logits_nV = project(hidden_nH, weight_VH, bias_V, self.softcap)
        ids = self.suppressed_ids
        return logits_nV if ids is None else logits_nV.index_fill_(-1, ids, SUPPRESSED_LOGIT)

    def stats(self, logits_nV: torch.Tensor, ids_n: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return kernel(_stats, self.compile)(logits_nV, ids_n, self.temperature)

    def logit_gradient(self, logits_nV: torch.Tensor, dtype: torch.dtype, *per_token: torch.Tensor) -> torch.Tensor:
        return kernel(_logit_gradient, self.compile)(logits_nV, self.temperature, self.softcap, dtype, *per_token)


class _RecomputedHead(torch.autograd.Function):
    """Log-probability and entropy; backward computes the logits again.

    Used when the head or the entropy is trained, and where no gradients are needed.
    """

    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, bias_V, ids_N, steps):
        operand_VH = operand(weight_VH)
        stats = [
            steps.stats(steps.logits(hidden_nH, operand_VH, bias_V), ids_n)
            for hidden_nH, ids_n in chunks(hidden_NH, ids_N)
        ]
        logps_N, entropy_N, lse_N = (torch.cat(parts) for parts in zip(*stats, strict=True))
        ctx.steps = steps
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, ids_N, lse_N, entropy_N if steps.train_entropy else None)
        if not steps.train_entropy:
            ctx.mark_non_differentiable(entropy_N)
        return logps_N, entropy_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_N, entropy_grad_N):
        hidden_NH, weight_VH, bias_V, ids_N, lse_N, entropy_N = ctx.saved_tensors
        steps = ctx.steps
        factor_N = grad_N / steps.temperature
        largest_N = factor_N.abs()
        if steps.train_entropy:
            entropy_factor_N = entropy_grad_N / steps.temperature
            largest_N = torch.maximum(largest_N, 4 * entropy_factor_N.abs())  # p (log p + H) < 4 in any vocabulary
        # scales the maximum to LARGEST_GRADIENT, whatever the scale of the loss: fp16 neither
        # overflows nor underflows
        unit = F.pad(largest_N, (0, 1), value=1e-30).amax() / LARGEST_GRADIENT
        per_token = [ids_N, lse_N, factor_N / unit]
        if steps.train_entropy:
            per_token += [entropy_N, entropy_factor_N / unit]

        operand_VH = operand(weight_VH)
        train_weight, train_bias = ctx.needs_input_grad[1:3]
        grad_hidden = []
        grad_VH = torch.zeros_like(weight_VH, dtype=torch.float32) if train_weight else None
        grad_V = torch.zeros_like(bias_V, dtype=torch.float32) if train_bias else None
        for hidden_nH, *per_token_n in chunks(hidden_NH, *per_token):
            logits_nV = steps.logits(hidden_nH, operand_VH, bias_V)
            grad_nV = steps.logit_gradient(logits_nV, operand_VH.dtype, *per_token_n)
            del logits_nV  # frees a chunk of logits before the products
            grad_hidden.append(mm(grad_nV, operand_VH).mul_(unit).to(hidden_NH.dtype))
            if train_weight:
                add_mm(grad_VH, grad_nV.t(), hidden_nH)
            if train_bias:
                grad_V += grad_nV.sum(0, dtype=torch.float32)
            del grad_nV  # frees it before the next chunk
        grad_weight = grad_VH.mul_(unit).to(weight_VH.dtype) if train_weight else None
        grad_bias = (grad_V * unit).to(bias_V.dtype) if train_bias else None
        return torch.cat(grad_hidden), grad_weight, grad_bias, None, None


class _FrozenHead(torch.autograd.Function):
    """Log-probability and entropy if only hidden states need gradients (LoRA); computes logits once.

    The gradient of a token's log-probability with respect to its hidden state depends on backward
    only by a factor, so forward computes the rest: [N, H] are kept, and no logits.
    """

    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, bias_V, ids_N, steps):
        operand_VH = operand(weight_VH)
        stats, jacobian = [], []
        for hidden_nH, ids_n in chunks(hidden_NH, ids_N):
            logits_nV = steps.logits(hidden_nH, operand_VH, bias_V)
            stats.append(steps.stats(logits_nV, ids_n))
            lse_n = stats[-1][2]
            factor_n = torch.full_like(lse_n, LARGEST_GRADIENT)
            grad_nV = steps.logit_gradient(logits_nV, operand_VH.dtype, ids_n, lse_n, factor_n)
            jacobian_nH = mm(grad_nV, operand_VH).div_(LARGEST_GRADIENT * steps.temperature).to(hidden_NH.dtype)
            jacobian.append(jacobian_nH)
            del logits_nV, grad_nV  # frees both before the next chunk
        logps_N, entropy_N, _ = (torch.cat(parts) for parts in zip(*stats, strict=True))
        ctx.save_for_backward(torch.cat(jacobian))
        ctx.mark_non_differentiable(entropy_N)
        return logps_N, entropy_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_N, entropy_grad_N):
        (jacobian_NH,) = ctx.saved_tensors
        return (jacobian_NH * grad_N[:, None]).to(jacobian_NH.dtype), None, None, None, None


def chunks(*tensors_N: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Splits into equal parts of at most CHUNK_TOKENS tokens; no tokens give one empty part."""
    count = -(-len(tensors_N[0]) // CHUNK_TOKENS) or 1
    for parts in zip(*(tensor_N.chunk(count) for tensor_N in tensors_N), strict=True):
        # copies: torch.compile also guards on the base of a view, and would compile again for
        # several parts
        yield tuple(part.clone() for part in parts)


@torch.no_grad()
def check(model: nn.Module) -> None:
    """Compares `vocabulary_logits` with the model's own logits on four tokens.

    Args:
        model: a transformers causal language model.

    Raises:
        ValueError: the model does more than a linear head between hidden states and logits, such as
            scaling, so that log-probabilities computed here would be wrong.
    """
    ids = torch.arange(4, device=model.device)[None] + 1
    with eval_mode(model):
        own = model(input_ids=ids, use_cache=False).logits[0].float()
        (hidden,) = agreement.plain_states(model, ids.tolist())
    weight = model.get_output_embeddings().weight
    ours = vocabulary_logits(model, hidden.to(weight.device)).to(own.device)
    if own.shape != ours.shape:
        raise ValueError(
            f"{type(model).__name__}: it gives {own.shape[-1]} logits, but its head has {ours.shape[-1]} outputs, so "
            "that log-probabilities would be wrong; use another model"
        )
    error, size = (own - ours).abs().max().item(), own.abs().max().item()
    tolerance = 0.02 if weight.dtype.itemsize < 4 else 1e-3  # a soft cap of 30 moves a logit of 3 by 1e-2
    if not error <= tolerance * size + 1e-4:  # true for NaN
        raise ValueError(
            f"{type(model).__name__}: its logits differ by {error:.3g} (of {size:.3g}) from a linear head over its "
            "last hidden states, which is what the log-probabilities are computed from; use another model, or teach "
            "common/model/head.py what this head does"
        )
