"""The table of loads: how long a microbatch keeps each resource busy, and the bytes that cross each link."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pipeplan.cluster_data.links import Links
from pipeplan.cost import contention
from pipeplan.explanation.time_breakdown import resource_loads, stage_loads
from pipeplan.plan.updates import minibatches_of_update
from pipeplan.report.document import LoadRow
from pipeplan.report.source import ReportSource
from pipeplan.report.timeline import ReportSimulation

FILL_AND_DRAIN = "filling and draining the pipeline"
"""A value of `bound_by` for two parts of a batch: the first microbatch's passes and its transfers."""
MAX_LOADS = 100
"""Largest number of loads that are listed."""


_Traffic = dict[str, float | None]
"""The traffic over a link or a network card, by the names of the fields of `LoadRow`."""


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
        traffic[name] = {"rate": rate, "bytes_per_minibatch": busy_s * rate}
    rows = [
        LoadRow(
            name=name,
            seconds=busy_s,
            share=busy_s / step_s,
            binds=_binds(name, bound),
            part=name in parts,
            **traffic.get(name, {}),
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


def _boundaries(source: ReportSource, simulated: ReportSimulation) -> Iterator[tuple[str, _Traffic]]:
    """The traffic over every stage boundary, in both directions and all copies of the pipeline together.

    A boundary is as busy as its busiest direction in any copy.
    """
    shares = simulated.report.links
    for index, hops in enumerate(source.scenario.hops):
        if source.plan.stages[index].workers == source.plan.stages[index + 1].workers:
            continue  # stages on the same worker pass tensors directly
        stage, busy = source.stated.prediction.stages[index], 0.0
        for copy, hop in enumerate(hops, start=1):
            for direction in (f"stage {index + 1} → {index + 2}", f"stage {index + 2} → {index + 1}"):
                name = direction + (f", copy {copy}" if len(hops) > 1 else "")
                own = [share for row, share in shares.items() if row == name or row.startswith(f"{name}, link ")]
                busy = max(busy, sum(own) / hop.links)
        rate, size = hops[0].bandwidth * hops[0].links, stage.send_bytes + stage.receive_gradient_bytes
        traffic: _Traffic = {"rate": rate, "bytes_per_minibatch": size, "simulated_busy": busy}
        yield f"traffic from stage {index + 1} to stage {index + 2}", traffic


def _allreduces(
    source: ReportSource, simulated: ReportSimulation, measured: Mapping[int, float]
) -> Iterator[tuple[str, _Traffic]]:
    """The traffic of the all-reduces of replicated stages.

    In a ring of r replicas, 2 (r-1)/r of the gradient bytes cross each hop for every group of minibatches.
    """
    rates = Links.of(source.problem.cluster)
    for index, stage in enumerate(source.plan.stages):
        if stage.replicas == 1 or source.plan.inference:
            continue
        size = 2 * (stage.replicas - 1) / stage.replicas * source.stated.prediction.stages[index].parameter_bytes
        traffic = {
            "rate": rates.allreduce_among(stage.workers)[0],
            "bytes_per_minibatch": size / minibatches_of_update(source.plan, index),
            "simulated_busy": simulated.report.links.get(f"all-reduce of stage {index + 1}", 0.0),
            "measured_busy": measured.get(index),
        }
        yield f"gradient synchronisation of stage {index + 1}", traffic


def _cards(source: ReportSource) -> Iterator[tuple[str, float, float]]:
    """Name, seconds and rate of both directions of the network cards of servers and higher levels."""
    if not source.problem.options.contention:
        return
    rates = Links.of(source.problem.cluster)
    loads = contention.card_loads(source.plan, source.problem, rates)
    for level in range(source.problem.cluster.server_level, len(loads.busy_s)):
        starts, kind = source.problem.cluster.starts(level), source.problem.cluster.levels[level - 1].name
        for direction, way in ((contention.OUTGOING, "outgoing"), (contention.INCOMING, "incoming")):
            for component, seconds in enumerate(loads.busy_s[level][direction]):
                rate = rates.card(level, starts[component])[0]
                yield f"network card of {kind} {component}, {way}", float(seconds), rate
