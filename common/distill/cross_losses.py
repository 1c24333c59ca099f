"""A student as the loss sees it if its teacher has another tokenizer: per span of text, chunk by chunk.

As in distillation.py, which computes both heads and the gradient; here are what it is a loss of, and what that takes.

Dims: N completion tokens, n of those in one chunk, H hidden size of the student, Ht of the teacher, S tokens that both
know.
"""

import torch
from torch import nn

from common.distill.cross_teacher import CrossTeacher
from common.distill.distillation import TokenLosses
from common.maths import divergences
from common.model.head import logps_from_weight, operand, project, softcap_of


class CrossDivergences(TokenLosses):
    """A student as the loss sees it: tokens and what a `CrossTeacher` gave in, loss out."""

    def __init__(self, model: nn.Module, temperature: float, compile: bool, beta: float, teacher: CrossTeacher):
        """Wraps a student.

        Args:
            model: a transformers causal language model, with dropout off.
            temperature: divides the logits of both sides.
            compile: as in `LogProbs`.
            beta: of the generalized JSD; ULD has none.
            teacher: with hidden states.

        Raises:
            ValueError: beta or temperature out of range.
        """
        divergences.check(beta, temperature)
        super().__init__(model, temperature, compile)
        self.beta, self.teacher, self.shared = beta, teacher, teacher.shared
        kls = ("forward_kl", "reverse_kl") if teacher.method == "spans" else ()
        self.values = ("divergence", *kls, "student_logps", "teacher_logps", "entropy", "aligned")

    def target(self, device: torch.device) -> "Spans | Sorted":
        """The teacher's head, and the tokens that both know."""
        head = self.teacher.head.on(device)
        if self.teacher.method == "uld":
            return Sorted(head, self.temperature, self.compiled)
        shared = self.teacher.own.to(device), self.teacher.other.to(device)
        return Spans(head, *shared, self.beta, self.temperature, self.compiled)

    def prepared(self, hidden: torch.Tensor, ids: torch.Tensor, *teacher: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Adds the log-probabilities of the spans under both sides, which no single token shows.

        Only tokens of spans that are compared as a whole go through the student's head once more.

        Args:
            hidden: [N, H].
            ids: [N] int64.
            *teacher: states [N, Ht], log-probabilities [N], places in spans [N]; for ULD, whether a token is given.

        Returns:
            What `Spans.inputs` or `Sorted.inputs` takes.
        """
        if self.teacher.method == "uld":
            return teacher
        states_NH, token_logps_N, spans_N = teacher
        output = self.model.get_output_embeddings()
        bias_V = None if output.bias is None else output.bias.detach()
        logps_N = torch.zeros(len(ids), device=hidden.device)
        rows = (spans_N.abs() >= divergences.START).nonzero().squeeze(-1)
        if len(rows):
            with torch.no_grad():
                options = self.temperature, softcap_of(self.model), self.compiled
                logps_N[rows], _ = logps_from_weight(hidden[rows], output.weight.detach(), bias_V, ids[rows], *options)
        sums = (divergences.span_sums(x, spans_N) for x in (logps_N, token_logps_N))
        return states_NH, token_logps_N, spans_N, *sums


class _OtherHead:
    """Logits of the teacher, over its own vocabulary."""

    def __init__(self, head: tuple):
        weight, self.bias, self.softcap = head
        self.weight = operand(weight)

    def logits(self, states_nH: torch.Tensor) -> torch.Tensor:
        return project(states_nH, self.weight, self.bias, self.softcap)


class Spans(_OtherHead):
    """Divergence over the tokens that both know, and over spans."""

    rule = staticmethod(divergences.spans)

    def __init__(
        self, head: tuple, own_S: torch.Tensor, other_S: torch.Tensor, beta: float, temperature: float, compile: bool
    ):
        super().__init__(head)
        self.options, self.compile = (own_S, other_S, beta, temperature), compile

    def inputs(self, ids_n: torch.Tensor, states_nH: torch.Tensor, token_logps_n: torch.Tensor, spans_n: torch.Tensor,
               *sums_n: torch.Tensor) -> tuple[torch.Tensor, ...]:  # fmt: skip
        """What the rule takes beside the student's logits."""
        return self.logits(states_nH), spans_n, token_logps_n, *sums_n, ids_n


class Sorted(_OtherHead):
    """Difference of sorted probabilities, and cross-entropy of given tokens."""

    rule = staticmethod(divergences.sorted_probabilities)

    def __init__(self, head: tuple, temperature: float, compile: bool):
        super().__init__(head)
        self.options, self.compile = (temperature,), compile

    def inputs(
        self, ids_n: torch.Tensor, states_nH: torch.Tensor, token_logps_n: torch.Tensor, spans_n: torch.Tensor,
        given_n: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        """What the rule takes beside the student's logits."""
        return self.logits(states_nH), spans_n, given_n, token_logps_n, ids_n
