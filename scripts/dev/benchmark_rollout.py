"""Times rollouts alone, with random weights of a known shape, beside vLLM if asked.

Run:   python scripts/dev/benchmark_rollout.py qwen0.5b --out rollouts.json
       python scripts/dev/benchmark_rollout.py qwen0.5b qwen1.5b --peer vllm --vllm_path FOLDER
                                                             beside vLLM in FOLDER, which only its process sees
Every side runs in processes of its own, one after another. Our side samples log-probabilities too, as in training.
It goes first: in a mixed work, random end tokens end a completion, each token with the same probability, and vLLM is
then given the lengths that came out. So both decode the same number of tokens in every row, from the same prompts.
Every repetition has its own prompts, and in a mixed work its own lengths. Figures are medians of those after --warmup:
  ours, vLLM, with log-probs   completion tokens / seconds, the forward pass of the prompts included; of vLLM with
               its engine in the same process (0) or in another (1), VLLM_ENABLE_V1_MULTIPROCESSING, the faster
  ours / ...   ratio of these
  limit        tokens / seconds if the card did nothing but read, at its full bandwidth, in every step the weights and
               the keys and values of live tokens, those of a prompt once per group
  ms per step  seconds of a rollout / tokens of its longest completion, the forward pass of the prompts included
  start        seconds from the start of the process until weights are loaded; of vLLM until its engine is ready,
               which includes compilation and graph capture
  first        seconds of the first rollout of a work: for our side with compilation (once in a process: one for each
               limit of lengths) and graph capture
Of several processes of a side, the later find compiler caches that the first has filled: their start is a warm one.
"""

import time

BEGAN = time.perf_counter()  # the imports are part of the start
import argparse
import dataclasses
import json
import operator
import random
import shlex
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]
import benchmark_base as base

from common.base import devices, memory
from common.base.checks import require
from common.generation.rollout import Sampler
from common.model import models, sources

OURS = "--ours"  # first argument of the child process that measures our side
SHORTEST = 8  # tokens of a completion in a mixed work


@dataclasses.dataclass(frozen=True)
class Work:
    """What is sampled in one rollout."""

    prompts: int
    group_size: int  # completions of each
    prompt_tokens: int
    new_tokens: int  # of every completion; their mean if `longest` is more
    longest: int = 0  # of a completion in a mixed work

    def __str__(self) -> str:
        tokens = f"{self.new_tokens}, mixed up to {self.longest}" if self.longest else str(self.new_tokens)
        return f"{self.prompts} x {self.group_size}, {self.prompt_tokens} + {tokens}"


WORKS = {
    "8x8-p128": Work(8, 8, 128, 256),
    "8x8-p256": Work(8, 8, 256, 256),
    "32x8-p128": Work(32, 8, 128, 256),
    "32x8-p256": Work(32, 8, 256, 256),
    "8x8-mixed": Work(8, 8, 128, 256, 1024),
    "8x8-p4096": Work(8, 8, 4096, 256),
    "8x8-n4096": Work(8, 8, 128, 4096),
    "tiny": Work(2, 4, 8, 8),
    "tiny-mixed": Work(2, 4, 8, 16, 48),
}


def describe(name: str, vocabulary: int, repetitions: int) -> dict[str, Any]:
    """A work with the prompts of its repetitions, for the process that does it.

    Args:
        name: key of WORKS.
        vocabulary: of the model; with random weights every token is nearly as likely.
        repetitions: rollouts.
    """
    work, rng, words = WORKS[name], random.Random(name), range(vocabulary - len(base.SPECIALS))
    mixed = work.longest > 0
    return {
        "name": name, "group_size": work.group_size,
        "end_ids": rng.sample(words, round(vocabulary / (work.new_tokens - SHORTEST)) if mixed else 1),
        "min_new_tokens": SHORTEST if mixed else work.new_tokens, "max_new_tokens": work.longest or work.new_tokens,
        "prompts": [[rng.choices(words, k=work.prompt_tokens) for _ in range(work.prompts)]
                    for _ in range(repetitions)],
    }  # fmt: skip


def measure_ours(work_file: Path, out: Path) -> None:
    """Times our side of works with the same limits of length, with one sampler, as in a training run.

    Args:
        work_file: as `main` writes it.
        out: gets "start", and for each work "tokens_and_logprobs", seconds, and "lengths" of the repetitions.

    Raises:
        RuntimeError: a completion is shorter or longer than its work says.
    """
    spec = json.loads(work_file.read_text(encoding="utf-8"))
    device, works = base.pick_device(spec["device"]), spec["works"]
    tokenizer, model = models.load_policy(spec["model"], device, spec["dtype"])
    measured = {"start": time.perf_counter() - BEGAN, "works": {}}
    sampler = None
    for work in works:
        seconds, lengths = [], []
        for step, prompts in enumerate(work["prompts"]):
            devices.synchronize([device])
            began = time.perf_counter()
            sampler = sampler or Sampler(
                [model], end_ids=work["end_ids"], pad_id=tokenizer.pad_token_id,
                max_new_tokens=work["max_new_tokens"], min_new_tokens=work["min_new_tokens"],
            )  # fmt: skip
            batch = sampler.generate(prompts, group_size=work["group_size"], temperature=1.0, step=step)
            devices.synchronize([device])
            seconds.append(time.perf_counter() - began)
            lengths.append(batch.lengths.tolist())
            if not work["min_new_tokens"] <= min(lengths[-1]) <= max(lengths[-1]) <= work["max_new_tokens"]:
                raise RuntimeError(f"{work['name']}: {min(lengths[-1])} to {max(lengths[-1])} tokens: another work")
        measured["works"][work["name"]] = {"tokens_and_logprobs": seconds, "lengths": lengths}
    unfinished = out.with_suffix(".part")
    unfinished.write_text(json.dumps(measured) + "\n", encoding="utf-8")
    unfinished.replace(out)


def rollout_bytes(shape: base.Shape, prompt_tokens: int, lengths: list[int], group_size: int, itemsize: int) -> int:
    """Bytes to be read for a rollout: as `benchmark_base.decode_bytes`, for the sum of its steps and any lengths.

    Args:
        shape: of the model.
        prompt_tokens: of every prompt.
        lengths: of the completions, those of a group side by side.
        group_size: completions per prompt.
        itemsize: bytes of one weight, and of one number of a key or value.
    """
    longest_P = [max(lengths[i : i + group_size]) for i in range(0, len(lengths), group_size)]
    live = prompt_tokens * sum(longest_P) + sum(n * (n - 1) // 2 for n in lengths)
    read = max(lengths) * (shape.body + shape.head) + live * 2 * shape.layers * shape.kv_width
    return itemsize * read + 2 * shape.state * sum(lengths)


def summarise(seconds: list[float], lengths: list[list[int]], warmup: int) -> dict[str, float]:
    """Tokens per second, milliseconds per step, and seconds of the first rollout.

    Args:
        seconds: of every rollout.
        lengths: of its completions.
        warmup: rollouts that do not count.
    """
    counted = [*zip(seconds, lengths, strict=True)][warmup:]
    return {
        "tokens_per_second": statistics.median(sum(row) / took for took, row in counted),
        "ms_per_step": statistics.median(1000 * took / max(row) for took, row in counted),
        "first": seconds[0],
    }


# ---- one shape ----


def measure(name: str, args: argparse.Namespace, result: dict[str, Any], save: Callable[[], None]) -> dict[str, Any]:
    """Measures one shape; a side that fails leaves {"error": text}.

    Args:
        name: key of SHAPES.
        args: of the command line.
        result: gets "sides", what each process measured, by its name, and "works", figures of every work.
        save: called after each side, so that a run that is cut off keeps what it has measured.

    Returns:
        The result.
    """
    (Path(args.work_dir) / "rollouts").mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=Path(args.work_dir) / "rollouts"))
    model = base.make_model(name, 1, Path(args.work_dir))
    memory.empty_cache()  # 7B were made on the GPU, which the sides need
    dtype = sources.pick_dtype(args.dtype, base.pick_device(args.device))
    spec = {"model": str(model), "device": args.device, "dtype": args.dtype}
    works = [describe(work, base.SHAPES[name][1], args.repetitions) for work in args.works]
    sides, done = result.setdefault("sides", {}), {}
    limits = operator.itemgetter("min_new_tokens", "max_new_tokens")
    for least, most in dict.fromkeys(map(limits, works)):
        part = [work for work in works if limits(work) == (least, most)]
        command = [sys.executable, str(Path(__file__).resolve()), OURS]
        ours = base.attempt(run, command, spec | {"works": part}, folder / f"ours-{least}-{most}", args)
        sides[f"ours, {most if least == most else f'{least} to {most}'} tokens"] = ours
        save()
        done |= ours.get("works", {})
    given = [work | {"lengths": done[work["name"]]["lengths"]} for work in works if work["name"] in done]
    for mode in args.vllm_multiprocessing if args.peer and given else ():
        command = [sys.executable, str(Path(__file__).resolve().with_name("benchmark_vllm.py"))]
        command += ["--gpu_memory_utilization", str(args.gpu_memory_utilization)]
        env = base.vllm_environment(args.vllm_path, bool(mode))
        full = spec | {"works": given, "dtype": str(dtype).removeprefix("torch.")}
        theirs = base.attempt(run, command, full, folder / f"vllm-{mode}", args, env)
        sides[f"vLLM ({mode})"] = theirs
        save()
    shape, bandwidth = base.shape_of(str(model)), base.CARDS.get(base.card(args.device), (None,))[0]
    rate = args.bandwidth or bandwidth
    compared = {work["name"]: compare(work, sides, shape, rate, dtype.itemsize, args.warmup) for work in given}
    return result | {"works": compared}


def run(command: list[str], spec: dict, folder: Path, args: argparse.Namespace, env: dict | None = None) -> dict:
    """What a command writes for a work file, as a process of its own."""
    folder.mkdir()
    work, out = folder / "work.json", folder / "out.json"
    work.write_text(json.dumps(spec), encoding="utf-8")
    base.run([*command, "--work", str(work), "--out", str(out)], folder, out.exists, args.timeout, **(env or {}))
    return json.loads(out.read_text(encoding="utf-8"))


def compare(
    work: dict, sides: dict[str, dict], shape: base.Shape, bandwidth: float | None, itemsize: int, warmup: int
) -> dict[str, Any]:
    """Figures of a work: our side, both outputs of vLLM in its faster mode, and the limit.

    Args:
        work: as `describe` gives it, with "lengths".
        sides: what all processes measured.
        shape: of the model.
        bandwidth: of the memory, bytes per second, if known.
        itemsize: bytes of a weight.
        warmup: repetitions that do not count.
    """
    lengths, figures = work["lengths"], {}
    for who, output in (("ours", "tokens_and_logprobs"), ("vLLM", "tokens"), ("vLLM", "tokens_and_logprobs")):
        measured = [
            {"side": name, **summarise(side["works"][work["name"]][output], lengths, warmup)}
            for name, side in sides.items()
            if name.startswith(who) and work["name"] in side.get("works", {})
        ]
        if measured:
            figures[f"{who} {output}"] = max(measured, key=lambda side: side["tokens_per_second"])
    prompt_tokens, figures["limit"] = len(work["prompts"][0][0]), None
    if bandwidth:
        speeds = [
            sum(row) * bandwidth / rollout_bytes(shape, prompt_tokens, row, work["group_size"], itemsize)
            for row in lengths[warmup:]
        ]
        figures["limit"] = statistics.median(speeds)
    return figures


# ---- command line and report ----


def report(results: list[dict]) -> str:
    """Markdown tables of speed and of start."""
    speeds = [["shape", "prompts x completions, prompt + new tokens", "ours", "vLLM", "with log-probs", "ours / vLLM",
               "ours / with log-probs", "limit", "ours / limit", "ms per step", "of vLLM"]]  # fmt: skip
    starts = [["shape", "side", "start", "first"]]
    for result in results:
        if "error" in result:
            speeds.append([result["shape"], "failed", *["-"] * 9])
        for name, figures in result.get("works", {}).items():
            ours, plain = figures["ours tokens_and_logprobs"], figures.get("vLLM tokens")
            full, limit, speed = figures.get("vLLM tokens_and_logprobs"), figures["limit"], ours["tokens_per_second"]
            theirs = [f"{x['tokens_per_second']:,.0f} {x['side'].split()[1]}" if x else "-" for x in (plain, full)]
            ratios = [f"{speed / x['tokens_per_second']:.2f} x" if x else "-" for x in (plain, full)]
            limits = [base.shown(limit, ",.0f"), base.shown(speed / limit if limit else None, ".1%")]
            steps = [f"{x['ms_per_step']:.2f}" if x else "-" for x in (ours, plain)]
            speeds.append([result["shape"], str(WORKS[name]), f"{speed:,.0f}", *theirs, *ratios, *limits, *steps])
        for side, measured in result.get("sides", {}).items():
            works = measured.get("works", {}).items()
            firsts = ", ".join(f"{name} {next(iter(seconds.values()))[0]:.2f}" for name, seconds in works)
            start = "failed" if "error" in measured else f"{measured['start']:.1f}"
            starts.append([result["shape"], side, start, firsts or "-"])
    return "\n\n".join(map(base.markdown, (speeds, starts)))


def parse(argv: list[str]) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    add = parser.add_argument
    add("shapes", nargs="+", choices=base.SHAPES, metavar="SHAPE", help=f"of: {', '.join(base.SHAPES)}")
    usual = [name for name in WORKS if "tiny" not in name and "4096" not in name]
    add("--works", nargs="+", default=usual, choices=WORKS, metavar="NAME",
        help=f"of: {', '.join(WORKS)} (default: {' '.join(usual)})")  # fmt: skip
    add("--repetitions", type=int, default=5, help="rollouts of each work, with --warmup (default: %(default)s)")
    add("--warmup", type=int, default=2, help="first rollouts that are not counted (default: %(default)s)")
    add("--peer", nargs="+", default=[], choices=["vllm"], help="also time vLLM")
    add("--vllm_path", default="", help="folder with vLLM and what it needs, if not installed here; for vLLM's process")
    add("--vllm_multiprocessing", type=int, nargs="+", default=[0, 1], choices=[0, 1],
        help="its VLLM_ENABLE_V1_MULTIPROCESSING; the faster is reported (default: 0 1)")  # fmt: skip
    add("--gpu_memory_utilization", type=float, default=0.5, help="of vLLM (default: %(default)s)")
    add("--device", default="auto", help="cuda, cpu, or auto")
    add("--dtype", default="auto", help="bf16, fp16, fp32, or auto: bf16 on a GPU")
    add("--bandwidth", type=float, help="memory bandwidth in bytes per second, for an unknown card")
    add("--out", default="", help="JSON file for all measurements, updated after each shape")
    add("--work_dir", default=str(Path(tempfile.gettempdir()) / "rl_hand_benchmark"),
        help="folder for models, which are reused, and logs (default: %(default)s)")  # fmt: skip
    add("--timeout", type=float, default=3600, help="seconds for each process (default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        require(1 <= args.warmup < args.repetitions, f"warmup = {args.warmup}, repetitions = {args.repetitions}",
                "at least one rollout is left out and one is counted", "raise repetitions")  # fmt: skip
        if args.peer:
            base.require_vllm(args.vllm_path)
    except ValueError as error:
        parser.error(str(error))
    return args


def main(argv: list[str] | None = None) -> int:
    """Measures every shape and prints the tables; returns 1 if anything failed."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == [OURS]:  # a child process of `measure`
        child = argparse.ArgumentParser()
        for name in ("--work", "--out"):
            child.add_argument(name, type=Path)
        args = child.parse_args(argv[1:])
        measure_ours(args.work, args.out)
        return 0
    args = parse(argv)
    command, results = shlex.join(["python", "scripts/dev/benchmark_rollout.py", *argv]), []
    written = {"command": command, "machine": base.machine(), "shapes": results}

    def save() -> None:
        if args.out:
            Path(args.out).parent.mkdir(parents=True, exist_ok=True)
            Path(args.out).write_text(json.dumps(written) + "\n", encoding="utf-8")

    for name in args.shapes:
        print(f"{name}: {', '.join(args.works)}", flush=True)
        results.append({"shape": name})
        results[-1].update(base.attempt(measure, name, args, results[-1], save))
        save()
    about = ", ".join(f"{name} {value}" for name, value in written["machine"].items() if value is not None)
    print(f"\n{report(results)}\n\n{about}\n{command}")
    sides = [side for result in results for side in result.get("sides", {}).values()]
    return int(any("error" in part for part in (*results, *sides)))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwind, so that started processes leave the GPU
    sys.exit(main())
