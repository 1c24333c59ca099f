#!/usr/bin/env bash
# Creates .venv, then trains GSPO on the built-in policy and task.
#   bash scripts/quickstart.sh                     about two minutes on two CPU cores, after the installation
#   bash scripts/quickstart.sh --steps 20          options go to the training script
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh
make_env requirements.txt

script=$(.venv/bin/python - <<'PY'
import ast, sys, torch
constants = {n.targets[0].id: ast.literal_eval(n.value) for n in ast.parse(open("gspo/gspo_multigpu.py").read()).body
             if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "").endswith("_GPU_IDS")}
needed = 1 + max(*constants["POLICY_GPU_IDS"], *(constants["ROLLOUT_GPU_IDS"] or ()))
found = torch.cuda.device_count()
script = "gspo/gspo_multigpu.py" if found >= needed else "gspo/gspo.py"
print(f"{script}: the layout of gspo_multigpu.py needs {needed} GPUs, {found} found", file=sys.stderr)
print(script)
PY
)
.venv/bin/python "$script" --out_dir runs/quickstart "$@"

out_dir=runs/quickstart
arguments=("$@")
for i in "${!arguments[@]}"; do
    case ${arguments[$i]} in
        --out_dir) out_dir=${arguments[$((i + 1))]} ;;
        --out_dir=*) out_dir=${arguments[$i]#*=} ;;
    esac
done
.venv/bin/python scripts/plot_run.py "$out_dir" --out "$out_dir/plot.png"
echo "next: open gspo/gspo.py or grpo/grpo.py, or the *_multigpu.py beside it, and set policy_model, train_data and the reward"
