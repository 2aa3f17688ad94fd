"""`pipeplan init [FOLDER]`: write a job file and a cluster file for this machine."""

from __future__ import annotations

from pathlib import Path

import click

from pipeplan.cli.options import PATH, force_option, json_option, output_folder, quiet_option
from pipeplan.cli.output import note, print_json, print_line, status
from pipeplan.cluster_data.local import local_cluster
from pipeplan.errors import InputError
from pipeplan.first_steps import init


@click.command("init")
@click.argument("folder", required=False, type=PATH)
@click.option(
    "--workers",
    type=int,
    metavar="N",
    help="Describe this number of workers  [default: one for each GPU, or for each processor core]",
)
@output_folder(note="FOLDER, or the current folder")
@force_option
@json_option
@quiet_option
def command(folder: Path | None, workers: int | None, output: Path | None, force: bool, as_json: bool) -> None:
    """Write job.py, a small training job that runs as it is, and cluster.toml, which describes this machine.

    Edit both files for your job. The command prints the three commands that measure the job, plan it, and train it.

    \b
    pipeplan init
    pipeplan init lab --workers 3
    """
    if folder is not None and output is not None and folder != output:
        raise InputError(f"two folders are given, {folder} and {output}: leave out one")
    place = folder or output or Path()
    with status("looking at this machine …"):
        texts = init.starter_files(workers)
    init.write_starter_files(place, texts, force=force)
    steps = init.next_commands(place, local_cluster(workers).device.kind)
    for name in texts:
        note(f"written: {place / name}")
    if as_json:
        print_json({"files": [str(place / name) for name in texts], "next": steps}, ascii_only=True)
        return
    print_line("Next:")
    for step in steps:
        print_line(f"  {step}")
