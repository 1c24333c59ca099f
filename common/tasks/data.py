"""Rows of prompts and answers: read, checked, tokenised once, and handed out in a resumable order.

Reading a source is in data_sources.py, chat template and BOS in prompt_encoding.py.

Columns:  the prompt is the first of `prompt`, `question`, `messages` that is not null: text, or
          chat messages. The ground truth is `answer`: text, or a number, which becomes text (8 and
          8.0 become "8"). Every other column reaches the reward functions, with None in rows that
          lack it. The names of the arguments that they get anyway (`scoring.ARGUMENTS`) are refused.
Tools:    the column `tools`, a list of JSON schemas or JSON text of one, goes to the chat template,
          and to the reward functions as it is. Columns of media (MEDIA) are refused where not null.
Chat:     a last assistant turn is the reply to learn. It is removed from the prompt, and is the
          answer where `answer` is missing or null, unless it calls tools. Contents are text, or a
          list of text parts, which are joined; roles are those of ROLES.
Length:   prompts over `max_prompt_tokens` are dropped and counted, never cut.
Teacher:  what it reads in place of the prompt, if `teacher_prompt` is set, is in privileged.py.
Memory:   each process keeps all rows in Python lists: as measured, 1.25 kB for a row of 30 prompt
          tokens and a short answer and 2.1 kB for a GSM8K row, with no higher peak while loading. A
          million short rows on 8 ranks take 10 GB; cut larger data into several files, and train on
          one after the other.
"""

import functools
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from common.base import distributed
from common.base.distributed import print_main
from common.tasks import thinking
from common.tasks.data_sources import read_rows
from common.tasks.privileged import encode as encode_privileged
from common.tasks.prompt_encoding import SURROGATE, encode, encode_prompts, without_nulls
from common.tasks.scoring import ARGUMENTS, Scored

__all__ = ["Example", "PromptStream", "collate_columns", "encode_prompts", "load_examples", "permutation", "read_rows"]

PROMPT_COLUMNS = ("prompt", "question", "messages")
PROMPT_LOOKALIKES = (*PROMPT_COLUMNS, "problem", "instruction", "query", "input", "text", "conversations")
RESERVED = (*(name for name in ARGUMENTS if name != "answer"), "self")  # arguments of reward functions
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation")
MEDIA = ("image", "images", "video", "videos", "audio", "audios", "multi_modal_data")
ANSWER_LOOKALIKES = ("answer", "solution", "ground_truth", "final_answer", "target", "label", "output", "response")


@dataclass(frozen=True, slots=True)
class Example:
    """One row of the data, checked and tokenised."""

    index: int  # row number in the data, from 0
    prompt: str | list[dict]  # text or chat messages, without a last assistant turn
    prompt_ids: list[int]  # the tokens that the policy sees
    answer: str | None  # ground truth as text ("8" for the integer 8)
    columns: dict[str, Any]  # every other column, passed to the reward functions
    reply_start: str = ""  # of the reply, the part that the prompt already holds: "<think>\n", or nothing
    reply: dict | None = None  # assistant turn to learn; None: the answer
    privileged_ids: list[int] | None = None  # the tokens that a teacher sees, with `teacher_prompt`; None: prompt_ids

    @property
    def identity(self) -> str:
        """What a position in the data is valid for."""
        return f"{self.prompt_ids} {self.answer!r}"

    @property
    def teacher_ids(self) -> list[int]:
        """Tokens of the prompt that a teacher reads."""
        return self.prompt_ids if self.privileged_ids is None else self.privileged_ids


def load_examples(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
    *,
    split: str = "train",
    apply_chat_template: bool = True,
    system_prompt: str = "",
    template_kwargs: Mapping[str, Any] | None = None,
    need_answer: bool = True,
    limit: str = "max_prompt_tokens",
    teacher_prompt: str = "",
    max_teacher_prompt_tokens: int = 0,
) -> list[Example]:
    """Reads a source and tokenises its prompts by the rules at the top of this file.

    Args:
        source: As in `read_rows`.
        tokenizer: The policy's tokenizer.
        max_prompt_tokens: Longest prompt in tokens, template included; longer ones are dropped.
        split: As in `read_rows`.
        apply_chat_template: As in `prompt_encoding.encode`.
        system_prompt: The same.
        template_kwargs: The same.
        need_answer: Whether a row without a ground truth is an error.
        limit: Option that gave `max_prompt_tokens`, for messages.
        teacher_prompt: Template of what a teacher reads, see privileged.py; "": the prompt.
        max_teacher_prompt_tokens: Longest such prompt in tokens; rows with longer ones are dropped.

    Returns:
        The rows that fit, in the order of the data.

    Raises:
        ValueError: A row is unusable (the message names it), or no prompt fits.
    """
    rows = read_rows(source, split)
    names = list(dict.fromkeys(name for row in rows for name in row))
    if taken := [name for name in RESERVED if name in names]:
        raise ValueError(
            f"{source}: columns {', '.join(taken)}: reward functions get arguments of these names already; rename or "
            "remove them"
        )
    fields = [_parse_row(row, names, f"{source}, row {i}", need_answer) for i, row in enumerate(rows)]
    tools = [tools_of(row.get("tools"), f"{source}, row {i}") for i, row in enumerate(rows)]
    prompt_ids, reply_starts = encode(
        [row[0] for row in fields], source, tokenizer, apply_chat_template, system_prompt,
        template_kwargs=template_kwargs, tools=tools,
    )  # fmt: skip
    privileged: Sequence[list[int] | None] = [None] * len(rows)
    if teacher_prompt:
        privileged = encode_privileged(
            teacher_prompt, [row[0] for row in fields], [row | {"answer": field[1]} for row, field in
            zip(rows, fields, strict=True)], source, tokenizer, apply_chat_template, system_prompt, template_kwargs,
            tools, reply_starts,
        )  # fmt: skip
    examples = [
        Example(index, prompt, ids, answer, columns, start, reply, for_teacher)
        for index, ((prompt, answer, columns, reply), ids, start, for_teacher) in enumerate(
            zip(fields, prompt_ids, reply_starts, privileged, strict=True)
        )
        if len(ids) <= max_prompt_tokens
    ]
    num_dropped = len(rows) - len(examples)
    dropped = f"{num_dropped} of {len(rows)} prompts longer than {max_prompt_tokens} tokens ({limit})"
    if not examples:
        shortest = min(map(len, prompt_ids))
        raise ValueError(f"{source}: {dropped}, so none is left; raise it to {shortest}, the shortest prompt, or more")
    if num_dropped:
        print_main(f"{source}: dropped {dropped}")
    return _within(examples, max_teacher_prompt_tokens, source) if teacher_prompt else examples


def _within(examples: list[Example], most: int, source: str) -> list[Example]:
    """Those whose prompts for the teacher are short enough; there must be one."""
    kept = [example for example in examples if len(example.teacher_ids) <= most]
    dropped = (f"{len(examples) - len(kept)} of {len(examples)} rows whose prompts for the teacher are longer than "
               f"{most} tokens (max_teacher_prompt_tokens)")  # fmt: skip
    if not kept:
        shortest = min(len(example.teacher_ids) for example in examples)
        raise ValueError(f"{source}: {dropped}, so none is left; raise it to {shortest}, the shortest, or more")
    if len(kept) < len(examples):
        print_main(f"{source}: dropped {dropped}")
    return kept


def _parse_row(
    row: dict, names: list[str], where: str, need_answer: bool
) -> tuple[str | list[dict], str | None, dict, dict | None]:
    """Splits a row into prompt, answer, other columns and reply; `names` are those of all rows."""
    for name, value in row.items():
        if name.lower() in MEDIA and not _is_blank(value) and value not in ([], {}):
            raise ValueError(f"{where}: the column `{name}` holds media, and {_NO_MEDIA}; or remove the column")
    used = next((name for name in PROMPT_COLUMNS if not _is_blank(row.get(name))), None)
    if used is None:
        raise ValueError(_missing_field(row, "prompt", PROMPT_LOOKALIKES, where))
    prompt, reply = row[used], None
    if isinstance(prompt, list):
        prompt, reply = _split_reply(prompt, where)
    elif not isinstance(prompt, str) or used == "messages":
        wanted = "a list of chat messages" if used == "messages" else "text or a list of chat messages"
        raise ValueError(f"{where}: `{used}` is {type(prompt).__name__}, expected {wanted}")
    answer = _answer_text(row.get("answer"), where)
    if answer is None and reply is not None and not reply.get("tool_calls"):
        answer = _answer_text(reply["content"], where)
    if need_answer and answer is None:
        raise ValueError(_missing_field(row, "answer", ANSWER_LOOKALIKES, where))
    return prompt, answer, {name: row.get(name) for name in names if name not in (used, "answer")}, reply


def _split_reply(messages: list, where: str) -> tuple[list[dict], dict | None]:
    """Splits a chat into the turns before the reply, and the reply: a last assistant turn, or None."""
    messages = [checked_turn(turn, where) for turn in messages]
    prompt, reply = messages, None
    if messages and messages[-1]["role"] == "assistant":
        prompt, reply = messages[:-1], messages[-1]
    last = prompt[-1] if prompt else {"role": "assistant"}
    if last["role"] == "assistant" or (last["role"] == "user" and _is_blank(last["content"])):
        raise ValueError(
            f"{where}: the chat has no turn to answer; end it with a user turn, or one reply to such a turn"
        )
    return prompt, reply


def checked_turn(turn: Any, where: str) -> dict:
    """A chat message with its content as text; refuses what templates would skip or format in a way of their own."""
    if isinstance(turn, dict) and turn.get("role") == "assistant" and turn.get("tool_calls"):
        turn = {"content": None} | turn
    if not isinstance(turn, dict) or "role" not in turn or "content" not in turn:
        raise ValueError(f"{where}: a chat message needs the keys `role` and `content`, got {turn!r:.80}")
    role, content = turn["role"], turn["content"]
    if role not in ROLES:  # a reply under another role would stay in the prompt
        raise ValueError(f"{where}: the role of a chat message is {role!r:.40}, expected one of {', '.join(ROLES)}")
    if isinstance(content, list) and content:
        return turn | {"content": "".join(_text_of_part(part, where) for part in content)}
    calls_tools = role == "assistant" and bool(turn.get("tool_calls"))
    if not isinstance(content, str) and not (content is None and calls_tools):
        # many templates would write the Python repr of None or of a dict
        kind = type(content).__name__
        raise ValueError(f"{where}: the content of a chat message is {kind}, expected text; correct the row")
    return turn


def _text_of_part(part: Any, where: str) -> str:
    """The text of a part of a content, {"type": "text", "text": ...}."""
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind == "text" and isinstance(part.get("text"), str):
        return part["text"]
    if kind == "text":
        raise ValueError(f"{where}: a text part of a chat message has no text; correct the row")
    raise ValueError(f"{where}: a chat message has a part of the type {kind!r:.40}, and {_NO_MEDIA}")


_NO_MEDIA = (
    'this script trains on text only: it reads parts {"type": "text", "text": ...}; for images use '
    "grpo/poster/poster_grpo.py"
)


def tools_of(value: Any, where: str) -> list[dict] | None:
    """The column `tools`: JSON schemas; None for null and for an empty list."""
    if _is_blank(value):
        return None
    tools = _from_json(value)
    tools = list(map(_from_json, tools)) if isinstance(tools, list) else [tools]
    names = [(tool.get("function") or tool) if isinstance(tool, dict) else None for tool in tools]
    if not all(isinstance(schema, dict) and isinstance(schema.get("name"), str) for schema in names):
        raise ValueError(
            f"{where}: `tools` is {value!r:.80}, expected a list of JSON schemas, or JSON text of one: "
            '[{"type": "function", "function": {"name": ..., "parameters": ...}}]; correct the row, or rename a column '
            "that means something else"
        )
    return (tools if isinstance(value, str) else without_nulls(tools)) or None


def _from_json(value: Any) -> Any:
    """JSON text as what it stands for; anything else as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _is_blank(value: Any) -> bool:
    """Whether a value is null or white space."""
    return value is None or (isinstance(value, str) and not value.strip())


def _answer_text(value: Any, where: str) -> str | None:
    """A ground truth as text; None for null, blank text and NaN, which tables write for null."""
    if _is_blank(value) or (isinstance(value, float) and math.isnan(value)):
        return None
    match value:
        case str():
            if SURROGATE.search(value):
                raise ValueError(f"{where}: the answer holds half a character (surrogate); correct the row")
            return value
        case float() if math.isfinite(value):  # from the shortest digits: int(1e23) has others
            return str(int(Decimal(repr(value)))) if value.is_integer() else str(value)
        case Decimal() if value.is_finite():  # of a table, with the digits that it stores
            return f"{value:f}"
        case int() if not isinstance(value, bool):  # a bool could mean "True", "true" or "yes"
            return str(value)
    kind = f"{value}" if isinstance(value, float) else type(value).__name__
    raise ValueError(f"{where}: the answer is {kind}, expected text or a finite number; correct or rename that column")


def _missing_field(row: dict, field: str, lookalikes: tuple[str, ...], where: str) -> str:
    """Error message for a row without `field`, with the column that was probably meant."""
    names = [name for name in row if name != field and name.lower() in lookalikes and not _is_blank(row[name])]
    meant = names[0] if names else None
    remedy = f"rename `{meant}` to `{field}`" if meant else f"add it, or rename the column that holds it to `{field}`"
    if meant == "conversations":
        remedy = 'rename `conversations` to `messages`, with turns {"role": "user", "content": ...}'
    elif meant == "instruction" and "input" in row:
        remedy = "write `instruction` and `input` into one text, `prompt`"
    return f"{where}: `{field}` is missing or empty; columns found: {', '.join(row) or 'none'}; {remedy}"


def warn_unclosed(starts: Sequence[str], replies: Sequence[str], rows: Sequence[int]) -> None:
    """Warns of replies that are learned inside of a thought, which their prompt opens and they do not close.

    Args:
        starts: thoughts that the prompts leave open, "" for none.
        replies: text behind each prompt.
        rows: their numbers in the data.
    """
    texts = [start + reply.removeprefix(start) for start, reply in zip(starts, replies, strict=True)]
    unclosed = [i for i, text in enumerate(texts) if starts[i] and thinking.after_thought(text) is None]
    if unclosed:
        print_main(
            f"warning: the prompts of {len(unclosed)} rows, such as row {rows[unclosed[0]]}, open a thought that the "
            "answers do not close, so the model learns to answer inside of it: add thoughts to the answers, or set "
            "chat_template_kwargs to '{\"enable_thinking\": false}' if the chat template reads that"
        )


def collate_columns(examples: list[Example], group_size: int) -> tuple[list[str | None], dict[str, list]]:
    """Repeats answers and columns for the completions of each prompt.

    Args:
        examples: The P prompts of a step.
        group_size: G, completions per prompt.

    Returns:
        Answers, and columns by name: lists of P * G values in the order p0, p0, .., p1, p1, ..
    """
    repeated = [example for example in examples for _ in range(group_size)]
    names = dict.fromkeys(name for example in examples for name in example.columns)
    columns = {name: [example.columns.get(name) for example in repeated] for name in names}
    return [example.answer for example in repeated], columns


class PromptStream:
    """Endless batches of prompts; every epoch is a new permutation, and batches may cross its end.

    The whole state is `position`, the number of prompts handed out so far on all ranks together. It
    does not depend on the number of ranks, so a run that resumes on more or fewer GPUs neither
    repeats nor skips a row of its epoch.
    """

    def __init__(
        self, examples: list[Example], batch_size: int, seed: int, position: int = 0, rank: int = 0, num_ranks: int = 1
    ):
        """Starts the stream.

        Args:
            examples: All rows, the same on every rank.
            batch_size: P, prompts per step on all ranks together.
            seed: Of the permutations, the same on every rank.
            position: Prompts that were handed out before; from a checkpoint.
            rank: This process, 0 <= rank < num_ranks.
            num_ranks: Processes that share every batch.

        Raises:
            ValueError: There are fewer rows than batch_size, batch_size is not a multiple of
                num_ranks, or rank or position is out of range.
        """
        if not 1 <= batch_size <= len(examples):
            raise ValueError(f"{len(examples)} rows, batch_size {batch_size}: use a batch_size from 1 to the row count")
        if batch_size % num_ranks:
            below = batch_size // num_ranks * num_ranks
            usable = [str(size) for size in (below, below + num_ranks) if 0 < size <= len(examples)]
            raise ValueError(
                f"batch_size {batch_size} on {num_ranks} ranks: every rank takes the same number of prompts; "
                f"usable: {' or '.join(usable) or 'fewer ranks'}"
            )
        if not 0 <= rank < num_ranks or position < 0:
            raise ValueError(f"rank {rank} of {num_ranks}, position {position}: ranks and positions count from 0")
        self.examples, self.batch_size, self.seed = examples, batch_size, seed
        self.position, self.rank, self.num_ranks = position, rank, num_ranks
        self._epoch, self._order, self._round = -1, [], 0

    @functools.cached_property
    def fingerprint(self) -> str:
        """Checksum of the rows in order, because a position is valid for these rows only."""
        checksum = 0
        for example in self.examples:
            checksum = zlib.crc32(example.identity.encode(errors="backslashreplace"), checksum)
        return f"{len(self.examples)} rows, CRC-32 {checksum:08x}"

    def warn_if_changed(self, known: str | None) -> None:
        """Warns if a resumed run was started on other data.

        Args:
            known: `fingerprint` from the checkpoint; None: unknown, or a new run.
        """
        if known not in (None, self.fingerprint):
            print_main(
                f"warning: the training data have changed since the checkpoint ({known}; now {self.fingerprint}): rows "
                "of this epoch may come twice, or not at all"
            )

    def next(self) -> list[Example]:
        """Returns this rank's prompts of the next batch, batch_size / num_ranks of them."""
        self._round = 0
        return self._take(self.batch_size)[self.rank :: self.num_ranks]

    def replace(self, examples: list[Example], unwanted: Sequence[bool]) -> tuple[list[int], list[int]]:
        """Replaces some of the prompts that `next` returned by new ones; a collective.

        The replaced places of all ranks get the next rows in the order of their places in the whole
        batch, so the same rows go to the same places on any number of ranks.

        Args:
            examples: This rank's part of the batch, changed in place.
            unwanted: One flag per example.

        Returns:
            The places that changed, and a number for each new prompt that is unique in the step.
        """
        self._round += 1
        own = [place * self.num_ranks + self.rank for place, flag in enumerate(unwanted) if flag]
        everyones = sorted(place for part in distributed.gather_objects(own) for place in part)
        for place, example in zip(everyones, self._take(len(everyones)), strict=True):
            if place % self.num_ranks == self.rank:
                examples[place // self.num_ranks] = example
        return [place // self.num_ranks for place in own], [self._round * self.batch_size + place for place in own]

    def learn(self, examples: Sequence[Example], scored: Scored, among: Sequence[bool] | None = None) -> None:
        """Nothing: the order does not depend on rewards. In `Curriculum` and `Greso` it does."""

    def end_step(self) -> dict[str, float]:
        """Ends a step; returns no metrics."""
        return {}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Tensors for a checkpoint, beside `position`: none."""
        return {}

    def _take(self, count: int) -> list[Example]:
        """The next rows of all ranks together."""
        taken = [self._example_at(self.position + i) for i in range(count)]
        self.position += count
        return taken

    def _example_at(self, position: int) -> Example:
        epoch, offset = divmod(position, len(self.examples))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, permutation(len(self.examples), self.seed, epoch)
        return self.examples[self._order[offset]]


def permutation(num_rows: int, seed: int, epoch: int) -> list[int]:
    """Order of the rows in one epoch, a function of the arguments alone, for ranks and resuming."""
    # The CPU generator reads only the low 32 bits of a seed. With seed + epoch, neighbouring seeds
    # would share the orders of neighbouring epochs.
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**32)
    return torch.randperm(num_rows, generator=generator).tolist()
