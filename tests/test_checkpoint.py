"""Tests of common/checkpoint.py: complete or absent, everything comes back, nothing is unpickled."""

import dataclasses
import json
import os
import pickle
import random
import re
import shutil
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import build_model, build_tokenizer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from common import checkpoint, models, optim
from common.rollout import RolloutBatch

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


def names(out_dir) -> list[str]:
    return sorted(path.name for path in out_dir.iterdir())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint to copy from."""
    return save(tmp_path_factory.mktemp("saved"), step=3)


@pytest.fixture
def run_dir(saved, tmp_path):
    """A run with checkpoints of steps 2 and 4."""
    for step in (2, 4):
        shutil.copytree(saved, tmp_path / f"checkpoint-{step:06d}")
    return tmp_path


# ---- what is saved comes back ----


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_everything_comes_back(tmp_path, model_folders, dtype):
    model, optimizer = trained(model=models.load_policy(str(model_folders["qwen2"]), CPU, dtype)[1])
    folder = save(tmp_path, 3, model, optimizer, position=12)

    _, loaded = models.load_policy(str(folder), CPU, dtype)
    restored = optim.AdamW(loaded, 0.5)  # another learning rate: that of the config holds
    assert checkpoint.load(folder, restored, Config()) == (3, 12)
    before, after = optimizer.state_dict(), restored.state_dict()
    assert before.keys() == after.keys() and len(before) > 3 * len(optimizer.names)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))

    # and both go on alike
    restored.learning_rate = optimizer.learning_rate
    take_step(model, optimizer)
    take_step(loaded.eval(), restored)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
    assert all(torch.equal(v, restored.state_dict()[k]) for k, v in optimizer.state_dict().items())


def draw() -> list:
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3).tolist()]


def test_random_number_generators_go_on(tmp_path):
    set_seed(3)
    # one draw of each pair of normal numbers, so that the other waits in the generator
    random.gauss(0, 1), np.random.randn(), torch.randn(1)
    model, optimizer = trained(steps=0)
    set_seed(5)
    random.gauss(0, 1), np.random.randn(), torch.randn(1)
    folder = save(tmp_path, 1, model, optimizer)
    expected = [draw() for _ in range(3)]
    set_seed(99)
    _, loaded = models.load_policy(str(folder), CPU, "fp32")
    checkpoint.load(folder, optim.AdamW(loaded, 1e-3), Config())
    assert [draw() for _ in range(3)] == expected


def test_generators_are_restored_before_any_normal_draw(tmp_path):
    model, optimizer = trained(steps=0)
    set_seed(5)
    folder = save(tmp_path, 1, model, optimizer)
    expected = draw()
    _, loaded = models.load_policy(str(folder), CPU, "fp32")
    checkpoint.load(folder, optim.AdamW(loaded, 1e-3), Config())
    assert draw() == expected


def test_saving_moves_no_generator(tmp_path):
    model, optimizer = trained(steps=1)
    set_seed(1)
    expected = draw()
    set_seed(1)
    save(tmp_path, 1, model, optimizer)
    assert draw() == expected


def test_before_the_first_step_there_is_no_state_of_adam(tmp_path):
    model, optimizer = trained(steps=0)
    folder = save(tmp_path, 1, model, optimizer)
    _, loaded = models.load_policy(str(folder), CPU, "fp32")
    restored = optim.AdamW(loaded, 1e-3)
    checkpoint.load(folder, restored, Config())
    take_step(model, optimizer)
    take_step(loaded.eval(), restored)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))


def test_a_changed_configuration_is_said_and_holds(saved, capsys):
    _, loaded = models.load_policy(str(saved), CPU, "fp32")
    checkpoint.load(saved, optim.AdamW(loaded, 1e-3), Config(learning_rate=0.5))
    assert capsys.readouterr().out == "changed since the checkpoint: learning_rate: 0.001 -> 0.5\n"


def test_another_number_of_ranks_is_said(saved, tmp_path, capsys):
    folder = tmp_path / saved.name
    shutil.copytree(saved, folder)
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, "num_ranks": 2}))
    _, loaded = models.load_policy(str(folder), CPU, "fp32")
    assert checkpoint.load(folder, optim.AdamW(loaded, 1e-3), Config()) == (3, 12)
    assert "saved by 2 process(es), resumed by 1" in capsys.readouterr().out


def test_a_checkpoint_of_another_model_is_refused(tmp_path, saved):
    other = build_model("gpt2")
    with pytest.raises(ValueError, match="optimizer state of another model"):
        checkpoint.load(saved, optim.AdamW(other, 1e-3), Config())


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_tied_embeddings_stay_tied(tmp_path, family):
    model, optimizer = trained(family)
    folder = save(tmp_path, 3, model, optimizer)
    _, loaded = models.load_policy(str(folder), CPU, "fp32")
    checkpoint.load(folder, optim.AdamW(loaded, 1e-3), Config())
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    ids = torch.randint(4, 50, (2, 9))
    assert torch.equal(loaded.eval()(input_ids=ids).logits, model.eval()(input_ids=ids).logits)


def test_the_folder_is_an_ordinary_model(tmp_path):
    model, optimizer = trained()
    folder = save(tmp_path, 3, model, optimizer)
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer, own = AutoTokenizer.from_pretrained(folder), build_tokenizer()
    assert tokenizer.get_vocab() == own.get_vocab() and tokenizer.chat_template == own.chat_template
    ids = models.load_tokenizer(str(folder))("what is 3 + 4 = ?", return_tensors="pt").input_ids
    assert ids.tolist() == own("what is 3 + 4 = ?", return_tensors="pt").input_ids.tolist()
    assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)


def test_the_state_is_readable_json(saved):
    state = json.loads((saved / "state.json").read_text())
    assert state["step"] == 3 and state["position"] == 12 and state["num_ranks"] == 1
    assert state["config"] == dataclasses.asdict(Config())


# ---- complete or absent ----


def test_nothing_is_pickled(saved):
    assert set(names(saved)) <= FILES | {"special_tokens_map.json"}
    assert {path.suffix for path in saved.iterdir()} <= {".json", ".safetensors", ".jinja", ".txt"}


def test_only_the_newest_are_kept(tmp_path):
    model, optimizer = trained(steps=1)
    for step in (1, 2, 3, 4):
        save(tmp_path, step, model, optimizer, cfg=Config(keep_checkpoints=2))
    assert names(tmp_path) == ["checkpoint-000003", "checkpoint-000004"]
    save(tmp_path, 5, model, optimizer, cfg=Config(keep_checkpoints=1))
    assert names(tmp_path) == ["checkpoint-000005"]


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


def test_the_same_step_saved_again_replaces_the_first(tmp_path):
    model, optimizer = trained(steps=1)
    save(tmp_path, 1, model, optimizer, position=4)
    save(tmp_path, 1, model, optimizer, position=8)
    assert json.loads((tmp_path / "checkpoint-000001" / "state.json").read_text())["position"] == 8
    assert names(tmp_path) == ["checkpoint-000001"]


def test_what_was_just_saved_stays_though_later_steps_exist(run_dir):
    # a run that went back to step 2 finds the old steps 4 and 6 there
    shutil.copytree(run_dir / "checkpoint-000004", run_dir / "checkpoint-000006")
    save(run_dir, step=3, cfg=Config(keep_checkpoints=2))
    assert checkpoint.is_complete(run_dir / "checkpoint-000003")


def test_a_million_steps_are_more_than_the_rest(saved, tmp_path):
    for step in (999_999, 1_000_000):
        shutil.copytree(saved, tmp_path / f"checkpoint-{step:06d}")
    assert checkpoint.newest(tmp_path).name == "checkpoint-1000000"


def test_no_folder_and_an_empty_one_hold_no_checkpoint(tmp_path):
    assert checkpoint.newest(tmp_path) is None and checkpoint.newest(tmp_path / "absent") is None


def cut_off(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def write_state(text):
    return lambda folder: (folder / "state.json").write_bytes(text)


DAMAGES = {
    "weights cut off": cut_off,
    "weights missing": lambda folder: (folder / "model.safetensors").unlink(),
    "optimizer missing": lambda folder: (folder / "optimizer.safetensors").unlink(),
    "generators missing": lambda folder: (folder / "rng.safetensors").unlink(),
    "tokenizer missing": lambda folder: (folder / "tokenizer.json").unlink(),
    "state missing": lambda folder: (folder / "state.json").unlink(),
    "state empty": write_state(b""),
    "state cut off": lambda folder: (folder / "state.json").write_text((folder / "state.json").read_text()[:50]),
    "state without files": write_state(b'{"step": 4}'),
    "state is a list": write_state(b"[1, 2]"),
    "state is not text": write_state(b"\x80\x04\x95\xff\xfe"),
    "file outside": write_state(b'{"step": 4, "files": {"../checkpoint-000002/state.json": 1}}'),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=[name.replace(" ", "_") for name in DAMAGES])
def test_a_damaged_checkpoint_is_not_taken(run_dir, damage):
    assert checkpoint.newest(run_dir).name == "checkpoint-000004"
    damage(run_dir / "checkpoint-000004")
    assert not checkpoint.is_complete(run_dir / "checkpoint-000004")
    assert checkpoint.newest(run_dir) == run_dir / "checkpoint-000002"
    with pytest.raises(ValueError, match="not a complete checkpoint"):
        checkpoint.find(str(run_dir), str(run_dir / "checkpoint-000004"))


def flip_a_bit(folder, name="optimizer.safetensors"):
    content = bytearray((folder / name).read_bytes())
    content[-9] ^= 1
    (folder / name).write_bytes(content)


def edit_state(folder):
    text = (folder / "state.json").read_text()
    assert text.count('"position": 12') == 1
    (folder / "state.json").write_text(text.replace('"position": 12', '"position": 16'))


def swap_weights(folder):
    """The weights of another step: same size, same shapes."""
    other = save(folder.parent / "other", 2, *trained(steps=2))
    shutil.copy(other / "model.safetensors", folder / "model.safetensors")


TAMPERED = {
    "one bit": (flip_a_bit, r"optimizer.safetensors is not the file that was saved \(CRC-32 \w{8}, not \w{8}\)"),
    "one bit of a small file": (lambda folder: flip_a_bit(folder, "config.json"), "config.json is not the file"),
    "state edited": (edit_state, "state.json was edited"),
    "weights swapped": (swap_weights, "model.safetensors is not the file"),
    "cut off": (cut_off, r"model.safetensors has \d+ bytes of \d+"),
    "missing": (lambda folder: (folder / "rng.safetensors").unlink(), "rng.safetensors is missing"),
}


@pytest.mark.parametrize("tamper, said", TAMPERED.values(), ids=[name.replace(" ", "_") for name in TAMPERED])
def test_a_checkpoint_that_is_not_what_was_saved_is_passed_over_and_said(saved, tmp_path, capsys, tamper, said):
    run_dir = tmp_path / "run"
    for step in (2, 4):
        shutil.copytree(saved, run_dir / f"checkpoint-{step:06d}")
    tamper(run_dir / "checkpoint-000004")
    assert checkpoint.find(str(run_dir), "auto") == run_dir / "checkpoint-000002"
    printed = capsys.readouterr()
    assert re.search(f"warning: {run_dir}/checkpoint-000004 is passed over: {said}", printed.err)
    assert f"resuming from {run_dir}/checkpoint-000002" in printed.out
    with pytest.raises(ValueError, match=f"not a complete checkpoint, {said}"):
        checkpoint.find(str(run_dir), str(run_dir / "checkpoint-000004"))
    # with no good one left nothing starts from the beginning, over what may still be mended
    shutil.rmtree(run_dir / "checkpoint-000002")
    with pytest.raises(ValueError, match="no checkpoint in it can be used"):
        checkpoint.find(str(run_dir), "auto")


def test_a_checkpoint_without_checksums_is_taken_by_its_sizes(run_dir):
    path = run_dir / "checkpoint-000004" / "state.json"
    state = json.loads(path.read_text())
    state["files"] = {name: found["bytes"] for name, found in state["files"].items()}
    del state["crc32"]
    path.write_text(json.dumps(state))
    assert checkpoint.find(str(run_dir), "auto") == run_dir / "checkpoint-000004"
    cut_off(run_dir / "checkpoint-000004")
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
    save(run_dir, step=8)
    assert names(run_dir) == ["checkpoint-000004", "checkpoint-000008", "checkpoint-000009"]


def test_killed_while_a_checkpoint_is_replaced_the_old_one_is_taken(saved, tmp_path):
    # the same step saved again: the old folder is renamed, then the new one takes its name
    shutil.copytree(saved, tmp_path / ".writing-old-checkpoint-000003")
    shutil.copytree(saved, tmp_path / ".writing-checkpoint-000003")
    assert checkpoint.find(str(tmp_path), "auto") == tmp_path / "checkpoint-000003"


@pytest.mark.parametrize("file", ["optimizer.safetensors", "rng.safetensors"])
@pytest.mark.parametrize("half", [False, True])
def test_a_full_disk_leaves_the_earlier_checkpoint(run_dir, monkeypatch, file, half):
    model, optimizer = trained(steps=1)
    before = {path: path.read_bytes() for path in (run_dir / "checkpoint-000004").iterdir()}

    def full(tensors, path):
        if path.name == file:
            if half:
                path.write_bytes(b"half of it")
            raise OSError(28, "No space left on device")
        real(tensors, path)

    real = checkpoint.save_file
    monkeypatch.setattr(checkpoint, "save_file", full)
    said = r"step 6 could not .* GiB is free: .*No space left.*keep_checkpoints = 2.*goes on from .*/checkpoint-000004"
    with pytest.raises(OSError, match=said):
        save(run_dir, 6, model, optimizer)
    assert names(run_dir) == ["checkpoint-000002", "checkpoint-000004"]
    assert all(path.read_bytes() == content for path, content in before.items())
    assert checkpoint.newest(run_dir).name == "checkpoint-000004"
    # once there is room, the same step can be saved
    monkeypatch.setattr(checkpoint, "save_file", real)
    save(run_dir, 6, model, optimizer)
    assert checkpoint.newest(run_dir).name == "checkpoint-000006"


def test_a_full_disk_under_the_weights_leaves_nothing(run_dir, monkeypatch):
    model, optimizer = trained(steps=1)

    def full(folder):
        (folder / "config.json").write_text("{")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model, "save_pretrained", full)
    with pytest.raises(OSError, match="No space left"):
        save(run_dir, 6, model, optimizer)
    assert names(run_dir) == ["checkpoint-000002", "checkpoint-000004"]


@pytest.mark.parametrize("name", ["master/", "exp_avg/", "exp_avg_sq/"])
def test_a_state_of_the_optimizer_that_is_not_finite_is_refused(saved, tmp_path, name):
    folder = shutil.copytree(saved, tmp_path / "checkpoint-000003")
    state = load_file(folder / "optimizer.safetensors")
    key = next(key for key in state if key.startswith(name))
    state[key].view(-1)[-1] = float("nan")
    checkpoint.save_file(state, folder / "optimizer.safetensors")
    _, optimizer = trained(steps=0)
    before = {key: value.clone() for key, value in optimizer.state_dict().items()}
    with pytest.raises(ValueError, match=f"optimizer.safetensors: {key} holds nan: must be finite; name an older"):
        checkpoint.load(folder, optimizer, Config())
    assert all(torch.equal(before[key], value) for key, value in optimizer.state_dict().items())


# ---- which one a run starts from ----


def test_auto_takes_the_newest_or_says_that_there_is_none(run_dir, tmp_path_factory, capsys):
    assert checkpoint.find(str(run_dir), "auto") == run_dir / "checkpoint-000004"
    assert f"resuming from {run_dir}/checkpoint-000004" in capsys.readouterr().out
    empty = tmp_path_factory.mktemp("empty")
    assert checkpoint.find(str(empty), "auto") is None
    assert f"no checkpoint in {empty}: starting anew" in capsys.readouterr().out


def test_a_named_checkpoint_is_taken(run_dir, tmp_path):
    assert checkpoint.find(str(tmp_path / "new"), str(run_dir / "checkpoint-000002")) == run_dir / "checkpoint-000002"


@pytest.mark.parametrize("name", ["absent", "checkpoint-000099", ".", "checkpoint-000004/model.safetensors"])
def test_a_named_checkpoint_must_exist(run_dir, name):
    with pytest.raises(ValueError, match="not a complete checkpoint"):
        checkpoint.find(str(run_dir / "new"), str(run_dir / name))
    assert not (run_dir / "new").exists()


def test_a_named_checkpoint_of_another_run_does_not_mix_two_runs(run_dir, saved, tmp_path_factory):
    elsewhere, named = tmp_path_factory.mktemp("elsewhere"), run_dir / "checkpoint-000002"
    assert checkpoint.find(str(elsewhere), str(named)) == named
    shutil.copytree(saved, elsewhere / "checkpoint-000003")
    with pytest.raises(ValueError, match=r"out_dir holds checkpoint-000003 of a run of its own.*give another out_dir"):
        checkpoint.find(str(elsewhere), str(named))
    (elsewhere / "link").symlink_to(run_dir)
    assert checkpoint.find(str(elsewhere / "link"), str(named)) == named  # the same folder by another name


@pytest.mark.parametrize("out_dir", ["", " ", "~/runs"])
def test_a_folder_must_have_a_name(out_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"out_dir = '{out_dir}': must name a folder"):
        checkpoint.find(out_dir, "auto")
    assert not list(tmp_path.iterdir())


def test_none_does_not_mix_two_runs(run_dir, tmp_path_factory):
    with pytest.raises(ValueError, match="already holds a run"):
        checkpoint.find(str(run_dir), "none")
    only_metrics = tmp_path_factory.mktemp("metrics")
    (only_metrics / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="already holds a run"):
        checkpoint.find(str(only_metrics), "none")
    assert checkpoint.find(str(tmp_path_factory.mktemp("empty")), "none") is None


# ---- a checkpoint is data ----


class Marker:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


@pytest.mark.parametrize("file", sorted(FILES - {"config.json", "generation_config.json", "chat_template.jinja"}))
def test_a_pickle_in_its_place_is_refused_and_not_run(saved, tmp_path, file):
    folder, marker = tmp_path / saved.name, tmp_path / "marker"
    shutil.copytree(saved, folder)
    content = pickle.dumps(Marker(marker))
    # as long as the file was, so that its size does not give it away
    size = (folder / file).stat().st_size
    (folder / file).write_bytes(content + b" " * max(0, size - len(content)))
    # every way a run would read it
    with pytest.raises(Exception):  # noqa: B017  whatever the reader of the format says
        found = checkpoint.find("runs/new", str(folder))
        _, loaded = models.load_policy(str(found), CPU, "fp32")
        checkpoint.load(found, optim.AdamW(loaded, 1e-3), Config())
    assert not marker.exists()
    pickle.loads(content)  # the marker works
    assert marker.exists()


def test_pickled_weights_beside_the_others_are_not_read(saved, tmp_path):
    folder, marker = tmp_path / saved.name, tmp_path / "marker"
    shutil.copytree(saved, folder)
    for name in ("pytorch_model.bin", "optimizer.pt", "rng_state.pth", "training_args.bin"):
        (folder / name).write_bytes(pickle.dumps(Marker(marker)))
    _, loaded = models.load_policy(str(checkpoint.find("runs/new", str(folder))), CPU, "fp32")
    checkpoint.load(folder, optim.AdamW(loaded, 1e-3), Config())
    assert not marker.exists()


# ---- numbers that are not finite ----


def micro(rows: int, **fields) -> RolloutBatch:
    ids = torch.arange(rows * 3).view(rows, 3)
    return RolloutBatch(
        prompt_ids=ids, prompt_mask=ids >= 0, completion_ids=ids + 1, sampled_mask=ids >= 0, completion_mask=ids >= 0,
        rollout_logps=-torch.rand(rows, 3), prompt_lengths=torch.full((rows,), 3), lengths=torch.full((rows,), 3),
        truncated=torch.zeros(rows).bool(), trained=torch.ones(rows).bool(), rows=torch.arange(rows), **fields,
    )  # fmt: skip


def test_the_batch_of_a_failed_step_is_kept(tmp_path):
    micros = [micro(2, advantages=torch.tensor([1.0, float("nan")])), micro(1)]
    with pytest.raises(FloatingPointError) as raised, checkpoint.keep_batch(str(tmp_path), 7, micros):
        raise FloatingPointError("gradient norm is nan")
    (path,) = tmp_path.iterdir()
    assert str(raised.value) == f"step 7: gradient norm is nan; the batch is in {path}"
    tensors = load_file(path)
    assert tensors["micro0/advantages"].isnan().tolist() == [False, True]
    for i, one in enumerate(micros):
        held = {field.name for field in dataclasses.fields(one) if getattr(one, field.name) is not None}
        assert {name.split("/")[1] for name in tensors if name.startswith(f"micro{i}/")} == held
        assert torch.equal(tensors[f"micro{i}/completion_ids"], one.completion_ids)


def test_a_failed_step_is_named_though_its_batch_cannot_be_kept(tmp_path):
    (tmp_path / "file").write_text("no folder")
    said = r"step 7: gradient norm is nan; the batch could not be kept \(.*File exists"
    with pytest.raises(FloatingPointError, match=said), checkpoint.keep_batch(str(tmp_path / "file"), 7, [micro(1)]):
        raise FloatingPointError("gradient norm is nan")


def test_other_errors_pass_and_keep_nothing(tmp_path):
    with checkpoint.keep_batch(str(tmp_path), 7, [micro(2)]):
        pass
    with pytest.raises(KeyError), checkpoint.keep_batch(str(tmp_path), 7, [micro(2)]):
        raise KeyError("answer")
    assert not list(tmp_path.iterdir())


def test_a_batch_can_be_kept_before_anything_else_was_written(tmp_path):
    # ranks other than the first may stand on a machine where nobody has made out_dir
    out_dir = tmp_path / "runs" / "x"
    with pytest.raises(FloatingPointError, match="gradient norm"), checkpoint.keep_batch(str(out_dir), 1, [micro(1)]):
        raise FloatingPointError("gradient norm is nan")


# ---- signals ----


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noted_and_a_later_one_stops(number, monkeypatch, capfd):
    now = [100.0]
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: now[0])
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    with pytest.raises(KeyboardInterrupt), checkpoint.stop_on_signal() as stop:
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
    assert {n: signal.getsignal(n) for n in before} == before


def test_handlers_are_put_back_after_an_error():
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    with pytest.raises(ZeroDivisionError), checkpoint.stop_on_signal():
        assert {n: signal.getsignal(n) for n in before} != before
        raise ZeroDivisionError
    assert {n: signal.getsignal(n) for n in before} == before


def test_a_signal_in_the_middle_of_a_print_is_noted_too(monkeypatch):
    # a print inside the handler would meet the one it interrupts: "reentrant call inside BufferedWriter"
    class Interrupted:
        def write(self, text):
            if not self.inside:
                self.inside = True
                os.kill(os.getpid(), signal.SIGTERM)
                self.inside = False
            else:
                raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stdout>'>")

        def flush(self):
            pass

        inside = False

    with checkpoint.stop_on_signal() as stop:
        monkeypatch.setattr("sys.stdout", Interrupted())
        print("a line")
        monkeypatch.undo()
        assert stop == ["SIGTERM"]


def test_a_rank_that_does_not_see_the_checkpoint_does_not_start(tmp_path, monkeypatch):
    elsewhere = tmp_path / "checkpoint-000004"
    gathered = iter([[None, None], [elsewhere, None], [None, None]])  # failures, what rank 0 found, failures
    monkeypatch.setattr(checkpoint.distributed, "gather_objects", lambda value: next(gathered))
    with pytest.raises(ValueError, match=r"rank 0 does not see .*checkpoint-000004.*all of them share"):
        checkpoint.find(str(tmp_path), "auto")


def test_a_tokenizer_with_several_chat_templates_makes_a_complete_checkpoint(tmp_path):
    model, tokenizer = build_model("qwen2"), build_tokenizer()
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}  # the second in a subfolder
    checkpoint.save(str(tmp_path), 1, model, tokenizer, optim.AdamW(model, 1e-3), 0, Config())
    folder = tmp_path / "checkpoint-000001"
    assert any(path.is_file() for path in folder.glob("*/*"))
    assert checkpoint.newest(tmp_path) == folder
    next(folder.glob("*/*")).unlink()
    assert checkpoint.newest(tmp_path) is None


def test_a_checkpoint_of_another_policy_model_is_refused(tmp_path):
    @dataclasses.dataclass(frozen=True)
    class Named(Config):
        policy_model: str = "first"

    model = build_model("qwen2")
    optimizer = optim.AdamW(model, 1e-3)
    checkpoint.save(str(tmp_path), 1, model, build_tokenizer(), optimizer, 5, Named())
    assert checkpoint.load(tmp_path / "checkpoint-000001", optimizer, Named()) == (1, 5)
    with pytest.raises(ValueError, match=r"policy_model = 'second'.*was trained from 'first'"):
        checkpoint.load(tmp_path / "checkpoint-000001", optimizer, Named(policy_model="second"))


def test_a_checkpoint_of_other_weights_or_another_kind_of_script_is_refused_by_name(tmp_path):
    @dataclasses.dataclass(frozen=True)
    class Policy(Config):
        policy_model: str = "first"
        lora_rank: int = 0

    @dataclasses.dataclass(frozen=True)
    class Student(Config):
        student_model: str = "first"

    model, optimizer = trained(steps=0)
    folder = save(tmp_path, 1, model, optimizer, cfg=Policy())
    with pytest.raises(ValueError, match=r"lora_rank = 4: .* was trained with lora_rank = 0.*set it back to 0"):
        checkpoint.load(folder, optimizer, Policy(lora_rank=4))
    with pytest.raises(ValueError, match=r"it has policy_model, so another kind of script saved it"):
        checkpoint.load(folder, optimizer, Student())


# ---- a reference of its own, and notes ----


def test_a_reference_and_notes_come_back(tmp_path):
    model, optimizer = trained()
    reference = build_model("qwen2")
    notes = {"cosine_quantiles": [0.25, 0.5]}
    checkpoint.save(str(tmp_path), 3, model, build_tokenizer(), optimizer, 12, Config(), reference, notes)
    folder = tmp_path / "checkpoint-000003"
    assert checkpoint.is_complete(folder) and checkpoint.notes(folder) == notes
    refreshing = SimpleNamespace(reference_refresh=2, policy_model="another")
    loaded = models.load_frozen(checkpoint.reference(folder, refreshing), CPU, "fp32")
    for (name, one), other in zip(reference.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(one, other), name
    assert any((a != b).any() for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
    # without the option it would not be saved again, so it is not loaded either
    assert checkpoint.reference(folder, SimpleNamespace(reference_refresh=0, policy_model="another")) == "another"
    # it is part of what must be complete
    (folder / "reference" / "model.safetensors").write_bytes(b"cut off")
    assert not checkpoint.is_complete(folder) and checkpoint.newest(tmp_path) is None


def test_without_them_a_run_begins_with_its_own_model(saved):
    refreshing = SimpleNamespace(reference_refresh=2, policy_model="a/model")
    assert checkpoint.reference(saved, refreshing) == checkpoint.reference(None, refreshing) == "a/model"
    assert checkpoint.notes(saved) == checkpoint.notes(None) == {}
