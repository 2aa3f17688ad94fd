"""`pipeplan solve`: find the best plan for a profile on a cluster, and write its plan folder.

With `--for TARGET` it also writes the files of another trainer beside the plan.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pipeplan.cli.options import complete_words, force_option, json_option, no_write_option, output_folder, quiet_option
from pipeplan.cli.problem_options import GroupedCommand, problem_options, search_options
from pipeplan.exports import TARGET_NAMES


@click.command("solve", cls=GroupedCommand)
@problem_options()
@search_options
@click.option(
    "--for",
    "target_name",
    metavar="TARGET",
    shell_complete=complete_words(*TARGET_NAMES),
    help=f"Plan for another trainer and write its files into the plan folder: {', '.join(TARGET_NAMES)}.",
)
@output_folder(Path("plan"))
@force_option
@no_write_option
@json_option
@quiet_option
def command(**arguments: Any) -> None:
    """Find the best plan for a profile on a cluster, prove how good it is, and write it to a folder.

    PROFILE defaults to ./profile.json. If there is no such file, a bundled profile of VGG-16 on V100 serves as an
    example, and nothing is written. A plan in the folder is replaced if no run has used it; otherwise only with
    --force.

    \b
    pipeplan solve profile.json --cluster local --workers 3
    pipeplan solve profile.json --cluster my-cluster.toml --batch 1024
    pipeplan solve vgg16-v100 --cluster A --staleness any
    pipeplan solve vgg16-v100 --cluster B --stages 1-3 --pin features.0=1
    pipeplan solve profile.json --cluster my-cluster.toml --for megatron --batch 2048
    """
    from pipeplan.cli.solve_and_write import solve_and_write  # imports the solvers, which help does not need

    solve_and_write(**arguments)
