"""Encodes prompts: chat template, BOS, token ids.

Template: chat messages go through the tokenizer's chat template. So does text, as one user turn, if
          the tokenizer has a template and `apply_chat_template` is on. Text that holds a special
          token of the tokenizer, or ends as the template does, is templated already and is used
          unchanged; a chat message of that kind is an error. `system_prompt` opens every chat
          without a system turn of its own.
BOS:      with a template, the template decides, also for text that is templated already. Without
          one, text gets the BOS that the tokenizer puts before text. A BOS at the start of the text
          is not doubled. EOS is never appended.
"""

import re

import jinja2
from transformers import PreTrainedTokenizerBase

from common.base.distributed import print_main

SURROGATE = re.compile("[\ud800-\udfff]")
ROWS_PER_CALL = 1000  # limits memory: the tokenizer returns far more than ids
_PROBE = "PROBE"  # a user text, to see what a template writes around one


def encode_prompts(
    prompts: list[str | list[dict]],
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    apply_chat_template: bool,
    system_prompt: str,
) -> list[list[int]]:
    """Turns the prompts of a source into token ids, by the rules at the top of this file.

    Args:
        prompts: text, or chat messages that end with a turn to answer.
        source: name of the data, for messages.
        tokenizer: the policy's tokenizer.
        apply_chat_template: whether text becomes a user turn, if the tokenizer has a template.
        system_prompt: system turn for chats without one; "" adds none.

    Raises:
        ValueError: a prompt cannot be encoded; the message names its row.
    """
    use_template = apply_chat_template and bool(tokenizer.chat_template)
    tokens = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special and token.content]
    frame = _render(_PROBE, tokenizer, "", source) if use_template else ""
    reply_header = frame.rpartition(_PROBE)[2].strip()
    is_distinctive = any(map(str.isalnum, reply_header))  # more than a colon, say
    special, of_template = _any_of(tokens), _any_of([token for token in tokens if token in frame])

    def is_templated(text: str, tokens: re.Pattern) -> bool:
        return bool(tokens.search(text)) or (is_distinctive and text.rstrip().endswith(reply_header))

    is_raw = [isinstance(prompt, str) and (not use_template or is_templated(prompt, special)) for prompt in prompts]
    if not use_template and not all(is_raw):
        raise ValueError(
            f"{source}, row {is_raw.index(False)}: chat messages need a chat template, and the tokenizer has none or "
            "apply_chat_template is off; use an instruct model, set tokenizer.chat_template, or give prompts as text"
        )
    if system_prompt and any(is_raw):
        raise ValueError(
            f"{source}, row {is_raw.index(True)}: system_prompt {system_prompt[:40]!r} has no place in a text that "
            "gets no chat template; leave it empty and write it into the prompts"
        )
    if use_template and any(is_raw):
        print_main(f"{source}: {sum(is_raw)} of {len(prompts)} prompts are templated already and get no chat template")
    for i, prompt in enumerate(prompts):
        # assistant turns are exempt: a policy may have written anything
        turns = [turn for turn in prompt if turn["role"] != "assistant"] if isinstance(prompt, list) else []
        if any(is_templated(turn["content"], of_template) for turn in turns):
            raise ValueError(
                f"{source}, row {i}: a chat message holds what the chat template writes around it, so it would be "
                "there twice; take it out, or give the whole templated text as `prompt`"
            )
    texts = [
        prompt if raw else _render(prompt, tokenizer, system_prompt, f"{source}, row {i}")
        for i, (prompt, raw) in enumerate(zip(prompts, is_raw, strict=True))
    ]
    prompt_ids = _tokenize(texts, tokenizer, source)
    if not use_template:
        bos = _tokenizer_bos(texts[0], tokenizer)
    else:
        bos = [tokenizer.bos_token_id] if tokenizer.bos_token and frame.startswith(tokenizer.bos_token) else []
    return [ids if ids[: len(bos)] == bos else bos + ids for ids in prompt_ids]


def _any_of(tokens: list[str]) -> re.Pattern:
    """A pattern that finds any of these tokens; without tokens it matches nothing."""
    return re.compile("|".join(map(re.escape, tokens)) or "(?!)")


def _render(prompt: str | list[dict], tokenizer: PreTrainedTokenizerBase, system_prompt: str, where: str) -> str:
    """Applies the chat template to one prompt, up to the header of the assistant's turn."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    # tables give every turn the keys of all turns, null where unused, but templates ask whether a
    # key exists
    messages = [{k: v for k, v in turn.items() if v is not None or k == "content"} for turn in messages]
    if system_prompt and not any(turn["role"] in ("system", "developer") for turn in messages):
        messages = [{"role": "system", "content": system_prompt}, *messages]
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except (jinja2.TemplateError, TypeError) as error:  # TypeError: the template joins a content that is not text
        raise ValueError(f"{where}: the chat template refuses these messages: {error}; correct the row") from error


def _tokenize(texts: list[str], tokenizer: PreTrainedTokenizerBase, source: str) -> list[list[int]]:
    """Tokenises texts without BOS or EOS; refuses those without tokens or with surrogates."""
    prompt_ids: list[list[int]] = []
    shared: dict[int, int] = {}  # one int object per vocabulary entry, not per token of the data: a fifth of the memory
    for start in range(0, len(texts), ROWS_PER_CALL):
        chunk = texts[start : start + ROWS_PER_CALL]
        broken = next((i for i, text in enumerate(chunk, start) if SURROGATE.search(text)), None)
        if broken is not None:
            raise ValueError(f"{source}, row {broken}: the prompt holds half a character (surrogate); correct the row")
        encoded = tokenizer(chunk, add_special_tokens=False, verbose=False)["input_ids"]
        prompt_ids += [[shared.setdefault(token, token) for token in ids] for ids in encoded]
    if [] in prompt_ids:
        raise ValueError(f"{source}, row {prompt_ids.index([])}: the prompt has 0 tokens; remove the row or fill it")
    return prompt_ids


def _tokenizer_bos(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that the tokenizer puts before a text: [bos_token_id], or [] for most."""
    bare = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    full = tokenizer(text, verbose=False)["input_ids"]
    return next((full[:start] for start in range(len(full)) if full[start : start + len(bare)] == bare), [])
