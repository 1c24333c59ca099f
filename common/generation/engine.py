"""The decode engine: many completions at a time from one model on one device, as fast as the GPU allows, not Python.

Prompts are read once per group into a cache of fixed size. Then one step gives every row its next token: forward pass,
draw, log-probability and end of sequence all happen on the device, and on a GPU the whole step is one CUDA graph. The
host looks every few steps which rows have ended, closes the gaps, and lets waiting prompts in. Weights are read where
they are: after an update there is nothing to copy, and graphs stay valid as long as parameters keep their storage.

Dims: P prompts, G completions per prompt, B = P * G sequences, b rows decoded together, V vocabulary, T new tokens.
"""

import dataclasses
from collections import Counter, deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from transformers import PreTrainedModel

from common.base import devices
from common.generation.cache import FlashCache, SdpaCache, Space
from common.maths import sampling
from common.maths.sampling import Sampling
from common.model import attention, merging
from common.model.head import vocabulary_logits, wide_weight
from common.model.images import Images
from common.model.models import eval_mode

CHECK_EVERY = 16  # steps between two looks at which rows have ended, on a GPU; each look makes the CPU wait for it
PREFILL_TOKENS = 16384  # prompt tokens read in one forward pass
SMALLEST_BATCH = 8  # graphs are captured for this many rows, twice as many, and so on
NOT_FINITE = "hidden states of the policy are not finite: broken weights, or an overflow in fp16"
KEEP_SHARE = 0.1  # of the GPU's memory: a cache up to this size stays allocated during the update


@dataclasses.dataclass
class Row:
    """Host side of one row of the batch."""

    sequence: int  # number of the sequence in the rollout
    slot: int  # its place in the cache
    born: int  # step at which its first token was drawn


class Engine:
    """Decodes completions with one model; keeps its cache and CUDA graphs from one rollout to the next."""

    def __init__(
        self,
        model: PreTrainedModel,
        support: attention.Support,
        end_ids: Sequence[int],
        suppressed_ids: Sequence[int] = (),
        compile: bool = True,
    ):
        """Sets up an empty engine.

        Args:
            model: a model all of whose layers are plain causal attention.
            support: from `attention.install`, without a reason against.
            end_ids: every token that ends a completion.
            suppressed_ids: tokens that are never drawn.
            compile: compile the decoder layers and the draw, on a GPU.
        """
        self.model, self.decoder, self.device = model, model.get_decoder(), model.device
        self.modules = [layer.module for layer in support.layers]
        on_gpu = self.device.type == "cuda"
        probe = torch.empty(0, support.layers[0].head_size, dtype=model.dtype, device=self.device)
        self.cache = (FlashCache if attention.on_flash(probe) else SdpaCache)(support.layers, model.dtype, self.device)
        self.use_graphs = on_gpu and self.cache.graphs
        self.compiled_layers = attention.decoder_layers(model, support) if compile and self.use_graphs else []
        self._draw = torch.compile(self._draw_eager, dynamic=True) if self.compiled_layers else self._draw_eager
        self.check_every = CHECK_EVERY if on_gpu else 1
        self.end = torch.tensor(list(end_ids), device=self.device)
        self.suppressed = torch.tensor(list(suppressed_ids), dtype=torch.long, device=self.device)
        self.graphs: dict[tuple, torch.cuda.CUDAGraph] = {}
        self.pool = None  # memory shared by all graphs
        self.rows = 0  # decoded at once, at most, in this rollout
        self.state = torch.empty(7, 0)
        self.out_tokens = torch.empty(0)

    @property
    def name(self) -> str:
        """What serves, for the log."""
        if not self.use_graphs:
            dtype = str(self.model.dtype).removeprefix("torch.")
            return f"PyTorch's attention over a static cache ({self.device.type}, {dtype}: no flash kernel)"
        return f"flash attention, shared prompts, CUDA graphs{', compiled layers' if self.compiled_layers else ''}"

    @torch.no_grad()
    def decode(
        self,
        prompts: Sequence[list[int]],
        group_size: int,
        uniforms: torch.Tensor,
        how: Sampling,
        max_rows: int = 0,
        images: Images | None = None,
    ) -> Generator[None, None, tuple[torch.Tensor, torch.Tensor]]:
        """Completions of every prompt; yields while the device is at work, so that engines can take turns.

        Args:
            prompts: token ids of P prompts.
            group_size: G, completions per prompt.
            uniforms: [B, T] fp64, random numbers of the sequences.
            how: the distribution tokens are drawn from.
            max_rows: sequences decoded at once, at most; 0: as many as memory holds. The others wait.
            images: of the P prompts, if the model is given any.

        Returns:
            Tokens [B, T] int64, -1 after the end, and their log-probabilities [B, T] fp32, 0 after the end.

        Raises:
            FloatingPointError: the model gave something that is not finite.
            ValueError: not even one group fits into the memory.
        """
        B, T = uniforms.shape
        space = self._plan(prompts, group_size, T, max_rows)
        self.rows = space.rows
        self._reserve(space, uniforms)
        waiting, rows, step, changed = deque(range(len(prompts))), [], 0, False
        free_rows, free_prompts = list(range(space.rows))[::-1], list(range(space.prompts))[::-1]
        prompt_slots: dict[int, int] = {}
        with self._attached():
            while waiting or rows:
                # let prompts in, when there is room for a good part of a batch
                room = min((space.rows - len(rows)) // group_size, space.prompts - len(prompt_slots), len(waiting))
                entered = room and (not rows or room * group_size >= min(space.rows // 4, len(waiting) * group_size))
                if entered:
                    entering = [waiting.popleft() for _ in range(room)]
                    for prompt in entering:
                        prompt_slots[prompt] = free_prompts.pop()
                        first = prompt * group_size
                        rows += [Row(first + i, free_rows.pop(), step) for i in range(group_size)]
                    self._prefill(prompts, entering, prompt_slots, rows, how, images)
                    changed = True
                b = self._batch_size(len(rows), space)
                if changed:
                    self._arrange(rows, prompts, prompt_slots, b)
                # decode until the next look
                longest = max(len(prompts[row.sequence // group_size]) + step - row.born for row in rows)
                steps = min(self.check_every, max(T - 1 - (step - row.born) for row in rows))
                if entered and self.done[: len(rows)].all():  # at their first token
                    steps = 0
                for i in range(steps):
                    self._advance(b, how, longest + i)
                step += steps
                yield
                # close the gaps, when that makes the batch smaller or room for others
                kept = [i for i, ended in enumerate(self.done[: len(rows)].tolist()) if not ended]
                smaller = self._batch_size(len(kept), space) < b
                changed = len(kept) < len(rows) and (smaller or bool(waiting) or not kept)
                if changed:
                    self._keep(kept, len(rows))
                    alive = [rows[i] for i in kept]
                    free_rows += {row.slot for row in rows} - {row.slot for row in alive}
                    rows = alive
                    for prompt in prompt_slots.keys() - {row.sequence // group_size for row in rows}:
                        free_prompts.append(prompt_slots.pop(prompt))
        tokens = self.out_tokens[: B * T].view(B, T).clone()
        logps = self.out_logps[: B * T].view(B, T).clone()
        healthy = self.healthy.item()
        if self.device.type == "cuda" and self.cache_bytes > KEEP_SHARE * torch.cuda.mem_get_info(self.device)[1]:
            self.release()
        if not healthy:
            self.release()  # what is not finite must not stay in the cache: zero times NaN is NaN
            raise FloatingPointError(NOT_FINITE)
        return tokens, logps

    def release(self) -> None:
        """Frees cache and graphs, which hold addresses in it; the next rollout allocates and captures again."""
        self.graphs, self.pool = {}, None
        self.cache.release()

    # ---- memory ----

    def _plan(self, prompts: Sequence[list[int]], group_size: int, new_tokens: int, max_rows: int) -> Space:
        """As many groups at once as there are, as `max_rows` allows, and as memory holds."""
        longest, groups = max(map(len, prompts)), len(prompts)
        if max_rows:
            groups = min(groups, max(1, max_rows // group_size))

        def space(groups: int) -> Space:
            # where prompts wait, some groups have few rows left: then there are more prompts than rows / group_size
            num_prompts = groups if groups == len(prompts) else min(2 * groups, len(prompts))
            rows = groups * group_size
            return Space(rows, max(rows, SMALLEST_BATCH), num_prompts, group_size, longest, new_tokens)

        if self.device.type == "cuda":
            free = devices.free_bytes(self.device) + self.cache_bytes  # the cache can be allocated anew
            vocabulary = self.model.get_output_embeddings().weight.shape[0]
            while groups and self.cache.bytes(space(groups)) + 16 * groups * group_size * vocabulary > 0.9 * free:
                groups -= max(1, groups // 8)  # logits, their copies in the draw, and the cache
            if not groups:
                raise ValueError(
                    f"group_size = {group_size}, max_new_tokens = {new_tokens}: one group with a prompt of {longest} "
                    f"tokens needs a cache of {self.cache.bytes(space(1)) / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB "
                    "are free; lower one of them"
                )
        return space(groups)

    @property
    def cache_bytes(self) -> int:
        """Memory of the cache as allocated."""
        return sum(x.numel() * x.element_size() for pool in self.cache.pools for x in pool)

    def _reserve(self, space: Space, uniforms: torch.Tensor) -> None:
        """Memory for a rollout; what graphs point to is allocated anew only when it has to grow."""
        total, rows = uniforms.numel(), space.batch
        moved = self.cache.reserve(space)
        if rows > self.state.shape[1]:
            moved = True
            self.state = torch.zeros(7, rows, dtype=torch.long, device=self.device)
            self.token, self.count, self.sequence, self.start, self.prompt_length, self.done, self.ahead = self.state
            self.healthy = torch.ones((), dtype=torch.bool, device=self.device)
        if total >= len(self.out_tokens):
            moved = True
            self.out_tokens = torch.empty(total + 1, dtype=torch.long, device=self.device)  # the last one is for rows
            self.out_logps = torch.empty(total + 1, device=self.device)  # that have ended
            self.uniforms = torch.empty(total, dtype=torch.float64, device=self.device)
        pointers = tuple(p.data_ptr() for p in self.model.parameters())
        if moved or pointers != getattr(self, "pointers", None):
            self.graphs, self.pool, self.pointers = {}, None, pointers
        self.uniforms[:total] = uniforms.flatten().to(self.device)
        self.head_weight = wide_weight(self.model)
        self.out_tokens.fill_(-1)
        self.out_logps.zero_()
        self.healthy.fill_(True)

    @contextmanager
    def _attached(self) -> Iterator[None]:
        """Caches on the attention modules, eval mode, LoRA merged; all of it is taken back, also on errors."""
        with ExitStack() as stack:
            stack.enter_context(eval_mode(self.model))
            stack.enter_context(merging.merged(self.model))
            for module, (keys, values) in zip(self.modules, self.cache.pools, strict=True):
                module.rl_keys, module.rl_values = keys, values
                stack.callback(lambda module=module: [delattr(module, name) for name in ("rl_keys", "rl_values")])
            yield

    # ---- rows ----

    def _batch_size(self, rows: int, space: Space) -> int:
        """Rows computed for so many that are needed: graphs exist for a few sizes only."""
        if not self.use_graphs:
            return rows
        size = SMALLEST_BATCH
        while size < rows:
            size *= 2
        return min(size, space.batch)

    def _prefill(self, prompts, entering, prompt_slots, rows, how, images) -> None:
        """Reads prompts and draws the first token of each of their rows, which are the last ones of the batch."""
        group_size = self.cache.space.group_size
        first_row = len(rows) - len(entering) * group_size
        for part in _split(entering, [len(prompts[i]) for i in entering], PREFILL_TOKENS):
            lengths = [len(prompts[i]) for i in part]
            batch_rows = [first_row + i * group_size for i in range(len(part))]
            way = self.cache.prefill(lengths, [prompt_slots[i] for i in part], batch_rows)
            ids = torch.tensor([[token for i in part for token in prompts[i]]], device=self.device)
            positions = torch.cat([torch.arange(n) for n in lengths])[None].to(self.device)
            given, ahead = {"input_ids": ids, "position_ids": positions}, torch.zeros(len(part), dtype=torch.long)
            if images is not None:
                own = images.select(torch.tensor(part)).to(self.device)
                row = torch.arange(len(part)).repeat_interleave(torch.tensor(lengths))[None].to(self.device)
                given = own.inputs(self.model, ids, row, positions)
                ahead = own.ends[own.prompts] - torch.tensor(lengths)
            with torch.compiler.set_stance("force_eager"):  # layers compiled for the update are not for this
                hidden = self.decoder(**given, **attention.inputs(self.device, way))
            last = hidden.last_hidden_state[0, way.offsets[1:].long() - 1].repeat_interleave(group_size, 0)
            here = slice(first_row, first_row + len(last))
            placed = [(row.sequence, self.cache.row_start(row.slot)) for row in rows[here]]
            sequences, starts = torch.tensor(placed, device=self.device).T
            self.sequence[here], self.start[here], self.count[here], self.done[here] = sequences, starts, 0, 0
            self.prompt_length[here] = torch.tensor(lengths, device=self.device).repeat_interleave(group_size)
            self.ahead[here] = ahead.to(self.device).repeat_interleave(group_size)  # images take fewer positions
            self._emit(last, here, how, self._draw_eager)
            first_row += len(last)

    def _arrange(self, rows, prompts, prompt_slots, b) -> None:
        """Tells the cache which rows share a prompt, and fills the batch up with rows that do nothing."""
        # rows of a group stand together
        shared = Counter(row.sequence // self.cache.space.group_size for row in rows)
        self.cache.arrange([(prompt_slots[i], len(prompts[i]), shared[i]) for i in shared], b)
        if b > len(rows):
            nothing = torch.tensor([0, 1, 0, self.cache.padding, 0, 1, 0], device=self.device)
            self.state[:, len(rows) : b] = nothing[:, None]

    def _keep(self, kept: list[int], before: int) -> None:
        """Closes the gaps that ended rows left."""
        self.state[:, : len(kept)] = self.state[:, :before][:, torch.tensor(kept, dtype=torch.long, device=self.device)]
        self.cache.keep(kept)

    # ---- one step ----

    def _advance(self, b: int, how: Sampling, longest: int) -> None:
        """One token for the first b rows: a graph, or the step itself."""
        if not self.use_graphs:
            return self._step(b, how, longest)
        key = (*self.cache.key(b), how)
        if key not in self.graphs:
            self.graphs[key] = self._capture(b, how)
        self.graphs[key].replay()

    def _step(self, b: int, how: Sampling, longest: int = 0) -> None:
        """One token for the first b rows; on a GPU it reads and writes device memory only."""
        position = self.prompt_length[:b] + self.count[:b] - 1
        way = self.cache.decode(self.start[:b], self.count[:b], position, longest)
        kwargs = attention.inputs(self.device, way)
        hidden = self.decoder(
            input_ids=self.token[:b, None], position_ids=(position + self.ahead[:b])[:, None], **kwargs
        )
        self._emit(hidden.last_hidden_state[:, 0], slice(0, b), how, self._draw)

    def _emit(self, hidden: torch.Tensor, rows: slice, how: Sampling, draw) -> None:
        """Draws the next token of some rows from their last hidden states, and writes it down."""
        self.healthy.logical_and_(hidden.isfinite().all())
        T = self.cache.space.tokens
        count, done = self.count[rows], self.done[rows].bool()
        place = self.sequence[rows] * T + count.clamp(max=T - 1)
        logits = vocabulary_logits(self.model, hidden, self.head_weight)
        tokens, logps = draw(logits, self.uniforms[place], count, how)
        place = torch.where(done, len(self.out_tokens) - 1, place)
        self.out_tokens.index_copy_(0, place, tokens)
        self.out_logps.index_copy_(0, place, logps)
        ended = done | (tokens[:, None] == self.end).any(1) | (count + 1 >= T)
        self.token[rows] = torch.where(done, self.token[rows], tokens)
        self.count[rows] = count + (~done).long()
        self.done[rows] = ended.long()

    def _draw_eager(self, logits, uniforms, count, how) -> tuple[torch.Tensor, torch.Tensor]:
        logits = sampling.distribution(logits, how, count, self.end, self.suppressed)
        return sampling.draw(logits, uniforms, greedy=how.temperature == 0)

    def _capture(self, b: int, how: Sampling) -> torch.cuda.CUDAGraph:
        """The step for b rows as a graph. All rows are marked as ended meanwhile, so that trying it changes nothing."""
        before = self.done[:b].clone()
        self.done[:b] = 1
        layers = [layer for layer in self.compiled_layers if layer._compiled_call_impl is None]
        for layer in layers:
            layer.forward = torch.compile(layer.forward, dynamic=True)
        try:
            aside = torch.cuda.Stream(self.device)
            aside.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(aside):
                for _ in range(3):
                    self._step(b, how)
            torch.cuda.current_stream(self.device).wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            # thread_local: what NCCL and other threads do meanwhile is no part of it, and must not end it. A stream of
            # this GPU: the one that torch would take belongs to the first GPU for which it did
            mode = dict(pool=self.pool, stream=aside, capture_error_mode="thread_local")
            with torch.cuda.device(self.device), torch.cuda.graph(graph, **mode):
                self._step(b, how)
        finally:
            for layer in layers:
                del layer.forward
        self.pool = self.pool or graph.pool()
        self.done[:b] = before
        return graph


def _split(items: list[int], sizes: list[int], limit: int) -> list[list[int]]:
    """Cuts a list into parts whose sizes add up to `limit` at most; an item above it is a part of its own."""
    parts: list[list[int]] = []
    total = limit + 1
    for item, size in zip(items, sizes, strict=True):
        if total + size > limit:
            parts.append([])
            total = 0
        parts[-1].append(item)
        total += size
    return parts
