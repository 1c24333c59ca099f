"""Measures the accuracy of a model or checkpoint on prompts with answers, greedily or over several samples.

Run:   python scripts/evaluate.py runs/gspo/best                                   on the run's eval_data
       python scripts/evaluate.py MODEL --data test.jsonl --examples 300 --max_new_tokens 256
       python scripts/evaluate.py MODEL --data test.jsonl --samples 8              mean and pass@8 at temperature 1
       python scripts/evaluate.py CHECKPOINT --rewards my/train.py                 the REWARDS of that script
       python scripts/evaluate.py MODEL --data test.jsonl --by level,topic         also by the values of columns
A checkpoint is asked as its run asked: data, system prompt, chat template, lengths and stop strings come from the run's
options unless given here. Prints one JSON line, whose `measure` says what was measured; --out FILE also saves every
completion. Without --rewards, answers are compared by common/tasks/answers.py, and any answer listed in a row's
`accepted` is correct. With it, `reward` is the weighted sum and a completion is correct if the first function gives 1.
`accuracy_low` and `accuracy_high` are the ends of the 95 % interval (common/tasks/accuracy.py), over prompts, whose
rows are independent; so for pass@k, majority and reward. --by adds `accuracy[level=3]` for each value of a column.
With --samples N, over the prompts that can be scored:
  pass@k             probability that at least one of k samples is correct, for k = 1, 2, 4, ... and N; unbiased
  majority           share of prompts whose most frequent answer is correct
  distinct           distinct texts among a prompt's N samples, mean
  distinct_correct   distinct correct answers among a prompt's N samples, mean; 0 for a prompt without one
  effective_correct  exp(entropy) of a prompt's correct answers, mean over prompts with one: 1 if all are the same,
                     their number if all are equally frequent
Answers are compared by value, not as text: "49", "49." and "The number is 49" are one answer.
"""

import argparse
import importlib.util
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.base import console, settings


def option_parser() -> argparse.ArgumentParser:
    """The options of the command line."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("model", help="'toy', a folder, a checkpoint of a run, or a hub id")
    found.add_argument("--data", dest="eval_data", help="as train_data of the scripts (default: the run's, or toy)")
    found.add_argument("--split", default="test", help="split of a hub data set (default: %(default)s)")
    found.add_argument("--examples", type=int, default=0, help="evaluate the first N rows; 0: all")
    found.add_argument(
        "--samples", type=int, default=0, help="completions per prompt at --temperature; 0: one greedy completion"
    )
    found.add_argument("--temperature", type=float, default=1.0, help="with --samples (default: %(default)s)")
    found.add_argument("--rewards", default="", help="training script whose REWARDS are measured")
    found.add_argument("--max_new_tokens", type=int, help="tokens per completion (default: the run's, or 128)")
    found.add_argument("--max_prompt_tokens", type=int, help="longer prompts are dropped (default: the run's, or 512)")
    found.add_argument("--system_prompt", type=console.text, help="opens every chat (default: the run's)")
    found.add_argument("--chat_template_kwargs", help="JSON arguments of the chat template (default: the run's)")
    found.add_argument("--stop_strings", help="JSON list of texts that end a completion (default: the run's)")
    found.add_argument("--batch_size", type=int, default=128, help="completions at a time (default: %(default)s)")
    found.add_argument("--device", help="cuda or cpu (default: cuda if there is one)")
    found.add_argument("--dtype", default="auto", help="auto, fp32, bf16 or fp16 (default: %(default)s)")
    found.add_argument("--seed", type=int, default=0, help="seed of sampling (default: %(default)s)")
    found.add_argument("--by", default="", help="columns of the data, separated by commas: accuracy by their values")
    found.add_argument("--out", default="", help="JSONL file for prompts, completions and scores")
    return found


if __name__ == "__main__":
    option_parser().parse_args()  # answers --help and wrong options before torch is imported, which takes seconds

import torch

from common.generation import rollout, stopping
from common.loop import pin_date_of
from common.loop.scorer import collate
from common.model import models, sources
from common.run import checkpoint_files
from common.tasks import accuracy, data, rewards, scoring
from common.tasks.answers import normal_answer

# options that a checkpoint's run decides unless they are given, and their values for any other model
OF_RUN = {"eval_data": "toy", "system_prompt": "", "apply_chat_template": True, "max_prompt_tokens": 512,
          "max_new_tokens": 128, "stop_strings": "", "chat_template_kwargs": ""}  # fmt: skip


def run_state(model: str) -> dict[str, Any]:
    """Step, options and notes of the run that saved a checkpoint; empty for any other model."""
    is_checkpoint = (Path(model) / checkpoint_files.STATE).is_file()
    return checkpoint_files.read_state(Path(model)) if is_checkpoint else {}


def load_rewards(script: str) -> scoring.Functions:
    """REWARDS of a training script, which is run as a module and may import its neighbours.

    Raises:
        ValueError: there is no such file, or it has no REWARDS, or other than pairs.
    """
    if not Path(script).is_file() or not script.endswith(".py"):
        raise ValueError(
            f"--rewards {script}: no such file with the suffix .py; name the training script that holds REWARDS"
        )
    sys.path.insert(0, str(Path(script).absolute().parent))  # as `python script` does
    spec = importlib.util.spec_from_file_location("rewards_script", script)
    module = sys.modules["rewards_script"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not getattr(module, "REWARDS", None):
        raise ValueError(f"--rewards {script}: it holds no REWARDS; define pairs of function and weight there")
    scoring.require_pairs(module.REWARDS)
    return module.REWARDS


def sample_metrics(groups: Sequence[Sequence[dict]], num_samples: int) -> dict[str, float | None]:
    """The metrics of --samples, as defined at the top of this file.

    Args:
        groups: for each scored prompt its N lines as in --out, with `right`, `completion` and `extracted`.
        num_samples: N, at least 1.

    Returns:
        Mean over the prompts by name; None if no prompt counts.
    """
    mean = accuracy.mean
    right = [[line["extracted"] for line in group if line["right"]] for group in groups]
    ks = sorted({2**i for i in range(num_samples.bit_length())} | {num_samples})
    result = {}
    for k in ks:
        result |= with_interval(f"pass@{k}", [accuracy.pass_at_k(num_samples, len(answers), k) for answers in right])
    votes = [([line["completion"] for line in group], [line["right"] for line in group]) for group in groups]
    result |= with_interval("majority", [accuracy.majority_is_right(*vote) for vote in votes])
    result["distinct"] = mean(len({line["completion"] for line in group}) for group in groups)
    result["distinct_correct"] = mean(len(set(answers)) for answers in right)
    result["effective_correct"] = mean(accuracy.effective_number(answers) for answers in right if answers)
    return result


def with_interval(name: str, values: Sequence[float]) -> dict[str, float | None]:
    """The mean of one value per prompt and its 95 % interval, by name; None where they are unknown."""
    found = dict(zip((f"{name}_low", f"{name}_high"), accuracy.interval(values), strict=True))
    return {name: accuracy.mean(values)} | {key: None if math.isnan(end) else end for key, end in found.items()}


def main(argv: list[str] | None = None) -> None:
    """Completes every prompt and prints the accuracy."""
    console.protect()
    parser = option_parser()
    args = parser.parse_args(argv)
    state = run_state(args.model)
    options = state.get("config", {})
    for name, usual in OF_RUN.items():
        if getattr(args, name, None) is None:
            setattr(args, name, options.get(name, usual))
    if not args.eval_data:
        parser.error("--data: the run has no eval_data; name the rows to measure")
    try:
        stops = settings.stop_strings(args.stop_strings)
        template_kwargs = settings.template_kwargs(args.chat_template_kwargs)
        functions = load_rewards(args.rewards) if args.rewards else ((rewards.math_match, 1.0),)
    except ValueError as error:
        parser.error(str(error))
    for name, least in (("examples", 0), ("samples", 0), ("max_new_tokens", 1), ("batch_size", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name} {getattr(args, name)}: must be at least {least}")
    out = Path(args.out or "-")
    if args.out and (out.is_dir() or not out.absolute().parent.is_dir()):  # fail before sampling, not after
        parser.error(f"--out {out}: must be a file in a folder that exists; make the folder, or choose another name")

    measured = ", ".join(scoring.names(function for function, _ in functions))
    if options:
        asked = {name: getattr(args, name) for name in OF_RUN if name in options}
        trained = ", ".join((state.get("notes") or {}).get("rewards") or ["not recorded"])
        print(f"asked as the run asked: {asked}", file=sys.stderr)
        hint = "" if args.rewards else " (--rewards SCRIPT measures those)"
        print(f"measured: {measured}; rewards of the run: {trained}{hint}", file=sys.stderr)

    pin_date_of(args.model)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer, model = models.load_policy(args.model, torch.device(device), args.dtype)
    examples = data.load_examples(
        args.eval_data, tokenizer, args.max_prompt_tokens, split=args.split,
        apply_chat_template=args.apply_chat_template, system_prompt=args.system_prompt, template_kwargs=template_kwargs,
    )  # fmt: skip
    examples = examples[: args.examples or None]
    scoring.check(functions, examples[0].columns)
    rows, columns = {example.index: example for example in examples}, settings.column_names(args.by)
    try:
        accuracy.require_columns([example.columns for example in examples], columns, "--by")
    except ValueError as error:
        parser.error(str(error))
    group_size = max(1, args.samples)
    lines, prompts_at_once = [], max(1, args.batch_size // group_size)
    sampler = rollout.Sampler(
        [model],
        end_ids=sources.end_token_ids(tokenizer, model),
        pad_id=tokenizer.pad_token_id,
        max_new_tokens=args.max_new_tokens,
        stopping=stopping.Stopping(stops, tokenizer) if stops else None,
    )
    for i in range(0, len(examples), prompts_at_once):
        part = examples[i : i + prompts_at_once]
        batch = sampler.generate(
            [example.prompt_ids for example in part],
            group_size=group_size,
            temperature=args.temperature if args.samples else 0,
            seed=args.seed,
            prompt_numbers=range(i, i + len(part)),
        )
        arguments = collate(part, batch, tokenizer, state.get("step", 0), stops)
        totals, by_function = scoring.score(functions, arguments)
        first = next(iter(by_function.values()))
        for row, completion in enumerate(arguments["completions"]):
            example, score = part[row // group_size], totals[row].item()
            line = {"row": example.index, "prompt": example.prompt, "answer": example.answer, "completion": completion}
            line |= {"extracted": normal_answer(completion), "score": None if math.isnan(score) else score}
            line |= {"right": first[row].item() >= 1, "truncated": bool(batch.truncated[row])}
            line |= {"tokens": int(batch.lengths[row])}
            if args.rewards:
                line |= {f"reward_{name}": values[row].item() for name, values in by_function.items()}
            lines.append({name: None if value != value else value for name, value in line.items()})  # NaN is not JSON
    groups = [lines[i : i + group_size] for i in range(0, len(lines), group_size)]
    scored = [group for group in groups if all(line["score"] is not None for line in group)]
    counted = [line for group in scored for line in group]
    right = [sum(line["right"] for line in group) / group_size for group in scored]
    result = {
        "model": args.model,
        "data": args.eval_data,
        "measure": f"REWARDS of {args.rewards}: {measured}" if args.rewards else measured,
        "examples": len(scored),
        "unscored": len(groups) - len(scored),
        **with_interval("accuracy", right),
        "truncated": accuracy.mean(line["truncated"] for line in lines),
        "tokens": accuracy.mean(line["tokens"] for line in lines),
    }
    if args.rewards:
        result |= with_interval("reward", [sum(line["score"] for line in group) / group_size for group in scored])
        for name in (name for name in lines[0] if name.startswith("reward_")):
            result[name] = accuracy.mean(line[name] for line in counted if line[name] is not None)
    by_label: dict[str, list[float]] = {}
    for group, share in zip(scored, right, strict=True):
        for label in accuracy.labels(rows[group[0]["row"]].columns, columns):
            by_label.setdefault(f"accuracy{label}", []).append(share)
    result |= {name: accuracy.mean(by_label[name]) for name in sorted(by_label)}
    if args.samples:
        result |= sample_metrics(scored, group_size)
    if args.out:
        partial = out.with_name(f"{out.name}.partial")  # replaces an earlier file only when complete
        with open(partial, "w", encoding="utf-8", errors="backslashreplace") as file:
            for line in lines:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
        partial.replace(out)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
