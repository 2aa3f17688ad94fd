"""`pipeplan models`: list the bundled models."""

from __future__ import annotations

import click
from rich.table import Table
from rich.text import Text

from pipeplan.cli.shared.options import json_option, quiet_option
from pipeplan.cli.shared.output import print_answer, print_json
from pipeplan_launch.job.bundled_models import BUNDLED


@click.command("models")
@json_option
@quiet_option
def command(as_json: bool) -> None:
    """List the bundled models with their parameters, samples in a minibatch, and origin.

    \b
    pipeplan models
    pipeplan models --json
    """
    if as_json:
        print_json(BUNDLED)
        return
    table = Table("model", box=None, pad_edge=False)
    table.add_column("parameters", justify="right", no_wrap=True)
    table.add_column("minibatch", justify="right", no_wrap=True)
    table.add_column("what it is")
    table.add_column("from")
    for name, model in BUNDLED.items():
        size = f"{model['parameters'] / 1e6:.{1 if model['parameters'] > 1e6 else 2}f} M"
        table.add_row(Text(name), size, str(model["minibatch"]), Text(model["description"]), Text(model["source"]))
    print_answer([table, "\nYour own: path/to/file.py:callable or package.module:callable"])
