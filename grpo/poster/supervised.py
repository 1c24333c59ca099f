"""SFT for posters: a text or vision-language policy learns to write given posters, so that RL starts with valid JSON.

Loss:  mean over the tokens y_t of the posters of -log p(y_t | brief, images, everything before y_t), p: policy
Run:   python grpo/poster/supervised.py        built-in policy and posters, a minute on a CPU
       python grpo/poster/supervised.py --policy_model Qwen/Qwen2.5-0.5B-Instruct --train_data synthetic:1 \
           --eval_data synthetic:1 --max_new_tokens 512 --learning_rate 1e-5 --steps 300
       then train on with --policy_model runs/supervised/best
Costs: grpo/poster/README.md
Dims:  P posters of this rank, m sequences of a micro-batch, C completion tokens

The loop is that of gkd/sft.py. A vision-language policy sees the input images; its vision tower stays frozen.
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
from common.base import devices, distributed
from common.loop import RewardSettings, Run, Sampler, Trainer, token_stats
from common.loop.supervised import batch_of, require_fit
from common.maths import losses
from common.model import images, sources
from common.planning import shapes
from common.training import optim
from grpo.poster import toys
from grpo.poster.examples import load_demonstrations, load_examples, open_images
from grpo.poster.policy import SupervisedPosterPolicy
from grpo.poster.scoring import PosterScorer, evaluate

TIMEOUT_MINUTES = 60  # limit for waiting on other ranks: must exceed an evaluation


@dataclass(frozen=True)
class Config(RewardSettings):
    """SFT, supervised fine-tuning for posters. Editing a line and passing --name value are the same."""

    policy_model: str = "toy-poster"  # built-in, or "toy-poster-vlm"; a chat model, or of the Qwen-VL families
    train_data: str = "synthetic:0"  # built-in, levels 0, 1, 2; or a .jsonl of records (grpo/poster/records.py)
    eval_data: str = "synthetic:0"  # the same, held out; "": no evaluation
    coord_space: Literal["px", "rel1000"] = "px"  # of boxes, in evaluations without a service
    font_paths: str = ""  # font files, separated by commas, for evaluations without a service; needed beyond ASCII
    send_images: bool = True  # a service paints posters with the input images; else with grey in their place
    max_prompt_tokens: int = 8192  # longer prompts, with the tokens of their images, are dropped, with a count
    max_tokens: int = 8192  # of prompt and poster; longer records are dropped and counted
    max_images: int = 8  # prompts with more images are dropped, for a policy that sees them
    max_pixels: int = 602_112  # area of an image above which it is made smaller: 768 visual tokens; 0: the model's own

    steps: int = 200  # optimizer steps
    batch_size: int = 16  # posters per step, over all GPUs
    learning_rate: float = 1e-3  # for the built-in policies; 1e-5 from 0.5 B parameters up
    warmup_steps: int = 10  # steps of linear warm-up
    lr_schedule: Literal["constant", "linear", "cosine"] = "linear"  # after the warm-up
    max_new_tokens: int = 256  # maximum length of a completion in an evaluation
    temperature: float = 1.0  # of sampling; evaluations are greedy

    seed: int = 0  # of data order
    out_dir: str = "runs/supervised"  # checkpoints, metrics.jsonl, tensorboard/
    save_every: int = 100  # steps between checkpoints; the last step is always saved
    eval_every: int = 100  # steps between evaluations (greedy), the first before training; 0: never
    eval_examples: int = 64  # rows of eval_data used

    group_size = num_minibatches = 1  # one poster per record and one optimizer step per batch; no options
    freeze_vision = True

    @property
    def fonts(self) -> tuple[str, ...]:
        """Paths of the font files."""
        return tuple(filter(None, (path.strip() for path in self.font_paths.split(","))))

    def __post_init__(self):
        rules.check_supervised(self)
        checks.at_least(self, 1, "max_images")


# metric: (least, most) in a healthy run, None: no limit; outside, the option on_collapse decides
GUARDS = {"nll": (None, 12.0), "entropy": (None, 8.0)}


def sft_loss(policy, micro, cfg, counts):
    """Share of a micro-batch in the loss of its minibatch; `counts` are the minibatch's, so the shares add up."""
    weights_mC = losses.weights(micro.completion_mask, "token_mean", counts.of("token_mean"))
    loss, reported = policy.cross_entropy(micro, weights_mC)
    return loss, token_stats(micro, loss, reported, counts)


def main(cfg: Config, rewards=()) -> None:
    """Trains the policy; every step is a batch, an update, report and save. `rewards` add to evaluations."""
    gpus = devices.layout(cfg.device, policy=None)
    run = Run(cfg, gpus, GUARDS, TIMEOUT_MINUTES)  # joins the other ranks, finds the checkpoint to resume from
    start_model = toys.find(cfg.policy_model)
    source = str(run.checkpoint or start_model)
    # the data before the model: how long prompts are decides about memory
    tokenizer, processor = sources.load_tokenizer(source), None
    if images.is_vlm(shapes.base(start_model)):
        processor = images.load_processor(source, cfg.max_pixels)
    train_examples = load_demonstrations(cfg, tokenizer, processor)
    eval_examples = []
    if cfg.eval_data and cfg.eval_every:
        eval_examples = load_examples(cfg, cfg.eval_data, "test", tokenizer, processor)[: cfg.eval_examples]
        eval_examples = eval_examples[distributed.rank() :: distributed.num_ranks()]
    prompt_ids = [example.prompt_ids for example in [*train_examples, *eval_examples]]
    visual = max(ids.count(processor.image_token_id) for ids in prompt_ids) if processor else 0
    run.require_memory(model=start_model, prompt_tokens=max(map(len, prompt_ids)), visual_tokens=visual)
    policy = SupervisedPosterPolicy(cfg, start_model, gpus, run.checkpoint, processor)
    require_fit(policy.model, train_examples, cfg.train_data)
    scorer = PosterScorer(cfg, policy.tokenizer, rewards, run.checkpoint, eval_examples)
    optimizer = optim.AdamW(policy.model, cfg.learning_rate, cfg.weight_decay, offload=cfg.optimizer_offload)
    sampler = Sampler(cfg, policy, eval_examples, policy.suppressed_ids)
    records = run.restore(policy, optimizer, train_examples, notes=scorer.notes, tokenizer=processor)
    log = run.log
    trainer = Trainer(cfg, policy, optimizer, log, run.plan, sampler.release_for_update)

    with run.interruptible():  # Ctrl-C: finishes and saves the step, then stops; a second one stops at once
        if run.eval_due(run.start):
            run.record_eval(run.start, evaluate(cfg, sampler, policy, scorer, eval_examples, run.start))
        for step in run.steps():
            # 1. data: the next posters, cut into micro-batches without padding
            examples_P = records.next()
            with run.phase("data", collective=policy.sharded):
                batch = batch_of(examples_P, sampler.pad_id, policy.home)
                pictures_P = open_images(examples_P, cfg.train_data, processor)
                batch.images = policy.vision_features(examples_P, pictures_P)
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
            run.end_step(step, records.position)
            if run.eval_due(step):
                run.record_eval(step, evaluate(cfg, sampler, policy, scorer, eval_examples, step))
            stop = run.stop_requested()  # by a signal, a guard or early_stop
            if stop or run.save_due(step):  # every save_every steps, at the last, and at a new best
                run.save()
            if stop:
                break


if __name__ == "__main__":
    main(config.parse(Config))
