#!/usr/bin/env bash
# Runs many settings of a training script side by side, several on each GPU, and waits for all of them.
#
# Run:   printf '%s\n' "dapo --loss dapo" "gspo --loss gspo" | OUT=runs/losses bash scripts/dev/side_by_side.sh \
#            python grpo/grpo.py --policy_model models/smollm2 --steps 80
# Stdin: one setting a line, its name and its options; each runs once per seed, in OUT/<name>-<seed>
# Environment: OUT; SEEDS "0 1 2"; JOBS at once, 8; GPUS, how many there are, 1
# A run that is complete is not repeated; one that fails is named, and the exit code is 1.
set -euo pipefail
OUT=${OUT:?folder for the runs} SEEDS=${SEEDS:-0 1 2} JOBS=${JOBS:-8} GPUS=${GPUS:-1}
mkdir -p "$OUT"

one() { # number of the job, seed, setting, command
    local number=$1 seed=$2 name=${3%% *} options=${3#"${3%% *}"} run
    shift 3
    run=$OUT/$name-$seed
    [ ! -f "$run.done" ] || return 0
    # shellcheck disable=SC2086
    if CUDA_VISIBLE_DEVICES=$((number % GPUS)) "$@" $options --seed "$seed" --out_dir "$run" > "$run.log" 2>&1; then
        touch "$run.done"
    else
        echo "failed: $run, see $run.log" >&2
        return 1
    fi
}
export -f one
export OUT GPUS

number=0
while read -r setting; do
    [ -n "$setting" ] || continue
    for seed in $SEEDS; do
        printf '%s\0%s\0%s\0' "$number" "$seed" "$setting"
        number=$((number + 1))
    done
done | xargs -0 -P "$JOBS" -n 3 bash -c 'command=("${@:1:$#-3}"); one "${@: -3}" "${command[@]}"' _ "$@"
