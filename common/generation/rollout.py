"""Sampling completions from a policy.

Tokens are sampled from the plain softmax at `temperature` over the whole vocabulary, in fp32;
nothing is taken from a generation_config.json. Every sequence has its own stream of random numbers,
named by (seed, step, prompt, completion), so the same seed gives the same completions on one GPU or
several, in one process or many.

Dims: P prompts, G completions per prompt, B = P * G sequences, C completion tokens.
"""

import dataclasses
import sys
from array import array
from collections.abc import Generator, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from common.base import memory
from common.base.checks import require
from common.base.distributed import print_main
from common.generation import fallback, paths
from common.generation.batches import RolloutBatch, assemble, deal
from common.generation.stopping import Stopping
from common.maths.sampling import Sampling, uniforms
from common.model import attention, positions
from common.model.images import Images, is_vlm
from common.model.logprobs import LogProbs


class Sampler:
    """Samples completions from the policy, on one device or several; keeps caches and graphs for the next rollout."""

    def __init__(
        self,
        replicas: Sequence[PreTrainedModel],
        *,
        end_ids: Sequence[int],
        pad_id: int,
        max_new_tokens: int,
        min_new_tokens: int = 0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        suppressed_ids: Sequence[int] = (),
        rollout_batch: int = 0,
        compile: bool = True,
        stopping: Stopping | None = None,
        trained: LogProbs | None = None,
    ):
        """Chooses how the replicas decode, and logs it.

        Args:
            replicas: models with equal weights; prompts are dealt to them, and their GPUs work at
                the same time.
            end_ids: every token that ends a completion.
            pad_id: what stands after the end.
            max_new_tokens: tokens after which a completion is cut off.
            min_new_tokens: no end token before this many.
            top_p: see `sampling.Sampling`; with it, `top_k` or `min_p` the log-probabilities of a
                rollout are those of the truncated distribution, the losses' are not.
            top_k: see `sampling.Sampling`.
            min_p: see `sampling.Sampling`.
            suppressed_ids: tokens that are never sampled.
            rollout_batch: completions decoded at once per replica, at most, but one group at least;
                0: as many as memory holds.
            compile: compile the small operations of a step, on a GPU.
            stopping: stop strings, which end a completion as an end token does.
            trained: the policy as the loss sees it, for the log.

        Raises:
            ValueError: log-probabilities would not be those of the plain forward pass.
        """
        self.replicas, self.end_ids, self.pad_id = replicas, tuple(end_ids), pad_id
        self.suppressed_ids, self.rollout_batch = tuple(suppressed_ids), rollout_batch  # lowered if memory runs out
        self.max_new_tokens, self.stopping = max_new_tokens, stopping
        self.sampling = Sampling(1.0, top_p, top_k, min_p, min_new_tokens)
        self._warned_of_positions, self._beyond_window, self._beyond_engines = False, None, ()
        self._supports = [attention.install(replica) for replica in replicas]
        self.window = min(self._supports[0].window, attention.window_of(replicas[0]))
        # all decode alike, so a replica that the engine cannot serve, such as one with broken
        # weights, decides
        first = next((i for i, support in enumerate(self._supports) if support.not_cached), 0)
        # prompts are not known yet: with long ones `generate` chooses again
        beyond = self.window if self.window < max_new_tokens else 0
        self.path, reason = paths.choose(replicas[first], self._supports[first], self.suppressed_ids, beyond)
        self.engines = self._decoders(self.path, compile)
        if beyond:
            self._beyond_window, self._beyond_engines = self.path, self.engines
        name = self.engines[0].name if self.engines[0] else str(self.path)
        training = f"; training: {trained.layout}" if trained else ""
        print_main(f"rollout: {name}{reason}{training}", file=sys.stderr)

    def generate(
        self,
        prompts: Sequence[list[int]],
        *,
        group_size: int,
        temperature: float,
        seed: int = 0,
        step: int = 0,
        prompt_numbers: Sequence[int] | None = None,
        images: Images | None = None,
        earlier: Sequence[Sequence[array]] = (),
    ) -> RolloutBatch:
        """Samples `group_size` completions for every prompt.

        Args:
            prompts: token ids of P prompts.
            group_size: completions per prompt.
            temperature: of the softmax; 0 takes the most likely token.
            seed: of the run.
            step: of the run; the same seed and step give the same completions.
            prompt_numbers: place of each prompt in the whole step's batch, over all ranks; 0..P-1
                by default.
            images: of the P prompts, for a policy that reads images; the batch refers to them.
            earlier: completions of the P prompts in their last pass, from `drafts.Earlier.of`; see `takes_drafts`.

        Returns:
            B = P * group_size sequences on the device of the first replica, the completions of a
            prompt side by side.

        Raises:
            FloatingPointError: the policy gave something that is not finite.
            FatalOutOfMemoryError: memory does not suffice for one group at a time; until then,
                fewer are decoded at once, which gives the same completions.
            ValueError: the images are not those of the prompts; or as in `require_fit`.
        """
        self.require_fit(prompts)
        self._check_images(prompts, images)
        sampling = dataclasses.replace(self.sampling, temperature=temperature)
        prompt_numbers = range(len(prompts)) if prompt_numbers is None else prompt_numbers
        uniforms_BC = uniforms(seed, step, prompt_numbers, group_size, self.max_new_tokens)
        tokens_BC, logps_BC, drafted_B = self._decode(prompts, group_size, uniforms_BC, sampling, images, earlier)
        stopped_B = self.stopping.cut(tokens_BC, logps_BC) if self.stopping else None
        batch = assemble(prompts, group_size, tokens_BC, logps_BC, self.pad_id, self.end_ids, images, stopped_B)
        batch.drafted = None if drafted_B is None else drafted_B.minimum(batch.lengths)  # a stop string may cut them
        return batch

    def _decode(
        self,
        prompts: Sequence[list[int]],
        group_size: int,
        uniforms_BC: torch.Tensor,
        sampling: Sampling,
        images: Images | None,
        earlier: Sequence[Sequence[array]],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Tokens [B, C], -1 after the end, their log-probabilities, and how many of each row stood in drafts.

        Prompts are dealt to the replicas.
        """
        # completions are not known yet: counted as if all were long
        costs = [len(ids) + group_size * self.max_new_tokens for ids in prompts]
        shares = [share for share in deal(costs, len(self.replicas)) if share]  # with few prompts, not one per replica
        within_window = self._within_window(prompts)
        path, engines = (self.path, self.engines) if within_window else (self._beyond_window, self._beyond_engines)
        drafting = bool(earlier) and _take_drafts(engines)
        for engine in filter(None, self.engines):
            engine.rows = 0

        def decoder(replica: int, share: list[int]) -> Generator[None, None, tuple[torch.Tensor, torch.Tensor]]:
            uniforms_bC = uniforms_BC.unflatten(0, (-1, group_size))[share].flatten(0, 1)
            own = None if images is None else images.select(torch.tensor(share))
            work = [prompts[k] for k in share], group_size, uniforms_bC, sampling
            if engines[replica]:
                drafts = {"earlier": [earlier[k] for k in share]} if drafting else {}
                return engines[replica].decode(*work, self.rollout_batch, own, self.stopping, **drafts)
            ids = self.end_ids, self.suppressed_ids
            more = self.rollout_batch, own, self.stopping, path.left_padding
            return fallback.decode(self.replicas[replica], *work, *ids, *more)

        parts = None
        while parts is None:
            with memory.catch_out_of_memory() as failure:
                parts = _in_turn([decoder(i, share) for i, share in enumerate(shares)])
            if failure.message:
                self._shrink(group_size, max(map(len, shares)) * group_size, failure.message)
        home = self.replicas[0].device
        back = torch.tensor([k for share in shares for k in share]).argsort().to(home)  # to the order of the prompts
        tokens_BC, logps_BC = (
            torch.cat([part[k].to(home) for part in parts]).unflatten(0, (-1, group_size))[back].flatten(0, 1)
            for k in range(2)
        )
        if not drafting:  # a batch may get rows of others, so that all have counts or none
            return tokens_BC, logps_BC, torch.zeros(len(tokens_BC), dtype=torch.long) if earlier else None
        drafted = torch.cat([engine.drafted for engine, _ in zip(engines, shares, strict=False)])
        return tokens_BC, logps_BC, drafted.unflatten(0, (-1, group_size))[back.cpu()].flatten()

    def _check_images(self, prompts: Sequence[list[int]], images: Images | None) -> None:
        """Refuses image tokens without images, and images of other prompts."""
        if images is not None:
            images.check([len(ids) for ids in prompts])
        elif is_vlm(self.replicas[0].config):
            token = self.replicas[0].config.image_token_id
            if places := [i for i, ids in enumerate(prompts) if token in ids]:
                raise ValueError(
                    f"prompt {places[0]} has image tokens, but there are no images: give images=Images.of(...)"
                )

    def _within_window(self, prompts: Sequence[list[int]]) -> bool:
        """Whether attention over all sequences is full, as the engine needs it; else chooses the other path, once."""
        longest = max(map(len, prompts)) + self.max_new_tokens
        if longest <= self.window:
            return True
        if self._beyond_window is None:
            choice = paths.choose(self.replicas[0], self._supports[0], self.suppressed_ids, self.window)
            self._beyond_window, reason = choice
            self._beyond_engines = self._decoders(self._beyond_window, compile=False)
            if self._beyond_window != self.path:
                print_main(f"rollout of up to {longest} tokens: now {self._beyond_window}{reason}", file=sys.stderr)
        return False

    @property
    def takes_drafts(self) -> bool:
        """Whether earlier completions make sampling faster; otherwise `generate` ignores them."""
        return _take_drafts(self.engines)

    def _decoders(self, path: paths.Path, compile: bool) -> list[Any]:
        """What decodes with each replica; None for `fallback.decode`."""
        return [
            path.decoder(replica, support, self.end_ids, self.suppressed_ids, compile)
            for replica, support in zip(self.replicas, self._supports, strict=True)
        ]

    def require_fit(self, prompts: Sequence[list[int]]) -> None:
        """Requires prompts that the policy can read; a run checks all of them at its start, not at step 1,000.

        Rotary positions extrapolate, less well: sequences longer than the policy was made for get a
        warning, once.

        Args:
            prompts: their token ids.

        Raises:
            ValueError: the policy has no such token, or too few learned positions for the longest
                sequence.
        """
        size = self.replicas[0].get_input_embeddings().num_embeddings
        highest = [max(ids) for ids in prompts]
        if (token := max(highest)) >= size:
            raise ValueError(
                f"prompt {highest.index(token)} of {len(prompts)} has token {token}, but the policy has {size}: its "
                "tokenizer has more; take the tokenizer that belongs to it, or resize its embeddings and save both"
            )
        longest = max(map(len, prompts)) + self.max_new_tokens
        places = getattr(self.replicas[0].config.get_text_config(), "max_position_embeddings", None)
        limit, reason = positions.longest_sequence(self.replicas[0])
        what = f"sequences of up to {longest} tokens (prompt and max_new_tokens)"
        # an embedding read behind its end would be an IndexError, and on a GPU the end of the
        # process
        require(limit is None or longest <= limit, what, reason, "lower max_prompt_tokens or max_new_tokens")
        if places is None or longest <= places or self._warned_of_positions:
            return
        self._warned_of_positions = True
        print_main(f"warning: {what}, but the policy was made for {places}: lower max_prompt_tokens or max_new_tokens")

    def _shrink(self, group_size: int, rows: int, failure: str) -> None:
        """After an out-of-memory error: halves the completions decoded at once, of `rows` at most."""
        self.release()
        memory.empty_cache()
        planned = max((engine.rows for engine in filter(None, self.engines)), default=0)  # by memory, at most
        rows = min(rows, self.rollout_batch or rows, planned or rows)
        if rows <= group_size:
            what = f"not even the {group_size} completions of one prompt can be sampled at once ({failure})"
            raise memory.FatalOutOfMemoryError(what, f"lower group_size; or {memory.REMEDIES}")
        self.rollout_batch = max(group_size, rows // 2)
        change = f"now {self.rollout_batch}; set rollout_batch to {self.rollout_batch} to begin with that"
        memory.print_with_rank(f"out of memory while {rows} completions were sampled at once: {change}")

    def release(self) -> None:
        """Frees the caches of all replicas until the next rollout, which then takes longer to begin."""
        for engine in filter(None, self.engines):
            engine.release()


def _take_drafts(engines: Sequence[Any]) -> bool:
    return all(engine is not None and engine.takes_drafts for engine in engines)


def _in_turn(decoders: list[Generator[None, None, Any]]) -> list[Any]:
    """Runs the decoders of several GPUs, a few steps of each in turn, and returns what they return.

    A GPU computes its steps while the next one is given its own. Threads would do the same, but
    spend more time handing Python's lock to one another than they gain.
    """
    results: dict[int, Any] = {}
    try:
        while len(results) < len(decoders):
            for i, decoder in enumerate(decoders):
                if i not in results:
                    try:
                        next(decoder)
                    except StopIteration as done:
                        results[i] = done.value
    finally:  # after an error in one, the others still put their models back as they were
        for decoder in decoders:
            decoder.close()
    return [results[i] for i in range(len(decoders))]
