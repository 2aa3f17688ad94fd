"""`pipeplan solve --for TARGET`: the option, and the trainer's files that it writes beside the plan."""

from __future__ import annotations

from pathlib import Path

import click

from pipeplan.cli.export import export_lines
from pipeplan.cli.options import complete_words
from pipeplan.exports import target
from pipeplan.exports.solve_for import TargetedProblem
from pipeplan.exports.target import TARGET_NAMES
from pipeplan.planning.solve import Outcome

for_option = click.option(
    "--for",
    "target_name",
    metavar="TARGET",
    shell_complete=complete_words(*TARGET_NAMES),
    help=f"Plan for another trainer and write its files into the plan folder: {', '.join(TARGET_NAMES)}.",
)


def write_exported(aim: TargetedProblem, outcome: Outcome, folder: Path, *, force: bool) -> list[str]:
    """Write the trainer's files into the plan folder. Returns the lines that say so."""
    target_folder, files = folder / aim.to.name, aim.files(outcome)
    target.write_export(target_folder, files, force=force)
    return export_lines(aim.to, target_folder, files, (outcome.problem, outcome.plan))
