"""Carries out `pipeplan solve`: reads the profile, solves, writes the plan folder, and prints the answer with notes."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from pipeplan.api import cluster
from pipeplan.cli.output import answer_width, note, print_json, print_line, print_warning
from pipeplan.cli.solving import (
    EXAMPLE,
    ProfileSource,
    read_profile,
    request_of,
    settings_of,
    watched_search,
    written_lines,
)
from pipeplan.cluster_data.local import LOCAL
from pipeplan.drawing.answer import answer_lines
from pipeplan.errors import InputError
from pipeplan.exports.target import export_lines, write_export
from pipeplan.from_options.build_problem import BuiltProblem, TargetedProblem, build_problem
from pipeplan.from_options.choose_order import OrderChoice
from pipeplan.planning.outcome import Outcome
from pipeplan.planning.solve import solve
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import edges
from pipeplan.profile_data.profile_document import job_notes, lacking_text, unchecked_text
from pipeplan.profile_data.rescale import describe_rescaling
from pipeplan.profile_data.ties import APART, held_layers
from pipeplan.rendering import plan_folder, plan_json
from pipeplan.rendering.launchers import LAUNCHERS
from pipeplan.util.deadline import Deadline
from pipeplan.util.files import refuse_to_overwrite
from pipeplan.util.text import shell_path, shell_program

_EXAMPLE_HEADING = "An example: there is no profile.json here, so this is VGG-16 on V100, which comes with pipeplan."
BUSY_MACHINE = (
    "note: other programs used this machine while the executor's costs were measured: the prediction, which leaves "
    "them out, is less exact; a run's table states their share, and the next pipeplan profile measures again"
)


def solve_and_write(
    target_name: str | None, output: Path, force: bool, no_write: bool, as_json: bool, **arguments: Any
) -> None:
    """Solve the problem that the arguments of `pipeplan solve` describe; write and print the answer."""
    settings, replaces = settings_of(arguments), force or plan_folder.holds_unused_plan(output)
    source = read_profile(arguments["profile"])
    if source.example:
        _refuse_to_write_example()
        no_write = True
    machines = cluster(arguments["cluster_name"], servers=arguments["servers"], workers=arguments["workers"])
    deadline = Deadline.after(settings.time_limit_s)
    if target_name in LAUNCHERS:
        raise InputError(f"{target_name} can start every plan: leave out --for, then pipeplan export {target_name}")
    request = request_of(
        arguments,
        source.profile,
        machines,
        target=target_name,
        maximum_cuts=settings.maximum_cuts,
        deadline=deadline,
        # After the checks of mistyped arguments, so that --force is not the first thing that a user has to add.
        before_search=lambda: None if no_write else plan_folder.refuse_to_overwrite_plan(output, replaces),
    )
    with watched_search() as (report, interrupted):
        built = build_problem(request)
        outcome = solve(
            built.problem, settings, report=report, deadline=deadline, known=built.known, choice=built.choice
        )
    if built.targeted is not None:
        # Raises before anything is written if the trainer cannot express the plan, or a file cannot be written.
        files = built.targeted.files(outcome)
        if not no_write:
            refuse_to_overwrite(output / built.targeted.target.name, files, replaces)
    # Written before the answer is printed, so that `| head`, which closes our output early, does not lose the plan.
    written_files = [] if no_write else _write(outcome, built.targeted, output, replaces)
    # Notes come after all steps that may fail, because an error should be the only line on standard error.
    _print_notes(source, built)
    print_warning(built.problem.profile, built.problem.cluster, as_json=as_json)
    if as_json:
        print_json(plan_json.plan_document(outcome, None if no_write else output), ascii_only=True)
    else:
        if source.example:
            print_line(textwrap.fill(_EXAMPLE_HEADING, answer_width()))
        following = "" if source.example or no_write or built.targeted else _next_commands(outcome, output)
        for line in answer_lines(outcome, answer_width(), following):
            print_line(line)
        if built.targeted is not None:
            print_line(built.targeted.cost(outcome, settings.maximum_cuts))
    for line in written_files:
        note(line)
    if source.example:
        name = shlex.quote(arguments["cluster_name"])
        note(
            f"nothing was written: this is an example. Name its profile to have its plan written, as in pipeplan solve "
            f"{EXAMPLE} --cluster {name}; measure a model of yours with pipeplan profile MODEL"
        )
    interrupted()  # the best plan so far is written, but the exit code keeps scripts from using it


def _refuse_to_write_example() -> None:
    """Raise an `InputError` if an option asks for files although there is no profile to plan for."""
    source = click.get_current_context().get_parameter_source("output")
    if source is click.core.ParameterSource.COMMANDLINE:
        raise InputError(
            f"there is no profile.json here to write a plan for: name a profile, such as the bundled {EXAMPLE}, or "
            "measure one with pipeplan profile MODEL"
        )


def _write(outcome: Outcome, targeted: TargetedProblem | None, folder: Path, force: bool) -> list[str]:
    """Write the plan, and the files for its target trainer. Returns lines that name the files."""
    plan_folder.write_plan(outcome, folder, force=force)
    if targeted is None:
        return [written_lines(outcome, folder)]
    target, files = targeted.target, targeted.files(outcome)
    write_export(folder / target.name, files, force=force)
    exported = export_lines(target, folder / target.name, files, outcome.problem, outcome.plan)
    return [written_lines(outcome, folder, fresh=(target.name,)), *exported]


def _print_notes(source: ProfileSource, built: BuiltProblem) -> None:
    """Print the origin of the profile, and notes on the profile and on this machine."""
    problem, own = built.problem, source.profile.minibatch
    profile, known = problem.profile, source.profile.all_sizes
    measured = any(one.minibatch == profile.minibatch for one in known)
    rescaled = "" if measured else f"; {describe_rescaling(known, profile.minibatch)}"
    note(source.text + rescaled, dim=True)
    if problem.cluster.executor.disturbed:
        note(BUSY_MACHINE)
    if profile.lacks and problem.training:
        note(lacking_text(profile.lacks))
    for line in job_notes(profile.model_ref, profile.model_file):
        note(f"note: {line}")
    if profile.unchecked:
        note(unchecked_text(profile.unchecked))
    for line in _held_lines(problem):
        note(line)
    if profile.minibatch < own and profile.normalises_minibatches:
        note(f"BatchNorm normalises over {profile.minibatch} samples in this plan, where the profile's model has {own}")
    if built.orders:
        note(_order_line(built.orders), dim=True)


def _held_lines(problem: Problem) -> Iterator[str]:
    """A line for each group of layers that must share a stage with many layers, so that few cuts remain."""
    profile, names = problem.profile, [layer.name for layer in problem.profile.layers]
    tied = () if problem.options.flushes else tuple(tie.layers for tie in profile.tied)
    for group in held_layers(names, edges(profile.tensors), (*profile.together, *tied)):
        if group.between:
            apart = f"; {APART}" if any(set(layers) <= set(group.group) for layers in tied) else ""
            yield group.text() + apart


def _next_commands(outcome: Outcome, folder: Path) -> str:
    """The next commands: the run, if the plan is for this machine, and the explanation."""
    profile = outcome.problem.profile
    measured = bool(profile.model_ref) and profile.provenance.kind in ("measured", "calibrated") and not profile.lacks
    runs = measured and outcome.problem.cluster.name == LOCAL and not outcome.plan.inference
    run = f"{shell_program(folder / 'launch.sh')} --epochs 1  |  " if runs else ""
    return f"{run}pipeplan explain {shell_path(folder)}"


def _order_line(orders: Sequence[OrderChoice]) -> str:
    """One line on the chosen order of the servers."""
    best, number = orders[0], len(orders)
    what = "devices" if best.problem.cluster.server_level > 1 else "servers"
    tried = f"{number} orders of the {what} were tried" if all(one.in_time for one in orders) else "time was short"
    listed = next(one for one in orders if one.order == tuple(sorted(one.order)))
    if best is listed or best.step_time_s is None:
        return f"  {what} as listed ({tried})"
    gain = (
        "which has no plan"
        if listed.step_time_s is None
        else f"{listed.step_time_s / best.step_time_s:.2f} x the throughput"
    )
    numbers = ", ".join(str(server) for server in best.order)
    return f"  {what} in the order {numbers} of the cluster file: {gain} of the listed order ({tried})"
