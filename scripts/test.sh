#!/usr/bin/env bash
# Creates .venv with the test tools, then runs ruff and pytest.
#   bash scripts/test.sh             the fast tier: every part of the project, about 3 minutes on two cores
#   bash scripts/test.sh full        all tests: also tools, posters, services, faults, fuzzing, documents, variants
#   bash scripts/test.sh -k losses   further arguments go to pytest
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh
make_env requirements.txt
make_env requirements-test.txt
export PATH="$PWD/.venv/bin:$PATH"

tier=()  # pyproject.toml selects the fast tier
if [ "${1:-}" = full ]; then
    shift
    tier=(-m "")
fi
cores=$(nproc)
workers=$((cores < 2 ? 2 : cores > 8 ? 8 : cores))
ruff check .
ruff format --check .
python -m pytest -n "$workers" --dist loadfile --no-loadscope-reorder "${tier[@]}" "$@"
