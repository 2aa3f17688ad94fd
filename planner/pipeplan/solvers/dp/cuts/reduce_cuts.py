"""Leaves out cuts that provably cannot matter, before any search.

Let v be a unit without cost: no work, no parameters of its own or shared, and, if memory is limited, nothing saved, no
buffers and no workspace. It may move across a cut, which only changes the bytes that cross. Let c(I) be these bytes,
for each direction on its own. The cut I is left out in two cases:

  later    v ∈ I, nothing in I reads v, and c(I - v) ≤ c(I). Every plan with the cut I is matched by a plan without it:
           take v out of I and out of all smaller cuts I' that hold it. Removing v adds the bytes of tensors that v
           reads and that nothing outside has read so far. A smaller cut has fewer of these, so c(I' - v) ≤ c(I') as
           well.
  earlier  v ∉ I, all that v reads is in I, c(I + v) ≤ c(I), and c is less in one direction. The same argument applies
           to v and all larger cuts.

Both kinds of moves end, because the sum of all c falls, or stays the same while units move later. So some best plan has
no such cut. A stage may become empty and vanish; with a fixed number of stages, or layers pinned to stages, no cut is
therefore left out.
"""

from __future__ import annotations

import numpy as np

from pipeplan.problem.cuts import Cuts
from pipeplan.problem.problem import Problem
from pipeplan.problem.units import Unit


def prune_cuts(problem: Problem, cuts: Cuts) -> Cuts:
    """The cuts without those that some best plan does not need."""
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
    """Whether no more bytes cross cut `first` than `second` in either direction, and with `strictly` fewer in one."""
    sent, returned = cuts.sent[first] - cuts.sent[second], cuts.returned[first] - cuts.returned[second]
    return bool(sent <= 0 and returned <= 0 and (not strictly or sent + returned < 0))
