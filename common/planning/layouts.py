"""What a training script says about GPUs: its constants and its Config, read without loading a model.

A script is known by what stands in it, not by its name, so that a copy under any name is read like the original:
POLICY_GPU_IDS or STUDENT_GPU_IDS is one process with all the GPUs it names; the other constants alone are one process
per GPU, as torchrun starts them.
"""

import contextlib
import importlib.util
import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from common.base import config, devices
from common.base.checks import require

ROOT = Path(__file__).resolve().parents[2]
CONSTANT = re.compile(r"^(POLICY|STUDENT|ROLLOUT|REFERENCE|REWARD|TEACHER|SIMILARITY)_GPU_IDS? *[:=]", re.MULTILINE)
CONFIG = re.compile(r"^class Config\b", re.MULTILINE)
MAYBE_OWN = ("REFERENCE_GPU_ID", "REWARD_GPU_ID", "TEACHER_GPU_ID")  # may be None: the GPU of each rank
_count = itertools.count()


def is_script(path: Path) -> bool:
    """Whether a file is a training script: Python with a Config and GPU constants.

    Args:
        path: a file.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    return bool(CONSTANT.search(text) and CONFIG.search(text))


def scripts() -> list[str]:
    """The training scripts of this clone, relative to it."""
    found = [path for family in ("gspo", "grpo", "gkd") for path in sorted((ROOT / family).rglob("*.py"))]
    return [path.relative_to(ROOT).as_posix() for path in found if is_script(path)]


def load(path: str | Path, argv: Sequence[str] = ()) -> tuple[ModuleType, Any]:
    """Imports a training script and reads its command line, as running it does, up to its `main`.

    Args:
        path: of the script.
        argv: its flags.

    Returns:
        The module, and an instance of its Config.

    Raises:
        ValueError: there is no such file, or it is no training script: nothing of it was executed then. Or it is a copy
            that does not find the clone it was taken from.
        SystemExit: flags that the script refuses, with its own message.
    """
    path = Path(path)
    rule = "must be a training script, a file with a Config and GPU constants"
    require(path.is_file() and is_script(path), f"script = '{path}'", rule, f"give one of {', '.join(scripts())}")
    name = f"_script{next(_count)}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for the types of fields
    with _run_as(path, argv):
        try:
            spec.loader.exec_module(module)
        except StopIteration as error:  # of the line that searches upwards for common/
            raise ValueError(f"script = '{path}': must stand inside the clone; copy it back there") from error
        return module, config.parse(module.Config, argv)


@contextlib.contextmanager
def _run_as(path: Path, argv: Sequence[str]) -> Iterator[None]:
    """`python path argv`: modules beside the script can be imported, and errors begin with its name."""
    was = sys.argv, sys.path[:]
    sys.argv, sys.path[:] = [str(path), *argv], [str(path.resolve().parent), *sys.path]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = was


def is_per_rank(module: ModuleType) -> bool:
    """Whether torchrun starts one process of the script per GPU.

    Args:
        module: of the script.
    """
    return not (hasattr(module, "POLICY_GPU_IDS") or hasattr(module, "STUDENT_GPU_IDS"))


def roles(module: ModuleType, cfg: Any, ranks: int = 1, local_rank: int = 0) -> dict[str, tuple[int, ...]]:
    """The GPUs of each role that a configuration has.

    Args:
        module: of the script.
        cfg: its Config.
        ranks: processes on this machine.
        local_rank: the one whose roles are asked for.

    Returns:
        GPU numbers, as the process sees them, by role: "policy" or "student", which is trained; "rollout", which
        samples, from a copy of the weights where it is not among the former; and those of "reference", "reward",
        "teacher" and "embedder" that there are. Numbers are those for a machine with GPUs, whatever this one has.

    Raises:
        ValueError: a constant that is no GPU number or list of them; or several processes of a script that is one.
    """
    trained = "student" if hasattr(cfg, "student_model") else "policy"
    if is_per_rank(module):
        own = (local_rank,)
    else:
        require(ranks == 1, f"{ranks} processes", "this script is one process, and every copy would take the same GPUs",
                "start it with python; scripts for torchrun end in _ddp.py")  # fmt: skip
        own = _numbers(module, f"{trained.upper()}_GPU_IDS", (0,))
    reference, reward = (_numbers(module, name, own[:1]) for name in ("REFERENCE_GPU_ID", "REWARD_GPU_ID"))
    everything = own
    if hasattr(module, "ROLLOUT_GPU_IDS") and trained == "policy":
        everything = tuple(dict.fromkeys((*own, *reference, *reward)))
    places = {trained: own, "reference": reference, "reward": reward}
    places["rollout"] = _numbers(module, "ROLLOUT_GPU_IDS", everything)
    name = "TEACHER_GPU_IDS" if hasattr(module, "TEACHER_GPU_IDS") else "TEACHER_GPU_ID"
    places["teacher"] = _numbers(module, name, own[:1])
    places["embedder"] = _numbers(module, "SIMILARITY_GPU_IDS", own[:1])
    return {role: places[role] for role in role_names(cfg)}


def role_names(cfg: Any) -> list[str]:
    """The roles that a configuration has, the one that is trained first.

    Args:
        cfg: the Config of a script.
    """
    found = ["student" if hasattr(cfg, "student_model") else "policy", "rollout"]
    if getattr(cfg, "kl_coef", 0) > 0 and not getattr(cfg, "lora_rank", 0):  # else the weights without adapters
        found.append("reference")
    if getattr(cfg, "reward_model", "") and not getattr(cfg, "reward_url", ""):
        found.append("reward")
    if hasattr(cfg, "teacher_model") and not getattr(cfg, "teacher_url", ""):
        found.append("teacher")
    if getattr(cfg, "embedding_model", ""):
        found.append("embedder")
    return found


def all_ranks(module: ModuleType, cfg: Any, ranks: int = 1) -> list[dict[str, tuple[int, ...]]]:
    """`roles` of every process on this machine, in the order of their local ranks.

    Args:
        module: of the script.
        cfg: its Config.
        ranks: processes on this machine.

    Raises:
        ValueError: as `roles`.
    """
    return [roles(module, cfg, ranks, local_rank) for local_rank in range(ranks)]


def _numbers(module: ModuleType, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
    """A constant of the script as numbers; `default` where it is None, or left out."""
    value = getattr(module, name, None)
    if value is None:
        return default
    if name.endswith("_ID"):
        value = (value,)
    holds = isinstance(value, (tuple, list)) and all(isinstance(i, int) for i in value)
    require(holds, f"{name} = {value}", "must be GPU numbers, (0, 1)", "edit the line at the top of the script")
    return tuple(value)


def check(module: ModuleType, cfg: Any) -> None:
    """The checks of GPU numbers that the script makes at its start, in this process and with the GPUs it sees.

    Roles that hold frozen models may share a GPU with any other: the phases of a step follow one another. What may not
    be shared: the GPUs of two replicas that are trained, and those of a student with those of copies that sample
    meanwhile.

    Args:
        module: of the script.
        cfg: its Config.

    Raises:
        ValueError: numbers that cannot be, GPUs that are not there, or two exclusive roles on one; what to change.
    """
    if hasattr(module, "STUDENT_GPU_IDS"):
        student, rollout = module.STUDENT_GPU_IDS, getattr(module, "ROLLOUT_GPU_IDS", None)
        teacher = () if getattr(cfg, "teacher_url", "") else getattr(module, "TEACHER_GPU_IDS", ())
        devices.distillation_layout(student, rollout, teacher, cfg.device)
    elif hasattr(module, "POLICY_GPU_IDS"):
        own = next(iter(_numbers(module, "POLICY_GPU_IDS", (0,))), 0)
        places = [getattr(module, name, own) for name in ("REFERENCE_GPU_ID", "REWARD_GPU_ID")]
        sampling = {"rollout": module.ROLLOUT_GPU_IDS} if hasattr(module, "ROLLOUT_GPU_IDS") else {}
        devices.layout(module.POLICY_GPU_IDS, *places, cfg.device, **sampling)
    else:
        named = {name: getattr(module, name) for name in MAYBE_OWN if hasattr(module, name)}
        places = [*named.values(), None, None][:2]
        gpus = devices.layout_of_rank(*places, cfg.device, " and ".join(named))
        devices.role("SIMILARITY_GPU_IDS", getattr(module, "SIMILARITY_GPU_IDS", None), gpus.policy[0])
