"""Decoding over transformers' own cache, for models that the engine does not support; draws the same tokens.

Dims: P prompts, G completions per prompt, B = P * G sequences, Q prompt tokens, T new tokens at
most.
"""

from collections.abc import Generator, Sequence

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedModel

from common.generation.runner import NOT_FINITE
from common.generation.scheduler import CHECK_EVERY
from common.generation.stopping import Stopping
from common.maths.sampling import Sampling, distribution, draw
from common.model import merging, states
from common.model.head import vocabulary_logits, wide_weight
from common.model.images import Images
from common.model.modes import eval_mode


@torch.no_grad()
def decode(
    model: PreTrainedModel,
    prompts: Sequence[list[int]],
    group_size: int,
    uniforms: torch.Tensor,
    sampling: Sampling,
    end_ids: Sequence[int],
    suppressed_ids: Sequence[int] = (),
    max_rows: int = 0,
    images: Images | None = None,
    stopping: Stopping | None = None,
    left_padding: bool = True,
) -> Generator[None, None, tuple[torch.Tensor, torch.Tensor]]:
    """Completions of every prompt; yields after each token, so that several GPUs can take turns.

    Args:
        model: any transformers causal language model.
        prompts: token ids of P prompts.
        group_size: G, completions per prompt.
        uniforms: [B, T] fp64, random numbers of the sequences.
        sampling: the distribution tokens are drawn from.
        end_ids: every token that ends a completion.
        suppressed_ids: tokens that are never drawn.
        max_rows: sequences decoded at once, at most, but one group at least; 0: all.
        images: of the P prompts, if the model is given any.
        stopping: ends rows at a stop string, within a few tokens; the caller cuts what follows it.
        left_padding: decode prompts of different lengths together; False: only those of one length,
            for models that padding confuses.

    Returns:
        Tokens [B, T] int64, -1 after the end, and their log-probabilities [B, T] fp32, 0 after the
        end.

    Raises:
        FloatingPointError: the model gave something that is not finite.
    """
    at_once = max(1, max_rows // group_size) if max_rows else len(prompts)
    numbers, lengths = torch.arange(len(prompts)), torch.tensor([len(ids) for ids in prompts])
    alike = [numbers] if left_padding else [numbers[lengths == n] for n in lengths.unique()]
    shares = [share for part in alike for share in part.split(at_once)]
    uniforms_PGT = uniforms.unflatten(0, (-1, group_size))
    parts = []
    for share in shares:
        own = None if images is None else images.select(share)
        work = [prompts[i] for i in share], group_size, uniforms_PGT[share].flatten(0, 1), sampling
        parts.append((yield from _decode(model, *work, end_ids, suppressed_ids, own, stopping)))
    back = torch.cat(shares).argsort().to(model.device)
    tokens, logps = (torch.cat(x).unflatten(0, (-1, group_size))[back].flatten(0, 1) for x in zip(*parts, strict=True))
    return tokens, logps


def _decode(
    model: PreTrainedModel,
    prompts: Sequence[list[int]],
    group_size: int,
    uniforms: torch.Tensor,
    sampling: Sampling,
    end_ids: Sequence[int],
    suppressed_ids: Sequence[int],
    images: Images | None,
    stopping: Stopping | None,
) -> Generator[None, None, tuple[torch.Tensor, torch.Tensor]]:
    """`decode` for prompts that are decoded at once."""
    device, (B, T) = model.device, uniforms.shape
    uniforms, end = uniforms.to(device), torch.tensor(list(end_ids), device=device)
    suppressed = torch.tensor(list(suppressed_ids), dtype=torch.long, device=device)
    prompt_ids = pad_sequence([torch.tensor(ids) for ids in prompts], True, 0, padding_side="left")
    prompt_lengths = torch.tensor([len(ids) for ids in prompts], device=device)
    prompt_ids, Q = prompt_ids.to(device), prompt_ids.shape[1]
    prompt_mask = torch.arange(Q, device=device) >= Q - prompt_lengths[:, None]
    tokens_BT = torch.full((B, T), -1, device=device)
    logps_BT = torch.zeros(B, T, device=device)
    decoder = model.get_decoder()
    attends = states.num_attention_layers(decoder) > 0  # some state-space models would apply the mask to the new token
    cache = DynamicCache(config=model.config)
    cached = {states.argument(decoder): cache, "use_cache": True}
    weight, head_device = wide_weight(model), model.get_output_embeddings().weight.device  # a model may be spread
    check_every = CHECK_EVERY if device.type == "cuda" else 1

    with eval_mode(model), merging.merged(model), states.limited_steps(model):
        # a prompt is read once per group; then its keys and values are repeated
        places = prompt_mask.long().cumsum(-1) - 1  # -1 where there is padding
        next_positions = prompt_lengths
        if images is None:
            inputs = {"input_ids": prompt_ids, "position_ids": places.clamp(min=0)}
        else:
            images = images.to(device)
            inputs = images.inputs(model, prompt_ids, torch.arange(len(prompts), device=device)[:, None], places)
            next_positions = images.ends[images.prompts].to(device)
        hidden = decoder(**inputs, attention_mask=prompt_mask.long(), **cached).last_hidden_state[:, -1]
        hidden = hidden.repeat_interleave(group_size, 0)
        # not batch_repeat_interleave, which layers with a state lack
        cache.reorder_cache(torch.arange(len(prompts), device=device).repeat_interleave(group_size))
        rows = torch.arange(B, device=device)  # sequences still running, by their place in the batch
        next_positions = next_positions.repeat_interleave(group_size)
        attention_mask = torch.ones(B, Q + T, dtype=torch.long, device=device)
        attention_mask[:, :Q] = prompt_mask.repeat_interleave(group_size, 0)
        ended = torch.zeros(B, dtype=torch.bool, device=device)
        healthy = hidden.isfinite().all()
        for t in range(T):
            logits = vocabulary_logits(model, hidden.to(head_device), weight).to(device)
            logits = distribution(logits, sampling, t, end, suppressed)
            tokens, logps = draw(logits, uniforms[rows, t], greedy=sampling.temperature == 0)
            tokens_BT[rows, t] = torch.where(ended, -1, tokens)
            logps_BT[rows, t] = torch.where(ended, 0.0, logps)
            ended = ended | torch.isin(tokens, end)
            if t == T - 1:
                break
            if t % check_every == 0:
                if stopping:
                    ended |= torch.tensor(stopping.ended(tokens_BT[rows], check_every), device=device)
                running = (~ended).nonzero().squeeze(-1)
                if len(running) == 0:
                    break
                if len(running) <= len(rows) // 2:
                    rows, tokens, ended = rows[running], tokens[running], ended[running]
                    cache.reorder_cache(running)
            hidden = decoder(
                input_ids=tokens[:, None],
                attention_mask=attention_mask[rows, : Q + t + 1] if attends else None,
                position_ids=(next_positions[rows] + t)[:, None],
                **cached,
            ).last_hidden_state[:, -1]
            healthy &= hidden.isfinite().all()
            yield
    if not healthy:
        raise FloatingPointError(NOT_FINITE)
    return tokens_BT, logps_BT
