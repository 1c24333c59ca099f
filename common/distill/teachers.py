"""A teacher in this process, and the rules for any teacher's tokenizer; teacher_client.py has the one behind a server.

Both have `fill`, which sets `teacher` of micro-batches, `generate`, `refresh`, `vocabulary`, `offload` and `onload`,
and the attributes `name`, `weights`, `head`, `to_save`, `tokenizer_traits`, `vocabulary_size` and `shared`.
"""

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from common.base.checks import require
from common.base.distributed import print_main
from common.distill import distillation
from common.generation import batches, rollout
from common.model import logprobs, models, passes, sources
from common.tasks.data import Example
from common.training.offload import Offloader

# encoded by both tokenizers: digits, code, spaces, capitals, an accent as one character and as two, other scripts
PROBE = "Is 12345+678 = 13023?\n\n  def f(x):\treturn x**2  # don't  caf\u00e9 cafe\u0301 \u4f60\u597d \u0416 A\u00a0b"
FOLLOWS = "follows the student"  # stands for the fingerprint of weights that change


class LocalTeacher:
    """A frozen model on GPUs of this process.

    Attributes:
        name: of the model.
        refresh_every: steps between copies of the student into the teacher; 0: it stays as it is.
        head: the output head; None if only log-probabilities of tokens are asked for.
        tokenizer_traits: see `tokenizer_traits`.
        vocabulary_size: rows of the output head.
        shared: number of the first token ids that the student has, too; set by `agree`.
    """

    def __init__(
        self,
        name: str,
        where: Sequence[torch.device],
        dtype: str,
        *,
        temperature: float,
        compile: bool,
        tokens_only: bool = False,
        refresh_every: int = 0,
        source: str = "",
    ):
        """Loads the model.

        Args:
            name: as in `sources.find`.
            where: its devices; over several the layers are spread.
            dtype: as in `sources.pick_dtype`.
            temperature: divides its logits.
            compile: as in `logprobs.LogProbs`.
            tokens_only: `fill` writes log-probabilities of the tokens instead of hidden states.
            refresh_every: steps between copies of the student into the teacher; 0: none.
            source: folder to load weights from, in place of the name; "": the name.

        Raises:
            ValueError: the model cannot be loaded.
        """
        self.name, self.tokenizer, self.refresh_every = name, sources.load_tokenizer(name), refresh_every
        self.model = models.load_spread(source or name, list(where), dtype)
        output = self.model.get_output_embeddings()
        self.device, self.vocabulary_size = self.model.device, len(output.weight)
        self.shared, self.tokenizer_traits = self.vocabulary_size, tokenizer_traits(self.tokenizer)
        self.head = None if tokens_only else distillation.Head(self.model)
        compile = compile and len(where) == 1
        kind = logprobs.LogProbs if tokens_only else distillation.HiddenStates
        self.gives = "token_logps" if tokens_only else "states"  # field of `batches.TeacherOutput`
        self.forward = kind(self.model, temperature, compile)
        self._compile, self._samplers = compile, {}
        # the update needs the head while the rest may be offloaded
        self.memory = Offloader(self.model, keep=[] if tokens_only else list(output.parameters()))

    @property
    def suppressed_ids(self) -> range:
        """Tokens that it never generates, since the student lacks them."""
        return range(self.shared, self.vocabulary_size)

    @property
    def weights(self) -> str:
        """Their `models.fingerprint`; FOLLOWS if they change."""
        return FOLLOWS if self.refresh_every else models.fingerprint(self.model)

    @property
    def to_save(self) -> nn.Module | None:
        """The model if checkpoints must contain it, because it changes; None if it does not."""
        return self.model if self.refresh_every else None

    @torch.no_grad()
    def refresh(self, student: nn.Module, step: int) -> None:
        """Copies the student's weights into the teacher, every `refresh_every` steps.

        Args:
            student: a whole model that the teacher was loaded like; its embedding may have more rows.
            step: steps done.
        """
        if not self.refresh_every or step % self.refresh_every:
            return
        weights = student.state_dict()
        for name, own in self.model.named_parameters():  # in CPU memory while the teacher is offloaded
            own.copy_(weights[name] if own.shape == weights[name].shape else weights[name][: len(own)])
        if self.head is not None:
            self.head.drop_copies()

    def vocabulary(self) -> dict[str, int]:
        """Ids by token."""
        return self.tokenizer.get_vocab()

    def fill(self, micros: Iterable[batches.RolloutBatch], micro_batch_tokens: int) -> None:
        """Sets `teacher` of micro-batches to last hidden states, or to log-probabilities of the tokens.

        Args:
            micros: as the update will see them.
            micro_batch_tokens: what they were cut to; without gradients, several are computed at once.

        Raises:
            FloatingPointError: something is not finite.
        """
        micros = list(micros)
        passes.fill(micros, "teacher", self.forward, self.device, micro_batch_tokens)
        for micro in micros:
            micro.teacher = batches.TeacherOutput(**{self.gives: micro.teacher})
        self.require_finite(micros)

    def require_finite(self, micros: Iterable[batches.RolloutBatch]) -> None:
        """Stops if something that the teacher gave is not finite.

        An error at a gradient later could not tell whether student or teacher is at fault.

        Args:
            micros: with `teacher`.

        Raises:
            FloatingPointError: something is not finite.
        """
        if not all(bool(x.isfinite().all()) for micro in micros for x in micro.teacher.tensors):
            dtype = str(self.model.dtype).removeprefix("torch.")
            raise FloatingPointError(
                f"teacher {self.name!r}: its {self.gives} are not all finite; they are too large for {dtype}, or the "
                "model is broken: set dtype to 'bf16' or 'fp32', or take another teacher"
            )

    def generate(
        self,
        prompts: Sequence[list[int]],
        numbers: Sequence[int],
        *,
        seed: int,
        temperature: float,
        max_new_tokens: int,
    ) -> list[list[int]]:
        """Completions by the teacher, one per prompt.

        Args:
            prompts: token ids.
            numbers: place of each prompt in the data: the same number and seed give the same completion.
            seed: of the run.
            temperature: of the softmax; 0 takes the most likely tokens.
            max_new_tokens: a completion is cut off here.

        Returns:
            Token ids, the end token included.
        """
        self.onload()
        if max_new_tokens not in self._samplers:
            end_ids = sources.end_token_ids(self.tokenizer, self.model)
            self._samplers[max_new_tokens] = rollout.Sampler(
                [self.model], end_ids=end_ids, pad_id=end_ids[0], max_new_tokens=max_new_tokens,
                suppressed_ids=self.suppressed_ids, compile=self._compile,
            )  # fmt: skip
        batch = self._samplers[max_new_tokens].generate(
            prompts, group_size=1, temperature=temperature, seed=seed, prompt_numbers=numbers
        )
        return [ids.tolist() for ids in batch.completions]

    def offload(self) -> float:
        """Moves all but the head to CPU memory until `onload`; returns GiB freed."""
        for sampler in self._samplers.values():
            sampler.release()
        return self.memory.offload()

    def onload(self) -> None:
        """Moves back what `offload` moved."""
        self.memory.onload()


def fill(teacher: Any, micros: Iterable[batches.RolloutBatch], examples_P: Sequence[Example], tokens: int) -> None:
    """Sets `teacher` of micro-batches, from the prompts that a teacher reads of their examples.

    Args:
        teacher: a `LocalTeacher` or a `RemoteTeacher`.
        micros: as the update will see them; their groups are numbers of examples.
        examples_P: whose completions they are.
        tokens: what they were cut to.
    """
    micros = list(micros)
    read = [_as_read(micro, examples_P) for micro in micros]
    teacher.fill(read, tokens)
    for micro, other in zip(micros, read, strict=True):
        micro.teacher = other.teacher


def _as_read(micro: batches.RolloutBatch, examples_P: Sequence[Example]) -> batches.RolloutBatch:
    """A micro-batch with the prompts that the teacher reads; itself if they are those of the student."""
    examples = [examples_P[number] for number in micro.group.tolist()]
    if all(example.privileged_ids is None for example in examples):
        return micro
    prompts = [torch.tensor(example.teacher_ids) for example in examples]
    return dataclasses.replace(
        micro,
        prompt_ids=pad_sequence(prompts, True, padding_side="left").to(micro.device),
        prompt_lengths=torch.tensor([len(ids) for ids in prompts]),
    )


def agree(
    teacher: Any, tokenizer: PreTrainedTokenizerBase, student_size: int, allow_other_template: bool = False
) -> int:
    """Checks that token ids mean the same to student and teacher, and sets the teacher's `shared`.

    Args:
        teacher: a `LocalTeacher` or a `RemoteTeacher`.
        tokenizer: the student's.
        student_size: rows of the student's output head.
        allow_other_template: warn instead of refusing if both have a chat template and these differ.

    Returns:
        Number of the first ids that both have.

    Raises:
        ValueError: see `shared_ids`; or the student's end token is not among those ids; or the chat templates differ.
    """
    teacher.shared = shared_ids(tokenizer, student_size, teacher.vocabulary(), teacher.vocabulary_size)
    require(
        tokenizer.eos_token_id is None or tokenizer.eos_token_id < teacher.shared,
        f"the student's end token {tokenizer.eos_token!r} has id {tokenizer.eos_token_id}",
        f"must be one of the first {teacher.shared} ids, which student and teacher share, or no completion ever ends",
        "give the student's tokenizer an eos_token that the teacher has",
    )
    if student_size != teacher.vocabulary_size:
        lost = sum(id_ >= teacher.shared for id_ in tokenizer.get_vocab().values())
        never = f"; {lost} tokens of its tokenizer are not among them, and the student never samples those"
        print_main(
            f"the student has {student_size} token ids, the teacher {teacher.vocabulary_size}: the first "
            f"{teacher.shared} count, on both sides{never if lost else ''}"
        )
    own, none = tokenizer_traits(tokenizer), _hash("")
    templates = own["template_hash"], teacher.tokenizer_traits.get("template_hash", none)
    require(
        allow_other_template or none in templates or templates[0] == templates[1],
        "the teacher's chat template is another than the student's",
        "it would judge prompts that look like none it was trained on, though the loss looks normal",
        "give the student the teacher's template (tokenizer.chat_template), or set allow_other_template",
    )
    for name, what in TOKENIZER_WARNINGS.items():
        if teacher.tokenizer_traits.get(name, own[name]) != own[name]:  # an older server omits some
            print_main(f"warning: {what}")
    return teacher.shared


def require_same(teacher: Any, notes: dict[str, Any]) -> None:
    """Refuses to resume from a checkpoint with another teacher, which no metric would show.

    Args:
        teacher: a `LocalTeacher` or a `RemoteTeacher`.
        notes: of the checkpoint; empty for a new run.

    Raises:
        ValueError: the weights differ.
    """
    was = notes.get("teacher", teacher.weights)  # not in checkpoints of older versions
    require(
        was == teacher.weights or FOLLOWS in (was, teacher.weights),
        f"the teacher {teacher.name!r} has the weights {teacher.weights[:12]}",
        f"must be those that this run began with, {was[:12]}: a run has one teacher",
        "give that one, in the same dtype; or start anew in another out_dir, with the checkpoint as student_model",
    )


def require_shared(examples: Iterable[Example], shared: int) -> None:
    """Refuses prompts with token ids that student or teacher lacks.

    Args:
        examples: rows of the data.
        shared: number of the first ids that both have.

    Raises:
        ValueError: with the row of the prompt.
    """
    for example in examples:
        if (highest := max(*example.prompt_ids, *example.teacher_ids)) >= shared:
            raise ValueError(
                f"row {example.index}: its prompt holds token id {highest}, which is not among the "
                f"first {shared} ids that student and teacher share; take that special token out of the data or of the "
                "chat template"
            )


# Traits in which tokenizers with equal ids may differ. The ids still mean the same, so the run goes on, but the teacher
# was trained on other sequences of them.
TOKENIZER_WARNINGS = {
    "template_hash": "the teacher's chat template is another than the student's: it reads prompts as the student's "
    "template writes them, which may not be what it was trained on",
    "segments_hash": "the teacher's tokenizer cuts text into other tokens than the student's, though the ids are the "
    "same: it reads the student's pieces, which may not be what it was trained on; take a teacher with this tokenizer",
    "end_token": "the teacher's end token is another than the student's: a student that learns it goes on after it; "
    "name both as eos_token_id in the student's generation_config.json",
}


def tokenizer_traits(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """What a tokenizer does beside mapping tokens to ids.

    Args:
        tokenizer: of student or teacher.

    Returns:
        `template_hash`, of the chat template; `segments_hash`, of the ids of PROBE; `end_token`.
    """
    parts = {"template_hash": str(tokenizer.chat_template or ""),
             "segments_hash": str(tokenizer.encode(PROBE, add_special_tokens=False))}  # fmt: skip
    return {name: _hash(text) for name, text in parts.items()} | {"end_token": str(tokenizer.eos_token)}


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def shared_ids(tokenizer: PreTrainedTokenizerBase, student_size: int, vocabulary: dict[str, int], size: int) -> int:
    """How many of the first token ids student and teacher share.

    Embeddings of the same tokenizer are often padded to different sizes (151,936 and 152,064). Tokens that only one
    side knows, such as an added pad token, do no harm.

    Args:
        tokenizer: the student's.
        student_size: rows of its output head.
        vocabulary: the teacher's ids by token.
        size: rows of the teacher's output head.

    Returns:
        The smaller size.

    Raises:
        ValueError: an id is another token on the other side; names the first.
    """
    own = {id_: token for token, id_ in tokenizer.get_vocab().items()}
    other = {id_: token for token, id_ in vocabulary.items()}
    different = [id_ for id_ in sorted(own.keys() & other.keys()) if own[id_] != other[id_]]
    moved = [token for token, id_ in tokenizer.get_vocab().items() if vocabulary.get(token, id_) != id_]
    if different or moved:
        first = different[0] if different else vocabulary[moved[0]]
        raise ValueError(
            f"student and teacher have different tokenizers: id {first} is {own.get(first)!r} for the student and "
            f"{other.get(first)!r} for the teacher ({len(different)} ids differ); a divergence over the vocabulary "
            "needs the same ids: take a teacher of the student's family, or set other_tokenizer to 'spans' or 'uld'"
        )
    return min(student_size, size)
