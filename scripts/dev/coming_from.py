"""Writes docs/coming_from.md from common/base/option_names.csv, the names of options in other toolkits.

Run: python scripts/dev/coming_from.py
"""

import itertools
import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from common.base import option_names

HEAD = """\
# Coming from TRL, verl, ms-swift or OpenRLHF

What your options are called here, or why they are absent. A script says the same when you pass one:

```
$ python gspo/gspo.py --num_generations 8
gspo.py: error: unknown option --num_generations: a name of TRL and ms-swift, here --group_size
```

## A whole command

1. Choose the script: `grpo/grpo.py` or `gspo/gspo.py` for RL, `gkd/gkd.py` for distillation,
   `gkd/sft.py` for supervised fine-tuning. On several GPUs take the file beside it that ends in
   `_multigpu` (one process) or `_ddp` (torchrun).
2. Write the reward into the script, or a copy of it: a function, in `REWARDS` with its weight.
3. Count prompts, not completions: `batch_size` is the prompts of a step over all GPUs, `group_size`
   the completions of each, `num_minibatches` the optimizer steps per rollout. `micro_batch_tokens`
   replaces gradient accumulation and affects memory and speed only.
4. Count rollouts, not optimizer steps: `steps`, `save_every`, `eval_every` and `warmup_steps` do.
5. Translate the other options with the lists below; `--help` explains each.

For example, GRPO with TRL on one GPU:

```
trl grpo --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --dataset_name openai/gsm8k \\
    --dataset_config main --reward_funcs my_rewards.right_answer --num_generations 8 \\
    --per_device_train_batch_size 16 --gradient_accumulation_steps 4 --max_completion_length 256 \\
    --beta 0.04 --epsilon 0.2 --learning_rate 1e-6 --max_steps 400 --bf16 --output_dir runs/gsm8k
```

A rollout has 16 x 4 completions, which are 8 groups of 8, and one optimizer step. TRL's default
loss is DAPO's, as here. TRL's default learning rate falls to 0, as with linear here.

```
python grpo/grpo.py --policy_model Qwen/Qwen2.5-0.5B-Instruct --train_data openai/gsm8k:main \\
    --eval_data openai/gsm8k:main --batch_size 8 --group_size 8 --num_minibatches 1 \\
    --max_new_tokens 256 --kl_coef 0.04 --epsilon_low 0.2 --epsilon_high 0.2 \\
    --learning_rate 1e-6 --lr_schedule linear --steps 400 --dtype bf16 --out_dir runs/gsm8k
```

The names below are those of TRL 1.9 with transformers 5, verl of January 2026, ms-swift 3.9 and
4.5, and OpenRLHF 0.9.9 and of August 2026, whose options have dots. Names in capitals are constants
at the top of a script.
"""


def page() -> str:
    """The text of docs/coming_from.md."""
    parts = [HEAD]
    rows = option_names.table()
    for group, members in itertools.groupby(rows, key=lambda row: row.group):
        parts.append(f"\n## {group}\n\n")
        entries: dict[tuple, list[str]] = {}  # rows with the same answer share a line
        for row in members:
            names = ", ".join(f"`{name}`" for name in row.names)
            entries.setdefault((row.here, row.note), []).append(f"{names} ({', '.join(row.toolkits)})")
        for (here, note), names in entries.items():
            text = " and ".join(f"**`{name}`**" for name in here) or "not here"
            note = re.sub(r"\*_\w+\.py", r"`\g<0>`", note)  # or two of them would be emphasis
            line = f"- {', '.join(names)}: {text}{f'; {note}' if note else ''}"
            wrapped = textwrap.wrap(line, 100, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
            parts.append("\n".join(wrapped) + "\n")
    return "".join(parts)


if __name__ == "__main__":
    (ROOT / option_names.PAGE).write_text(page(), encoding="utf-8")
