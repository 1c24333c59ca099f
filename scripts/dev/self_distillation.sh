#!/usr/bin/env bash
# Compares self-distillation with GRPO at equal samples: the teacher is the student, and reads the answer.
#
# Run:   MODEL=models/smollm2 bash scripts/dev/self_distillation.sh     JOBS=10 GPUS=2 for a larger machine
# Needs: python scripts/make_arithmetic.py data/arithmetic --test 1024
# Environment: MODEL; DATA; OUT; STEPS 80 of 128 completions, SEEDS "0 1 2"; JOBS and GPUS of side_by_side.sh
# Leaves: OUT/<name>-<seed>, and OUT/self_distillation.png with the table of plot_samples.py
set -euo pipefail
cd "$(dirname "$0")/../.."
MODEL=${MODEL:-models/smollm2} DATA=${DATA:-data/arithmetic} STEPS=${STEPS:-80} PYTHON=${PYTHON:-python}
export OUT=${OUT:-runs/self_distillation} SEEDS=${SEEDS:-0 1 2}
RATES=${RATES:-5e-6 2e-5} # learning rates, of both
shared=(--train_data "$DATA/train.jsonl" --eval_data "$DATA/test.jsonl" --batch_size 16 --group_size 8 --steps "$STEPS"
    --max_new_tokens 48 --max_prompt_tokens 128 --eval_every 10 --eval_examples 1024 --save_every "$STEPS")

for rate in $RATES; do
    for loss in forward_kl reverse_kl jsd; do echo "$loss-start-$rate --loss $loss --learning_rate $rate"; done
    echo "forward_kl-present-$rate --loss forward_kl --learning_rate $rate --teacher_refresh 1"
done | bash scripts/dev/side_by_side.sh "$PYTHON" gkd/gkd.py --student_model "$MODEL" --teacher_model student \
    --teacher_prompt $'{prompt}\n\nThe correct answer is {answer}. Reply with the number {answer} only.' \
    --max_teacher_prompt_tokens 192 "${shared[@]}"
for rate in $RATES; do echo "grpo-$rate --learning_rate $rate"; done |
    bash scripts/dev/side_by_side.sh "$PYTHON" grpo/grpo.py --policy_model "$MODEL" "${shared[@]}"
"$PYTHON" scripts/dev/plot_samples.py "$OUT"/*-[0-9]/ --out "$OUT/self_distillation.png"
