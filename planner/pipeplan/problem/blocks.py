"""Finds the repeated blocks of a model, such as the layers of a transformer, and the cuts between them.

Units repeat with a period where their sizes do: parameters, buffers, and what they save for the backward pass. Times
are not compared, as measurements of equal layers differ. Within each repetition the cuts that the fewest bytes cross
are kept. In a transformer only the residual stream crosses them. Plans that cut there are found much sooner than plans
with any cuts, and are nearly as fast where a stage has several blocks. A bound from these cuts holds for them alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from pipeplan.problem.cuts import Cuts, Flags, Floats, Ints
from pipeplan.problem.problem import Problem
from pipeplan.problem.units import Unit

LEAST_REPEATS = 3
"""The least number of repetitions of a block."""
LEAST_SHARE = 0.5
"""The least share of all units that lie in repeated blocks."""
MOST_CUTS_KEPT = 0.5
"""The largest share of all cuts that may be kept. With more, a search on them is hardly faster."""


def block_cuts(problem: Problem, cuts: Cuts) -> Flags | None:
    """A mask of the cuts between repeated blocks, each of which contains the one before it; None without blocks.

    Cuts outside of the repetitions, such as those around an embedding, are kept.
    """
    count = len(problem.units)
    regions = list(repeated_regions(problem.units))
    if sum(stop - start for start, stop, _ in regions) < LEAST_SHARE * count:
        return None
    index_of = {ideal: index for index, ideal in enumerate(cuts.ideals)}
    in_order = np.array([index_of.get((1 << units) - 1, -1) for units in range(count + 1)], dtype=np.intp)
    if (in_order < 0).any():
        return None
    kept = _between_blocks(regions, (cuts.sent + cuts.returned)[in_order])
    if kept.sum() > MOST_CUTS_KEPT * len(cuts.ideals):
        return None
    mask = np.zeros(len(cuts.ideals), dtype=bool)
    mask[in_order[kept]] = True
    return mask


def _between_blocks(regions: Sequence[tuple[int, int, int]], crossing: Floats) -> Flags:
    """Whether each cut along the order of the units is kept; `crossing` has the bytes that cross them."""
    kept = np.ones(len(crossing), dtype=bool)
    for start, stop, period in regions:
        least = np.inf
        for first in range(start + 1, stop, period):
            inside = slice(first, min(first + period, stop))
            if first + period <= stop:  # of the rest behind the last whole repetition, no more cuts are kept than there
                least = crossing[inside].min()
            kept[inside] = crossing[inside] <= least
    kept[[0, -1]] = True
    return kept


def repeated_regions(units: Sequence[Unit]) -> Iterator[tuple[int, int, int]]:
    """(first unit, one past the last, period) of every run of units that repeats, in no particular order."""
    sizes = [(len(unit.layers), unit.parameter_bytes, unit.buffer_bytes, unit.saved_bytes) for unit in units]
    number_of = {size: number for number, size in enumerate(dict.fromkeys(sizes))}
    numbers = np.array([number_of[size] for size in sizes], dtype=np.intp)
    parts = [(0, len(numbers))]
    while parts:
        first, last = parts.pop()
        found = _longest_repetition(numbers[first:last])
        if found is not None:
            start, stop, period = found
            yield first + start, first + stop, period
            parts += [(first, first + start), (first + stop, last)]


def _longest_repetition(numbers: Ints) -> tuple[int, int, int] | None:
    """(start, stop, period) of the longest stretch with a period; of several the one with the shortest period."""
    best: tuple[int, int, int] | None = None
    for period in range(1, len(numbers) // LEAST_REPEATS + 1):
        equal = numbers[period:] == numbers[:-period]
        edges = np.flatnonzero(np.diff(np.concatenate(([False], equal, [False])).astype(np.int8)))
        if not len(edges):
            continue
        starts, stops = edges[::2], edges[1::2]
        longest = int((stops - starts).argmax())
        start, stop = int(starts[longest]), int(stops[longest]) + period
        if stop - start >= LEAST_REPEATS * period and (best is None or stop - start > best[1] - best[0]):
            best = start, stop, period
    return best
