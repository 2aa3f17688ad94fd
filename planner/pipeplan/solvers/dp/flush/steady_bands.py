"""The search for the fastest batch, divided into bands of its steady part.

The time of a batch is a sum in which one part, the steady part A of `batch_limit`, is itself a maximum over all stages.
Far above the bound a search keeps many states that trade A for the other parts, each with all replicas and depths that
some A may need. So the possible values of A are divided into bands, each searched by itself: a band from A₁ to A₂ has
the batches with A ≤ A₂, and a smaller A than A₁ counts as A₁. In it A hardly tells states apart, stages need just the
replicas and depths for A₂, and the other parts must do with what A₁ leaves. Every batch is found in the band of its own
A, at its own time, and in no band at less. A batch that is found is the limit for the bands after it.

Only schedules with one phase are divided, and only where there are so many cuts that a search takes long.
"""

from __future__ import annotations

from dataclasses import replace

from pipeplan.solvers.dp.budget import SearchLimits, Step
from pipeplan.solvers.dp.flush import batch_plans
from pipeplan.solvers.dp.flush.uniform_flush import FlushSearch
from pipeplan.solvers.dp.terms.batch_limit import BatchLimit
from pipeplan.solvers.dp.terms.cost_terms import CostTerms

WIDTH = 0.02
"""The width of a band, as a part of the limit on the batch."""
_MOST_BANDS = 16
_FEWEST_CUTS = 48


def find_fastest_batch(terms: CostTerms, limit_s: float, limits: SearchLimits) -> list[Step] | None:
    """The pipeline with the fastest batch within a limit on equal servers, input to output, or None.

    The limit is in seconds from one update to the next. Raises `OutOfTime`.
    """
    batch = BatchLimit(terms, limit_s)
    if batch.phases > 1 or len(terms.cuts.ideals) <= _FEWEST_CUTS:
        return FlushSearch(terms, limit_s, limits).run()
    low, best = batch.least_steady_s, None
    width = max(WIDTH * limit_s, (batch.most_steady_s - low) / _MOST_BANDS)
    while low <= batch.most_steady_s:
        steps = FlushSearch(terms, batch.limit_s, limits, (low, low + width)).run()
        if steps is not None:
            found_s = batch_plans.batch_s(terms, steps, depths=limits.memory)
            if best is None or found_s < batch.limit_s:
                best, batch = steps, replace(batch, limit_s=min(found_s, limit_s))
        low += width
    return best
