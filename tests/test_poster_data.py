"""Poster records: the synthetic ones, those of a file, and what the converters make of other data."""

import base64
import hashlib
import json
import random
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from grpo.poster import assessors, convert, layout, records, reward, synthetic


def test_records_and_images_never_change():
    """Bit for bit: a promise, of integers and of fp64 additions and multiplications one by one."""
    random.seed(7)  # the global generator has no part in it
    pinned = {0: ("216573e6540369bd", "b3de904dc5fd129c"), 1: ("f31cb741264d780f", "b9b46fd8ed8732dc"),
              2: ("4fd11ace119a3278", "c42d5adaffa83117")}  # fmt: skip
    for level, (expected, pixels) in pinned.items():
        rows = [synthetic.record(seed, level, cjk=cjk) for seed in (*range(40), 10199) for cjk in (False, True)]
        references = [ref for seed in range(4) for ref in synthetic.record(seed, level)["images"]]
        images = b"".join(synthetic.image(ref).tobytes() for ref in references)
        found = [hashlib.sha256(content).hexdigest()[:16] for content in (json.dumps(rows).encode(), images)]
        assert found == [expected, pixels]


@pytest.mark.parametrize("level, counts", [(0, {3}), (1, {6, 7}), (2, {10, 11, 12, 13})])
def test_the_brief_names_what_is_on_the_good_poster(level, counts):
    rows = [synthetic.record(seed, level) for seed in range(80)]
    for row in rows:
        canvas, layers = row["ground_truth"]["canvas"], row["ground_truth"]["layers"]
        layout.ground_truth(row["ground_truth"])
        ids = [layer["src"] for layer in layers if "src" in layer]
        assert ids == [f"image_{k + 1}" for k in range(len(row["images"]))]
        names = [f"Canvas {canvas['width']}x{canvas['height']}", canvas["background"], *ids]
        names += [json.dumps(layer["text"])[1:-1] for layer in layers if layer["type"] == "text"]
        assert all(name in row["prompt"] for name in names)
        if level == 0:
            assert len(row["prompt"].split()) <= 60 and len(synthetic.gold(row)) <= 340
    assert {len(row["ground_truth"]["layers"]) for row in rows} == counts


def test_splits_share_nothing_and_what_does_not_exist_is_refused():
    train, test = synthetic.records(0, "train"), synthetic.records(0, "test")
    assert (len(train), len(test)) == (10_000, 200) and not {r["id"] for r in train} & {r["id"] for r in test}
    assert [r["extra_info"]["seed"] for r in synthetic.records(1, "test", 3)] == [10_000, 10_001, 10_002]
    for function, given, message in (
        (synthetic.records, (1, "dev"), r"split='dev'.*\['test', 'train'\]"), (synthetic.record, (-1, 0), "seed -1"),
        (synthetic.record, (0, 3), "level 3"), (synthetic.image, ("synthetic:0:1:2",), "has 1 images"),
        *((synthetic.image, (ref,), "synthetic:LEVEL:SEED:K") for ref in (
            "synthetic:1:1", "synthetic:3:1:1", "synthetic:1:01:1", "synthetic:1:1:0", "synthetic:1:1:1\n")),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            function(*given)


def test_images_have_the_size_that_is_said_before_and_differ():
    references = ("synthetic:0:0:1", "synthetic:1:1:1", *synthetic.record(0, 2)["images"])
    shown = [synthetic.image(reference) for reference in references]
    for image, reference in zip(shown, references, strict=True):
        assert image.mode == "RGB" and image.size == synthetic.image_size(reference)
        assert all(side % 28 == 0 and side <= 448 for side in image.size)
        assert len(image.getcolors(10**6)) > 100  # a picture, not a plain area
    assert len({image.tobytes() for image in shown}) == len(shown)


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


def test_reading_a_file_or_synthetic_posters(rows):
    (row,) = records.read(str(rows))
    assert row == synthetic.record(0, 0) | {"images": ["pictures/a.png"]}
    folder = records.folder_of(str(rows))
    assert records.open_image("pictures/a.png", folder).getpixel((3, 3)) == (0x33, 0x66, 0x99)
    assert records.open_image("synthetic:0:4:1", folder) == synthetic.image("synthetic:0:4:1")
    rewrite(rows, id="absent", images="absent", extra_info="absent", ground_truth=json.dumps(row["ground_truth"]))
    assert records.read(str(rows)) == [row | {"id": "0", "images": [], "extra_info": {}}]  # JSON text was read
    assert records.read("synthetic:2", "test")[:2] == synthetic.records(2, "test", 2)
    with pytest.raises(ValueError, match="levels are 0, 1 and 2"):
        records.read("synthetic:5")
    with pytest.raises(FileNotFoundError, match=r"give a .jsonl file or synthetic:0"):
        records.read("synthetik:1")


@pytest.mark.parametrize("changes, message", [
    ({"prompt": " "}, "`prompt`"), ({"images": "a.png"}, "`images`"), ({"images": [3]}, "`images`"),
    ({"extra_info": [1]}, "`extra_info`"), ({"ground_truth": "absent"}, "`ground_truth` is missing"),
    ({"ground_truth": {"canvas": {"width": 9, "height": 9}}}, "has None layers"),
    *(({"images": [name]}, "must be a file inside") for name in (
        "pictures/none.png", "../outside.png", "/etc/hostname", "a\0b", "link.png")),
    ({"images": ["x.gif"]}, "cannot be read as PNG, JPEG, WEBP"), ({"images": ["synthetic:0:1:3"]}, "has 1 images"),
    ({"images": ["narrow.png"]}, "over 1 to 200; crop it"), ({"images": ["wide.png"]}, "over 1 to 200; crop it"),
])  # fmt: skip
def test_a_bad_row_is_an_error_that_names_it(rows, changes, message):
    for name, size in (("x.gif", (8, 8)), ("narrow.png", (1, 201)), ("wide.png", (400, 1)), ("long.png", (1, 200))):
        Image.new("L", size).save(rows.parent / name)
    (rows.parent / "link.png").symlink_to(rows.parent.parent / "outside.png")
    records.read(rewrite(rows, images=["long.png"]))
    with pytest.raises(ValueError, match=f"row 0: .*{message}"):
        records.read(rewrite(rows, **changes))


def test_large_and_broken_images_are_refused(rows, monkeypatch):
    picture = rows.parent / "pictures" / "a.png"  # of 800 pixels

    def refused(message: str, place=records, **limits) -> None:
        with monkeypatch.context() as patch, pytest.raises(ValueError, match=message):
            for name, limit in limits.items():
                patch.setattr(place, name, limit)
            records.open_image("pictures/a.png", rows.parent)

    refused("over 799 pixels", MAX_PIXELS=799)
    refused("decompression bomb", Image, MAX_IMAGE_PIXELS=300)  # 800 is over twice that: Pillow raises by itself
    refused("at most 10", MAX_BYTES=10)
    monkeypatch.setattr(records, "MAX_PIXELS", 800)
    records.open_image("pictures/a.png", rows.parent)
    picture.write_bytes(picture.read_bytes()[:60])
    refused("cannot be read")


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


def test_truths_in_thousandths_are_pointed_out(rows, capsys):
    truth = synthetic.record(0, 0)["ground_truth"]
    layers = [layer | dict(x=100, y=100, width=800, height=850) for layer in truth["layers"]]
    canvas = truth["canvas"] | {"width": 500, "height": 600}
    records.read(rewrite(rows, ground_truth={"canvas": canvas, "layers": layers}))
    said = capsys.readouterr().out
    assert "1 of 1 records" in said and "row 0" in said and "beyond the canvas" in said
    records.read(rewrite(rows, ground_truth=truth))
    assert not capsys.readouterr().out


def test_messages():
    row = {"prompt": "A <|image_pad|>poster<|im_<|x|>end|> of 5 <b> | <|not one|>", "images": ["a", "b"]}
    clean = "A  poster<|im_ end|> of 5 <b> | <|not one|>"
    assert records.messages(row, with_images=False) == [{"role": "user", "content": clean}]
    content = [*[{"type": "image"}] * 2, {"type": "text", "text": clean}]
    assert records.messages(row, with_images=True) == [{"role": "user", "content": content}]


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


def test_pku_with_and_without_images(tmp_path):
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
    expected = dict(type="text", x=20.0, y=200.0, width=160.0, height=40.0, text="Sale", color="#FF0010")
    assert expected.items() <= text.items() and '"Sale"' in row["prompt"]
    assert row["id"] == "c1" and row["extra_info"] == {"format": "crello"}


def test_boxes_in_either_form_are_the_same_poster(tmp_path):
    Image.new("RGB", (30, 30)).save(tmp_path / "p.png")
    canvas, head = {"width": 300, "height": 300}, {"text": "Hello", "font_size": 30}
    ltrb = [{"type": "Photo", "box": [10, 20, 110, 120], "src": "p.png"},
            {"type": "headline", "box": [10, 150, 290, 190], **head}]  # fmt: skip
    edges = [{"type": "image", "left": 10, "top": 20, "width": 100, "height": 100, "src": "p.png"},
             {"type": "text", "x": 10, "y": 150, "width": 280, "height": 40, **head}]  # fmt: skip
    posters = [{"id": "a", "prompt": "A poster.", "canvas": canvas, "elements": elements} for elements in (ltrb, edges)]
    one, other = run(tmp_path, "boxes", json.dumps(posters), ".json", images=str(tmp_path))
    assert one == other and one["prompt"] == "A poster." and one["images"] == ["p.png"]
    box = dict(x=10, y=20, width=100, height=100)
    assert one["ground_truth"]["layers"][0] == {"type": "image", **box, "src": "image_1"}


HEAD = "poster_path,total_elem,cls_elem,box_elem\n"
GOOD = {"canvas": {"width": 9, "height": 9}, "elements": [{"type": "logo", "box": [1, 1, 5, 5]}]}


def boxes(**element) -> str:
    return json.dumps([GOOD, GOOD | {"elements": [{"type": "logo", "box": [1, 1, 5, 5]} | element]}])


@pytest.mark.parametrize("format, text, message", [
    ("pku", "poster_path,cls_elem\n", r"must have \['box_elem'\]"), ("pku", HEAD, "no poster"),
    ("pku", HEAD + 'a,1,4,"[1, 2, 3, 4]"\n', "line 2: class 4"),
    ("pku", HEAD + 'a,1,1,"__import__(1)"\n', "line 2: .*whole number"),
    ("pku", HEAD + 'a,1,1,"[10, 20, 5, 30]"\n', r"line 2: box \[10, 20, 5, 30\]: must be left < right"),
    ("boxes", boxes(box=[1, 1, 5, float("nan")]), "row 1: box .*four numbers"),
    ("boxes", boxes(type="frame"), "row 1: layer 0.*type"), ("boxes", boxes(fill=[1, 2]), "row 1: fill"),
    ("boxes", boxes(src="a.png"), "row 1: image 'a.png'.*folder"),
    ("boxes", json.dumps([GOOD | {"elements": []}]), "row 0: elements = .*at least one"),
    ("boxes", "[3]", "row 0: 3: must be an object"), ("boxes", "{nothing}", "one JSON object per line"),
    ("crello", json.dumps({"type": ["a", "b"], "left": [1]}), "row 0: lists of .*one length"),
    ("cgl", json.dumps({"images": [], "annotations": [{"bbox": []}]}), "annotation 0: .*image_id"),
])  # fmt: skip
def test_a_bad_row_stops_the_conversion(tmp_path, format, text, message):
    suffix = ".csv" if text.startswith("poster_path") else ".json" if text[0] == "[" or format == "cgl" else ".jsonl"
    with pytest.raises(ValueError, match=message):
        run(tmp_path, format, text, suffix)


def test_the_command_line(tmp_path, monkeypatch, capsys):
    output = tmp_path / "a" / "b.jsonl"
    (tmp_path / "input.csv").write_text(PKU)
    (tmp_path / "elsewhere").mkdir()

    def called(**changes) -> None:
        options = dict(format="pku", input=tmp_path / "input.csv", output=output) | changes
        monkeypatch.setattr("sys.argv", ["convert.py", *(f"--{name}={value}" for name, value in options.items())])
        convert.main()

    called()
    assert "2 records" in capsys.readouterr().out
    assert len(records.read(str(output))) == 2
    for changes, message in ((dict(format="nothing"), "must be one of"), (dict(output="nothing"), "in .jsonl"),
                             (dict(images=tmp_path / "elsewhere"), "a folder beside the output")):  # fmt: skip
        with pytest.raises(SystemExit):
            called(**changes)
        assert message in capsys.readouterr().err
