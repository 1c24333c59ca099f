#!/usr/bin/env bash
# Starts gkd/teacher_server.py in the background and returns when it is ready, or prints the end of its log if it fails.
#   bash scripts/start_teacher.sh --gpus 2,3 -- --teacher_model Qwen/Qwen2.5-7B-Instruct
#   bash scripts/start_teacher.sh                  the built-in teacher, on the CPU
#   bash scripts/start_teacher.sh --stop           answers waiting requests, then stops
# Options: --gpus LIST    CUDA devices; default: the CPU
#          --port N       15555
#          --log FILE     runs/teacher-PORT.log
#          --wait SECONDS until it must be ready, 1800
#          --foreground   stay, and log to the terminal
# Options after "--" go to gkd/teacher_server.py.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh

gpus="" port=15555 log="" wait_seconds=1800 foreground=no stop=no
while [ $# -gt 0 ]; do
    case $1 in
        --) shift && break ;;
        -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" && exit 0 ;;
        --foreground) foreground=yes && shift && continue ;;
        --stop) stop=yes && shift && continue ;;
        --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" && continue ;;
        --*-*) name=${1#--} && set -- "--${name//-/_}" "${@:2}" && continue ;;
    esac
    case $1 in
        --gpus) require_value "$@" && gpus=$2 ;;
        --port) require_value "$@" && require_number "$1" "$2" 1 65535 && port=$2 ;;
        --log) require_value "$@" && log=$2 ;;
        --wait) require_value "$@" && require_number "$1" "$2" 1 1000000 && wait_seconds=$2 ;;
        *) echo "error: unknown option $1: options of the server stand after --; see --help" >&2 && exit 2 ;;
    esac
    shift 2
done
pid_file=runs/teacher-$port.pid
log=${log:-runs/teacher-$port.log}
python=python3
[ ! -x .venv/bin/python ] || python=.venv/bin/python

alive() { # pid: and not one that has ended and that nobody has waited for
    [ -n "$1" ] && [ -d "/proc/$1" ] && ! grep -q '^State:.[ZX]' "/proc/$1/status" 2>/dev/null
}

pid=$(cat "$pid_file" 2>/dev/null || true)
# a pid that is a server's: after a reboot the number may be someone else's
if alive "$pid" && ! tr '\0' ' ' <"/proc/$pid/cmdline" | grep -q teacher_server; then pid=""; fi

if [ "$stop" = yes ]; then
    if ! alive "$pid"; then
        echo "no teacher on port $port was started by this script" >&2
        rm -f "$pid_file"
        exit 0
    fi
    kill -TERM "$pid" 2>/dev/null || true
    for _ in $(seq 600); do
        alive "$pid" || break
        sleep 0.1
    done
    if alive "$pid"; then
        echo "the teacher did not end within a minute: killed" >&2
        kill -KILL "$pid"
    fi
    rm -f "$pid_file"
    exit 0
fi

mkdir -p runs
exec 9>>"runs/teacher-$port.lock" # of two starts at once, the second would take the place of the first in the pid file
if ! flock -n 9; then
    echo "error: another start of a teacher on port $port is under way: wait for it, or give another --port" >&2
    exit 1
fi
if alive "$pid"; then
    echo "error: a teacher runs on port $port already (process $pid): stop it with --stop, or give another --port" >&2
    exit 1
fi
if (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
    echo "error: something else listens on port $port: give another --port" >&2
    exit 1
fi
command=("$python" gkd/teacher_server.py --port "$port")
if [ -n "$gpus" ]; then
    export CUDA_VISIBLE_DEVICES=$gpus
    command+=(--device cuda)
else
    command+=(--device cpu)
fi
command+=("$@")
export PYTHONUNBUFFERED=1
if [ "$foreground" = yes ]; then
    exec "${command[@]}"
fi

mkdir -p "$(dirname "$log")"
# a session of its own: Ctrl-C in this terminal is not for the teacher
setsid nohup "${command[@]}" </dev/null >>"$log" 2>&1 9>&- &
pid=$!
echo "$pid" >"$pid_file"
ready() {
    "$python" -c 'import sys, urllib.request as u
u.build_opener(u.ProxyHandler({})).open(sys.argv[1], timeout=5)' "http://127.0.0.1:$port/health" 2>/dev/null
}
end=$((SECONDS + wait_seconds))
until ready; do
    if ! alive "$pid"; then
        echo "error: the teacher ended before it was ready; the end of $log:" >&2
        tail -n 20 "$log" >&2
        rm -f "$pid_file"
        exit 1
    fi
    if [ "$SECONDS" -ge "$end" ]; then
        echo "error: the teacher was not ready within $wait_seconds s: stopped; raise --wait, or see $log" >&2
        kill -TERM "$pid"
        rm -f "$pid_file"
        exit 1
    fi
    sleep 0.5
done
echo "teacher: http://127.0.0.1:$port (process $pid, log $log); stop it with: bash scripts/start_teacher.sh --port $port --stop"
