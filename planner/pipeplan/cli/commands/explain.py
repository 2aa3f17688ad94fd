"""`pipeplan explain`: the reasons for a plan, or for there being none."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import click

from pipeplan.checker.verify import check_readable_plan
from pipeplan.cli.options import json_option, quiet_option, seed_option
from pipeplan.cli.output import note, print_answer, print_json, print_warning, status
from pipeplan.cli.problem_options import GroupedCommand, problem_arguments, problem_of
from pipeplan.cli.solver_options import solver_option
from pipeplan.errors import InfeasibleError, InputError
from pipeplan.explanation import infeasible
from pipeplan.explanation.explain import RobustnessSettings, explain_plan, explanation_json
from pipeplan.explanation.sensitivity import check_spread
from pipeplan.explanation.terminal import explanation_parts
from pipeplan.plan.plan import Plan
from pipeplan.planning.infeasibility import Diagnosis, diagnose
from pipeplan.problem import plan_file
from pipeplan.problem.problem import Problem
from pipeplan.questions import SEARCH
from pipeplan.util import processes
from pipeplan.util.deadline import Deadline
from pipeplan.util.units import parse_share


@click.command("explain", cls=GroupedCommand)
@problem_arguments()
@click.option(
    "--profile",
    "profile_option",
    type=click.Path(path_type=Path),
    help="Read this profile, which a plan was made from.",
)
@click.option(
    "--samples",
    type=click.IntRange(0, 10_000),
    default=20,
    show_default=True,
    help="Draw the layers' times at random so many times.",
)
@seed_option
@click.option("--spread", metavar="5%", help="Assume this interquartile range of every time  [default: as measured]")
@solver_option("dp")
@json_option
@quiet_option
def command(
    profile_option: Path | None,
    samples: int,
    seed: int,
    spread: str | None,
    solver: str,
    as_json: bool,
    **arguments: Any,
) -> None:
    """Explain the best plan: what bounds its pace, which plan comes second, and what other machines would gain.

    PROFILE is a profile as for `solve`; or a plan folder or plan.json, which excludes the options that describe a
    problem.

    \b
    pipeplan explain --cluster A
    pipeplan explain profile.json --cluster local --workers 3
    pipeplan explain plan
    """
    wishes = RobustnessSettings(samples, seed, None if spread is None else parse_share(spread, "--spread"))
    if wishes.spread is not None:
        check_spread(wishes.spread)
    settings = replace(SEARCH, solver=solver)
    with status("choosing the schedule and the microbatch size …"):
        problem, plan, origin, (proof, step_s) = _subject(
            profile_option, arguments, Deadline.after(settings.time_limit_s)
        )
    try:
        with status("") as show_status, processes.remember_interrupt() as interrupted:

            def progress(text: str) -> None:
                interrupted()
                show_status(f"{text} …")

            explanation = explain_plan(problem, settings, wishes, plan, progress, proof=proof, step_s=step_s)
            interrupted()
    except InfeasibleError:
        _note_origin(origin)
        ends = Deadline.after(settings.time_limit_s)
        _explain_infeasible(problem, diagnose(problem, settings.maximum_cuts, ends), as_json)
    _note_origin(origin)
    print_warning(problem.profile, problem.cluster, as_json=as_json)
    if as_json:
        print_json(explanation_json(explanation))
    else:
        print_answer(explanation_parts(explanation), fold=True, narrow=True)


def _note_origin(lines: Sequence[str]) -> None:
    """Print where the problem comes from, after everything that may fail: an error is to be the only line."""
    for line in lines:
        note(line, dim=True)


def _subject(
    profile: Path | None, arguments: dict[str, Any], deadline: Deadline
) -> tuple[Problem, Plan | None, list[str], tuple[str | None, float | None]]:
    """The problem, the plan to explain (None: the one that a solve takes), lines on where they come from, what is shown
    of the plan, and its stated pace in seconds per minibatch."""
    path: Path | None = arguments["profile"]
    if path is not None and plan_file.is_plan(path):
        _refuse_problem_options(path)
        problem, plan = plan_file.read_plan(path, profile)
        root = plan_file.read_plan_document(path)
        known = check_readable_plan(root, problem.profile).proof, plan_file.PlanFile.of(root).step_s
        return problem, plan, [f"plan: {path}, made from {_source(problem)}"], known
    if profile is not None and path is not None:
        raise InputError(f"{path} is not a plan but a profile: leave out --profile")
    built, origin = problem_of(arguments | {"profile": path or profile}, deadline)
    return built.problem, None, [origin], (None, None)


def _source(problem: Problem) -> str:
    """Where the profile of a plan was found."""
    return problem.profile.file or f"the bundled profile of {problem.profile.model_name}"


def _refuse_problem_options(path: Path) -> None:
    """Raise an `InputError` where an option describes the problem, which the plan at `path` describes already."""
    context = click.get_current_context()
    allowed = {"profile", "profile_option", "samples", "seed", "spread", "solver", "as_json"}
    for parameter in context.command.params:
        name = str(parameter.name)
        if name not in allowed and context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise InputError(f"{parameter.opts[-1]} is part of {path} already: leave it out")


def _explain_infeasible(problem: Problem, diagnosis: Diagnosis, as_json: bool) -> NoReturn:
    """Print why there is no plan, and raise an `InfeasibleError` with the diagnosis in one line."""
    if as_json:
        print_json(infeasible.diagnosis_json(problem, diagnosis))
    else:
        print_answer(infeasible.diagnosis_parts(problem, diagnosis), fold=True, narrow=True)
    sys.stdout.flush()
    raise InfeasibleError(diagnosis.text)
