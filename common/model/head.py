"""The output head: logits, and log-probabilities of tokens without ever holding all logits.

Dims: b rows, H hidden size, V vocabulary, N tokens, n of them in one chunk.
"""

import functools
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn import functional as F

CHUNK_TOKENS = 1024  # tokens projected to the vocabulary at once: 0.6 GiB of fp32 logits at V = 151,936
NEVER = -1e9  # logit of a suppressed token: probability 0, at any temperature, and its square is still finite
LARGEST = 2.0**14  # gradients of logits are scaled to this size: fp16 holds 6e-8 to 65,504


def vocabulary_logits(model: nn.Module, hidden: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    """Next-token logits in fp32, whatever the dtype of the model; without gradient in half precision on a GPU.

    Rounding the logits to bf16 alone would move a sequence's ratio by more than GSPO's clip range.

    Args:
        model: a transformers causal language model.
        hidden: [b, H], last hidden states.
        weight: from `wide_weight`, if it was called before.

    Returns:
        [b, V] fp32.
    """
    head = model.get_output_embeddings()
    return project(hidden, head.weight if weight is None else weight, getattr(head, "bias", None), softcap_of(model))


def wide_weight(model: nn.Module) -> torch.Tensor | None:
    """The head's weight in fp32, for many calls of `vocabulary_logits`; None where those need no cast, on a GPU.

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
    """Log-probability and entropy of tokens, in fp32, a chunk of the logits at a time.

    Args:
        model: a transformers causal language model.
        hidden: [N, H], last hidden states before the tokens.
        ids: [N] int64.
        temperature: divides the logits.
        compile: compile what is not a matrix product.
        train_entropy: let gradients through the entropy too.
        suppressed_ids: int64, tokens of no probability, none of them among `ids`.

    Returns:
        [N] and [N] fp32, nats.
    """
    output = model.get_output_embeddings()
    options = temperature, softcap_of(model), compile, train_entropy, suppressed_ids
    return _Head.apply(hidden, output.weight, output.bias, ids, *options)


def softcap_of(model: nn.Module) -> float | None:
    """The bound that a model's tanh puts on its logits, if it has one."""
    return getattr(model.config, "final_logit_softcapping", None)


def on_tensor_cores(x: torch.Tensor) -> bool:
    """Whether products of half precision numbers can be exact, summed and returned in fp32, without fp32 copies."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[i, j] by [j, k], in fp32."""
    if on_tensor_cores(a) and a.dtype == b.dtype:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a.float(), b.float())


def add_mm(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Adds [i, j] by [j, k] to `total`, in fp32: partial sums rounded to bf16 would bias the gradient."""
    if on_tensor_cores(a) and a.dtype == b.dtype:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(a.float(), b.float())


def operand(weight: torch.Tensor) -> torch.Tensor:
    """The weight as `mm` takes it: where it has to be cast, that is done once and not for every chunk."""
    return weight if on_tensor_cores(weight) else weight.float()


def project(
    hidden_nH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None, softcap: float | None
) -> torch.Tensor:
    """Logits of n states in fp32.

    Args:
        hidden_nH: [n, H].
        weight_VH: [V, H], from `operand`.
        bias_V: [V] or None.
        softcap: as `softcap_of` gives it.

    Returns:
        [n, V] fp32.
    """
    logits_nV = mm(hidden_nH, weight_VH.t())
    if bias_V is not None:
        logits_nV += bias_V
    return logits_nV if softcap is None else logits_nV.div_(softcap).tanh_().mul_(softcap)


def _suppress(logits_nV: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
    """The same logits, with those of some tokens so low that they are never drawn."""
    return logits_nV if ids is None else logits_nV.index_fill_(-1, ids, NEVER)


# The next two functions are compiled where that pays: then they read the logits once or twice and write no matrix but
# their result. In-place operations change tensors of their own only; they save memory where nothing is compiled.


def _stats(logits_nV: torch.Tensor, ids_n: torch.Tensor, temperature: float) -> tuple[torch.Tensor, ...]:
    """Log-probability, entropy, and log of the softmax's denominator, [n] each."""
    scaled_nV = logits_nV / temperature
    top_n1 = scaled_nV.amax(-1, keepdim=True)
    ids_n1 = ids_n[:, None]
    token_n1 = scaled_nV.gather(-1, ids_n1) - top_n1
    weights_nV = scaled_nV.sub_(top_n1).exp_()
    # both sums in one pass over the logits: with weights w and total W, entropy is log W - sum(w log w) / W
    total_n1 = weights_nV.sum(-1, keepdim=True)
    spread_n1 = torch.special.entr(weights_nV).sum(-1, keepdim=True)  # entr(0) is 0
    log_n1 = total_n1.log()
    return tuple(x.squeeze(-1) for x in (token_n1 - log_n1, log_n1 + spread_n1 / total_n1, log_n1 + top_n1))


def _logit_gradient(
    logits_nV, ids_n, lse_n, factor_n, temperature, softcap, dtype, entropy_n=None, entropy_factor_n=None
) -> torch.Tensor:
    """Gradient with respect to the logits before the soft cap, [n, V].

    `factor` is the incoming gradient of logp, divided by the temperature, `entropy_factor` that of the entropy H: with
    respect to a scaled logit the one changes by 1 - p (or -p), the other by -p (log p + H).
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


class _Head(torch.autograd.Function):
    """Log-probability and entropy of N tokens from hidden states, a chunk of the logits at a time.

    The backward pass computes the logits again. With a frozen head (LoRA) it need not: the gradient of a token's
    log-probability then has the incoming gradient as a factor only, and the rest of it is made in the forward pass,
    unless the entropy is trained as well.
    """

    @staticmethod
    def forward(
        ctx, hidden_NH, weight_VH, bias_V, ids_N, temperature, softcap, compile, train_entropy=False, suppressed=None
    ):
        head_trained = weight_VH.requires_grad or (bias_V is not None and bias_V.requires_grad)
        ctx.frozen = hidden_NH.requires_grad and not head_trained and not train_entropy
        ctx.options = temperature, softcap, compile, suppressed
        operand_VH = operand(weight_VH)
        stats, jacobian = [], []
        for hidden_nH, ids_n in chunks(hidden_NH, ids_N):
            logits_nV = _suppress(project(hidden_nH, operand_VH, bias_V, softcap), suppressed)
            stats.append(kernel(_stats, compile)(logits_nV, ids_n, temperature))
            if ctx.frozen:
                args = ids_n, stats[-1][2], torch.full_like(stats[-1][2], LARGEST), temperature, softcap
                grad_nV = kernel(_logit_gradient, compile)(logits_nV, *args, operand_VH.dtype)
                jacobian.append(mm(grad_nV, operand_VH).div_(LARGEST * temperature).to(hidden_NH.dtype))
                del grad_nV
            del logits_nV  # or it would stand beside the next one
        logps_N, entropy_N, lse_N = (torch.cat(parts) for parts in zip(*stats, strict=True))
        if ctx.frozen:
            ctx.save_for_backward(torch.cat(jacobian))
        else:
            ctx.save_for_backward(hidden_NH, weight_VH, bias_V, ids_N, lse_N, *[entropy_N][:train_entropy])
        if not train_entropy:
            ctx.mark_non_differentiable(entropy_N)
        return logps_N, entropy_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_N, entropy_grad_N):
        if ctx.frozen:
            (jacobian_NH,) = ctx.saved_tensors
            return (jacobian_NH * grad_N[:, None]).to(jacobian_NH.dtype), *[None] * 8
        hidden_NH, weight_VH, bias_V, ids_N, lse_N, *entropy = ctx.saved_tensors
        temperature, softcap, compile, suppressed = ctx.options
        # the largest becomes LARGEST, whatever the loss is scaled by: fp16 neither overflows nor loses the small ones
        factor_N = grad_N / temperature
        largest_N = factor_N.abs()
        if entropy:  # with the factor of its gradient; p (log p + H) stays below 4 in any vocabulary
            entropy.append(entropy_grad_N / temperature)
            largest_N = torch.maximum(largest_N, 4 * entropy[1].abs())
        unit = F.pad(largest_N, (0, 1), value=1e-30).amax() / LARGEST
        factor_N, entropy[1:] = factor_N / unit, [x / unit for x in entropy[1:]]
        operand_VH = operand(weight_VH)
        train_weight = ctx.needs_input_grad[1]
        grad_hidden, grad_VH = [], torch.zeros_like(weight_VH, dtype=torch.float32) if train_weight else None
        grad_V = torch.zeros(len(weight_VH), device=weight_VH.device)
        for hidden_nH, ids_n, lse_n, factor_n, *entropy_n in chunks(hidden_NH, ids_N, lse_N, factor_N, *entropy):
            logits_nV = _suppress(project(hidden_nH, operand_VH, bias_V, softcap), suppressed)
            args = ids_n, lse_n, factor_n, temperature, softcap, operand_VH.dtype, *entropy_n
            grad_nV = kernel(_logit_gradient, compile)(logits_nV, *args)
            del logits_nV
            grad_hidden.append(mm(grad_nV, operand_VH).mul_(unit).to(hidden_NH.dtype))
            if train_weight:
                add_mm(grad_VH, grad_nV.t(), hidden_nH)
            if bias_V is not None:
                grad_V += grad_nV.sum(0, dtype=torch.float32)
            del grad_nV
        grad_weight = grad_VH.mul_(unit).to(weight_VH.dtype) if train_weight else None
        grad_bias = None if bias_V is None else (grad_V * unit).to(bias_V.dtype)
        return torch.cat(grad_hidden), grad_weight, grad_bias, *[None] * 6


def chunks(*tensors_N: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Cuts along tokens into parts of equal size, at most CHUNK_TOKENS; no token gives one empty part."""
    count = -(-len(tensors_N[0]) // CHUNK_TOKENS) or 1
    for parts in zip(*(tensor_N.chunk(count) for tensor_N in tensors_N), strict=True):
        # copies: of a view torch.compile looks at the whole too, and would compile again when there are several parts
        yield tuple(part.clone() for part in parts)
