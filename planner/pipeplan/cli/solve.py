"""`pipeplan solve`: from a profile and a cluster to a plan folder."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import click
from rich.console import Console
from rich.markup import escape

from pipeplan import interrupts
from pipeplan.api import cluster
from pipeplan.auto import Choice
from pipeplan.cli.answer import disagreement_in, search_arguments, settings_of, written
from pipeplan.cli.given import problem_arguments, read_profile, words_of
from pipeplan.cli.options import force_option, json_option, output_folder, quiet_option, words
from pipeplan.cli.solve_for import for_option
from pipeplan.cli.solve_for import write as write_for
from pipeplan.errors import InputError
from pipeplan.exports import written as exports
from pipeplan.fewest import Fewest
from pipeplan.fewest import fewest_workers as search_fewest
from pipeplan.hardware import mismatch
from pipeplan.posing import AUTO, pose
from pipeplan.rendering import documents, plan_folder
from pipeplan.show import show
from pipeplan.sized import Sized
from pipeplan.solving import Outcome, solve
from pipeplan.units import show_pace, show_time


@click.command("solve")
@problem_arguments("minibatch")
@search_arguments
@click.option(
    "--minibatch",
    metavar="N|auto",
    help="Another minibatch size: as measured, between measured ones, or in proportion; auto: the best measured one.",
)
@for_option
@click.option("--batch", type=int, metavar="SAMPLES", help="Global batch, for --schedule auto and --for.")
@click.option(
    "--staleness",
    metavar="NONE|BOUNDED|ANY",
    default="any",
    shell_complete=words("none", "bounded", "any"),
    help="With --schedule auto: how old weights may be.",
)
@click.option("--fewest-workers", metavar="5%", help="Use as few workers as come so close to the best.")
@output_folder(Path("plan"))
@force_option
@click.option("--report", "with_report", is_flag=True, help="Also write report.html, as `pipeplan report` does.")
@click.option("--no-write", is_flag=True, help="Print the answer only.")
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
    **given: Any,
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
    settings = settings_of(given)
    within = None if fewest_workers is None else _share(fewest_workers)
    if not no_write:
        plan_folder.refuse_to_overwrite(output, force)
    elif with_report:
        raise InputError("--report goes beside a plan that is written: leave out --no-write")
    notes = Console(stderr=True, highlight=False)
    samples = _samples(minibatch)
    source = read_profile(given["profile"], None if samples == AUTO else samples)
    with interrupts.noted() as interrupted, _waiting(source.text, notes):
        posed = pose(
            source.profile,
            cluster(given["cluster_name"], servers=given["servers"], workers=given["workers"]),
            minibatch=AUTO if samples == AUTO else None,
            batch=batch,
            staleness=staleness,
            target=target_name,
            maximum_cuts=settings.maximum_cuts,
            **words_of(given | {"target_name": target_name}),
        )
        interrupted()  # what was chosen then need not be the best
        problem, aim = posed.problem, posed.aim
        with disagreement_in(None if no_write else output):
            fewest = None if within is None else search_fewest(problem, within, settings)
            outcome = solve(problem, settings) if fewest is None else fewest.outcome
    if aim is not None:
        # What it cannot express, or cannot be written, is said before anything is written.
        files = aim.files(outcome)
        if not no_write:
            exports.refuse_to_overwrite(output / aim.to.name, files, force)
    if not no_write:
        # Before the table: whoever closes our output early, as `| head` does, still has the plan.
        plan_folder.write_plan(outcome, output, force=force)
    exported = [] if no_write or aim is None else write_for(aim, outcome, output, force=force)
    # What goes wrong is one line: these come when nothing does.
    notes.print(source.text, style="dim", markup=False, soft_wrap=True)
    if note := mismatch(problem.profile, problem.cluster):
        notes.print(note, markup=False, soft_wrap=True)
    for remark in [*map(_choice, posed.schedules), *map(_size, posed.sizes), *([_fewest(fewest)] if fewest else [])]:
        notes.print(remark, style="dim", markup=False, soft_wrap=True)
    if as_json:
        click.echo(json.dumps(documents.plan_document(outcome), indent=1, allow_nan=False))
    else:
        show(outcome, Console(highlight=False, markup=False))
        if aim is not None:
            click.echo(aim.cost(outcome, settings.maximum_cuts))
    if not no_write:
        for line in [written(outcome, output, fresh=() if aim is None else (aim.to.name,)), *exported]:
            notes.print(line, markup=False, soft_wrap=True)
        if with_report:
            notes.print(_report(outcome, output), markup=False, soft_wrap=True)
        elif not exported:
            notes.print(_next(output), markup=False, soft_wrap=True)
    interrupted()  # the best so far is there, and no script is to go on with it


@contextmanager
def _waiting(text: str, notes: Console) -> Iterator[None]:
    """While it is solved, what is solved, if someone looks at it."""
    with notes.status(escape(text)) if notes.is_terminal else nullcontext():
        yield


def _next(folder: Path) -> str:
    """The line that says how to see more of a plan; a report of the plan before it may still be there."""
    older = " (the report.html there is of an older plan)" if (folder / "report.html").exists() else ""
    return f"next: pipeplan report {shlex.quote(str(folder))}{older}"


def _report(outcome: Outcome, folder: Path) -> str:
    """Write the report on a plan, and the line that says so."""
    from pipeplan.cli.report import write  # what draws is not to keep the others waiting

    return f"written: {write(folder, outcome.problem.profile)}"


def _samples(text: str | None) -> int | Literal["auto"] | None:
    if text is None:
        return None
    if text == AUTO:
        return AUTO
    try:
        return int(text)
    except ValueError:
        raise InputError(f"--minibatch: expected a number of samples or auto, found {text!r}") from None


def _size(sized: Sized) -> str:
    return f"  minibatch {sized.minibatch}: {_rate(sized.samples_per_s, sized.config)}"


def _choice(choice: Choice) -> str:
    per_update = f", {choice.problem.options.accumulate} minibatches" if choice.problem.options.accumulate else ""
    rate = _rate(None if choice.sample_s is None else 1 / choice.sample_s, choice.config)
    return f"  {choice.schedule}{per_update} of {choice.minibatch}: {rate}"


def _rate(samples_per_s: float | None, config: str) -> str:
    return "nothing fits" if samples_per_s is None else f"{show_pace(samples_per_s)} samples/s, {config}"


def _share(text: str) -> float:
    """`5%` or `0.05`."""
    number = text.strip().removesuffix("%")
    try:
        share = float(number) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < 100:
        raise InputError(f"--fewest-workers: expected a share such as 5%, found {text!r}")
    return share


def _fewest(found: Fewest) -> str:
    less = "" if found.fewer_s is None else f"; one fewer takes {show_time(found.fewer_s)}"
    return (
        f"{found.workers} workers come within {found.slower:.2%} of the best, {found.best.plan.config} on "
        f"{found.best.plan.busy} workers ({show_time(found.best.objective_s)}){less}"
    )
