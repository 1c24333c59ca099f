"""The device side of the decode engine: prefill, decode steps, drawing, and CUDA graphs of whole steps.

A decode step gives every row its next token: forward pass, draw, log-probability and end of
sequence all happen on the device. Weights are read where they are: after an update there is nothing
to copy, and graphs stay valid as long as parameters keep their storage.

Dims: B sequences of the rollout, b rows decoded together, V vocabulary, T new tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from common.fused.step import Step
from common.generation import delta_rule
from common.generation.cache import Cache
from common.generation.flash_cache import FlashCache
from common.generation.scheduler import Draft, Group, Space
from common.generation.sdpa_cache import SdpaCache
from common.generation.stopping import Stopping
from common.maths.sampling import Sampling, distribution, draw
from common.model import attention, merging, states
from common.model.head import vocabulary_logits, wide_weight
from common.model.images import Images
from common.model.modes import eval_mode

NOT_FINITE = "hidden states of the policy are not finite: broken weights, or an overflow in fp16"


class RowState:
    """What a decode step knows of each row of the batch, int64 [rows] each, on the device.

    Attributes:
        table: [8, rows], all of the following: one gather closes gaps, and graphs keep their
            addresses.
        token: the last token drawn.
        count: tokens drawn so far.
        sequence: number of the completion in the rollout.
        start: where the completion begins in the cache.
        prompt_length: tokens of the prompt.
        done: 1 once the completion has ended.
        position_shift: position of a token less its place in the sequence: images take fewer
            positions than tokens.
        prompt_start: where the prompt begins in the cache.
    """

    def __init__(self, rows: int, device: torch.device):
        self.table = torch.zeros(8, rows, dtype=torch.long, device=device)
        self.token, self.count, self.sequence, self.start = self.table[:4]
        self.prompt_length, self.done, self.position_shift, self.prompt_start = self.table[4:]

    def __len__(self) -> int:
        return self.table.shape[1]

    def keep(self, kept: list[int], before: int) -> None:
        """Closes the gaps in a batch of `before` rows; `kept` are the places of those that stay, ascending."""
        places = torch.tensor(kept, dtype=torch.long, device=self.table.device)
        self.table[:, : len(kept)] = self.table[:, :before][:, places]

    def pad(self, rows: int, batch: int, start: int) -> None:
        """Fills a batch up from `rows` to `batch` with ended rows, which write to `start` in the cache."""
        values = [0, 1, 0, start, 0, 1, 0, 0]  # one token drawn, done
        self.table[:, rows:batch] = torch.tensor(values, device=self.table.device)[:, None]


class Runner:
    """Runs one model on one device over a key-value cache; keeps cache and CUDA graphs from one rollout to the next."""

    def __init__(
        self,
        model: PreTrainedModel,
        support: attention.Support,
        end_ids: Sequence[int],
        suppressed_ids: Sequence[int],
        compile: bool,
        left_padding: bool,
        graphs: bool,
        kernels: bool,
        fused: bool,
    ):
        """Chooses the cache; no memory is allocated yet. See `engine.Engine` for the arguments."""
        self.model, self.decoder, self.device = model, model.get_decoder(), model.device
        self.modules, self.width = [layer.module for layer in support.layers], model.get_output_embeddings().in_features
        probe = torch.empty(0, support.layers[0].head_size, dtype=model.dtype, device=self.device)
        kind = FlashCache if attention.on_flash(probe) else SdpaCache
        self.cache: Cache = kind(support.layers, model.dtype, self.device)
        self.states, self.left_padding = states.Pool(self.decoder, support.kept), left_padding
        self.use_graphs = graphs and self.device.type == "cuda" and kind is FlashCache
        self.kernels, self.compiled_layers = kernels, []
        self.fused = Step(model, support, end_ids, suppressed_ids) if fused else None
        if compile and self.use_graphs and not fused:
            blocks = attention.decoder_layers(model, support)
            self.compiled_layers = states.stateless_parts(self.decoder) if support.kept else blocks
        self._draw = torch.compile(self._draw_eager, dynamic=True) if self.compiled_layers else self._draw_eager
        self.end = torch.tensor(list(end_ids), device=self.device)
        self.suppressed = torch.tensor(list(suppressed_ids), dtype=torch.long, device=self.device)
        self.graphs: dict[tuple, torch.cuda.CUDAGraph] = {}
        self.graph_memory = None  # shared by all graphs
        self.aside: torch.cuda.Stream | None = None  # on which graphs are captured
        self.state = RowState(0, torch.device("cpu"))
        self.out_tokens = torch.empty(0)
        self.parameter_addresses: tuple[int, ...] | None = None

    # ---- one rollout ----

    def reserve(self, space: Space, uniforms: torch.Tensor) -> None:
        """Gets memory ready for a rollout; what graphs point to is allocated anew only when it has to grow."""
        total = uniforms.numel()
        moved = self.cache.reserve(space) | self.states.reserve(space.batch)
        if self.fused:
            moved |= self.fused.reserve(space.batch, space.longest + space.tokens)
        if space.batch > len(self.state):
            moved = True
            self.state = RowState(space.batch, self.device)
            self.healthy = torch.ones((), dtype=torch.bool, device=self.device)
        if total >= len(self.out_tokens):
            moved = True
            # ended rows write to the last place
            self.out_tokens = torch.empty(total + 1, dtype=torch.long, device=self.device)
            self.out_logps = torch.empty(total + 1, device=self.device)
            self.uniforms = torch.empty(total, dtype=torch.float64, device=self.device)
        addresses = tuple(p.data_ptr() for p in self.model.parameters())
        if moved or addresses != self.parameter_addresses:
            self.graphs, self.graph_memory, self.parameter_addresses = {}, None, addresses
            if self.fused:
                self.fused.read()
        self.uniforms[:total] = uniforms.flatten().to(self.device)
        self.head_weight = wide_weight(self.model)
        self.out_tokens.fill_(-1)
        self.out_logps.zero_()
        self.healthy.fill_(True)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Caches on the attention modules, eval mode, LoRA merged; all of it is undone, also on errors."""
        with ExitStack() as stack:
            stack.enter_context(eval_mode(self.model))
            stack.enter_context(merging.merged(self.model))
            stack.enter_context(states.limited_steps(self.model))
            if self.kernels:
                stack.enter_context(delta_rule.used_by(self.model))
            for module, (keys, values) in zip(self.modules, self.cache.pools, strict=True):
                module.rl_keys, module.rl_values = keys, values
                stack.callback(lambda module=module: [delattr(module, name) for name in ("rl_keys", "rl_values")])
            yield

    def results(self, B: int, T: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and log-probabilities of the rollout, as `engine.Engine.decode` returns them."""
        return tuple(out[: B * T].view(B, T).clone() for out in (self.out_tokens, self.out_logps))

    def release(self) -> None:
        """Frees cache and graphs, which hold addresses in it; the next rollout allocates and captures again."""
        self.graphs, self.graph_memory = {}, None
        self.cache.release()
        self.states.release()
        if self.fused:
            self.fused.release()

    # ---- the batch ----

    def prefill(
        self, groups: list[Group], prompts: Sequence[list[int]], sampling: Sampling, images: Images | None
    ) -> None:
        """Reads prompts in one forward pass and draws the first token of each of their rows.

        Args:
            groups: neighbors in the batch, all of whose rows are new.
            prompts: of the whole rollout.
            sampling: the distribution tokens are drawn from.
            images: of all prompts, if the model is given any.
        """
        group_size, lengths = len(groups[0].rows), [group.length for group in groups]
        read = self._read_rows if self.states.kept else self._read_packed
        last, shift = read(groups, prompts, images)
        here, state = slice(groups[0].first, groups[-1].places.stop), self.state
        starts = [start for group in groups for start in self.cache.starts(group)]
        numbers = [row.sequence for group in groups for row in group.rows]
        prompts_at = [self.cache.prompt_start(group) for group in groups for _ in group.rows]
        places = torch.tensor([numbers, starts, prompts_at], device=self.device)
        state.sequence[here], state.start[here], state.prompt_start[here] = places
        state.count[here], state.done[here] = 0, 0
        state.prompt_length[here] = torch.tensor(lengths, device=self.device).repeat_interleave(group_size)
        state.position_shift[here] = shift.to(self.device).repeat_interleave(group_size)
        self._emit(last.repeat_interleave(group_size, 0), here, sampling, self._draw_eager)

    def _read_packed(
        self, groups: list[Group], prompts: Sequence[list[int]], images: Images | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Last hidden state and position shift of each prompt, read without padding."""
        path, lengths = self.cache.prefill(groups), [group.length for group in groups]
        ids = torch.tensor([[token for group in groups for token in prompts[group.prompt]]], device=self.device)
        positions = torch.cat([torch.arange(n) for n in lengths])[None].to(self.device)
        row = torch.arange(len(groups)).repeat_interleave(torch.tensor(lengths))[None].to(self.device)
        inputs, shift = self._inputs(groups, ids, row, positions, images)
        with torch.compiler.set_stance("force_eager"):  # layers compiled for the update are not for this
            hidden = self.decoder(**inputs, **attention.inputs(self.device, path))
        return hidden.last_hidden_state[0, path.offsets[1:].long() - 1], shift

    def _read_rows(
        self, groups: list[Group], prompts: Sequence[list[int]], images: Images | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `_read_packed`, in rows padded on the left, or in rows of equal length; keeps their states."""
        lengths = torch.tensor([group.length for group in groups])
        parts = [torch.arange(len(groups))] if self.left_padding else [
            (lengths == n).nonzero().squeeze(1) for n in lengths.unique()
        ]  # fmt: skip
        last = torch.empty(len(groups), self.width, dtype=self.model.dtype, device=self.device)
        shift = torch.zeros(len(groups), dtype=torch.long)
        for part in parts:
            own = [groups[i] for i in part.tolist()]
            rows = [torch.tensor(prompts[group.prompt]) for group in own]
            ids = pad_sequence(rows, True, 0, padding_side="left").to(self.device)
            mask = (torch.arange(ids.shape[1]) >= ids.shape[1] - lengths[part, None]).to(self.device)
            positions, row = (mask.long().cumsum(1) - 1).clamp(min=0), torch.arange(len(own), device=self.device)
            inputs, shift[part] = self._inputs(own, ids, row[:, None], positions, images)
            cache = states.cache_for(self.decoder)
            inputs |= attention.inputs(self.device, attention.Padded(self.cache.prefill(own), mask))
            inputs |= {self.states.argument: cache, "use_cache": True}
            if lengths[part].min() < ids.shape[1]:
                inputs["attention_mask"] = mask.long()  # states must not see padding
            with torch.compiler.set_stance("force_eager"):
                last[part.to(self.device)] = self.decoder(**inputs).last_hidden_state[:, -1]
            places = [place for group in own for place in range(group.places.start, group.places.stop)]
            self.states.write(cache, len(own[0].rows), torch.tensor(places, device=self.device))
        return last, shift

    def _inputs(
        self, groups: list[Group], ids: torch.Tensor, row: torch.Tensor, positions: torch.Tensor, images: Images | None
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Tokens and positions for the decoder, with images if there are any; and the position shift of each prompt."""
        if images is None:
            return {"input_ids": ids, "position_ids": positions}, torch.zeros(len(groups), dtype=torch.long)
        own = images.select(torch.tensor([group.prompt for group in groups])).to(self.device)
        shift = own.ends[own.prompts].cpu() - torch.tensor([group.length for group in groups])
        return own.inputs(self.model, ids, row, positions), shift

    def last_tokens(self, groups: list[Group]) -> list[int]:
        """The token that each row of neighboring groups drew last; syncs."""
        return self.state.token[groups[0].first : groups[-1].places.stop].tolist()

    def extend(self, drafts: list[Draft], sampling: Sampling) -> tuple[list[int], list[int]]:
        """Draws tokens of some rows in one forward pass over their drafts; syncs.

        A row draws a token at every place of its draft, and keeps those up to the first that
        differs from the draft: behind that one, the pass has read other tokens than were drawn.

        Args:
            drafts: of different rows that have not ended, at most as long as the limit on completions.
            sampling: the distribution tokens are drawn from.

        Returns:
            Of each row: tokens that it has drawn, and the last of them.
        """
        state, T = self.state, self.cache.space.tokens
        path = self.cache.extend(drafts)
        to = {"device": self.device}
        places, lengths = (torch.tensor(x, **to) for x in zip(*((d.place, d.new) for d in drafts), strict=True))
        before = torch.tensor([token for d in drafts for token in d.tokens[d.count - 1 : -1]], **to)
        draft = torch.tensor([token for d in drafts for token in d.tokens[d.count :]], **to)
        row = torch.arange(len(drafts), **to).repeat_interleave(lengths, output_size=len(draft))
        number = torch.arange(len(draft), **to) - path.offsets[row]  # of the token in its draft
        count = state.count[places][row] + number
        position = (state.prompt_length + state.position_shift)[places][row] + count - 1
        with torch.compiler.set_stance("force_eager"):
            hidden = self.decoder(
                input_ids=before[None], position_ids=position[None], **attention.inputs(self.device, path)
            ).last_hidden_state[0]
        self.healthy.logical_and_(hidden.isfinite().all())
        where = state.sequence[places][row] * T + count
        drawn = []
        for part in torch.arange(len(draft), **to).split(self.cache.space.batch):  # there is room for so many logits
            logits = vocabulary_logits(self.model, hidden[part], self.head_weight)
            drawn.append(self._draw_eager(logits, self.uniforms[where[part]], count[part], sampling))
        tokens, logps = (torch.cat(x) for x in zip(*drawn, strict=True))
        stops = (tokens != draft) | torch.isin(tokens, self.end)
        new = lengths.scatter_reduce(0, row, torch.where(stops, number + 1, len(draft)), "amin")
        kept = number < new[row]
        self.out_tokens[where[kept]], self.out_logps[where[kept]] = tokens[kept], logps[kept]
        last = tokens[path.offsets[:-1] + new - 1]
        state.token[places] = last
        state.count[places] += new
        state.done[places] = (torch.isin(last, self.end) | (state.count[places] >= T)).long()
        return new.tolist(), last.tolist()

    def arrange(self, groups: list[Group], b: int) -> None:
        """Prepares decode steps for a batch that has changed: groups, then padding up to b rows."""
        self.cache.arrange(groups, b)
        if b > (rows := groups[-1].places.stop):
            self.state.pad(rows, b, self.cache.padding)  # for graphs, which only a FlashCache allows

    def keep(self, kept: list[int], before: int) -> None:
        """Closes the gaps that ended rows leave; see `RowState.keep`."""
        self.state.keep(kept, before)
        if moving := [*self.cache.row_tensors, *self.states.tensors]:
            places = torch.tensor(kept, dtype=torch.long, device=self.device)
            for tensor in moving:
                tensor[: len(kept)] = tensor[places]

    def stop(self, rows: int, stopping: Stopping, new: int) -> None:
        """Marks rows as ended whose text holds a stop string; syncs.

        Args:
            rows: of the batch.
            stopping: finds stop strings.
            new: tokens of each row since the last call, at most.
        """
        T = self.cache.space.tokens
        running = (self.state.done[:rows] == 0).nonzero().squeeze(-1)
        tokens = self.out_tokens[: len(self.out_tokens) // T * T].view(-1, T)[self.state.sequence[running]]
        ended = torch.tensor(stopping.ended(tokens, new), dtype=torch.bool, device=self.device)
        self.state.done[running[ended]] = 1

    def done(self, rows: int) -> list[bool]:
        """Which rows of the batch have ended; syncs."""
        return list(map(bool, self.state.done[:rows].tolist()))

    def all_done(self, rows: int) -> bool:
        """Whether all rows of the batch have ended; syncs."""
        return bool(self.state.done[:rows].all())

    # ---- one step ----

    def advance(self, b: int, sampling: Sampling, longest: int) -> None:
        """One token for the first b rows, by a graph or the step itself; `longest` is the length of the longest row."""
        if not self.use_graphs:
            return self._step(b, sampling, longest)
        key = (*self.cache.graph_key(b), sampling)
        if key not in self.graphs:
            self.graphs[key] = self._capture(b, sampling)
        self.graphs[key].replay()

    def _step(self, b: int, sampling: Sampling, longest: int = 0) -> None:
        """One token for the first b rows; under a graph it reads and writes device memory only."""
        state = self.state
        if self.fused:
            return self._fused_step(b, sampling)
        position = state.prompt_length[:b] + state.count[:b] - 1
        path = self.cache.decode(state.start[:b], state.count[:b], longest)
        hidden = self.decoder(
            input_ids=state.token[:b, None],
            position_ids=(position + state.position_shift[:b])[:, None],
            **attention.inputs(self.device, path) | self.states.read(b),
        )
        self._emit(hidden.last_hidden_state[:, 0], slice(0, b), sampling, self._draw)

    def _fused_step(self, b: int, sampling: Sampling) -> None:
        """As `_step`, by the kernels of common/fused/."""
        with torch.cuda.device(self.device):  # where Triton launches
            logits = self.fused.logits(b, self.state.table, self.cache, sampling)
            if self.fused.draws(sampling):
                outputs = self.uniforms, self.out_tokens, self.out_logps, self.healthy
                self.fused.draw(b, self.state.table, *outputs, self.cache.space.tokens, sampling)
            else:
                self._record(logits, slice(0, b), sampling, self._draw)

    def _emit(self, hidden: torch.Tensor, rows: slice, sampling: Sampling, draw_tokens: Callable) -> None:
        """Draws the next token of some rows from their last hidden states, and records it."""
        self._record(vocabulary_logits(self.model, hidden, self.head_weight), rows, sampling, draw_tokens)

    def _record(self, logits: torch.Tensor, rows: slice, sampling: Sampling, draw_tokens: Callable) -> None:
        """As `_emit`, from logits."""
        self.healthy.logical_and_(logits.isfinite().all())
        state, T = self.state, self.cache.space.tokens
        count, done = state.count[rows], state.done[rows].bool()
        place = state.sequence[rows] * T + count.clamp(max=T - 1)
        tokens, logps = draw_tokens(logits, self.uniforms[place], count, sampling)
        place = torch.where(done, len(self.out_tokens) - 1, place)
        self.out_tokens.index_copy_(0, place, tokens)
        self.out_logps.index_copy_(0, place, logps)
        ended = done | (tokens[:, None] == self.end).any(1) | (count + 1 >= T)
        state.token[rows] = torch.where(done, state.token[rows], tokens)
        state.count[rows] = count + (~done).long()
        state.done[rows] = ended.long()

    def _draw_eager(
        self, logits: torch.Tensor, uniforms: torch.Tensor, count: torch.Tensor, sampling: Sampling
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = distribution(logits, sampling, count, self.end, self.suppressed)
        return draw(logits, uniforms, greedy=sampling.temperature == 0)

    def _capture(self, b: int, sampling: Sampling) -> torch.cuda.CUDAGraph:
        """The step for b rows as a graph; rows are marked as ended meanwhile, so that warming up changes nothing."""
        before, states_before = self.state.done[:b].clone(), [tensor[:b].clone() for tensor in self.states.tensors]
        self.state.done[:b] = 1
        layers = [layer for layer in self.compiled_layers if layer._compiled_call_impl is None]
        for layer in layers:
            layer.forward = torch.compile(layer.forward, dynamic=True)
        try:
            # one for all captures: cuBLAS keeps 32 MiB for every stream that it was used on
            aside = self.aside = self.aside or torch.cuda.Stream(self.device)
            aside.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(aside):
                for _ in range(3):
                    self._step(b, sampling)
            torch.cuda.current_stream(self.device).wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            # thread_local: what NCCL and other threads do meanwhile is no part of it, and must not
            # end it. A stream of this GPU: the one that torch would take belongs to the first GPU
            # for which it did
            options = dict(pool=self.graph_memory, stream=aside, capture_error_mode="thread_local")
            with torch.cuda.device(self.device), torch.cuda.graph(graph, **options):
                self._step(b, sampling)
        finally:
            for layer in layers:
                del layer.forward
        self.graph_memory = self.graph_memory or graph.pool()
        self.state.done[:b] = before
        for tensor, value in zip(self.states.tensors, states_before, strict=True):
            tensor[:b] = value
        return graph
