"""SFT with one process per GPU: the policy learns the replies of given conversations, token by token.

Loss:  mean over the assistant's tokens y_t of -log p(y_t | everything before y_t), p: policy
       (GKD, arXiv 2306.13649, Sec. 2: distillation without a teacher. Its students start from it, and RL needs it
       where the starting model is never right.)
Run:   torchrun --standalone --nproc_per_node=2 gkd/sft_ddp.py      (--help lists all options)
       with --fsdp true if the model or AdamW's state does not fit into one GPU
       then train on with python gspo/gspo.py --policy_model runs/sft/best
Costs: gkd/README.md
Dims:  P conversations of this rank, m sequences of a micro-batch, C tokens from the first reply on
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
from common.base import config
from common.run import rules

config.answer_early(globals())  # answers --help and wrong options before the slow imports
from common.base import devices
from common.loop import PromptSettings, Run, Sampler, Trainer, token_stats
from common.loop.student import AnsweredScorer
from common.loop.supervised import SFTPolicy, batch_of, evaluate, load_demonstrations
from common.maths import losses
from common.tasks import rewards
from common.training import optim

POLICY_GPU_IDS = None  # replicas that train, in this process; None: one process per GPU, under torchrun
TIMEOUT_MINUTES = 60  # limit for waiting on other ranks: must exceed an evaluation


@dataclass(frozen=True)
class Config(PromptSettings):
    """SFT, supervised fine-tuning. Editing a line and passing --name value are the same."""

    policy_model: str = "toy"  # built-in; or a hub id or folder: "Qwen/Qwen2.5-0.5B"
    train_data: str = "toy"  # built-in; or a file (.jsonl, .parquet), a folder, a hub id: "openai/gsm8k:main"
    eval_data: str = "toy"  # the same formats, held out (a hub id: its split "test"); "": no evaluation
    turns: Literal["all", "last"] = "all"  # which of the assistant's turns are learned

    steps: int = 60  # optimizer steps
    batch_size: int = 64  # conversations per step, over all GPUs
    max_tokens: int = 1024  # of a conversation; longer ones are dropped and counted
    max_prompt_tokens: int = 512  # of what is evaluated; longer prompts are dropped and counted
    learning_rate: float = 3e-4  # for the built-in policy; 1e-4 up to 0.5B parameters, 1e-5 at 7B
    lr_schedule: Literal["constant", "linear", "cosine"] = "cosine"  # after the warm-up
    aggregation: Literal["token_mean", "seq_mean"] = "token_mean"  # over all tokens; or over each conversation first

    max_new_tokens: int = 128  # maximum length of a completion in an evaluation
    temperature: float = 1.0  # of sampling in an evaluation with eval_samples
    seed: int = 0  # of data order and sampling
    out_dir: str = "runs/sft"  # checkpoints, metrics.jsonl, tensorboard/
    save_every: int = 60  # steps between checkpoints; the last step is always saved
    eval_every: int = 20  # steps between evaluations (greedy), the first before training; 0: never
    eval_examples: int = 256  # rows of eval_data used

    group_size = num_minibatches = 1  # one reply per conversation and one optimizer step per batch; no options

    def __post_init__(self):
        rules.check_supervised(self)


def reward(completions: list[str], answers: list[str], **columns: list) -> list[float]:
    """Task reward of every completion in [0, 1], here 1 if the final answer is right. It is reported, not trained on.

    Only completions of rows with an answer are scored. Arguments go by name: prompts, completions, answers,
    completion_tokens, step, and every column of the data. NaN means that a completion cannot be scored.
    """
    return rewards.math_match(completions, answers, **columns)


REWARDS = ((reward, 1.0),)  # (function, weight): the weighted sum is reported; the demonstrations alone train
# metric: (least, most) in a healthy run, None: no limit; outside, the option on_collapse decides
GUARDS = {"nll": (None, 12.0), "entropy": (None, 8.0)}


def sft_loss(policy, micro, cfg, counts):
    """Share of a micro-batch in the loss of its minibatch; `counts` are the minibatch's, so the shares add up."""
    weights_mC = losses.weights(micro.completion_mask, cfg.aggregation, counts.of(cfg.aggregation))
    loss, reported = policy.cross_entropy(micro, weights_mC)
    return loss, token_stats(micro, loss, reported, counts)


def main(cfg: Config, rewards=REWARDS) -> None:
    """Trains the policy; every step is a batch, an update, report and save. `rewards` overrides REWARDS."""
    gpus = devices.layout(cfg.device, policy=POLICY_GPU_IDS)
    run = Run(cfg, gpus, GUARDS, TIMEOUT_MINUTES)  # joins the other ranks, finds the checkpoint to resume from
    run.require_memory()
    policy = SFTPolicy(cfg, gpus, run.checkpoint)
    train_examples, eval_examples = load_demonstrations(cfg, policy)
    scorer = AnsweredScorer(cfg, policy.tokenizer, rewards, eval_examples)
    optimizer = optim.AdamW(policy.model, cfg.learning_rate, cfg.weight_decay, offload=cfg.optimizer_offload)
    sampler = Sampler(cfg, policy, eval_examples)
    conversations = run.restore(policy, optimizer, train_examples)
    log = run.log
    trainer = Trainer(cfg, policy, optimizer, log, run.plan, sampler.release_for_update)
    judged = sampler, policy, scorer, eval_examples, sft_loss

    with run.interruptible():  # Ctrl-C: finishes and saves the step, then stops; a second one stops at once
        if run.eval_due(run.start):
            run.record_eval(run.start, evaluate(cfg, *judged, run.start))
        for step in run.steps():
            # 1. data: the next conversations, cut into micro-batches without padding
            with run.phase("data", collective=policy.sharded):
                batch = batch_of(conversations.next(), sampler.pad_id, policy.home)
                minibatches = trainer.minibatches(batch)
            log.add_batch(batch)

            # 2. update: one optimizer step; gradients summed over micro-batches and GPUs
            rate = optim.schedule(step, cfg.steps, cfg.warmup_steps, cfg.lr_schedule, cfg.lr_end)
            optimizer.learning_rate = cfg.learning_rate * rate
            with log.time("update"):
                for minibatch in minibatches:
                    if trainer.forward_backward(minibatch, sft_loss):  # False: nothing in it can be trained on
                        log.add(grad_norm=optimizer.step(cfg.max_grad_norm))
                trainer.finish_update(step, minibatches)  # stops if a loss or gradient is not finite

            # 3. report and save
            run.end_step(step, conversations.position)
            if run.eval_due(step):
                run.record_eval(step, evaluate(cfg, *judged, step))
            stop = run.stop_requested()  # by a signal, a guard or early_stop
            if stop or run.save_due(step):  # every save_every steps, at the last, and at a new best
                run.save()
            if stop:
                break


if __name__ == "__main__":
    main(config.parse(Config))
