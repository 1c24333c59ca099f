"""Tests of common/base/wire.py, peers.py and storage.py: what ranks tell one another, and whose a folder is."""

import errno
import fcntl
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from common.base import peers, storage, wire


@pytest.mark.parametrize("value", [
    None, True, False, 0, -(2**70), 0.1 + 0.2, -0.0, math.inf, "", "naïve\u2028\U0001f600\x00", [], (), {},
    Path("/a b/c"), [None, (1, [2, ()]), {"a": {"b": (True,)}}], {("sums", None): 1.5, 3: "three", None: 0},
    {"tensor": "0"}, {"tuple": []},
], ids=repr)  # fmt: skip
def test_values_come_back_as_they_were(value):
    back = wire.decode(wire.encode(value))
    assert back == value and type(back) is type(value)
    assert repr(back) == repr(value)  # tuples stay tuples, 1 stays no truth value, -0.0 keeps its sign
    assert math.isnan(wire.decode(wire.encode(math.nan)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_come_back_bit_for_bit(dtype):
    whole = torch.randn(4, 6).mul(3).to(dtype)
    value = {"whole": whole, "view": whole.T, "row": (whole[1], whole[1]), "none": whole[:0], "scalar": whole[0, 0]}
    back = wire.decode(wire.encode(value))
    torch.testing.assert_close(back, value, rtol=0, atol=0)
    gradient = torch.ones(2, requires_grad=True) * 2
    assert not wire.decode(wire.encode(gradient)).requires_grad


@pytest.mark.parametrize("value", [{1, 2}, b"bytes", [lambda: 0], {"x": 1j}])
def test_other_kinds_are_refused_by_name(value):
    with pytest.raises(TypeError, match=r" of type \w+ cannot be sent"):
        wire.encode(value)


def test_a_process_that_ended_is_not_alive_though_its_parent_has_not_asked():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    end = time.monotonic() + 30
    while peers.is_alive(ended.pid) and time.monotonic() < end:
        time.sleep(0.01)
    assert not peers.is_alive(ended.pid) and os.path.exists(f"/proc/{ended.pid}")  # nobody has waited for it
    ended.wait()
    assert not peers.is_alive(ended.pid) and peers.is_alive(os.getpid())


def test_those_that_are_gone_or_late_are_named(monkeypatch):
    monkeypatch.setattr(peers, "EXIT_SECONDS", 0.0)
    store = dist.HashStore()
    assert "first meeting" in peers.Peers(0, 3, store, 0.5).missing()  # and nobody waits for its name
    three = [peers.Peers(rank, 3, store, 0.5) for rank in range(3)]
    for rank in (0, 1, 2, 0, 2):
        three[rank].arrive()
    host = store.get("process1").decode().split(" ")[1]
    said = three[0].missing()
    assert said.startswith(f"rank 1 (process {os.getpid()} on {host}) did not come within 0.5 minutes")
    assert said.endswith("raise TIMEOUT_MINUTES")
    store.set("process2", f"{2**22 + 1} {host}")  # above the largest process number
    assert three[0].missing() == f"rank 2 (process {2**22 + 1}) is gone"
    store.set("process2", f"{2**22 + 1} elsewhere")  # what another machine runs cannot be seen
    assert three[0].missing().startswith("rank 1 ")
    three[1].arrive()
    assert three[0].missing() == ""


@pytest.fixture
def unclaimed(monkeypatch) -> None:
    monkeypatch.setattr(storage, "_claimed", {})


def test_a_folder_is_kept_by_one_process_until_it_ends(tmp_path, unclaimed, monkeypatch):
    storage.claim(tmp_path / "run")
    storage.claim(tmp_path / "run" / ".." / "run")  # the same, and its own
    held = storage._claimed
    monkeypatch.setattr(storage, "_claimed", {})  # as another process sees it
    with pytest.raises(ValueError, match=rf"another run uses it \(process {os.getpid()} on .*give another out_dir"):
        storage.claim(tmp_path / "run")
    for file in held.values():
        file.close()  # as the kernel does when a process ends, however it does
    storage.claim(tmp_path / "run")


def test_a_forked_process_does_not_hold_the_folder(tmp_path, unclaimed):
    storage.claim(tmp_path)
    (held,) = storage._claimed.values()
    ready, begun = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(begun, b".")
        time.sleep(60)  # as a worker of a pool that outlives the run
        os._exit(0)
    try:
        os.read(ready, 1)
        with open(tmp_path / storage.LOCK) as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)  # this process still holds it
        held.close()
        with open(tmp_path / storage.LOCK) as other:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path, unclaimed):
    (tmp_path / "mine").write_text("kept")
    (tmp_path / storage.LOCK).symlink_to(tmp_path / "mine")
    with pytest.raises(ValueError, match="cannot be written"):
        storage.claim(tmp_path)
    assert (tmp_path / "mine").read_text() == "kept"


def test_a_disk_without_locks_is_used_with_a_warning(tmp_path, unclaimed, monkeypatch, capsys):
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    storage.claim(tmp_path)
    assert f"warning: {tmp_path} cannot be locked (No locks available)" in capsys.readouterr().out


def test_the_checksum_is_that_of_zip_files(tmp_path, monkeypatch):
    (tmp_path / "digits").write_bytes(b"123456789")
    monkeypatch.setattr(storage, "READ_AT_ONCE", 4)
    # the check value of CRC-32 in every table of such sums
    assert storage.checksums(tmp_path, ["digits"]) == {"digits": {"bytes": 9, "crc32": "cbf43926"}}
