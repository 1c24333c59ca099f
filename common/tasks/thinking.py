"""Thoughts of reasoning models: the tags around them, and what follows them."""

from collections.abc import Sequence

from common.base.distributed import print_main

TAGS = (
    ("<think>", "</think>"),  # DeepSeek-R1, Qwen3, GLM, SmolLM3 and most others
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("[THINK]", "[/THINK]"),  # Magistral
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    ("\u25c1think\u25b7", "\u25c1/think\u25b7"),  # Kimi
)


def opened(reply_header: str) -> str:
    r"""The thought that a prompt leaves open, such as "<think>\n"; "" if it opens none.

    Args:
        reply_header: what the prompt holds after the last turn of the user.
    """
    starts = [reply_header.find(tag, reply_header.rfind(end) + 1) for tag, end in TAGS]
    starts = [start for start in starts if start >= 0]
    return reply_header[min(starts) :] if starts else ""


def after_thought(text: str) -> str | None:
    """What follows the last thought of a reply; None if a thought is not closed."""
    for tag, end in TAGS:
        text = text.rpartition(end)[2]
        if tag in text:
            return None
    return text


def warn_unclosed(starts: Sequence[str], replies: Sequence[str], rows: Sequence[int]) -> None:
    """Warns of replies that are learned inside of a thought, which their prompt opens and they do not close.

    Args:
        starts: thoughts that the prompts leave open, "" for none.
        replies: text behind each prompt.
        rows: their numbers in the data.
    """
    texts = [start + reply.removeprefix(start) for start, reply in zip(starts, replies, strict=True)]
    unclosed = [i for i, text in enumerate(texts) if starts[i] and after_thought(text) is None]
    if unclosed:
        print_main(
            f"warning: the prompts of {len(unclosed)} rows, such as row {rows[unclosed[0]]}, open a thought that the "
            "answers do not close, so the model learns to answer inside of it: add thoughts to the answers, or set "
            "chat_template_kwargs to '{\"enable_thinking\": false}' if the chat template reads that"
        )
