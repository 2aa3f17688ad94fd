"""The closed sets of a model's blocks of layers: sets that have with every block all blocks before it.

The stages of a pipeline lie between closed sets, each of which has the one before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipeplan.solvers.ilp.facts.layers import LayerBlocks

MOST_SETS = 450
"""The most closed sets for which stages are told apart. A chain has one more than it has layers."""

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]
Flags = NDArray[np.bool_]


class ClosedSets:
    """The sets of blocks that have with every block all those before it, in an order in which subsets come first."""

    def __init__(self, layers: LayerBlocks, masks: list[int]) -> None:
        self._layers, count = layers, len(layers)
        self.has: Flags = np.array([[mask >> block & 1 for block in range(count)] for mask in masks], dtype=bool)
        """Which blocks every set has."""
        self.home = layers.home
        """The block of every layer."""

    def __len__(self) -> int:
        return len(self.has)

    @staticmethod
    def of(layers: LayerBlocks) -> ClosedSets | None:
        """All closed sets, or None where there are more than `MOST_SETS`."""
        with_all_before = _closures(layers)
        found, newest = {0}, {0}
        while newest and len(found) <= MOST_SETS:
            newest = {mask | one for mask in newest for one in with_all_before if one & ~mask} - found
            found |= newest
        if len(found) > MOST_SETS:
            return None
        return ClosedSets(layers, sorted(found, key=lambda mask: (mask.bit_count(), mask)))

    def sums(self, amounts: Iterable[float]) -> Floats:
        """For every set, the sum of amounts that are given by block."""
        return np.asarray(self.has @ np.array(list(amounts), dtype=np.float64))

    def crossing(self, sizes: Iterable[float]) -> Floats:
        """For every set, the bytes of the tensors, given by tensor, that leave it."""
        total = np.zeros(len(self))
        for tensor, size in zip(self._layers.tensors, sizes, strict=True):
            total += size * (self.has[:, tensor.producer] & ~self.has[:, list(tensor.consumers)].all(axis=1))
        return total

    def largest(self, amounts: Iterable[float], begin: Ints, end: Ints) -> Floats:
        """The largest of the amounts, given by block, of the blocks that sets have beyond others, pair by pair; 0 where
        none has any."""
        given = np.array(list(amounts), dtype=np.float64)
        found, left = np.zeros(len(end)), np.arange(len(end))
        for amount in np.unique(given[given > 0])[::-1].tolist():
            here = self.has[:, given == amount]
            beyond = (here[end[left]] & ~here[begin[left]]).any(axis=1)
            found[left[beyond]] = amount
            left = left[~beyond]
        return found

    @cached_property
    def larger(self) -> Flags:
        """For every set, which others have all of its blocks and more."""
        missing = self.has.astype(np.float32) @ (~self.has).T.astype(np.float32)
        return np.asarray((missing == 0) & ~np.eye(len(self), dtype=bool))


def _closures(layers: LayerBlocks) -> list[int]:
    """For every block, the bits of the block and of all blocks before it; blocks may be before each other."""
    before: list[list[int]] = [[] for _ in range(len(layers))]
    for source, target in layers.edges:
        before[target].append(source)
    closures = []
    for block in range(len(layers)):
        seen, waiting = 1 << block, [block]
        while waiting:
            for source in before[waiting.pop()]:
                if not seen >> source & 1:
                    seen |= 1 << source
                    waiting.append(source)
        closures.append(seen)
    return closures
