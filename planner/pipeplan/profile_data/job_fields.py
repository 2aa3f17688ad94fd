"""The job's file in profiles and plans: the fields that record it, and the remarks where it has changed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pipeplan_launch.job_reference import JobFile, change_note, choice_note, file_of, job_file, relative_reference


def located_fields(ref: str, recorded: JobFile | None, folder: Path) -> dict[str, Any]:
    """The fields `ref` and `file` of a model, as a file in `folder` has them.

    Where no file was recorded, `file` is left out and `ref` stays as it is.
    """
    if recorded is None:
        return {"ref": ref}
    file = file_of(ref)
    current = replace(recorded, path=str(file)) if file is not None and file.is_file() else recorded
    return {"ref": relative_reference(ref, folder), "file": asdict(current)}


def job_notes(ref: str, recorded: JobFile | None) -> Iterator[str]:
    """Remarks where the file of a profile's job is another one than the recorded file, or has changed since."""
    if file_of(ref) is None:
        return
    if note := choice_note(ref, recorded):
        yield note
    if note := change_note(ref, recorded, job_file(ref)):
        yield f"{note}, so its layers may take other times"
