"""Arguments of the solvers, the line on a running search, and the lines on written files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from pipeplan.cli.options import Function
from pipeplan.cli.output import live_line
from pipeplan.errors import InputError
from pipeplan.exports.target import TARGET_NAMES
from pipeplan.planning.outcome import Outcome
from pipeplan.planning.run_solvers import Disagreement
from pipeplan.planning.settings import Settings, SolveProgress
from pipeplan.rendering import plan_folder
from pipeplan.rendering.launchers import LAUNCHERS, LOCAL
from pipeplan.util.units import show_time

PHASES = {
    "": "choosing what to solve",
    "cuts": "listing the model's cuts",
    "DP": "searching with the DP",
    "ILP": "confirming with the ILP",
    "certificate": "making the certificate",
    "baselines": "searching for the baselines",
    "simulation": "simulating the plan",
    "why no plan fits": "finding out why no plan fits",
}
"""The words for every phase in the line."""


def solver_option(default: str) -> Callable[[Function], Function]:
    """The option `--solver`, with the solvers that run without it."""
    return click.option(
        "--solver",
        type=click.Choice(["dp", "ilp", "both"]),
        default=default,
        show_default=True,
        help="Run these solvers; both check each other.",
    )


_ARGUMENTS = (
    solver_option("both"),
    click.option(
        "--time-limit",
        type=float,
        default=60.0,
        show_default=True,
        help="Search for at most this many seconds; unless given, the second solver has 4 of them to confirm a proof.",
    ),
)


def search_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that gives a command all arguments that `settings_of` reads."""
    for argument in reversed(_ARGUMENTS):
        function = argument(function)
    return function


def settings_of(arguments: dict[str, Any]) -> Settings:
    """The settings that the arguments describe. A time limit that the user gave also holds for confirming a proof."""
    source = click.get_current_context().get_parameter_source("time_limit")
    given = source not in (None, ParameterSource.DEFAULT)
    return Settings(
        solver=arguments["solver"],
        time_limit_s=positive_time_limit(arguments["time_limit"]),
        confirm_s=None if given else Settings.confirm_s,
        simplify=True,
    )


def positive_time_limit(time_limit: float) -> float:
    """The time limit in seconds. Raises `InputError` unless it is positive."""
    if not time_limit > 0:
        raise InputError(f"--time-limit must be above 0 seconds, not {time_limit:g}")
    return time_limit


def progress_text(state: SolveProgress) -> str:
    """The state of a solve in one line."""
    parts = [PHASES.get(state.phase, state.phase)]
    if state.best_s is not None:
        parts.append(f"best {show_time(state.best_s)}")
    if state.bound_s is not None:
        parts.append(f"bound {show_time(state.bound_s)}")
    if state.gap is not None:
        parts.append(f"gap {state.gap:.2%}")
    return f"{parts[0]}: {', '.join([*parts[1:], f'{state.seconds:.0f} s'])}"


@contextmanager
def solve_line() -> Iterator[Callable[[SolveProgress], None]]:
    """Show the line while the block runs. Yields the function that a solve reports its progress to."""
    state = [SolveProgress.started()]

    def report(changed: SolveProgress) -> None:
        # Only kept: the line is drawn by another thread, a few times a second.
        state[0] = changed

    with live_line(lambda: progress_text(state[0])):
        yield report


@contextmanager
def keep_disagreement(folder: Path | None) -> Iterator[None]:
    """If the solvers contradict each other, write both plans beside `folder` (None: nowhere) and name the files."""
    try:
        yield
    except Disagreement as error:
        if folder is None:
            raise
        files = " and ".join(str(path) for path in plan_folder.write_disagreement(error.results, folder))
        raise Disagreement(f"{error}; both plans are in {files}", error.results) from None


def written_lines(outcome: Outcome, folder: Path, *, fresh: Collection[str] = ()) -> str:
    """A line on the files that were written, and another on files made from an older plan that remain.

    `fresh` names the exports that were written with this plan.
    """
    runnable = "" if outcome.problem.profile.model_ref else " (its profile names no model that could be run)"
    line = f"written: {folder}/plan.json, stages/, launch.sh{runnable}"
    older = [name for name in _written_into_plan_folder() if name not in fresh and (folder / name).exists()]
    if not older:
        return line
    return f"{line}\nstill of the older plan, to be made anew: {', '.join(older)} in {folder}"


def _written_into_plan_folder() -> list[str]:
    """Names of the files and folders that `render`, `export` and `report` write into a plan folder by default."""
    launchers = [launcher.file_name for launcher in LAUNCHERS.values() if launcher is not LOCAL]
    return [*launchers, *TARGET_NAMES, "report.html"]
