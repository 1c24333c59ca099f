"""Tests of common/run/checkpoint.py: complete or absent, everything comes back, nothing is unpickled."""

import dataclasses
import io
import json
import os
import pickle
import random
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import assert_equal_weights, build_model, build_tokenizer
from safetensors.torch import load_file
from test_security import Marker
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from common.generation.batches import RolloutBatch
from common.model import models
from common.run import checkpoint, checkpoint_files, interrupts, random_state
from common.training import optim

CPU = torch.device("cpu")
FILES = {
    "model.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json", "config.json",
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Config:
    keep_checkpoints: int = 2
    learning_rate: float = 1e-3
    out_dir: str = "runs/x"


@dataclasses.dataclass(frozen=True)
class Policy(Config):
    policy_model: str = "first"
    lora_rank: int = 0


def trained(family: str = "qwen2", steps: int = 3, model=None):
    """A model and its optimizer, some steps in."""
    model = (model or build_model(family)).eval()
    optimizer = optim.AdamW(model, 1e-3)
    for step in range(steps):
        take_step(model, optimizer, step)
    return model, optimizer


def take_step(model, optimizer, step: int = 7) -> None:
    ids = torch.randint(4, 50, (2, 9), generator=torch.Generator().manual_seed(step))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step(1.0)


def save(out_dir, step=3, model=None, optimizer=None, position=12, cfg=None):
    if model is None:
        model, optimizer = trained(steps=1)
    checkpoint.save(str(out_dir), step, model, build_tokenizer(), optimizer, position, cfg or Config())
    return out_dir / f"checkpoint-{step:06d}"


def load(folder, cfg=None, dtype="fp32"):
    """What a run loads that goes on from a checkpoint; its learning rate is that of the run."""
    _, model = models.load_policy(str(folder), CPU, dtype)
    optimizer = optim.AdamW(model.eval(), 1e-3)
    return model, optimizer, checkpoint.load(folder, optimizer, cfg or Config())


def weights_of(model) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters())


def edit_state(folder, **changes) -> None:
    path = folder / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def names(out_dir) -> list[str]:
    return sorted(path.name for path in out_dir.iterdir() if path.name != checkpoint.storage.LOCK)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint to copy from."""
    return save(tmp_path_factory.mktemp("saved"), step=3)


@pytest.fixture
def run_dir(saved, tmp_path):
    """A run with checkpoints of steps 2 and 4."""
    for step in (2, 4):
        copy(saved, tmp_path / "run", step)
    return tmp_path / "run"


def copy(folder, out_dir, step):
    """A checkpoint as the checkpoint of another step."""
    copied = Path(shutil.copytree(folder, out_dir / f"checkpoint-{step:06d}"))
    state = json.loads((copied / "state.json").read_text())
    checkpoint_files.write_state(copied, {name: state[name] for name in state if name != "crc32"} | {"step": step})
    return copied


@pytest.mark.parametrize("family, dtype, steps", [("qwen2", "bf16", 3), ("gpt2", "fp32", 3), ("qwen2", "fp32", 0)])
def test_everything_comes_back(tmp_path, model_folders, family, dtype, steps):
    model, optimizer = trained(steps=steps, model=models.load_policy(str(model_folders[family]), CPU, dtype)[1])
    folder = save(tmp_path, 3, model, optimizer, position=12)
    assert set(names(folder)) <= FILES | {"special_tokens_map.json"}  # nothing is pickled
    tokenizer, own = AutoTokenizer.from_pretrained(folder), build_tokenizer()
    assert tokenizer.get_vocab() == own.get_vocab() and tokenizer.chat_template == own.chat_template
    assert_equal_weights(weights_of(AutoModelForCausalLM.from_pretrained(folder)), weights_of(model))  # an ordinary one
    loaded, restored, done = load(folder, dtype=dtype)
    assert done == (3, 12)
    assert_equal_weights(optimizer.state_dict(), restored.state_dict())
    assert_equal_weights(weights_of(model), weights_of(loaded))
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    take_step(model, optimizer)
    take_step(loaded, restored)  # both go on alike
    assert_equal_weights(optimizer.state_dict(), restored.state_dict())
    assert_equal_weights(weights_of(model), weights_of(loaded))


@pytest.mark.parametrize("waiting", [False, True], ids=["pairs begin", "half of each pair waits"])
def test_random_number_generators_go_on(tmp_path, waiting):
    def begin(seed=random_state.seed):
        seed(5)
        if waiting:  # one draw of each pair of normal numbers, so that the other waits in the generator
            random.gauss(0, 1), np.random.randn(), torch.randn(1)

    def draw() -> list:
        return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3).tolist()]

    model, optimizer = trained(steps=0)
    begin(set_seed)  # of transformers
    expected = [draw() for _ in range(3)]
    begin()
    folder = save(tmp_path, 1, model, optimizer)
    assert [draw() for _ in range(3)] == expected  # saving moves none
    set_seed(99)
    random.gauss(0, 1), np.random.randn(), torch.randn(1)
    load(folder)
    assert [draw() for _ in range(3)] == expected


def test_what_has_changed_since_the_checkpoint_is_said(saved, tmp_path, capsys):
    load(saved, Config(learning_rate=0.5))
    assert capsys.readouterr().out == "changed since the checkpoint: learning_rate: 0.001 -> 0.5\n"
    folder = shutil.copytree(saved, tmp_path / saved.name)
    assert json.loads((folder / "state.json").read_text())["config"] == dataclasses.asdict(Config())
    edit_state(folder, num_ranks=2)
    assert load(folder)[2] == (3, 12)
    assert "saved by 2 process(es), resumed by 1" in capsys.readouterr().out


@pytest.mark.parametrize(("cfg", "message"), [
    (Policy(policy_model="second"), r"policy_model = 'second'.*from 'first'"),
    (Policy(lora_rank=4), r"lora_rank = 4: .*lora_rank = 0.*set it back to 0"),
    (Config(), "it has policy_model, so another kind of script"),
    (Policy(), "another model"),  # the names fit, the weights do not
])  # fmt: skip
def test_a_checkpoint_of_another_model_is_refused(tmp_path, saved, cfg, message):
    folder = shutil.copytree(saved, tmp_path / saved.name)
    edit_state(folder, config=dataclasses.asdict(Policy()))
    load(folder, Policy())
    with pytest.raises(ValueError, match=message):
        checkpoint.load(folder, trained("gpt2", steps=0)[1], cfg)


def test_only_the_newest_are_kept_and_always_the_one_just_saved(run_dir):
    model, optimizer = trained(steps=1)
    save(run_dir, 5, model, optimizer, position=4)
    assert names(run_dir) == ["checkpoint-000004", "checkpoint-000005"]
    save(run_dir, 5, model, optimizer, position=8, cfg=Config(keep_checkpoints=1))  # replaces the first
    assert names(run_dir) == ["checkpoint-000005"]
    assert json.loads((run_dir / "checkpoint-000005" / "state.json").read_text())["position"] == 8


@pytest.mark.parametrize("saved_again", [2, 6], ids=["replaced", "too old"])
def test_a_kill_while_an_old_checkpoint_is_deleted_leaves_no_half_of_one(run_dir, monkeypatch, saved_again):
    def killed(path):
        next(path.glob("model*")).unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint.storage, "remove", killed)
    with pytest.raises(KeyboardInterrupt):
        save(run_dir, saved_again, cfg=Config(keep_checkpoints=2))
    monkeypatch.undo()
    assert all(map(checkpoint.is_complete, run_dir.glob("checkpoint-*")))
    assert checkpoint.is_complete(run_dir / f"checkpoint-{saved_again:06d}")
    save(run_dir, 7)
    assert not list(run_dir.glob(".writing-*"))


def cut_off(folder, name="model.safetensors", size=-100):
    (folder / name).write_bytes((folder / name).read_bytes()[:size])


def missing(name):
    return lambda folder: (folder / name).unlink()


def state_is(text):
    return lambda folder: (folder / "state.json").write_bytes(text)


def flip_a_bit(folder):
    content = bytearray((folder / "optimizer.safetensors").read_bytes())
    content[-9] ^= 1
    (folder / "optimizer.safetensors").write_bytes(content)


DAMAGES = {  # what is done, what is said of it, and whether it can be seen without reading the files
    "weights cut off": (cut_off, r"model.safetensors has \d+ bytes of \d+", True),
    "weights missing": (missing("model.safetensors"), "model.safetensors is missing", True),
    "state missing": (missing("state.json"), "state.json is missing", True),
    "state cut off": (lambda folder: cut_off(folder, "state.json", 50), "state.json cannot be read", True),
    "state without files": (state_is(b'{"step": 4}'), "state.json cannot be read", True),
    "state is a list": (state_is(b"[1, 2]"), "state.json cannot be read", True),
    "state is not text": (state_is(b"\x80\x04\x95\xff\xfe"), "state.json cannot be read", True),
    "file outside": (state_is(b'{"files": {"../checkpoint-000002/state.json": 1}}'), "state.json is missing", True),
    "one bit": (flip_a_bit, r"optimizer.safetensors is not .*\(CRC-32 \w{8}, not \w{8}\)", False),
    "state edited": (lambda folder: edit_state(folder, position=16), "state.json was edited", False),
}


@pytest.mark.parametrize("damage, said, at_once", DAMAGES.values(), ids=[name.replace(" ", "_") for name in DAMAGES])
def test_a_checkpoint_that_is_not_what_was_saved_is_passed_over_and_said(run_dir, capsys, damage, said, at_once):
    good, bad = run_dir / "checkpoint-000002", run_dir / "checkpoint-000004"
    damage(bad)
    assert checkpoint.is_complete(bad) == (not at_once)
    assert checkpoint.newest(run_dir) == (good if at_once else bad)
    assert checkpoint.find(str(run_dir), "auto") == good
    printed = capsys.readouterr()
    assert re.search(f"warning: {bad} is passed over: .*{said}", printed.err)
    assert f"resuming from {good}" in printed.out
    with pytest.raises(ValueError, match=f"not a complete checkpoint, .*{said}"):
        checkpoint.find(str(run_dir.parent / "new"), str(bad))
    assert not (run_dir.parent / "new").exists()
    # with no good one left nothing starts from the beginning, over what may still be mended
    shutil.rmtree(good)
    with pytest.raises(ValueError, match="no checkpoint in it can be used"):
        checkpoint.find(str(run_dir), "auto")


def test_a_checkpoint_without_checksums_is_taken_by_its_sizes(run_dir):
    path = run_dir / "checkpoint-000004" / "state.json"
    state = json.loads(path.read_text())
    state["files"] = {name: found["bytes"] for name, found in state["files"].items()}
    del state["crc32"]
    path.write_text(json.dumps(state))
    assert checkpoint.find(str(run_dir), "auto") == path.parent
    cut_off(path.parent)
    assert checkpoint.find(str(run_dir), "auto") == run_dir / "checkpoint-000002"


def test_what_a_link_leads_to_stays(run_dir, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside")
    for name in (".writing-checkpoint-000001", "checkpoint-000005"):
        (run_dir / name).symlink_to(outside)
    (outside / "kept").write_text("mine")
    save(run_dir, step=5)
    assert (outside / "kept").read_text() == "mine" and names(outside) == ["kept"]
    assert not (run_dir / "checkpoint-000005").is_symlink() and checkpoint.newest(run_dir).name == "checkpoint-000005"
    assert names(run_dir) == ["checkpoint-000004", "checkpoint-000005"]


def test_a_folder_left_behind_by_a_kill_is_not_taken_and_goes(run_dir):
    shutil.copytree(run_dir / "checkpoint-000004", run_dir / ".writing-checkpoint-000006")
    (run_dir / "checkpoint-000009").write_text("a file")
    assert checkpoint.newest(run_dir).name == "checkpoint-000004"
    # killed while the same step was saved again: the old folder was renamed, the new one had not taken its name
    (run_dir / "checkpoint-000004").rename(run_dir / ".writing-old-checkpoint-000004")
    assert checkpoint.find(str(run_dir), "auto") == run_dir / "checkpoint-000004"
    save(run_dir, step=8)
    assert names(run_dir) == ["checkpoint-000004", "checkpoint-000008", "checkpoint-000009"]


@pytest.mark.parametrize("file", ["config.json", "optimizer.safetensors", "rng.safetensors"])
def test_a_full_disk_leaves_the_earlier_checkpoint(run_dir, monkeypatch, file):
    model, optimizer = trained(steps=1)
    before = {path: path.read_bytes() for path in (run_dir / "checkpoint-000004").iterdir()}
    real = checkpoint.save_file

    def full(tensors, path):
        path = path / "config.json" if path.is_dir() else path  # the weights
        if path.name != file:
            return real(tensors, path)
        path.write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    if file == "config.json":
        monkeypatch.setattr(model, "save_pretrained", lambda folder: full({}, folder))
    said = r"step 6 .* GiB is free: .*No space left.*keep_checkpoints = 2.*goes on from .*/checkpoint-000004"
    with pytest.raises(OSError, match=said):
        save(run_dir, 6, model, optimizer)
    assert names(run_dir) == ["checkpoint-000002", "checkpoint-000004"]
    assert all(path.read_bytes() == content for path, content in before.items())
    # once there is room, the same step can be saved
    monkeypatch.undo()
    save(run_dir, 6, model, optimizer)
    assert checkpoint.newest(run_dir).name == "checkpoint-000006"


@pytest.mark.parametrize("name", ["master/", "exp_avg/", "exp_avg_sq/"])
def test_a_state_of_the_optimizer_that_is_not_finite_is_refused(saved, tmp_path, name):
    folder = shutil.copytree(saved, tmp_path / "checkpoint-000003")
    state = load_file(folder / "optimizer.safetensors")
    key = next(key for key in state if key.startswith(name))
    state[key].view(-1)[-1] = float("nan")
    checkpoint.save_file(state, folder / "optimizer.safetensors")
    _, optimizer = trained(steps=0)
    before = {key: value.clone() for key, value in optimizer.state_dict().items()}
    with pytest.raises(ValueError, match=f"optimizer.safetensors: {key} holds nan: must be finite; .*older"):
        checkpoint.load(folder, optimizer, Config())
    assert_equal_weights(before, optimizer.state_dict())


def test_auto_takes_the_newest_or_says_that_there_is_none(run_dir, tmp_path, capsys):
    assert checkpoint.find(str(run_dir), "auto") == run_dir / "checkpoint-000004"
    assert f"resuming from {run_dir}/checkpoint-000004" in capsys.readouterr().out
    for step in (999_999, 1_000_000):  # by number, not by name
        copy(run_dir / "checkpoint-000004", run_dir, step)
    assert checkpoint.newest(run_dir).name == "checkpoint-1000000"
    assert checkpoint.find(str(tmp_path / "empty"), "auto") is None
    assert f"no checkpoint in {tmp_path / 'empty'}: starting anew" in capsys.readouterr().out


def test_two_runs_are_not_mixed_in_one_folder(run_dir, saved, tmp_path):
    for out_dir in (run_dir, only_metrics := tmp_path / "metrics"):
        only_metrics.mkdir(exist_ok=True)
        (only_metrics / "metrics.jsonl").write_text("")
        with pytest.raises(ValueError, match="already holds a run"):
            checkpoint.find(str(out_dir), "none")
    assert checkpoint.find(str(tmp_path / "empty"), "none") is None
    elsewhere, named = tmp_path / "elsewhere", run_dir / "checkpoint-000002"
    assert checkpoint.find(str(elsewhere), str(named)) == named
    shutil.copytree(saved, elsewhere / "checkpoint-000003")
    with pytest.raises(ValueError, match=r"out_dir holds checkpoint-000003.*give another out_dir"):
        checkpoint.find(str(elsewhere), str(named))
    (elsewhere / "link").symlink_to(run_dir)
    assert checkpoint.find(str(elsewhere / "link"), str(named)) == named  # the same folder by another name


def test_a_folder_without_a_name_or_that_a_rank_does_not_see_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for out_dir in (" ", "~/runs"):
        with pytest.raises(ValueError, match=f"out_dir = '{out_dir}': must name a folder"):
            checkpoint.find(out_dir, "auto")
    assert not list(tmp_path.iterdir())
    elsewhere = tmp_path / "checkpoint-000004"
    gathered = iter([[None, None], [elsewhere, None], [None, None]])  # failures, what rank 0 found, failures
    monkeypatch.setattr(checkpoint.distributed, "gather_objects", lambda value: next(gathered))
    with pytest.raises(ValueError, match=r"rank 0 does not see .*checkpoint-000004.*share"):
        checkpoint.find(str(tmp_path), "auto")


@pytest.mark.parametrize("file", sorted(FILES - {"config.json", "generation_config.json", "chat_template.jinja"}))
def test_a_pickle_in_its_place_is_refused_and_not_run(saved, tmp_path, file):
    folder, marker = shutil.copytree(saved, tmp_path / saved.name), tmp_path / "marker"
    content = pickle.dumps(Marker(marker))
    for name in ("pytorch_model.bin", "optimizer.pt", "rng_state.pth", "training_args.bin"):
        (folder / name).write_bytes(content)
    load(checkpoint.find(str(tmp_path / "old"), str(folder)))  # what lies beside the others is not read
    # as long as the file was, so that its size does not give it away
    (folder / file).write_bytes(content.ljust((folder / file).stat().st_size))
    # every way a run would read it
    for read in (lambda: load(checkpoint.find(str(tmp_path / "new"), str(folder))), lambda: load(folder)):
        with pytest.raises(Exception):  # noqa: B017  whatever the reader of the format says
            read()
    assert not marker.exists()
    pickle.loads(content)
    assert marker.exists()  # or the file was harmless


def micro(rows: int, **fields) -> RolloutBatch:
    ids = torch.arange(rows * 3).view(rows, 3)
    return RolloutBatch(
        prompt_ids=ids, completion_ids=ids + 1, completion_mask=ids >= 0, rollout_logps=-torch.rand(rows, 3),
        prompt_lengths=torch.full((rows,), 3), lengths=torch.full((rows,), 3),
        truncated=torch.zeros(rows).bool(), trained=torch.ones(rows).bool(), rows=torch.arange(rows),
        group=torch.arange(rows), **fields,
    )  # fmt: skip


def test_the_batch_of_a_failed_step_is_kept_where_it_can_be(tmp_path):
    (tmp_path / "file").write_text("no folder")
    said = r"step 7: gradient norm is nan; the batch could not be kept \(.*File exists"
    for error, place, message in ((FloatingPointError, "file", said), (KeyError, "", "is nan")):  # others keep nothing
        with pytest.raises(error, match=message), interrupts.keep_batch(str(tmp_path / place), 7, [micro(1)]):
            raise error("gradient norm is nan")
    assert names(tmp_path) == ["file"]
    out_dir = tmp_path / "runs" / "x"  # ranks other than the first may stand on a machine where nobody has made it
    micros = [micro(2, advantages=torch.tensor([1.0, float("nan")])), micro(1)]
    with pytest.raises(FloatingPointError) as raised, interrupts.keep_batch(str(out_dir), 7, micros):
        raise FloatingPointError("gradient norm is nan")
    (path,) = out_dir.iterdir()
    assert path.name == "not_finite-step000007-rank0.safetensors"
    assert str(raised.value) == f"step 7: gradient norm is nan; the batch is in {path}"
    tensors = load_file(path)
    assert tensors["micro0/advantages"].isnan().tolist() == [False, True]
    for i, one in enumerate(micros):
        held = {field.name for field in dataclasses.fields(one) if getattr(one, field.name) is not None}
        assert {name.split("/")[1] for name in tensors if name.startswith(f"micro{i}/")} == held
        assert torch.equal(tensors[f"micro{i}/completion_ids"], one.completion_ids)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noted_and_a_later_one_stops(number, monkeypatch, capfd):
    now = [100.0]
    monkeypatch.setattr(interrupts.time, "monotonic", lambda: now[0])
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    with pytest.raises(KeyboardInterrupt), interrupts.stop_on_signal() as stop:
        assert not stop
        os.kill(os.getpid(), number)
        assert stop == [number.name]
        assert f"{number.name}: finishing this step, then saving" in "".join(capfd.readouterr())
        now[0] += 1.9
        os.kill(os.getpid(), number)  # torchrun passes on what the terminal has sent already
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop == [number.name]
        now[0] += 0.2
        os.kill(os.getpid(), number)
        pytest.fail("the second signal did not stop")
    assert now == [100.0 + 1.9 + 0.2]  # not before
    assert {n: signal.getsignal(n) for n in before} == before


def test_a_signal_in_the_middle_of_a_print_is_noted_too(monkeypatch):
    # a print inside the handler would meet the one it interrupts: "reentrant call inside BufferedWriter"
    class Interrupted(io.StringIO):
        inside = False

        def write(self, text):
            if self.inside:
                raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stdout>'>")
            self.inside = True
            os.kill(os.getpid(), signal.SIGTERM)
            self.inside = False

    with interrupts.stop_on_signal() as stop:
        monkeypatch.setattr("sys.stdout", Interrupted())
        print("a line")
        monkeypatch.undo()
        assert stop == ["SIGTERM"]


def test_a_reference_and_notes_come_back(tmp_path, saved):
    model, optimizer = trained()
    reference, notes = build_model("qwen2"), {"cosine_quantiles": [0.25, 0.5]}
    checkpoint.save(str(tmp_path), 3, model, build_tokenizer(), optimizer, 12, Config(), reference, notes)
    folder = tmp_path / "checkpoint-000003"
    assert checkpoint.is_complete(folder) and checkpoint.notes(folder) == notes
    refreshing = SimpleNamespace(reference_refresh=2, policy_model="another")
    loaded = models.load_frozen(checkpoint.reference(folder, refreshing), CPU, "fp32")
    assert_equal_weights(weights_of(reference), weights_of(loaded))
    assert any((a != b).any() for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
    # without the option it would not be saved again, so it is not loaded either
    assert checkpoint.reference(folder, SimpleNamespace(reference_refresh=0, policy_model="another")) == "another"
    # it is part of what must be complete
    (folder / "reference" / "model.safetensors").write_bytes(b"cut off")
    assert not checkpoint.is_complete(folder) and checkpoint.newest(tmp_path) is None
    # without them a run begins with its own model
    assert checkpoint.reference(saved, refreshing) == checkpoint.reference(None, refreshing) == "another"
    assert checkpoint.notes(saved) == checkpoint.notes(None) == {}
