"""Values as bytes and back, for what ranks tell one another: JSON, and safetensors for tensors.

Not pickle: whoever reads a pickle runs whatever code it asks for.
"""

import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

HEAD = 8  # bytes that say how long the JSON is


def encode(value: Any) -> bytes:
    """A value as bytes.

    Args:
        value: None, truth values, numbers, texts, paths, tensors, and lists, tuples and dicts of them.

    Raises:
        TypeError: it holds anything else.
    """
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(_plain(value, tensors)).encode()
    return len(text).to_bytes(HEAD, "little") + text + (safetensors.torch.save(tensors) if tensors else b"")


def decode(body: bytes) -> Any:
    """The value that `encode` was given; its tensors on the CPU.

    Args:
        body: from `encode`.
    """
    end = HEAD + int.from_bytes(body[:HEAD], "little")
    return _value(json.loads(body[HEAD:end]), safetensors.torch.load(body[end:]) if len(body) > end else {})


def _plain(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """What JSON can hold; of a tensor its name, and of all that is no list the kind."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [_plain(part, tensors) for part in value]
    if isinstance(value, tuple):
        return {"tuple": [_plain(part, tensors) for part in value]}
    if isinstance(value, dict):
        return {"dict": [[_plain(key, tensors), _plain(part, tensors)] for key, part in value.items()]}
    if isinstance(value, Path):
        return {"path": str(value)}
    if isinstance(value, torch.Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().cpu().contiguous().clone()  # safetensors takes no two views of one memory
        return {"tensor": name}
    raise TypeError(f"{value!r:.80} of type {type(value).__name__} cannot be sent: send numbers, texts or tensors")


def _value(plain: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(plain, list):
        return [_value(part, tensors) for part in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, inner),) = plain.items()
    if kind == "tuple":
        return tuple(_value(inner, tensors))
    if kind == "dict":
        return {_value(key, tensors): _value(part, tensors) for key, part in inner}
    return Path(inner) if kind == "path" else tensors[inner]
