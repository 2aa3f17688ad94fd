"""The DAG of a profile with its chains drawn together: what is left is where it branches, and the expensive layers.

Blocks of a model that follow each other and are drawn alike: of 32 transformer blocks, one picture tells all.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pipeplan.profile_data.layers import Layer, edges
from pipeplan.profile_data.profile import Profile

HALF = 0.5
AS_LONG = 0.99


@dataclass(frozen=True)
class Chain:
    """Layers that follow each other with nothing beside them: each reads only the one before, and alone reads it."""

    layers: tuple[Layer, ...]
    reads: tuple[int, ...]
    """Numbers of the chains that it reads, all before it."""

    @property
    def total_s(self) -> float:
        """Forward and backward time of its layers."""
        return sum(map(total_s, self.layers))


def total_s(layer: Layer) -> float:
    """Forward and backward time."""
    return layer.forward_s + layer.backward_s


def expensive(profile: Profile, most: int = 12) -> list[str]:
    """The fewest layers that take half of the time together, the most expensive first, and those that take as long as
    the last of them; at most `most`. Of more layers that take as long as each other none stands out.
    """
    found: list[Layer] = []
    taken = 0.0
    for layer in sorted(profile.layers, key=total_s, reverse=True):
        enough = taken >= HALF * profile.total_s or len(found) >= most
        if not total_s(layer) or (enough and total_s(layer) < AS_LONG * total_s(found[-1])):
            break
        found.append(layer)
        taken += total_s(layer)
    if len(found) > most:
        found = [layer for layer in found if total_s(layer) * AS_LONG > total_s(found[-1])]
    return [layer.name for layer in found]


def chains(profile: Profile, alone: Collection[str] = ()) -> list[Chain]:
    """The chains in a topological order; the layers named in `alone` are chains of their own."""
    before: dict[str, list[str]] = defaultdict(list)
    after: dict[str, list[str]] = defaultdict(list)
    for source, target in edges(profile.tensors):
        before[target].append(source)
        after[source].append(target)
    apart = set(alone)
    members: list[list[Layer]] = []
    home: dict[str, int] = {}
    for layer in _in_order(profile, before, after):
        name = layer.name
        feeds = before[name]
        joined = len(feeds) == 1 and len(after[feeds[0]]) == 1 and not apart & {name, feeds[0]}
        home[name] = home[feeds[0]] if joined else len(members)
        if joined:
            members[home[name]].append(layer)
        else:
            members.append([layer])
    return [Chain(tuple(layers), tuple(sorted({home[name] for name in before[layers[0].name]}))) for layers in members]


def _in_order(profile: Profile, before: dict[str, list[str]], after: dict[str, list[str]]) -> list[Layer]:
    """The layers in a topological order, the profile's own where that is one: it must be, but files differ."""
    position = {layer.name: number for number, layer in enumerate(profile.layers)}
    left = {name: len(before[name]) for name in position}
    ready = [position[name] for name, count in left.items() if not count]
    heapq.heapify(ready)
    found = []
    while ready:
        layer = profile.layers[heapq.heappop(ready)]
        found.append(layer)
        for name in after[layer.name]:
            left[name] -= 1
            if not left[name]:
                heapq.heappush(ready, position[name])
    return found


FEWEST, LONGEST = 3, 60
"""Times that a block must follow itself, and the most chains in one."""


@dataclass(frozen=True)
class Repeat:
    """Chains `start` … `start + period - 1`, and as many again so often that there are `times` of them."""

    start: int
    period: int
    times: int

    @property
    def end(self) -> int:
        """The chain after the last."""
        return self.start + self.period * self.times


def repeats(chains: Sequence[Chain]) -> list[Repeat]:
    """Runs of like blocks, from the first on, each as long as can be."""
    found = []
    at = 0
    while at < len(chains):
        best = max((_run(chains, at, period) for period in range(1, LONGEST + 1)), key=_covered)
        if best.times >= FEWEST:
            found.append(best)
            at = best.end
        else:
            at += 1
    return found


def _covered(run: Repeat) -> tuple[int, int]:
    """What of two runs is better: what covers more, and then the shorter block."""
    return (run.period * run.times if run.times >= FEWEST else 0, -run.period)


def _run(chains: Sequence[Chain], start: int, period: int) -> Repeat:
    at = start
    while at + period < len(chains) and _alike(chains[at], chains[at + period], period):
        at += 1
    return Repeat(start, period, (at - start) // period + 1)


def _alike(one: Chain, later: Chain, period: int) -> bool:
    """The same operations and weights, reading the same, or what lies as far before."""
    mine = [(layer.op, layer.parameter_bytes) for layer in one.layers]
    theirs = [(layer.op, layer.parameter_bytes) for layer in later.layers]
    return mine == theirs and (
        len(one.reads) == len(later.reads)
        and all(after - before in (0, period) for before, after in zip(one.reads, later.reads, strict=True))
    )
