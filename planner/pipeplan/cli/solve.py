"""`pipeplan solve`: find the best plan for a profile on a cluster, and write its plan folder.

`pipeplan solve --for TARGET`: the option, and the trainer's files that it writes beside the plan.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any, Literal

import click

from pipeplan.api import cluster
from pipeplan.cli.export import export_lines
from pipeplan.cli.options import complete_words, force_option, json_option, output_folder, quiet_option
from pipeplan.cli.output import note, print_answer, print_json, print_line, status
from pipeplan.cli.problem_options import ProfileSource, option_fields, problem_arguments, read_profile
from pipeplan.cli.solver_options import keep_disagreement, search_arguments, settings_of, written_lines
from pipeplan.cluster_data.devices import device_mismatch
from pipeplan.drawing.plan_table import plan_table
from pipeplan.errors import InputError
from pipeplan.exports import target
from pipeplan.exports import target as exports
from pipeplan.exports.solve_for import TargetedProblem
from pipeplan.exports.target import TARGET_NAMES
from pipeplan.from_options import AUTO, BuiltProblem, build_problem
from pipeplan.planning.choose_minibatch import MinibatchChoice
from pipeplan.planning.choose_schedule import ScheduleChoice
from pipeplan.planning.fewest_workers import FewestWorkers
from pipeplan.planning.fewest_workers import fewest_workers as search_fewest
from pipeplan.planning.solve import Outcome, solve
from pipeplan.rendering import plan_folder, plan_json
from pipeplan.util import interrupts
from pipeplan.util.units import show_pace, show_time

for_option = click.option(
    "--for",
    "target_name",
    metavar="TARGET",
    shell_complete=complete_words(*TARGET_NAMES),
    help=f"Plan for another trainer and write its files into the plan folder: {', '.join(TARGET_NAMES)}.",
)


def write_exported(aim: TargetedProblem, outcome: Outcome, folder: Path, *, force: bool) -> list[str]:
    """Write the trainer's files into the plan folder. Returns the lines that say so."""
    target_folder, files = folder / aim.to.name, aim.files(outcome)
    target.write_export(target_folder, files, force=force)
    return export_lines(aim.to, target_folder, files, (outcome.problem, outcome.plan))


@click.command("solve")
@problem_arguments("minibatch")
@search_arguments
@click.option(
    "--minibatch",
    metavar="N|auto",
    help="Plan for this minibatch size, interpolated or rescaled from the measured ones; auto: the best measured one.",
)
@for_option
@click.option("--batch", type=int, metavar="SAMPLES", help="Global batch size, for --schedule auto and --for.")
@click.option(
    "--staleness",
    metavar="NONE|BOUNDED|ANY",
    default="any",
    shell_complete=complete_words("none", "bounded", "any"),
    help="With --schedule auto: how stale weights may be.",
)
@click.option("--fewest-workers", metavar="5%", help="Use as few workers as come this close to the best pace.")
@output_folder(Path("plan"))
@force_option
@click.option("--report", "with_report", is_flag=True, help="Also write report.html, as `pipeplan report` does.")
@click.option("--no-write", is_flag=True, help="Print the answer without writing files.")
@json_option
@quiet_option
def command(
    batch: int | None,
    staleness: str,
    fewest_workers: str | None,
    minibatch: str | None,
    target_name: str | None,
    output: Path,
    force: bool,
    with_report: bool,
    no_write: bool,
    as_json: bool,
    **arguments: Any,
) -> None:
    """Find the best plan for a profile on a cluster, prove it, and write it to a folder.

    PROFILE defaults to ./profile.json, else to a bundled VGG-16 on V100.

    \b
    pipeplan solve --cluster B
    pipeplan solve profile.json --cluster local --workers 3
    pipeplan solve profile.json --cluster my-cluster.toml --json --no-write
    pipeplan solve --cluster A --schedule auto --batch 1024 --staleness none
    pipeplan solve --cluster A --fewest-workers 5%
    pipeplan solve profile.json --cluster A --minibatch auto
    pipeplan solve --cluster A --grid
    pipeplan solve profile.json --cluster A --for megatron --accumulate 32
    """
    settings = settings_of(arguments)
    within = None if fewest_workers is None else _share(fewest_workers)
    if not no_write:
        plan_folder.refuse_to_overwrite_plan(output, force)
    elif with_report:
        raise InputError("--report writes a page beside the plan: leave out --no-write")
    samples = _samples(minibatch)
    source = read_profile(arguments["profile"], None if samples == AUTO else samples)
    with interrupts.remember_interrupt() as interrupted, status(source.text):
        posed = build_problem(
            source.profile,
            cluster(arguments["cluster_name"], servers=arguments["servers"], workers=arguments["workers"]),
            minibatch=AUTO if samples == AUTO else None,
            batch=batch,
            staleness=staleness,
            target=target_name,
            maximum_cuts=settings.maximum_cuts,
            **option_fields(arguments | {"target_name": target_name}),
        )
        interrupted()  # an interrupted search may have chosen a schedule that is not the best
        with keep_disagreement(None if no_write else output):
            fewest = None if within is None else search_fewest(posed.problem, within, settings)
            outcome = solve(posed.problem, settings) if fewest is None else fewest.outcome
    if posed.aim is not None:
        # Raises for what the trainer cannot express or cannot be written, before anything is written.
        files = posed.aim.files(outcome)
        if not no_write:
            exports.refuse_to_overwrite_export(output / posed.aim.to.name, files, force)
    # Written before the table is printed, so that `| head`, which closes our output early, does not lose the plan.
    written_files = [] if no_write else _write(outcome, posed.aim, output, force)
    # Notes come after everything that may fail, because an error is to be the only line on standard error.
    _print_choices(source, posed, fewest)
    if as_json:
        print_json(plan_json.plan_document(outcome), ascii_only=True)
    else:
        print_answer(plan_table(outcome))
        if posed.aim is not None:
            print_line(posed.aim.cost(outcome, settings.maximum_cuts))
    for line in written_files:
        note(line)
    if with_report:
        note(_report(outcome, output))
    elif not no_write and posed.aim is None:
        note(_next(output))
    interrupted()  # the best plan so far is written, but the exit code stops scripts from going on with it


def _write(outcome: Outcome, aim: TargetedProblem | None, folder: Path, force: bool) -> list[str]:
    """Write the plan, and the files of the trainer that it is for. Returns the lines that say so."""
    plan_folder.write_plan(outcome, folder, force=force)
    exported = [] if aim is None else write_exported(aim, outcome, folder, force=force)
    return [written_lines(outcome, folder, fresh=() if aim is None else (aim.to.name,)), *exported]


def _print_choices(source: ProfileSource, posed: BuiltProblem, fewest: FewestWorkers | None) -> None:
    """Print the origin of the profile, and the schedules, minibatch sizes and numbers of workers that were tried."""
    note(source.text, dim=True)
    if warning := device_mismatch(posed.problem.profile, posed.problem.cluster):
        note(warning)
    for line in [*map(_choice, posed.schedules), *map(_size, posed.sizes), *([_fewest(fewest)] if fewest else [])]:
        note(line, dim=True)


def _next(folder: Path) -> str:
    """The line that names the next command. A report on the previous plan may still be in the folder."""
    older = " (the report.html there is of an older plan)" if (folder / "report.html").exists() else ""
    return f"next: pipeplan report {shlex.quote(str(folder))}{older}"


def _report(outcome: Outcome, folder: Path) -> str:
    """Write the report on a plan. Returns the line that says so."""
    from pipeplan.cli.report import write_report  # imported late: commands without a report start faster

    return f"written: {write_report(folder, outcome.problem.profile)}"


def _samples(text: str | None) -> int | Literal["auto"] | None:
    if text is None:
        return None
    if text == AUTO:
        return AUTO
    try:
        return int(text)
    except ValueError:
        raise InputError(f"--minibatch: expected a number of samples or auto, found {text!r}") from None


def _size(sized: MinibatchChoice) -> str:
    return f"  minibatch {sized.minibatch}: {_rate(sized.samples_per_s, sized.config)}"


def _choice(choice: ScheduleChoice) -> str:
    per_update = f", {choice.problem.options.accumulate} minibatches" if choice.problem.options.accumulate else ""
    rate = _rate(None if choice.sample_s is None else 1 / choice.sample_s, choice.config)
    return f"  {choice.schedule}{per_update} of {choice.minibatch}: {rate}"


def _rate(samples_per_s: float | None, config: str) -> str:
    return "nothing fits" if samples_per_s is None else f"{show_pace(samples_per_s)} samples/s, {config}"


def _share(text: str) -> float:
    """The share that `5%` or `0.05` stands for."""
    number = text.strip().removesuffix("%")
    try:
        share = float(number) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < 100:
        raise InputError(f"--fewest-workers: expected a share such as 5%, found {text!r}")
    return share


def _fewest(fewest: FewestWorkers) -> str:
    less = "" if fewest.fewer_s is None else f"; one fewer takes {show_time(fewest.fewer_s)}"
    return (
        f"{fewest.workers} workers come within {fewest.slower:.2%} of the best, {fewest.best.plan.config} on "
        f"{fewest.best.plan.busy} workers ({show_time(fewest.best.objective_s)}){less}"
    )
