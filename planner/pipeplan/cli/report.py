"""`pipeplan report`: one HTML file on a plan and its run."""

from __future__ import annotations

import json
from pathlib import Path

import click

from pipeplan import stored
from pipeplan.cli.given import profile_of_plan
from pipeplan.errors import InputError
from pipeplan.files import Node, refuse_unwritable, write_text
from pipeplan.measured import run as runs
from pipeplan.profile_data import Profile
from pipeplan.report.build import build
from pipeplan.report.page import page
from pipeplan.report.source import read

REPORT = "report.html"
MARK, HEAD = b'<meta name="generator" content="pipeplan report">', 2**12
"""By what a report is known, and within so many bytes."""


@click.command("report")
@click.argument("plan_folder", metavar="[PLAN]", type=click.Path(path_type=Path), default=Path("plan"))
@click.argument("run", required=False, type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help=f"The file to write  [default: {REPORT} in the plan's folder]",
)
@click.option(
    "--profile",
    "profile_file",
    type=click.Path(path_type=Path),
    help="What the plan was made from  [default: found beside the plan, here, or among the bundled ones]",
)
@click.option("--thorough", is_flag=True, help="Seek a runner-up and plans for other clusters also where that is slow.")
@click.option("--json", "as_json", is_flag=True, help="Print the document that the page shows, and write nothing.")
def command(
    plan_folder: Path, run: Path | None, output: Path | None, profile_file: Path | None, thorough: bool, as_json: bool
) -> None:
    """Write one HTML file that shows PLAN (./plan unless given), and RUN, a run's folder, beside it.

    \b
    pipeplan report
    pipeplan report plan plan/runs/20260131T120000Z
    pipeplan report plan -o vgg16.html --profile profile.json
    """
    path = stored.file_of(plan_folder)
    target = output or path.parent / REPORT
    root = stored.document(plan_folder)
    if not as_json:
        if target.is_dir():
            raise InputError(f"{target} is a folder: name the file to write, as in -o {target / REPORT}")
        refuse_unwritable(target)
        _refuse_to_overwrite(target)
    source = read(root, _profile(root, path, profile_file))
    measured = None if run is None else runs.read_of(path.parent, run)
    document = build(source, measured, thorough=thorough).to_json()
    if as_json:
        click.echo(json.dumps(document, allow_nan=False, ensure_ascii=False))
        return
    write_text(target, page(document))
    click.echo(f"written: {target}", err=True)


def write(folder: Path, profile: Profile) -> Path:
    """Write the report on a plan that was just written, in place of what is there, and say where."""
    target = folder / REPORT
    write_text(target, page(build(read(stored.document(folder), profile)).to_json()))
    return target


def _profile(root: Node, path: Path, given: Path | None) -> Profile | None:
    """The plan's profile; None where it is not named and not found."""
    if given is not None:
        return profile_of_plan(root, path, given)
    try:
        return profile_of_plan(root, path, None)
    except InputError:
        return None


def _refuse_to_overwrite(target: Path) -> None:
    """A report may be written anew, another file may not."""
    if target.is_file() and target.stat().st_size and MARK not in _begin(target):
        raise InputError(f"{target} exists and is not a report: give another file with -o")


def _begin(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(HEAD)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
