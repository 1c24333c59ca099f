"""Poster records: reading and checking, chat messages, images.

Sources:  "synthetic:LEVEL" (grpo/poster/synthetic.py) | rows.jsonl, of grpo/poster/convert.py or by hand
Record:   {"id": text, "prompt": text, "images": references, image_1 first, "ground_truth": poster, "extra_info": dict}
          `images` may be missing or empty; `id` and `extra_info` may be missing.
Images:   "synthetic:LEVEL:SEED:K", or a path relative to the folder of the .jsonl and inside it.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

from common.base.distributed import print_main
from common.tasks import data
from grpo.poster import layout, pictures, synthetic

MAX_PIXELS = 25_000_000  # of an input image: a file of a few kilobytes can decode to gigabytes
MAX_BYTES = 32 * 2**20
MAX_RATIO = 200  # of the sides of an input image: the limit of the Qwen-VL processors
FORMATS = ("PNG", "JPEG", "WEBP")
CONTROL = re.compile(r"<\|[^<>|\s]*\|>")


def read(source: str, split: str = "train") -> list[dict[str, Any]]:
    """Reads and checks the records of a source.

    Args:
        source: "synthetic:LEVEL" or a .jsonl file.
        split: "train" or "test" of the synthetic posters; a file has no splits.

    Returns:
        Records with all keys: "id", "prompt", "images", "ground_truth", "extra_info".

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a record is invalid; the message names it. No record is skipped.
    """
    if source.startswith("synthetic:"):
        level = source.removeprefix("synthetic:")
        if level not in ("0", "1", "2"):
            raise ValueError(f"source {source!r}: the levels are 0, 1 and 2; use synthetic:1")
        return synthetic.records(int(level), split)
    folder = folder_of(source)
    if not Path(source).expanduser().is_file():
        raise FileNotFoundError(
            f"no records at {source!r}: give a .jsonl file or synthetic:0, synthetic:1, synthetic:2"
        )
    rows = data.read_rows(source, split)
    checked = [_checked(row, f"{source}, row {i}", str(i), folder) for i, row in enumerate(rows)]
    beyond = [i for i, (_, poster) in enumerate(checked) if layout.mostly_beyond_canvas(poster.layers)]
    if 2 * len(beyond) > len(rows):
        print_main(
            f"warning: {source}: in {len(beyond)} of {len(rows)} records, such as row {beyond[0]}, most boxes reach "
            "beyond the canvas: ground truths are in px of their canvas, not in thousandths"
        )
    return [record for record, _ in checked]


def folder_of(source: str) -> Path:
    """The folder that image paths of a source are relative to; meaningless for synthetic posters."""
    return Path(source).expanduser().absolute().parent


def messages(record: dict[str, Any], with_images: bool) -> list[dict[str, Any]]:
    """The chat of a record: one user turn, without control tokens in the text.

    Args:
        record: from `read`.
        with_images: for vision-language models: one placeholder per image precedes the text.
    """
    text = CONTROL.sub(" ", record["prompt"])  # a space, or the text around it could form another control token
    if not with_images:
        return [{"role": "user", "content": text}]
    content = [{"type": "image"} for _ in record["images"]]
    return [{"role": "user", "content": [*content, {"type": "text", "text": text}]}]


def open_image(reference: str, folder: Path) -> Image.Image:
    """Opens an input image, as RGB.

    Args:
        reference: an entry of `images` of a record.
        folder: from `folder_of` the source.

    Raises:
        ValueError: it is outside the folder, missing, too large, or not a PNG, JPEG or WebP image.
    """
    if reference.startswith("synthetic:"):
        return synthetic.image(reference)
    with _opened(reference, folder) as image:
        return pictures.rgb(image)


def image_size(reference: str, folder: Path) -> tuple[int, int]:
    """Width and height of an input image in pixels, without decoding it.

    Args:
        reference: as in `open_image`.
        folder: the same.

    Raises:
        ValueError: as in `open_image`.
    """
    if reference.startswith("synthetic:"):
        return synthetic.image_size(reference)
    with _opened(reference, folder) as image:
        return pictures.size(image)


@contextmanager
def _opened(reference: str, folder: Path) -> Iterator[Image.Image]:
    """Opens an image file and checks its size before it is decoded."""
    path = image_path(reference, folder)
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"image {reference!r}: {path.stat().st_size} bytes, at most {MAX_BYTES}; make it smaller")
    try:
        with Image.open(path, formats=FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise ValueError(f"image {reference!r}: {image.size} is over {MAX_PIXELS} pixels; make it smaller")
            if max(image.size) > MAX_RATIO * min(image.size):
                raise ValueError(f"image {reference!r}: {image.size}: sides of over 1 to {MAX_RATIO}; crop it")
            yield image
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, SyntaxError) as error:
        raise ValueError(
            f"image {reference!r}: cannot be read as {', '.join(FORMATS)} ({error}); replace it"
        ) from error


def image_path(reference: str, folder: Path) -> Path:
    """The file of an image.

    Args:
        reference: path relative to the folder.
        folder: from `folder_of` the source.

    Raises:
        ValueError: it is outside the folder, or not a file.
    """
    try:
        path, root = (folder / reference).resolve(), folder.resolve()
        usable = path.is_relative_to(root) and path.is_file()
    except (OSError, ValueError):  # a path with a null byte, or one that is too long
        usable = False
    if not usable:
        raise ValueError(f"image {reference!r}: must be a file inside of {folder}; correct the path or move the file")
    return path


def _checked(row: dict[str, Any], where: str, name: str, folder: Path) -> tuple[dict[str, Any], layout.Poster]:
    """Checks a row of a file; returns it as a record, and its parsed ground truth."""
    prompt, images, extra = (row.get(name) for name in ("prompt", "images", "extra_info"))
    images, extra = [] if images is None else images, {} if extra is None else extra
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError(f"{where}: `prompt` is {prompt!r:.40}, must be text; write the brief there")
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise ValueError(f"{where}: `images` is {images!r:.40}, must be a list of paths; write [] for none")
    if not isinstance(extra, dict):
        raise ValueError(f"{where}: `extra_info` is {extra!r:.40}, must be an object; write {{}} for none")
    if row.get("ground_truth") is None:
        raise ValueError(f"{where}: `ground_truth` is missing; add the poster that the answer is compared with")
    try:
        truth = row["ground_truth"]
        poster = layout.ground_truth(truth)
        for reference in images:
            image_size(reference, folder)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    truth = json.loads(truth) if isinstance(truth, str) else truth
    record = {"id": str(row.get("id", name)), "prompt": prompt, "images": images, "ground_truth": truth,
              "extra_info": extra}  # fmt: skip
    return record, poster
