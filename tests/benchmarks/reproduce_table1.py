"""Table 1 of the PipeDream paper: the published speed-ups beside pipeplan's predictions.

    python tests/benchmarks/reproduce_table1.py [--reference FOLDER] [--rows NAME,…] [-o table1.md]

FOLDER (or the environment variable PIPEPLAN_REFERENCE) holds PipeDream's published profiles, `pipedream/vgg16.txt` and
so on; estimated profiles take the place of those that are missing. docs/evidence/table1.md explains the table.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from table1 import profiles
from table1.render import print_sections, to_markdown
from table1.sections import sections_of
from table1.table import Report, build_table, rows_named

from pipeplan.errors import InputError
from pipeplan.planning.settings import Settings
from pipeplan.util.files import write_text

REFERENCE = "PIPEPLAN_REFERENCE"


@click.command()
@click.option(
    "--reference",
    type=click.Path(path_type=Path),
    help=f"A folder with PipeDream's published profiles, pipedream/vgg16.txt …  [default: {REFERENCE}, else bundled]",
)
@click.option("--rows", metavar="NAME,…", help="Only these rows: vgg16-4x4,gnmt8-3x4.")
@click.option("--solver", type=click.Choice(["dp", "both"]), default="both", show_default=True)
@click.option("--time-limit", type=float, default=20.0, show_default=True, help="Seconds for each solver and row.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Also write the table as Markdown.")
def command(
    reference: Path | None,
    rows: str | None,
    solver: str,
    time_limit: float,
    output: Path | None,
) -> None:
    """Print Table 1 of the PipeDream paper beside pipeplan's predictions."""
    try:
        wanted = rows_named(rows)
        folder = profiles.folder_of(reference or _reference_from_environment())
        with _progress() as report:
            table = build_table(wanted, folder, Settings(solver=solver, time_limit_s=time_limit), report)
    except InputError as error:
        raise click.ClickException(str(error)) from error
    sections = sections_of(table)
    if output is not None:
        write_text(output, to_markdown(sections))
    print_sections(sections, Console(highlight=False, width=None if sys.stdout.isatty() else 200))


def _reference_from_environment() -> Path | None:
    named = os.environ.get(REFERENCE)
    return Path(named) if named else None


@contextmanager
def _progress() -> Iterator[Report]:
    """Show the current step on standard error where that is a terminal."""
    console = Console(file=sys.stderr)
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading", total=None)
        yield lambda step: bar.update(task, description=step)


if __name__ == "__main__":
    command()
