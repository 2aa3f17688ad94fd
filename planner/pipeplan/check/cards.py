"""The load of every network card and port: the busy time, per minibatch, of what leaves or enters each component.

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
