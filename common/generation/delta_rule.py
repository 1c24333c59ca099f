"""One decode step of gated linear attention (Qwen3.5, Qwen3-Next, OLMo hybrid), as one Triton kernel.

Each head remembers a matrix S, keys by values, about a megabyte per layer and row in Qwen3.5-0.8B:
a step is as fast as S can be read and written. transformers' PyTorch code does that about a dozen
times. The kernel does it once, in place:

    S = exp(g) S;   S = S + k (beta (v - S^T k))^T;   o = S^T q

Source: Yang et al. 2024, "Gated Delta Networks", arXiv 2412.06464, Equation 10.

Dims: b rows, Hk query and key heads, H value heads, K key size, V value size.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from common.model import states

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for CPUs comes without it
    triton = None

NAME = "torch_recurrent_gated_delta_rule"  # of the function in transformers' modeling files
BLOCK = 32  # values of a head per program


if triton is not None:

    @triton.jit
    def _kernel(q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, state_ptr, out_ptr, scale, q_row, k_row, v_row, H,
                REPEATS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
                NORM: tl.constexpr):  # fmt: skip
        row_head, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
        row, head = row_head // H, row_head % H
        at_k, at_v = tl.arange(0, BK), block * BV + tl.arange(0, BV)
        in_k, in_v = at_k < K, at_v < V
        q = tl.load(q_ptr + row * q_row + (head // REPEATS) * K + at_k, in_k, 0.0).to(tl.float32)
        k = tl.load(k_ptr + row * k_row + (head // REPEATS) * K + at_k, in_k, 0.0).to(tl.float32)
        v = tl.load(v_ptr + row * v_row + head * V + at_v, in_v, 0.0).to(tl.float32)
        if NORM:
            q = q * tl.rsqrt(tl.sum(q * q) + 1e-6)
            k = k * tl.rsqrt(tl.sum(k * k) + 1e-6)
        q = q * scale
        g, beta = tl.load(g_ptr + row_head).to(tl.float32), tl.load(beta_ptr + row_head).to(tl.float32)
        place = state_ptr + row_head * K * V + at_k[:, None] * V + at_v[None, :]
        mask = in_k[:, None] & in_v[None, :]
        state = tl.load(place, mask, 0.0) * tl.exp(g)
        delta = (v - tl.sum(state * k[:, None], 0)) * beta
        state = state + k[:, None] * delta[None, :]
        tl.store(place, state, mask)
        tl.store(out_ptr + row_head * V + at_v, tl.sum(state * q[:, None], 0), in_v)


def step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Takes the place of transformers' function of one token per row; names are those it is called with.

    Args:
        query: [b, 1, Hk, K].
        key: [b, 1, Hk, K].
        value: [b, 1, H, V].
        g: [b, 1, H] fp32, log of the decay.
        beta: [b, 1, H], share of a value that is written.
        initial_state: [b, H, K, V] fp32, updated in place.
        use_qk_l2norm_in_kernel: normalise queries and keys.
        **kwargs: of no meaning for one token.

    Returns:
        [b, 1, H, V] in the dtype of the query, and the state.
    """
    (b, T, Hk, K), (H, V) = query.shape, value.shape[2:]
    if T != 1 or initial_state.dtype != torch.float32 or not initial_state.is_contiguous():
        raise ValueError(f"{T} tokens, {initial_state.dtype}: must be one token per row, and a contiguous fp32 state")
    # heads of a row must follow one another; rows may be parts of wider ones
    query, key, value = (
        x if x.stride(2) == x.shape[3] and x.stride(3) == 1 else x.contiguous() for x in (query, key, value)
    )
    out = torch.empty(b, 1, H, V, dtype=query.dtype, device=query.device)
    _kernel[(b * H, triton.cdiv(V, BLOCK))](
        query, key, value, g.contiguous(), beta.contiguous(), initial_state, out, K**-0.5,
        query.stride(0), key.stride(0), value.stride(0), H, H // Hk, K, V, triton.next_power_of_2(K), BLOCK,
        use_qk_l2norm_in_kernel,
    )  # fmt: skip
    return out, initial_state


def serves(model: nn.Module) -> bool:
    """Whether the kernel serves layers of a model; never without a GPU and Triton.

    Args:
        model: a transformers causal language model.
    """
    return triton is not None and model.device.type == "cuda" and states.has_function(model, NAME)


def used_by(model: nn.Module) -> AbstractContextManager:
    """Puts the kernel in the place of transformers' function, and takes it out again.

    Args:
        model: decodes meanwhile; other models of its family may be trained at the same time.
    """
    return states.replaced(model, NAME, lambda function: step)
