"""GRPO for posters: a text or vision-language policy writes a layout as JSON, a reward service scores what is painted.

Papers: GRPO 2402.03300 (Eq. 3), and the losses of GSPO 2507.18071, DAPO 2503.14476 and Dr. GRPO 2503.20783.
Run:    bash scripts/start_poster_training_with_reward_server.sh     the service and this script, in one command
        python grpo/poster/poster_grpo.py                            alone; rewards are computed in this process
        torchrun --nproc_per_node=7 grpo/poster/poster_grpo.py --reward_url http://127.0.0.1:8899
Costs:  grpo/poster/README.md
Dims:   P prompts, G completions per prompt, B = P*G / ranks, m sequences in one forward, C completion tokens

Every rank samples, scores and trains on its share of the step's prompts. Images pass through the vision tower once per
prompt, not once per completion; gradients are summed over the ranks when all of an optimizer step are there.
"""

import base64
import io
import json
import sys
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from transformers import set_seed

sys.path.insert(0, str(next(p for p in Path(__file__).resolve().parents if (p / "common/maths/losses.py").is_file())))
from common.base import background, checks, config, devices, distributed
from common.base.checks import require
from common.generation import rollout
from common.maths import advantages, losses
from common.model import images, logprobs, lora, models, sources
from common.planning import plan, shapes
from common.run import checkpoint, guards, metrics, profiling, rules
from common.tasks import data, reward_client, rewards
from common.training import budgets, optim, sharding
from grpo.poster import records, toys
from grpo.poster.local import LocalRewards

REFERENCE_GPU_ID = None  # frozen reference, loaded only if kl_coef > 0; None: the GPU of each rank; or a GPU number
TIMEOUT_MINUTES = 60  # ranks wait this long for one another: longer than the slowest reward or evaluation takes

# how the terms of a minibatch are averaged (common/maths/losses.py, aggregate); "gspo" has one ratio per sequence
AGGREGATION = {"gspo": "seq_mean", "grpo": "seq_mean", "dapo": "token_mean", "dr_grpo": "constant"}
REWARDS = ()  # (function, weight): more, added to the score of the poster; such as (rewards.length_reward(300), 0.1)
THUMBNAIL = 384  # pixels, long side of the copies of input images that go to the service
# metric of metrics.jsonl: (least, most) in a healthy run, None: no limit; on_collapse says what happens outside
GUARDS = {"reward_std": (1e-4, None), "entropy": (5e-3, 8.0), "completion_length": (1.5, None),
          "truncated": (0.0, 0.98), "clip_fraction": (0.0, 0.5), "unscored": (0.0, 0.9)}  # fmt: skip


@dataclass(frozen=True)
class Config:
    """GRPO for poster layouts. Editing a line and passing --name value are the same."""

    policy_model: str = "toy-poster"  # built-in, or "toy-poster-vlm"; a chat model, or of the Qwen-VL families
    reward_url: str = ""  # reward service, such as "http://127.0.0.1:8899"; "": the CPU formula, in this process
    reward_patience: float = 900.0  # seconds to wait while it is away; then the run saves and exits with code 75
    allow_reward_change: bool = False  # resume although the service scores in another way than it did
    send_images: bool = True  # the service paints posters with the input images; else with grey in their place
    train_data: str = "synthetic:0"  # built-in, levels 0, 1, 2; or a .jsonl of records (grpo/poster/records.py)
    eval_data: str = "synthetic:0"  # the same, held out; "": no evaluation
    coord_space: str = "px"  # of boxes, without a service: canvas pixels, or "rel1000"; a service has its own option
    max_prompt_tokens: int = 8192  # longer prompts, with the tokens of their images, are dropped, with a count
    max_images: int = 8  # prompts with more images are dropped, for a policy that sees them
    max_pixels: int = 602_112  # area of an image above which it is made smaller: 768 visual tokens; 0: the model's own
    freeze_vision: bool = True  # the vision tower is not trained

    steps: int = 60  # rollouts, each followed by grpo_epochs * num_minibatches optimizer steps
    batch_size: int = 16  # P, prompts per step, over all GPUs
    group_size: int = 8  # G, completions per prompt; the group mean is the baseline
    num_minibatches: int = 2  # optimizer steps per pass over a rollout; at 1 the ratio is 1 and nothing clips
    grpo_epochs: int = 1  # passes over each rollout
    micro_batch_tokens: int = 8192  # prompt and completion tokens in one forward per GPU; for memory and speed only
    max_new_tokens: int = 256  # a completion is cut off here; a poster of level 1 has about 300 tokens, of level 2 600
    min_new_tokens: int = 0  # no end token before
    truncated: str = "keep"  # completions cut off, which score 0: "keep" trains on them, "mask" leaves them out
    temperature: float = 1.0  # of sampling, and of every log-probability
    top_p: float = 1.0  # sample from the likeliest tokens with this probability; below 1 the ratios are biased
    top_k: int = 0  # sample from this many of the likeliest tokens; 0: all; the ratios are biased
    min_p: float = 0.0  # leave out tokens this many times less likely than the likeliest; the ratios are biased
    rollout_batch: int = 0  # completions sampled at once per GPU, but one group at least; 0: as many as memory holds

    learning_rate: float = 5e-4  # for the built-in policies; 5e-6 up to 0.5B parameters, 1e-6 at 7B
    warmup_steps: int = 5  # steps of linear warm-up, then constant
    weight_decay: float = 0.0  # decoupled
    max_grad_norm: float = 1.0  # the gradient is scaled down to this norm; inf: never
    loss: str = "grpo"  # "grpo", "dapo", "dr_grpo" or "gspo": what is clipped, and how tokens are averaged
    epsilon_low: float = 0.2  # the ratio counts down to 1 - epsilon_low; with "gspo" 3e-3 is usual
    epsilon_high: float = 0.28  # and up to 1 + epsilon_high; with "gspo" 4e-3 is usual
    advantage_scale: str = "auto"  # divide by the std of the "group", of the "batch", or "none"; "auto": by the loss
    kl_coef: float = 0.0  # weight of the KL to the reference, the starting model; 0: none is loaded
    kl_estimator: str = "k3"  # "k3" as in the paper; "k2" has the gradient of KL(policy, reference)

    device: str = "auto"  # "cuda": a GPU per process; "cpu"; "auto": GPUs if there are any, else the CPU
    dtype: str = "auto"  # "bf16" and "fp16" with fp32 master weights, "fp32"; "auto": bf16 on GPUs, fp32 on the CPU
    lora_rank: int = 0  # train adapters of this rank and leave the weights alone (LoRA); 0: train all weights
    lora_alpha: float = 32.0  # what adapters add is multiplied by lora_alpha / lora_rank
    lora_targets: str = "all-linear"  # layers that get one: "all-linear" (all but the head), or names, "q_proj,v_proj"
    load_bits: int = 0  # with LoRA: hold the weights in 8 or 4 bits (bitsandbytes); 0: as dtype says
    gradient_checkpointing: bool = False  # recompute activations: less memory, a third more time in the update
    optimizer_offload: str = "none"  # AdamW's state in CPU memory: "rollout", while completions are sampled; "always"
    fsdp: bool = False  # shard weights, gradients and AdamW's state over the ranks (FSDP2): common/training/sharding.py
    memory_limit: float = 0.0  # GiB of each GPU that this run may take; 0: all that is free
    force: bool = False  # start although the plan says that memory will not suffice
    compile: bool = True  # torch.compile on GPUs: faster steps, some seconds in the first
    seed: int = 0  # of data order and sampling

    out_dir: str = "runs/poster"  # checkpoints, metrics.jsonl, samples.jsonl, tensorboard/
    resume: str = "auto"  # "auto": newest complete checkpoint in out_dir; "none": start anew; or a checkpoint folder
    save_every: int = 20  # steps between checkpoints; the last step is always saved
    keep_checkpoints: int = 2  # older ones are deleted
    eval_every: int = 20  # steps between evaluations, greedy, also before the first; 0: never
    eval_examples: int = 64  # rows of eval_data used
    sample_every: int = 10  # steps between entries in samples.jsonl; 0: never
    print_samples: bool = False  # show them on the console too
    on_collapse: str = "warn"  # when a metric is outside GUARDS: "warn"; "stop" saves and ends the run; "off"
    collapse_steps: int = 10  # steps in a row that it has to be outside
    profile: int = 0  # steps to trace with the torch profiler, from the third on, into out_dir/profile/

    @property
    def scale(self) -> str:
        """advantage_scale in force: the std of the group, as in the papers, and none in Dr. GRPO."""
        by_loss = "none" if self.loss == "dr_grpo" else "group"
        return by_loss if self.advantage_scale == "auto" else self.advantage_scale

    def __post_init__(self):
        rules.check(self)  # what holds for all scripts
        checks.at_least(self, 2, "group_size")  # a group of one has no baseline
        checks.at_least(self, 1, "grpo_epochs", "max_images")
        checks.at_least(self, 0, "epsilon_low", "epsilon_high", "kl_coef", "max_pixels")
        checks.above_zero(self, "reward_patience")
        checks.one_of(self, loss=AGGREGATION, advantage_scale=("auto", "group", "batch", "none"),
                      kl_estimator=("k2", "k3"), coord_space=("px", "rel1000"))  # fmt: skip
        require(self.loss != "gspo" or max(self.epsilon_low, self.epsilon_high) < 0.1,
                f"epsilon_low = {self.epsilon_low}, epsilon_high = {self.epsilon_high} with the loss 'gspo'",
                "the ratio of a sequence stays near 1, so nothing would clip", "set them to 3e-3 and 4e-3")  # fmt: skip


def load_examples(source, split, tokenizer, processor, cfg):
    """Records as examples; for a policy with images, prompts are as long as the images make them."""
    rows, folder = records.read(source, split), records.folder_of(source)
    kept = [i for i, row in enumerate(rows) if processor is None or len(row["images"]) <= cfg.max_images]
    if processor is None:
        chats = [records.messages(rows[i], with_images=False) for i in kept]
        ids = data.encode_prompts(chats, source, tokenizer, apply_chat_template=True, system_prompt="")
    else:
        sizes = [[records.image_size(ref, folder) for ref in rows[i]["images"]] for i in kept]
        ids = [images.encode(processor, records.messages(rows[i], with_images=True), own)
               for i, own in zip(kept, sizes, strict=True)]  # fmt: skip
    found = []
    for i, prompt_ids in zip(kept, ids, strict=True):
        columns = {name: rows[i][name] for name in ("id", "images", "extra_info")}
        truth = rows[i]["ground_truth"]
        truth = truth if isinstance(truth, str) else json.dumps(truth)
        if len(prompt_ids) <= cfg.max_prompt_tokens:
            found.append(data.Example(i, rows[i]["prompt"], prompt_ids, truth, columns))
    shortest = min(map(len, ids), default=0)
    require(bool(found), f"max_prompt_tokens = {cfg.max_prompt_tokens}, max_images = {cfg.max_images}", f"no prompt of "
            f"{source} fits", f"the shortest has {shortest} tokens; raise one, or lower max_pixels")  # fmt: skip
    if dropped := len(rows) - len(found):
        distributed.print_main(f"{source}: dropped {dropped} of {len(rows)} prompts: too long, or of more images")
    return found


def poster_loss(policy, micro, cfg, num_sequences, num_tokens):
    """Share of the minibatch loss owed by one micro-batch; the shares add up exactly."""
    mask_mC, advantages_m = micro.completion_mask, micro.advantages
    logps_mC, entropy_mC = policy(*micro.tokens)  # fp32
    if micro.old_logps is None:  # the first minibatch: no update since the rollout, so the ratio is 1
        micro.old_logps = logps_mC.detach()
    if cfg.loss == "gspo":  # one ratio per sequence, which stands at each of its tokens: their mean is that of Eq. 5
        ratio = losses.sequence_ratio(logps_mC, micro.old_logps, mask_mC)
        surrogate_m = losses.clipped_surrogate(ratio, advantages_m, cfg.epsilon_low, cfg.epsilon_high)
        surrogate_mC, clipped = surrogate_m[:, None].expand_as(logps_mC), mask_mC.any(1)
    else:
        ratio = losses.token_ratio(logps_mC, micro.old_logps)
        surrogate_mC = losses.clipped_surrogate(ratio, advantages_m, cfg.epsilon_low, cfg.epsilon_high)  # Eq. 3
        clipped = mask_mC
    loss_mC = -surrogate_mC
    reported = {"entropy": entropy_mC, "kl_old": losses.kl_estimate(micro.old_logps, logps_mC, "k3")}
    if cfg.kl_coef > 0:
        loss_mC = loss_mC + cfg.kl_coef * losses.kl_estimate(logps_mC, micro.ref_logps, cfg.kl_estimator)
        reported["kl_ref"] = losses.kl_estimate(logps_mC, micro.ref_logps, "k3")
    mode = AGGREGATION[cfg.loss]
    constant = num_sequences * cfg.max_new_tokens
    denominator = {"seq_mean": num_sequences, "token_mean": num_tokens, "constant": constant}[mode]
    loss = losses.aggregate(loss_mC, mask_mC, mode, denominator)
    stats = losses.clip_stats(ratio, advantages_m, cfg.epsilon_low, cfg.epsilon_high, clipped)
    reported["rollout_mismatch"] = (micro.old_logps - micro.rollout_logps).abs()
    count = mask_mC.sum().clamp(min=1)
    for name, values_mC in reported.items():
        stats[name] = losses.aggregate(values_mC.detach(), mask_mC, "token_mean", count)
    stats["loss"] = loss.detach() * num_tokens / count
    return loss, stats


def open_images(examples, folder, processor):
    """The input images of every example; None where only the service looks, which draws synthetic ones itself."""

    def opened(ref):
        return records.open_image(ref, folder) if processor or not ref.startswith("synthetic:") else None

    return [[opened(ref) for ref in example.columns["images"]] for example in examples]


def sent(reference, picture):
    """An input image as the service takes it: a synthetic one by its name, others as a small copy."""
    if reference.startswith("synthetic:"):
        return reference
    small, file = picture.copy(), io.BytesIO()
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    small.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def score(examples_P, pictures_P, batch, tokenizer, functions, judge, cfg):
    """Completions as text, their rewards [B], and the parts of the reward by name."""
    group_size = len(batch) // len(examples_P)
    completions_B = batch.texts(tokenizer)
    answers_B, columns = data.collate_columns(examples_P, group_size)
    if cfg.send_images:
        extra_P = [{**e.columns["extra_info"], "images": [*map(sent, e.columns["images"], pictures)]}
                   for e, pictures in zip(examples_P, pictures_P, strict=True)]  # fmt: skip
        columns["extra_info"] = [extra for extra in extra_P for _ in range(group_size)]
    columns["completion_tokens"] = batch.lengths.tolist()
    scores = judge.scores(completions_B, answers_B, columns, group_size)
    return rewards.Scored(completions_B, *rewards.score(functions, completions_B, answers_B, columns, extra=scores))


def sample(sampler, model, processor, examples, pictures, batch=None, **options):
    """Completions of examples; the images of each prompt are looked at once. A batch that is given gets images only."""
    prompts = [e.prompt_ids for e in examples]
    seen = images.Images.of(model, processor, prompts, pictures) if processor else None
    if batch is None:
        return sampler.generate(prompts, images=seen, **options)
    batch.images = seen and seen.repeat(options["group_size"])
    return batch


def evaluate(sampler, model, processor, examples, folder, grade, cfg):
    """Mean reward of greedy completions and means of its parts, over the examples of all ranks."""
    sums = {}
    with distributed.together("evaluate"):
        # images of many prompts take memory
        size = max(1, cfg.batch_size * cfg.group_size // (4 if processor else 1))
        for part in [examples[i : i + size] for i in range(0, len(examples), size)]:
            pictures = open_images(part, folder, processor)
            batch = sample(sampler, model, processor, part, pictures, group_size=1, temperature=0)
            scored = grade(part, pictures, batch)
            for name, values in {"reward": scored.rewards, **scored.by_function}.items():
                known = values[~values.isnan()]
                total, count = sums.get(name, (0.0, 0))
                sums[name] = total + known.sum().item(), count + len(known)
    by_rank = distributed.gather_objects(sums)
    names = sorted({name for own in by_rank for name in own} - {"service"})
    pairs = {name: [sum(own.get(name, (0, 0))[k] for own in by_rank) for k in range(2)] for name in names}
    count = distributed.sum_over_ranks(len(examples))
    missing = count - pairs.get("reward", [0, 0])[1]
    if missing:
        distributed.print_main(f"warning: evaluation: {missing} of {count} rewards are NaN and left out")
    return {f"eval_{name}": total / count for name, (total, count) in pairs.items() if count}


def main(cfg: Config, rewards=REWARDS) -> None:
    """Trains the policy; every step is rollout, score, update, report and save. `rewards`: in place of REWARDS."""
    gpus = devices.layout_of_rank(REFERENCE_GPU_ID, None, cfg.device, "REFERENCE_GPU_ID")
    home = gpus.policy[0]
    rank, num_ranks = distributed.start(home, TIMEOUT_MINUTES)
    sharded = sharding.enabled(cfg)
    require(cfg.batch_size % num_ranks == 0, f"batch_size = {cfg.batch_size}", f"must be a multiple of the {num_ranks} "
            "ranks", f"{num_ranks * max(1, cfg.batch_size // num_ranks)} would do")  # fmt: skip
    rows = cfg.batch_size * cfg.group_size // num_ranks
    require(rows >= cfg.num_minibatches, f"num_minibatches = {cfg.num_minibatches}",
            f"must be at most the {rows} completions of a rank", "lower it, or raise batch_size")  # fmt: skip
    require(cfg.reward_patience < 60 * TIMEOUT_MINUTES, f"reward_patience = {cfg.reward_patience} s",
            f"ranks wait {TIMEOUT_MINUTES} minutes for one another", "lower it, or raise TIMEOUT_MINUTES")  # fmt: skip
    devices.limit_memory(gpus.all, cfg.memory_limit)
    resumed = checkpoint.find(cfg.out_dir, cfg.resume)
    set_seed(cfg.seed + rank)
    start_model = toys.find(cfg.policy_model)
    source = str(resumed or start_model)
    # the data before the model: how long its prompts are decides about memory
    tokenizer, processor = sources.load_tokenizer(source), None
    if images.is_vlm(shapes.base(start_model)):
        processor = images.load_processor(source, cfg.max_pixels)
    train_examples = load_examples(cfg.train_data, "train", tokenizer, processor, cfg)
    train_folder, eval_folder = map(records.folder_of, (cfg.train_data, cfg.eval_data))
    eval_examples = []
    if cfg.eval_data and cfg.eval_every:
        eval_examples = load_examples(cfg.eval_data, "test", tokenizer, processor, cfg)
        eval_examples = eval_examples[: cfg.eval_examples][rank::num_ranks]
    prompt_ids = [example.prompt_ids for example in [*train_examples, *eval_examples]]
    visual = max(ids.count(processor.image_token_id) for ids in prompt_ids) if processor else 0
    planned = plan.require_fit(cfg, gpus, ranks=num_ranks, model=start_model, prompt_tokens=max(map(len, prompt_ids)),
                               visual_tokens=visual)  # fmt: skip
    tokenizer, model = models.load_policy(source, home, cfg.dtype, cfg.gradient_checkpointing, lora.options(cfg))
    models.warn_learning_rate(cfg.learning_rate, model)
    suppressed = images.vision_ids(model)
    if processor:
        processor.tokenizer = tokenizer  # whose padding may have been repaired; it is saved with the policy
        if cfg.freeze_vision:
            images.freeze_vision(model)
    policy = logprobs.LogProbs(model, cfg.temperature, cfg.compile, suppressed_ids=suppressed)
    require(not processor or cfg.freeze_vision or not (sharded or cfg.lora_rank), "freeze_vision = False",
            "with fsdp or lora_rank the vision tower stays as it is", "set it, or leave those off")  # fmt: skip
    whole = sharding.shard(policy, home) if sharded else model  # to sample from and to save
    frozen, reference = None, None
    if cfg.kl_coef > 0 and cfg.lora_rank:  # the policy without its adapters
        reference = logprobs.LogProbs(model, cfg.temperature, cfg.compile, suppressed_ids=suppressed, adapters=False)
    elif cfg.kl_coef > 0:
        frozen = models.load_frozen(start_model, gpus.reference, cfg.dtype)
        reference = logprobs.LogProbs(frozen, cfg.temperature, cfg.compile, suppressed_ids=suppressed)
        if sharded:
            sharding.shard_frozen(reference, home)
    optimizer = optim.AdamW(model, cfg.learning_rate, weight_decay=cfg.weight_decay, offload=cfg.optimizer_offload)
    sampler = rollout.Sampler(
        [whole], end_ids=sources.end_token_ids(tokenizer, model), pad_id=tokenizer.pad_token_id,
        max_new_tokens=cfg.max_new_tokens, min_new_tokens=cfg.min_new_tokens, top_p=cfg.top_p, top_k=cfg.top_k,
        min_p=cfg.min_p, suppressed_ids=suppressed, rollout_batch=cfg.rollout_batch, compile=cfg.compile,
    )  # fmt: skip
    sampler.require_fit([e.prompt_ids for e in train_examples])
    start, position = checkpoint.load(resumed, optimizer, cfg) if resumed else (0, 0)
    sharding.gather(model, whole)
    if start >= cfg.steps:
        distributed.print_main(f"{resumed} has all {cfg.steps} steps: raise steps to go on, or give another out_dir")
    was = None if cfg.allow_reward_change else checkpoint.notes(resumed).get("reward_service")
    with checkpoint.save_on_outage(), distributed.together("find the reward service"):
        judge = LocalRewards(cfg.coord_space)
        if cfg.reward_url:
            judge = reward_client.RewardService(cfg.reward_url, patience_s=cfg.reward_patience, fingerprint=was)
    grade = partial(score, tokenizer=tokenizer, functions=rewards, judge=judge, cfg=cfg)
    prompts = data.PromptStream(train_examples, cfg.batch_size, cfg.seed, position, rank, num_ranks)
    prompts.warn_if_changed(checkpoint.notes(resumed).get("data"))
    config.save(cfg, cfg.out_dir)
    log = metrics.Log(cfg.out_dir, start, cfg.steps, gpus.all)
    watch = guards.Watch(GUARDS, cfg, log, start)
    budget = budgets.Budget(cfg.micro_batch_tokens, str(planned), redo=not sharded, release=sampler.release)
    done, position, batch, unscored = start, prompts.position, None, checkpoint.pending_rollout(resumed, home, cfg)

    def save(rollout=None):
        notes = {"data": prompts.fingerprint, "reward_service": judge.fingerprint if cfg.reward_url else None}
        with log.time_save(done):
            checkpoint.save(cfg.out_dir, done, whole, processor or tokenizer, optimizer, position, cfg, notes=notes,
                            rollout=rollout)  # fmt: skip

    def eval_now():
        return evaluate(sampler, whole, processor, eval_examples, eval_folder, grade, cfg)

    with (
        checkpoint.stop_on_signal() as stop,
        profiling.trace(cfg.out_dir, cfg.profile) as profiled,
        checkpoint.save_on_outage(lambda: save(batch)),  # of the reward service: after a resume, the batch comes first
    ):
        if log.evaluation_due(cfg):
            log.eval(start, **eval_now())
        for step in range(start + 1, cfg.steps + 1):
            # 1. rollout: B completions from the current policy, of this rank's prompts
            examples_P = prompts.next()
            with log.time("rollout"), distributed.together("rollout"):
                pictures_P = open_images(examples_P, train_folder, processor)
                batch = sample(sampler, whole, processor, examples_P, pictures_P, unscored, group_size=cfg.group_size,
                               temperature=cfg.temperature, seed=cfg.seed, step=step,
                               prompt_numbers=range(rank, cfg.batch_size, num_ranks))  # fmt: skip
                unscored = None

            # 2. score: rewards, and meanwhile log-probs; rewards stay rewards, advantages get their own name
            scoring = background.start(grade, examples_P, pictures_P, batch)
            minibatches = batch.minibatches(cfg.num_minibatches, budget.tokens, policy.packed)
            if sharded:
                sharding.pad_micro_batches(minibatches)
            micros = list(chain(*minibatches))
            with log.time("logprobs"), distributed.together("logprobs", sharded):
                # the first minibatch finds its old log-probs in its own forward pass
                logprobs.fill(chain(*minibatches[1:]), "old_logps", policy, home, budget.tokens)
                if reference is not None:
                    own = None  # what the reference sees, if the policy's vision tower is another one by now
                    if processor and frozen is not None and not cfg.freeze_vision:
                        own = images.Images.of(frozen, processor, [e.prompt_ids for e in examples_P], pictures_P)
                    logprobs.fill(micros, "ref_logps", reference, reference.model.device, budget.tokens, own)
            with log.time("score"), distributed.together("score"):
                scored = scoring.result()
            rewards_PG = scored.rewards.view(-1, cfg.group_size)
            gathered = torch.cat(distributed.gather_objects(rewards_PG))  # the scale "batch" is that of all ranks
            by_rank = advantages.group_advantages(gathered, cfg.scale).chunk(num_ranks)
            advantages_B = by_rank[rank].flatten().to(home)
            left_out_B = scored.rewards.isnan() | (batch.truncated.cpu() & (cfg.truncated == "mask"))
            for micro in micros:
                micro.advantages = advantages_B[micro.rows]
                micro.drop(left_out_B[micro.rows])
            log.add_rollout(batch, rewards_PG, scored.by_function)

            # 3. update: num_minibatches optimizer steps per epoch, each summed over micro-batches and ranks
            optimizer.learning_rate = cfg.learning_rate * optim.warmup(step, cfg.warmup_steps)
            with log.time("update"):
                for minibatch in minibatches * cfg.grpo_epochs:
                    num_sequences = distributed.sum_over_ranks(sum(micro.num_trained for micro in minibatch))
                    num_tokens = distributed.sum_over_ranks(sum(micro.num_tokens for micro in minibatch))
                    log.add(skipped_updates=float(num_sequences == 0))
                    if num_sequences == 0:  # everything unscored or masked: no step, rather than 0 / 0
                        continue
                    with distributed.together("update", sharded):
                        if processor:  # of a vision tower that is trained: its present features, and their graph
                            batch.images.refresh(whole, torch.cat([micro.images.prompts for micro in minibatch]))
                        for micro in budget.passes(minibatch, optimizer, log):  # again in halves, if memory runs out
                            with budget.room():
                                loss, stats = poster_loss(policy, micro, cfg, num_sequences, num_tokens)
                                optimizer.scale(loss).backward()
                                log.add(micro.num_tokens, **stats)
                            loss = None  # after a failure its graph would hold the memory that is needed now
                        if processor:
                            batch.images.backward()
                    distributed.sum_gradients(optimizer.params)
                    log.add(grad_norm=optimizer.step(cfg.max_grad_norm))
                with checkpoint.keep_batch(cfg.out_dir, step, chain(*minibatches)):
                    log.add(overflows=optimizer.check())  # stops at a loss or gradient that is not finite
                sharding.gather(model, whole)
                optimizer.make_room()
            done, position, batch = step, prompts.position, None

            # 4. report and save
            collapsed = watch.see(log.end_step(step, learning_rate=optimizer.learning_rate))
            if cfg.sample_every and step % cfg.sample_every == 0:
                log.samples(step, examples_P, scored.completions, scored.rewards.tolist(), cfg.print_samples)
            if cfg.eval_data and cfg.eval_every and (step % cfg.eval_every == 0 or step == cfg.steps):
                log.eval(step, **eval_now())
            stopping = distributed.any_rank(bool(stop)) or collapsed
            if step % cfg.save_every == 0 or step == cfg.steps or stopping:
                save()
            profiled()
            if stopping:
                break
    log.close()
    distributed.print_main(f"policy saved in {checkpoint.newest(cfg.out_dir)}")
    watch.leave()
    distributed.shutdown()


if __name__ == "__main__":
    main(config.parse(Config))
