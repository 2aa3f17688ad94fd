"""`pipeplan export`: write a plan as files of another trainer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click

from pipeplan.cli.shared.options import (
    complete_words,
    force_option,
    json_option,
    output_folder,
    plan_profile_option,
    quiet_option,
)
from pipeplan.cli.shared.output import note, print_json, print_line
from pipeplan.errors import InputError
from pipeplan.exports.target import (
    TARGET_NAMES,
    ExportFile,
    ExportTarget,
    export_files,
    export_target,
    write_export,
)
from pipeplan.plan.plan import Plan
from pipeplan.problem import plan_file
from pipeplan.problem.plan_profile import profile_of_plan
from pipeplan.problem.problem import Problem

FORMAT, VERSION = "pipeplan-export", 1


@click.command("export")
@click.argument("name", metavar="TARGET", required=False, shell_complete=complete_words(*TARGET_NAMES))
@click.argument("plan_folder", metavar="[PLAN]", type=click.Path(path_type=Path), default=Path("plan"))
@click.option("--list", "listed", is_flag=True, help="List the targets with the versions that they support.")
@output_folder(note="TARGET in the plan's folder")
@force_option
@plan_profile_option
@json_option
@quiet_option
def command(
    name: str | None,
    plan_folder: Path,
    listed: bool,
    output: Path | None,
    force: bool,
    profile_file: Path | None,
    as_json: bool,
) -> None:
    """Export PLAN (default: ./plan) for the trainer TARGET, as files that it reads.

    A plan that the trainer cannot express is refused; `pipeplan solve --for TARGET` finds the best plan that it can
    express. With --json no file is written.

    \b
    pipeplan export --list
    pipeplan export torch-pipelining
    pipeplan export megatron plan -o megatron --force
    """
    if listed:
        _list(as_json)
        return
    if name is None:
        raise InputError(f"say which trainer to export the plan for: {', '.join(TARGET_NAMES)}")
    target = export_target(name)
    path = plan_file.plan_file(plan_folder)
    root = plan_file.read_plan_document(plan_folder)
    problem, plan = plan_file.plan_from_document(root, profile_of_plan(root, path, profile_file))
    folder = output or path.parent / target.name
    files = export_files(target, problem, plan)
    if as_json:
        print_json(_document(target, folder, files, (problem, plan)), indent=None)
        return
    write_export(folder, files, force=force)
    for line in export_lines(target, folder, files, (problem, plan)):
        note(line)


def export_lines(
    target: ExportTarget, folder: Path, files: Mapping[str, ExportFile], solved: tuple[Problem, Plan]
) -> list[str]:
    """A line for each file that was written, and one on the next step."""
    lines = [f"written: {folder / name}  {file.about}" for name, file in files.items()]
    return [*lines, f"next: {target.next_step(*solved, str(folder))}"]


def _document(
    target: ExportTarget, folder: Path, files: Mapping[str, ExportFile], solved: tuple[Problem, Plan]
) -> dict[str, object]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "target": target.name,
        "title": target.title,
        "folder": str(folder),
        "files": [{"name": name, "about": file.about, "text": file.text} for name, file in files.items()],
        "next": target.next_step(*solved, str(folder)),
    }


def _list(as_json: bool) -> None:
    targets = [export_target(name) for name in TARGET_NAMES]
    if as_json:
        print_json([{"name": target.name, "title": target.title} for target in targets], indent=None)
        return
    width = max((len(target.name) for target in targets), default=0)
    for target in targets:
        print_line(f"{target.name:{width}}  {target.title}")
