"""JSON documents on disk: versioned, checked field by field, written whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn

from pipeplan.errors import InputError
from pipeplan.suggest import did_you_mean, near_files

LARGEST = float(2**63)
"""No time, size or count in any file is larger: sums and products of them stay finite."""


def write_text(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Write `text` to `path` by atomic replace, so that a reader sees the old file or the new one, never a part.

    What a link points to is replaced, not the link; a device or a pipe is written to as it is.
    """
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            path.write_text(text, encoding="utf-8")
            return
        path = Path(os.path.realpath(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, mode)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error


def refuse_unwritable(path: Path) -> None:
    """Raise an `InputError` now, before long work, for a path that `write_text` could not write."""
    if path.is_dir():
        raise InputError(f"{path} is a folder: name the file to write, as in -o {path / 'profile.json'}")
    if path.exists() and not path.is_file():
        return
    target = Path(os.path.realpath(path))
    folder = next(one for one in target.parents if one.exists())
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document as indented JSON with a final newline; NaN and infinity are refused."""
    write_text(path, json.dumps(document, indent=1, allow_nan=False) + "\n")


def read_text(path: Path) -> str:
    """The text of a file, or an `InputError` that names it."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}{near_files(path)}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not text: it has bytes that are not UTF-8") from error


def read_json(path: Path, kind: str) -> Node:
    """The JSON value in a file, unchecked; an `InputError` names the file and says what it is not (`kind`)."""
    text = read_text(path)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{path} is not valid JSON (line {error.lineno}: {error.msg}): is it truncated?") from error
    except RecursionError as error:
        raise InputError(f"{path} is nested too deeply to be a {kind}") from error
    except ValueError as error:
        raise InputError(f"{path} has a number with too many digits") from error
    return Node(value, str(path))


def read_document(path: Path, kind: str, version: int) -> Node:
    """Parse a versioned JSON document and check that it is of the expected `format` and not from a newer pipeplan."""
    root = read_json(path, kind)
    found = root.get("format")
    if found is None:
        raise InputError(f"{path} is not a {kind} file: it has no `format`")
    if found.value != kind:
        raise InputError(f"{path} is not a {kind} file: its `format` says {found.value!r}")
    number = root["version"].integer(minimum=1)
    if number > version:
        raise InputError(f"{path} is version {number} of {kind}; this pipeplan reads up to {version}: upgrade pipeplan")
    return root


def read_toml(path: Path, kind: str, version: int) -> Node:
    """Parse a versioned TOML document; checks and errors as in `read_document`."""
    try:
        root = Node(tomllib.loads(read_text(path)), str(path))
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path} is not valid TOML: {error}") from error
    except RecursionError as error:
        raise InputError(f"{path} is nested too deeply to be a {kind}") from error
    if (found := root.get("format")) is None or found.value != kind:
        what = kind.removeprefix("pipeplan-")
        raise InputError(f'{path} is not a {what} file: it does not say format = "{kind}"')
    if (number := root["version"].integer(minimum=1)) > version:
        raise InputError(f"{path} is version {number} of {kind}; this pipeplan reads up to {version}: upgrade pipeplan")
    return root


class Node:
    """A value inside a parsed document that knows where it stands, so that every complaint can name the place."""

    def __init__(self, value: Any, where: str) -> None:
        self.value = value
        self.where = where

    def fail(self, why: str) -> NoReturn:
        """Raise an `InputError` that names this place."""
        raise InputError(f"{self.where}: {why}")

    def mapping(self) -> dict[str, Any]:
        """This value as a mapping."""
        if not isinstance(self.value, dict):
            self.fail(f"expected a mapping, found {_short(self.value)}")
        return self.value

    def __getitem__(self, key: str) -> Node:
        """The field `key`; missing is an error."""
        fields = self.mapping()
        if key not in fields:
            self.fail(f"the field {key!r} is missing")
        return Node(fields[key], f"{self.where}: {key}")

    def get(self, key: str) -> Node | None:
        """The field `key`, or None where it is missing or null."""
        value = self.mapping().get(key)
        return None if value is None else Node(value, f"{self.where}: {key}")

    def refuse_others(self, names: Collection[str]) -> None:
        """Fail where this mapping has a field that is not among the names."""
        for key in self.mapping():
            if key not in names:
                self.fail(f"there is no field {key!r}; {did_you_mean(key, sorted(names))}")

    def items(self) -> list[Node]:
        """The members of a list."""
        if not isinstance(self.value, list):
            self.fail(f"expected a list, found {_short(self.value)}")
        return [Node(value, f"{self.where}[{index}]") for index, value in enumerate(self.value)]

    def text(self) -> str:
        """This value as a string."""
        if not isinstance(self.value, str):
            self.fail(f"expected text, found {_short(self.value)}")
        if not self.value.isascii() and any("\ud800" <= character <= "\udfff" for character in self.value):
            self.fail("the text has half a character (a lone surrogate)")
        return self.value

    def boolean(self) -> bool:
        """This value as true or false."""
        if not isinstance(self.value, bool):
            self.fail(f"expected true or false, found {_short(self.value)}")
        return self.value

    def number(self, *, minimum: float = 0.0) -> float:
        """A finite number, at least `minimum` (0 unless told: times, sizes and rates are never negative)."""
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.fail(f"expected a number, found {_short(value)}")
        if abs(value) > LARGEST or value != value:
            self.fail(f"expected a finite number of at most {LARGEST:g}, found {_short(value)}")
        if value < minimum:
            self.fail(f"expected at least {minimum:g}, found {value:g}")
        return float(value)

    def integer(self, *, minimum: int = 0) -> int:
        """A whole number, at least `minimum`."""
        number = self.number(minimum=minimum)
        if number != int(number):
            self.fail(f"expected a whole number, found {_short(self.value)}")
        return int(self.value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "…"
