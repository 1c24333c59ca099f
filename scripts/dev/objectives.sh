#!/usr/bin/env bash
# Compares the objectives of grpo/grpo.py, the kinds of advantages and the group sizes at equal samples.
#
# Run:   MODEL=models/smollm2 bash scripts/dev/objectives.sh     SETTINGS="losses", JOBS=10 GPUS=2 for a larger machine
# Needs: python scripts/make_arithmetic.py data/arithmetic --test 1024
# Environment: MODEL; DATA; OUT; SETTINGS of "losses advantages groups stale"; STEPS 80 of 128 completions, SEEDS "0 1 2";
#              JOBS and GPUS of side_by_side.sh. "stale" makes 16 optimizer steps per rollout, at a larger rate.
# Leaves: OUT/<name>-<seed>, and OUT/<settings>.png with the table of plot_samples.py
set -euo pipefail
cd "$(dirname "$0")/../.."
MODEL=${MODEL:-models/smollm2} DATA=${DATA:-data/arithmetic} STEPS=${STEPS:-80} PYTHON=${PYTHON:-python}
export OUT=${OUT:-runs/objectives} SEEDS=${SEEDS:-0 1 2}
LOSSES="grpo dapo dr_grpo cispo dppo sapo gspo gspo_token luspo gmpo vespo"
command=("$PYTHON" grpo/grpo.py --policy_model "$MODEL" --train_data "$DATA/train.jsonl" --eval_data "$DATA/test.jsonl"
    --steps "$STEPS" --batch_size 16 --group_size 8 --max_new_tokens 48 --learning_rate 5e-6 --eval_every 20
    --eval_examples 1024 --save_every "$STEPS")

compared() { # name, names of its runs
    local name=$1 runs=()
    shift
    for setting in "$@"; do runs+=("$OUT/$setting"-[0-9]*/); done
    echo "--- $name"
    "$PYTHON" scripts/dev/plot_samples.py "${runs[@]}" --out "$OUT/$name.png"
}

for settings in ${SETTINGS:-losses advantages groups stale}; do
    case $settings in
        losses)
            for loss in $LOSSES; do echo "$loss --loss $loss"; done | bash scripts/dev/side_by_side.sh "${command[@]}"
            compared losses $LOSSES
            ;;
        advantages)
            kinds="batch none rloo maxrl lite_ppo reinforce_pp"
            for kind in $kinds; do echo "$kind --advantage_scale $kind"; done |
                bash scripts/dev/side_by_side.sh "${command[@]}"
            compared advantages $kinds
            ;;
        groups)
            for size in 2 4 16; do echo "group$size --group_size $size --batch_size $((128 / size))"; done |
                bash scripts/dev/side_by_side.sh "${command[@]}"
            compared groups group2 group4 group16
            ;;
        stale)
            for loss in $LOSSES; do echo "stale-$loss --loss $loss"; done |
                bash scripts/dev/side_by_side.sh "${command[@]}" --epochs 4 --learning_rate 2e-5 --steps 40 --eval_every 10
            compared stale $(printf 'stale-%s ' $LOSSES)
            ;;
        *) echo "error: SETTINGS=$settings: must be of losses, advantages, groups, stale" >&2 && exit 2 ;;
    esac
done
