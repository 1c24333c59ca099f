"""What to change when a plan does not fit: settings in the order of their cost, first those that change no result."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from common.devices import GIB

LORA_RANK = 16
SHORTEST = 32  # tokens; prompts and completions are not cut further than this


@dataclasses.dataclass(frozen=True)
class Advice:
    """Settings with which a run fits, or why there are none.

    Attributes:
        changes: fields of the Config and their values; empty if nothing has to be changed, or nothing helps.
        plan: with them.
        text: for people.
    """

    changes: Mapping[str, Any]
    plan: Any
    text: str

    def __str__(self) -> str:
        return self.text


def find(plan: Any) -> Advice:
    """The least costly settings with which a plan fits.

    First each setting alone, then each added to those before: at first those that leave results as they are (smaller
    micro-batches, recomputed activations, AdamW's state in CPU memory, shards), then adapters instead of all weights,
    then weights in 4 bits and shorter texts. What turns out not to be needed is left out again.

    Args:
        plan: a `plan.Plan` that knows the GPUs' capacity.
    """
    if plan.fits():
        return Advice({}, plan, "it fits as it is")
    exact, others = list(_exact(plan)), list(_others(plan))
    for options in exact:  # alone
        for changes in options:
            if _fits(plan, changes):
                return _advice(plan, changes)
    changes: dict[str, Any] = {}
    for options in exact:
        changes, done = _added(plan, changes, options)
        if done:
            return _advice(plan, _needed(plan, changes))
    for changes in others[0] if others else ():  # adapters alone, since most of the above is then needless
        if _fits(plan, changes):
            return _advice(plan, changes)
    changes = {name: value for name, value in changes.items() if name != "fsdp"}  # which adapters cannot have
    for options in [*exact, *others]:
        changes, done = _added(plan, changes, [option for option in options if not option.get("fsdp")])
        if done:
            return _advice(plan, _needed(plan, changes))
    smallest = _but(plan, changes) or plan
    fullest = max(smallest.gpus, key=smallest.load)
    needed = smallest.load(fullest) * smallest.capacity[fullest] / GIB
    size = plan.shape.params / smallest.load(fullest) / 1e9
    text = (
        f"nothing helps: with {_flags(changes)} GPU {fullest} still needs {smallest.peak(fullest) / GIB:.1f} GiB; take "
        f"GPUs of {math.ceil(needed)} GiB, or a model of about {size:.2g} billion parameters"
    )
    return Advice({}, smallest, text)


def _exact(plan: Any) -> Iterator[list[dict[str, Any]]]:
    """Settings that change no result but by rounding; of each the values to try, the least costly first."""
    cfg, sizes = plan.cfg, []
    size = min(cfg.micro_batch_tokens, plan.step_tokens)
    while size > plan.sequence:
        size = max(plan.sequence, size // 2)
        sizes.append({"micro_batch_tokens": size})
    yield sizes
    if not cfg.gradient_checkpointing:
        yield [{"gradient_checkpointing": True}]
    offload = getattr(cfg, "optimizer_offload", "always")
    if offload == "none":
        yield [{"optimizer_offload": "rollout"}]
    if plan.given["ranks"] > 1 and not getattr(cfg, "fsdp", True):  # before every rank fills the CPU's memory
        yield [{"fsdp": True}]
    if offload != "always":
        yield [{"optimizer_offload": "always"}]


def _others(plan: Any) -> Iterator[list[dict[str, Any]]]:
    """Settings that train something else, or on something else."""
    cfg = plan.cfg
    rank = getattr(cfg, "lora_rank", None)
    if rank == 0:
        yield [{"lora_rank": LORA_RANK} | ({"fsdp": False} if getattr(cfg, "fsdp", False) else {})]
    if rank is not None and not cfg.load_bits:
        yield [{"load_bits": 4}]
    shorter = []
    new, prompt = cfg.max_new_tokens, plan.longest
    while max(new, prompt) > SHORTEST:
        new, prompt = (max(min(SHORTEST, size), size // 2) for size in (new, prompt))
        shorter.append({"max_new_tokens": new, "max_prompt_tokens": prompt})
    yield shorter


def _but(plan: Any, changes: Mapping[str, Any]) -> Any:
    """The plan with changes; None where the Config refuses them."""
    try:
        return plan.but(**changes)
    except ValueError:  # another rule than that of memory: this is no way out
        return None


def _fits(plan: Any, changes: Mapping[str, Any]) -> bool:
    changed = _but(plan, changes)
    return changed is not None and changed.fits()


def _added(plan: Any, changes: dict[str, Any], options: list[dict[str, Any]]) -> tuple[dict[str, Any], bool]:
    """Changes with the first of the options that makes the run fit, or with the last, and whether it does."""
    last = changes
    for option in options:
        changed = _but(plan, changes | option)
        if changed is not None:
            last = changes | option
            if changed.fits():
                return last, True
    return last, False


def _needed(plan: Any, changes: dict[str, Any]) -> dict[str, Any]:
    """Changes without those that the others have made needless, and with micro-batches as large as fit."""
    for name in reversed(changes):  # the costliest first
        fewer = {key: value for key, value in changes.items() if key != name}
        if _fits(plan, fewer):
            changes = fewer
    while "micro_batch_tokens" in changes:
        larger = changes | {"micro_batch_tokens": 2 * changes["micro_batch_tokens"]}
        if larger["micro_batch_tokens"] >= plan.cfg.micro_batch_tokens or not _fits(plan, larger):
            break
        changes = larger
    return changes


def _flags(changes: Mapping[str, Any]) -> str:
    shown = {name: str(value).lower() if isinstance(value, bool) else value for name, value in changes.items()}
    return " ".join(f"--{name} {value}" for name, value in shown.items())


def _advice(plan: Any, changes: Mapping[str, Any]) -> Advice:
    changed = plan.but(**changes)
    text = f"it would fit with {_flags(changes)}, in {max(map(changed.peak, changed.gpus)) / GIB:.1f} GiB"
    if "lora_rank" in changes:
        text += " (adapters take a learning_rate about ten times as high)"
    return Advice(changes, changed, text)
