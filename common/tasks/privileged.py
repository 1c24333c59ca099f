r"""Prompts that a teacher alone reads: the student's, with columns of the data that the student does not see.

The template is text with names of columns in braces, "{prompt}\n\nA correct solution:\n{answer}\n\nNow answer."
`prompt` is the text of the prompt, or of the last user turn of a chat; `answer` is the ground truth. What the template
gives takes the place of that text or turn. Everything else, the system turn, earlier turns, tools, chat template, BOS
and the beginning of the reply, is that of the student's prompt. {{ and }} are literal braces.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from common.base import settings
from common.base.checks import require
from common.tasks import prompt_encoding
from common.tasks.chat_templates import Frame


def encode(
    template: str,
    prompts: Sequence[str | list[dict]],
    rows: Sequence[Mapping[str, Any]],
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    apply_chat_template: bool,
    system_prompt: str,
    template_kwargs: Mapping[str, Any] | None,
    tools: Sequence[list[dict] | None],
    reply_starts: Sequence[str],
) -> list[list[int]]:
    """Token ids of the prompts that the teacher reads.

    Args:
        template: as described at the top of this file.
        prompts: of the student, text or chat messages.
        rows: all columns of each prompt by name.
        source: name of the data, for messages.
        tokenizer: of the student.
        apply_chat_template: as in `prompt_encoding.encode`.
        system_prompt: the same.
        template_kwargs: the same.
        tools: the same.
        reply_starts: thoughts that the prompts of the student leave open.

    Raises:
        ValueError: a column is unknown, or has no value in a row; or a prompt has no place for the text, or would open
            the reply in another way than the student's.
    """
    parts, known = settings.prompt_parts(template), dict.fromkeys(["prompt", *(name for row in rows for name in row)])
    names = list(dict.fromkeys(name for _, name in parts if name is not None))
    unknown = [name for name in names if name not in known]
    require(not unknown, f"teacher_prompt names {', '.join(unknown)}", f"the columns of {source} are "
            f"{', '.join(known)}", "correct the name, or add the column")  # fmt: skip
    use_template = apply_chat_template and bool(tokenizer.chat_template)
    frame = Frame.of(tokenizer, template_kwargs or {}, source) if use_template else Frame()
    written = []
    for i, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        where = f"{source}, row {i}"
        values = {name: _text(name, row.get(name), where) for name in names if name != "prompt"}
        templated = isinstance(prompt, str) and use_template and frame.is_templated(prompt)
        turns = [] if isinstance(prompt, str) else [n for n, turn in enumerate(prompt) if turn["role"] == "user"]
        if templated or (not turns and not isinstance(prompt, str)):
            raise ValueError(
                f"{where}: teacher_prompt takes the place of the last user turn, and this prompt "
                f"{'is templated already' if templated else 'has none'}; give prompts as text or chats with a user turn"
            )
        values["prompt"] = prompt if isinstance(prompt, str) else prompt[turns[-1]]["content"]
        text = "".join(text + ("" if name is None else values[name]) for text, name in parts)
        if isinstance(prompt, str):
            written.append(text)
        else:
            written.append([turn | {"content": text} if n == turns[-1] else turn for n, turn in enumerate(prompt)])
    encoded = prompt_encoding.encode(
        written, source, tokenizer, apply_chat_template, system_prompt, template_kwargs=template_kwargs, tools=tools,
        again=range(len(written)),
    )  # fmt: skip
    for i, (own, teachers) in enumerate(zip(reply_starts, encoded.reply_starts, strict=True)):
        require(own == teachers, f"{source}, row {i}: the prompt opens the reply with {own!r}, that of the teacher "
                f"with {teachers!r}", "the teacher must read a completion as the student wrote it",
                "end teacher_prompt as the prompts end")  # fmt: skip
    return encoded.prompt_ids


def _text(name: str, value: Any, where: str) -> str:
    """A value of a row as text."""
    missing = value is None or (isinstance(value, str) and not value.strip())
    if missing or isinstance(value, bool) or not isinstance(value, (str, int, float)) or value != value:
        found = "missing or empty" if missing else f"{value!r:.40}, expected text or a number"
        raise ValueError(f"{where}: teacher_prompt needs the column `{name}`, which is {found}; fill it, or remove "
                         "the row")  # fmt: skip
    return str(value)
