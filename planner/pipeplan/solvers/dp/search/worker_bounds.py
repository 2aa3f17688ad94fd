"""Lower bounds on the workers of the stages in front of a cut, for their work and their memory together.

A stage with r replicas needs r ≥ ρ · work for its step time, where ρ is in workers per second of work, and r · capacity
≥ memory. Work and memory add up over the layers of the stages in front, and so does every mixture of both terms:

    r ≥ λ · ρ · work + (1 - λ) · memory / capacity        for any 0 ≤ λ ≤ 1

A stage that recomputes has more work and needs less memory. It is unknown which stages recompute, so every layer takes
the smaller of its two terms. The mixtures give better bounds than λ = 0 and λ = 1: at λ = 0 recomputation costs
nothing, and at λ = 1 keeping activations costs nothing.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from pipeplan.cost.stage_table import unit_figures
from pipeplan.problem.cuts import Cuts, Floats, Ints
from pipeplan.solvers.dp.search.cost_terms import CostTerms

_SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""The values of λ."""
_ROUNDING = 1e-9
_FIRST_ROWS = 16
"""Initial number of rows of the table."""
_TOGETHER, _TOGETHER_LINEAR = 16, 64
"""Number of rows that are computed together, if stages may recompute and if they may not."""
EXACT_DEMANDS = 64
"""Largest demand up to which every whole number has its own entry. Above this demand, every doubling has this many
entries."""
_LARGEST_MATRIX = 4_000_000
"""Largest number of cuts times units for which the units inside each cut are kept as a matrix."""


class WorkerBounds:
    """Lower bounds on the workers in front of each cut, by the demand of the stage behind it (`states`)."""

    def __init__(
        self, terms: CostTerms, per_second: float, *, recompute: bool, demands: tuple[float, float] = (0.0, np.inf)
    ) -> None:
        """Prepare an empty table.

        `per_second` is ρ for seconds on the device; `demands` are the smallest and largest demand."""
        self._terms, self._rate, self._recompute = terms, per_second / terms.speed, recompute
        self._demands = demands
        """The smallest and the largest demand. Demands outside of this range are clipped to it."""
        self._rounded = np.zeros(0, dtype=np.intp)
        """For every whole demand that may be looked up, the rounded demand that represents it."""
        self._known_rows = np.full(0, -1, dtype=np.intp)
        """For every whole demand, the row of its rounded demand in the table, or -1."""
        self._table: Floats = np.zeros((_FIRST_ROWS, len(terms.cuts.ideals)))
        """The bounds: a row for each rounded demand that was looked up (and empty rows for more), a column for every
        cut."""
        self._count = 0

    @staticmethod
    def suits(cuts: Cuts) -> bool:
        """Whether there are few enough cuts for these bounds."""
        return cuts.chain or len(cuts.ideals) * len(cuts.workspace_bytes) <= _LARGEST_MATRIX

    def at(self, targets: Ints, demand: Floats) -> Floats:
        """Lower bound on the workers in front of cuts, given the demands of the stages behind them; both broadcast."""
        rows = self._rows_of(demand)
        return np.asarray(self._table[rows, targets])

    def _rows_of(self, demand: Floats) -> Ints:
        """The rows of the table for some demands."""
        whole = np.clip(demand, *self._demands).astype(np.intp)
        highest = int(whole.max(initial=0))
        if highest >= len(self._known_rows):
            self._rounded = _rounded_down(np.arange(2 * highest + 1))
            self._known_rows = np.concatenate([self._known_rows, np.full(2 * highest + 1 - len(self._known_rows), -1)])
        rows = self._known_rows[whole]
        if rows.min(initial=0) < 0:
            self._add(self._with_next(np.unique(self._rounded[whole[rows < 0]])))
            rows = self._known_rows[whole]
        return rows

    def _with_next(self, demands: Ints) -> Ints:
        """The given rounded demands and further ones above them that are not in the table yet.

        Computing many rows together takes little more time."""
        steps = np.maximum(demands // EXACT_DEMANDS, 1)
        together = _TOGETHER if self._recompute else _TOGETHER_LINEAR
        above = (demands[:, None] + steps[:, None] * np.arange(1, together)).ravel()
        above = self._rounded[above[above < len(self._rounded)]]
        return np.union1d(demands, above[self._known_rows[above] < 0])

    def _add(self, demands: Ints) -> None:
        """Add a row to the table for each of these rounded demands."""
        while self._count + len(demands) > len(self._table):
            self._table = np.concatenate([self._table, np.zeros_like(self._table)])
        self._table[self._count : self._count + len(demands)] = self._rows(demands.astype(float))
        begins, ends = np.searchsorted(self._rounded, demands), np.searchsorted(self._rounded, demands + 1)
        for row, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True), self._count):
            self._known_rows[begin:end] = row
        self._count += len(demands)

    def _rows(self, demands: Floats) -> Floats:
        """The bounds for these demands (rows), by cut."""
        if not self._recompute:
            return self._without_recomputing(demands)
        least = np.zeros((len(demands), len(self._terms.cuts.ideals)))
        variants = [self._units(demands[:, None], recompute=one) for one in (False, True)]
        for share in _SHARES:
            mixed = [share * for_work + (1 - share) * for_memory for for_work, for_memory in variants]
            np.maximum(least, self._in_cuts(np.minimum.reduce(mixed)), out=least)
        return np.ceil(least * (1 - _ROUNDING) - _ROUNDING)

    def _without_recomputing(self, demands: Floats) -> Floats:
        """The bounds if no stage recomputes. No mixture then exceeds the larger of work and memory."""
        work, memory = self._linear
        slopes = memory[1] - memory[0]
        least = np.maximum(work, memory[0] + demands[:, None] * slopes)
        return np.asarray(np.ceil(least * (1 - _ROUNDING) - _ROUNDING))

    @cached_property
    def _linear(self) -> tuple[Floats, Floats]:
        """Workers in front of every cut that the work needs, and that the memory needs at the demands 0 and 1."""
        work, memory = self._units(np.array([[0.0], [1.0]]), recompute=False)
        return self._in_cuts(work[None, :])[0], self._in_cuts(memory)

    def _units(self, demand: Floats, *, recompute: bool) -> tuple[Floats, Floats]:
        """Workers that every unit (columns) needs for its work, and at every demand (rows) for its memory."""
        terms = self._terms
        layers = terms.layers_alone(unit_figures(terms.problem.units), recompute=recompute)
        once, each = terms.memory_of_layers(layers)
        memory = (once + each * demand) / terms.problem.capacity
        return self._rate * np.asarray(layers.work_s), memory

    def _in_cuts(self, values: Floats) -> Floats:
        """The sums of values of units (columns) over the units inside every cut."""
        cuts = self._terms.cuts
        if cuts.chain:
            running = np.concatenate([np.zeros((len(values), 1)), np.cumsum(values[:, self._chain[0]], axis=1)], axis=1)
            return np.asarray(running[:, self._chain[1]])
        return np.asarray(values @ self._inside)

    @cached_property
    def _chain(self) -> tuple[Ints, Ints]:
        """For a chain of cuts: the units in the order in which cuts take them up, and the number of units of each
        cut."""
        cuts = self._terms.cuts
        order = [unit for cut in range(1, len(cuts.ideals)) for unit in cuts.members(cut - 1, cut)]
        counts = [ideal.bit_count() for ideal in cuts.ideals]
        return np.array(order, dtype=np.intp), np.array(counts, dtype=np.intp)

    @cached_property
    def _inside(self) -> Floats:
        """A row for every unit, a column for every cut: 1 where the unit is inside the cut."""
        bits = np.unpackbits(self._terms.cuts.words.view(np.uint8), axis=1, bitorder="little")
        inside: Floats = bits[:, : len(self._terms.problem.units)].T.astype(float)
        return inside


def _rounded_down(whole: Ints) -> Ints:
    """The given demands rounded down to one of a few whole numbers."""
    step = np.maximum(whole // EXACT_DEMANDS, 1)
    power = 1 << np.floor(np.log2(step)).astype(np.intp)
    return np.asarray(whole // power * power)
