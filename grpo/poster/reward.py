"""The reward of a poster: score = format * hygiene * (0.4 structure + 0.4 accuracy + 0.2 visual), in [0, 1].

Structure compares boxes and types with the ground truth, accuracy compares the texts, and visual is the score of a
scorer (scorers.py) times the share of foreground layers that exist. Only what is visible in the rendered poster counts:
otherwise hidden texts, stacks and floods of layers earn more than half of the reward.

Dims: n layers of the policy, m of the ground truth, p and t their texts.
"""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from PIL import Image
from scipy.optimize import linear_sum_assignment

from grpo.poster import layout, scorers
from grpo.poster.fonts import Fonts
from grpo.poster.layout import Layer, Malformed, Poster
from grpo.poster.render import Ink, Rendered, render
from grpo.poster.scorers import intersection

WEIGHTS = {"structure": 0.4, "accuracy": 0.4, "visual": 0.2}
VERSION = 2
FLOOR = 0.01  # of a parsed poster, so that the worst one scores more than a malformed one
PICTURE = 768  # px, long side of the picture for a visual scorer
SIDE = 384  # px, long side of the picture for measurements
SIMILAR = 0.5  # text similarity to the ground truth, above which a visual scorer may see a text
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
    """
    try:
        poster = layout.parse(solution, truth, coord_space)
    except Malformed as error:
        return Assessed(reason=error.reason)
    n, m = poster.emitted, len(truth.layers)
    kept = deduplicate(poster.layers)
    poster = replace(poster, layers=kept)
    rendered = render(poster, fonts, images, SIDE)
    visibilities = _visibilities(kept, rendered)
    visible = [layer for i, layer in enumerate(kept) if _is_visible(layer, i, rendered, visibilities)]
    gate = _gate(visible, truth.layers)
    structure = structure_score(visible, truth.layers, n)
    accuracy, texts, similar = _accuracy(kept, visibilities, truth.layers, gate)
    cpu_visual, parts = scorers.cpu_visual(visible, list(rendered.texts.values()))

    warnings = list(poster.warnings)
    if any(fonts.missing(layer.text) for layer in kept if layer.kind == "text"):
        warnings.append("glyphs_missing")
    known = images or {}
    if any(layer.kind in ("image", "logo") and layer.src not in known for layer in kept) and images is not None:
        warnings.append("unknown_image")
    image = None
    if with_image:
        bars = {i for i, layer in enumerate(kept) if layer.kind == "text" and i not in similar}
        image = render(poster, fonts, images, PICTURE, bars).image
    details = {"layers": n, "kept": len(kept), "seen": len(visible), "invalid": poster.invalid, **texts,
               "visual_parts": parts}  # fmt: skip
    return Assessed(structure, accuracy, poster.format, min(1.0, (2 * m + 4) / n), True, None, tuple(warnings), details,
                    cpu_visual, gate, image)  # fmt: skip


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
        "parse_ok": assessed.parse_ok, "reason": assessed.reason, "warnings": list(assessed.warnings),
        "details": assessed.details,
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


def deduplicate(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Drops layers that repeat one below: same type and text, and an IoU of the boxes above 0.9.

    The lowest one is kept, so that a copy on top cannot make a hidden layer visible.
    """
    kept: list[Layer] = []
    for layer in layers:
        same = (other for other in kept if other.kind == layer.kind and other.text == layer.text)
        if not any(iou(layer, other) > 0.9 for other in same):
            kept.append(layer)
    return tuple(kept)


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
    """Visibility of the text layers, by index."""
    boxes = {index: ink.box for index, ink in rendered.texts.items()}
    result = {}
    for index, ink in rendered.texts.items():
        left, top, right, bottom = ink.box
        area = max((right - left) * (bottom - top), 1)
        conflict = 0.0
        for other, (left2, top2, right2, bottom2) in boxes.items():
            if other != index:
                width, height = min(right, right2) - max(left, left2), min(bottom, bottom2) - max(top, top2)
                conflict = max(conflict, max(width, 0) * max(height, 0) / area)
        result[index] = visibility(layers[index], ink, conflict)
    return result


def _is_visible(layer: Layer, index: int, rendered: Rendered, visibilities: Mapping[int, float]) -> bool:
    left, top, right, bottom = layer.box
    inside = max(min(right, 1) - max(left, 0), 0) * max(min(bottom, 1) - max(top, 0), 0)
    if inside < 0.5 * layer.area or layer.area < 0.001:  # validity threshold: PosterLayout, arXiv 2303.15937
        return False
    if layer.kind == "text":
        return visibilities[index] >= 0.25
    return layer.opacity >= 0.3 and rendered.shares[index] >= 0.05


def _gate(visible: Sequence[Layer], truth: Sequence[Layer]) -> float:
    """Share of the foreground layers that exist; without it, an empty poster would score as tidy."""
    foreground = [sum(layer.kind not in ("background", "underlay") for layer in layers) for layers in (visible, truth)]
    if not foreground[1]:
        return float(bool(visible))
    return min(1.0, foreground[0] / foreground[1])


# Structure


def pair_score(a: Layer, b: Layer) -> float:
    """Similarity of two layers: 0.6 IoU + 0.4 similarity of centres and sizes, a signal even if the IoU is 0."""
    if a.kind == b.kind:
        same = 1.0
    else:
        same = 0.25 if {a.kind, b.kind} in ALIKE else 0.0
    if not same:
        return 0.0
    distance = math.hypot(a.x + a.width / 2 - b.x - b.width / 2, a.y + a.height / 2 - b.y - b.height / 2)
    sizes = min(a.width, b.width) / max(a.width, b.width) * min(a.height, b.height) / max(a.height, b.height)
    return same * (0.6 * iou(a, b) + 0.4 * math.exp(-((distance / 0.15) ** 2)) * sizes)


def structure_score(visible: Sequence[Layer], truth: Sequence[Layer], emitted: int) -> float:
    """Soft F1 of matched layers, F1 of their types, and the stacking order of overlapping ones.

    Args:
        visible: visible layers of the policy, bottom to top.
        truth: m layers, bottom to top.
        emitted: n layers that the policy wrote: one too many costs as much as one too few.
    """
    if not visible:
        return 0.0
    total = emitted + len(truth)
    scores = np.array([[pair_score(a, b) for b in truth] for a in visible])
    rows, columns = linear_sum_assignment(-scores)
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


def similarity(a: str, b: str) -> float:
    """Normalised edit similarity (NES), shifted so that unrelated texts have 0: max(0, (NES - 0.4) / 0.6)."""
    longest = max(len(a), len(b))
    if min(len(a), len(b)) <= 0.4 * longest:  # the insertions alone bring it to 0
        return 0.0
    return max(0.0, (1 - levenshtein(a, b) / longest - 0.4) / 0.6)


def _accuracy(
    layers: Sequence[Layer], visibilities: Mapping[int, float], truth: Sequence[Layer], gate: float
) -> tuple[float, dict, set[int]]:
    """Accuracy, its details, and the indices of layers whose text is in the ground truth."""
    indices, wanted = list(visibilities), [layer.text for layer in truth if layer.kind == "text"]
    written = [layers[i].text for i in indices]
    if not wanted:  # times the gate: an empty poster must not get the full score for writing nothing
        return gate / (1 + len(written)), {"texts": []}, set()
    if not written:
        return 0.0, {"texts": [], "cer": 1.0, "wer": 1.0}, set()
    similar_pt = np.array([[similarity(a, b) for b in wanted] for a in written])
    value_pt = similar_pt * np.array([[visibilities[i]] for i in indices])
    rows, columns = linear_sum_assignment(-value_pt)
    matched = value_pt[rows, columns]
    lengths_p, lengths_t = np.array([len(text) for text in written]), np.array([len(text) for text in wanted])
    recall = (matched * lengths_t[columns]).sum() / lengths_t.sum()
    precision = (matched * lengths_p[rows]).sum() / lengths_p.sum()
    accuracy = 2 * recall * precision / (recall + precision) if recall + precision > 0 else 0.0

    partner = {j: i for i, j in zip(rows.tolist(), columns.tolist(), strict=True) if similar_pt[i, j] > 0}
    pairs = [(written[partner[j]] if j in partner else "", text) for j, text in enumerate(wanted)]
    texts = [{"sim": round(float(similar_pt[i, j]), 4), "vis": round(visibilities[indices[i]], 4)}
             for i, j in zip(rows, columns, strict=True)]  # fmt: skip
    details = {
        "texts": texts,
        "cer": sum(levenshtein(a, b) for a, b in pairs) / int(lengths_t.sum()),
        "wer": sum(levenshtein(a.split(), b.split()) for a, b in pairs) / sum(len(b.split()) for _, b in pairs),
    }
    similar = {indices[i] for i in np.flatnonzero(similar_pt.max(axis=1) >= SIMILAR)}
    return _clip(float(accuracy)), details, similar
