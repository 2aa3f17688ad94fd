"""`pipeplan reproduce table1`: published results beside predictions, and replays."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from pipeplan.cli.explain import answer_console
from pipeplan.cli.options import json_option, output_file, quiet_option
from pipeplan.errors import InputError
from pipeplan.files import refuse_unwritable, write_text
from pipeplan.profile_data import Profile
from pipeplan.reproduce import profiles, replayed
from pipeplan.reproduce.document import document
from pipeplan.reproduce.sections import sections
from pipeplan.reproduce.show import markdown, show
from pipeplan.reproduce.table import Step, Table, build, chosen
from pipeplan.solving import Settings

RESULTS = ("table1",)
REFERENCE = "PIPEPLAN_REFERENCE"


@click.command("reproduce")
@click.argument("what", required=False)
@click.option(
    "--reference",
    type=click.Path(path_type=Path),
    help=f"A folder with PipeDream's published profiles, pipedream/vgg16.txt …  [default: {REFERENCE}, else bundled]",
)
@click.option("--rows", metavar="NAME,…", help="Only these rows: vgg16-4x4,gnmt8-3x4.")
@click.option("--solver", type=click.Choice(["dp", "both"]), default="both", show_default=True)
@click.option("--time-limit", type=float, default=20.0, show_default=True, help="Seconds for each solver and row.")
@click.option("--replay", "replays", is_flag=True, help="Replay four plans a row on emulated servers (minutes).")
@click.option(
    "--replay-seconds",
    type=click.FloatRange(min=0, min_open=True),
    help="Of training in each new replay; kept ones stay as they are.",
)
@click.option(
    "--keep", type=click.Path(path_type=Path), help="Keep replayed plans and their results here, and go on from them."
)
@json_option
@output_file(note="none; .md or .json")
@quiet_option
def command(what: str | None, **given: Any) -> None:
    """Put published results beside pipeplan's predictions: table1, of PipeDream's paper.

    \b
    pipeplan reproduce table1
    pipeplan reproduce table1 --rows vgg16-4x4,vgg16-2x8 --replay --keep replays
    """
    if what not in RESULTS:
        known = ", ".join(RESULTS)
        raise InputError(f"there is no result {what!r}: there is {known}" if what else f"say which result: {known}")
    table = _made(given)
    answer = json.dumps(document(table), indent=1, allow_nan=False, ensure_ascii=False)
    output: Path | None = given["output"]
    if output is not None:
        write_text(output, answer + "\n" if output.suffix == ".json" else markdown(sections(table)))
    if given["as_json"]:
        click.echo(answer)
    else:
        show(sections(table), answer_console())
    if output is not None:
        Console(stderr=True, highlight=False).print(f"written: {output}", markup=False, soft_wrap=True)
    sys.stdout.flush()
    failed = [one for one in table.replays if one.failure]
    if failed:
        raise InputError(
            f"{len(failed)} of {len(table.replays)} plans were not replayed, the first: {failed[0].failure}"
        )


def _made(given: dict[str, Any]) -> Table:
    wanted = chosen(given["rows"])
    output, keep = given["output"], given["keep"]
    if output is not None:
        if output.suffix not in (".md", ".json"):
            raise InputError(f"-o: {output} ends neither in .md nor in .json")
        refuse_unwritable(output)
    if not given["time_limit"] > 0:
        raise InputError(f"--time-limit must be above 0 seconds, not {given['time_limit']:g}")
    for name in ("keep", "replay_seconds"):
        if given[name] is not None and not given["replays"]:
            raise InputError(f"--{name.replace('_', '-')} goes with --replay")
    if keep is not None:
        replayed.refuse_foreign(keep)
    named = os.environ.get(REFERENCE)
    folder = profiles.folder_of(given["reference"] or (Path(named) if named else None))
    run = _replayer(given["replay_seconds"]) if given["replays"] else None
    with _progress() as step:
        table = build(wanted, folder, Settings(solver=given["solver"], time_limit_s=given["time_limit"]), step)
        if run is None:
            return table
        with _kept(keep) as place:
            return replace(table, replays=tuple(replayed.replay(table.rows, place, run, step)))


def _replayer(seconds: float | None) -> replayed.Replayer:
    """What replays a plan folder here. Imported only now: planning needs none of it."""
    from pipeplan.emulate import machine
    from pipeplan.emulate.run import SECONDS, replay
    from pipeplan.emulate.run import Settings as Replaying

    machine.check()
    settings = Replaying(seconds=seconds or SECONDS)

    def run(folder: Path, profile: Profile) -> replayed.Measured:
        return replay(folder, profile, settings)

    return run


@contextmanager
def _kept(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix="pipeplan-table1-") as folder:
        yield Path(folder)


@contextmanager
def _progress() -> Iterator[Step]:
    """What is being done, on standard error, where that is a terminal."""
    console = Console(file=sys.stderr)
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading", total=None)
        yield lambda what: bar.update(task, description=what)
