"""Visual scorers: how good a poster looks, in [0, 1].

A scorer is any object with
    name: str
    identity: str        everything its scores depend on; part of the fingerprint of the reward
    needs_image: bool    whether posters are rendered for it
    score_batch(images: list[Image | None], metas: list[dict]) -> list[float | ScorerError]
where a meta is {"cpu": score of `cpu_visual`, "extra_info": dict, "solution": str, "prompt": text, chat or None,
"step": int or None}. For a poster that it cannot score, it returns a ScorerError, never an invented number.
"""

import hashlib
import importlib
import importlib.util
import inspect
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from PIL import Image

from grpo.poster.errors import ScorerError
from grpo.poster.layout import Layer
from grpo.poster.render import Ink

CORE = ("text", "logo", "image")  # layers that should not overlap, unlike underlays and backgrounds
BACKDROP = 0.6  # an image that covers this share of the canvas is a backdrop
GRID = 48  # cells per side, to measure covered area
WEIGHTS = {"legibility": 0.35, "overlap": 0.20, "alignment": 0.15, "margins": 0.10, "density": 0.10, "balance": 0.10}


class Cpu:
    """The deterministic CPU formula, whose score `reward.assess` has already computed."""

    name = identity = "cpu"
    needs_image = False

    def score_batch(self, images: list[Image.Image | None], metas: list[dict]) -> list[float | ScorerError]:
        """The `cpu` score of each meta."""
        return [float(meta["cpu"]) for meta in metas]


class _Function:
    """A plain function as a scorer."""

    needs_image = True

    def __init__(self, name: str, identity: str, function: Callable[[list, list], list]) -> None:
        self.name, self.identity, self.score_batch = name, identity, function


def load(name: str, options: dict[str, Any]) -> Any:
    """Loads a scorer by name.

    Args:
        name: "cpu"; "visualquality_r1"; or "package.module:factory" or "path/to/file.py:factory", where
            factory(**options) returns a scorer, or factory is itself a function with the signature of `score_batch`.
        options: keyword arguments of the factory.

    Raises:
        ValueError: there is no such scorer, or it lacks a required attribute.
    """
    if name == "cpu":
        if options:
            raise ValueError(f"scorer cpu got the options {sorted(options)}: it has none; leave them out")
        return Cpu()
    if name == "visualquality_r1":
        from grpo.poster import visualquality  # needs transformers and a model

        return visualquality.VisualQuality(**options)
    source, colon, attribute = name.rpartition(":")
    if not colon:
        raise ValueError(f"scorer {name!r}: must be cpu, visualquality_r1, package.module:factory or file.py:factory")
    module = _module(name, source)
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise ValueError(f"scorer {name!r}: {source} has no function {attribute!r}; correct the name")
    content = Path(module.__file__).read_bytes() if getattr(module, "__file__", None) else b""
    identity = f"{name} {sorted(options.items())} {hashlib.sha256(content).hexdigest()[:16]}"
    if not inspect.isclass(factory) and list(inspect.signature(factory).parameters) == ["images", "metas"]:
        if options:
            raise ValueError(
                f"scorer {name!r} is a plain function and takes no options, got {sorted(options)}: drop them"
            )
        return _Function(name, identity, factory)
    scorer = factory(**options)
    if not hasattr(scorer, "score_batch") and callable(scorer):
        scorer = _Function(name, identity, scorer)
    lacking = [key for key in ("name", "identity", "needs_image", "score_batch") if not hasattr(scorer, key)]
    if lacking:
        raise ValueError(f"scorer {name!r} lacks {', '.join(lacking)}: add what the docstring of scorers.py lists")
    return scorer


def _module(name: str, source: str) -> ModuleType:
    try:
        if not source.endswith(".py"):
            return importlib.import_module(source)
        if not Path(source).is_file():
            raise ValueError(f"scorer {name!r}: there is no file {source!r}; name one relative to {Path.cwd()}")
        spec = importlib.util.spec_from_file_location(f"poster_scorer_{Path(source).stem}", source)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
        return module
    except ImportError as error:
        raise ValueError(f"scorer {name!r}: cannot import {source!r} ({error}); correct or install it") from error


def cpu_visual(layers: Sequence[Layer], inks: Sequence[Ink]) -> tuple[float, dict[str, float]]:
    """Legibility and common measures of a tidy layout; deterministic.

    Args:
        layers: visible layers, for all parts but legibility.
        inks: of all texts, including hidden ones: hiding illegible text must not pay.

    Returns:
        The score and its parts, all in [0, 1]. Without texts, legibility is 0.5; without layers other than backdrops,
        the other parts are 0.
    """
    parts = dict.fromkeys(WEIGHTS, 0.0)
    readable = [min(max((ink.contrast - 1.5) / 3, 0), 1) * min(1, 1.1 * ink.shown) * ink.fit for ink in inks]
    parts["legibility"] = sum(readable) / len(readable) if readable else 0.5
    placed = [layer for layer in layers if layer.kind != "background" and not _is_backdrop(layer)]
    core = [layer for layer in placed if layer.kind in CORE]
    if core:
        pairs = itertools.combinations(core, 2)
        covered = sum(intersection(a, b) / min(a.area, b.area) for a, b in pairs)
        parts["overlap"] = math.exp(-2 * covered / len(core))
        parts["margins"] = sum(_inset(layer) >= 0.02 - 1e-6 for layer in core) / len(core)
    if placed:
        parts["alignment"] = sum(math.exp(-_misalignment(layer, placed) / 0.015) for layer in placed) / len(placed)
        parts["density"], parts["balance"] = _coverage(placed)
    return sum(WEIGHTS[name] * value for name, value in parts.items()), parts


def intersection(a: Layer, b: Layer) -> float:
    """Area of the intersection of two boxes, as a share of the canvas."""
    width = min(a.x + a.width, b.x + b.width) - max(a.x, b.x)
    height = min(a.y + a.height, b.y + b.height) - max(a.y, b.y)
    return max(width, 0.0) * max(height, 0.0)


def _is_backdrop(layer: Layer) -> bool:
    return layer.kind != "text" and layer.area >= BACKDROP


def _inset(layer: Layer) -> float:
    left, top, right, bottom = layer.box
    return min(left, top, 1 - right, 1 - bottom)


def _alignment_lines(layer: Layer) -> tuple[float, float, float, float, float, float]:
    """Left, centre, right, top, middle, bottom."""
    left, top, right, bottom = layer.box
    return left, (left + right) / 2, right, top, (top + bottom) / 2, bottom


def _misalignment(layer: Layer, layers: Sequence[Layer]) -> float:
    """Smallest distance between a line of a layer and that of another box, or between its centre and the canvas's."""
    own = _alignment_lines(layer)
    others = [_alignment_lines(other) for other in layers if other.box != layer.box]
    distances = [abs(a - b) for other in others for a, b in zip(own, other, strict=True)]
    return min([*distances, abs(own[1] - 0.5), abs(own[4] - 0.5)])


def _coverage(layers: Sequence[Layer]) -> tuple[float, float]:
    """Density and balance of the grid cells whose centre is in a box."""
    covered = np.zeros((GRID, GRID), bool)
    for layer in layers:
        left, top, right, bottom = (min(max(math.ceil(side * GRID - 0.5), 0), GRID) for side in layer.box)
        covered[top:bottom, left:right] = True
    share = covered.mean()
    if not share:
        return 0.0, 0.0
    density = min(share / 0.12, 1.0, (1 - share) / 0.25)
    centres = (np.arange(GRID) + 0.5) / GRID
    x = (covered.sum(axis=0) * centres).sum() / covered.sum()
    y = (covered.sum(axis=1) * centres).sum() / covered.sum()
    balance = (0.35 - math.hypot(x - 0.5, y - 0.5)) / 0.25  # 1 up to a tenth of the canvas off centre
    return float(density), float(min(max(balance, 0.0), 1.0))
