"""The built-in poster policies, and the supervised start that makes others like them."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from common import images, models, rollout
from grpo.poster import records, reward, supervised, synthetic, toys

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("toy-poster", "toy-poster-vlm")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """The real things, but for training of two steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RL_HAND_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(toys, "STEPS", dict.fromkeys(NAMES, 2))
        return {name: toys.folder(name) for name in NAMES}


@pytest.fixture
def few(tmp_path) -> str:
    """A file with a few records: to read and tokenise the 10,000 synthetic ones takes seconds."""
    path = tmp_path / "few.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in synthetic.records(0, "train", 16)))
    return str(path)


@pytest.fixture(autouse=True)
def one_thread():
    """More threads than free cores would make these tests wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def quick(tmp_path, monkeypatch) -> Path:
    """An empty cache, and warm starts of one step for tests that do not look at the policy."""
    monkeypatch.setenv("RL_HAND_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(toys, "STEPS", dict.fromkeys(NAMES, 1))
    return tmp_path / "cache"


def sampled(name: str, folder: Path, num_prompts: int) -> list[dict]:
    """Scores of two samples for each of the first test posters."""
    tokenizer, model = models.load_policy(str(folder), torch.device("cpu"), "fp32")
    sees = name == "toy-poster-vlm"
    reader = images.load_processor(folder) if sees else tokenizer
    rows = synthetic.records(0, "test", num_prompts)
    prompts = [prompt for prompt, _ in supervised.encode(rows, reader, Path())]
    sampler = rollout.Sampler([model], end_ids=models.end_token_ids(tokenizer, model), pad_id=tokenizer.pad_token_id,
                              max_new_tokens=120, suppressed_ids=images.vision_ids(model))  # fmt: skip
    pictures = [[synthetic.image(ref) for ref in row["images"]] for row in rows]
    seen = images.Images.of(model, reader, prompts, pictures) if sees else None
    batch = sampler.generate(prompts, group_size=2, temperature=1.0, images=seen)
    pairs = zip(batch.texts(tokenizer), [row for row in rows for _ in range(2)], strict=True)
    return [reward.score(text, row["ground_truth"]) for text, row in pairs]


# ---- built-in policies ----


@pytest.mark.slow
@pytest.mark.parametrize("name, least", [("toy-poster", 0.25), ("toy-poster-vlm", 0.15)])
def test_the_warm_start_parses_mostly_and_leaves_room_to_learn(name, least):
    results = sampled(name, toys.folder(name), num_prompts=16)
    scores = [result["score"] for result in results]
    assert least <= sum(scores) / len(scores) <= 0.75
    assert sum(result["parse_ok"] for result in results) / len(results) >= 0.6
    groups = [abs(scores[i] - scores[i + 1]) > 1e-6 for i in range(0, len(scores), 2)]
    assert sum(groups) > len(groups) / 2  # rewards inside a group differ, or GRPO has no gradient


def test_the_text_model_is_an_ordinary_folder(folders):
    model = AutoModelForCausalLM.from_pretrained(folders["toy-poster"])
    tokenizer = AutoTokenizer.from_pretrained(folders["toy-poster"])
    assert 4e5 < model.num_parameters() < 2e6 and model.get_input_embeddings().num_embeddings == len(tokenizer) == 512
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.padding_side == "left"
    for config in (model.config, model.generation_config):
        assert (config.eos_token_id, config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)


def test_the_tokenizer_gives_texts_back_and_is_short(folders):
    tokenizer = models.load_tokenizer(str(folders["toy-poster"]))
    for text in ("Nacht é 夏日 🎉\n\t", synthetic.gold(synthetic.record(3, 2)), synthetic.SCHEMA, ""):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    for row in synthetic.records(0, "test", 50):
        chat = tokenizer.apply_chat_template(records.messages(row, False), tokenize=False, add_generation_prompt=True)
        prompt, gold, both = (
            tokenizer(x)["input_ids"] for x in (chat, synthetic.gold(row), chat + synthetic.gold(row))
        )
        assert prompt + gold == both and len(gold) <= 80
    pieces = [tokenizer.decode([i]) for i in tokenizer('"x":128,"fill":"#3D0C45"')["input_ids"]]
    assert pieces[-2:] == ["#3D0C45", '"'] and [p for p in pieces if p.isdigit()] == ["1", "2", "8"]


def test_the_chat_template_has_places_for_images(folders):
    processor = images.load_processor(folders["toy-poster-vlm"])
    row = synthetic.record(0, 0)
    for with_images, before in ((True, "<|vision_start|><|image_pad|><|vision_end|>"), (False, "")):
        chat = records.messages(row, with_images)
        expected = f"<|im_start|>user\n{before}{row['prompt']}<|im_end|>\n<|im_start|>assistant\n"
        for reader in (processor, processor.tokenizer):
            assert reader.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == expected
    (prompt, _), = supervised.encode([row], processor, Path())  # fmt: skip
    assert prompt.count(processor.image_token_id) == 4  # 56 x 56 pixels


def test_built_once_then_cached(quick, capsys, monkeypatch):
    for name in NAMES:
        folder = toys.folder(name)
        assert capsys.readouterr().out == f"built-in {name}: training 1 steps once, cached in {folder}\n"
        assert folder.parent == quick and toys.find(name) == str(folder)
    monkeypatch.delattr(toys, "_warm_start")
    assert toys.folder(name) == folder and capsys.readouterr().out == ""
    assert toys.find("some/model") == "some/model"
    with pytest.raises(ValueError, match=r"use one of \['toy-poster', 'toy-poster-vlm'\]"):
        toys.folder("toy")


def test_any_change_of_the_recipe_gets_another_folder(quick, monkeypatch, tmp_path):
    folder = toys.folder()
    for place, path in enumerate(toys.SOURCES):
        edited = tmp_path / f"{place}.py"
        edited.write_text(path.read_text() + "\n")
        with monkeypatch.context() as patch:
            patch.setattr(toys, "SOURCES", [*toys.SOURCES[:place], edited, *toys.SOURCES[place + 1 :]])
            patch.setattr(toys, "_warm_start", lambda *arguments: None)
            assert toys.folder() != folder


def test_the_same_recipe_gives_the_same_model_and_disturbs_nothing(quick, tmp_path, monkeypatch):
    torch.set_num_threads(2)
    with torch.no_grad():
        before = torch.get_rng_state(), random.getstate()
        folder = toys.folder()
        assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
        assert torch.get_num_threads() == 2 and not torch.is_grad_enabled()
    torch.rand(3)
    monkeypatch.setenv("RL_HAND_CACHE", str(tmp_path / "again"))
    again = toys.folder()
    for name in ("model.safetensors", "tokenizer.json"):
        assert (again / name).read_bytes() == (folder / name).read_bytes()


def test_an_interrupted_build_leaves_nothing_behind(quick, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch.nn.utils, "clip_grad_norm_", interrupt)
        toys.folder()
    assert list(quick.iterdir()) == []


def test_the_slower_of_two_builders_keeps_what_the_faster_made(quick, monkeypatch):
    train = toys._warm_start

    def overtaken(*recipe):
        with monkeypatch.context() as patch:
            patch.setattr(toys, "_warm_start", train)
            (toys.folder() / "first").touch()
        return train(*recipe)

    monkeypatch.setattr(toys, "_warm_start", overtaken)
    folder = toys.folder()
    assert (folder / "first").exists() and list(quick.iterdir()) == [folder]


# ---- supervised start ----


def metrics_of(out_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", NAMES)
def test_supervised_training_lowers_the_loss_and_saves_a_folder(quick, few, tmp_path, name):
    cfg = supervised.Config(policy_model=name, train_data=few, steps=8, batch_size=4, warmup_steps=0,
                            learning_rate=3e-3, device="cpu", out_dir=str(tmp_path / "run"))  # fmt: skip
    supervised.main(cfg)
    lines = metrics_of(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.5
    assert lines[0]["learning_rate"] == 3e-3 and lines[-1]["learning_rate"] == pytest.approx(3e-3 / 4)
    before, after = (models.load_policy(str(place), torch.device("cpu"), "fp32")[1].state_dict()
                     for place in (toys.folder(name), tmp_path / "run" / "policy"))  # fmt: skip
    changed = {key for key, value in before.items() if not torch.equal(value, after[key])}
    assert changed == {key for key in before if "visual" not in key}  # the vision tower stays
    if name == "toy-poster-vlm":
        assert images.load_processor(tmp_path / "run" / "policy").image_token_id is not None
    with pytest.raises(ValueError, match="holds a policy already"):
        supervised.Config(out_dir=cfg.out_dir)


def test_the_loss_is_the_mean_over_the_tokens_of_the_posters(quick, few, tmp_path):
    """Against transformers' own cross-entropy, and the same however the batch is cut."""
    folder = toys.folder()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), models.load_tokenizer(str(folder))
    usual = dict(policy_model=str(folder), train_data=few, batch_size=3, steps=1, device="cpu")
    losses = []
    for size in (8192, 100):
        supervised.main(supervised.Config(**usual, micro_batch_tokens=size, out_dir=str(tmp_path / str(size))))
        losses.append(metrics_of(tmp_path / str(size))[0]["loss"])
    rows = synthetic.records(0, "train", 16)
    total, count = 0.0, 0
    for prompt, gold in supervised.encode(random.Random(0).sample(rows, 3), tokenizer, Path()):
        assert gold[-1] == tokenizer.eos_token_id
        with torch.no_grad():
            logits = model(torch.tensor([prompt + gold])).logits[0, len(prompt) - 1 : -1]
        total += torch.nn.functional.cross_entropy(logits, torch.tensor(gold), reduction="sum").item()
        count += len(gold)
    assert losses == pytest.approx([total / count] * 2, rel=1e-4)


@pytest.mark.slow  # the page's command is run too
def test_supervised_over_the_command_line(quick, few, tmp_path):
    command = [sys.executable, str(ROOT / "grpo/poster/supervised.py"), "--policy_model", str(toys.folder())]
    command += ["--train_data", few, "--steps", "2", "--out_dir", str(tmp_path / "run"), "--device", "cpu"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    assert "16 of 16 records fit into max_tokens = 8192" in run.stdout and len(metrics_of(tmp_path / "run")) == 2
    assert (tmp_path / "run" / "policy" / "model.safetensors").is_file()


@pytest.mark.parametrize("changes, message", [
    ({"max_tokens": 50}, "0 of 16 records fit into max_tokens = 50: must be at least batch_size = 16"),
    ({"train_data": "nothing.jsonl"}, "no records at 'nothing.jsonl'"),
])  # fmt: skip
def test_supervised_refuses_data_it_cannot_use(quick, few, tmp_path, changes, message):
    usual = {"policy_model": str(toys.folder()), "train_data": few, "device": "cpu", "out_dir": str(tmp_path / "run")}
    cfg = supervised.Config(**(usual | changes))
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        supervised.main(cfg)


@pytest.mark.parametrize("changes, message", [
    ({"steps": 0}, "steps = 0"), ({"learning_rate": -1.0}, "learning_rate = -1"), ({"dtype": "int8"}, "dtype = 'int8'"),
    ({"device": "tpu"}, "device = 'tpu'"), ({"max_grad_norm": 0.0}, "max_grad_norm = 0"),
])  # fmt: skip
def test_supervised_refuses_settings_that_break_a_rule(changes, message):
    with pytest.raises(ValueError, match=message):
        supervised.Config(**changes)
