"""`pipeplan replan PLAN_FOLDER --lost server2`: solve again for the rest of the cluster, and say how to resume."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from pipeplan.api import cluster as named_cluster
from pipeplan.checker.document import FLUSHING, PlanDocument
from pipeplan.checker.model import checked_model
from pipeplan.checker.structure import check_structure
from pipeplan.cli.options import force_option, json_option, output_folder, plan_profile_option, quiet_option
from pipeplan.cli.output import note, print_answer, print_json
from pipeplan.cli.problem_options import checked_option_fields, problem_arguments, profile_of_plan
from pipeplan.cli.solve_line import solve_line
from pipeplan.cli.solver_options import keep_disagreement, search_arguments, settings_of, written_lines
from pipeplan.cluster_data.cluster import Cluster
from pipeplan.drawing.plan_table import plan_table
from pipeplan.errors import InfeasibleError, InputError
from pipeplan.from_options import default_overlap
from pipeplan.plan.schedules import ACCUMULATING
from pipeplan.planning.progress import Report
from pipeplan.planning.solve import Outcome, Settings, solve
from pipeplan.problem import plan_file
from pipeplan.problem.problem import Options, Problem
from pipeplan.rendering.plan_folder import refuse_to_overwrite_plan, write_plan
from pipeplan.replanning.remaining_cluster import RemainingCluster, remove_workers, workers_named
from pipeplan.replanning.replan import RELAXED, OldPlan, ReplanReport, helpful_options, relax_options
from pipeplan.replanning.terminal import changes_table, resume_lines
from pipeplan.run_data import latest_run
from pipeplan.util import interrupts
from pipeplan.util.deadline import Deadline


@click.command("replan")
@click.argument("plan_folder", type=click.Path(path_type=Path), default=Path("plan"))
@click.option(
    "--lost",
    multiple=True,
    metavar="NAME,…",
    help="Lost servers and workers: server2, worker5 (of all) or server1.worker0, numbered from 0 as in the plan. "
    "Can be repeated.",
)
@click.option("--cluster", metavar="NAME", help="Instead of --lost, the new cluster: A, B, C, local, or a TOML file.")
@click.option("--servers", type=int, help="With --cluster: number of servers, instead of its own.")
@click.option("--workers", type=int, help="With --cluster local: number of workers.")
@click.option(
    "--run", "run_folder", type=click.Path(path_type=Path), help="The run to resume from  [default: the latest]"
)
@plan_profile_option
@click.option(
    "--relax",
    type=click.Choice(list(RELAXED)),
    multiple=True,
    help="Drop this constraint of the old plan. Can be repeated.",
)
@problem_arguments("profile", "cluster_name", "servers", "workers", "inference")
@search_arguments
@output_folder(note="PLAN_FOLDER-replanned")
@force_option
@click.option("--no-write", is_flag=True, help="Print the answer without writing files.")
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
    **arguments: Any,
) -> None:
    """Solve again for the rest of the cluster of PLAN_FOLDER (default: ./plan), and say how to resume training from its
    last checkpoint. The options of the old plan apply, except for those given here.

    \b
    pipeplan replan plan --lost server2
    pipeplan replan plan --lost worker5,worker6 --relax stages
    pipeplan replan plan --cluster what-is-left.toml
    """
    names = tuple(name.strip() for text in lost for name in text.split(","))
    folder = plan_file.plan_file(plan_folder).parent
    output = _default_output(folder) if output is None else output
    settings = settings_of(arguments)
    old_problem, old, origin = _read_old_plan(plan_folder, folder, profile_file)
    remaining = _remaining_cluster(old_problem.cluster, names, cluster, servers, workers)
    problem = _problem(old_problem, remaining, relax, arguments)
    if not no_write:
        refuse_to_overwrite_plan(output, force)  # after what may be mistyped, as in `solve`
    checkpoint = None
    if not old.plan.inference:
        checkpoint = latest_run.latest_checkpoint(folder, run_folder, problem.profile.graph_hash)
    note(origin, dim=True)
    with (
        interrupts.remember_interrupt() as interrupted,
        keep_disagreement(None if no_write else output),
        solve_line() as progress,
    ):
        outcome = _solve(problem, settings, progress)
    if not no_write:
        # Written before the table is printed, as in `solve`.
        write_plan(outcome, output, force=force)
    report = ReplanReport(old, remaining, names, outcome, None if no_write else output, checkpoint)
    if as_json:
        print_json(report.to_json(), ascii_only=True)
    else:
        print_answer(plan_table(outcome))
        print_answer(changes_table(report), fold=True)
        print_answer(resume_lines(report))
    if not no_write:
        note(written_lines(outcome, output))
    interrupted()  # as in `solve`


def _default_output(folder: Path) -> Path:
    """The folder of a new plan: `plan-replanned` for `plan`, `plan-replanned-2` for that, and so on."""
    named = folder if folder.name not in ("", "..") else folder.resolve()
    replanned = re.fullmatch(r"(.*-replanned)(?:-([1-9][0-9]{0,8}))?", named.name, re.DOTALL)
    if replanned is None:
        return named.with_name(f"{named.name or 'plan'}-replanned")
    return named.with_name(f"{replanned[1]}-{int(replanned[2] or 1) + 1}")


def _read_old_plan(path: Path, folder: Path, profile_file: Path | None) -> tuple[Problem, OldPlan, str]:
    """The problem that the old plan was made for, the plan itself, and a line on where both come from.

    Raises `InputError` if the structure of the plan is wrong.
    """
    root, file = plan_file.read_plan_document(path), plan_file.plan_file(path)
    profile = profile_of_plan(root, file, profile_file)
    document = PlanDocument.of(root)
    if not document.pace_s > 0:
        raise InputError(f"{file} cannot be replanned: it states no pace")
    try:
        check_structure(
            document,
            checked_model(
                profile,
                document.options,
                inference=document.inference,
                synchronous=document.schedule in FLUSHING,
            ),
        )
    except InputError as error:
        raise InputError(f"{file} cannot be replanned: {error}") from None
    problem, plan = plan_file.plan_from_document(root, profile)
    old = OldPlan(folder, plan, problem.cluster, profile.minibatch, document.pace_s)
    return problem, old, f"plan: {file}; profile: {profile.model_name}"


def _remaining_cluster(
    cluster: Cluster, names: tuple[str, ...], instead: str | None, servers: int | None, workers: int | None
) -> RemainingCluster:
    if instead is not None:
        if names:
            raise InputError("--lost refers to the plan's cluster, which --cluster replaces: give one of them")
        return RemainingCluster(named_cluster(instead, servers=servers, workers=workers), (), ())
    if servers is not None or workers is not None:
        raise InputError("--servers and --workers go with --cluster; say what is gone with --lost")
    if not names:
        raise InputError("say what is gone, as in --lost server1, or what there is now with --cluster")
    return remove_workers(cluster, workers_named(names, cluster))


def _problem(old: Problem, remaining: RemainingCluster, relax: tuple[str, ...], arguments: dict[str, Any]) -> Problem:
    profile, minibatch = old.profile, arguments["minibatch"]
    if minibatch is not None and minibatch != profile.minibatch:
        profile = profile.rescaled(minibatch)
    options = _options(relax_options(old.options, relax), arguments)
    kind = remaining.cluster.device.kind
    if arguments["overlap"] is None and kind != old.cluster.device.kind:
        options = replace(options, overlap=default_overlap(kind))
    if options.stages is not None and options.stages > remaining.cluster.workers:
        raise InputError(
            f"{options.stages} stages were asked for, and {remaining.cluster.workers} workers are left: ask for fewer "
            "with --stages, or leave it to the solvers with --relax stages"
        )
    return Problem(profile, remaining.cluster, options)


def _options(old: Options, arguments: dict[str, Any]) -> Options:
    """The old options, overridden by the arguments of the command line."""
    schedule = arguments["schedule"] or (None if old.inference else old.schedule)
    accumulate = arguments["accumulate"]
    if accumulate is None and schedule in ACCUMULATING:
        accumulate = old.accumulate
    arguments = arguments | {"schedule": schedule, "accumulate": accumulate, "inference": old.inference}
    return replace(old, **({"accumulate": accumulate} | checked_option_fields(arguments)))


def _solve(problem: Problem, settings: Settings, report: Report) -> Outcome:
    deadline = Deadline.after(settings.time_limit_s)
    try:
        # A part of the time is left for options that would help, if these have no plan.
        return solve(problem, settings, report=report, deadline=deadline.share(0.8))
    except InfeasibleError as error:
        helps = helpful_options(problem, deadline)
        if not helps:
            raise
        raise InfeasibleError(f"{error}; of the options here {', '.join(helps)} would do") from None
