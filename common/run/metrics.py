"""What a run reports: metrics.jsonl, TensorBoard, a progress bar, and samples.jsonl to read.

The README of each algorithm explains its metrics.
"""

import contextlib
import json
import os
import resource
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from common.base import devices, distributed, storage
from common.generation.batches import RolloutBatch
from common.maths import advantages
from common.run import branches, measures
from common.tasks.data import Example
from common.tasks.scoring import Scored

NUM_SAMPLES = 4  # prompts per entry in samples.jsonl
LEAST_ROOM = 2**16  # bytes on the disk of TensorBoard's events, to open a file there
IN_BAR = {"reward": "reward", "len": "completion_length", "clip": "clip_fraction", "div": "divergence",
          "nll": "nll", "tok/s": "tokens_per_second"}  # fmt: skip


class StepMetrics:
    """Averages over micro-batches and devices in a step; tensors stay on their GPU until `take`."""

    def __init__(self):
        """Starts a step."""
        # keyed by name and device; devices are summed on the host, so that no GPU waits for another
        self._sums: dict[tuple[str, torch.device | None], Any] = {}
        self._weights: dict[tuple[str, torch.device | None], Any] = {}
        self._max: dict[str, Any] = {}

    def add(self, weight: float | torch.Tensor = 1.0, **values: float | torch.Tensor) -> None:
        """Adds to this step's averages.

        Args:
            weight: number of items that each value is the mean of, e.g. sequences or tokens.
            **values: means by name; for a name ending in `_max`, the maximum is reported instead.
        """
        for name, value in values.items():
            if name.endswith("_max"):
                self._max.setdefault(name, []).append(value)
            else:
                key = name, value.device if isinstance(value, torch.Tensor) else None
                self._sums[key] = self._sums.get(key, 0.0) + value * weight
                self._weights[key] = self._weights.get(key, 0.0) + weight

    def mark(self) -> tuple[dict, dict, dict]:
        """The state of this step so far, for `rollback`."""
        return dict(self._sums), dict(self._weights), {name: list(values) for name, values in self._max.items()}

    def rollback(self, mark: tuple[dict, dict, dict]) -> None:
        """Drops what was added since `mark`, which is of this step; a mark can be reused."""
        self._sums, self._weights = dict(mark[0]), dict(mark[1])
        self._max = {name: list(values) for name, values in mark[2].items()}

    def take(self) -> dict[str, dict[str, float]]:
        """Ends the step; returns "sums", "weights" and "max" by name. A mean is sum / weight."""
        maxima = [value for values in self._max.values() for value in values]
        numbers = iter(_to_host([*self._sums.values(), *self._weights.values(), *maxima]))
        taken = {
            "sums": _by_name(self._sums, numbers),
            "weights": _by_name(self._weights, numbers),
            "max": {name: max(next(numbers) for _ in values) for name, values in self._max.items()},
        }
        self._sums, self._weights, self._max = {}, {}, {}
        return taken

    def means(self) -> dict[str, float]:
        """Ends the step; returns means and maxima of this process by name."""
        taken = self.take()
        weights = taken["weights"]
        means = {name: total / weights[name] for name, total in taken["sums"].items() if weights[name]}
        return means | taken["max"]


class Log(StepMetrics):
    """Reports the metrics of all ranks: metrics.jsonl, TensorBoard, progress bar, samples.jsonl.

    Attributes:
        evaluations: lines of metrics.jsonl from evaluations before this start; none in a new run.
    """

    def __init__(self, out_dir: str, start: int, steps: int, gpus: list[torch.device]):
        """Opens the files of a run and removes lines of steps after `start`; a collective.

        Args:
            out_dir: folder of the run.
            start: steps that an earlier run completed; 0 for a new run.
            steps: steps of the whole run.
            gpus: devices whose memory is reported.
        """
        super().__init__()
        self.out_dir, self.gpus, self.is_main = Path(out_dir), gpus, distributed.rank() == 0
        self._warned: set[str] = set()
        found: list[dict[str, Any]] = []
        with distributed.share_errors("log"):
            if self.is_main:
                for name in ("metrics.jsonl", "samples.jsonl"):
                    with storage.required(self.out_dir / name):
                        self.out_dir.mkdir(parents=True, exist_ok=True)
                        # -1 in a new run: it evaluates the starting model again
                        keep_lines(self.out_dir / name, start if start else -1)
                with storage.required(self.out_dir / "metrics.jsonl"):
                    found = _evaluations(self.out_dir / "metrics.jsonl")
                self._board = Board(self.out_dir / "tensorboard", start + 1)
                self._bar = tqdm(initial=start, total=steps, unit="step", dynamic_ncols=True)
        self._start, self.evaluations = start, distributed.gather_objects(found)[0]

    def add_batch(self, batch: RolloutBatch) -> None:
        """Adds completion lengths and the truncated share of a batch; a collective."""
        lengths = batch.lengths.float().cpu()
        self.add(len(lengths), completion_length=lengths.mean().item(), truncated=batch.truncated.float().mean().item())
        if batch.drafted is not None:
            tokens = lengths.sum().item()
            self.add(tokens, draft_accepted=batch.drafted.sum().item() / tokens)
        self.add(len(lengths), completion_length_max=lengths.max().item())
        self._tokens = distributed.sum_over_ranks(lengths.sum().item())

    def add_rewards(self, rewards: torch.Tensor, by_function: dict[str, torch.Tensor]) -> None:
        """Adds mean rewards and the unscored share.

        Args:
            rewards: [...] fp32, NaN for unscored completions.
            by_function: unweighted rewards [B] by reward function.
        """
        scored = ~rewards.isnan()
        self.add(scored.sum().item(), reward=rewards.nansum().item() / max(1, scored.sum().item()))
        self.add(rewards.numel(), unscored=1 - scored.float().mean().item())
        for name, values in by_function.items():
            known = values[~values.isnan()]
            self.add(len(known), **{f"reward_{name}": known.mean().item() if len(known) else 0.0})

    def add_rollout(self, batch: RolloutBatch, rewards: torch.Tensor, by_function: dict[str, torch.Tensor]) -> None:
        """Adds rewards, their spread within groups, and completion lengths; a collective.

        Args:
            batch: P * G completions.
            rewards: [P, G] fp32, NaN for unscored completions.
            by_function: unweighted rewards [B] by reward function.
        """
        rewards, scored = rewards.cpu(), ~rewards.cpu().isnan()
        self.add_rewards(rewards, by_function)
        filled = torch.where(scored, rewards, 0.0)
        mean = filled.sum(1) / scored.sum(1).clamp(min=1)
        spread = torch.where(scored, rewards - mean[:, None], 0.0).square().sum(1) / (scored.sum(1) - 1).clamp(min=1)
        equal = advantages.equal_groups(rewards).float()
        self.add(len(rewards), reward_std=spread.sqrt().mean().item(), zero_std=equal.mean().item())
        self.add_batch(batch)
        lengths = batch.lengths.float().cpu()
        for name, rows in (("above", rewards > mean[:, None]), ("below", rewards < mean[:, None])):
            # skip groups of equal rewards: rounding can put their mean above or below them
            picked = lengths[(rows & (equal == 0)[:, None]).flatten()]
            self.add(len(picked), **{f"completion_length_{name}": picked.mean().item() if len(picked) else 0.0})

    @contextmanager
    def time(self, phase: str) -> Iterator[None]:
        """Adds the duration of the block to `seconds_<phase>`; the blocks of a step add up."""
        began, key = time.perf_counter(), (f"seconds_{phase}", None)
        yield
        devices.synchronize(self.gpus)
        self._sums[key] = self._sums.get(key, 0.0) + time.perf_counter() - began
        self._weights[key] = 1.0

    @contextmanager
    def time_save(self, step: int) -> Iterator[None]:
        """Writes the duration of the block as `seconds_save`, in its own line after `step`."""
        began = time.perf_counter()
        yield
        if self.is_main:
            self._write({"step": step, "seconds_save": time.perf_counter() - began})

    def end_step(self, step: int, **values: float) -> dict[str, Any]:
        """Writes the line of a step and returns it; a collective.

        Args:
            step: from 1.
            **values: additional metrics, equal on every rank.

        Raises:
            ValueError: no completion of the step was scored, on any rank.
        """
        own = self.take() | {
            "memory": devices.peak_memory_gib(self.gpus),
            "host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        }
        ranks = distributed.gather_objects(own)
        line: dict[str, Any] = {"step": step}
        # a rank may lack a metric: a service reports some numbers for some completions only
        for name in dict.fromkeys(name for r in ranks for name in r["sums"]):
            weight = sum(r["weights"].get(name, 0.0) for r in ranks)
            line[name] = sum(r["sums"].get(name, 0.0) for r in ranks) / weight if weight else None
        maxima = [r["max"] for r in ranks]
        line |= {name: max(own[name] for own in maxima if name in own) for name in dict.fromkeys(chain(*maxima))}
        line |= values
        line["seconds"] = sum(line[name] for name in line if name.startswith("seconds_"))
        if "seconds_similarity" in line:
            line["similarity_share"] = line["seconds_similarity"] / line["seconds"]
        line["tokens_per_second"] = self._tokens / line["seconds"]
        line["memory_gib"] = [gib for r in ranks for gib in r["memory"]]
        line["host_memory_gib"] = [round(r["host"], 3) for r in ranks]
        if self.is_main:
            self._write(line)
            shown = {label: line[name] for label, name in IN_BAR.items() if line.get(name) is not None}
            self._bar.set_postfix({label: f"{value:.3g}" for label, value in shown.items()}, refresh=False)
            self._bar.update()
            self._warn(line)
        if line.get("unscored") == 1.0:
            raise ValueError(f"step {step}: the reward is NaN for every completion: check reward function and answers")
        return line

    def evaluation_due(self, cfg: Any) -> bool:
        """Whether to evaluate before the first step: a new run, or an outage cut an evaluation."""
        if not (cfg.eval_data and cfg.eval_every) or any(line["step"] == self._start for line in self.evaluations):
            return False
        return self._start % cfg.eval_every == 0 or self._start == cfg.steps

    def eval(self, step: int, seconds: float, **values: float) -> None:
        """Writes the line of an evaluation; values are equal on every rank.

        Printed are the measures with their intervals; those of single values of a column are only written.

        Args:
            step: steps done.
            seconds: that it took.
            **values: measures by name.
        """
        if self.is_main:
            self._write({"step": step, **values, "seconds_eval": seconds})
            ends = {f"{name}{end}" for name in values for end in measures.ENDS}
            shown = [name for name in values if name not in ends and "[" not in name]
            self.print_above_bar(f"step {step}: " + ", ".join(measures.with_interval(name, values) for name in shown))

    def samples(self, step: int, examples: list[Example], scored: Scored, show: bool) -> None:
        """Writes samples to read: the first completion of each of the first NUM_SAMPLES prompts.

        Args:
            step: from 1.
            examples: P prompts.
            scored: P * G completions, those of a prompt side by side.
            show: print them, too.
        """
        if not self.is_main:
            return
        group_size = len(scored.completions) // len(examples)
        lines = []
        for i, example in enumerate(examples[:NUM_SAMPLES]):
            row = i * group_size
            completion, reward = scored.completions[row], scored.rewards[row].item()
            line = {"step": step, "prompt": example.prompt, "completion": completion, "answer": example.answer}
            line |= {"id": example.columns["id"]} if "id" in example.columns else {}
            line |= {"reward": _finite(reward)}
            if len(scored.by_function) > 1:
                line["rewards"] = {name: _finite(values[row].item()) for name, values in scored.by_function.items()}
            lines.append(json.dumps(line, ensure_ascii=False) + "\n")
            if show:
                self.print_above_bar(f"step {step}, reward {reward:.3g}, answer {example.answer!r}: {completion!r}")
        path = self.out_dir / "samples.jsonl"
        with storage.optional(f"{path} could not be written", "the run goes on without these samples; mend that"):
            storage.append(path, "".join(lines))

    def print_above_bar(self, text: str) -> None:
        """Prints a line on rank 0 above the progress bar, without breaking it."""
        if self.is_main:
            self._bar.write(text)

    def close(self) -> None:
        """Closes the files."""
        if self.is_main:
            self._board.close()
            self._bar.close()

    def _warn(self, line: dict[str, Any]) -> None:
        """Warns, once per cause, that nothing can be learned from a step."""
        causes = {
            "truncated": "every completion was cut off: raise max_new_tokens, or ask for shorter answers",
            "zero_std": "the rewards of every group are equal, so there is nothing to learn: is the task too hard, too "
            "easy, or the reward function blind?",
            "skipped_updates": "nothing in this step could be trained on",
        }
        for name, cause in causes.items():
            if line.get(name) == 1.0 and name not in self._warned:
                self._warned.add(name)
                self.print_above_bar(f"warning: step {line['step']}: {cause}")

    def _write(self, line: dict[str, Any]) -> None:
        """Appends a line to metrics.jsonl and TensorBoard."""
        line = {name: _finite(value) for name, value in line.items()}
        with storage.required(self.out_dir / "metrics.jsonl"):
            storage.append(self.out_dir / "metrics.jsonl", json.dumps(line, allow_nan=False) + "\n")
        self._board.add(line, reopen="seconds_save" in line)


class Board:
    """TensorBoard's copy of metrics.jsonl, which a run can do without: a failure is a warning.

    SummaryWriter writes in a thread, which ends at its first error; later calls raise that error again. So the writer
    is given up then, and another one opened after a checkpoint has been saved, which shows that the disk takes files.
    """

    def __init__(self, folder: Path, first_step: int):
        """Opens a file of events.

        Args:
            folder: of the files.
            first_step: of this run; TensorBoard drops events of an earlier run from this step on.
        """
        self._folder, self._writer = folder, None
        with self._optional():
            self._writer = self._open(first_step)

    def add(self, line: dict[str, Any], reopen: bool) -> None:
        """Adds the floats of a line of metrics.jsonl.

        Args:
            line: with its step.
            reopen: also if an earlier line could not be written.
        """
        if self._writer is None and not reopen:
            return
        with self._optional():
            self._writer = self._writer or self._open()
            for name, value in line.items():
                if isinstance(value, float):  # a name may hold any text of the data, half a character, too
                    name = name.encode(errors="backslashreplace").decode()
                    self._writer.add_scalar(name, value, line["step"])

    def close(self) -> None:
        """Writes what is left."""
        if self._writer is not None:
            with self._optional():
                self._writer.flush()  # raises what its thread could not write
                self._writer.close()

    def _open(self, first_step: int | None = None) -> SummaryWriter:
        """Opens a file of events on a disk that has room: on a full one it would stay behind, empty."""
        self._folder.mkdir(parents=True, exist_ok=True)
        tried = self._folder / f"{branches.WRITING}events"
        try:
            storage.append(tried, "." * LEAST_ROOM)
        finally:
            tried.unlink(missing_ok=True)
        return SummaryWriter(str(self._folder), purge_step=first_step)

    @contextmanager
    def _optional(self) -> Iterator[None]:
        with storage.optional(
            f"{self._folder} could not be written",
            "the run goes on: metrics.jsonl has the same numbers, TensorBoard those after the next save; mend that",
        ):
            try:
                yield
            except OSError:
                self._writer = None
                raise


def _to_host(values: list[float | torch.Tensor]) -> list[float]:
    """Copies all numbers of a step to the host, with one sync per device, not per number."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for value in values:
        if isinstance(value, torch.Tensor):
            by_device.setdefault(value.device, []).append(value.detach().double())
    numbers = {device: iter(torch.stack(tensors).tolist()) for device, tensors in by_device.items()}
    return [next(numbers[value.device]) if isinstance(value, torch.Tensor) else float(value) for value in values]


def _by_name(keys: Iterable[tuple[str, Any]], numbers: Iterator[float]) -> dict[str, float]:
    """Takes one number per (name, device) key and sums over devices."""
    sums: dict[str, float] = {}
    for name, _ in keys:
        sums[name] = sums.get(name, 0.0) + next(numbers)
    return sums


def keep_lines(path: Path, last_step: int) -> None:
    """Removes the lines after `last_step` from a JSONL file, and any line cut off by a kill.

    Prints what it removed. A missing file is left missing.
    """
    if not path.exists():
        return
    kept, removed, content = [], 0, path.read_bytes()
    for line in content.decode("utf-8", "replace").split("\n"):
        try:
            keep = json.loads(line)["step"] <= last_step
            removed += not keep
        except (ValueError, KeyError, TypeError, RecursionError):  # cut off, or not ours
            keep = False
            if line:
                print(f"warning: {path}: a line that is not one of a step is dropped: {line[:80]!r}")
        if keep:
            kept.append(line + "\n")
    if "".join(kept).encode() == content:
        return
    if removed:
        print(f"{path}: removed {removed} lines of steps that are taken again")
    temporary = path.with_name(f"{branches.WRITING}{path.name}")
    try:
        temporary.write_bytes("".join(kept).encode())
        storage.sync(temporary)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _evaluations(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that hold the results of an evaluation."""
    lines = [json.loads(line) for line in storage.read_lines(path)] if path.exists() else []
    return [line for line in lines if any(name.startswith("eval_") for name in line)]


def _finite(value: Any) -> Any:
    """The value, or None if it is NaN or infinite, which JSON cannot hold."""
    return None if isinstance(value, float) and value - value != 0.0 else value
