"""Candidate stages of a search, many at a time: pairs of an end position and the cut at which the stage begins."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeplan.problem.cuts import Flags, Floats, Ints
from pipeplan.solvers.dp.states.search_states import SearchStates
from pipeplan.solvers.dp.terms.stage_terms import StageTerms


@dataclass(frozen=True)
class CandidateStages:
    """Stages to be sized, one column each: pairs of an end position and a cut I, flattened."""

    numbers: Ints
    behind: Floats
    """The demand of the state behind each stage."""

    @staticmethod
    def of(
        stage: StageTerms, states: SearchStates, places: EndPositions, need: Ints, pairs: tuple[Ints, Ints, Ints]
    ) -> CandidateStages:
        """Build the pairs from the level, target and end position of each; `need` is the workers needed before I."""
        level, target, position = pairs
        state = places.state[position]
        lowest = np.maximum(need[stage.targets][target], places.lowest[position])
        rows = (
            target,
            level,
            state,
            places.end[position],
            lowest,
            places.room[level, position],
            states.first[state],
            states.level[state],
        )
        return CandidateStages(np.stack(rows), states.demand[state])

    def take(self, rows: Ints | Flags) -> CandidateStages:
        """The selected stages."""
        places = rows.nonzero()[0] if rows.dtype == np.bool_ else rows
        if len(places) == len(self.behind) and rows.dtype == np.bool_:
            return self
        return CandidateStages(self.numbers.take(places, axis=1), self.behind[places])

    def _row(self, index: int) -> Ints:
        row: Ints = self.numbers[index]
        return row

    @property
    def target(self) -> Ints:
        """Index into the cuts I under consideration."""
        return self._row(0)

    @property
    def level(self) -> Ints:
        """The level that the stage's workers span, exactly."""
        return self._row(1)

    @property
    def state(self) -> Ints:
        """The state in front of which the stage is put."""
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
        """The level that the next stage spans."""
        return self._row(7)

    def has_room(self, replicas: Floats) -> Flags:
        """Whether the level has room for so many replicas, and enough workers remain in front of them."""
        fits: Flags = replicas <= self.most
        return fits

    @property
    def most(self) -> Ints:
        """The most replicas for which the level has room and enough workers remain in front."""
        most: Ints = np.minimum(self.numbers[5], self.numbers[3] - self.numbers[4])
        return most


SizedStages = tuple[CandidateStages, Floats, Floats, Floats]
"""Stages with their replicas, depths and demands."""


@dataclass(frozen=True)
class EndPositions:
    """End positions of stages: pairs of a state and an end e ≤ p."""

    state: Ints
    end: Ints
    lowest: Ints
    """The lowest first worker of a stage for which the boundary behind it is fast enough."""
    room: Ints
    """By level 0 … L (rows): workers, up to e, of the component of that level that holds e - 1."""

    def __len__(self) -> int:
        return len(self.end)

    def take(self, rows: slice) -> EndPositions:
        """The selected positions."""
        return EndPositions(self.state[rows], self.end[rows], self.lowest[rows], self.room[:, rows])
