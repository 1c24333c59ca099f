"""What to change when a run does not fit into memory: the cheapest settings with which it would."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from common.base.devices import GIB
from common.planning.footprint import option

LORA_RANK = 16
SHORTEST = 32  # tokens: lower limit of the advice for prompts and completions

# Cost of a setting: about how many percent it adds to the time of a step; only the order matters. Settings that change
# results cost more than all others together.
CHECKPOINTING = 30
ROLLOUT = 35  # moves AdamW's state once per rollout, and takes CPU memory
FSDP = 40  # times the number of micro-batches that one is divided into: each gathers all layers
PARAMS = 90
ALWAYS = 100  # moves AdamW's state in each optimizer step
HALVED = 10  # halves micro-batches, down to a quarter and to two sequences
HALVED_AGAIN = 1000  # halves them further, which leaves the GPU underused
ADAPTERS, FEW_BITS = 10**5, 10**6


@dataclasses.dataclass(frozen=True)
class Advice:
    """Settings with which a run fits, or why there are none.

    Attributes:
        changes: options and their values; empty if no change is needed, or none helps.
        plan: the plan with these changes.
        text: for the user.
    """

    changes: Mapping[str, Any]
    plan: Any
    text: str

    def __str__(self) -> str:
        return self.text


def find(plan: Any) -> Advice:
    """The cheapest settings with which a plan fits.

    Tries all combinations of settings that do not change results: smaller micro-batches, gradient checkpointing,
    sharding, offloading of models and of AdamW's state. Then, combined with these, LoRA and 4-bit weights, and last
    shorter prompts and completions.

    Args:
        plan: a `plan.Plan` with the capacity of the GPUs.
    """
    if plan.fits():
        return Advice({}, plan, "it fits as it is")
    changes, smallest = _search(plan)
    if changes is None:
        changes = _shorter(plan, smallest)
    if changes is None:
        closest = _with_changes(plan, smallest) or plan
        return Advice({}, closest, _explain_failure(closest, smallest))
    changed = plan.with_options(**changes)
    peak = max(map(changed.peak, changed.gpus)) / GIB
    text = f"it would fit with {flags(changes)}, in {peak:.1f} GiB{_cpu_memory(changed)}"
    if "lora_rank" in changes:
        text += " (adapters take a learning_rate about ten times as high)"
    return Advice(changes, changed, text)


def flags(changes: Mapping[str, Any]) -> str:
    """Options as command-line flags.

    Args:
        changes: options and their values.
    """
    shown = {name: str(value).lower() if isinstance(value, bool) else value for name, value in changes.items()}
    return " ".join(f"--{name} {value}" for name, value in shown.items())


def _search(plan: Any) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """The cheapest changes with which a plan fits, or None; and the changes with which it needs the least memory."""
    combinations = [dict(itertools.chain(*(part.items() for part in chosen))) for chosen in _combinations(plan)]
    best, smallest = (math.inf, math.inf), {}
    for changes in sorted(combinations, key=lambda changes: _cost(plan, changes)):
        changed = _with_changes(plan, changes)
        if changed is None:
            continue
        if changed.fits():
            return changes, changes
        needs = (max(1.0, *map(changed.load, changed.gpus)), changed.pinned)
        if needs < best:
            best, smallest = needs, changes
    return None, smallest


def _combinations(plan: Any) -> Iterator[tuple[dict[str, Any], ...]]:
    """All combinations of changes that leave lengths as they are."""
    cfg, roles = plan.cfg, plan.processes[0]
    own = roles.get("student") or roles["policy"]
    sizes, size = [], min(cfg.micro_batch_tokens, plan.minibatch)
    while size > plan.sequence:
        size = max(plan.sequence, size // 2)
        sizes.append({"micro_batch_tokens": size})
    # scripts that train the vision tower refuse shards and adapters
    trains_vision = plan.shape.levels and _can_set(cfg, "freeze_vision", True)
    can_shard = plan.given["ranks"] > 1 and not trains_vision and set(roles.get("reference", own)) <= set(own)
    shares_gpu = set(roles.get("teacher", ())) & {*own, *roles.get("rollout", own)}
    offload = {"none": ("rollout", "always"), "rollout": ("always",), "always": ()}[option(cfg, "optimizer_offload")]
    adapters = []
    if not trains_vision and not option(cfg, "lora_rank") and hasattr(cfg, "lora_rank"):
        lora = {"lora_rank": LORA_RANK} | ({"fsdp": False} if option(cfg, "fsdp") else {})
        adapters = [lora, lora | {"load_bits": 4}]
    elif option(cfg, "lora_rank") and not option(cfg, "load_bits"):
        adapters = [{"load_bits": 4}]
    return itertools.product(
        [{}, *adapters],
        [{}, *sizes],
        [{}, *_settings(cfg, gradient_checkpointing=(True,))],
        [{}, *_settings(cfg, optimizer_offload=offload)],
        [{}, *(_settings(cfg, fsdp=(True,)) if can_shard else [])],
        [{}, *(_settings(cfg, param_offload=(True,)) if shares_gpu else [])],
    )


def _settings(cfg: Any, **values: Sequence[Any]) -> list[dict[str, Any]]:
    """One change for each value of an option that the script has and that is not set to it."""
    return [{name: value} for name, some in values.items() for value in some if _can_set(cfg, name, value)]


def _can_set(cfg: Any, name: str, value: Any) -> bool:
    """Whether the script has an option, and with another value."""
    return hasattr(cfg, name) and getattr(cfg, name) != value


def _cost(plan: Any, changes: Mapping[str, Any]) -> float:
    """Cost of changes, by the constants above."""
    size = min(plan.cfg.micro_batch_tokens, plan.minibatch)
    least = min(size, max(size / 4, 2 * plan.sequence))
    tokens = changes.get("micro_batch_tokens", size)
    halved, again = math.log2(size / max(tokens, least)), math.log2(max(1.0, least / tokens))
    return (
        HALVED * halved
        + HALVED_AGAIN * again
        + CHECKPOINTING * changes.get("gradient_checkpointing", False)
        + {"rollout": ROLLOUT, "always": ALWAYS}.get(changes.get("optimizer_offload"), 0)
        + FSDP * changes.get("fsdp", option(plan.cfg, "fsdp")) * 2**halved
        + PARAMS * changes.get("param_offload", False)
        + ADAPTERS * ("lora_rank" in changes)
        + FEW_BITS * ("load_bits" in changes)
    )


def _shorter(plan: Any, smallest: Mapping[str, Any]) -> dict[str, Any] | None:
    """The cheapest changes with prompts and completions as long as possible; None if even short ones do not fit."""
    new, prompt = plan.cfg.max_new_tokens, plan.longest
    while max(new, prompt) > SHORTEST:
        new, prompt = (max(min(SHORTEST, size), size // 2) for size in (new, prompt))
        lengths = {"max_new_tokens": new, "max_prompt_tokens": prompt}
        if option(plan.cfg, "max_tokens"):  # of given conversations
            lengths["max_tokens"] = new + prompt
        changed = _with_changes(plan, {**smallest, **lengths})
        if changed is not None and changed.fits():
            found = _search(plan.with_options(**lengths))[0]
            changes = {**(smallest if found is None else found), **lengths}
            for name in lengths:  # one of them may suffice
                fewer = {key: value for key, value in changes.items() if key != name}
                without = _with_changes(plan, fewer)
                if without is not None and without.fits():
                    changes = fewer
            return changes
    return None


def _explain_failure(plan: Any, changes: Mapping[str, Any]) -> str:
    """What a run would need when no settings help.

    Args:
        plan: with the changes.
        changes: with which it needs the least memory.
    """
    start = f"nothing helps: with {flags(changes)} " if changes else "nothing helps: "
    fullest = max(plan.gpus, key=plan.load)
    if plan.load(fullest) <= 1:
        needs = _cpu_memory(plan).removeprefix(" and")
        return f"{start}it still needs{needs}; {plan.host_capacity / GIB:.1f} GiB are there"
    needed = math.ceil(max(plan.capacity.values()) / GIB)
    while any(larger.load(i) > 1 for larger in [plan.for_capacity(needed * GIB)] for i in plan.gpus):
        needed += 1
    larger = plan.for_capacity(needed * GIB, plan.host_capacity)
    text = f"{start}GPU {fullest} still needs {plan.peak(fullest) / GIB:.1f} GiB; take GPUs of {needed} GiB"
    if not larger.fits():
        text += _cpu_memory(larger)
    weights = plan.gpus[fullest].always.total()
    left = plan.peak(fullest) / plan.load(fullest) - (plan.peak(fullest) - weights)
    if left > 0.1 * weights:
        text += f", or a model of about {plan.shape.params * left / weights / 1e9:.2g} billion parameters"
    if plan.teacher_too_large():
        text += ", or a teacher that is served elsewhere: gkd/teacher_server.py and --teacher_url"
    return text


def _cpu_memory(plan: Any) -> str:
    """The pinned CPU memory of a plan, as the end of a sentence."""
    if not plan.pinned:
        return ""
    each = " for each process" if len(plan.processes) < plan.given["ranks"] else ""
    return f" and {plan.pinned / GIB:.1f} GiB of CPU memory{each}"


def _with_changes(plan: Any, changes: Mapping[str, Any]) -> Any:
    """The plan with other settings; None if the Config or the script refuses them."""
    try:
        return plan.with_options(**changes)
    except ValueError:  # rejected for a reason other than memory; skip it
        return None
