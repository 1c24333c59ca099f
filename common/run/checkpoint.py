"""Saving and resuming a run: `save` after a step, `find` and `load` at the start.

A checkpoint is complete or absent: it is written to a hidden folder, synced and renamed. checkpoint_files.py says
which files it has; branches.py which one a run starts from; interrupts.py what makes a run save early.
"""

import contextlib
import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from common.base import config, distributed, settings, storage
from common.generation.batches import RolloutBatch
from common.model import lora
from common.run import branches, random_state
from common.run import checkpoint_files as files
from common.run.branches import find, leave, link_best
from common.run.checkpoint_files import is_complete, newest
from common.training.optim import AdamW

__all__ = ["curriculum", "find", "is_complete", "leave", "link_best", "load", "newest", "notes", "pending_rollout",
           "reference", "save"]  # fmt: skip
# Settings that may differ when a pending rollout is taken up: completions do not depend on them
NOT_OF_ROLLOUT = ("reward_url", "reward_patience", "allow_reward_change", "out_dir", "resume", "steps", "save_every",
                  "keep_checkpoints", "best_by", "early_stop", "eval_by", "micro_batch_tokens")  # fmt: skip


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
    best: int | None = None,
    curriculum: dict[str, torch.Tensor] | None = None,
) -> Path:
    """Saves a checkpoint; called by every rank, written by rank 0.

    A run killed in the middle, or a full disk, leaves the older checkpoints untouched. If old ones cannot be deleted,
    the run goes on with a warning, and so it does if out_dir/best cannot be set.

    Args:
        out_dir: of the run; a folder.
        step: steps done.
        model: the unwrapped policy; of a sharded one its plain copy.
        tokenizer: saved with it.
        optimizer: its state is saved.
        position: prompts taken from the data so far, over all ranks.
        cfg: the Config of the run, saved too; the newest `keep_checkpoints` checkpoints of its branch are kept.
        reference: the frozen model, a reference or a teacher, if it was refreshed.
        notes: JSON values that the function `notes` returns after a resume.
        rollout: completions of the next step that could not be scored; `pending_rollout` returns them.
        best: step of the best evaluation; out_dir/best leads to its checkpoint, which is kept, too.
        curriculum: state of the choice of prompts; the function `curriculum` returns it.

    Returns:
        The checkpoint.

    Raises:
        OSError: it could not be written; the older checkpoints are untouched.
    """
    final = Path(out_dir) / files.name(step)
    optimizer_state = optimizer.state_dict()  # a collective, if it is sharded
    rng_by_rank = distributed.gather_objects(random_state.capture())
    rollout_by_rank = distributed.gather_objects(rollout.state_dict() if rollout is not None else None)
    with distributed.share_errors("save"):
        if distributed.rank() != 0:
            return final
        tensors = {files.OPTIMIZER: optimizer_state, files.RNG: _prefixed(rng_by_rank)}
        if all(rollout_by_rank):  # those of some ranks alone are useless
            tensors[files.ROLLOUT] = _prefixed(rollout_by_rank)
        if curriculum:
            tensors[files.CURRICULUM] = curriculum
        state = {"step": step, "position": position, "num_ranks": len(rng_by_rank), "files": {}, "notes": notes or {},
                 "config": dataclasses.asdict(cfg)}  # fmt: skip
        folder = branches.unused(final.with_name(f"{branches.WRITING}{final.name}"))
        _tidy(out_dir)  # makes room
        try:
            state["metrics"] = _settle_metrics(out_dir, step)
            _write(folder, model, tokenizer, reference, tensors, state)
            _publish(folder, final)
        except BaseException as error:  # also a second Ctrl-C
            with contextlib.suppress(OSError):
                shutil.rmtree(folder, ignore_errors=True)
            if not (isinstance(error, (OSError, SafetensorError)) or type(error) is Exception):  # as tokenizers raises
                raise
            raise OSError(_failure(out_dir, step, cfg.keep_checkpoints, error)) from error
        with storage.optional(
            f"{out_dir} could not be synced",
            "the run goes on, and keeps older checkpoints until a save can sync it; mend that",
        ):
            storage.sync(Path(out_dir))
            link_best(out_dir, best)  # before the checkpoint that it led to is deleted
            _tidy(out_dir, cfg.keep_checkpoints, best)
    return final


def _failure(out_dir: str, step: int, keep: int, error: Exception) -> str:
    """The message of a checkpoint that could not be written."""
    left, room = None, storage.free(out_dir)
    with contextlib.suppress(OSError):
        left = files.newest(out_dir)
        room += f" ({found})" if (found := branches.abandoned(out_dir)) else ""
    goes_on = f"it goes on from {left}, which is as it was" if left else "it starts anew"
    return (
        f"the checkpoint of step {step} could not be written to {out_dir}, on which {room} is free: {error}. Make room "
        f"(keep_checkpoints = {keep} and one more must fit) or mend what else it says, then run the same command: "
        f"{goes_on}"
    )


def _settle_metrics(out_dir: str, step: int) -> dict[str, Any]:
    """Syncs metrics.jsonl to disk, so that no power failure leaves it behind the checkpoint; its fingerprint."""
    if (path := Path(out_dir) / branches.METRICS).exists():
        storage.sync(path)
    return branches.fingerprint(out_dir, step)


def _write(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    reference: PreTrainedModel | None,
    tensors: dict[str, dict[str, torch.Tensor]],
    state: dict[str, Any],
) -> None:
    """Writes all files of a checkpoint to a new folder and syncs them to disk."""
    folder.mkdir()
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
    """Gives a written checkpoint its final name; what has this name is set aside, or hidden if it is of this branch."""
    aside = None
    if final.is_symlink() or (final in files.own(final.parent) and not branches.departure(final, final.parent)):
        aside = _hide(final)
    elif os.path.lexists(final):
        branches.set_aside(final)
    try:
        os.rename(folder, final)
    except BaseException:
        if aside is not None:
            os.rename(aside, final)
        raise


def _hide(folder: Path) -> Path:
    """Renames a checkpoint that is to be deleted, so that a kill leaves no half of it under its name."""
    aside = branches.unused(folder.with_name(f"{branches.REPLACED}{folder.name}"))
    os.rename(folder, aside)
    return aside


def _tidy(out_dir: str, keep: int | None = None, best: int | None = None) -> None:
    """Deletes what earlier saves left, and all checkpoints but the newest and the best; a failure is a warning.

    Args:
        out_dir: of the run.
        keep: checkpoints to keep; None: all.
        best: step of one that is kept, too, as is the one that out_dir/best leads to.
    """
    failed: list[OSError] = []
    remedy = "the run goes on, and the next save tries again; mend that, or delete it yourself"
    with storage.optional(f"{out_dir}: an old checkpoint could not be deleted", remedy):
        old = []
        if keep is not None:
            old = [folder for folder in files.complete(out_dir) if not branches.departure(folder, out_dir)][:-keep]
            old = [folder for folder in old if files.number(folder) != best and folder != files.linked(out_dir)]
        for path in [*files.entries(out_dir, branches.WRITING), *old]:
            try:
                storage.remove(_hide(path) if path in old else path)
            except OSError as error:
                failed.append(error)
        if failed:
            left = [*files.entries(out_dir, branches.WRITING), *filter(Path.exists, old)]
            text = f"{failed[0].strerror}; {storage.size(*left)} remain in {', '.join(map(str, left))}"
            raise OSError(failed[0].errno, text)


def _prefixed(by_rank: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Tensors of every rank as one dict, by "rank{r}/name"."""
    return {f"rank{r}/{name}": value for r, own in enumerate(by_rank) for name, value in own.items()}


def _of_this_rank(path: Path) -> dict[str, torch.Tensor]:
    """The part of this rank in a file written from `_prefixed`; empty if there were fewer ranks."""
    prefix = f"rank{distributed.rank()}/"
    with safe_open(path, "pt") as file:
        return {key.removeprefix(prefix): file.get_tensor(key) for key in file.keys() if key.startswith(prefix)}  # noqa: SIM118


def reference(folder: Path | None, cfg: Any) -> str:
    """The model that a frozen reference or teacher is loaded from.

    Args:
        folder: a complete checkpoint, or None for a new run.
        cfg: the Config of the run.

    Returns:
        The one saved in the checkpoint if `reference_refresh` or `teacher_refresh` is on, else the one that the run
        began with: a run that saves none must not resume with one, or it would have another after the next resume.
    """
    saved, distilled = Path(folder or "") / files.REFERENCE, hasattr(cfg, "teacher_model")
    if folder and getattr(cfg, "teacher_refresh" if distilled else "reference_refresh", 0) and saved.is_dir():
        return str(saved)
    return settings.teacher_name(cfg) if distilled else cfg.policy_model


def notes(folder: Path | None) -> dict[str, Any]:
    """The notes that a script passed to `save`; empty for a new run.

    Args:
        folder: a complete checkpoint, or None.
    """
    return files.read_state(folder).get("notes", {}) if folder else {}


def curriculum(folder: Path | None) -> dict[str, torch.Tensor]:
    """The state of the choice of prompts that was passed to `save`; empty for a new run, or one without a curriculum.

    Args:
        folder: a complete checkpoint, or None.
    """
    path = Path(folder or "") / files.CURRICULUM
    return load_file(path) if folder and path.is_file() else {}


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
