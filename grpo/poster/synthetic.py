"""Synthetic poster briefs with a good poster for each: pure functions of a seed, without files or network (CC0).

A record is a brief (canvas, colours, role-tagged texts in shuffled order, image ids, the layout in words) and a poster
that fulfils it. The brief determines every coordinate of that poster, so the task can be learned. Level 0 is for tests:
3 layers on a tiny canvas. Level 1, the default, has 6 or 7 layers. Level 2 has two images, a logo and 10 to 14 layers.
Input images are procedural and depend on the seed, too.
"""

import colorsys
import json
import random
import re
from typing import Any

import numpy as np
from PIL import Image

SPLITS = {"train": range(10_000), "test": range(10_000, 10_200)}
MAX_SEED = 10**9

# background, text on it, accent (fill of the button), text on the accent; both text contrasts are above 4.5 (WCAG)
PALETTES = (
    ("#1B2A41", "#FFFFFF", "#F4A259", "#1B2A41"),
    ("#FFF8E7", "#22223B", "#9B2226", "#FFFFFF"),
    ("#0B3D2E", "#F1FAEE", "#F4D35E", "#0B3D2E"),
    ("#F2F2F2", "#1D1D1D", "#1D4ED8", "#FFFFFF"),
    ("#3D0C45", "#FFE8D6", "#FFB703", "#3D0C45"),
)
CANVASES = ((600, 800), (720, 960), (800, 800), (640, 1136))
TEMPLATES = {"top": "at the top", "middle": "in the middle", "lower": "at the bottom", "text": ""}

SHORT_HEADLINES = ("Jazz Night", "Open Day", "Book Fair", "Art Walk", "Flea Sale", "Chess Cup", "Film Club", "Sea Run")
SHORT_DATES = ("5 June, 8 pm", "Friday, 6 pm", "1 May, noon", "Sunday, 9 am", "12 July, 3 pm", "Monday, 7 pm")
HEADLINES = (
    "Summer Jazz Night", "Harbour Food Fair", "Winter Book Sale", "City Marathon", "Open Studio Day",
    "Night Market", "Garden Festival", "Science for All", "Film by the River", "Craft and Clay",
)  # fmt: skip
SUBLINES = (
    "Music, food and good company", "Free entry for everyone", "Three days under open skies",
    "Bring a friend, stay all day", "Local makers, fair prices", "One evening to remember",
)  # fmt: skip
CTAS = ("Book now", "Join us", "Get tickets", "Save a seat", "Sign up", "Learn more")
MONTHS = ("January", "March", "April", "May", "June", "August", "October", "November")
PLACES = (
    "Old Town Hall",
    "Pier 14, North Quay",
    "Linden Park",
    "Museum Square",
    "The Brick Yard",
    "Hall 3, Fair Ground",
)
PRICES = ("Tickets from 8 EUR", "Entry 12 EUR", "Half price for students", "Children go free")
FOOTERS = ("Doors open one hour earlier", "Rain or shine", "Please bring your own cup")
CJK_LINES = ("夏日夜市", "城市音乐节", "春の本市", "여름 밤 축제")

# order of the blocks from top to bottom; blocks that a poster lacks are skipped
STACKS = {
    "top": ("logo", "images", "headline", "cjk", "subline", "rule", "date", "place", "price", "cta", "footer"),
    "middle": ("logo", "headline", "cjk", "subline", "images", "rule", "date", "place", "price", "cta", "footer"),
    "lower": ("logo", "headline", "cjk", "subline", "rule", "date", "place", "price", "cta", "footer", "images"),
    "text": ("headline", "subline", "rule", "date", "cta"),
}
TEXT_ROLES = ("headline", "cjk", "subline", "date", "place", "price", "cta", "footer")
SCHEMA = (
    'Design a poster. Answer with JSON only: {"canvas":{"width","height","background"},"layers":[..]}, layers from '
    "bottom to top. Each layer has type, x, y, width, height (pixels, origin top left). Also: fill for background, "
    "shape, underlay; src for image, logo; text, font_size, color, align for text."
)
REFERENCE = re.compile(r"synthetic:([0-2]):(0|[1-9][0-9]{0,8}):([1-3])", re.ASCII)


def record(seed: int, level: int, cjk: bool = False) -> dict[str, Any]:
    """The brief and the good poster of a seed.

    Args:
        seed: from 0 to 10**9 - 1.
        level: 0, 1 or 2.
        cjk: adds to level 2 a line in Chinese, Japanese or Korean, which needs a font with these characters.

    Returns:
        {"id", "prompt", "images": references for `image`, image_1 first, "ground_truth", "extra_info": {"seed",
        "level"}}.

    Raises:
        ValueError: there is no such seed or level.
    """
    if not 0 <= seed < MAX_SEED or level not in (0, 1, 2):
        raise ValueError(f"seed {seed}, level {level}: seeds are 0 to {MAX_SEED - 1}, levels 0, 1 and 2; choose others")
    rng = random.Random(f"poster {level} {seed}")
    prompt, poster = _tiny(rng) if level == 0 else _stacked(rng, level, cjk)
    num_images = sum("src" in layer for layer in poster["layers"])
    return {
        "id": f"synthetic-{level}-{seed}",
        "prompt": prompt,
        "images": [f"synthetic:{level}:{seed}:{k + 1}" for k in range(num_images)],
        "ground_truth": poster,
        "extra_info": {"seed": seed, "level": level},
    }


def records(level: int, split: str, limit: int | None = None) -> list[dict[str, Any]]:
    """The records of a split; the splits share no seed and never change.

    Args:
        level: 0, 1 or 2.
        split: "train" (10,000 records) or "test" (200 records).
        limit: number of records, from the first; None: all.

    Raises:
        ValueError: there is no such split or level.
    """
    if split not in SPLITS:
        raise ValueError(f"split={split!r} is not a split of the synthetic posters; use one of {sorted(SPLITS)}")
    return [record(seed, level) for seed in SPLITS[split][:limit]]


def gold(record: dict[str, Any]) -> str:
    """The good poster of a record as a policy should write it: JSON on one line without spaces."""
    return json.dumps(record["ground_truth"], ensure_ascii=False, separators=(",", ":"))


def image(reference: str) -> Image.Image:
    """Draws an input image of a record.

    Args:
        reference: "synthetic:LEVEL:SEED:K", where K = 1 is image_1.

    Returns:
        RGB; 56 x 56 pixels at level 0, at most 448 x 448 at the others, sides in multiples of 28.

    Raises:
        ValueError: the reference is invalid, or the record has fewer images.
    """
    return _picture(random.Random(reference), *image_size(reference))


def image_size(reference: str) -> tuple[int, int]:
    """Width and height of an input image in pixels, without drawing it.

    Args:
        reference: as in `image`.

    Raises:
        ValueError: as in `image`.
    """
    match = REFERENCE.fullmatch(reference)
    if match is None:
        raise ValueError(f"image reference {reference!r}: must read synthetic:LEVEL:SEED:K; take those of a record")
    level, seed, number = map(int, match.groups())
    poster = record(seed, level)["ground_truth"]
    drawn = {layer["src"]: layer for layer in poster["layers"] if "src" in layer}
    layer = drawn.get(f"image_{number}")
    if layer is None:
        raise ValueError(f"image reference {reference!r}: this record has {len(drawn)} images; take one of those")
    longest = 56 if level == 0 else 112 if layer["type"] == "logo" else 448
    scale = longest / max(layer["width"], layer["height"])
    width, height = (max(28, round(layer[side] * scale / 28) * 28) for side in ("width", "height"))
    return width, height


def _tiny(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """The brief and the poster of level 0: an image and two texts, without optional fields."""
    width, height = 112, 168
    background, color, *_ = rng.choice(PALETTES)
    template = rng.choice(("top", "middle", "lower"))
    side = rng.choice((56, 70, 84))
    texts = {"headline": rng.choice(SHORT_HEADLINES), "date": rng.choice(SHORT_DATES)}
    heights = {"image": side, "headline": 20, "date": 15}
    order = {"top": ("image", "headline", "date"), "middle": ("headline", "image", "date")}
    order = order.get(template, ("headline", "date", "image"))
    gap = (height - sum(heights.values())) // 4
    tops = _tops(gap, gap, [heights[name] for name in order])
    top = dict(zip(order, tops, strict=True))
    box = {"x": (width - side) // 2, "y": top["image"], "width": side, "height": side}
    layers = [{"type": "image", "src": "image_1", **box}]
    for role, text in texts.items():
        box = {"x": 8, "y": top[role], "width": 96, "height": heights[role]}
        layers.append({"type": "text", "text": text, **box, "color": color})
    lines = [f'{role} "{text}"' for role, text in texts.items()]
    rng.shuffle(lines)
    prompt = (
        f"Poster as JSON only. Canvas {width}x{height}, background {background}, text {color}. "
        f"image_1 {side}x{side} {TEMPLATES[template]}. {lines[0]}, {lines[1]}."
    )
    return prompt, {"canvas": {"width": width, "height": height, "background": background}, "layers": layers}


def _stacked(rng: random.Random, level: int, cjk: bool) -> tuple[str, dict[str, Any]]:
    """The brief and the poster of level 1 or 2: blocks in one column from top to bottom, evenly spaced."""
    width, height = rng.choice(CANVASES)
    background, color, accent, on_accent = rng.choice(PALETTES)
    template = rng.choice(tuple(TEMPLATES) if level == 1 else ("top", "middle", "lower"))
    align = rng.choice(("left", "center"))
    texts = _texts(rng, level, cjk)
    unit = min(
        width, 0.75 * height
    )  # unit of text sizes; bounded by the height, so that all lines fit on wide canvases
    margin, column = round(0.08 * width), width - 2 * round(0.08 * width)
    sizes = {role: round((0.07 if role == "headline" else 0.04) * unit) for role in texts}
    heights = {role: -(-13 * size // 10) for role, size in sizes.items()}
    heights["cta"] = round(0.085 * unit)
    if template != "text":
        heights["images"] = round((0.42 if level == 1 else 0.27) * height)
    if template == "text" or (level == 2 and rng.random() < 0.5):
        heights["rule"] = max(6, round(0.012 * height))
    if level == 2:
        heights["logo"] = round(0.09 * unit)
    order = [name for name in STACKS[template] if name in heights]
    edge = round((0.14 if template == "text" else 0.05) * height)
    gap = (height - 2 * edge - sum(heights[name] for name in order)) // (len(order) - 1)
    top = dict(zip(order, _tops(edge, gap, [heights[name] for name in order]), strict=True))

    def box(name: str, wide: int) -> dict[str, int]:
        x = margin if align == "left" else (width - wide) // 2
        return {"x": x, "y": top[name], "width": wide, "height": heights[name]}

    layers = [{"type": "background", "x": 0, "y": 0, "width": width, "height": height, "fill": background}]
    images = []
    if template != "text":
        each = column if level == 1 else (column - round(0.04 * width)) // 2
        for k in range(level):
            x = margin + k * (column - each)
            place = {"x": x, "y": top["images"], "width": each, "height": heights["images"]}
            layers.append({"type": "image", "src": f"image_{k + 1}", **place})
        images = [f"{'image_1' if level == 1 else 'image_1, image_2 side by side'} {each}x{heights['images']}"]
    if "logo" in heights:
        layers.append({"type": "logo", "src": "image_3", **box("logo", heights["logo"])})
        images.append(f"image_3 {heights['logo']}x{heights['logo']} logo above all")
    if "rule" in heights:
        layers.append({"type": "shape", **box("rule", round(0.25 * width)), "fill": accent})
        images.append("accent rule above the date")
    for role in sorted(texts, key=TEXT_ROLES.index):
        place, paint = box(role, column), color
        if role == "cta":  # in the middle of an underlay
            button = box(role, round(0.42 * width))
            layers.append({"type": "underlay", **button, "fill": accent})
            inset, tall = round(0.03 * width), -(-13 * sizes[role] // 10)
            place = {
                "x": button["x"] + inset,
                "y": button["y"] + (button["height"] - tall) // 2,
                "width": button["width"] - 2 * inset,
                "height": tall,
            }
            paint = on_accent
        style = {"font_size": sizes[role], "color": paint, "align": "center" if role == "cta" else align}
        layers.append({"type": "text", "text": texts[role], **place, **style})
    lines = [f'{role} {sizes[role]}px "{text}"' for role, text in texts.items()]
    rng.shuffle(lines)
    where = f"images {TEMPLATES[template]}" if template != "text" else "text only"
    prompt = "\n".join([
        SCHEMA,
        f"Canvas {width}x{height}, background {background}, text {color}, accent {accent}, text on accent {on_accent}.",
        f"Layout: {where}, {align}-aligned, cta centred on an accent underlay.",
        *images,
        *lines,
    ])  # fmt: skip
    return prompt, {"canvas": {"width": width, "height": height, "background": background}, "layers": layers}


def _texts(rng: random.Random, level: int, cjk: bool) -> dict[str, str]:
    """The texts of a poster by role; optional ones exist with probability 1/2."""
    date = f"{rng.randint(1, 28)} {rng.choice(MONTHS)}, {rng.randint(1, 11)} {rng.choice(('am', 'pm'))}"
    texts = {"headline": rng.choice(HEADLINES), "date": date, "cta": rng.choice(CTAS)}
    if level == 2 or rng.random() < 0.5:
        texts["subline"] = rng.choice(SUBLINES)
    if level == 2:
        texts["place"] = rng.choice(PLACES)
        for role, choices in (("price", PRICES), ("footer", FOOTERS)):
            if rng.random() < 0.5:
                texts[role] = rng.choice(choices)
        line = rng.choice(CJK_LINES)  # always drawn from rng, so that the rest of the record does not depend on cjk
        if cjk:
            texts["cjk"] = line
    return texts


def _tops(first: int, gap: int, heights: list[int]) -> list[int]:
    """Top edges of stacked blocks."""
    return [first + sum(heights[:i]) + i * gap for i in range(len(heights))]


def _picture(rng: random.Random, width: int, height: int) -> Image.Image:
    """A gradient between two colours with a few discs and a little noise."""
    y, x = np.mgrid[0:height, 0:width] / max(width, height)
    start, end = (np.array(colorsys.hsv_to_rgb(rng.random(), 0.6, rng.uniform(0.4, 0.9))) for _ in range(2))
    slope = rng.random()
    share = slope * x / x.max() + (1 - slope) * y / y.max()
    pixels = start + share[..., None] * (end - start)
    for _ in range(rng.randint(2, 6)):
        centre_x, centre_y, radius = rng.random(), rng.random(), rng.uniform(0.05, 0.3)
        disc = (x - centre_x) ** 2 + (y - centre_y) ** 2 < radius**2
        pixels[disc] = 0.3 * pixels[disc] + 0.7 * np.array(colorsys.hsv_to_rgb(rng.random(), 0.7, 0.9))
    noise = np.frombuffer(rng.randbytes(width * height), np.uint8).reshape(height, width, 1) / 255 - 0.5
    return Image.fromarray(np.clip(255 * pixels + 16 * noise, 0, 255).round().astype(np.uint8))
