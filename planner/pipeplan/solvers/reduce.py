"""Leaves out cuts that provably cannot matter, before any search.

A unit v that costs nothing (no work, no parameters; where memory limits, nothing saved and no buffers either) may move
across a cut at no cost but that of the bytes that cross. Let c(I) be those bytes, each direction on its own.

  later    v ∈ I, nothing in I reads v, c(I - v) ≤ c(I). Then every plan with the cut I is matched by one without:
           take v out of I and of all smaller cuts I' that hold it. The bytes that v's removal adds are those of tensors
           read by v and, up to now, by nobody outside: fewer the smaller the cut, so c(I' - v) ≤ c(I') as well.
  earlier  v ∉ I, all that v reads is in I, c(I + v) ≤ c(I), and less in one direction. Likewise, with all larger cuts.

Both end, as the sum of all c falls, or stays while units move later: so some best plan has no such cut. A stage may
become empty and vanish: with a fixed number of stages, or layers pinned to stages, nothing is left out.
"""

from __future__ import annotations

import numpy as np

from pipeplan.cuts import Cuts
from pipeplan.problem import Problem, Unit


def reduced(problem: Problem, cuts: Cuts) -> Cuts:
    """The cuts without those that some best plan does without."""
    options = problem.options
    if options.stages is not None or options.pins or options.several:
        return cuts
    place = {ideal: index for index, ideal in enumerate(cuts.ideals)}
    kept = np.ones(len(cuts.ideals), dtype=bool)
    for unit, costs in enumerate(problem.units):
        if not _free(problem, costs):
            continue
        bit = 1 << unit
        for index in (np.flatnonzero(kept[1:-1]) + 1).tolist():
            other = place.get(cuts.ideals[index] ^ bit)
            if other is not None and _better(cuts, other, index, strictly=not cuts.ideals[index] & bit):
                kept[index] = False
    return cuts if kept.all() else cuts.only(kept)


def _free(problem: Problem, unit: Unit) -> bool:
    costless = unit.forward_s + unit.backward_s == 0 and unit.parameter_bytes == 0
    return costless and (not problem.options.memory or unit.saved_bytes + unit.buffer_bytes == 0)


def _better(cuts: Cuts, one: int, other: int, *, strictly: bool) -> bool:
    """Whether no more bytes cross the cut `one` than `other` in either direction, and fewer in one if `strictly`."""
    sent, returned = cuts.sent[one] - cuts.sent[other], cuts.returned[one] - cuts.returned[other]
    return bool(sent <= 0 and returned <= 0 and (not strictly or sent + returned < 0))
