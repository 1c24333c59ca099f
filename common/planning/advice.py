"""What to change when a plan does not fit: of the settings with which it would, those that cost least."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from common.base.devices import GIB

LORA_RANK = 16
SHORTEST = 32  # tokens; prompts and completions are not cut further than this

# What a setting adds to the time of a step, in percent, roughly: only their order matters. What changes results costs
# more than all that does not.
CHECKPOINTING = 30
ROLLOUT = 35  # AdamW's state comes and goes once per rollout, and takes CPU memory
FSDP = 40  # for each micro-batch of what was one: layers are gathered in each
PARAMS = 90
ALWAYS = 100  # the state goes through the bus in each optimizer step
HALVED = 10  # micro-batches of half as many tokens, as long as a quarter and two sequences are left
HALVED_AGAIN = 1000  # less than that keeps a GPU waiting
ADAPTERS, FEW_BITS = 10**5, 10**6


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

    All combinations are tried of those that leave results as they are: smaller micro-batches, recomputed activations,
    shards, models and AdamW's state in CPU memory. Then adapters instead of all weights, with these or without, weights
    in 4 bits, and at last shorter texts.

    Args:
        plan: a `plan.Plan` that knows the GPUs' capacity.
    """
    if plan.fits():
        return Advice({}, plan, "it fits as it is")
    changes, smallest = _search(plan)
    if changes is None:
        changes = _shorter(plan, smallest)
    if changes is None:
        return Advice({}, _but(plan, smallest) or plan, _nothing(_but(plan, smallest) or plan, smallest))
    changed = plan.but(**changes)
    text = f"it would fit with {flags(changes)}, in {max(map(changed.peak, changed.gpus)) / GIB:.1f} GiB{_cpu(changed)}"
    if "lora_rank" in changes:
        text += " (adapters take a learning_rate about ten times as high)"
    return Advice(changes, changed, text)


def flags(changes: Mapping[str, Any]) -> str:
    """Settings as they stand on a command line.

    Args:
        changes: fields of a Config and their values.
    """
    shown = {name: str(value).lower() if isinstance(value, bool) else value for name, value in changes.items()}
    return " ".join(f"--{name} {value}" for name, value in shown.items())


def _search(plan: Any) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """The least costly changes that make a plan fit, None if there are none; and those with which it needs least."""
    combinations = [dict(itertools.chain(*(option.items() for option in chosen))) for chosen in _product(plan)]
    best, smallest = (math.inf, math.inf), {}
    for changes in sorted(combinations, key=lambda changes: _cost(plan, changes)):
        changed = _but(plan, changes)
        if changed is None:
            continue
        if changed.fits():
            return changes, changes
        needs = (max(1.0, *map(changed.load, changed.gpus)), changed.pinned)
        if needs < best:
            best, smallest = needs, changes
    return None, smallest


def _product(plan: Any) -> Iterator[tuple[dict[str, Any], ...]]:
    """All combinations of settings, each as what it changes; texts stay as they are."""
    cfg, roles = plan.cfg, plan.processes[0]
    own = roles.get("student") or roles["policy"]
    sizes, size = [], min(cfg.micro_batch_tokens, plan.minibatch)
    while size > plan.sequence:
        size = max(plan.sequence, size // 2)
        sizes.append({"micro_batch_tokens": size})
    # where the tower for images is trained, scripts neither shard nor add adapters
    whole = plan.shape.levels and not getattr(cfg, "freeze_vision", True)
    can_shard = plan.given["ranks"] > 1 and not whole and set(roles.get("reference", own)) <= set(own)
    shared = set(roles.get("teacher", ())) & {*own, *roles.get("rollout", own)}
    offload = getattr(cfg, "optimizer_offload", "always")
    kinds = {"none": ("rollout", "always"), "rollout": ("always",), "always": ()}[offload]
    adapters = []
    if not whole and getattr(cfg, "lora_rank", None) == 0:
        one = {"lora_rank": LORA_RANK} | ({"fsdp": False} if getattr(cfg, "fsdp", False) else {})
        adapters = [one, one | {"load_bits": 4}]
    elif getattr(cfg, "lora_rank", 0) and not cfg.load_bits:
        adapters = [{"load_bits": 4}]
    return itertools.product(
        [{}, *adapters],
        [{}, *sizes],
        [{}, *([] if cfg.gradient_checkpointing else [{"gradient_checkpointing": True}])],
        [{}, *({"optimizer_offload": kind} for kind in kinds)],
        [{}, *([{"fsdp": True}] if can_shard and not getattr(cfg, "fsdp", True) else [])],
        [{}, *([{"param_offload": True}] if shared and not getattr(cfg, "param_offload", True) else [])],
    )


def _cost(plan: Any, changes: Mapping[str, Any]) -> float:
    """What changes add to the time of a step, or to the harm done to results."""
    size = min(plan.cfg.micro_batch_tokens, plan.minibatch)
    least = min(size, max(size / 4, 2 * plan.sequence))
    tokens = changes.get("micro_batch_tokens", size)
    halved, again = math.log2(size / max(tokens, least)), math.log2(max(1.0, least / tokens))
    return (
        HALVED * halved
        + HALVED_AGAIN * again
        + CHECKPOINTING * changes.get("gradient_checkpointing", False)
        + {"rollout": ROLLOUT, "always": ALWAYS}.get(changes.get("optimizer_offload"), 0)
        + FSDP * changes.get("fsdp", getattr(plan.cfg, "fsdp", False)) * 2**halved
        + PARAMS * changes.get("param_offload", False)
        + ADAPTERS * ("lora_rank" in changes)
        + FEW_BITS * ("load_bits" in changes)
    )


def _shorter(plan: Any, smallest: Mapping[str, Any]) -> dict[str, Any] | None:
    """The least costly changes with texts that are as long as can be; None if not even short ones fit."""
    new, prompt = plan.cfg.max_new_tokens, plan.longest
    while max(new, prompt) > SHORTEST:
        new, prompt = (max(min(SHORTEST, size), size // 2) for size in (new, prompt))
        texts = {"max_new_tokens": new, "max_prompt_tokens": prompt}
        changed = _but(plan, {**smallest, **texts})
        if changed is not None and changed.fits():
            found = _search(plan.but(**texts))[0]
            changes = {**(smallest if found is None else found), **texts}
            for name in texts:
                fewer = {key: value for key, value in changes.items() if key != name}
                without = _but(plan, fewer)
                if without is not None and without.fits():
                    changes = fewer
            return changes
    return None


def _nothing(plan: Any, changes: Mapping[str, Any]) -> str:
    """What would be needed, where no setting helps; the plan is the one with changes."""
    start = f"nothing helps: with {flags(changes)} " if changes else "nothing helps: "
    fullest = max(plan.gpus, key=plan.load)
    if plan.load(fullest) <= 1:
        return f"{start}it still needs{_cpu(plan).removeprefix(' and')}; {plan.host_capacity / GIB:.1f} GiB are there"
    needed = math.ceil(max(plan.capacity.values()) / GIB)
    while any(larger.load(i) > 1 for larger in [plan.within(needed * GIB)] for i in plan.gpus):
        needed += 1
    larger = plan.within(needed * GIB, plan.host_capacity)
    text = f"{start}GPU {fullest} still needs {plan.peak(fullest) / GIB:.1f} GiB; take GPUs of {needed} GiB"
    if not larger.fits():
        text += _cpu(larger)
    weights = plan.gpus[fullest].always.total()
    left = plan.peak(fullest) / plan.load(fullest) - (plan.peak(fullest) - weights)
    if left > 0.1 * weights:
        text += f", or a model of about {plan.shape.params * left / weights / 1e9:.2g} billion parameters"
    if plan.teacher_alone():
        text += ", or a teacher that is served elsewhere: gkd/teacher_server.py and --teacher_url"
    return text


def _cpu(plan: Any) -> str:
    """What a plan takes of the CPU's memory, as the end of a sentence."""
    if not plan.pinned:
        return ""
    each = " for each process" if len(plan.processes) < plan.given["ranks"] else ""
    return f" and {plan.pinned / GIB:.1f} GiB of CPU memory{each}"


def _but(plan: Any, changes: Mapping[str, Any]) -> Any:
    """The plan with changes; None where the Config or the script refuses them."""
    try:
        return plan.but(**changes)
    except ValueError:  # another rule than that of memory: this is no way out
        return None
