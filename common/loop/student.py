"""Distillation: the student, its teacher, on- and off-policy completions, and evaluation."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from common.base import devices, distributed, memory, settings
from common.base.checks import require
from common.distill import cross_losses, cross_teacher, distillation, offpolicy, teacher_client, teachers
from common.generation.batches import RolloutBatch
from common.loop.offloading import Offloading
from common.loop.policy import Policy
from common.loop.sampler import Sampler, sampled_accuracies
from common.loop.scorer import check_functions, collate
from common.loop.trainer import Counts, Stats
from common.model import logprobs, sources
from common.run import checkpoint, interrupts, measures
from common.tasks import data, scoring
from common.tasks.data import Example, PromptStream
from common.tasks.scoring import Scored
from common.training import budgets


class Student(Policy):
    """A policy that learns from a teacher; `learn_from` chooses what its forward pass computes."""

    kind = "student"

    def __init__(self, cfg: Any, gpus: devices.Layout | None = None, resumed: Path | None = None):
        """Loads the student.

        Args:
            cfg: a `settings.Settings` with `student_model`.
            gpus: its devices; default: the first GPU, or the CPU.
            resumed: checkpoint to load weights from.
        """
        gpus = gpus or devices.layout(cfg.device, student=(0,))
        usual = "by distillation: 5e-5 (up to 0.5 B) to 1e-5 (7 B)"
        self.load(cfg, cfg.student_model, gpus, resumed, most=2e-4, usual=usual)
        self.num_ids = self.model.get_output_embeddings().weight.shape[0]

    def learn_from(self, teacher: Any, cfg: Any) -> None:
        """Wraps the student for its loss: log-probabilities for "opd", else divergences."""
        if cfg.loss == "opd":
            self.wrap(functools.partial(logprobs.LogProbs, temperature=cfg.temperature, compile=cfg.compile))
        elif cfg.other_tokenizer != "refuse":
            options = cfg.loss_temperature, cfg.compile, cfg.beta_in_force, teacher
            self.wrap(lambda model: cross_losses.CrossDivergences(model, *options))
        else:
            options = cfg.loss_temperature, cfg.compile, cfg.beta_in_force, teacher.shared, teacher.head
            self.wrap(lambda model: distillation.Divergences(model, *options))

    def divergence(self, micro: RolloutBatch, weights_mC: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Divergence from the teacher over the vocabulary.

        Args:
            micro: m sequences that `teacher.fill` has processed.
            weights_mC: [m, C] fp32, weight of each token in the sum.

        Returns:
            The weighted sum over tokens, and per-token metrics [m, C] by name.
        """
        student, inputs = self.wrapped[micro.replica or 0], (*micro.tokens[:4], weights_mC, *micro.teacher.tensors)
        loss, values_mCR = student(*inputs, group=micro.group)
        return loss.squeeze(0), dict(zip(student.values, values_mCR.unbind(-1), strict=True))


def require_copies(cfg: Any, gpus: devices.Layout) -> None:
    """Requires GPUs that only sample, if `overlap` is set."""
    require(not cfg.overlap or bool(gpus.copies), "overlap = True", "needs GPUs that sample while others train",
            "set ROLLOUT_GPU_IDS at the top of a script with STUDENT_GPU_IDS, such as gkd_multigpu.py")  # fmt: skip


def load_teacher(cfg: Any, gpus: devices.Layout, student: Student, resumed: Path | None = None) -> Any:
    """Loads the teacher or connects to its server, and wraps the student; a collective.

    Args:
        cfg: Config of a GKD script.
        gpus: devices of all roles.
        student: must have the teacher's tokenizer.
        resumed: checkpoint; the teacher must be the one that it was saved with.
    """
    with interrupts.save_on_outage(), distributed.share_errors("load the teacher"):
        if cfg.teacher_url:
            teacher = teacher_client.RemoteTeacher(
                cfg.teacher_url, top_k=cfg.teacher_top_k, temperature=cfg.loss_temperature,
                workers=cfg.n_server_workers, patience_s=cfg.teacher_patience,
            )  # fmt: skip
        else:
            kind = teachers.LocalTeacher
            if cfg.other_tokenizer != "refuse":
                end_ids = sources.end_token_ids(student.tokenizer, student.model)
                kind = functools.partial(cross_teacher.CrossTeacher, student=student.tokenizer, end_ids=end_ids,
                                         student_size=student.num_ids, method=cfg.other_tokenizer)  # fmt: skip
            teacher = kind(
                settings.teacher_name(cfg), gpus.teacher, cfg.dtype, temperature=cfg.loss_temperature,
                compile=cfg.compile, tokens_only=cfg.loss == "opd", refresh_every=getattr(cfg, "teacher_refresh", 0),
                source=checkpoint.reference(resumed, cfg),
            )  # fmt: skip
        if cfg.other_tokenizer == "refuse":
            teachers.agree(teacher, student.tokenizer, student.num_ids, cfg.allow_other_template)
        teachers.require_same(teacher, checkpoint.notes(resumed))
    student.learn_from(teacher, cfg)  # shards, which is a collective
    return teacher


def require_readable(cfg: Any, teacher: Any, examples: Sequence[Example]) -> None:
    """Requires that the teacher can read the prompts; one with another tokenizer encodes them for itself.

    Args:
        cfg: Config of a GKD script.
        teacher: from `load_teacher`.
        examples: all rows of the run.

    Raises:
        ValueError: with the row of a prompt that it cannot read.
    """
    if cfg.other_tokenizer == "refuse":
        teachers.require_shared(examples, teacher.shared)
        return
    teacher.read_prompts(examples, apply_chat_template=cfg.apply_chat_template, system_prompt=cfg.system_prompt,
                         template_kwargs=cfg.template_kwargs)  # fmt: skip


class AnsweredScorer:
    """Scores completions of rows that have an answer; the reward of other rows is NaN."""

    def __init__(self, cfg: Any, tokenizer: Any, functions: scoring.Functions, examples: Sequence[Example] = ()):
        """Checks the reward functions.

        Args:
            cfg: Config of a GKD script.
            tokenizer: of the student.
            functions: pairs of reward function and weight.
            examples: all rows of the run.

        Raises:
            ValueError: as in `scoring.check`.
        """
        check_functions(functions, examples)
        self.cfg, self.tokenizer, self.functions = cfg, tokenizer, functions

    def score(self, examples_P: Sequence[Example], batch: RolloutBatch, step: int = 0, least: int = 2) -> Scored:
        """Scores completions; as `Scorer.score`, with rewards by function if there are at least `least`."""
        arguments = collate(examples_P, batch, self.tokenizer, step, self.cfg.stops)
        answered = [i for i, answer in enumerate(arguments["answers"]) if answer is not None]
        scored = Scored(arguments["completions"], torch.full((len(batch),), math.nan), {})
        if answered:
            own = {name: [values[i] for i in answered] if isinstance(values, list) else values
                   for name, values in arguments.items()}  # fmt: skip
            total, by_function = scoring.score(self.functions, own)
            scored.put(answered, Scored(own["completions"], total, by_function if len(by_function) >= least else {}))
        return scored


class MixedCompletions:
    """Completions of each step: on-policy, or off-policy from the data or the teacher.

    The choice is drawn once per step; `lmbda` is the on-policy share (arXiv 2306.13649, Eq. 4).

    Attributes:
        on_policy: whether the student sampled the last step's completions.
        metrics: `on_policy`; and for on-policy steps `staleness`, the number of updates by which
            the sampling weights lag behind.
        position: number of prompts taken from the data up to the last step, without those sampled
            ahead with `overlap`.
        answers: the teacher's answers, with `seq_kd`; else None.
    """

    def __init__(self, cfg: Any, prompts: PromptStream, sampler: Sampler, student: Student, teacher: Any):
        """Opens the cache of the teacher's answers, if `seq_kd` is set.

        Args:
            cfg: Config of a GKD script.
            prompts: source of prompts.
            sampler: samples from the student.
            student: the trained model.
            teacher: from `load_teacher`.
        """
        self.cfg, self.prompts, self.sampler, self.student, self.teacher = cfg, prompts, sampler, student, teacher
        self.position, self._ahead, self.answers = prompts.position, None, None
        if cfg.seq_kd:
            recipe = offpolicy.recipe(teacher, prompts.examples, cfg.seed, cfg.seq_kd_temperature, cfg.max_new_tokens)
            self.answers = offpolicy.TeacherAnswers(cfg.seq_kd_cache or cfg.out_dir, teacher, recipe)
        elif cfg.off_policy:
            rows = prompts.examples
            data.warn_unclosed([e.reply_start for e in rows], [e.answer for e in rows], [e.index for e in rows])

    def next(self, step: int) -> tuple[list[Example], RolloutBatch]:
        """Prompts of this rank and their completions; with `overlap`, starts the next step."""
        cfg, home = self.cfg, self.student.home
        staleness = float(self._ahead is not None)
        examples_P, rollout, position = self._ahead or self._begin(step)
        self.on_policy = rollout is not None
        self.metrics = {"on_policy": float(self.on_policy)}
        if self.on_policy:
            self.metrics["staleness"] = staleness
            batch = rollout().to(home)
        else:
            if cfg.seq_kd:
                ids = self.answers.get(examples_P)
            else:
                ids = offpolicy.answers(examples_P, self.student.tokenizer, cfg.max_new_tokens, self.teacher.shared)
            batch = offpolicy.batch([e.prompt_ids for e in examples_P], ids, self.sampler.pad_id, self.sampler.end_ids,
                                    home)  # fmt: skip
        self.position = position
        self._ahead = self._begin(step + 1) if cfg.overlap and step < cfg.steps else None
        return examples_P, batch

    def wait(self) -> None:
        """Waits until the replicas that sample ahead are idle."""
        if self._ahead and self._ahead[1]:
            self._ahead[1]()

    def _begin(self, step: int) -> tuple[list[Example], Callable[[], RolloutBatch] | None, int]:
        """Draws whether a step is on-policy, and starts sampling ahead with `overlap`.

        Returns:
            Its prompts; a function that returns their completions, None if off-policy; position.
        """
        cfg, examples_P, rollout = self.cfg, self.prompts.next(), None
        if offpolicy.draw(cfg.seed, step, offpolicy.share(step, cfg.lmbda, cfg.lmbda_ramp)):
            rollout = functools.partial(self.sampler.rollout, examples_P, step)
            if cfg.overlap:
                rollout = self.sampler.rollout_ahead(examples_P, step).result
        return examples_P, rollout, self.prompts.position


@torch.no_grad()
def evaluate(
    cfg: Any, sampler: Sampler, student: Student, teacher: Any, scorer: AnsweredScorer, offloading: Offloading,
    examples: Sequence[Example], loss: Callable, step: int = 0,
) -> dict[str, float]:  # fmt: skip
    """Evaluates a student over the examples of all ranks; a collective.

    Args:
        cfg: Config of a GKD script.
        sampler: samples from the student.
        student: the trained model.
        teacher: from `load_teacher`.
        scorer: scores greedy completions.
        offloading: moves the teacher to its GPU.
        examples: of this rank.
        loss: of the script: (student, micro, cfg, counts) -> loss, `Stats`.
        step: steps done, for reward functions.

    Returns:
        Reward of greedy completions and accuracies of sampled ones, as in `sampler.evaluate`, of
        rows with an answer; per token: divergence from the teacher and the teacher's negative
        log-likelihood on sampled completions, and the student's negative log-likelihood of answers.
    """
    sums = {name: [0.0, 0] for name in ("reverse_kl", "forward_kl", "teacher_nll", "answer_nll")}
    greedy: list[Scored] = []
    student, home = student.unsharded, student.home

    def add(name: str, total: float, count: int) -> None:
        sums[name][0], sums[name][1] = sums[name][0] + float(total), sums[name][1] + count

    def micro_stats(batch: RolloutBatch, examples: Sequence[Example]) -> Iterator[tuple[RolloutBatch, Stats]]:
        (micros,) = batch.minibatches(1, tokens, student.packs(batch))
        teachers.fill(teacher, micros, examples, tokens)
        yield from memory.map_with_halving(micros, lambda micro: loss(student, micro, cfg, Counts())[1])

    tokens = cfg.micro_batch_tokens or budgets.TOKENS
    size = cfg.batch_size * cfg.group_size
    with distributed.share_errors("evaluate"), offloading.teacher_for_evaluation():
        for part in [examples[i : i + size] for i in range(0, len(examples), size)]:
            greedy.append(scorer.score(part, sampler.sample(part, temperature=0), step))
            batch = sampler.sample(part, cfg.temperature, numbers=[e.index for e in part])
            for micro, stats in micro_stats(batch.to(home), part):
                add("teacher_nll", -stats.means["teacher_logps"] * micro.num_tokens, micro.num_tokens)
                for name in {"reverse_kl", "forward_kl"} & stats.means.keys():
                    add(name, stats.means[name] * micro.num_tokens, micro.num_tokens)
            answered = [e for e in part if e.answer is not None]
            if answered:
                ids = offpolicy.answers(answered, student.tokenizer, cfg.max_new_tokens, teacher.shared)
                batch = offpolicy.batch([e.prompt_ids for e in answered], ids, sampler.pad_id, sampler.end_ids, home)
                for micro, stats in micro_stats(batch, answered):
                    add("answer_nll", -stats.means["student_logps"] * micro.num_tokens, micro.num_tokens)
        answered = [e for e in examples if e.answer is not None]
        accuracies = sampled_accuracies(cfg, sampler, functools.partial(scorer.score, least=1), answered, step)
    totals = {name: [distributed.sum_over_ranks(x) for x in pair] for name, pair in sums.items()}
    means = {f"eval_{name}": total / count for name, (total, count) in totals.items() if count}
    rewards = measures.mean_rewards(greedy, examples, cfg.eval_columns, accuracies)
    return means if math.isnan(rewards["eval_reward"]) else rewards | means
