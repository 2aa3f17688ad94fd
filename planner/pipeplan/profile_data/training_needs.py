"""The job behind a profile: its file, remarks where that has changed, and what training needs and a job may lack."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from pipeplan_launch.job_reference import JobFile, change_note, choice_note, file_of, job_file, relative_reference

TrainingNeed = Literal["loss", "data"]
"""A field of a job that training needs, and profiling and planning do not."""


LEFT_OUT = "--no-self-check"
"""The reason why a profile was not self-checked, where the option left it out."""


def unchecked_text(reason: str) -> str:
    """One line for the user of a profile whose model was not compared with plain training."""
    return f"not self-checked, whether stages train as the model alone does ({reason}); launch.sh checks it by itself"


def lacking_text(lacks: Sequence[TrainingNeed]) -> str:
    """The consequence of what a job lacks, in one line for people."""
    missing = " and ".join(f"no {name}" for name in lacks)
    fields = ", ".join(f"{name}=..." for name in lacks)
    return (
        f"the job has {missing}, so that it can be planned, but launch.sh cannot train it: return Job(model, {fields}) "
        "and profile it again"
    )


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
