"""`pipeplan explain`: the reasons for a plan, or why there is none."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NoReturn

import click

from pipeplan.cli.options import PATH, json_option, quiet_option, seed_option
from pipeplan.cli.output import note, print_answer, print_json, print_warning, status
from pipeplan.cli.problem_options import GroupedCommand, problem_options
from pipeplan.cli.solving import problem_of
from pipeplan.errors import InfeasibleError, InputError
from pipeplan.explanation.explain import RobustnessSettings, diagnosis_json, explain_plan, explanation_json
from pipeplan.explanation.sensitivity import check_spread
from pipeplan.explanation.terminal import diagnosis_parts, explanation_parts
from pipeplan.from_options.build_problem import BuiltProblem
from pipeplan.plan.plan import Plan
from pipeplan.planning.infeasibility import diagnose
from pipeplan.problem import plan_file
from pipeplan.problem.diagnosis import Diagnosis
from pipeplan.problem.problem import Problem
from pipeplan.questions import SEARCH, read_checked_plan
from pipeplan.util import processes
from pipeplan.util.deadline import Deadline
from pipeplan.util.units import parse_share


@click.command("explain", cls=GroupedCommand)
@problem_options()
@click.option("--profile", "profile_option", type=PATH, help="Read the plan's profile from this file.")
@click.option(
    "--samples",
    type=click.IntRange(0, 10_000),
    default=20,
    help="Draw the layers' times at random in this many samples.",
)
@seed_option
@click.option("--spread", metavar="5%", help="Assume this interquartile range of every time  [default: as measured]")
@json_option
@quiet_option
def command(
    profile_option: Path | None, samples: int, seed: int, spread: str | None, as_json: bool, **arguments: Any
) -> None:
    """Explain the best plan: what bounds its step time, which plan comes second, and what other machines would gain.

    PROFILE is a profile, as for `solve`, or a plan folder or plan.json. With a plan, options that describe a problem
    are refused.

    \b
    pipeplan explain --cluster A
    pipeplan explain profile.json --cluster local --workers 3
    pipeplan explain plan
    """
    robustness = RobustnessSettings(samples, seed, None if spread is None else parse_share(spread, "--spread"))
    if robustness.spread is not None:
        check_spread(robustness.spread)
    settings = SEARCH
    with status("choosing the schedule and the microbatch size …"):
        ends = Deadline.after(settings.time_limit_s)
        built, plan, proof, step_s, origin = _subject(profile_option, arguments, ends)
        problem = built.problem
    try:
        with status("") as show_status, processes.remember_interrupt() as interrupted:

            def progress(text: str) -> None:
                interrupted()
                show_status(f"{text} …")

            explanation = explain_plan(
                problem,
                settings,
                robustness,
                plan,
                progress,
                proof=proof,
                step_s=step_s,
                known=built.known,
                choice=built.choice,
            )
            interrupted()
    except InfeasibleError:
        note(origin, dim=True)
        ends = Deadline.after(settings.time_limit_s)
        _explain_infeasible(problem, diagnose(problem, settings.maximum_cuts, ends), as_json)
    note(origin, dim=True)
    print_warning(problem.profile, problem.cluster, as_json=as_json)
    if as_json:
        print_json(explanation_json(explanation))
    else:
        print_answer(explanation_parts(explanation), fold=True, narrow=True)


def _subject(
    profile: Path | None, arguments: dict[str, Any], deadline: Deadline
) -> tuple[BuiltProblem, Plan | None, str | None, float | None, str]:
    """(problem, plan to explain, proof, step time, line on their origin).

    If the user names no plan, plan, proof and step time are None, and a solve finds the plan.
    """
    path: Path | None = arguments["profile"]
    if path is not None and plan_file.is_plan(path):
        _refuse_problem_options(path)
        problem, plan, proof, step_s = read_checked_plan(path, profile)
        source = problem.profile.file or f"the bundled profile of {problem.profile.model_name}"
        return BuiltProblem(problem), plan, proof, step_s, f"plan: {path}, made from {source}"
    if profile is not None and path is not None:
        raise InputError(f"{path} is not a plan but a profile: leave out --profile")
    built, origin = problem_of(arguments | {"profile": path or profile}, deadline)
    return built, None, None, None, origin


def _refuse_problem_options(path: Path) -> None:
    """Raise an `InputError` if an option describes the problem, because the plan at `path` already does."""
    context = click.get_current_context()
    allowed = {"profile", "profile_option", "samples", "seed", "spread", "as_json"}
    for parameter in context.command.params:
        name = str(parameter.name)
        if name not in allowed and context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise InputError(f"{parameter.opts[-1]} is part of {path} already: leave it out")


def _explain_infeasible(problem: Problem, diagnosis: Diagnosis, as_json: bool) -> NoReturn:
    """Print why there is no plan, and raise an `InfeasibleError` with the diagnosis in one line."""
    if as_json:
        print_json(diagnosis_json(problem, diagnosis))
    else:
        print_answer(diagnosis_parts(problem, diagnosis), fold=True, narrow=True)
    sys.stdout.flush()
    raise InfeasibleError(diagnosis.text)
