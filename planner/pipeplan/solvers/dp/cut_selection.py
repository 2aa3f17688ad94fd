"""Selects the cuts to search: leaves out cuts that provably do not matter, and finds small selections of good cuts.

Let v be a unit without cost: no work, no parameters of its own or shared, and, if memory is limited, nothing saved, no
buffers and no workspace. Such a unit may move across a cut, which only changes the bytes that cross. Let c(I) be these
bytes, separately for each direction. The cut I is left out in two cases.

In the first case, v moves later: v ∈ I, nothing in I reads v, and c(I - v) ≤ c(I). For every plan with the cut I there
is an equal plan without it: take v out of I and out of all smaller cuts I' that hold it. Removing v adds the bytes of
tensors that v reads and that nothing outside has read so far. A smaller cut has fewer of them, so c(I' - v) ≤ c(I').

In the second case, v moves earlier: v ∉ I, all that v reads is in I, c(I + v) ≤ c(I), and c is smaller in one
direction. The same argument applies to v and all larger cuts.

Both kinds of moves end, because the sum of all c falls, or stays the same while units move later. So some best plan has
no such cut. A stage may become empty and vanish. Therefore no cut is left out if the number of stages is fixed or
layers are pinned to stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from pipeplan.problem.cuts import Cuts, Flags
from pipeplan.problem.problem import Problem
from pipeplan.problem.units import Unit
from pipeplan.solvers.dp.budget import OutOfTime


def prune_cuts(problem: Problem, cuts: Cuts) -> Cuts:
    """The cuts that remain after leaving out superfluous cuts."""
    options = problem.options
    if options.stages is not None or options.pins:
        return cuts
    position = {ideal: index for index, ideal in enumerate(cuts.ideals)}
    kept = np.ones(len(cuts.ideals), dtype=bool)
    for unit, costs in enumerate(problem.units):
        if not _is_costless(problem, costs) or any(unit in weight.units for weight in problem.shared):
            continue
        bit = 1 << unit
        for index in (np.flatnonzero(kept[1:-1]) + 1).tolist():
            other = position.get(cuts.ideals[index] ^ bit)
            if other is not None and _no_costlier(cuts, other, index, strictly=not cuts.ideals[index] & bit):
                kept[index] = False
    return cuts if kept.all() else cuts.only(kept)


def _is_costless(problem: Problem, unit: Unit) -> bool:
    costless = unit.forward_s + unit.backward_s == 0 and unit.parameter_bytes == 0
    needed = unit.saved_bytes + unit.buffer_bytes + unit.workspace_bytes
    return costless and (not problem.options.memory or needed == 0)


def _no_costlier(cuts: Cuts, first: int, second: int, *, strictly: bool) -> bool:
    """Whether at most as many bytes cross cut `first` as `second` in both directions, and with `strictly` fewer in
    one."""
    sent, returned = cuts.sent[first] - cuts.sent[second], cuts.returned[first] - cuts.returned[second]
    return bool(sent <= 0 and returned <= 0 and (not strictly or sent + returned < 0))


SELECTED_CUTS = 48
"""Number of cuts in a selection that is spread over all cuts."""

# Largest number of cuts near each end of a stage in the search for a better plan.
_NEAREST = 24

# Each selection has `_GROWTH` times as many cuts as the previous one, and at most the share `_PART` of all cuts.
_GROWTH, _PART = 4, 0.25

# Relative distance below the best step time at which to search for a better plan: the first and the smallest distance.
_FIRST_STEP, _LAST_STEP = 4e-3, 1e-6

Found = TypeVar("Found")


def cheap_cuts(cuts: Cuts, count: int | None = None) -> Flags:
    """Mask selecting, for each of `count` equal shares of the work, the cut that the fewest bytes cross."""
    count = count or SELECTED_CUTS
    part = np.minimum((cuts.work_s / cuts.work_s[-1] * count).astype(np.intp), count - 1)
    order = np.lexsort((np.arange(len(part)), cuts.sent + cuts.returned, part))
    mask = np.zeros(len(part), dtype=bool)
    mask[order[np.unique(part[order], return_index=True)[1]]] = True
    mask[[0, -1]] = True
    return mask


def selections(cuts: Cuts, ends: Sequence[int]) -> list[Flags]:
    """Masks that select more and more cuts, including cuts with nearly the work of the given `ends`.

    Each mask selects a small part of all cuts, so that a search on it is quick. If there are few cuts, there are no
    masks.
    """
    most = int(len(cuts.ideals) * _PART)
    counts = [count for count in (SELECTED_CUTS * _GROWTH**step for step in range(8)) if count < most]
    return [_around(cuts, count, min(_NEAREST, (most - count) // max(1, len(ends))), ends) for count in counts]


def _around(cuts: Cuts, count: int, nearest: int, ends: Sequence[int]) -> Flags:
    mask = cheap_cuts(cuts, count)
    for end in ends:
        distance = np.abs(cuts.work_s - cuts.work_s[end])
        mask[np.argpartition(distance, nearest)[:nearest]] = True
        mask[end] = True
    return mask


def refined_result(
    find: Callable[[Found, float], tuple[float, Found] | None],
    known: tuple[float, Found],
    enough: float,
    report: Callable[[float], None],
) -> tuple[float, Found]:
    """A result at least as good as a known one. The search ends at the first result of at most `enough`.

    `find(around, limit)` looks for a result within a limit that is similar to `around`. `report` is called with every
    better result. After a success, the step below the best result grows. After a failure, the smallest step follows. If
    it fails, too, every longer step would fail, and the search ends. Otherwise the search continues with shorter steps.
    """
    step, is_last = _FIRST_STEP, False
    try:
        while known[0] > enough:
            found = find(known[1], max(known[0] * (1 - (_LAST_STEP if is_last else step)), enough))
            if found is not None and found[0] < known[0]:
                known, step, is_last = found, step if is_last else 2 * step, False
                report(known[0])
            elif is_last:
                break
            else:
                step, is_last = max(step / 4, _LAST_STEP), True
    except OutOfTime:
        pass
    return known
