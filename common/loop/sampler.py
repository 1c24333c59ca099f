"""Completions from a policy, for training and for evaluation."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from common.base import background, distributed
from common.generation import rollout
from common.generation.batches import RolloutBatch
from common.loop.policy import Policy
from common.loop.scorer import Scorer
from common.maths import advantages
from common.model import sources
from common.model.images import Images
from common.run import metrics
from common.run.metrics import Log
from common.tasks.data import Example, PromptStream
from common.tasks.rewards import Scored


class Sampler(rollout.Sampler):
    """`rollout.Sampler` with the options of a configuration and the newest weights of a policy."""

    def __init__(self, cfg: Any, policy: Policy, examples: Sequence[Example] = (), suppressed_ids: Sequence[int] = ()):
        """Chooses how every replica decodes.

        Args:
            cfg: a `settings.Settings`.
            policy: what is sampled from.
            examples: prompts that will be sampled from; checked now, rather than in step 1,000.
            suppressed_ids: tokens that are never sampled.

        Raises:
            ValueError: the policy cannot read a prompt.
        """
        super().__init__(
            policy.samplers, end_ids=sources.end_token_ids(policy.tokenizer, policy.model),
            pad_id=policy.tokenizer.pad_token_id, max_new_tokens=cfg.max_new_tokens, min_new_tokens=cfg.min_new_tokens,
            top_p=cfg.top_p, top_k=cfg.top_k, min_p=cfg.min_p, suppressed_ids=suppressed_ids,
            rollout_batch=cfg.rollout_batch, compile=cfg.compile,
        )  # fmt: skip
        self.cfg, self.policy = cfg, policy
        if examples:
            self.require_fit([example.prompt_ids for example in examples])

    @property
    def release_for_update(self) -> Callable[[], None] | None:
        """Frees caches when an update is short of memory; None if all replicas that sample have GPUs of their own."""
        copies = set(map(id, self.policy.copies))
        return None if all(id(replica) in copies for replica in self.replicas) else self.release

    def rollout(
        self,
        examples_P: Sequence[Example],
        step: int,
        numbers: Sequence[int] | None = None,
        images: Images | None = None,
    ) -> RolloutBatch:
        """Samples `group_size` completions of each prompt.

        Args:
            examples_P: prompts of this rank.
            step: from 1; the same seed and step give the same completions.
            numbers: places of the prompts in the batch of all ranks; by default those of this rank.
            images: of the prompts.

        Returns:
            P * group_size sequences on the policy's device.
        """
        self.policy.refresh_copies()
        batch = self._generate(examples_P, step, numbers, images)
        return batch if batch.device == self.policy.home else batch.to(self.policy.home)

    def rollout_ahead(self, examples_P: Sequence[Example], step: int) -> Future:
        """Starts `rollout` in a thread, with the weights as they are now.

        Args:
            examples_P: as in `rollout`.
            step: as in `rollout`.
        """
        self.policy.refresh_copies()  # not in the thread: the next optimizer step must not come in between
        return background.start(self._generate, examples_P, step)

    def _generate(self, examples_P, step, numbers=None, images=None) -> RolloutBatch:
        cfg = self.cfg
        if numbers is None:
            numbers = range(distributed.rank(), cfg.batch_size, distributed.num_ranks())
        return self.generate(
            [e.prompt_ids for e in examples_P], group_size=cfg.group_size, temperature=cfg.temperature, seed=cfg.seed,
            step=step, prompt_numbers=numbers, images=images,
        )  # fmt: skip

    def sample_one(
        self,
        examples: Sequence[Example],
        temperature: float,
        numbers: Sequence[int] | None = None,
        images: Images | None = None,
    ) -> RolloutBatch:
        """Samples one completion of each prompt, for an evaluation.

        Args:
            examples: prompts.
            temperature: 0 takes the most likely token.
            numbers: names of the random streams of the prompts.
            images: of the prompts.
        """
        self.policy.refresh_copies()
        prompts = [e.prompt_ids for e in examples]
        return self.generate(prompts, group_size=1, temperature=temperature, prompt_numbers=numbers, images=images)


def evaluate(cfg: Any, sampler: Sampler, scorer: Scorer, examples: Sequence[Example]) -> float:
    """Mean reward of greedy completions, over the examples of all ranks; a collective.

    Args:
        cfg: a `settings.Settings`.
        sampler: gives the completions.
        scorer: scores them.
        examples: of this rank.
    """
    rewards_E, size = [], cfg.batch_size * cfg.group_size
    with distributed.share_errors("evaluate"):
        for part in [examples[i : i + size] for i in range(0, len(examples), size)]:
            rewards_E.append(scorer.score(part, sampler.sample_one(part, temperature=0)).rewards)
    return metrics.mean_scored(rewards_E)


def resample(
    cfg: Any, step: int, examples_P: list[Example], batch: RolloutBatch, scoring: Future, prompts: PromptStream,
    sampler: Sampler, scorer: Scorer, log: Log,
) -> RolloutBatch:  # fmt: skip
    """Dynamic sampling: replaces groups with equal rewards, which teach nothing, by new prompts; a collective.

    After `dynamic_sampling` rounds, a group that still has equal rewards stays.

    Args:
        cfg: a `settings.RLSettings`.
        step: from 1.
        examples_P: prompts of this rank; changed in place.
        batch: their completions.
        scoring: gives their `Scored`, which is changed in place.
        prompts: where new prompts come from.
        sampler: samples their completions.
        scorer: scores them.
        log: takes the share of prompts that were replaced.

    Returns:
        The new batch.

    Source: arXiv 2503.14476 (DAPO), Eq. 11, here for any reward.
    """
    replaced = 0
    with log.time("resample"):
        with distributed.share_errors("score"):
            scored: Scored = scoring.result()
        for _ in range(cfg.dynamic_sampling):
            equal_P = advantages.equal_groups(scored.rewards.view(-1, cfg.group_size))
            places, numbers = prompts.replace(examples_P, equal_P.tolist())
            if not distributed.any_rank(bool(places)):
                break
            with distributed.share_errors("resample"):
                if places:
                    new_P = [examples_P[place] for place in places]
                    rows = [place * cfg.group_size + g for place in places for g in range(cfg.group_size)]
                    new = sampler.rollout(new_P, step, numbers)
                    batch = batch.put(torch.tensor(rows), new)
                    scored.put(rows, scorer.score(new_P, new))
            replaced += len(places)
    log.add(len(examples_P), resampled=replaced / len(examples_P))
    return batch
