"""Shared parts of the commands that solve: profile, request, settings, the line on a search, lines on files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from pipeplan.api import cluster
from pipeplan.cli.output import live_line
from pipeplan.cluster_data.cluster import Cluster
from pipeplan.errors import InputError
from pipeplan.exports import TARGET_NAMES
from pipeplan.from_options.build_problem import BuiltProblem, Request, build_problem
from pipeplan.from_options.option_fields import option_fields
from pipeplan.planning.outcome import Outcome
from pipeplan.planning.settings import Settings, SolveProgress
from pipeplan.problem.plan_profile import PROFILE
from pipeplan.profile_data.profile import Profile, bundled_profile_paths, load_profile
from pipeplan.rendering.launchers import LAUNCHERS, LOCAL
from pipeplan.util import processes
from pipeplan.util.deadline import Deadline
from pipeplan.util.text import one_line
from pipeplan.util.units import show_time

EXAMPLE = "vgg16-v100"
"""The bundled profile that is used if there is no other."""
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
"""The words for every phase in the progress line."""


@dataclass(frozen=True)
class ProfileSource:
    """A profile, and a line that says where it comes from."""

    profile: Profile
    text: str
    example: bool = False
    """Whether this is the bundled profile, used because none is named and there is no ./profile.json."""


def problem_of(arguments: dict[str, Any], deadline: Deadline) -> tuple[BuiltProblem, str]:
    """The problem that the arguments describe, and a line on the origin of its profile.

    If the arguments leave the choice between synchronous and asynchronous plans open, the choice may take a share of
    the time until the deadline.
    """
    source = read_profile(arguments.get("profile"))
    machines = cluster(arguments["cluster_name"], servers=arguments.get("servers"), workers=arguments.get("workers"))
    return build_problem(request_of(arguments, source.profile, machines, deadline=deadline)), source.text


def request_of(arguments: dict[str, Any], profile: Profile, machines: Cluster, **more: Any) -> Request:
    """The request that the arguments describe; `more` has further fields of it. Raises `InputError`."""
    return Request(
        profile,
        machines,
        batch=arguments.get("batch"),
        microbatch=arguments.get("microbatch"),
        staleness=arguments.get("staleness"),
        options=checked_option_fields(arguments),
        **more,
    )


def checked_option_fields(arguments: dict[str, Any]) -> dict[str, Any]:
    """The fields of `Options` that the arguments set. Raises `InputError` if they contradict each other."""
    if arguments.get("inference") and arguments.get("schedule"):
        raise InputError("--schedule is for training: leave it out with --inference")
    least, most = arguments.get("stages") or (None, None)
    exact = {"stages": least} if least == most else {"stages": None, "max_stages": most}
    return option_fields(arguments | exact)


def read_profile(path: Path | None) -> ProfileSource:
    """The profile at `path`. Without `path`: ./profile.json, or the bundled VGG-16 if there is no such file."""
    here = Path(PROFILE)
    example = path is None and not here.exists()
    if path is not None:
        why = "bundled" if str(path) in bundled_profile_paths() and not path.is_file() else str(path)
    elif example:
        path, why = Path(EXAMPLE), f"bundled, as there is no {here} here"
    else:
        path, why = here, f"{here} in this folder"
    profile = load_profile(str(path))
    origin = profile.provenance
    text = f"profile: {profile.model_name} ({why}); {origin.kind} on {origin.device_name or 'an unnamed device'}"
    if origin.kind == "modelled":
        text += ", not measured"
    return ProfileSource(profile, one_line(text), example)


def settings_of(arguments: dict[str, Any]) -> Settings:
    """The settings that the arguments describe. A time limit from the user also applies to confirming a proof."""
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
def watched_search() -> Iterator[tuple[Callable[[SolveProgress], None], Callable[[], None]]]:
    """Show a progress line while the block solves.

    Yields the function that a solve calls to report progress, and a function that raises `KeyboardInterrupt` if Ctrl-C
    came in the block.
    """
    state = [SolveProgress.started()]

    def report(changed: SolveProgress) -> None:
        # Only store the state: another thread draws the line, a few times a second.
        state[0] = changed

    with processes.remember_interrupt() as interrupted, live_line(lambda: progress_text(state[0])):
        yield report, interrupted


def written_lines(outcome: Outcome, folder: Path, *, fresh: Collection[str] = ()) -> str:
    """A line on the written files, and another on remaining files of an older plan.

    `fresh` has the names of the exports that were written with this plan.
    """
    runnable = "" if outcome.problem.profile.model_ref else " (its profile names no model that could be run)"
    line = f"written: {folder}/plan.json, stages/, launch.sh{runnable}"
    launchers = [launcher.file_name for launcher in LAUNCHERS.values() if launcher is not LOCAL]
    makeable = [*launchers, *TARGET_NAMES, "report.html"]
    older = [name for name in makeable if name not in fresh and (folder / name).exists()]
    if not older:
        return line
    return f"{line}\nfiles of the older plan, to be written again: {', '.join(older)} in {folder}"
