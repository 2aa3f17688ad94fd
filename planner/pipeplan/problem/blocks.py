"""Finds the repeated blocks of a model, such as the layers of a transformer, and the cuts between them.

Units repeat with a period if their sizes do: bytes of parameters, of buffers, and of tensors saved for the backward
pass. Times are not compared, because measurements of equal layers differ. Within each repetition, the cuts with the
least traffic are kept. In a transformer only the residual stream crosses these cuts. A search over the kept cuts is
much faster than a search over all cuts, and its plans are nearly as fast if a stage has several blocks. A bound from
the kept cuts holds only for plans with these cuts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from pipeplan.problem.cuts import Cuts, Flags, Floats, Ints
from pipeplan.problem.problem import Problem
from pipeplan.problem.units import Unit

LEAST_REPEATS = 3
"""Smallest number of repetitions of a block."""
LEAST_SHARE = 0.5
"""Smallest share of all units that must lie in repeated blocks."""
MOST_CUTS_KEPT = 0.5
"""Largest share of all cuts that may be kept. If more are kept, a search over them is hardly faster."""


def block_cuts(problem: Problem, cuts: Cuts) -> Flags | None:
    """A mask of the cuts between repeated blocks; None if the model has no repeated blocks.

    Each selected cut contains the previous one. Cuts outside of the repetitions are kept, such as the cuts around an
    embedding.
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
    """Whether each cut along the order of the units is kept; `crossing` has the bytes that cross each cut."""
    kept = np.ones(len(crossing), dtype=bool)
    for start, stop, period in regions:
        least = np.inf
        for first in range(start + 1, stop, period):
            inside = slice(first, min(first + period, stop))
            if first + period <= stop:  # an incomplete last repetition keeps the limit of the one before it
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
    """(start, stop, period) of the longest repetition, with the shortest period among equally long repetitions."""
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
