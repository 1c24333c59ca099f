#!/usr/bin/env bash
# TRL beside the stages of scripts/recipe_gsm8k.sh: from the same models, with as many samples. Run the recipe first.
#   MODEL=models/smollm2 TRAIN=train.jsonl TEST=test.jsonl OUT=runs/gsm8k bash scripts/dev/recipe_peers.sh
# Needs: pip install trl (recipe_trl.py says which)
# Fine-tuning makes as many passes as the recipe. Reinforcement and distillation take the first STEPS rollouts, since
# TRL samples with model.generate; ours after as many is an evaluation of the recipe's run.
# Environment: MODEL, TRAIN, TEST, OUT and TOKENS of the recipe; STAGES "sft gspo grpo gkd", EPOCHS 2 of sft, STEPS 20
# (a multiple of 20: ours is evaluated then), SEQUENCES 64 in a forward pass, GPU the one to use. Started again, it goes
# on with the stages that are missing. Prints a table.
set -euo pipefail
cd "$(dirname "$0")/../.."

MODEL=${MODEL:-HuggingFaceTB/SmolLM2-135M-Instruct} OUT=${OUT:-runs/gsm8k}
TRAIN=${TRAIN:-openai/gsm8k:main} TEST=${TEST:-$TRAIN}
STAGES=${STAGES:-sft gspo grpo gkd} STEPS=${STEPS:-20} EPOCHS=${EPOCHS:-2} TOKENS=${TOKENS:-300}
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
[ -z "${GPU:-}" ] || export CUDA_VISIBLE_DEVICES=$GPU

last() { # the last checkpoint of a stage of the recipe
    local found=("$OUT/$1"/checkpoint-*)
    [ -d "${found[-1]}" ] || { echo "error: $OUT/$1 has no checkpoint: run scripts/recipe_gsm8k.sh first" >&2 && exit 1; }
    printf '%s' "${found[-1]}"
}

peer() { # stage and its options
    local out=$OUT/trl-$1
    if [ ! -f "$out.json" ]; then
        echo "--- TRL: $1"
        rm -rf "$out"
        "$PYTHON" scripts/dev/recipe_trl.py "$@" --train_data "$TRAIN" --out "$out" > "$out.run" 2> "$out.log" ||
            { tail "$out.log" >&2 && exit 1; }
        "$PYTHON" scripts/evaluate.py "$out" --data "$TEST" --max_new_tokens "$TOKENS" --batch_size 512 \
            --out "$out.jsonl" > "$out.part"
        mv "$out.part" "$out.json"
    fi
}

sampled=(--steps "$STEPS" --max_new_tokens "$TOKENS" --sequences "${SEQUENCES:-64}")
for stage in $STAGES; do
    case $stage in
        sft) peer sft --model "$MODEL" --epochs "$EPOCHS" --learning_rate 6e-4 ;;
        gspo | grpo)
            start=$(last sft)
            peer "$stage" --model "$start" --batch_size 128 --group_size 8 --learning_rate 2e-5 "${sampled[@]}"
            ;;
        gkd)
            start=$(last student)
            teacher=$(last gspo)
            peer gkd --student "$start" --teacher "$teacher" --batch_size 256 --learning_rate 1e-4 "${sampled[@]}"
            ;;
        *) echo "error: STAGES=$STAGES: must be of sft, gspo, grpo, gkd" >&2 && exit 2 ;;
    esac
done

"$PYTHON" - "$OUT" "$STEPS" $STAGES <<'PY'
import json, sys
out, steps, stages = sys.argv[1], int(sys.argv[2]), sys.argv[3:]


def shown(found, name):
    return f"{found[name]:.3f} [{found[name + '_low']:.3f}, {found[name + '_high']:.3f}]"


print("| stage | TRL's samples | before | ours | TRL | ours, s | TRL, s |\n|---|---|---|---|---|---|---|")
for stage in stages:
    run = json.loads(next(line for line in open(f"{out}/trl-{stage}.run") if line.startswith("{")))
    accuracy = json.loads(next(line for line in open(f"{out}/trl-{stage}.json") if line.startswith("{")))
    lines = [json.loads(line) for line in open(f"{out}/{stage}/metrics.jsonl")]
    evals = {line["step"]: line for line in lines if "eval_reward" in line}
    end = steps if stage != "sft" else max(evals)
    ours = shown(evals[end], "eval_reward") if end in evals else f"not evaluated at step {end}"
    seconds = sum(line.get("seconds", 0.0) for line in lines if line["step"] <= end)
    before = f"{evals[0]['eval_reward']:.3f}" if 0 in evals else "-"
    times = f"{seconds:.0f} | {run['seconds']:.0f}"
    print(f"| {stage} | {run['samples']:,} | {before} | {ours} | {shown(accuracy, 'accuracy')} | {times} |")
PY
