"""Writes the files that start a plan, from plan.json alone: neither the profile nor a solver is needed."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeplan import stored
from pipeplan.errors import InputError
from pipeplan.files import write_text
from pipeplan.rendering.launcher import Context, Launcher
from pipeplan.rendering.templating import render_own, template


def text(
    plan: Path,
    kind: Launcher | None,
    settings: Mapping[str, Any],
    *,
    own: Path | None = None,
    output: Path | None = None,
    command: str = "pipeplan render",
) -> str:
    """The text of a file that starts the plan of a folder, rendered from the template of `kind`, or from `own`.

    `own` is a template of the user's. `settings` are those of `kind`; without a kind they are any variables for `own`.
    `output` is where the text will be written: outside the plan folder it has to name that folder. Raises `InputError`.
    """
    path = stored.file_of(plan)
    root, folder = stored.document(plan), path.parent.resolve()
    beside = output is None or output.parent.resolve() == folder
    context = Context.of(root, command=command, plan_folder=str(folder), beside=beside)
    variables = kind.variables(context, settings) if kind else context.variables() | dict(settings)
    if own is not None:
        return render_own(own, variables)
    assert kind is not None, "a kind or a template must be given"
    return template(kind.template).render(variables)


def destination(plan: Path, kind: Launcher | None, own: Path | None, output: Path | None) -> Path:
    """Path of the file: `output`, else a file in the plan folder named after the user's template or the kind."""
    if output is not None:
        return output
    if own is not None:
        name = own.name.removesuffix(".j2").removesuffix(".jinja2").removesuffix(".jinja")
        return stored.file_of(plan).parent / name
    assert kind is not None
    return stored.file_of(plan).parent / kind.file_name


def write(path: Path, content: str, kind: Launcher | None, own: Path | None = None, *, force: bool = False) -> None:
    """Write the file, in full or not at all. Raises `InputError` if another one exists, unless `force` is given."""
    if path.is_dir():
        raise InputError(f"{path} is a folder: name the file to write with -o")
    if path.exists() and not force and path.is_file() and path.read_bytes() != content.encode():
        raise InputError(f"{path} exists with another content: give another file with -o, or --force")
    if own is not None:
        # A template that can be run becomes a file that can be run.
        mode = stat.S_IMODE(own.stat().st_mode) if own.exists() else 0o644
    else:
        mode = kind.mode if kind else 0o644
    write_text(path, content, mode=mode)
