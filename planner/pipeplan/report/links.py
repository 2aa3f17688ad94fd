"""What is sent over every link: boundaries, all-reduces, and the network cards that they share."""

from __future__ import annotations

from collections.abc import Mapping

from pipeplan.cluster_data.links import Links
from pipeplan.cost import contention
from pipeplan.plan.schedules import ACCUMULATING
from pipeplan.report.document import Link
from pipeplan.report.source import Source
from pipeplan.report.timeline import Simulated

MOST = 200
"""Links that are listed, the busiest first."""


def links(source: Source, simulated: Simulated, measured: Mapping[int, float]) -> list[Link]:
    """All links that carry anything, busiest first. `measured`: how busy all-reduces were in a run, by stage."""
    found = [*_boundaries(source, simulated), *_allreduces(source, simulated, measured), *_cards(source)]
    return sorted((one for one in found if one.bytes_per_minibatch > 0), key=lambda one: -one.busy)


def _boundaries(source: Source, simulated: Simulated) -> list[Link]:
    """Each direction between two stages, of every copy of the pipeline: bytes of an average minibatch of the whole."""
    found = []
    busy = simulated.measured.links
    for index, hops in enumerate(source.scenario.hops):
        said = source.predictions[index]
        for copy, hop in enumerate(hops, start=1):
            for there, size in (
                (True, said["send_bytes"].integer()),
                (False, said["receive_gradient_bytes"].integer()),
            ):
                ends = (index + 1, index + 2) if there else (index + 2, index + 1)
                name = "stage {} → {}".format(*ends) + (f", copy {copy}" if len(hops) > 1 else "")
                rows = [share for row, share in busy.items() if row == name or row.startswith(f"{name}, link ")]
                found.append(
                    Link(
                        name=name,
                        kind="boundary",
                        rate=hop.bandwidth * hop.links,
                        bytes_per_minibatch=size / len(hops),
                        busy=sum(rows) / hop.links,
                        simulated=True,
                    )
                )
    return found


def _allreduces(source: Source, simulated: Simulated, measured: Mapping[int, float]) -> list[Link]:
    """The rings of the stages: bytes over each hop of the ring, 2 (r-1)/r of the gradients for every group."""
    if source.plan.inference:
        return []
    rates, found = Links.of(source.cluster), []
    for index, stage in enumerate(source.plan.stages):
        if stage.replicas == 1:
            continue
        name = f"all-reduce of stage {index + 1}"
        group = (source.plan.accumulate or 1) if source.plan.schedule in ACCUMULATING else stage.replicas
        size = source.predictions[index]["parameter_bytes"].integer()
        found.append(
            Link(
                name=name,
                kind="all-reduce",
                rate=rates.allreduce_among(stage.workers)[0],
                bytes_per_minibatch=2 * (stage.replicas - 1) / stage.replicas * size / group,
                busy=simulated.measured.links.get(name, 0.0),
                simulated=True,
                measured_busy=measured.get(index),
            )
        )
    return found


def _cards(source: Source) -> list[Link]:
    """The cards of servers and what is above them, each direction: what crosses them, over the pace."""
    if source.known is None or not source.known.problem.options.contention:
        return []
    rates = Links.of(source.cluster)
    cards = contention.card_loads(source.plan, source.known.problem, rates)
    found = []
    for level in range(source.cluster.server_level, len(cards.busy_s)):
        starts = source.cluster.starts(level)
        for direction, way in ((contention.OUTGOING, "outgoing"), (contention.INCOMING, "incoming")):
            for component, seconds in enumerate(cards.busy_s[level][direction]):
                rate = rates.card(level, starts[component])[0]
                found.append(
                    Link(
                        name=f"network card of {source.cluster.levels[level - 1].name} {component}, {way}",
                        kind="card",
                        rate=rate,
                        bytes_per_minibatch=float(seconds) * rate,
                        busy=float(seconds) / source.pace_s,
                        simulated=False,
                    )
                )
    return found
