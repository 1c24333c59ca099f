"""GKD on one GPU or the CPU: a student samples, and a teacher says of every token how likely it should have been.

Paper: Agarwal et al. 2023, arXiv 2306.13649 - Eq. 1 generalized JSD, Eq. 4 mix of on- and off-policy data.
Run:   python gkd/gkd.py              edit the constants below, or pass --learning_rate 2e-5 (--help lists all)
Costs: 0.5B student, 1.5B teacher, 64 x 256 tokens on one H200: 1.06 s per step, 20 GiB (gkd/README.md)
Dims:  P prompts of this rank, G completions of each, B = P*G, m sequences of a micro-batch, C completion tokens
"""

import os
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Literal

PLACES = [*Path(__file__).resolve().parents, Path(os.environ.get("RL_HAND", "."))]  # searched for the clone
sys.path[:0] = [str(p) for p in PLACES if (p / "common/loop").is_dir()][:1]
find_spec("common") or sys.exit("no package common: set RL_HAND to the folder of the clone, or pip install -e it")
from common.base import config
from common.run import rules

config.answer_early(globals())  # answers --help and wrong options before the slow imports
from common.base import background, devices, distributed
from common.distill import teachers
from common.loop import PromptSettings, Run, Sampler, Trainer, load_data, token_stats
from common.loop.offloading import Offloading
from common.loop.student import (
    AnsweredScorer, MixedCompletions, Student, evaluate, load_teacher, require_copies, require_readable,
)  # fmt: skip
from common.maths import losses
from common.tasks import rewards
from common.training import optim

STUDENT_GPU_IDS = (0,)  # replicas that train, in this process; None: one process per GPU, under torchrun
ROLLOUT_GPU_IDS = None  # GPUs that sample; None: the student's; others hold copies, which may sample one step ahead
TEACHER_GPU_IDS = None  # its layers are spread over several; None: the student's first GPU
TIMEOUT_MINUTES = 60  # limit for waiting on other ranks: must exceed teacher_patience and an evaluation


@dataclass(frozen=True)
class Config(PromptSettings):
    """GKD, distillation on what the student samples. Editing a line and passing --name value are the same."""

    student_model: str = "toy"  # built-in; or a hub id or folder: "Qwen/Qwen2.5-0.5B-Instruct"
    teacher_model: str = "toy-teacher"  # or a hub id or folder, with the student's tokenizer; "student": that itself
    teacher_prompt: str = ""  # what it reads, with columns: "{prompt} Answer: {answer}"; "": the student's prompt
    max_teacher_prompt_tokens: int = 1024  # rows in which it reads more are dropped and counted
    teacher_refresh: int = 0  # with "student": steps between copies of the student into the teacher; 0: none
    teacher_url: str = ""  # of gkd/teacher_server.py, in place of teacher_model: "http://127.0.0.1:15555"
    teacher_top_k: int = 64  # tokens of the vocabulary that a server sends per position, and a tail; 0: all
    n_server_workers: int = 4  # requests to it in flight at the same time, per rank; not GPUs, not server threads
    teacher_patience: float = 600.0  # seconds to wait for a server that stays away, before the run saves and ends
    allow_other_template: bool = False  # distil although teacher and student have different chat templates
    other_tokenizer: Literal["refuse", "spans", "uld"] = "refuse"  # of the teacher: how to distil from it nevertheless
    train_data: str = "toy"  # built-in; or a file (.jsonl, .parquet), a folder, a hub id: "openai/gsm8k:main"
    eval_data: str = "toy"  # the same formats, held out (a hub id: its split "test"); "": no evaluation

    steps: int = 60  # batches, each followed by num_minibatches optimizer steps
    batch_size: int = 16  # prompts per step, over all GPUs
    group_size: int = 4  # G, completions that the student samples per prompt
    num_minibatches: int = 1  # optimizer steps per batch
    lmbda: float = 1.0  # on-policy share: probability that the completions of a step are sampled from the student
    lmbda_ramp: int = 0  # steps over which that share grows from 0 to lmbda; 0: none
    seq_kd: bool = False  # off-policy completions are the teacher's own, not the answers of the data
    seq_kd_temperature: float = 1.0  # of sampling those; 0: its most likely tokens
    seq_kd_cache: str = ""  # folder that keeps them; "": out_dir
    overlap: bool = False  # with ROLLOUT_GPU_IDS: sample one step ahead, with the weights before the last update
    max_new_tokens: int = 128  # maximum length of a completion
    temperature: float = 1.0  # of sampling
    learning_rate: float = 3e-4  # for the built-in student; 5e-5 up to 0.5B parameters, 1e-5 at 7B
    loss: Literal["reverse_kl", "forward_kl", "jsd", "opd"] = "reverse_kl"  # "opd": from sampled tokens alone
    beta: float = 0.5  # with "jsd": weight of the teacher in the mixture, between 0 and 1
    loss_temperature: float = 1.0  # divides the logits of both sides in the loss
    aggregation: Literal["token_mean", "seq_mean"] = "token_mean"  # over all tokens; or over each completion first
    param_offload: bool = False  # the idle model waits in CPU memory: the teacher, or the student in its turn

    seed: int = 0  # of data order, sampling and the mix
    out_dir: str = "runs/gkd"  # checkpoints, metrics.jsonl, samples.jsonl, tensorboard/
    save_every: int = 20  # steps between checkpoints; the last step is always saved
    eval_every: int = 20  # steps between evaluations, the first before training; 0: never
    eval_examples: int = 256  # rows of eval_data used

    @property
    def off_policy(self) -> bool:
        """Whether there are steps with completions that the student did not sample."""
        return self.lmbda < 1 or self.lmbda_ramp > 1

    @property
    def beta_in_force(self) -> float:
        """Beta of the generalized JSD; its ends are the forward and the reverse KL."""
        return {"forward_kl": 0.0, "reverse_kl": 1.0}.get(self.loss, self.beta)

    def __post_init__(self):
        rules.check_distillation(self)


def reward(completions: list[str], answers: list[str], **columns: list) -> list[float]:
    """Task reward of every completion in [0, 1], here 1 if the final answer is right. It is reported, not trained on.

    Only completions of rows with an answer are scored. Arguments go by name: prompts, completions, answers,
    completion_tokens, step, and every column of the data. NaN means that a completion cannot be scored.
    """
    return rewards.math_match(completions, answers, **columns)


REWARDS = ((reward, 1.0),)  # (function, weight): the weighted sum is reported; the teacher alone trains
# metric: (least, most) in a healthy run, None: no limit; outside, the option on_collapse decides
GUARDS = {"entropy": (5e-3, 8.0), "completion_length": (1.5, None), "truncated": (0.0, 0.98)}


def gkd_loss(student, micro, cfg, counts):
    """Share of a micro-batch in the loss of its minibatch; `counts` are the minibatch's, so the shares add up."""
    mask_mC, denominator = micro.completion_mask, counts.of(cfg.aggregation)
    if cfg.loss == "opd":  # policy gradient: the advantage of a token is how much likelier it is to the teacher
        logps_mC, entropy_mC = student(micro)
        advantages_mC = micro.teacher.advantages(micro.old_logps)
        surrogate_mC = losses.token_ratio(logps_mC, micro.old_logps) * advantages_mC
        loss = losses.aggregate(-surrogate_mC, mask_mC, cfg.aggregation, denominator)
        reported = {"reverse_kl": -advantages_mC, "entropy": entropy_mC, "student_logps": logps_mC,
                    "teacher_logps": micro.teacher.token_logps, **micro.teacher.shares}  # fmt: skip
    else:  # Eq. 1, over the vocabulary
        loss, reported = student.divergence(micro, losses.weights(mask_mC, cfg.aggregation, denominator))
    return loss, token_stats(micro, loss, reported, counts)


def main(cfg: Config, rewards=REWARDS) -> None:
    """Trains the student; every step is rollout, teacher, update, report and save. `rewards` overrides REWARDS."""
    gpus = devices.layout(cfg.device, student=STUDENT_GPU_IDS, rollout=ROLLOUT_GPU_IDS,
                          teacher=() if cfg.teacher_url else TEACHER_GPU_IDS)  # fmt: skip
    require_copies(cfg, gpus)  # to sample ahead
    run = Run(cfg, gpus, GUARDS, TIMEOUT_MINUTES)  # joins the other ranks, finds the checkpoint to resume from
    run.require_memory()
    student = Student(cfg, gpus, run.checkpoint)
    teacher = load_teacher(cfg, gpus, student, run.checkpoint)  # here, or behind teacher_url
    optimizer = optim.AdamW(student.model, cfg.learning_rate, cfg.weight_decay, offload=cfg.optimizer_offload)
    # whether every row must have an answer, to train on and to evaluate on
    train_examples, eval_examples = load_data(cfg, student.tokenizer, cfg.off_policy and not cfg.seq_kd, False)
    scorer = AnsweredScorer(cfg, student.tokenizer, rewards, [*train_examples, *eval_examples])
    require_readable(cfg, teacher, [*train_examples, *eval_examples])
    sampler = Sampler(cfg, student, train_examples, suppressed_ids=range(teacher.shared, student.num_ids))
    prompts = run.restore(student, optimizer, train_examples, teacher.to_save, {"teacher": teacher.weights})
    mixed = MixedCompletions(cfg, prompts, sampler, student, teacher)
    log = run.log
    trainer = Trainer(cfg, student, optimizer, log, run.plan, sampler.release_for_update)
    offloading = Offloading(cfg, student, teacher, sampler, optimizer, log)
    judged = sampler, student, teacher, scorer, offloading, eval_examples, gkd_loss

    with run.interruptible():  # Ctrl-C: finishes and saves the step, then stops; a second one stops at once
        if run.eval_due(run.start):
            run.record_eval(run.start, evaluate(cfg, *judged, run.start))
        for step in run.steps():
            # 1. rollout: completions from the student, of this rank's prompts; or off-policy ones
            offloading.offload_optimizer()
            with run.phase("rollout"):
                examples_P, batch = mixed.next(step)

            # 2. teacher: what it says of every completion token; meanwhile rewards, to be reported
            scoring = background.start(scorer.score, examples_P, batch, step)
            batch.drop(batch.truncated & (cfg.truncated == "mask"))
            minibatches = trainer.minibatches(batch, in_turn=False)
            if cfg.loss == "opd":
                with run.phase("logprobs", collective=student.sharded):  # the first minibatch finds its own later
                    student.fill_logps(chain(*minibatches[1:]), "old_logps", trainer.micro_batch_tokens)
            with offloading.teacher_phase(), run.phase("teacher"):
                teachers.fill(teacher, chain(*minibatches), examples_P, trainer.micro_batch_tokens)
            with run.phase("score"):
                scored = scoring.result()
            log.add_batch(batch)
            log.add(**mixed.metrics)
            if mixed.on_policy and distributed.any_rank(not scored.rewards.isnan().all()):
                log.add_rewards(scored.rewards, scored.by_function)

            # 3. update: num_minibatches optimizer steps; gradients summed over micro-batches and GPUs
            rate = optim.schedule(step, cfg.steps, cfg.warmup_steps, cfg.lr_schedule, cfg.lr_end)
            optimizer.learning_rate = cfg.learning_rate * rate
            offloading.onload_optimizer()
            with log.time("update"):
                for minibatch in minibatches:
                    if trainer.forward_backward(minibatch, gkd_loss):  # False: nothing in it can be trained on
                        log.add(grad_norm=optimizer.step(cfg.max_grad_norm))
                trainer.finish_update(step, minibatches)  # stops if a loss or gradient is not finite
            teacher.refresh(student.whole, step)  # every teacher_refresh steps

            # 4. report and save
            run.end_step(step, mixed.position)
            if run.sample_due(step):
                log.samples(step, examples_P, scored, cfg.print_samples)
            if run.eval_due(step):
                mixed.wait()  # for replicas that sample ahead: they sample here too
                run.record_eval(step, evaluate(cfg, *judged, step))
            stop = run.stop_requested()  # by a signal, a guard or early_stop
            if stop or run.save_due(step):  # every save_every steps, at the last, and at a new best
                run.save()
            if stop:
                break


if __name__ == "__main__":
    main(config.parse(Config))
