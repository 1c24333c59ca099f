"""GRPO for posters: a text or vision-language policy writes a layout as JSON, a reward service scores what is painted.

Papers: GRPO 2402.03300 (Eq. 3); common/maths/objectives.py has the objectives of ten more, one function each.
Run:    bash scripts/start_poster_training_with_reward_server.sh     the service and this script, in one command
        python grpo/poster/poster_grpo.py                            alone; rewards are computed in this process
        torchrun --nproc_per_node=7 grpo/poster/poster_grpo.py --reward_url http://127.0.0.1:8899
Costs:  grpo/poster/README.md
Dims:   P prompts of this rank, G completions of each, B = P*G, m sequences of a micro-batch, C completion tokens

One process per GPU: every rank samples, scores and trains on its share of the step's prompts. Images pass through the
vision tower once per prompt, not once per completion.
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
from common.base.settings import Loss
from common.run import rules

config.answer_early(globals())  # answers --help and wrong options before the slow imports
from common.base import background, devices, distributed
from common.loop import Reference, RewardSettings, Run, Sampler, Trainer, assign_advantages, fill_logps
from common.loop import group_advantages, policy_stats
from common.maths import losses, objectives
from common.model import images, sources
from common.planning import shapes
from common.tasks import accuracy
from common.training import optim
from grpo.poster import toys
from grpo.poster.examples import load_examples, open_images
from grpo.poster.policy import PosterPolicy
from grpo.poster.scoring import PosterScorer, evaluate

REFERENCE_GPU_ID = None  # reference, loaded only if kl_coef > 0; None: the GPU of each rank; or a GPU number
TIMEOUT_MINUTES = 60  # limit for waiting on other ranks: must exceed the slowest reward or evaluation


@dataclass(frozen=True)
class Config(RewardSettings):
    """GRPO for poster layouts. Editing a line and passing --name value are the same."""

    policy_model: str = "toy-poster"  # built-in, or "toy-poster-vlm"; a chat model, or of the Qwen-VL families
    train_data: str = "synthetic:0"  # built-in, levels 0, 1, 2; or a .jsonl of records (grpo/poster/records.py)
    eval_data: str = "synthetic:0"  # the same, held out; "": no evaluation
    coord_space: Literal["px", "rel1000"] = "px"  # of boxes, without a service; a service has its own option
    font_paths: str = ""  # font files, separated by commas, without a service; needed beyond ASCII
    send_images: bool = True  # the service paints posters with the input images; else with grey in their place
    max_prompt_tokens: int = 8192  # longer prompts, with the tokens of their images, are dropped, with a count
    max_images: int = 8  # prompts with more images are dropped, for a policy that sees them
    max_pixels: int = 602_112  # area of an image above which it is made smaller: 768 visual tokens; 0: the model's own
    freeze_vision: bool = True  # the vision tower is not trained

    steps: int = 60  # rollouts, each followed by epochs * num_minibatches optimizer steps
    batch_size: int = 16  # prompts per step, over all GPUs
    group_size: int = 8  # G, completions per prompt; the group mean is the baseline
    num_minibatches: int = 2  # optimizer steps per pass over a rollout; 1 with epochs 1: the ratio is 1, nothing clips
    epochs: int = 1  # passes over each rollout
    max_new_tokens: int = 256  # maximum length; a poster of level 1 has about 300 tokens, of level 2 about 600
    temperature: float = 1.0  # of sampling; log-probabilities are computed at it too
    learning_rate: float = 5e-4  # for the built-in policies; 5e-6 up to 0.5B parameters, 1e-6 at 7B
    loss: Loss = "grpo"  # objective, each a function in common/maths/objectives.py; grpo/README.md says when to use it
    epsilon_low: float = 0.0  # lower end of the clip range, 1 - epsilon_low; 0: that of the loss, 0.2 with "grpo"
    epsilon_high: float = 0.0  # its upper end, 1 + epsilon_high; 0: that of the loss, 0.28 with "grpo"
    advantage_scale: Literal["auto", "group", "batch", "none", "rloo", "maxrl", "lite_ppo"] = "auto"  # grpo/README.md
    kl_coef: float = 0.0  # weight of the KL to the reference (the starting model, unless refreshed); 0: not loaded
    kl_estimator: Literal["k2", "k3"] = "k3"  # "k3": GRPO paper; "k2" has the gradient of KL(policy, reference)

    seed: int = 0  # of data order and sampling
    out_dir: str = "runs/poster"  # checkpoints, metrics.jsonl, samples.jsonl, tensorboard/
    save_every: int = 20  # steps between checkpoints; the last step is always saved
    eval_every: int = 20  # steps between evaluations (greedy), the first before training; 0: never
    eval_examples: int = 64  # rows of eval_data used

    @property
    def fonts(self) -> tuple[str, ...]:
        """Paths of the font files."""
        return tuple(filter(None, (path.strip() for path in self.font_paths.split(","))))

    @property
    def clip_range(self) -> tuple[float, float]:
        """epsilon_low and epsilon_high; where they are 0, those of the loss."""
        low, high = objectives.FAMILY[self.loss].numbers
        return self.epsilon_low or low, self.epsilon_high or high

    @property
    def aggregation(self) -> str:
        """How the tokens of a minibatch are averaged."""
        return objectives.FAMILY[self.loss].aggregation

    @property
    def scale(self) -> str:
        """advantage_scale; "auto" is the std of the group, as in the papers, and none in Dr. GRPO."""
        return {"auto": "none" if self.loss == "dr_grpo" else "group"}.get(self.advantage_scale, self.advantage_scale)

    def __post_init__(self):
        rules.check_rl(self)  # rules that all scripts share
        checks.at_least(self, 1, "max_images")


REWARDS = ()  # (function, weight): more, added to the score of the poster; such as (rewards.length_reward(300), 0.1)
# metric: (least, most) in a healthy run, None: no limit; outside, the option on_collapse decides
GUARDS = {"reward_std": (1e-4, None), "entropy": (5e-3, 8.0), "completion_length": (1.5, None),
          "truncated": (0.0, 0.98), "clip_fraction": (0.0, 0.5), "unscored": (0.0, 0.9)}  # fmt: skip


def poster_loss(policy, micro, cfg, counts):
    """Share of a micro-batch in the loss of its minibatch; `counts` are the minibatch's, so the shares add up."""
    mask_mC = micro.completion_mask
    logps_mC, entropy_mC = policy(micro)
    objective = objectives.FAMILY[cfg.loss].function
    surrogate_mC, ratio, outside = objective(logps_mC, micro.old_logps, micro.advantages, mask_mC, *cfg.clip_range)
    loss_mC = -surrogate_mC
    if cfg.kl_coef > 0:
        loss_mC = loss_mC + cfg.kl_coef * losses.kl_estimate(logps_mC, micro.ref_logps, cfg.kl_estimator)
    loss = losses.aggregate(loss_mC, mask_mC, cfg.aggregation, counts.of(cfg.aggregation, cfg.max_new_tokens))
    return loss, policy_stats(micro, loss, logps_mC, entropy_mC, ratio, outside, counts)


def main(cfg: Config, rewards=REWARDS) -> None:
    """Trains the policy; every step is rollout, score, update, report and save. `rewards` overrides REWARDS."""
    gpus = devices.layout(cfg.device, policy=None, reference=REFERENCE_GPU_ID)
    run = Run(cfg, gpus, GUARDS, TIMEOUT_MINUTES)  # joins the other ranks, finds the checkpoint to resume from
    start_model = toys.find(cfg.policy_model)
    source = str(run.checkpoint or start_model)
    # the data before the model: how long prompts are decides about memory
    tokenizer, processor = sources.load_tokenizer(source), None
    if images.is_vlm(shapes.base(start_model)):
        processor = images.load_processor(source, cfg.max_pixels)
    train_examples = load_examples(cfg, cfg.train_data, "train", tokenizer, processor)
    eval_examples = []
    if cfg.eval_data and cfg.eval_every:
        eval_examples = load_examples(cfg, cfg.eval_data, "test", tokenizer, processor)[: cfg.eval_examples]
        accuracy.require_columns([example.columns for example in eval_examples], cfg.eval_columns)
        eval_examples = eval_examples[distributed.rank() :: distributed.num_ranks()]
    prompt_ids = [example.prompt_ids for example in [*train_examples, *eval_examples]]
    visual = max(ids.count(processor.image_token_id) for ids in prompt_ids) if processor else 0
    run.require_memory(model=start_model, prompt_tokens=max(map(len, prompt_ids)), visual_tokens=visual)
    policy = PosterPolicy(cfg, start_model, gpus, run.checkpoint, processor)
    reference = Reference(cfg, policy, gpus, run.checkpoint)  # loads nothing if kl_coef is 0
    scorer = PosterScorer(cfg, policy.tokenizer, rewards, run.checkpoint, [*train_examples, *eval_examples])
    optimizer = optim.AdamW(policy.model, cfg.learning_rate, cfg.weight_decay, offload=cfg.optimizer_offload)
    sampler = Sampler(cfg, policy, train_examples, policy.suppressed_ids)
    prompts = run.restore(policy, optimizer, train_examples, notes=scorer.notes, tokenizer=processor)
    log = run.log
    trainer = Trainer(cfg, policy, optimizer, log, run.plan, sampler.release_for_update)

    with run.interruptible():  # Ctrl-C: finishes and saves the step, then stops; a second one stops at once
        if run.eval_due(run.start):
            run.record_eval(run.start, evaluate(cfg, sampler, policy, scorer, eval_examples, run.start))
        for step in run.steps():
            # 1. rollout: B completions from the current policy, for this rank's prompts
            examples_P = prompts.next()
            with run.phase("rollout"):
                pictures_P = open_images(examples_P, cfg.train_data, processor)
                seen = policy.vision_features(examples_P, pictures_P)  # vision features, once per prompt
                batch = run.batch = run.take_pending(seen) or sampler.rollout(examples_P, step, images=seen)

            # 2. score: rewards in a thread, log-probabilities meanwhile; then advantages
            scoring = background.start(scorer.score, examples_P, pictures_P, batch, step)
            with run.phase("logprobs", collective=policy.sharded):
                minibatches = trainer.minibatches(batch)
                seen = policy.reference_features(reference, examples_P, pictures_P)
                fill_logps(minibatches, policy, reference, trainer.micro_batch_tokens, seen)
            with run.phase("score"):
                scored = scoring.result()
            rewards_PG = scored.rewards.view(-1, cfg.group_size)
            advantages_PG = group_advantages(rewards_PG, cfg.scale)
            assign_advantages(cfg, advantages_PG, scored, batch, minibatches)
            log.add_rollout(batch, rewards_PG, scored.by_function)

            # 3. update: num_minibatches optimizer steps per epoch; gradients summed over micro-batches and GPUs
            rate = optim.schedule(step, cfg.steps, cfg.warmup_steps, cfg.lr_schedule, cfg.lr_end)
            optimizer.learning_rate = cfg.learning_rate * rate
            with log.time("update"):
                for minibatch in minibatches * cfg.epochs:
                    if trainer.forward_backward(minibatch, poster_loss):  # False: nothing in it can be trained on
                        log.add(grad_norm=optimizer.step(cfg.max_grad_norm))
                trainer.finish_update(step, minibatches)  # stops if a loss or gradient is not finite
                optimizer.offload_for_rollout()

            # 4. report and save
            run.end_step(step, prompts.position)
            if run.sample_due(step):
                log.samples(step, examples_P, scored, cfg.print_samples)
            if run.eval_due(step):
                run.record_eval(step, evaluate(cfg, sampler, policy, scorer, eval_examples, step))
            stop = run.stop_requested()  # by a signal, a guard or early_stop
            if stop or run.save_due(step):  # every save_every steps, at the last, and at a new best
                run.save()
            if stop:
                break


if __name__ == "__main__":
    main(config.parse(Config))
