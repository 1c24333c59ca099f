"""Chat templates: arguments, date, tools, and what a template writes around a chat.

A template is a program that comes with a model. It is rendered in a child process with limits
(common/base/bounded.py) before anything in this process renders it.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, time
from typing import Any

import jinja2
import jinja2.defaults
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

from common.base import bounded
from common.base.distributed import print_main
from common.tasks import thinking

LARGEST = 1_000_000  # characters that a template may write around a chat
# what every template gets anyway; the special tokens of the tokenizer come on top
GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
_PROBE = "PROBE"  # a user text, to see what a template writes around one
_REPLY = "ANSWER"
_GENERATION = re.compile(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}")  # a tag of transformers that Jinja does not know


@dataclass(frozen=True)
class Chat:
    """Messages that end with a turn to answer, and the tools that the reply may call."""

    messages: list[dict]
    tools: list[dict] | None = None


def pin_date(day: str) -> None:
    """Sets the date that chat templates print in this process, at midnight.

    Args:
        day: "2026-11-29".

    Raises:
        ValueError: it is no date.
    """
    now = datetime.combine(date.fromisoformat(day), time())

    class Pinned(datetime):
        @classmethod
        def now(cls, tz=None):
            return now

    # a variable `strftime_now` would do, but transformers 5.24 turns functions among the variables into text
    chat_template_utils.datetime = Pinned
    probe = [{"role": "user", "content": ""}]
    [printed], _ = chat_template_utils.render_jinja_template([probe], chat_template="{{ strftime_now('%Y-%m-%d') }}")
    if printed != day:
        print_main(
            f"warning: chat templates that print the date print {printed} instead of {day}, the day on which the run "
            "began: this version of transformers takes it from elsewhere; constraints.txt names one that does not"
        )


def render(
    reader: Any,
    chats: Sequence[Any],
    arguments: Mapping[str, Any],
    header: bool = True,
    to_chat: Callable[[Any], Chat] = lambda chat: chat,
) -> Iterator[str]:
    """Renders chats in a child process.

    Args:
        reader: a tokenizer or processor with a chat template.
        chats: to render.
        arguments: more variables of the template.
        header: end with the header of the reply.
        to_chat: makes a `Chat` of what `chats` holds, in the child, which saves memory here.

    Yields:
        The texts, in order.

    Raises:
        bounded.Exceeded: the template takes too much time or memory, or writes too much.
        ValueError: the template refuses a chat, or does not print its tools or one of its turns.
    """
    return _bounded(reader, lambda chat: _rendered(reader, to_chat(chat), arguments, header), chats)


def require_bounded(reader: Any) -> None:
    """Renders a short chat in a child process, so that this process may render others.

    Args:
        reader: as in `render`.

    Raises:
        bounded.Exceeded: as in `render`.
    """
    try:
        list(render(reader, [Chat([{"role": "user", "content": _PROBE}])], {}))
    except bounded.Exceeded:
        raise
    except ValueError:  # it refuses this chat; others are checked when they are rendered
        pass


@dataclass(frozen=True)
class Frame:
    r"""What a template writes around a text of a user.

    Attributes:
        text: the whole, around the probe.
        header: of the reply, without a thought that it opens: "<|im_start|>assistant".
        bos: the BOS that it begins with; "" for none.
        tokens: special tokens in it, without a BOS that stands at its start only.
        ending: what follows a reply, of a reward model.
    """

    text: str = ""
    header: str = ""
    bos: str = ""
    tokens: tuple[str, ...] = ()
    ending: str = ""
    _special: re.Pattern = field(default=re.compile("(?!)"))

    @classmethod
    def of(cls, tokenizer: Any, arguments: Mapping[str, Any], source: str) -> "Frame":
        """Renders the probe.

        Args:
            tokenizer: one with a chat template.
            arguments: as in `render`.
            source: for messages.

        Raises:
            ValueError: the template refuses the probe, exceeds its limits, or reads no variable of
                such a name.
        """
        chat = Chat([{"role": "user", "content": _PROBE}])
        steps = (
            lambda: _require_read(tokenizer, arguments),
            lambda: _rendered(tokenizer, chat, arguments, True),
            lambda: _rendered(tokenizer, chat, arguments, False),
        )
        try:
            _, text, bare = _bounded(tokenizer, lambda step: step(), steps)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from error
        # a template that always writes the header, or another end without it, is read from the probe on
        header = text.removeprefix(bare) if text.startswith(bare) and text != bare else text.rpartition(_PROBE)[2]
        return cls._around(text, header, "", tokenizer)

    @classmethod
    def of_reply(cls, tokenizer: Any, source: str) -> "Frame":
        """What the template of a reward model writes: its header stands between user and reply.

        Args:
            tokenizer: of the reward model.
            source: for messages.

        Raises:
            ValueError: the template refuses a reply, or exceeds its limits.
        """
        turns = [{"role": "user", "content": _PROBE}, {"role": "assistant", "content": _REPLY}]
        try:
            [text] = render(tokenizer, [Chat(turns)], {}, header=False)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from error
        return cls._around(text, text.partition(_PROBE)[2].partition(_REPLY)[0], text.rpartition(_REPLY)[2], tokenizer)

    @classmethod
    def _around(cls, text: str, header: str, ending: str, tokenizer: Any) -> "Frame":
        for tag, _ in thinking.TAGS:
            header = header.partition(tag)[0]
        special, bos = special_tokens(tokenizer), tokenizer.bos_token or ""
        bos = bos if bos and text.startswith(bos) else ""
        # a BOS may also open every turn
        own = tuple(token for token in special if token in text and not (token == bos and text.count(bos) == 1))
        return cls(text, header.strip(), bos, own, ending, any_of(special))

    def is_templated(self, text: str) -> bool:
        """Whether a text was templated before.

        It ends with the header of a reply and opens a turn of a user before, or it begins with a
        special token as the template does and holds that header. A special token that is only
        mentioned makes no template, such as <|assistant|> at the end of a question.
        """
        if not self._is_distinctive:
            return False
        text = text.strip()
        opening = self._special.match(self.text.removeprefix(self.bos).lstrip())
        begins = bool(self.bos) and text.startswith(self.bos)
        begins |= opening is not None and text.removeprefix(self.bos).lstrip().startswith(opening.group())
        stem = text.removesuffix(thinking.opened(text)).rstrip()
        ends = text.endswith(self.header) or stem.endswith(self.header)
        return (ends and self._user_opening in text) or (begins and self.header in text)

    def is_part_of_template(self, content: str) -> bool:
        """Whether a message holds what the template writes around one, as in data templated before."""
        content = content.strip()
        has_header = self.header in content if self._special.search(self.header) else content.endswith(self.header)
        return (has_header and self._is_distinctive) or content.startswith(self.tokens) or content.endswith(self.tokens)

    @property
    def _user_opening(self) -> str:
        """What opens a turn of a user, from its last special token on, or its last word: "<|im_start|>user"."""
        before = self.text.partition(_PROBE)[0].removeprefix(self.bos)
        starts = [found.start() for found in self._special.finditer(before)]
        return before[starts[-1] :].strip() if starts else "".join(before.split()[-1:])

    @property
    def _is_distinctive(self) -> bool:
        """Whether the header tells something: any text may end with a colon, say."""
        return any(map(str.isalnum, self.header))

    def reply_start(self, prompt: str) -> str:
        """The thought that a templated text leaves open for the reply; "" if there is none."""
        return thinking.opened(prompt.rpartition(self.header)[2]) if self.header and self.header in prompt else ""


def special_tokens(tokenizer: Any) -> list[str]:
    """Special tokens of a tokenizer, longer ones first."""
    tokens = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special and token.content]
    return sorted(tokens, key=len, reverse=True)


def any_of(tokens: Sequence[str]) -> re.Pattern:
    """A pattern that finds any of these tokens; without tokens it matches nothing."""
    return re.compile("|".join(map(re.escape, tokens)) or "(?!)")


def _bounded(reader: Any, function: Any, items: Sequence[Any]) -> Iterator[Any]:
    """As `bounded.results`, with a message about templates."""
    try:
        yield from bounded.results(function, items)
    except bounded.Exceeded as error:
        raise bounded.Exceeded(
            f"rendering the chat template of {getattr(reader, 'name_or_path', '')!r} {error}; set another one as "
            "tokenizer.chat_template, or take another model"
        ) from error


def _rendered(reader: Any, chat: Chat, arguments: Mapping[str, Any], header: bool) -> str:
    """Renders one chat, in the child."""

    def apply(messages: list[dict], tools: list[dict] | None) -> str:
        return reader.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=header, **arguments
        )

    messages, last_error = chat.messages, None
    for as_text in (False, True):  # most templates take the arguments of a call as an object, some as JSON text
        try:
            text = apply(_with_call_arguments(messages, as_text), chat.tools)
            break
        except MemoryError:
            raise
        except Exception as error:  # whatever a template may raise
            last_error = last_error or error
    else:
        raise ValueError(f"the chat template refuses these messages: {last_error}; correct the row")
    if len(text) > LARGEST and len(text) > LARGEST + 8 * len(str(chat)):
        raise bounded.Exceeded(f"writes {len(text)} characters, over {LARGEST} around a chat")
    without = [{key: value for key, value in turn.items() if key != "tool_calls"} for turn in messages]
    for what, present, stripped in (
        ("tools", bool(chat.tools), (messages, None)),
        ("tool calls", any(map(_is_named_call, messages)), (without, chat.tools)),
    ):
        if present and _same(apply, stripped, text):
            raise ValueError(
                f"the chat template does not print {what}, so the policy would not see them; take a model whose "
                "template does, or remove them from the row"
            )
    for i, turn in enumerate(messages):
        content = "" if turn["role"] == "assistant" else turn["content"].strip()  # earlier replies may be shortened
        if content not in text and _same(apply, (messages[:i] + messages[i + 1 :], chat.tools), text):
            raise ValueError(
                f"the chat template does not print a turn of the role {turn['role']!r}, so the policy would not see "
                "it; write its text into a turn of the user"
            )
    return text


def _same(apply: Any, arguments: tuple, text: str) -> bool:
    try:
        return apply(*arguments) == text
    except Exception:  # refused, so what was taken away mattered
        return False


def _is_named_call(turn: dict) -> bool:
    """Whether a turn calls a tool by name."""
    return any("name" in (call.get("function") or call) for call in _calls(turn))


def _calls(turn: dict) -> list[dict]:
    calls = turn.get("tool_calls")
    return [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []


def _with_call_arguments(messages: list[dict], as_text: bool) -> list[dict]:
    """Messages with the arguments of their calls as JSON text, or as objects."""

    def converted(call: Any) -> Any:
        if not isinstance(call, dict):
            return call
        if isinstance(call.get("function"), dict):
            return call | {"function": converted(call["function"])}
        value = call.get("arguments")
        if as_text and isinstance(value, dict):
            return call | {"arguments": json.dumps(value, ensure_ascii=False)}
        if not as_text and isinstance(value, str):
            try:
                parsed = json.loads(value)
            except (ValueError, RecursionError):  # what the policy wrote need not be JSON
                return call
            return call | {"arguments": parsed} if isinstance(parsed, dict) else call
        return call

    return [
        turn | {"tool_calls": list(map(converted, turn["tool_calls"]))} if _calls(turn) else turn for turn in messages
    ]


def variables(tokenizer: Any) -> set[str]:
    """Names that a template reads beside those that every template is given.

    Args:
        tokenizer: one with a chat template.
    """
    templates = tokenizer.chat_template
    texts = templates.values() if isinstance(templates, dict) else [templates]
    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    trees = [environment.parse(_GENERATION.sub("", text)) for text in texts]
    read = {name for tree in trees for name in jinja2.meta.find_undeclared_variables(tree)}
    return read - {*jinja2.defaults.DEFAULT_NAMESPACE, *GIVEN, *tokenizer.special_tokens_map}


def _require_read(tokenizer: Any, arguments: Mapping[str, Any]) -> None:
    """Refuses arguments that the template does not read."""
    if not arguments:
        return
    read = variables(tokenizer)
    if unread := sorted(arguments.keys() - read):
        known = f"use {', '.join(sorted(read))}" if read else "it reads none, so leave it empty"
        raise ValueError(f"chat_template_kwargs: the chat template does not read {', '.join(unread)}; {known}")
