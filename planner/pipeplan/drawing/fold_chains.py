"""Folds the chains of a profile's DAG into single nodes, so that branches and expensive layers remain.

One of several equal consecutive blocks, such as 32 transformer blocks, can represent all of them. `repeated_blocks`
finds such blocks.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pipeplan.profile_data.layers import Layer, edges
from pipeplan.profile_data.profile import Profile
from pipeplan.util.graph import strong_components

EXPENSIVE_SHARE = 0.5
"""Share of the total time that the layers marked as expensive take together."""
EQUAL_TIME_RATIO = 0.99
"""Smallest ratio of two times at which they count as equal."""
MIN_REPEATS, MAX_BLOCK = 3, 60
"""Smallest number of equal blocks in a row, and largest number of chains in a block."""


@dataclass(frozen=True)
class Chain:
    """Layers in a row: each reads only the layer before it, and is that layer's only consumer."""

    layers: tuple[Layer, ...]
    reads: tuple[int, ...]
    """Indices of the chains that this chain reads, all smaller than its own index."""

    @property
    def total_s(self) -> float:
        """Forward plus backward time of the layers, in seconds."""
        return sum(map(layer_time_s, self.layers))


def layer_time_s(layer: Layer) -> float:
    """Forward plus backward time of a layer, in seconds."""
    return layer.forward_s + layer.backward_s


def most_expensive_layers(profile: Profile, most: int = 12) -> list[str]:
    """Names of the fewest layers that together take half of the time, the most expensive first.

    Layers that take as long as the last of these are included. A group of equally expensive layers is left out if it
    would raise the number of names above `most`, because none of its layers stands out.
    """
    selected: list[Layer] = []
    selected_s = 0.0
    for layer in sorted(profile.layers, key=layer_time_s, reverse=True):
        enough = selected_s >= EXPENSIVE_SHARE * profile.total_s or len(selected) >= most
        if not layer_time_s(layer) or (enough and layer_time_s(layer) < EQUAL_TIME_RATIO * layer_time_s(selected[-1])):
            break
        selected.append(layer)
        selected_s += layer_time_s(layer)
    if len(selected) > most:
        selected = [layer for layer in selected if layer_time_s(layer) * EQUAL_TIME_RATIO > layer_time_s(selected[-1])]
    return [layer.name for layer in selected]


def fold_chains(profile: Profile, alone: Collection[str] = ()) -> list[Chain]:
    """The chains in a topological order. Each layer named in `alone` is a separate chain."""
    before: dict[str, list[str]] = defaultdict(list)
    after: dict[str, list[str]] = defaultdict(list)
    for source, target in edges(profile.tensors):
        before[target].append(source)
        after[source].append(target)
    apart = set(alone)
    members: list[list[Layer]] = []
    chain_of: dict[str, int] = {}
    by_name = {layer.name: layer for layer in profile.layers}
    # The order of the profile is used, unless it is not topological, which the file format requires.
    ordered = itertools.chain.from_iterable(strong_components(list(by_name), edges(profile.tensors)))
    for name in ordered:
        feeds = before[name]
        joined = len(feeds) == 1 and len(after[feeds[0]]) == 1 and not apart & {name, feeds[0]}
        chain_of[name] = chain_of[feeds[0]] if joined else len(members)
        if joined:
            members[chain_of[name]].append(by_name[name])
        else:
            members.append([by_name[name]])
    return [
        Chain(tuple(layers), tuple(sorted({chain_of[name] for name in before[layers[0].name]}))) for layers in members
    ]


@dataclass(frozen=True)
class RepeatedBlock:
    """A block of chains, `start` … `start + period - 1`, that occurs `times` times in a row."""

    start: int
    period: int
    times: int

    @property
    def end(self) -> int:
        """Index of the chain after the last block."""
        return self.start + self.period * self.times


def repeated_blocks(chains: Sequence[Chain]) -> list[RepeatedBlock]:
    """Repeated blocks, found from the first chain on. Each repetition covers the largest possible number of chains."""
    blocks: list[RepeatedBlock] = []
    position = 0
    while position < len(chains):
        best = max((_longest_repeat(chains, position, period) for period in range(1, MAX_BLOCK + 1)), key=_covered)
        if best.times >= MIN_REPEATS:
            blocks.append(best)
            position = best.end
        else:
            position += 1
    return blocks


def _covered(repeat: RepeatedBlock) -> tuple[int, int]:
    """Sort key: a repetition is better if it covers more chains, or the same number with a shorter block."""
    return (repeat.period * repeat.times if repeat.times >= MIN_REPEATS else 0, -repeat.period)


def _longest_repeat(chains: Sequence[Chain], start: int, period: int) -> RepeatedBlock:
    at = start
    while at + period < len(chains) and _equal_chains(chains[at], chains[at + period], period):
        at += 1
    return RepeatedBlock(start, period, (at - start) // period + 1)


def _equal_chains(earlier: Chain, later: Chain, period: int) -> bool:
    """Whether two chains have equal operations and weights, and read the same chains, or chains `period` apart."""
    layers = [(layer.op, layer.weight_bytes) for layer in earlier.layers]
    later_layers = [(layer.op, layer.weight_bytes) for layer in later.layers]
    return layers == later_layers and (
        len(earlier.reads) == len(later.reads)
        and all(after - before in (0, period) for before, after in zip(earlier.reads, later.reads, strict=True))
    )
