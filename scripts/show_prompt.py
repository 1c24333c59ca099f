"""Shows what a row of a data set becomes: the text and the tokens of its prompt, the answer, the other columns.

Run:   python scripts/show_prompt.py rows.jsonl Qwen/Qwen2.5-0.5B-Instruct --row 3
Options have the names and the meaning of those of a training script. Only the tokenizer of the model is loaded.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.base import console, settings


def option_parser() -> argparse.ArgumentParser:
    """The options of the command line."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("data", help="'toy', a file, a folder, or a hub id, as train_data")
    found.add_argument("model", help="'toy', a folder, a checkpoint of a run, or a hub id")
    found.add_argument("--row", type=int, default=0, help="row number, from 0 (default: %(default)s)")
    found.add_argument("--split", default="train", help="of a folder or hub id (default: %(default)s)")
    found.add_argument("--system_prompt", type=console.text, default="", help="opens every chat")
    found.add_argument("--chat_template_kwargs", default="", help="JSON: '{\"enable_thinking\": false}'")
    found.add_argument("--no_chat_template", action="store_true", help="as with apply_chat_template off")
    return found


if __name__ == "__main__":
    option_parser().parse_args()  # answers --help and wrong options before torch is imported, which takes seconds

from common.loop import pin_date_of
from common.model import sources
from common.tasks import data


def main(argv: list[str] | None = None) -> None:
    """Loads data and tokenizer, and prints one row."""
    console.protect()
    parser = option_parser()
    args = parser.parse_args(argv)
    pin_date_of(args.model)
    tokenizer = sources.load_tokenizer(args.model)
    examples = data.load_examples(
        args.data, tokenizer, sys.maxsize, split=args.split, apply_chat_template=not args.no_chat_template,
        system_prompt=args.system_prompt, template_kwargs=settings.template_kwargs(args.chat_template_kwargs),
        need_answer=False,
    )  # fmt: skip
    if not 0 <= args.row < len(examples):
        parser.error(f"--row {args.row}: {args.data} has the rows 0 to {len(examples) - 1}")
    example = examples[args.row]
    print(f"row {example.index}: {len(example.prompt_ids)} prompt tokens\n{tokenizer.decode(example.prompt_ids)}\n")
    for token in example.prompt_ids:
        print(f"{token:8} {tokenizer.decode([token])!r}")
    print(f"\nopened thought: {example.reply_start!r}\nanswer: {example.answer!r}\ncolumns: {example.columns!r}")


if __name__ == "__main__":
    main()
