"""Typed documents: a dataclass or a msgspec `Struct` defines the fields of a file and their limits. `decode` reads it.

Errors name the file, the field and its wrong value. The JSON Schemas in docs/reference/schemas are made from the same
types. Torch-free.
"""

from __future__ import annotations

import json
import re
import types
import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from pipeplan_launch.errors import LaunchError, nearest

LARGEST = float(2**63)
"""Upper limit for every time, size and count in a file, so that sums and products of them stay finite."""
LARGEST_SIZE = 2**53
"""Largest number of bytes in a file; that is 8 PiB. Beyond it a float cannot hold every whole number."""

MOST_DIGITS = 18
"""Largest number of digits of a whole number in an option or an environment variable."""

Amount = Annotated[float, Meta(ge=0, le=LARGEST)]
"""A time, a rate, a price or another figure that is never negative."""
Finite = Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]
Bytes = Annotated[int, Meta(ge=0, le=LARGEST_SIZE)]
Natural = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Positive = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Text = Annotated[str, Meta(min_length=1)]

_WORDS = {
    "str": "text",
    "float": "a number",
    "int": "a whole number",
    "bool": "true or false",
    "array": "a list",
    "object": "a mapping",
}
_WRAPPERS = (Annotated, typing.Union, types.UnionType, typing.NotRequired)
_PLACE = re.compile(r"(?s)(.*) - at `\$(.*)`")
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]")
_Document = TypeVar("_Document")
Convert = Callable[[Any, Any], Any]
"""Converts a value to a type; raises `msgspec.ValidationError`."""


def convert_plainly(value: Any, kind: Any) -> Any:
    """The value as an instance of a type that has no quantities with units."""
    return msgspec.convert(value, kind)


def decode(
    value: Any,
    kind: type[_Document],
    where: str,
    *,
    convert: Convert = convert_plainly,
    error_type: type[Exception] = LaunchError,
) -> _Document:
    """The value at a place of a file, as an instance of `kind`. `kind` defines the fields and their limits.

    Whole numbers may be written with a decimal point or an exponent. Raises an error of type `error_type` that names
    the place, the field and its wrong value.
    """
    try:
        return typing.cast(_Document, convert(value, kind))
    except msgspec.ValidationError as error:
        if "Expected `int" not in str(error) or "got `float`" not in str(error):
            raise error_type(_explained(value, kind, where, error, convert)) from None
    # Few files write whole numbers as 5.0, so only a file that fails is converted and decoded again.
    value = _with_whole_numbers(value)
    try:
        return typing.cast(_Document, convert(value, kind))
    except msgspec.ValidationError as error:
        raise error_type(_explained(value, kind, where, error, convert)) from None


def parse_json(raw: bytes) -> Any:
    """The value of a JSON file. Raises `ValueError` or `RecursionError` for anything else."""
    value = json.loads(raw)
    if b"\\u" in raw:
        refuse_half_characters(value)
    return value


def refuse_half_characters(value: Any) -> None:
    """Raise a `ValueError` for a text with a lone surrogate, which JSON can express but no UTF-8 file can hold."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        near = ascii(error.object[max(0, error.start - 20) : error.start + 1])
        raise ValueError(f"a text has half a character (a lone surrogate), at {near}") from None


def whole_number(text: str) -> int | None:
    """The number that is written in decimal digits; None for any other text, and for more than `MOST_DIGITS` digits.

    Python raises a `ValueError` for more than 4,300 digits.
    """
    return int(text) if text.isdecimal() and len(text) <= MOST_DIGITS else None


def shortened(value: Any, most: int = 40) -> str:
    """A value for an error message, cut to about `most` characters."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than 4,300 digits, though TOML has longer ones in hexadecimal
        return "a number with too many digits"
    except RecursionError:
        return "a value that is nested too deeply"
    return text if len(text) <= most else text[: most - 3] + "…"


def _with_whole_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_whole_numbers(member) for name, member in value.items()}
    if isinstance(value, list):
        return [_with_whole_numbers(member) for member in value]
    if isinstance(value, float) and abs(value) <= LARGEST_SIZE and value.is_integer():
        return int(value)
    return value


def _explained(value: Any, kind: Any, where: str, error: msgspec.ValidationError, convert: Convert) -> str:
    """The message for a conversion error of msgspec, with the place and the wrong value."""
    match = _PLACE.fullmatch(str(error))
    message, path = (match[1], match[2]) if match else (str(error), "")
    for step in _STEP.finditer(path):
        value, kind, shown = _inside(value, kind, step, convert)
        where += shown
    return f"{where}: {_reason(message, value, kind)}"


def _inside(value: Any, kind: Any, step: re.Match[str], convert: Convert) -> tuple[Any, Any, str]:
    """(value, type, text for messages) one step further along a path of msgspec."""
    name, index = step[1], step[2]
    kind = _member_for(value, kind)
    if name is not None:
        return value[name], _type_of(kind, name), f": {name}"
    if index != "..." and isinstance(kind, type) and issubclass(kind, msgspec.Struct):  # written as a list
        name = kind.__struct_fields__[int(index)]
        return value[int(index)], _type_of(kind, name), f": {name}"
    arguments = [argument for argument in typing.get_args(kind) if argument is not Ellipsis] or [None]
    if index == "...":
        name = _wrong_member(value, arguments[-1], convert)
        return value[name], arguments[-1], f": {shortened(name, 60)}"
    member = value[int(index)]
    inner = arguments[min(int(index), len(arguments) - 1)]
    return member, inner, f"[{index}]{_quoted_name(member)}"


def _type_of(kind: Any, name: str) -> Any:
    return typing.get_type_hints(kind, include_extras=True).get(name)


def _wrong_member(mapping: dict[str, Any], kind: Any, convert: Convert) -> str:
    """The first member of a mapping with a wrong type, which msgspec does not name."""
    for name, member in mapping.items():
        try:
            convert(member, kind)
        except msgspec.ValidationError:
            return name
    raise AssertionError("a member was wrong")


def _quoted_name(member: Any) -> str:
    """The name of a layer, a tensor or a device, to be shown with its index."""
    name = member.get("name") if isinstance(member, dict) else None
    return f" ({shortened(name, 60)})" if isinstance(name, str) else ""


def _member_for(value: Any, kind: Any) -> Any:
    """The type inside `Annotated` and `NotRequired`. For a union: the list type if the value is a list, else the
    other.
    """
    while typing.get_origin(kind) in _WRAPPERS:
        arguments = typing.get_args(kind)[:1] if typing.get_origin(kind) is Annotated else typing.get_args(kind)
        members = [member for member in arguments if member is not type(None)]
        listing = [member for member in members if typing.get_origin(member) in (tuple, list)]
        others = [member for member in members if member not in listing]
        kind = (listing or others if isinstance(value, list) else others or listing)[0]
    return kind


def _reason(message: str, value: Any, kind: Any) -> str:
    found = f", found {shortened(value)}"
    if match := re.fullmatch(r"Object missing required field `(.*)`", message):
        return f"the field {match[1]!r} is missing"
    if match := re.fullmatch(r"(?s)Object contains unknown field `(.*)`", message):
        return f"there is no field {shortened(match[1])}; {nearest(match[1], _names(_member_for(value, kind)))}"
    if match := re.fullmatch(r"Expected `([a-z |]+)`, got `\w+`", message):
        return f"expected {' or '.join(_words(match[1]))}{found}"
    if match := re.fullmatch(r"Expected `array` of (?:at least |at most )?length (\d+), got (\d+)", message):
        return f"expected a list of {match[1]}, found {match[2]} values"
    if match := re.fullmatch(r"Expected `(array|str|object)` of length >= 1", message):
        return f"expected {_WORDS[match[1]]} that is not empty"
    if message.startswith("Invalid enum value"):
        known = [repr(one) for one in typing.get_args(_member_for(value, kind))]
        return f"expected {' or '.join(known)}{found}"
    if match := re.fullmatch(r"Expected `(?:[a-z |]+)` (>=|>) (.*)", message):
        least = f"{'at least' if match[1] == '>=' else 'more than'} {float(match[2]):g}"
        return f"expected {least}{found}" if value == value else "expected a finite number"
    if match := re.fullmatch(r"Expected `([a-z |]+)` <= (.*)", message):
        most = match[2] if "int" in match[1] else f"{float(match[2]):g}"
        return f"expected a finite number of at most {most}{found}"
    if message == "Number out of range":
        return f"expected a finite number of at most {LARGEST:g}{found}"
    return message


def _names(kind: Any) -> list[str]:
    """The names of the fields of a type, as they are written in a file."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return [field.encode_name for field in msgspec.structs.fields(kind)]
    return list(typing.get_type_hints(kind))


def _words(kinds: str) -> Iterator[str]:
    for name in kinds.split(" | "):
        if name != "null":
            yield _WORDS.get(name, name)
