"""A teacher in this process, and what must be true of any teacher's vocabulary; common/distill/teacher_client.py has
the other.

Both kinds of teacher have `fill`, which writes what the teacher says of each completion token into micro-batches,
`generate`, `offload` and `onload`, `name`, `weights`, `head`, `habits`, `vocabulary_size` and `shared`.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from common.base.checks import require
from common.base.distributed import print_main
from common.distill import distillation
from common.generation import batches, rollout
from common.model import logprobs, models, sources
from common.tasks.data import Example
from common.training.offload import Offloader

# cut by both tokenizers: digits, code, spaces, capitals, an accent as one character and as two, other scripts
PROBE = "Is 12345+678 = 13023?\n\n  def f(x):\treturn x**2  # don't  caf\u00e9 cafe\u0301 \u4f60\u597d \u0416 A\u00a0b"


class LocalTeacher:
    """A frozen model on GPUs of this process.

    Attributes:
        name: of the model.
        head: the output head; None if only log-probabilities of tokens are asked for.
        habits: of its tokenizer, see `habits`.
        vocabulary_size: rows of the output head.
        shared: number of the first token ids that count, those that the student has too.
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
    ):
        """Loads the model.

        Args:
            name: as in `sources.find`.
            where: its devices; over several the layers are spread.
            dtype: as in `sources.pick_dtype`.
            temperature: divides its logits.
            compile: as in `logprobs.LogProbs`.
            tokens_only: `fill` writes log-probabilities of the tokens instead of hidden states.

        Raises:
            ValueError: the model cannot be loaded.
        """
        self.name, self.tokenizer = name, sources.load_tokenizer(name)
        self.model = models.load_spread(name, list(where), dtype)
        output = self.model.get_output_embeddings()
        self.device, self.vocabulary_size = self.model.device, len(output.weight)
        self.shared, self.habits = self.vocabulary_size, habits(self.tokenizer)
        self.head = None if tokens_only else distillation.Head(self.model)
        compile = compile and len(where) == 1
        kind = logprobs.LogProbs if tokens_only else distillation.HiddenStates
        self.field = "teacher_token_logps" if tokens_only else "teacher_states"
        self.forward = kind(self.model, temperature, compile)
        self._compile, self._samplers = compile, {}
        # the head is at work in the update, when the rest may be away
        self.memory = Offloader(self.model, keep=[] if tokens_only else list(output.parameters()))

    @property
    def weights(self) -> str:
        """What `models.fingerprint` says of them."""
        return models.fingerprint(self.model)

    def vocabulary(self) -> dict[str, int]:
        """Ids by token."""
        return self.tokenizer.get_vocab()

    def fill(self, micros: Iterable[batches.RolloutBatch], micro_batch_tokens: int) -> None:
        """Writes last hidden states [m, C, H], or log-probabilities of the tokens [m, C], into micro-batches.

        Args:
            micros: as the update will see them.
            micro_batch_tokens: what they were cut to; without gradients a few of them are computed at once.

        Raises:
            FloatingPointError: something is not finite.
        """
        micros = list(micros)
        logprobs.fill(micros, self.field, self.forward, self.device, micro_batch_tokens)
        # or the run would end at a gradient, and nothing would tell whether student or teacher is at fault
        if not all(bool(getattr(micro, self.field).isfinite().all()) for micro in micros):
            dtype = str(self.model.dtype).removeprefix("torch.")
            raise FloatingPointError(
                f"teacher {self.name!r}: its {self.field.removeprefix('teacher_')} are not all finite; they are too "
                f"large for {dtype}, or the model is broken: set dtype to 'bf16' or 'fp32', or take another teacher"
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
            numbers: names of the prompts' random numbers: the same number and seed, the same completion.
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
                suppressed_ids=range(self.shared, self.vocabulary_size), compile=self._compile,
            )  # fmt: skip
        batch = self._samplers[max_new_tokens].generate(
            prompts, group_size=1, temperature=temperature, seed=seed, prompt_numbers=numbers
        )
        return [ids[:n] for ids, n in zip(batch.completion_ids.tolist(), batch.lengths.tolist(), strict=True)]

    def offload(self) -> float:
        """Moves all but the head to CPU memory, until `onload`; GiB freed."""
        for sampler in self._samplers.values():
            sampler.release()
        return self.memory.offload()

    def onload(self) -> None:
        """Moves back what `offload` moved."""
        self.memory.onload()


def agree(
    teacher: Any, tokenizer: PreTrainedTokenizerBase, student_size: int, allow_other_template: bool = False
) -> int:
    """Makes sure that token ids mean the same to student and teacher, and tells the teacher which of them count.

    Args:
        teacher: a `LocalTeacher` or a `RemoteTeacher`; its `shared` is set.
        tokenizer: the student's.
        student_size: rows of the student's output head.
        allow_other_template: warn, and do not refuse, if both have a chat template and these differ.

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
    own, none = habits(tokenizer), _hash("")
    templates = own["template_hash"], teacher.habits.get("template_hash", none)
    require(
        allow_other_template or none in templates or templates[0] == templates[1],
        "the teacher's chat template is another than the student's",
        "it would judge prompts that look like none it was trained on, though the loss looks normal",
        "give the student the teacher's template (tokenizer.chat_template), or set allow_other_template",
    )
    for name, what in UNLIKE.items():
        if teacher.habits.get(name, own[name]) != own[name]:  # a server of an older version does not say all of them
            print_main(f"warning: {what}")
    return teacher.shared


def require_same(teacher: Any, notes: dict[str, Any]) -> None:
    """Refuses to go on from a checkpoint with another teacher: nothing in the curves would tell.

    Args:
        teacher: a `LocalTeacher` or a `RemoteTeacher`.
        notes: of the checkpoint; empty for a new run.

    Raises:
        ValueError: the weights are others.
    """
    was = notes.get("teacher", teacher.weights)  # not in checkpoints of older versions
    require(
        was == teacher.weights,
        f"the teacher {teacher.name!r} has the weights {teacher.weights[:12]}",
        f"must be those that this run began with, {was[:12]}: a run has one teacher",
        "give that one, in the same dtype; or start anew in another out_dir, with the checkpoint as student_model",
    )


def require_shared(examples: Iterable[Example], shared: int) -> None:
    """Refuses prompts with token ids that one of the two does not have.

    Args:
        examples: rows of the data.
        shared: number of the first ids that both have.

    Raises:
        ValueError: an id is not among those; it names the row.
    """
    for example in examples:
        if max(example.prompt_ids) >= shared:
            raise ValueError(
                f"row {example.index}: its prompt holds token id {max(example.prompt_ids)}, which is not among the "
                f"first {shared} ids that student and teacher share; take that special token out of the data or of the "
                "chat template"
            )


# What tokenizers with equal ids can differ in. The ids mean the same all the same, so the run goes on; but the teacher
# was trained on other sequences of them.
UNLIKE = {
    "template_hash": "the teacher's chat template is another than the student's: it reads prompts as the student's "
    "template writes them, which may not be what it was trained on",
    "segments_hash": "the teacher's tokenizer cuts text into other tokens than the student's, though the ids are the "
    "same: it reads the student's pieces, which may not be what it was trained on; take a teacher with this tokenizer",
    "end_token": "the teacher's end token is another than the student's: a student that learns it goes on after it; "
    "name both as eos_token_id in the student's generation_config.json",
}


def habits(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """What a tokenizer does beside giving ids to tokens.

    Args:
        tokenizer: of student or teacher.

    Returns:
        `template_hash`, of the chat template; `segments_hash`, of the ids of some text; `end_token`.
    """
    parts = {"template_hash": str(tokenizer.chat_template or ""),
             "segments_hash": str(tokenizer.encode(PROBE, add_special_tokens=False))}  # fmt: skip
    return {name: _hash(text) for name, text in parts.items()} | {"end_token": str(tokenizer.eos_token)}


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def shared_ids(tokenizer: PreTrainedTokenizerBase, student_size: int, vocabulary: dict[str, int], size: int) -> int:
    """How many of the first token ids student and teacher share; says so where one has more than the other.

    Embeddings of the same tokenizer are often padded to different sizes (151,936 and 152,064). Tokens that only one of
    them knows, an added pad token, say, do no harm.

    Args:
        tokenizer: the student's.
        student_size: rows of its output head.
        vocabulary: the teacher's ids by token.
        size: rows of the teacher's output head.

    Returns:
        The smaller size.

    Raises:
        ValueError: the same id is another token; it names the first.
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
            "needs the same ids: take a teacher of the student's family"
        )
    return min(student_size, size)
