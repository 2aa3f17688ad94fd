"""Traffic over every link: stage boundaries, all-reduces, and the network cards that they share."""

from __future__ import annotations

from collections.abc import Mapping

from pipeplan.cluster_data.links import Links
from pipeplan.cost import contention
from pipeplan.plan.schedules import ACCUMULATING
from pipeplan.report.document import LinkTraffic
from pipeplan.report.source import ReportSource
from pipeplan.report.timeline import ReportSimulation

MAX_LINKS = 200
"""Most links that are listed, the busiest first."""


def link_rows(source: ReportSource, simulated: ReportSimulation, measured: Mapping[int, float]) -> list[LinkTraffic]:
    """All links with traffic, busiest first.

    `measured` is the share of time in which all-reduces ran, by stage of a run.
    """
    rows = [*_boundaries(source, simulated), *_allreduces(source, simulated, measured), *_cards(source)]
    return sorted((row for row in rows if row.bytes_per_minibatch > 0), key=lambda row: -row.busy)


def _boundaries(source: ReportSource, simulated: ReportSimulation) -> list[LinkTraffic]:
    """Both directions of every stage boundary, for every copy of the pipeline.

    The bytes are averages over all minibatches, each of which takes one of the copies.
    """
    boundaries = []
    busy = simulated.measured.links
    for index, hops in enumerate(source.scenario.hops):
        if source.plan.stages[index].workers == source.plan.stages[index + 1].workers:
            continue  # stages of one worker hand tensors over
        stage = source.predictions[index]
        for copy, hop in enumerate(hops, start=1):
            for sender, receiver, size in (
                (index + 1, index + 2, stage["send_bytes"].integer()),
                (index + 2, index + 1, stage["receive_gradient_bytes"].integer()),
            ):
                name = f"stage {sender} → {receiver}" + (f", copy {copy}" if len(hops) > 1 else "")
                shares = [share for row, share in busy.items() if row == name or row.startswith(f"{name}, link ")]
                boundaries.append(
                    LinkTraffic(
                        name=name,
                        kind="boundary",
                        rate=hop.bandwidth * hop.links,
                        bytes_per_minibatch=size / len(hops),
                        busy=sum(shares) / hop.links,
                        simulated=True,
                    )
                )
    return boundaries


def _allreduces(source: ReportSource, simulated: ReportSimulation, measured: Mapping[int, float]) -> list[LinkTraffic]:
    """The all-reduces of replicated stages.

    In a ring of r replicas, 2 (r-1)/r of the gradient bytes cross each hop for every group of minibatches.
    """
    if source.plan.inference:
        return []
    rates, allreduces = Links.of(source.cluster), []
    for index, stage in enumerate(source.plan.stages):
        if stage.replicas == 1:
            continue
        name = f"all-reduce of stage {index + 1}"
        group = (source.plan.accumulate or 1) if source.plan.schedule in ACCUMULATING else stage.replicas
        size = source.predictions[index]["parameter_bytes"].integer()
        allreduces.append(
            LinkTraffic(
                name=name,
                kind="all-reduce",
                rate=rates.allreduce_among(stage.workers)[0],
                bytes_per_minibatch=2 * (stage.replicas - 1) / stage.replicas * size / group,
                busy=simulated.measured.links.get(name, 0.0),
                simulated=True,
                measured_busy=measured.get(index),
            )
        )
    return allreduces


def _cards(source: ReportSource) -> list[LinkTraffic]:
    """Both directions of the network cards of servers and higher levels. `busy` is the load divided by the pace."""
    if source.known is None or not source.known.problem.options.contention:
        return []
    rates = Links.of(source.cluster)
    loads = contention.card_loads(source.plan, source.known.problem, rates)
    cards = []
    for level in range(source.cluster.server_level, len(loads.busy_s)):
        starts = source.cluster.starts(level)
        for direction, way in ((contention.OUTGOING, "outgoing"), (contention.INCOMING, "incoming")):
            for component, seconds in enumerate(loads.busy_s[level][direction]):
                rate = rates.card(level, starts[component])[0]
                cards.append(
                    LinkTraffic(
                        name=f"network card of {source.cluster.levels[level - 1].name} {component}, {way}",
                        kind="card",
                        rate=rate,
                        bytes_per_minibatch=float(seconds) * rate,
                        busy=float(seconds) / source.pace_s,
                        simulated=False,
                    )
                )
    return cards
