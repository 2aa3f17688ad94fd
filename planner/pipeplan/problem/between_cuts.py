"""Shared weights and workspaces between two cuts: two quantities that are not differences of totals.

Layers may share weights. A stage that holds some of these layers, but not all, has a *shared copy* of the weights. The
stage's layers alone determine whether it has a copy, and the cost of the copy (docs/cost-model.md, "Shared weights").

The largest workspace is a maximum. If every cut contains the previous cut, a sparse table has the maxima over 1, 2, 4,
… cuts. Two of its entries give the maximum over any number of cuts (Bender and Farach-Colton, The LCA problem
revisited, 2000). Otherwise the sizes of workspaces are tried from the largest down, each for all units of that size. A
model has few sizes, because most layers occur several times.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeplan.profile_data.profile import Profile

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]


@dataclass(frozen=True)
class SharedWeight:
    """Weights that several units share.

    Units are indices. The parameter bytes of the first unit include the weights.
    """

    units: tuple[int, ...]
    bytes: int

    def split_by(self, held: Collection[int]) -> bool:
        """Whether a stage with these units has a shared copy: some, but not all, units that share the weights."""
        return any(unit in held for unit in self.units) and not all(unit in held for unit in self.units)

    def copied_in(self, held: Collection[int]) -> bool:
        """Whether a stage with these units holds the weights, but its units' parameter bytes do not include them."""
        return self.units[0] not in held and any(unit in held for unit in self.units)


def shared_weights(profile: Profile, unit_of: Mapping[str, int]) -> tuple[SharedWeight, ...]:
    """The weights of a profile that units share, given the unit of every layer."""
    found = []
    for tie in profile.tied:
        units = tuple(dict.fromkeys(unit_of[name] for name in tie.layers))
        if len(units) > 1 and tie.bytes:
            found.append(SharedWeight(units, tie.bytes))
    return tuple(found)


def copied_bytes(shared: Sequence[SharedWeight], held: Collection[int]) -> int:
    """Bytes of the weights that a stage with these units holds in addition to the parameter bytes of its units."""
    return sum(weight.bytes for weight in shared if weight.copied_in(held))


@dataclass(frozen=True)
class SharedInCuts:
    """The additional bytes and seconds of shared weights for the stages between two cuts, as arrays."""

    members: Ints
    """For every weight (rows) and cut, the number of units inside the cut that share it."""
    first: Ints
    """For every weight and cut, 1 if the first unit that shares the weight is inside the cut, else 0."""
    bytes: Floats
    """Bytes of every weight."""
    exchange_s: Floats
    """Seconds for the exchange of each weight's gradient, charged to each stage that takes part."""

    @staticmethod
    def of(shared: Sequence[SharedWeight], ideals: Sequence[int], exchange_s: Sequence[float]) -> SharedInCuts:
        """The arrays for shared weights and cuts, given as bit sets of units."""
        masks = [sum(1 << unit for unit in weight.units) for weight in shared]
        return SharedInCuts(
            np.array([[(ideal & mask).bit_count() for ideal in ideals] for mask in masks], dtype=np.intp),
            np.array([[ideal >> weight.units[0] & 1 for ideal in ideals] for weight in shared], dtype=np.intp),
            np.array([float(weight.bytes) for weight in shared]),
            np.array(exchange_s),
        )

    def copied(self, starts: Ints, ends: Ints) -> Floats:
        """Bytes of shared weights that the stages between two cuts hold beyond the parameter bytes of their units."""
        lacking = self.first[:, ends] == self.first[:, starts]
        holding = self.members[:, ends] > self.members[:, starts]
        return np.asarray(np.tensordot(self.bytes, lacking & holding, axes=1))

    def exchanged_s(self, starts: Ints, ends: Ints) -> Floats:
        """Seconds that the stages between two cuts are charged for exchanging gradients of shared weights."""
        held = self.members[:, ends] - self.members[:, starts]
        whole = self.members[:, -1].reshape(-1, *(1,) * (held.ndim - 1))
        return np.asarray(np.tensordot(self.exchange_s, (held > 0) & (held < whole), axes=1))


@dataclass(frozen=True)
class Workspaces:
    """The workspaces of a model's units, in bytes, by cut. All arrays are empty if no unit has a workspace."""

    words: NDArray[np.uint64]
    """The units inside every cut, as one row of words for each cut (`Cuts.words`)."""
    sizes: Floats
    """The distinct sizes of workspaces in bytes, the largest first."""
    masks: NDArray[np.uint64]
    """The units with a workspace of each size, as words."""
    ranges: Floats
    """Row k, column I: the largest workspace between cut I and the cut 2^k later. This table is used only in a chain of
    cuts."""

    @staticmethod
    def of(words: NDArray[np.uint64], unit_bytes: Sequence[int], *, chain: bool) -> Workspaces:
        """The workspaces of units.

        `words` has the units inside every cut. In a `chain`, each cut contains the previous cut."""
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
        """The largest workspace of the units between each target and a cut: one cut for all, or one for each target."""
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
