"""`pipeplan solve`: find the best plan for a profile on a cluster, and write its plan folder.

With `--for TARGET` it also writes the files of another trainer beside the plan.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import click

from pipeplan.api import cluster
from pipeplan.cli.planning.problem_options import (
    EXAMPLE,
    ProfileSource,
    checked_option_fields,
    problem_arguments,
    read_profile,
)
from pipeplan.cli.planning.solve_line import solve_line
from pipeplan.cli.planning.solver_options import (
    keep_disagreement,
    parse_share,
    search_arguments,
    settings_of,
    written_lines,
)
from pipeplan.cli.running.export import export_lines
from pipeplan.cli.shared.options import complete_words, force_option, json_option, output_folder, quiet_option
from pipeplan.cli.shared.output import note, print_answer, print_json, print_line, print_warning
from pipeplan.cluster_data.devices import device_mismatch
from pipeplan.cluster_data.local import LOCAL
from pipeplan.cost.throughput import RunSize
from pipeplan.drawing.executor_line import executor_lines
from pipeplan.drawing.plan_table import plan_table
from pipeplan.errors import InputError
from pipeplan.exports.solve_for import TargetedProblem
from pipeplan.exports.target import TARGET_NAMES, refuse_to_overwrite_export, write_export
from pipeplan.from_options.build_problem import AUTO, SERVER_ORDERS, BuiltProblem, build_problem
from pipeplan.planning.choose_minibatch import MinibatchChoice
from pipeplan.planning.choose_order import OrderChoice
from pipeplan.planning.choose_schedule import EXTRAPOLATED, ScheduleChoice
from pipeplan.planning.choose_synchrony import OBJECTIVES, RATE
from pipeplan.planning.fewest_workers import FewestWorkers, search_fewest_workers
from pipeplan.planning.outcome import Outcome
from pipeplan.planning.solve import solve
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.job_fields import job_notes
from pipeplan.profile_data.layers import edges
from pipeplan.profile_data.profile import Profile
from pipeplan.profile_data.ties import APART, held_layers
from pipeplan.profile_data.training_needs import lacking_text, unchecked_text
from pipeplan.rendering import plan_folder, plan_json
from pipeplan.util import interrupts
from pipeplan.util.deadline import Deadline
from pipeplan.util.text import shell_path, shell_program
from pipeplan.util.units import show_pace, show_time

_EXAMPLE_HEADING = "An example: there is no profile.json here, so this is VGG-16 on V100, which pipeplan has with it."

BY_ONE_SOLVER = "  DP alone chose among these; no second solver cross-checked the choice"
"""The note on a schedule or minibatch size that was chosen automatically (`pipeplan.planning.fast.best_plan`)."""

for_option = click.option(
    "--for",
    "target_name",
    metavar="TARGET",
    shell_complete=complete_words(*TARGET_NAMES),
    help=f"Plan for another trainer and write its files into the plan folder: {', '.join(TARGET_NAMES)}.",
)


def write_exported(targeted: TargetedProblem, outcome: Outcome, folder: Path, *, force: bool) -> list[str]:
    """Write the trainer's files into the plan folder. Returns the lines that say so."""
    target_folder, files = folder / targeted.target.name, targeted.files(outcome)
    write_export(target_folder, files, force=force)
    return export_lines(targeted.target, target_folder, files, (outcome.problem, outcome.plan))


@click.command("solve")
@problem_arguments("minibatch")
@search_arguments
@click.option(
    "--minibatch",
    metavar="N|auto",
    help="Plan for this minibatch size, interpolated or rescaled from the measured ones; auto: the best measured one.",
)
@for_option
@click.option("--batch", type=int, metavar="SAMPLES", help="Global batch size, for --schedule best, auto and --for.")
@click.option(
    "--staleness",
    metavar="NONE|BOUNDED|ANY",
    shell_complete=complete_words("none", "bounded", "any"),
    help="With --schedule best or auto: how stale weights may be  [default: any; with best at most 3 updates]",
)
@click.option(
    "--asynchronous-gain",
    metavar="10%",
    default="10%",
    help="With --schedule best: the gain from which an asynchronous plan is taken.",
)
@click.option(
    "--objective",
    metavar="RATE|TIME-TO-GOAL",
    default=RATE,
    shell_complete=complete_words(*OBJECTIVES),
    help="With --schedule best: compare samples/s, or these over the measured cost in samples to the goal.",
)
@click.option(
    "--server-order",
    metavar="ANY|LISTED",
    default="any",
    shell_complete=complete_words(*SERVER_ORDERS),
    help="Where servers differ: whether pipelines may run through them in any order, or only as listed.",
)
@click.option("--fewest-workers", metavar="5%", help="Use as few workers as come this close to the best pace.")
@click.option("--epochs", type=int, metavar="N", help="Also say how long so many epochs take, and what they cost.")
@click.option("--dataset-size", type=int, metavar="N", help="Samples in an epoch  [default: as the profile says]")
@click.option("--tokens-per-sample", type=int, metavar="N", help="Tokens in a sample  [default: as the profile says]")
@output_folder(Path("plan"))
@force_option
@click.option("--report", "with_report", is_flag=True, help="Also write report.html, as `pipeplan report` does.")
@click.option("--no-write", is_flag=True, help="Print the answer without writing files.")
@json_option
@quiet_option
def command(
    batch: int | None,
    staleness: str | None,
    server_order: str,
    asynchronous_gain: str,
    objective: str,
    fewest_workers: str | None,
    minibatch: str | None,
    target_name: str | None,
    epochs: int | None,
    dataset_size: int | None,
    tokens_per_sample: int | None,
    output: Path,
    force: bool,
    with_report: bool,
    no_write: bool,
    as_json: bool,
    **arguments: Any,
) -> None:
    """Find the best plan for a profile on a cluster, prove it, and write it to a folder.

    PROFILE defaults to ./profile.json. Where there is none, a bundled VGG-16 on V100 serves as an example, and nothing
    is written.

    \b
    pipeplan solve vgg16-v100 --cluster B
    pipeplan solve profile.json --cluster local --workers 3
    pipeplan solve profile.json --cluster my-cluster.toml --json --no-write
    pipeplan solve --cluster A --schedule best
    pipeplan solve --cluster A --objective time-to-goal
    pipeplan solve --cluster A --schedule auto --batch 1024 --staleness none
    pipeplan solve --cluster A --fewest-workers 5%
    pipeplan solve profile.json --cluster A --minibatch auto
    pipeplan solve --cluster A --grid
    pipeplan solve profile.json --cluster A --epochs 90 --dataset-size 1281167
    pipeplan solve profile.json --cluster A --for megatron --accumulate 32
    """
    settings = settings_of(arguments)
    tolerance = None if fewest_workers is None else parse_share(fewest_workers, "--fewest-workers")
    gain = parse_share(asynchronous_gain, "--asynchronous-gain")
    size = RunSize(epochs, dataset_size, tokens_per_sample)
    if no_write and with_report:
        raise InputError("--report writes a page beside the plan: leave out --no-write")
    minibatch_size = _parse_minibatch(minibatch)
    source = read_profile(arguments["profile"], None if minibatch_size == AUTO else minibatch_size)
    size.check(source.profile, inference=arguments["inference"])
    if source.example:
        _refuse_to_write_example(with_report)
        no_write = True
    chosen_cluster = cluster(arguments["cluster_name"], servers=arguments["servers"], workers=arguments["workers"])
    fields = checked_option_fields(arguments | {"target_name": target_name})
    deadline = Deadline.after(settings.time_limit_s)
    with interrupts.remember_interrupt() as interrupted, solve_line() as report:
        built = build_problem(
            source.profile,
            chosen_cluster,
            minibatch=AUTO if minibatch_size == AUTO else None,
            batch=batch,
            staleness=staleness,
            target=target_name,
            server_order=server_order.lower(),
            asynchronous_gain=gain,
            objective=objective.lower(),
            maximum_cuts=settings.maximum_cuts,
            deadline=deadline,
            simplest=settings.simplest,
            simulate=settings.simulate,
            # After everything that may be mistyped, so that --force is not the first thing that a user has to add.
            before_search=lambda: None if no_write else plan_folder.refuse_to_overwrite_plan(output, force),
            **fields,
        )
        if built.synchrony is None:
            interrupted()  # an interrupted search may have chosen a schedule that is not the best
        with keep_disagreement(None if no_write else output):
            if tolerance is None:
                fewest = None
                outcome = solve(built.problem, settings, report=report, deadline=deadline, known=built.known)
            else:
                fewest = search_fewest_workers(built.problem, tolerance, settings, report=report, deadline=deadline)
                outcome = fewest.outcome
    outcome = replace(outcome, synchrony=built.synchrony, run_size=size)
    if built.targeted is not None:
        # Raises for what the trainer cannot express or cannot be written, before anything is written.
        files = built.targeted.files(outcome)
        if not no_write:
            refuse_to_overwrite_export(output / built.targeted.target.name, files, force)
    # Written before the table is printed, so that `| head`, which closes our output early, does not lose the plan.
    written_files = [] if no_write else _write(outcome, built.targeted, output, force)
    # Notes come after everything that may fail, because an error is to be the only line on standard error.
    _print_choices(source, built, fewest)
    if as_json:
        print_warning(built.problem.profile.provenance, as_json=True)
        print_json(plan_json.plan_document(outcome, None if no_write else output), ascii_only=True)
    else:
        print_warning(built.problem.profile.provenance)
        if source.example:
            print_line(_EXAMPLE_HEADING)
        print_answer(plan_table(outcome))
        if built.targeted is not None:
            print_line(built.targeted.cost(outcome, settings.maximum_cuts))
        for line in executor_lines(outcome.plan, outcome.evaluation, outcome.problem):
            print_line(line)
    for line in written_files:
        note(line)
    if source.example:
        note(_example_line(arguments))
    if with_report:
        note(_write_report(outcome, output))
    elif not no_write and built.targeted is None:
        note(_next_line(outcome, output))
    interrupted()  # the best plan so far is written, but the exit code stops scripts from going on with it


def _refuse_to_write_example(with_report: bool) -> None:
    """Raise an `InputError` if files are asked for by an option, and there is no profile to plan for."""
    source = click.get_current_context().get_parameter_source("output")
    if with_report or source is click.core.ParameterSource.COMMANDLINE:
        raise InputError(
            f"there is no profile.json here to write a plan for: name a profile, such as the bundled {EXAMPLE}, or "
            "measure one with pipeplan profile MODEL"
        )


def _example_line(arguments: Mapping[str, Any]) -> str:
    """The line that says how a plan is written."""
    cluster_name = shlex.quote(arguments["cluster_name"])
    return (
        f"nothing was written: this is an example. Name its profile to have its plan written, as in pipeplan solve "
        f"{EXAMPLE} --cluster {cluster_name}; measure a model of yours with pipeplan profile MODEL"
    )


def _write(outcome: Outcome, targeted: TargetedProblem | None, folder: Path, force: bool) -> list[str]:
    """Write the plan, and the files of the trainer that it is for. Returns the lines that say so."""
    plan_folder.write_plan(outcome, folder, force=force)
    exported = [] if targeted is None else write_exported(targeted, outcome, folder, force=force)
    return [written_lines(outcome, folder, fresh=() if targeted is None else (targeted.target.name,)), *exported]


BUSY_MACHINE = (
    "note: other programs used this machine while the executor's costs were measured: the prediction, which leaves "
    "them out, is less exact; a run's table states their share, and the next pipeplan profile measures again"
)


def _print_choices(source: ProfileSource, built: BuiltProblem, fewest: FewestWorkers | None) -> None:
    """Print the origin of the profile, and the schedules, minibatch sizes and numbers of workers that were tried."""
    note(source.text, dim=True)
    if warning := device_mismatch(built.problem.profile, built.problem.cluster):
        note(warning)
    if built.one_worker is not None:
        note(built.one_worker.text)
    if built.problem.cluster.executor.disturbed:
        note(BUSY_MACHINE)
    if built.problem.profile.lacks and built.problem.training:
        note(lacking_text(built.problem.profile.lacks))
    for line in job_notes(built.problem.profile.model_ref, built.problem.profile.model_file):
        note(f"note: {line}")
    if built.problem.profile.unchecked:
        note(unchecked_text(built.problem.profile.unchecked))
    for line in (*_held_lines(built.problem), *_batch_norm_lines(built.problem.profile, source.minibatch)):
        note(line)
    chosen = [*map(_choice_line, built.schedules), *map(_size_line, built.sizes), *_order_lines(built.orders)]
    for line in [
        *chosen,
        *([BY_ONE_SOLVER] if chosen else []),
        *([_fewest_line(fewest)] if fewest else []),
    ]:
        note(line, dim=True)


def _held_lines(problem: Problem) -> list[str]:
    """A line for each group of layers that keeps others in its stage, so that few places are left to cut."""
    profile, names = problem.profile, [layer.name for layer in problem.profile.layers]
    tied = () if problem.options.flushes else tuple(tie.layers for tie in profile.tied)
    lines = []
    for group in held_layers(names, edges(profile.tensors), (*profile.together, *tied)):
        if group.between:
            apart = f"; {APART}" if any(set(layers) <= set(group.group) for layers in tied) else ""
            lines.append(group.text() + apart)
    return lines


def _batch_norm_lines(profile: Profile, own: int) -> list[str]:
    """A line where the plan's minibatches are smaller than the profile's `own`, and the model has BatchNorm."""
    if profile.minibatch >= own or not profile.normalises_minibatches:
        return []
    return [f"BatchNorm normalises over {profile.minibatch} samples in this plan, where the profile's model has {own}"]


def _next_line(outcome: Outcome, folder: Path) -> str:
    """The line that names the next command: the run, if the plan is for this machine, and the report.

    A report on the previous plan may still be in the folder.
    """
    older = " (the report.html there is of an older plan)" if (folder / "report.html").exists() else ""
    profile = outcome.problem.profile
    measured = bool(profile.model_ref) and profile.provenance.kind in ("measured", "calibrated") and not profile.lacks
    runs = measured and outcome.problem.cluster.name == LOCAL and not outcome.plan.inference
    run = f"{shell_program(folder / 'launch.sh')} --epochs 1, or " if runs else ""
    return f"next: {run}pipeplan report {shell_path(folder)}{older}"


def _write_report(outcome: Outcome, folder: Path) -> str:
    """Write the report on a plan. Returns the line that says so."""
    from pipeplan.cli.inspecting.report import write_report  # imported late: commands without a report start faster

    return f"written: {write_report(folder, outcome.problem.profile)}"


def _parse_minibatch(text: str | None) -> int | Literal["auto"] | None:
    if text is None:
        return None
    if text == AUTO:
        return AUTO
    try:
        return int(text)
    except ValueError:
        raise InputError(f"--minibatch: expected a number of samples or auto, found {text!r}") from None


def _size_line(sized: MinibatchChoice) -> str:
    return f"  minibatch {sized.minibatch}: {_rate_text(sized.samples_per_s, sized.config, sized.in_time)}"


def _choice_line(choice: ScheduleChoice) -> str:
    per_update = f", {choice.problem.options.accumulate} minibatches" if choice.problem.options.accumulate else ""
    rate = _rate_text(None if choice.sample_s is None else 1 / choice.sample_s, choice.config, choice.in_time)
    note = f" ({choice.note})" if choice.note else ""
    extrapolated = EXTRAPOLATED if choice.extrapolated else ""
    return f"  {choice.schedule}{per_update} of {choice.minibatch}{extrapolated}: {rate}{note}"


def _order_lines(orders: Sequence[OrderChoice]) -> list[str]:
    """One line on the order of the servers; none where there was nothing to choose."""
    if not orders:
        return []
    best, number = orders[0], len(orders)
    tried = f"{number} orders of the servers were tried" if all(one.in_time for one in orders) else "time was short"
    listed = next(one for one in orders if one.order == tuple(sorted(one.order)))
    if best is listed or best.pace_s is None:
        return [f"  servers as listed ({tried})"]
    gain = "which has no plan" if listed.pace_s is None else f"{listed.pace_s / best.pace_s:.2f} x the pace"
    numbers = ", ".join(str(server) for server in best.order)
    return [f"  servers in the order {numbers} of the cluster file: {gain} of the listed order ({tried})"]


def _rate_text(samples_per_s: float | None, config: str, in_time: bool) -> str:
    if samples_per_s is None:
        return "nothing fits" if in_time else "no plan was found in time"
    return f"{show_pace(samples_per_s)} samples/s, {config}"


def _fewest_line(fewest: FewestWorkers) -> str:
    less = "" if fewest.fewer_s is None else f"; one fewer takes {show_time(fewest.fewer_s)}"
    best, best_s = fewest.best.plan, show_time(fewest.best.predicted_s)
    if best.busy <= fewest.workers:
        return f"the best plan has the fewest workers that are fast enough, {fewest.workers} ({best_s}){less}"
    return (
        f"{fewest.workers} workers come within {fewest.slower:.2%} of the best plan, {best.config} with {best.busy} "
        f"workers ({best_s}){less}"
    )
