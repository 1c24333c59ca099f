"""Measures the accuracy of a model or checkpoint on prompts with answers, greedily or over several samples.

Run:   python scripts/evaluate.py runs/gspo/checkpoint-000060                      on the built-in task
       python scripts/evaluate.py MODEL --data test.jsonl --examples 300 --max_new_tokens 256
       python scripts/evaluate.py MODEL --data test.jsonl --samples 8              mean and pass@8 at temperature 1
Prints one JSON line; --out FILE also saves every completion. Answers are compared by common/tasks/answers.py; any
answer listed in a row's `accepted` is correct.
With --samples N, over the prompts that can be scored:
  pass@k             probability that at least one of k samples is correct, for k = 1, 2, 4, ... and N; unbiased
  distinct           distinct texts among a prompt's N samples, mean
  distinct_correct   distinct correct answers among a prompt's N samples, mean; 0 for a prompt without one
  effective_correct  exp(entropy) of a prompt's correct answers, mean over prompts with one: 1 if all are the same,
                     their number if all are equally frequent
Answers are compared by value, not as text: "49", "49." and "The number is 49" are one answer.
"""

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.base import console
from common.generation import rollout
from common.model import models, sources
from common.tasks import data, rewards
from common.tasks.answers import normal_answer


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of k samples is correct.

    Args:
        num_samples: n, samples of one prompt.
        num_right: c, correct samples, 0 to n.
        k: attempts, 1 to n.

    Returns:
        1 - C(n - c, k) / C(n, k), in [0, 1]. Chen et al. 2021, arXiv 2107.03374, Eq. 1.

    Raises:
        ValueError: k or c is out of range.
    """
    if not 0 <= num_right <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(
            f"pass@{k} of {num_samples} samples with {num_right} right: k is 1 to the number of samples, and no more "
            "can be right than were drawn; take more samples"
        )
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)  # exact integers up to the division


def effective_number(answers: Sequence[str]) -> float:
    """exp(entropy) of the answers' frequencies: 1 for a single answer, n for n equally frequent ones.

    Raises:
        ValueError: there are no answers.
    """
    if not answers:
        raise ValueError("effective number of 0 answers: at least one is needed; leave out prompts without any")
    shares = [count / len(answers) for count in Counter(answers).values()]
    return math.exp(-sum(share * math.log(share) for share in shares))


def sample_metrics(groups: Sequence[Sequence[dict]], num_samples: int) -> dict[str, float | None]:
    """The metrics of --samples, as defined at the top of this file.

    Args:
        groups: for each scored prompt its N lines as in --out, with `score`, `completion` and `extracted`.
        num_samples: N, at least 1.

    Returns:
        Mean over the prompts by name; None if no prompt counts.
    """
    right = [[line["extracted"] for line in group if line["score"] == 1] for group in groups]
    ks = sorted({2**i for i in range(num_samples.bit_length())} | {num_samples})
    result = {f"pass@{k}": mean(pass_at_k(num_samples, len(answers), k) for answers in right) for k in ks}
    result["distinct"] = mean(len({line["completion"] for line in group}) for group in groups)
    result["distinct_correct"] = mean(len(set(answers)) for answers in right)
    result["effective_correct"] = mean(effective_number(answers) for answers in right if answers)
    return result


def mean(values: Iterable[float]) -> float | None:
    """Mean of the values; None if there are none."""
    values = list(values)
    return sum(values) / len(values) if values else None


def main(argv: list[str] | None = None) -> None:
    """Completes every prompt and prints the accuracy."""
    console.protect()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="'toy', a folder, a checkpoint of a run, or a hub id")
    parser.add_argument("--data", default="toy", help="as train_data of the scripts (default: %(default)s)")
    parser.add_argument("--split", default="test", help="split of a hub data set (default: %(default)s)")
    parser.add_argument("--examples", type=int, default=0, help="evaluate the first N rows; 0: all")
    parser.add_argument(
        "--samples", type=int, default=0, help="completions per prompt at --temperature; 0: one greedy completion"
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="with --samples (default: %(default)s)")
    parser.add_argument("--max_new_tokens", type=int, default=128, help="tokens per completion (default: %(default)s)")
    parser.add_argument("--max_prompt_tokens", type=int, default=512, help="longer prompts are dropped and counted")
    parser.add_argument("--system_prompt", type=console.text, default="", help="prepended to prompts given as text")
    parser.add_argument("--batch_size", type=int, default=128, help="completions at a time (default: %(default)s)")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(default: %(default)s)"
    )
    parser.add_argument("--dtype", default="auto", help="auto, fp32, bf16 or fp16 (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of sampling (default: %(default)s)")
    parser.add_argument("--out", default="", help="JSONL file for prompts, completions and scores")
    args = parser.parse_args(argv)
    for name, least in (("examples", 0), ("samples", 0), ("max_new_tokens", 1), ("batch_size", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name} {getattr(args, name)}: must be at least {least}")
    out = Path(args.out or "-")
    if args.out and (out.is_dir() or not out.absolute().parent.is_dir()):  # fail before sampling, not after
        parser.error(f"--out {out}: must be a file in a folder that exists; make the folder, or choose another name")

    tokenizer, model = models.load_policy(args.model, torch.device(args.device), args.dtype)
    examples = data.load_examples(
        args.data, tokenizer, args.max_prompt_tokens, split=args.split, system_prompt=args.system_prompt
    )
    examples = examples[: args.examples or None]
    group_size = max(1, args.samples)
    lines, prompts_at_once = [], max(1, args.batch_size // group_size)
    sampler = rollout.Sampler(
        [model],
        end_ids=sources.end_token_ids(tokenizer, model),
        pad_id=tokenizer.pad_token_id,
        max_new_tokens=args.max_new_tokens,
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
        completions = batch.texts(tokenizer)
        answers, columns = data.collate_columns(part, group_size)
        scores = rewards.math_match(completions, answers, **columns)
        for row, (completion, score) in enumerate(zip(completions, scores, strict=True)):
            example, truncated = part[row // group_size], bool(batch.truncated[row])
            line = {"row": example.index, "prompt": example.prompt, "answer": example.answer, "completion": completion}
            line |= {"extracted": normal_answer(completion), "score": score}
            lines.append({**line, "truncated": truncated, "tokens": int(batch.lengths[row])})
    scores = torch.tensor([line["score"] for line in lines]).view(-1, group_size)
    scored = ~scores.isnan().any(1)
    result = {
        "model": args.model,
        "data": args.data,
        "examples": int(scored.sum()),
        "unscored": int((~scored).sum()),
        "accuracy": scores[scored].mean().item() if scored.any() else None,
        "truncated": sum(line["truncated"] for line in lines) / len(lines),
        "tokens": sum(line["tokens"] for line in lines) / len(lines),
    }
    if args.samples:
        groups = [lines[i * group_size : (i + 1) * group_size] for i in scored.nonzero().flatten().tolist()]
        result |= sample_metrics(groups, group_size)
    if args.out:
        partial = out.with_name(f"{out.name}.partial")  # replaces an earlier file only when complete
        with open(partial, "w", encoding="utf-8", errors="backslashreplace") as file:
            for line in lines:
                # NaN, for a reference answer that cannot be graded, is not JSON
                line["score"] = None if line["score"] != line["score"] else line["score"]
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
        partial.replace(out)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
