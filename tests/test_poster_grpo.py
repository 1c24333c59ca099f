"""The training of poster policies, text and vision-language: its loss, its cuts, its ranks, its images, its service."""

import importlib
import json
import math
import sys

import pytest
import torch
from comparing import comparable
from conftest import ROOT, Run, assert_equal_weights
from safetensors.torch import load_file
from test_reward_client import Fake
from test_rollout import make_batch
from test_teacher_server import free_port

sys.path.insert(0, str(ROOT / "scripts" / "dev"))
import random_vlm

from common.base.distributed import OUTAGE_EXIT_CODE
from common.loop import Counts
from common.model import images, models
from grpo.poster import poster_grpo, synthetic, toys

PATH = ROOT / "grpo" / "poster" / "poster_grpo.py"


def earned(completions, answers, **columns):
    """What a policy without training can earn, whose posters never parse."""
    return [len(c) % 5 / 5 for c in completions]


@pytest.fixture(scope="module")
def policies(tmp_path_factory) -> dict[str, str]:
    """Folders of the built-in policies before any training."""
    folders, tokenizer = {name: str(tmp_path_factory.mktemp(name)) for name in ("text", "vlm")}, toys.build_tokenizer()
    torch.manual_seed(0)
    for part in (toys.build_llama(tokenizer), tokenizer):
        part.save_pretrained(folders["text"])
    for part in (toys.build_qwen_vl(tokenizer), toys.build_processor(tokenizer)):
        part.save_pretrained(folders["vlm"])
    return folders


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> str:
    """Twelve records with one image, two, or none."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    records = [synthetic.record(seed, 0) for seed in range(12)]
    for i, record in enumerate(records):
        record["images"] = (record["images"] + [f"synthetic:0:{i + 50}:1"])[: (1, 2, 0)[i % 3]]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture
def run(launcher, policies, rows, tmp_path):
    def run(name: str, kind: str = "text", ranks: int = 1, start: bool = False, rewards=(earned,), **options) -> Run:
        defaults = dict(policy_model=policies[kind], train_data=rows, eval_data=rows, kl_coef=0, num_minibatches=2,
                        micro_batch_tokens=400, max_new_tokens=6, learning_rate=1e-3)  # fmt: skip
        begin = launcher.start if start else launcher.run
        return begin(PATH, tmp_path / name, ranks, rewards=rewards, **{**defaults, **options})

    return run


def assert_close(run: Run, other: Run, folder: str) -> None:
    """Two runs whose sums were rounded differently, from the policy in a folder.

    Of the gradients that are close to 0 Adam makes up to a whole step, and a fault moves most weights elsewhere: so
    they may differ, in the mean, by a hundredth of what training moved them.
    """
    for line, other_line in zip(comparable(run.lines), comparable(other.lines), strict=True):
        assert line.keys() == other_line.keys()
        for name, value in line.items():
            # a ratio at the limit may be clipped in one run only; others are differences of almost equal numbers
            least = 0.02 if name.startswith("clip") else 1e-5
            assert value == other_line[name] or math.isclose(value, other_line[name], rel_tol=0.01, abs_tol=least), name
    one, two, start = run.weights(), other.weights(), load_file(f"{folder}/model.safetensors")
    assert one.keys() == two.keys()
    difference, moved = (sum((one[name] - x[name]).abs().sum() for name in one) for x in (two, start))
    assert difference < 0.01 * moved


@pytest.mark.parametrize(("kind", "options"), [
    ("text", {}), pytest.param("vlm", {}, marks=pytest.mark.poster),
    pytest.param("vlm", {"freeze_vision": False}, marks=pytest.mark.poster),
], ids=["text", "frozen", "trained"])  # fmt: skip
def test_ranks_and_cuts_change_nothing(run, policies, kind, options):
    options |= dict(steps=2, save_every=1)
    one = run("one", kind, **options).succeeded()
    assert len(one.steps) == 2 and one.steps[0]["reward_service"] == 0 and one.steps[0]["reward"] > 0
    assert one.steps[0]["rollout_mismatch"] < 1e-4  # rounding of log-probs of -6, in sums of hundreds of terms
    # every sequence alone, on two ranks, one of which has other numbers of images
    two = run("two", kind, ranks=2, micro_batch_tokens=1, **options).succeeded()
    assert_close(two, one, policies[kind])
    before, after = one.weights(1), one.weights(2)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    vision = {name for name in before if "visual" in name}
    assert moved - vision and bool(moved & vision) == (options.get("freeze_vision") is False)
    assert bool(vision) == (kind == "vlm")


@pytest.mark.poster
def test_gspo_with_a_reference_on_two_ranks_evaluates_more_than_a_step_has(run, policies):
    options = dict(kind="vlm", loss="gspo", kl_coef=0.1, epsilon_low=3e-3, epsilon_high=4e-3, num_minibatches=1,
                   steps=2, freeze_vision=False, batch_size=2, eval_every=1, eval_examples=12)  # fmt: skip
    one = run("one", **options).succeeded()
    assert [line["step"] for line in one.lines if "eval_reward" in line] == [0, 1, 2]
    first, last = (line["kl_ref"] for line in one.steps)
    assert abs(first) < 1e-6 < 1e-5 < last  # 0 but for rounding, then the policy has moved
    assert_close(run("two", ranks=2, **options).succeeded(), one, policies["vlm"])


@pytest.mark.poster
@pytest.mark.parametrize(("policy", "least"), [("toy-poster", 0.25), ("toy-poster-vlm", 0.15)])
def test_the_warm_start_parses_mostly_and_leaves_room_to_learn(run, policy, least):
    done = run("run", rewards=None, policy_model=toys.folder(policy), train_data="synthetic:0", steps=1, batch_size=16,
               group_size=2, max_new_tokens=120, micro_batch_tokens=8192, eval_every=0)  # fmt: skip
    (line,) = done.succeeded().steps
    assert least <= line["reward"] <= 0.75 and line["reward_parse_ok"] >= 0.6
    assert line["zero_std"] < 0.5  # rewards inside a group differ, or GRPO has no gradient


@pytest.mark.parametrize("loss", ["grpo", "dapo", "dr_grpo", "gspo"])
def test_the_loss_is_that_of_the_other_scripts(loss):
    torch.manual_seed(0)
    batch = make_batch([7, 3, 1, 5, 2, 4])
    logps = (torch.randn(batch.completion_mask.shape).mul(0.3) * batch.completion_mask for _ in range(4))
    now, batch.old_logps, batch.ref_logps, batch.rollout_logps = logps
    batch.advantages = torch.randn(6)
    batch.drop(torch.arange(6) == 3)
    shared = dict(kl_coef=0.2, max_new_tokens=9, epsilon_low=0.05, epsilon_high=0.06)
    name, more = ("gspo", dict(clip_preset="custom")) if loss == "gspo" else ("grpo", dict(loss=loss))
    other = importlib.import_module(f"{name}.{name}")
    results = []
    for function, config, counts in (
        (poster_grpo.poster_loss, poster_grpo.Config(loss=loss, **shared), Counts(11, 40)),
        (getattr(other, f"{name}_loss"), other.Config(**shared, **more), Counts(11, 40)),
    ):
        logps = now.clone().requires_grad_()
        value, stats = function(lambda *_, logps=logps: (logps, logps.detach().abs()), batch, config, counts)
        value.backward()
        results.append((value, logps.grad, stats.means["clip_fraction"], stats.means["kl_ref"]))
    for own, theirs in zip(*results, strict=True):
        torch.testing.assert_close(own, theirs)
    assert results[0][1].abs().sum() > 0 and results[0][2] > 0


def test_the_vision_tower_runs_once_per_prompt_however_large_the_group(monkeypatch, policies, rows, tmp_path):
    compute = images._features
    for frozen, expected in ((True, 3), (False, 3 + 2 * 3)):  # prompts; a trained one also once per optimizer step
        calls = []
        monkeypatch.setattr(images, "_features", lambda *args, calls=calls: calls.append(1) or compute(*args))
        options = dict(batch_size=3, group_size=6, steps=1, max_new_tokens=4, device="cpu", freeze_vision=frozen)
        poster_grpo.main(poster_grpo.Config(policy_model=policies["vlm"], train_data=rows, eval_data="",
                                            out_dir=str(tmp_path / str(frozen)), **options))  # fmt: skip
        assert len(calls) == expected


def test_prompts_that_do_not_fit_are_dropped_with_their_images(policies, rows, capsys):
    processor = images.load_processor(policies["vlm"])

    def load(**options):
        cfg = poster_grpo.Config(train_data=rows, **options)
        return poster_grpo.load_examples(cfg, rows, "train", processor.tokenizer, processor)

    everything = load()
    assert len(everything) == 12 and not capsys.readouterr().out
    counts = [example.prompt_ids.count(processor.image_token_id) for example in everything]
    assert counts[:3] == [counts[0], 2 * counts[0], 0] and counts[0] >= 4
    assert [example.index % 3 for example in load(max_images=1)] == [0, 2] * 4
    assert "dropped 4 of 12 prompts: too long, or too many images" in capsys.readouterr().out
    limit = sorted(len(example.prompt_ids) for example in everything)[5]
    assert max(len(example.prompt_ids) for example in load(max_prompt_tokens=limit)) == limit
    with pytest.raises(ValueError, match=r"no prompt of .* fits; the shortest has \d+ tokens"):
        load(max_prompt_tokens=5)


def test_settings_that_cannot_be_are_refused():
    for options, said in ((dict(group_size=1), "group_size = 1"),
                          (dict(coord_space="cm"), "coord_space = 'cm': must be one of")):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            poster_grpo.Config(**options)


@pytest.mark.poster
def test_after_an_outage_the_rollout_with_images_is_scored_first(run):
    port = free_port()
    options = dict(steps=3, reward_url=f"http://127.0.0.1:{port}", reward_patience=1.0, save_every=100, eval_every=0,
                   freeze_vision=False, rewards=None)  # fmt: skip
    service = Fake(port)
    straight = run("straight", "vlm", **options).succeeded()
    first = service.items[0]
    assert json.loads(first["ground_truth"])["layers"] and first["extra_info"]["level"] == 0
    assert all(name.startswith("synthetic:0:") for item in service.items for name in item["extra_info"]["images"])
    service.delay = 0.5
    broken = run("run", "vlm", start=True, **options)
    broken.wait_for(lambda: len(broken.steps) >= 1)
    service.stop()
    service.reply = lambda items, number: 503
    assert broken.wait().codes == [OUTAGE_EXIT_CODE], broken.output
    service = Fake(port)
    again = run("run", "vlm", **options).succeeded()
    service.stop()
    assert "were not scored: they come first" in again.output
    images.load_processor(again.out_dir / again.checkpoints[-1])  # saved with the policy
    assert comparable(again.steps) == comparable(straight.steps)
    assert_equal_weights(again.weights(), straight.weights())


@pytest.mark.tools
def test_a_model_of_a_real_shape_for_measuring(tmp_path):
    output = str(tmp_path / "tiny")
    random_vlm.main(random_vlm.Config(shape="tiny", output=output, dtype="fp32"))
    _, model = models.load_policy(output, torch.device("cpu"), "fp32")
    assert images.is_vlm(model.config) and images.load_processor(output).tokenizer.pad_token
    with pytest.raises(ValueError, match="is there already"):
        random_vlm.Config(output=output)
