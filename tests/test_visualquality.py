"""VisualQuality-R1 as a scorer, with a tiny model that rates dark pictures 1.50 and bright ones 4.25."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, tiny_model
from PIL import Image, ImageColor, ImageDraw
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as token_models
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

sys.path.insert(0, str(ROOT / "scripts"))
import render_poster

from common import images
from grpo.poster import layout, reward, scorers, synthetic, visualquality
from grpo.poster.render import Fonts
from grpo.poster.scorers import ScorerError
from grpo.poster.visualquality import INSTRUCTION, QUESTION, VisualQuality, parse

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
            "<|video_pad|>"]  # fmt: skip
TEMPLATE = (
    "{% set count = namespace(value=0) %}{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}{% set count.value = count.value + 1 %}"
    "{% if add_vision_id %}Picture {{ count.value }}: {% endif %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ c['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
AREA = 56 * 84  # max_pixels of the tests: 6 visual tokens
REAL = {1: "dark", 9: "bright"}  # seeds of level 1, posters with a photograph
RATINGS = {"dark": "1.50", "bright": "4.25"}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Byte BPE of the question's words; digits stay single, as in Qwen's."""
    tokenizer = Tokenizer(token_models.BPE())
    digits, pieces = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Sequence([digits, pieces]), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIALS, initial_alphabet=alphabet, min_frequency=1)
    tokenizer.train_from_iterator([f"{QUESTION} {INSTRUCTION}"], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", padding_side="left",
        chat_template=TEMPLATE, additional_special_tokens=SPECIALS[1:],
    )  # fmt: skip


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLForConditionalGeneration:
    torch.manual_seed(0)
    ids = dict(zip(SPECIALS, tokenizer.convert_tokens_to_ids(SPECIALS), strict=True))
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    text = dict(vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048, rope_parameters=rope,
                tie_word_embeddings=True, eos_token_id=ids["<|im_end|>"], pad_token_id=ids["<|endoftext|>"],
                bos_token_id=None)  # fmt: skip
    vision = dict(depth=2, hidden_size=32, intermediate_size=64, num_heads=2, patch_size=14, spatial_merge_size=2,
                  temporal_patch_size=2, window_size=56, out_hidden_size=64, fullatt_block_indexes=[1])  # fmt: skip
    config = Qwen2_5_VLConfig(
        tie_word_embeddings=True, image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"], text_config=text,
        vision_config=vision,
    )  # fmt: skip
    return Qwen2_5_VLForConditionalGeneration(config)


def picture(seed: int, fonts: Fonts) -> Image.Image:
    """What the reward shows to a judge of the good poster of a synthetic record."""
    record = synthetic.record(seed, 1)
    truth, shown = layout.ground_truth(record["ground_truth"]), record["images"]
    images = {f"image_{k}": synthetic.image(reference) for k, reference in enumerate(shown, 1)}
    return reward.assess(synthetic.gold(record), truth, fonts=fonts, images=images, with_image=True).image


def poster(kind: str, size: tuple[int, int] = (84, 56), shade: int = 0) -> Image.Image:
    """A headline over a block, in light or dark colours."""
    ground, ink = {"dark": (20 + shade, 90), "bright": (235 - shade, 160)}[kind]
    image = Image.new("RGB", size, (ground,) * 3)
    draw = ImageDraw.Draw(image)
    draw.text((size[0] * 0.1, size[1] * 0.1), "Night Market", fill=(ink,) * 3)
    draw.rectangle((size[0] * 0.2, size[1] * 0.6, size[0] * 0.8, size[1] * 0.9), fill=(ink,) * 3)
    return image


@pytest.fixture(scope="session")
def judge_folder(tmp_path_factory) -> Path:
    """The judge, after some steps on what it is to answer; saved as a hub folder is."""
    folder = tmp_path_factory.mktemp("judge")
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    Qwen2VLImageProcessorPil(size={"shortest_edge": 56 * 56, "longest_edge": 12_845_056}).save_pretrained(folder)
    processor = images.load_processor(str(folder), max_pixels=AREA)
    content = [{"type": "image"}, {"type": "text", "text": f"{QUESTION} {INSTRUCTION}"}]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True, add_vision_id=True
    )
    shown, texts = [], []
    for kind, rating in RATINGS.items():
        for shade in (0, 15):
            shown.append(poster(kind, shade=shade))
            texts.append(f"{prompt}<answer>{rating}</answer><|im_end|>")
    for seed, kind in REAL.items():
        shown.append(picture(seed, Fonts()))
        texts.append(f"{prompt}<answer>{RATINGS[kind]}</answer><|im_end|>")
    batch = processor(images=shown, text=texts, padding=True, return_tensors="pt")
    answer = len(tokenizer.encode(f"<answer>{RATINGS['dark']}</answer><|im_end|>", add_special_tokens=False))
    labels = batch["input_ids"].clone()
    labels[:, :-answer] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loss = torch.tensor(9.0)
    for _ in range(300):
        loss = model(**batch, labels=labels).loss
        if loss < 0.01:
            break
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert loss < 0.02
    model.generation_config.repetition_penalty = 5.0  # as some checkpoints have, smaller: it must not reach the scorer
    model.save_pretrained(folder)
    return folder


def judge(folder: Path, **options) -> VisualQuality:
    return VisualQuality(**{**dict(model=str(folder), device="cpu", max_pixels=AREA), **options})


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


def shades(*values: int) -> list[Image.Image]:
    return [Image.new("RGB", (84, 56), (value,) * 3) for value in values]


@pytest.fixture
def scripted(judge_folder) -> Scripted:
    return Scripted(model=str(judge_folder), device="cpu", max_pixels=AREA, alpha=1.0)


@pytest.mark.parametrize(("text", "rating"), [
    ("<answer>4.25</answer>", 4.25), ("<answer> 3 </answer>", 3.0), ("<answer>\n1\n</answer>", 1.0),
    ("2 <answer>4</answer> or rather <answer>2.5</answer> of 5", 2.5), ("<answer>Score: 5.00/5</answer>", 5.0),
    ("4.10", 4.1), ("My rating is 3.5.", 3.5), ("<answer>4.2", 4.2), ("<think>2 moons</think><answer>4</answer>", 4.0),
    ("", None), ("good", None), ("<answer></answer> 3", None), ("<answer>good</answer> 3", None), ("0.99", None),
    ("5.01", None), ("<answer>42</answer>", None), ("<answer>-3</answer>", None), ("<think>there are 3 moons", None),
    ("<answer>\uff14</answer>", None), ("4" * 5000, None), ("<answer>" * 4000, None),
])  # fmt: skip
def test_parse(text, rating):
    assert parse(text) == rating


def test_the_model_is_asked_the_official_question(judge_folder):
    assert judge(judge_folder).prompt == (
        "<|im_start|>user\nPicture 1: <|vision_start|><|image_pad|><|vision_end|>You are doing the image quality "
        "assessment task. Here is the question: What is your overall rating on the quality of this picture? The rating "
        "should be a float between 1 and 5, rounded to two decimal places, with 1 representing very poor quality and 5 "
        "representing excellent quality. Please only output the final answer with only one score in <answer> </answer> "
        "tags.<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_scores_blend_the_rating_with_the_cpu_formula(judge_folder, alpha):
    scorer, infos = judge(judge_folder, alpha=alpha), metas(0.8, 0.3, 1.0)
    scores = scorer.score_batch([poster("dark"), poster("bright"), poster("dark", shade=7)], infos)
    dark, bright = 0.5 / 4, 3.25 / 4  # of 1.50 and 4.25
    assert [info["visual_quality"] for info in infos] == pytest.approx([dark, bright, dark])
    expected = [(1 - alpha) * cpu + alpha * vq for cpu, vq in ((0.8, dark), (0.3, bright), (1.0, dark))]
    assert scores == pytest.approx(expected)
    assert scorer.counters == {"asked": 3}
    assert scorer.name == "visualquality_r1" and scorer.needs_image


def test_posters_are_scored_end_to_end(judge_folder):
    fonts, pairs = Fonts(), []
    for seed, change in ((9, str), (1, str), (9, lambda text: text[:-1])):  # the last is cut off
        record = synthetic.record(seed, 1)
        images = {"image_1": synthetic.image(record["images"][0])}
        pairs.append((change(synthetic.gold(record)), layout.ground_truth(record["ground_truth"]), images))
    parts = [reward.assess(text, truth, fonts=fonts, images=shown, with_image=True) for text, truth, shown in pairs]
    assert [part.parse_ok for part in parts] == [True, True, False]
    scorer = scorers.load("visualquality_r1", dict(model=str(judge_folder), device="cpu", max_pixels=AREA, alpha=0.25))
    bright, dark, cut = scorer.score_batch([part.image for part in parts], metas(*[part.cpu_visual for part in parts]))
    assert isinstance(cut, ScorerError)  # a caller that forgets to leave it out hears of it
    for part, visual, rating in zip(parts, (bright, dark), (4.25, 1.5), strict=False):
        assert visual == pytest.approx(0.75 * part.cpu_visual + 0.25 * (rating - 1) / 4)
        assert reward.result(part, visual)["score"] == pytest.approx(0.8 + 0.2 * visual)  # all else of a gold one is 1


def test_answers_do_not_depend_on_the_batch(judge_folder, monkeypatch):
    shown = [poster("dark"), poster("bright", (112, 160)), poster("dark", (300, 60)), poster("bright", (56, 56), 9)]
    scorer = judge(judge_folder, max_pixels=112 * 168)
    tokens = [int(scorer._inputs([image], "")["attention_mask"].sum()) for image in shown]
    assert len(set(tokens)) == 4  # so all but one are padded
    for prefill in ("", "<answer>"):
        together = scorer.generate(shown, prefill)
        assert together == [scorer.generate([image], prefill)[0] for image in shown]
        assert scorer.generate(shown[::-1], prefill) == together[::-1]
    monkeypatch.setattr(visualquality, "DIGIT_MASS", 0.0)  # sizes that it did not learn are no reason to refuse
    alone = [scorer._expectations([image])[0] for image in shown]
    assert scorer._expectations(shown) == pytest.approx(alone, abs=1e-4)


def test_sub_batches_keep_the_order(scripted):
    scripted.batch_size = 2
    scripted.say({"": {10 * rating: f"<answer>{rating}</answer>" for rating in range(1, 6)}})
    assert scripted.score_batch(shades(50, 10, 30, 40, 20), metas(*[0.0] * 5)) == [1.0, 0.0, 0.5, 0.75, 0.25]
    assert scripted.calls == [("", 2), ("", 2), ("", 1)]


def test_large_images_are_made_smaller(judge_folder):
    def visual_tokens(scorer: VisualQuality, size: tuple[int, int]) -> int:
        return int((scorer._inputs([Image.new("RGB", size)], "")["input_ids"] == pad).sum())

    pad = build_tokenizer().convert_tokens_to_ids("<|image_pad|>")
    official = judge(judge_folder, max_pixels=602112)
    assert visual_tokens(official, (1024, 1536)) == 22 * 33  # 616 x 924 pixels
    assert visual_tokens(official, (280, 384)) == 10 * 14  # as it is, but for rounding
    assert visual_tokens(judge(judge_folder), (1024, 1536)) <= AREA // 28**2


def test_an_answer_without_a_rating_is_asked_for_once_more(scripted):
    scripted.say({"": {0: "It is nice", 1: "<answer>3</answer>", 2: "<answer>9</answer>", 3: ""},
                  "<answer>": {0: "2.00</answer>", 2: "really 9</answer>", 3: "4"}})  # fmt: skip
    infos = metas(0.5, 0.5, 0.5, 0.5)
    scores = scripted.score_batch(shades(0, 1, 2, 3), infos)
    assert scripted.calls == [("", 4), ("<answer>", 3)]
    assert (scores[0], scores[1], scores[3]) == (0.25, 0.5, 0.75)
    assert isinstance(scores[2], ScorerError)
    assert (scores[2].code, scores[2].retryable) == ("scorer_unparsable", False)
    assert "really 9" in str(scores[2])
    assert ["visual_quality" in info for info in infos] == [True, True, False, True]
    assert scripted.counters == {"asked": 4, "retried": 3, "unparsable": 1}


def test_images_that_cannot_be_shown_are_not(scripted):
    scripted.say({"": {0: "<answer>5</answer>"}})
    missing, good, thin = scripted.score_batch([None, *shades(0), Image.new("RGB", (402, 2))], metas(0.0, 0.0, 0.0))
    assert good == 1.0 and scripted.calls == [("", 1)]
    assert [(error.code, error.retryable) for error in (missing, thin)] == [("scorer_bad_image", False)] * 2
    assert scripted.score_batch([None], metas(0.0))[0].code == "scorer_bad_image"
    assert scripted.score_batch([], []) == []
    with pytest.raises(ValueError, match="1 images, 2 metas"):
        scripted.score_batch(shades(0), metas(0.0, 0.0))


@pytest.mark.parametrize(("room", "calls", "scored"), [
    (3, [5, 3, 2], 5), (2, [5, 3, 2], 2), (1, [5, 3, 2], 0)
])  # fmt: skip
def test_a_batch_without_memory_is_halved_once(scripted, room, calls, scored):
    scripted.say({"": {0: "<answer>5</answer>"}}, room)
    scores = scripted.score_batch(shades(*[0] * 5), metas(*[0.0] * 5))
    assert [count for _, count in scripted.calls] == calls
    errors = [score for score in scores if isinstance(score, ScorerError)]
    assert len(scores) - len(errors) == scored == scripted.counters["asked"]
    assert all((error.code, error.retryable) == ("scorer_out_of_memory", True) for error in errors)
    scripted.room = 9  # the next batch is not held up
    assert scripted.score_batch(shades(0), metas(0.0)) == [1.0]


def test_expected_mode_is_the_mean_digit(judge_folder, monkeypatch):
    scorer, shown = judge(judge_folder, expected=True, alpha=1.0), [poster("dark"), poster("bright")]
    (dark, bright), infos = scorer.score_batch(shown, metas(0.0, 0.0)), metas(0.0)
    # by hand, without the scorer's batch: one picture, every logit of its last position
    inputs = scorer.processor(images=shown[:1], text=[scorer.prompt + "<answer>"], return_tensors="pt")
    with torch.no_grad():
        probs = scorer.model(**inputs).logits[0, -1].double().softmax(-1)
    weights = [float(probs[scorer.tokenizer.convert_tokens_to_ids(digit)]) for digit in "12345"]
    mean = sum(digit * weight for digit, weight in zip(range(1, 6), weights, strict=True)) / sum(weights)
    assert dark == pytest.approx((mean - 1) / 4, abs=1e-6)
    assert dark < 0.1 and 0.65 < bright < 0.85  # it learned 1.50 and 4.25, whose first digits are 1 and 4
    monkeypatch.setattr(visualquality, "DIGIT_MASS", sum(weights) + 1e-6)
    (error,) = scorer.score_batch(shown[:1], infos)
    assert (error.code, error.retryable, scorer.counters["unparsable"]) == ("scorer_unparsable", False, 1)
    assert "visual_quality" not in infos[0]


def test_identity_names_what_scores_depend_on(judge_folder, tmp_path):
    same = judge(judge_folder).identity
    assert judge(judge_folder, batch_size=3).identity == same
    for change in (dict(alpha=0.4), dict(expected=True), dict(max_pixels=2 * AREA), dict(dtype="bf16")):
        assert judge(judge_folder, **change).identity != same, change
    other = shutil.copytree(judge_folder, tmp_path / "other")
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(other)
    with torch.no_grad():
        model.get_input_embeddings().weight[0, 0] += 1
    model.save_pretrained(other)
    weights = [json.loads(judge(folder).identity)["weights"] for folder in (judge_folder, other)]
    assert weights[0] != weights[1]


def test_what_cannot_be_loaded_is_refused(judge_folder, tmp_path):
    for options, said in [
        (dict(alpha=1.5), "alpha = 1.5"), (dict(batch_size=0), "batch_size = 0"), (dict(dtype="int8"), "int8"),
        (dict(max_pixels=100), "max_pixels = 100"), (dict(model=str(tmp_path / "none")), "no such folder"),
        (dict(model=str(tmp_path)), "has the type None: must be 'qwen2_5_vl'"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=said):
            judge(judge_folder, **options)
    tiny_model("qwen2").save_pretrained(tmp_path / "text")
    with pytest.raises(ValueError, match="has the type 'qwen2': must be 'qwen2_5_vl'"):
        judge(tmp_path / "text")
    cut = shutil.copytree(judge_folder, tmp_path / "cut")
    weights = load_file(cut / "model.safetensors")
    save_file(
        {name: x for name, x in weights.items() if "mlp" not in name}, cut / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(ValueError, match="all weights must be there"):
        judge(cut)


# ---- scripts/render_poster.py ----


def test_render_poster_draws_a_sheet(tmp_path, capsys):
    record, cut, out = synthetic.record(3, 0), tmp_path / "cut.txt", tmp_path / "deep" / "sheet.png"
    cut.write_text(synthetic.gold(record)[:-1])
    others = f"trick:no_text_layers:0:3,solution:{cut}:0:3"
    render_poster.main(["gold:0:3", others, "--columns", "2", "--out", str(out)])
    gold, bare, malformed, written = capsys.readouterr().out.splitlines()
    numbers = reward.score(synthetic.gold(record), record["ground_truth"])
    assert gold.startswith(f"gold 0:3: score {numbers['score']:.3f}  structure {numbers['structure']:.2f}  accuracy 1")
    assert bare.startswith("no_text_layers: score 0.") and "accuracy 0.00" in bare
    assert malformed.startswith("cut.txt: score 0.000  malformed: ")
    assert written == f"{out} written"
    page, gap = Image.open(out), render_poster.GAP
    width, height = render_poster.LEAST_WIDTH + gap, 480 + 4 * render_poster.LINE + gap // 2 + gap
    assert page.size == (gap + 2 * width, gap + 2 * height)
    background = ImageColor.getrgb(record["ground_truth"]["canvas"]["background"])
    corners = [page.getpixel((gap + 4 + x, gap + 4 + y)) for x, y in ((0, 0), (width, 0), (0, height), (width, height))]
    assert corners == [background, background, *map(ImageColor.getrgb, (render_poster.HOLE, render_poster.PAPER))]


def test_render_poster_reads_records_and_samples(tmp_path, capsys):
    records = [synthetic.record(seed, 0) for seed in range(3)]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(record) + "\n" for record in records))
    samples = tmp_path / "samples.jsonl"
    answers = [{"answer": records[1]["id"]}, {"ground_truth": records[1]["ground_truth"]},
               {"answer": json.dumps(records[2]["ground_truth"])}]  # fmt: skip
    samples.write_text("".join(
        json.dumps({"step": step, "completion": synthetic.gold(records[1])} | answer) + "\n"
        for step, answer in enumerate(answers)
    ))  # fmt: skip
    single = tmp_path / "poster.json"
    single.write_text(json.dumps(records[0]["ground_truth"]))
    out = ["--out", str(tmp_path / "x.png"), "--long_side", "168"]
    render_poster.main([str(rows), str(samples), str(single), "--rows", "2", *out])
    said = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert [line.rpartition(": ")[0] for line in said[:5]] == [
        "synthetic-0-0", "synthetic-0-1", "step 1", "step 2", "poster.json"]  # fmt: skip
    scores = [float(line.rpartition(" ")[2]) for line in said[:5]]
    assert min(scores[:3] + scores[4:]) > 0.98 > 0.8 > scores[3]  # another poster than was asked for


@pytest.mark.parametrize(("what", "message"), [
    ("gold:1", "must be gold:"), ("gold:x:1", "must end in :LEVEL:SEED"), ("gold:7:1", "levels 0, 1 and 2"),
    ("trick:nothing:0:1", "trick 'nothing': must be one of gold"), ("solution:/none:0:1", "No such file"),
    ("poster.png", "must be gold:"), ("/none.json", "No such file"), ("BAD", "must have `completion`"),
    (",", "nothing to draw"),
])  # fmt: skip
def test_render_poster_refuses(tmp_path, capsys, what, message):
    if what == "BAD":
        what = tmp_path / "bad.jsonl"
        what.write_text('{"completion": "{}", "reward": 0}\n')
    with pytest.raises(SystemExit, match="2"):
        render_poster.main([str(what), "--out", str(tmp_path / "x.png")])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x.png").exists()
