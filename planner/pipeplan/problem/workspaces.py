"""The largest workspace of the units between two cuts: a maximum, which is no difference of totals as sums are.

Where every cut contains the one before it, a table of the largest workspaces over 1, 2, 4, … cuts has the maximum over
any number of them in two entries (a sparse table: Bender and Farach-Colton, The LCA problem revisited, 2000). Elsewhere
units are tried from the largest workspace down, those of equal size together. A model has few sizes, because most
layers come several times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]


@dataclass(frozen=True)
class Workspaces:
    """The workspaces of a model's units, in bytes, by cut. All arrays are empty where no unit has one."""

    words: NDArray[np.uint64]
    """The units inside every cut, a row of words for each (`Cuts.words`)."""
    sizes: Floats
    """The sizes that units have, the largest first."""
    masks: NDArray[np.uint64]
    """The units of each size, as words."""
    ranges: Floats
    """In a chain of cuts: in row k and column I the largest workspace between cut I and the one 2^k later."""

    @staticmethod
    def of(words: NDArray[np.uint64], unit_bytes: Sequence[int], *, chain: bool) -> Workspaces:
        """The workspaces of units; `words` has those inside every cut, and in a `chain` each contains the last."""
        sizes = sorted({size for size in unit_bytes if size}, reverse=True)
        masks = np.zeros((len(sizes), words.shape[1]), dtype=np.uint64)
        row = {size: number for number, size in enumerate(sizes)}
        for unit, size in enumerate(unit_bytes):
            if size:
                masks[row[size], unit // 64] |= np.uint64(1 << unit % 64)
        found = Workspaces(words, np.array(sizes, dtype=float), masks, np.zeros((0, len(words))))
        if not (chain and sizes):
            return found
        return Workspaces(words, found.sizes, masks, _ranges(found))

    def between(self, cuts: int | Ints, targets: Ints) -> Floats:
        """The largest workspace of the units between each of `targets` and a cut, or between each and a cut of its
        own."""
        if len(self.ranges):
            row = np.frexp(np.asarray(cuts - targets, dtype=float))[1] - 1
            return np.asarray(np.maximum(self.ranges[row, targets], self.ranges[row, cuts - (1 << row)]))
        return self._tried(cuts, targets)

    def _tried(self, cuts: int | Ints, targets: Ints) -> Floats:
        found, left = np.zeros(len(targets)), np.arange(len(targets))
        if not len(self.sizes):
            return found
        inside = self.words[cuts] & ~self.words[targets]
        for size, mask in zip(self.sizes.tolist(), self.masks, strict=True):
            held = (inside[left] & mask).any(axis=1)
            found[left[held]] = size
            left = left[~held]
        return found


def _ranges(workspaces: Workspaces) -> Floats:
    count = len(workspaces.words)
    starts = np.arange(count - 1)
    rows = [np.append(workspaces._tried(starts + 1, starts), 0.0)]
    width = 1
    while 2 * width < count:
        shorter, longer = rows[-1], np.zeros(count)
        longer[: count - 2 * width] = np.maximum(shorter[: count - 2 * width], shorter[width : count - width])
        rows.append(longer)
        width *= 2
    return np.array(rows)
