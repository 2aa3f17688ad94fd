"""Values as JSON with the tensors taken out: how a checkpoint holds an optimiser's settings, which are not code.

A value is encoded as itself where JSON has it. What JSON has not is an object with one key: `tensor` (the name under
which the tensor is kept), `tuple`, `dict` or `float` (one that is not finite).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


class NotPlain(Exception):
    """A value that only code could make again; the argument says what it is."""


def encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """`value` as JSON; its tensors go into `tensors`, under names that begin with `name`. Raises `NotPlain`."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, Tensor):
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, list | tuple):
        inner = [encode(one, f"{name}.{index}", tensors) for index, one in enumerate(value)]
        return {"tuple": inner} if isinstance(value, tuple) else inner
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: encode(one, f"{name}.{key}", tensors) for key, one in value.items()}}
    raise NotPlain(type(value).__name__)


def tensors_in(encoded: Any) -> Iterator[str]:
    """The names of the tensors that an encoded value needs."""
    if isinstance(encoded, list):
        for one in encoded:
            yield from tensors_in(one)
    elif isinstance(encoded, dict):
        for kind, inner in encoded.items():
            if kind == "tensor" and isinstance(inner, str):
                yield inner
            elif kind == "dict" and isinstance(inner, dict):
                yield from tensors_in(list(inner.values()))
            else:
                yield from tensors_in(inner)


def decode(encoded: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `encode`. Raises `NotPlain` for what it never writes."""
    if isinstance(encoded, list):
        return [decode(one, tensors) for one in encoded]
    if not isinstance(encoded, dict):
        return encoded
    match list(encoded.items()):
        case [("tensor", str(name))] if name in tensors:
            return tensors[name]
        case [("tuple", list(inner))]:
            return tuple(decode(one, tensors) for one in inner)
        case [("dict", dict(inner))]:
            return {key: decode(one, tensors) for key, one in inner.items()}
        case [("float", "nan" | "inf" | "-inf" as text)]:
            return float(text)
    raise NotPlain(f"an object with {', '.join(encoded) or 'nothing'} in it")
