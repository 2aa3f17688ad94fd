"""Values of known types as JSON, for what workers tell each other. Torch-free.

A pickle may run any code where it is read. JSON cannot, and what is read here has the expected type or is refused:
None, booleans, numbers, strings, paths, lists, tuples, dictionaries with any of these as keys, dataclasses, and unions
of them. `Any` stands for plain JSON.
"""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from pipeplan_launch.errors import LaunchError

_PLAIN = (bool, int, float, str, type(None))


def encode(value: Any) -> bytes:
    """The value as JSON. NaN and infinity stay what they are."""
    return json.dumps(_plain(value)).encode()


def decode(data: bytes, kind: Any) -> Any:
    """The value of type `kind` that `encode` wrote. Raises `LaunchError` for anything else."""
    try:
        return _typed(json.loads(data), kind)
    except (ValueError, TypeError, RecursionError) as error:
        raise LaunchError(
            f"another worker sent a wrong value ({str(error)[:100]}): another program writes here"
        ) from error


def _plain(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return [[_plain(key), _plain(inner)] for key, inner in value.items()]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [_plain(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, list | tuple | range):
        return [_plain(inner) for inner in value]
    raise TypeError(f"a {type(value).__name__} cannot be sent to other workers")


def _typed(value: Any, kind: Any) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        return _one_of(value, arguments)
    if kind in (None, type(None)):
        return _checked(value, type(None))
    if kind is float:
        return float(_checked(value, int | float))
    if kind in (bool, int, str):
        return _checked(value, kind)
    if kind is Path:
        return Path(_checked(value, str))
    if dataclasses.is_dataclass(kind):
        return _object(value, kind)
    if origin is dict:
        return {_typed(key, arguments[0]): _typed(inner, arguments[1]) for key, inner in _pairs(value)}
    if origin is list:
        return [_typed(inner, arguments[0]) for inner in _checked(value, list)]
    if origin is tuple and arguments[-1] is not Ellipsis:
        return tuple(_typed(inner, one) for inner, one in zip(_checked(value, list), arguments, strict=True))
    if origin in (tuple, Sequence):
        return tuple(_typed(inner, arguments[0]) for inner in _checked(value, list))
    raise TypeError(f"{kind} is no type of values that workers send")


def _one_of(value: Any, kinds: Sequence[Any]) -> Any:
    """The value read as the first type that fits it. None is tried first, because nothing else fits None."""
    if value is None and type(None) in kinds:
        return None
    for kind in kinds:
        if kind is not type(None):
            try:
                return _typed(value, kind)
            except (ValueError, TypeError):
                continue
    raise TypeError("a value of none of the expected types")


def _checked(value: Any, kind: Any) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"a {type(value).__name__} in place of {getattr(kind, '__name__', kind)}")
    return value


def _pairs(value: Any) -> Sequence[tuple[Any, Any]]:
    return [(key, inner) for key, inner in _checked(value, list)]


@cache
def _fields(kind: Any) -> tuple[Any, ...]:
    hints = get_type_hints(kind)
    return tuple(hints[field.name] for field in dataclasses.fields(kind))


def _object(value: Any, kind: Any) -> Any:
    values = [_typed(inner, one) for inner, one in zip(_checked(value, list), _fields(kind), strict=True)]
    names = [field.name for field in dataclasses.fields(kind)]
    return kind(**dict(zip(names, values, strict=True)))
