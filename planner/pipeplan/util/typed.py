"""Typed documents: a dataclass or msgspec's `Struct` states the fields of a file and their limits; `decode` reads it.

Errors name the file, the field and what was found there. The same types give the JSON Schemas in docs/schemas.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from pipeplan.errors import InputError
from pipeplan.util.files import LARGEST, LARGEST_SIZE, Node, shortened
from pipeplan.util.text import did_you_mean
from pipeplan.util.units import parse_rate, parse_size, parse_time

Amount = Annotated[float, Meta(ge=0, le=LARGEST)]
"""A time, a rate, a price or another figure that is never negative."""
Bytes = Annotated[int, Meta(ge=0, le=LARGEST_SIZE)]
Natural = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Positive = Annotated[int, Meta(ge=1, le=2**63 - 1)]


class WrittenRate(float):
    """Bytes per second, in a file a number or text such as `10 Gbit/s`."""


class WrittenTime(float):
    """Seconds, in a file a number or text such as `5 us`."""


class WrittenSize(int):
    """Bytes, in a file a number or text such as `16 GiB`."""


_WRITTEN: dict[Any, Any] = {WrittenRate: parse_rate, WrittenTime: parse_time, WrittenSize: parse_size}
_WORDS = {
    "str": "text",
    "float": "a number",
    "int": "a whole number",
    "bool": "true or false",
    "array": "a list",
    "object": "a mapping",
}
_PLACE = re.compile(r"(?s)(.*) - at `\$(.*)`")
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]")
_Document = TypeVar("_Document")


def decode(node: Node, kind: type[_Document]) -> _Document:
    """The value at a place of a file as an instance of `kind`, which states its fields and their limits.

    Whole numbers may be written with a decimal point or an exponent. Raises an `InputError` that names the place, the
    field and what is wrong there.
    """
    value = node.value
    try:
        return _convert(value, kind)
    except msgspec.ValidationError as error:
        if "Expected `int" not in str(error) or "got `float`" not in str(error):
            raise _explained(node, kind, error) from None
    # Few files write whole numbers as 5.0, so only those that need it are gone through once more.
    value = _with_whole_numbers(value)
    try:
        return _convert(value, kind)
    except msgspec.ValidationError as error:
        raise _explained(node, kind, error) from None


def _convert(value: Any, kind: type[_Document]) -> _Document:
    return msgspec.convert(value, kind, dec_hook=_read_written)


def _read_written(kind: type[Any], value: Any) -> Any:
    """A quantity with a unit."""
    try:
        return kind(_WRITTEN[kind](value, ""))
    except InputError as error:
        raise ValueError(str(error).removeprefix(": ")) from None


def _with_whole_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_whole_numbers(member) for name, member in value.items()}
    if isinstance(value, list):
        return [_with_whole_numbers(member) for member in value]
    if isinstance(value, float) and abs(value) <= LARGEST_SIZE and value.is_integer():
        return int(value)
    return value


def _explained(node: Node, kind: Any, error: msgspec.ValidationError) -> InputError:
    """The error of a conversion in this project's words, with the place and the value that is wrong."""
    match = _PLACE.fullmatch(str(error))
    message, path = (match[1], match[2]) if match else (str(error), "")
    where, value = node.where, node.value
    for step in _STEP.finditer(path):
        value, kind, shown = _inside(value, kind, step)
        where += shown
    return InputError(f"{where}: {_reason(message, value, kind)}")


def _inside(value: Any, kind: Any, step: re.Match[str]) -> tuple[Any, Any, str]:
    """(value, type, text for people) one step further down a path of msgspec."""
    name, index = step[1], step[2]
    kind = _member_for(value, kind)
    if name is not None:
        return value[name], typing.get_type_hints(kind, include_extras=True).get(name), f": {name}"
    arguments = [argument for argument in typing.get_args(kind) if argument is not Ellipsis] or [None]
    if index == "...":  # msgspec does not say which member of a mapping it is
        return _Unknown(), arguments[-1], ": …"
    member = value[int(index)]
    inner = arguments[min(int(index), len(arguments) - 1)]
    return member, inner, f"[{index}]{_quoted_name(member)}"


class _Unknown:
    """A value of which the error does not say where it is."""


def _quoted_name(member: Any) -> str:
    """The name of a layer, a tensor or a device, which says more than its index."""
    name = member.get("name") if isinstance(member, dict) else None
    return f" ({shortened(name, 60)})" if isinstance(name, str) else ""


def _member_for(value: Any, kind: Any) -> Any:
    """The type behind `Annotated`, and of a union the member that is a list if the value is one."""
    while typing.get_origin(kind) in (Annotated, typing.Union, types.UnionType):
        members = [member for member in typing.get_args(kind) if member is not type(None)]
        listing = [member for member in members if typing.get_origin(member) is tuple]
        others = [member for member in members if member not in listing]
        kind = (listing or others if isinstance(value, list) else others or listing)[0]
    return kind


def _reason(message: str, value: Any, kind: Any) -> str:
    found = "" if isinstance(value, _Unknown) else f", found {shortened(value)}"
    if match := re.fullmatch(r"Object missing required field `(.*)`", message):
        return f"the field {match[1]!r} is missing"
    if match := re.fullmatch(r"Object contains unknown field `(.*)`", message):
        known = sorted(typing.get_type_hints(_member_for(value, kind)))
        return f"there is no field {match[1]!r}; {did_you_mean(match[1], known)}"
    if match := re.fullmatch(r"Expected `([a-z |]+)`, got `\w+`", message):
        return f"expected {' or '.join(_words(match[1]))}{found}"
    if match := re.fullmatch(r"Expected `array` of length (\d+), got (\d+)", message):
        return f"expected a list of {match[1]}, found {match[2]} values"
    if message.startswith("Invalid enum value"):
        known = [repr(one) for one in typing.get_args(_member_for(value, kind))]
        return f"expected {' or '.join(known)}{found}"
    if match := re.fullmatch(r"Expected `(?:[a-z |]+)` >= (.*)", message):
        return f"expected at least {float(match[1]):g}{found}" if value == value else "expected a finite number"
    if match := re.fullmatch(r"Expected `([a-z |]+)` <= (.*)", message):
        most = match[2] if "int" in match[1] else f"{float(match[2]):g}"
        return f"expected a finite number of at most {most}{found}"
    if message == "Number out of range":
        return f"expected a finite number of at most {LARGEST:g}{found}"
    return message


def _words(kinds: str) -> Iterator[str]:
    for name in kinds.split(" | "):
        if name != "null":
            yield _WORDS.get(name, name)


def json_schema(*kinds: type[Any]) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a document that is of one of these types."""
    schemas, definitions = msgspec.json.schema_components(kinds, schema_hook=_written_schema)
    (choice,) = schemas if len(schemas) == 1 else ({"anyOf": list(schemas)},)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **choice, "$defs": definitions}


def _written_schema(kind: type[Any]) -> dict[str, Any]:
    return {"anyOf": [{"type": "number", "minimum": 0}, {"type": "string"}], "description": kind.__doc__ or ""}
