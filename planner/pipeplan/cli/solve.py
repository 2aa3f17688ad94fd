"""`pipeplan solve`: from a profile and a cluster to a plan folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from pipeplan import render
from pipeplan.cli.given import problem_arguments, problem_of
from pipeplan.errors import InputError
from pipeplan.show import show
from pipeplan.solve import Disagreement, Settings, solve


@click.command("solve")
@problem_arguments()
@click.option("--solver", type=click.Choice(["dp", "ilp", "both"]), default="both", show_default=True)
@click.option("--ilp-solver", type=click.Choice(["highs", "cbc"]), default="highs", show_default=True)
@click.option("--time-limit", type=float, default=60.0, show_default=True, help="Seconds for the ILP.")
@click.option(
    "--cost-model",
    type=click.Choice(["pipeplan", "pipedream-code", "pipedream-paper"]),
    default="pipeplan",
    show_default=True,
    help="The published variants are for comparing figures.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("plan"), show_default=True)
@click.option("--force", is_flag=True, help="Replace a plan that is already in the output folder.")
@click.option("--no-write", is_flag=True, help="Print the answer only.")
@click.option("--json", "as_json", is_flag=True, help="Print plan.json instead of the table.")
def command(
    solver: str,
    ilp_solver: str,
    time_limit: float,
    cost_model: str,
    output: Path,
    force: bool,
    no_write: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Find the best plan for a profile on a cluster, prove it, and write it to a folder.

    PROFILE defaults to ./profile.json, else to a bundled VGG-16 on V100.

    \b
    pipeplan solve --cluster B
    pipeplan solve profile.json --cluster local --workers 3
    pipeplan solve profile.json --cluster my-cluster.toml --json --no-write
    """
    if not time_limit > 0:
        raise InputError(f"--time-limit must be above 0 seconds, not {time_limit:g}")
    if not no_write:
        render.refuse_to_overwrite(output, force)
    problem, origin = problem_of(given)
    settings = Settings(solver=solver, cost_model=cost_model, backend=ilp_solver, time_limit_s=time_limit)
    notes = Console(stderr=True, highlight=False)
    notes.print(origin, style="dim", markup=False, soft_wrap=True)
    try:
        outcome = solve(problem, settings)
    except Disagreement as error:
        if no_write:
            raise
        written = render.write_disagreement(error.results, output)
        places = " and ".join(str(path) for path in written)
        raise Disagreement(f"{error}; both plans are in {places}", error.results) from None
    if not no_write:
        # Before the table: whoever closes our output early, as `| head` does, still has the plan.
        render.write_plan(outcome, output, force=force)
    if as_json:
        click.echo(json.dumps(render.plan_document(outcome), indent=1, allow_nan=False))
    else:
        show(outcome, Console(highlight=False))
    if not no_write:
        runnable = "" if problem.profile.model_ref else " (its profile names no model that could be run)"
        notes.print(f"written: {output}/plan.json, stages/, launch.sh{runnable}", markup=False, soft_wrap=True)
