"""Atomic writing: a file is written under a temporary name and then moved into place. Torch-free."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from pipeplan_launch.errors import LaunchError

LARGEST_FILE = 2**28
"""Largest file, in bytes, that is read into memory."""


@contextmanager
def explain_errors(path: Path, action: str) -> Iterator[None]:
    """Turn an operating-system error about `path` into a `LaunchError` that names the action, such as "writing"."""
    try:
        yield
    except OSError as error:
        raise LaunchError(f"{action} {path} failed: {error.strerror or error}") from error


def read_file(path: Path, most: int = LARGEST_FILE) -> bytes:
    """The content of a regular file of at most `most` bytes.

    Raises `OSError` for a larger file, a device or a pipe. Never waits for a pipe.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is a device or a pipe, not a regular file", str(path))
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most / 2**20:g} MiB", str(path))
    return content


def write_atomically(path: Path, write: Callable[[IO[bytes]], object], *, sync: bool = True) -> int:
    """Let `write` fill the file at `path`, and replace an existing file once the new one is complete and on disk.

    Returns the size in bytes. Without `sync`, the system may write the file to disk later; use this for files that may
    be lost in a crash.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with explain_errors(path, "writing"):
        try:
            with part.open("wb") as file:
                write(file)
                file.flush()
                if sync:
                    os.fsync(file.fileno())
                size = file.tell()
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    return size


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write an object as JSON, atomically. NaN and infinity, which JSON lacks, become null."""
    text = json.dumps(finite(content), indent=2, allow_nan=False) + "\n"
    write_atomically(path, lambda file: _fill(file, text))


def finite(value: Any) -> Any:
    """A copy of a nested value with None in place of every NaN and infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return value


def _fill(file: IO[bytes], text: str) -> None:
    file.write(text.encode())


# JSON files that contain their own checksum, so that every changed bit is noticed.
#
# The checksum is the SHA-256 of the whole file with zeros in place of the checksum's digits. It finds damage, but not
# forgery: anybody can write another valid file.

FIELD = "checksum"
_DIGITS = 64
_UNSET = "sha256:" + "0" * _DIGITS
_ENTRY = re.compile(rb'"checksum": "sha256:([0-9a-f]{64})"')


def with_checksum(content: Mapping[str, Any], *, indent: int) -> str:
    """The content as indented JSON, with a field `checksum` after the field `version`.

    An older checksum in the content is replaced. NaN and infinity raise a `ValueError`.
    """
    fields: dict[str, Any] = {}
    for name, value in content.items():
        if name != FIELD:
            fields[name] = value
        if name == "version":
            fields[FIELD] = _UNSET
    text = json.dumps(fields, indent=indent, allow_nan=False) + "\n"
    return text.replace(_UNSET, f"sha256:{_digest(text.encode())}", 1)


def is_unchanged(raw: bytes) -> bool:
    """Whether the bytes of a file are unchanged since `with_checksum` made them."""
    entry = _ENTRY.search(raw)
    if entry is None:
        return False
    start, end = entry.span(1)
    return _digest(raw[:start] + b"0" * _DIGITS + raw[end:]) == entry[1].decode()


def _digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()
