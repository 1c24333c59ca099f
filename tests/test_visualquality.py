"""VisualQuality-R1 as a scorer: what a tiny model without training says, and what is made of what one would say."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from bounds import assert_rounded
from conftest import ROOT, tiny_model
from PIL import Image, ImageColor
from safetensors.torch import load_file, save_file
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

sys.path.insert(0, str(ROOT / "scripts"))
import render_poster

from grpo.poster import scorers, synthetic, toys, visualquality
from grpo.poster.scorers import ScorerError
from grpo.poster.visualquality import VisualQuality, parse

# as those of the Qwen-VL families
TEMPLATE = toys.CHAT_TEMPLATE.replace(
    "<|vision_start|>", "{% if add_vision_id %}Picture 1: {% endif %}<|vision_start|>"
)
AREA = 56 * 84  # max_pixels of the tests: 6 visual tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model whose weights are large enough for what it says to depend on the picture; saved as a hub folder is."""
    folder, tokenizer = tmp_path_factory.mktemp("judge"), toys.build_tokenizer()
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    model = toys.build_qwen_vl(tokenizer)
    for p in model.parameters():
        if p.ndim > 1:
            p.data *= 5
    model.generation_config.repetition_penalty = 5.0  # as some checkpoints have, smaller: it must not reach the scorer
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    Qwen2VLImageProcessorPil(size={"shortest_edge": 56 * 56, "longest_edge": 12_845_056}).save_pretrained(folder)
    return folder


def judge(folder: Path, **options) -> VisualQuality:
    options = dict(model=str(folder), device="cpu", max_pixels=AREA) | options
    return scorers.load("visualquality_r1", options)


def metas(*cpus: float) -> list[dict]:
    return [{"cpu": cpu, "extra_info": {}, "solution": "{}"} for cpu in cpus]


class Scripted(VisualQuality):
    """The judge, saying what it is told to: by beginning of the answer, a text for each shade of the image's corner."""

    def say(self, said: dict[str, dict[int, str]], room: int = 99) -> "Scripted":
        self.said, self.room, self.calls = said, room, []
        return self

    def generate(self, images, prefill=""):
        self.calls.append((prefill, len(images)))
        if len(images) > self.room:
            raise torch.OutOfMemoryError("stub")
        return [self.said[prefill][image.getpixel((0, 0))[0]] for image in images]


@pytest.fixture
def scripted(folder) -> Scripted:
    return Scripted(model=str(folder), device="cpu", max_pixels=AREA, alpha=1.0)


def shades(*values: int) -> list[Image.Image]:
    return [Image.new("RGB", (84, 56), (value,) * 3) for value in values]


@pytest.mark.parametrize(("text", "rating"), [
    ("<answer>4.25</answer>", 4.25), ("<answer>\n1\n</answer>", 1.0), ("<answer>Score: 5.00/5</answer>", 5.0),
    ("2 <answer>4</answer> or rather <answer>2.5</answer> of 5", 2.5), ("My rating is 3.5.", 3.5),
    ("<answer>4.2", 4.2), ("<think>2 moons</think><answer>4</answer>", 4.0),
    ("good", None), ("<answer></answer> 3", None), ("0.99", None), ("5.01", None), ("<answer>42</answer>", None),
    ("<answer>-3</answer>", None), ("<think>there are 3 moons", None), ("<answer>\uff14</answer>", None),
    ("4" * 5000, None), ("<answer>" * 4000, None),
])  # fmt: skip
def test_parse(text, rating):
    assert parse(text) == rating


def test_the_model_is_asked_the_official_question(folder):
    assert judge(folder).prompt == (
        "<|im_start|>user\nPicture 1: <|vision_start|><|image_pad|><|vision_end|>You are doing the image quality "
        "assessment task. Here is the question: What is your overall rating on the quality of this picture? The rating "
        "should be a float between 1 and 5, rounded to two decimal places, with 1 representing very poor quality and 5 "
        "representing excellent quality. Please only output the final answer with only one score in <answer> </answer> "
        "tags.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_scores_blend_the_rating_with_the_cpu_formula_in_order(scripted):
    scripted.batch_size, infos = 2, metas(0.8, 0.3, 1.0)
    scripted.say({"": {0: "<answer>1.50</answer>", 1: "<answer>4.25</answer>", 2: "<answer>5</answer>"}})
    for alpha in (0.0, 0.25):
        scripted.alpha = alpha
        expected = [(1 - alpha) * cpu + alpha * vq for cpu, vq in ((0.8, 0.5 / 4), (0.3, 3.25 / 4), (1.0, 1.0))]
        assert scripted.score_batch(shades(0, 1, 2), infos) == pytest.approx(expected)
        assert [info["visual_quality"] for info in infos] == [0.5 / 4, 3.25 / 4, 1.0]
    assert scripted.calls == 2 * [("", 2), ("", 1)] and scripted.counters == {"asked": 6}
    assert scripted.name == "visualquality_r1" and scripted.needs_image


def test_answers_are_greedy_and_do_not_depend_on_the_batch(folder, monkeypatch):
    monkeypatch.setattr(visualquality, "MAX_NEW_TOKENS", 6)
    scorer = judge(folder, max_pixels=112 * 168)
    scorer.model.double()  # where no two tokens are so close that rounding decides between them
    sizes = [(84, 56), (112, 160), (300, 60), (56, 56)]
    shown = [synthetic.image(f"synthetic:0:{seed}:1").resize(size) for seed, size in enumerate(sizes)]
    tokens = [int(scorer._inputs([image], "")["attention_mask"].sum()) for image in shown]
    assert len(set(tokens)) == 4  # so all but one are padded
    for prefill in ("", "<answer>"):
        together = scorer.generate(shown, prefill)
        assert together == [scorer.generate([image], prefill)[0] for image in shown] and len(set(together)) > 1
    monkeypatch.setattr(visualquality, "DIGIT_MASS", 0.0)
    alone = [scorer._expectations([image])[0] for image in shown]  # softmax is fp32, of ratings up to 5
    terms = len(scorer.tokenizer) + 8
    assert_rounded(scorer._expectations(shown), alone, terms=terms, magnitude=5, dtype=torch.float32)
    # by hand, one token after the other
    inputs = scorer._inputs(shown[:1], "")
    text, ids = inputs.pop("input_ids"), []
    while len(ids) < visualquality.MAX_NEW_TOKENS and scorer.tokenizer.eos_token_id not in ids:
        inputs["attention_mask"] = torch.ones_like(text)
        inputs["mm_token_type_ids"] = (text == scorer.model.config.image_token_id).int()
        with torch.no_grad():
            ids.append(int(scorer.model(input_ids=text, **inputs).logits[0, -1].argmax()))
        text = torch.cat([text, torch.tensor([ids[-1:]])], 1)
    assert scorer.tokenizer.decode(ids, skip_special_tokens=True) == scorer.generate(shown[:1])[0]


def test_large_images_are_made_smaller(folder):
    official, large = 602112, (1024, 1536)  # of which 616 x 924 pixels are seen
    for pixels, size, expected in ((official, large, 22 * 33), (official, (280, 384), 10 * 14), (AREA, large, 2 * 3)):
        scorer = judge(folder, max_pixels=pixels)
        tokens = scorer._inputs([Image.new("RGB", size)], "")["input_ids"]
        assert int((tokens == scorer.model.config.image_token_id).sum()) == expected


def test_an_answer_without_a_rating_is_asked_for_once_more(scripted):
    scripted.say({"": {0: "It is nice", 1: "<answer>3</answer>", 2: "<answer>9</answer>", 3: ""},
                  "<answer>": {0: "2.00</answer>", 2: "really 9</answer>", 3: "4"}})  # fmt: skip
    infos = metas(0.5, 0.5, 0.5, 0.5)
    first, second, error, last = scripted.score_batch(shades(0, 1, 2, 3), infos)
    assert scripted.calls == [("", 4), ("<answer>", 3)] and (first, second, last) == (0.25, 0.5, 0.75)
    assert (error.code, error.retryable) == ("scorer_unparsable", False) and "really 9" in str(error)
    assert ["visual_quality" in info for info in infos] == [True, True, False, True]
    assert scripted.counters == {"asked": 4, "retried": 3, "unparsable": 1}


def test_images_that_cannot_be_shown_are_not(scripted):
    scripted.say({"": {0: "<answer>5</answer>"}})
    missing, good, thin = scripted.score_batch([None, *shades(0), Image.new("RGB", (402, 2))], metas(0.0, 0.0, 0.0))
    assert good == 1.0 and scripted.calls == [("", 1)]
    assert [(error.code, error.retryable) for error in (missing, thin)] == [("scorer_bad_image", False)] * 2
    with pytest.raises(ValueError, match="1 images, 2 metas"):
        scripted.score_batch(shades(0), metas(0.0, 0.0))


def test_a_batch_without_memory_is_halved_once(scripted):
    for room, scored in ((3, 5), (2, 2), (1, 0)):
        asked = scripted.counters["asked"]
        scripted.say({"": {0: "<answer>5</answer>"}}, room)
        scores = scripted.score_batch(shades(*[0] * 5), metas(*[0.0] * 5))
        assert [count for _, count in scripted.calls] == [5, 3, 2]
        errors = [score for score in scores if isinstance(score, ScorerError)]
        assert len(scores) - len(errors) == scored == scripted.counters["asked"] - asked
        assert all((error.code, error.retryable) == ("scorer_out_of_memory", True) for error in errors)
    scripted.room = 9  # the next batch is not held up
    assert scripted.score_batch(shades(0), metas(0.0)) == [1.0]


def test_expected_mode_is_the_mean_digit(folder, monkeypatch):
    scorer, shown = judge(folder, expected=True, alpha=1.0), [synthetic.image("synthetic:0:0:1").resize((84, 56))]
    scorer.model.double()
    # by hand, without the scorer's batch: one picture, every logit of its last position
    inputs = scorer.processor(images=shown, text=[scorer.prompt + "<answer>"], return_tensors="pt")
    with torch.no_grad():
        probs = scorer.model(**inputs).logits[0, -1].softmax(-1)
    weights = [float(probs[scorer.tokenizer.convert_tokens_to_ids(digit)]) for digit in "12345"]
    mean = sum(digit * weight for digit, weight in zip(range(1, 6), weights, strict=True)) / sum(weights)
    monkeypatch.setattr(visualquality, "DIGIT_MASS", 0.999 * sum(weights))
    (score,) = scorer.score_batch(shown, metas(0.0))
    assert_rounded(score, (mean - 1) / 4, terms=len(probs) + 8, magnitude=5 / 4, dtype=torch.float32)
    monkeypatch.setattr(visualquality, "DIGIT_MASS", 1.001 * sum(weights))
    infos = metas(0.0)
    (error,) = scorer.score_batch(shown, infos)
    assert (error.code, error.retryable, scorer.counters["unparsable"]) == ("scorer_unparsable", False, 1)
    assert "visual_quality" not in infos[0]


def test_identity_names_what_scores_depend_on(folder, tmp_path):
    same = judge(folder).identity
    assert judge(folder, batch_size=3).identity == same
    for change in (dict(alpha=0.4), dict(expected=True), dict(max_pixels=2 * AREA), dict(dtype="bf16")):
        assert judge(folder, **change).identity != same, change
    other = shutil.copytree(folder, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    next(iter(weights.values())).view(-1)[0] += 1
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    assert json.loads(judge(other).identity)["weights"] != json.loads(same)["weights"]


def test_what_cannot_be_loaded_is_refused(folder, tmp_path):
    tiny_model("qwen2").save_pretrained(tmp_path / "text")
    cut = shutil.copytree(folder, tmp_path / "cut")
    weights = {name: x for name, x in load_file(cut / "model.safetensors").items() if "mlp" not in name}
    save_file(weights, cut / "model.safetensors", {"format": "pt"})
    for options, said in [
        (dict(alpha=1.5), "alpha = 1.5"), (dict(batch_size=0), "batch_size = 0"), (dict(dtype="int8"), "int8"),
        (dict(max_pixels=100), "max_pixels = 100"), (dict(model=str(tmp_path / "none")), "no such folder"),
        (dict(model=str(tmp_path / "text")), "'qwen2': must be 'qwen2_5_vl'"),
        (dict(model=str(cut)), "all weights must be there"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=said):
            judge(folder, **options)


@pytest.mark.tools
def test_render_poster_draws_a_sheet_of_records_samples_and_tricks_or_refuses(tmp_path, capsys):
    records = [synthetic.record(seed, 0) for seed in range(4)]
    files = [tmp_path / name for name in ("rows.jsonl", "samples.jsonl", "poster.json", "cut.txt")]
    samples = [{"step": 0, "answer": records[1]["id"]}, {"step": 1, "ground_truth": records[1]["ground_truth"]},
               {"step": 2, "answer": json.dumps(records[2]["ground_truth"])}]  # fmt: skip
    samples = [sample | {"completion": synthetic.gold(records[1]), "note": "a\u2028b"} for sample in samples]
    for file, lines in zip(files, (records[:3], samples, [records[0]["ground_truth"]]), strict=False):
        file.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    files[3].write_text(synthetic.gold(records[3])[:-1])
    out = tmp_path / "deep" / "sheet.png"
    tricks = f"trick:no_text_layers:0:3,solution:{files[3]}:0:3"
    render_poster.main(["gold:0:3", tricks, *map(str, files[:3]), "--rows", "2", "--columns", "2", "--out", str(out)])
    *said, written = capsys.readouterr().out.splitlines()
    scores = {line.partition(": score ")[0]: float(line.partition(": score ")[2].split()[0]) for line in said}
    good = ("gold 0:3", "synthetic-0-0", "synthetic-0-1", "step 1", "poster.json")
    assert list(scores) == [good[0], "no_text_layers", "cut.txt", *good[1:4], "step 2", good[4]]
    assert min(scores[name] for name in good) > 0.98 and written == f"{out} written"
    assert scores["no_text_layers"] < 0.4 and scores["cut.txt"] == 0 and scores["step 2"] < 0.8  # another's poster
    assert "accuracy 0.00" in said[1] and "malformed: " in said[2]
    page, gap = Image.open(out), render_poster.GAP
    width, height = render_poster.LEAST_WIDTH + gap, 480 + 4 * render_poster.LINE + gap // 2 + gap
    assert page.size == (gap + 2 * width, gap + 4 * height)
    corners = [page.getpixel((gap + 4 + x, gap + 4 + y)) for x, y in ((0, 0), (width, 0), (0, height))]
    background = records[3]["ground_truth"]["canvas"]["background"]
    assert corners == [ImageColor.getrgb(color) for color in (background, background, render_poster.HOLE)]
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"completion": "{}", "reward": 0}\n')
    for what, message in (
        ("gold:x:1", "must end in :LEVEL:SEED"), ("gold:7:1", "levels 0, 1 and 2"), ("poster.png", "must be gold:"),
        ("trick:none:0:1", "trick 'none': must be one of"), (bad, "must have `completion`"), (",", "nothing to draw"),
    ):  # fmt: skip
        with pytest.raises(SystemExit, match="2"):
            render_poster.main([str(what), "--out", str(tmp_path / "x.png")])
        assert message in capsys.readouterr().err and not (tmp_path / "x.png").exists()
