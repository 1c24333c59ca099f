#!/usr/bin/env bash
# Time to a good model on GSM8K with one GPU: fixed model, data, number of samples, and accuracy to reach. Prints a row
# for the table of records; docs/speedrun.md has the rules.
#   bash scripts/speedrun.sh smollm2        SmolLM2-135M-Instruct, demonstrations first
#   bash scripts/speedrun.sh qwen           Qwen2.5-0.5B-Instruct, reinforcement alone
#   MODEL=models/smollm2 TRAIN=train.jsonl TEST=test.jsonl OUT=runs/mine bash scripts/speedrun.sh smollm2 --seed 1
# Options after the track go to every training script. The clock runs from the start of the first command to the end of
# the last, with imports, compilation and saving; the test set is asked after it has stopped. OUT must be new.
set -euo pipefail
cd "$(dirname "$0")/.."

track=${1:-}
[ $# -gt 0 ] && shift
TRAIN=${TRAIN:-openai/gsm8k:main} TEST=${TEST:-$TRAIN}
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
common=(--train_data "$TRAIN" --eval_data "" --best_by "" --sample_every 0)
case $track in
    smollm2) # at most two passes over the demonstrations, and 16,384 samples
        MODEL=${MODEL:-HuggingFaceTB/SmolLM2-135M-Instruct} target=${TARGET:-0.09} tokens=300
        steps=${STEPS:-234} rl_steps=${RL_STEPS:-32}
        ;;
    qwen) # at most 16,000 samples
        MODEL=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct} target=${TARGET:-0.502} tokens=320
        steps=0 rl_steps=${RL_STEPS:-31}
        ;;
    *) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" && exit 2 ;;
esac
OUT=${OUT:-runs/speedrun-$track}
[ -e "$OUT" ] && echo "error: $OUT exists: a speedrun starts anew; remove it, or set OUT" >&2 && exit 2
mkdir -p "$OUT"

start=$(date +%s.%N) policy=$MODEL runs=()
if [ "$steps" -gt 0 ]; then
    "$PYTHON" gkd/sft.py "${common[@]}" --policy_model "$policy" --steps "$steps" --batch_size 64 \
        --learning_rate 6e-4 --save_every "$steps" --out_dir "$OUT/sft" "$@"
    policy=$(printf '%s/sft/checkpoint-%06d' "$OUT" "$steps") runs+=("$OUT/sft")
fi
"$PYTHON" gspo/gspo.py "${common[@]}" --policy_model "$policy" --steps "$rl_steps" --batch_size 64 --group_size 8 \
    --max_new_tokens "$tokens" --learning_rate "$([ "$track" = qwen ] && echo 5e-6 || echo 2e-5)" \
    --save_every "$rl_steps" --out_dir "$OUT/gspo" "$@"
seconds=$(echo "$(date +%s.%N) $start" | awk '{ printf "%.1f", $1 - $2 }')
policy=$(printf '%s/gspo/checkpoint-%06d' "$OUT" "$rl_steps") runs+=("$OUT/gspo")

"$PYTHON" scripts/evaluate.py "$policy" --data "$TEST" --max_new_tokens "$tokens" --batch_size 512 \
    --out "$OUT/answers.jsonl" > "$OUT/accuracy.json"
"$PYTHON" scripts/report_runs.py "${runs[@]}" --json > "$OUT/runs.json"
"$PYTHON" - "$OUT" "$track" "$target" "$seconds" <<'PY'
import json, platform, subprocess, sys
from datetime import date
import torch
out, track, target, seconds = sys.argv[1], sys.argv[2], *map(float, sys.argv[3:])
accuracy = json.load(open(f"{out}/accuracy.json"))
runs = json.load(open(f"{out}/runs.json"))
memory = runs["total"]["memory_gib"]
commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip() or "-"
card = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU"
reached = accuracy["accuracy"] >= target
print("| date | track | card | seconds | GiB | demonstrations | samples | tokens | accuracy | commit |")
print("|---|---|---|---|---|---|---|---|---|---|")
samples = [run["samples"] for run in runs["runs"]]
row = [date.today(), track, card, f"{seconds:.0f}", f"{memory:.1f}" if memory else "-",
       f"{sum(samples[:-1]):,}", f"{samples[-1]:,}", f"{runs['total']['tokens']:,.0f}",
       f"{accuracy['accuracy']:.4f} [{accuracy['accuracy_low']:.4f}, {accuracy['accuracy_high']:.4f}]", commit]
print("|", " | ".join(map(str, row)), "|")
print(f"torch {torch.__version__}; {'reached' if reached else 'missed'} {target:g}")
sys.exit(not reached)
PY
