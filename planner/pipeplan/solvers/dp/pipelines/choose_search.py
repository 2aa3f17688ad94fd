"""Selects the search and the cost terms for uniform or heterogeneous clusters, in the steady state or with a flush."""

from __future__ import annotations

import math

from pipeplan.errors import InputError
from pipeplan.plan.schedules import VERTICAL
from pipeplan.problem.cuts import Cuts
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp.budget import SearchLimits, Step
from pipeplan.solvers.dp.flush import batch_plans
from pipeplan.solvers.dp.flush.heterogeneous_flush import PlacementFlushSearch
from pipeplan.solvers.dp.flush.uniform_flush import FlushSearch
from pipeplan.solvers.dp.steady import placed_steps, vertical_sync
from pipeplan.solvers.dp.steady.placement_search import PlacementSearch, SharedLimit
from pipeplan.solvers.dp.steady.uniform_search import UniformSearch
from pipeplan.solvers.dp.terms.batch_limit import BatchLimit
from pipeplan.solvers.dp.terms.cost_terms import CostTerms
from pipeplan.solvers.dp.terms.heterogeneous_terms import HeterogeneousTerms

MOST_WORKERS = 1024
"""The most workers for a search over all candidate placements, of which there are about half the square."""


def terms_of(problem: Problem, cuts: Cuts) -> CostTerms:
    """The terms of the cost model for the problem's cluster.

    Raises `InputError` if the cluster is too large for the search that it needs.
    """
    if problem.cluster.uniform and problem.options.boundary == "single":
        return CostTerms(problem, cuts)
    if problem.cluster.workers > MOST_WORKERS:
        what = "boundaries over parallel links" if problem.cluster.uniform else "servers that differ"
        raise InputError(
            f"cluster {problem.cluster.name} has {problem.cluster.workers} workers; with {what} plans can be searched "
            f"for on at most {MOST_WORKERS}"
        )
    return HeterogeneousTerms(problem, cuts)


def limits_range(terms: CostTerms) -> tuple[float, float]:
    """A lower bound on the least limit for which there is a pipeline, and a limit that excludes none.

    Limits are seconds per minibatch, or with a flush seconds from one update to the next.
    """
    if terms.problem.options.flushes:
        batch = BatchLimit(terms, math.inf)
        return batch.floor_s, batch.most_s
    return terms.floor, terms.most


def find_pipeline(
    terms: CostTerms, limit: float, limits: SearchLimits, shared: SharedLimit | None = None
) -> list[Step] | None:
    """A pipeline within the limit, input to output, or None. Raises `OutOfTime`.

    In the steady state it is any pipeline that has every resource within the limit, in seconds per minibatch. With a
    flush it is the one whose batch is the fastest, if that is within the limit, in seconds from one update to the next.
    With `shared`, which takes terms of all placements, what workers share keeps within its limit as well.
    """
    if terms.problem.options.flushes:
        if isinstance(terms, HeterogeneousTerms):
            return PlacementFlushSearch(terms, limit, limits, shared).run()
        return FlushSearch(terms, limit, limits).run()

    def once(assumed: CostTerms) -> list[Step] | None:
        if isinstance(assumed, HeterogeneousTerms):
            return PlacementSearch(assumed, limit, limits, shared).run()
        return (vertical_sync.VerticalSearch if assumed.first else UniformSearch)(assumed, limit, limits).run()

    if terms.training and terms.schedule == VERTICAL and limits.memory:
        return vertical_sync.find_vertical_sync_pipeline(terms, limit, limits, once)
    return once(terms)


def pipeline_pace(terms: CostTerms, steps: list[Step], *, depths: bool) -> float:
    """Seconds per minibatch of one copy: the slowest stage or boundary, and with `depths` the pace they sustain.

    With a flush it is the time from one update to the next, which no depth changes.
    """
    if terms.problem.options.flushes:
        return batch_plans.batch_s(terms, steps)
    return placed_steps.steady_pace(terms, steps, depths=depths)


def pipeline_fits(terms: CostTerms, steps: list[Step], pace_s: float) -> bool:
    """Whether every worker's memory suffices at the depths that a pace needs, or with a flush the pipeline's own."""
    if terms.problem.options.flushes:
        return batch_plans.batch_fits(terms, steps)
    return placed_steps.steady_fits(terms, steps, pace_s)
