"""GRPO, one process per GPU: sample G completions per prompt, score them, take clipped token-level steps.

Papers: GRPO 2402.03300 (Eq. 3), and the losses of DAPO 2503.14476, Dr. GRPO 2503.20783 and CISPO 2506.13585.
Run:    torchrun --nproc_per_node=2 grpo/grpo_ddp.py   edit the constants below, or pass --learning_rate 2e-6
        accelerate launch --num_processes 2 grpo/grpo_ddp.py    (several machines: docs/gpus.md)
Costs:  those of gspo/gspo_ddp.py; not measured apart from it
Dims:   P prompts, G completions per prompt, B = P*G / ranks, m sequences in one forward, C completion tokens

Every rank samples, scores and trains on its share of the step's prompts; once per optimizer step gradients are added
up. With --fsdp true weights, gradients and optimizer are sharded over the ranks (docs/gpus.md).
All ranks take the same steps, whatever the data, and meet once in each; what can fail on one rank alone ends all.
"""

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
from common.model import logprobs, lora, models, sources
from common.model.reward_models import RewardModel
from common.planning import plan
from common.run import checkpoint, guards, metrics, profiling, rules
from common.tasks import data, reward_client, rewards
from common.tasks.rewards import overlong_penalty
from common.training import budgets, optim, sharding

REFERENCE_GPU_ID = None  # frozen reference, loaded only if kl_coef > 0; None: the GPU of each rank; or a GPU number
REWARD_GPU_ID = None  # reward model, if there is one; likewise
TIMEOUT_MINUTES = 60  # ranks wait this long for one another: longer than the slowest reward or evaluation takes


# how the tokens of a minibatch are averaged (common/maths/losses.py, aggregate)
AGGREGATION = {"grpo": "seq_mean", "dapo": "token_mean", "dr_grpo": "constant", "cispo": "token_mean"}


# [copy]
@dataclass(frozen=True)
class Config:
    """GRPO, group relative policy optimization. Editing a line and passing --name value are the same."""

    policy_model: str = "toy"  # built-in; or a hub id or folder: "Qwen/Qwen2.5-0.5B-Instruct"
    reward_model: str = ""  # sequence classifier with one output, hub id or folder; its score joins REWARDS
    reward_model_weight: float = 1.0  # weight of its score in the sum
    reward_url: str = ""  # a service in place of REWARDS, "http://127.0.0.1:8899": common/tasks/reward_client.py
    reward_patience: float = 900.0  # seconds to wait while it is away; then the run saves and exits with code 75
    allow_reward_change: bool = False  # resume although the service scores in another way than it did
    train_data: str = "toy"  # built-in; or a .jsonl file, a saved datasets folder, a hub id: "openai/gsm8k:main"
    eval_data: str = "toy"  # the same, held out (split "test" of a hub id); "": no evaluation
    apply_chat_template: bool = True  # a prompt given as text becomes one user message, if the tokenizer has a template
    system_prompt: str = ""  # put before prompts given as text
    max_prompt_tokens: int = 512  # longer prompts are dropped, with a count

    steps: int = 60  # rollouts, each followed by grpo_epochs * num_minibatches optimizer steps
    batch_size: int = 16  # P, prompts per step, over all GPUs
    group_size: int = 8  # G, completions per prompt; the group mean is the baseline
    num_minibatches: int = 4  # optimizer steps per pass over a rollout; at 1 the ratio is 1 and nothing clips
    grpo_epochs: int = 1  # passes over each rollout
    micro_batch_tokens: int = 8192  # prompt and completion tokens in one forward per GPU; for memory and speed only
    max_new_tokens: int = 128  # a completion is cut off here
    min_new_tokens: int = 0  # no end token before
    truncated: str = "keep"  # completions cut off: "keep" trains on them, "mask" leaves them out of the loss
    overlong_cache: int = 0  # tokens before that limit over which a penalty grows to -1 (DAPO, Eq. 13); 0: no penalty
    dynamic_sampling: int = 0  # rounds in which new prompts replace groups with equal rewards; 0: none
    temperature: float = 1.0  # of sampling, and of every log-probability
    top_p: float = 1.0  # sample from the likeliest tokens with this probability; below 1 the ratios are biased
    top_k: int = 0  # sample from this many of the likeliest tokens; 0: all; the ratios are biased
    min_p: float = 0.0  # leave out tokens this many times less likely than the likeliest; the ratios are biased
    rollout_batch: int = 0  # completions sampled at once per GPU, but one group at least; 0: as many as memory holds

    learning_rate: float = 1e-4  # for the built-in policy; 5e-6 up to 0.5B parameters, 1e-6 at 7B
    warmup_steps: int = 5  # steps of linear warm-up, then constant
    weight_decay: float = 0.0  # decoupled
    max_grad_norm: float = 1.0  # the gradient is scaled down to this norm; inf: never
    loss: str = "dapo"  # "grpo", "dapo", "dr_grpo" or "cispo": what is clipped, and how tokens are averaged
    epsilon_low: float = 0.2  # the ratio of a token counts down to 1 - epsilon_low
    epsilon_high: float = 0.28  # and up to 1 + epsilon_high; 0.2 is usual without DAPO's clip-higher
    dual_clip: float = 0.0  # where the advantage is negative, the ratio counts up to this (3 is usual); 0: no limit
    cispo_cap: float = 5.0  # with "cispo": largest weight of a token
    advantage_scale: str = "auto"  # divide by the std of the "group", of the "batch", or "none"; "auto": by the loss
    entropy_coef: float = 0.0  # weight of the entropy bonus
    kl_coef: float = 0.0  # weight of the KL to the reference, the starting model; 0: none is loaded
    kl_estimator: str = "k3"  # "k3" as in the paper; "k2" and "rho_k3" have the gradient of KL(policy, reference)
    reference_refresh: int = 0  # every so many steps the policy becomes the reference; 0: never

    device: str = "auto"  # "cuda": the GPUs above; "cpu"; "auto": the GPUs above if there are any, else the CPU
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

    out_dir: str = "runs/grpo"  # checkpoints, metrics.jsonl, samples.jsonl, tensorboard/
    resume: str = "auto"  # "auto": newest complete checkpoint in out_dir; "none": start anew; or a checkpoint folder
    save_every: int = 20  # steps between checkpoints; the last step is always saved
    keep_checkpoints: int = 2  # older ones are deleted
    eval_every: int = 20  # steps between evaluations, greedy, also before the first; 0: never
    eval_examples: int = 256  # rows of eval_data used
    sample_every: int = 10  # steps between entries in samples.jsonl; 0: never
    print_samples: bool = False  # show them on the console too
    on_collapse: str = "warn"  # when a metric is outside GUARDS: "warn"; "stop" saves and ends the run; "off"
    collapse_steps: int = 10  # steps in a row that it has to be outside
    profile: int = 0  # steps to trace with the torch profiler, from the third on, into out_dir/profile/

    @property
    def clip_range(self) -> tuple[float, float]:
        """epsilon_low and epsilon_high in force; CISPO has no lower limit, and a cap instead of the upper one."""
        return (1.0, self.cispo_cap - 1.0) if self.loss == "cispo" else (self.epsilon_low, self.epsilon_high)

    @property
    def scale(self) -> str:
        """advantage_scale in force: the std of the group, as in the papers, and none in Dr. GRPO."""
        by_loss = "none" if self.loss == "dr_grpo" else "group"
        return by_loss if self.advantage_scale == "auto" else self.advantage_scale

    def __post_init__(self):
        rules.check_rl(self)  # what holds for all scripts
        checks.at_least(self, 1, "grpo_epochs")
        checks.at_least(self, 0, "epsilon_low", "epsilon_high", "dual_clip", "entropy_coef")
        checks.above_zero(self, "cispo_cap")
        checks.one_of(self, loss=AGGREGATION, advantage_scale=("auto", "group", "batch", "none"),
                      kl_estimator=("k1", "k2", "k3", "rho_k3"))  # fmt: skip
        require(self.dual_clip == 0 or self.dual_clip > 1, f"dual_clip = {self.dual_clip}", "must be above 1",
                "3 is usual; 0 switches it off")  # fmt: skip
        require(self.dual_clip == 0 or self.loss != "cispo", f"dual_clip = {self.dual_clip}", "the loss 'cispo' holds "
                "all tokens with cispo_cap", "leave this at 0")  # fmt: skip
        if self.kl_coef > 0 and self.kl_estimator == "k1":
            distributed.print_main("warning: kl_estimator = 'k1' has no gradient but noise: nothing is regularised")


# [copy]
def reward(completions: list[str], answers: list[str], **columns: list) -> list[float]:
    """Task reward in [0, 1], here: is the final answer right? This is the function most people replace.

    `columns` holds the other columns of the data and `completion_tokens`, one entry per completion. NaN means that a
    completion cannot be scored: it is left out and counted.
    """
    return rewards.math_match(completions, answers, **columns)


REWARDS = ((reward, 1.0),)  # (function, weight): the weighted sum counts; add (rewards.format_reward, 0.2), say
# metric of metrics.jsonl: (least, most) in a healthy run, None: no limit; on_collapse says what happens outside
GUARDS = {"reward_std": (1e-4, None), "entropy": (5e-3, 8.0), "completion_length": (1.5, None),
          "truncated": (0.0, 0.98), "clip_fraction": (0.0, 0.5), "unscored": (0.0, 0.9)}  # fmt: skip


# [copy]
def grpo_loss(policy, micro, cfg, num_sequences, num_tokens):
    """Share of the minibatch loss owed by one micro-batch; the shares add up exactly."""
    epsilon_low, epsilon_high = cfg.clip_range
    mask_mC, advantages_m = micro.completion_mask, micro.advantages
    logps_mC, entropy_mC = policy(*micro.tokens)  # fp32, through the wrapper
    if micro.old_logps is None:  # the first minibatch: no update since the rollout, so the ratio is 1
        micro.old_logps = logps_mC.detach()
    ratio_mC = losses.token_ratio(logps_mC, micro.old_logps)
    if cfg.loss == "cispo":
        surrogate_mC = losses.cispo_surrogate(logps_mC, ratio_mC, advantages_m, cfg.cispo_cap)
    else:
        surrogate_mC = losses.clipped_surrogate(ratio_mC, advantages_m, epsilon_low, epsilon_high)  # Eq. 3
    if cfg.dual_clip:
        surrogate_mC = losses.dual_clip(surrogate_mC, advantages_m, cfg.dual_clip)
    loss_mC = -surrogate_mC - cfg.entropy_coef * entropy_mC
    reported = {"entropy": entropy_mC, "kl_old": losses.kl_estimate(micro.old_logps, logps_mC, "k3")}
    if cfg.kl_coef > 0:
        kl_mC = losses.kl_estimate(logps_mC, micro.ref_logps, cfg.kl_estimator.removeprefix("rho_"))
        loss_mC = loss_mC + cfg.kl_coef * (ratio_mC * kl_mC if cfg.kl_estimator == "rho_k3" else kl_mC)
        reported["kl_ref"] = losses.kl_estimate(logps_mC, micro.ref_logps, "k3")
    mode = AGGREGATION[cfg.loss]
    constant = num_sequences * cfg.max_new_tokens
    denominator = {"seq_mean": num_sequences, "token_mean": num_tokens, "constant": constant}[mode]
    loss = losses.aggregate(loss_mC, mask_mC, mode, denominator)
    stats = losses.clip_stats(ratio_mC, advantages_m, epsilon_low, epsilon_high, mask_mC, cfg.dual_clip)
    reported["rollout_mismatch"] = (micro.old_logps - micro.rollout_logps).abs()
    count = mask_mC.sum().clamp(min=1)
    for name, values_mC in reported.items():
        stats[name] = losses.aggregate(values_mC.detach(), mask_mC, "token_mean", count)
    stats["loss"] = loss.detach() * num_tokens / count
    return loss, stats


# [copy]
def score(examples_P, batch, tokenizer, functions, judge, cfg):
    """Completions as text, their rewards [B], and by function, reward model or part of a service."""
    group_size = len(batch) // len(examples_P)
    completions_B = batch.texts(tokenizer)
    answers_B, columns = data.collate_columns(examples_P, group_size)
    columns["completion_tokens"] = batch.lengths.tolist()
    scores = {}
    if cfg.reward_url:
        scores = judge.scores(completions_B, answers_B, columns, group_size)
    elif judge is not None:
        prompts_B = [example.prompt for example in examples_P for _ in range(group_size)]
        scores["reward_model"] = (judge.scores(prompts_B, completions_B), cfg.reward_model_weight)
    functions = () if cfg.reward_url else functions
    return rewards.Scored(completions_B, *rewards.score(functions, completions_B, answers_B, columns, extra=scores))


# [copy]
def resample(examples_P, batch, scoring, prompts, sampler, grade, cfg, step):
    """Dynamic sampling: new prompts take the places of groups with equal rewards, which teach nothing.

    DAPO's rule (arXiv 2503.14476, Eq. 11) for any reward, up to a number of rounds; a group still equal then stays.
    Examples and scores change in place; returned are the new batch, and the prompts replaced, per prompt of the step.
    """
    with distributed.together("score"):
        scored, replaced = scoring.result(), 0
    for _ in range(cfg.dynamic_sampling):
        equal_P = advantages.equal_groups(scored.rewards.view(-1, cfg.group_size))
        places, numbers = prompts.replace(examples_P, equal_P.tolist())
        if not distributed.any_rank(bool(places)):
            break
        with distributed.together("resample"):
            if places:
                new_P = [examples_P[place] for place in places]
                rows = [place * cfg.group_size + g for place in places for g in range(cfg.group_size)]
                new = sampler.generate([e.prompt_ids for e in new_P], group_size=cfg.group_size,
                                       temperature=cfg.temperature, seed=cfg.seed, step=step,
                                       prompt_numbers=numbers)  # fmt: skip
                batch = batch.put(torch.tensor(rows), new)
                scored.put(rows, grade(new_P, new))
        replaced += len(places)
    return batch, replaced / len(examples_P)


# [copy]
def evaluate(sampler, examples, grade, cfg):
    """Mean reward of greedy completions, over the examples of all ranks."""
    rewards_E, size = [], cfg.batch_size * cfg.group_size
    with distributed.together("evaluate"):
        for part in [examples[i : i + size] for i in range(0, len(examples), size)]:
            batch = sampler.generate([e.prompt_ids for e in part], group_size=1, temperature=0)
            rewards_E.append(grade(part, batch).rewards)
    return metrics.mean_scored(rewards_E)


def main(cfg: Config, rewards=REWARDS) -> None:
    """Trains the policy; every step is rollout, score, update, report and save. `rewards`: in place of REWARDS."""
    gpus = devices.layout_of_rank(REFERENCE_GPU_ID, REWARD_GPU_ID, cfg.device)
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
    planned = plan.require_fit(cfg, gpus, ranks=num_ranks)
    set_seed(cfg.seed + rank)
    source = str(resumed or cfg.policy_model)
    tokenizer, model = models.load_policy(source, home, cfg.dtype, cfg.gradient_checkpointing, lora.options(cfg))
    models.warn_learning_rate(cfg.learning_rate, model)
    policy = logprobs.LogProbs(model, cfg.temperature, cfg.compile, cfg.entropy_coef > 0)
    whole = sharding.shard(policy, home) if sharded else model  # to sample from and to save
    frozen, reference, judge = None, None, None
    if cfg.kl_coef > 0 and cfg.lora_rank:  # the policy without its adapters
        reference = logprobs.LogProbs(model, cfg.temperature, cfg.compile, adapters=False)
    elif cfg.kl_coef > 0:
        frozen = models.load_frozen(checkpoint.reference(resumed, cfg), gpus.reference, cfg.dtype)
        reference = logprobs.LogProbs(frozen, cfg.temperature, cfg.compile)
        if sharded:
            sharding.shard_frozen(reference, home)
    if cfg.reward_model:
        judge = RewardModel(cfg.reward_model, gpus.reward, sources.pick_dtype(cfg.dtype, gpus.reward))
    if cfg.reward_url:
        was = None if cfg.allow_reward_change else checkpoint.notes(resumed).get("reward_service")
        with checkpoint.save_on_outage(), distributed.together("find the reward service"):
            judge = reward_client.RewardService(cfg.reward_url, patience_s=cfg.reward_patience, fingerprint=was)
    grade = partial(score, tokenizer=tokenizer, functions=rewards, judge=judge, cfg=cfg)
    optimizer = optim.AdamW(model, cfg.learning_rate, weight_decay=cfg.weight_decay, offload=cfg.optimizer_offload)
    reading = dict(max_prompt_tokens=cfg.max_prompt_tokens, apply_chat_template=cfg.apply_chat_template,
                   system_prompt=cfg.system_prompt)  # fmt: skip
    train_examples = data.load_examples(cfg.train_data, tokenizer, **reading)
    eval_examples = []
    if cfg.eval_data and cfg.eval_every:
        eval_examples = data.load_examples(cfg.eval_data, tokenizer, split="test", **reading)[: cfg.eval_examples]
        eval_examples = eval_examples[rank::num_ranks]
    sampler = rollout.Sampler(
        [whole], end_ids=sources.end_token_ids(tokenizer, model), pad_id=tokenizer.pad_token_id,
        max_new_tokens=cfg.max_new_tokens, min_new_tokens=cfg.min_new_tokens, top_p=cfg.top_p, top_k=cfg.top_k,
        min_p=cfg.min_p, rollout_batch=cfg.rollout_batch, compile=cfg.compile,
    )  # fmt: skip
    sampler.require_fit([e.prompt_ids for e in train_examples])
    start, position = checkpoint.load(resumed, optimizer, cfg) if resumed else (0, 0)
    sharding.gather(model, whole)
    if start >= cfg.steps:
        distributed.print_main(f"{resumed} has all {cfg.steps} steps: raise steps to go on, or give another out_dir")
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
            checkpoint.save(cfg.out_dir, done, whole, tokenizer, optimizer, position, cfg, notes=notes, rollout=rollout,
                            reference=frozen if cfg.reference_refresh else None)  # fmt: skip

    with (
        checkpoint.stop_on_signal() as stop,
        profiling.trace(cfg.out_dir, cfg.profile) as profiled,
        checkpoint.save_on_outage(lambda: save(batch)),  # of the reward service: after a resume, the batch comes first
    ):
        if log.evaluation_due(cfg):
            log.eval(start, eval_reward=evaluate(sampler, eval_examples, grade, cfg))
        for step in range(start + 1, cfg.steps + 1):
            # 1. rollout: B completions from the current policy, of this rank's prompts
            examples_P = prompts.next()
            with log.time("rollout"), distributed.together("rollout"):
                batch = unscored or sampler.generate([e.prompt_ids for e in examples_P], group_size=cfg.group_size,
                                                     temperature=cfg.temperature, seed=cfg.seed, step=step,
                                                     prompt_numbers=range(rank, cfg.batch_size, num_ranks))  # fmt: skip
                unscored = None

            # 2. score: rewards, and meanwhile log-probs; rewards stay rewards, advantages get their own name
            scoring = background.start(grade, examples_P, batch)
            if cfg.dynamic_sampling:
                with log.time("resample"):
                    batch, resampled = resample(examples_P, batch, scoring, prompts, sampler, grade, cfg, step)
                log.add(len(examples_P), resampled=resampled)
            minibatches = batch.minibatches(cfg.num_minibatches, budget.tokens, policy.packed)
            if sharded:
                sharding.pad_micro_batches(minibatches)
            micros = list(chain(*minibatches))
            with log.time("logprobs"), distributed.together("logprobs", sharded):
                # the first minibatch finds its old log-probs in its own forward pass
                logprobs.fill(chain(*minibatches[1:]), "old_logps", policy, home, budget.tokens)
                if reference is not None:
                    logprobs.fill(micros, "ref_logps", reference, reference.model.device, budget.tokens)
            with log.time("score"), distributed.together("score"):
                scored = scoring.result()
            if cfg.overlong_cache:  # not before dynamic sampling, which asks about the task
                penalty_B = overlong_penalty(batch.lengths, cfg.max_new_tokens, cfg.overlong_cache)
                scored.rewards, scored.by_function["overlong"] = scored.rewards + penalty_B, penalty_B
            rewards_PG = scored.rewards.view(-1, cfg.group_size)
            gathered = torch.cat(distributed.gather_objects(rewards_PG))  # the scale "batch" is that of all ranks
            by_rank = advantages.group_advantages(gathered, cfg.scale).chunk(num_ranks)
            advantages_B = by_rank[rank].flatten().to(home)
            left_out_B = scored.rewards.isnan() | (batch.truncated.cpu() & (cfg.truncated == "mask"))
            for micro in micros:
                micro.advantages = advantages_B[micro.rows]
                micro.drop(left_out_B[micro.rows])
            log.add_rollout(batch, rewards_PG, scored.by_function)

            # 3. update: num_minibatches optimizer steps per epoch, each summed over micro-batches
            optimizer.learning_rate = cfg.learning_rate * optim.warmup(step, cfg.warmup_steps)
            with log.time("update"):
                for minibatch in minibatches * cfg.grpo_epochs:
                    num_sequences = distributed.sum_over_ranks(sum(micro.num_trained for micro in minibatch))
                    num_tokens = distributed.sum_over_ranks(sum(micro.num_tokens for micro in minibatch))
                    log.add(skipped_updates=float(num_sequences == 0))
                    if num_sequences == 0:  # everything unscored or masked: no step, rather than 0 / 0
                        continue
                    with distributed.together("update", sharded):
                        for micro in budget.passes(minibatch, optimizer, log):  # again in halves, if memory runs out
                            with budget.room():
                                loss, stats = grpo_loss(policy, micro, cfg, num_sequences, num_tokens)
                                optimizer.scale(loss).backward()
                                log.add(micro.num_tokens, **stats)
                            loss = None  # after a failure its graph would hold the memory that is needed now
                    distributed.sum_gradients(optimizer.params)
                    log.add(grad_norm=optimizer.step(cfg.max_grad_norm))
                with checkpoint.keep_batch(cfg.out_dir, step, chain(*minibatches)):
                    log.add(overflows=optimizer.check())  # stops at a loss or gradient that is not finite
                sharding.gather(model, whole)
                optimizer.make_room()
            if cfg.reference_refresh and step % cfg.reference_refresh == 0:
                models.refresh([model, frozen])
            done, position, batch = step, prompts.position, None

            # 4. report and save
            collapsed = watch.see(log.end_step(step, learning_rate=optimizer.learning_rate))
            if cfg.sample_every and step % cfg.sample_every == 0:
                log.samples(step, examples_P, scored.completions, scored.rewards.tolist(), cfg.print_samples)
            if cfg.eval_data and cfg.eval_every and (step % cfg.eval_every == 0 or step == cfg.steps):
                log.eval(step, eval_reward=evaluate(sampler, eval_examples, grade, cfg))
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
