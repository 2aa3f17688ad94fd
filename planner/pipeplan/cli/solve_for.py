"""`pipeplan solve --for TARGET`: what it writes beside the plan."""

from __future__ import annotations

from pathlib import Path

import click

from pipeplan.cli.export import said
from pipeplan.cli.options import words
from pipeplan.exports import written
from pipeplan.exports.aim import Aim
from pipeplan.exports.target import NAMES
from pipeplan.solving import Outcome

for_option = click.option(
    "--for",
    "target_name",
    metavar="TARGET",
    shell_complete=words(*NAMES),
    help=f"The best plan for another trainer, and its files in the plan's folder: {', '.join(NAMES)}.",
)


def write(aim: Aim, outcome: Outcome, folder: Path, *, force: bool) -> list[str]:
    """Write the trainer's files beside a plan in its folder; the lines that say so."""
    place, files = folder / aim.to.name, aim.files(outcome)
    written.write(place, files, force=force)
    return said(aim.to, place, files, (outcome.problem, outcome.plan))
