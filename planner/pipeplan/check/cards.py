"""The load of every network card and port: the busy time, per minibatch, of what leaves or enters each component. And
of the cores of servers that have more workers than cores.

Minibatch i goes from the sender number i mod r to the receiver number i mod r′ and its gradient back; a ring goes from
each replica to the next, and each hop carries 2 (r-1)/r of the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pipeplan.check.document import Document
from pipeplan.check.figures import Figures
from pipeplan.check.model import Model

Ints = NDArray[np.intp]

LONGEST_ROUND = 10**7


def busiest_s(document: Document, found: Sequence[Figures]) -> float | None:
    """The longest busy time of a card in one direction; None where the stages' replicas take too long to meet again."""
    network = document.network
    traffic = _messages(document, found)
    if traffic is None:
        return None
    rings = _rings(document, found)
    longest = 0.0
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
        longest = max(longest, float(busy.max()))
    return longest


def cores_s(document: Document, found: Sequence[Figures]) -> float:
    """The longest time that a minibatch keeps a server's cores busy; 0 where every worker has one of its own."""
    busy = dict.fromkeys(range(document.cluster.workers), 0.0)
    for stage, figure in zip(document.stages, found, strict=True):
        count = len(stage.workers)
        exposed = figure.group_s * (1.0 - document.asked.overlap)
        every = document.accumulate if document.accumulates and document.accumulate else count
        for worker in stage.workers:
            busy[worker] = figure.pass_s / count + exposed / every
    by_server: dict[int, list[float]] = {}
    for worker, time in busy.items():
        by_server.setdefault(document.cluster.server_of(worker), []).append(time)
    cores = {document.cluster.server_of(worker): document.cluster.device_of(worker).cores for worker in busy}
    shared = [sum(times) / cores[one] for one, times in by_server.items() if 0 < cores[one] < len(times)]
    return max(shared, default=0.0)


def least_s(document: Document, model: Model) -> float:
    """The pace that cores shared by workers leave at best: the work of all layers, on everything that computes."""
    if not document.asked.contention:
        return 0.0
    speeds: dict[int, list[float]] = {}
    for worker in range(document.cluster.workers):
        speeds.setdefault(document.cluster.server_of(worker), []).append(document.cluster.device_of(worker).speed)
    cores = {server: document.cluster.device_of(first).cores for first, server in _firsts(document)}
    total = sum(sum(each[: cores[server] or None]) for server, each in speeds.items())
    if all(not count or count >= len(speeds[server]) for server, count in cores.items()):
        return 0.0
    return float((model.forward_s + model.backward_s + model.update_s).sum()) / total


def _firsts(document: Document) -> list[tuple[int, int]]:
    """A worker of each server, and the server."""
    of = {document.cluster.server_of(worker): worker for worker in range(document.cluster.workers)}
    return [(worker, server) for server, worker in of.items()]


def _messages(document: Document, found: Sequence[Figures]) -> list[tuple[Ints, Ints, float]] | None:
    """Senders, receivers, and bytes per minibatch of each such pair."""
    hops = []
    for index in range(len(found) - 1):
        senders, receivers = (np.array(document.stages[number].workers) for number in (index, index + 1))
        round_ = math.lcm(len(senders), len(receivers))
        if round_ > LONGEST_ROUND:
            return None
        turn = np.arange(round_)
        here, there = senders[turn % len(senders)], receivers[turn % len(receivers)]
        hops.append((here, there, found[index].sent / round_))
        hops.append((there, here, found[index].received_gradient / round_))
    return hops


def _rings(document: Document, found: Sequence[Figures]) -> list[tuple[Ints, Ints, float]]:
    """Each replica and the next in its ring, and bytes per minibatch of all copies: in each copy, and among them."""
    if document.inference:
        return []
    hops, copies = [], document.copies
    for stage, figure in zip(document.stages, found, strict=True):
        workers, size = np.array(stage.workers), figure.parameters
        replicas = len(workers) // copies
        every = document.accumulate if document.accumulates and document.accumulate else None
        for copy in range(copies):
            ring = workers[copy::copies]
            hops.append((ring, np.roll(ring, -1), _hop(replicas, size) / (every or replicas * copies)))
        for replica in range(replicas):
            ring = workers[replica * copies : (replica + 1) * copies]
            hops.append((ring, np.roll(ring, -1), _hop(copies, size / replicas) / (every or copies)))
    return hops


def _hop(members: int, size: float) -> float:
    return 2 * (members - 1) / members * size
