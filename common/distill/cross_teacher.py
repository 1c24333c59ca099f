"""A teacher with another tokenizer: it reads the student's completions as text, and answers per span of that text.

Prompts are encoded for it from the rows of the data, with its own chat template. Completions are decoded, encoded
with its tokenizer and aligned (alignment.py); what it says of its tokens is then put where the student's stand.
cross_losses.py compares that with the student.

What the teacher cannot read costs the student that wrote it, as if it had a probability of 1e-7. Left out of the loss
it would be a way out: with `opd` most advantages are below 0, and those of such tokens would be 0. In answers of the
data it is left out.

Dims: m sequences, C completion tokens of the student, D those of the teacher, Ht hidden size of the teacher.
"""

import bisect
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from common.base.checks import require
from common.base.distributed import print_main
from common.distill import alignment, teachers
from common.distill.alignment import Span
from common.generation import batches
from common.maths.divergences import INSIDE, MATCH, SMALLEST_TAIL, START
from common.model import head, passes, sources
from common.tasks import chat_templates, data, prompt_encoding
from common.tasks.data import Example

FEW = 0.02  # share of tokens that both know, of the student's, below which a line warns
UNREADABLE = math.log(SMALLEST_TAIL)  # log-probability of a text that the teacher cannot write


class Reading(NamedTuple):
    """A completion as the teacher reads it."""

    ids: list[int]  # of the teacher
    spans: list[Span]
    unreadable: range  # the student's tokens in which begins what the teacher cannot read


class CrossTeacher(teachers.LocalTeacher):
    """A `LocalTeacher` whose tokens are not the student's.

    Attributes:
        shared: number of the student's token ids: it may sample all of them.
        own: ids of the student's tokens that both know.
        other: ids of the teacher for these.
        method: "spans" or "uld".
    """

    suppressed_ids = range(0)  # its texts are encoded anew: it may generate all of its tokens

    def __init__(
        self,
        name: str,
        where: Sequence[torch.device],
        dtype: str,
        *,
        student: PreTrainedTokenizerBase,
        student_size: int,
        end_ids: Sequence[int],
        method: str,
        **options: Any,
    ):
        """Loads the model and compares the vocabularies.

        Args:
            name: as in `LocalTeacher`.
            where: the same.
            dtype: the same.
            student: its tokenizer.
            student_size: rows of its output head.
            end_ids: all tokens that end a completion of the student.
            method: "spans" or "uld".
            **options: as in `LocalTeacher`.

        Raises:
            ValueError: the model cannot be loaded, a tokenizer has no end token, or a text is not the concatenation
                of its tokens.
        """
        super().__init__(name, where, dtype, **options)
        self.method, self.shared, self.end_ids = method, student_size, set(end_ids)
        for whose, tokenizer in (("student", student), ("teacher", self.tokenizer)):
            require(tokenizer.eos_token_id is not None, f"the {whose}'s tokenizer has no end token",
                    "its end token stands for the other's", "set eos_token and save the tokenizer")  # fmt: skip
        self.vocabularies = alignment.Vocabulary(student, "the student"), alignment.Vocabulary(self.tokenizer, name)
        self.teacher_end_ids = set(sources.end_token_ids(self.tokenizer, self.model))
        self.ends = student.eos_token_id, self.tokenizer.eos_token_id
        sizes = student_size, self.vocabulary_size
        own, other = alignment.matches(*self.vocabularies, sizes, self.ends)
        self.own, self.other = torch.tensor(own), torch.tensor(other)
        self._partner = dict(zip(own, other, strict=True))
        self._prompts: dict[tuple[int, ...], list[int]] = {}
        few = "; warning: that is little to compare" if method == "spans" and len(own) < FEW * student_size else ""
        print_main(f"another tokenizer: student and teacher have {student_size} and {self.vocabulary_size} token ids, "
                   f"of which {len(own)} stand for the same text{few}")  # fmt: skip

    def read_prompts(
        self,
        examples: Sequence[Example],
        *,
        apply_chat_template: bool,
        system_prompt: str,
        template_kwargs: Mapping[str, Any],
    ) -> None:
        """Encodes prompts for the teacher, by its own chat template.

        Args:
            examples: all rows of the run, encoded for the student.
            apply_chat_template: as in `prompt_encoding.encode`.
            system_prompt: the same.
            template_kwargs: the same; those that the teacher's template does not read are left out.

        Raises:
            ValueError: a prompt cannot be encoded, or ends in a thought that is open for one side only.
        """
        if not examples:
            return
        own = self.vocabularies[0].tokenizer
        if apply_chat_template and own.chat_template:
            frame = chat_templates.Frame.of(own, template_kwargs, "chat_template_kwargs")
            for example in examples:
                require(not isinstance(example.prompt, str) or not frame.is_templated(example.prompt),
                        f"row {example.index}: the prompt is written in the student's chat template",
                        "the teacher has another one", "give the text or the messages alone")  # fmt: skip
        templated = apply_chat_template and bool(self.tokenizer.chat_template)
        read = chat_templates.variables(self.tokenizer) if templated and template_kwargs else set()
        if unread := sorted(template_kwargs.keys() - read):
            print_main(f"the teacher's chat template does not read {', '.join(unread)}")
        encoded = prompt_encoding.encode(
            [e.prompt for e in examples], "prompts for the teacher", self.tokenizer, apply_chat_template,
            system_prompt, template_kwargs={k: v for k, v in template_kwargs.items() if k in read},
            tools=[data.tools_of(e.columns.get("tools"), f"row {e.index}") for e in examples],
            again=[e.index for e in examples],
        )  # fmt: skip
        for example, ids, start in zip(examples, *encoded, strict=True):
            require(start == example.reply_start, f"row {example.index}: the prompt ends in "
                    f"{example.reply_start!r} for the student, in {start!r} for the teacher",
                    "both must begin their reply at the same place",
                    "set chat_template_kwargs so that both templates open a thought, or neither")  # fmt: skip
            self._prompts[tuple(example.prompt_ids)] = ids

    def prompt_of(self, ids: Sequence[int]) -> list[int]:
        """The teacher's tokens of a prompt.

        Args:
            ids: the student's.

        Raises:
            ValueError: `read_prompts` did not see the prompt.
        """
        prompt = self._prompts.get(tuple(ids))
        require(prompt is not None, f"a prompt of {len(ids)} tokens", "must be one that read_prompts has seen",
                "call it with all rows of the run")  # fmt: skip
        return prompt

    def readings(self, completions: Sequence[Sequence[int]]) -> list[Reading]:
        """Completions in the teacher's tokens, aligned with the student's.

        A reading ends before bytes that are not UTF-8, and before what the teacher's tokenizer changes: characters
        that it does not know, or capitals. A cut-off completion may end within a character; else such bytes are
        something that the teacher cannot write.

        Args:
            completions: the student's token ids.
        """
        ended = [len(ids) > 0 and int(ids[-1]) in self.end_ids for ids in completions]
        rows = [list(ids[: len(ids) - end]) for ids, end in zip(completions, ended, strict=True)]
        translated = alignment.translate(rows, *self.vocabularies)
        return [self._reading(*each) for each in zip(rows, ended, translated, strict=True)]

    def _reading(self, ids: list[int], ended: bool, translated: tuple[list[int], list[bytes]]) -> Reading:
        """The reading of one completion, whose end token is not among `ids`."""
        own = self.vocabularies[0].of(ids)
        text, tokens, length = b"".join(own), [], 0
        for token in translated[1]:
            if not text.startswith(token, length):
                break
            tokens.append(token)
            length += len(token)
        read, spans, unreadable = translated[0][: len(tokens)], alignment.align(own, tokens), range(0)
        if length < len(text):
            changed = b"".join(translated[1])
            wrong = next((i for i, (a, b) in enumerate(zip(text, changed, strict=False)) if a != b), len(changed))
            if wrong == len(alignment.whole_characters(text).encode()):  # all that it was given is as it was
                wrong = alignment.first_wrong_byte(text, ended)
            if wrong is not None:
                token = bisect.bisect_right(list(itertools.accumulate(map(len, own))), wrong)
                unreadable = range(spans[-1].end if spans else 0, token + 1)
        elif ended:
            spans.append(Span(len(ids), len(ids) + 1, len(read), len(read) + 1))
            read = [*read, self.ends[1]]
        return Reading(read or [self.ends[1]], spans, unreadable)  # a forward pass needs a token

    def fill(self, micros: Iterable[batches.RolloutBatch], micro_batch_tokens: int) -> None:
        """Sets `teacher` of micro-batches, in the places of the student's tokens.

        Args:
            micros: as in `LocalTeacher.fill`.
            micro_batch_tokens: the same, here of the teacher's tokens.

        Raises:
            FloatingPointError: something is not finite.
        """
        micros = list(micros)
        readings = [self.readings([ids.tolist() for ids in micro.completions]) for micro in micros]
        translated = [self._translated(micro, rows) for micro, rows in zip(micros, readings, strict=True)]
        passes.fill(translated, "teacher", self.forward, self.device, micro_batch_tokens)
        for micro, rows, other in zip(micros, readings, translated, strict=True):
            micro.teacher = self._aligned(micro, rows, other)
            other.teacher = None  # states of long texts are large
        self.require_finite(micros)

    def _translated(self, micro: batches.RolloutBatch, readings: Sequence[Reading]) -> batches.RolloutBatch:
        """The micro-batch in the teacher's tokens."""
        prompts = [self.prompt_of(ids.tolist()) for ids in micro.prompts]
        rows = [torch.tensor(reading.ids) for reading in readings]
        tokens_mD = torch.nn.utils.rnn.pad_sequence(rows, True, -1).to(micro.device)
        zeros_mD = torch.zeros(tokens_mD.shape, device=micro.device)
        other = batches.assemble(prompts, 1, tokens_mD, zeros_mD, self.ends[1], [self.ends[1]])
        other.group, other.replica = micro.group, micro.replica
        return other

    def _aligned(
        self, micro: batches.RolloutBatch, readings: Sequence[Reading], other: batches.RolloutBatch
    ) -> batches.TeacherOutput:
        """What the teacher said of its tokens, where the student's stand."""
        (m, C), device = micro.completion_ids.shape, micro.device
        kinds_mC, first_mC = torch.zeros(m, C, dtype=torch.int32), torch.zeros(m, C, dtype=torch.int64)
        unread_mC = torch.zeros(m, C)
        span_mC = torch.zeros(m, C, dtype=torch.int64)  # number of the span that the token belongs to
        span_mD = torch.zeros(other.completion_ids.shape, dtype=torch.int64)
        lengths, ids = [1], micro.completion_ids.tolist()
        given_m1 = (micro.rollout_logps == 0).all(1, keepdim=True)  # not sampled: there are no log-probabilities
        for row, (read, spans, unreadable) in enumerate(readings):
            for start, end, other_start, other_end in spans:
                one = end - start == other_end - other_start == 1
                is_match = one and self._partner.get(ids[row][start]) == read[other_start]
                kinds_mC[row, start] = MATCH if is_match else START
                kinds_mC[row, start + 1 : end] = INSIDE
                first_mC[row, start] = other_start
                span_mC[row, start:end] = span_mD[row, other_start:other_end] = len(lengths)
                lengths.append(end - start)
            if unreadable and not given_m1[row]:
                kinds_mC[row, unreadable.start] = -START
                kinds_mC[row, unreadable.start + 1 : unreadable.stop] = -INSIDE
                unread_mC[row, unreadable.start : unreadable.stop] = UNREADABLE / len(unreadable)
        kinds_mC, first_mC, span_mC, span_mD, lengths_S = (
            x.to(device) for x in (kinds_mC, first_mC, span_mC, span_mD, torch.tensor(lengths))
        )
        gives = {"spans": kinds_mC}
        logps_mD = other.teacher
        if self.gives == "states":
            compared = (kinds_mC == MATCH) | ((kinds_mC == START) & (self.method == "uld"))
            states_mCH = other.teacher.gather(1, first_mC[..., None].expand(-1, -1, other.teacher.shape[-1]))
            gives["states"] = torch.where(compared[..., None], states_mCH, 0.0)
            logps_mD = self._logps(other)
        sums_S = torch.zeros(len(lengths), device=device).index_add(0, span_mD.flatten(), logps_mD.flatten())
        gives["token_logps"] = torch.where(kinds_mC > 0, (sums_S / lengths_S)[span_mC], unread_mC.to(device))
        if self.method == "uld":
            # also true of a sampled row that was sure of every token; but then their cross-entropy has no gradient
            gives["given"] = given_m1.expand(m, C)
        return batches.TeacherOutput(**gives)

    @torch.no_grad()
    def _logps(self, other: batches.RolloutBatch) -> torch.Tensor:
        """Log-probabilities of the teacher's tokens [m, D], from its hidden states."""
        weight_VH, bias_V, softcap = self.head.on(other.device)
        within_mD = torch.arange(other.completion_ids.shape[1])[None] < other.lengths[:, None]
        place = tuple(x.to(other.device) for x in within_mD.nonzero(as_tuple=True))
        options = self.forward.temperature, softcap, self._compile
        logps_N, _ = head.logps_from_weight(other.teacher[place], weight_VH, bias_V, other.completion_ids[place],
                                            *options)  # fmt: skip
        return torch.zeros(other.completion_ids.shape, device=other.device).index_put(place, logps_N)

    def generate(
        self, prompts: Sequence[list[int]], numbers: Sequence[int], *, max_new_tokens: int, **options: Any
    ) -> list[list[int]]:
        """Completions by the teacher in the student's tokens.

        Args:
            prompts: token ids of the student.
            numbers: as in `LocalTeacher.generate`.
            max_new_tokens: a completion is cut off here, in the tokens of either.
            **options: as in `LocalTeacher.generate`.

        Returns:
            Token ids of the student, its end token included; one that is cut off may have fewer than `max_new_tokens`.
        """
        own_prompts = [self.prompt_of(ids) for ids in prompts]
        rows = super().generate(own_prompts, numbers, max_new_tokens=max_new_tokens, **options)
        ended = [row[-1] in self.teacher_end_ids for row in rows]
        texts = [row[: len(row) - end] for row, end in zip(rows, ended, strict=True)]
        translated = alignment.translate(texts, *reversed(self.vocabularies))
        ends = [[self.ends[0]] if end else [] for end in ended]
        return [([*ids, *end] or [self.ends[0]])[:max_new_tokens]
                for (ids, _), end in zip(translated, ends, strict=True)]  # fmt: skip
