"""Saving and resuming a run: `save` after a step, `find` and `load` at the start.

A checkpoint is complete or absent: it is written to a hidden folder, synced and renamed. checkpoint_files.py says
which files it has; interrupts.py what makes a run save early.
"""

import dataclasses
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from common.base import config, distributed, storage
from common.generation.batches import RolloutBatch
from common.model import lora
from common.run import checkpoint_files as files
from common.run import random_state
from common.run.checkpoint_files import is_complete, newest
from common.training.optim import AdamW

__all__ = ["find", "is_complete", "load", "newest", "notes", "pending_rollout", "reference", "save"]
WRITING = ".writing-"  # prefix of folders that the next save deletes: half written, or about to be deleted
REPLACED = f"{WRITING}old-"
# Settings that may differ when a pending rollout is taken up: completions do not depend on them
NOT_OF_ROLLOUT = ("reward_url", "reward_patience", "allow_reward_change", "out_dir", "resume", "steps", "save_every",
                  "keep_checkpoints")  # fmt: skip


def find(out_dir: str, resume: str) -> Path | None:
    """The checkpoint that a run starts from; also locks `out_dir` for this run. Called by every rank.

    Args:
        out_dir: of the run.
        resume: "auto" (the newest undamaged checkpoint in out_dir, if any), "none" (start anew), or a checkpoint
            folder. "auto" skips damaged checkpoints with a warning.

    Returns:
        The folder, or None to start anew.

    Raises:
        ValueError: the folder named is incomplete or damaged; with "auto", all checkpoints are; with "none", out_dir
            already holds a run; the folder belongs to another run, and out_dir holds one of its own; another run uses
            out_dir, or it cannot be written; the ranks see different checkpoints.
    """
    folder = None
    with distributed.share_errors("resume"):
        if distributed.rank() == 0:
            if Path(out_dir).is_dir():
                storage.claim(out_dir)
            folder = _choose(out_dir, resume)
            storage.claim(out_dir)
    folder = distributed.gather_objects(folder)[0]
    with distributed.share_errors("resume"):
        if folder is not None and not is_complete(folder):
            raise ValueError(
                f"out_dir = {out_dir!r}: rank {distributed.rank()} does not see {folder}, from which rank 0 goes on; "
                "to resume on several machines, out_dir must be a folder that all of them share"
            )
    if resume == "auto":
        distributed.print_main(f"resuming from {folder}" if folder else f"no checkpoint in {out_dir}: starting anew")
    return folder


def _choose(out_dir: str, resume: str) -> Path | None:
    if resume == "auto":
        return _newest_undamaged(out_dir)
    if resume == "none":
        if newest(out_dir) or (Path(out_dir) / "metrics.jsonl").exists():
            raise ValueError(f"out_dir = {out_dir!r} already holds a run: give another out_dir, or resume = 'auto'")
        return None
    if found := files.damage(Path(resume)):
        raise ValueError(
            f"resume = {resume!r}: not a complete checkpoint, {found}; give a folder checkpoint-NNNNNN with all its "
            "files, 'auto', or 'none'"
        )
    if Path(resume).resolve().parent != Path(out_dir).resolve() and (own := newest(out_dir)):
        raise ValueError(
            f"resume = {resume!r}, out_dir = {out_dir!r}: out_dir holds {own.name} of a run of its own, whose lines "
            "and checkpoints would be mixed with new ones; give another out_dir, or resume = 'auto' to go on from it"
        )
    return Path(resume)


def _newest_undamaged(out_dir: str) -> Path | None:
    """The newest checkpoint whose checksums are right; None if there is none at all."""
    for aside in Path(out_dir).glob(f"{REPLACED}checkpoint-*"):  # the run was killed while it replaced a checkpoint
        final = aside.with_name(aside.name.removeprefix(REPLACED))
        if not final.exists() and is_complete(aside):
            os.rename(aside, final)
            print(f"{final} was about to be replaced when a run ended: it is back in its place")
    folders = [path for path in Path(out_dir).glob("checkpoint-*") if path.is_dir() and files.step_of(path) >= 0]
    folders.sort(key=files.step_of, reverse=True)
    for folder in folders:
        found = files.damage(folder)
        if not found:
            return folder
        print(f"warning: {folder} is passed over: {found}", file=sys.stderr, flush=True)
    if folders:
        raise ValueError(
            f"out_dir = {out_dir!r}: no checkpoint in it can be used, see above; put back what is missing, or move "
            "them away to start anew"
        )
    return None


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

    A run killed in the middle, or a full disk, leaves the older checkpoints untouched.

    Args:
        out_dir: of the run.
        step: steps done.
        model: the unwrapped policy; of a sharded one its plain copy.
        tokenizer: saved with it.
        optimizer: its state is saved.
        position: prompts taken from the data so far, over all ranks.
        cfg: the Config of the run, saved too; its newest `keep_checkpoints` checkpoints are kept.
        reference: the frozen model, if it was refreshed.
        notes: JSON values that the function `notes` returns after a resume.
        rollout: completions of the next step that could not be scored; `pending_rollout` returns them.

    Raises:
        OSError: it could not be written; the older checkpoints are untouched.
    """
    optimizer_state = optimizer.state_dict()  # a collective, if it is sharded
    rng_by_rank = distributed.gather_objects(random_state.capture())
    rollout_by_rank = distributed.gather_objects(rollout.state_dict() if rollout is not None else None)
    with distributed.share_errors("save"):
        if distributed.rank() != 0:
            return
        tensors = {files.OPTIMIZER: optimizer_state, files.RNG: _prefixed(rng_by_rank)}
        if all(rollout_by_rank):  # those of some ranks alone are useless
            tensors[files.ROLLOUT] = _prefixed(rollout_by_rank)
        state = {"step": step, "position": position, "num_ranks": len(rng_by_rank), "files": {}, "notes": notes or {},
                 "config": dataclasses.asdict(cfg)}  # fmt: skip
        final = Path(out_dir) / f"checkpoint-{step:06d}"
        folder = final.with_name(f"{WRITING}{final.name}")
        try:
            _write(folder, model, tokenizer, reference, tensors, state)
        except (OSError, SafetensorError) as error:  # safetensors has an error of its own for a full disk
            shutil.rmtree(folder, ignore_errors=True)
            left, room = newest(out_dir), storage.free(out_dir)
            raise OSError(
                f"the checkpoint of step {step} could not be written to {out_dir}, on which {room} is free: "
                f"{error}. Make room (keep_checkpoints = {cfg.keep_checkpoints} and one more must fit), then run "
                "the same command: " + (f"it goes on from {left}, which is as it was" if left else "it starts anew")
            ) from error
        except BaseException:  # a second Ctrl-C: delete the partial checkpoint, re-raise
            shutil.rmtree(folder, ignore_errors=True)
            raise
        _publish(folder, final)
        _mark_abandoned(out_dir, step)
        _prune(out_dir, cfg.keep_checkpoints)


def _write(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    reference: PreTrainedModel | None,
    tensors: dict[str, dict[str, torch.Tensor]],
    state: dict[str, Any],
) -> None:
    """Writes all files of a checkpoint to a new folder and syncs them to disk."""
    for leftover in folder.parent.glob(f"{WRITING}*"):
        storage.remove(leftover)
    folder.mkdir(parents=True)
    lora.save(model, folder)
    tokenizer.save_pretrained(folder)
    if reference is not None:
        reference.save_pretrained(folder / files.REFERENCE)
    for name, values in tensors.items():
        save_file({key: value.detach().cpu().contiguous() for key, value in values.items()}, folder / name)
    written = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    files.write_state(folder, {**state, "files": storage.checksums(folder, written)})
    for path in [*folder.rglob("*"), folder]:
        storage.sync(path)


def _publish(folder: Path, final: Path) -> None:
    """Gives a written checkpoint its final name; one that was saved for the same step before is deleted."""
    replaced = _move_aside(final) if os.path.lexists(final) else None
    os.rename(folder, final)
    storage.sync(final.parent)
    if replaced:
        storage.remove(replaced)


def _mark_abandoned(out_dir: str, step: int) -> None:
    """Renames later checkpoints: the run went back to an older one, and "auto" must not return to the old branch."""
    for later in [folder for folder in files.complete(out_dir) if files.step_of(folder) > step]:
        abandoned = later.with_name(f"abandoned-{later.name}")
        if os.path.lexists(abandoned):
            storage.remove(abandoned)
        os.rename(later, abandoned)
        print(f"{later} is of steps that are taken again: now {abandoned}")


def _prune(out_dir: str, keep: int) -> None:
    """Deletes all but the newest checkpoints."""
    for old in files.complete(out_dir)[:-keep]:
        storage.remove(_move_aside(old))


def _move_aside(folder: Path) -> Path:
    """Renames a checkpoint before it is deleted: if the run is killed meanwhile, the next save deletes the rest."""
    aside = folder.with_name(f"{REPLACED}{folder.name}")
    os.rename(folder, aside)
    return aside


def _prefixed(by_rank: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Tensors of every rank as one dict, by "rank{r}/name"."""
    return {f"rank{r}/{name}": value for r, own in enumerate(by_rank) for name, value in own.items()}


def _of_this_rank(path: Path) -> dict[str, torch.Tensor]:
    """The part of this rank in a file written from `_prefixed`; empty if there were fewer ranks."""
    prefix = f"rank{distributed.rank()}/"
    with safe_open(path, "pt") as file:
        return {key.removeprefix(prefix): file.get_tensor(key) for key in file.keys() if key.startswith(prefix)}  # noqa: SIM118


def reference(folder: Path | None, cfg: Any) -> str:
    """The model that a frozen reference is loaded from.

    Args:
        folder: a complete checkpoint, or None for a new run.
        cfg: the Config of the run.

    Returns:
        The reference saved in the checkpoint if `reference_refresh` is on, else `policy_model`: a run that saves no
        reference must not resume with one, or it would have another after the next resume.
    """
    saved = Path(folder or "") / files.REFERENCE
    return str(saved) if folder and cfg.reference_refresh and saved.is_dir() else cfg.policy_model


def notes(folder: Path | None) -> dict[str, Any]:
    """The notes that a script passed to `save`; empty for a new run.

    Args:
        folder: a complete checkpoint, or None.
    """
    return files.read_state(folder).get("notes", {}) if folder else {}


def pending_rollout(folder: Path | None, device: torch.device, cfg: Any = None) -> RolloutBatch | None:
    """Completions of the next step that are still to be scored, if a service went away before that.

    Args:
        folder: a complete checkpoint, or None.
        device: of the policy.
        cfg: the present Config; None, as in scripts copied earlier: the completions are sampled again.

    Returns:
        Those of this rank. None if there are none, or if settings that completions depend on or the number of ranks
        have changed: then they are sampled again.
    """
    if folder is None or not (folder / files.ROLLOUT).is_file():
        return None
    state = files.read_state(folder)
    lines = config.changed(state["config"], cfg) if cfg is not None else ["cfg"]
    changed = [line for line in lines if line.partition(":")[0] not in NOT_OF_ROLLOUT]
    if changed or state["num_ranks"] != distributed.num_ranks():
        distributed.print_main(f"{folder} holds completions sampled with other settings or ranks: sampled again")
        return None
    fields = _of_this_rank(folder / files.ROLLOUT)
    distributed.print_main(f"{folder} holds completions that were not scored: they come first")
    return RolloutBatch.from_state_dict(fields).to(device)


def load(folder: Path, optimizer: AdamW, cfg: Any) -> tuple[int, int]:
    """Restores optimizer and random number generators; the policy is loaded from the folder like any model.

    Args:
        folder: a complete checkpoint.
        optimizer: its state is replaced, and the weights by the fp32 masters.
        cfg: the present Config; it wins over the saved one, and each difference is printed. The model must not differ.

    Returns:
        Steps done, and prompts taken from the data.

    Raises:
        ValueError: the checkpoint is of another model, or its optimizer state does not fit or is not finite.
    """
    state = files.read_state(folder)
    _require_same_model(state["config"], folder, cfg)
    optimizer_state = load_file(folder / files.OPTIMIZER)
    for name, value in optimizer_state.items():
        ends = torch.stack(torch.aminmax(value)) if value.numel() else torch.zeros(1)  # NaN passes through
        if not ends.double().isfinite().all():
            raise ValueError(
                f"{folder / files.OPTIMIZER}: {name} holds {ends[~ends.isfinite()][0]}: must be finite; name an older "
                "checkpoint as resume"
            )
    optimizer.load_state_dict(optimizer_state)
    if state["num_ranks"] != distributed.num_ranks():
        distributed.print_main(
            f"saved by {state['num_ranks']} process(es), resumed by {distributed.num_ranks()}: data order and sampling "
            "go on as before; Python, NumPy and torch generators of new ranks start from the seed"
        )
    random_state.restore(_of_this_rank(folder / files.RNG))
    for line in config.changed(state["config"], cfg):
        distributed.print_main(f"changed since the checkpoint: {line}")
    return state["step"], state["position"]


def _require_same_model(saved: dict[str, Any], folder: Path, cfg: Any) -> None:
    """Raises ValueError if a Config cannot go on from a checkpoint saved with another one."""
    for name in ("policy_model", "student_model"):
        was, now = saved.get(name), getattr(cfg, name, None)
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
    was, now = saved.get("lora_rank", 0), getattr(cfg, "lora_rank", 0)
    if bool(was) != bool(now):
        raise ValueError(
            f"lora_rank = {now}: {folder} was trained with lora_rank = {was}, and its optimizer state is of those "
            f"weights; set it back to {was}, or give another out_dir and name that folder as the model to begin with"
        )
