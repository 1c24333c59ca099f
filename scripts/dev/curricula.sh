#!/usr/bin/env bash
# Compares the ways to choose prompts on sums of 1 to 4 digits, of which a small model solves some always, some never.
#
# Run:   MODEL=models/smollm2 bash scripts/dev/curricula.sh            SEEDS="0" STEPS=40 for a short one
# Takes: 5 settings x 3 seeds x 150 steps of 16 x 8 completions, JOBS at once on GPUS (side_by_side.sh); matplotlib
# Leaves: OUT/<setting>-<seed>, and OUT/samples.png with the table of scripts/dev/plot_samples.py
set -euo pipefail
cd "$(dirname "$0")/../.."
MODEL=${MODEL:-HuggingFaceTB/SmolLM2-135M-Instruct} STEPS=${STEPS:-150} PYTHON=${PYTHON:-python}
export OUT=${OUT:-runs/curricula} SEEDS=${SEEDS:-0 1 2}
ROWS=64 # of each number of digits, of which 110 problems exist with one; a pass takes 16 steps

"$PYTHON" - "$OUT" "$ROWS" <<'PY'
import json
import random
import sys
from pathlib import Path

folder, count, rng = Path(sys.argv[1]), int(sys.argv[2]), random.Random(0)
folder.mkdir(parents=True, exist_ok=True)
files = {"train": [], "test": []}
for digits in range(1, 5):
    problems = {}
    while len(problems) < count + 32:
        lowest = 10 ** (digits - 1) if digits > 1 else 0
        a, b = sorted((rng.randrange(lowest, 10**digits) for _ in "ab"), reverse=True)
        sign = rng.choice("+-")
        problems[f"{a} {sign} {b}"] = a + b if sign == "+" else a - b
    for i, (problem, answer) in enumerate(problems.items()):
        row = {"prompt": f"What is {problem}? Answer with the number only.", "answer": str(answer), "digits": digits}
        files["train" if i < count else "test"].append(row)
for name, rows in files.items():
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
PY

printf '%s\n' uniform "greso --curriculum greso" "row --curriculum row" "dynamic --dynamic_sampling 2" \
    "both --curriculum greso --dynamic_sampling 2" |
    bash scripts/dev/side_by_side.sh "$PYTHON" grpo/grpo.py --policy_model "$MODEL" --train_data "$OUT/train.jsonl" \
        --eval_data "$OUT/test.jsonl" --eval_by digits --steps "$STEPS" --batch_size 16 --group_size 8 \
        --learning_rate 5e-6 --max_new_tokens 48 --eval_every 10 --save_every "$STEPS"
"$PYTHON" scripts/dev/plot_samples.py "$OUT"/*-[0-9]*/ --after 16 --out "$OUT/samples.png"
