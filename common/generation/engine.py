"""The decode engine: many completions at a time from one model on one device.

Prompts are read once per group into a cache of fixed size. On a GPU each decode step is one CUDA
graph. The host checks every few steps which rows have ended, closes the gaps, and lets waiting
prompts in: scheduler.py decides, runner.py acts on the device.

Dims: P prompts, G completions per prompt, B = P * G sequences, T new tokens.
"""

from array import array
from collections.abc import Generator, Sequence

import torch
from transformers import PreTrainedModel

from common.base import devices
from common.generation import drafts
from common.generation.runner import NOT_FINITE, Runner
from common.generation.scheduler import CHECK_EVERY, SMALLEST_BATCH, Group, Scheduler, Space, prefill_parts
from common.generation.stopping import Stopping
from common.maths.sampling import Sampling
from common.model import attention
from common.model.images import Images

KEEP_SHARE = 0.1  # of the GPU's memory: a cache up to this size stays allocated during the update


class Engine:
    """Decodes completions with one model; keeps its cache and CUDA graphs from one rollout to the next.

    Attributes:
        rows: completions decoded at once in the last rollout, at most.
        check_every: decode steps between host checks.
        drafted: [B] int64, on the CPU: tokens of the last rollout's completions that stood in a draft.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        support: attention.Support,
        end_ids: Sequence[int],
        suppressed_ids: Sequence[int] = (),
        compile: bool = True,
        left_padding: bool = True,
        graphs: bool = True,
        kernels: bool = False,
        fused: bool = False,
    ):
        """Sets up an empty engine.

        Args:
            model: a model whose layers attend plainly, or keep a state.
            support: from `attention.install`, without a reason against.
            end_ids: every token that ends a completion.
            suppressed_ids: tokens that are never drawn.
            compile: compile the decoder layers and the draw, on a GPU.
            left_padding: a hybrid model reads prompts of different lengths together, padded; False:
                one length at a time.
            graphs: capture decode steps as CUDA graphs; False if they wait for the host.
            kernels: replace steps of linear attention by those of delta_rule.py.
            fused: decode by the kernels of common/fused/.
        """
        self.model, self.device, self.rows, self.drafted = model, model.device, 0, torch.empty(0)
        options = compile, left_padding, graphs, kernels, fused
        self.runner = Runner(model, support, end_ids, suppressed_ids, *options)
        self.check_every = CHECK_EVERY if self.device.type == "cuda" else 1

    @property
    def takes_drafts(self) -> bool:
        """Whether `decode` uses earlier completions: a state cannot go back to where a draft differs."""
        return not self.runner.states.kept

    @property
    def name(self) -> str:
        """Name of the decode path, for logging."""
        runner = self.runner
        fused = " by a fused kernel" if runner.kernels else ""
        states = f", states of its other layers{fused}" if runner.states.kept else ""
        if runner.cache.kind == "sdpa":
            dtype = str(self.model.dtype).removeprefix("torch.")
            return f"PyTorch's attention over a static cache{states} ({self.device.type}, {dtype}: no flash kernel)"
        compiled = ", compiled layers" if runner.compiled_layers else ", fused blocks" if runner.fused else ""
        graphs = ", CUDA graphs" if runner.use_graphs else ""
        return f"flash attention, shared prompts{states}{graphs}{compiled}"

    @property
    def cache_bytes(self) -> int:
        """Memory of the cache as allocated, with the states of layers without attention."""
        tensors = [x for pool in self.runner.cache.pools for x in pool] + self.runner.states.tensors
        return sum(x.nbytes for x in tensors)

    @torch.no_grad()
    def decode(
        self,
        prompts: Sequence[list[int]],
        group_size: int,
        uniforms: torch.Tensor,
        sampling: Sampling,
        max_rows: int = 0,
        images: Images | None = None,
        stopping: Stopping | None = None,
        earlier: Sequence[Sequence[array]] = (),
    ) -> Generator[None, None, tuple[torch.Tensor, torch.Tensor]]:
        """Completions of every prompt; yields while the device is at work, so that engines can take turns.

        Args:
            prompts: token ids of P prompts.
            group_size: G, completions per prompt.
            uniforms: [B, T] fp64, random numbers of the sequences.
            sampling: the distribution tokens are drawn from.
            max_rows: sequences decoded at once, at most; 0: as many as memory holds. The others
                wait.
            images: of the P prompts, if the model is given any.
            stopping: ends rows at a stop string, at the next host check; the caller cuts what
                follows it.
            earlier: completions of each prompt in its last pass, to be drafts; see drafts.py.

        Returns:
            Tokens [B, T] int64, -1 after the end, and their log-probabilities [B, T] fp32, 0 after
            the end.

        Raises:
            FloatingPointError: the model gave something that is not finite.
            ValueError: not even one group fits into the memory.
        """
        (B, T), runner = uniforms.shape, self.runner
        space = self._plan(prompts, group_size, T, max_rows)
        self.rows = space.rows
        self.drafted = torch.zeros(B, dtype=torch.long)
        runner.reserve(space, uniforms)
        # fused steps are so short that few rows deserve graphs of their own
        smallest = (1 if runner.fused else SMALLEST_BATCH) if runner.use_graphs else 0
        schedule, kept = Scheduler([len(ids) for ids in prompts], space, self.check_every, smallest), None
        with runner.attached():
            while schedule.unfinished:
                entered = schedule.admit()
                for groups in prefill_parts(entered):
                    runner.prefill(groups, prompts, sampling, images)
                ahead = self._draw_along(earlier, entered, sampling) if entered and earlier else []
                schedule.draw_ahead(ahead)
                rows, b = len(schedule.rows), schedule.batch_size
                if entered or kept is not None:
                    runner.arrange(schedule.groups(), b)
                steps, longest = schedule.steps_until_check, schedule.longest
                if any(ahead) or (entered and runner.all_done(rows)):  # rows may have ended already
                    steps = 0
                for i in range(steps):
                    runner.advance(b, sampling, longest + i)
                schedule.step += steps
                yield
                if stopping:
                    runner.stop(rows, stopping, steps + 1 + max(ahead, default=0))
                kept = schedule.close_gaps(runner.done(rows))
                if kept is not None:
                    runner.keep(kept, rows)
        tokens, logps = runner.results(B, T)
        healthy = runner.healthy.item()
        if self.device.type == "cuda" and self.cache_bytes > KEEP_SHARE * torch.cuda.mem_get_info(self.device)[1]:
            self.release()
        if not healthy:
            self.release()  # what is not finite must not stay in the cache: zero times NaN is NaN
            raise FloatingPointError(NOT_FINITE)
        return tokens, logps

    def _draw_along(self, earlier: Sequence[Sequence[array]], groups: list[Group], sampling: Sampling) -> list[int]:
        """Tokens that each new row draws by `drafts.verify`."""
        ahead, drafted = drafts.verify(self.runner, groups, earlier, sampling)
        self.drafted[[row.sequence for group in groups for row in group.rows]] = torch.tensor(drafted)
        return ahead

    def release(self) -> None:
        """Frees cache and graphs until the next rollout, which allocates and captures again."""
        self.runner.release()

    def _plan(self, prompts: Sequence[list[int]], group_size: int, new_tokens: int, max_rows: int) -> Space:
        """As many groups at once as there are, as `max_rows` allows, and as memory holds."""
        cache, longest, groups = self.runner.cache, max(map(len, prompts)), len(prompts)
        if max_rows:
            groups = min(groups, max(1, max_rows // group_size))

        def space(groups: int) -> Space:
            # where prompts wait, some groups have few rows left: then there are more prompts than
            # rows / group_size
            num_prompts = groups if groups == len(prompts) else min(2 * groups, len(prompts))
            rows = groups * group_size
            return Space(rows, max(rows, SMALLEST_BATCH), num_prompts, group_size, longest, new_tokens)

        if self.device.type == "cuda":
            states, fused = self.runner.states.bytes_per_row, self.runner.fused
            held = self.cache_bytes + (fused.bytes if fused else 0)  # can be allocated anew
            free = devices.free_bytes(self.device) + held
            vocabulary = self.model.get_output_embeddings().weight.shape[0]
            buffers = fused.bytes_per_row if fused else 0

            def needed(groups: int) -> int:
                # logits and their copies in the draw; states are copied while a graph is captured
                return (
                    cache.bytes(space(groups))
                    + 16 * groups * group_size * vocabulary
                    + (2 * states + buffers) * space(groups).batch
                )

            while groups and needed(groups) > 0.9 * free:
                groups -= max(1, groups // 8)
            if not groups:
                raise ValueError(
                    f"group_size = {group_size}, max_new_tokens = {new_tokens}: one group with a prompt of {longest} "
                    f"tokens needs {needed(1) / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free; lower one of them"
                )
        return space(groups)
