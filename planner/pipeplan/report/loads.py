"""The loads of a plan in one table: how long a microbatch keeps each resource busy, and the bytes that cross each
link."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pipeplan.cluster_data.links import Links
from pipeplan.cost import contention
from pipeplan.explanation.time_breakdown import resource_loads, stage_loads
from pipeplan.plan.schedules import ACCUMULATING
from pipeplan.report.document import LoadRow
from pipeplan.report.source import ReportSource
from pipeplan.report.timeline import ReportSimulation

FILL_AND_DRAIN = "filling and draining the pipeline"
"""A name in `bound_by` that covers two parts of a batch: the first microbatch's passes and its transfers."""
MAX_LOADS = 100
"""Largest number of loads that are listed."""


@dataclass(frozen=True)
class _Traffic:
    """The traffic over a link or a network card."""

    rate: float
    bytes_per_minibatch: float
    simulated_busy: float | None = None
    measured_busy: float | None = None


def load_rows(source: ReportSource, simulated: ReportSimulation, measured: Mapping[int, float]) -> list[LoadRow]:
    """All resources, the longest busy first. For a schedule with a flush, the parts of a batch come before them.

    `measured` is the share of time in which all-reduces ran, by stage of a run.
    """
    bound, step_s = source.bound, source.step_time_s
    seconds = dict(resource_loads(source.plan, source.problem, source.score))
    parts = set() if source.score.batch is None else set(seconds)
    if parts:
        seconds |= dict(stage_loads(source.plan, source.score))
    traffic = dict([*_boundaries(source, simulated), *_allreduces(source, simulated, measured)])
    for name, busy_s, rate in _cards(source):
        seconds.setdefault(name, busy_s)
        traffic[name] = _Traffic(rate, busy_s * rate)
    rows = [
        LoadRow(
            name=name,
            seconds=busy_s,
            share=busy_s / step_s,
            binds=_binds(name, bound),
            part=name in parts,
            **(vars(traffic[name]) if name in traffic else {}),
        )
        for name, busy_s in seconds.items()
        if busy_s > 0
    ]
    return sorted(rows, key=lambda row: (not row.part, -row.seconds, not row.binds))[:MAX_LOADS]


def _binds(name: str, bound: str) -> bool:
    """Whether a resource, or a part of a batch, is the bound that plan.json names."""
    if bound == FILL_AND_DRAIN:
        return name.endswith(": filling and draining") or name == "its transfers"
    if name == "the first microbatch's passes":  # the name for a plan of one stage, which has no pipeline to fill
        return bound != "gradient synchronisation"
    return name == bound or (name.startswith(f"{bound}, microbatches ") or name == f"{bound} that is waited for")


def _group(source: ReportSource, index: int) -> int:
    """Number of minibatches of the whole pipeline for each all-reduce of a stage."""
    if source.plan.schedule in ACCUMULATING:
        return source.plan.accumulate or 1
    return source.plan.stages[index].replicas


def _boundaries(source: ReportSource, simulated: ReportSimulation) -> Iterator[tuple[str, _Traffic]]:
    """The traffic over every stage boundary, in both directions and all copies of the pipeline together.

    A boundary is as busy as its busiest direction in any copy.
    """
    shares = simulated.report.links
    for index, hops in enumerate(source.scenario.hops):
        if source.plan.stages[index].workers == source.plan.stages[index + 1].workers:
            continue  # stages on the same worker pass tensors directly
        stage, busy = source.predictions[index], 0.0
        for copy, hop in enumerate(hops, start=1):
            for direction in (f"stage {index + 1} → {index + 2}", f"stage {index + 2} → {index + 1}"):
                name = direction + (f", copy {copy}" if len(hops) > 1 else "")
                own = [share for row, share in shares.items() if row == name or row.startswith(f"{name}, link ")]
                busy = max(busy, sum(own) / hop.links)
        yield (
            f"traffic from stage {index + 1} to stage {index + 2}",
            _Traffic(hops[0].bandwidth * hops[0].links, stage.send_bytes + stage.receive_gradient_bytes, busy),
        )


def _allreduces(
    source: ReportSource, simulated: ReportSimulation, measured: Mapping[int, float]
) -> Iterator[tuple[str, _Traffic]]:
    """The traffic of the all-reduces of replicated stages.

    In a ring of r replicas, 2 (r-1)/r of the gradient bytes cross each hop for every group of minibatches.
    """
    rates = Links.of(source.cluster)
    for index, stage in enumerate(source.plan.stages):
        if stage.replicas == 1 or source.plan.inference:
            continue
        size = 2 * (stage.replicas - 1) / stage.replicas * source.predictions[index].parameter_bytes
        yield (
            f"gradient synchronisation of stage {index + 1}",
            _Traffic(
                rates.allreduce_among(stage.workers)[0],
                size / _group(source, index),
                simulated.report.links.get(f"all-reduce of stage {index + 1}", 0.0),
                measured.get(index),
            ),
        )


def _cards(source: ReportSource) -> Iterator[tuple[str, float, float]]:
    """Name, seconds and rate of both directions of the network cards of servers and higher levels."""
    if not source.problem.options.contention:
        return
    rates = Links.of(source.cluster)
    loads = contention.card_loads(source.plan, source.problem, rates)
    for level in range(source.cluster.server_level, len(loads.busy_s)):
        starts, kind = source.cluster.starts(level), source.cluster.levels[level - 1].name
        for direction, way in ((contention.OUTGOING, "outgoing"), (contention.INCOMING, "incoming")):
            for component, seconds in enumerate(loads.busy_s[level][direction]):
                rate = rates.card(level, starts[component])[0]
                yield f"network card of {kind} {component}, {way}", float(seconds), rate
