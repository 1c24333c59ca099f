#!/usr/bin/env bash
# Makes .venv with the test tools, then runs ruff and pytest, on two cores; arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh
make_env requirements.txt
make_env requirements-test.txt
export PATH="$PWD/.venv/bin:$PATH"

ruff check .
ruff format --check .
python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
