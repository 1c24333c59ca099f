#!/usr/bin/env bash
# Creates .venv, then trains GSPO on the built-in policy and task.
#   bash scripts/quickstart.sh                     about two minutes on two CPU cores, after the installation
#   bash scripts/quickstart.sh --steps 20          options go to the training script
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh

out_dir=runs/quickstart
arguments=("$@")
for i in "${!arguments[@]}"; do
    case ${arguments[$i]} in
        --out_dir | --out-dir) require_value "${arguments[@]:$i}" && out_dir=${arguments[$((i + 1))]} ;;
        --out_dir=* | --out-dir=*) out_dir=${arguments[$i]#*=} ;;
    esac
done
make_env requirements.txt

script=$(.venv/bin/python - <<'PY'
import ast, sys, torch
lines = [node for node in ast.parse(open("gspo/gspo_multigpu.py").read()).body if isinstance(node, ast.Assign)]
constants = [ast.literal_eval(n.value) for n in lines if ast.unparse(n.targets[0]).endswith(("_GPU_ID", "_GPU_IDS"))]
needed = 1 + max(i for ids in constants for i in ((ids,) if isinstance(ids, int) else ids or ()))
found = torch.cuda.device_count()
script = "gspo/gspo_multigpu.py" if found >= needed else "gspo/gspo.py"
print(f"{script}: the layout of gspo_multigpu.py needs {needed} GPUs, {found} found", file=sys.stderr)
print(script)
PY
)
.venv/bin/python "$script" --out_dir runs/quickstart "$@"
.venv/bin/python scripts/plot_run.py "$out_dir" --out "$out_dir/plot.png"
echo "next: open gspo/gspo.py or grpo/grpo.py, or the *_multigpu.py beside it, and set policy_model, train_data and the reward"
