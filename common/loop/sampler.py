"""Samples completions from a policy, for training and for evaluation."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from common.base import background, distributed
from common.generation import rollout
from common.generation.batches import RolloutBatch
from common.generation.drafts import Earlier
from common.generation.stopping import Stopping
from common.loop.policy import Policy
from common.loop.scorer import Scorer
from common.maths import advantages
from common.model import sources
from common.model.images import Images
from common.run import measures
from common.run.metrics import Log
from common.tasks import accuracy
from common.tasks.data import Example, PromptStream
from common.tasks.scoring import Scored


class Sampler(rollout.Sampler):
    """A `rollout.Sampler` that takes its options from a Config and its weights from a policy."""

    def __init__(self, cfg: Any, policy: Policy, examples: Sequence[Example] = (), suppressed_ids: Sequence[int] = ()):
        """Chooses how each replica decodes.

        Args:
            cfg: a `settings.Settings`.
            policy: what to sample from.
            examples: prompts of the run; checked now, rather than in step 1,000.
            suppressed_ids: tokens that are never sampled.

        Raises:
            ValueError: the policy cannot read a prompt; see `require_fit`.
        """
        super().__init__(
            policy.samplers, end_ids=sources.end_token_ids(policy.tokenizer, policy.model),
            pad_id=policy.tokenizer.pad_token_id, max_new_tokens=cfg.max_new_tokens, min_new_tokens=cfg.min_new_tokens,
            top_p=cfg.top_p, top_k=cfg.top_k, min_p=cfg.min_p, suppressed_ids=suppressed_ids,
            rollout_batch=cfg.rollout_batch, compile=cfg.compile,
            stopping=Stopping(cfg.stops, policy.tokenizer) if cfg.stops else None, trained=policy.wrapped[0],
        )  # fmt: skip
        self.cfg, self.policy, self.earlier = cfg, policy, Earlier()
        self.drafts = cfg.drafts and self.takes_drafts
        if cfg.drafts and not self.drafts:
            served = "only the decode engine takes them, of models without layers that keep a state"
            distributed.print_main(f"warning: drafts are ignored: {served}")
        if examples:
            self.require_fit([example.prompt_ids for example in examples])

    @property
    def release_for_update(self) -> Callable[[], None] | None:
        """Frees caches if an update runs out of memory; None if training GPUs hold no caches."""
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
            numbers: positions of the prompts in the batch of all ranks; default: for this rank.
            images: of the prompts.

        Returns:
            P * group_size sequences on `policy.home`.
        """
        self.policy.refresh_copies()
        batch = self._generate(examples_P, step, numbers, images)
        return batch if batch.device == self.policy.home else batch.to(self.policy.home)

    def rollout_ahead(self, examples_P: Sequence[Example], step: int) -> Future:
        """Starts `rollout` in a thread, with the current weights."""
        self.policy.refresh_copies()  # not in the thread: the next optimizer step could come first
        return background.start(self._generate, examples_P, step)

    def _generate(self, examples_P, step, numbers=None, images=None) -> RolloutBatch:
        """As `rollout`, with the weights that the copies have."""
        cfg = self.cfg
        if numbers is None:
            numbers = range(distributed.rank(), cfg.batch_size, distributed.num_ranks())
        rows = [e.index for e in examples_P]
        batch = self.generate(
            [e.prompt_ids for e in examples_P], group_size=cfg.group_size, temperature=cfg.temperature, seed=cfg.seed,
            step=step, prompt_numbers=numbers, images=images, earlier=self.earlier.of(rows) if self.drafts else (),
        )  # fmt: skip
        if self.drafts:
            self.earlier.put(rows, batch.completions)
        if getattr(cfg, "sampler_is_old", False):  # the trainer computes no old log-probabilities then
            batch.old_logps = batch.rollout_logps
        return batch

    def sample(
        self,
        examples: Sequence[Example],
        temperature: float,
        group_size: int = 1,
        numbers: Sequence[int] | None = None,
        images: Images | None = None,
    ) -> RolloutBatch:
        """Samples completions for an evaluation.

        Args:
            examples: prompts.
            temperature: 0: greedy.
            group_size: completions of each prompt.
            numbers: seeds of the prompts' random streams; default: 0..P-1.
            images: of the prompts.
        """
        self.policy.refresh_copies()
        prompts = [e.prompt_ids for e in examples]
        return self.generate(prompts, group_size=group_size, temperature=temperature, prompt_numbers=numbers,
                             images=images)  # fmt: skip


def evaluate(
    cfg: Any, sampler: Sampler, scorer: Scorer, examples: Sequence[Example], step: int = 0
) -> dict[str, float]:
    """Evaluates a policy over the examples of all ranks; a collective.

    Args:
        cfg: a `settings.RLSettings`.
        sampler: samples completions.
        scorer: scores them.
        examples: of this rank.
        step: steps done, for reward functions.

    Returns:
        `eval_reward` of greedy completions, also by reward function if there are several, and by
        the columns of `eval_by`. With `eval_samples` k: `eval_pass_at_1`, `eval_pass_at_k` and
        `eval_majority_of_k`, where a completion is right if the first reward function gives it at
        least 1. The ends of 95 % intervals are `<name>_low` and `<name>_high`.
    """
    greedy, size = [], cfg.batch_size * cfg.group_size
    with distributed.share_errors("evaluate"):
        for part in [examples[i : i + size] for i in range(0, len(examples), size)]:
            greedy.append(scorer.score(part, sampler.sample(part, temperature=0), step))
        accuracies = sampled_accuracies(cfg, sampler, scorer.score, examples, step)
    return measures.mean_rewards(greedy, examples, cfg.eval_columns, accuracies)


def sampled_accuracies(
    cfg: Any, sampler: Sampler, score: Callable, examples: Sequence[Example], step: int = 0
) -> list[dict[str, float]]:
    """Accuracies of each prompt over `eval_samples` completions, as in `accuracies_of`; none if it is 0.

    Args:
        cfg: a `settings.PromptSettings`.
        sampler: samples completions.
        score: `Scorer.score`, or a function like it.
        examples: of this rank, with answers.
        step: steps done, for reward functions.
    """
    k, found = cfg.eval_samples, []
    size = max(1, cfg.batch_size * cfg.group_size // max(1, k))
    for part in [examples[i : i + size] for i in range(0, len(examples), size)] if k else []:
        batch = sampler.sample(part, cfg.temperature, k, [e.index for e in part])
        found += accuracies_of(score(part, batch, step), k)
    return found


def accuracies_of(scored: Scored, k: int) -> list[dict[str, float]]:
    """Accuracies of each prompt with k samples that were all scored, by name of the metric.

    Args:
        scored: k completions of each prompt, side by side. One is right if the first reward
            function gives it at least 1.
        k: samples of a prompt.
    """
    values_PK = next(iter(scored.by_function.values())).view(-1, k).tolist()
    found = []
    for i, values in enumerate(values_PK):
        right = [value >= 1 for value in values]
        if not any(map(math.isnan, values)):
            found.append({
                "eval_pass_at_1": sum(right) / k,
                f"eval_pass_at_{k}": float(any(right)),
                f"eval_majority_of_{k}": accuracy.majority_is_right(scored.completions[i * k : (i + 1) * k], right),
            })  # fmt: skip
    return found


def resample(
    cfg: Any, step: int, examples_P: list[Example], batch: RolloutBatch, scoring: Future, prompts: PromptStream,
    sampler: Sampler, scorer: Scorer, log: Log,
) -> RolloutBatch:  # fmt: skip
    """Dynamic sampling: replaces groups with equal rewards by new prompts; a collective.

    Equal rewards give no gradient. A group that still has equal rewards after `dynamic_sampling`
    rounds stays.

    Args:
        cfg: a `settings.RLSettings`.
        step: from 1.
        examples_P: prompts of this rank; changed in place.
        batch: their completions.
        scoring: future of their `Scored`, which is changed in place.
        prompts: source of new prompts.
        sampler: samples their completions.
        scorer: scores them.
        log: receives the share of replaced prompts.

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
            prompts.learn(examples_P, scored, among=equal_P.tolist())  # before they are gone
            places, numbers = prompts.replace(examples_P, equal_P.tolist())
            if not distributed.any_rank(bool(places)):
                break
            with distributed.share_errors("resample"):
                if places:
                    new_P = [examples_P[place] for place in places]
                    rows = [place * cfg.group_size + g for place in places for g in range(cfg.group_size)]
                    new = sampler.rollout(new_P, step, numbers)
                    batch = batch.put(torch.tensor(rows), new)
                    scored.put(rows, scorer.score(new_P, new, step))
            replaced += len(places)
    log.add(len(examples_P), resampled=replaced / len(examples_P))
    return batch
