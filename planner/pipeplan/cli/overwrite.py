"""Checks before a file is replaced: a command replaces its own older output, but any other file only with --force."""

from __future__ import annotations

from pathlib import Path

from pipeplan.errors import InputError

HEAD = 2**12
"""Bytes at the beginning of a file that are searched for the mark of its kind."""


def refuse_another(path: Path, mark: bytes, what: str, force: bool) -> None:
    """Raise an `InputError` if `path` is a file that is not `what`, which has a mark in its first bytes."""
    if force or not path.is_file() or not path.stat().st_size or mark in _begin(path):
        return
    raise InputError(f"{path} exists and is not {what}: give another file with -o, or --force to replace it")


def refuse_existing(path: Path, force: bool) -> None:
    """Raise an `InputError` if `path` is a folder, or an existing file and `force` is not set."""
    if path.is_dir():
        raise InputError(f"{path} is a folder: name the file to write with -o")
    if path.exists() and not force:
        raise InputError(f"{path} exists; give another file with -o, or --force to replace it")


def _begin(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(HEAD)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
