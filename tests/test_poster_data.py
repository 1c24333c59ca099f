"""Poster records: the synthetic ones, those of a file, and what the converters make of other data."""

import base64
import hashlib
import json
import random
import re
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFont

from grpo.poster import assessors, convert, layout, records, reward, synthetic

LEVELS = (0, 1, 2)


def digest(value: bytes | str) -> str:
    return hashlib.sha256(value.encode() if isinstance(value, str) else value).hexdigest()[:16]


def luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    parts = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def inside(inner: dict, outer: dict) -> bool:
    return (outer["x"] <= inner["x"] and inner["x"] + inner["width"] <= outer["x"] + outer["width"]
            and outer["y"] <= inner["y"] and inner["y"] + inner["height"] <= outer["y"] + outer["height"])  # fmt: skip


def apart(one: dict, other: dict) -> bool:
    return (one["x"] + one["width"] <= other["x"] or other["x"] + other["width"] <= one["x"]
            or one["y"] + one["height"] <= other["y"] or other["y"] + other["height"] <= one["y"])  # fmt: skip


# ---- synthetic ----


def test_records_and_images_never_change():
    random.seed(7)  # the global generator has no part in it
    pinned = {0: ("d870baa2595818ab", "b3de904dc5fd129c"), 1: ("1436d5b1e9103fb5", "b9b46fd8ed8732dc"),
              2: ("02c728769e2ea1ae", "c42d5adaffa83117")}  # fmt: skip
    for level, (expected, pixels) in pinned.items():
        rows = [synthetic.record(seed, level, cjk=cjk) for seed in (0, 1, 2, 10199) for cjk in (False, True)]
        references = [ref for seed in range(4) for ref in synthetic.record(seed, level)["images"]]
        assert digest(json.dumps(rows)) == expected
        assert digest(b"".join(synthetic.image(ref).tobytes() for ref in references)) == pixels


@pytest.mark.parametrize("level", LEVELS)
def test_every_good_poster_keeps_the_rules_of_a_good_poster(level):
    fonts = {size: ImageFont.load_default(size=size) for size in range(4, 120)}
    counts = set()
    for seed in range(200):
        row = synthetic.record(seed, level)
        truth = row["ground_truth"]
        layout.ground_truth(truth)
        width, height = truth["canvas"]["width"], truth["canvas"]["height"]
        layers = [layer for layer in truth["layers"] if layer["type"] != "background"]
        counts.add(len(truth["layers"]))
        core = [layer for layer in layers if layer["type"] != "underlay"]
        assert all(apart(a, b) for i, a in enumerate(core) for b in core[:i])
        for layer in core:
            inset = {"x": 0.02 * width, "y": 0.02 * height, "width": 0.96 * width, "height": 0.96 * height}
            assert inside(layer, inset) and layer["width"] * layer["height"] > 0.001 * width * height
            if layer["type"] != "text":
                continue
            size = layer.get("font_size", 0.7 * layer["height"])
            assert size >= 0.016 * height and 1.2 * size <= layer["height"]
            for shown in (384 / max(width, height), 1.0):  # as it is rendered for the reward, and as it is
                drawn = fonts[round(size * shown)].getlength(layer["text"])
                assert drawn <= layer["width"] * shown, (seed, layer["text"])
            under = [other for other in layers if other["type"] == "underlay" and inside(layer, other)]
            below = under[0]["fill"] if under else truth["canvas"]["background"]
            assert contrast(layer["color"], below) >= 4.5
            assert json.dumps(layer["text"])[1:-1] in row["prompt"]
        assert truth["canvas"]["background"] in row["prompt"] and f"Canvas {width}x{height}" in row["prompt"]
        ids = [layer["src"] for layer in layers if "src" in layer]
        assert ids == [f"image_{k + 1}" for k in range(len(row["images"]))] and all(i in row["prompt"] for i in ids)
    assert counts <= {0: {3}, 1: {6, 7}, 2: {10, 11, 12, 13, 14}}[level] and len(counts) == (1, 2, 4)[level]


def test_the_brief_decides_the_layout():
    """Two records that differ in their texts only have the same boxes: coordinates can be learned."""
    for level, texts in ((0, r'"[^"]*"'), (1, r'(?<=px )"[^"]*"')):
        boxes = defaultdict(set)
        for seed in range(2000):
            row = synthetic.record(seed, level)
            layers = row["ground_truth"]["layers"]
            brief = "\n".join(sorted(re.sub(texts, "", row["prompt"]).replace(", ", "\n").splitlines()))
            boxes[brief].add(tuple((r["type"], r["x"], r["y"], r["width"], r["height"]) for r in layers))
        assert all(len(found) == 1 for found in boxes.values())
        assert len(boxes) < 1500  # so that briefs did meet


def test_texts_are_shuffled_and_level_0_is_short():
    orders = set()
    for seed in range(60):
        prompt = synthetic.record(seed, 0)["prompt"]
        assert len(prompt.split()) <= 60 and len(synthetic.gold(synthetic.record(seed, 0))) <= 340
        orders.add(prompt.index("headline") < prompt.index("date"))
    assert orders == {True, False}


def test_a_cjk_line_changes_nothing_else():
    plain, more = synthetic.record(5, 2), synthetic.record(5, 2, cjk=True)
    added = [t for t in (r.get("text", "") for r in more["ground_truth"]["layers"]) if t in synthetic.CJK_LINES]
    assert len(added) == 1 and len(more["ground_truth"]["layers"]) == len(plain["ground_truth"]["layers"]) + 1
    assert more["images"] == plain["images"] and added[0] in more["prompt"]


def test_splits_share_nothing():
    train, test = synthetic.records(0, "train"), synthetic.records(0, "test")
    assert (len(train), len(test)) == (10_000, 200) and not {r["id"] for r in train} & {r["id"] for r in test}
    assert [r["extra_info"]["seed"] for r in synthetic.records(1, "test", 3)] == [10_000, 10_001, 10_002]
    assert {r["extra_info"]["level"] for r in synthetic.records(2, "train", 3)} == {2}


@pytest.mark.parametrize("call, message", [
    (lambda: synthetic.records(1, "dev"), r"split='dev'.*\['test', 'train'\]"),
    (lambda: synthetic.record(-1, 0), "seed -1"),
    (lambda: synthetic.record(0, 3), "level 3"),
    (lambda: synthetic.image("synthetic:0:1:2"), "has 1 images"),
])  # fmt: skip
def test_what_does_not_exist_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("reference", [
    "", "synthetic:1:1", "synthetic:3:1:1", "synthetic:1:01:1", "synthetic:1:-1:1", "synthetic:1:1:0",
    "synthetic:1:1:1 ", "synthetic:1:1:1\n", "synthetic:1:9999999999:1", "synthetic:1:\u0661:1", "/etc/passwd",
])  # fmt: skip
def test_image_references_are_strict(reference):
    for function in (synthetic.image, synthetic.image_size):
        with pytest.raises(ValueError, match="synthetic:LEVEL:SEED:K"):
            function(reference)


def test_images_have_the_shape_of_their_boxes():
    for level in LEVELS:
        for seed in range(6):
            row = synthetic.record(seed, level)
            boxes = {r["src"]: r for r in row["ground_truth"]["layers"] if "src" in r}
            for k, reference in enumerate(row["images"]):
                image, box = synthetic.image(reference), boxes[f"image_{k + 1}"]
                assert image.mode == "RGB" and image.size == synthetic.image_size(reference)
                assert all(side % 28 == 0 and side <= 448 for side in image.size)
                assert abs(image.width / image.height / (box["width"] / box["height"]) - 1) < 0.2
                assert len(image.getcolors(10**6)) > 100  # a picture, not a plain area
    first, second, _ = (synthetic.image(ref).tobytes() for ref in synthetic.record(0, 2)["images"])
    assert first != second


@pytest.mark.parametrize("level", LEVELS)
def test_good_posters_score_almost_one(level):
    scores = []
    for seed in range(60):
        row = synthetic.record(seed, level)
        images = {f"image_{k + 1}": synthetic.image(ref) for k, ref in enumerate(row["images"])}
        scores.append(reward.score(synthetic.gold(row), row["ground_truth"], images=images)["score"])
    assert min(scores) >= 0.98 and sum(scores) / len(scores) >= 0.995


# ---- records of a file ----


@pytest.fixture
def rows(tmp_path) -> Path:
    """A .jsonl with one good record, whose image lies in a folder below."""
    (tmp_path / "data" / "pictures").mkdir(parents=True)
    Image.new("RGB", (40, 20), "#336699").save(tmp_path / "data" / "pictures" / "a.png")
    Image.new("RGB", (8, 8)).save(tmp_path / "outside.png")
    row = synthetic.record(0, 0) | {"images": ["pictures/a.png"]}
    path = tmp_path / "data" / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    return path


def rewrite(path: Path, **changes) -> str:
    row = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in row.items() if value != "absent"}) + "\n")
    return str(path)


def test_reading_a_file(rows):
    (row,) = records.read(str(rows))
    assert row == synthetic.record(0, 0) | {"images": ["pictures/a.png"]}
    folder = records.folder_of(str(rows))
    assert records.open_image("pictures/a.png", folder).getpixel((3, 3)) == (0x33, 0x66, 0x99)
    assert records.image_size("pictures/a.png", folder) == (40, 20)
    assert records.open_image("synthetic:0:4:1", folder) == synthetic.image("synthetic:0:4:1")
    rewrite(rows, id="absent", images="absent", extra_info="absent", ground_truth=json.dumps(row["ground_truth"]))
    assert records.read(str(rows)) == [row | {"id": "0", "images": [], "extra_info": {}}]  # JSON text was read


def test_reading_synthetic_posters():
    assert records.read("synthetic:2", "test")[:2] == synthetic.records(2, "test", 2)
    with pytest.raises(ValueError, match="levels are 0, 1 and 2"):
        records.read("synthetic:5")
    with pytest.raises(FileNotFoundError, match=r"give a .jsonl file or synthetic:0"):
        records.read("synthetik:1")


@pytest.mark.parametrize("changes, message", [
    ({"prompt": " "}, "row 0: `prompt`"),
    ({"prompt": ["x"]}, "row 0: `prompt`"),
    ({"images": "a.png"}, "row 0: `images`"),
    ({"images": [3]}, "row 0: `images`"),
    ({"images": ""}, "row 0: `images`"),
    ({"extra_info": False}, "row 0: `extra_info`"),
    ({"extra_info": [1]}, "row 0: `extra_info`"),
    ({"ground_truth": "absent"}, "row 0: `ground_truth` is missing"),
    ({"ground_truth": {"layers": []}}, "row 0: .*no canvas"),
    ({"ground_truth": {"canvas": {"width": 9, "height": 9}, "layers": []}}, "row 0: ground_truth has 0 layers"),
    ({"ground_truth": {"canvas": {"width": 9, "height": 9}}}, "row 0: ground_truth has None layers"),
    ({"ground_truth": None}, "row 0: `ground_truth` is missing"),
    ({"images": ["pictures/none.png"]}, "row 0: image 'pictures/none.png': must be a file inside"),
    ({"images": ["../outside.png"]}, "row 0: image '../outside.png': must be a file inside"),
    ({"images": ["/etc/hostname"]}, "row 0: image '/etc/hostname': must be a file inside"),
    ({"images": ["a\0b"]}, "row 0: .*must be a file inside"),
    ({"images": ["rows.jsonl"]}, "row 0: image 'rows.jsonl': cannot be read as PNG"),
    ({"images": ["synthetic:0:1:3"]}, "row 0: .*has 1 images"),
])  # fmt: skip
def test_a_bad_row_is_an_error_that_names_it(rows, changes, message):
    with pytest.raises(ValueError, match=message):
        records.read(rewrite(rows, **changes))


def test_a_link_out_of_the_folder_is_refused(rows):
    (rows.parent / "link.png").symlink_to(rows.parent.parent / "outside.png")
    with pytest.raises(ValueError, match="must be a file inside"):
        records.open_image("link.png", rows.parent)


def test_large_and_broken_images_are_refused(rows, monkeypatch):
    picture = rows.parent / "pictures" / "a.png"
    monkeypatch.setattr(records, "MAX_PIXELS", 799)
    with pytest.raises(ValueError, match="over 799 pixels"):
        records.open_image("pictures/a.png", rows.parent)
    monkeypatch.setattr(records, "MAX_PIXELS", 800)
    records.open_image("pictures/a.png", rows.parent)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 300)  # 800 is over twice that: Pillow raises by itself
    with pytest.raises(ValueError, match="decompression bomb"):
        records.open_image("pictures/a.png", rows.parent)
    monkeypatch.undo()
    monkeypatch.setattr(records, "MAX_BYTES", 10)
    with pytest.raises(ValueError, match="at most 10"):
        records.open_image("pictures/a.png", rows.parent)
    monkeypatch.undo()
    picture.write_bytes(picture.read_bytes()[:60])
    with pytest.raises(ValueError, match="cannot be read"):
        records.open_image("pictures/a.png", rows.parent)
    Image.new("RGB", (8, 8)).save(rows.parent / "x.gif")
    with pytest.raises(ValueError, match="cannot be read as PNG, JPEG, WEBP"):
        records.open_image("x.gif", rows.parent)


def test_pictures_are_upright_and_of_8_bits_and_their_size_is_known_before(rows):
    def stored(image: Image.Image, name: str, **options) -> Image.Image:
        image.save(rows.parent / name, **options)
        opened = records.open_image(name, rows.parent)
        assert opened.mode == "RGB" and opened.size == records.image_size(name, rows.parent)
        content = base64.b64encode((rows.parent / name).read_bytes()).decode()
        if not name.endswith(".webp"):
            assert assessors.image(content, "").tobytes() == opened.tobytes()  # the service sees the same
        return opened

    turned = Image.Exif()
    turned[0x0112] = 6  # to be turned to the right by a quarter
    halves = Image.new("RGB", (40, 20), "white")
    halves.paste("black", (0, 0, 20, 20))
    for name in ("turned.jpg", "turned.webp"):
        upright = stored(halves, name, exif=turned, quality=100)
        assert upright.size == (20, 40) and upright.getpixel((10, 5))[0] < 20 and upright.getpixel((10, 35))[0] > 235
    deep = Image.fromarray(np.arange(0, 65536, 1024, dtype=np.uint16).reshape(8, 8))
    assert [stored(deep, "deep.png").getpixel((x, 0)) for x in range(4)] == [(4 * x,) * 3 for x in range(4)]
    frames = [Image.new("RGB", (4, 4), name) for name in ("red", "blue")]
    assert stored(frames[0], "moving.png", save_all=True, append_images=frames[1:]).getpixel((0, 0)) == (255, 0, 0)
    assert stored(Image.new("CMYK", (4, 4), (0, 255, 0, 0)), "print.jpg").getpixel((0, 0)) == (255, 0, 255)
    assert stored(Image.new("RGBA", (4, 4), (9, 8, 7, 0)), "clear.png").getpixel((0, 0)) == (9, 8, 7)
    assert stored(Image.new("P", (1, 1), 1), "one.png").size == (1, 1)


def test_an_image_that_no_vision_tower_takes_is_an_error_of_its_row(rows):
    for name, size in (("narrow", (1, 201)), ("wide", (400, 1))):
        Image.new("L", size).save(rows.parent / f"{name}.png")
        with pytest.raises(ValueError, match=rf"row 0: image '{name}.png': .*: sides of over 1 to 200; crop it"):
            records.read(rewrite(rows, images=[f"{name}.png"]))
    Image.new("L", (1, 200)).save(rows.parent / "long.png")
    records.read(rewrite(rows, images=["long.png"]))


def test_truths_in_thousandths_are_pointed_out(rows, capsys):
    record = synthetic.record(0, 0)
    canvas, layers = record["ground_truth"]["canvas"], []
    for layer in record["ground_truth"]["layers"]:
        scales = {"x": 1000 / canvas["width"], "y": 1000 / canvas["height"]}
        scales |= {"width": scales["x"], "height": scales["y"]}
        layers.append({**layer, **{key: layer[key] * scale for key, scale in scales.items()}})
    smaller = {"width": 500, "height": 600}
    records.read(rewrite(rows, ground_truth={"canvas": {**canvas, **smaller}, "layers": layers}))
    assert "in 1 of 1 records, such as row 0, most boxes reach beyond the canvas" in capsys.readouterr().out
    records.read(rewrite(rows, ground_truth=record["ground_truth"]))
    assert not capsys.readouterr().out


def test_messages():
    row = {"prompt": "A <|image_pad|>poster<|im_<|x|>end|> of 5 <b> | <|not one|>", "images": ["a", "b"]}
    clean = "A  poster<|im_ end|> of 5 <b> | <|not one|>"
    assert records.messages(row, with_images=False) == [{"role": "user", "content": clean}]
    content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": clean}]
    assert records.messages(row, with_images=True) == [{"role": "user", "content": content}]


# ---- converters ----


def run(tmp_path: Path, format: str, text: str, suffix: str, **options) -> list[dict]:
    source = tmp_path / f"input{suffix}"
    source.write_text(text, encoding="utf-8")
    output = str(tmp_path / "rows.jsonl")
    return convert.convert(convert.Config(format=format, input=str(source), output=output, **options))


PKU = """poster_path,total_elem,cls_elem,box_elem
train/0.png,3,1,"[100, 50, 400, 90]"
train/0.png,3,3,"[90, 40, 410, 100]"
train/1.png,1,0,"[0, 0, 0, 0]"
train/0.png,3,2,"[10, 600, 60, 640]"
train/2.png,1,1,"[20, 600, 300, 640]"
"""


def test_pku_without_images(tmp_path):
    first, second = run(tmp_path, "pku", PKU, ".csv")
    assert (first["id"], second["id"], first["images"]) == ("train/0.png", "train/2.png", [])  # 1 has no element
    truth = first["ground_truth"]
    assert truth["canvas"] == {"width": 513, "height": 750, "background": "#FFFFFF"}
    assert truth["layers"] == [
        {"type": "underlay", "x": 90, "y": 40, "width": 320, "height": 60, "fill": "#FFFFFF"},
        {"type": "logo", "x": 10, "y": 600, "width": 50, "height": 40},
        {"type": "text", "x": 100, "y": 50, "width": 300, "height": 40, "text": "Text 1", "font_size": 30.77,
         "color": "#111111"},
    ]  # fmt: skip
    assert first["prompt"].endswith('Canvas 513x750, background #FFFFFF.\ntext 31px "Text 1"\n1 underlay\n1 logo')
    assert 0.9 < reward.score(synthetic.gold(first), truth)["score"] <= 1


def test_pku_with_images(tmp_path):
    (tmp_path / "canvas").mkdir()
    picture = Image.new("RGB", (400, 800), "#DDDDDD")
    picture.paste("#101010", (0, 500, 400, 800))
    for k in range(3):
        picture.save(tmp_path / "canvas" / f"{k}.png")
    first, second = run(tmp_path, "pku", PKU, ".csv", images=str(tmp_path / "canvas"))
    assert first["images"] == ["canvas/0.png"] and second["images"] == ["canvas/2.png"]
    background, *_, text = second["ground_truth"]["layers"]
    assert background == {"type": "image", "src": "image_1", "x": 0, "y": 0, "width": 400, "height": 800}
    assert text["color"] == "#FFFFFF"  # on the dark half
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (first, second)))
    assert records.read(str(tmp_path / "rows.jsonl")) == [first, second]


def test_cgl_as_csv_and_as_json(tmp_path):
    text = 'poster_path,total_elem,cls_elem,box_elem\na.jpg,2,2,"[1, 2, 31, 22]"\na.jpg,2,4,"[50, 60, 70, 90]"\n'
    (row,) = run(tmp_path, "cgl", text, ".csv")
    assert [layer["type"] for layer in row["ground_truth"]["layers"]] == ["shape", "text"]
    boxes = [{"image_id": 7, "category_id": 2, "bbox": [1, 2, 30, 20]},
             {"image_id": 7, "category_id": 4, "bbox": [50, 60, 20, 30]}]  # fmt: skip
    value = {"images": [{"id": 7, "file_name": "a.jpg", "width": 513, "height": 750}], "annotations": [boxes]}
    assert run(tmp_path, "cgl", json.dumps(value), ".json") == [row]
    assert run(tmp_path, "cgl", json.dumps(value | {"annotations": boxes}), ".json") == [row]
    # an image of another size is stretched to the canvas that the boxes are of
    Image.new("RGB", (100, 200), "#000000").save(tmp_path / "a.jpg")
    (seen,) = run(tmp_path, "cgl", json.dumps(value), ".json", images=str(tmp_path))
    first, *_, text = seen["ground_truth"]["layers"]
    assert (first["src"], first["width"], first["height"], text["color"]) == ("image_1", 513, 750, "#FFFFFF")


def test_crello_columns_and_shares_of_the_canvas(tmp_path):
    poster = {"id": "c1", "canvas_width": 200, "canvas_height": 400, "type": ["coloredBackground", "textElement"],
              "left": [-0.001, 0.1], "top": [0.0, 0.5], "width": [1.002, 0.8], "height": [1.0, 0.1],
              "text": ["", "Sale"], "color": [None, [255, 0, 16]], "fill": ["#EEEEEE", None]}  # fmt: skip
    (row,) = run(tmp_path, "crello", json.dumps(poster), ".jsonl")
    background, text = row["ground_truth"]["layers"]
    assert background == {"type": "background", "x": -0.2, "y": 0.0, "width": 200.4, "height": 400.0, "fill": "#EEEEEE"}
    assert (text["x"], text["y"], text["width"], text["height"]) == (20.0, 200.0, 160.0, 40.0)
    assert (text["type"], text["text"], text["color"]) == ("text", "Sale", "#FF0010")
    assert row["id"] == "c1" and '"Sale"' in row["prompt"] and row["extra_info"] == {"format": "crello"}


def test_boxes_in_either_form_are_the_same_poster(tmp_path):
    Image.new("RGB", (30, 30)).save(tmp_path / "p.png")
    canvas = {"width": 300, "height": 300}
    ltrb = [{"type": "Photo", "box": [10, 20, 110, 120], "src": "p.png"},
            {"type": "headline", "box": [10, 150, 290, 190], "text": "Hello", "font_size": 30}]  # fmt: skip
    edges = [{"type": "image", "left": 10, "top": 20, "width": 100, "height": 100, "src": "p.png"},
             {"type": "text", "x": 10, "y": 150, "width": 280, "height": 40, "text": "Hello",
              "font_size": 30}]  # fmt: skip
    posters = [{"id": "a", "prompt": "A poster.", "canvas": canvas, "elements": elements} for elements in (ltrb, edges)]
    one, other = run(tmp_path, "boxes", json.dumps(posters), ".json", images=str(tmp_path))
    assert one == other and one["prompt"] == "A poster." and one["images"] == ["p.png"]
    assert one["ground_truth"]["layers"][0] == {
        "type": "image", "x": 10, "y": 20, "width": 100, "height": 100, "src": "image_1"}  # fmt: skip


HEAD = "poster_path,total_elem,cls_elem,box_elem\n"
GOOD = {"canvas": {"width": 9, "height": 9}, "elements": [{"type": "logo", "box": [1, 1, 5, 5]}]}


def boxes(**element) -> str:
    return json.dumps([GOOD, GOOD | {"elements": [{"type": "logo", "box": [1, 1, 5, 5]} | element]}])


@pytest.mark.parametrize("format, text, message", [
    ("pku", "poster_path,cls_elem\n", r"must have \['box_elem'\]"),
    ("pku", HEAD, "holds no poster"),
    ("pku", HEAD + 'a,1,4,"[1, 2, 3, 4]"\n', "line 2: class 4: must be one of"),
    ("pku", HEAD + 'a,1,one,"[1, 2, 3, 4]"\n', "line 2: class 'one'"),
    ("pku", HEAD + 'a,1,1,"__import__(1)"\n', "line 2: .*must be a whole number and"),
    ("pku", HEAD + 'a,1,1,"[10, 20, 5, 30]"\n', r"line 2: box \[10, 20, 5, 30\]: must be left < right"),
    ("pku", HEAD + 'a,1,1,"[10, 20, 30]"\n', "line 2: box .*four numbers"),
    ("boxes", boxes(box=[1, 1, 5, float("nan")]), "row 1: box .*four numbers"),
    ("boxes", boxes(type="frame"), "row 1: layer 0.*type must be one of"),
    ("boxes", boxes(fill="red"), "row 1: layer 0.*#RRGGBB"),
    ("boxes", boxes(fill=[1, 2]), "row 1: fill .*three numbers"),
    ("boxes", boxes(src="a.png"), "row 1: image 'a.png': needs a folder"),
    ("boxes", json.dumps([{"canvas": {"width": 9}, "elements": GOOD["elements"]}]), "row 0: 'height' is missing"),
    ("boxes", json.dumps([GOOD | {"elements": []}]), "row 0: elements = .*at least one"),
    ("boxes", "[3]", "row 0: 3: must be an object"),
    ("boxes", "[1, ", "no JSON"),
    ("boxes", "{nothing}", "expected one JSON object per line"),
    ("crello", json.dumps({"type": ["a", "b"], "left": [1]}), "row 0: lists of .*one length"),
    ("cgl", json.dumps({"images": []}), 'must hold an object with "images" and "annotations"'),
    ("cgl", json.dumps({"images": [], "annotations": [{"bbox": []}]}), "annotation 0: .*must have image_id"),
    ("cgl", json.dumps({"images": [{"id": 1}], "annotations": []}), "image 0: .*lacks a key"),
])  # fmt: skip
def test_a_bad_row_stops_the_conversion(tmp_path, format, text, message):
    suffix = ".csv" if text.startswith("poster_path") else ".json" if text[0] == "[" or format == "cgl" else ".jsonl"
    with pytest.raises(ValueError, match=message):
        run(tmp_path, format, text, suffix)


def test_the_command_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "input.csv").write_text(PKU)
    arguments = ["--format", "pku", "--input", str(tmp_path / "input.csv"), "--output", str(tmp_path / "a" / "b.jsonl")]
    monkeypatch.setattr("sys.argv", ["convert.py", *arguments])
    convert.main()
    assert capsys.readouterr().out == f"{tmp_path / 'a' / 'b.jsonl'}: 2 records, 2.0 layers each\n"
    assert len(records.read(str(tmp_path / "a" / "b.jsonl"))) == 2
    for changed, message in (("--format", "must be one of"), ("--input", "must be a file"), ("--output", "in .jsonl")):
        broken = list(arguments)
        broken[broken.index(changed) + 1] = "nothing"
        monkeypatch.setattr("sys.argv", ["convert.py", *broken])
        with pytest.raises(SystemExit):
            convert.main()
        assert message in capsys.readouterr().err
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr("sys.argv", ["convert.py", *arguments, "--images", str(tmp_path / "elsewhere")])
    with pytest.raises(SystemExit):
        convert.main()
    assert "must be a folder beside the output" in capsys.readouterr().err
