"""Every call to the file system that a start, a step and a save make fails in turn, with every errno that disks have.

Afterwards the run goes on with a warning, or has ended with an error; both name file, reason and remedy. Checkpoints of
before can be loaded, half ones are not taken for whole, and the next save succeeds and leaves nothing behind.
"""

import builtins
import errno
import io
import itertools
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
from test_checkpoint import Config, build_tokenizer, names, trained

from common.base import storage
from common.run import branches, checkpoint, checkpoint_files
from common.run.metrics import Log
from common.tasks.data import Example
from common.tasks.scoring import Scored

ERRNOS = (errno.ENOSPC, errno.EIO, errno.EACCES, errno.EBUSY, errno.EROFS, errno.ESTALE, errno.EDQUOT)
OS = (
    "rename",
    "replace",
    "symlink",
    "open",
    "fsync",
    "mkdir",
    "unlink",
    "rmdir",
    "scandir",
    "listdir",
    "stat",
    "lstat",
    "ftruncate",
)
READS = ("os.stat", "os.lstat", "os.scandir", "os.listdir")


class Disk:
    """Counts calls to the file system below a folder, and lets one of them fail, or all from there on."""

    def __init__(self, folder: Path, monkeypatch):
        self.folder, self.calls, self.fails_at, self.errno, self.lasting = str(folder), [], 0, 0, False
        monkeypatch.setattr(os, "fsync", lambda handle: None)  # takes its time
        for name in OS:
            monkeypatch.setattr(os, name, self.wrapped(f"os.{name}", getattr(os, name)))
        for module, name in ((shutil, "rmtree"), (shutil, "disk_usage"), (checkpoint, "save_file")):
            monkeypatch.setattr(module, name, self.wrapped(name, getattr(module, name)))
        monkeypatch.setattr(
            type(TOKENIZER), "save_pretrained", self.wrapped("tokenizer", type(TOKENIZER).save_pretrained)
        )
        opened = io.open
        for module in (builtins, io):
            monkeypatch.setattr(module, "open", lambda *args, **options: self.open(opened, *args, **options))

    def check(self, name: str, arguments: tuple) -> None:
        """Counts a call, or raises."""
        places = [value for value in arguments[:2] if isinstance(value, (str, Path, int))]  # a path or a handle
        inside = any(isinstance(place, int) or str(place).startswith(self.folder) for place in places)
        if not inside or threading.current_thread() is not threading.main_thread():
            return
        self.calls.append(name)
        if self.fails_at and (len(self.calls) == self.fails_at or (self.lasting and len(self.calls) > self.fails_at)):
            text = f"{os.strerror(self.errno)}"
            raise Exception(f"{text} (os error {self.errno})") if name == "tokenizer" else OSError(self.errno, text)

    def wrapped(self, name: str, real):
        def call(*arguments, **options):
            self.check(name, arguments)
            return real(*arguments, **options)

        return call

    def open(self, real, path, mode="r", *arguments, **options):
        self.check("open", (path,))
        file = real(path, mode, *arguments, **options)
        if not str(path).startswith(self.folder) or not set(mode) & set("wa"):
            return file
        return Written(file, self)


class Written:
    """A file whose writes can fail, after half of what was to be written."""

    def __init__(self, file, disk: Disk):
        self.file, self.disk = file, disk

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()
        self.disk.check("close", (self.disk.folder,))

    def write(self, data):
        try:
            self.disk.check("write", (self.disk.folder,))
        except OSError:
            self.file.write(data[: len(data) // 2])
            raise
        return self.file.write(data)


TOKENIZER = build_tokenizer()


@pytest.fixture(scope="module")
def model():
    return trained(steps=1)


def save(out_dir: Path, step: int, model, keep: int = 2, best: int | None = None) -> None:
    checkpoint.save(str(out_dir), step, model[0], TOKENIZER, model[1], step, Config(keep), best=best)


def step(log: Log, number: int) -> None:
    """What a step writes."""
    log.add(loss=0.5)
    log._tokens = 4
    with log.time("update"):
        pass
    log.end_step(number, learning_rate=1e-3)
    log.samples(number, [Example(0, "what", [1], "2", {})], Scored(["1"], torch.tensor([0.5]), {}), show=False)


@pytest.fixture(scope="module")
def run_dir(model, tmp_path_factory) -> Path:
    """A run of six steps: two checkpoints, a folder that a kill left half written, and one half deleted."""
    out_dir = tmp_path_factory.mktemp("run") / "a"
    log = Log(str(out_dir), 0, 9, [])
    for number in range(1, 7):
        step(log, number)
        if number % 2 == 0:
            save(out_dir, number, model)
    log.close()
    for name in (".writing-checkpoint-000008", ".writing-old-checkpoint-000002"):
        shutil.copytree(out_dir / "checkpoint-000004", out_dir / name)
        (out_dir / name / "model.safetensors").unlink()
    return out_dir


def start(out_dir: Path) -> Log:
    """What a run does that goes back to step 4, as run.py does it."""
    storage._claimed.clear()
    folder = checkpoint.find(str(out_dir), str(out_dir / "checkpoint-000004"))
    log = Log(str(out_dir), checkpoint_files.number(folder), 9, [])
    checkpoint.leave(str(out_dir), 4)
    checkpoint.link_best(str(out_dir), 4)
    return log


def try_save(out_dir: Path, model, log: Log) -> None:
    save(out_dir, 8, model, best=8)


def try_start(out_dir: Path, model, log: Log) -> None:
    start(out_dir).close()


def try_step(out_dir: Path, model, log: Log) -> None:
    step(log, 7)
    with log.time_save(7):
        pass


class Trial:
    """Work with and without faults, each time in a fresh copy of a run."""

    def __init__(self, work, run_dir: Path, tmp_path: Path, model, monkeypatch, capsys):
        self.work, self.run_dir, self.tmp_path, self.model, self.capsys = work, run_dir, tmp_path, model, capsys
        self.disk, self.count = Disk(tmp_path, monkeypatch), itertools.count()
        out_dir, error, printed = self.attempt(0, errno.EIO, False)
        assert error is None and "warning" not in printed, printed
        self.calls, self.expected = list(self.disk.calls), names(out_dir)

    def attempt(self, number: int, code: int, lasting: bool) -> tuple[Path, Exception | None, str]:
        """Does the work while this call fails; the folder, the error that ended it, and what was printed."""
        out_dir = self.tmp_path / str(next(self.count))
        shutil.copytree(self.run_dir, out_dir)
        storage._failing.clear()
        log, error = Log(str(out_dir), 6, 9, []), None
        self.capsys.readouterr()
        self.disk.calls, self.disk.fails_at, self.disk.errno, self.disk.lasting = [], number, code, lasting
        try:
            self.work(out_dir, self.model, log)
        except (OSError, ValueError) as caught:
            error = caught
        self.disk.fails_at = 0
        log.close()
        captured = self.capsys.readouterr()
        return out_dir, error, captured.out + captured.err

    def __call__(self, number: int, code: int, lasting: bool) -> None:
        """Lets one call fail, and checks what must hold after it."""
        out_dir, error, printed = self.attempt(number, code, lasting)
        where = f"{self.calls[number - 1]}, call {number}, {errno.errorcode[code]}, lasting {lasting}"
        said = str(error) if error else printed
        if error or "warning" in printed:
            assert str(out_dir) in said and (os.strerror(code) in said or "File exists" in said), f"{where}: {said}"
            assert any(word in said for word in ("mend", "give", "put back")), f"{where}: {said}"
            assert error or "the run goes on" in said, f"{where}: {said}"
        elif not lasting:
            assert set(names(out_dir)) >= set(self.expected), f"{where}: nothing was said"
        folders = list(out_dir.glob("*checkpoint-*"))
        assert all(not checkpoint_files.damage(path) for path in folders if checkpoint.is_complete(path)), where
        older = "checkpoint-000006" if error is None and self.work is try_save else "checkpoint-000004"
        assert checkpoint.is_complete(out_dir / older), where
        assert checkpoint.is_complete(out_dir / "checkpoint-000008") >= (error is None and self.work is try_save), where
        # the same command: the lines are those of its checkpoint, and the next save leaves nothing behind
        storage._claimed.clear()
        folder = checkpoint.find(str(out_dir), "auto")
        done = checkpoint_files.number(folder)
        log = Log(str(out_dir), done, 9, [])
        checkpoint.leave(str(out_dir), done)
        log.close()
        self.capsys.readouterr()
        assert not checkpoint_files.damage(folder) and not branches.departure(folder, out_dir), where
        save(out_dir, 9, self.model)
        assert "warning" not in "".join(self.capsys.readouterr()), where
        kept = [name for name in names(out_dir) if name.startswith(("checkpoint-", ".writing-"))]
        assert kept == [folder.name, "checkpoint-000009"], where
        shutil.rmtree(out_dir)


@pytest.fixture(params=[try_save, try_start, try_step], ids=["save", "start", "step"])
def trial(request, run_dir, tmp_path, model, monkeypatch, capsys):
    return Trial(request.param, run_dir, tmp_path, model, monkeypatch, capsys)


def test_some_calls_fail(trial):
    calls = range(1, len(trial.calls) + 1)
    for number, code in zip(calls[:: len(calls) // 6], itertools.cycle(ERRNOS)):
        trial(number, code, lasting=False)


@pytest.mark.faults
def test_every_call_fails_with_every_errno(trial):
    for number, name in enumerate(trial.calls, 1):
        for code in ERRNOS if name not in READS else (errno.EIO, errno.EACCES):
            trial(number, code, lasting=False)


@pytest.mark.faults
def test_every_call_from_one_on_fails(trial):
    for number, code in zip(range(1, len(trial.calls) + 1), itertools.cycle(ERRNOS)):
        trial(number, code, lasting=True)


def test_a_folder_that_another_process_finished_first_stays(tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model").write_text(name)
        storage.publish(tmp_path / name, tmp_path / "place")
    assert (tmp_path / "place" / "model").read_text() == "first"
    with pytest.raises(OSError):
        storage.publish(tmp_path / "none", tmp_path / "other")


def test_compiled_code_is_kept_where_a_restart_leaves_it(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/chosen")
    storage.keep_compiled_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/chosen"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    storage.keep_compiled_code()
    assert (folder := Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])).is_dir() and folder.parents[1] == tmp_path / "cache"
    # where it cannot be written, torch chooses
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    storage.keep_compiled_code()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    # and for a user without a home, as in a container that is started with the number of one
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    storage.keep_compiled_code()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
