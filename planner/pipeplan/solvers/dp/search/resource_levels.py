"""The resources that workers of one component share: network cards at every level, cores of servers, and ports.

`StageCharges` and `core_loads` give the load that one stage adds to the components of its workers. `PlacedLoads`
compares states by the room that they leave to the stages in front.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeplan.cluster_data.cluster import Cluster
from pipeplan.cluster_data.links import Links
from pipeplan.problem.cuts import Flags, Floats, Ints
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp.search.topology import PlacementTable
from pipeplan.solvers.plan_space import PlanSpace


@dataclass(frozen=True)
class ResourceLevel:
    """Components whose workers share a resource, and the position of every candidate placement on them.

    Arrays with an entry for each placement are in the order of the `PlacementTable`.
    """

    component: Ints
    """The component of every worker, counted from 0."""
    start: Ints
    """The first worker of every component; `stop` is one past its last."""
    stop: Ints
    per_message: Floats
    """Seconds for which a byte of a message keeps the component's card busy; 0 for cores."""
    per_ring: Floats
    """Seconds for which a byte of an all-reduce keeps the component's card busy; 0 for cores."""
    per_core: Floats
    """Inverse of the number of cores that the component's workers share; 0 for cards."""
    first: Ints
    """For each placement, the component of its first worker."""
    last: Ints
    """For each placement, the component of its last worker."""
    in_first: Ints
    """For each placement, the number of its workers in the component of its first worker."""
    in_last: Ints
    middle: tuple[tuple[int, Flags], ...]
    """For each kind of component: one such component, and whether each placement fills a component of this kind without
    beginning or ending in it."""

    @staticmethod
    def of(
        edges: Ints, per_message: Floats, per_ring: Floats, per_core: Floats, table: PlacementTable
    ) -> ResourceLevel:
        """The level whose components begin at each of `edges` except the last."""
        start, stop = edges[:-1], edges[1:]
        component = np.repeat(np.arange(len(start)), np.diff(edges))
        first, last = component[table.first], component[table.end - 1]
        kinds: dict[tuple[float, ...], list[int]] = {}
        for index in range(len(start)):
            rates = (float(stop[index] - start[index]), per_message[index], per_ring[index], per_core[index])
            kinds.setdefault(tuple(map(float, rates)), []).append(index)
        middle = []
        for indices in kinds.values():
            inside = np.zeros(len(first), dtype=bool)
            for index in indices:
                inside |= (first < index) & (index < last)
            if inside.any():
                middle.append((indices[0], inside))
        # An additional component without workers stands behind the last worker, where the search begins.
        beyond = edges[-1:]
        return ResourceLevel(
            np.append(component, len(start)),
            np.concatenate([start, beyond]),
            np.concatenate([stop, beyond]),
            np.append(per_message, 0.0),
            np.append(per_ring, 0.0),
            np.append(per_core, 0.0),
            first,
            last,
            np.minimum(table.end, stop[first]) - table.first,
            table.end - np.maximum(table.first, start[last]),
            tuple(middle),
        )

    @property
    def is_card(self) -> bool:
        """Whether the resource is a network card, which has two directions, and not cores."""
        return not self.per_core.any()


@dataclass(frozen=True)
class Port:
    """One kind of port, the card of a single worker."""

    per_message: float
    """Seconds for which a byte of a message keeps the port busy."""
    per_ring: float
    """Seconds for which a byte of an all-reduce keeps the port busy."""
    held: Flags
    """For each placement, whether one of its workers has such a port."""


def card_levels(inner: Cluster, table: PlacementTable) -> list[ResourceLevel]:
    """The levels of a cluster whose components share a card, smallest components first."""
    links, found = Links.of(inner), []
    for level in range(1, len(inner.levels)):
        edges = np.array(inner.starts(level), dtype=np.intp)
        rates = np.array([links.card(level, int(worker)) for worker in edges[:-1]])
        if np.isfinite(rates).any():
            messages, rings = 1 / rates.T
            found.append(ResourceLevel.of(edges, messages, rings, np.zeros(len(rates)), table))
    return found


def core_level(whole: Problem, space: PlanSpace, inner: Cluster, table: PlacementTable) -> ResourceLevel | None:
    """The servers whose workers share cores; None if no cores are shared.

    A server may contain several copies of the pipeline. `inner` is the component of the whole problem's cluster that
    contains one copy.
    """
    size, shared, copies = inner.workers, whole.cluster.shared_cores, space.copies
    if not shared:
        return None
    if shared[0][1] - shared[0][0] > size and copies > 1:
        first, stop, cores = shared[0]
        edges, rates = np.array([0, size]), np.array([min(copies, (stop - first) // size) / cores])
    else:
        base = space.workers(whole.cluster)[0]
        starts = whole.cluster.starts(whole.cluster.server_level)
        edges = np.array([start - base for start in starts if 0 <= start - base <= size], dtype=np.intp)
        number = {first - base: cores for first, _, cores in shared}
        rates = np.array([1 / number[first] if first in number else 0.0 for first in edges[:-1].tolist()])
    nothing = np.zeros(len(rates))
    return ResourceLevel.of(edges, nothing, nothing, rates, table)


def ports_of(inner: Cluster, table: PlacementTable) -> tuple[Port, ...]:
    """The kinds of ports of a cluster's workers that are not infinitely fast."""
    links = Links.of(inner)
    kinds: dict[tuple[float, float], list[int]] = {}
    for worker in range(inner.workers):
        kinds.setdefault(links.card(0, worker), []).append(worker)
    ports = []
    for (message, ring), workers in kinds.items():
        held = np.zeros(inner.workers + 1, dtype=np.intp)
        held[np.array(workers) + 1] = 1
        count = np.cumsum(held)
        if np.isfinite(message) or np.isfinite(ring):
            ports.append(Port(1 / message, 1 / ring, count[table.end] > count[table.first]))
    return tuple(ports)


@dataclass(frozen=True)
class StageCharges:
    """Bytes that stages on placements send through the card of each of their workers, per minibatch of the whole
    plan."""

    hop: Floats
    """Bytes of the ring among the stage's replicas, on each hop."""
    copied: Floats
    """Bytes of the rings among copies of the pipeline."""
    directions: tuple[tuple[Floats, Floats], ...]
    """For outgoing and for incoming traffic: (bytes of messages across the cut behind the stage, bytes across the cut
    in front)."""

    def card_loads(
        self, level: ResourceLevel, placement: Ints, behind: Floats, ahead: Floats, busy: Floats
    ) -> tuple[Floats, Floats]:
        """(largest complete load, pending load) of the cards of a level in one direction, in seconds.

        `busy` is the load of the last worker's component, including the traffic across the cut behind the stage.
        """
        first, last = level.first[placement], level.last[placement]
        ending, beginning = level.in_last[placement], level.in_first[placement]
        end = busy + (self.hop + ending * self.copied) * level.per_ring[last] + ending * ahead * level.per_message[last]
        straddles = first != last
        complete = np.where(straddles, end, 0.0)
        for index, held in level.middle:
            count = level.stop[index] - level.start[index]
            load = count * (behind + ahead) * level.per_message[index]
            load = load + (self.hop + count * self.copied) * level.per_ring[index]
            complete = np.maximum(complete, np.where(held[placement], load, 0.0))
        across = (
            beginning * behind * level.per_message[first] + (self.hop + beginning * self.copied) * level.per_ring[first]
        )
        within = busy + beginning * self.copied * level.per_ring[first]
        return complete, np.where(straddles, across, within)


def core_loads(level: ResourceLevel, placement: Ints, core_s: Floats, busy: Floats) -> tuple[Floats, Floats]:
    """(largest complete load, pending load of the first server) of the cores of servers, in seconds."""
    first, last = level.first[placement], level.last[placement]
    end = busy + level.in_last[placement] * core_s * level.per_core[last]
    complete = end
    for index, held in level.middle:
        load = (level.stop[index] - level.start[index]) * core_s * level.per_core[index]
        complete = np.maximum(complete, np.where(held[placement], load, 0.0))
    return complete, np.where(first != last, level.in_first[placement] * core_s * level.per_core[first], end)


def meeting_pairs(sending: Ints, receiving: Ints, common: Ints) -> Ints:
    """Number of meeting pairs among the last `sending` senders and the first `receiving` receivers, in one period.

    Sender p and receiver q meet if p ≡ q modulo `common`, which divides the number of senders and of receivers.
    """
    rounds, more = np.divmod(sending, common)
    others, rest = np.divmod(receiving, common)
    pairs: Ints = common * rounds * others + rounds * rest + others * more + np.maximum(0, more + rest - common)
    return pairs


@dataclass(frozen=True)
class PlacedLoads:
    """Position and loads of states on one level that charges something, as arrays over the states."""

    is_card: bool
    first: Ints
    replicas: Ints
    component: Ints
    """The component of the first worker."""
    edge: Flags
    """Whether the first worker is the first of its component."""
    inside: Flags
    """Whether the whole stage lies in the component of its first worker."""
    closed: Flags
    """Whether the component stays within the limit if no other stage uses it."""
    loads: Floats

    def no_worse(self, some: Ints, others: Ints) -> Flags:
        """Flags of shape (some, others): whether the first state leaves at least the second state's room for stages in
        front."""
        component, other = self.component[some][:, None], self.component[others]
        no_more = np.ones((len(some), len(other)), dtype=bool)
        for column in range(self.loads.shape[1]):
            no_more &= self.loads[some, column][:, None] <= self.loads[others, column]
        if not self.is_card:
            return np.asarray(self.edge[others] | (component > other) | ((component == other) & no_more))
        same = self.first[some][:, None] == self.first[others]
        same &= self.replicas[some][:, None] == self.replicas[others]
        alike = (self.inside[some][:, None] & self.inside[others]) | same
        return np.where(self.edge[others], self.closed[some][:, None], (component == other) & no_more & alike)
