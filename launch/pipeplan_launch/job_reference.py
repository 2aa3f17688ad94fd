"""Job references, and records of the job's file that let a project folder be moved or copied. Torch-free.

A reference is a bundled name, `file.py:callable` or `package.module:callable`. A profile or a plan records the file's
path relative to its own folder, and a `JobFile` with the absolute path and the digest of the content.
"""

from __future__ import annotations

import hashlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class JobFile:
    """The file of a job, as a profile or a plan recorded it."""

    path: str
    """Absolute path of the file when the record was written."""
    digest: str
    """SHA-256 of the file's content when the model was profiled."""


def is_file_name(text: str) -> bool:
    """Whether the first part of a reference names a file, instead of a module."""
    return text.endswith(".py") or os.sep in text


def file_of(ref: str) -> Path | None:
    """The file in a reference; None if the reference names a module or a bundled model."""
    head, colon, _ = ref.rpartition(":")
    return Path(head) if colon and is_file_name(head) else None


def canonical_reference(ref: str) -> str:
    """The reference that names the same job from any folder: a file's path is made absolute.

    A symbolic link is not followed, because a copy of its folder may have a file in its place.
    """
    file = file_of(ref)
    return ref if file is None else _with_file(ref, file.parent.resolve() / file.name)


def relative_reference(ref: str, folder: Path) -> str:
    """The reference with the path of its file relative to a folder. The text always has a slash or ends in .py."""
    file = file_of(ref)
    return ref if file is None else _with_file(ref, os.path.relpath(file, folder.resolve()))


def located_reference(ref: str, recorded: JobFile | None, folder: Path) -> str:
    """The absolute form of a job reference that a file in `folder` records.

    The job's file is first looked for relative to the folder, then at the recorded path. A reference without any file
    stays unchanged.
    """
    file = file_of(ref)
    if file is None:
        return ref
    found = Path(os.path.normpath(folder.resolve() / file))
    if not found.is_file():
        # Older files record nothing, and a relative path in them starts at the working folder.
        other = file.absolute() if recorded is None else Path(recorded.path)
        found = other if other.is_file() else found
    return ref if recorded is None and not found.is_file() else _with_file(ref, found)


def portable_reference(ref: str) -> str:
    """The reference without the folder of its file."""
    file = file_of(ref)
    return ref if file is None else _with_file(ref, file.name)


def job_file(ref: str) -> JobFile | None:
    """The file of a job that has been loaded in this process; None for a bundled model, or if there is no file."""
    head, colon, _ = ref.rpartition(":")
    path = file_of(ref)
    if colon and path is None:
        module = sys.modules.get(head)
        path = None if module is None or not module.__file__ else Path(module.__file__)
    digest = "" if path is None else file_digest(path)
    return JobFile(os.path.abspath(path), digest) if path is not None and digest else None


def file_digest(path: Path) -> str:
    """SHA-256 of a file's content; empty if it cannot be read."""
    try:
        return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
    except OSError:
        return ""


def choice_note(ref: str, recorded: JobFile | None) -> str | None:
    """A sentence for the user if the located file and the recorded file both exist and differ; else None."""
    file = file_of(ref)
    if file is None or recorded is None or str(file) == recorded.path:
        return None
    here, there = file_digest(file), file_digest(Path(recorded.path))
    if not here or not there or here == there:
        return None
    return f"the job is {file}, and not {recorded.path}, which was profiled: the two files differ"


def change_note(ref: str, recorded: JobFile | None, current: JobFile | None) -> str | None:
    """The beginning of a sentence if the file of a job has changed since it was profiled; else None."""
    if recorded is None or current is None or recorded.digest == current.digest:
        return None
    return f"{Path(current.path).name} has changed since it was profiled"


def _with_file(ref: str, file: Path | str) -> str:
    return f"{file}:{ref.rpartition(':')[2]}"
