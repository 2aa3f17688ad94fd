"""Writes a plan folder: plan.json for people and tools, stages/*.json for the executor, launch.sh to run it.

All files are first written to a scratch folder and then moved into place, so that no half-written plan can be started.
Other launch files are rendered from plan.json alone, without the profile or a solver.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeplan.errors import InputError
from pipeplan.problem import plan_file
from pipeplan.rendering.launcher import Launcher, TemplateContext
from pipeplan.rendering.launchers import LOCAL
from pipeplan.rendering.plan_json import plan_document, stage_documents
from pipeplan.util.files import Node, read_text, refuse_to_replace, write_json, write_text
from pipeplan_launch.files import with_checksum

if TYPE_CHECKING:
    from pipeplan.planning.outcome import Outcome


def refuse_to_overwrite_plan(folder: Path, force: bool) -> None:
    """Raise `InputError` if a plan cannot or must not be written to `folder`."""
    if (folder.exists() or folder.is_symlink()) and not folder.is_dir():
        raise InputError(f"{folder} is not a folder; a plan is written to one: give another with -o")
    for parent in folder.parents:
        if parent.exists():
            if not parent.is_dir():
                raise InputError(f"{parent} is not a folder, so that {folder} cannot be made: give another with -o")
            break
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if not (folder / "plan.json").exists():
        raise InputError(f"{folder} is not empty and holds no plan; give another folder with -o")
    if not force:
        raise InputError(f"{folder} already holds a plan; give another folder with -o, or --force to replace it")


def holds_unused_plan(folder: Path) -> bool:
    """Whether a folder has an unchanged plan of `write_plan`, and no run of the plan was started."""
    script = folder / LOCAL.file_name
    if not script.is_file() or any(folder.glob("runs/*")):
        return False
    try:
        return read_text(script) == launch_script(plan_file.read_plan_document(folder))
    except InputError:
        return False


def write_plan(outcome: Outcome, folder: Path, *, force: bool = False) -> None:
    """Write the plan folder.

    With `force`, an existing plan is replaced; other files in the folder stay. Raises `InputError`.
    """
    refuse_to_overwrite_plan(folder, force)
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".new-plan.", dir=folder))
        try:
            _write_files(outcome, scratch, folder)
            _move_in(scratch, folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            if is_new and not any(folder.iterdir()):
                folder.rmdir()
    except (InputError, OSError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        if not isinstance(cause, OSError):
            raise
        # The error names a file in the scratch folder, but the user knows only the plan folder.
        raise InputError(f"cannot write {folder}: {cause.strerror or cause}") from error


def _write_files(outcome: Outcome, scratch: Path, folder: Path) -> None:
    """Write the files of a plan for `folder` into a scratch folder."""
    document = plan_document(outcome, folder)
    write_json(scratch / "plan.json", document)
    for index, stage in enumerate(stage_documents(outcome, folder)):
        write_text(scratch / "stages" / f"stage-{index}.json", with_checksum(stage, indent=1))
    write_text(scratch / LOCAL.file_name, launch_script(Node(document, "the plan")), mode=LOCAL.mode)


def _move_in(scratch: Path, folder: Path) -> None:
    """Replace the files of an older plan by the files in `scratch`.

    The old launch.sh is removed first and the new one added last, so that after an interruption no script starts a
    mixture.
    """
    (folder / "launch.sh").unlink(missing_ok=True)
    if (folder / "stages").exists():
        (folder / "stages").rename(scratch / "old-stages")
    (scratch / "stages").rename(folder / "stages")
    for name in ("plan.json", "launch.sh"):
        (scratch / name).replace(folder / name)


def launch_file_text(
    plan: Path, launcher: Launcher, settings: Mapping[str, Any], *, output: Path | None = None, command: str
) -> str:
    """The text of a file that starts the plan of a folder, rendered from the template of `launcher`.

    `output` is the path of the file. If it is outside the plan folder, the text names that folder. `command` is the
    command that writes the file, for a comment. Raises `InputError`.
    """
    root, folder = plan_file.read_plan_document(plan), plan_file.plan_file(plan).parent.resolve()
    in_folder = output is None or output.parent.resolve() == folder
    context = TemplateContext.of(root, command=command, plan_folder=str(folder), in_folder=in_folder)
    return launcher.text(context, settings)


def write_launch_file(
    plan: Path,
    launcher: Launcher,
    settings: Mapping[str, Any],
    *,
    output: Path | None = None,
    command: str = "pipeplan export",
    force: bool = False,
) -> Path:
    """Write the file to `output`, by default into the plan folder, in full or not at all. Returns the path of the file.

    Raises `InputError` if another file exists there, unless `force` is given.
    """
    path = output or plan_file.plan_file(plan).parent / launcher.file_name
    text = launch_file_text(plan, launcher, settings, output=path, command=command)
    same = path.is_file() and path.read_bytes() == text.encode()
    refuse_to_replace(path, force=force or same)
    write_text(path, text, mode=launcher.mode)
    return path


def launch_script(plan: Node) -> str:
    """The text of launch.sh for a plan.json. Every value in it is quoted for the shell."""
    return LOCAL.text(TemplateContext.of(plan), {})
