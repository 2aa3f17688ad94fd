"""`pipeplan replan PLAN_FOLDER --lost server2`: solve again for the rest of the cluster, and say how to resume."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from pipeplan.api import cluster as named_cluster
from pipeplan.cli.options import (
    PATH,
    force_option,
    json_option,
    no_write_option,
    output_folder,
    plan_profile_option,
    quiet_option,
)
from pipeplan.cli.output import answer_width, note, print_answer, print_json, print_line, print_warning
from pipeplan.cli.problem_options import GroupedCommand, problem_options, search_options
from pipeplan.cli.solving import checked_option_fields, settings_of, watched_search, written_lines
from pipeplan.cluster_data.cluster import Cluster
from pipeplan.drawing.answer import answer_lines
from pipeplan.errors import InputError
from pipeplan.plan.schedules import ACCUMULATING
from pipeplan.planning.question import microbatches
from pipeplan.problem import plan_file
from pipeplan.problem.options import Options
from pipeplan.profile_data.profile_document import job_notes
from pipeplan.rendering.plan_folder import refuse_to_overwrite_plan, write_plan
from pipeplan.replanning.old_plan import read_old_plan, remaining_cluster, replanned_problem, solve_again
from pipeplan.replanning.replan import RELAXED, ReplanReport, relax_options
from pipeplan.replanning.terminal import changes_table, resume_lines
from pipeplan.run_data.run_folder import latest_checkpoint


@click.command("replan", cls=GroupedCommand)
@click.argument("plan_folder", type=PATH, default=Path("plan"))
@click.option(
    "--lost",
    multiple=True,
    metavar="NAME,…",
    help="Leave out lost servers and workers: server2, worker5 (of all) or server1.worker0, numbered from 0 as in the "
    "plan; can be repeated.",
)
@click.option(
    "--cluster", metavar="NAME", help="Plan for this cluster instead of --lost: A, B, C, local, or a TOML file."
)
@click.option("--servers", type=int, help="Use this number of servers, with --cluster.")
@click.option("--workers", type=int, help="Use this number of workers, on a --cluster of one server such as local.")
@click.option("--run", "run_folder", type=PATH, help="Resume from this run  [default: the latest]")
@plan_profile_option
@click.option(
    "--relax",
    type=click.Choice(list(RELAXED)),
    multiple=True,
    help="Drop this constraint of the old plan; can be repeated.",
)
@problem_options("profile", "cluster_name", "servers", "workers", "inference", "staleness")
@search_options
@output_folder(note="PLAN_FOLDER-replanned")
@force_option
@no_write_option
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
    old_problem, old = read_old_plan(plan_folder, profile_file)
    remaining = remaining_cluster(old.cluster, names, _replacement(cluster, servers, workers))
    size = arguments["microbatch"] or old_problem.profile.minibatch
    fields = _fields(relax_options(old_problem.options, relax), arguments, size)
    problem = replanned_problem(old_problem, remaining, relax, arguments["microbatch"], fields)
    checkpoint = None
    if not old.plan.inference:
        checkpoint = latest_checkpoint(folder, run_folder, problem.profile.graph_hash)
    if not no_write:
        refuse_to_overwrite_plan(output, force)  # after the checks of mistyped arguments, as in `solve`
    note(f"plan: {plan_file.plan_file(plan_folder)}; profile: {problem.profile.model_name}", dim=True)
    with watched_search() as (progress, interrupted):
        outcome = solve_again(problem, settings, progress)
    if not no_write:
        # Written before the table is printed, as in `solve`.
        write_plan(outcome, output, force=force)
    print_warning(problem.profile, problem.cluster, as_json=as_json)
    report = ReplanReport(old, remaining, names, outcome, None if no_write else output, checkpoint)
    if as_json:
        print_json(report.to_json(), ascii_only=True)
    else:
        for line in answer_lines(outcome, answer_width()):
            print_line(line)
        print_answer(changes_table(report), fold=True)
        print_answer(resume_lines(report))
    for line in job_notes(problem.profile.model_ref, problem.profile.model_file):
        note(f"note: {line}")
    if not no_write:
        note(written_lines(outcome, output))
    interrupted()  # as in `solve`


def _default_output(folder: Path) -> Path:
    """The folder of a new plan: `plan-replanned` after `plan`, `plan-replanned-2` after `plan-replanned`, and so on."""
    named = folder if folder.name not in ("", "..") else folder.resolve()
    replanned = re.fullmatch(r"(.*-replanned)(?:-([1-9][0-9]{0,8}))?", named.name, re.DOTALL)
    if replanned is None:
        return named.with_name(f"{named.name or 'plan'}-replanned")
    return named.with_name(f"{replanned[1]}-{int(replanned[2] or 1) + 1}")


def _replacement(instead: str | None, servers: int | None, workers: int | None) -> Cluster | None:
    """The cluster that replaces the old cluster; None if the user names no cluster."""
    if instead is not None:
        return named_cluster(instead, servers=servers, workers=workers)
    if servers is not None or workers is not None:
        raise InputError("--servers and --workers go with --cluster; say what is gone with --lost")
    return None


def _fields(old: Options, arguments: dict[str, Any], microbatch: int) -> dict[str, Any]:
    """The fields of the options that the command line sets. The schedule is that of the old plan unless the user names
    one.

    A global batch is cut into microbatches of `microbatch` samples. Raises `InputError` if that is impossible.
    """
    fields = checked_option_fields(arguments | {"inference": old.inference, "schedule": None})
    if arguments["schedule"]:
        fields["schedule"] = arguments["schedule"]
    if arguments["batch"] is not None:
        if fields.get("schedule", old.schedule) not in ACCUMULATING:
            raise InputError(f"--batch goes with --schedule {', '.join(ACCUMULATING)}")
        fields["accumulate"] = microbatches(arguments["batch"], microbatch)
    return fields
