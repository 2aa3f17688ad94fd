"""Encoding of values as JSON with their tensors taken out, for an optimiser's settings in a checkpoint without code.

Values that JSON has are encoded as themselves. Other values are objects with one key: `tensor` (the name under which
the tensor is kept), `tuple`, `dict`, or `float` (for a number that is not finite).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


class NotPlain(Exception):
    """A value that only code could rebuild; the argument describes it."""


def encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """`value` as JSON. Its tensors are added to `tensors`, under names that start with `name`. Raises `NotPlain`."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, Tensor):
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, list | tuple):
        inner = [encode(member, f"{name}.{index}", tensors) for index, member in enumerate(value)]
        return {"tuple": inner} if isinstance(value, tuple) else inner
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: encode(member, f"{name}.{key}", tensors) for key, member in value.items()}}
    raise NotPlain(type(value).__name__)


def tensors_in(encoded: Any) -> Iterator[str]:
    """The names of the tensors in an encoded value."""
    if isinstance(encoded, list):
        for member in encoded:
            yield from tensors_in(member)
    elif isinstance(encoded, dict):
        for kind, inner in encoded.items():
            if kind == "tensor" and isinstance(inner, str):
                yield inner
            elif kind == "dict" and isinstance(inner, dict):
                yield from tensors_in(list(inner.values()))
            else:
                yield from tensors_in(inner)


def decode(encoded: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `encode`. Raises `NotPlain` for input that `encode` never writes."""
    if isinstance(encoded, list):
        return [decode(member, tensors) for member in encoded]
    if not isinstance(encoded, dict):
        return encoded
    match list(encoded.items()):
        case [("tensor", str(name))] if name in tensors:
            return tensors[name]
        case [("tuple", list(inner))]:
            return tuple(decode(member, tensors) for member in inner)
        case [("dict", dict(inner))]:
            return {key: decode(member, tensors) for key, member in inner.items()}
        case [("float", "nan" | "inf" | "-inf" as text)]:
            return float(text)
    raise NotPlain(f"an object with {', '.join(encoded) or 'nothing'} in it")
