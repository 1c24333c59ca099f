"""The poster JSON of policies and records, parsed into layers whose boxes are fractions of the canvas.

    {"canvas": {"width": 600, "height": 800, "background": "#1B2A41"},
     "layers": [{"type": "image", "src": "image_1", "x": 48, "y": 360, "width": 504, "height": 280},
                {"type": "text", "text": "Night Market", "x": 48, "y": 64, "width": 504, "height": 54,
                 "font_size": 40, "color": "#FFFFFF", "align": "left"}]}

Layers are listed bottom to top. All have type (KINDS), x, y, width, height, and may have opacity, and z, which replaces
their position in the list as the sort key. A text has text, and may have font_size (default: 0.7 of its height), color
and align; background, shape and underlay may have fill; image and logo have src, the id of an input image, never a
path. Other fields are ignored. The size of a policy's canvas is that of the record.

Errors of a policy raise `Malformed` (the completion scores 0) or drop a layer (which still counts as emitted). Errors
of a record raise ValueError: the policy must not pay for them. Nothing is repaired: a policy that is rewarded for half
a JSON never learns to stop. Everything takes linear time: a degenerate policy may write 60,000 brackets.
"""

import contextlib
import functools
import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

KINDS = ("background", "image", "logo", "shape", "underlay", "text")
ALIASES = {
    "textelement": "text", "title": "text", "headline": "text", "subtitle": "text", "cta": "text",
    "imageelement": "image", "maskelement": "image", "photo": "image", "picture": "image",
    "svgelement": "shape", "rect": "shape", "rectangle": "shape", "embellishment": "shape",
    "coloredbackground": "background", "bg": "background", "deco": "underlay",
}  # fmt: skip
COORD_SPACES = ("px", "rel1000")

MAX_SOLUTION = 65_536  # characters a policy may write
MAX_TRUTH = 262_144  # characters of a ground truth
MAX_CANVAS = 8192  # px
MAX_LAYERS = 64  # of a ground truth, and painted of a policy's poster
MAX_DEPTH = 16  # of nested brackets
MAX_TEXT = 500  # characters of one layer, normalised
MAX_RAW_TEXT = 1000  # before normalisation: NFKC sorts combining marks in quadratic time
MAX_CHARACTERS = 4000  # of all layers
MAX_BOX = 4.0  # times the side of the canvas
FONT_SIZES = (4.0, 400.0)  # canvas px
RULES = {
    "not_an_object": "a layer must be an object",
    "unknown_type": f"type must be one of {', '.join(KINDS)}, or an alias",
    "bad_box": "x, y, width and height must be numbers of at most 1e6, width and height above 0",
    "box_too_large": f"a box must be at most {MAX_BOX:g} times as wide and as high as the canvas",
    "bad_text": f"text must be 1 to {MAX_TEXT} characters that show",
    "bad_font_size": "font_size must be a number above 0",
    "bad_color": "color and fill must be #RGB or #RRGGBB",
    "bad_align": "align must be left, center or right",
    "bad_opacity": "opacity must be a number from 0 to 1",
    "bad_src": "src must be the id of an input image",
    "bad_z": "z must be a number",
}


class Malformed(Exception):
    """A completion without a valid poster; `reason` is one word for counters."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class _Invalid(Exception):
    """A layer that breaks one of RULES."""


@dataclass(frozen=True)
class Layer:
    """One layer; x, y, width, height are fractions of the canvas, font_size of its height."""

    kind: str
    x: float
    y: float
    width: float
    height: float
    color: tuple[int, int, int]  # of the text, or the fill
    opacity: float = 1.0
    text: str = ""  # normalised, one line
    lines: tuple[str, ...] = ()  # normalised, as painted
    font_size: float = 0.0
    align: str = "left"
    src: str = ""

    @property
    def box(self) -> tuple[float, float, float, float]:
        """Left, top, right, bottom."""
        return self.x, self.y, self.x + self.width, self.y + self.height

    @property
    def area(self) -> float:
        """Area as a share of the canvas, including the part outside it."""
        return self.width * self.height


@dataclass(frozen=True)
class Poster:
    """A canvas in px and the layers on it, bottom to top."""

    width: int
    height: int
    background: tuple[int, int, int]
    layers: tuple[Layer, ...]
    emitted: int  # layers that the policy wrote, including dropped ones
    invalid: dict[str, int] = field(default_factory=dict)  # number of dropped layers by reason
    format: float = 1.0  # 0.8 if the JSON is surrounded by prose
    warnings: tuple[str, ...] = ()

    @property
    def letters(self) -> str:
        """The characters of all texts, without spaces."""
        return "".join(layer.text for layer in self.layers if layer.kind == "text").replace(" ", "")


def normalise(text: str) -> str:
    """Normalises a text to one line of NFKC without control and format characters.

    Args:
        text: at most MAX_RAW_TEXT characters.
    """
    if not (text.isascii() and text.isprintable()):
        kept = []
        for char in unicodedata.normalize("NFKC", text):
            if char.isspace():
                kept.append(" ")
            elif unicodedata.category(char) not in ("Cf", "Cc", "Cs"):  # Cs: lone surrogates, which no font has
                kept.append(char)
        text = "".join(kept)
    return " ".join(text.split())


def ground_truth(value: dict | str) -> Poster:
    """Parses the poster of a record.

    Args:
        value: a poster object as above, with `canvas`, or its JSON; boxes in px.

    Raises:
        ValueError: it breaks a rule.
    """
    if not isinstance(value, (dict, str)):
        raise ValueError(f"ground_truth is a {type(value).__name__}: pass an object with canvas and layers, or JSON")
    if isinstance(value, dict):
        try:
            value = json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"ground_truth is no JSON ({error}): use numbers, texts, lists, objects") from None
    return _ground_truth(value)


@functools.lru_cache(maxsize=256)  # the G completions of a prompt share their ground truth
def _ground_truth(text: str) -> Poster:
    if len(text) > MAX_TRUTH:
        raise ValueError(f"ground_truth has {len(text)} characters: at most {MAX_TRUTH}; leave out what is not layout")
    try:
        if _too_deep(text, 0):
            raise Malformed("too_deep")
        value = _DECODER.decode(text)
    except (Malformed, ValueError) as error:
        where = ""
        if str(error) == "not_finite":
            with contextlib.suppress(ValueError):  # the rest may not be JSON
                where = find_not_finite(json.loads(text, parse_int=float), "ground_truth")
        if where:
            raise ValueError(f"{where} is NaN, infinite or too long a number: correct the record") from None
        raise ValueError(f"ground_truth {text[:60]!r} is no JSON ({error}): pass one object, finite numbers") from None
    if not isinstance(value, dict) or not isinstance(value.get("canvas"), dict):
        raise ValueError(f"ground_truth {text[:60]!r} has no canvas: add its width and height in px")
    size = [value["canvas"].get(key) for key in ("width", "height")]
    if not all(_is_number(side) and side == int(side) and 1 <= side <= MAX_CANVAS for side in size):
        raise ValueError(f"canvas of {size[0]!r:.40} x {size[1]!r:.40}: sides must be whole numbers of px from 1 to "
                         f"{MAX_CANVAS}; scale the poster")  # fmt: skip
    width, height = (int(side) for side in size)
    raw = value.get("layers")
    if not isinstance(raw, list) or not 1 <= len(raw) <= MAX_LAYERS:
        count = len(raw) if isinstance(raw, list) else repr(raw)[:40]
        raise ValueError(f"ground_truth has {count} layers: must be a list of 1 to {MAX_LAYERS}; merge or drop some")
    try:
        background = _color(value["canvas"].get("background"), (255, 255, 255))
    except _Invalid:
        raise ValueError(f"canvas background {value['canvas']['background']!r:.40}: must be #RGB or #RRGGBB") from None
    layers = []
    for index, item in enumerate(raw):
        try:
            layers.append(_layer(item, index, width, height, "px"))
        except _Invalid as error:
            raise ValueError(f"layer {index}, {item!r:.120}: {RULES[str(error)]}; correct the record") from None
    layers.sort(key=lambda pair: pair[0])
    poster = Poster(width, height, background, tuple(layer for _, layer in layers), len(layers))
    outside = sum(_is_off_canvas(layer) for layer in poster.layers)
    fractions = all(layer.width * width <= 1 and layer.height * height <= 1 for layer in poster.layers)
    if fractions or outside > max(1, len(layers) // 2):
        what = "no box is larger than a pixel" if fractions else f"{outside} of {len(layers)} boxes lie off the canvas"
        raise ValueError(f"{what} of {width} x {height}: boxes are in px; multiply fractions or thousandths by it")
    return poster


def find_not_finite(value: Any, name: str) -> str:
    """The path of the first NaN or infinite number in a JSON value, such as "ground_truth.layers[0].x"; "" if none.

    Args:
        value: not nested deeper than the recursion limit.
        name: of the value.
    """
    if isinstance(value, float):
        return "" if math.isfinite(value) else name
    if isinstance(value, dict):
        inner = [(f"{name}.{key:.80}", x) for key, x in value.items()]
    else:
        inner = [(f"{name}[{i}]", x) for i, x in enumerate(value)] if isinstance(value, list) else []
    return next(filter(None, (find_not_finite(x, path) for path, x in inner)), "")


def mostly_beyond_canvas(layers: Sequence[Layer]) -> bool:
    """Whether most boxes end a tenth of the canvas or more beyond it, which suggests coordinates in thousandths."""
    return 2 * sum(max(layer.box[2:]) > 1.1 for layer in layers) > len(layers)


def _is_off_canvas(layer: Layer) -> bool:
    left, top, right, bottom = layer.box
    return left >= 1 or top >= 1 or right <= 0 or bottom <= 0


def parse(solution: str, truth: Poster, coord_space: str = "px") -> Poster:
    """Parses the completion of a policy to a poster on the canvas of the ground truth.

    Args:
        solution: the completion, possibly with thoughts, a code fence, or prose.
        truth: determines the canvas and the layer limit: 4 m + 8 for its m layers, at most 64.
        coord_space: "px" of the canvas, or "rel1000": thousandths of its width and height (font sizes: of its height).

    Raises:
        Malformed: there is no poster with at least one valid layer.
        ValueError: an unknown coord_space.
    """
    if coord_space not in COORD_SPACES:
        raise ValueError(f"coord_space = {coord_space!r}: must be one of {', '.join(COORD_SPACES)}")
    value, fmt = _extract(solution)
    raw = value["layers"]
    if not isinstance(raw, list) or not raw:
        raise Malformed("no_layers")
    layers, invalid = [], Counter()
    for index, item in enumerate(raw):
        try:
            layers.append(_layer(item, index, truth.width, truth.height, coord_space))
        except _Invalid as error:
            invalid[str(error)] += 1
    if not layers:
        raise Malformed("no_valid_layers")
    layers.sort(key=lambda pair: pair[0])  # stable: equal z keeps the order of the list
    background, warnings = _canvas(value.get("canvas"), truth, coord_space)
    kept, characters = [], 0
    for _, layer in layers[: min(MAX_LAYERS, 4 * len(truth.layers) + 8)]:
        characters += len(layer.text)
        if characters > MAX_CHARACTERS:
            break
        kept.append(layer)
    if len(kept) < len(layers):
        warnings.append("layers_cut")
    # if these warnings are frequent, the policy uses another unit: see coord_space
    if any(map(_is_off_canvas, kept)):
        warnings.append("off_canvas")
    unit_x, unit_y = (truth.width, truth.height) if coord_space == "px" else (1000, 1000)
    if all(layer.width * unit_x <= 1 and layer.height * unit_y <= 1 for layer in kept):
        warnings.append("fractions")
    if mostly_beyond_canvas(kept):
        warnings.append("beyond_canvas")
    return Poster(truth.width, truth.height, background, tuple(kept), len(raw), dict(invalid), fmt, tuple(warnings))


def _canvas(value: Any, truth: Poster, coord_space: str) -> tuple[tuple[int, int, int], list[str]]:
    """Background of a policy's canvas, and warnings; its size is ignored: on a tiny canvas everything would fit."""
    white = (255, 255, 255)
    if value is None:
        return white, []
    if not isinstance(value, dict):
        return white, ["canvas_invalid"]
    size = [value.get(key, side) for key, side in (("width", truth.width), ("height", truth.height))]
    warnings = ["canvas_differs"] if coord_space == "px" and size != [truth.width, truth.height] else []
    try:
        return _color(value.get("background"), white), warnings
    except _Invalid:
        return white, [*warnings, "canvas_invalid"]


def _layer(item: Any, index: int, canvas_width: int, canvas_height: int, coord_space: str) -> tuple[float, Layer]:
    """Parses a layer; returns it with its sort key, or raises _Invalid with a key of RULES."""
    if not isinstance(item, dict):
        raise _Invalid("not_an_object")
    kind = item.get("type")
    kind = kind.strip().lower() if isinstance(kind, str) else ""
    kind = ALIASES.get(kind, kind)
    if kind not in KINDS:
        raise _Invalid("unknown_type")
    box = [item.get(key) for key in ("x", "y", "width", "height")]
    if not all(_is_number(side) and abs(side) <= 1e6 for side in box) or box[2] <= 0 or box[3] <= 0:
        raise _Invalid("bad_box")
    unit_x, unit_y = (canvas_width, canvas_height) if coord_space == "px" else (1000, 1000)
    x, y, width, height = box[0] / unit_x, box[1] / unit_y, box[2] / unit_x, box[3] / unit_y
    if width > MAX_BOX or height > MAX_BOX:
        raise _Invalid("box_too_large")
    opacity = _number(item, "opacity", 1.0)
    if not 0 <= opacity <= 1:
        raise _Invalid("bad_opacity")
    z = _number(item, "z", index)
    if kind != "text":
        src = item.get("src") if kind in ("image", "logo") else None
        if src is not None and not isinstance(src, str):
            raise _Invalid("bad_src")
        return z, Layer(kind, x, y, width, height, _color(item.get("fill"), (128, 128, 128)), opacity, src=src or "")

    raw = item.get("text")
    if not isinstance(raw, str) or len(raw) > MAX_RAW_TEXT:
        raise _Invalid("bad_text")
    text = normalise(raw)
    if not 1 <= len(text) <= MAX_TEXT:
        raise _Invalid("bad_text")
    lines = tuple(line for line in map(normalise, raw.split("\n")) if line)
    font_size = _number(item, "font_size", 0.7 * box[3])
    if font_size <= 0:
        raise _Invalid("bad_font_size")
    smallest, largest = FONT_SIZES
    font_size = min(max(font_size * canvas_height / unit_y, smallest), largest) / canvas_height
    align = item.get("align")
    if align is not None and align not in ("left", "center", "right"):
        raise _Invalid("bad_align")
    color = _color(item.get("color"), (0, 0, 0))
    return z, Layer("text", x, y, width, height, color, opacity, text, lines, font_size, align or "left")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)  # the decoder ensures that it is finite


def _number(item: dict, key: str, default: float) -> float:
    value = item.get(key)
    if value is None:
        return default
    if not _is_number(value):
        raise _Invalid(f"bad_{key}")
    return float(value)


def _color(value: Any, default: tuple[int, int, int]) -> tuple[int, int, int]:
    if value is None:
        return default
    if not isinstance(value, str) or not re.fullmatch(r"#(?:[0-9a-fA-F]{3}){1,2}", value):
        raise _Invalid("bad_color")
    digits = value[1:] if len(value) == 7 else "".join(digit * 2 for digit in value[1:])
    return int(digits[:2], 16), int(digits[2:4], 16), int(digits[4:], 16)


def _extract(solution: str) -> tuple[dict, float]:
    """Finds the JSON object with `layers` in a completion; returns it with its format score."""
    if len(solution) > MAX_SOLUTION:
        raise Malformed("too_long")
    text = _unwrap(solution.rpartition("</think>")[2].strip())
    if text.startswith("<think>"):  # unclosed
        raise Malformed("no_json")
    *_, last = -1, *(match.start() for match in _LAYERS.finditer(text))
    starts = [0] if text.startswith("{") else []
    if last > 0 and (outer := _enclosing_object(text, last)) is not None:
        starts.append(outer)
    position = last
    for _ in range(4):  # trying every "{" would take quadratic time
        position = text.rfind("{", 0, position) if position > 0 else -1
        if position < 0:
            break
        starts.append(position)
    draft = None
    for start in dict.fromkeys(starts):
        value, end = _decode_at(text, start)
        if isinstance(value, dict) and "layers" in value:
            outer = _enclosing_object(text, start)
            if outer is not None and _decode_at(text, outer)[0] is None:
                continue  # part of a broken object, such as a group of layers in a truncated poster
            if end > last:
                return value, 1.0 if start == 0 and end == len(text) else 0.8
            draft = draft or value  # of several posters the last one counts
    if draft is None:
        raise Malformed("no_json")
    return draft, 0.8


def _decode_at(text: str, start: int) -> tuple[Any, int]:
    """The JSON value that begins at `start`, or None if it is invalid, and where it ends."""
    if _too_deep(text, start):
        raise Malformed("too_deep")
    try:
        return _DECODER.raw_decode(text, start)
    except json.JSONDecodeError:
        return None, start
    except RecursionError:
        raise Malformed("too_deep") from None


def _enclosing_object(text: str, start: int) -> int | None:
    """Where the outermost object around `start` begins, in JSON or something similar; None if there is none.

    The search begins at the last code fence: code before it may have braces in its strings.
    """
    open_braces: list[int] = []
    for match in _OBJECT_OR_BRACE.finditer(text, text.rfind("\n```", 0, start) + 1, start):
        if match[0] != "}":
            open_braces.append(match.start() if match[0] != "{" else -1)
        elif open_braces:
            open_braces.pop()
    return next((position for position in open_braces if position >= 0), None)


def _unwrap(text: str) -> str:
    """Removes a code fence or an answer tag around the whole text."""
    if text.startswith("<answer>") and text.endswith("</answer>"):
        return text[len("<answer>") : -len("</answer>")].strip()
    head, newline, rest = text.partition("\n")
    if newline and re.fullmatch(r"```[ ]*[\w+-]{0,20}[ ]*", head.rstrip("\r")) and rest.endswith("```"):
        return rest[:-3].strip()
    return text


_LAYERS = re.compile(r'"layers"\s*:')  # as a key, not in prose
_OBJECT_OR_BRACE = re.compile(r"""{\s*(?:["'/#]|\w+\s*:)|[{}]""")
_STRING_OR_BRACKET = re.compile(
    r'"(?:[^"\\]+|\\.)*"?|[][{}]', re.DOTALL
)  # an unclosed string extends to the end, which keeps this linear


def _too_deep(text: str, start: int) -> bool:
    """Whether the value that begins at `start` is nested deeper than MAX_DEPTH, before the decoder recurses."""
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(text, start):
        char = match[0]
        if char in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                return True
        elif char in "]}":
            depth -= 1
            if depth <= 0:
                break
    return False


def _object(pairs: list[tuple[str, Any]]) -> dict:
    value = dict(pairs)
    if len(value) < len(pairs):  # parsers disagree on which one counts
        raise Malformed("duplicate_key")
    return value


def _float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):  # 1e400 is infinite, but not a parse_constant
        raise Malformed("not_finite")
    return value


def _int(digits: str) -> int:
    if len(digits) > 300:  # above the largest float; int() raises beyond 4,300 digits
        raise Malformed("not_finite")
    return int(digits)


def _constant(name: str) -> float:
    raise Malformed("not_finite")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_float, parse_int=_int, parse_constant=_constant)
