"""Converts public poster datasets, which you download yourself, to records for training.

Run:   python grpo/poster/convert.py --format pku --input train_csv_9973.csv --images data/pku/canvas \
           --output data/pku/rows.jsonl
Formats:
  pku     CSV with one element per line: poster_path, total_elem, cls_elem, box_elem = "[left, top,
          right, bottom]" in px; classes 1 text, 2 logo, 3 underlay. Class 0 (no element) is skipped.
  cgl     the same columns with classes 1 logo, 2 text, 3 underlay, 4 embellishment, 5 highlighted
          text; or the JSON with "images" and "annotations", boxes [left, top, width, height].
  crello  JSON lines, or one JSON list, of posters with a list per attribute: canvas_width,
          canvas_height, type, left, top, width, height; optional: text, font_size, color, align,
          opacity, src. Types are names, not class numbers.
  boxes   the same with a list of elements: {"canvas": {"width", "height"}, "elements": [{"type",
          "box": [left, top, right, bottom], "text", ..}]}; or, instead of a box, x or left, y or
          top, width, height.
Boxes may be in px or in shares of the canvas. They are shares if no coordinate of a poster is
larger than 1.5.

Missing attributes are filled in: texts ("Text 1"), font sizes, colours that are legible on the
background, and a brief that lists texts, sizes and images. Elements of pku and cgl have no order:
underlays go below, texts on top. Records name images by paths relative to the output file, which
must be beside or above the images.

Nothing is shipped or downloaded. Mind the licences: PKU PosterLayout requires a signed agreement,
CGL is for non-commercial research, and the rights to Crello-like templates stay with their
designers.
"""

import ast
import csv
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageColor

sys.path.insert(0, str(next(p for p in Path(__file__).resolve().parents if (p / "common/maths/losses.py").is_file())))
from common.base import checks, config
from common.base.checks import require
from common.tasks.data_sources import read_json_lines
from grpo.poster import layout, records, synthetic

CLASSES = {
    "pku": {1: "text", 2: "logo", 3: "underlay"},
    "cgl": {1: "logo", 2: "text", 3: "underlay", 4: "shape", 5: "text"},
}
COLUMNS = {"poster_path", "cls_elem", "box_elem"}
SHARES = 1.5  # largest coordinate of boxes in shares of the canvas; boxes in px are larger
COPIED = ("font_size", "color", "fill", "align", "opacity", "src")
LIGHT, DARK = "#FFFFFF", "#111111"


@dataclass(frozen=True)
class Config:
    """Converts poster data to records."""

    format: str = ""  # pku, cgl, crello or boxes
    input: str = ""  # file of the data
    output: str = ""  # .jsonl to write
    images: str = ""  # folder of the input images; "": none
    width: int = 513  # px of the canvas, for csv data without images
    height: int = 750  # the same

    def __post_init__(self):
        checks.one_of(self, format=(*CLASSES, "crello", "boxes"))
        checks.at_least(self, 1, "width", "height")
        require(Path(self.input).is_file(), f"input = {self.input!r}", "must be a file", "give the file of the data")
        require(self.output.endswith(".jsonl"), f"output = {self.output!r}", "must end in .jsonl", "rename it")
        if self.images:
            inside = Path(self.images).resolve().is_relative_to(Path(self.output).resolve().parent)
            require(inside and Path(self.images).is_dir(), f"images = {self.images!r}", "must be a folder beside the "
                    f"output {self.output!r}, or below it", "write the output there")  # fmt: skip


def convert(cfg: Config) -> list[dict[str, Any]]:
    """Converts a file to records.

    Args:
        cfg: with the file and its format.

    Raises:
        ValueError: a row breaks a rule; no row is skipped.
    """
    path = Path(cfg.input)
    if cfg.format == "cgl" and path.suffix == ".json":
        posters = _coco_posters(path)
    elif cfg.format in CLASSES:
        posters = _csv_posters(path, CLASSES[cfg.format])
    else:
        posters = _json_posters(path)
    converted = []
    for where, poster in posters:
        try:
            converted.append(_record(poster, cfg))
        except (ValueError, TypeError, KeyError) as error:
            text = f"{error} is missing; add it" if isinstance(error, KeyError) else error
            raise ValueError(f"{where}: {text}") from error
    require(bool(converted), cfg.input, "holds no poster with an element", "give another file")
    return converted


def _csv_posters(path: Path, classes: dict[int, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Posters of a csv file with one element per line, in order of first appearance."""
    posters: dict[str, dict[str, Any]] = {}
    lines: dict[str, str] = {}
    with open(path, newline="", encoding="utf-8-sig") as file:
        rows = csv.DictReader(file)
        missing = COLUMNS - set(rows.fieldnames or ())
        require(not missing, f"{path}: columns {rows.fieldnames}", f"must have {sorted(missing)}", "rename them")
        for row in rows:
            name, where = row["poster_path"], f"{path}, line {rows.line_num}"
            try:
                number, box = int(row["cls_elem"]), ast.literal_eval(row["box_elem"])
            except (ValueError, SyntaxError, TypeError) as error:
                raise ValueError(f"{where}: class {row['cls_elem']!r}, box {row['box_elem']!r}: must be a whole number "
                                 "and [left, top, right, bottom]; correct the line") from error  # fmt: skip
            require(number == 0 or number in classes, f"{where}: class {number}", f"must be one of {classes}", "map it")
            poster = posters.setdefault(name, {"id": name, "image": Path(name).name, "elements": []})
            lines.setdefault(name, where)
            if number:
                poster["elements"].append({"type": classes[number], "box": box})
    yield from ((lines[name], _sorted_layers(poster)) for name, poster in posters.items() if poster["elements"])


def _coco_posters(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Posters of a JSON file in COCO format; annotations may be nested in lists."""
    value = _load_json(path)
    whole = isinstance(value, dict) and {"images", "annotations"} <= value.keys()
    require(
        whole, str(path), 'must hold an object with "images" and "annotations"', "give the file as it was published"
    )
    elements: dict[Any, list[dict[str, Any]]] = {}
    for index, entry in enumerate(value["annotations"]):
        for found in entry if isinstance(entry, list) else [entry]:
            where, kind = f"{path}, annotation {index}: {found!r:.80}", CLASSES["cgl"].get(found.get("category_id"))
            good = kind and "image_id" in found and len(found.get("bbox", ())) == 4
            require(good, where, f"must have image_id, bbox and a category_id of {CLASSES['cgl']}", "correct it")
            box = dict(zip(("x", "y", "width", "height"), found["bbox"], strict=True))
            elements.setdefault(found["image_id"], []).append({"type": kind, **box})
    for index, image in enumerate(value["images"]):
        have = f"{path}, image {index}: {image!r:.80}"
        require({"id", "file_name", "width", "height"} <= image.keys(), have, "lacks a key", "add what is missing")
        if image["id"] in elements:
            poster = {"id": image["file_name"], "image": image["file_name"], "elements": elements[image["id"]]}
            poster["canvas"] = {"width": image["width"], "height": image["height"]}
            yield f"{path}, image {index}", _sorted_layers(poster)


def _json_posters(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Posters of JSON lines or of one JSON list; lists per attribute become elements."""
    with open(path, encoding="utf-8-sig") as file:
        is_list = file.read(1) == "["
    rows = _load_json(path) if is_list else read_json_lines(path)
    for index, row in enumerate(rows):
        where = f"{path}, row {index}"
        require(isinstance(row, dict), f"{where}: {row!r:.40}", "must be an object", "write one poster there")
        if "elements" not in row:
            columns = {name: values for name, values in row.items() if isinstance(values, list)}
            lengths = {len(values) for values in columns.values()}
            have = f"{where}: lists of {sorted(lengths)} values"
            require(len(lengths) == 1, have, "must have one length", "give every element every attribute, or null")
            names = [{name: values[i] for name, values in columns.items()} for i in range(lengths.pop())]
            canvas = {"width": row.get("canvas_width"), "height": row.get("canvas_height")}
            row = {key: row[key] for key in ("id", "prompt") if key in row} | {"canvas": canvas, "elements": names}
        yield where, {"id": str(index), **row}


def _load_json(path: Path) -> Any:
    """Reads a JSON file."""
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"{path}: no JSON ({error}); correct the file") from error


def _sorted_layers(poster: dict[str, Any]) -> dict[str, Any]:
    """Sorts the elements of a poster: underlays at the bottom, texts on top."""
    rank = {"underlay": 0, "text": 2}
    return poster | {"elements": sorted(poster["elements"], key=lambda element: rank.get(element["type"], 1))}


def _record(poster: dict[str, Any], cfg: Config) -> dict[str, Any]:
    """Converts a poster of any format to a record."""
    folder, paths, layers, photo = records.folder_of(cfg.output), [], [], None
    if cfg.images and "image" in poster:  # the background photo of the poster
        paths.append(_relative(poster["image"], cfg))
        photo = records.open_image(paths[0], folder)
    default = (photo.width, photo.height) if photo else (cfg.width, cfg.height)
    size = poster.get("canvas") or dict(zip(("width", "height"), default, strict=True))
    width, height = (int(size[side]) for side in ("width", "height"))
    if photo:
        photo = photo.resize((width, height))
        layers.append({"type": "image", "src": "image_1", "x": 0, "y": 0, "width": width, "height": height})
    background = size.get("background") or LIGHT
    require(bool(poster["elements"]), "elements = []", "a poster needs at least one", "add it, or remove the row")
    corners = [_corners(element) for element in poster["elements"]]
    scale = (width, height) if max(abs(side) for box in corners for side in box) <= SHARES else (1, 1)
    for element, (left, top, right, bottom) in zip(poster["elements"], corners, strict=True):
        kind = str(element["type"]).strip()
        kind = layout.ALIASES.get(kind.lower(), kind.lower())
        layer = {"type": kind, "x": left * scale[0], "y": top * scale[1]}
        layer |= {"width": (right - left) * scale[0], "height": (bottom - top) * scale[1]}
        layer = {key: round(value, 2) if isinstance(value, float) else value for key, value in layer.items()}
        layer |= {key: _value(key, element[key]) for key in COPIED if element.get(key) not in (None, "")}
        if "src" in layer:
            paths.append(_relative(layer["src"], cfg))
            layer["src"] = f"image_{len(paths)}"
        if kind == "underlay":
            layer.setdefault("fill", LIGHT)
        if kind == "text":
            number = 1 + sum(other["type"] == "text" for other in layers)
            layer = _with_text(layer, element.get("text") or f"Text {number}", layers, photo, background)
        layers.append(layer)
    canvas = {"width": width, "height": height, "background": background}
    truth = {"canvas": canvas, "layers": layers}
    layout.ground_truth(truth)
    brief = poster.get("prompt") or _brief(truth, str(poster["id"]))
    return {"id": str(poster["id"]), "prompt": brief, "images": paths, "ground_truth": truth,
            "extra_info": {"format": cfg.format}}  # fmt: skip


def _corners(element: dict[str, Any]) -> tuple[float, float, float, float]:
    """Left, top, right, bottom of an element, in the units of the data."""
    if "box" in element:
        box = element["box"]
    else:
        left, top = (element[near if near in element else far] for near, far in (("x", "left"), ("y", "top")))
        box = [left, top, left + element["width"], top + element["height"]]
    good = isinstance(box, (list, tuple)) and len(box) == 4 and all(type(side) in (int, float) for side in box)
    if not good or not (box[0] < box[2] and box[1] < box[3]):  # also rejects NaN
        raise ValueError(f"box {box!r}: must be left < right and top < bottom, four numbers; correct or remove it")
    return tuple(box)


def _value(key: str, value: Any) -> Any:
    """Converts an attribute to the poster schema; colours may be three numbers."""
    if key in ("color", "fill") and isinstance(value, (list, tuple)):
        if len(value) != 3 or not all(type(part) in (int, float) and 0 <= part <= 255 for part in value):
            raise ValueError(f"{key} {value!r}: must be #RRGGBB or three numbers from 0 to 255; convert it")
        return "#" + "".join(f"{round(part):02X}" for part in value)
    return value


def _relative(name: str, cfg: Config) -> str:
    """Path of an image relative to the folder of the output."""
    require(bool(cfg.images), f"image {name!r}", "needs a folder to be in", "pass --images")
    path = records.image_path(name, Path(cfg.images).resolve())
    return path.relative_to(Path(cfg.output).resolve().parent).as_posix()


def _with_text(
    layer: dict[str, Any], text: str, below: list[dict[str, Any]], photo: Image.Image | None, background: str
) -> dict[str, Any]:
    """Adds text, a fitting font size and a colour legible on the layers below to a text layer."""
    size = min(layer["height"] / 1.3, layer["width"] / (0.65 * len(text)))
    layer = layer | {"text": text, "font_size": layer.get("font_size", round(size, 2))}
    x, y = layer["x"] + layer["width"] / 2, layer["y"] + layer["height"] / 2
    fills = [under["fill"] for under in below if "fill" in under and under["x"] <= x <= under["x"] + under["width"]
             and under["y"] <= y <= under["y"] + under["height"]]  # fmt: skip
    if fills or photo is None:
        brightness = np.dot(ImageColor.getrgb((fills or [background])[-1]), (0.299, 0.587, 0.114))
    else:
        box = (layer["x"], layer["y"], layer["x"] + layer["width"], layer["y"] + layer["height"])
        patch = np.asarray(photo.convert("L").crop(tuple(map(round, box))))
        brightness = patch.mean() if patch.size else 0
    return layer | {"color": layer.get("color", DARK if brightness > 128 else LIGHT)}


def _brief(truth: dict[str, Any], seed: str) -> str:
    """The brief of a poster: canvas, texts in shuffled order, images, number of other elements."""
    canvas, layers = truth["canvas"], truth["layers"]
    lines = [f'text {layer["font_size"]:.0f}px "{layer["text"]}"' for layer in layers if layer["type"] == "text"]
    random.Random(seed).shuffle(lines)
    size = [f"{layer['src']} {layer['width']:.0f}x{layer['height']:.0f}" for layer in layers if "src" in layer]
    others = Counter(layer["type"] for layer in layers if layer["type"] != "text" and "src" not in layer)
    lines += size + [f"{count} {kind}" for kind, count in others.items()]
    about = f"Canvas {canvas['width']}x{canvas['height']}, background {canvas['background']}."
    return "\n".join([synthetic.SCHEMA, about, *lines])


def main() -> None:
    """Reads the command line, converts, and writes the file if every row is valid."""
    cfg = config.parse(Config)
    converted = convert(cfg)
    path = Path(cfg.output)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in converted), encoding="utf-8")
    layers = sum(len(row["ground_truth"]["layers"]) for row in converted)
    print(f"{path}: {len(converted)} records, {layers / len(converted):.1f} layers each")


if __name__ == "__main__":
    main()
