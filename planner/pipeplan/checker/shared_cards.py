"""The load of every network card and port, and of the shared cores of servers that have more workers than cores.

The load of a card is the time per minibatch for which the traffic that leaves or enters its component keeps it busy.
Minibatch i goes from sender i mod r to receiver i mod r′, and its gradient goes back. A ring all-reduce goes from each
replica to the next, and each hop carries 2 (r-1)/r of the bytes. docs/cost-model.md, "Shared cards" and "Shared cores".
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pipeplan.checker.document import FLUSHING, PlanDocument
from pipeplan.checker.figures import ROUNDING, StageFigures
from pipeplan.checker.loads import Load
from pipeplan.checker.model import CheckedModel

Ints = NDArray[np.intp]

LONGEST_ROUND = 10**7
"""Largest number of minibatches after which the pairs of senders and receivers repeat."""


def card_loads(document: PlanDocument, figures: Sequence[StageFigures]) -> list[Load] | None:
    """The busy time of the busiest cards of every level in one direction, seconds per minibatch.

    None where the pairs of senders and receivers repeat only after more than `LONGEST_ROUND` minibatches.
    """
    network = document.network
    traffic = _messages(document, figures)
    if traffic is None:
        return None
    rings = _rings(document, figures)
    loads = []
    for level, cards in enumerate(network.cards):
        starts = np.array(network.starts[level])
        count = len(starts) - 1
        busy = np.zeros((2, count))
        for hops, ring in ((traffic, False), (rings, True)):
            rate = np.array([card.allreduce if ring else card.message for card in cards])
            for source, target, size in hops:
                homes = [np.searchsorted(starts, workers, side="right") - 1 for workers in (source, target)]
                crosses = homes[0] != homes[1]
                for direction in (0, 1):
                    load = np.bincount(homes[direction][crosses], minlength=count) * size
                    busy[direction] += load / rate
        for direction, component in np.argwhere(busy >= busy.max() * (1 - ROUNDING)).tolist():
            name = (
                f"port of worker {component}" if level == 0 else f"network card of {_name(document, level, component)}"
            )
            loads.append(Load(float(busy[direction, component]), f"{name}, {('outgoing', 'incoming')[direction]}"))
    return loads


def _name(document: PlanDocument, level: int, component: int) -> str:
    return f"{document.cluster.levels[level - 1].name} {component}"


def core_loads(document: PlanDocument, figures: Sequence[StageFigures]) -> list[Load]:
    """The time for which a minibatch keeps the cores of each server busy whose workers share them."""
    busy = dict.fromkeys(range(document.cluster.workers), 0.0)
    for stage, figure in zip(document.stages, figures, strict=True):
        count = len(stage.workers)
        exposed = figure.group_s * (1.0 - document.options.overlap) * (document.schedule not in FLUSHING)
        interval = document.accumulate if document.accumulates and document.accumulate else count
        for worker in stage.workers:
            busy[worker] += figure.pass_s / count + exposed / interval
    by_server: dict[int, list[float]] = {}
    for worker, time in busy.items():
        by_server.setdefault(document.cluster.server_of(worker), []).append(time)
    cores = {document.cluster.server_of(worker): document.cluster.device_of(worker).cores for worker in busy}
    return [
        Load(sum(times) / cores[one], f"the {cores[one]:g} cores of server {one}")
        for one, times in by_server.items()
        if 0 < cores[one] < len(times)
    ]


def shared_cores_bound_s(document: PlanDocument, model: CheckedModel) -> float:
    """Lower bound on the pace from shared cores: the work of all layers divided by the speed of all cores.

    0 where no cores are shared or contention is not charged.
    """
    if not document.options.contention:
        return 0.0
    speeds: dict[int, list[float]] = {}
    for worker in range(document.cluster.workers):
        speeds.setdefault(document.cluster.server_of(worker), []).append(document.cluster.device_of(worker).speed)
    cores = {server: document.cluster.device_of(first).cores for first, server in _firsts(document)}
    # All devices of a server have the same speed.
    total = sum(each[0] * min(cores[server] or len(each), len(each)) for server, each in speeds.items())
    if all(not count or count >= len(speeds[server]) for server, count in cores.items()):
        return 0.0
    return float((model.forward_s + model.backward_s + model.update_s).sum()) / total


def _firsts(document: PlanDocument) -> list[tuple[int, int]]:
    """(one of its workers, server) for every server."""
    worker_of = {document.cluster.server_of(worker): worker for worker in range(document.cluster.workers)}
    return [(worker, server) for server, worker in worker_of.items()]


def _messages(document: PlanDocument, figures: Sequence[StageFigures]) -> list[tuple[Ints, Ints, float]] | None:
    """(senders, receivers, bytes per minibatch for each such pair) of every boundary, in both directions."""
    hops = []
    for index in range(len(figures) - 1):
        senders, receivers = (np.array(document.stages[number].workers) for number in (index, index + 1))
        period = math.lcm(len(senders), len(receivers))
        if period > LONGEST_ROUND:
            return None
        minibatch = np.arange(period)
        senders, receivers = senders[minibatch % len(senders)], receivers[minibatch % len(receivers)]
        hops.append((senders, receivers, figures[index].sent / period))
        hops.append((receivers, senders, figures[index].received_gradient / period))
    return hops


def _rings(document: PlanDocument, figures: Sequence[StageFigures]) -> list[tuple[Ints, Ints, float]]:
    """(replicas, next replicas in the ring, bytes per minibatch) of every all-reduce, in each copy and among copies.

    With a flush there are none: what no pass hides of them is a part of the batch.
    """
    if document.inference or document.schedule in FLUSHING:
        return []
    hops, copies = [], document.copies
    for stage, figure in zip(document.stages, figures, strict=True):
        workers, size = np.array(stage.workers), figure.parameters
        replicas = len(workers) // copies
        interval = document.accumulate if document.accumulates and document.accumulate else None
        for copy in range(copies):
            ring = workers[copy::copies]
            hop = _hop_bytes(document, replicas, size)
            hops.append((ring, np.roll(ring, -1), hop / (interval or replicas * copies)))
        for replica in range(replicas):
            ring = workers[replica * copies : (replica + 1) * copies]
            hop = _hop_bytes(document, copies, size / replicas)
            hops.append((ring, np.roll(ring, -1), hop / (interval or copies)))
    return hops


def _hop_bytes(document: PlanDocument, members: int, size: float) -> float:
    """Bytes that one member of a ring sends to the next in an all-reduce of `size` bytes, and in gathering them."""
    return (3 if document.options.shard_optimizer else 2) * (members - 1) / members * size
