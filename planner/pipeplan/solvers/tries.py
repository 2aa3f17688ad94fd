"""Stages that a search considers, many at a time: where they may end, and pairs of such a place and a cut."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeplan.cuts import Flags, Floats, Ints
from pipeplan.solvers.states import States
from pipeplan.solvers.terms import StageTerms


@dataclass(frozen=True)
class Tries:
    """Pairs of a place to put stages and a cut I, flattened: stages to be sized, a column each."""

    numbers: Ints
    behind: Floats
    """The demand of the state behind."""

    @staticmethod
    def of(stage: StageTerms, states: States, places: Places, need: Ints, at: tuple[Ints, Ints, Ints]) -> Tries:
        """From level, target and place of each; `need` is the workers that the cut I needs before it."""
        level, target, place = at
        state = places.state[place]
        lowest = np.maximum(need[stage.targets][target], places.lowest[place])
        rows = (
            target,
            level,
            state,
            places.end[place],
            lowest,
            places.room[level, place],
            states.first[state],
            states.level[state],
        )
        return Tries(np.stack(rows), states.demand[state])

    def take(self, rows: Ints | Flags) -> Tries:
        """Some of them."""
        return Tries(self.numbers[:, rows], self.behind[rows])

    def _row(self, index: int) -> Ints:
        row: Ints = self.numbers[index]
        return row

    @property
    def target(self) -> Ints:
        """Index into the cuts I that are considered."""
        return self._row(0)

    @property
    def level(self) -> Ints:
        """That the stage's workers span, exactly."""
        return self._row(1)

    @property
    def state(self) -> Ints:
        """The state that the stage is put in front of."""
        return self._row(2)

    @property
    def end(self) -> Ints:
        """One past the last worker."""
        return self._row(3)

    @property
    def next_first(self) -> Ints:
        """The first worker of the next stage."""
        return self._row(6)

    @property
    def next_level(self) -> Ints:
        """What the next stage spans."""
        return self._row(7)

    def roomy(self, replicas: Floats) -> Flags:
        """Whether there are so many workers within the level, and enough before them."""
        found: Flags = (replicas <= self.numbers[5]) & (replicas <= self.numbers[3] - self.numbers[4])
        return found


Sized = tuple[Tries, Floats, Floats, Floats]
"""Stages with their replicas, depths and demands."""


@dataclass(frozen=True)
class Places:
    """Where stages may end: a state and an e ≤ p."""

    state: Ints
    end: Ints
    lowest: Ints
    """No stage may start before, or the boundary behind it would take too long."""
    room: Ints
    """By level 0 … L (rows): workers of e's component of that level up to e."""

    def __len__(self) -> int:
        return len(self.end)
