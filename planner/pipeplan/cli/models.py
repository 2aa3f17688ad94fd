"""`pipeplan models`: the bundled models."""

from __future__ import annotations

import json

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeplan_launch.models import BUNDLED


@click.command("models")
@click.option("--json", "as_json", is_flag=True, help="Print the names and descriptions as JSON.")
def command(as_json: bool) -> None:
    """List the bundled models."""
    if as_json:
        click.echo(json.dumps(BUNDLED, indent=1, ensure_ascii=False))
        return
    table = Table("model", "what it is", box=None, pad_edge=False)
    for name, description in BUNDLED.items():
        table.add_row(Text(name), Text(description))
    console = Console()
    console.print(table)
    console.print("\nYour own: path/to/file.py:callable or package.module:callable", highlight=False)
