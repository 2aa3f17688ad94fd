"""States that wait for their cut: added in bulk, taken cut by cut, from the last cut to the first."""

from __future__ import annotations

import numpy as np

from pipeplan.cuts import Ints
from pipeplan.solvers.states import States

# Cuts are sorted by blocks first, and within a block when the search reaches it, which makes far fewer pieces.
_BLOCK = 32


class Pool:
    """Holds the waiting states of `cuts` cuts."""

    def __init__(self, cuts: int) -> None:
        self._waiting: dict[int, list[tuple[Ints, States]]] = {}
        self._open: list[tuple[Ints, States]] = []
        self._opened = -(-cuts // _BLOCK)

    def add(self, cuts: Ints, states: States) -> None:
        """Add states, each at its cut, which must lie before all cuts already taken."""
        order = np.argsort(cuts, kind="stable")
        cuts, states = cuts[order], states.take(order)
        blocks = cuts // _BLOCK
        edges = (np.flatnonzero(np.diff(blocks)) + 1).tolist()
        for begin, end in zip([0, *edges], [*edges, len(cuts)], strict=True):
            piece = slice(begin, end)
            block = int(blocks[begin])
            target = self._open if block == self._opened else self._waiting.setdefault(block, [])
            target.append((cuts[piece], states.take(piece)))

    def take(self, cut: int) -> States | None:
        """All states at a cut, or None if there are none."""
        if cut // _BLOCK < self._opened:
            self._opened = cut // _BLOCK
            self._open = self._sorted(self._waiting.pop(self._opened, []))
        parts = []
        for cuts, states in self._open:
            begin, end = np.searchsorted(cuts, (cut, cut + 1))
            if begin < end:
                parts.append(states.take(slice(int(begin), int(end))))
        return States.join(parts) if parts else None

    @staticmethod
    def _sorted(pieces: list[tuple[Ints, States]]) -> list[tuple[Ints, States]]:
        """All pieces as one, sorted by cut."""
        if not pieces:
            return []
        cuts = np.concatenate([cuts for cuts, _ in pieces])
        states = States.join([states for _, states in pieces])
        order = np.argsort(cuts, kind="stable")
        return [(cuts[order], states.take(order))]
