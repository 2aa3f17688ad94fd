"""Numbers of a dataclass in the types of its fields, so that an object equals the one that is read from its file."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from numbers import Real
from typing import Any, get_type_hints

_TYPES: dict[object, type] = {float: float, float | None: float, int: int, int | None: int}


def settle_numbers(instance: Any) -> None:
    """Turn whole numbers in fields of type `float` into floats, and whole floats in fields of type `int` into integers.

    For `__post_init__` of frozen dataclasses: `Level("server", 2, 12_000_000_000)` is then written as
    `12000000000.0`, which is also what a reader of that file finds. Other values are left for checks to complain of.
    """
    kind: type = type(instance)
    for name, wanted in _numeric_fields(kind):
        value = getattr(instance, name)
        if type(value) is wanted or isinstance(value, bool) or not isinstance(value, Real):
            continue
        if wanted is float or float(value).is_integer():
            object.__setattr__(instance, name, wanted(value))


@cache
def _numeric_fields(kind: type) -> tuple[tuple[str, type], ...]:
    """The names of the numeric fields of a dataclass, with the type that each has."""
    hints = get_type_hints(kind)
    return tuple((field.name, _TYPES[hints[field.name]]) for field in fields(kind) if hints[field.name] in _TYPES)
