#!/usr/bin/env bash
# Distills from a teacher server in one command: starts the server, trains, restarts the server if it dies, stops both.
#   bash scripts/run_gkd.sh                                                        built-in models; CPU if there is no GPU
#   bash scripts/run_gkd.sh --teacher_gpus 2,3 --student_gpus 0,1 --teacher_model Qwen/Qwen2.5-7B-Instruct \
#       -- --student_model Qwen/Qwen2.5-0.5B-Instruct --out_dir runs/distilled
# Options: --teacher_gpus LIST  the last GPU; "" for the CPU
#          --student_gpus LIST  all others; with several, gkd_ddp.py trains on them
#          --port N             15555
#          --restarts N         limit for a teacher that dies, 10; training waits meanwhile
#          --teacher_model NAME, --teacher_dtype D, --max_top_k, --max_tokens, --max_batch_tokens, --max_queue N:
#                              see gkd/teacher_server.py
# Options after "--" go to the training script. The exit code is that of the training.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh

port=15555 restarts=10 teacher_gpus=unset student_gpus=unset teacher_model=toy-teacher teacher_options=()
while [ $# -gt 0 ]; do
    case $1 in
        --) shift && break ;;
        -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" && exit 0 ;;
        --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" && continue ;;
        --*-*) name=${1#--} && set -- "--${name//-/_}" "${@:2}" && continue ;;
    esac
    case $1 in
        --teacher_gpus) require_value "$@" && teacher_gpus=$2 ;;
        --student_gpus) require_value "$@" && student_gpus=$2 ;;
        --port) require_value "$@" && require_number "$1" "$2" 1 65535 && port=$2 ;;
        --restarts) require_value "$@" && require_number "$1" "$2" 0 1000000 && restarts=$2 ;;
        --teacher_model) require_value "$@" && teacher_model=$2 ;;
        --teacher_dtype) require_value "$@" && teacher_options+=(--dtype "$2") ;;
        --max_top_k | --max_tokens | --max_batch_tokens | --max_queue)
            require_value "$@" && require_number "$1" "$2" 0 999999999 && teacher_options+=("$1" "$2")
            ;;
        *) echo "error: unknown option $1: options of the training stand after --; see --help" >&2 && exit 2 ;;
    esac
    shift 2
done
python=python3
[ ! -x .venv/bin/python ] || python=.venv/bin/python
export PYTHONUNBUFFERED=1
mkdir -p runs

# who computes where
found=${CUDA_VISIBLE_DEVICES-$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | paste -sd, || true)}
IFS=, read -ra gpus <<<"$found"
if [ "$teacher_gpus" = unset ]; then
    teacher_gpus=""
    [ ${#gpus[@]} -eq 0 ] || teacher_gpus=${gpus[-1]}
fi
if [ "$student_gpus" = unset ]; then
    student_gpus=""
    for gpu in "${gpus[@]}"; do
        [[ ",$teacher_gpus," == *",$gpu,"* ]] || student_gpus+=${student_gpus:+,}$gpu
    done
    [ -n "$student_gpus" ] || student_gpus=$teacher_gpus # one GPU for both, or none
fi
echo "run_gkd: ${#gpus[@]} GPUs found; teacher on ${teacher_gpus:-the CPU}, student on ${student_gpus:-the CPU}" >&2
IFS=, read -ra own <<<"$student_gpus"
if [ ${#own[@]} -gt 1 ]; then
    train=("$python" -m torch.distributed.run --standalone --nproc_per_node="${#own[@]}" gkd/gkd_ddp.py)
else
    train=("$python" gkd/gkd.py)
fi
[ ${#own[@]} -gt 0 ] || train+=(--device cpu)
train+=(--teacher_url "http://127.0.0.1:$port" "$@")

log=runs/teacher-$port.log pid_file=runs/teacher-$port.pid
starting="" trainer="" follower="" stopping=no

running() { # pid: and not one that has ended and that nobody has waited for
    [ -n "$1" ] && [ -d "/proc/$1" ] && ! grep -q '^State:.[ZX]' "/proc/$1/status" 2>/dev/null
}

show() { # name: lines with a prefix, also those of a progress bar; outlives Ctrl-C, for what is said while saving
    trap '' INT
    stdbuf -oL tr '\r' '\n' | sed -u "/^ *\$/d;s/^/[$1] /"
}

pause() { # a signal is handled at once, not after the second
    sleep 1 &
    wait "$!" || true
}

start_teacher() {
    bash scripts/start_teacher.sh --gpus "$teacher_gpus" --port "$port" --log "$log" -- \
        --teacher_model "$teacher_model" ${teacher_options[@]+"${teacher_options[@]}"} &
    starting=$!
}

on_signal() { # the training finishes its step and saves; a second signal stops it at once
    stopping=yes
    ! running "$starting" || kill -TERM "$starting"
    ! running "$trainer" || kill -TERM "$trainer"
}

at_exit() {
    trap '' INT TERM
    if running "$trainer"; then
        kill -TERM "$trainer"
        wait "$trainer" || true
    fi
    ! running "$starting" || kill -TERM "$starting"
    bash scripts/start_teacher.sh --port "$port" --stop || true
    sleep 0.5 # what it said last
    ! running "$follower" || kill "$follower"
}

if running "$(cat "$pid_file" 2>/dev/null)"; then
    echo "error: a teacher runs on port $port already: train with it (gkd/gkd.py --teacher_url http://127.0.0.1:$port)," \
        "stop it (scripts/start_teacher.sh --port $port --stop), or give another --port" >&2
    exit 1
fi
trap on_signal INT TERM
: >>"$log"
tail -n 0 -F "$log" > >(show teacher) 2>/dev/null &
follower=$!
trap at_exit EXIT
start_teacher
while running "$starting"; do pause; done
[ "$stopping" = no ] || exit 130
wait "$starting"

# a session of its own: Ctrl-C comes through on_signal, once
CUDA_VISIBLE_DEVICES=$student_gpus setsid "${train[@]}" > >(show train) 2>&1 &
trainer=$!
while running "$trainer"; do
    pause
    if [ "$stopping" = yes ] || running "$starting" || running "$(cat "$pid_file" 2>/dev/null)"; then
        continue
    fi
    if [ "$restarts" -gt 0 ]; then
        restarts=$((restarts - 1))
        echo "run_gkd: the teacher died; starting it again, $restarts more times at most" >&2
        start_teacher
    elif [ "$restarts" -eq 0 ]; then
        restarts=-1
        echo "run_gkd: the teacher died once too often: see $log; the training saves when its patience ends" >&2
    fi
done
code=0
wait "$trainer" || code=$?
exit "$code"
