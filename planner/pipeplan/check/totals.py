"""Sums of costs over the layers inside every cut, and the traffic across it; a stage's sums are differences of two."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeplan.check.model import Floats, Model


@dataclass(frozen=True)
class Totals:
    """Arrays over all cuts of the model, from the empty one to the one with all layers; seconds and bytes."""

    cuts: list[int]
    """The cuts as bit sets."""
    packed: NDArray[np.uint8]
    """The layers inside every cut, eight to a byte."""
    forward_s: Floats
    backward_s: Floats
    parameters: Floats
    buffers: Floats
    saved: Floats
    sent: Floats
    """Bytes that cross the cut forward."""
    returned: Floats
    """Bytes that cross the cut backward."""

    @property
    def busier(self) -> Floats:
        """Bytes that cross the cut in the busier direction."""
        found: Floats = np.maximum(self.sent, self.returned)
        return found

    @staticmethod
    def of(model: Model, limit: int) -> Totals:
        """The totals of a model. Raises an `InputError` where it has more than `limit` cuts."""
        cuts = model.cuts(limit)
        inside = model.members(cuts)
        weights = inside.astype(float)
        sent, returned = model.crossing(cuts)
        return Totals(
            cuts=cuts,
            packed=np.packbits(inside, axis=1),
            forward_s=weights @ model.forward_s,
            backward_s=weights @ (model.backward_s + model.update_s),
            parameters=weights @ model.parameters,
            buffers=weights @ model.buffers,
            saved=weights @ model.saved,
            sent=sent,
            returned=returned,
        )

    def inside(self, cut: int) -> NDArray[np.intp]:
        """Indices of the cuts that are proper subsets of a cut."""
        subsets = ~(self.packed & ~self.packed[cut]).any(axis=1)
        subsets[cut] = False
        return np.flatnonzero(subsets)

    def holds(self, cuts: NDArray[np.intp], layer: int) -> NDArray[np.bool_]:
        """Which of some cuts contain a layer."""
        found: NDArray[np.bool_] = self.packed[cuts, layer // 8] >> (7 - layer % 8) & 1 == 1
        return found
