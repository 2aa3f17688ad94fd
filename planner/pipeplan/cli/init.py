"""`pipeplan init [FOLDER]`: a job file and a cluster file to begin with."""

from __future__ import annotations

import json
from pathlib import Path

import click

from pipeplan import init
from pipeplan.cli.options import force_option, json_option, output_folder, quiet_option
from pipeplan.errors import InputError
from pipeplan.local import local


@click.command("init")
@click.argument("folder", required=False, type=click.Path(path_type=Path))
@click.option("--workers", type=int, metavar="N", help="Of this machine  [default: one a GPU, or one a processor core]")
@output_folder(note="FOLDER, or here")
@force_option
@json_option
@quiet_option
def command(folder: Path | None, workers: int | None, output: Path | None, force: bool, as_json: bool) -> None:
    """Write job.py, a small training that runs as it is, and cluster.toml, this machine, both to be edited.

    Prints the three commands that measure the job, plan it, and train it.

    \b
    pipeplan init
    pipeplan init lab --workers 3
    """
    if folder is not None and output is not None and folder != output:
        raise InputError(f"two folders are given, {folder} and {output}: leave out one")
    place = folder or output or Path()
    texts = init.files(workers)
    init.write(place, texts, force=force)
    steps = init.commands(place, local(workers).device.kind)
    for name in texts:
        click.echo(f"written: {place / name}", err=True)
    if as_json:
        click.echo(json.dumps({"files": [str(place / name) for name in texts], "next": steps}, indent=1))
        return
    click.echo("Next:")
    for step in steps:
        click.echo(f"  {step}")
