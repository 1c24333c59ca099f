"""Everything around the loop of a training script: start, log, checkpoints, Ctrl-C and outages."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from common.base import config, console, devices, distributed, storage
from common.base.checks import require
from common.generation.batches import RolloutBatch
from common.loop.policy import Policy
from common.model.images import Images
from common.planning import plan
from common.run import checkpoint, checkpoint_files, guards, interrupts, metrics, profiling, random_state
from common.run.best import Best
from common.tasks import accuracy, chat_templates, data
from common.tasks.curriculum import Curriculum
from common.tasks.data import Example, PromptStream
from common.tasks.greso import Greso
from common.training.optim import AdamW


class Run:
    """One training run.

    Attributes:
        checkpoint: to resume from; None for a new run.
        date: day on which the run began, which chat templates print.
        plan: predicted memory.
        log: receives metrics; set by `restore`.
        start: steps done when the run was resumed; set by `restore`.
        done: steps done so far.
        saved: the newest checkpoint of this run, or the one it was resumed from.
        best: the best evaluation so far; set by `restore`.
        batch: completions of the current step that have no rewards yet. In an outage of the reward
            service they are saved; a resumed run scores them first.
    """

    def __init__(self, cfg: Any, gpus: devices.Layout, guards: Mapping[str, tuple], timeout_minutes: float = 60):
        """Joins the process group, finds the checkpoint to resume from, and sets seeds.

        Args:
            cfg: a `settings.Settings`.
            gpus: devices of all roles.
            guards: healthy ranges of metrics, see common/run/guards.py.
            timeout_minutes: how long ranks wait for one another.

        Raises:
            ValueError: an option does not fit the number of ranks, or there is no such checkpoint.
        """
        console.protect()
        config.collect_garbage()  # where no command line was read
        self.cfg, self.gpus, self.limits = cfg, gpus, guards
        rank, self.num_ranks = distributed.start(gpus.home, timeout_minutes)
        _require_shares(cfg, self.num_ranks, timeout_minutes)
        devices.limit_memory(gpus.all, cfg.memory_limit)
        self.checkpoint = checkpoint.find(cfg.out_dir, cfg.resume)
        # templates print the day on which the run began: a resumed run has the same prompts, on all ranks
        began = checkpoint.notes(self.checkpoint).get("date") or date.today().isoformat()
        self.date = distributed.gather_objects(began)[0]
        chat_templates.pin_date(self.date)
        self.plan: Any = ""
        self.batch: RolloutBatch | None = None
        random_state.seed(cfg.seed + rank)

    def require_memory(self, **known: Any) -> None:
        """Prints predicted memory and refuses a run that cannot fit; call it before loading.

        Args:
            **known: facts about model and data, see `plan.require_fit`.
        """
        tokens = checkpoint.notes(self.checkpoint).get("micro_batch_tokens", 0)
        self.plan = plan.require_fit(self.cfg, self.gpus, ranks=self.num_ranks, resumed_tokens=tokens, **known)

    def restore(
        self,
        policy: Policy,
        optimizer: AdamW,
        examples: list[Example],
        frozen: nn.Module | None = None,
        notes: Mapping[str, Any] | None = None,
        tokenizer: Any = None,
    ) -> PromptStream:
        """Restores optimizer, random state, data position and log from the checkpoint, if any.

        Args:
            policy: the trained model; its replicas are updated.
            optimizer: of the policy.
            examples: rows to train on.
            frozen: a reference or a teacher that changes, so that every checkpoint must contain it.
            notes: further JSON values for every checkpoint; read at the time of saving.
            tokenizer: saved with the policy; default: the policy's tokenizer.

        Returns:
            The prompts, from the restored position on.
        """
        cfg = self.cfg
        self.policy, self.optimizer, self.frozen, self.notes = policy, optimizer, frozen, notes or {}
        self.tokenizer = tokenizer or policy.tokenizer
        done, position = checkpoint.load(self.checkpoint, optimizer, cfg) if self.checkpoint else (0, 0)
        policy.sync()
        if done >= cfg.steps:
            distributed.print_main(
                f"{self.checkpoint} has all {cfg.steps} steps: raise steps to go on, or give another out_dir"
            )
        options = examples, cfg.batch_size, cfg.seed, position, distributed.rank(), self.num_ranks
        match getattr(cfg, "curriculum", ""):
            case "":
                self.prompts = PromptStream(*options)
            case "greso":
                self.prompts = Greso(*options, state=checkpoint.curriculum(self.checkpoint))
            case by:
                self.prompts = Curriculum(*options, by=by, state=checkpoint.curriculum(self.checkpoint))
        before = checkpoint.notes(self.checkpoint)
        self.prompts.warn_if_changed(before.get("data"))
        with distributed.share_errors("start"):
            if distributed.rank() == 0:
                with storage.required(Path(cfg.out_dir) / "config.json"):
                    config.save(cfg, cfg.out_dir, micro_batch_tokens=self.micro_batch_tokens)
        self.log = metrics.Log(cfg.out_dir, done, cfg.steps, self.gpus.all)
        self.best = Best(cfg.best_by, cfg.early_stop, before.get("best"), self.log.evaluations)
        with distributed.share_errors("start"):
            if distributed.rank() == 0:
                checkpoint.leave(cfg.out_dir, done)
                checkpoint.link_best(cfg.out_dir, self.best.step)
        self.watch = guards.Watch(self.limits, cfg, self.log, done)
        self.start = self.done = done
        self.saved = self.checkpoint
        self.position = position
        self.pending = checkpoint.pending_rollout(self.checkpoint, policy.home, cfg)
        return self.prompts

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Surrounds the training loop, and closes the run after it.

        The first Ctrl-C or SIGTERM lets the step finish, then saves; a second one stops at once. In
        an outage of a service, the steps done and the completions without rewards are saved, and
        the process exits with code 75.
        """
        cfg = self.cfg
        with (
            interrupts.stop_on_signal() as self._signals,
            profiling.trace(cfg.out_dir, cfg.profile) as self._end_profiled_step,
            interrupts.save_on_outage(lambda: self.save(self.batch)),
        ):
            yield
        self.log.close()
        distributed.print_main(f"{self.policy.kind} saved in {self.saved}{self._without_best()}")
        self.watch.exit_if_collapsed()
        distributed.shutdown()

    def steps(self) -> Iterator[int]:
        """Yields the numbers of the remaining steps; none if the run has stopped early before."""
        if self.best.exhausted:
            distributed.print_main(f"{self._stopped_early()}: raise early_stop, or set it to 0, to go on")
            return
        for step in range(self.start + 1, self.cfg.steps + 1):
            yield step
            self._end_profiled_step()

    @contextmanager
    def phase(self, name: str, collective: bool = False) -> Iterator[None]:
        """Times the block, and shares errors between ranks; see `distributed.share_errors`.

        Args:
            name: of the phase; its metric is `seconds_<name>`.
            collective: the block contains collectives.
        """
        with self.log.time(name), distributed.share_errors(name, collective):
            yield

    def take_pending(self, images: Images | None = None) -> RolloutBatch | None:
        """Returns completions that an earlier run could not score, once; None if there are none.

        Args:
            images: features of their prompts, which checkpoints do not contain.
        """
        batch, self.pending = self.pending, None
        if batch is not None and images is not None:
            batch.images = images.repeat(self.cfg.group_size)
        return batch

    def end_step(self, step: int, position: int) -> None:
        """Marks a step as done, writes its metrics and checks the guards; a collective.

        Args:
            step: from 1.
            position: number of prompts taken from the data so far.
        """
        self.done, self.position, self.batch = step, position, None
        reported = {"learning_rate": self.optimizer.learning_rate, **self.prompts.end_step()}
        self.collapsed = self.watch.check(self.log.end_step(step, **reported))

    def sample_due(self, step: int) -> bool:
        """Whether samples.jsonl gets completions of this step."""
        return self.cfg.sample_every > 0 and step % self.cfg.sample_every == 0

    def eval_due(self, step: int) -> bool:
        """Whether to evaluate after this step, which is timed from here on; `step == start`: before the first step."""
        cfg, self._eval_began = self.cfg, time.perf_counter()
        if step == self.start:
            return self.log.evaluation_due(cfg)
        return bool(cfg.eval_data and cfg.eval_every) and (step % cfg.eval_every == 0 or step == cfg.steps)

    def record_eval(self, step: int, values: Mapping[str, float]) -> None:
        """Writes an evaluation, and finds out whether it is the best so far.

        Args:
            step: steps done.
            values: measures by name, equal on every rank.

        Raises:
            ValueError: none of them is the one that `best_by` names; the steps done are saved before.
        """
        seconds = time.perf_counter() - self._eval_began
        try:
            self.best.add(step, values)
        except ValueError:
            if step > self.start:
                self.save()
            raise
        self.log.eval(step, seconds, **values)
        if step == self.start and distributed.rank() == 0:  # a save before this start may have written a checkpoint
            checkpoint.link_best(self.cfg.out_dir, self.best.step)

    def stop_requested(self) -> bool:
        """Whether any rank received a signal, a guard stops the run, or `early_stop` does; a collective.

        Call it once per step: a later call may differ, if a signal arrives while the run saves.
        """
        if self.best.exhausted:
            self.log.print_above_bar(self._stopped_early())
        return distributed.any_rank(bool(self._signals)) or self.collapsed or self.best.exhausted

    def _without_best(self) -> str:
        """Why out_dir/best leads nowhere although the run has evaluated, as text; "" if it leads somewhere."""
        best, folder = self.best, Path(self.cfg.out_dir)
        link = folder / checkpoint_files.BEST
        if not best.by or best.last < 0 or link.exists():
            return ""
        if best.step is None:
            return f"; no {link}: evaluations have no number for best_by = {best.by!r}; name another measure of theirs"
        if (folder / checkpoint_files.name(best.step)).exists():  # it could not be linked, which has been said
            return ""
        return f"; no {link}: {best.name} was best after step {best.step}, {best.value:.4g}, which has no checkpoint"

    def _stopped_early(self) -> str:
        """Why a run stops early, as text."""
        found = f"{self.best.value:.4g} after step {self.best.step}" if self.best.step is not None else "none"
        return f"early stop: {self.best.since} evaluations without a new best {self.best.by} (the best: {found})"

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of a micro-batch; a resumed run keeps those that the plan chose."""
        return plan.micro_batch_tokens(self.cfg, self.plan)

    def save_due(self, step: int) -> bool:
        """Whether to save after this step: also if its evaluation is the best so far."""
        return step % self.cfg.save_every == 0 or step in (self.cfg.steps, self.best.step)

    def save(self, batch: RolloutBatch | None = None) -> None:
        """Saves a checkpoint of the steps done; a collective.

        Args:
            batch: completions of the next step that have no rewards yet.
        """
        chosen = 0 if self.cfg.micro_batch_tokens else self.micro_batch_tokens
        notes = {"data": self.prompts.fingerprint, "date": self.date, "micro_batch_tokens": chosen,
                 "best": self.best.notes}  # fmt: skip
        with self.log.time_save(self.done):
            self.saved = checkpoint.save(
                self.cfg.out_dir, self.done, self.policy.whole, self.tokenizer, self.optimizer, self.position, self.cfg,
                notes=notes | self.notes, rollout=batch, reference=self.frozen, best=self.best.step,
                curriculum=self.prompts.state_dict(),
            )  # fmt: skip


def pin_date_of(model: str) -> None:
    """Lets chat templates print the date of a run, if `model` is one of its checkpoints; else today.

    Args:
        model: a folder, or another name of a model.
    """
    folder = Path(model) if checkpoint.is_complete(model) else None
    chat_templates.pin_date(checkpoint.notes(folder).get("date") or date.today().isoformat())


def load_data(
    cfg: Any, tokenizer: PreTrainedTokenizerBase, train_answers: bool = True, eval_answers: bool = True
) -> tuple[list[Example], list[Example]]:
    """Reads all training rows, and this rank's share of the evaluation rows.

    Args:
        cfg: a `settings.PromptSettings`.
        tokenizer: of the policy.
        train_answers: a training row without an answer is an error.
        eval_answers: an evaluation row without an answer is an error.

    Raises:
        ValueError: a row cannot be used, or `eval_by` names no column by which rows can be told apart.
    """
    options = dict(max_prompt_tokens=cfg.max_prompt_tokens, apply_chat_template=cfg.apply_chat_template,
                   system_prompt=cfg.system_prompt, template_kwargs=cfg.template_kwargs)  # fmt: skip
    if hasattr(cfg, "teacher_prompt"):
        options |= dict(teacher_prompt=cfg.teacher_prompt, max_teacher_prompt_tokens=cfg.max_teacher_prompt_tokens)
    train = data.load_examples(cfg.train_data, tokenizer, need_answer=train_answers, **options)
    held_out = []
    if cfg.eval_data and cfg.eval_every:
        held_out = data.load_examples(cfg.eval_data, tokenizer, split="test", need_answer=eval_answers, **options)
    held_out = held_out[: cfg.eval_examples]
    accuracy.require_columns([example.columns for example in held_out], cfg.eval_columns)
    return train, held_out[distributed.rank() :: distributed.num_ranks()]


def _require_shares(cfg: Any, num_ranks: int, timeout_minutes: float) -> None:
    """Requires a batch that can be divided among the ranks, and patience within their timeout."""
    if num_ranks == 1:
        return
    require(cfg.batch_size % num_ranks == 0, f"batch_size = {cfg.batch_size}", f"must be a multiple of the {num_ranks} "
            "ranks", f"{num_ranks * max(1, cfg.batch_size // num_ranks)} would do")  # fmt: skip
    rows = cfg.batch_size * (1 if getattr(cfg, "off_policy", False) else cfg.group_size) // num_ranks
    require(rows >= cfg.num_minibatches, f"num_minibatches = {cfg.num_minibatches}",
            f"must be at most the {rows} completions of a rank", "lower it, or raise batch_size")  # fmt: skip
    patience = getattr(cfg, "reward_patience", 0)
    require(patience < 60 * timeout_minutes, f"reward_patience = {patience} s",
            f"ranks wait {timeout_minutes} minutes for one another", "lower it, or raise TIMEOUT_MINUTES")  # fmt: skip
