"""Serialization of values that ranks exchange: JSON, and safetensors for tensors.

Not pickle, which can execute code when it is loaded.
"""

import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

HEAD = 8  # bytes: length of the JSON


def encode(value: Any) -> bytes:
    """Serializes a value.

    Args:
        value: None, bool, int, float, str, Path, Tensor, and lists, tuples and dicts of these.

    Raises:
        TypeError: it holds another type.
    """
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(_plain(value, tensors)).encode()
    return len(text).to_bytes(HEAD, "little") + text + (safetensors.torch.save(tensors) if tensors else b"")


def decode(body: bytes) -> Any:
    """Deserializes a value; its tensors are on the CPU.

    Args:
        body: from `encode`.
    """
    end = HEAD + int.from_bytes(body[:HEAD], "little")
    return _value(json.loads(body[HEAD:end]), safetensors.torch.load(body[end:]) if len(body) > end else {})


def _plain(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """A value as JSON: types that JSON lacks as {type: content}, tensors as {"tensor": name}."""
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
        tensors[name] = value.detach().cpu().contiguous().clone()  # safetensors refuses shared memory
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
