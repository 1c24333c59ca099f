"""Samples completions from a model or checkpoint, for one prompt or interactively.

Run:   python scripts/sample.py runs/gspo/checkpoint-000060
       python scripts/sample.py MODEL --prompt "What is 47 + 38?" --samples 4
Without --prompt it reads prompts from the terminal, one per line, until an empty line or Ctrl-D. With --chat they are
the turns of one conversation.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.base import console, settings


def option_parser() -> argparse.ArgumentParser:
    """The options of the command line."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("model", help="'toy', a folder, a checkpoint of a run, or a hub id")
    found.add_argument("--prompt", type=console.text, default="", help="complete this prompt and exit")
    found.add_argument("--chat", action="store_true", help="each prompt continues one conversation")
    found.add_argument("--system_prompt", type=console.text, default="", help="of the conversation")
    found.add_argument("--chat_template_kwargs", default="", help="JSON: '{\"enable_thinking\": false}'")
    found.add_argument("--samples", type=int, default=1, help="completions per prompt (default: %(default)s)")
    found.add_argument("--temperature", type=float, default=1.0, help="0: greedy (default: %(default)s)")
    found.add_argument("--max_new_tokens", type=int, default=256, help="tokens per completion (default: %(default)s)")
    found.add_argument("--device", help="cuda or cpu (default: cuda if there is one)")
    found.add_argument("--dtype", default="auto", help="auto, fp32, bf16 or fp16 (default: %(default)s)")
    found.add_argument("--seed", type=int, default=0, help="seed of sampling (default: %(default)s)")
    return found


if __name__ == "__main__":
    option_parser().parse_args()  # answers --help and wrong options before torch is imported, which takes seconds

import torch

from common.generation import rollout
from common.loop import pin_date_of
from common.model import models, sources
from common.tasks import data


def lines_from_terminal() -> Iterator[str]:
    """Yields prompts typed at the terminal, until an empty line or end of input."""
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            return
        if not line:
            return
        yield line


def main(argv: list[str] | None = None) -> None:
    """Loads the model and prints completions."""
    console.protect()
    parser = option_parser()
    args = parser.parse_args(argv)
    if min(args.samples, args.max_new_tokens) < 1:
        parser.error(f"--samples {args.samples}, --max_new_tokens {args.max_new_tokens}: each must be at least 1")
    if args.chat and (args.samples > 1 or args.prompt):
        parser.error("--chat goes with one sample per prompt, typed at the terminal: leave out --samples and --prompt")

    template_kwargs = settings.template_kwargs(args.chat_template_kwargs)
    pin_date_of(args.model)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer, model = models.load_policy(args.model, torch.device(device), args.dtype)
    if not tokenizer.chat_template and (args.chat or args.system_prompt):
        parser.error("--chat and --system_prompt need a chat template, and this tokenizer has none")
    sampler = rollout.Sampler(
        [model],
        end_ids=sources.end_token_ids(tokenizer, model),
        pad_id=tokenizer.pad_token_id,
        max_new_tokens=args.max_new_tokens,
        compile=False,  # compiling takes longer than a few completions
    )
    opening = [{"role": "system", "content": args.system_prompt}] if args.system_prompt else []
    history = list(opening)
    for turn, text in enumerate([args.prompt] if args.prompt else lines_from_terminal()):
        prompt = [*history, {"role": "user", "content": text}] if tokenizer.chat_template else text
        batch = sampler.generate(
            data.encode_prompts([prompt], "prompt", tokenizer, template_kwargs=template_kwargs),
            group_size=args.samples,
            temperature=args.temperature,
            seed=args.seed,
            step=turn,
        )
        completions = batch.texts(tokenizer)
        for completion, truncated in zip(completions, batch.truncated.tolist(), strict=True):
            print(completion + (" [cut off]" if truncated else ""))
        if args.chat:
            history = [*prompt, {"role": "assistant", "content": completions[0]}]


if __name__ == "__main__":
    main()
