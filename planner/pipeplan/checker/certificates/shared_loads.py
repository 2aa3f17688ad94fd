"""The loads of shared cards, ports and cores by the stages that are already placed.

A component of a level (for example a server) has one card in each direction, and may have cores that its workers share.
Stages are placed one in front of the other, so the load of a resource is complete when no further stage can use it.
Until then, a state has the load so far, without the traffic of the state's own cut. docs/proof.md explains the loads
and proves the rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeplan.checker.certificates.worker_runs import Rows, WorkerRuns
from pipeplan.checker.model import Flags, Floats
from pipeplan.checker.network import NetworkRates
from pipeplan.cluster_data.cluster import Cluster

Ints = NDArray[np.intp]


@dataclass(frozen=True)
class StageTraffic(Rows):
    """Traffic and compute of stages, with one array entry for each stage. All figures are for one minibatch of all
    copies.
    """

    run: Ints
    """Index of the run of workers."""
    hop: Floats
    """Bytes that each replica sends to the next one in the all-reduce."""
    copied: Floats
    """Bytes that each replica sends to its counterpart in the next copy, in the all-reduce among the copies."""
    sent: Floats
    """Columns: bytes that each replica sends, and receives, at the boundary behind the stage."""
    ahead: Floats
    """Columns: bytes that each replica sends, and receives, at the boundary in front of the stage."""
    core_s: Floats
    """Seconds for which each replica keeps a core busy."""


@dataclass(frozen=True)
class Pairs(Rows):
    """Pairs of a state and a run of workers in front of it, with the link between; one array entry for each pair."""

    state: Ints
    """Index of the state among those of its cut."""
    first: Ints
    """First worker of the state."""
    replicas: Ints
    """Replicas of the state's first stage."""
    run: Ints
    bandwidth: Floats
    """Bytes/s of messages from the run to the state; infinite if nothing is behind."""
    latency_s: Floats
    lanes: Ints
    """Number of messages that are sent at the same time."""
    loads: Floats
    """A row for each pair: the loads of the state; after `joined`, the loads of the component where the run ends."""


@dataclass(frozen=True)
class SharedLevel:
    """The components of one level that share network cards or cores, in order, as arrays over the components.

    A state has two loads of cards, outgoing and incoming, and one load of cores.
    """

    runs: WorkerRuns
    limit_s: float
    """Longest allowed busy time of the resource, in seconds per minibatch."""
    home: Ints
    """The component of every worker."""
    begin: Ints
    stop: Ints
    message: Floats
    """Seconds that a byte of a message keeps a card busy; 0 for cores."""
    share: Floats
    """Seconds that a byte of an all-reduce keeps a card busy, or that a second of work keeps each of the cores busy."""
    cores: bool

    @property
    def width(self) -> int:
        """Number of loads of a state."""
        return 1 if self.cores else 2

    def first_in(self, run: Ints) -> tuple[Ints, Ints]:
        """(component of the first worker of each run, how many of the run's workers it has)."""
        home = self.home[self.runs.start[run]]
        return home, np.minimum(self.runs.end[run], self.stop[home]) - self.runs.start[run]

    def last_in(self, run: Ints) -> tuple[Ints, Ints]:
        """(component of the last worker of each run, how many of the run's workers it has)."""
        home = self.home[self.runs.end[run] - 1]
        return home, self.runs.end[run] - np.maximum(self.runs.start[run], self.begin[home])

    def possible(self, stages: StageTraffic) -> Flags:
        """Whether components that lie completely inside a stage's run stay within the limit."""
        possible = np.ones(len(stages.run), dtype=bool)
        for index, held in self._between(stages.run):
            count = self.stop[index] - self.begin[index]
            for hop, each, behind, ahead in self._ways(stages):
                load = count * (behind + ahead) * self.message[index] + (hop + count * each) * self.share[index]
                possible &= (load <= self.limit_s) | ~held
        return possible

    def joined(self, pairs: Pairs, loads: Floats, traffic: tuple[Floats, Floats] | None) -> tuple[Flags, Floats]:
        """The loads of the component where each run ends, from the stages behind and from the boundary to them.

        `loads`: the loads of the states here. `traffic`: bytes across their cut, (forward, backward), for a minibatch
        of all copies; None if nothing is behind. If the run does not reach a component of the state, the load of that
        component is complete; the flags say whether it stays within the limit.
        """
        if traffic is None:
            return np.ones(len(pairs.run), dtype=bool), np.zeros(loads.shape)
        senders = self.runs.replicas[pairs.run]
        mine, sending = self.last_in(pairs.run)
        theirs = self.home[pairs.first]
        receiving = np.minimum(pairs.first + pairs.replicas, self.stop[theirs]) - pairs.first
        shared = mine == theirs
        period = np.lcm(senders, pairs.replicas)
        inside = np.where(shared, _meetings(senders, sending, pairs.replicas, receiving), 0)
        leaving = (sending * (period // senders) - inside) / period * self.message[mine]
        entering = (receiving * (period // pairs.replicas) - inside) / period * self.message[theirs]
        closed = np.ones(len(pairs.run), dtype=bool)
        found = np.empty(loads.shape)
        for way, (out, back) in enumerate((traffic, traffic[::-1])[: self.width]):
            at_state = loads[:, way] + entering * back
            closed &= shared | (at_state <= self.limit_s)
            found[:, way] = leaving * out + np.where(shared, at_state, 0.0)
        return closed, found

    def extended(self, stages: StageTraffic, loads: Floats) -> tuple[Flags, Floats]:
        """(whether stages stay within the limit, loads of the states that they lead to), given `joined` loads."""
        (first, front), (last, rear) = self.first_in(stages.run), self.last_in(stages.run)
        within, straddles = np.ones(len(first), dtype=bool), first != last
        start = self.runs.start[stages.run]
        edge = start == self.begin[self.home[start]]  # No stage in front is in this component.
        found = np.empty(loads.shape)
        for way, (hop, each, behind, ahead) in enumerate(self._ways(stages)):
            complete = loads[:, way] + (hop + rear * each) * self.share[last] + rear * ahead * self.message[last]
            apart = front * behind * self.message[first] + (hop + front * each) * self.share[first]
            pending = np.where(straddles, apart, loads[:, way] + front * each * self.share[first])
            within &= (complete <= self.limit_s) | ~straddles
            within &= pending + np.where(edge, front * ahead * self.message[first], 0.0) <= self.limit_s
            found[:, way] = np.where(edge, 0.0, pending)
        return within, found

    def alone(self, first: Ints, replicas: Ints, traffic: tuple[Floats, Floats], loads: Floats) -> Flags:
        """Whether the components of states stay within the limit if no stage in front is in them.

        `traffic`: bytes across the states' cuts, (forward, backward), for a minibatch of all copies.
        """
        home = self.home[first]
        entering = (np.minimum(first + replicas, self.stop[home]) - first) / replicas * self.message[home]
        back = np.stack(traffic[::-1][: self.width], axis=1)
        return np.asarray((loads + entering[:, None] * back <= self.limit_s).all(axis=1))

    def _ways(self, stages: StageTraffic) -> Iterator[tuple[Floats, Floats, Floats, Floats]]:
        """For each load of a state: the parts from a hop of the ring, a replica, the boundary behind, and the boundary
        ahead.
        """
        if self.cores:
            nothing = np.zeros(len(stages.run))
            yield nothing, stages.core_s, nothing, nothing
        else:
            yield from ((stages.hop, stages.copied, *ways) for ways in zip(stages.sent.T, stages.ahead.T, strict=True))

    def _between(self, run: Ints) -> list[tuple[int, Flags]]:
        """For every kind of component: (one such component, the runs with such a component strictly inside)."""
        first, last = self.home[self.runs.start[run]], self.home[self.runs.end[run] - 1]
        kinds: dict[tuple[float, ...], tuple[int, Flags]] = {}
        for index in range(len(self.begin)):
            mine = (first < index) & (index < last)
            if mine.any():
                # All properties of a component that determine its load, except the stages in it.
                kind = float(self.stop[index] - self.begin[index]), self.message[index], self.share[index]
                kinds[kind] = (index, kinds[kind][1] | mine) if kind in kinds else (index, mine)
        return list(kinds.values())


def card_levels(cluster: Cluster, runs: WorkerRuns, limit_s: float) -> list[SharedLevel]:
    """The levels above single workers whose cards can carry traffic, innermost first."""
    network, found = NetworkRates.of(cluster), []
    for level, cards in enumerate(network.cards[1:], start=1):
        message, ring = (1 / np.array([getattr(card, name) for card in cards]) for name in ("message", "allreduce"))
        if message.any() or ring.any():
            edges = np.array(network.starts[level])
            found.append(SharedLevel(*_components(edges, runs, limit_s), message, ring, cores=False))
    return found


def core_levels(whole: Cluster, runs: WorkerRuns, limit_s: float, workers: range) -> list[SharedLevel]:
    """One level with the shared cores; none if every worker has its own core. `runs`: the runs of one copy on the
    cluster `whole`.

    `workers`: the workers of all components that hold a copy.

    If a server holds n copies of a pipeline, its cores do n times the work of one copy.
    """
    servers = [whole.server_of(worker) for worker in range(whole.workers)]
    sizes = np.bincount(servers)
    cores = np.array([whole.device_of(servers.index(one)).cores for one in range(len(sizes))])
    share = np.where((cores > 0) & (cores < sizes), 1.0 / np.maximum(cores, 1), 0.0)
    if not share.any():
        return []
    mine = np.array(servers[workers.start : workers.start + runs.workers])
    edges = np.concatenate([[0], np.flatnonzero(np.diff(mine)) + 1, [runs.workers]])
    # Copies that share a server are equal, and then all servers are equal too.
    together = min(len(workers), sizes[mine[0]]) // runs.workers if runs.workers < sizes[mine[0]] else 1
    share = share[mine[edges[:-1]]] * together
    return [SharedLevel(*_components(edges, runs, limit_s), np.zeros(len(share)), share, cores=True)]


def ports_suffice(cluster: Cluster, runs: WorkerRuns, stages: StageTraffic, limit_s: float) -> Flags:
    """Whether the port of every worker of the stages stays within the limit."""
    suffice = np.ones(len(stages.run), dtype=bool)
    start, end = runs.start[stages.run], runs.end[stages.run]
    cards = NetworkRates.of(cluster).cards[0]
    for card in set(cards):
        before = np.concatenate([[0], np.cumsum([one == card for one in cards])])
        held = before[end] > before[start]
        for behind, ahead in zip(stages.sent.T, stages.ahead.T, strict=True):
            load = (behind + ahead) / card.message + (stages.hop + stages.copied) / card.allreduce
            suffice &= (load <= limit_s) | ~held
    return suffice


def _components(edges: Ints, runs: WorkerRuns, limit_s: float) -> tuple[WorkerRuns, float, Ints, Ints, Ints]:
    """The first fields of a `SharedLevel` whose components lie between consecutive `edges`."""
    return runs, limit_s, np.repeat(np.arange(len(edges) - 1), np.diff(edges)), edges[:-1], edges[1:]


def _meetings(senders: Ints, sending: Ints, receivers: Ints, receiving: Ints) -> Ints:
    """Number of pairs of one of the last `sending` senders and one of the first `receiving` receivers that exchange
    messages.

    Minibatch i goes from sender i mod r to receiver i mod r′, so sender p and receiver q meet once in lcm(r, r′)
    minibatches if p ≡ q modulo gcd(r, r′), and never otherwise. The senders are counted one by one.
    """
    common, found = np.gcd(senders, receivers), np.zeros(len(senders), dtype=np.intp)
    for index in range(int(sending.max(initial=0))):
        residue = (senders - 1 - index) % common
        found += np.where(index < sending, np.maximum(0, -((residue - receiving) // common)), 0)
    return found
