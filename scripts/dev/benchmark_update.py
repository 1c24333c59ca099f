"""Time, memory and MFU of the update alone: prompts computed once per group or per completion, and micro-batch sizes.

Run: python scripts/dev/benchmark_update.py qwen0.5b qwen1.5b --profile 30
     python scripts/dev/benchmark_update.py tiny --device cpu --prompts 2 --prompt_tokens 8 --new_tokens 8

GSPO's loss on random tokens, with AdamW. Every completion has all its tokens. Columns:
  tokens           of all forward passes of an update
  micro-batches    of an update
  update, s        median of --repetitions after one that compiles; MFU and peak GiB belong to it
  log-probs, s     of a pass without gradients over the whole batch, as for a reference; the same median
  MFU              as in benchmark.py: a prompt counts once per completion, also where it is computed once
--profile N prints the N kernels that take longest in an update of the last row.
"""

import argparse
import functools
import sys
import tempfile
from itertools import chain
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]
import benchmark_base as base
from benchmark import update_flops
from benchmark_models import build, seconds

from common.base import devices
from common.generation.batches import RolloutBatch, assemble
from common.maths import losses
from common.model import passes
from common.model.logprobs import LogProbs
from common.model.modes import train_mode
from common.training.optim import AdamW


class Update:
    """A model with its optimizer, and a batch for it."""

    def __init__(self, shape: str, device: torch.device, args: argparse.Namespace):
        """Builds the model, the optimizer and random tokens.

        Args:
            shape: key of `benchmark_base.SHAPES`.
            device: of the model.
            args: of the command line.
        """
        self.device, self.args = device, args
        model = train_mode(build(shape, device).requires_grad_())
        self.policy, self.optimizer = LogProbs(model, 1.0, args.compile), AdamW(model, 1e-6)
        words = model.config.vocab_size - len(base.SPECIALS)
        size = args.prompts * args.group_size, args.new_tokens
        self.tokens_BC = torch.randint(words, size, device=device)
        self.prompts = torch.randint(words, (args.prompts, args.prompt_tokens)).tolist()
        with tempfile.TemporaryDirectory() as folder:
            model.config.save_pretrained(folder)
            self.flops = update_flops(base.shape_of(folder), size[0], args.prompt_tokens, args.new_tokens)

    def minibatches(self, micro_batch_tokens: int, shared: bool) -> list[list[RolloutBatch]]:
        """The batch as the update takes it.

        Args:
            micro_batch_tokens: of a micro-batch, at most.
            shared: whether a prompt is computed once per group.
        """
        logps_BC = torch.zeros(self.tokens_BC.shape, device=self.device)
        end_id = self.policy.model.config.eos_token_id
        batch = assemble(self.prompts, self.args.group_size, self.tokens_BC, logps_BC, 0, [end_id])
        if not shared:
            batch.group = torch.arange(len(batch))
        return batch.minibatches(self.args.num_minibatches, micro_batch_tokens, packed=True)

    def run(self, minibatches: list[list[RolloutBatch]]) -> None:
        """The optimizer steps of an update."""
        for minibatch in minibatches:
            for micro in minibatch:
                logps_mC, _ = self.policy(*micro.tokens)
                ratio_m = losses.sequence_ratio(logps_mC, logps_mC.detach(), micro.completion_mask)
                self.optimizer.scale(-ratio_m.sum() / len(self.tokens_BC)).backward()
            self.optimizer.step(1.0)

    def measure(self, micro_batch_tokens: int, shared: bool, peak: float | None) -> list[str]:
        """A row of the table.

        Args:
            micro_batch_tokens: of a micro-batch, at most.
            shared: whether a prompt is computed once per group.
            peak: FLOP/s of the card, if known.
        """
        minibatches = self.minibatches(micro_batch_tokens, shared)
        micros = list(chain(*minibatches))
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        update = seconds(lambda: self.run(minibatches), self.device, self.args.repetitions)
        gib = torch.cuda.max_memory_allocated() / devices.GIB if self.device.type == "cuda" else None
        fill = functools.partial(passes.fill, micros, "ref_logps", self.policy, self.device, micro_batch_tokens)
        log_probs = seconds(fill, self.device, self.args.repetitions)
        mfu = base.shown(self.flops / update / peak if peak else None, ".1%")
        counts = f"{sum(micro.size for micro in micros):,}", str(len(micros))
        times = f"{update:.3f}", f"{log_probs:.3f}"
        return ["once" if shared else "each", f"{micro_batch_tokens:,}", *counts, *times, mfu, base.shown(gib, ".1f")]

    def kernels(self, number: int) -> str:
        """A table of the kernels, or on a CPU operators, that take longest in an update."""
        minibatches = self.minibatches(self.args.micro_batch_tokens[-1], True)
        kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self.device.type == "cuda")
        with profile(activities=kinds) as profiler:
            self.run(minibatches)
            devices.synchronize([self.device])
        order = "self_cuda_time_total" if self.device.type == "cuda" else "self_cpu_time_total"
        return profiler.key_averages().table(sort_by=order, row_limit=number, max_name_column_width=100)


def main(argv: list[str] | None = None) -> None:
    """Prints a table for each shape, and what it was measured with."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("shapes", nargs="+", choices=list(base.SHAPES), metavar="SHAPE", help="of benchmark.py")
    add("--device", default="auto", help="cuda, cpu, or auto")
    add("--prompts", type=int, default=32, help="in a batch (default: %(default)s)")
    add("--group_size", type=int, default=8, help="completions of each (default: %(default)s)")
    add("--prompt_tokens", type=int, default=128, help="of each (default: %(default)s)")
    add("--new_tokens", type=int, default=256, help="of each completion (default: %(default)s)")
    add("--num_minibatches", type=int, default=4, help="optimizer steps (default: %(default)s)")
    add("--micro_batch_tokens", type=int, nargs="+", default=[8192, 16384, 32768], help="sizes to measure")
    add("--repetitions", type=int, default=3, help="that count (default: %(default)s)")
    add("--compile", action=argparse.BooleanOptionalAction, default=True, help="on a GPU")
    add("--profile", type=int, default=0, metavar="N", help="print the N kernels that take longest")
    args = parser.parse_args(argv)
    device = base.pick_device(args.device)
    peak = base.CARDS.get(base.card(args.device), (None, None))[1]
    columns = ["shape", "a prompt is computed", "micro_batch_tokens", "tokens", "micro-batches", "update, s",
               "log-probs, s", "MFU", "peak GiB"]  # fmt: skip
    rows, tables, update = [columns], [], None
    for shape in args.shapes:
        update = None  # frees the model before the next
        update = Update(shape, device, args)
        for shared in (False, True):
            for size in args.micro_batch_tokens:
                rows.append([shape, *update.measure(size, shared, peak)])
                print(*rows[-1], flush=True)
        tables += [update.kernels(args.profile)] * (args.profile > 0)
    about = ", ".join(f"{name} {value}" for name, value in base.machine().items() if value is not None)
    print("", *tables, base.markdown(rows), "", about, sep="\n")


if __name__ == "__main__":
    main()
