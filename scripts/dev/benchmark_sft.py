"""Speed of gkd/sft.py beside TRL's SFTTrainer: the same model, the same rows, the same conversations per step.

Run:   python scripts/dev/benchmark_sft.py qwen0.5b --peer packed padding_free padded liger --out sft.json
       python scripts/dev/benchmark_sft.py tiny --device cpu --steps 6 --batch_size 4
Needs: pip install trl for --peer (tested with TRL 1.16; recipe_trl.py says how it packs), liger-kernel for "liger"
Rows are random words: prompts of 40 to 120 tokens, replies of 60 to 260, as long as those of GSM8K. Each side is a
process of its own and makes one pass over them. Ours: median of the steps after --warmup, and of all steps, with
compilation. TRL: train() from start to end, which compiles nothing.
packed         rows of 1,024 tokens, filled with whole conversations ("bfd"); up to 4 rows in a pass
padding_free   all conversations of a step in one row
padded         all conversations of a step, padded
liger          padding_free, with the layers of liger-kernel
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]
import benchmark_base as base

PEERS = {
    "packed": {"packing": "true", "max_length": 1024},
    "padding_free": {"packing": "false", "padding_free": "true"},
    "padded": {"packing": "false"},
    "liger": {"packing": "false", "padding_free": "true", "liger": "true"},
}
TEMPLATE = (  # TRL's chats need one; words of the tokenizer stand for roles
    "{% for turn in messages %}{{ 'w3 ' if turn['role'] == 'assistant' else 'w1 ' }}{{ turn['content'] }}"
    "{{ ' <end> ' if turn['role'] == 'assistant' else ' ' }}{% endfor %}{{ 'w3 ' if add_generation_prompt else '' }}"
)


def with_template(model: Path, folder: Path) -> Path:
    """A folder with the files of a model, and a chat template."""
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).symlink_to(file)
    tokenizer = base.make_tokenizer(base.AutoConfig.from_pretrained(model, trust_remote_code=False).vocab_size)
    tokenizer.chat_template = TEMPLATE
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).unlink()
    tokenizer.save_pretrained(folder)
    return folder


def write_rows(path: Path, rows: int, vocabulary: int) -> int:
    """Writes conversations of random words.

    Args:
        path: of the file.
        rows: conversations.
        vocabulary: ids of the model.

    Returns:
        Their tokens.
    """
    rng, tokens = random.Random(0), 0
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(rows):
            prompt, reply = (
                [f"w{rng.randrange(vocabulary - len(base.SPECIALS))}" for _ in range(rng.randint(*span))]
                for span in ((40, 120), (60, 260))
            )
            tokens += len(prompt) + len(reply) + 3  # two of the template, and the end
            file.write(json.dumps({"prompt": " ".join(prompt), "answer": " ".join(reply)}) + "\n")
    return tokens


def ours(model: Path, rows: Path, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Measures gkd/sft.py."""
    options = dict(policy_model=model, train_data=rows, eval_data="", steps=args.steps, batch_size=args.batch_size,
                   max_tokens=1024, device=args.device, out_dir=folder / "run", save_every=10**6, best_by="",
                   on_collapse="off", learning_rate=1e-6)  # fmt: skip
    command = [sys.executable, str(base.ROOT / "gkd" / "sft.py"), *base.as_options(options), *args.options]
    metrics = folder / "run" / "metrics.jsonl"

    def lines() -> list[dict]:
        found = metrics.read_text(encoding="utf-8").splitlines() if metrics.is_file() else []
        return [line for line in map(json.loads, found) if "seconds_update" in line]

    base.run(command, folder, lambda: len(lines()) == args.steps, args.timeout)
    seconds = [line["seconds"] for line in lines()]
    return {"step": statistics.median(seconds[args.warmup :]), "total": sum(seconds),
            "memory_gib": max((gib for line in lines() for gib in line["memory_gib"]), default=None)}  # fmt: skip


def peer(name: str, model: Path, rows: Path, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Measures TRL's SFTTrainer by recipe_trl.py."""
    options = dict(model=model, train_data=rows, out=folder / "out", batch_size=args.batch_size, learning_rate=1e-6,
                   device="cpu" if args.device == "cpu" else "auto", **PEERS[name])  # fmt: skip
    command = [sys.executable, str(base.ROOT / "scripts" / "dev" / "recipe_trl.py"), "sft", *base.as_options(options)]
    log = folder / "log.txt"

    def result() -> dict | None:
        found = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
        marked = [line[line.index('{"stage"') :] for line in found if '{"stage"' in line]  # behind a progress bar
        return next((json.loads(line) for line in reversed(marked) if line.endswith("}")), None)

    base.run(command, folder, lambda: result() is not None, args.timeout)
    found = result()
    return {"step": found["seconds"] / found["samples"] * args.batch_size, "total": found["seconds"],
            "memory_gib": found["memory_gib"]}  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    """Prints a table, and what it was measured with."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("shape", choices=list(base.SHAPES), metavar="SHAPE", help="of benchmark.py")
    add("--peer", nargs="*", choices=list(PEERS), default=[], help="TRL, in these ways")
    add("--steps", type=int, default=30, help="optimizer steps (default: %(default)s)")
    add("--warmup", type=int, default=5, help="steps of ours that do not count (default: %(default)s)")
    add("--batch_size", type=int, default=64, help="conversations per step (default: %(default)s)")
    add("--device", default="auto", choices=["auto", "cuda", "cpu"])
    add("--timeout", type=float, default=600.0, help="seconds for each side (default: %(default)s)")
    add("--out", type=Path, help="JSON file")
    add("options", nargs="*", help="after --: of gkd/sft.py")
    args = parser.parse_args(argv)
    work_dir = Path(tempfile.gettempdir()) / "rl_hand_benchmark"
    weights = base.make_model(args.shape, 1, work_dir)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        model = with_template(weights, Path(scratch) / "model")
        rows = Path(scratch) / "rows.jsonl"
        tokens = write_rows(rows, args.steps * args.batch_size, base.SHAPES[args.shape][1]) / args.steps
        for name in ("gkd/sft.py", *args.peer):
            folder = Path(scratch) / name.replace("/", "-")
            folder.mkdir()
            measure = (ours,) if name == "gkd/sft.py" else (peer, name)
            found = base.attempt(*measure, model, rows, folder, args)
            if "error" not in found:
                found |= {"tokens_per_second": tokens / found["step"]}
            results[name] = found
            if args.out:
                text = json.dumps({"shape": args.shape, "results": results, **base.machine()}, indent=1)
                args.out.write_text(text + "\n", encoding="utf-8")
    table = [["", "s per step", "conversations/s", "tokens/s", "all steps, s", "peak GiB"]]
    for name, found in results.items():
        if "error" in found:
            table.append([name, found["error"][:60], *["-"] * 4])
            continue
        per_second = args.batch_size / found["step"]
        table.append([name, f"{found['step']:.3f}", f"{per_second:.0f}", f"{found['tokens_per_second']:,.0f}",
                      f"{found['total']:.1f}", base.shown(found["memory_gib"])])  # fmt: skip
    about = ", ".join(f"{name} {value}" for name, value in base.machine().items() if value is not None)
    print(base.markdown(table), "", about, sep="\n")


if __name__ == "__main__":
    main()
