"""`pipeplan replan PLAN_FOLDER --lost server2`: solve again for what is left, and say how training goes on."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from pipeplan import interrupts, stored
from pipeplan.api import cluster as named_cluster
from pipeplan.check import model as models
from pipeplan.check.document import Document
from pipeplan.check.structure import check_structure
from pipeplan.cli.answer import disagreement_in, search_arguments, settings_of, written
from pipeplan.cli.given import options_of, problem_arguments, profile_of_plan
from pipeplan.cli.options import force_option, json_option, output_folder, quiet_option
from pipeplan.cluster_data import Cluster
from pipeplan.errors import InfeasibleError, InputError
from pipeplan.plan import ACCUMULATING
from pipeplan.problem import Options, Problem
from pipeplan.rendering.plan_folder import refuse_to_overwrite, write_plan
from pipeplan.replan import runs
from pipeplan.replan.lost import Left, without, workers_named
from pipeplan.replan.options import RELAXED, relaxed, what_helps
from pipeplan.replan.report import Old, Report
from pipeplan.replan.show import show as show_changes
from pipeplan.show import show
from pipeplan.solving import Outcome, Settings, solve

# The fields of `Options` that an argument sets, where it is given.
_SETS = {
    "stages": ("stages",),
    "max_replicas": ("max_replicas",),
    "straight": ("max_replicas", "allow_copies"),
    "overlap": ("overlap",),
    "ignore_memory": ("memory",),
    "schedule": ("schedule", "accumulate"),
    "accumulate": ("accumulate",),
    "no_recompute": ("recompute",),
    "no_contention": ("contention",),
    "boundary": ("boundary",),
    "max_stages": ("max_stages",),
    "max_workers": ("max_workers",),
    "pins": ("pins",),
    "together": ("together",),
    "no_cut_after": ("no_cut_after",),
    "grid": ("grid",),
}


@click.command("replan")
@click.argument("plan_folder", type=click.Path(path_type=Path), default=Path("plan"))
@click.option(
    "--lost",
    multiple=True,
    metavar="NAME,…",
    help="server2, worker5 (of all) or server1.worker0, numbered from 0 as in the plan. Repeat.",
)
@click.option("--cluster", metavar="NAME", help="Instead of --lost, what there is now: A, B, C, local, or a TOML file.")
@click.option("--servers", type=int, help="With --cluster: another number of servers than its own.")
@click.option("--workers", type=int, help="With --cluster local: how many workers.")
@click.option("--run", "run_folder", type=click.Path(path_type=Path), help="Go on from this run  [default: the latest]")
@click.option(
    "--profile",
    "profile_file",
    type=click.Path(path_type=Path),
    help="What the plan was made from  [default: found beside the plan, here, or among the bundled ones]",
)
@click.option("--relax", type=click.Choice(list(RELAXED)), multiple=True, help="Leave out what was asked for. Repeat.")
@problem_arguments("profile", "cluster_name", "servers", "workers", "inference")
@search_arguments
@output_folder(note="PLAN_FOLDER-replanned")
@force_option
@click.option("--no-write", is_flag=True, help="Print the answer only.")
@json_option
@quiet_option
def command(
    plan_folder: Path,
    lost: tuple[str, ...],
    cluster: str | None,
    servers: int | None,
    workers: int | None,
    run_folder: Path | None,
    profile_file: Path | None,
    relax: tuple[str, ...],
    output: Path | None,
    force: bool,
    no_write: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Solve again for what is left of the cluster of PLAN_FOLDER (./plan unless given), with the options that the plan
    was made with, and say how training goes on from its last checkpoint. Options given here replace the plan's.

    \b
    pipeplan replan plan --lost server2
    pipeplan replan plan --lost worker5,worker6 --relax stages
    pipeplan replan plan --cluster what-is-left.toml
    """
    names = tuple(name.strip() for text in lost for name in text.split(","))
    folder = stored.file_of(plan_folder).parent
    output = _beside(folder) if output is None else output
    if not no_write:
        refuse_to_overwrite(output, force)
    settings = settings_of(given)
    was, old, root_profile_text = _old(plan_folder, folder, profile_file)
    left = _left(was.cluster, names, cluster, servers, workers)
    problem = _problem(was, left, relax, given)
    checkpoint = None
    if not old.plan.inference:
        checkpoint = runs.latest(folder, run_folder, problem.profile.graph_hash)
    notes = Console(stderr=True, highlight=False)
    notes.print(root_profile_text, style="dim", markup=False, soft_wrap=True)
    with interrupts.noted() as interrupted, disagreement_in(None if no_write else output):
        outcome = _solved(problem, settings)
    if not no_write:
        # Before the table, as `solve` does.
        write_plan(outcome, output, force=force)
    report = Report(old, left, names, outcome, None if no_write else output, checkpoint)
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=1, allow_nan=False))
    else:
        console = Console(highlight=False, markup=False)
        show(outcome, console)
        show_changes(report, console)
    if not no_write:
        notes.print(written(outcome, output), markup=False, soft_wrap=True)
    interrupted()  # as `solve` does


def _beside(folder: Path) -> Path:
    """`plan-replanned` for `plan`, then `plan-replanned-2` and so on: the folder of a plan is never its own."""
    named = folder if folder.name not in ("", "..") else folder.resolve()
    again = re.fullmatch(r"(.*-replanned)(?:-([1-9][0-9]{0,8}))?", named.name, re.DOTALL)
    if again is None:
        return named.with_name(f"{named.name or 'plan'}-replanned")
    return named.with_name(f"{again[1]}-{int(again[2] or 1) + 1}")


def _old(path: Path, folder: Path, profile_file: Path | None) -> tuple[Problem, Old, str]:
    """The problem that the old plan was made for, and the plan, checked to be one."""
    root, file = stored.document(path), stored.file_of(path)
    profile = profile_of_plan(root, file, profile_file)
    document = Document.of(root)
    if not document.pace_s > 0:
        raise InputError(f"{file} is no plan to begin with: it states no pace")
    try:
        check_structure(document, models.build(profile, document.asked, inference=document.inference))
    except InputError as error:
        raise InputError(f"{file} is no plan to begin with: {error}") from None
    problem, plan = stored.of(root, profile)
    old = Old(folder, plan, problem.cluster, profile.minibatch, document.pace_s)
    return problem, old, f"plan: {file}; profile: {profile.model_name}"


def _left(
    cluster: Cluster, names: tuple[str, ...], instead: str | None, servers: int | None, workers: int | None
) -> Left:
    if instead is not None:
        if names:
            raise InputError("--lost is of the plan's cluster, and --cluster replaces that: give one of them")
        return Left(named_cluster(instead, servers=servers, workers=workers), (), ())
    if servers is not None or workers is not None:
        raise InputError("--servers and --workers go with --cluster; say what is gone with --lost")
    if not names:
        raise InputError("say what is gone, as in --lost server1, or what there is now with --cluster")
    return without(cluster, workers_named(names, cluster))


def _problem(was: Problem, left: Left, relax: tuple[str, ...], given: dict[str, Any]) -> Problem:
    profile, minibatch = was.profile, given["minibatch"]
    if minibatch is not None and minibatch != profile.minibatch:
        profile = profile.rescaled(minibatch)
    options = _options(relaxed(was.options, relax), given, was.cluster.device.kind, left.cluster.device.kind)
    if options.stages is not None and options.stages > left.cluster.workers:
        raise InputError(
            f"{options.stages} stages were asked for, and {left.cluster.workers} workers are left: ask for fewer with "
            "--stages, or leave it to the solvers with --relax stages"
        )
    return Problem(profile, left.cluster, options)


def _options(old: Options, given: dict[str, Any], kind_was: str, kind: str) -> Options:
    """The old options, but for those that are given; the overlap is the usual one for devices of another kind."""
    schedule = given["schedule"] or (None if old.inference else old.schedule)
    accumulate = given["accumulate"]
    if accumulate is None and schedule in ACCUMULATING:
        accumulate = old.accumulate
    fresh = options_of(given | {"schedule": schedule, "accumulate": accumulate, "inference": old.inference}, kind)
    asked = {name for name in _SETS if given[name] is not None and given[name] is not False and given[name] != ()}
    if kind != kind_was:
        asked.add("overlap")
    return replace(old, **{field: getattr(fresh, field) for name in asked for field in _SETS[name]})


def _solved(problem: Problem, settings: Settings) -> Outcome:
    try:
        return solve(problem, settings)
    except InfeasibleError as error:
        helps = what_helps(problem)
        if not helps:
            raise
        raise InfeasibleError(f"{error}; of the options here {', '.join(helps)} would do") from None
