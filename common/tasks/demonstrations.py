"""Conversations as fine-tuning learns them: token ids, and which of them are the assistant's.

Reply:  the last assistant turn of the prompt's chat; else the column `completion`, text or a list
        of one assistant turn; else the answer.
Turns:  a chat with several assistant turns is one row whose loss covers all of them, if the chat
        template only appends: the tokens of each reply then follow exactly those that the policy
        would see there. Some templates rewrite earlier turns, for instance by dropping thoughts.
        Then each reply becomes a row of its own, behind its own prompt. Turns of the assistant that
        nobody has asked for, such as a greeting before the first turn of the user, are context.
End:    a reply ends with the token that the chat template writes behind one, if that ends
        generation, else with the tokenizer's EOS. A reply that is empty, or holds such a token
        before its end, is an error.
"""

import dataclasses
import itertools
from array import array
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from common.base.checks import require
from common.base.distributed import print_main
from common.tasks import data, prompt_encoding
from common.tasks.chat_templates import Frame
from common.tasks.data import Example
from common.tasks.prompt_encoding import ROWS_PER_CALL, Encoded

_FOLLOWING = {"role": "tool", "content": "-"}  # a turn after a call, to see what a template writes for the call
_OPENING = ("system", "developer", "assistant")  # roles of turns that ask for nothing


@dataclass(frozen=True, slots=True)
class Demonstration(Example):
    """A row to learn: `prompt_ids` precede the first reply."""

    completion_ids: array = field(default_factory=lambda: array("i"))  # replies, and the turns between them
    learned: array = field(default_factory=lambda: array("b"))  # 1 for each of these tokens that is in the loss, else 0

    @property
    def identity(self) -> str:
        """What a position in the data is valid for."""
        return f"{self.prompt_ids} {self.completion_ids} {self.learned}"

    @property
    def tokens(self) -> int:
        """Length in tokens."""
        return len(self.prompt_ids) + len(self.completion_ids)


def load(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    end_ids: Sequence[int],
    max_tokens: int,
    *,
    max_prompt_tokens: int = 0,
    split: str = "train",
    last_turn_only: bool = False,
    apply_chat_template: bool = True,
    system_prompt: str = "",
    template_kwargs: dict[str, Any] | None = None,
) -> list[Demonstration]:
    """Reads a source and encodes its conversations by the rules at the top of this file.

    Args:
        source: as in `data.read_rows`.
        tokenizer: of the policy.
        end_ids: every token that ends a completion.
        max_tokens: maximum length of a conversation; longer ones are dropped and counted.
        max_prompt_tokens: maximum length of what precedes the last reply; 0: none.
        split: as in `data.read_rows`.
        last_turn_only: learn the last reply of each conversation only.
        apply_chat_template: as in `data.load_examples`.
        system_prompt: the same.
        template_kwargs: the same.

    Raises:
        ValueError: a row has no reply, or is unusable for another reason; or no conversation fits.
    """
    most, limit = min((max_prompt_tokens or max_tokens + 1, "max_prompt_tokens"), (max_tokens, "max_tokens"))
    examples = data.load_examples(
        source, tokenizer, most, split=split, need_answer=False, limit=limit,
        apply_chat_template=apply_chat_template, system_prompt=system_prompt, template_kwargs=template_kwargs,
    )  # fmt: skip
    require(tokenizer.eos_token_id is not None, "the tokenizer has no end token", "a reply ends with it",
            "set eos_token and save the tokenizer with the model")  # fmt: skip
    use_template = apply_chat_template and bool(tokenizer.chat_template)
    end = _end_of_reply(tokenizer, end_ids, source) if use_template else tokenizer.eos_token_id

    writer = _Writer(source, tokenizer, end, {*end_ids, end})

    def encode(chats: Sequence[list[dict]], chatting: Sequence[Example]) -> Encoded:
        if not chats:
            return Encoded([], [])
        return prompt_encoding.encode(
            chats, source, tokenizer, True, system_prompt, template_kwargs=template_kwargs,
            tools=[_tools(example) for example in chatting], again=[example.index for example in chatting],
        )  # fmt: skip

    replies = [_reply(example, f"{source}, row {example.index}") for example in examples]
    last_ids = _encode_replies(examples, replies, writer, encode)
    single = [
        _row(example, example.prompt_ids, [(example.prompt_ids, ids)])
        for example, ids in zip(examples, last_ids, strict=True)
    ]
    rows = single if last_turn_only else _with_earlier_turns(single, writer, encode)
    kept = [row for row in rows if row.tokens <= max_tokens]
    dropped = f"{len(rows) - len(kept)} of {len(rows)} conversations longer than {max_tokens} tokens (max_tokens)"
    if not kept:
        shortest = min(row.tokens for row in rows)
        raise ValueError(f"{source}: {dropped}, so none is left; raise it to {shortest}, the shortest, or more")
    if len(kept) < len(rows):
        print_main(f"{source}: dropped {dropped}")
    texts = [reply["content"] or "" for reply in replies]
    data.warn_unclosed([row.reply_start for row in single], texts, [row.index for row in single])
    return kept


def of_texts(
    examples: Sequence[Example], replies: Sequence[str], tokenizer: PreTrainedTokenizerBase, end: int, source: str
) -> list[Demonstration]:
    """Rows that learn one reply each.

    Args:
        examples: what the replies answer.
        replies: texts.
        tokenizer: of the policy.
        end: the token that ends a reply.
        source: of the data, for messages.

    Raises:
        ValueError: a reply is empty or cannot be encoded.
    """
    ids = _Writer(source, tokenizer, end, {end}).ids(replies, [example.index for example in examples])
    return [
        _row(example, example.prompt_ids, [(example.prompt_ids, own)])
        for example, own in zip(examples, ids, strict=True)
    ]


@dataclass(frozen=True)
class _Writer:
    """Writes replies as tokens."""

    source: str
    tokenizer: PreTrainedTokenizerBase
    end: int  # the token behind a reply
    end_ids: Set[int]  # every token that ends generation

    def ids(self, texts: Sequence[str], rows: Sequence[int]) -> list[list[int]]:
        """Token ids of replies, end token included; an end token that the text holds already is not doubled.

        Raises:
            ValueError: a reply is empty, holds half a character, or goes on behind an end token.
        """
        found = []
        for start in range(0, len(texts), ROWS_PER_CALL):
            part = texts[start : start + ROWS_PER_CALL]
            for text, row in zip(part, rows[start:], strict=False):
                self.require_text(text, row)
            encoded = self.tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]
            found += [[*self._before_end(ids, rows[i]), self.end] for i, ids in enumerate(encoded, start)]
        return found

    def require_text(self, text: str, row: int) -> None:
        """Requires something that can be learned."""
        if not text.strip():
            raise ValueError(self._empty(row))
        if prompt_encoding.SURROGATE.search(text):
            raise ValueError(f"{self.source}, row {row}: the reply holds half a character (surrogate); correct the row")

    def _before_end(self, ids: list[int], row: int) -> list[int]:
        cut = next((i for i, token in enumerate(ids) if token in self.end_ids), len(ids))
        rest = self.tokenizer.decode([token for token in ids[cut:] if token not in self.end_ids]).strip()
        if rest:
            raise ValueError(
                f"{self.source}, row {row}: a reply goes on behind {self.tokenizer.decode(ids[cut])!r}, which ends "
                f"generation: {rest!r:.40}; take that token out, or write a longer chat into `messages`"
            )
        if cut == 0:
            raise ValueError(self._empty(row))
        return ids[:cut]

    def _empty(self, row: int) -> str:
        return (
            f"{self.source}, row {row}: a reply of the assistant is empty, so the policy would learn to say nothing; "
            "fill it, or remove the row"
        )


def _end_of_reply(tokenizer: PreTrainedTokenizerBase, end_ids: Sequence[int], source: str) -> int:
    """The token that ends a reply in the chat template, if it ends generation; else EOS."""
    ending = Frame.of_reply(tokenizer, source).ending.lstrip()
    ids = tokenizer(ending, add_special_tokens=False, verbose=False)["input_ids"] if ending else []
    return ids[0] if ids and ids[0] in end_ids else tokenizer.eos_token_id


def _reply(example: Example, where: str) -> dict:
    """The assistant turn to learn."""
    if example.reply is not None:
        return example.reply
    value = example.columns.get("completion")
    if isinstance(value, list):
        turns = [data.checked_turn(turn, where) for turn in value]
        if len(turns) != 1 or turns[0]["role"] != "assistant":
            raise ValueError(
                f"{where}: `completion` holds {len(turns)} turns, expected one of the assistant; write a longer chat "
                "into `messages`"
            )
        return turns[0]
    if not isinstance(value, str) and value is not None and value == value:  # tables write NaN for null
        raise ValueError(
            f"{where}: `completion` is {type(value).__name__}, expected text or a list of one turn of the assistant; "
            "correct the row, or rename a column that means something else"
        )
    text = value if isinstance(value, str) and value.strip() else example.answer
    if text is None:
        meant = [name for name in data.ANSWER_LOOKALIKES if isinstance(example.columns.get(name), str)]
        remedy = f"rename `{meant[0]}` to" if meant else "add a column"
        raise ValueError(
            f"{where}: there is no reply to learn; end `messages` with an assistant turn, or {remedy} `completion`"
            f"{'' if meant else ' or `answer`'}"
        )
    return {"role": "assistant", "content": text}


def _encode_replies(
    examples: Sequence[Example], replies: Sequence[dict], writer: _Writer, encode: Any
) -> list[list[int]]:
    """Token ids of the last reply of each row, end token included."""
    found: dict[int, list[int]] = {}
    calling = [i for i, reply in enumerate(replies) if reply.get("tool_calls")]
    chats = [[*_as_chat(examples[i].prompt), replies[i], _FOLLOWING] for i in calling]
    for i, following in zip(calling, encode(chats, [examples[i] for i in calling]).prompt_ids, strict=True):
        prompt = examples[i].prompt_ids
        if following[: len(prompt)] != prompt or writer.end not in following[len(prompt) :]:
            raise ValueError(
                f"{writer.source}, row {examples[i].index}: the chat template does not write the tool calls of the "
                "last turn behind its prompt; write the call as the text of the turn, or remove the row"
            )
        found[i] = _until_end(following[len(prompt) :], writer.end)
    written = [i for i in range(len(examples)) if i not in found]
    texts = [replies[i]["content"].removeprefix(examples[i].reply_start) for i in written]
    found |= zip(written, writer.ids(texts, [examples[i].index for i in written]), strict=True)
    return [found[i] for i in range(len(examples))]


def _with_earlier_turns(rows: Sequence[Demonstration], writer: _Writer, encode: Any) -> list[Demonstration]:
    """Rows in which earlier assistant turns are learned, too."""
    result, divided = [], 0
    for start in range(0, len(rows), ROWS_PER_CALL):  # the prompts of all turns take more memory than the rows
        for own in _divided(rows[start : start + ROWS_PER_CALL], writer, encode):
            result += own
            divided += len(own) > 1
    if divided:
        print_main(f"{writer.source}: {divided} of {len(rows)} chats have a row for each reply, because the chat "
                   "template rewrites earlier turns")  # fmt: skip
    return result


def _divided(rows: Sequence[Demonstration], writer: _Writer, encode: Any) -> list[list[Demonstration]]:
    """For each row one that learns all replies, or one for each reply."""
    places = [(number, turn) for number, row in enumerate(rows) for turn in _earlier_replies(row.prompt)]
    for number, turn in places:
        message = rows[number].prompt[turn]
        if not message.get("tool_calls"):
            writer.require_text(message["content"], rows[number].index)
    chats = [rows[number].prompt[:turn] for number, turn in places]
    encoded = encode(chats, [rows[number] for number, _ in places])
    result = [[row] for row in rows]
    by_row = itertools.groupby(zip(places, *encoded, strict=True), key=lambda entry: entry[0][0])
    for number, group in by_row:
        row, turns = rows[number], [(row_turn[1], ids, begun) for row_turn, ids, begun in group]
        steps = [ids for _, ids, _ in turns] + [row.prompt_ids]
        replies = []
        for (turn, before, begun), after in zip(turns, steps[1:], strict=True):
            message = row.prompt[turn]
            text = None if message.get("tool_calls") else message["content"].removeprefix(begun)
            replies.append(_appended(text, before, after, writer))
        last = list(row.completion_ids)
        if None not in replies:
            result[number] = [_row(row, steps[0], list(zip(steps, [*replies, last], strict=True)))]
            continue
        if any(row.prompt[turn].get("tool_calls") for turn, _, _ in turns):
            raise ValueError(
                f"{writer.source}, row {row.index}: the chat template rewrites a turn that calls tools when others "
                "follow, so its tokens cannot be learned; set turns to 'last'"
            )
        texts = [row.prompt[turn]["content"].removeprefix(begun) for turn, _, begun in turns]
        replies = [*writer.ids(texts, [row.index] * len(texts)), last]
        result[number] = [_row(row, prompt, [(prompt, ids)]) for prompt, ids in zip(steps, replies, strict=True)]
    return result


def _earlier_replies(prompt: str | list[dict]) -> list[int]:
    """The assistant's turns of a chat that answer something: a greeting before the first turn of a user does not."""
    roles = [turn["role"] for turn in prompt] if isinstance(prompt, list) else []
    asked = next((i for i, role in enumerate(roles) if role not in _OPENING), len(roles))
    return [i for i in range(asked, len(roles)) if roles[i] == "assistant"]


def _appended(text: str | None, before: list[int], after: list[int], writer: _Writer) -> list[int] | None:
    """The tokens of a reply between two prompts, of which one continues the other; None if it does not.

    None, too, if the template does not write `text` there; a `text` of None may be anything, such as a call.
    """
    added = after[len(before) :]
    if after[: len(before)] != before or writer.end not in added:
        return None
    reply = _until_end(added, writer.end)
    written = writer.tokenizer.decode(reply[:-1], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return reply if text is None or written.strip() == text.strip() else None


def _row(example: Example, prompt_ids: list[int], steps: Sequence[tuple[list[int], list[int]]]) -> Demonstration:
    """A row that learns some replies.

    Args:
        example: where they come from.
        prompt_ids: what precedes the first reply.
        steps: for each reply all tokens before it, which continue the step before, and its tokens.
    """
    completion, learned = array("i"), array("b")
    for before, reply in steps:
        between = before[len(prompt_ids) + len(completion) :]
        completion.extend([*between, *reply])
        learned.extend([0] * len(between) + [1] * len(reply))
    fields = {field.name: getattr(example, field.name) for field in dataclasses.fields(Example)}
    return Demonstration(**fields | {"prompt_ids": prompt_ids}, completion_ids=completion, learned=learned)


def _until_end(ids: list[int], end: int) -> list[int]:
    """Tokens up to the first end token."""
    return ids[: ids.index(end) + 1]


def _as_chat(prompt: str | list[dict]) -> list[dict]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _tools(example: Example) -> Any:
    return data.tools_of(example.columns.get("tools"), f"row {example.index}")
