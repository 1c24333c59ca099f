"""Trains one stage of a recipe with TRL, and saves a folder that `scripts/evaluate.py` measures.

Run:   python scripts/dev/recipe_trl.py sft --model models/smollm2 --train_data train.jsonl --out runs/trl-sft
       python scripts/dev/recipe_trl.py grpo --model runs/trl-sft --train_data train.jsonl --out runs/trl-grpo
       python scripts/dev/recipe_trl.py gspo --model runs/trl-sft --train_data train.jsonl --out runs/trl-gspo
       python scripts/dev/recipe_trl.py gkd --student runs/trl-sft --teacher models/big --train_data train.jsonl \\
           --out runs/trl-gkd
Needs: pip install trl (tested with TRL 1.16)
Prints one JSON line. `samples` are the conversations or completions that were trained on, `tokens` the tokens of their
completions, `seconds` the time from the start of train() to its end, `seconds_prepare` that of loading and tokenising
before it, `memory_gib` the peak of train(). TRL's progress and warnings go to stderr.

Rows are those of the training scripts: prompt or question, and answer. In every stage the weights are fp32 and the
forward and backward passes run under bf16 autocast, which is TRL's default; the saved weights have the dtype of the
folder that the stage began from. Completions are sampled by model.generate. cuDNN's attention is turned off, as in the
training scripts.

sft    SFTTrainer. The loss is over the completions. With --packing true, the strategy "bfd" fills rows of max_length
       with whole conversations. TRL 1.16 then passes positions that begin at 0 in every conversation and no attention
       mask, and turns the cache off; transformers derives the block-diagonal mask from these positions, in sdpa, eager
       and flex_attention. So conversations do not see one another without the package flash-attn, but sdpa computes
       the masked blocks, too, over all rows of a forward pass: by default these are at most 4. With "wrapped",
       conversations are cut at the ends of rows, and see one another. A step has the number of rows that holds
       batch_size conversations of mean length.
grpo   GRPOTrainer with the loss of grpo/grpo.py (DAPO, clipped at 0.2 and 0.28) and the reward math_match.
gspo   GRPOTrainer with ratios of whole sequences, clipped as --clip_preset of gspo/gspo.py says.
gkd    DistillationTrainer, on-policy, with the reverse KL.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from common.base import checks, console
from common.maths import losses
from common.model import sources
from common.tasks import data, rewards

try:
    import datasets
    import trl
except ImportError as error:
    raise ImportError(f"recipe_trl.py trains with the package trl: pip install trl ({error})") from error

PACKED_ROWS = 4  # in one pass at most
TOKEN_CLIP = (0.2, 0.28)  # epsilon_low and epsilon_high of grpo/grpo.py


def yes_or_no(value: str) -> bool:
    """Reads true or false from the command line."""
    if value not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{value!r} must be true or false")
    return value == "true"


def option_parser() -> argparse.ArgumentParser:
    """The options of the command line, by stage."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stages = found.add_subparsers(dest="stage", required=True)
    parsers = {name: stages.add_parser(name, help=f"options: {name} --help") for name in ("sft", "grpo", "gspo", "gkd")}
    for name, parser in parsers.items():
        sampled = name != "sft"
        unit = "prompts per rollout" if sampled else "conversations per optimizer step"
        if name == "gkd":
            parser.add_argument("--student", dest="model", required=True, help="folder")
            parser.add_argument("--teacher", required=True, help="folder of a model with the student's tokenizer")
        else:
            parser.add_argument("--model", required=True, help="folder")
        parser.add_argument("--train_data", required=True, help="rows with prompt or question, and answer")
        parser.add_argument("--out", required=True, help="new folder for the trained model")
        parser.add_argument("--batch_size", type=int, default=16 if sampled else 64, help=f"{unit} (%(default)s)")
        parser.add_argument("--learning_rate", type=float, default=5e-6 if sampled else 2e-5, help="(%(default)s)")
        parser.add_argument("--warmup_steps", type=int, default=5, help="in the unit of steps (%(default)s)")
        schedules, usual = ["constant", "linear", "cosine"], "constant" if sampled else "cosine"
        parser.add_argument("--lr_schedule", choices=schedules, default=usual, help="after the warm-up (%(default)s)")
        parser.add_argument("--system_prompt", type=console.text, default="", help="opens every chat")
        parser.add_argument("--max_prompt_tokens", type=int, default=512, help="longer prompts are dropped")
        parser.add_argument("--seed", type=int, default=0, help="of data order and sampling (%(default)s)")
        parser.add_argument("--device", default="auto", choices=["auto", "cpu"], help="auto: a GPU if there is one")
        parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp32"], help="of the passes (%(default)s)")
        parser.add_argument("--arguments", type=json.loads, default={}, help="JSON of fields of TRL's config that win")
        if sampled:
            parser.add_argument("--steps", type=int, default=60, help="rollouts (%(default)s)")
            parser.add_argument("--max_new_tokens", type=int, default=128, help="per completion (%(default)s)")
            parser.add_argument("--temperature", type=float, default=1.0, help="of sampling (%(default)s)")
            parser.add_argument("--sequences", type=int, default=0, help="completions in one pass; 0: a minibatch")
        if name in ("grpo", "gspo"):
            parser.add_argument("--group_size", type=int, default=8, help="completions per prompt (%(default)s)")
            parser.add_argument("--num_minibatches", type=int, default=4, help="optimizer steps per rollout")
    parsers["gspo"].add_argument("--clip_preset", default="dense", choices=sorted(losses.CLIP_PRESETS),
                                 help="3e-3/4e-3 or 3e-4/4e-4 (%(default)s)")  # fmt: skip
    sft = parsers["sft"]
    sft.add_argument("--epochs", type=int, default=1, help="passes over the data (%(default)s)")
    sft.add_argument("--max_length", type=int, default=1024, help="tokens of a row; the rest is cut (%(default)s)")
    sft.add_argument("--packing", type=yes_or_no, default=True, help="fill rows with conversations (%(default)s)")
    sft.add_argument("--packing_strategy", default="bfd", choices=["bfd", "bfd_split", "wrapped"], help="(%(default)s)")
    sft.add_argument("--padding_free", type=yes_or_no, default=False,
                     help="with --packing false: one row without padding; nothing is cut (%(default)s)")  # fmt: skip
    sft.add_argument("--sequences", type=int, default=0, help="rows in one pass; 0: up to 4 if packed, else batch_size")
    sft.add_argument("--attention", default="sdpa", choices=["sdpa", "eager", "flex_attention", "flash_attention_2"],
                     help="(%(default)s)")  # fmt: skip
    sft.add_argument("--liger", type=yes_or_no, default=False, help="layers of liger-kernel (%(default)s)")
    return found


def messages_of(example: data.Example, system_prompt: str) -> list[dict]:
    """The chat messages that an example asks with."""
    asked = example.prompt
    asked = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    return [{"role": "system", "content": system_prompt}, *asked] if system_prompt else asked


def parts(args: argparse.Namespace) -> tuple[int, int]:
    """Sequences of a forward pass, and forward passes of an optimizer step, of a stage that samples.

    Raises:
        ValueError: the completions of a rollout cannot be cut into parts of equal size.
    """
    minibatches = getattr(args, "num_minibatches", 1)
    total = args.batch_size * getattr(args, "group_size", 1)
    in_step, left = divmod(total, minibatches)
    passes, rest = divmod(in_step, args.sequences or in_step)
    checks.require(
        not left and not rest,
        f"{total} completions, num_minibatches = {minibatches}, sequences = {args.sequences}",
        "TRL takes parts of equal size only",
        "choose numbers that divide one another",
    )
    return in_step // passes, passes


def shared_fields(args: argparse.Namespace, steps_per_unit: int = 1) -> dict[str, Any]:
    """Fields that the configs of all trainers have.

    Args:
        args: of the command line.
        steps_per_unit: optimizer steps in one step of --warmup_steps.
    """
    on_cpu = args.device == "cpu" or not torch.cuda.is_available()
    schedule = "constant_with_warmup" if args.lr_schedule == "constant" else args.lr_schedule
    return dict(
        learning_rate=args.learning_rate, lr_scheduler_type=schedule, warmup_steps=args.warmup_steps * steps_per_unit,
        weight_decay=0.0, max_grad_norm=1.0, seed=args.seed, bf16=args.dtype == "bf16", use_cpu=on_cpu,
        gradient_checkpointing=False, model_init_kwargs={"dtype": "float32"},
        logging_strategy="no", save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip


def sft_fields(args: argparse.Namespace, lengths: list[int]) -> dict[str, Any]:
    """Fields of SFTConfig.

    Args:
        args: of the command line.
        lengths: tokens of every conversation.

    Raises:
        ValueError: the conversations of a step cannot be cut into passes of equal size.
    """
    rows = args.batch_size
    if args.packing:
        rows = max(1, round(args.batch_size * sum(min(n, args.max_length) for n in lengths) / len(lengths)
                            / args.max_length))  # fmt: skip
    in_pass = args.sequences or (max(n for n in range(1, PACKED_ROWS + 1) if rows % n == 0) if args.packing else rows)
    checks.require(rows % in_pass == 0, f"sequences = {in_pass}", f"must divide the {rows} rows of a step",
                   "choose another --sequences or --batch_size")  # fmt: skip
    padding_free = args.padding_free and not args.packing
    fields = shared_fields(args) | dict(
        num_train_epochs=args.epochs, per_device_train_batch_size=in_pass, gradient_accumulation_steps=rows // in_pass,
        max_length=None if padding_free else args.max_length, packing=args.packing,
        packing_strategy=args.packing_strategy, padding_free=padding_free, shuffle_dataset=True,
        completion_only_loss=True, use_liger_kernel=args.liger,
    )  # fmt: skip
    fields["model_init_kwargs"]["attn_implementation"] = args.attention
    return fields


def sampling_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of the configs of the trainers that sample; raises as in `parts`."""
    in_pass, passes = parts(args)
    minibatches = getattr(args, "num_minibatches", 1)
    return shared_fields(args, minibatches) | dict(
        per_device_train_batch_size=in_pass, gradient_accumulation_steps=passes, max_steps=args.steps * minibatches,
        max_completion_length=args.max_new_tokens, temperature=args.temperature, top_k=0, top_p=1.0,
    )  # fmt: skip


def grpo_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of GRPOConfig, of the stages grpo and gspo; raises as in `parts`."""
    fields = sampling_fields(args)
    by_sequence = args.stage == "gspo"
    low, high = losses.CLIP_PRESETS[args.clip_preset] if by_sequence else TOKEN_CLIP
    return fields | dict(
        importance_sampling_level="sequence" if by_sequence else "token", loss_type="grpo" if by_sequence else "dapo",
        epsilon=low, epsilon_high=high, beta=0.0, scale_rewards="group", num_generations=args.group_size,
        num_iterations=1, steps_per_generation=args.num_minibatches * fields["gradient_accumulation_steps"],
    )  # fmt: skip


def gkd_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of DistillationConfig; raises as in `parts`."""
    dtype = "bfloat16" if args.dtype == "bf16" else "float32"
    return sampling_fields(args) | dict(beta=1.0, teacher_model_init_kwargs={"dtype": dtype})


def math_reward(seen: list[float]) -> Callable[..., list[float | None]]:
    """Makes TRL's reward function of `rewards.math_match`; the mean of every call is appended to `seen`."""

    def math_match(
        completions: list, answer: list[str], accepted: list | None = None, **columns: list
    ) -> list[float | None]:
        texts = [turns if isinstance(turns, str) else turns[0]["content"] for turns in completions]
        scores = rewards.math_match(texts, answer, **({} if accepted is None else {"accepted": accepted}))
        known = [score for score in scores if not math.isnan(score)]
        seen.append(round(sum(known) / len(known), 4) if known else math.nan)
        print(f"rollout {len(seen)}: reward {seen[-1]}", file=sys.stderr, flush=True)
        return [None if math.isnan(score) else score for score in scores]  # None: TRL leaves the completion out

    return math_match


def count_samples(trainer: Any, tally: Counter) -> None:
    """Counts what a trainer samples, from now on, as `samples`, `tokens` and `prompt_tokens` of `tally`."""
    sample = trainer._generate_single_turn

    def counted(prompt_ids: list[list[int]], *arguments: Any, **options: Any) -> Any:
        sampled = sample(prompt_ids, *arguments, **options)
        ids = sampled[0] if isinstance(sampled, tuple) else sampled  # GRPOTrainer also returns log-probabilities
        tally["samples"] += len(ids)
        tally["tokens"] += sum(map(len, ids))
        tally["prompt_tokens"] += sum(map(len, prompt_ids))
        return sampled

    trainer._generate_single_turn = counted


def count_rows(rows: Any, conversations: int, epochs: int) -> Counter:
    """What training on prepared rows amounts to: `samples`, `tokens` and `prompt_tokens`.

    Args:
        rows: dicts with `input_ids` and `labels`, -100 where there is no loss, and `seq_lengths` if packed.
        conversations: of the data, for rows that do not say how many they hold.
        epochs: passes over them.
    """
    tally = Counter()
    for row in rows:
        trained = sum(label != -100 for label in row["labels"])
        tally["tokens"] += epochs * trained
        tally["prompt_tokens"] += epochs * (len(row["labels"]) - trained)
        tally["samples"] += epochs * len(row.get("seq_lengths") or ())
    tally["samples"] = tally["samples"] or epochs * conversations
    return tally


def main(argv: list[str] | None = None) -> None:
    """Trains the stage, saves the model and prints what it took."""
    console.protect()
    parser = option_parser()
    args = parser.parse_args(argv)
    out = Path(args.out)
    # cuDNN's attention with a mask has NaN in its gradient at some lengths on H100 and H200 (pytorch/pytorch#196678)
    torch.backends.cuda.enable_cudnn_sdp(False)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        parser.error(f"--out {out} is a file or holds some: it must be new or empty, so choose another")
    began = time.perf_counter()
    saved_dtype = transformers.AutoConfig.from_pretrained(args.model, trust_remote_code=False).dtype or torch.float32
    tokenizer = sources.load_tokenizer(args.model)
    examples = data.load_examples(args.train_data, tokenizer, args.max_prompt_tokens, need_answer=args.stage != "gkd",
                                  system_prompt=args.system_prompt)  # fmt: skip
    rows = [{"prompt": messages_of(example, args.system_prompt)} for example in examples]
    tally, seen = Counter(), []
    if args.stage == "sft":
        for row, example in zip(rows, examples, strict=True):
            row["completion"] = [{"role": "assistant", "content": example.answer}]
        chats = [row["prompt"] + row["completion"] for row in rows]
        lengths = [len(ids) for ids in tokenizer.apply_chat_template(chats, tokenize=True, return_dict=False)]
        fields, kind, config = sft_fields(args, lengths), trl.SFTTrainer, trl.SFTConfig
        others = {}
    elif args.stage == "gkd":
        fields, kind, config = gkd_fields(args), trl.DistillationTrainer, trl.DistillationConfig
        others = {"teacher_model": args.teacher}
    else:
        for row, example in zip(rows, examples, strict=True):
            row["answer"] = example.answer
            if "accepted" in example.columns:
                row["accepted"] = example.columns["accepted"]
        fields, kind, config = grpo_fields(args), trl.GRPOTrainer, trl.GRPOConfig
        others = {"reward_funcs": math_reward(seen)}
    fields |= args.arguments
    with tempfile.TemporaryDirectory() as scratch:
        trainer = kind(
            model=args.model,
            args=config(output_dir=scratch, **fields),
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer,
            **others,
        )
        trainer.remove_callback(transformers.PrinterCallback)  # which would print to stdout
        if args.stage == "sft":
            tally = count_rows(trainer.train_dataset, len(examples), args.epochs)
        else:
            count_samples(trainer, tally)
        on_gpu = torch.cuda.is_available() and not fields["use_cpu"]
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        trainer.train()
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        memory = round(torch.cuda.max_memory_allocated() / 2**30, 3) if on_gpu else None
        model = trainer.accelerator.unwrap_model(trainer.model).to(saved_dtype)
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
    optimizer_steps = trainer.state.global_step
    steps = optimizer_steps if args.stage == "sft" else args.steps
    result = {"stage": args.stage, "trl": trl.__version__, "out": str(out), "steps": steps}
    result |= {"optimizer_steps": optimizer_steps, **{name: tally[name] for name in ("samples", "tokens")}}
    result |= {"prompt_tokens": tally["prompt_tokens"], "seconds": round(seconds, 2)}
    result |= {"seconds_prepare": round(started - began, 2), "memory_gib": memory}
    if args.stage == "sft":
        result["samples_per_step"] = round(tally["samples"] / optimizer_steps, 1)
        result["loss"] = round(trainer.state.log_history[-1]["train_loss"], 4)  # mean over the steps
    if seen:
        result["rewards"] = [None if math.isnan(mean) else mean for mean in seen]  # of every rollout
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
