"""The GPUs of a machine as nvidia-smi lists them, and as a process sees them through CUDA_VISIBLE_DEVICES."""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field

import torch

from common.base.devices import GIB

GPU_QUERY = "--query-gpu=index,uuid,pci.bus_id,memory.total,memory.free,driver_version,name"
APP_QUERY = "--query-compute-apps=gpu_uuid,pid,used_memory,process_name"
FORMAT = "--format=csv,noheader,nounits"  # memory in MiB
HIDES = ("", "-1", "none", "nodevfiles")  # common values of CUDA_VISIBLE_DEVICES that hide all GPUs


@dataclass(frozen=True)
class Row:
    """A GPU as nvidia-smi lists it; bytes are 0 if unknown."""

    index: str
    uuid: str
    bus: str
    name: str
    total: int = 0
    free: int = 0


@dataclass(frozen=True)
class Machine:
    """The answer of nvidia-smi.

    Attributes:
        rows: GPUs of the machine, or of the container.
        slices: by UUID of a MIG slice: index of the GPU and name of the profile.
        users: by UUID of a GPU: process id, bytes (0: unknown) and name of each process on it.
        driver: version; "" without nvidia-smi.
        error: why nvidia-smi failed.
    """

    rows: tuple[Row, ...] = ()
    slices: dict[str, tuple[str, str]] = field(default_factory=dict)
    users: dict[str, list[tuple[str, int, str]]] = field(default_factory=dict)
    driver: str = ""
    error: str = ""


@dataclass(frozen=True)
class Card:
    """A GPU as a process sees it.

    Attributes:
        number: of `cuda:number` in the process.
        physical: index in nvidia-smi, with the profile of a MIG slice; "?" if unknown.
        uuid: "GPU-..." or "MIG-...".
        bus: PCI address.
        name: product name.
        total: bytes.
        free: bytes, before this process allocated any.
        users: other processes on it, one line each.
    """

    number: int
    physical: str
    uuid: str
    bus: str
    name: str
    total: int
    free: int
    users: tuple[str, ...] = ()


def query() -> Machine:
    """Runs nvidia-smi; returns an empty answer if it is not installed."""
    if not shutil.which("nvidia-smi"):
        return Machine()
    answers = []
    for arguments in ([GPU_QUERY, FORMAT], [APP_QUERY, FORMAT], ["-L"]):
        try:
            run = subprocess.run(
                ["nvidia-smi", *arguments], capture_output=True, encoding="utf-8", timeout=30, check=False
            )
        except subprocess.TimeoutExpired:
            return Machine(error="no answer within 30 s")
        if run.returncode:
            return Machine(error=" ".join((run.stdout or run.stderr).split()))
        answers.append(run.stdout)
    return parse(*answers)


def parse(gpus: str, apps: str, listing: str) -> Machine:
    """Parses the output of nvidia-smi.

    Args:
        gpus: output for GPU_QUERY.
        apps: output for APP_QUERY.
        listing: output for -L, which lists MIG slices below their GPU.
    """
    fields = [line.split(", ", 6) for line in gpus.splitlines() if line.count(", ") >= 6]
    rows = tuple(Row(f[0], f[1], f[2].upper(), f[6].strip(), _bytes(f[3]), _bytes(f[4])) for f in fields)
    users: dict[str, list[tuple[str, int, str]]] = {}
    for line in apps.splitlines():
        if line.count(", ") >= 3:
            uuid, pid, used, name = line.split(", ", 3)
            users.setdefault(uuid, []).append((pid, _bytes(used), name.strip()))
    slices, index = {}, ""
    for line in listing.splitlines():
        if gpu := re.match(r"GPU (\d+):", line):
            index = gpu[1]
        elif mig := re.match(r"\s+MIG (\S+)\s+Device.*UUID: (MIG-[^)]+)", line):
            slices[mig[2]] = index, mig[1]
    return Machine(rows, slices, users, fields[0][5] if fields else "")


def _bytes(mib: str) -> int:
    return int(mib) * 2**20 if mib.strip().isdigit() else 0  # "[N/A]" in some containers and for MIG


def visible(machine: Machine) -> list[Card]:
    """The GPUs that this process sees, by number.

    Args:
        machine: from `query`, which also knows the other processes.

    Raises:
        RuntimeError: CUDA cannot be initialized.
    """
    cards = []
    for number in range(torch.cuda.device_count()):
        seen = torch.cuda.get_device_properties(number)
        bus = f"{seen.pci_domain_id:08X}:{seen.pci_bus_id:02X}:{seen.pci_device_id:02X}.0"
        uuid, physical = f"GPU-{seen.uuid}", "?"
        row = next((row for row in machine.rows if row.uuid == uuid), None)
        row = row or next((row for row in machine.rows if row.bus == bus), None)
        if row:
            uuid, physical = row.uuid, row.index
        if f"MIG-{seen.uuid}" in machine.slices:
            uuid = f"MIG-{seen.uuid}"
            physical = "{} MIG {}".format(*machine.slices[uuid])
        # mem_get_info creates a CUDA context, which takes memory; but only CUDA knows the memory of a MIG slice
        whole = row is not None and row.total and seen.total_memory > 0.9 * row.total
        free, total = (row.free, row.total) if whole else torch.cuda.mem_get_info(number)
        cards.append(Card(number, physical, uuid, bus, seen.name, total, free, _others(machine, row)))
    return cards


def _others(machine: Machine, row: Row | None) -> tuple[str, ...]:
    listed = machine.users.get(row.uuid, []) if row else []
    return tuple(
        f"pid {pid} {os.path.basename(name)} {f'{used / GIB:.1f} GiB' if used else ''}".strip()
        for pid, used, name in listed
        if pid != str(os.getpid())
    )


def resolve(visible: str | None, machine: Machine) -> tuple[list[str], str]:
    """How CUDA reads CUDA_VISIBLE_DEVICES.

    Args:
        visible: its value; None: it is not set.
        machine: from `query`.

    Returns:
        UUIDs of the visible GPUs by number, and what is wrong with the list, or "".
    """
    by_index = {row.index: row.uuid for row in machine.rows}
    if visible is None:
        return list(by_index.values()), ""
    shown: list[str] = []
    for entry in [] if visible.strip().lower() in HIDES else [part.strip() for part in visible.split(",")]:
        if entry in by_index:
            named = [by_index[entry]]
        else:  # a prefix of a UUID is allowed
            uuids = (*by_index.values(), *machine.slices)
            named = [uuid for uuid in uuids if entry.startswith(("GPU-", "MIG-")) and uuid.startswith(entry)]
        if len(named) != 1:
            return shown, f"'{entry}' is no GPU of this machine, and CUDA shows none from there on"
        if named[0] in shown:
            return [], f"'{entry}' stands there twice, and CUDA then shows no GPU at all"
        shown += named
    return shown, ""


def why_hidden(visible: str | None, machine: Machine, found: int, built: str | None) -> str:
    """Why a process does not see the GPUs of the machine, or those of CUDA_VISIBLE_DEVICES.

    Args:
        visible: CUDA_VISIBLE_DEVICES; None: it is not set.
        machine: from `query`.
        found: number of GPUs that torch sees.
        built: CUDA version of torch; None: built without CUDA.

    Returns:
        Value, rule, remedy; "" if nothing is wrong.
    """
    total, (shown, wrong) = len(machine.rows), resolve(visible, machine)
    value, listed = f"CUDA_VISIBLE_DEVICES = '{visible}'", ",".join(row.index for row in machine.rows)
    if not total:
        return ""
    if built is None:
        rule, remedy = "it is built without CUDA", "install the build for CUDA, https://pytorch.org/get-started/locally"
        return f"torch {torch.__version__} on a machine with {total} GPU(s): {rule}; {remedy}"
    if wrong:
        return f"{value}: {wrong}; name each once, of {listed}, or unset it"
    if not shown:
        return f"{value}: it hides the {total} GPU(s) of this machine; unset it, or name them, {listed}"
    if not found:
        rule, remedy = f"must be one for CUDA {built}", "update it, or install a torch for an older CUDA"
        return f"driver {machine.driver}, with which torch sees none of {total} GPU(s): {rule}; {remedy}"
    return ""
