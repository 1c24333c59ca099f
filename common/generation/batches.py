"""Completions on their way from rollout to update: put together, dealt out, and cut into micro-batches.

Dims: P prompts, G completions per prompt, B = P * G sequences, Q prompt tokens, C completion tokens.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from common.model.images import Images

PROMPT = ("prompt_ids", "prompt_mask")  # fields with a column per prompt token; others have one per completion token


@dataclasses.dataclass
class RolloutBatch:
    """Completions and what the losses need to know about them; every field has one row per sequence.

    What the host needs to know lies on the CPU, so that cutting the batch up never waits for a GPU.

    Attributes:
        prompt_ids: [B, Q] int64, padded on the left.
        prompt_mask: [B, Q] bool.
        completion_ids: [B, C] int64, padded on the right.
        sampled_mask: [B, C] bool, the tokens sampled, end token included.
        completion_mask: [B, C] bool, the tokens trained on: those sampled, or none of the row.
        rollout_logps: [B, C] fp32, of the distribution sampled from, as the decode engine computed it.
        prompt_lengths: [B] int64, on the CPU.
        lengths: [B] int64, on the CPU: tokens sampled.
        truncated: [B] bool, on the CPU: cut off by the limit before an end token.
        trained: [B] bool, on the CPU: whether the row is in the loss.
        rows: [B] int64, on the CPU: place of each sequence in the rollout; parts of a batch keep it.
        advantages: [B] fp32.
        old_logps: [B, C] fp32, under the policy at the time of the rollout, from the forward pass of the update.
        ref_logps: [B, C] fp32, under the reference.
        teacher_states: [B, C, H], last hidden states of a teacher before each token.
        teacher_ids: [B, C, K] int32, the teacher's top k tokens, in place of the states.
        teacher_logps: [B, C, K] fp32, their log-probabilities.
        teacher_tail_logp: [B, C] fp32, log of the mass of all other tokens.
        teacher_token_logps: [B, C] fp32, of the completion's tokens, under the teacher.
        images: of the prompts, if the policy was given any.
        replica: number of the policy replica that trains on a micro-batch, where there are several.
    """

    prompt_ids: torch.Tensor
    prompt_mask: torch.Tensor
    completion_ids: torch.Tensor
    sampled_mask: torch.Tensor
    completion_mask: torch.Tensor
    rollout_logps: torch.Tensor
    prompt_lengths: torch.Tensor
    lengths: torch.Tensor
    truncated: torch.Tensor
    trained: torch.Tensor
    rows: torch.Tensor
    advantages: torch.Tensor | None = None
    old_logps: torch.Tensor | None = None
    ref_logps: torch.Tensor | None = None
    teacher_states: torch.Tensor | None = None
    teacher_ids: torch.Tensor | None = None
    teacher_logps: torch.Tensor | None = None
    teacher_tail_logp: torch.Tensor | None = None
    teacher_token_logps: torch.Tensor | None = None
    images: Images | None = None
    replica: int | None = None

    def __len__(self) -> int:
        return len(self.prompt_ids)

    @property
    def tokens(self) -> tuple[torch.Tensor | Images, ...]:
        """The arguments of `LogProbs`; dropped rows are computed too, so that dropping changes no rounding.

        Lengths stand in place of masks: they are known on the host, which then need not wait for the GPU.
        """
        tokens = self.prompt_ids, self.prompt_lengths, self.completion_ids, self.lengths
        return tokens if self.images is None else (*tokens, self.images)

    @property
    def said(self) -> tuple[torch.Tensor, ...]:
        """What a teacher said of every completion token, as `distillation.Divergences` takes it."""
        top_k = self.teacher_ids, self.teacher_logps, self.teacher_tail_logp, self.teacher_token_logps
        return top_k if self.teacher_states is None else (self.teacher_states,)

    @property
    def device(self) -> torch.device:
        """Where all but what the host needs to know lies."""
        return self.prompt_ids.device

    @property
    def size(self) -> int:
        """Prompt and completion tokens of all rows."""
        return int((self.prompt_lengths + self.lengths).sum())

    @property
    def num_trained(self) -> int:
        """Sequences in the loss."""
        return int(self.trained.sum())

    @property
    def num_tokens(self) -> int:
        """Completion tokens in the loss."""
        return int(self.lengths[self.trained].sum())

    def drop(self, rows: torch.Tensor) -> None:
        """Takes rows out of the loss; they still count in lengths and rewards.

        Args:
            rows: [B] bool, on the CPU.
        """
        self.trained = self.trained & ~rows
        self.completion_mask = self.completion_mask & self.trained.to(self.completion_mask.device)[:, None]

    def to(self, device: torch.device) -> "RolloutBatch":
        """The batch with what lies on a GPU on another device; what the host needs to know stays on the CPU.

        Args:
            device: of the model that is trained.
        """
        on_host = ("prompt_lengths", "lengths", "truncated", "trained", "rows", "replica")
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return RolloutBatch(**{k: v if v is None or k in on_host else v.to(device) for k, v in fields.items()})

    def select(self, rows: torch.Tensor) -> "RolloutBatch":
        """The batch of these rows, columns of pure padding cut off.

        Args:
            rows: [b] int64, row numbers, on the CPU.
        """
        there = rows.to(self.prompt_ids.device)
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        images, replica = fields.pop("images"), fields.pop("replica")
        part = {k: v if v is None else v[rows if v.device.type == "cpu" else there] for k, v in fields.items()}
        Q, C = int(part["prompt_lengths"].max()), int(part["lengths"].max())
        for name in PROMPT:
            part[name] = part[name][:, self.prompt_ids.shape[1] - Q :]
        for name, value in part.items():
            if value is not None and value.dim() >= 2 and name not in PROMPT:
                part[name] = value[:, :C]
        return RolloutBatch(**part, images=None if images is None else images.select(rows), replica=replica)

    def halves(self) -> tuple["RolloutBatch", "RolloutBatch"]:
        """Two batches of the first and the last rows, of about as many tokens; of two rows at least."""
        ends = (self.prompt_lengths + self.lengths).cumsum(0)
        first = 1 + int((2 * ends[:-1] - ends[-1]).abs().argmin())
        one, other = torch.arange(len(self)).split([first, len(self) - first])
        return self.select(one), self.select(other)

    def put(self, rows: torch.Tensor, other: "RolloutBatch") -> "RolloutBatch":
        """The batch with some rows replaced by those of another, as both come from the sampler.

        Args:
            rows: [b] int64, row numbers, on the CPU.
            other: b rows.
        """
        fields = {}
        for name in (f.name for f in dataclasses.fields(self)):
            own, new = getattr(self, name), getattr(other, name)
            if name in ("rows", "replica") or own is None:
                fields[name] = own
                continue
            if name == "images":
                fields[name] = own.put(rows, new)
                continue
            if own.dim() == 2:  # of different widths
                width, left = max(own.shape[1], new.shape[1]), name in PROMPT
                own, new = (F.pad(x, (width - x.shape[1], 0) if left else (0, width - x.shape[1])) for x in (own, new))
            fields[name] = own.index_copy(0, rows.to(own.device), new.to(own.device))
        return RolloutBatch(**fields).select(torch.arange(len(self)))

    def minibatches(
        self,
        num_minibatches: int,
        micro_batch_tokens: int,
        packed: bool,
        in_turn: bool = True,
        devices: Sequence[torch.device] = (),
    ) -> list[list["RolloutBatch"]]:
        """Cuts the batch into minibatches, one optimizer step each, and those into micro-batches that fit in memory.

        Minibatch k holds the sequences k, k + num_minibatches, ...: with a group size that is a multiple of
        num_minibatches every step sees every prompt equally often, in one process or many. Inside a minibatch,
        sequences of similar length stand together, so that little is computed for padding.

        Args:
            num_minibatches: optimizer steps.
            micro_batch_tokens: prompt and completion tokens in one forward pass, at most; a longer sequence is alone.
            packed: padding is not computed, so it does not count.
            in_turn: as said above; False: minibatch k holds the k-th part of the sequences, and so of the prompts: the
                same in one process and many, also where groups are no multiple of num_minibatches.
            devices: of policy replicas, to which the sequences of every minibatch are dealt so that each has about as
                many tokens; micro-batches then lie on the device of their `replica`. None given: they stay.

        Returns:
            Per minibatch, its micro-batches, those of the replicas in turn.
        """
        lengths = self.prompt_lengths + self.lengths
        cut = []
        blocks = torch.arange(len(self)).tensor_split(num_minibatches)
        for k in range(num_minibatches):
            rows = torch.arange(k, len(self), num_minibatches) if in_turn else blocks[k]
            rows = rows[lengths[rows].argsort(stable=True, descending=True)]
            shares = [rows[share].tolist() for share in deal(lengths[rows].tolist(), max(1, len(devices)))]
            parts = [_parts(share, lengths.tolist(), micro_batch_tokens, packed) for share in shares]
            cut.append([])
            for number, part in in_rounds(parts):
                micro = self.select(torch.tensor(part))
                if devices:
                    micro = micro.to(devices[number])
                    micro.replica = number
                cut[-1].append(micro)
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


def assemble(
    prompts: Sequence[list[int]],
    group_size: int,
    tokens_BC: torch.Tensor,
    logps_BC: torch.Tensor,
    pad_id: int,
    end_ids: Sequence[int],
) -> RolloutBatch:
    """Puts prompts and completions together, from wherever those are.

    Args:
        prompts: token ids of P prompts.
        group_size: completions per prompt.
        tokens_BC: [B, C] int64, -1 after the end of each completion; none is empty.
        logps_BC: [B, C] fp32, as they were sampled, 0 after the end.
        pad_id: what stands where there is no token.
        end_ids: every token that ends a completion.
    """
    home = tokens_BC.device
    sampled_BC = tokens_BC >= 0
    lengths = sampled_BC.sum(1).cpu()
    last_B = tokens_BC.gather(1, (lengths - 1).to(home)[:, None]).squeeze(1)
    width = int(lengths.max())
    prompt_lengths = torch.tensor([len(ids) for ids in prompts])
    prompt_ids = pad_sequence([torch.tensor(ids) for ids in prompts], True, pad_id, padding_side="left")
    prompt_mask = torch.arange(prompt_ids.shape[1]) >= prompt_ids.shape[1] - prompt_lengths[:, None]
    return RolloutBatch(
        prompt_ids=prompt_ids.repeat_interleave(group_size, 0).to(home),
        prompt_mask=prompt_mask.repeat_interleave(group_size, 0).to(home),
        completion_ids=torch.where(sampled_BC, tokens_BC, pad_id)[:, :width],
        sampled_mask=sampled_BC[:, :width],
        completion_mask=sampled_BC[:, :width],
        rollout_logps=logps_BC[:, :width],
        prompt_lengths=prompt_lengths.repeat_interleave(group_size),
        lengths=lengths,
        truncated=~torch.isin(last_B.cpu(), torch.tensor(list(end_ids))),
        trained=torch.ones(len(lengths), dtype=torch.bool),
        rows=torch.arange(len(lengths)),
    )


def deal(costs: Sequence[int], num_shares: int) -> list[list[int]]:
    """Deals work out so that shares cost about the same: the dearest piece first, to the cheapest share so far.

    Args:
        costs: of each piece.
        num_shares: how many there are; with fewer pieces, the last ones get none.

    Returns:
        Numbers of the pieces of each share, ascending.

    Source: R. Graham 1969, "Bounds on multiprocessing timing anomalies": at most 4/3 of the best possible.
    """
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    totals = [0] * num_shares
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        share = totals.index(min(totals))
        shares[share].append(i)
        totals[share] += costs[i]
    return [sorted(share) for share in shares]


def in_rounds(queues: Sequence[Sequence[Any]]) -> list[tuple[int, Any]]:
    """The first of each queue, then the second of each, and so on, so that all GPUs have work from the beginning.

    Args:
        queues: of different lengths.

    Returns:
        Number of the queue, and what stood there.
    """
    longest = max(map(len, queues))
    return [(number, queue[k]) for k in range(longest) for number, queue in enumerate(queues) if k < len(queue)]


def _parts(rows: list[int], lengths: list[int], micro_batch_tokens: int, packed: bool) -> list[list[int]]:
    """Rows, the longest first, cut into micro-batches."""
    parts: list[list[int]] = []
    size = micro_batch_tokens
    for row in rows:
        size += lengths[row] if packed or not parts else lengths[parts[-1][0]]  # its first row is its longest
        if size > micro_batch_tokens:
            parts.append([])
            size = lengths[row]
        parts[-1].append(row)
    return parts
