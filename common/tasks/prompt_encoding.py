r"""Encodes prompts: chat template, BOS, special tokens, token ids. docs/prompts.md is for users.

Template: chat messages go through the tokenizer's chat template. So does text, as one user turn, if
          the tokenizer has a template and `apply_chat_template` is on. Text that was templated
          before (`chat_templates.Frame.is_templated`) is used unchanged; a chat message of that
          kind is an error. `system_prompt` opens every chat without a system turn of its own.
Special:  only the template writes control tokens. A special token that a message mentions, all but
          earlier replies of the assistant, is encoded as ordinary text: the policy would take
          "What does <|im_end|> mean?" for the end of the turn. In text without a template, special
          tokens are control tokens, since nothing else could write them.
BOS:      with a template, the template decides, also for text that is templated already. Without
          one, text gets the BOS that the tokenizer puts before text. A BOS at the start of the text
          is not doubled. EOS is never appended.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from common.base.distributed import print_main
from common.tasks import chat_templates, thinking
from common.tasks.chat_templates import Chat, Frame

SURROGATE = re.compile("[\ud800-\udfff]")
ROWS_PER_CALL = 1000  # limits memory: the tokenizer returns far more than ids
_BREAK = "\ufdd0"  # inside a special token that is only mentioned; Unicode never assigns it


class Encoded(NamedTuple):
    """Prompts as the policy sees them."""

    prompt_ids: list[list[int]]
    reply_starts: list[str]  # thoughts that prompts leave open, "<think>\n"; "" for none


def encode_prompts(*args: Any, **options: Any) -> list[list[int]]:
    """Token ids of prompts; arguments and errors are those of `encode`."""
    return encode(*args, **options).prompt_ids


def encode(
    prompts: Sequence[str | list[dict]],
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    apply_chat_template: bool = True,
    system_prompt: str = "",
    *,
    template_kwargs: Mapping[str, Any] | None = None,
    tools: Sequence[list[dict] | None] | None = None,
    again: Sequence[int] | None = None,
) -> Encoded:
    """Turns the prompts of a source into token ids, by the rules at the top of this file.

    Args:
        prompts: text, or chat messages that end with a turn to answer.
        source: name of the data, for messages.
        tokenizer: the policy's tokenizer.
        apply_chat_template: whether text becomes a user turn, if the tokenizer has a template.
        system_prompt: system turn for chats without one; "" adds none.
        template_kwargs: more variables of the template, {"enable_thinking": False}.
        tools: JSON schemas of the tools that each prompt offers; None: no prompt has any.
        again: for parts of prompts that were encoded before, their rows in the data: errors name
            these, and nothing is reported twice. None: the prompts are all rows, in order.

    Raises:
        ValueError: a prompt cannot be encoded, the message names its row; or the template does not
            read a variable, or exceeds its limits.
    """
    template_kwargs, tools = dict(template_kwargs or {}), tools or [None] * len(prompts)
    use_template, rows = apply_chat_template and bool(tokenizer.chat_template), again or range(len(prompts))
    if template_kwargs and not use_template:
        raise ValueError(
            f"chat_template_kwargs = {template_kwargs}: the tokenizer has no chat template, or apply_chat_template is "
            "off; leave it empty, or use an instruct model"
        )
    frame = Frame.of(tokenizer, template_kwargs, source) if use_template else Frame()
    is_raw = [isinstance(p, str) and (not use_template or frame.is_templated(p)) for p in prompts]
    _require_template(prompts, tools, is_raw, use_template, system_prompt, source, rows)
    if use_template and any(is_raw) and not again:
        print_main(f"{source}: {sum(is_raw)} of {len(prompts)} prompts are templated already and get no chat template")
    special = chat_templates.any_of(chat_templates.special_tokens(tokenizer))
    texts, places = list(prompts), [i for i, raw in enumerate(is_raw) if not raw]
    for i in places:
        _require_untemplated(_messages(prompts[i], system_prompt), frame, f"{source}, row {rows[i]}")

    def to_chat(i: int) -> Chat:
        return Chat(_marked(_messages(prompts[i], system_prompt), special), _marked(tools[i], special))

    done = 0
    try:
        if places:
            for done, text in enumerate(chat_templates.render(tokenizer, places, template_kwargs, to_chat=to_chat), 1):
                texts[places[done - 1]] = text
    except ValueError as error:
        hint = f"; system_prompt {system_prompt[:40]!r} opens every chat: leave it empty if the template takes none"
        where = f"{source}, row {rows[places[min(done, len(places) - 1)]]}"
        raise ValueError(f"{where}: {error}{hint if system_prompt else ''}") from error
    if not again:
        _report_special(texts, special, use_template, source)
    prompt_ids = _tokenize(texts, tokenizer, source, special, rows)
    if not use_template:
        bos = _tokenizer_bos(texts[0], tokenizer)
    else:
        bos = [tokenizer.bos_token_id] if frame.bos else []
    prompt_ids = [ids if ids[: len(bos)] == bos else bos + ids for ids in prompt_ids]
    starts = [frame.reply_start(text) if use_template else _raw_reply_start(text, special) for text in texts]
    return Encoded(prompt_ids, [sys.intern(start) for start in starts])  # one text for all rows


def _require_template(
    prompts: Sequence[str | list[dict]],
    tools: Sequence[list[dict] | None],
    is_raw: list[bool],
    use_template: bool,
    system_prompt: str,
    source: str,
    rows: Sequence[int],
) -> None:
    """Refuses chats, tools and a system prompt that no template would write."""
    if not use_template and not all(is_raw):
        raise ValueError(
            f"{source}, row {rows[is_raw.index(False)]}: chat messages need a chat template, and the tokenizer has "
            "none or apply_chat_template is off; use an instruct model, set tokenizer.chat_template, or give text as "
            "prompts"
        )
    raw = [i for i, flag in enumerate(is_raw) if flag]
    if system_prompt and raw:
        raise ValueError(
            f"{source}, row {rows[raw[0]]}: system_prompt {system_prompt[:40]!r} has no place in a text that gets no "
            "chat template; leave it empty and write it into the prompts"
        )
    if lost := [i for i in raw if tools[i]]:
        raise ValueError(
            f"{source}, row {rows[lost[0]]}: `tools` have no place in a text that gets no chat template: the tokenizer "
            "has none, apply_chat_template is off, or the text is templated already; write them into the prompt, or "
            "use an instruct model"
        )


def _messages(prompt: str | list[dict], system_prompt: str) -> list[dict]:
    """A prompt as messages, with a system turn."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    calls = [{"tool_calls": without_nulls(turn["tool_calls"])} if turn.get("tool_calls") else {} for turn in messages]
    messages = [
        {key: value for key, value in turn.items() if value is not None or key == "content"} | called
        for turn, called in zip(messages, calls, strict=True)
    ]
    if system_prompt and not any(turn["role"] in ("system", "developer") for turn in messages):
        messages = [{"role": "system", "content": system_prompt}, *messages]
    return messages


def without_nulls(value: Any) -> Any:
    """A copy whose objects lack keys that are null.

    Tables give every object the keys of all, null where unused, but templates ask whether a key
    exists.
    """
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _require_untemplated(messages: list[dict], frame: Frame, where: str) -> None:
    """Refuses messages that hold what the template writes; a policy may have written anything."""
    if any(frame.is_part_of_template(turn["content"]) for turn in messages if turn["role"] != "assistant"):
        raise ValueError(
            f"{where}: a chat message holds what the chat template writes around one, so it would be there twice; "
            "take it out, or give the whole templated text, up to the header of the reply, as `prompt`"
        )


def _marked(value: Any, special: re.Pattern) -> Any:
    """A copy in which special tokens of all strings but those of the assistant are broken."""
    if isinstance(value, str):
        return special.sub(lambda found: found[0][0] + _BREAK + found[0][1:], value)
    if isinstance(value, list):
        return [_marked(item, special) for item in value]
    if isinstance(value, dict) and value.get("role") != "assistant":
        return {key: _marked(item, special) for key, item in value.items()}
    return value


def _report_special(texts: list[str], special: re.Pattern, use_template: bool, source: str) -> None:
    """Says what becomes of special tokens that prompts hold; silent about those of a template."""
    if use_template:
        rows = [i for i, text in enumerate(texts) if _BREAK in text]
        what = "mention special tokens of the tokenizer, which are encoded as ordinary text"
    else:
        rows = [i for i, text in enumerate(texts) if special.search(text)]
        what = "hold special tokens of the tokenizer, which are control tokens in text without a chat template"
    if rows:
        print_main(f"{source}: {len(rows)} of {len(texts)} prompts, such as row {rows[0]}, {what}")


def _tokenize(
    texts: list[str], tokenizer: PreTrainedTokenizerBase, source: str, special: re.Pattern, rows: Sequence[int]
) -> list[list[int]]:
    """Tokenises texts without BOS or EOS; refuses those without tokens or with surrogates."""
    prompt_ids: list[list[int]] = []
    shared: dict[int, int] = {}  # one int object per vocabulary entry, not per token of the data: a fifth of the memory
    for start in range(0, len(texts), ROWS_PER_CALL):
        chunk = texts[start : start + ROWS_PER_CALL]
        broken = next((i for i, text in enumerate(chunk, start) if SURROGATE.search(text)), None)
        if broken is not None:
            where = f"{source}, row {rows[broken]}"
            raise ValueError(f"{where}: the prompt holds half a character (surrogate); correct the row")
        encoded = tokenizer(chunk, add_special_tokens=False, verbose=False)["input_ids"]
        for i, text in enumerate(chunk):
            if _BREAK in text:
                encoded[i] = _with_mentions(text, tokenizer, special, f"{source}, row {rows[start + i]}")
        prompt_ids += [[shared.setdefault(token, token) for token in ids] for ids in encoded]
    if [] in prompt_ids:
        where = f"{source}, row {rows[prompt_ids.index([])]}"
        raise ValueError(f"{where}: the prompt has 0 tokens; remove the row or fill it")
    return prompt_ids


def _with_mentions(text: str, tokenizer: PreTrainedTokenizerBase, special: re.Pattern, where: str) -> list[int]:
    """Tokenises a text in which special tokens that `_marked` broke are ordinary text."""
    ids = []
    for part in re.split(f"((?:{special.pattern})+)", text):  # control tokens of the template separate the parts
        mentions = _BREAK in part
        new = tokenizer(part.replace(_BREAK, ""), add_special_tokens=False, split_special_tokens=mentions,
                        verbose=False)["input_ids"] if part else []  # fmt: skip
        named = {tokenizer.convert_tokens_to_ids(token) for token in special.findall(part.replace(_BREAK, ""))}
        if mentions and named & set(new):
            raise ValueError(
                f"{where}: the prompt mentions a special token that this tokenizer cannot encode as ordinary text; "
                "write it in another way"
            )
        ids += new
    return ids


def _raw_reply_start(text: str, special: re.Pattern) -> str:
    """The thought that a text without template leaves open.

    Its tag ends the text or, behind the last special token, begins a line.
    """
    tail = special.split(text)[-1]
    start = thinking.opened(tail)
    begins = len(tail) < len(text) and tail.removesuffix(start).rstrip(" ")[-1:] in ("", "\n")
    return start if begins or start.strip() in [tag for tag, _ in thinking.TAGS] else ""


def _tokenizer_bos(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that the tokenizer puts before a text: [bos_token_id], or [] for most."""
    bare = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    full = tokenizer(text, verbose=False)["input_ids"]
    return next((full[:start] for start in range(len(full)) if full[start : start + len(bare)] == bare), [])
