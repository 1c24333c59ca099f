"""Checkpoints that are complete or absent, everything a resume needs, and a stop that saves first.

A checkpoint is an ordinary transformers folder (model.safetensors, config, tokenizer) with three more files:
`optimizer.safetensors` (fp32 masters and Adam state by parameter name), `rng.safetensors` (random number generators of
every rank and device) and `state.json` (step, data position, configuration, notes of the script, and sizes and
checksums of all files, which are checked before a run goes on from it), with a folder `reference` if the frozen model
is no longer the one the run began with, and with `rollout.safetensors` if a service stayed away before the completions
of the next step could be scored. Nothing is pickled.
"""

import dataclasses
import json
import os
import random
import shutil
import signal
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from common.base import config, distributed, storage
from common.generation.batches import RolloutBatch
from common.model import lora
from common.training.optim import AdamW

STATE = "state.json"
REFERENCE = "reference"  # folder of a refreshed reference inside a checkpoint
ROLLOUT = "rollout.safetensors"  # completions that are not scored yet, of every rank
# settings that completions do not depend on, of those that change while a service is away
NOT_SAMPLING = ("reward_url", "reward_patience", "allow_reward_change", "out_dir", "resume", "steps", "save_every",
                "keep_checkpoints")  # fmt: skip


def newest(out_dir: str | Path) -> Path | None:
    """The complete checkpoint with the most steps.

    Args:
        out_dir: of the run.

    Returns:
        Its folder, or None.
    """
    return max(filter(is_complete, Path(out_dir).glob("checkpoint-*")), key=_step, default=None)


def is_complete(folder: str | Path) -> bool:
    """Whether every file the checkpoint was saved with is there, in its full size; quick, since nothing is read."""
    return not _damage(Path(folder), thorough=False)


def _damage(folder: Path, thorough: bool = True) -> str:
    """What is wrong with a checkpoint, in words; "" if it is as it was saved."""
    try:
        state = json.loads((folder / STATE).read_text())
        files = {name: {"bytes": was} if isinstance(was, int) else was for name, was in state["files"].items()}
        sizes = {name: was["bytes"] for name, was in files.items()}
    except FileNotFoundError:
        return f"{STATE} is missing"
    except OSError as error:
        return f"{STATE} cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # cut off in the middle, or not ours
        return f"{STATE} cannot be read"
    for name, size in sizes.items():
        if Path(name).is_absolute() or ".." in Path(name).parts or not (folder / name).is_file():
            return f"{name} is missing"
        if (found := (folder / name).stat().st_size) != size:
            return f"{name} has {found} bytes of {size}"
    if not thorough:
        return ""
    if "crc32" in state and state["crc32"] != _crc32_of(state):
        return f"{STATE} was edited"
    known = [name for name, was in files.items() if "crc32" in was]
    for name, found in storage.checksums(folder, known).items():
        if found != files[name]:
            return f"{name} is not the file that was saved (CRC-32 {found['crc32']}, not {files[name]['crc32']})"
    return ""


def _crc32_of(state: dict[str, Any]) -> str:
    """Checksum of what is known of a checkpoint, itself left out."""
    text = json.dumps({name: value for name, value in state.items() if name != "crc32"}, sort_keys=True)
    return f"{zlib.crc32(text.encode()):08x}"


def find(out_dir: str, resume: str) -> Path | None:
    """Which checkpoint a run starts from, and keeps `out_dir` for this run alone; called by every rank.

    Args:
        out_dir: of the run.
        resume: "auto" (the newest complete one in out_dir, if any), "none" (start anew), or a checkpoint folder. One
            whose files are not what was saved is passed over by "auto", with a message.

    Returns:
        The folder, or None to start anew.

    Raises:
        ValueError: the folder named is not a complete checkpoint, or damaged; or "auto", and all in out_dir are; or
            "none", and out_dir already holds a run; or the folder is of another run, and out_dir holds one of its own;
            or another run uses out_dir, or it cannot be written; or the ranks see different checkpoints.
    """
    folder = None
    with distributed.together("resume"):
        if distributed.rank() == 0:
            if Path(out_dir).is_dir():
                storage.claim(out_dir)
            folder = _find(out_dir, resume)
            storage.claim(out_dir)
    folder = distributed.gather_objects(folder)[0]
    with distributed.together("resume"):
        if folder is not None and not is_complete(folder):
            raise ValueError(
                f"out_dir = {out_dir!r}: rank {distributed.rank()} does not see {folder}, from which rank 0 goes on; "
                "to resume on several machines, out_dir must be a folder that all of them share"
            )
    if resume == "auto":
        distributed.print_main(f"resuming from {folder}" if folder else f"no checkpoint in {out_dir}: starting anew")
    return folder


def _find(out_dir: str, resume: str) -> Path | None:
    if resume == "auto":
        for aside in Path(out_dir).glob(".writing-old-checkpoint-*"):  # killed while it was replaced
            final = aside.with_name(aside.name.removeprefix(".writing-old-"))
            if not final.exists() and is_complete(aside):
                os.rename(aside, final)
                print(f"{final} was about to be replaced when a run ended: it is back in its place")
        folders = [folder for folder in Path(out_dir).glob("checkpoint-*") if folder.is_dir() and _step(folder) >= 0]
        folders.sort(key=_step, reverse=True)
        for folder in folders:
            damage = _damage(folder)
            if not damage:
                return folder
            print(f"warning: {folder} is passed over: {damage}", file=sys.stderr, flush=True)
        if folders:
            raise ValueError(
                f"out_dir = {out_dir!r}: no checkpoint in it can be used, see above; put back what is missing, or move "
                "them away to start anew"
            )
        return None
    if resume == "none":
        if newest(out_dir) or (Path(out_dir) / "metrics.jsonl").exists():
            raise ValueError(f"out_dir = {out_dir!r} already holds a run: give another out_dir, or resume = 'auto'")
        return None
    if damage := _damage(Path(resume)):
        raise ValueError(
            f"resume = {resume!r}: not a complete checkpoint, {damage}; give a folder checkpoint-NNNNNN with all its "
            "files, 'auto', or 'none'"
        )
    if Path(resume).resolve().parent != Path(out_dir).resolve() and (own := newest(out_dir)):
        raise ValueError(
            f"resume = {resume!r}, out_dir = {out_dir!r}: out_dir holds {own.name} of a run of its own, whose lines "
            "and checkpoints would be mixed with new ones; give another out_dir, or resume = 'auto' to go on from it"
        )
    return Path(resume)


def save(
    out_dir: str,
    step: int,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    optimizer: AdamW,
    position: int,
    cfg: Any,
    reference: PreTrainedModel | None = None,
    notes: dict[str, Any] | None = None,
    rollout: RolloutBatch | None = None,
) -> None:
    """Saves a checkpoint; called by every rank, written by rank 0.

    It is written beside its final place, synced to disk and renamed: a run killed in the middle, or a full disk, leaves
    the older checkpoints as they were.

    Args:
        out_dir: of the run.
        step: steps done.
        model: the unwrapped policy; of a sharded one its plain copy.
        tokenizer: saved with it.
        optimizer: its state is saved.
        position: prompts taken from the data so far, over all ranks.
        cfg: the Config of the run, saved too; its newest `keep_checkpoints` checkpoints stay.
        reference: the frozen model, if it is no longer the one the run began with; saved in a folder of its own inside.
        notes: what else the script wants back from `notes`, JSON values.
        rollout: completions of the next step that could not be scored; `unscored` gives them back.

    Raises:
        OSError: it could not be written; the checkpoints before are as they were.
    """
    optimizer_state = optimizer.state_dict()  # a collective, if it is sharded
    rng_by_rank = distributed.gather_objects(_rng_state())
    rollouts = distributed.gather_objects(rollout.state_dict() if rollout is not None else None)
    with distributed.together("save"):
        if distributed.rank() == 0:
            final = Path(out_dir) / f"checkpoint-{step:06d}"
            folder = Path(out_dir) / f".writing-{final.name}"
            try:
                for leftover in Path(out_dir).glob(".writing-*"):
                    storage.remove(leftover)
                folder.mkdir(parents=True)
                lora.save(model, folder)
                tokenizer.save_pretrained(folder)
                if reference is not None:
                    reference.save_pretrained(folder / REFERENCE)
                save_file({k: v.detach().cpu().contiguous() for k, v in optimizer_state.items()},
                          folder / "optimizer.safetensors")  # fmt: skip
                rng = {f"rank{r}/{name}": value for r, state in enumerate(rng_by_rank) for name, value in state.items()}
                save_file(rng, folder / "rng.safetensors")
                if all(rollouts):  # of one rank alone they would be of no use
                    named = {f"rank{r}/{name}": x for r, own in enumerate(rollouts) for name, x in own.items()}
                    save_file(named, folder / ROLLOUT)
                written = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
                state = {
                    "step": step,
                    "position": position,
                    "num_ranks": len(rng_by_rank),
                    "files": storage.checksums(folder, written),
                    "notes": notes or {},
                    "config": dataclasses.asdict(cfg),
                }
                state = json.loads(json.dumps(state))  # as it will be read: keys of notes become texts
                (folder / STATE).write_text(json.dumps({**state, "crc32": _crc32_of(state)}, indent=1))
                for path in [*folder.rglob("*"), folder]:
                    storage.sync(path)
            except (OSError, SafetensorError) as error:  # safetensors has a kind of its own for a full disk
                shutil.rmtree(folder, ignore_errors=True)
                left, room = newest(out_dir), storage.free(out_dir)
                raise OSError(
                    f"the checkpoint of step {step} could not be written to {out_dir}, on which {room} is free: "
                    f"{error}. Make room (keep_checkpoints = {cfg.keep_checkpoints} and one more must fit), then run "
                    "the same command: " + (f"it goes on from {left}, which is as it was" if left else "it starts anew")
                ) from error
            except BaseException:  # a second Ctrl-C: what was written goes, the error stays
                shutil.rmtree(folder, ignore_errors=True)
                raise
            replaced = _aside(final) if os.path.lexists(final) else None
            os.rename(folder, final)
            storage.sync(final.parent)
            if replaced:
                storage.remove(replaced)
            complete = sorted(filter(is_complete, Path(out_dir).glob("checkpoint-*")), key=_step)
            for later in [folder for folder in complete if _step(folder) > step]:
                # the run went back to an older checkpoint: "auto" must not return to the branch it left
                abandoned = later.with_name(f"abandoned-{later.name}")
                if os.path.lexists(abandoned):
                    storage.remove(abandoned)
                os.rename(later, abandoned)
                print(f"{later} is of steps that are taken again: now {abandoned}")
            for old in [folder for folder in complete if _step(folder) <= step][: -cfg.keep_checkpoints]:
                storage.remove(_aside(old))


def _aside(folder: Path) -> Path:
    """Renames a checkpoint to go: a kill while it is deleted leaves no half of one; the next save deletes it."""
    aside = folder.with_name(f".writing-old-{folder.name}")
    os.rename(folder, aside)
    return aside


def reference(folder: Path | None, cfg: Any) -> str:
    """The model that a frozen reference is loaded from.

    Args:
        folder: a complete checkpoint, or None for a new run.
        cfg: the Config of the run.

    Returns:
        The reference saved in the checkpoint, if there is one and `reference_refresh` is on, else `policy_model`: a run
        that saves no reference must not go on with one, or it would be another after the next resume.
    """
    saved = Path(folder or "") / REFERENCE
    return str(saved) if folder and cfg.reference_refresh and saved.is_dir() else cfg.policy_model


def notes(folder: Path | None) -> dict[str, Any]:
    """What a script gave to `save` as notes; empty for a new run.

    Args:
        folder: a complete checkpoint, or None.
    """
    return json.loads((folder / STATE).read_text()).get("notes", {}) if folder else {}


def unscored(folder: Path | None, device: torch.device, cfg: Any = None) -> RolloutBatch | None:
    """The completions of the next step, if the run was saved because they could not be scored.

    Args:
        folder: a complete checkpoint, or None.
        device: of the policy.
        cfg: the present Config; None, as in scripts copied earlier: the completions are sampled again.

    Returns:
        Those of this rank. None if there are none, or if the run has other settings or another number of ranks by now:
        they are sampled again, since they may be of other prompts, or of groups of another size.
    """
    if folder is None or not (folder / ROLLOUT).is_file():
        return None
    state = json.loads((folder / STATE).read_text())
    lines = config.changed(state["config"], cfg) if cfg is not None else ["cfg"]
    changed = [line for line in lines if line.partition(":")[0] not in NOT_SAMPLING]
    if changed or state["num_ranks"] != distributed.num_ranks():
        distributed.print_main(f"{folder} holds completions sampled with other settings or ranks: sampled again")
        return None
    prefix = f"rank{distributed.rank()}/"
    with safe_open(folder / ROLLOUT, "pt") as file:
        fields = {key.removeprefix(prefix): file.get_tensor(key) for key in file.keys() if key.startswith(prefix)}  # noqa: SIM118
    distributed.print_main(f"{folder} holds completions that were not scored: they come first")
    return RolloutBatch.from_state_dict(fields).to(device)


def load(folder: Path, optimizer: AdamW, cfg: Any) -> tuple[int, int]:
    """Restores optimizer and random number generators; the policy itself is loaded from the folder like any model.

    Args:
        folder: a complete checkpoint.
        optimizer: its state is replaced, and with it the weights, by the fp32 masters.
        cfg: the present Config; what differs from the saved one is printed, and holds, except for the model.

    Returns:
        Steps done, and prompts taken from the data.

    Raises:
        ValueError: the checkpoint is of another model, or its optimizer state does not fit, or holds a number that is
            not finite.
    """
    state = json.loads((folder / STATE).read_text())
    for name in ("policy_model", "student_model"):
        was, now = state["config"].get(name), getattr(cfg, name, None)
        if (was is None) != (now is None):
            raise ValueError(
                f"resume from {folder}: it has {'no ' if was is None else ''}{name}, so another kind of script saved "
                "it; give a checkpoint of this kind, or name that folder as the model to begin with"
            )
        if was != now:
            raise ValueError(
                f"{name} = {now!r}: {folder} was trained from {was!r}; give another out_dir, or set {name} back (to go "
                f"on from a checkpoint with other settings, name its folder as {name})"
            )
    was, now = state["config"].get("lora_rank", 0), getattr(cfg, "lora_rank", 0)
    if bool(was) != bool(now):
        raise ValueError(
            f"lora_rank = {now}: {folder} was trained with lora_rank = {was}, and its optimizer state is of those "
            f"weights; set it back to {was}, or give another out_dir and name that folder as the model to begin with"
        )
    optimizer_state = load_file(folder / "optimizer.safetensors")
    for name, value in optimizer_state.items():
        ends = torch.stack(torch.aminmax(value)) if value.numel() else torch.zeros(1)  # NaN passes through
        if not ends.double().isfinite().all():
            raise ValueError(
                f"{folder / 'optimizer.safetensors'}: {name} holds {ends[~ends.isfinite()][0]}: must be finite; name "
                "an older checkpoint as resume"
            )
    optimizer.load_state_dict(optimizer_state)
    prefix = f"rank{distributed.rank()}/"
    with safe_open(folder / "rng.safetensors", "pt") as file:
        rng = {key.removeprefix(prefix): file.get_tensor(key) for key in file.keys() if key.startswith(prefix)}  # noqa: SIM118
    if state["num_ranks"] != distributed.num_ranks():
        distributed.print_main(
            f"saved by {state['num_ranks']} process(es), resumed by {distributed.num_ranks()}: data order and sampling "
            "go on as before; Python, NumPy and torch generators of new ranks start from the seed"
        )
    _restore_rng(rng)
    for line in config.changed(state["config"], cfg):
        distributed.print_main(f"changed since the checkpoint: {line}")
    return state["step"], state["position"]


@contextmanager
def keep_batch(out_dir: str, step: int, micros: list[RolloutBatch]) -> Iterator[None]:
    """Saves the micro-batches of a step whose numbers are not finite, before the run stops.

    Args:
        out_dir: of the run.
        step: from 1.
        micros: all of the step: which optimizer step was at fault is not known.

    Raises:
        FloatingPointError: the one from the block, with the path of the saved batch.
    """
    try:
        yield
    except FloatingPointError as error:
        path = Path(out_dir) / f"not_finite-step{step:06d}-rank{distributed.rank()}.safetensors"
        where = f"is in {path}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)  # a rank on another machine
            tensors = {f"micro{i}/{k}": v for i, micro in enumerate(micros) for k, v in micro.state_dict().items()}
            save_file(tensors, path)
        except (OSError, SafetensorError) as failure:  # what stopped the run must be the error that is read last
            where = f"could not be kept ({failure})"
        raise FloatingPointError(f"step {step}: {error}; the batch {where}") from error


def _step(folder: Path) -> int:
    """Steps done at a checkpoint; -1 for a folder that only begins like one."""
    number = folder.name.removeprefix("checkpoint-")
    return int(number) if number.isdecimal() else -1


def _rng_state() -> dict[str, torch.Tensor]:
    version, words, gauss = random.getstate()
    _, keys, place, has_gauss, cached = np.random.get_state()
    state = {
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "python_gauss": torch.tensor([float("nan") if gauss is None else gauss], dtype=torch.float64),
        "numpy": torch.tensor([*keys.tolist(), place, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    for i in range(torch.cuda.device_count()):
        state[f"cuda{i}"] = torch.cuda.get_rng_state(i)
    return state


def _restore_rng(state: dict[str, torch.Tensor]) -> None:
    if not state:  # a rank that the saved run did not have
        return
    version, *words = state["python"].tolist()
    gauss = state["python_gauss"].item()
    random.setstate((version, tuple(words), None if gauss != gauss else gauss))
    *keys, place, has_gauss = state["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), place, has_gauss, state["numpy_gauss"].item()))
    torch.set_rng_state(state["torch"])
    for i in range(torch.cuda.device_count()):
        if f"cuda{i}" in state:
            torch.cuda.set_rng_state(state[f"cuda{i}"], i)


@contextmanager
def save_on_outage(save: Callable[[], None] | None = None) -> Iterator[None]:
    """Saves and ends the run when a service that it needs stays away; all ranks come here together.

    Args:
        save: saves what was done before the step that could not be taken; None: nothing was done yet.

    Raises:
        SystemExit: after an outage, with OUTAGE_EXIT_CODE.
    """
    try:
        yield
    except distributed.OutageError as outage:
        distributed.print_main(outage, file=sys.stderr)
        if save is not None:
            save()
            distributed.print_main("saved; the same command goes on from here", file=sys.stderr)
        distributed.shutdown(distributed.OUTAGE_EXIT_CODE)
        raise SystemExit(distributed.OUTAGE_EXIT_CODE) from outage


@contextmanager
def stop_on_signal() -> Iterator[list[str]]:
    """Turns the first Ctrl-C or SIGTERM into a note, so that the step can be finished and saved; a second one stops.

    Yields:
        A list; it is no longer empty once a signal came.
    """
    received: list[str] = []
    first = 0.0

    def note(number: int, frame: Any) -> None:
        nonlocal first
        if received and time.monotonic() - first > 2.0:  # torchrun passes on what the terminal has sent already
            raise KeyboardInterrupt
        if received:
            return
        first = time.monotonic()
        received.append(signal.Signals(number).name)
        if distributed.rank() == 0:  # not print: it may be a print that the signal interrupts
            os.write(2, f"\n{received[0]}: finishing this step, then saving; once more stops at once\n".encode())

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
