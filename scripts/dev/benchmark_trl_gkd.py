"""Measures seconds per cycle of TRL's distillation with GKD's options, for `scripts/dev/benchmark.py --peer trl`.

Run:   python scripts/dev/benchmark_trl_gkd.py --student_model FOLDER --teacher_model FOLDER \\
           --train_data prompts.jsonl --sequences 8 --out trl.json
       --trainer distillation      DistillationTrainer in place of trl.experimental.gkd.GKDTrainer
A cycle is num_minibatches optimizer steps over batch_size * group_size completions, timed from the end of one to the
end of the next. Training is on-policy, at temperature 1; nothing is evaluated, saved or reported. On a GPU the student
has fp32 weights under bf16 autocast, TRL's default, and the teacher bf16 weights. The memory of the loss is measured
as in benchmark.py: the peak from compute_loss to the end of the backward pass, in the worst pass of a cycle, above
what was allocated when the first pass began. Tested with TRL 1.16, whose GKDTrainer
- samples again in every forward and backward pass (`training_step`), with model.generate, for that pass's sequences
  only: with --sequences below a step's completions it samples that many times, from the same weights;
- computes the logits of student and teacher and the divergence at all positions, prompts included, before it selects
  those of the completion (`compute_loss`, `generalized_jsd_loss`): this memory limits --sequences;
- returns torch's cached memory to the driver after every loss (`empty_cache`);
- divides the loss by the number of completion tokens in the data, even where it replaces them by its own samples
  (`num_items_in_batch` is counted earlier): rows here have as many tokens as a sample may have, to avoid division by 0;
- prints at the start that DistillationTrainer covers these options without building the full logits.
DistillationTrainer samples once per optimizer step, with model.generate, and applies the heads to completion tokens
only, in tiles (`_chunked_divergence_loss`), with a Triton kernel on a GPU.
"""

import argparse
import copy
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

try:
    import datasets
    import trl
    from trl.experimental import gkd
except ImportError as error:
    raise ImportError(f"benchmark_trl_gkd.py measures the package trl: pip install trl ({error})") from error


class NoGpu:
    """Replaces torch.cuda on the CPU, where memory is not measured."""

    @staticmethod
    def memory_allocated() -> int:
        """Returns 0."""
        return 0

    @staticmethod
    def max_memory_allocated() -> int:
        """Returns 0."""
        return 0

    @staticmethod
    def reset_peak_memory_stats() -> None:
        """Does nothing."""


class Clock(transformers.TrainerCallback):
    """Records when training began, when each cycle ended, and its peak memory."""

    def __init__(self, num_minibatches: int, memory: "LossMemory"):
        self.num_minibatches, self.memory, self.marks, self.losses, self.peaks = num_minibatches, memory, [], [], []

    def on_train_begin(self, args, state, control, **others):
        """Marks the start of the first cycle."""
        self.marks.append(now())

    def on_step_end(self, args, state, control, **others):
        """Marks the end of a cycle after its last optimizer step."""
        self.losses.append(self.memory.take())
        if state.global_step % self.num_minibatches == 0:
            self.peaks.append(self.memory.overall())
            self.marks.append(now())


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


def now() -> float:
    """Seconds, after all queued GPU work is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def main(argv: list[str] | None = None) -> None:
    """Trains for some cycles and writes their timings and memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--student_model", required=True, help="folder")
    parser.add_argument("--teacher_model", required=True, help="folder")
    parser.add_argument("--train_data", required=True, help="JSONL with prompts as text")
    parser.add_argument("--out", required=True, help="JSON file: seconds of every cycle, and more")
    parser.add_argument("--trainer", default="gkd", choices=["gkd", "distillation"], help="(default: %(default)s)")
    parser.add_argument("--cycles", type=int, default=6, help="(default: %(default)s)")
    parser.add_argument("--batch_size", type=int, default=64, help="prompts per cycle (default: %(default)s)")
    parser.add_argument("--group_size", type=int, default=1, help="completions per prompt (default: %(default)s)")
    parser.add_argument("--num_minibatches", type=int, default=1, help="optimizer steps per cycle")
    parser.add_argument("--sequences", type=int, default=8, help="in one forward; 0: all of an optimizer step")
    parser.add_argument("--max_new_tokens", type=int, default=256, help="per completion (default: %(default)s)")
    parser.add_argument("--min_new_tokens", type=int, default=0, help="per completion (default: %(default)s)")
    parser.add_argument("--beta", type=float, default=0.5, help="of the generalized JSD; 0: forward KL, 1: reverse KL")
    parser.add_argument("--device", default="auto", help="cuda, cpu, or auto")
    parser.add_argument("--dtype", default="auto", help="bf16, fp32, or auto: bf16 on a GPU")
    parser.add_argument("--bf16_weights", action="store_true", help="weights and optimizer states in bf16, too")
    parser.add_argument("--arguments", type=json.loads, default={}, help="JSON of fields of its config that win")
    args = parser.parse_args(argv)

    on_cpu = args.device == "cpu" or not torch.cuda.is_available()
    bf16 = args.dtype == "bf16" or (args.dtype == "auto" and not on_cpu)
    in_step, left = divmod(args.batch_size * args.group_size, args.num_minibatches)
    forwards, rest = divmod(in_step, args.sequences or in_step)
    if left or rest:
        raise ValueError(
            f"{args.batch_size} x {args.group_size} completions, num_minibatches = {args.num_minibatches}, sequences = "
            f"{args.sequences}: TRL takes parts of equal size only; choose numbers that divide one another"
        )
    # AutoTokenizer would take the model type's usual class and lose a custom tokenizer
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(args.student_model, padding_side="left")
    lines = Path(args.train_data).read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines for _ in range(args.group_size)]
    rows = [{"prompt": prompt} for prompt in prompts]
    fields = dict(
        beta=args.beta, temperature=1.0, per_device_train_batch_size=in_step // forwards,
        gradient_accumulation_steps=forwards, max_steps=args.cycles * args.num_minibatches, bf16=bf16,
        model_init_kwargs={"dtype": "bfloat16" if args.bf16_weights else "float32"},
        teacher_model_init_kwargs={"dtype": "bfloat16" if bf16 else "float32"},
        gradient_checkpointing=False, learning_rate=1e-6, use_cpu=on_cpu, seed=0,
        logging_strategy="no", save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    if args.trainer == "gkd":
        for row in rows:
            ids = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
            row["input_ids"] = ids + ids[-1:] * args.max_new_tokens
        fields |= dict(lmbda=1.0, seq_kd=False, max_new_tokens=args.max_new_tokens)
        kind, config, sampling = gkd.GKDTrainer, gkd.GKDConfig, "generate_on_policy_outputs"
    else:
        fields |= dict(max_completion_length=args.max_new_tokens, shuffle_dataset=False)
        fields |= dict(generation_kwargs={"min_new_tokens": args.min_new_tokens})
        kind, config, sampling = trl.DistillationTrainer, trl.DistillationConfig, "_generate_single_turn"
    fields |= args.arguments
    memory = LossMemory(NoGpu if on_cpu else torch.cuda)
    clock = Clock(args.num_minibatches, memory)
    rollouts, lengths = [], []
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = kind(
            model=args.student_model,
            teacher_model=args.teacher_model,
            args=config(output_dir=output_dir, **copy.deepcopy(fields)),  # GKDTrainer modifies its fields
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        if args.trainer == "gkd":  # its config has no field for it
            trainer.generation_config.min_new_tokens = args.min_new_tokens
        sample, compute_loss, training_step = getattr(trainer, sampling), trainer.compute_loss, trainer.training_step

        def timed(*arguments: Any, **options: Any) -> Any:
            began = now()
            sampled = sample(*arguments, **options)
            rollouts.append(now() - began)
            found = [(row != -100).sum().item() for row in sampled[2]] if args.trainer == "gkd" else map(len, sampled)
            lengths.extend(found)
            return sampled

        def watched_loss(*arguments: Any, **options: Any) -> Any:
            memory.open()  # after sampling
            return compute_loss(*arguments, **options)

        def watched_step(*arguments: Any, **options: Any) -> Any:
            loss = training_step(*arguments, **options)
            memory.close()  # after the backward pass, before the optimizer
            return loss

        setattr(trainer, sampling, timed)
        trainer.compute_loss, trainer.training_step = watched_loss, watched_step
        trainer.train()

    def by_cycle(values: list[float], gather: Any) -> list[float]:
        size, odd = divmod(len(values), args.cycles)
        if odd or not size:
            raise RuntimeError(f"TRL sampled or stepped {len(values)} times in {args.cycles} cycles: not as expected")
        return [gather(values[i : i + size]) for i in range(0, len(values), size)]

    measured = {
        "trl": trl.__version__,
        "fields": fields,
        "seconds": [end - begin for begin, end in zip(clock.marks[:-1], clock.marks[1:], strict=True)],
        "seconds_rollout": by_cycle(rollouts, sum),
        "completion_length": by_cycle(lengths, lambda part: sum(part) / len(part)),
        "memory_gib": None if on_cpu else clock.peaks,
        "loss_memory_gib": None if on_cpu else by_cycle(clock.losses, max),
    }
    unfinished = Path(args.out).with_suffix(".part")
    unfinished.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    os.replace(unfinished, args.out)


if __name__ == "__main__":
    main()
