"""Draws posters side by side, each with its reward below.

Run:   python scripts/render_poster.py gold:1:12 trick:no_text_layers:1:12 solution:answer.txt:1:12 --out posters.png
       python scripts/render_poster.py runs/poster/samples.jsonl --out samples.png     the last few completions
       python scripts/render_poster.py rows.jsonl poster.json --out truths.png
Draws: gold:LEVEL:SEED            the ground truth of a synthetic record
       trick:NAME:LEVEL:SEED      an attack on the reward, see grpo/poster/tricks.py
       solution:FILE:LEVEL:SEED   a policy's completion for that record, in a text file
       FILE.jsonl                 the first few records, or the last few completions with their ground truth
       FILE.json                  one poster, scored against itself
"""

import argparse
import json
import random
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.base import console, storage
from grpo.poster import layout, records, reward, synthetic, tricks
from grpo.poster.fonts import Fonts, missing_text
from grpo.poster.render import render

GAP, LINE, LETTERS = 16, 20, 15  # px: space around panels, line height and font size of captions
LEAST_WIDTH = 330  # px, for the caption
INK, MUTED, PAPER, HOLE = "#111111", "#666666", "#FFFFFF", "#E4E4E4"


@dataclass(frozen=True)
class Panel:
    """A poster to draw."""

    name: str
    solution: str
    ground_truth: dict | str
    images: dict[str, Image.Image] = field(default_factory=dict)


def of_record(name: str, record: dict, solution: str, folder: Path = Path()) -> Panel:
    """Panel of a solution; image paths in the record are relative to `folder`."""
    images = {f"image_{k}": records.open_image(reference, folder) for k, reference in enumerate(record["images"], 1)}
    return Panel(name, solution, record["ground_truth"], images)


def panels(spec: str, rows: int) -> list[Panel]:
    """The panels of one command-line argument.

    Args:
        spec: one of the forms listed at the top of this file.
        rows: limit for a .jsonl file.

    Raises:
        ValueError: the argument has none of the forms, or a file has other content.
        OSError: a file cannot be read.
    """
    kind, *rest = spec.split(":")
    if kind in ("gold", "trick", "solution") and len(rest) >= 2:
        if not all(re.fullmatch("[0-9]{1,9}", number) for number in rest[-2:]):
            raise ValueError(f"{spec!r}: must end in :LEVEL:SEED, two numbers; gold:1:12 is one")
        level, seed, what = int(rest[-2]), int(rest[-1]), ":".join(rest[:-2])
        record = synthetic.record(seed, level)
        if kind == "trick":
            if what not in tricks.TRICKS:
                raise ValueError(f"trick {what!r}: must be one of {', '.join(tricks.TRICKS)}")
            return [of_record(what, record, tricks.TRICKS[what](record, random.Random(seed)))]
        if kind == "solution":
            return [of_record(Path(what).name, record, Path(what).read_text(encoding="utf-8"))]
        return [of_record(f"gold {level}:{seed}", record, synthetic.gold(record))]
    path = Path(spec)
    if path.suffix == ".json":
        text = path.read_text(encoding="utf-8")
        return [Panel(path.name, text, text)]
    if path.suffix != ".jsonl":
        raise ValueError(f"{spec!r}: must be gold:.., trick:.., solution:.., a .json or a .jsonl; see --help")
    lines = storage.read_lines(path)
    if not lines or "completion" not in json.loads(lines[0]):
        read, folder = records.read(spec)[:rows], records.folder_of(spec)
        return [of_record(str(record["id"]), record, synthetic.gold(record), folder) for record in read]
    return [sample(json.loads(line), f"{path}, line {n}") for n, line in list(enumerate(lines, start=1))[-rows:]]


def sample(row: dict, where: str) -> Panel:
    """Panel of a line of samples.jsonl; synthetic records are found by their id.

    Raises:
        ValueError: the line has no completion or no ground truth.
    """
    truth, images = row.get("ground_truth") or row.get("answer"), row.get("images") or []
    named = re.fullmatch("synthetic-([0-2])-([0-9]{1,9})", str(row.get("id") or truth))
    if named:
        record = synthetic.record(int(named[2]), int(named[1]))
        truth, images = record["ground_truth"], record["images"]
    if not truth or "completion" not in row:
        raise ValueError(f"{where}: must have `completion`, and `ground_truth` or `answer`; remove what is no sample")
    return of_record(f"step {row.get('step', '?')}", {"ground_truth": truth, "images": images}, row["completion"])


def draw(panel: Panel, fonts: Fonts, long_side: int, coord_space: str) -> tuple[Image.Image, list[str]]:
    """Draws a poster and returns it with the lines of its caption.

    Args:
        panel: to draw; a malformed poster becomes an empty canvas with the beginning of the text.
        fonts: for the texts.
        long_side: of the drawing, px.
        coord_space: of the solution.
    """
    truth, images = layout.ground_truth(panel.ground_truth), panel.images
    scored = reward.score(panel.solution, panel.ground_truth, fonts=fonts, images=images, coord_space=coord_space)
    if missing := scored["details"].get("missing_characters"):
        print(f"warning: {panel.name}: {missing_text(missing)}", file=sys.stderr)
    caption = [panel.name, f"score {scored['score']:.3f}"]
    if scored["parse_ok"]:
        for names in (("structure", "accuracy", "visual"), ("format", "hygiene")):
            caption.append("  ".join(f"{name} {scored[name]:.2f}" for name in names))
        return render(layout.parse(panel.solution, truth, coord_space), fonts, images, long_side).image, caption
    scale = long_side / max(truth.width, truth.height)
    image = Image.new("RGB", (max(1, round(truth.width * scale)), max(1, round(truth.height * scale))), HOLE)
    text = "\n".join(re.findall(".{1,30}", " ".join(panel.solution[:600].split())))
    ImageDraw.Draw(image).text((GAP, GAP), text, MUTED, ImageFont.load_default(LETTERS))
    return image, [*caption, f"malformed: {scored['reason']}"]


def sheet(drawn: list[tuple[Image.Image, list[str]]], columns: int) -> Image.Image:
    """All posters with their captions on one page, `columns` per row."""
    width = max(LEAST_WIDTH, *(image.width for image, _ in drawn))
    height = max(image.height for image, _ in drawn) + LINE * max(len(caption) for _, caption in drawn) + GAP // 2
    columns = min(columns, len(drawn))
    rows = -(-len(drawn) // columns)
    page = Image.new("RGB", (GAP + columns * (width + GAP), GAP + rows * (height + GAP)), PAPER)
    pen, font = ImageDraw.Draw(page), ImageFont.load_default(LETTERS)
    for place, (image, caption) in enumerate(drawn):
        x, y = GAP + place % columns * (width + GAP), GAP + place // columns * (height + GAP)
        page.paste(image, (x, y))
        pen.rectangle((x - 1, y - 1, x + image.width, y + image.height), outline=MUTED)
        for row, line in enumerate(caption):
            pen.text((x, y + image.height + GAP // 2 + row * LINE), line, INK if row < 2 else MUTED, font)
    return page


def main(argv: list[str] | None = None) -> None:
    """Draws and scores the posters."""
    console.protect()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", metavar="WHAT", nargs="+", help="see above; separated by spaces or commas")
    parser.add_argument(
        "--out", type=Path, default=Path("posters.png"), help="image file to write (default: %(default)s)"
    )
    parser.add_argument("--rows", type=int, default=4, help="limit per .jsonl file (default: %(default)s)")
    parser.add_argument("--columns", type=int, default=4, help="posters side by side (default: %(default)s)")
    parser.add_argument("--long_side", type=int, default=480, help="of each poster, in px (default: %(default)s)")
    parser.add_argument("--coord_space", choices=layout.COORD_SPACES, default="px", help="(default: %(default)s)")
    parser.add_argument("--font_paths", default="", help="comma-separated font files; needed beyond ASCII")
    args = parser.parse_args(argv)
    try:
        if min(args.rows, args.columns) < 1 or not 64 <= args.long_side <= 4096:
            raise ValueError("--rows and --columns must be at least 1, --long_side from 64 to 4096: correct them")
        fonts = Fonts([path for path in args.font_paths.split(",") if path])
        asked = [panel for spec in ",".join(args.what).split(",") if spec for panel in panels(spec, args.rows)]
        drawn = [draw(panel, fonts, args.long_side, args.coord_space) for panel in asked]
        if not drawn:
            raise ValueError(f"{args.what}: nothing to draw; name at least one poster")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    sheet(drawn, args.columns).save(args.out)
    for _, caption in drawn:
        print(": ".join((caption[0], "  ".join(caption[1:]))))
    print(f"{args.out} written")


if __name__ == "__main__":
    main()
