"""Measures seconds per cycle of TRL's GRPOTrainer with GSPO's options, for `scripts/dev/benchmark.py --peer trl`.

Run:   python scripts/dev/benchmark_trl.py --policy_model FOLDER --train_data prompts.jsonl --out trl.json
A cycle is one generation and its num_minibatches optimizer steps, timed from the end of one to the end of the next.
The reward is always 0; nothing is evaluated, saved or reported. Tested with TRL 1.16.
       --vllm awake                    samples with vLLM in the same process, in place of model.generate; or
       --vllm sleep                    vLLM also gives its memory back during the update, and takes the weights anew
vLLM is TRL's mode "colocate", on one GPU, with a share of the memory that --arguments can change
({"vllm_gpu_memory_utilization": 0.5}). TRL 1.16 warns of a vLLM that is not 0.22 to 0.31, and runs it. Its model has
the dtype of the saved weights. memory_gib is None with vLLM, whose cache takes that share, needed or not.
"""

import argparse
import importlib.metadata
import json
import os
import tempfile
import time
from pathlib import Path

import torch
import transformers

try:
    import datasets
    import trl
except ImportError as error:
    raise ImportError(f"benchmark_trl.py measures the package trl: pip install trl ({error})") from error


def no_reward(completions: list[str], **columns: list) -> list[float]:
    """0 for every completion: the work of a cycle does not depend on it."""
    return [0.0] * len(completions)


class Clock(transformers.TrainerCallback):
    """Records when training began and when each cycle ended."""

    def __init__(self, num_minibatches: int):
        self.num_minibatches, self.marks = num_minibatches, []

    def on_train_begin(self, args, state, control, **others):
        """Marks the start of the first cycle."""
        self.marks.append(now())

    def on_step_end(self, args, state, control, **others):
        """Marks the end of a cycle after its last optimizer step."""
        if state.global_step % self.num_minibatches == 0:
            self.marks.append(now())


def now() -> float:
    """Seconds, after all queued GPU work is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def main(argv: list[str] | None = None) -> None:
    """Trains for some cycles and writes their timings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy_model", required=True, help="folder")
    parser.add_argument("--train_data", required=True, help="JSONL with prompts as text")
    parser.add_argument("--out", required=True, help="JSON file: seconds of every cycle, and more")
    parser.add_argument("--cycles", type=int, default=6, help="(default: %(default)s)")
    parser.add_argument("--batch_size", type=int, default=8, help="prompts per cycle (default: %(default)s)")
    parser.add_argument("--group_size", type=int, default=8, help="completions per prompt (default: %(default)s)")
    parser.add_argument("--num_minibatches", type=int, default=4, help="optimizer steps per cycle")
    parser.add_argument("--sequences", type=int, default=0, help="in one forward; 0: all of an optimizer step")
    parser.add_argument("--max_new_tokens", type=int, default=256, help="per completion (default: %(default)s)")
    parser.add_argument("--min_new_tokens", type=int, default=0, help="per completion (default: %(default)s)")
    parser.add_argument("--kl_coef", type=float, default=0.0, help="above 0: with a reference model")
    parser.add_argument("--device", default="auto", help="cuda, cpu, or auto")
    parser.add_argument("--dtype", default="auto", help="bf16, fp32, or auto: bf16 on a GPU")
    parser.add_argument("--bf16_weights", action="store_true", help="weights and optimizer states in bf16, too")
    parser.add_argument("--vllm", choices=["awake", "sleep"], help="sample with vLLM in this process")
    parser.add_argument("--arguments", type=json.loads, default={}, help="JSON of GRPOConfig fields that win")
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
    lines = Path(args.train_data).read_text(encoding="utf-8").splitlines()
    rows = datasets.Dataset.from_list([{"prompt": json.loads(line)["prompt"]} for line in lines])
    fields = dict(
        importance_sampling_level="sequence", loss_type="grpo", epsilon=3e-3, epsilon_high=4e-3, beta=args.kl_coef,
        num_generations=args.group_size, num_iterations=1, steps_per_generation=args.num_minibatches * forwards,
        per_device_train_batch_size=in_step // forwards, gradient_accumulation_steps=forwards,
        max_steps=args.cycles * args.num_minibatches, max_completion_length=args.max_new_tokens,
        temperature=1.0, top_k=0, top_p=1.0, generation_kwargs={"min_new_tokens": args.min_new_tokens},
        bf16=bf16, model_init_kwargs={"dtype": "bfloat16" if args.bf16_weights else "float32"},
        gradient_checkpointing=False, learning_rate=1e-6, shuffle_dataset=False, use_cpu=on_cpu, seed=0,
        logging_strategy="no", save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    # AutoTokenizer would take the model type's usual class and lose a custom tokenizer
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(args.policy_model, padding_side="left")
    if args.vllm:
        fixed = args.min_new_tokens == args.max_new_tokens  # ignore_eos costs nothing, min_tokens changes the logits
        longest = max(map(len, tokenizer(list(rows["prompt"]))["input_ids"])) + args.max_new_tokens
        fields |= dict(
            use_vllm=True, vllm_mode="colocate", vllm_enable_sleep_mode=args.vllm == "sleep",
            vllm_max_model_length=longest,
            generation_kwargs={"ignore_eos": True} if fixed else {"min_tokens": args.min_new_tokens},
        )  # fmt: skip
    fields |= args.arguments
    clock = Clock(args.num_minibatches)
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = trl.GRPOTrainer(
            model=args.policy_model,
            reward_funcs=no_reward,
            args=trl.GRPOConfig(output_dir=output_dir, **fields),
            train_dataset=rows,
            processing_class=tokenizer,
            callbacks=[clock],
        )
        rollouts, lengths, generate = [], [], trainer._generate_single_turn

        def timed(*arguments, **options):
            began = now()
            completion_ids, others = generate(*arguments, **options)
            rollouts.append(now() - began)
            lengths.append(sum(map(len, completion_ids)) / len(completion_ids))
            return completion_ids, others

        trainer._generate_single_turn = timed
        trainer.train()
    measured = {
        "trl": trl.__version__,
        "vllm": importlib.metadata.version("vllm") if args.vllm else None,
        "fields": fields,
        "seconds": [end - begin for begin, end in zip(clock.marks[:-1], clock.marks[1:], strict=True)],
        "seconds_rollout": rollouts,
        "completion_length": lengths,
        "memory_gib": None if on_cpu or args.vllm else round(torch.cuda.max_memory_allocated() / 2**30, 3),
    }
    unfinished = Path(args.out).with_suffix(".part")
    unfinished.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    os.replace(unfinished, args.out)


if __name__ == "__main__":
    main()
