"""`pipeplan explain`: why a plan is what it is, or why there is none."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from pipeplan import interrupts, stored
from pipeplan.cli.given import problem_arguments, problem_of
from pipeplan.cli.options import json_option, quiet_option, seed_option
from pipeplan.diagnose import Diagnosis, diagnose
from pipeplan.errors import InfeasibleError, InputError
from pipeplan.explain import infeasible
from pipeplan.explain.report import Wishes, explain, to_json
from pipeplan.explain.show import show
from pipeplan.plan import Plan
from pipeplan.problem import Problem
from pipeplan.solving import Settings
from pipeplan.units import parse_share

PIPED_WIDTH = 80


@click.command("explain")
@problem_arguments()
@click.option("--profile", "profile_option", type=click.Path(path_type=Path), help="The profile of a plan's folder.")
@click.option("--samples", type=click.IntRange(0, 10_000), default=20, show_default=True, help="Drawings of the times.")
@seed_option
@click.option("--spread", metavar="5%", help="Interquartile range to assume of every time  [default: as measured]")
@click.option("--solver", type=click.Choice(["dp", "ilp", "both"]), default="dp", show_default=True)
@json_option
@quiet_option
def command(
    profile_option: Path | None,
    samples: int,
    seed: int,
    spread: str | None,
    solver: str,
    as_json: bool,
    **given: Any,
) -> None:
    """Say why the best plan is what it is: what bounds it, what comes second, what other machines would give.

    PROFILE as for `solve`; or a plan's folder or plan.json, then with its --profile, and without the other arguments.

    \b
    pipeplan explain --cluster A
    pipeplan explain profile.json --cluster local --workers 3
    pipeplan explain plan --profile profile.json
    """
    wishes = Wishes(samples, seed, None if spread is None else parse_share(spread, "--spread"))
    problem, plan, origin = _what(profile_option, given)
    settings = Settings(solver=solver, certify=False)
    notes = Console(stderr=True, highlight=False)
    notes.print(origin, style="dim", markup=False, soft_wrap=True)
    try:
        with notes.status("") if notes.is_terminal else nullcontext() as status, interrupts.noted() as check:

            def progress(text: str) -> None:
                check()
                if status is not None:
                    status.update(f"{text} …")

            explanation = explain(problem, settings, wishes, plan, progress)
            check()
    except InfeasibleError:
        _complain(problem, diagnose(problem, settings.maximum_cuts), as_json)
    if as_json:
        click.echo(json.dumps(to_json(explanation), indent=1, allow_nan=False, ensure_ascii=False))
        return
    show(explanation, answer_console())


def answer_console() -> Console:
    """Where answers go: at most 80 columns wide where nobody sees them."""
    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, width=PIPED_WIDTH)


def _what(profile: Path | None, given: dict[str, Any]) -> tuple[Problem, Plan | None, str]:
    """The problem, the plan to explain (None: the best), and where they come from."""
    path: Path | None = given["profile"]
    if path is not None and stored.is_plan(path):
        if profile is None:
            raise InputError(f"{path} is a plan: say which profile it was made from with --profile")
        _refuse_others(path)
        problem, plan = stored.read(path, profile)
        return problem, plan, f"plan: {path}, made from {profile}"
    if profile is not None and path is not None:
        raise InputError(f"{path} is not a plan, so that it is the profile: leave out --profile")
    problem, origin = problem_of(given | {"profile": path or profile})
    return problem, None, origin


def _refuse_others(path: Path) -> None:
    """What a plan says of its problem is not to be said again."""
    context = click.get_current_context()
    own = {"profile", "profile_option", "samples", "seed", "spread", "solver", "as_json"}
    for parameter in context.command.params:
        name = str(parameter.name)
        if name not in own and context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise InputError(f"{parameter.opts[-1]} is part of {path} already: leave it out")


def _complain(problem: Problem, diagnosis: Diagnosis, as_json: bool) -> None:
    """Print why there is no plan, and end with the one line of it."""
    if as_json:
        click.echo(json.dumps(infeasible.to_json(problem, diagnosis), indent=1, allow_nan=False, ensure_ascii=False))
    else:
        infeasible.show(problem, diagnosis, answer_console())
    sys.stdout.flush()
    raise InfeasibleError(diagnosis.text)
