"""Reading and writing of text, JSON and TOML files: versioned, checked field by field, written by atomic replace.

Bundled data is inside the installed package or at the top of a checkout; `bundled_folder` finds it.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
import tomllib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from pipeplan.errors import InputError
from pipeplan.util.text import did_you_mean, near_files
from pipeplan_launch.typed_document import LARGEST as LARGEST
from pipeplan_launch.typed_document import refuse_half_characters, shortened

LARGEST_FILE = 2**28
"""Largest size of a file that is read, in bytes."""
HEAD = 2**12
"""Number of bytes at the beginning of a file that are searched for the mark of its kind."""


def write_text(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Write `text` to `path` by atomic replace: a reader sees the old or the new file, never a part of it.

    If `path` is a symbolic link, its target is replaced. A device or a pipe is written to directly. The file's
    permissions are `mode` minus the user's umask. Raises an `InputError` if the file cannot be written.
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
            os.chmod(temporary, mode & ~_umask())
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error


def _umask() -> int:
    """The umask of the process, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def refuse_unwritable(path: Path, option: str = "-o") -> None:
    """Raise an `InputError` for a path that `write_text` could not write. Call this function before long work.

    `option` is the option that gave the path.
    """
    if path.is_dir():
        raise InputError(f"{path} is a folder: name the file to write with {option}")
    if path.exists() and not path.is_file():
        return
    target = Path(os.path.realpath(path))
    folder = next(parent for parent in target.parents if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error


def refuse_to_replace(
    path: Path, option: str = "-o", *, force: bool = False, mark: bytes | None = None, what: str = ""
) -> None:
    """Raise an `InputError` if a file cannot be written, or, without `force`, must not be. Call this function before
    long work.

    An empty file, and a file with `mark` in its first bytes, may be replaced without `force`. `what` describes files
    with the mark in the error message. Without a mark, every existing file is refused.
    """
    refuse_unwritable(path, option)
    if force or not path.is_file():
        return
    if mark is not None and (not path.stat().st_size or mark in read_bytes(path)[:HEAD]):
        return
    kind = f" and is not {what}" if what else ""
    raise InputError(f"{path} exists{kind}: give another file with {option}, or --force to replace it")


def refuse_to_overwrite(folder: Path, names: Collection[str], force: bool) -> None:
    """Raise an `InputError` if files of these names cannot be written to `folder`, or, without `force`, must not be."""
    place = next(parent for parent in (folder, *folder.parents) if parent.exists() or parent.is_symlink())
    if not place.is_dir():
        raise InputError(f"{place} is not a folder: give another one with -o")
    for path in (folder / name for name in names):
        if path.is_dir():
            raise InputError(f"{path} is a folder, where a file is to be written: give another folder with -o")
        if (path.exists() or path.is_symlink()) and not force:
            raise InputError(f"{path} exists: give another folder with -o, or --force to replace it")


def write_together(folder: Path, contents: Mapping[str, tuple[str, int]], *, force: bool = False) -> None:
    """Write texts with their permissions to a folder under these names, either all or none.

    With `force` they replace older files. Raises an `InputError` if they would replace files without `force`, or if the
    folder cannot be written; new folders are then removed again.
    """
    refuse_to_overwrite(folder, contents, force)
    created = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".new-files.", dir=folder))
        try:
            for name, (text, mode) in contents.items():
                (scratch / name).write_text(text, encoding="utf-8")
                os.chmod(scratch / name, mode & ~_umask())
            for name in contents:
                (scratch / name).replace(folder / name)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            for place in created:
                if place.is_dir() and not any(place.iterdir()):
                    place.rmdir()
    except OSError as error:
        raise InputError(f"cannot write {folder}: {error.strerror or error}") from error


def json_text(document: Mapping[str, Any]) -> str:
    """A document as indented JSON with a final newline. NaN and infinity raise a `ValueError`."""
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document as JSON by atomic replace."""
    write_text(path, json_text(document))


def read_bytes(path: Path, most: int = LARGEST_FILE) -> bytes:
    """The content of a file that the user named.

    Raises an `InputError` that names the file if it cannot be read, is not a regular file (but a device, a pipe or a
    folder), or has more than `most` bytes. The function never waits for a pipe.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            found = os.fstat(file.fileno())
            if stat.S_ISDIR(found.st_mode):
                raise InputError(f"cannot read {path}: Is a directory")
            if not stat.S_ISREG(found.st_mode):
                raise InputError(f"{path} is not a regular file: it is a device or a pipe; save its content to a file")
            content = file.read(most + 1)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise InputError(f"cannot read {path}: {reason}{near_files(path)}") from error
    if len(content) > most:
        raise InputError(f"{path} has more than {most / 2**20:.0f} MiB: it is not a file that pipeplan reads")
    return content


def read_text(path: Path) -> str:
    """The text of a file, without a byte order mark, and with plain line ends.

    Raises the same errors as `read_bytes`.
    """
    try:
        return read_bytes(path).decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not text: it has bytes that are not UTF-8") from error


def read_document(path: Path, kind: str, version: int) -> Node:
    """Read a versioned JSON document.

    Raises an `InputError` unless its `format` is `kind` and its `version` is at most `version`.
    """
    text = read_text(path)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{path} is not valid JSON (line {error.lineno}: {error.msg}): is it truncated?") from error
    except RecursionError as error:
        raise InputError(f"{path} is nested too deeply to be a {kind}") from error
    except ValueError as error:
        raise InputError(f"{path} has a number with too many digits") from error
    if "\\u" in text:
        try:
            refuse_half_characters(value)
        except ValueError as error:
            raise InputError(f"{path}: {error}") from None
    root = Node(value, str(path))
    found = root.get("format")
    if found is None:
        raise InputError(f"{path} is not a {kind} file: it has no `format`")
    if found.value != kind:
        raise InputError(f"{path} is not a {kind} file: its `format` says {found.value!r}")
    return _of_version(root, path, kind, version)


def _of_version(root: Node, path: Path, kind: str, version: int) -> Node:
    number = root["version"].integer(minimum=1)
    if number > version:
        raise InputError(f"{path} is version {number} of {kind}; this pipeplan reads up to {version}: upgrade pipeplan")
    return root


def read_toml(path: Path, kind: str, version: int) -> Node:
    """Read a versioned TOML document, with the same checks and errors as `read_document`."""
    try:
        root = Node(tomllib.loads(read_text(path)), str(path))
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path} is not valid TOML: {error}") from error
    except RecursionError as error:
        raise InputError(f"{path} is nested too deeply to be a {kind}") from error
    except ValueError as error:
        raise InputError(f"{path} has a number with too many digits, or a wrong date") from error
    if (found := root.get("format")) is None or found.value != kind:
        what = kind.removeprefix("pipeplan-")
        raise InputError(f'{path} is not a {what} file: it does not say format = "{kind}"')
    return _of_version(root, path, kind, version)


class Node:
    """A value in a parsed document, with its place in the document for error messages."""

    def __init__(self, value: Any, where: str) -> None:
        self.value = value
        self.where = where

    def fail(self, why: str) -> NoReturn:
        """Raise an `InputError` that names this place."""
        raise InputError(f"{self.where}: {why}")

    @contextmanager
    def locating_errors(self) -> Iterator[None]:
        """Add this place to every `InputError` raised in the block that does not name it yet."""
        try:
            yield
        except InputError as error:
            message = str(error)
            raise InputError(message if message.startswith(self.where) else f"{self.where}: {message}") from None

    def mapping(self) -> dict[str, Any]:
        """This value as a mapping."""
        if not isinstance(self.value, dict):
            self.fail(f"expected a mapping, found {shortened(self.value)}")
        return self.value

    def __getitem__(self, key: str) -> Node:
        """The field `key`. Raises an `InputError` if it is missing."""
        fields = self.mapping()
        if key not in fields:
            self.fail(f"the field {key!r} is missing")
        return Node(fields[key], f"{self.where}: {key}")

    def get(self, key: str) -> Node | None:
        """The field `key`; None if it is missing or null."""
        value = self.mapping().get(key)
        return None if value is None else Node(value, f"{self.where}: {key}")

    def refuse_others(self, names: Collection[str]) -> None:
        """Raise an `InputError` if this mapping has a field that is not among `names`."""
        for key in self.mapping():
            if key not in names:
                self.fail(f"there is no field {key!r}; {did_you_mean(key, sorted(names))}")

    def items(self) -> list[Node]:
        """The members of a list."""
        if not isinstance(self.value, list):
            self.fail(f"expected a list, found {shortened(self.value)}")
        return [Node(value, f"{self.where}[{index}]") for index, value in enumerate(self.value)]

    def text(self) -> str:
        """This value as a string."""
        if not isinstance(self.value, str):
            self.fail(f"expected text, found {shortened(self.value)}")
        return self.value

    def boolean(self) -> bool:
        """This value as true or false."""
        if not isinstance(self.value, bool):
            self.fail(f"expected true or false, found {shortened(self.value)}")
        return self.value

    def number(self, *, minimum: float = 0.0) -> float:
        """This value as a finite number of at least `minimum`.

        The default is 0, because times, sizes and rates are never negative.
        """
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.fail(f"expected a number, found {shortened(value)}")
        if abs(value) > LARGEST or value != value:
            self.fail(f"expected a finite number of at most {LARGEST:g}, found {shortened(value)}")
        if value < minimum:
            self.fail(f"expected at least {minimum:g}, found {value:g}")
        return float(value)

    def integer(self, *, minimum: int = 0) -> int:
        """This value as a whole number of at least `minimum`."""
        number = self.number(minimum=minimum)
        if number != int(number):
            self.fail(f"expected a whole number, found {shortened(self.value)}")
        return int(self.value)


_PACKAGE = Path(__file__).resolve().parents[1]


def bundled_folder(name: str) -> Path:
    """The folder of bundled data with the name `name` (`profiles`, `templates`, …)."""
    installed = _PACKAGE / name
    return installed if installed.is_dir() else _PACKAGE.parent.parent / name
