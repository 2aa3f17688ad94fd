"""The loads of all network cards and ports, and of shared cores on servers with more workers than cores.

The load of a card is its busy time per minibatch, from the traffic that leaves or enters its component.
Minibatch i goes from sender i mod r to receiver i mod r′, and its gradient goes back. A ring all-reduce goes from each
replica to the next, and each hop carries 2 (r-1)/r of the bytes. docs/cost-model.md, "Shared cards" and "Shared cores".
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pipeplan.checker.batch import Load
from pipeplan.checker.document import PlanDocument
from pipeplan.checker.figures import StageFigures
from pipeplan.checker.formulas import ROUNDING, core_busy_s, hop_bytes
from pipeplan.checker.model import CheckedModel
from pipeplan.errors import InputError

Ints = NDArray[np.intp]

LONGEST_ROUND = 10**7
"""Largest number of minibatches after which the pairs of senders and receivers repeat."""


def card_loads(document: PlanDocument, figures: Sequence[StageFigures]) -> list[Load]:
    """The busy times of the busiest cards of every level in one direction, in seconds per minibatch.

    Raises an `InputError` if the pairs of senders and receivers repeat only after more than `LONGEST_ROUND`
    minibatches.
    """
    network = document.network
    traffic, rings = _messages(document, figures), _rings(document, figures)
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
            kind = "port of worker" if level == 0 else f"network card of {document.cluster.levels[level - 1].name}"
            name = f"{kind} {component}"
            loads.append(Load(float(busy[direction, component]), f"{name}, {('outgoing', 'incoming')[direction]}"))
    return loads


def core_loads(document: PlanDocument, figures: Sequence[StageFigures]) -> list[Load]:
    """For each server whose workers share cores: the time for which a minibatch keeps the cores busy."""
    cluster, busy = document.cluster, dict[int, float]()
    for stage, figure in zip(document.stages, figures, strict=True):
        mine = float(core_busy_s(document, figure.pass_s, figure.group_s, len(stage.workers)))
        for worker in stage.workers:
            server = cluster.server_of(worker)
            busy[server] = busy.get(server, 0.0) + mine
    return [
        Load(busy.get(server, 0.0) / cores, f"the {cores:g} cores of server {server}")
        for server, cores, workers in _servers(document)
        if 0 < cores < len(workers)
    ]


def shared_cores_bound_s(document: PlanDocument, model: CheckedModel) -> float:
    """Lower bound on the step time from shared cores: the work of all layers divided by the speed of all cores.

    The bound is 0 if no cores are shared, or if contention is not charged.
    """
    servers = _servers(document)
    if not document.options.contention or not any(0 < cores < len(workers) for _, cores, workers in servers):
        return 0.0
    # All devices of a server have the same speed.
    speeds = [
        document.cluster.device_of(workers[0]).speed * min(cores or len(workers), len(workers))
        for _, cores, workers in servers
    ]
    return float((model.forward_s + model.backward_s + model.update_s).sum()) / sum(speeds)


def _servers(document: PlanDocument) -> list[tuple[int, float, list[int]]]:
    """(server, its cores, its workers) for every server; 0 cores if every worker has its own core."""
    workers = dict[int, list[int]]()
    for worker in range(document.cluster.workers):
        workers.setdefault(document.cluster.server_of(worker), []).append(worker)
    return [(server, document.cluster.device_of(mine[0]).cores, mine) for server, mine in workers.items()]


def _messages(document: PlanDocument, figures: Sequence[StageFigures]) -> list[tuple[Ints, Ints, float]]:
    """(senders, receivers, bytes per minibatch of each pair) for every boundary, in both directions."""
    hops = []
    for index in range(len(figures) - 1):
        senders, receivers = (np.array(document.stages[number].workers) for number in (index, index + 1))
        period = math.lcm(len(senders), len(receivers))
        if period > LONGEST_ROUND:
            raise InputError("the replicas of the stages are too many to add up what each network card carries")
        minibatch = np.arange(period)
        senders, receivers = senders[minibatch % len(senders)], receivers[minibatch % len(receivers)]
        hops.append((senders, receivers, figures[index].sent / period))
        hops.append((receivers, senders, figures[index].received_gradient / period))
    return hops


def _rings(document: PlanDocument, figures: Sequence[StageFigures]) -> list[tuple[Ints, Ints, float]]:
    """(replicas, next replicas in the ring, bytes per minibatch) of every all-reduce, in each copy and among copies.

    With a flush the result is empty: the part of an all-reduce that no pass hides counts in the batch.
    """
    if document.inference or document.flushes:
        return []
    hops, copies = [], document.copies
    for stage, figure in zip(document.stages, figures, strict=True):
        workers, size = np.array(stage.workers), figure.parameters
        replicas = len(workers) // copies
        interval = document.minibatches if document.accumulates else None
        for copy in range(copies):
            ring = workers[copy::copies]
            hop = hop_bytes(document, replicas, size)
            hops.append((ring, np.roll(ring, -1), hop / (interval or replicas * copies)))
        for replica in range(replicas):
            ring = workers[replica * copies : (replica + 1) * copies]
            hop = hop_bytes(document, copies, size / replicas)
            hops.append((ring, np.roll(ring, -1), hop / (interval or copies)))
    return hops
