"""Weights that several layers share, where the stages that hold some of these layers each keep a copy of them.

A stage that holds some of the layers, and not all, has a *shared copy*. Whether it does, and what the copy costs,
follows from the stage's layers alone (docs/cost-model.md, "Shared weights").
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
    """Weights that several units share. Units are indices; the parameter bytes of the first include the weights."""

    units: tuple[int, ...]
    bytes: int

    def split_by(self, held: Collection[int]) -> bool:
        """Whether a stage with these units has a shared copy: some of the units that share the weights, not all."""
        return any(unit in held for unit in self.units) and not all(unit in held for unit in self.units)

    def copied_in(self, held: Collection[int]) -> bool:
        """Whether the sum of parameter bytes over these units lacks the weights that the stage holds."""
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
    """Bytes of the weights that a stage with these units holds beside the parameter bytes of its units."""
    return sum(weight.bytes for weight in shared if weight.copied_in(held))


@dataclass(frozen=True)
class SharedInCuts:
    """The additions of shared weights to the stages between two cuts, as arrays."""

    members: Ints
    """For every weight (rows) and cut, the number of units inside the cut that share it."""
    first: Ints
    """The additions for the first of these units alone."""
    bytes: Floats
    """Bytes of every weight."""
    exchange_s: Floats
    """Seconds that one stage is charged for the exchange of each weight's gradient."""

    @staticmethod
    def of(shared: Sequence[SharedWeight], ideals: Sequence[int], exchange_s: Sequence[float]) -> SharedInCuts:
        """The weights that units share, for cuts that are bit sets of units."""
        masks = [sum(1 << unit for unit in weight.units) for weight in shared]
        return SharedInCuts(
            np.array([[(ideal & mask).bit_count() for ideal in ideals] for mask in masks], dtype=np.intp),
            np.array([[ideal >> weight.units[0] & 1 for ideal in ideals] for weight in shared], dtype=np.intp),
            np.array([float(weight.bytes) for weight in shared]),
            np.array(exchange_s),
        )

    def copied(self, starts: Ints, ends: Ints) -> Floats:
        """Bytes that stages from cuts to larger cuts hold beside the parameter bytes of their units."""
        lacking = self.first[:, ends] == self.first[:, starts]
        holding = self.members[:, ends] > self.members[:, starts]
        return np.asarray(np.tensordot(self.bytes, lacking & holding, axes=1))

    def exchanged_s(self, starts: Ints, ends: Ints) -> Floats:
        """Seconds that these stages are charged for the exchange of gradients."""
        held = self.members[:, ends] - self.members[:, starts]
        whole = self.members[:, -1].reshape(-1, *(1,) * (held.ndim - 1))
        return np.asarray(np.tensordot(self.exchange_s, (held > 0) & (held < whole), axes=1))
