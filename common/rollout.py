"""Sampling completions from a policy, and the batch that carries them from rollout to update.

Dims: P prompts, G completions per prompt, B = P * G sequences, Q prompt tokens, C completion tokens, V vocabulary.

Sampling is from the plain softmax at `temperature`, over the whole vocabulary, in fp32: nothing is taken from a
generation_config.json. Every sequence draws from its own stream of random numbers, named by (seed, step, prompt,
completion). So the same seed gives the same completions on one GPU or several, in one process or many.
"""

import dataclasses
import inspect
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from common import logprobs

CHECK_EVERY = 8  # tokens between two looks at which sequences have ended; each look makes the CPU wait for the GPU


@dataclasses.dataclass
class RolloutBatch:
    """Completions and what the losses need to know about them; every field has one row per sequence.

    Attributes:
        prompt_ids: [B, Q] int64, padded on the left.
        prompt_mask: [B, Q] bool.
        completion_ids: [B, C] int64, padded on the right.
        completion_mask: [B, C] bool, the tokens that are trained on, end token included; a row may be empty.
        lengths: [B] int64, tokens sampled, end token included, whether trained on or not.
        truncated: [B] bool, cut off by the limit before an end token.
        rows: [B] int64, place of each sequence in the rollout; parts of a batch keep it.
        advantages: [B] fp32.
        old_logps: [B, C] fp32, under the policy at the time of the rollout.
        ref_logps: [B, C] fp32, under the reference.
    """

    prompt_ids: torch.Tensor
    prompt_mask: torch.Tensor
    completion_ids: torch.Tensor
    completion_mask: torch.Tensor
    lengths: torch.Tensor
    truncated: torch.Tensor
    rows: torch.Tensor
    advantages: torch.Tensor | None = None
    old_logps: torch.Tensor | None = None
    ref_logps: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.prompt_ids)

    @property
    def tokens(self) -> tuple[torch.Tensor, ...]:
        """The arguments of `LogProbs`."""
        return self.prompt_ids, self.prompt_mask, self.completion_ids, self.completion_mask

    @property
    def num_trained(self) -> int:
        """Sequences with at least one token to train on."""
        return int(self.completion_mask.any(1).sum())

    def drop(self, rows: torch.Tensor) -> None:
        """Takes rows out of the loss; they still count in lengths and rewards.

        Args:
            rows: [B] bool.
        """
        self.completion_mask = self.completion_mask & ~rows.to(self.completion_mask.device)[:, None]

    def select(self, rows: torch.Tensor) -> "RolloutBatch":
        """The batch of these rows, columns of pure padding cut off.

        Args:
            rows: [b] int64, row numbers.
        """
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        part = RolloutBatch(**{k: None if v is None else v[rows.to(v.device)] for k, v in fields.items()})
        prompt = part.prompt_mask.any(0)
        completion = part.completion_mask.any(0)
        completion[0] = True  # a batch without any token to train on keeps one column
        part.prompt_ids, part.prompt_mask = part.prompt_ids[:, prompt], part.prompt_mask[:, prompt]
        for name in ("completion_ids", "completion_mask", "old_logps", "ref_logps"):
            value = getattr(part, name)
            setattr(part, name, value if value is None else value[:, completion])
        return part

    def minibatches(self, num_minibatches: int, micro_batch_size: int) -> list[list["RolloutBatch"]]:
        """Cuts the batch into minibatches, one optimizer step each, and those into micro-batches that fit in memory.

        Minibatch k holds the sequences k, k + num_minibatches, ...: with a group size that is a multiple of
        num_minibatches every step sees every prompt equally often, in one process or many. Inside a minibatch,
        sequences of similar length stand together, so that little is computed for padding.

        Args:
            num_minibatches: optimizer steps.
            micro_batch_size: sequences per forward pass, at most.

        Returns:
            Per minibatch, its micro-batches.
        """
        cut = []
        for k in range(num_minibatches):
            rows = torch.arange(k, len(self), num_minibatches)
            by_length = rows[self.lengths.cpu()[rows].argsort(stable=True, descending=True)]
            cut.append([self.select(part) for part in by_length.split(micro_batch_size)])
        return cut

    def texts(self, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """Completions as text, without end and pad tokens; other special tokens, such as <think>, stay.

        Args:
            tokenizer: the policy's.
        """
        texts = []
        for ids, length, truncated in zip(
            self.completion_ids.tolist(), self.lengths.tolist(), self.truncated.tolist(), strict=True
        ):
            kept = [token for token in ids[: length if truncated else length - 1] if token != tokenizer.pad_token_id]
            texts.append(tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False))
        return texts


def generate(
    replicas: Sequence[PreTrainedModel],
    prompts: Sequence[list[int]],
    *,
    group_size: int,
    max_new_tokens: int,
    temperature: float,
    end_ids: Sequence[int],
    pad_id: int,
    seed: int = 0,
    step: int = 0,
    prompt_numbers: Sequence[int] | None = None,
) -> RolloutBatch:
    """Samples `group_size` completions for every prompt.

    Args:
        replicas: models with equal weights; with several, the prompts are split between them, and their GPUs work at
            the same time.
        prompts: token ids of P prompts.
        group_size: completions per prompt.
        max_new_tokens: tokens after which a completion is cut off.
        temperature: of the softmax; 0 takes the most likely token.
        end_ids: every token that ends a completion.
        pad_id: what stands after the end.
        seed: of the run.
        step: of the run; the same seed and step give the same completions.
        prompt_numbers: place of each prompt in the whole step's batch, over all ranks; 0..P-1 by default.

    Returns:
        B = P * group_size sequences on the device of the first replica, the completions of a prompt side by side.
    """
    prompt_numbers = range(len(prompts)) if prompt_numbers is None else prompt_numbers
    uniforms_BC = _uniforms(seed, step, prompt_numbers, group_size, max_new_tokens)
    home = replicas[0].device
    prompt_ids = pad_sequence([torch.tensor(ids) for ids in prompts], True, pad_id, padding_side="left")
    prompt_mask = pad_sequence([torch.ones(len(ids)) for ids in prompts], True, 0, padding_side="left").bool()

    shares = [share for share in torch.arange(len(prompts)).tensor_split(len(replicas)) if len(share)]

    decoders = []
    for replica, share in zip(replicas, shares, strict=False):  # fewer shares than replicas when prompts are few
        rows = slice(int(share[0]) * group_size, (int(share[-1]) + 1) * group_size)
        prompts_of_share = prompt_ids[share], prompt_mask[share], uniforms_BC[rows]
        decoders.append(_decode(replica, *prompts_of_share, group_size, temperature, end_ids, pad_id))
    parts = _in_turn(decoders)
    completion_ids = torch.cat([part.to(home) for part in parts])
    completion_mask, truncated = mask_after_end(completion_ids, end_ids)
    width = int(completion_mask.sum(1).max())
    return RolloutBatch(
        prompt_ids=prompt_ids.to(home).repeat_interleave(group_size, 0),
        prompt_mask=prompt_mask.to(home).repeat_interleave(group_size, 0),
        completion_ids=torch.where(completion_mask, completion_ids, pad_id)[:, :width],
        completion_mask=completion_mask[:, :width],
        lengths=completion_mask.sum(1),
        truncated=truncated,
        rows=torch.arange(len(completion_ids)),
    )


def mask_after_end(completion_ids: torch.Tensor, end_ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tokens belong to a completion: up to and with its first end token.

    Args:
        completion_ids: [B, C] int64.
        end_ids: every token that ends a completion.

    Returns:
        Mask [B, C] bool, and [B] bool: no end token, so cut off by the limit.
    """
    is_end = torch.isin(completion_ids, torch.tensor(list(end_ids), device=completion_ids.device))
    ended_before = is_end.long().cumsum(1) - is_end.long() > 0
    return ~ended_before, ~is_end.any(1)


def sample(logits: torch.Tensor, uniforms: torch.Tensor, temperature: float) -> torch.Tensor:
    """Draws one token per row by inverting the cumulative distribution.

    Args:
        logits: [b, V] fp32.
        uniforms: [b] fp64, random numbers in [0, 1).
        temperature: of the softmax; 0 takes the most likely token.

    Returns:
        [b] int64.
    """
    if temperature == 0:
        return logits.argmax(-1)
    # fp64: in fp32 the sum over 150,000 tokens would lose the rare ones
    cumulative = (logits / temperature).softmax(-1).double().cumsum(-1)
    threshold = uniforms[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)


def _in_turn(decoders: list[Generator[None, None, torch.Tensor]]) -> list[torch.Tensor]:
    """Runs the decoders of several GPUs, a token of each in turn, and returns what they return.

    A GPU computes its token while the next one is given its own. Threads would do the same, but spend more time handing
    Python's lock to one another than they gain.
    """
    results: dict[int, torch.Tensor] = {}
    while len(results) < len(decoders):
        for i, decoder in enumerate(decoders):
            if i not in results:
                try:
                    next(decoder)
                except StopIteration as done:
                    results[i] = done.value
    return [results[i] for i in range(len(decoders))]


@torch.no_grad()
def _decode(
    model: PreTrainedModel,
    prompt_ids: torch.Tensor,
    prompt_mask: torch.Tensor,
    uniforms: torch.Tensor,
    group_size: int,
    temperature: float,
    end_ids: Sequence[int],
    pad_id: int,
) -> Generator[None, None, torch.Tensor]:
    """Completions [B, max_new_tokens] of one replica, `pad_id` after the end; yields after each token."""
    device = model.device
    prompt_ids, prompt_mask, uniforms = prompt_ids.to(device), prompt_mask.to(device), uniforms.to(device)
    (B, max_new_tokens), Q = uniforms.shape, prompt_ids.shape[1]
    completion_ids = torch.full((B, max_new_tokens), pad_id, device=device)
    end = torch.tensor(list(end_ids), device=device)
    decoder = model.get_decoder()
    cache = DynamicCache(config=model.config)
    # transformers 5.24 renamed the argument, and 5.40 will drop the old name
    cache_name = "cache" if "cache" in inspect.signature(decoder.forward).parameters else "past_key_values"
    cached = {cache_name: cache, "use_cache": True}
    weight = model.get_output_embeddings().weight.float()
    check_every = CHECK_EVERY if device.type == "cuda" else 1

    with _eval_mode(model):
        # the prompt is read once per group; its keys and values are then repeated
        hidden = decoder(
            input_ids=prompt_ids,
            attention_mask=prompt_mask.long(),
            position_ids=logprobs.position_ids(prompt_mask),
            **cached,
        ).last_hidden_state[:, -1]
        logits = logprobs.vocabulary_logits(model, hidden, weight).repeat_interleave(group_size, 0)
        cache.batch_repeat_interleave(group_size)
        # rows: the sequences still running, by their place in the batch
        rows = torch.arange(B, device=device)
        prompt_lengths = prompt_mask.sum(1).repeat_interleave(group_size)
        attention_mask = torch.ones(B, Q + max_new_tokens, dtype=torch.long, device=device)
        attention_mask[:, :Q] = prompt_mask.repeat_interleave(group_size, 0)
        ended = torch.zeros(B, dtype=torch.bool, device=device)
        healthy = hidden.isfinite().all()
        for t in range(max_new_tokens):
            tokens = sample(logits, uniforms[rows, t], temperature)
            completion_ids[rows, t] = torch.where(ended, pad_id, tokens)
            ended = ended | torch.isin(tokens, end)
            if t == max_new_tokens - 1:
                break
            if t % check_every == 0:
                running = (~ended).nonzero().squeeze(-1)
                if len(running) == 0:
                    break
                if len(running) <= len(rows) // 2:
                    rows, tokens, ended = rows[running], tokens[running], ended[running]
                    cache.batch_select_indices(running)
            hidden = decoder(
                input_ids=tokens[:, None],
                attention_mask=attention_mask[rows, : Q + t + 1],
                position_ids=(prompt_lengths[rows] + t)[:, None],
                **cached,
            ).last_hidden_state[:, -1]
            healthy &= hidden.isfinite().all()
            logits = logprobs.vocabulary_logits(model, hidden, weight)
            yield
    if not healthy:
        raise FloatingPointError("hidden states of the policy are not finite: broken weights, or an overflow in fp16")
    return completion_ids


def _uniforms(seed: int, step: int, prompt_numbers: Sequence[int], group_size: int, length: int) -> torch.Tensor:
    """Random numbers [B, length] fp64, one stream per prompt, drawn on the CPU so that every machine gets the same."""
    streams = []
    for number in prompt_numbers:
        generator = torch.Generator().manual_seed(((seed * 1_000_003 + step) * 1_000_003 + number) % 2**63)
        streams.append(torch.rand(group_size, length, generator=generator, dtype=torch.float64))
    return torch.cat(streams)


@contextmanager
def _eval_mode(model: PreTrainedModel) -> Iterator[None]:
    """Train mode would switch the cache off under gradient checkpointing; the mode is put back even after an error."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
