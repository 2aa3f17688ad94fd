"""Typed documents as the planner reads them: `pipeplan_launch.typed_document`, with quantities that have units.

`settle_numbers` gives numbers of dataclasses the types of their fields, as a reader of the file does.
"""

from __future__ import annotations

from dataclasses import asdict, fields
from functools import cache
from numbers import Real
from typing import Any, TypeVar, get_type_hints

import msgspec

from pipeplan.errors import InputError
from pipeplan.util.files import Node
from pipeplan.util.units import parse_rate, parse_share, parse_size, parse_time
from pipeplan_launch import typed_document
from pipeplan_launch.typed_document import LARGEST as LARGEST
from pipeplan_launch.typed_document import Amount as Amount
from pipeplan_launch.typed_document import Bytes as Bytes
from pipeplan_launch.typed_document import Natural as Natural
from pipeplan_launch.typed_document import Positive as Positive
from pipeplan_launch.typed_document import Text as Text
from pipeplan_launch.typed_document import shortened as shortened
from pipeplan_launch.typed_document import whole_number as whole_number


class WrittenRate(float):
    """Bytes per second. In a file, a rate is text such as `10 Gbit/s`; only 0 needs no unit."""


class WrittenTime(float):
    """Seconds. In a file, a time is text such as `50 us`; only 0 needs no unit."""


class WrittenSize(int):
    """Bytes. In a file, a size is a number, or text such as `16 GiB`."""


class WrittenShare(float):
    """A share of 1. In a file, a share is a number such as 0.05, or text such as `5%`."""


_WRITTEN: dict[Any, Any] = {
    WrittenRate: parse_rate,
    WrittenTime: parse_time,
    WrittenSize: parse_size,
    WrittenShare: parse_share,
}
_NEEDS_UNIT: dict[Any, str] = {WrittenRate: "10 Gbit/s", WrittenTime: "50 us"}
"""Quantities that must have a unit, each with an example. Users write them in several units."""
_Document = TypeVar("_Document")


def decode(node: Node, kind: type[_Document]) -> _Document:
    """The value at a place of a file as an instance of `kind`, which defines the fields and their limits.

    Whole numbers may be written with a decimal point or an exponent. Raises an `InputError` that names the place, the
    field and its wrong value.
    """

    def convert(value: Any, kind: Any) -> Any:
        return msgspec.convert(value, kind, dec_hook=_read_written)

    return typed_document.decode(node.value, kind, node.where, convert=convert, error_type=InputError)


def _read_written(kind: type[Any], value: Any) -> Any:
    """A quantity with a unit."""
    if kind in _NEEDS_UNIT and isinstance(value, int | float) and value:
        raise ValueError(f'{shortened(value)} has no unit: write it as in "{_NEEDS_UNIT[kind]}"')
    try:
        return kind(_WRITTEN[kind](value, ""))
    except InputError as error:
        raise ValueError(str(error).removeprefix(": ")) from None


def json_fields(record: Any, *optional: str) -> dict[str, Any]:
    """The fields of a dataclass as JSON values; fields in `optional` only if they are not empty, zero or false."""
    stated = {name: value for name, value in asdict(record).items() if value or name not in optional}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in stated.items()}


def json_schema(*kinds: type[Any]) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a document that has one of these types."""
    schemas, definitions = msgspec.json.schema_components(kinds, schema_hook=_written_schema)
    (choice,) = schemas if len(schemas) == 1 else ({"anyOf": list(schemas)},)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **choice, "$defs": definitions}


def _written_schema(kind: type[Any]) -> dict[str, Any]:
    number = {"const": 0} if kind in _NEEDS_UNIT else {"type": "number", "minimum": 0}
    return {"anyOf": [number, {"type": "string"}], "description": kind.__doc__ or ""}


_TYPES: dict[object, type] = {float: float, float | None: float, int: int, int | None: int}


def settle_numbers(instance: Any) -> None:
    """Turn whole numbers in fields of type `float` into floats, and whole floats in fields of type `int` into integers.

    This is for `__post_init__` of frozen dataclasses. `Level("server", 2, 12_000_000_000)` is then written with
    `12000000000.0`, as a reader of the file would have it. Other values stay unchanged, and checks report them.
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
    """The numeric fields of a dataclass, as (name, type)."""
    hints = get_type_hints(kind)
    return tuple((field.name, _TYPES[hints[field.name]]) for field in fields(kind) if hints[field.name] in _TYPES)
