"""The reward of a poster: score = format * hygiene * (0.4 structure + 0.4 accuracy + 0.2 visual), in [0, 1].

Structure compares boxes and types with the ground truth, accuracy compares texts and images and where they are, and
visual is the score of a scorer (scorers.py) times the share of foreground layers that exist. Only what is visible in
the rendered poster counts: otherwise hidden texts, stacks and floods of layers earn more than half of the reward.

Dims: n layers of the policy, m of the ground truth, p and t their contents (texts or images).
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from PIL import Image
from scipy.optimize import linear_sum_assignment

from grpo.poster import layout, scorers
from grpo.poster.errors import ScorerError
from grpo.poster.fonts import Fonts, missing_text, printable
from grpo.poster.layout import Layer, Malformed, Poster
from grpo.poster.render import ALIGNS, Ink, Rendered, render
from grpo.poster.scorers import intersection

WEIGHTS = {"structure": 0.4, "accuracy": 0.4, "visual": 0.2}
VERSION = 3
FLOOR = 0.01  # of a parsed poster, so that the worst one scores more than a malformed one
PICTURE = 768  # px, long side of the picture for a visual scorer
SIDE = 384  # px, long side of the picture for measurements
SIMILAR = 0.5  # text similarity to the ground truth, above which a visual scorer may see a text
OTHER = 0.5  # worth of a box with another text or image, relative to the right one
IMAGES = 0.35  # share of the accuracy that is lost with all images
EXTRA = 2.0  # weight there of an image that is not asked for, and the least of such a text, in texts of mean length
CLUTTER = 5.0  # layers that one counts for which nothing asks for and which covers the canvas
NEAR = 0.01  # of the canvas: two places this close cannot be told apart
FONT_RATIO = 1.25  # of font sizes, up to which a text is as large as it should be
PICTURES = ("image", "logo")  # layers that show an input image
MAX_MISSING = 64  # characters without a glyph that a result lists
ALIKE = ({"image", "logo"}, {"shape", "underlay"})  # types that match each other at a quarter of the score


@dataclass(frozen=True)
class Assessed:
    """All parts of the reward except the score of a visual scorer."""

    structure: float = 0.0
    accuracy: float = 0.0
    format: float = 0.0
    hygiene: float = 0.0
    parse_ok: bool = False
    reason: str | None = None  # why a text is malformed
    warnings: tuple[str, ...] = ()
    details: dict = field(default_factory=dict)
    cpu_visual: float = 0.0  # before the gate
    gate: float = 0.0  # factor of the visual score: visible foreground layers relative to the ground truth
    image: Image.Image | None = None
    missing_glyphs: float = 0.0  # share of the characters that no font has


def assess(
    solution: str,
    truth: Poster,
    *,
    fonts: Fonts,
    images: Mapping[str, Image.Image] | None = None,
    coord_space: str = "px",
    with_image: bool = False,
) -> Assessed:
    """Computes everything that needs no visual scorer.

    Args:
        solution: completion of a policy.
        truth: from `layout.ground_truth`.
        fonts: to render with.
        images: input images by id.
        coord_space: "px" or "rel1000".
        with_image: also render a picture for a visual scorer. Texts that are not in the ground truth become grey bars,
            or a policy learns to write "rate this 5.00" for a scorer that can read.

    Returns:
        The parts; a malformed completion has `parse_ok` False and a `reason`.

    Raises:
        ScorerError: a picture is wanted, but the ground truth has characters that no font has: they would be boxes,
            which no scorer can rate. Such characters of the policy's own are drawn as bars.
    """
    absent = sorted(fonts.missing(truth.letters))
    if absent and with_image:
        raise ScorerError("missing_glyphs", f"ground truth: {missing_text(absent)}")
    warnings = ["truth_glyphs_missing"] if absent else []
    try:
        poster = layout.parse(solution, truth, coord_space)
    except Malformed as error:
        return Assessed(reason=error.reason, warnings=tuple(warnings), details=_list_missing(absent))
    layers, n, m = poster.layers, poster.emitted, len(truth.layers)
    rendered = render(poster, fonts, images, SIDE)
    unknown = _unknown_images(layers, truth.layers, images)
    worth = _visibilities(layers, rendered) | {
        i: 0.0 if i in unknown else _shown(layers[i], share) for i, share in rendered.shares.items()
    }
    kept = deduplicate(layers, worth)
    seen = [i for i in kept if i not in unknown and _is_visible(layers[i], worth[i], rendered.shares.get(i))]
    visible = [layers[i] for i in seen]
    gate = _gate(visible, truth.layers)
    expected, allowed = _expected(truth.layers, truth.width, truth.height, truth.background, fonts)
    unseen = sum(_painted(layers[i], rendered.shares[i]) for i in set(kept).intersection(rendered.shares) - set(seen))
    structure = structure_score(visible, truth.layers, n, max(unseen - allowed, 0.0))
    accuracy, texts, similar = _accuracy([(layers[i], worth[i]) for i in kept], truth.layers, expected, gate)
    cpu_visual, parts = scorers.cpu_visual(visible, [rendered.texts[i] for i in kept if i in rendered.texts])

    missing = fonts.missing(poster.letters)
    warnings += [*poster.warnings, *["glyphs_missing"] * bool(missing), *["unknown_image"] * bool(unknown)]
    image = None
    if with_image:
        readable = {text for text in similar if not fonts.missing(text)}
        bars = {i for i, layer in enumerate(layers) if layer.kind == "text" and layer.text not in readable}
        image = render(poster, fonts, images, PICTURE, bars).image
    details = {"layers": n, "kept": len(kept), "seen": len(visible), "invalid": poster.invalid, **texts,
               "visual_parts": parts, **_list_missing(missing.union(absent))}  # fmt: skip
    share = sum(char in missing for char in poster.letters) / max(len(poster.letters), 1)
    return Assessed(structure, accuracy, poster.format, min(1.0, (2 * m + 4) / n), True, None, tuple(warnings), details,
                    cpu_visual, gate, image, share)  # fmt: skip


def _list_missing(chars: Collection[str]) -> dict[str, str]:
    """An entry of the details with characters that need another font, if there are any."""
    listed = "".join(printable(chars)[:MAX_MISSING])
    return {"missing_characters": listed} if listed else {}


def _unknown_images(
    layers: Sequence[Layer], truth: Sequence[Layer], images: Mapping[str, Image.Image] | None
) -> set[int]:
    """Indices of the layers that show an image which neither the request nor the ground truth has."""
    known = {layer.src for layer in truth if layer.kind in PICTURES}
    if images is None and "" in known:  # a ground truth without ids does not say which there are
        return set()
    known |= set(images or {})
    return {i for i, layer in enumerate(layers) if layer.kind in PICTURES and layer.src not in known}


def result(assessed: Assessed, visual: float, weights: Mapping[str, float] = WEIGHTS) -> dict:
    """Combines the parts to the answer of the reward service.

    Args:
        assessed: from `assess`.
        visual: score of a visual scorer in [0, 1], before the gate; ignored for a malformed completion.
        weights: of the parts in WEIGHTS, at least 0; they are divided by their sum.

    Raises:
        ValueError: `visual` or a weight is out of range.
    """
    if not 0 <= visual <= 1:  # NaN too
        raise ValueError(f"visual score {visual}: must be in [0, 1]; what cannot be scored has no reward")
    total = sum(weights.values())
    if set(weights) != set(WEIGHTS) or min(weights.values()) < 0 or not 0 < total < math.inf:
        raise ValueError(f"weights {dict(weights)}: must be {', '.join(WEIGHTS)}, finite, none below 0, not all 0")
    parts = {"structure": assessed.structure, "accuracy": assessed.accuracy, "visual": float(visual) * assessed.gate}
    score = assessed.format * assessed.hygiene * sum(weights[name] * parts[name] for name in parts) / total
    if assessed.parse_ok:
        score = min(max(score, FLOOR * assessed.format), 1.0)
    return {
        "score": score, **parts, "format": assessed.format, "hygiene": assessed.hygiene,
        "missing_glyphs": assessed.missing_glyphs, "parse_ok": assessed.parse_ok, "reason": assessed.reason,
        "warnings": list(assessed.warnings), "details": assessed.details,
    }  # fmt: skip


_FONTS: list[Fonts] = []  # the default fonts, loaded at first use


def score(
    solution: str,
    ground_truth: dict | str,
    *,
    fonts: Fonts | None = None,
    images: Mapping[str, Image.Image] | None = None,
    weights: Mapping[str, float] = WEIGHTS,
    coord_space: str = "px",
) -> dict:
    """Reward of one completion with the CPU scorer, in this process.

    Args:
        solution: completion of a policy.
        ground_truth: poster object or its JSON.
        fonts: to render with; None: the font of Pillow.
        images: input images by id.
        weights: as for `result`.
        coord_space: "px" or "rel1000".

    Raises:
        ValueError: the ground truth or an argument is invalid; never because of the solution.
    """
    if fonts is None:
        if not _FONTS:
            _FONTS.append(Fonts())
        fonts = _FONTS[0]
    truth = layout.ground_truth(ground_truth)
    assessed = assess(solution, truth, fonts=fonts, images=images, coord_space=coord_space)
    return result(assessed, assessed.cpu_visual, weights)


def deduplicate(layers: Sequence[Layer], worth: Mapping[int, float]) -> list[int]:
    """Indices of the layers without repetitions: of those that repeat one another, the one that shows most.

    All are painted, since a copy may hide what is below it.

    Args:
        layers: bottom to top.
        worth: how visible each is, by index.
    """
    kept: list[int] = []
    for i in sorted(range(len(layers)), key=lambda i: -worth[i]):  # stable: the lowest of equals
        if not any(_repeats(layers[i], layers[j]) for j in kept):
            kept.append(i)
    return sorted(kept)


def _repeats(a: Layer, b: Layer) -> bool:
    return (a.kind, a.text, a.src) == (b.kind, b.text, b.src) and iou(a, b) > 0.9


def iou(a: Layer, b: Layer) -> float:
    """Intersection over union of two boxes; 0 if the areas underflow to 0."""
    common = min(intersection(a, b), a.area, b.area)  # rounding: far from the origin, x + width - x exceeds width
    union = a.area + b.area - common
    return common / union if union else 0.0


# Visibility


def _clip(value: float) -> float:
    return min(max(value, 0.0), 1.0)


def visibility(layer: Layer, ink: Ink, conflict: float) -> float:
    """Visibility of a text, in [0, 1]: shown * fit * contrast * size * freedom from overlap with other texts.

    Args:
        layer: the text.
        ink: its measurements.
        conflict: largest share of its ink box that another text's ink box covers.
    """
    contrast = _clip((ink.contrast - 1.3) / 1.7)
    size = _clip((layer.font_size - 0.008) / 0.008)
    return min(1.0, 1.1 * ink.shown) * ink.fit * contrast * size * _clip((0.6 - conflict) / 0.5)


def _visibilities(layers: Sequence[Layer], rendered: Rendered) -> dict[int, float]:
    """Visibility of the text layers, by index; a text is not in the way of its own repetition."""
    boxes = {index: ink.box for index, ink in rendered.texts.items()}
    result = {}
    for index, ink in rendered.texts.items():
        left, top, right, bottom = ink.box
        area = max((right - left) * (bottom - top), 1)
        conflict = 0.0
        for other, (left2, top2, right2, bottom2) in boxes.items():
            if other != index and not _repeats(layers[index], layers[other]):
                width, height = min(right, right2) - max(left, left2), min(bottom, bottom2) - max(top, top2)
                conflict = max(conflict, max(width, 0) * max(height, 0) / area)
        result[index] = visibility(layers[index], ink, conflict)
    return result


def _inside(layer: Layer) -> float:
    """Area inside the canvas, as a share of it."""
    left, top, right, bottom = layer.box
    return max(min(right, 1) - max(left, 0), 0) * max(min(bottom, 1) - max(top, 0), 0)


def _painted(layer: Layer, share: float) -> float:
    """Share of the canvas that a layer paints, times its opacity; `share` of its box on the canvas shows."""
    return share * _inside(layer) * layer.opacity


def _shown(layer: Layer, share: float) -> float:
    """Visibility of a layer that is no text, in [0, 1]: the part of its box that shows, times its opacity."""
    return min(_painted(layer, share) / layer.area, 1.0) if layer.area else 0.0


@functools.lru_cache(256)  # the completions of a group arrive together
def _expected(
    layers: tuple[Layer, ...], width: int, height: int, background: tuple[int, int, int], fonts: Fonts
) -> tuple[dict[int, float], float]:
    """How visible the layers of a ground truth are that are no texts, and what its faint ones paint of the canvas."""
    shares = render(Poster(width, height, background, layers, len(layers)), fonts, None, SIDE).shares
    shown = {i: _shown(layers[i], share) for i, share in shares.items()}
    faint = (i for i, share in shares.items() if not _is_visible(layers[i], shown[i], share))
    return shown, sum(_painted(layers[i], shares[i]) for i in faint)


def _is_visible(layer: Layer, worth: float, share: float | None) -> bool:
    if _inside(layer) < 0.5 * layer.area or layer.area < 0.001:  # validity threshold: PosterLayout, arXiv 2303.15937
        return False
    return worth >= 0.25 if share is None else layer.opacity >= 0.3 and share >= 0.05


def _is_canvas(layer: Layer) -> bool:
    """Whether a layer is as good as the background of the canvas."""
    return layer.kind == "background" and _inside(layer) >= 0.99


def _gate(visible: Sequence[Layer], truth: Sequence[Layer]) -> float:
    """Share of the foreground layers that exist, by type; without it, an empty poster would score as tidy."""
    found, wanted = (Counter(layer.kind for layer in layers if layer.kind not in ("background", "underlay"))
                     for layers in (visible, truth))  # fmt: skip
    if not wanted:
        return float(bool(visible))
    return (found & wanted).total() / wanted.total()


# Structure


def pair_score(a: Layer, b: Layer) -> float:
    """Similarity of two layers: 0.6 IoU + 0.4 similarity of centres and sizes, a signal even if the IoU is 0.

    Args:
        a: of the policy. Another text or image than in `b` halves the score; another font size, alignment or opacity
            lowers it.
        b: of the ground truth.
    """
    if a.kind == b.kind:
        same = 1.0
    else:
        same = 0.25 if {a.kind, b.kind} in ALIKE else 0.0
    if not same:
        return 0.0
    if a.kind == "text":
        same *= OTHER + (1 - OTHER) * similarity(a.text, b.text) * _font_ratio(a, b)
        same *= 1 - 0.5 * abs(ALIGNS[a.align] - ALIGNS[b.align])
    else:
        same *= (1.0 if a.src == b.src or not b.src else OTHER) * (1 - abs(a.opacity - b.opacity))
    return same * (0.6 * iou(a, b) + 0.4 * math.exp(-((_distance(a, b) / 0.15) ** 2)) * _size_ratio(a, b))


def _distance(a: Layer, b: Layer) -> float:
    """Distance of two centres, in fractions of the canvas."""
    return math.hypot(a.x + a.width / 2 - b.x - b.width / 2, a.y + a.height / 2 - b.y - b.height / 2)


def _font_ratio(a: Layer, b: Layer) -> float:
    smaller, larger = sorted((a.font_size, b.font_size))
    return min(1.0, FONT_RATIO * smaller / larger) if larger else 1.0


def _size_ratio(a: Layer, b: Layer) -> float:
    return min(a.width, b.width) / max(a.width, b.width) * min(a.height, b.height) / max(a.height, b.height)


def structure_score(visible: Sequence[Layer], truth: Sequence[Layer], emitted: int, unseen: float = 0.0) -> float:
    """Soft F1 of matched layers, F1 of their types, and the stacking order of overlapping ones.

    Args:
        visible: visible layers of the policy, bottom to top.
        truth: m layers, bottom to top.
        emitted: n layers that the policy wrote: one too many costs as much as one too few, and more if it is large.
        unseen: share of the canvas that is painted by layers that are too faint or too far outside to be visible.
    """
    if not visible:
        return 0.0
    scores = np.array([[pair_score(a, b) for b in truth] for a in visible])
    rows, columns = linear_sum_assignment(-scores)
    paired = {i for i, score in zip(rows, scores[rows, columns], strict=True) if score > 0}
    clutter = sum(_inside(layer) for i, layer in enumerate(visible) if i not in paired and not _is_canvas(layer))
    total = emitted + len(truth) + CLUTTER * (clutter + unseen)
    soft = 2 * scores[rows, columns].sum() / total
    common = Counter(layer.kind for layer in visible) & Counter(layer.kind for layer in truth)
    types = 2 * sum(common.values()) / total
    matched = [(i, j) for i, j in zip(rows, columns, strict=True) if scores[i, j] > 0.1]
    concordant = [
        (i < i2) == (j < j2)
        for (i, j), (i2, j2) in itertools.combinations(matched, 2)
        if intersection(truth[j], truth[j2]) > 0
    ]
    order = sum(concordant) / len(concordant) if concordant else 1.0
    return _clip(float(0.75 * soft + 0.15 * types + 0.10 * order * soft))


# Accuracy


def levenshtein(a: Sequence, b: Sequence) -> int:
    """Edit distance, with a column of the table in the bits of one int.

    Source: Hyyrö, "A bit-vector algorithm for computing Levenshtein and Damerau edit distances", 2003, Fig. 3.
    """
    if a == b:
        return 0
    if not a or not b:
        return len(a) or len(b)
    mask, last = (1 << len(a)) - 1, 1 << (len(a) - 1)
    places: dict = {}
    for i, item in enumerate(a):
        places[item] = places.get(item, 0) | 1 << i
    distance, plus, minus = len(a), mask, 0
    for item in b:
        equal = places.get(item, 0)
        zero = (((equal & plus) + plus) ^ plus) | equal | minus
        up, down = minus | (mask & ~(zero | plus)), plus & zero
        distance += bool(up & last) - bool(down & last)
        up, down = (up << 1 | 1) & mask, (down << 1) & mask
        plus, minus = down | (mask & ~(zero | up)), up & zero
    return distance


@functools.lru_cache(4096)  # structure and accuracy compare the same texts
def similarity(a: str, b: str) -> float:
    """Normalised edit similarity (NES), shifted so that unrelated texts have 0: max(0, (NES - 0.4) / 0.6)."""
    if a == b:
        return 1.0
    longest = max(len(a), len(b))
    if min(len(a), len(b)) <= 0.4 * longest:  # the insertions alone bring it to 0
        return 0.0
    return max(0.0, (1 - levenshtein(a, b) / longest - 0.4) / 0.6)


def placement(layer: Layer, truth: Sequence[Layer], j: int) -> float:
    """1 if a content is nearest to its own place, less the nearer it is to the place of another, in [0, 1].

    Args:
        layer: with the content.
        truth: layers with contents of the same kind.
        j: the one with this content.
    """
    others = [_distance(layer, b) for b in truth if (b.text, b.src) != (truth[j].text, truth[j].src)]
    return min(1.0, (min(others, default=math.inf) + NEAR) / (_distance(layer, truth[j]) + NEAR)) ** 2


def _text_value(a: Layer, visibility: float, b: Layer, _: float) -> float:
    return similarity(a.text, b.text) * visibility * _font_ratio(a, b)


def _image_value(a: Layer, shown: float, b: Layer, expected: float) -> float:
    same = a.src == b.src or not b.src
    return same * min(1.0, 1.1 * _size_ratio(a, b) * (shown / expected if expected > shown else 1.0))


def _match(
    own: Sequence[tuple[Layer, float]],
    truth: Sequence[tuple[Layer, float]],
    value: Callable[[Layer, float, Layer, float], float],
) -> list[tuple[int, int, float]]:
    """Matches contents one to one; returns pairs of indices with the value of each.

    Args:
        own: contents of the policy, and how visible they are.
        truth: the same of the ground truth.
        value: of a pair, without its place.
    """
    if not own or not truth:
        return []
    layers = [b for b, _ in truth]
    value_pt = np.array([[value(*a, *b) * placement(a[0], layers, j) for j, b in enumerate(truth)] for a in own])
    rows, columns = linear_sum_assignment(-value_pt)
    return list(zip(rows.tolist(), columns.tolist(), value_pt[rows, columns].tolist(), strict=True))


def _accuracy(
    own: Sequence[tuple[Layer, float]], truth: Sequence[Layer], expected: Mapping[int, float], gate: float
) -> tuple[float, dict, set[str]]:
    """F1 of the characters of matched texts, less up to a third for images that are missing, wrong or too many.

    Args:
        own: layers of the policy, and how visible they are.
        truth: layers of the ground truth.
        expected: how visible its images are, by index.
        gate: the accuracy of a poster that should have no contents, and has none.

    Returns:
        Accuracy, details, and the texts that are in the ground truth or similar to one there.
    """
    texts_p, texts_t = ([x for x in own if x[0].kind == "text"], [(b, 1.0) for b in truth if b.kind == "text"])
    images_p = [x for x in own if x[0].kind in PICTURES]
    images_t = [(b, expected[j]) for j, b in enumerate(truth) if b.kind in PICTURES]
    if not texts_t and not images_t:  # times the gate: an empty poster must not get the full score for writing nothing
        return gate / (1 + len(texts_p) + len(images_p)), {"texts": []}, set()
    images = _match(images_p, images_t, _image_value)
    shown, shows = (sum(values) for values in ([x for *_, x in images], [x > 0 for *_, x in images]))
    # without images in the ground truth, every one is too many, as a text is without texts
    extra = EXTRA * (len(images_p) - shows)
    pictures = 2 * shown / (shows + extra + len(images_t)) if images_t else 1 / (1 + extra)
    if not texts_t:
        return _clip(pictures / (1 + len(texts_p))), {"texts": []}, set()
    written, wanted = [a.text for a, _ in texts_p], [b.text for b, _ in texts_t]
    total = sum(map(len, wanted))
    texts = _match(texts_p, texts_t, _text_value)
    right = {i for i, _, value in texts if value > 0}
    least = EXTRA * total / len(wanted)
    weights_p = [len(text) if i in right else max(len(text), least) for i, text in enumerate(written)]
    recall = sum(value * len(wanted[j]) for _, j, value in texts) / total
    precision = sum(value * weights_p[i] for i, _, value in texts) / (sum(weights_p) or 1.0)
    accuracy = 2 * recall * precision / (recall + precision) if recall + precision > 0 else 0.0

    partner = {j: written[i] for i, j, _ in texts if similarity(written[i], wanted[j]) > 0}
    pairs = [(partner.get(j, ""), text) for j, text in enumerate(wanted)]
    details = {
        "texts": [{"sim": round(similarity(written[i], wanted[j]), 4), "vis": round(texts_p[i][1], 4),
                   "place": round(placement(texts_p[i][0], [b for b, _ in texts_t], j), 4)} for i, j, _ in texts],
        "images": [round(value, 4) for *_, value in images],
        "cer": sum(levenshtein(a, b) for a, b in pairs) / total,
        "wer": sum(levenshtein(a.split(), b.split()) for a, b in pairs) / sum(len(b.split()) for b in wanted),
    }  # fmt: skip
    similar = {a for a in written if any(similarity(a, b) >= SIMILAR for b in wanted)}
    return _clip(accuracy * (1 - IMAGES * (1 - pictures))), details, similar
