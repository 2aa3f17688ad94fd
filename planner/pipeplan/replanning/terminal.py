"""The changes that `pipeplan replan` prints below the new plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from pipeplan.replanning.migration import BatchChange, WorkerChange
from pipeplan.replanning.replan import ReplanReport
from pipeplan.util.text import number_ranges, one_line
from pipeplan.util.units import show_size, show_step_time, show_time

MOST_COMMANDS = 16


def changes_table(report: ReplanReport) -> Iterator[RenderableType]:
    """Lines on the rest of the cluster and the change of throughput, and a table of the workers.

    The lines may be wrapped.
    """
    yield ""
    yield _left(report)
    yield _step_time(report)
    yield _workers(report)
    yield from _state(report)


def _left(report: ReplanReport) -> str:
    before, now = report.old.cluster, report.left.cluster
    counts = f"{now.servers} of {before.servers} servers and {now.workers} of {before.workers} workers"
    if report.lost:
        return one_line(f"Without {', '.join(report.lost)}: {counts} are left.")
    servers = f"{now.servers} server{'s' * (now.servers != 1)} instead of {before.servers}"
    return one_line(f"Another cluster, {now.name}: {servers}, {now.workers} workers instead of {before.workers}.")


def _step_time(report: ReplanReport) -> Text:
    old, outcome, (before, now) = report.old, report.outcome, report.samples_per_s
    workers = report.left.cluster.workers / old.cluster.workers
    return Text.assemble(
        f"Before {old.plan.config}, {show_time(old.step_time_s)} a minibatch, {show_step_time(before)} samples/s; now "
        f"{outcome.plan.config}, {show_time(outcome.predicted_s)}, {show_step_time(now)} samples/s: ",
        (f"{now / before:.0%} of the throughput", "bold"),
        f" on {workers:.0%} of the workers.",
    )


def _workers(report: ReplanReport) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("workers", "before", "server", "before", "stage", "before"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("takes over", overflow="fold")
    table.add_column("reads", justify="right", no_wrap=True)
    for _, group in groupby(report.moves.workers, _alike):
        workers = list(group)
        first = workers[0]
        table.add_row(
            number_ranges([worker.number for worker in workers]),
            "?" if first.was is None else number_ranges([worker.was for worker in workers if worker.was is not None]),
            str(first.server),
            str(report.left.servers[first.server]) if report.left.servers else "?",
            _stages(first.stages),
            "?" if first.was is None else _stages(first.stages_was),
            layer_span(first.taken),
            show_size(first.read_bytes),
        )
    return table


def _alike(worker: WorkerChange) -> tuple[object, ...]:
    """Consecutive workers share a row of the table if these properties are equal."""
    return worker.server, worker.stages, worker.stages_was, worker.taken, worker.was is None


def _stages(indices: Sequence[int]) -> str:
    return ", ".join(str(index + 1) for index in indices) or "-"


def layer_span(names: Sequence[str]) -> str:
    """The first and the last layer, and the number of layers, as text."""
    if not names:
        return "-"
    text = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)})"
    return one_line(text)


def _state(report: ReplanReport) -> list[str]:
    moved, count = report.moves, len(report.outcome.problem.profile.layers)
    state = "Weights" if report.outcome.plan.inference else "Weights and optimiser state"
    most_bytes, sum_of_all = max(worker.read_bytes for worker in moved.workers), moved.read_bytes
    changed = f"{moved.restaged} of {count} layers change their stage."
    lines = [
        f"{changed} {state} to read: {show_size(sum_of_all)} by all workers, {show_size(most_bytes)} at most by one."
    ]
    if moved.rebatched:
        lines.append(f"Batch: {'; '.join(_update(batch) for batch in moved.rebatched)} (linear rule).")
    return lines


def _update(batch: BatchChange) -> str:
    samples = f"{batch.samples} samples, before {batch.samples_was}"
    now = f"{batch.minibatches} minibatch{'es' * (batch.minibatches != 1)}"
    return (
        f"an update of {layer_span(batch.layers)} averages {now} instead of {batch.minibatches_was} ({samples}): "
        f"learning rate × {batch.rate:.3g}"
    )


def resume_lines(report: ReplanReport) -> Iterator[str]:
    """The checkpoint to resume from, and the commands that resume. Users copy these lines, so they are not wrapped."""
    commands, training = report.commands, not report.outcome.plan.inference
    for run in report.checkpoint.skipped if report.checkpoint else ():
        yield f"Left out: {one_line(run)} is a later run, and has no checkpoint."
    for text in report.checkpoint.damaged if report.checkpoint else ():
        yield f"Left out: {one_line(text)}."
    if report.checkpoint is not None:
        yield f"Last checkpoint: {one_line(report.checkpoint.folder)}, {report.checkpoint.text}."
    elif training:
        yield f"No complete checkpoint in {one_line(report.old.folder / 'runs')}: training can only start anew."
    if not commands:
        return
    yield f"{'Go on' if report.checkpoint else 'Start'} with{_where(report)}"
    for command in commands[:MOST_COMMANDS]:
        yield f"  {command.text}"
    if len(commands) > MOST_COMMANDS:
        yield f"  … and so on to NODE_RANK={len(commands) - 1}"
    if report.checkpoint is not None:
        yield "and the other options of the old run, such as --epochs."


def _where(report: ReplanReport) -> str:
    servers = report.left.servers
    if len(report.commands) == 1:
        return f", on server {servers[0]} of before:" if servers and report.old.cluster.servers > 1 else ":"
    was = f" (server {servers[0]} of before)" if servers else ""
    return f", one on each server, MASTER_ADDR and MASTER_PORT being those of server 0{was}:"
