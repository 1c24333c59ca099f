#!/usr/bin/env bash
# Repeats the faults of tests/test_faults.py with 100 SIGKILLs, and prints how often each was tried, survived and lost.
# Runs tiny models on the CPU; about 4 minutes on two cores.
#   bash scripts/dev/soak.sh          100 kills
#   bash scripts/dev/soak.sh 1000     another number of kills
set -euo pipefail
cd "$(dirname "$0")/../.."
source scripts/env.sh
require_number "number of kills" "${1:-100}" 1 1000000
make_env requirements.txt
make_env requirements-test.txt
export PATH="$PWD/.venv/bin:$PATH" RL_HAND_KILLS="${1:-100}" RL_HAND_FAULTS="$PWD/runs/faults.jsonl"

mkdir -p runs
rm -f "$RL_HAND_FAULTS"
python -m pytest -m "" tests/test_faults.py tests/test_gkd_server.py -k "test_faults or killed or fails" || failed=1
python - <<'TABLE'
import collections, json, os

tried, survived = collections.Counter(), collections.Counter()
for line in open(os.environ["RL_HAND_FAULTS"]):
    found = json.loads(line)
    tried[found["fault"]] += 1
    survived[found["fault"]] += found["survived"]
print("\n| fault | tried | survived | lost |\n|---|---|---|---|")
for name in sorted(tried):
    print(f"| {name} | {tried[name]} | {survived[name]} | {tried[name] - survived[name]} |")
print(f"| all | {tried.total()} | {survived.total()} | {tried.total() - survived.total()} |")
TABLE
exit "${failed:-0}"
