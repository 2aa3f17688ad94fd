"""`pipeplan profile MODEL`: what a model's layers cost, measured here or estimated for a device."""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from pipeplan.api import profile
from pipeplan.cli.given import DEFAULT_PROFILE
from pipeplan.cli.options import (
    completing,
    force_option,
    json_option,
    model_words,
    output_file,
    quiet_option,
    seed_option,
)
from pipeplan.cli.overwrite import refuse_another
from pipeplan.cli.profile.table import print_profile
from pipeplan.errors import InputError
from pipeplan.files import refuse_unwritable
from pipeplan.init import CLUSTER
from pipeplan.local import processors
from pipeplan.profile_data import GRANULARITIES, Profile


class _Measure(click.Command):
    def format_usage(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        # This is what `profile` does unless told otherwise: its usage is that of the whole.
        formatter.write_usage("pipeplan profile", "MODEL [OPTIONS] | --links [OPTIONS] | show FILE | diff FILE FILE")


@click.command("measure", cls=_Measure)
@click.argument("model", shell_complete=completing(model_words, ".py"))
@click.option(
    "--batch",
    "batches",
    metavar="N[,N…]",
    help="Samples in a minibatch; several sizes are measured in one run.  [default: the model's own]",
)
@click.option(
    "--device",
    default="cpu",
    metavar="cpu|cuda|NAME",
    show_default=True,
    help="Where to measure; or a device to estimate for, as v100, a100, h100, h200, titan-x, or a TOML file.",
)
@output_file(DEFAULT_PROFILE)
@force_option
@click.option("--threads", type=int, default=1, metavar="N", show_default=True, help="Threads to compute with.")
@click.option(
    "--granularity",
    type=click.Choice(GRANULARITIES),
    default="layer",
    show_default=True,
    help="What one layer is: a member of a list of modules, the call of a leaf module, or one operator.",
)
@click.option("--repeats", type=int, metavar="N", help="Measured passes.  [default: until the spread is small]")
@click.option(
    "--processes",
    type=int,
    default=1,
    metavar="N",
    show_default=True,
    help="So many measure at the same time: for a plan whose workers share this machine.",
)
@click.option("--measure-all", is_flag=True, help="Measure each layer, also where several are the same computation.")
@seed_option
@json_option
@quiet_option
def command(
    model: str,
    batches: str | None,
    output: Path,
    force: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Measure what each layer of MODEL takes: time forward and backward, bytes sent, held and kept for backward.

    MODEL is a bundled name (`pipeplan models` lists them), path/to/file.py:callable or package.module:callable; the
    callable takes nothing and returns a torch module with `example_input_array`, or a pipeplan_launch.Job. An older
    profile is replaced, another file only with --force.

    \b
    pipeplan profile mnist
    pipeplan profile job.py:build --batch 16,32 --granularity module
    pipeplan profile mnist --device v100 -o mnist-v100.json
    """
    refuse_unwritable(output)
    refuse_another(output, b'"pipeplan-profile"', "a profile", force)
    measured = _measure(model, {"batch": _sizes(batches), **given})
    measured.save(output)
    if as_json:
        click.echo(json.dumps(measured.to_json(), indent=1))
    else:
        print_profile(measured, Console())
        click.echo(f"written: {output}\nnext: {_next(measured, output)}", err=True)
        if given["device"] == "cpu" and given["threads"] > (cores := processors().cores):
            click.echo(f"note: {given['threads']} threads share {cores} cores: fewer would be as quick", err=True)


def _next(profile: Profile, output: Path) -> str:
    """The command that a user would give now."""
    file = "" if output == DEFAULT_PROFILE else f" {shlex.quote(str(output))}"
    here = profile.provenance.kind == "measured"
    near = output.parent / CLUSTER
    there = shlex.quote(str(near)) if near.is_file() else "local --workers 3" if here else "YOURS.toml"
    return f"pipeplan solve{file} --cluster {there}"


def _sizes(text: str | None) -> tuple[int, ...]:
    """`32` or `8,16,32`."""
    if text is None:
        return ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"--batch: expected a number of samples, or several as in 8,16,32, found {text!r}") from None


def _measure(model: str, given: dict[str, Any]) -> Profile:
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}")
    # What the user's code prints goes with the progress: standard output is for the result.
    # The stream itself: while the model is traced, sys.stderr is another one.
    console = Console(file=sys.stderr)
    with (
        Progress(
            *columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal
        ) as bar,
        redirect_stdout(sys.stderr),
    ):
        task = bar.add_task("loading", total=None)

        def show(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total or None, description=what)

        return profile(model, progress=show, **given)
