"""Measures the speed of the training step as users run it, with random weights of a known shape, on a GPU or the CPU.

Run:   python scripts/dev/benchmark.py --setting decode update --out speed.json
       python scripts/dev/benchmark.py --setting qwen0.5b-8x8 --new_tokens 512 -- --compile false
                                                                     options after "--" go to gspo.py
       python scripts/dev/benchmark.py --setting cpu-smollm2 --baseline generate
                                                                     beside transformers' model.generate
       python scripts/dev/benchmark.py --setting qwen0.5b-8x8 --peer trl
                                                                     beside TRL's GRPOTrainer, if installed
       python scripts/dev/benchmark.py --setting qwen0.5b-8x8 --peer trl_vllm trl_vllm_sleep --vllm_path FOLDER
                                                                     beside TRL that samples with vLLM
       python scripts/dev/benchmark.py --setting gkd-0.5b-1.5b --peer trl trl_distillation
                                                                     distillation with gkd/gkd.py

A cycle is one step of gspo/gspo.py, or of gkd/gkd.py if the setting has a teacher: rollout, scores or teacher, and
num_minibatches optimizer steps. Times are medians over the cycles after --warmup. The process is stopped after the
last cycle, before it writes a checkpoint. Columns:
  cycle, rollout, score, teacher, logprobs, update   seconds from metrics.jsonl: the sum of the phases, and each phase
  wall          seconds between lines of that file, time between the phases included; polled every 20 ms
  decode/s      completion tokens / seconds of the rollout, the forward pass of the prompts included
  tokens/s      completion tokens / seconds of the cycle; seq/s counts completions; both are sums over all GPUs
  roofline      decode/s as a share of sequences * bandwidth / bytes. One more token for every sequence requires
                reading all weights once (a tied embedding counts as the head), and the keys and values of all live
                tokens, those of a prompt once per group; in the model's dtype, mean over the steps, so fixed lengths
                only; states of layers of linear attention are read and written; each rank reads for its sequences
  MFU           FLOPs / seconds of the update / ranks / the card's peak FLOP/s in bf16. A forward and backward pass
                over T = prompt + completion tokens takes 6 * (parameters without embedding and head) * all tokens
                + 6 * head parameters * completion tokens + 6 * layers * heads * head_dim * (sum of T^2 over the
                sequences), with the experts that a token goes through and the layers of attention alone;
                recomputation does not count, and a prompt counts once per completion, though it is computed once
                per group. A teacher, whose head is applied in the update, adds
                2 * parameters of that head * completion tokens
  length, GiB   mean tokens of a completion; peak memory allocated by tensors on the fullest GPU, after --warmup
  mismatch      rollout_mismatch of metrics.jsonl: the rollout's log-probabilities beside those of the update
  planned       what common/planning/plan.py predicts for that peak
  first, start  seconds of the first step (compilation, graph capture), and of the process before it
With a teacher, on one GPU and without offloading, also:
  above resident   GiB less what is always allocated: for every student parameter its weight, the fp32 master of a
                half-precision weight, and Adam's two states (gkd.py in bf16: 2 + 4 + 8 bytes; TRL with fp32 weights:
                4 + 8, with bf16 weights: 2 + 4); and the teacher's weights (2 bytes each in bf16). The rest is
                gradients, activations, logits, the loss, keys and values, and temporaries of the optimizer
  loss GiB      peak during the forward passes of student and teacher and the backward pass over a cycle's completions,
                less what was allocated before the first of them, when there are no gradients yet; largest of the
                cycles after --warmup. Generation and the optimizer step do not count. The same code measures both
  at once       most tokens, prompts included, in one forward pass with gradient; loss GiB grows with it
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import multiprocessing
import operator
import os
import runpy
import shlex
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import XLMRobertaConfig, XLMRobertaModel

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]
from benchmark_base import (
    CARDS,
    SHAPES,
    Shape,
    as_options,
    attempt,
    card,
    decode_bytes,
    machine,
    make_model,
    make_tokenizer,
    markdown,
    pick_device,
    require_vllm,
    run,
    shape_of,
    shown,
    vllm_environment,
    write_prompts,
)

from common.base import config, devices, storage
from common.base.checks import require
from common.model import models, sources
from common.planning import layouts, plan
from common.run import metrics
from common.tasks import data
from common.training import optim

# options of benchmark_trl.py, or of benchmark_trl_gkd.py if the setting has a teacher
PEERS = {"trl": [], "trl_bf16": ["--bf16_weights"], "trl_vllm": ["--vllm", "awake"],
         "trl_vllm_sleep": ["--vllm", "sleep"], "trl_distillation": ["--trainer", "distillation"]}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is measured; every field is a command-line option. Distillation ignores kl_coef."""

    model: str = "qwen0.5b"  # a key of SHAPES: random weights of that shape; toy: the built-in policy
    batch_size: int = 8  # prompts per cycle
    group_size: int = 8  # completions per prompt
    prompt_tokens: int = 128  # tokens of every prompt
    new_tokens: int = 256  # tokens of every completion; their mean if lengths is geometric, their limit if natural
    lengths: str = "fixed"  # or "geometric": every token is the last with the same probability; "natural" for toy
    shortest: int = 8  # least geometric length
    longest: int = 1024  # largest geometric length
    num_minibatches: int = 4  # optimizer steps per cycle
    kl_coef: float = 0.001  # above 0: with a reference model
    device: str = "auto"  # cuda, cpu, or auto
    dtype: str = "auto"  # bf16, fp16, fp32, or auto: bf16 on a GPU
    peer_sequences: int = 0  # sequences in one forward of the peer; 0: all of an optimizer step
    teacher: str = ""  # shape of a teacher with the same vocabulary; the model is then the student of gkd.py

    def __post_init__(self):
        known, allowed = (*SHAPES, "toy"), ("natural",) if self.model == "toy" else ("fixed", "geometric")
        require(self.model in known, f"model = {self.model!r}", f"must be one of {known}", "choose one of these")
        require(self.lengths in allowed, f"model = {self.model!r}, lengths = {self.lengths!r}",
                f"must be one of {allowed} for this model", "choose one of these")  # fmt: skip
        fitting = [name for name in SHAPES if self.model in SHAPES and SHAPES[name][1] == SHAPES[self.model][1]]
        require(not self.teacher or self.teacher in fitting, f"model = {self.model!r}, teacher = {self.teacher!r}",
                f"must have the vocabulary of the student: one of {fitting}", "choose others")  # fmt: skip
        require(self.lengths != "geometric" or self.shortest < self.new_tokens < self.longest,
                f"new_tokens = {self.new_tokens}", f"is the mean of lengths from {self.shortest} to {self.longest}",
                "choose one between")  # fmt: skip


SETTINGS = {
    "qwen0.5b-8x8": Setting(),
    "qwen0.5b-32x8": Setting(batch_size=32),
    "smollm2-8x8": Setting("smollm2"),
    "decode": Setting(batch_size=32, prompt_tokens=256, num_minibatches=1, kl_coef=0.0, peer_sequences=32),
    "update": Setting("qwen1.5b", batch_size=32, kl_coef=0.0, peer_sequences=16),
    "gpus-0.5b": Setting(num_minibatches=1, kl_coef=0.0),  # 64 x 256 tokens: batch_size 8 for each GPU
    "gpus-1.5b": Setting("qwen1.5b", num_minibatches=1, kl_coef=0.0),
    "gpus-7b": Setting("qwen7b", num_minibatches=1, kl_coef=0.0),
    "hybrid-0.8b": Setting("qwen3.5-0.8b", kl_coef=0.0),
    "moe-30b-a3b-6": Setting("qwen3-30b-a3b-6", kl_coef=0.0),
    "mixed-lengths": Setting(lengths="geometric"),
    "cpu-toy": Setting("toy", 16, new_tokens=128, lengths="natural", kl_coef=0.0, device="cpu"),
    "cpu-smollm2": Setting("smollm2", 1, 8, 32, 32, num_minibatches=2, kl_coef=0.0, device="cpu"),
    "tiny": Setting("tiny", 2, 4, 8, 8, num_minibatches=2),
    # 384 tokens of 151,936 fp32 logits are 0.23 GB, and GKDTrainer holds about 17 times as much per sequence
    "gkd-0.5b-1.5b": Setting(batch_size=64, group_size=1, num_minibatches=1, peer_sequences=8, teacher="qwen1.5b"),
    "gkd-tiny": Setting("tiny", 4, 2, 8, 8, num_minibatches=2, peer_sequences=2, teacher="tiny-teacher"),
}
WATCHED = "--run_watched"  # first argument of the child process that measures memory
LOSS = dict(loss="jsd", beta=0.5, lmbda=1.0)  # of the distillation; options after "--" override it


def make_embedder(work_dir: Path) -> Path:
    """Folder with random weights in the shape of BAAI/bge-m3 (XLM-RoBERTa large), cached in `work_dir`."""
    vocabulary, folder = 250002, work_dir / "models" / f"bge-m3-{transformers.__version__}"
    if folder.is_dir():
        return folder
    torch.manual_seed(0)
    tokenizer = make_tokenizer(vocabulary)
    cfg = XLMRobertaConfig(
        vocab_size=vocabulary, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
        max_position_embeddings=8194, pad_token_id=1, type_vocab_size=1,
    )  # fmt: skip
    tokenizer.pad_token = "w1"  # positions start after the pad id, which must be the config's
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
        for part in (XLMRobertaModel(cfg).half(), tokenizer):
            part.save_pretrained(Path(unfinished) / folder.name)
        storage.publish(Path(unfinished) / folder.name, folder)
    return folder


# ---- formulas ----


def update_flops(shape: Shape, sequences: int, prompt_tokens: float, new_tokens: float, variance: float = 0.0) -> float:
    """FLOPs of a forward and backward pass over a rollout, without recomputation.

    A weight costs 2 FLOPs per token forward and 4 backward (two gradients). The head is applied to completion tokens
    only. In attention, Q K^T and P V take 2 T^2 d each per layer (d = heads * head_dim); the causal half of both is
    2 T^2 d forward, and 6 T^2 d with the backward pass. Recurrences of linear attention do not count.

    Args:
        shape: of the model.
        sequences: completions.
        prompt_tokens: per sequence.
        new_tokens: per sequence, mean.
        variance: of new_tokens between the sequences.
    """
    weights = (shape.body - shape.idle) * (prompt_tokens + new_tokens) + shape.head * new_tokens
    squares = (prompt_tokens + new_tokens) ** 2 + variance
    return 6 * sequences * (weights + shape.layers * shape.attention_width * squares)


def resident_bytes(student: int, teacher: int, weight_itemsize: int, state_itemsize: int, teacher_itemsize: int) -> int:
    """Bytes that distillation keeps allocated: weights, masters and Adam's states, not gradients.

    Args:
        student: number of parameters, all trained.
        teacher: number of parameters.
        weight_itemsize: bytes of a student weight.
        state_itemsize: bytes of an optimizer state; smaller weights have a master of that size.
        teacher_itemsize: bytes of a teacher weight.
    """
    masters = state_itemsize if weight_itemsize < state_itemsize else 0
    return student * (weight_itemsize + masters + 2 * state_itemsize) + teacher * teacher_itemsize


def add_memory(numbers: dict[str, Any], resident: int) -> None:
    """Adds "resident_gib" and "above_resident_gib" to `numbers`; the latter is None without "memory_gib"."""
    peak, numbers["resident_gib"] = numbers["memory_gib"], resident / devices.GIB
    numbers["above_resident_gib"] = None if peak is None else peak - numbers["resident_gib"]


def summarise(
    lines: list[dict],
    setting: Setting,
    cfg: dict,
    shape: Shape,
    bandwidth: float | None,
    peak: float | None,
    teacher: Shape | None = None,
    ranks: int = 1,
) -> dict[str, Any]:
    """The reported numbers of a run; None for unknown ones.

    Args:
        lines: of metrics.jsonl, one per counted step.
        setting: what was measured.
        cfg: config.json of the run.
        shape: of the model.
        bandwidth: of the memory, bytes per second, if known.
        peak: FLOP/s of the card, if known.
        teacher: its shape, if there is one.
        ranks: processes, each on a GPU of its own, that share the prompts.
    """
    sequences = cfg["batch_size"] * cfg["group_size"]
    tokens = [sequences * line["completion_length"] for line in lines]
    numbers = {name: statistics.median(line[name] for line in lines) for name in lines[0] if name.startswith("seconds")}
    length = numbers["completion_length"] = statistics.mean(tokens) / sequences
    for name, seconds in (("decode_tokens_per_second", "seconds_rollout"), ("tokens_per_second", "seconds")):
        numbers[name] = statistics.median(n / line[seconds] for n, line in zip(tokens, lines, strict=True))
    numbers["sequences_per_second"] = statistics.median(sequences / line["seconds"] for line in lines)
    mismatches = [line["rollout_mismatch"] for line in lines if "rollout_mismatch" in line]
    numbers["rollout_mismatch"] = statistics.median(mismatches) if mismatches else None
    numbers["memory_gib"] = max((gib for line in lines for gib in line["memory_gib"]), default=None)
    numbers |= dict.fromkeys(("roofline_tokens_per_second", "roofline_share", "update_flops", "mfu"))
    itemsize = sources.pick_dtype(cfg["dtype"], pick_device(cfg["device"])).itemsize
    if bandwidth and setting.lengths == "fixed":
        sizes = cfg["batch_size"] // ranks, cfg["group_size"], setting.prompt_tokens, setting.new_tokens
        numbers["roofline_tokens_per_second"] = sequences * bandwidth / decode_bytes(shape, *sizes, itemsize)
        numbers["roofline_share"] = numbers["decode_tokens_per_second"] / numbers["roofline_tokens_per_second"]
    if setting.lengths != "natural":
        variance = (length - setting.shortest) ** 2 if setting.lengths == "geometric" else 0.0
        flops = update_flops(shape, sequences, setting.prompt_tokens, length, variance)
        flops *= cfg.get("epochs", 1)  # absent in distillation
        if teacher:
            flops += 2 * sequences * length * teacher.head
        seconds = ranks * numbers["seconds_update"]
        numbers["update_flops"], numbers["mfu"] = flops, flops / seconds / peak if peak else None
    if teacher:
        add_memory(numbers, resident_bytes(shape.parameters, teacher.parameters, itemsize, 4, itemsize))
        spread = any(len(line["memory_gib"]) > 1 for line in lines)  # the largest peak is then that of one GPU
        numbers["above_resident_gib"] = None if spread else numbers["above_resident_gib"]
        seen = [line["loss_memory_gib_max"] for line in lines if "loss_memory_gib_max" in line]
        numbers["loss_memory_gib"] = max(seen, default=None)
        in_step = -(-sequences // cfg["num_minibatches"])
        fitting = max(1, cfg["micro_batch_tokens"] // (setting.prompt_tokens + setting.new_tokens))
        numbers["forward_tokens"] = forward_tokens(setting, min(in_step, fitting))
    return numbers


def forward_tokens(setting: Setting, sequences: int) -> int | None:
    """Tokens of this many sequences; None if their lengths vary."""
    return sequences * (setting.prompt_tokens + setting.new_tokens) if setting.lengths == "fixed" else None


# ---- memory of the loss ----


class LossMemory:
    """Peak during forward and backward passes above what was allocated before them; the same code in both scripts.

    Attributes:
        source: torch.cuda or an object with its memory functions; measures the current device.
        highest: peak in bytes between the last call of `overall` and the last reset of the device's counter.
    """

    def __init__(self, source: Any = torch.cuda):
        self.source, self.highest, self._before, self._peak = source, 0, None, 0

    def open(self) -> None:
        """Starts measuring; the first call since `take` also records what was allocated before the passes."""
        self.highest = max(self.highest, self.source.max_memory_allocated())
        self.source.reset_peak_memory_stats()
        if self._before is None:
            self._before = self.source.memory_allocated()

    def close(self) -> None:
        """Stops measuring until the next `open`."""
        self._peak = max(self._peak, self.source.max_memory_allocated())

    def take(self) -> float:
        """Peak in GiB between `open` and `close`, above what was allocated at the first `open`; resets both."""
        gib = (self._peak - self._before) / 2**30
        self._before, self._peak = None, 0
        return gib

    def overall(self) -> float:
        """Peak in GiB since the last call."""
        gib = max(self.highest, self.source.max_memory_allocated()) / 2**30
        self.highest = 0
        self.source.reset_peak_memory_stats()
        return gib


@contextlib.contextmanager
def watching(memory: LossMemory) -> Iterator[None]:
    """Patches a script of gkd/ to log "loss_memory_gib_max" if it runs on one GPU.

    Covers the phases "teacher" and "update" without `AdamW.step`. The reported peak memory stays the same, although
    the counter is reset more often.
    """
    timed, step, peaks, inside = metrics.Log.time, optim.AdamW.step, devices.peak_memory_gib, False

    @contextlib.contextmanager
    def time_phase(log: metrics.Log, phase: str) -> Iterator[None]:
        nonlocal inside
        inside = phase in ("teacher", "update") and [gpu.type for gpu in log.gpus] == ["cuda"]
        if inside:
            memory.open()
        with timed(log, phase):
            yield
        if inside and phase == "teacher":
            memory.close()
        elif inside:
            log.add(loss_memory_gib_max=memory.take())
        inside = False

    def take_step(optimizer: optim.AdamW, *arguments: Any) -> torch.Tensor:
        if inside:
            memory.close()
        norm = step(optimizer, *arguments)
        if inside:
            memory.open()  # for the passes of the next minibatch
        return norm

    def peak_memory_gib(gpus: list[torch.device]) -> list[float]:
        return [round(memory.overall(), 3)] if [gpu.type for gpu in gpus] == ["cuda"] else peaks(gpus)

    metrics.Log.time, optim.AdamW.step, devices.peak_memory_gib = time_phase, take_step, peak_memory_gib
    try:
        yield
    finally:
        metrics.Log.time, optim.AdamW.step, devices.peak_memory_gib = timed, step, peaks


def run_watched(script: str, arguments: list[str]) -> None:
    """Runs a script of gkd/ as its own main program, `watching` its memory."""
    sys.argv = [script, *arguments]
    with watching(LossMemory()):
        runpy.run_path(script, run_name="__main__")


def planned_gib(script: str, arguments: list[str], ranks: int, setting: Setting, ran: dict) -> float | None:
    """Peak of the fullest GPU in GiB as planned by common/planning/plan.py; None on a CPU.

    Args:
        script: that was measured.
        arguments: of it.
        ranks: processes.
        setting: what was measured.
        ran: config.json of the run, with the micro_batch_tokens that it chose.
    """
    if pick_device(setting.device).type == "cpu":
        return None
    module, cfg = layouts.load(script, arguments)
    roles = layouts.all_ranks(module, cfg, ranks)
    planned = plan.of(cfg, roles, ranks=ranks, prompt_tokens=setting.prompt_tokens)
    limit = cfg.memory_limit * devices.GIB or torch.cuda.get_device_properties(0).total_memory
    planned = planned.for_capacity(limit).with_options(micro_batch_tokens=ran["micro_batch_tokens"])
    return max(map(planned.peak, planned.gpus)) / devices.GIB


# ---- running ----


def read_steps(out_dir: Path) -> list[dict]:
    """Lines of the training steps that a run has logged so far."""
    path = out_dir / "metrics.jsonl"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in lines if "seconds" in line]  # not those of evaluations


def measure(
    name: str,
    setting: Setting,
    args: argparse.Namespace,
    extra: list[str],
    result: dict[str, Any],
    save: Callable[[], None],
) -> dict[str, Any]:
    """Measures a setting and its baselines and peers; one of these that fails leaves {"error": text}.

    Args:
        name: of the setting.
        setting: what to measure.
        args: of the command line.
        extra: arguments for our script.
        result: gets what our script, "generate" and each peer measured.
        save: called after each of them, so that a run that is cut off keeps what it has measured.

    Returns:
        The result.
    """
    (Path(args.work_dir) / "runs").mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=Path(args.work_dir) / "runs"))
    shortest, longest = {"fixed": (setting.new_tokens,) * 2, "geometric": (setting.shortest, setting.longest),
                         "natural": (0, setting.new_tokens)}[setting.lengths]  # fmt: skip
    policy, prompts, teacher, script = "toy", "toy", "", args.script or str(ROOT / "gspo" / "gspo.py")
    if setting.lengths != "natural":
        vocabulary = SHAPES[setting.model][1]
        num_ends = round(vocabulary / (setting.new_tokens - shortest)) if setting.lengths == "geometric" else 1
        policy, prompts = str(make_model(setting.model, num_ends, Path(args.work_dir))), str(folder / "prompts.jsonl")
        write_prompts(Path(prompts), setting.batch_size * (args.steps + 1), setting.prompt_tokens, vocabulary)
    if setting.teacher:
        teacher = str(make_model(setting.teacher, 1, Path(args.work_dir)))
        script = args.script or str(ROOT / "gkd" / "gkd.py")
    own = dict(student_model=policy, teacher_model=teacher) if teacher else dict(policy_model=policy)
    options = own | dict(
        train_data=prompts, eval_data="", out_dir=folder / "run", resume="none",
        steps=args.steps + 1, save_every=args.steps + 1, eval_every=0, sample_every=0,  # stopped before it saves
        batch_size=setting.batch_size, group_size=setting.group_size, num_minibatches=setting.num_minibatches,
        max_prompt_tokens=max(512, setting.prompt_tokens), max_new_tokens=longest, min_new_tokens=shortest,
        learning_rate=1e-6, device=setting.device, dtype=setting.dtype,
    )  # fmt: skip
    if not teacher:
        options["kl_coef"] = setting.kl_coef
    twice = [text for text in extra if text.lstrip("-").partition("=")[0].replace("-", "_") in options]
    require(not twice, f"{' '.join(twice)} after --", "benchmark.py sets it", "use the options before --")
    if args.embedder:
        options["similarity_model"] = make_embedder(Path(args.work_dir))
    watched = [str(Path(__file__).resolve()), WATCHED] if teacher else []
    rest = [*as_options(LOSS), *extra] if teacher else extra
    command = [sys.executable, *watched, str(Path(script).resolve()), *as_options(options), *rest]
    arrivals: list[float] = []

    def done() -> bool:
        arrivals.extend([time.monotonic()] * (len(read_steps(folder / "run")) - len(arrivals)))
        return len(arrivals) >= args.steps

    caches = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR") if args.cold else ()
    began = time.monotonic()
    run(command, folder, done, args.timeout, args.ranks, **{name: str(folder / name.lower()) for name in caches})
    lines, cfg = read_steps(folder / "run")[: args.steps], json.loads((folder / "run" / "config.json").read_bytes())
    shape, (bandwidth, peak) = shape_of(policy), CARDS.get(card(setting.device), (None, None))
    other = shape_of(teacher) if teacher else None
    given = command[command.index(str(Path(script).resolve())) + 1 :]
    planned = planned_gib(script, given, args.ranks, setting, cfg)
    rates = args.bandwidth or bandwidth, args.flops or peak
    numbers = summarise(lines[args.warmup :], setting, cfg, shape, *rates, other, args.ranks)
    ends = arrivals[args.warmup - 1 : args.steps]
    numbers["seconds_wall"] = statistics.median(map(operator.sub, ends[1:], ends))
    numbers["seconds_first_step"], numbers["planned_gib"] = lines[0]["seconds"], planned
    numbers["seconds_start"] = arrivals[0] - began - lines[0]["seconds"]
    result |= {"command": shlex.join(command), "config": cfg, "shape": vars(shape), "numbers": numbers, "lines": lines}
    result |= {"teacher_shape": vars(other)} if other else {}
    save()
    if args.baseline:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:  # frees its memory when it ends
            result["generate"] = attempt(pool.submit(time_generate, cfg, prompts, shortest).result)
        save()
    for peer in args.peer:
        result[peer] = attempt(run_peer, peer, setting, cfg, shortest, args, folder)
        if teacher and "error" not in result[peer]:
            width = getattr(torch, result[peer]["fields"]["model_init_kwargs"]["dtype"]).itemsize
            theirs = getattr(torch, result[peer]["fields"]["teacher_model_init_kwargs"]["dtype"]).itemsize
            add_memory(result[peer], resident_bytes(shape.parameters, other.parameters, width, width, theirs))
            at_once = result[peer]["fields"]["per_device_train_batch_size"]
            result[peer]["forward_tokens"] = forward_tokens(setting, at_once)
        save()
    return result


def time_generate(cfg: dict, prompts: str, min_new_tokens: int) -> dict[str, float]:
    """Completion tokens per second of transformers' model.generate on one batch, sampled as in our script."""
    device = pick_device(cfg["device"])
    tokenizer, model = models.load_policy(cfg.get("student_model") or cfg["policy_model"], device, cfg["dtype"])
    examples = data.load_examples(prompts, tokenizer, cfg["max_prompt_tokens"])[: cfg["batch_size"]]
    padded = tokenizer.pad({"input_ids": [example.prompt_ids for example in examples]}, return_tensors="pt").to(device)
    inputs = {name: padded[name].repeat_interleave(cfg["group_size"], 0) for name in ("input_ids", "attention_mask")}
    ends, speeds = sources.end_token_ids(tokenizer, model), []
    for _ in range(3):
        devices.synchronize([device])
        began = time.perf_counter()
        ids = model.eval().generate(
            **inputs, do_sample=True, temperature=cfg["temperature"], top_k=0, top_p=1.0, eos_token_id=ends,
            pad_token_id=tokenizer.pad_token_id, min_new_tokens=min_new_tokens, max_new_tokens=cfg["max_new_tokens"],
        )  # fmt: skip
        devices.synchronize([device])
        seconds = time.perf_counter() - began
        is_end = torch.isin(ids[:, inputs["input_ids"].shape[1] :], torch.tensor(ends, device=device)).long()
        speeds.append(int((is_end.cumsum(1) - is_end == 0).sum()) / seconds)  # up to and including the first end token
    return {"tokens_per_second": statistics.median(speeds[1:]), "first_tokens_per_second": speeds[0]}


def run_peer(
    peer: str, setting: Setting, cfg: dict, min_new_tokens: int, args: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    """Medians of the peer's script with the models, prompts, sizes and number of cycles of a run.

    Memory measured per cycle is reported by its maximum, as on our side.

    Raises:
        ValueError: an option of our side that the peer does not support.
    """
    script, own = "benchmark_trl.py", ("policy_model", "kl_coef")
    if setting.teacher:
        script, own = "benchmark_trl_gkd.py", ("student_model", "teacher_model")
        betas = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": cfg["beta"]}
        given = {name: cfg[name] for name in ("loss", "lmbda", "temperature", "loss_temperature")}
        same = given["loss"] in betas and given["lmbda"] == given["temperature"] == given["loss_temperature"] == 1
        require(same, ", ".join(f"{name} = {value!r}" for name, value in given.items()), f"the peer is measured with "
                f"the losses {tuple(betas)}, on-policy, at temperature 1", "leave out --peer")  # fmt: skip
    names = (*own, "train_data", "batch_size", "group_size", "num_minibatches", "max_new_tokens", "device", "dtype")
    out = folder / f"{peer}.json"
    options = {name: cfg[name] for name in names} | dict(min_new_tokens=min_new_tokens, cycles=args.steps, out=out)
    options |= {"sequences": setting.peer_sequences, "arguments": args.peer_arguments}
    if setting.teacher:
        options["beta"] = betas[cfg["loss"]]
    command = [sys.executable, str(ROOT / "scripts" / "dev" / script), *as_options(options), *PEERS[peer]]
    (folder / peer).mkdir()
    one_gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]  # TRL must see one GPU only
    more = vllm_environment(args.vllm_path) if "--vllm" in PEERS[peer] else {}
    run(command, folder / peer, out.exists, args.timeout, CUDA_VISIBLE_DEVICES=one_gpu, **more)
    measured = json.loads(out.read_text(encoding="utf-8"))
    for name in ("seconds", "seconds_rollout", "completion_length"):
        measured[name] = statistics.median(measured[name][args.warmup :])
    for name in {"memory_gib", "loss_memory_gib"} & measured.keys():
        if isinstance(measured[name], list):  # one per cycle
            measured[name] = max(measured[name][args.warmup :])
    return {"command": shlex.join(command), **measured}


# ---- command line and report ----


def report(results: list[dict]) -> str:
    """Markdown tables of the numbers and of the comparisons; settings with a teacher have more columns."""
    taught = any(result["setting"]["teacher"] for result in results)
    names = ("wall", "rollout", "score", *["teacher"] * taught, "similarity", "logprobs", "update")
    phases = {phase: f"seconds_{phase}" for phase in names}
    memory = {"GiB": "memory_gib"}
    if taught:
        memory |= {"above resident": "above_resident_gib", "loss GiB": "loss_memory_gib", "at once": "forward_tokens"}
    columns = {"cycle": "seconds", **phases, "decode/s": "decode_tokens_per_second", "roofline": "roofline_share",
               "tokens/s": "tokens_per_second", "seq/s": "sequences_per_second", "MFU": "mfu",
               "length": "completion_length", "mismatch": "rollout_mismatch", **memory, "planned": "planned_gib",
               "first": "seconds_first_step", "start": "seconds_start"}  # fmt: skip
    forms = {"decode/s": ",.0f", "tokens/s": ",.0f", "roofline": ".1%", "MFU": ".1%", "at once": ",.0f"}
    rows = [["setting", *columns]]
    compared = [["setting", "beside", "cycle", "rollout", "decode/s", "length", *memory, "ours is faster"]]
    compared[0] += ["its loss GiB / ours"] * taught
    for result in results:
        ours = result.get("numbers", {})
        values = [shown(ours.get(key), forms.get(title, ".3g")) for title, key in columns.items()]
        rows.append([result["name"], *(["failed", *values[1:]] if "error" in result else values)])
        for other in (name for name in ("generate", *PEERS) if name in result):
            their = result[other]
            times = "failed"
            if "error" not in their:
                per_cycle, per_second = their.get("seconds"), their.get("tokens_per_second")
                ratio = per_cycle / ours["seconds_wall"] if per_cycle else ours[columns["decode/s"]] / per_second
                times = f"{ratio:.2f} x" + (" (cycle, wall)" if per_cycle else " (decode/s)")
            values = [shown(their.get(key)) for key in ("seconds", "seconds_rollout")]
            values += [shown(their.get("tokens_per_second"), ",.0f")]
            values += [shown(their.get("completion_length"))]
            values += [shown(their.get(key), forms.get(title, ".3g")) for title, key in memory.items()]
            lost, kept = their.get("loss_memory_gib"), ours.get("loss_memory_gib")
            less = [f"{lost / kept:.2f} x" if lost and kept else "-"] * taught
            compared.append([result["name"], other, *values, times, *less])
    return "\n\n".join(markdown(table) for table in (rows, compared) if len(table) > 1)


def parse(argv: list[str]) -> tuple[argparse.Namespace, dict[str, Setting], list[str]]:
    """Parses the command line: options, settings by name, and the arguments after "--"."""
    own, extra = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    add = parser.add_argument
    add("--setting", nargs="+", default=["qwen0.5b-8x8"], choices=SETTINGS, metavar="NAME",
        help=f"settings to measure, in this order: {', '.join(SETTINGS)} (default: qwen0.5b-8x8)")  # fmt: skip
    add("--steps", type=int, default=6, help="cycles, including --warmup (default: %(default)s)")
    add("--warmup", type=int, default=2, help="first cycles that are not counted (default: %(default)s)")
    add("--out", default="", help="JSON file for all measurements, updated after each process")
    add("--baseline", choices=["generate"], help="also time transformers' model.generate")
    add("--peer", nargs="+", default=[], choices=PEERS, help="also time TRL's GRPOTrainer, or with a teacher its "
        "GKDTrainer: trl keeps fp32 weights under bf16 autocast, its default; trl_bf16 has weights and optimizer "
        "states in bf16; trl_vllm samples with vLLM on the same GPU; trl_vllm_sleep, too, and vLLM frees its memory "
        "for the update; trl_distillation is its DistillationTrainer, with fp32 weights")  # fmt: skip
    add("--vllm_path", default="", help="folder with vLLM and what it needs, if not installed here; for vLLM's process")
    add("--peer_arguments", default="{}", help="JSON of fields to override in GRPOConfig (or GKDConfig, ...)")
    add("--bandwidth", type=float, help="memory bandwidth in bytes per second, for an unknown card")
    add("--flops", type=float, help="peak FLOP/s in the dtype used, for such a card")
    add("--ranks", type=int, default=1, help="processes, one per GPU, for a script that runs under torchrun")
    add("--cold", action="store_true", help="start with empty caches of compiled code, for the columns first and start")
    add("--script", default="", help="script to measure (default: gspo/gspo.py, with a teacher gkd/gkd.py)")
    add(
        "--embedder", choices=["bge-m3"], help="embedding model of grpo/similarity_grpo.py: random weights of the shape"
    )
    add("--work_dir", default=str(Path(tempfile.gettempdir()) / "rl_hand_benchmark"),
        help="folder for models, which are reused, and logs (default: %(default)s)")  # fmt: skip
    add("--timeout", type=float, default=3600, help="seconds for each process (default: %(default)s)")
    group = parser.add_argument_group("override fields of the settings")
    for name, text in config.comments(Setting).items():
        group.add_argument(f"--{name}", type=type(getattr(Setting, name)), help=text)
    args = parser.parse_args(own)
    given = {name: getattr(args, name) for name in vars(Setting()) if getattr(args, name) is not None}
    try:
        require(1 <= args.warmup < args.steps, f"warmup = {args.warmup}, steps = {args.steps}",
                "at least one cycle is left out and one is counted", "raise steps")  # fmt: skip
        missing = args.peer and importlib.util.find_spec("trl") is None
        require(not missing, f"peer = {args.peer}", "needs the package trl", "pip install trl, or leave out --peer")
        settings = {name: dataclasses.replace(SETTINGS[name], **given) for name in args.setting}
        toys = [name for name, setting in settings.items() if args.peer and setting.model == "toy"]
        require(
            not toys, f"peer = {args.peer}", f"is not run on the built-in policy of {toys}", "leave one of them out"
        )
        untaught = [name for name, setting in settings.items() if not setting.teacher]
        if [peer for peer in args.peer if "--vllm" in PEERS[peer]]:
            require_vllm(args.vllm_path)
            require(untaught == [*settings], f"peer = {args.peer}", "samples with vLLM for GRPOTrainer only, but one "
                    f"of {[*settings]} distils", "leave one of them out")  # fmt: skip
        require("trl_distillation" not in args.peer or not untaught, f"peer = {args.peer}", f"trl_distillation needs a "
                f"teacher, which {untaught} have not", "leave one of them out, or set --teacher")  # fmt: skip
    except ValueError as error:
        parser.error(str(error))
    return args, settings, extra


def main(argv: list[str] | None = None) -> int:
    """Measures every setting and prints the tables; returns 1 if anything failed."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == [WATCHED]:  # a child process of `measure`
        run_watched(argv[1], argv[2:])
        return 0
    args, settings, extra = parse(argv)
    command, results = shlex.join(["python", "scripts/dev/benchmark.py", *argv]), []
    written = {"command": command, "machine": machine(), "settings": results}

    def save() -> None:
        if args.out:
            Path(args.out).parent.mkdir(parents=True, exist_ok=True)
            Path(args.out).write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")

    for name, setting in settings.items():
        print(f"{name}: {args.steps} cycles", flush=True)
        results.append({"name": name, "setting": vars(setting)})
        results[-1].update(attempt(measure, name, setting, args, extra, results[-1], save))
        save()
    about = ", ".join(f"{name} {value}" for name, value in written["machine"].items() if value is not None)
    print(f"\n{report(results)}\n\n{about}\n{command}")
    parts = [part for result in results for part in (result, *result.values()) if isinstance(part, dict)]
    return int(any("error" in part for part in parts))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwind, so that started scripts do not stay on the GPUs
    sys.exit(main())
