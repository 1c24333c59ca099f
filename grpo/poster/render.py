"""Renders a poster to pixels, and measures how much of each layer is visible.

Text layout has its own rules, so that scores do not depend on a browser: lines break at newlines only, are 1.2 font
sizes high and may overflow their box; the block of lines is centred vertically, each line aligned as the layer says.

Dims: H, W pixels of the picture.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from grpo.poster.fonts import INK, Fonts
from grpo.poster.layout import Layer, Poster

OPAQUE = 0.5  # a layer with this opacity hides the pixels below; one with less is a veil that lets them through
LINE_HEIGHT = 1.2  # font sizes
BASELINE = 0.95  # font sizes below the top of a line
GREY = (128, 128, 128)
ALIGNS = {"left": 0.0, "center": 0.5, "right": 1.0}  # share of the free width that is left of a line

Region = tuple[slice, slice]  # rows and columns of the picture


@dataclass(frozen=True)
class Ink:
    """Measurements of one text layer."""

    shown: float  # visible share of its ink; ink outside the canvas counts as hidden
    fit: float  # 1 if the lines fit into the box
    contrast: float  # WCAG ratio, 1 to 21, to the median colour under the letters; 1 if none is on the canvas
    box: tuple[int, int, int, int]  # left, top, right, bottom of the letters in px of the picture


@dataclass(frozen=True)
class Rendered:
    """A picture, and how much of each layer is visible."""

    pixels: np.ndarray  # uint8 [H, W, 3]
    owner: np.ndarray  # int16 [H, W], index of the topmost opaque layer at the pixel, -1 for the canvas
    texts: dict[int, Ink]  # text layers by index
    shares: dict[int, float]  # other layers by index: visible share of the box inside the canvas

    @property
    def image(self) -> Image.Image:
        """The picture, RGB."""
        return Image.fromarray(self.pixels)


def render(
    poster: Poster,
    fonts: Fonts,
    images: Mapping[str, Image.Image] | None = None,
    long_side: int = 384,
    bars: Collection[int] = (),
) -> Rendered:
    """Renders a poster.

    Args:
        poster: of at most a few dozen layers.
        fonts: for its texts.
        images: input images by id, stretched to their boxes; an unknown id is grey.
        long_side: of the picture in px.
        bars: indices of text layers that are drawn as grey bars instead of letters.
    """
    scale = long_side / max(poster.width, poster.height)
    width, height = max(1, round(poster.width * scale)), max(1, round(poster.height * scale))
    pixels = np.empty((height, width, 3), np.uint8)
    pixels[:] = _row(poster.background, width)
    owner = np.full((height, width), -1, np.int16)
    transmission: np.ndarray | None = None  # fp32 [H, W], share of light that the veils so far let through
    sources = {
        src: _source(images[src], long_side) for src in {layer.src for layer in poster.layers} & set(images or {})
    }
    placed: dict[int, _Placed] = {}
    for index, layer in enumerate(poster.layers):
        if layer.kind == "text":
            item = _place_text(layer, poster.width / poster.height, fonts, width, height)
            _paint_text(pixels, owner, index, layer, item, index in bars)
        else:
            box = _pixel_box(layer, width, height)
            item = _Placed(_region(box, width, height), box)
            if pixels[item.region].size:
                color, alpha = _fill(layer, sources, box, item.region)
                _blend(pixels, item.region, color, alpha)
                if layer.opacity < OPAQUE:
                    transmission = np.ones(owner.shape, np.float32) if transmission is None else transmission
                    transmission[item.region] *= 1 - layer.opacity
                elif isinstance(alpha, float):
                    owner[item.region] = index
                else:
                    owner[item.region][alpha >= OPAQUE] = index
        item.transmission = _mean_transmission(transmission, item)
        placed[index] = item

    texts, shares = {}, {}
    for index, item in placed.items():
        free = owner[item.region] <= index  # covered by veils at most
        through = _mean_transmission(transmission, item) / item.transmission  # of the veils above
        if item.ink is None:
            shares[index] = np.count_nonzero(free) / free.size * through if free.size else 0.0
            continue
        shown = min(1.0, np.count_nonzero(item.ink & free) / item.drawn) if item.drawn else 0.0
        layer = poster.layers[index]
        opacity = layer.opacity * through
        seen = [b + (c - b) * opacity for c, b in zip(layer.color, item.backdrop, strict=True)]
        texts[index] = Ink(shown, item.fit, contrast_ratio(seen, item.backdrop), item.box)
    return Rendered(pixels, owner, texts, shares)


@dataclass
class _Placed:
    """A layer on the picture; the fields from `ink` on are for texts."""

    region: Region
    box: tuple[int, int, int, int]
    transmission: float = 1.0  # of the veils below it
    ink: np.ndarray | None = None  # bool, of the region
    coverage: np.ndarray | None = None  # uint8, of the region
    drawn: float = 0.0  # pixels of ink, including those outside the canvas
    fit: float = 1.0
    backdrop: Sequence[float] = (0, 0, 0)
    bars: Sequence[tuple[int, int, int, int]] = ()


def _mean_transmission(transmission: np.ndarray | None, item: _Placed) -> float:
    if transmission is None:
        return 1.0
    values = transmission[item.region] if item.ink is None else transmission[item.region][item.ink]
    return float(values.mean()) if values.size else 1.0


def contrast_ratio(first: Sequence[float], second: Sequence[float]) -> float:
    """Contrast of two sRGB colours (0 to 255), from 1 to 21.

    Source: WCAG 2.1, relative luminance and contrast ratio.
    """
    lighter, darker = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(color: Sequence[float]) -> float:
    linear = [c / 255 / 12.92 if c / 255 <= 0.03928 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in color]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _pixel_box(layer: Layer, width: int, height: int) -> tuple[int, int, int, int]:
    """Box in px, at least one pixel wide and high."""
    left, top, right, bottom = layer.box
    left, top, right, bottom = round(left * width), round(top * height), round(right * width), round(bottom * height)
    return left, top, max(right, left + 1), max(bottom, top + 1)


def _region(box: tuple[int, int, int, int], width: int, height: int) -> Region:
    """The part of a box inside the picture, possibly empty."""
    left, top, right, bottom = box
    left, top = min(max(left, 0), width), min(max(top, 0), height)
    return slice(top, max(min(bottom, height), top)), slice(left, max(min(right, width), left))


def _source(image: Image.Image, long_side: int) -> Image.Image:
    """An input image as RGB or RGBA, reduced to about the size of the picture: it may be painted dozens of times."""
    shrink = min(image.size) // long_side
    if image.mode not in ("RGB", "RGBA"):
        image = image.convert("RGBA" if image.mode in ("LA", "PA") or "transparency" in image.info else "RGB")
    return image.reduce(shrink) if shrink > 1 else image


def _fill(
    layer: Layer, images: Mapping[str, Image.Image], box: tuple[int, int, int, int], region: Region
) -> tuple[np.ndarray, np.ndarray | float]:
    """Colours of the visible region of a layer, and their opacity."""
    rows, columns = region
    image = images.get(layer.src) if layer.kind in ("image", "logo") else None
    if image is None:
        color = GREY if layer.kind in ("image", "logo") else layer.color
        return _row(color, columns.stop - columns.start), layer.opacity
    per_x, per_y = image.width / (box[2] - box[0]), image.height / (box[3] - box[1])
    crop = ((columns.start - box[0]) * per_x, (rows.start - box[1]) * per_y,
            (columns.stop - box[0]) * per_x, (rows.stop - box[1]) * per_y)  # fmt: skip
    size = columns.stop - columns.start, rows.stop - rows.start
    # resize only the part on the canvas: a box of four times its sides would cost sixteen times as much
    crop = (max(crop[0], 0), max(crop[1], 0), min(crop[2], image.width), min(crop[3], image.height))
    painted = np.asarray(image.resize(size, Image.Resampling.BILINEAR, crop))
    if painted.shape[2] == 4:
        return painted[..., :3], painted[..., 3] * np.float32(layer.opacity / 255)
    return painted, layer.opacity


def _row(color: tuple[int, int, int], width: int) -> np.ndarray:
    """One row of pixels; numpy broadcasts rows much faster than single colours."""
    return np.tile(np.array(color, np.uint8), (width, 1))


def _blend(pixels: np.ndarray, region: Region, color: np.ndarray, alpha: np.ndarray | float) -> None:
    if isinstance(alpha, float) and alpha == 1:
        pixels[region] = color
        return
    below = pixels[region].astype(np.float32)
    weight = alpha if isinstance(alpha, float) else alpha[..., None]
    pixels[region] = np.rint(below + (color.astype(np.float32) - below) * weight).astype(np.uint8)


def _place_text(layer: Layer, aspect: float, fonts: Fonts, width: int, height: int) -> _Placed:
    """Lays out the letters of a text layer."""
    size = layer.font_size * height
    lengths = [fonts.length(line) for line in layer.lines]
    lines_high = LINE_HEIGHT * layer.font_size * len(layer.lines)
    longest = max(lengths) * layer.font_size
    fit = min(1.0, layer.width * aspect / longest if longest else 1.0) * min(1.0, layer.height / lines_high)
    top = (layer.y + (layer.height - lines_high) / 2) * height
    share = ALIGNS[layer.align]

    glyphs, bars, boxes, drawn = [], [], [], 0.0
    for row, (line, length) in enumerate(zip(layer.lines, lengths, strict=True)):
        start = layer.x * width + (layer.width * width - length * size) * share
        baseline = top + (LINE_HEIGHT * row + BASELINE) * size
        bars.append((round(start), round(baseline - 0.5 * size), round(start + length * size), round(baseline)))
        off = not -size < baseline < height + 2 * size
        for char, pen in fonts.pens(line, size):
            if (
                off or not -3 * size < start + pen < width + size
            ):  # off the canvas: only estimate the ink, huge letters are slow to draw
                drawn += fonts.ink(char, size)
                boxes.append(bars[-1])
                continue
            glyph = fonts.glyph(char, size)
            x, y = round(start + pen) + glyph.left, round(baseline) + glyph.top
            if glyph.ink:
                drawn += glyph.ink
                glyphs.append((glyph, x, y))
                boxes.append((x, y, x + glyph.mask.shape[1], y + glyph.mask.shape[0]))
    box = (0, 0, 0, 0)
    if boxes:  # empty if no character has ink
        lefts, tops, rights, bottoms = zip(*boxes, strict=True)
        box = min(lefts), min(tops), max(rights), max(bottoms)
    region = _region(box, width, height)
    left, top = region[1].start, region[0].start
    coverage = np.zeros((region[0].stop - top, region[1].stop - left), np.uint8)
    for glyph, x, y in glyphs:
        rows, columns = glyph.mask.shape
        x0, y0, x1, y1 = max(x, 0), max(y, 0), min(x + columns, width), min(y + rows, height)
        if x0 < x1 and y0 < y1:  # on the canvas
            target = coverage[y0 - top : y1 - top, x0 - left : x1 - left]
            np.maximum(target, glyph.mask[y0 - y : y1 - y, x0 - x : x1 - x], out=target)
    return _Placed(region, box, ink=coverage >= INK, coverage=coverage, drawn=drawn, fit=fit, bars=bars)


def _paint_text(pixels: np.ndarray, owner: np.ndarray, index: int, layer: Layer, item: _Placed, as_bars: bool) -> None:
    below = pixels[item.region][item.ink]
    item.backdrop = np.median(below, axis=0).tolist() if len(below) else layer.color
    if as_bars:
        for bar in item.bars:
            pixels[_region(bar, owner.shape[1], owner.shape[0])] = GREY
    elif item.coverage.size:
        alpha = item.coverage * np.float32(layer.opacity / 255)
        _blend(pixels, item.region, np.array(layer.color, np.uint8), alpha)
    if layer.opacity >= OPAQUE:
        owner[item.region][item.ink] = index
