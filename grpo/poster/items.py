"""Requests of the reward service, their validation, and its errors.

Request: {"id", "solution_str", "ground_truth", "extra_info", "prompt", "step"} to /compute_reward, or {"items": [...]}
         of these to /compute_reward_batch, as application/json. Objects must not have duplicate keys, and numbers must
         be finite.
         `ground_truth` is an object or its JSON text. `extra_info` may hold "images": input images by id, or a list of
         them ("image_1" first); each is base64 of a PNG or JPEG, the path of one below the asset root, or a reference
         of grpo/poster/synthetic.py. Scorers get the rest of `extra_info`.
         `id` is text or an integer, returned unchanged; it need not be unique, and nothing is cached by it.
         `prompt` (text, or a list of chat messages) and `step` (of the training, an integer from 0) are optional;
         scorers get them, and the CPU part does not depend on them.
A malformed poster is the policy's fault and no error: it scores 0.
"""

import json
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from grpo.poster import layout

MAX_BODY = 2**23  # bytes of a request
MAX_ITEMS = 256  # of a request
MAX_IMAGES = 16  # of an item
MAX_EXTRA = 2**16  # characters of extra_info as JSON, without images
MAX_PROMPT = 2**20  # characters of a prompt as JSON
MAX_DEPTH = 32  # of nested lists and objects in extra_info, so that no parser of it hits its recursion limit
MAX_ID = 256  # characters

CODES = {  # HTTP status, and whether a retry may succeed
    "bad_json": (400, False),
    "bad_length": (400, False),
    "bad_token": (401, False),
    "bad_host": (403, False),
    "bad_origin": (403, False),
    "not_found": (404, False),
    "bad_method": (405, False),
    "too_large": (413, False),
    "bad_content_type": (415, False),
    "bad_request": (422, False),
    "bad_ground_truth": (422, False),
    "bad_image": (422, False),
    "missing_glyphs": (422, False),
    "queue_full": (429, True),
    "internal": (500, True),
    "loading": (503, True),
    "draining": (503, True),
    "degraded": (503, True),
    "failed": (503, True),
    "scorer_failed": (503, True),
    "scorer_invalid": (503, True),
    "scorer_timeout": (503, True),
    "worker_died": (503, True),
    "deadline": (504, True),
}


class Refused(Exception):
    """A request or an item that gets no score.

    Attributes:
        code: of `CODES`, or of a scorer.
        status: HTTP status, for a single item.
        retryable: whether a retry may succeed.
    """

    def __init__(self, code: str, text: str, retryable: bool | None = None):
        super().__init__(code, text, retryable)  # args, for pickle
        self.code, self.text = code, text
        self.status, known = CODES.get(code, (503, True))
        self.retryable = known if retryable is None else retryable

    def __str__(self) -> str:
        return self.text

    @property
    def result(self) -> dict[str, Any]:
        """Its entry in the answer to a batch."""
        return {"ok": False, "error": {"code": self.code, "message": self.text, "retryable": self.retryable}}


@dataclass(frozen=True)
class Item:
    """One poster to score."""

    id: str | int | None
    solution: str
    truth: str  # JSON text
    extra_info: str  # JSON text of an object, without the images
    images: dict[str, str]  # id -> base64, path or reference
    prompt: str = "null"  # JSON of text, of a list of messages, or null
    step: int | None = None


def read(body: bytes, many: bool) -> list[Item]:
    """Parses the items of a request, in time and memory linear in its length.

    Args:
        body: JSON.
        many: whether it is a batch.

    Raises:
        Refused: it is not JSON, or not of the form above.
    """
    try:
        return _items(json.loads(body, object_pairs_hook=_object), many)
    except (ValueError, RecursionError) as error:  # ValueError: also bytes that are no text, and too long a number
        raise Refused("bad_json", f"the body cannot be read as JSON: {error}; send an object") from error


def _items(value: Any, many: bool) -> list[Item]:
    if not many:
        return [_item(value, "the item")]
    items = value.get("items") if isinstance(value, dict) else None
    _require(isinstance(items, list), "items", items, "must be a list of objects")
    _require(1 <= len(items) <= MAX_ITEMS, "items", f"{len(items)} of them", f"must be from 1 to {MAX_ITEMS}")
    return [_item(item, f"items[{i}]") for i, item in enumerate(items)]


def _item(value: Any, name: str) -> Item:
    _require(isinstance(value, dict), name, value, "must be an object with solution_str and ground_truth")
    solution, truth, extra = (value.get(key) for key in ("solution_str", "ground_truth", "extra_info"))
    number, extra = value.get("id"), {} if extra is None else extra
    _require(isinstance(solution, str), f"solution_str of {name}", solution, "must be text")
    _require("ground_truth" in value, f"ground_truth of {name}", None, "must be an object, or its JSON text")
    _require(isinstance(extra, dict), f"extra_info of {name}", extra, "must be an object, or left out")
    plain = isinstance(number, str | int | None) and len(str(number)) <= MAX_ID
    _require(plain, f"id of {name}", number, f"must be text or an integer of at most {MAX_ID} characters")
    images = {} if extra.get("images") is None else extra["images"]
    if isinstance(images, list):
        images = {f"image_{i}": image for i, image in enumerate(images, 1)}
    good = isinstance(images, dict) and len(images) <= MAX_IMAGES and all(isinstance(x, str) for x in images.values())
    count = f"{len(images)} of them" if isinstance(images, dict) else images
    _require(good, f"images of {name}", count, f"must be at most {MAX_IMAGES} texts by image id")
    given = {key: x for key, x in extra.items() if key != "images"}
    rest = json.dumps(given)
    _require(len(rest) <= MAX_EXTRA, f"extra_info of {name}", f"{len(rest)} characters", f"at most {MAX_EXTRA}")
    depth, where = _depth(given), layout.find_not_finite(given, "extra_info")
    _require(depth <= MAX_DEPTH, f"extra_info of {name}", f"{depth} levels", f"at most {MAX_DEPTH}")
    _require(not where, f"{where} of {name}", "NaN or infinite", "must be a JSON number")
    prompt, step = value.get("prompt"), value.get("step")
    asked = json.dumps(prompt)
    _require(isinstance(prompt, str | None) or _is_chat(prompt), f"prompt of {name}", prompt,
             "must be text, or a list of messages, objects with a `role`")  # fmt: skip
    _require(len(asked) <= MAX_PROMPT, f"prompt of {name}", f"{len(asked)} characters", f"at most {MAX_PROMPT}")
    where = layout.find_not_finite(prompt, "prompt")
    _require(not where, f"{where} of {name}", "NaN or infinite", "must be a JSON number")
    whole = step is None or (isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 2**63)
    _require(whole, f"step of {name}", step, "must be an integer from 0 to 2^63 - 1")
    truth = truth if isinstance(truth, str) else json.dumps(truth)
    return Item(number, solution, truth, rest, images, asked, step)


def _is_chat(prompt: Any) -> bool:
    """Whether a prompt is a list of messages; their content may be text, or a list of parts."""
    messages = prompt if isinstance(prompt, list) and _depth(prompt) <= MAX_DEPTH else [None]
    return all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages)


def timeout_seconds(header: str | None, most: float) -> float:
    """Seconds that a client waits for an answer.

    Args:
        header: X-Timeout-Ms.
        most: upper limit, and the value without the header.

    Raises:
        Refused: it is not a number above 0.
    """
    if header is None:
        return most
    try:
        seconds = float(header) / 1000
    except ValueError:
        seconds = math.nan
    _require(0 < seconds < math.inf, "X-Timeout-Ms", header, "must be a number of milliseconds above 0")
    return min(seconds, most)


def _require(holds: bool, name: str, got: Any, rule: str) -> None:
    if not holds:
        shown = got if isinstance(got, str) and len(got) < 40 else type(got).__name__
        raise Refused("bad_request", f"{name}: {shown}: {rule}; see grpo/poster/items.py for the format")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):  # parsers disagree on which one counts
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name!r:.80} stands twice in an object")
    return value


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(_depth, inner), default=0)
