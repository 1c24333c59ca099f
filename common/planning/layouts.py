"""Reads the GPU constants and the Config of a training script, without loading a model."""

import ast
import contextlib
import importlib.util
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from common.base import config, devices

ROOT = Path(__file__).resolve().parents[2]
_count = itertools.count()


def is_script(path: Path) -> bool:
    """Whether a file has `class Config`, `def main` and a GPU constant at its top level.

    The file is parsed, not executed.
    """
    try:
        body = ast.parse(path.read_bytes()).body
    except (SyntaxError, ValueError):
        return False
    assigned = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    names = {target.id for target in assigned if isinstance(target, ast.Name)} | {
        node.name for node in body if isinstance(node, (ast.ClassDef, ast.FunctionDef))
    }
    return {"Config", "main"} <= names and bool(names & set(devices.CONSTANTS.values()))


def scripts() -> list[str]:
    """Training scripts of this clone, as relative paths."""
    found = [path for family in ("gspo", "grpo", "gkd") for path in sorted((ROOT / family).rglob("*.py"))]
    return [path.relative_to(ROOT).as_posix() for path in found if is_script(path)]


def load(path: str | Path, argv: Sequence[str] = ()) -> tuple[ModuleType, Any]:
    """Imports a training script and parses its command line `argv`, without calling its `main`.

    Returns:
        The module, and an instance of its Config.

    Raises:
        ValueError: the file does not exist or is not a training script; it was not executed.
        SystemExit: the script refuses the options, with its own message.
    """
    path = Path(path)
    if not (path.is_file() and is_script(path)):
        rule = "must be a training script: a file with a Config, a main and GPU constants"
        raise ValueError(f"script = '{path}': {rule}; give one of {', '.join(scripts())}")
    name = f"_script{next(_count)}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses resolve the types of fields there
    with _run_as(path, argv):
        spec.loader.exec_module(module)
        return module, config.parse(module.Config, argv)


@contextlib.contextmanager
def _run_as(path: Path, argv: Sequence[str]) -> Iterator[None]:
    """Imitates `python path argv`: siblings can be imported, errors begin with its name."""
    before = sys.argv, sys.path[:]
    sys.argv, sys.path[:] = [str(path), *argv], [str(path.resolve().parent), *sys.path]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = before


def constants(module: ModuleType, cfg: Any) -> dict[str, Any]:
    """Arguments of `devices.layout` in the script's main by role, the trained role first."""
    trained = role_names(cfg)[0]
    found = {trained: None}  # a script without the constant runs one process per GPU
    found |= {role: getattr(module, name) for role, name in devices.CONSTANTS.items() if hasattr(module, name)}
    if "teacher" in found and cfg.teacher_url:
        found["teacher"] = ()
    return found


def is_per_rank(module: ModuleType) -> bool:
    """Whether a script runs one process per GPU, under torchrun."""
    return all(getattr(module, name, None) is None for name in ("POLICY_GPU_IDS", "STUDENT_GPU_IDS"))


def roles(module: ModuleType, cfg: Any, ranks: int = 1, local_rank: int = 0) -> dict[str, tuple[int, ...]]:
    """GPU numbers in one process of the roles that a configuration uses, whether they exist or not.

    Roles are keys of `devices.CONSTANTS`. A GPU of "rollout" that does not train holds a copy of
    the weights.

    Args:
        module: training script.
        cfg: Config of the script.
        ranks: number of processes on this machine.
        local_rank: rank of the process on this machine.

    Raises:
        ValueError: as in `devices.gpu_numbers`.
    """
    numbers = devices.gpu_numbers(constants(module, cfg), local_rank, ranks)
    own = next(iter(numbers.values()))
    default = {"rollout": own}  # for a role without a constant
    return {role: numbers.get(role, default.get(role, own[:1])) for role in role_names(cfg)}


def role_names(cfg: Any) -> list[str]:
    """Roles that a configuration uses, the trained one first."""
    found = ["student" if hasattr(cfg, "student_model") else "policy", "rollout"]
    # with LoRA the reference shares the weights of the policy
    if getattr(cfg, "kl_coef", 0) > 0 and not getattr(cfg, "lora_rank", 0):
        found.append("reference")
    if getattr(cfg, "reward_model", "") and not getattr(cfg, "reward_url", ""):
        found.append("reward")
    if hasattr(cfg, "teacher_model") and not getattr(cfg, "teacher_url", ""):
        found.append("teacher")
    if getattr(cfg, "embedding_model", ""):
        found.append("embedder")
    return found


def all_ranks(module: ModuleType, cfg: Any, ranks: int = 1) -> list[dict[str, tuple[int, ...]]]:
    """`roles` of every process on this machine, by local rank."""
    return [roles(module, cfg, ranks, local_rank) for local_rank in range(ranks)]


def check(module: ModuleType, cfg: Any) -> None:
    """Checks the GPU constants against the visible GPUs, as the script's main does.

    Raises:
        ValueError: as in `devices.layout`.
    """
    devices.layout(cfg.device, **constants(module, cfg))
