"""GSPO, one process per GPU: sample G completions per prompt, score them, take clipped sequence-level steps.

Paper: Zheng et al. 2025, arXiv 2507.18071 - Eq. 5 objective, Eq. 6 advantage, Eq. 7 ratio.
Run:   torchrun --nproc_per_node=2 gspo/gspo_ddp.py   edit the constants below, or pass --learning_rate 2e-6
       accelerate launch --num_processes 2 gspo/gspo_ddp.py    (several machines: docs/gpus.md)
Costs: 0.5B on two H200s, 64 x 256 tokens each: 0.9 s per step, 16.4 GiB, 1.99 times one GPU (docs/gpus.md)
Dims:  P prompts of this rank, G completions of each, B = P*G, m sequences of a micro-batch, C completion tokens

Every rank samples, scores and trains on its share of the step's prompts; gradients are summed once per optimizer
step. With --fsdp true, weights, gradients and optimizer are sharded over the ranks (docs/gpus.md). All ranks take the
same steps, whatever the data; if a phase fails on one rank, all of them end.
"""

import os
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

PLACES = [*Path(__file__).resolve().parents, Path(os.environ.get("RL_HAND", "."))]  # searched for the clone
sys.path[:0] = [str(p) for p in PLACES if (p / "common/loop").is_dir()][:1]
find_spec("common") or sys.exit("no package common: set RL_HAND to the folder of the clone, or pip install -e it")
from common.base import checks, config
from common.run import rules

config.answer_early(globals())  # answers --help and wrong options before the slow imports
from common.base import background, devices, distributed
from common.loop import Policy, Reference, RLSettings, Run, Sampler, Scorer, Trainer, add_overlong_penalty
from common.loop import assign_advantages, evaluate, fill_logps, group_advantages, load_data, policy_stats, resample
from common.maths import losses
from common.tasks import rewards
from common.training import optim

POLICY_GPU_IDS = None  # replicas that train, in this process; None: one process per GPU, under torchrun
ROLLOUT_GPU_IDS = None  # GPUs that sample; None: the policy's
REFERENCE_GPU_ID = None  # reference, loaded only if kl_coef > 0; None: the policy's first GPU; or a GPU number
REWARD_GPU_ID = None  # reward model, if there is one; None: the policy's first GPU; or a GPU number
TIMEOUT_MINUTES = 60  # limit for waiting on other ranks: must exceed the slowest reward or evaluation


@dataclass(frozen=True)
class Config(RLSettings):
    """GSPO, group sequence policy optimization. Editing a line and passing --name value are the same."""

    policy_model: str = "toy"  # built-in; or a hub id or folder: "Qwen/Qwen2.5-0.5B-Instruct"
    train_data: str = "toy"  # built-in; or a file (.jsonl, .parquet), a folder, a hub id: "openai/gsm8k:main"
    eval_data: str = "toy"  # the same formats, held out (a hub id: its split "test"); "": no evaluation

    steps: int = 60  # rollouts, each followed by epochs * num_minibatches optimizer steps
    batch_size: int = 16  # prompts per step, over all GPUs
    group_size: int = 8  # G, completions per prompt; the group mean is the baseline
    num_minibatches: int = 4  # optimizer steps per pass over a rollout; 1 with epochs 1: the ratio is 1, nothing clips
    epochs: int = 1  # passes over each rollout
    max_new_tokens: int = 128  # maximum length of a completion
    temperature: float = 1.0  # of sampling; log-probabilities are computed at it too
    learning_rate: float = 1e-4  # for the built-in policy; 5e-6 up to 0.5B parameters, 1e-6 at 7B
    clip_preset: Literal["dense", "paper", "custom"] = "dense"  # 3e-3/4e-3, 3e-4/4e-4 (long answers), or the epsilons
    epsilon_low: float = 0.2  # with "custom" only: clips the ratio below 1 - epsilon_low; the presets are far smaller
    epsilon_high: float = 0.2  # with "custom" only: clips the ratio above 1 + epsilon_high
    advantage_scale: Literal["group", "batch", "none", "rloo", "maxrl", "lite_ppo"] = "group"  # Eq. 6: "group"
    kl_coef: float = 0.0  # weight of the KL to the reference (the starting model, unless refreshed); 0: not loaded
    kl_estimator: Literal["k2", "k3"] = "k3"  # "k3": GRPO paper; "k2" has the gradient of KL(policy, reference)

    seed: int = 0  # of data order and sampling
    out_dir: str = "runs/gspo"  # checkpoints, metrics.jsonl, samples.jsonl, tensorboard/
    save_every: int = 20  # steps between checkpoints; the last step is always saved
    eval_every: int = 20  # steps between evaluations (greedy), the first before training; 0: never
    eval_examples: int = 256  # rows of eval_data used

    @property
    def clip_range(self) -> tuple[float, float]:
        """epsilon_low and epsilon_high of the preset, or the custom ones."""
        return losses.CLIP_PRESETS.get(self.clip_preset, (self.epsilon_low, self.epsilon_high))

    def __post_init__(self):
        rules.check_rl(self)  # rules that all scripts share
        epsilons_unset = (self.epsilon_low, self.epsilon_high) == (0.2, 0.2)
        checks.require(self.clip_preset == "custom" or epsilons_unset, f"clip_preset = {self.clip_preset!r}",
                       "epsilon_low and epsilon_high would be ignored", "set clip_preset to 'custom'")  # fmt: skip
        if self.num_minibatches * self.epochs == 1:
            distributed.print_main("warning: one optimizer step per rollout: the ratio is always 1, so nothing clips")


def reward(completions: list[str], answers: list[str], **columns: list) -> list[float]:
    """Task reward of every completion in [0, 1], here 1 if the final answer is right. Replace this function.

    Arguments go by name: prompts, completions, answers, completion_tokens, step, and every column of the data. NaN: a
    completion cannot be scored and is left out; None: this function does not apply to it (docs/rewards.md).
    """
    return rewards.math_match(completions, answers, **columns)


REWARDS = ((reward, 1.0),)  # (function, weight): the reward is the weighted sum; add (rewards.format_reward, 0.2)
# metric: (least, most) in a healthy run, None: no limit; outside, the option on_collapse decides
GUARDS = {"reward_std": (1e-4, None), "entropy": (5e-3, 8.0), "completion_length": (1.5, None),
          "truncated": (0.0, 0.98), "clip_fraction": (0.0, 0.9), "unscored": (0.0, 0.9)}  # fmt: skip


def gspo_loss(policy, micro, cfg, counts):
    """Share of a micro-batch in the loss of its minibatch; `counts` are the minibatch's, so the shares add up."""
    mask_mC = micro.completion_mask
    logps_mC, entropy_mC = policy(micro)
    ratio_m = losses.sequence_ratio(logps_mC, micro.old_logps, mask_mC)  # Eq. 7
    surrogate_m = losses.clipped_surrogate(ratio_m, micro.advantages, *cfg.clip_range)
    loss = losses.aggregate(-surrogate_m, mask_mC.any(1), "constant", counts.sequences)  # Eq. 5: mean over sequences
    if cfg.kl_coef > 0:
        kl_mC = losses.kl_estimate(logps_mC, micro.ref_logps, cfg.kl_estimator)
        loss = loss + cfg.kl_coef * losses.aggregate(kl_mC, mask_mC, "seq_mean", counts.sequences)
    outside = losses.outside(ratio_m, *cfg.clip_range)
    return loss, policy_stats(micro, loss, logps_mC, entropy_mC, ratio_m, outside, counts)


def main(cfg: Config, rewards=REWARDS) -> None:
    """Trains the policy; every step is rollout, score, update, report and save. `rewards` overrides REWARDS."""
    gpus = devices.layout(cfg.device, policy=POLICY_GPU_IDS, rollout=ROLLOUT_GPU_IDS, reference=REFERENCE_GPU_ID,
                          reward=REWARD_GPU_ID)  # fmt: skip
    run = Run(cfg, gpus, GUARDS, TIMEOUT_MINUTES)  # joins the other ranks, finds the checkpoint to resume from
    run.require_memory()
    policy = Policy(cfg, gpus, run.checkpoint)
    reference = Reference(cfg, policy, gpus, run.checkpoint)  # loads nothing if kl_coef is 0
    train_examples, eval_examples = load_data(cfg, policy.tokenizer)
    scorer = Scorer(cfg, policy.tokenizer, rewards, gpus, run.checkpoint, [*train_examples, *eval_examples])
    optimizer = optim.AdamW(policy.model, cfg.learning_rate, cfg.weight_decay, offload=cfg.optimizer_offload)
    sampler = Sampler(cfg, policy, train_examples)
    prompts = run.restore(policy, optimizer, train_examples, reference.to_save, scorer.notes)
    log = run.log
    trainer = Trainer(cfg, policy, optimizer, log, run.plan, sampler.release_for_update)

    with run.interruptible():  # Ctrl-C: finishes and saves the step, then stops; a second one stops at once
        if run.eval_due(run.start):
            run.record_eval(run.start, evaluate(cfg, sampler, scorer, eval_examples, run.start))
        for step in run.steps():
            # 1. rollout: B completions from the current policy, for this rank's prompts
            examples_P = prompts.next()
            with run.phase("rollout"):
                batch = run.batch = run.take_pending() or sampler.rollout(examples_P, step)  # pending: from an outage

            # 2. score: rewards in a thread, log-probabilities meanwhile; then advantages
            scoring = background.start(scorer.score, examples_P, batch, step)
            if cfg.dynamic_sampling:  # waits for the scores, then replaces groups with equal rewards, in place
                batch = run.batch = resample(cfg, step, examples_P, batch, scoring, prompts, sampler, scorer, log)
            with run.phase("logprobs", collective=policy.sharded):
                minibatches = trainer.minibatches(batch)
                fill_logps(minibatches, policy, reference, trainer.micro_batch_tokens)
            with run.phase("score"):
                scored = scoring.result()
            prompts.learn(examples_P, scored)  # for a curriculum
            add_overlong_penalty(cfg, scored, batch)
            rewards_PG = scored.rewards.view(-1, cfg.group_size)
            advantages_PG = group_advantages(rewards_PG, cfg.advantage_scale)  # Eq. 6
            assign_advantages(cfg, advantages_PG, scored, batch, minibatches)
            log.add_rollout(batch, rewards_PG, scored.by_function)

            # 3. update: num_minibatches optimizer steps per epoch; gradients summed over micro-batches and GPUs
            rate = optim.schedule(step, cfg.steps, cfg.warmup_steps, cfg.lr_schedule, cfg.lr_end)
            optimizer.learning_rate = cfg.learning_rate * rate
            with log.time("update"):
                for minibatch in minibatches * cfg.epochs:
                    if trainer.forward_backward(minibatch, gspo_loss):  # False: nothing in it can be trained on
                        log.add(grad_norm=optimizer.step(cfg.max_grad_norm))
                trainer.finish_update(step, minibatches)  # stops if a loss or gradient is not finite
                optimizer.offload_for_rollout()
            reference.refresh(step)  # every reference_refresh steps

            # 4. report and save
            run.end_step(step, prompts.position)
            if run.sample_due(step):
                log.samples(step, examples_P, scored, cfg.print_samples)
            if run.eval_due(step):
                run.record_eval(step, evaluate(cfg, sampler, scorer, eval_examples, step))
            stop = run.stop_requested()  # by a signal, a guard or early_stop
            if stop or run.save_due(step):  # every save_every steps, at the last, and at a new best
                run.save()
            if stop:
                break


if __name__ == "__main__":
    main(config.parse(Config))
