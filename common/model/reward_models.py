"""Reward models: sequence classifiers with a single output, the score of a conversation."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from common.model.models import require_finite
from common.tasks.chat_templates import Frame


class RewardModel:
    """A reward model.

    Args:
        name_or_folder: hub id or local folder.
        device: of the model.
        dtype: of the weights; scores are always fp32.

    Raises:
        ValueError: the model cannot be loaded, its type is unknown to transformers, it has more
            than one label, its weights are incomplete or not finite, or it has no token to pad
            with.
    """

    def __init__(
        self, name_or_folder: str, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
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
        if missing := sorted(loading["missing_keys"]):  # transformers initialises them randomly
            raise ValueError(f"{name_or_folder} lacks the weights {missing}: choose a trained reward model")
        self.model = model.to(device).eval()
        require_finite(self.model, name_or_folder)
        config = self.model.config.get_text_config()
        self.max_tokens = min(self.tokenizer.model_max_length, getattr(config, "max_position_embeddings", math.inf))
        _set_pad_token(self.tokenizer, config)
        self._frame = Frame()
        if self.tokenizer.chat_template:  # with the arguments and tools that it has by default
            self._frame = Frame.of_reply(self.tokenizer, f"reward model {name_or_folder!r}")
            self._start = self._frame.bos
        else:  # the tokenizer may put a start token before a text
            starts = self.tokenizer("?")["input_ids"][:1] == [self.tokenizer.bos_token_id]
            self._start = self.tokenizer.bos_token if starts and self.tokenizer.bos_token else ""

    def scores(
        self, prompts: Sequence[str | list[dict]], completions: Sequence[str], batch_size: int = 16
    ) -> torch.Tensor:
        """Scores each completion as the reply to its prompt, in the model's own chat template.

        Args:
            prompts: B user texts or message lists. A text that was templated as this model's chat
                template does it (`chat_templates.Frame.is_templated`) is not templated again.
            completions: B texts, each with the thought that its prompt opens.
            batch_size: conversations in one forward pass; does not change the scores.

        Returns:
            Scores, fp32 [B] on CPU.

        Raises:
            ValueError: a conversation is empty or longer than the model reads, or a score is not
                finite.
        """
        texts = [self._text(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        parts = [self._forward(texts[i : i + batch_size]) for i in range(0, len(texts), batch_size)]
        scores_B = torch.cat([torch.zeros(0), *parts])
        for row, value in enumerate(scores_B.tolist()):
            if not math.isfinite(value):
                raise ValueError(f"reward model scores {value} in row {row}, {texts[row][:80]!r}: try dtype float32")
        return scores_B

    def _text(self, prompt: str | list[dict], completion: str) -> str:
        if isinstance(prompt, str) and self._frame.is_templated(prompt):
            completion = completion.removeprefix(self._frame.reply_start(prompt))  # the prompt has it
            return self._start + prompt.removeprefix(self._start) + completion + self._frame.ending
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self.tokenizer.chat_template:
            messages = [*messages, {"role": "assistant", "content": completion}]
            return self.tokenizer.apply_chat_template(messages, tokenize=False)
        text = "\n".join(message["content"] or "" for message in messages) + completion
        return text.removeprefix(self._start)  # the tokenizer adds it

    @torch.inference_mode()
    def _forward(self, texts: list[str]) -> torch.Tensor:
        # A chat template writes the start token itself.
        add_start = not self.tokenizer.chat_template
        batch = self.tokenizer(texts, add_special_tokens=add_start, padding=True, return_tensors="pt")
        lengths = batch["attention_mask"].sum(1)
        if lengths.min() < 1 or lengths.max() > self.max_tokens:
            span = f"{lengths.min()} to {lengths.max()}"
            raise ValueError(f"conversations of {span} tokens: the reward model reads 1 to {self.max_tokens}; cut them")
        device = self.model.device
        logits = self.model(batch["input_ids"].to(device), attention_mask=batch["attention_mask"].to(device)).logits
        return logits.squeeze(-1).float().cpu()


def _set_pad_token(tokenizer: Any, config: Any) -> None:
    """Sets the same pad token in tokenizer and model: the head reads the last other token."""
    if tokenizer.pad_token_id is None:
        # The end token is the last choice: as padding, it would hide the end token of the text.
        ids = (config.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
        pad_id = next((i for i in ids if i is not None and i >= 0), None)
        if pad_id is None:
            raise ValueError("reward tokenizer has no pad, unknown, start or end token: set its pad_token and save it")
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad_id)
        print(f"reward tokenizer has no pad token: padding with {tokenizer.pad_token!r}, id {pad_id}")
    config.pad_token_id = tokenizer.pad_token_id
