"""Writes the files of a target for a plan: all of them or none."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path

from pipeplan.errors import InputError
from pipeplan.exports.target import File, Target
from pipeplan.files import write_text
from pipeplan.plan import Plan
from pipeplan.problem import Problem


def export(to: Target, problem: Problem, plan: Plan) -> Mapping[str, File]:
    """The files of a target by name. Raises `InputError` for a plan that the target cannot express."""
    to.refuse(problem, plan)
    return to.files(problem, plan)


def refuse_to_overwrite(folder: Path, names: Collection[str], force: bool) -> None:
    """Raise `InputError` if files of these names cannot, or must not, be written to `folder`."""
    for place in (folder, *folder.parents):
        if place.exists() or place.is_symlink():
            if not place.is_dir():
                raise InputError(f"{place} is not a folder; an export is written to one: give another with -o")
            break
    for name in names:
        if (folder / name).is_dir():
            raise InputError(f"{folder / name} is a folder, and the export has a file of that name: give -o another")
        if (folder / name).exists() and not force:
            raise InputError(f"{folder / name} exists: give another folder with -o, or --force to replace it")


def write(folder: Path, files: Mapping[str, File], *, force: bool = False) -> None:
    """Write all files into a folder, or none. With `force` they replace existing ones. Raises `InputError`."""
    refuse_to_overwrite(folder, files, force)
    created = _missing(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".new-export.", dir=folder))
        try:
            for name, file in files.items():
                write_text(scratch / name, file.text, mode=file.mode)
            for name in files:
                (scratch / name).replace(folder / name)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            for place in created:
                if place.is_dir() and not any(place.iterdir()):
                    place.rmdir()
    except OSError as error:
        raise InputError(f"cannot write {folder}: {error.strerror or error}") from error


def _missing(folder: Path) -> list[Path]:
    """The folders of a path that do not exist yet, innermost first."""
    return [place for place in (folder, *folder.parents) if not place.exists()]
