"""Conversations as fine-tuning learns them: token ids, and which of them are the assistant's.

Reply:  the last assistant turn of the prompt's chat; else the column `completion`, text or a list
        of one assistant turn; else the answer.
Turns:  a chat with several assistant turns is one row whose loss covers all of them, if the chat
        template only appends: the tokens of each reply then follow exactly those that the policy
        would see there. Some templates rewrite earlier turns, for instance by dropping thoughts.
        Then each reply becomes a row of its own, behind its own prompt.
End:    a reply ends with the token that the chat template writes behind one, if that ends
        generation, else with the tokenizer's EOS. What follows is never learned.
"""

import dataclasses
import itertools
from array import array
from collections.abc import Sequence
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

    def encode(chats: Sequence[list[dict]], tools: Sequence[Any]) -> Encoded:
        return prompt_encoding.encode(chats, source, tokenizer, True, system_prompt, template_kwargs=template_kwargs,
                                      tools=tools) if chats else Encoded([], [])  # fmt: skip

    replies = [_reply(example, f"{source}, row {example.index}") for example in examples]
    last_ids = _encode_replies(examples, replies, tokenizer, encode, end, source)
    single = [
        _row(example, example.prompt_ids, [(example.prompt_ids, ids)])
        for example, ids in zip(examples, last_ids, strict=True)
    ]
    rows = single if last_turn_only else _with_earlier_turns(single, tokenizer, encode, end, source)
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
    examples: Sequence[Example], replies: Sequence[str], tokenizer: PreTrainedTokenizerBase, end: int
) -> list[Demonstration]:
    """Rows that learn one reply each.

    Args:
        examples: what the replies answer.
        replies: texts.
        tokenizer: of the policy.
        end: the token that ends a reply.
    """
    return [
        _row(example, example.prompt_ids, [(example.prompt_ids, ids)])
        for example, ids in zip(examples, _reply_ids(replies, tokenizer, end), strict=True)
    ]


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
    text = value if isinstance(value, str) and value.strip() else example.answer
    if text is None:
        raise ValueError(
            f"{where}: there is no reply to learn; end `messages` with an assistant turn, or add a column `completion` "
            "or `answer`"
        )
    return {"role": "assistant", "content": text}


def _encode_replies(
    examples: Sequence[Example], replies: Sequence[dict], tokenizer: Any, encode: Any, end: int, source: str
) -> list[list[int]]:
    """Token ids of the last reply of each row, end token included."""
    texts = [
        (reply["content"] or "").removeprefix(example.reply_start)
        for example, reply in zip(examples, replies, strict=True)
    ]
    found = _reply_ids(texts, tokenizer, end)
    calling = [i for i, reply in enumerate(replies) if reply.get("tool_calls")]
    chats = [[*_as_chat(examples[i].prompt), replies[i], _FOLLOWING] for i in calling]
    encoded = encode(chats, [_tools(examples[i]) for i in calling])
    for i, following in zip(calling, encoded.prompt_ids, strict=True):
        prompt = examples[i].prompt_ids
        if following[: len(prompt)] != prompt or end not in following[len(prompt) :]:
            raise ValueError(
                f"{source}, row {examples[i].index}: the chat template does not write the tool calls of the last turn "
                "behind its prompt; write the call as the text of the turn, or remove the row"
            )
        found[i] = _until_end(following[len(prompt) :], end)
    return found


def _with_earlier_turns(
    rows: Sequence[Demonstration], tokenizer: Any, encode: Any, end: int, source: str
) -> list[Demonstration]:
    """Rows in which earlier assistant turns are learned, too."""
    places = [
        (number, turn)
        for number, row in enumerate(rows)
        if isinstance(row.prompt, list)
        for turn, message in enumerate(row.prompt)
        if message["role"] == "assistant" and turn > 0
    ]
    chats = [rows[number].prompt[:turn] for number, turn in places]
    encoded = encode(chats, [_tools(rows[number]) for number, _ in places])
    result, divided = list(map(list, zip(rows, strict=True))), 0
    by_row = itertools.groupby(zip(places, *encoded, strict=True), key=lambda place: place[0][0])
    for number, group in by_row:
        row, found = rows[number], list(group)
        turns = [row.prompt[turn] for (_, turn), _, _ in found]
        texts = [(turn["content"] or "").removeprefix(start) for turn, (_, _, start) in zip(turns, found, strict=True)]
        steps = [ids for _, ids, _ in found] + [row.prompt_ids]
        replies = []
        for turn, text, before, after in zip(turns, texts, steps, steps[1:], strict=False):
            replies.append(_appended(None if turn.get("tool_calls") else text, before, after, tokenizer, end))
        last = list(row.completion_ids)
        if None not in replies:
            result[number] = [_row(row, steps[0], list(zip(steps, [*replies, last], strict=True)))]
            continue
        divided += 1
        if any(turn.get("tool_calls") for turn in turns):
            raise ValueError(
                f"{source}, row {row.index}: the chat template rewrites a turn that calls tools when others follow, so "
                "its tokens cannot be learned; set turns to 'last'"
            )
        pairs = zip(steps, [*_reply_ids(texts, tokenizer, end), last], strict=True)
        result[number] = [_row(row, prompt, [(prompt, reply)]) for prompt, reply in pairs]
    if divided:
        print_main(f"{source}: {divided} of {len(rows)} chats have a row for each reply, because the chat template "
                   "rewrites earlier turns")  # fmt: skip
    return list(itertools.chain.from_iterable(result))


def _appended(text: str | None, before: list[int], after: list[int], tokenizer: Any, end: int) -> list[int] | None:
    """The tokens of a reply between two prompts, of which one continues the other; None if it does not.

    None, too, if the template does not write the text of the reply there; for a call of tools there is none.
    """
    added = after[len(before) :]
    if after[: len(before)] != before or end not in added:
        return None
    reply = _until_end(added, end)
    written = tokenizer.decode(reply[:-1], skip_special_tokens=False, clean_up_tokenization_spaces=False)
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


def _reply_ids(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, end: int) -> list[list[int]]:
    """Token ids of replies, end token included."""
    found = []
    for start in range(0, len(texts), ROWS_PER_CALL):
        encoded = tokenizer(texts[start : start + ROWS_PER_CALL], add_special_tokens=False, verbose=False)
        found += [_until_end([*tokens, end], end) for tokens in encoded["input_ids"]]
    return found


def _until_end(ids: list[int], end: int) -> list[int]:
    """Tokens up to the first end token."""
    return ids[: ids.index(end) + 1]


def _as_chat(prompt: str | list[dict]) -> list[dict]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _tools(example: Example) -> Any:
    return data.tools_of(example.columns.get("tools"), f"row {example.index}")
