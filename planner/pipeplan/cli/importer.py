"""`pipeplan import`: other tools' profiles."""

from __future__ import annotations

from pathlib import Path

import click

from pipeplan.errors import InputError
from pipeplan.importers import pipedream
from pipeplan.units import show_size, show_time


@click.command("import")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--minibatch", type=int, required=True, help="Samples in the minibatch that the file was measured with.")
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("profile.json"), show_default=True)
@click.option("--force", is_flag=True, help="Replace the output file.")
def command(file: Path, minibatch: int, output: Path, force: bool) -> None:
    """Read a graph.txt of PipeDream's profiler and write a profile.

    \b
    pipeplan import graph.txt --minibatch 128 -o vgg16.json
    """
    if minibatch < 1:
        raise InputError(f"--minibatch must be at least 1, not {minibatch}")
    if output.exists() and not force:
        raise InputError(f"{output} exists; give another file with -o, or --force to replace it")
    profile = pipedream.load(file, minibatch)
    profile.save(output)
    size = sum(layer.parameter_bytes for layer in profile.layers)
    click.echo(
        f"{output}: {len(profile.layers)} layers, {show_time(profile.total_s)} forward and backward, "
        f"{show_size(size)} of parameters, minibatch {minibatch}"
    )
