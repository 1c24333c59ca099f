"""Accuracy of a model or checkpoint on a file of prompts and answers, greedy or over several samples.

Run:   python scripts/evaluate.py runs/gspo/checkpoint-000060                      on the built-in test rows
       python scripts/evaluate.py MODEL --data test.jsonl --examples 300 --max_new_tokens 256
       python scripts/evaluate.py MODEL --data test.jsonl --samples 8              mean and pass@8 at temperature 1
Prints one JSON line; --out FILE writes every completion beside it. Right or wrong is decided by common/answers.py.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import data, models, rewards, rollout


def main(argv: list[str] | None = None) -> None:
    """Loads the model, completes every prompt, and prints the accuracy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="'toy', a folder, a checkpoint of a run, or a hub id")
    parser.add_argument("--data", default="toy", help="as train_data of the scripts (default: %(default)s)")
    parser.add_argument("--split", default="test", help="split of a data set that has several (default: %(default)s)")
    parser.add_argument("--examples", type=int, default=0, help="rows used, from the first; 0: all")
    parser.add_argument(
        "--samples", type=int, default=0, help="completions per prompt at --temperature; 0: one, greedy"
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="with --samples (default: %(default)s)")
    parser.add_argument("--max_new_tokens", type=int, default=128, help="tokens per completion (default: %(default)s)")
    parser.add_argument("--max_prompt_tokens", type=int, default=512, help="longer prompts are dropped, with a count")
    parser.add_argument("--system_prompt", default="", help="put before prompts given as text")
    parser.add_argument("--batch_size", type=int, default=128, help="completions at a time (default: %(default)s)")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(default: %(default)s)"
    )
    parser.add_argument("--dtype", default="auto", help="auto, fp32, bf16 or fp16 (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of sampling (default: %(default)s)")
    parser.add_argument("--out", default="", help="JSONL file for prompts, completions and rewards")
    args = parser.parse_args(argv)

    tokenizer, model = models.load_policy(args.model, torch.device(args.device), args.dtype)
    examples = data.load_examples(
        args.data, tokenizer, args.max_prompt_tokens, split=args.split, system_prompt=args.system_prompt
    )
    examples = examples[: args.examples or None]
    group_size = max(1, args.samples)
    lines, prompts_at_once = [], max(1, args.batch_size // group_size)
    sampler = rollout.Sampler(
        [model],
        end_ids=models.end_token_ids(tokenizer, model),
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
            lines.append({**line, "score": score, "truncated": truncated, "tokens": int(batch.lengths[row])})
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
        result[f"pass@{args.samples}"] = scores[scored].amax(1).mean().item() if scored.any() else None
    if args.out:
        with open(args.out, "w", encoding="utf-8", errors="backslashreplace") as file:
            for line in lines:
                # a gold answer that cannot be graded has no score, and JSON has no NaN
                line["score"] = None if line["score"] != line["score"] else line["score"]
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
