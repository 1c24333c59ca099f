"""Completions on their way from rollout to update: batches of them, cut into minibatches and micro-batches.

Dims: P prompts, G completions per prompt, B = P * G sequences, Q prompt tokens, C completion tokens,
H hidden size of a teacher, K its top k.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from common.generation import stopping
from common.maths import divergences
from common.model.images import Images
from common.model.packing import Sizes

# fields that stay on the CPU, so that cutting a batch never syncs
ON_HOST = ("prompt_lengths", "lengths", "truncated", "rows", "group", "drafted", "trained", "not_learned", "replica")
TEACHER = "teacher_"  # prefix of `TeacherOutput` in a state dict


@dataclasses.dataclass(kw_only=True)
class TeacherOutput:
    """What a teacher gave for every completion token: hidden states, its top k, or the token's log-probability alone.

    Attributes:
        states: [B, C, H], last hidden states before each token.
        ids: [B, C, K] int32, the top k tokens.
        logps: [B, C, K] fp32, their log-probabilities.
        tail_logp: [B, C] fp32, log of the mass of all other tokens.
        token_logps: [B, C] fp32, of the completion's tokens. From a teacher with another tokenizer: of the span of text
            that the token belongs to, in equal parts.
        spans: [B, C] int32, only from such a teacher: the token's place in a span, `divergences.MATCH`, `START` or
            `INSIDE`; below 0 where the teacher cannot read what the student wrote; 0: in none.
        given: [B, C] bool, only for ULD: tokens that the student did not sample.
    """

    states: torch.Tensor | None = None
    ids: torch.Tensor | None = None
    logps: torch.Tensor | None = None
    tail_logp: torch.Tensor | None = None
    token_logps: torch.Tensor | None = None
    spans: torch.Tensor | None = None
    given: torch.Tensor | None = None

    def advantages(self, logps: torch.Tensor) -> torch.Tensor:
        """How much likelier each token is to the teacher; or the span that it belongs to, for all tokens of it.

        The gradient of a span's log-probability is the sum of those of its tokens, so each has the span's advantage.

        Args:
            logps: [B, C] fp32, of the student.

        Returns:
            [B, C] fp32, 0 for tokens in no span.
        """
        difference = self.token_logps - logps
        return difference if self.spans is None else divergences.span_sums(difference, self.spans)

    @property
    def shares(self) -> dict[str, torch.Tensor]:
        """`aligned`, [B, C]: whether the token is in a span; nothing if there are none."""
        return {} if self.spans is None else {"aligned": (self.spans > 0).float()}

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Those that are not None, in the order that `distillation.Divergences` takes."""
        return tuple(x for x in _fields(self).values() if x is not None)

    def to(self, device: torch.device) -> "TeacherOutput":
        """The same on another device."""
        return self._each(lambda x: x.to(device))

    def select(self, rows: torch.Tensor, width: int) -> "TeacherOutput":
        """The first `width` tokens of some rows, [b] int64 on the device of the tensors."""
        return self._each(lambda x: x[rows][:, :width])

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "TeacherOutput":
        return TeacherOutput(**{k: v if v is None else change(v) for k, v in _fields(self).items()})


@dataclasses.dataclass(kw_only=True)
class Rollout:
    """Prompts and completions, one row per sequence; later phases leave them as they are.

    Attributes:
        prompt_ids: [B, Q] int64, padded on the left.
        completion_ids: [B, C] int64, padded on the right; the end token included.
        rollout_logps: [B, C] fp32, of the distribution sampled from, as the decode engine computed it.
        prompt_lengths: [B] int64, on the CPU.
        lengths: [B] int64, on the CPU: tokens sampled.
        truncated: [B] bool, on the CPU: cut off by the limit before an end token or stop string.
        rows: [B] int64, on the CPU: place of each sequence in the rollout; parts of a batch keep it.
        group: [B] int64, on the CPU: rows with equal numbers have the same prompt; parts of a batch keep it.
        images: of the prompts, if the policy is given any.
        drafted: [B] int64, on the CPU: tokens that stood in a draft; None without the option `drafts`.
    """

    prompt_ids: torch.Tensor
    completion_ids: torch.Tensor
    rollout_logps: torch.Tensor
    prompt_lengths: torch.Tensor
    lengths: torch.Tensor
    truncated: torch.Tensor
    rows: torch.Tensor
    group: torch.Tensor
    images: Images | None = None
    drafted: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.prompt_ids)

    @property
    def tokens(self) -> tuple[torch.Tensor | Images | None, ...]:
        """The arguments of `LogProbs`; dropped rows are computed too, so that dropping changes no rounding.

        Lengths take the place of masks: they are known on the host, which then need not wait for the GPU.
        """
        return self.prompt_ids, self.prompt_lengths, self.completion_ids, self.lengths, self.images, self.group

    @property
    def prompts(self) -> list[torch.Tensor]:
        """Token ids of each prompt, int64 on the CPU, without padding."""
        Q = self.prompt_ids.shape[1]
        return [ids[Q - n :] for ids, n in zip(self.prompt_ids.cpu(), self.prompt_lengths.tolist(), strict=True)]

    @property
    def completions(self) -> list[torch.Tensor]:
        """Token ids of each completion, int64 on the CPU, without padding."""
        return [ids[:n] for ids, n in zip(self.completion_ids.cpu(), self.lengths.tolist(), strict=True)]

    @property
    def device(self) -> torch.device:
        """Where all but the host's fields lie."""
        return self.prompt_ids.device

    @property
    def size(self) -> int:
        """Tokens of a forward pass that computes the prompt of each group once."""
        prompts = dict(zip(self.group.tolist(), self.prompt_lengths.tolist(), strict=True))
        return sum(prompts.values()) + int(self.lengths.sum())

    @property
    def longest(self) -> int:
        """Most prompt and completion tokens of a row."""
        return int((self.prompt_lengths + self.lengths).max())

    def texts(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str] = ()) -> list[str]:
        """Completions as text, without end and pad tokens; other special tokens, such as <think>, stay.

        Args:
            tokenizer: the policy's.
            stops: texts at which sampling stopped; a completion is cut before the first one.
        """

        def decode(ids: list[int]) -> str:
            kept = [token for token in ids if token != tokenizer.pad_token_id]
            return tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)

        texts = []
        for row, truncated in zip(self.completions, self.truncated.tolist(), strict=True):
            ids = row.tolist()
            text = decode(ids) if truncated or stops else ""
            if (end := stopping.find(text, stops)) >= 0:
                text = text[:end]
            elif not truncated:  # the last token is an end token
                text = decode(ids[:-1])
            texts.append(text)
        return texts


@dataclasses.dataclass(kw_only=True)
class RolloutBatch(Rollout):
    """A rollout with what the losses need beside it, which the phases before the update fill in.

    Attributes:
        trained: [B] bool, on the CPU: whether the row is in the loss; see `drop`.
        completion_mask: [B, C] bool, the tokens in the loss: those of a row that is trained on.
        advantages: [B] fp32.
        old_logps: [B, C] fp32, under the policy at the time of the rollout, from the forward pass of the update.
        ref_logps: [B, C] fp32, under the reference.
        teacher: what a teacher gave for the completions.
        not_learned: [B] int64, on the CPU: completion tokens that are not in the loss, such as a user's turn
            between two replies; None: all are.
        replica: number of the policy replica that trains on a micro-batch, where there are several.
    """

    trained: torch.Tensor
    completion_mask: torch.Tensor
    advantages: torch.Tensor | None = None
    old_logps: torch.Tensor | None = None
    ref_logps: torch.Tensor | None = None
    teacher: TeacherOutput | None = None
    not_learned: torch.Tensor | None = None
    replica: int | None = None

    @property
    def num_trained(self) -> int:
        """Sequences in the loss."""
        return int(self.trained.sum())

    @property
    def num_tokens(self) -> int:
        """Completion tokens in the loss."""
        left_out = 0 if self.not_learned is None else self.not_learned[self.trained].sum()
        return int(self.lengths[self.trained].sum() - left_out)

    def drop(self, rows: torch.Tensor) -> None:
        """Takes rows out of the loss; they still count in lengths and rewards.

        Args:
            rows: [B] bool, on the CPU.
        """
        self.trained = self.trained & ~rows
        self.completion_mask = self.completion_mask & self.trained.to(self.completion_mask.device)[:, None]

    def to(self, device: torch.device) -> "RolloutBatch":
        """The batch on another device, but for the host's fields, which stay on the CPU.

        Args:
            device: of the model that is trained.
        """
        fields = {k: v if v is None or k in ON_HOST else v.to(device) for k, v in _fields(self).items()}
        return RolloutBatch(**fields)

    def select(self, rows: torch.Tensor) -> "RolloutBatch":
        """The batch of these rows, columns of pure padding cut off.

        Args:
            rows: [b] int64, row numbers, on the CPU.
        """
        there = rows.to(self.device)
        Q, C = (int(lengths[rows].max()) for lengths in (self.prompt_lengths, self.lengths))
        part = {}
        for name, value in _fields(self).items():
            if value is None or name == "replica":
                part[name] = value
            elif name == "images":
                part[name] = value.select(rows)
            elif name == "teacher":
                part[name] = value.select(there, C)
            else:
                value = value[rows if name in ON_HOST else there]
                columns = slice(value.shape[1] - Q, None) if name == "prompt_ids" else slice(C)
                part[name] = value[:, columns] if value.dim() == 2 else value
        return RolloutBatch(**part)

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
            other: b rows, of other prompts.
        """
        fields = {}
        for name, own in _fields(self).items():
            new = getattr(other, name)
            if name == "group":
                new = new + own.max() + 1
            if name in ("rows", "replica"):
                fields[name] = own
                continue
            if own is None or new is None:  # `drafted`, where only some rows had drafts
                fields[name] = None
                continue
            if name == "images":
                fields[name] = own.put(rows, new)
                continue
            if own.dim() == 2:  # of different widths
                width, left = max(own.shape[1], new.shape[1]), name == "prompt_ids"
                own, new = (F.pad(x, (width - x.shape[1], 0) if left else (0, width - x.shape[1])) for x in (own, new))
            fields[name] = own.index_copy(0, rows.to(own.device), new.to(own.device))
        return RolloutBatch(**fields).select(torch.arange(len(self)))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Copies of all tensors on the CPU, to be saved; images come from the data again."""
        of_teacher = {} if self.teacher is None else _fields(self.teacher)
        values = _fields(self) | {TEACHER + name: value for name, value in of_teacher.items()}
        tensors = {name: value.detach() for name, value in values.items() if isinstance(value, torch.Tensor)}
        return {name: x.cpu().clone(memory_format=torch.contiguous_format) for name, x in tensors.items()}

    @classmethod
    def from_state_dict(cls, tensors: dict[str, torch.Tensor]) -> "RolloutBatch":
        """The batch that `state_dict` saved.

        Args:
            tensors: by name; the masks in files of earlier versions, which are no fields any more, are ignored. Without
                `group`, each row is one of its own.
        """
        tensors = {"group": torch.arange(len(tensors["rows"]))} | tensors
        names = [field.name for field in dataclasses.fields(cls)]
        of_teacher = {k.removeprefix(TEACHER): v for k, v in tensors.items() if k.startswith(TEACHER)}
        teacher = TeacherOutput(**of_teacher) if of_teacher else None
        return cls(**{name: tensors[name] for name in names if name in tensors}, teacher=teacher)

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
        the sequences of a group stand together, so that little is computed for prompts; or where there is padding those
        of similar length, so that little is computed for padding.

        Args:
            num_minibatches: optimizer steps.
            micro_batch_tokens: prompt and completion tokens in one forward pass, at most; a longer sequence is alone.
            packed: prompts are computed once per group and padding is not, so they count in that way; see
                `LogProbs.packs`.
            in_turn: as described above; False: minibatch k holds the k-th part of the sequences, and so of the prompts:
                the same in one process and many, also where groups are no multiple of num_minibatches.
            devices: of policy replicas, to which the sequences of every minibatch are dealt so that each has about as
                many tokens; micro-batches then lie on the device of their `replica`. Empty: they stay where they are.

        Returns:
            Per minibatch, its micro-batches, those of the replicas in turn.
        """
        sizes = Sizes(self.prompt_lengths.tolist(), self.lengths.tolist(), self.group.tolist(), packed)
        cut = []
        blocks = torch.arange(len(self)).tensor_split(num_minibatches)
        for k in range(num_minibatches):
            rows = torch.arange(k, len(self), num_minibatches) if in_turn else blocks[k]
            shares = _shares(sizes, rows.tolist(), max(1, len(devices)))
            parts = [sizes.parts(share, micro_batch_tokens) for share in shares]
            cut.append([])
            for number, part in in_rounds(parts):
                micro = self.select(torch.tensor(part))
                if devices:
                    micro = micro.to(devices[number])
                    micro.replica = number
                cut[-1].append(micro)
        return cut


def _fields(of: Any) -> dict[str, Any]:
    """The fields of a dataclass by name."""
    return {field.name: getattr(of, field.name) for field in dataclasses.fields(of)}


def assemble(
    prompts: Sequence[list[int]],
    group_size: int,
    tokens_BC: torch.Tensor,
    logps_BC: torch.Tensor,
    pad_id: int,
    end_ids: Sequence[int],
    images: Images | None = None,
    stopped_B: torch.Tensor | None = None,
) -> RolloutBatch:
    """Batches prompts and completions, sampled or given.

    Args:
        prompts: token ids of P prompts.
        group_size: completions per prompt.
        tokens_BC: [B, C] int64, -1 after the end of each completion; none is empty.
        logps_BC: [B, C] fp32, as they were sampled, 0 after the end.
        pad_id: fills rows up.
        end_ids: every token that ends a completion.
        images: of the P prompts, if the policy is given any.
        stopped_B: [B] bool on the CPU, which completions end with a stop string; None: none.
    """
    home = tokens_BC.device
    sampled_BC = tokens_BC >= 0
    lengths = sampled_BC.sum(1).cpu()
    last_B = tokens_BC.gather(1, (lengths - 1).to(home)[:, None]).squeeze(1)
    width = int(lengths.max())
    truncated = ~torch.isin(last_B.cpu(), torch.tensor(list(end_ids)))
    prompt_lengths = torch.tensor([len(ids) for ids in prompts])
    prompt_ids = pad_sequence([torch.tensor(ids) for ids in prompts], True, pad_id, padding_side="left")
    return RolloutBatch(
        prompt_ids=prompt_ids.repeat_interleave(group_size, 0).to(home),
        completion_ids=torch.where(sampled_BC, tokens_BC, pad_id)[:, :width],
        rollout_logps=logps_BC[:, :width],
        prompt_lengths=prompt_lengths.repeat_interleave(group_size),
        lengths=lengths,
        truncated=truncated if stopped_B is None else truncated & ~stopped_B,
        rows=torch.arange(len(lengths)),
        group=torch.arange(len(prompts)).repeat_interleave(group_size),
        images=None if images is None else images.repeat(group_size),
        trained=torch.ones(len(lengths), dtype=torch.bool),
        completion_mask=sampled_BC[:, :width],
    )


def deal(costs: Sequence[int], num_shares: int) -> list[list[int]]:
    """Deals pieces of work into shares of about the same cost: the dearest first, to the cheapest share so far.

    Args:
        costs: of each piece.
        num_shares: shares; with fewer pieces, the last ones stay empty.

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
    """Interleaves queues, so that all GPUs have work from the beginning: the first of each, the second of each, ...

    Args:
        queues: of any lengths.

    Returns:
        Number of the queue and the item, in turn.
    """
    longest = max(map(len, queues))
    return [(number, queue[k]) for k in range(longest) for number, queue in enumerate(queues) if k < len(queue)]


def _shares(sizes: Sizes, rows: list[int], num_shares: int) -> list[list[int]]:
    """Deals rows into shares of about as many tokens: whole groups, if that is even enough, or parts of them."""
    by_group: dict[int, list[int]] = {}
    for row in rows:
        by_group.setdefault(sizes.groups[row], []).append(row)
    longest, most = max(map(sizes.of, rows), default=0), max(map(len, by_group.values()), default=1)
    for k in range(1 if sizes.packed else most, most + 1):
        pieces = [group[i::k] for group in by_group.values() for i in range(min(k, len(group)))]
        costs = [sum(sizes.added(row, piece[:i]) for i, row in enumerate(piece)) for piece in pieces]
        shares = deal(costs, num_shares)
        totals = [sum(costs[i] for i in share) for share in shares]
        if max(totals) - min(totals) <= longest:
            break
    return [[row for i in share for row in pieces[i]] for share in shares]
