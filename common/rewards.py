"""Reward functions, reward models, and the checks on every value that comes back.

A reward function is `f(completions: list[str], answers: list[str], **columns: list) -> list[float]`, one value per
completion. `columns` are the other columns of the data, and `completion_tokens`: sampled tokens per row, end token
included. NaN means "this row cannot be scored": it is dropped from the loss and counted. Any other failure raises.
"""

import copy
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from common.answers import (
    answers_match,
    any_answer_matches,
    extract_answer,
    last_boxed,
    last_number,
    numbers_match,
)

__all__ = [
    "RewardModel",
    "Scored",
    "answers_match",
    "exact_match",
    "extract_answer",
    "format_reward",
    "last_boxed",
    "last_number",
    "length_reward",
    "math_match",
    "numeric_match",
    "overlong_penalty",
    "score",
]

_FP32_MAX = torch.finfo(torch.float32).max


def math_match(completions: list[str], answers: list[str], **columns: list) -> list[float]:
    """1 if the answer of a completion matches the gold answer, else 0; NaN for a gold answer that cannot be graded.

    Args:
        completions: B texts.
        answers: B gold answers; read where the column `accepted` holds None or is missing.
        columns: `accepted`, if it is there, holds B lists of right answers, texts or numbers: matching one is enough.

    Raises:
        ValueError: `accepted` of a row is no list, is empty, or holds anything but texts and finite numbers.
    """
    accepted_B = columns.get("accepted", [None] * len(answers))
    values = []
    for row, (completion, answer, accepted) in enumerate(zip(completions, answers, accepted_B, strict=True)):
        if accepted is None:
            values.append(answers_match(completion, answer))
            continue
        try:
            values.append(any_answer_matches(completion, accepted))
        except ValueError as error:
            raise ValueError(f"row {row}, whose answer is {answer!r:.80}: {error}") from error
    return values


def numeric_match(completions: list[str], answers: list[str], **columns: list) -> list[float]:
    """1 if both answers are the same exact number, else 0; NaN for a gold answer that is not a number."""
    return [numbers_match(completion, answer) for completion, answer in zip(completions, answers, strict=True)]


def exact_match(completions: list[str], answers: list[str], **columns: list) -> list[float]:
    """1 if the whole completion is the gold answer, apart from white space at both ends, else 0."""
    return [float(text.strip() == answer.strip()) for text, answer in zip(completions, answers, strict=True)]


def format_reward(completions: list[str], answers: list[str], **columns: list) -> list[float]:
    """1 for <think>...</think> <answer>...</answer>, each tag once and nothing but white space around them, else 0.

    A prompt that already opens <think> takes this reward away from every completion.
    """
    pattern = re.compile(r"\s*<think>.*</think>\s*<answer>.*</answer>\s*", re.DOTALL)
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    return [float(all(text.count(tag) == 1 for tag in tags) and bool(pattern.fullmatch(text))) for text in completions]


def length_reward(target: int, width: int | None = None, tokenizer: Any = None) -> Callable[..., list[float]]:
    """Make a reward function that is 1 at `target` tokens and falls in a straight line to 0, `width` tokens away.

    Args:
        target: best length in tokens, end token included.
        width: distance from `target`, in tokens to either side, at which the reward reaches 0; default `target`.
        tokenizer: counts the tokens if the column `completion_tokens` is missing.

    Raises:
        ValueError: target or width below 1 or not finite; when called, neither the column nor a tokenizer.
    """
    width = target if width is None else width
    if not 1 <= target < math.inf or not 1 <= width < math.inf:
        raise ValueError(f"target = {target}, width = {width}: both are numbers of tokens, at least 1")

    def length_reward(
        completions: list[str], answers: list[str], completion_tokens: list[int] | None = None, **columns: list
    ) -> list[float]:
        if completion_tokens is None and tokenizer is None:
            raise ValueError("no column completion_tokens: lengths are tokens, so pass the column or a tokenizer")
        if completion_tokens is None:
            completion_tokens = [len(tokenizer.encode(text, add_special_tokens=False)) for text in completions]
        return [max(0.0, 1.0 - abs(length - target) / width) for length in completion_tokens]

    return length_reward


def overlong_penalty(lengths: torch.Tensor, max_new_tokens: int, cache: int) -> torch.Tensor:
    """Soft penalty of long completions: 0 up to max_new_tokens - cache, then in a straight line to -1 at the limit.

    Args:
        lengths: [B] int64, tokens sampled, end token included.
        max_new_tokens: the limit.
        cache: tokens over which the penalty grows.

    Returns:
        [B] fp32, from -1 to 0.

    Source: arXiv 2503.14476, Eq. 13, with L_max = max_new_tokens and L_cache = cache.
    """
    return ((max_new_tokens - cache - lengths).float() / cache).clamp(-1.0, 0.0)


# Scoring a batch


@dataclass
class Scored:
    """What is known of completions once they are scored.

    Attributes:
        completions: B texts.
        rewards: [B] fp32 on the CPU, NaN = unscored.
        by_function: [B] fp32 of each reward function and reward model by name, unweighted.
    """

    completions: list[str]
    rewards: torch.Tensor
    by_function: dict[str, torch.Tensor]

    def put(self, rows: Sequence[int], other: "Scored") -> None:
        """Replaces some rows by those of another, in place.

        Args:
            rows: b row numbers.
            other: of b completions, scored by the same functions.
        """
        for row, completion in zip(rows, other.completions, strict=True):
            self.completions[row] = completion
        self.rewards[rows] = other.rewards
        for name, values in other.by_function.items():
            self.by_function[name][rows] = values


def score(
    functions: Sequence[tuple[Callable[..., Any], float]],
    completions: list[str],
    answers: list[str],
    columns: Mapping[str, list],
    extra: Mapping[str, tuple[Any, float]] | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Call every reward function, check what it returns and add up the weighted values.

    Args:
        functions: pairs (reward function, weight); weight 0 only reports.
        completions: B texts.
        answers: B gold answers.
        columns: other columns by name, B values each.
        extra: scores of reward models by name, as pairs (B values, weight).

    Returns:
        Weighted sum, fp32 [B], and the values by `__name__`, fp32 [B] each; on CPU, NaN = unscored.

    Raises:
        ValueError: wrong number of values; a value, or the sum, that is no finite fp32 number; a name used twice;
            nothing to score with.
        RuntimeError: a reward function raised or exited; the error is its cause.
    """
    rewards = [(getattr(function, "__name__", repr(function)), function, weight) for function, weight in functions]
    rewards += [(name, values, weight) for name, (values, weight) in (extra or {}).items()]
    names = [name for name, _, _ in rewards]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"rewards {names}: at least one, each with its own name; set function.__name__")
    for name, column in {"answers": answers, **columns}.items():
        if len(column) != len(completions):
            raise ValueError(
                f"column {name} has {len(column)} values for {len(completions)} completions: pass one each"
            )

    total_B, scores = torch.zeros(len(completions)), {}
    for name, reward, weight in rewards:
        if not math.isfinite(weight):
            raise ValueError(f"reward {name} has weight {weight}: must be finite; 0 only reports it")
        values = _call(reward, name, completions, answers, columns) if callable(reward) else reward
        scores[name] = _checked(name, values, completions)
        total_B += weight * scores[name] if weight else 0.0
        if total_B.isinf().any():
            row = int(total_B.isinf().nonzero()[0])
            raise ValueError(f"reward {name} times weight {weight} exceeds fp32 in the sum of row {row}: scale it down")
    return total_B, scores


def _call(
    function: Callable[..., Any], name: str, completions: list[str], answers: list[str], columns: Mapping[str, list]
) -> Any:
    # Copies: the lists are logged and given to the next function, their values come back in the next epoch.
    own = {key: [copy.deepcopy(x) if isinstance(x, (list, dict)) else x for x in xs] for key, xs in columns.items()}
    try:
        return function(list(completions), list(answers), **own)
    except (Exception, SystemExit) as error:  # SystemExit: it would end the run as if all were well
        rows = f"rows 0 to {len(completions) - 1}"
        raise RuntimeError(f"reward {name} raised {type(error).__name__} on {rows}: {error}") from error


def _checked(name: str, values: Any, completions: list[str]) -> torch.Tensor:
    """Values of one reward as fp32 [B] on CPU, or a ValueError that names the reward and the row."""
    values = values.tolist() if hasattr(values, "tolist") else values  # a tensor or an array
    if not isinstance(values, (list, tuple)) or len(values) != len(completions):
        got = f"{len(values)} values" if isinstance(values, (list, tuple)) else f"one {type(values).__name__}"
        raise ValueError(
            f"reward {name} returned {got}, expected {len(completions)}: return a list, one per completion"
        )
    values = [value.item() if getattr(value, "ndim", None) == 0 else value for value in values]
    for row, value in enumerate(values):
        if not isinstance(value, Real) or abs(value) > _FP32_MAX:
            excerpt = f"row {row}, {completions[row][:80]!r}"
            raise ValueError(f"reward {name} is {value!r} in {excerpt}: must be a finite number, or NaN for unscored")
    return torch.tensor([float(value) for value in values], dtype=torch.float32)


# Reward models


class RewardModel:
    """A sequence classifier with a single output, which is the score of a conversation.

    Args:
        name_or_folder: hub id or local folder.
        device: where it runs.
        dtype: of the weights; scores are fp32 in any case.

    Raises:
        ValueError: it cannot be loaded, or is of a kind that transformers does not know; more than one label,
            weights missing in the checkpoint or not finite, or no token to pad with.
    """

    def __init__(
        self, name_or_folder: str, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

        from common.models import require_finite  # brings all that a policy needs, and a reward function does not

        try:
            labels = AutoConfig.from_pretrained(name_or_folder, trust_remote_code=False).num_labels
        except (OSError, ValueError) as error:
            raise ValueError(
                f"reward model {name_or_folder!r} cannot be loaded: give a folder with config.json, weights and "
                "tokenizer, or a hub id; code that comes with a model is never run, so that its kind must be one that "
                f"transformers knows ({error})"
            ) from error
        if labels != 1:
            raise ValueError(f"{name_or_folder} has {labels} labels: a reward model has one; choose another checkpoint")
        self.tokenizer = AutoTokenizer.from_pretrained(name_or_folder, padding_side="right", trust_remote_code=False)
        model, loading = AutoModelForSequenceClassification.from_pretrained(
            name_or_folder, dtype=dtype, output_loading_info=True, trust_remote_code=False
        )
        if missing := sorted(loading["missing_keys"]):  # transformers fills them with random numbers
            raise ValueError(f"{name_or_folder} lacks the weights {missing}: choose a trained reward model")
        self.model = model.to(device).eval()
        require_finite(self.model, name_or_folder)
        config = self.model.config.get_text_config()
        self.max_tokens = min(self.tokenizer.model_max_length, getattr(config, "max_position_embeddings", math.inf))
        _pad_alike(self.tokenizer, config)
        bos, self._written, self._ending = self.tokenizer.bos_token or "", [], ""
        if self.tokenizer.chat_template:
            frame = self._text("?", "PROBE")
            tokens = [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]
            self._written = [token for token in tokens if token and token != bos and token in frame]
            self._start, self._ending = bos if frame.startswith(bos) else "", frame.rpartition("PROBE")[2]
        else:  # what the tokenizer puts before a text
            self._start = bos if self.tokenizer("?")["input_ids"][:1] == [self.tokenizer.bos_token_id] else ""

    def scores(
        self, prompts: Sequence[str | list[dict]], completions: Sequence[str], batch_size: int = 16
    ) -> torch.Tensor:
        """Score each completion as the answer to its prompt, in the model's own chat template if it has one.

        Args:
            prompts: B user texts or message lists; or texts that hold tokens of this model's chat template, which is
                then not applied again.
            completions: B texts.
            batch_size: conversations in one forward; does not change the scores.

        Returns:
            Scores, fp32 [B] on CPU.

        Raises:
            ValueError: a conversation without tokens or longer than the model reads, or a score that is not finite.
        """
        texts = [self._text(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        parts = [self._forward(texts[i : i + batch_size]) for i in range(0, len(texts), batch_size)]
        scores_B = torch.cat([torch.zeros(0), *parts])
        for row, value in enumerate(scores_B.tolist()):
            if not math.isfinite(value):
                raise ValueError(f"reward model scores {value} in row {row}, {texts[row][:80]!r}: try dtype float32")
        return scores_B

    def _text(self, prompt: str | list[dict], completion: str) -> str:
        if isinstance(prompt, str) and any(token in prompt for token in self._written):
            return self._start + prompt.removeprefix(self._start) + completion + self._ending
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self.tokenizer.chat_template:
            messages = [*messages, {"role": "assistant", "content": completion}]
            return self.tokenizer.apply_chat_template(messages, tokenize=False)
        text = "\n".join(message["content"] or "" for message in messages) + completion
        return text.removeprefix(self._start)  # the tokenizer puts one there

    @torch.inference_mode()
    def _forward(self, texts: list[str]) -> torch.Tensor:
        # A chat template writes the start token itself: a second one would be a text the model has never seen.
        add_start = not self.tokenizer.chat_template
        batch = self.tokenizer(texts, add_special_tokens=add_start, padding=True, return_tensors="pt")
        lengths = batch["attention_mask"].sum(1)
        if lengths.min() < 1 or lengths.max() > self.max_tokens:
            span = f"{lengths.min()} to {lengths.max()}"
            raise ValueError(f"conversations of {span} tokens: the reward model reads 1 to {self.max_tokens}; cut them")
        device = self.model.device
        logits = self.model(batch["input_ids"].to(device), attention_mask=batch["attention_mask"].to(device)).logits
        return logits.squeeze(-1).float().cpu()


def _pad_alike(tokenizer: Any, config: Any) -> None:
    """Give the reward tokenizer a pad token and tell the model: its head reads the last token that is not padding."""
    if tokenizer.pad_token_id is None:
        # The end token is the last choice: as padding, it would hide the one that closes the text.
        ids = (config.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
        pad_id = next((i for i in ids if i is not None and i >= 0), None)
        if pad_id is None:
            raise ValueError("reward tokenizer has no pad, unknown, start or end token: set its pad_token and save it")
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad_id)
        print(f"reward tokenizer has no pad token: padding with {tokenizer.pad_token!r}, id {pad_id}")
    config.pad_token_id = tokenizer.pad_token_id
