#!/usr/bin/env bash
# Trains a poster policy with its reward service in one command: starts the service, waits until it is ready, trains,
# restarts the service if it dies, and stops both at the end.
#   bash scripts/start_poster_training_with_reward_server.sh                 built-in policy; CPU if there is no GPU
#   bash scripts/start_poster_training_with_reward_server.sh --scorer visualquality_r1 \
#       -- --policy_model Qwen/Qwen2.5-VL-7B-Instruct --out_dir runs/poster-7b
# Options: --reward_gpu LIST   of the service; by default none with --scorer cpu, else the last GPU; "" for the CPU
#          --train_gpus LIST   all others; with several, torchrun starts a process on each
#          --port N            8899
#          --wait SECONDS      until the service must be ready; 60 with --scorer cpu, else 900
#          --reuse_server      use the service that runs on the port, and leave it running
#          --trainer FILE      grpo/poster/poster_grpo.py; it gets --reward_url URL and the options after "--"
#          --NAME VALUE        any other option goes to grpo/poster/reward_server.py
# Options after "--" go to the training script. Its --out_dir, runs/poster by default, gets reward_server.log,
# training.log, and launcher.json with the state of both. RL_HAND_REWARD_TOKEN holds the token of the service.
# The exit code is that of the training; 75: the service was away too long, and the same command resumes.
# Ctrl-C: the training finishes its step and saves, then the service stops; a second Ctrl-C stops both at once.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh

port=8899 scorer=cpu reward_gpu=unset train_gpus=unset wait_seconds="" reuse=no trainer_file=grpo/poster/poster_grpo.py
server_options=()
while [ $# -gt 0 ]; do
    case $1 in
        --reuse_server | --reuse-server) reuse=yes && shift && continue ;;
        --) shift && break ;;
        -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" && exit 0 ;;
        --token=* | --token) echo "error: --token: the training needs it too; set RL_HAND_REWARD_TOKEN" >&2 && exit 2 ;;
        --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" && continue ;;
        --*-*) name=${1#--} && set -- "--${name//-/_}" "${@:2}" && continue ;;
        --*) ;;
        *) echo "error: unknown option $1: options of the training stand after --; see --help" >&2 && exit 2 ;;
    esac
    require_value "$@"
    case $1 in
        --reward_gpu) reward_gpu=$2 ;;
        --train_gpus) train_gpus=$2 ;;
        --port) require_number "$1" "$2" 1 65535 && port=$2 ;;
        --wait) require_number "$1" "$2" 1 1000000 && wait_seconds=$2 ;;
        --trainer) trainer_file=$2 ;;
        --scorer) scorer=$2 && server_options+=("$1" "$2") ;;
        *) server_options+=("$1" "$2") ;;
    esac
    shift 2
done
[ -f "$trainer_file" ] || { echo "error: trainer $trainer_file: there is no such file" >&2 && exit 2; }
out_dir=runs/poster previous=""
for word in "$@"; do
    case $previous in --out_dir | --out-dir) out_dir=$word ;; esac
    case $word in --out_dir=* | --out-dir=*) out_dir=${word#*=} ;; esac
    previous=$word
done
mkdir -p "$out_dir"
exec 9>>"$out_dir/.launcher.lock" # the kernel's: it is free when this and the training have ended, however they did
if ! flock -n 9; then
    echo "error: $out_dir is at work for another launcher, or for the training of one that was killed" \
        "($(grep -oE '"(launcher|trainer)_pid": [0-9]+' "$out_dir/launcher.json" 2>/dev/null | paste -sd, || true)):" \
        "give another --out_dir, or end those first" >&2
    exit 1
fi
server_log=$out_dir/reward_server.log training_log=$out_dir/training.log url=http://127.0.0.1:$port
python=python3
[ ! -x .venv/bin/python ] || python=.venv/bin/python
export PYTHONUNBUFFERED=1

# who computes where
found=${CUDA_VISIBLE_DEVICES-$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | paste -sd, || true)}
IFS=, read -ra gpus <<<"$found"
if [ "$reward_gpu" = unset ]; then
    reward_gpu=""
    [ "$scorer" = cpu ] || [ ${#gpus[@]} -eq 0 ] || reward_gpu=${gpus[-1]}
fi
if [ "$train_gpus" = unset ]; then
    train_gpus=""
    for gpu in "${gpus[@]}"; do
        [[ ",$reward_gpu," == *",$gpu,"* ]] || train_gpus+=${train_gpus:+,}$gpu
    done
    [ -n "$train_gpus" ] || train_gpus=$reward_gpu # one GPU for both, or none
fi
say() { echo "launcher: $*" >&2; }
say "${#gpus[@]} GPUs found; rewards on ${reward_gpu:-the CPU}, training on ${train_gpus:-the CPU}; logs in $out_dir"
IFS=, read -ra own <<<"$train_gpus"
train=("$python" "$trainer_file")
if [ ${#own[@]} -gt 1 ]; then
    train=("$python" -m torch.distributed.run --standalone --nproc_per_node="${#own[@]}" "$trainer_file")
    export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110 # of the 120 s below: its 30 s may be too few to save
elif [ ${#own[@]} -eq 0 ]; then
    train=(env OMP_NUM_THREADS=1 "${train[@]}" --device cpu) # or the threads of both wait for one another's cores
fi
train+=(--reward_url "$url" --out_dir "$out_dir" "$@")

server="" trainer="" followers=() signals=0 stop_at=0 phase=starting restarts=() restart_at="" given_up=no code=""
export RL_HAND_INSTANCE_ID=$$-$RANDOM$RANDOM

running() { # pid: and not one that has ended and that nobody has waited for
    [ -n "$1" ] && [ -d "/proc/$1" ] && ! grep -q '^State:.[ZX]' "/proc/$1/status" 2>/dev/null
}

status() { # phase: for whoever looks, at any time
    phase=$1
    local form='{"phase": "%s", "url": "%s", "launcher_pid": %s, "server_pid": %s, "trainer_pid": %s, "restarts": %s'
    # shellcheck disable=SC2059
    printf "$form, \"exit_code\": %s}\n" "$phase" "$url" $$ "${server:-null}" "${trainer:-null}" "${#restarts[@]}" \
        "${code:-null}" >"$out_dir/launcher.json.$$"
    mv "$out_dir/launcher.json.$$" "$out_dir/launcher.json"
}

show() { # name: lines with a prefix, also those of a progress bar; outlives Ctrl-C, for what is said while saving
    trap '' INT
    stdbuf -oL tr '\r' '\n' | sed -u "/^ *\$/d;s/^/[$1] /"
}

follow() { # log name: what is written from now on
    : >>"$1"
    tail --pid=$$ -c "+$(($(stat -c %s "$1") + 1))" -F "$1" > >(exec 9>&- && show "$2") 2>/dev/null 9>&- &
    followers+=($!)
}

pause() { # a signal is handled at once, not after this
    sleep 0.5 &
    wait "$!" || true
}

ask() { # path: what the service answers
    "$python" -c 'import os, sys, urllib.request as u
request = u.Request(sys.argv[1], headers={"Authorization": "Bearer " + os.environ.get("RL_HAND_REWARD_TOKEN", "")})
print(u.build_opener(u.ProxyHandler({})).open(request, timeout=5).read().decode())' "$url$1" 2>/dev/null
}

start_server() { # in a session of its own: Ctrl-C in this terminal is not for it
    CUDA_VISIBLE_DEVICES=$reward_gpu OMP_NUM_THREADS=1 setsid "$python" grpo/poster/reward_server.py --port "$port" \
        ${server_options[@]+"${server_options[@]}"} </dev/null >>"$server_log" 2>&1 9>&- &
    server=$!
}

kill_now() { # pid: with all that it has started
    pkill -KILL -P "$1" 2>/dev/null || true # torchrun's processes are not of its group
    kill -KILL -- "-$1" 2>/dev/null || true
}

stop() { # pid seconds: asks it to end, and ends it when the time is over, or at a second signal
    running "$1" || return 0
    kill -TERM "$1" 2>/dev/null || true
    local end=$((SECONDS + $2))
    while running "$1" && [ "$SECONDS" -lt "$end" ] && [ "$signals" -lt 2 ]; do pause; done
    ! running "$1" || kill_now "$1"
}

on_signal() {
    signals=$((signals + 1))
    stop_at=$((SECONDS + 120))
    [ "$signals" -gt 1 ] || ! running "$trainer" || kill -TERM "$trainer"
}

at_exit() { # however this ends; the training first, since its last step may still need rewards
    code=${code:-$?}
    status stopping
    ! running "$trainer" || stop "$trainer" 120
    [ "$reuse" = yes ] || stop "$server" 20
    status done
    sleep 0.5 # what they said last
    for follower in ${followers[@]+"${followers[@]}"}; do
        ! running "$follower" || kill "$follower"
    done
}

supervise() { # starts a service that died again, after 1, 2, 4, 8, 8 s, at most five times an hour
    if [ "$reuse" = yes ] || running "$server"; then return 0; fi
    if [ -z "$restart_at" ]; then
        local recent=() time
        for time in ${restarts[@]+"${restarts[@]}"}; do
            [ $((SECONDS - time)) -ge 3600 ] || recent+=("$time")
        done
        if [ ${#recent[@]} -ge 5 ]; then
            [ "$given_up" = yes ] || say "the service died again, after five new starts within an hour: see $server_log;" \
                "the training saves when its patience ends"
            given_up=yes
            return 0
        fi
        local delay=$((${#recent[@]} < 3 ? 1 << ${#recent[@]} : 8))
        restart_at=$((SECONDS + delay))
        say "the service died; starting it again in $delay s"
    elif [ "$SECONDS" -ge "$restart_at" ]; then
        restart_at="" given_up=no restarts+=("$SECONDS")
        start_server
        status "$phase"
    fi
}

listens() { (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null; }

if [ "$reuse" = no ] && listens; then
    say "error: something listens on port $port: give another --port, or --reuse_server if it is a reward service." \
        "One that an earlier launcher left behind has its process in launcher.json"
    exit 1
fi
trap on_signal INT TERM HUP
trap at_exit EXIT
follow "$server_log" reward
if [ "$reuse" = no ]; then
    start_server
fi
status starting
if [ -z "$wait_seconds" ]; then
    [ "$scorer" = cpu ] && wait_seconds=60 || wait_seconds=900
fi
end=$((SECONDS + wait_seconds))
until ask /health >/dev/null; do
    [ "$signals" -eq 0 ] || exit 130
    if [ "$reuse" = no ] && ! running "$server"; then
        say "error: the service ended before it was ready; the end of $server_log:"
        tail -n 40 "$server_log" >&2
        exit 1
    fi
    if [ "$SECONDS" -ge "$end" ]; then
        say "error: the service was not ready within $wait_seconds s: raise --wait, or see $server_log"
        exit 1
    fi
    pause
done
info=$(ask /info) || { say "error: $url/info cannot be read: is RL_HAND_REWARD_TOKEN that of the service?" && exit 1; }
if [ "$reuse" = no ] && [[ $info != *"\"$RL_HAND_INSTANCE_ID\""* ]]; then
    say "error: another service answers on port $port, not the one just started: give another --port"
    exit 1
fi
say "the service is ready: $(grep -o '"fingerprint": "[^"]*"' <<<"$info" || echo "$info")"
[ "$signals" -eq 0 ] || exit 130

follow "$training_log" train
size=$(stat -c %s "$training_log")
# a session of its own: Ctrl-C comes through on_signal, once
CUDA_VISIBLE_DEVICES=$train_gpus setsid "${train[@]}" </dev/null >>"$training_log" 2>&1 &
trainer=$!
status training
[ "$signals" -eq 0 ] || kill -TERM "$trainer"
while running "$trainer"; do
    pause
    supervise
    if [ "$signals" -gt 0 ]; then
        [ "$phase" = stopping ] || status stopping
        [ "$signals" -lt 2 ] && [ "$SECONDS" -lt "$stop_at" ] || kill_now "$trainer"
    fi
done
code=0
wait "$trainer" || code=$?
# torchrun itself ends with 1
if [ "$code" -eq 1 ] && tail -c "+$((size + 1))" "$training_log" | grep -q 'exitcode *: 75 '; then code=75; fi
[ "$code" -ne 75 ] || say "the training saved and gave up waiting for the service (see $server_log):" \
    "when that is mended, the same command goes on from its checkpoint"
exit "$code"
