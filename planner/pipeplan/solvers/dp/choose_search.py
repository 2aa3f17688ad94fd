"""Selects the search and the cost terms for uniform or heterogeneous clusters."""

from __future__ import annotations

from pipeplan.errors import InputError
from pipeplan.plan.schedules import VERTICAL
from pipeplan.problem.cuts import Cuts
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp import heterogeneous_plans, uniform_plans, vertical_sync
from pipeplan.solvers.dp.budget import SearchLimits, Step
from pipeplan.solvers.dp.flush_search import BatchObjective
from pipeplan.solvers.dp.heterogeneous_flush import HeterogeneousBatchObjective
from pipeplan.solvers.dp.heterogeneous_search import HeterogeneousSearch, HeterogeneousTerms
from pipeplan.solvers.dp.stage_costs import CostTerms
from pipeplan.solvers.dp.uniform_search import UniformSearch

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


def find_pipeline(terms: CostTerms, limit: float, limits: SearchLimits) -> list[Step] | None:
    """A pipeline with every resource within the limit, input to output, or None. Raises `OutOfTime`."""
    if isinstance(terms, HeterogeneousTerms):
        if terms.training and terms.schedule == VERTICAL and limits.memory:
            return vertical_sync.find_vertical_sync_pipeline(
                terms, limit, limits, lambda terms_given: find_heterogeneous_pipeline(terms_given, limit, limits)
            )
        return find_heterogeneous_pipeline(terms, limit, limits)
    if terms.training and terms.schedule == VERTICAL:
        return vertical_sync.find_vertical_sync_pipeline(terms, limit, limits)
    return UniformSearch(terms, limit, limits).run()


def find_heterogeneous_pipeline(terms: CostTerms, limit: float, limits: SearchLimits) -> list[Step] | None:
    """Like `find_pipeline`, on a heterogeneous cluster or over parallel links, for one input stage."""
    assert isinstance(terms, HeterogeneousTerms)
    return HeterogeneousSearch(terms, limit, limits).run()


def batch_objective(terms: CostTerms, limits: SearchLimits) -> BatchObjective:
    """Batch times under the flush schedules."""
    return (
        HeterogeneousBatchObjective(terms, limits)
        if isinstance(terms, HeterogeneousTerms)
        else BatchObjective(terms, limits)
    )


def pipeline_pace(terms: CostTerms, steps: list[Step], *, depths: bool) -> float:
    """Seconds per minibatch of one copy: the slowest stage or boundary, and with `depths` the pace they sustain."""
    if isinstance(terms, HeterogeneousTerms):
        return heterogeneous_plans.heterogeneous_pace(terms, steps, depths=depths)
    return uniform_plans.uniform_pace(terms, steps, depths=depths)


def pipeline_fits(terms: CostTerms, steps: list[Step], pace_s: float) -> bool:
    """Whether every worker's memory suffices at the depths that a pace needs."""
    if isinstance(terms, HeterogeneousTerms):
        return heterogeneous_plans.heterogeneous_fits(terms, steps, pace_s)
    return uniform_plans.uniform_fits(terms, steps, pace_s)
