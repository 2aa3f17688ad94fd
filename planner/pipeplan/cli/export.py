"""`pipeplan export`: a plan in the words of another trainer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import click

from pipeplan import stored
from pipeplan.cli.given import profile_of_plan
from pipeplan.cli.options import force_option, json_option, output_folder, quiet_option, words
from pipeplan.errors import InputError
from pipeplan.exports import written
from pipeplan.exports.target import NAMES, File, Target, target
from pipeplan.plan import Plan
from pipeplan.problem import Problem

FORMAT, VERSION = "pipeplan-export", 1


@click.command("export")
@click.argument("name", metavar="TARGET", required=False, shell_complete=words(*NAMES))
@click.argument("plan_folder", metavar="[PLAN]", type=click.Path(path_type=Path), default=Path("plan"))
@click.option("--list", "listed", is_flag=True, help="List the targets, with the versions that they are written for.")
@output_folder(note="TARGET in the plan's folder")
@force_option
@click.option(
    "--profile",
    "profile_file",
    type=click.Path(path_type=Path),
    help="What the plan was made from  [default: found beside the plan, here, or among the bundled ones]",
)
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
    """Tell PLAN (./plan unless given) to the trainer TARGET, in files that it reads.

    A plan that the trainer cannot express is refused; `pipeplan solve --for TARGET` finds the best one that it can.
    With --json nothing is written.

    \b
    pipeplan export --list
    pipeplan export torch-pipelining
    pipeplan export megatron plan -o megatron --force
    """
    if listed:
        _list(as_json)
        return
    if name is None:
        raise InputError(f"say which trainer to tell the plan to: {', '.join(NAMES)}")
    to = target(name)
    path = stored.file_of(plan_folder)
    root = stored.document(plan_folder)
    problem, plan = stored.of(root, profile_of_plan(root, path, profile_file))
    folder = output or path.parent / to.name
    files = written.export(to, problem, plan)
    if as_json:
        click.echo(json.dumps(_document(to, folder, files, (problem, plan)), allow_nan=False, ensure_ascii=False))
        return
    written.write(folder, files, force=force)
    for line in said(to, folder, files, (problem, plan)):
        click.echo(line, err=True)


def said(to: Target, folder: Path, files: Mapping[str, File], made_of: tuple[Problem, Plan]) -> list[str]:
    """The lines on what was written, and on what to do next."""
    lines = [f"written: {folder / name}  {file.about}" for name, file in files.items()]
    return [*lines, f"next: {to.next_step(*made_of, str(folder))}"]


def _document(to: Target, folder: Path, files: Mapping[str, File], made_of: tuple[Problem, Plan]) -> dict[str, object]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "target": to.name,
        "title": to.title,
        "folder": str(folder),
        "files": [{"name": name, "about": file.about, "text": file.text} for name, file in files.items()],
        "next": to.next_step(*made_of, str(folder)),
    }


def _list(as_json: bool) -> None:
    found = [target(name) for name in NAMES]
    if as_json:
        click.echo(json.dumps([{"name": to.name, "title": to.title} for to in found], ensure_ascii=False))
        return
    width = max((len(to.name) for to in found), default=0)
    for to in found:
        click.echo(f"{to.name:{width}}  {to.title}")
