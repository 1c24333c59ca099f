"""Divergences of a student from a teacher, and cross-entropy, from last hidden states, chunk by chunk.

A teacher hands over the hidden states of the completion tokens, [N, H] numbers instead of [N, V] logits,
and its output head. Both heads are applied here to one chunk of tokens at a time, and the gradient of the
student's logits goes at once into that of its hidden states and its head: the full logits of neither side
ever exist, and none are computed twice.

Dims: m sequences, C completion tokens of one at most, N of all together, n of those in one chunk, H hidden size of the
student, Ht of the teacher, V vocabulary, K the teacher's top k, R values reported per
token.
"""

from collections.abc import Callable

import torch
from torch import nn

from common.base.distributed import print_main
from common.maths import divergences
from common.model.head import add_mm, chunks, kernel, mm, operand, project, scaled, softcap_of
from common.model.images import Images
from common.model.logprobs import LogProbs

SLICES, COMPILED_SLICES = 16, 8  # parts of a chunk whose temporary results are alive at the same time
NEAR_AN_END = 0.01  # of beta from 0 or 1
FP16_SCALE = 256.0  # gradients of logits are scaled by this in fp16, whose smallest number is 6e-8


class HiddenStates(LogProbs):
    """A teacher whose head is applied elsewhere: tokens in, last hidden states out."""

    def forward(
        self,
        prompt_ids: torch.Tensor,
        prompt_mask: torch.Tensor,
        completion_ids: torch.Tensor,
        completion_mask: torch.Tensor,
        images: None = None,
        group: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor]:
        """The states that predict each completion token.

        Args:
            prompt_ids: [m, Q] int64, padded on the left.
            prompt_mask: [m, Q] bool, or lengths, as in `LogProbs.forward`.
            completion_ids: [m, C] int64, padded on the right.
            completion_mask: [m, C] bool, or lengths.
            images: none; teachers read text.
            group: [m] int64 on the CPU, as in `LogProbs.forward`.

        Returns:
            [m, C, Ht] in the dtype of the model, 0 where masked; in a tuple, as `passes.fill` takes it.
        """
        hidden_NH, place = self.states(prompt_ids, prompt_mask, completion_ids, completion_mask, images, group)
        hidden_NH = scaled(self.model, hidden_NH)
        zeros_mCH = hidden_NH.new_zeros(*completion_ids.shape, hidden_NH.shape[-1])
        return (zeros_mCH.index_put(tuple(x.to(hidden_NH.device) for x in place), hidden_NH),)


class TokenLosses(LogProbs):
    """A model as a loss over all its tokens sees it: tokens and their weights in, loss out.

    Attributes:
        shared: number of token ids that the loss is over, the first ones.
        values: names of the per-token metrics; the first is the loss.
        target: what the loss compares the model with, on a device.
    """

    shared: int
    values: tuple[str, ...]
    target: Callable[[torch.device], "Full | TopK | Tokens"]

    def forward(
        self,
        prompt_ids: torch.Tensor,
        prompt_mask: torch.Tensor,
        completion_ids: torch.Tensor,
        completion_mask: torch.Tensor,
        weights: torch.Tensor,
        *teacher: torch.Tensor,
        images: Images | None = None,
        group: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weighted sum of the tokens' losses, and values to report.

        Args:
            prompt_ids: [m, Q] int64, padded on the left.
            prompt_mask: [m, Q] bool, or lengths, as in `LogProbs.forward`.
            completion_ids: [m, C] int64, padded on the right.
            completion_mask: [m, C] bool, or lengths.
            weights: [m, C] fp32, of each token in the loss: 1 / trained tokens, or 0.
            *teacher: `batches.TeacherOutput.tensors`: last hidden states, or a top k; none without
                a teacher.
            images: of the m prompts, if the model reads images.
            group: [m] int64 on the CPU, as in `LogProbs.forward`.

        Returns:
            The loss [1] fp32, and [m, C, number of values] fp32 without gradient, 0 where masked.
        """
        hidden_NH, place = self.states(prompt_ids, prompt_mask, completion_ids, completion_mask, images, group)
        hidden_NH = scaled(self.model, hidden_NH)
        output, device = self.model.get_output_embeddings(), hidden_NH.device
        # `needs_input_grad` ignores no_grad, and gradients of the weights would be computed for nothing
        own = (x if torch.is_grad_enabled() else _detached(x) for x in (output.weight, output.bias))
        teacher_N = self.prepared(hidden_NH.detach(), completion_ids[place], *(x[place] for x in teacher))
        loss, values_RN = _TokenLoss.apply(
            hidden_NH, *own, weights[place], softcap_of(self.model), self.shared, self.target(device),
            completion_ids[place], *teacher_N,
        )  # fmt: skip
        values_mCR = torch.zeros(*completion_ids.shape, len(self.values), device=device)
        return loss, values_mCR.index_put(place, values_RN.t())

    def prepared(self, hidden: torch.Tensor, ids: torch.Tensor, *teacher: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What the target takes of each token: what the teacher gave, as it is.

        Args:
            hidden: [N, H], states of the model that predict the tokens, scaled, without gradient.
            ids: [N] int64, the tokens.
            *teacher: [N, ...].
        """
        return teacher


class Divergences(TokenLosses):
    """A student as the distillation loss sees it: tokens and the teacher's output in, loss out."""

    values = ("divergence", "forward_kl", "reverse_kl", "student_logps", "teacher_logps", "entropy")

    def __init__(
        self, model: nn.Module, temperature: float, compile: bool, beta: float, shared: int, head: "Head | None"
    ):
        """Wraps a student.

        Args:
            model: a transformers causal language model, with dropout off.
            temperature: divides the logits of both sides.
            compile: as in `LogProbs`.
            beta: of the generalized JSD, see common/maths/divergences.py.
            shared: number of the first token ids that both vocabularies have; all others are left out on both sides.
            head: the teacher's output head; None for a teacher that sends its top k.

        Raises:
            ValueError: beta or temperature out of range.
        """
        divergences.check(beta, temperature)
        if 0 < min(beta, 1 - beta) < NEAR_AN_END:
            end = "forward" if beta < 0.5 else "reverse"
            print_main(
                f"warning: beta = {beta}: so near an end the generalized JSD is the {end} KL times "
                f"{min(beta, 1 - beta):.3g}, a loss of nearly 0; set loss to {end}_kl, or beta further inside"
            )
        super().__init__(model, temperature, compile)
        self.beta, self.shared, self.head = beta, shared, head

    def target(self, device: torch.device) -> "Full | TopK":
        """The teacher's head, or its top k."""
        if self.head is None:
            return TopK(self.beta, self.temperature, self.compiled)
        return Full(self.head.on(device), self.shared, self.beta, self.temperature, self.compiled)


class CrossEntropy(TokenLosses):
    """A model as supervised fine-tuning sees it: tokens in, their negative log-likelihood out."""

    values = ("nll", "entropy", "token_accuracy")

    def __init__(self, model: nn.Module, compile: bool = False):
        """Wraps a model.

        Args:
            model: a transformers causal language model, with dropout off.
            compile: as in `LogProbs`.
        """
        super().__init__(model, 1.0, compile)
        self.shared = model.get_output_embeddings().weight.shape[0]

    def target(self, device: torch.device) -> "Tokens":
        """The tokens themselves."""
        return Tokens(self.compiled)


class Head:
    """A frozen output head, with a copy on every device that asks for one."""

    def __init__(self, model: nn.Module):
        """Takes the head of a model.

        Args:
            model: a transformers causal language model that is not trained.
        """
        output = model.get_output_embeddings()
        self.softcap = softcap_of(model)
        self._copies = {output.weight.device: tuple(_detached(x) for x in (output.weight, output.bias))}

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None, float | None]:
        """Weight [V, Ht], bias [V] or None, and soft cap, on a device.

        Args:
            device: of the student.
        """
        if device not in self._copies:
            source = next(iter(self._copies.values()))
            self._copies[device] = tuple(x if x is None else x.to(device) for x in source)
        return *self._copies[device], self.softcap

    def drop_copies(self) -> None:
        """Forgets those on other devices, after the weights have changed; the next `on` copies again."""
        self._copies = dict([next(iter(self._copies.items()))])


def _detached(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.detach()


class Full:
    """Divergence over the whole vocabulary, from the hidden states of a teacher."""

    rule = staticmethod(divergences.full)

    def __init__(self, head: tuple, shared: int, beta: float, temperature: float, compile: bool):
        weight_VH, bias_V, self.softcap = head
        self.weight, self.bias = operand(weight_VH)[:shared], None if bias_V is None else bias_V[:shared]
        self.options, self.compile = (beta, temperature), compile

    def inputs(self, ids_n: torch.Tensor, states_nH: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What the rule takes beside the student's logits."""
        return project(states_nH, self.weight, self.bias, self.softcap), ids_n


class TopK:
    """Divergence over a teacher's top k and the tail, from what a server sends."""

    rule = staticmethod(divergences.topk)

    def __init__(self, beta: float, temperature: float, compile: bool):
        self.options, self.compile = (beta, temperature), compile

    def inputs(self, ids_n: torch.Tensor, teacher_ids_nK: torch.Tensor, *others: torch.Tensor) -> tuple:
        """What the rule takes beside the student's logits."""
        return teacher_ids_nK.long(), *others, ids_n


class Tokens:
    """Cross-entropy of the tokens, without a teacher."""

    rule = staticmethod(divergences.cross_entropy)
    options = ()

    def __init__(self, compile: bool):
        self.compile = compile

    def inputs(self, ids_n: torch.Tensor) -> tuple[torch.Tensor]:
        """What the rule takes beside the model's logits."""
        return (ids_n,)


def _weighted(
    rule: Callable, logits_nV: torch.Tensor, inputs: tuple, options: tuple, factor_n: torch.Tensor,
    softcap: float | None, dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Values [R, n], and the gradient before the soft cap times a factor, [n, V] in `dtype`; None: no gradient."""
    values_Rn, grad_nV = rule(logits_nV, *inputs, *options)
    if dtype is None:
        return values_Rn, None
    grad_nV = grad_nV * factor_n[:, None]
    if softcap is not None:
        grad_nV = grad_nV * (1 - (logits_nV / softcap) ** 2)
    return values_Rn, grad_nV.to(dtype)


def _apply(
    target: Full | TopK | Tokens, logits_nV: torch.Tensor, inputs: tuple, factor_n: torch.Tensor, softcap: float | None,
    dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """`_weighted` for a chunk, a slice at a time to save memory; overwrites the logits."""
    rows = -(-len(logits_nV) // (COMPILED_SLICES if target.compile else SLICES)) or 1
    grad_nV = None
    if dtype is not None:  # where it can, the gradient takes the place of the logits
        grad_nV = logits_nV if dtype == logits_nV.dtype else torch.empty_like(logits_nV, dtype=dtype)
    rule = kernel(_weighted, target.compile)
    values = []
    for start in range(0, max(1, len(logits_nV)), rows):
        part = slice(start, start + rows)
        cut = tuple(x[part] for x in inputs)
        value, grad = rule(target.rule, logits_nV[part], cut, target.options, factor_n[part], softcap, dtype)
        values.append(value)
        if grad is not None:
            grad_nV[part] = grad
    return torch.cat(values, dim=1), grad_nV


class _TokenLoss(torch.autograd.Function):
    """Weighted sum over N tokens, from hidden states. Weights are known, so forward computes the gradient, too."""

    @staticmethod
    def forward(
        ctx, hidden_NH, weight_VH, bias_V, weights_N, softcap, shared, target: Full | TopK | Tokens, ids_N, *teacher_N
    ) -> tuple[torch.Tensor, torch.Tensor]:
        train_hidden, train_weight, train_bias = ctx.needs_input_grad[:3]
        operand_VH, bias = operand(weight_VH)[:shared], None if bias_V is None else bias_V[:shared]
        dtype = operand_VH.dtype if any(ctx.needs_input_grad[:3]) else None
        # gradients are kept in fp32, for weights of which the largest is 1: in fp16 the loss is scaled later
        grad_NH = torch.empty_like(hidden_NH, dtype=torch.float32) if train_hidden else None
        grad_VH = torch.zeros_like(weight_VH, dtype=torch.float32) if train_weight else None
        grad_V = torch.zeros_like(bias_V, dtype=torch.float32) if train_bias else None
        largest = torch.cat([weights_N.abs(), weights_N.new_full((1,), 1e-30)]).amax()
        scale = FP16_SCALE if dtype == torch.float16 else 1.0
        values, start = [], 0
        factor_N = weights_N * (scale / largest)
        for hidden_nH, factor_n, ids_n, *teacher_n in chunks(hidden_NH, factor_N, ids_N, *teacher_N):
            logits_nV = project(hidden_nH, operand_VH, bias, softcap)
            inputs = target.inputs(ids_n, *teacher_n)
            values_Rn, grad_nV = _apply(target, logits_nV, inputs, factor_n, softcap, dtype)
            del logits_nV, inputs  # before the next ones are allocated
            values.append(values_Rn)
            if train_hidden:
                grad_NH[start : start + len(hidden_nH)] = mm(grad_nV, operand_VH)
            if train_weight:
                add_mm(grad_VH[:shared], grad_nV.t(), hidden_nH)
            if train_bias:
                grad_V[:shared] += grad_nV.sum(0, dtype=torch.float32)
            start += len(hidden_nH)
            del grad_nV
        values_RN = torch.cat(values, dim=1)
        ctx.save_for_backward(grad_NH, grad_VH, grad_V, largest / scale)
        ctx.dtypes = [None if x is None else x.dtype for x in (hidden_NH, weight_VH, bias_V)]
        ctx.mark_non_differentiable(values_RN)
        return (values_RN[0] * weights_N).sum(0, keepdim=True), values_RN

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, loss_grad_1, _):
        *saved, unit = ctx.saved_tensors
        factor, grads = loss_grad_1 * unit, []
        for grad, dtype in zip(saved, ctx.dtypes, strict=True):
            # into the result: another fp32 copy would be as large as the head
            out = None if grad is None else torch.mul(grad, factor, out=torch.empty_like(grad, dtype=dtype))
            grads.append(out)
        return *grads, *[None] * (len(ctx.needs_input_grad) - 3)
