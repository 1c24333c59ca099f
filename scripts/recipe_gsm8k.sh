#!/usr/bin/env bash
# From a raw small model to a good one on GSM8K: supervised fine-tuning, reinforcement from there with GSPO and with
# GRPO, distillation of the result into a pruned student. The whole test set is asked after each stage.
#   bash scripts/recipe_gsm8k.sh                                   SmolLM2-135M-Instruct; docs/gsm8k.md has the results
#   MODEL=models/smollm2 TRAIN=train.jsonl TEST=test.jsonl OUT=runs/mine bash scripts/recipe_gsm8k.sh
# The model is never chosen by the test set: each stage keeps its last step. Started again, the recipe goes on where it
# stopped; another OUT starts anew. With two GPUs, GSPO and GRPO run side by side.
# Sizes (environment): SFT_STEPS 234, RL_STEPS 200, GKD_STEPS 100, KEEP 20 layers of the student, TOKENS 300 of a
# completion, SAMPLES 4 of each test problem beside the greedy one; 0: none
set -euo pipefail
cd "$(dirname "$0")/.."

MODEL=${MODEL:-HuggingFaceTB/SmolLM2-135M-Instruct} OUT=${OUT:-runs/gsm8k}
TRAIN=${TRAIN:-openai/gsm8k:main} TEST=${TEST:-$TRAIN}
SFT_STEPS=${SFT_STEPS:-234} RL_STEPS=${RL_STEPS:-200} GKD_STEPS=${GKD_STEPS:-100}
KEEP=${KEEP:-20} TOKENS=${TOKENS:-300} SAMPLES=${SAMPLES:-4}
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
data=(--train_data "$TRAIN" --eval_data "$TEST" --eval_examples 1000000 --max_new_tokens "$TOKENS" --best_by "")
mkdir -p "$OUT"

last() { printf '%s/%s/checkpoint-%06d' "$OUT" "$1" "$2"; } # the last checkpoint of a stage

train() { # name, steps, script and its options; nothing if the stage is done
    local name=$1 steps=$2
    [ -d "$(last "$name" "$steps")" ] && return
    echo "--- $name"
    "$PYTHON" "${@:3}" "${data[@]}" --steps "$steps" --save_every "$steps" --out_dir "$OUT/$name"
}

measure() { # name, model: greedy answers to the whole test set and, at the same time, SAMPLES sampled ones
    local ask=("$PYTHON" scripts/evaluate.py "$2" --data "$TEST" --max_new_tokens "$TOKENS" --batch_size 512) greedy
    { [ -f "$OUT/$1.jsonl" ] || "${ask[@]}" --out "$OUT/$1.jsonl"; } &
    greedy=$!
    [ "$SAMPLES" = 0 ] || [ -f "$OUT/$1-sampled.jsonl" ] ||
        "${ask[@]}" --samples "$SAMPLES" --out "$OUT/$1-sampled.jsonl"
    wait "$greedy"
}

measure start "$MODEL"

# 1. a warm start: two passes over the solutions; more of them learn the training problems by heart (docs/gsm8k.md)
train sft "$SFT_STEPS" gkd/sft.py --policy_model "$MODEL" --batch_size 64 --learning_rate 6e-4 --eval_every "$SFT_STEPS"
sft=$(last sft "$SFT_STEPS")
measure sft "$sft"

# 2. reinforcement from there: 128 problems x 8 samples a step
reinforce() { # name and script
    train "$1" "$RL_STEPS" "$2" --policy_model "$sft" --batch_size 128 --group_size 8 --learning_rate 2e-5 --eval_every 20
    measure "$1" "$(last "$1" "$RL_STEPS")"
}
gpus=$("$PYTHON" -c "import torch; print(torch.cuda.device_count())")
if [ "$gpus" -ge 2 ]; then
    CUDA_VISIBLE_DEVICES=1 reinforce grpo grpo/grpo.py > "$OUT/grpo.log" 2>&1 &
    grpo=$!
    CUDA_VISIBLE_DEVICES=0 reinforce gspo gspo/gspo.py
    wait "$grpo" || { tail "$OUT/grpo.log" >&2 && exit 1; }
else
    reinforce gspo gspo/gspo.py
    reinforce grpo grpo/grpo.py
fi

# 3. a smaller student: layers dropped, the same warm start, then the GSPO policy as teacher
[ -d "$OUT/pruned" ] || "$PYTHON" scripts/drop_layers.py "$sft" "$OUT/pruned" --keep "$KEEP"
train student "$SFT_STEPS" gkd/sft.py --policy_model "$OUT/pruned" --batch_size 64 --learning_rate 6e-4 \
    --eval_every "$SFT_STEPS"
train gkd "$GKD_STEPS" gkd/gkd.py --student_model "$(last student "$SFT_STEPS")" \
    --teacher_model "$(last gspo "$RL_STEPS")" --batch_size 128 --group_size 2 --learning_rate 1e-4 --eval_every 20
measure student "$(last student "$SFT_STEPS")"
measure gkd "$(last gkd "$GKD_STEPS")"

# 4. what came of it
"$PYTHON" scripts/report_runs.py "$OUT"/{sft,gspo,grpo,student,gkd}
"$PYTHON" scripts/compare_answers.py "$OUT"/{start,sft,gspo,grpo,student,gkd}.jsonl --of "$OUT/sft.jsonl" | tee "$OUT/greedy.md"
[ "$SAMPLES" = 0 ] || "$PYTHON" scripts/compare_answers.py "$OUT"/{start,sft,gspo,grpo,student,gkd}-sampled.jsonl \
    --of "$OUT/sft-sampled.jsonl" | tee "$OUT/sampled.md"
"$PYTHON" scripts/plot_run.py "$OUT/gspo" "$OUT/grpo" --out "$OUT/reinforcement.png"
"$PYTHON" scripts/plot_run.py "$OUT/sft" "$OUT/student" --out "$OUT/sft.png"
"$PYTHON" scripts/plot_run.py "$OUT/gkd" --out "$OUT/gkd.png"
