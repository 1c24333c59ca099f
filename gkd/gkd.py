"""GKD on one GPU or the CPU: a student samples, and a teacher says of every token how likely it should have been.

Paper:  Agarwal et al. 2023, arXiv 2306.13649 - Eq. 1 generalized JSD, Eq. 4 mix of on- and off-policy data.
Run:    python gkd/gkd.py             edit the constants below, or pass --learning_rate 2e-5 (--help lists all)
Costs:  0.5B student, 1.5B teacher, 64 x 256 tokens on one H200: 1.06 s per step, 20 GiB (gkd/README.md)
Dims:   P prompts, G completions per prompt, B = P*G, m sequences in one forward, C completion tokens, R values reported
"""

import sys
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from transformers import set_seed

sys.path.insert(0, str(next(p for p in Path(__file__).resolve().parents if (p / "common/maths/losses.py").is_file())))
from common.base import background, checks, config, devices, distributed, memory
from common.base.checks import require
from common.distill import distillation, offpolicy, teacher_client, teachers
from common.generation import rollout
from common.maths import losses
from common.model import logprobs, lora, models, sources
from common.planning import plan
from common.run import checkpoint, guards, metrics, profiling, rules
from common.tasks import data, rewards
from common.training import budgets, offload, optim

STUDENT_GPU_IDS = (0,)  # the student's GPU; the weights that are trained are the ones sampled from
TEACHER_GPU_IDS = (0,)  # the teacher's; several: its layers are spread over them

BETA = {"forward_kl": 0.0, "reverse_kl": 1.0}  # ends of the generalized JSD, where it jumps
# metric of metrics.jsonl: (least, most) in a healthy run, None: no limit; on_collapse says what happens outside
GUARDS = {"entropy": (5e-3, 8.0), "completion_length": (1.5, None), "truncated": (0.0, 0.98)}


# [copy]
@dataclass(frozen=True)
class Config:
    """GKD, distillation on what the student samples. Editing a line and passing --name value are the same."""

    student_model: str = "toy"  # built-in; or a hub id or folder: "Qwen/Qwen2.5-0.5B-Instruct"
    teacher_model: str = "toy-teacher"  # built-in; or a hub id or folder, with the tokenizer of the student
    teacher_url: str = ""  # of gkd/teacher_server.py, in place of teacher_model: "http://127.0.0.1:15555"
    teacher_top_k: int = 64  # tokens of the vocabulary that a server sends per position, and a tail; 0: all
    n_server_workers: int = 4  # requests to it in flight at the same time, per rank; not GPUs, not server threads
    teacher_patience: float = 600.0  # seconds to wait for a server that stays away, before the run saves and ends
    allow_other_template: bool = False  # distil although teacher and student have different chat templates
    train_data: str = "toy"  # built-in; or a .jsonl file, a saved datasets folder, a hub id: "openai/gsm8k:main"
    eval_data: str = "toy"  # the same, held out (split "test" of a hub id); "": no evaluation
    apply_chat_template: bool = True  # a prompt given as text becomes one user message, if the tokenizer has a template
    system_prompt: str = ""  # put before prompts given as text
    max_prompt_tokens: int = 512  # longer prompts are dropped, with a count

    steps: int = 60  # batches, each followed by num_minibatches optimizer steps
    batch_size: int = 16  # P, prompts per step, over all GPUs
    group_size: int = 4  # G, completions that the student samples per prompt
    num_minibatches: int = 1  # optimizer steps per batch
    lmbda: float = 1.0  # on-policy share: probability that the completions of a step are sampled from the student
    lmbda_ramp: int = 0  # steps over which that share grows from 0 to lmbda; 0: none
    seq_kd: bool = False  # off-policy completions are the teacher's own, not the answers of the data
    seq_kd_temperature: float = 1.0  # of sampling those; 0: its most likely tokens
    seq_kd_cache: str = ""  # folder that keeps them; "": out_dir
    micro_batch_tokens: int = 8192  # prompt and completion tokens in one forward per GPU; for memory and speed only
    max_new_tokens: int = 128  # a completion is cut off here
    min_new_tokens: int = 0  # no end token before
    truncated: str = "keep"  # completions cut off: "keep" trains on them, "mask" leaves them out of the loss
    temperature: float = 1.0  # of sampling
    top_p: float = 1.0  # sample from the likeliest tokens with this probability
    top_k: int = 0  # sample from this many of the likeliest tokens; 0: all
    min_p: float = 0.0  # leave out tokens this many times less likely than the likeliest
    rollout_batch: int = 0  # completions sampled at once per GPU, but one group at least; 0: as many as memory holds

    learning_rate: float = 3e-4  # for the built-in student; 5e-5 up to 0.5B parameters, 1e-5 at 7B
    warmup_steps: int = 5  # steps of linear warm-up, then constant
    weight_decay: float = 0.0  # decoupled
    max_grad_norm: float = 1.0  # the gradient is scaled down to this norm; inf: never
    loss: str = "reverse_kl"  # "reverse_kl", "forward_kl", "jsd"; or "opd", the reverse KL from sampled tokens alone
    beta: float = 0.5  # with "jsd": weight of the teacher in the mixture, between 0 and 1
    loss_temperature: float = 1.0  # divides the logits of both sides in the loss
    aggregation: str = "token_mean"  # over all tokens of a minibatch; or "seq_mean": over each completion first

    param_offload: bool = False  # the idle model waits in CPU memory: the teacher, or the student in the teacher's turn
    device: str = "auto"  # "cuda": the GPUs above; "cpu"; "auto": the GPUs above if there are any, else the CPU
    dtype: str = "auto"  # "bf16" and "fp16" with fp32 master weights, "fp32"; "auto": bf16 on GPUs, fp32 on the CPU
    lora_rank: int = 0  # train adapters of this rank and leave the weights alone (LoRA); 0: train all weights
    lora_alpha: float = 32.0  # what adapters add is multiplied by lora_alpha / lora_rank
    lora_targets: str = "all-linear"  # layers that get one: "all-linear" (all but the head), or names, "q_proj,v_proj"
    load_bits: int = 0  # with LoRA: hold the weights in 8 or 4 bits (bitsandbytes); 0: as dtype says
    gradient_checkpointing: bool = False  # recompute activations: less memory, a third more time in the update
    optimizer_offload: str = "none"  # AdamW's state in CPU memory: "rollout", while completions are sampled; "always"
    memory_limit: float = 0.0  # GiB of each GPU that this run may take; 0: all that is free
    force: bool = False  # start although the plan says that memory will not suffice
    compile: bool = True  # torch.compile on GPUs: faster steps, some seconds in the first
    seed: int = 0  # of data order, sampling and the mix

    out_dir: str = "runs/gkd"  # checkpoints, metrics.jsonl, samples.jsonl, tensorboard/
    resume: str = "auto"  # "auto": newest complete checkpoint in out_dir; "none": start anew; or a checkpoint folder
    save_every: int = 20  # steps between checkpoints; the last step is always saved
    keep_checkpoints: int = 2  # older ones are deleted
    eval_every: int = 20  # steps between evaluations, also before the first; 0: never
    eval_examples: int = 256  # rows of eval_data used
    sample_every: int = 10  # steps between entries in samples.jsonl; 0: never
    print_samples: bool = False  # show them on the console too
    on_collapse: str = "warn"  # when a metric is outside GUARDS: "warn"; "stop" saves and ends the run; "off"
    collapse_steps: int = 10  # steps in a row that it has to be outside
    profile: int = 0  # steps to trace with the torch profiler, from the third on, into out_dir/profile/

    @property
    def off_policy(self) -> bool:
        """Whether there are steps with completions that the student did not sample."""
        return self.lmbda < 1 or self.lmbda_ramp > 1

    def __post_init__(self):
        rules.check(self)  # what holds for all scripts
        checks.at_least(self, 0, "teacher_top_k", "lmbda", "lmbda_ramp", "seq_kd_temperature")
        checks.at_least(self, 1, "n_server_workers")
        checks.above_zero(self, "loss_temperature", "teacher_patience")
        checks.one_of(self, loss=("reverse_kl", "forward_kl", "jsd", "opd"), aggregation=("token_mean", "seq_mean"))
        require(self.lmbda <= 1, f"lmbda = {self.lmbda}", "is a share, at most 1", "1 is on-policy in every step")
        require(0 < self.beta < 1, f"beta = {self.beta}", "must be between 0 and 1; the loss jumps at the ends",
                "set loss to forward_kl (0) or reverse_kl (1)")  # fmt: skip
        require(not self.off_policy or self.batch_size >= self.num_minibatches,
                f"num_minibatches = {self.num_minibatches}",
                f"must be at most the {self.batch_size} answers of an off-policy step", "lower it")  # fmt: skip
        if self.loss == "opd":
            require(not self.off_policy, f"loss = 'opd', lmbda = {self.lmbda}, lmbda_ramp = {self.lmbda_ramp}",
                    "its tokens must be the student's own", "set lmbda 1 and lmbda_ramp 0")  # fmt: skip
            require(self.loss_temperature == self.temperature, f"loss = 'opd', loss_temperature = "
                    f"{self.loss_temperature}", f"must be that of the samples, temperature = {self.temperature}",
                    "set both to the same")  # fmt: skip


# [copy]
def reward(completions: list[str], answers: list[str], **columns: list) -> list[float]:
    """Task reward in [0, 1], here: is the final answer right? It is reported, and has no part in the training.

    Only completions of rows that have an answer come here. `columns` holds the other columns of the data and
    `completion_tokens`. NaN means that a completion cannot be scored.
    """
    return rewards.math_match(completions, answers, **columns)


REWARDS = ((reward, 1.0),)  # (function, weight): the weighted sum is reported; the teacher alone trains


# [copy]
def gkd_loss(student, micro, cfg, num_sequences, num_tokens):
    """Share of the minibatch loss owed by one micro-batch; the shares add up exactly."""
    mask_mC = micro.completion_mask
    denominator = {"token_mean": num_tokens, "seq_mean": num_sequences}[cfg.aggregation]
    if cfg.loss == "opd":  # policy gradient: the advantage of a token is how much likelier it is to the teacher
        logps_mC, entropy_mC = student(*micro.tokens)
        if micro.old_logps is None:  # the first minibatch: no update since the rollout, so the ratio is 1
            micro.old_logps = logps_mC.detach()
        advantages_mC = micro.teacher_token_logps - micro.old_logps
        surrogate_mC = losses.token_ratio(logps_mC, micro.old_logps) * advantages_mC
        loss = losses.aggregate(-surrogate_mC, mask_mC, cfg.aggregation, denominator)
        values_mCR = torch.stack([-advantages_mC, entropy_mC, logps_mC, micro.teacher_token_logps], dim=-1).detach()
        names = ("reverse_kl", "entropy", "student_logps", "teacher_logps")
    else:  # Eq. 1, over the vocabulary
        weights_mC = losses.weights(mask_mC, cfg.aggregation, denominator)
        loss, values_mCR = student(*micro.tokens, weights_mC, *micro.said)
        loss, names = loss.squeeze(0), distillation.VALUES
    count = mask_mC.sum().clamp(min=1)
    means = (values_mCR * mask_mC[..., None]).sum((0, 1)) / count
    stats = dict(zip(names, means, strict=True))
    stats["loss"] = loss.detach() * num_tokens / count
    return loss, stats


# [copy]
def score(examples_P, batch, tokenizer, functions):
    """Completions as text, and their rewards [B], NaN where the data has no answer."""
    group_size = len(batch) // len(examples_P)
    completions_B = batch.texts(tokenizer)
    answers_B, columns = data.collate_columns(examples_P, group_size)
    columns["completion_tokens"] = batch.lengths.tolist()
    known = [i for i, answer in enumerate(answers_B) if answer is not None]
    rewards_B = torch.full((len(completions_B),), float("nan"))
    if known:
        picked = {name: [values[i] for i in known] for name, values in columns.items()}
        work = [completions_B[i] for i in known], [answers_B[i] for i in known], picked
        rewards_B[known] = rewards.score(functions, *work)[0]
    return completions_B, rewards_B


# [copy]
def load_teacher(cfg, where):
    """The teacher: a model on devices of this process, or the server that has it."""
    if cfg.teacher_url:
        return teacher_client.RemoteTeacher(cfg.teacher_url, top_k=cfg.teacher_top_k, temperature=cfg.loss_temperature,
                                            workers=cfg.n_server_workers, patience_s=cfg.teacher_patience)  # fmt: skip
    return teachers.LocalTeacher(cfg.teacher_model, where, cfg.dtype, temperature=cfg.loss_temperature,
                                 compile=cfg.compile, tokens_only=cfg.loss == "opd")  # fmt: skip


# [copy]
@torch.no_grad()
def evaluate(sampler, student, teacher, examples, grade, tokenizer, home, cfg):
    """Reward of greedy completions; divergence from the teacher on sampled ones, and loss on the answers, per token."""
    sums = {name: [0.0, 0] for name in ("reward", "reverse_kl", "forward_kl", "teacher_nll", "answer_nll")}

    def add(name, total, count):
        sums[name][0], sums[name][1] = sums[name][0] + float(total), sums[name][1] + count

    size = cfg.batch_size * cfg.group_size
    with distributed.together("evaluate"):
        teacher.onload()
        for part in [examples[i : i + size] for i in range(0, len(examples), size)]:
            prompts, numbers = [e.prompt_ids for e in part], [e.index for e in part]
            rewards_E = grade(part, sampler.generate(prompts, group_size=1, temperature=0))[1]
            add("reward", rewards_E.nansum(), int((~rewards_E.isnan()).sum()))
            batch = sampler.generate(prompts, group_size=1, temperature=cfg.temperature, prompt_numbers=numbers)
            for micro, stats in judge(student, batch.to(home), teacher, cfg):
                add("teacher_nll", -stats["teacher_logps"] * micro.num_tokens, micro.num_tokens)
                for name in {"reverse_kl", "forward_kl"} & stats.keys():
                    add(name, stats[name] * micro.num_tokens, micro.num_tokens)
            answered = [e for e in part if e.answer is not None]
            if answered:
                ids = offpolicy.answers(answered, tokenizer, cfg.max_new_tokens, teacher.shared)
                batch = offpolicy.batch([e.prompt_ids for e in answered], ids, sampler.pad_id, sampler.end_ids, home)
                for micro, stats in judge(student, batch, teacher, cfg):
                    add("answer_nll", -stats["student_logps"] * micro.num_tokens, micro.num_tokens)
        if cfg.param_offload:
            teacher.offload()
    totals = {name: [distributed.sum_over_ranks(x) for x in pair] for name, pair in sums.items()}
    return {f"eval_{name}": total / count for name, (total, count) in totals.items() if count}


# [copy]
def judge(student, batch, teacher, cfg):
    """Micro-batches of a batch, each with what `gkd_loss` reports of it."""
    (micros,) = batch.minibatches(1, cfg.micro_batch_tokens, student.packed)
    teacher.fill(micros, cfg.micro_batch_tokens)
    yield from memory.map_with_halving(micros, lambda micro: gkd_loss(student, micro, cfg, 1, 1)[1])


def main(cfg: Config, rewards=REWARDS) -> None:
    """Trains the student; every step is rollout, teacher, update, report and save. `rewards`: in place of REWARDS."""
    gpus = devices.distillation_layout(STUDENT_GPU_IDS, None, () if cfg.teacher_url else TEACHER_GPU_IDS, cfg.device)
    home = gpus.student[0]
    devices.limit_memory(gpus.all, cfg.memory_limit)
    resumed = checkpoint.find(cfg.out_dir, cfg.resume)
    planned = plan.require_fit(cfg, gpus)
    set_seed(cfg.seed)
    source = str(resumed or cfg.student_model)
    tokenizer, model = models.load_policy(source, home, cfg.dtype, cfg.gradient_checkpointing, lora.options(cfg))
    models.warn_learning_rate(cfg.learning_rate, model, 2e-4, "by distillation: 5e-5 (up to 0.5 B) to 1e-5 (7 B)")
    num_ids = model.get_output_embeddings().weight.shape[0]
    with checkpoint.save_on_outage(), distributed.together("load the teacher"):
        teacher = load_teacher(cfg, gpus.teacher)
        shared = teachers.agree(teacher, tokenizer, num_ids, cfg.allow_other_template)
        teachers.require_same(teacher, checkpoint.notes(resumed))
    if cfg.loss == "opd":
        student = logprobs.LogProbs(model, cfg.temperature, cfg.compile)
    else:
        beta = BETA.get(cfg.loss, cfg.beta)
        student = distillation.Divergences(model, cfg.loss_temperature, cfg.compile, beta, shared, teacher.head)
    optimizer = optim.AdamW(model, cfg.learning_rate, weight_decay=cfg.weight_decay, offload=cfg.optimizer_offload)
    reading = dict(max_prompt_tokens=cfg.max_prompt_tokens, apply_chat_template=cfg.apply_chat_template,
                   system_prompt=cfg.system_prompt)  # fmt: skip
    train_examples = data.load_examples(
        cfg.train_data, tokenizer, need_answer=cfg.off_policy and not cfg.seq_kd, **reading
    )
    eval_examples = []
    if cfg.eval_data and cfg.eval_every:
        held_out = data.load_examples(cfg.eval_data, tokenizer, split="test", need_answer=False, **reading)
        eval_examples = held_out[: cfg.eval_examples]
    teachers.require_shared([*train_examples, *eval_examples], shared)
    grade = partial(score, tokenizer=tokenizer, functions=rewards)
    sampler = rollout.Sampler(
        [model], end_ids=sources.end_token_ids(tokenizer, model), pad_id=tokenizer.pad_token_id,
        max_new_tokens=cfg.max_new_tokens, min_new_tokens=cfg.min_new_tokens, top_p=cfg.top_p, top_k=cfg.top_k,
        min_p=cfg.min_p, suppressed_ids=range(shared, num_ids), rollout_batch=cfg.rollout_batch, compile=cfg.compile,
    )  # fmt: skip
    sampler.require_fit([e.prompt_ids for e in train_examples])
    start, position = checkpoint.load(resumed, optimizer, cfg) if resumed else (0, 0)
    if start >= cfg.steps:
        print(f"{resumed} has all {cfg.steps} steps: raise steps to go on, or give another out_dir")
    prompts = data.PromptStream(train_examples, cfg.batch_size, cfg.seed, position)
    prompts.warn_if_changed(checkpoint.notes(resumed).get("data"))
    config.save(cfg, cfg.out_dir)
    if cfg.seq_kd:
        recipe = offpolicy.recipe(teacher, train_examples, cfg.seed, cfg.seq_kd_temperature, cfg.max_new_tokens)
        teacher_answers = offpolicy.TeacherAnswers(cfg.seq_kd_cache or cfg.out_dir, teacher, recipe)
    log = metrics.Log(cfg.out_dir, start, cfg.steps, gpus.all)
    watch = guards.Watch(GUARDS, cfg, log, start)
    budget = budgets.Budget(cfg.micro_batch_tokens, str(planned), release=sampler.release)
    student_memory = offload.Offloader(model)
    if cfg.param_offload:
        teacher.offload()
    done, position = start, prompts.position

    def save():
        with log.time_save(done):
            checkpoint.save(cfg.out_dir, done, model, tokenizer, optimizer, position, cfg,
                            notes={"data": prompts.fingerprint, "teacher": teacher.weights})  # fmt: skip

    with (
        checkpoint.stop_on_signal() as stop,
        profiling.trace(cfg.out_dir, cfg.profile) as profiled,
        checkpoint.save_on_outage(save),  # of the teacher; the step it was lost in is taken after a resume
    ):
        if log.evaluation_due(cfg):
            log.eval(start, **evaluate(sampler, student, teacher, eval_examples, grade, tokenizer, home, cfg))
        for step in range(start + 1, cfg.steps + 1):
            # 1. rollout: completions from the student; or off-policy ones, of the data or the teacher
            examples_P = prompts.next()
            prompts_P = [e.prompt_ids for e in examples_P]
            on_policy = offpolicy.draw(cfg.seed, step, offpolicy.share(step, cfg.lmbda, cfg.lmbda_ramp))
            if cfg.optimizer_offload == "rollout":
                with log.time("offload"):
                    log.add(offloaded_gib_optimizer=optimizer.offload())
            with log.time("rollout"):
                if on_policy:
                    batch = sampler.generate(prompts_P, group_size=cfg.group_size, temperature=cfg.temperature,
                                             seed=cfg.seed, step=step)  # fmt: skip
                elif cfg.seq_kd:
                    ids = teacher_answers.get(examples_P)
                    batch = offpolicy.batch(prompts_P, ids, sampler.pad_id, sampler.end_ids, home)
                else:
                    ids = offpolicy.answers(examples_P, tokenizer, cfg.max_new_tokens, shared)
                    batch = offpolicy.batch(prompts_P, ids, sampler.pad_id, sampler.end_ids, home)

            # 2. teacher: what it says of every completion token; meanwhile rewards, to be reported
            scoring = background.start(grade, examples_P, batch)
            batch.drop(batch.truncated & (cfg.truncated == "mask"))
            minibatches = batch.minibatches(cfg.num_minibatches, budget.tokens, student.packed, in_turn=False)
            micros = list(chain(*minibatches))
            if cfg.loss == "opd":
                with log.time("logprobs"):  # the first minibatch finds its old log-probs in its own forward pass
                    logprobs.fill(chain(*minibatches[1:]), "old_logps", student, home, budget.tokens)
            if cfg.param_offload:
                with log.time("offload"):
                    sampler.release()
                    log.add(offloaded_gib_student=student_memory.offload())
                    teacher.onload()
            with log.time("teacher"):
                teacher.fill(micros, budget.tokens)
            if cfg.param_offload:
                with log.time("offload"):
                    log.add(offloaded_gib_teacher=teacher.offload())
                    student_memory.onload()
            with log.time("score"):
                completions, rewards_B = scoring.result()
            log.add_batch(batch)
            log.add(on_policy=float(on_policy))
            if on_policy and not rewards_B.isnan().all():
                log.add_rewards(rewards_B, {})

            # 3. update: num_minibatches optimizer steps, each summed over micro-batches
            optimizer.learning_rate = cfg.learning_rate * optim.warmup(step, cfg.warmup_steps)
            if cfg.optimizer_offload == "rollout":
                with log.time("offload"):
                    optimizer.onload()
            with log.time("update"):
                for minibatch in minibatches:
                    num_sequences = sum(micro.num_trained for micro in minibatch)
                    num_tokens = sum(micro.num_tokens for micro in minibatch)
                    log.add(skipped_updates=float(num_sequences == 0))
                    if num_sequences == 0:  # everything masked: no step, rather than 0 / 0
                        continue
                    for micro in budget.passes(minibatch, optimizer, log):  # again in halves, if memory runs out
                        with budget.room():
                            loss, stats = gkd_loss(student, micro, cfg, num_sequences, num_tokens)
                            optimizer.scale(loss).backward()
                            log.add(micro.num_tokens, **stats)
                        loss = None  # after a failure its graph would hold the memory that is needed now
                    log.add(grad_norm=optimizer.step(cfg.max_grad_norm))
                with checkpoint.keep_batch(cfg.out_dir, step, chain(*minibatches)):
                    log.add(overflows=optimizer.check())  # stops at a loss or gradient that is not finite
            done, position = step, prompts.position

            # 4. report and save
            collapsed = watch.see(log.end_step(step, learning_rate=optimizer.learning_rate))
            if cfg.sample_every and step % cfg.sample_every == 0:
                log.samples(step, examples_P, completions, rewards_B.tolist(), cfg.print_samples)
            if eval_examples and (step % cfg.eval_every == 0 or step == cfg.steps):
                log.eval(step, **evaluate(sampler, student, teacher, eval_examples, grade, tokenizer, home, cfg))
            stopping = bool(stop) or collapsed  # read once: a signal may come while the checkpoint is written
            if step % cfg.save_every == 0 or step == cfg.steps or stopping:
                save()
            profiled()
            if stopping:
                break
    log.close()
    print(f"student saved in {checkpoint.newest(cfg.out_dir)}")
    watch.leave()


if __name__ == "__main__":
    main(config.parse(Config))
