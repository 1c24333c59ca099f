"""The GPUs of a machine: as nvidia-smi knows them, and as a process sees them behind CUDA_VISIBLE_DEVICES."""

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
HIDES = ("", "-1", "none", "nodevfiles")  # values of CUDA_VISIBLE_DEVICES that are used to show no GPU


@dataclass(frozen=True)
class Row:
    """A GPU as nvidia-smi knows it; bytes are 0 where it does not say."""

    index: str
    uuid: str
    bus: str
    name: str
    total: int = 0
    free: int = 0


@dataclass(frozen=True)
class Machine:
    """What nvidia-smi says.

    Attributes:
        rows: the GPUs of the machine, or of the container.
        slices: index of the GPU and name of the profile, by UUID of a MIG slice.
        users: process id, bytes (0: unknown) and name of the processes on a GPU, by its UUID.
        driver: version; "" without nvidia-smi.
        error: why nvidia-smi gave no answer.
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
        physical: number in nvidia-smi, with the profile of a MIG slice; "?" if unknown.
        uuid: "GPU-..." or "MIG-...".
        bus: PCI address.
        name: of the model.
        total: bytes.
        free: bytes, before this process took any.
        users: other processes on it, in words.
    """

    number: int
    physical: str
    uuid: str
    bus: str
    name: str
    total: int
    free: int
    users: tuple[str, ...] = ()


def ask() -> Machine:
    """Runs nvidia-smi; without it the answer is empty."""
    if not shutil.which("nvidia-smi"):
        return Machine()
    answers = []
    for query in ([GPU_QUERY, FORMAT], [APP_QUERY, FORMAT], ["-L"]):
        try:
            run = subprocess.run(["nvidia-smi", *query], capture_output=True, text=True, timeout=30, check=False)
        except subprocess.TimeoutExpired:
            return Machine(error="no answer within 30 s")
        if run.returncode:
            return Machine(error=" ".join((run.stdout or run.stderr).split()))
        answers.append(run.stdout)
    return parse(*answers)


def parse(gpus: str, apps: str, listing: str) -> Machine:
    """Reads the answers of nvidia-smi.

    Args:
        gpus: to GPU_QUERY.
        apps: to APP_QUERY.
        listing: to -L, where MIG slices stand below their GPU.
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


def collect(machine: Machine) -> list[Card]:
    """The GPUs that this process sees, in its order.

    Args:
        machine: from `ask`; other processes are those that were there then.

    Raises:
        RuntimeError: CUDA does not start.
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
        # nvidia-smi costs no memory; asked of CUDA, it takes some itself. Only CUDA knows that of a slice
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
    """What CUDA makes of CUDA_VISIBLE_DEVICES.

    Args:
        visible: its value; None: it is not set.
        machine: with the GPUs there are.

    Returns:
        UUIDs of the GPUs that are shown, in the order of their numbers; and what is wrong with the list, or "".
    """
    by_index = {row.index: row.uuid for row in machine.rows}
    if visible is None:
        return list(by_index.values()), ""
    shown: list[str] = []
    for entry in [] if visible.strip().lower() in HIDES else [part.strip() for part in visible.split(",")]:
        if entry in by_index:
            named = [by_index[entry]]
        else:  # the beginning of a UUID suffices
            uuids = (*by_index.values(), *machine.slices)
            named = [uuid for uuid in uuids if entry.startswith(("GPU-", "MIG-")) and uuid.startswith(entry)]
        if len(named) != 1:
            return shown, f"'{entry}' is no GPU of this machine, and CUDA shows none from there on"
        if named[0] in shown:
            return [], f"'{entry}' stands there twice, and CUDA then shows no GPU at all"
        shown += named
    return shown, ""


def hidden(visible: str | None, machine: Machine, found: int, built: str | None) -> str:
    """Why a process does not see the GPUs that it could, or that it is told to.

    Args:
        visible: CUDA_VISIBLE_DEVICES; None: it is not set.
        machine: from `ask`.
        found: GPUs that torch sees.
        built: CUDA version of torch; None: built without.

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
