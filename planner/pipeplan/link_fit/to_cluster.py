"""A cluster from link measurements.

The bandwidth of a level is the rate of one component's link. It is the largest of three measured rates: all workers of
a component together, one pair, and an all-reduce. The efficiency of messages is the rate of one pair divided by this
bandwidth. The efficiency of all-reduces is their rate by the ring formula divided by this bandwidth. The latency is the
latency of messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeplan.cluster_data.cluster import Cluster, Device, Level, Server
from pipeplan.link_fit.alpha_beta import MESSAGE, RING, TOGETHER, AlphaBetaFit, LinkSeries, fit_cards, fit_series
from pipeplan.link_fit.find_levels import Nesting
from pipeplan.util.units import show_rate, show_size

DIFFERENT = 1.5
"""Ratio of rates at which servers count as different, for the links inside servers or for their cards."""
SMALLEST_EFFICIENCY = 1e-3


@dataclass(frozen=True)
class MeasuredLink:
    """The measurements of one level, or of one server's part of it."""

    bandwidth: float
    """Rate of a component's link, in bytes/s."""
    message: AlphaBetaFit
    ring: AlphaBetaFit
    series: tuple[LinkSeries, ...]

    @property
    def latency_s(self) -> float:
        """Latency of a message, in seconds."""
        return float(f"{self.message.latency_s:.3g}")

    def level(self, name: str, count: int, source: str) -> Level:
        """The level with the efficiencies of a ring and of a single pair of workers."""
        ring, pair = (_share(fit.bandwidth / self.bandwidth) for fit in (self.ring, self.message))
        return Level(name, count, self.bandwidth, self.latency_s, ring, pair, source=source)


@dataclass(frozen=True)
class ClusterFromLinks:
    """The cluster, with the measurements behind it."""

    cluster: Cluster
    links: tuple[MeasuredLink | None, ...]
    """Measurements by level; None for a level of a single component."""
    notes: tuple[str, ...]


def build_cluster(
    name: str, nesting: Nesting, series: Sequence[LinkSeries], devices: Sequence[Device], when: str
) -> ClusterFromLinks:
    """The cluster of workers 0 … D-1 with these devices. The source of every level includes the date `when`."""
    links = [_link(series, nesting, number) for number in range(len(nesting.partitions))]
    levels: list[Level] = []
    for number, link in enumerate(links):
        if link is None:
            levels.append(Level(nesting.names[number], 1, 0.0))
            continue
        count = len(nesting.below(number)) // len(nesting.partitions[number])
        fitted = link.level(nesting.names[number], count, _source(link, when))
        # A message between components also passes the links inside, so its latency is at least theirs.
        levels.append(replace(fitted, latency_s=max([fitted.latency_s, *(level.latency_s for level in levels)])))
    notes = list(nesting.notes)
    machines = _servers(nesting, series, devices, levels, notes) if len(nesting.partitions[nesting.server]) > 1 else []
    if machines:
        above = levels[nesting.server + 1 :]
        cluster = Cluster.of_servers(name, machines, [_carded(above[0], machines), *above[1:]])
    elif len(levels) == 1:
        cluster = Cluster.of_devices(name, devices, levels[0])
    else:
        cluster = Cluster(name, _least(devices), tuple(levels))
    return ClusterFromLinks(cluster, tuple(links), tuple(notes))


def _link(
    series: Sequence[LinkSeries], nesting: Nesting, level: int, within: Sequence[int] | None = None
) -> MeasuredLink | None:
    """The measurements of one level, or only the measurements among some workers."""
    workers = None if within is None else set(within)
    selected = [
        measured
        for measured in series
        if measured.level == level and (workers is None or workers.issuperset(measured.ranks))
    ]
    messages, rings = ([measured for measured in selected if measured.kind == kind] for kind in (MESSAGE, RING))
    if not messages or not rings:
        return None
    message = fit_series(messages)
    # All-reduces are predicted with the latency of messages, so their bandwidth is fitted with that latency.
    ring = fit_series(rings, message.latency_s)
    # Workers inside a server share no card. So the rate of all pairs at once says nothing about one worker's link.
    together = fit_cards(selected, nesting, level).values() if len(nesting.below(level)[0]) > 1 else ()
    carried = max((fit.bandwidth for fit in together), default=0.0)
    return MeasuredLink(_rounded(max(message.bandwidth, ring.bandwidth, carried)), message, ring, tuple(selected))


def _servers(
    nesting: Nesting, series: Sequence[LinkSeries], devices: Sequence[Device], levels: list[Level], notes: list[str]
) -> list[Server]:
    """The list of servers if they differ, else an empty list."""
    servers, server_level = nesting.partitions[nesting.server], nesting.server
    device_of = [_least([devices[rank] for rank in ranks]) for ranks in servers]
    sizes = [len(ranks) for ranks in servers]
    # A server with islands has several levels inside, which cannot differ between servers.
    inside_links = [_link(series, nesting, server_level, ranks) if server_level == 0 else None for ranks in servers]
    card_rates = _cards_of(nesting, series, server_level + 1)
    inside = [link.message.bandwidth for link in inside_links if link] or [1.0]
    if len(set(sizes)) == 1 and len(set(device_of)) == 1 and max(_spread(inside), _spread(card_rates)) < DIFFERENT:
        return []
    if server_level > 0:
        notes.append(
            "servers differ, and a cluster file cannot describe islands inside them: the slowest server stands for all"
        )
        return []
    slowest = min(card_rates)
    machines = []
    for device, size, link, card in zip(_named(device_of), sizes, inside_links, card_rates, strict=True):
        source = levels[server_level].source
        level = link.level("server", size, source) if link else Level("server", size, 0.0)
        machines.append(Server(device, level, _rounded(card) if card > DIFFERENT * slowest else _rounded(slowest)))
    return machines


def _cards_of(nesting: Nesting, series: Sequence[LinkSeries], level: int) -> list[float]:
    """For every component that a level joins, the best measured rate of its link to any other component."""
    home = {rank: number for number, ranks in enumerate(nesting.below(level)) for rank in ranks}
    reached = {pair: fit.bandwidth for pair, fit in fit_cards(series, nesting, level).items()}
    for measured in series:
        if (measured.kind, measured.level) == (MESSAGE, level):
            first, last = sorted(home[rank] for rank in measured.ranks)
            reached[first, last] = max(reached.get((first, last), 0.0), fit_series([measured]).bandwidth)
    best = [0.0] * len(nesting.below(level))
    for pair, bandwidth in reached.items():
        for number in pair:
            best[number] = max(best[number], bandwidth)
    return best


def _carded(level: Level, machines: Sequence[Server]) -> Level:
    """The level above servers that have their own cards. The level's efficiencies are those of the slowest card."""
    slowest, fastest = (choose(machine.card for machine in machines) for choose in (min, max))
    lift = max(1.0, level.bandwidth / slowest)
    return replace(
        level,
        bandwidth=fastest,
        sendrecv_efficiency=_share(level.sendrecv_efficiency * lift),
        allreduce_efficiency=_share(level.allreduce_efficiency * lift),
    )


def _least(devices: Sequence[Device]) -> Device:
    """A device with the smallest memory and the smallest speed among several similar devices."""
    memory, speed = min(device.memory_bytes for device in devices), min(device.speed for device in devices)
    return replace(devices[0], memory_bytes=memory, speed=speed)


def _named(devices: Sequence[Device]) -> list[Device]:
    """Rename devices so that different devices have different names, by which a cluster file refers to them."""
    kinds = list(dict.fromkeys(devices))
    renamed = {}
    for kind in kinds:
        namesakes = [other for other in kinds if other.name == kind.name]
        renamed[kind] = replace(kind, name=f"{kind.name} #{namesakes.index(kind) + 1}") if len(namesakes) > 1 else kind
    return [renamed[device] for device in devices]


def _source(link: MeasuredLink, when: str) -> str:
    """The measurements in one line."""
    sizes = [size for series in link.series for size, _ in series.samples]
    ways_of = {
        kind: " and ".join(dict.fromkeys(series.way for series in link.series if series.kind == kind))
        for kind in (MESSAGE, RING)
    }
    groups = sorted({len(series.ranks) for series in link.series if series.kind == RING})
    among = " and ".join(map(str, groups))
    text = (
        f"measured {when}, {show_size(min(sizes))} to {show_size(max(sizes))}: "
        f"messages both ways through {ways_of[MESSAGE]} {show_rate(link.message.bandwidth)} "
        f"({_off(link.message)}); all-reduce among {among} by {ways_of[RING]} {show_rate(link.ring.bandwidth)} "
        f"({_off(link.ring)})"
    )
    loaded = [series for series in link.series if series.kind == TOGETHER]
    if loaded:
        text += f"; a pair while others send too {show_rate(fit_series(loaded).bandwidth)}"
    return text


def _off(fit: AlphaBetaFit) -> str:
    return f"times within {fit.error:.0%}, at worst {fit.worst:.0%}"


def _spread(values: Sequence[float]) -> float:
    return max(*values, 1e-300) / max(min(values), 1e-300)


def _rounded(value: float) -> float:
    """A rate in bytes/s, rounded to three digits in bits/s."""
    return float(f"{value * 8:.3g}") / 8


def _share(value: float) -> float:
    return min(1.0, max(SMALLEST_EFFICIENCY, round(value, 3)))
