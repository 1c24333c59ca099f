"""Thoughts of reasoning models: the tags around them, and what follows them."""

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
