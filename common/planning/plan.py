"""Predicts the GPU memory of a run before anything loads, and what to change if it does not fit.

Training scripts call `require_fit`; scripts/plan_memory.py plans for machines that are not here.
The numbers come from footprint.py. A phase adds its own parts to what is always resident; the
column "update" shows the largest phase of the update. Qwen2.5-1.5B with gspo/gspo.py on 48 GiB,
with a reference, and with AdamW's state in CPU memory during rollouts:

    GiB    weights  reference  rollout  update   peak  usable
    GPU 0     2.88       2.88     1.70   38.84  44.59    45.6
    GPU 0, rollout: KV cache 0.66, reading prompts 0.50, logits 0.29, workspace 0.25
    GPU 0, update (loss): AdamW 17.25, activations 15.71, gradients 2.88, gradient of the head 1.30, logits 1.04, ...
    CPU memory, pinned: 17.25
"""

import contextlib
import dataclasses
import io
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from common.base import devices, distributed
from common.base.checks import require
from common.base.devices import GIB
from common.model import lora
from common.planning import advice, layouts, shapes
from common.planning.footprint import USABLE, Gpu, Roles, Run, completion_tokens
from common.training import budgets, sharding

RESERVE = 0.15  # of a GPU's free memory, left by the micro-batches that are chosen for a run: plans err by 10 %


@dataclasses.dataclass(frozen=True)
class Plan:
    """Predicted memory of a run, in bytes per GPU.

    Attributes:
        name: of the trained model.
        cfg: Config of the script.
        shape: of the trained model.
        trained: number of trained parameters.
        gpus: by GPU number, as the process sees it.
        host: pinned CPU memory of all processes here, without the copies that adapters merge into.
        longest: tokens of the longest prompt.
        minibatch: maximum number of tokens that a GPU trains on in an optimizer step.
        given: arguments of `of`, to plan again with other settings.
        capacity: bytes available to the run on each GPU; empty: unknown.
        host_capacity: bytes of CPU memory.
    """

    name: str
    cfg: Any
    shape: shapes.Shape
    trained: int
    gpus: dict[int, Gpu]
    host: int
    longest: int
    minibatch: int
    given: dict[str, Any]
    capacity: dict[int, float] = dataclasses.field(default_factory=dict)
    host_capacity: float = math.inf

    def for_capacity(self, capacity: float | Mapping[int, float], host: float = math.inf) -> "Plan":
        """The plan for a machine with known memory.

        Args:
            capacity: bytes available to the run, one number for all GPUs or by GPU number.
            host: bytes of CPU memory.
        """
        each = capacity if isinstance(capacity, Mapping) else dict.fromkeys(self.gpus, capacity)
        each = {number: each[number] for number in self.gpus}
        return dataclasses.replace(self, capacity=each, host_capacity=host)

    def with_options(self, **changes: Any) -> "Plan":
        """Plans again with changed fields of the Config.

        Raises:
            ValueError: the Config or the script would refuse these options.
        """
        cfg = _changed(self.cfg, **changes)
        with contextlib.redirect_stdout(io.StringIO()):
            sharding.enabled(cfg)
        return dataclasses.replace(of(cfg, **self.given), capacity=self.capacity, host_capacity=self.host_capacity)

    def peak(self, number: int) -> int:
        """Peak bytes on a GPU."""
        return self.gpus[number].peak(self.capacity.get(number, math.inf))

    @property
    def pinned(self) -> int:
        """Bytes of pinned CPU memory."""
        copies = ((gpu.copy, gpu.copied(self.capacity.get(i, math.inf))) for i, gpu in self.gpus.items())
        return self.host + sum(copy for copy, on_gpu in copies if not on_gpu)

    def load(self, number: int) -> float:
        """Peak of a GPU as a share of its usable memory; above 1 the run does not fit."""
        return self.peak(number) / max(1, USABLE * self.capacity.get(number, math.inf))

    def fits(self, capacity: float | Mapping[int, float] | None = None) -> bool:
        """Whether the run fits into every GPU and into CPU memory.

        Args:
            capacity: as in `for_capacity`; None: that of this plan.
        """
        plan = self if capacity is None else self.for_capacity(capacity)
        return plan.pinned <= USABLE * plan.host_capacity and all(plan.load(i) <= 1 for i in plan.gpus)

    def advice(self, capacity: float | Mapping[int, float] | None = None) -> advice.Advice:
        """The cheapest change of settings that makes the run fit; `capacity` as in `fits`."""
        return advice.find(self if capacity is None else self.for_capacity(capacity))

    def largest(self, capacity: float | Mapping[int, float] | None = None) -> tuple[int, int]:
        """The largest sizes that fit; they affect speed, not results.

        Args:
            capacity: as in `fits`.

        Returns:
            The largest micro_batch_tokens, up to a whole minibatch; 0 if not even one sequence
            fits. And the number of completions that all GPUs here decode at once; further ones are
            queued.
        """
        plan = self if capacity is None else self.for_capacity(capacity)
        tokens = 0
        for start in (plan.sequence, plan.cfg.micro_batch_tokens):
            size = min(start, plan.minibatch)
            while plan.with_options(micro_batch_tokens=size).fits():
                tokens = max(tokens, size)
                if size == plan.minibatch:
                    break
                size = min(2 * size, plan.minibatch)
        groups = [gpu.room(plan.capacity.get(i, math.inf)) for i, gpu in plan.gpus.items() if gpu.groups]
        return tokens, sum(groups) * self.cfg.group_size

    def with_largest_micro_batches(self) -> "Plan":
        """The plan with the micro-batches that `micro_batch_tokens` = 0 stands for.

        They have `budgets.TOKENS`, doubled up to `budgets.MOST_TOKENS` as long as a minibatch has
        more and RESERVE stays free.
        Ranks that share a model (FSDP2) cannot halve them when memory runs out: if so many do not
        fit, theirs are halved here.
        """
        room = {i: (1 - RESERVE) * capacity for i, capacity in self.capacity.items()}
        plan = self.with_options(micro_batch_tokens=budgets.TOKENS)

        def times(factor: float) -> Plan:
            return plan.with_options(micro_batch_tokens=int(factor * plan.cfg.micro_batch_tokens))

        sharded = self.given["ranks"] > 1 and distributed.shards(self.cfg)
        while sharded and not plan.fits() and plan.cfg.micro_batch_tokens > self.sequence:
            plan = times(1 / 2)
        most = min(self.minibatch, budgets.MOST_TOKENS)
        while plan.cfg.micro_batch_tokens < most and times(2).fits(room):
            plan = times(2)
        return plan

    @property
    def sequence(self) -> int:
        """Tokens of the longest sequence, the minimum for a micro-batch."""
        return self.longest + self.completion

    @property
    def completion(self) -> int:
        """Most tokens behind a prompt."""
        return completion_tokens(self.cfg, self.longest)

    @property
    def processes(self) -> list[Roles]:
        """Roles of each planned process."""
        roles = self.given["roles"]
        return [roles] if isinstance(roles, Mapping) else list(roles)

    def teacher_too_large(self) -> bool:
        """Whether the teacher does not fit into its GPUs even if nothing else is on them."""
        for i in self.processes[0].get("teacher", ()):
            held = self.gpus[i].always["teacher"] + self.gpus[i].phases["teacher"]["teacher"]
            if held > USABLE * self.capacity.get(i, math.inf):
                return True
        return False

    def __str__(self) -> str:
        """A table with one line per GPU."""
        names = list(dict.fromkeys(name for gpu in self.gpus.values() for name, n in gpu.always.items() if n))
        rows = [["GiB", *names, "rollout", "update", "peak", *(["usable", ""] if self.capacity else [])]]
        for number, gpu in sorted(self.gpus.items()):
            capacity = self.capacity.get(number, math.inf)
            totals = {phase: gpu.parts(phase, capacity).total() for phase in gpu.phases}
            rollout = totals.pop("rollout", 0)
            sizes = [gpu.always[name] for name in names] + [rollout, max(totals.values(), default=0), self.peak(number)]
            row = [f"GPU {number}", *(f"{size / GIB:.2f}" for size in sizes)]
            if self.capacity:
                row += [f"{USABLE * capacity / GIB:.1f}", "" if self.load(number) <= 1 else "does not fit"]
            rows.append(row)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [self._title()]
        for row in rows:
            cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
            lines.append("  ".join([row[0].ljust(widths[0]), *cells[1:]]).rstrip())
        lines += self._details()
        return "\n".join(lines)

    def _title(self) -> str:
        """The line above the table."""

        def rounded(count: int) -> str:
            return f"{count / 1e9:.2f} billion" if count >= 1e8 else f"{count / 1e6:.1f} million"

        trained = "all" if self.trained == self.shape.params else rounded(self.trained)
        return (
            f"plan: {self.name}, {rounded(self.shape.params)} parameters, {trained} trained; sequences of up to "
            f"{self.longest} + {self.completion} tokens, {self.cfg.micro_batch_tokens} in a micro-batch"
        )

    def _details(self) -> list[str]:
        """Lines below the table: parts on the fullest GPU, queued prompts, pinned memory."""
        number = max(self.gpus, key=self.load if self.capacity else self.peak)
        gpu, capacity = self.gpus[number], self.capacity.get(number, math.inf)
        lines = []
        for name, phases in (("rollout", ["rollout"]), ("update", [p for p in gpu.phases if p != "rollout"])):
            best = max(phases, key=lambda phase: gpu.parts(phase, capacity).total(), default=None)
            if best in gpu.phases:
                parts = ", ".join(f"{k} {n / GIB:.2f}" for k, n in gpu.parts(best, capacity).most_common())
                lines.append(f"GPU {number}, {name}{'' if best == name else f' ({best})'}: {parts}")
        waiting = gpu.groups - gpu.at_once(capacity)
        if waiting > 0:
            lines.append(f"completions of {gpu.groups - waiting} of {gpu.groups} prompts are sampled at once")
        if self.pinned:
            too_much = "" if self.pinned <= USABLE * self.host_capacity else ", which does not fit"
            lines.append(f"CPU memory, pinned: {self.pinned / GIB:.2f}{too_much}")
        return lines


def of(
    cfg: Any,
    roles: Roles | Sequence[Roles],
    *,
    ranks: int = 1,
    model: str = "",
    prompt_tokens: int = 0,
    visual_tokens: int | None = None,
    on_gpu: bool = True,
) -> Plan:
    """Plans a run from its configuration.

    Args:
        cfg: Config of a training script; fields that it lacks count as switched off.
        roles: GPUs of each role, from `layouts.roles`; or a list, one per process on this machine.
        ranks: number of processes on all machines.
        model: the trained model, as in `shapes.of`; "": the one that `cfg` names.
        prompt_tokens: length of the longest prompt; 0: unknown, `max_prompt_tokens` is assumed.
        visual_tokens: largest number of image tokens in a prompt, for a vision-language model;
            None: unknown, the most that options allow is assumed.
        on_gpu: False: everything runs on the CPU, which counts as GPU 0.

    Raises:
        ValueError: a model cannot be found or is not supported.
    """
    if not cfg.micro_batch_tokens:  # `with_largest_micro_batches` may choose more, where there is memory
        cfg = _changed(cfg, micro_batch_tokens=budgets.TOKENS)
    given = dict(roles=roles, ranks=ranks, model=model, prompt_tokens=prompt_tokens, visual_tokens=visual_tokens,
                 on_gpu=on_gpu)  # fmt: skip
    processes = [roles] if isinstance(roles, Mapping) else list(roles)
    name = cfg.student_model if hasattr(cfg, "student_model") else cfg.policy_model
    shape = shapes.of(model or name, targets=getattr(cfg, "lora_targets", lora.ALL))
    longest = min(prompt_tokens or cfg.max_prompt_tokens, cfg.max_prompt_tokens)
    run = Run(cfg, shape, ranks, longest, visual_tokens, on_gpu)
    gpus = {i: Gpu() for i in sorted({i for process in processes for ids in process.values() for i in ids})}
    for process in processes:
        run.add(gpus, process)
    trains = len(processes[0].get("student") or processes[0]["policy"])
    replicas = (trains - 1) * run.weights * run.param_offload  # every replica is offloaded
    host = len(processes) * math.ceil(run.host + replicas)
    return Plan(name, cfg, shape, run.trained, gpus, host, run.longest, run.minibatch(trains), given)


def _changed(cfg: Any, **changes: Any) -> Any:
    """A Config with changed fields; a ValueError if it refuses them."""
    with contextlib.redirect_stdout(io.StringIO()):  # warnings were printed before
        return dataclasses.replace(cfg, **changes)


def micro_batch_tokens(cfg: Any, plan: "Plan | str") -> int:
    """The tokens of a micro-batch: the option, or what the plan has in place of 0.

    Args:
        cfg: a `settings.Settings`.
        plan: from `require_fit`.
    """
    return cfg.micro_batch_tokens or (plan.cfg.micro_batch_tokens if isinstance(plan, Plan) else budgets.TOKENS)


def host_bytes() -> int:
    """Bytes of CPU memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def require_fit(
    cfg: Any,
    gpus: devices.Layout,
    *,
    ranks: int = 1,
    model: str = "",
    prompt_tokens: int = 0,
    visual_tokens: int | None = None,
    resumed_tokens: int = 0,
) -> "Plan | str":
    """Prints the plan of a run on rank 0 and refuses a run that cannot fit; call it before loading.

    On GPUs it chooses the micro-batches, if `micro_batch_tokens` is 0; then it is a collective.

    Args:
        cfg: as in `of`.
        gpus: devices of all roles.
        ranks: as in `of`.
        model: as in `of`.
        prompt_tokens: as in `of`.
        visual_tokens: as in `of`.
        resumed_tokens: of a micro-batch before the run was resumed; chosen again, if they fit.

    Returns:
        The plan; or the reason why there is none.

    Raises:
        ValueError: not even a micro-batch of one sequence fits, and `force` is not set. The message
            says what to change.
    """
    found = {role: tuple(dict.fromkeys(gpus.of(role))) for role in layouts.role_names(cfg)}
    on_gpu = next(iter(found.values()))[0].type == "cuda"
    places = {d.index or 0: d for where in found.values() for d in where}
    numbers = {role: tuple(d.index or 0 for d in where) for role, where in found.items()}
    try:
        plan = of(cfg, numbers, ranks=ranks, model=model, prompt_tokens=prompt_tokens, visual_tokens=visual_tokens,
                  on_gpu=on_gpu)  # fmt: skip
    except (OSError, ValueError, AttributeError) as error:  # loading the model gives a better error
        plan = f"no plan of memory: {type(error).__name__}: {error}"
        distributed.print_main(plan)
        if on_gpu and not cfg.micro_batch_tokens:  # other ranks may have a plan
            distributed.gather_objects(budgets.TOKENS)
        return plan
    if not on_gpu:
        gib = plan.gpus[0].always.total() / GIB
        if gib > 0.1:  # not for a built-in model
            distributed.print_main(f"plan: weights and optimizer take {gib:.2f} GiB of CPU memory, in each process")
        return plan
    # the plan includes what this process has allocated already
    capacity = {i: devices.free_bytes(d) + torch.cuda.memory_allocated(d) for i, d in places.items()}
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    plan = plan.for_capacity(capacity, host_bytes() / processes)  # the plan covers one process
    if not cfg.micro_batch_tokens:
        before = plan.with_options(micro_batch_tokens=resumed_tokens or budgets.TOKENS)
        own = before if resumed_tokens and before.fits() else plan.with_largest_micro_batches()
        tokens = min(distributed.gather_objects(own.cfg.micro_batch_tokens))
        plan = plan.with_options(micro_batch_tokens=tokens)
        distributed.print_main(f"micro_batch_tokens = 0: micro-batches of up to {tokens} tokens")
    distributed.print_main(plan)
    if plan.fits():
        return plan
    smallest = plan.with_options(micro_batch_tokens=1)
    if smallest.fits():
        distributed.print_main(
            f"micro_batch_tokens = {plan.cfg.micro_batch_tokens} may be too many: halved when memory runs out; "
            f"about {max(plan.sequence, plan.largest()[0])} fit"
        )
        return plan
    fullest = max(places, key=smallest.load)
    value = f"GPU {fullest}: the smallest micro-batch needs about {smallest.peak(fullest) / GIB:.1f} GiB"
    rule = f"{USABLE * plan.capacity[fullest] / GIB:.1f} GiB can be used"
    if smallest.load(fullest) <= 1:
        pinned = processes * smallest.pinned / GIB
        value = f"optimizer_offload or param_offload: {pinned:.1f} GiB of CPU memory for all processes"
        rule = f"this machine has {host_bytes() / GIB:.1f}"
    if getattr(cfg, "force", False):
        distributed.print_main(f"warning: {value}, {rule}; starting all the same, as force says")
        return plan
    require(False, value, rule, f"{plan.advice()}; or --force true, if you know better")
    return plan
