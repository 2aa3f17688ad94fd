"""Selects the search and the cost terms for uniform or heterogeneous clusters."""

from __future__ import annotations

from pipeplan.cuts import Cuts
from pipeplan.errors import InputError
from pipeplan.problem import Problem
from pipeplan.schedules import VERTICAL
from pipeplan.solvers import differing_pace, pace, vertical
from pipeplan.solvers.differing import Differing, DifferingSearch
from pipeplan.solvers.differing_flush import DifferingBatches
from pipeplan.solvers.flush import Batches
from pipeplan.solvers.limits import Limits, Step
from pipeplan.solvers.search import Search
from pipeplan.solvers.terms import Terms

MOST_WORKERS = 1024
"""The most workers for a search over all candidate placements, of which there are about half the square."""


def terms_of(problem: Problem, cuts: Cuts) -> Terms:
    """The terms of the cost model for the problem's cluster.

    Raises `InputError` if the cluster is too large for the search that it needs.
    """
    if problem.cluster.uniform and problem.options.boundary == "single":
        return Terms(problem, cuts)
    if problem.cluster.workers > MOST_WORKERS:
        what = "boundaries over parallel links" if problem.cluster.uniform else "servers that differ"
        raise InputError(
            f"cluster {problem.cluster.name} has {problem.cluster.workers} workers; with {what} plans can be searched "
            f"for on at most {MOST_WORKERS}"
        )
    return Differing(problem, cuts)


def search(terms: Terms, limit: float, limits: Limits) -> list[Step] | None:
    """A pipeline with every resource within the limit, input to output, or None. Raises `OutOfTime`."""
    if isinstance(terms, Differing):
        if terms.training and terms.schedule == VERTICAL and limits.memory:
            return vertical.search(terms, limit, limits, lambda terms_given: differing(terms_given, limit, limits))
        return differing(terms, limit, limits)
    if terms.training and terms.schedule == VERTICAL:
        return vertical.search(terms, limit, limits)
    return Search(terms, limit, limits).run()


def differing(terms: Terms, limit: float, limits: Limits) -> list[Step] | None:
    """Like `search`, on a heterogeneous cluster or over parallel links, for one input stage."""
    assert isinstance(terms, Differing)
    return DifferingSearch(terms, limit, limits).run()


def batches(terms: Terms, limits: Limits) -> Batches:
    """Batch times under the flush schedules."""
    return DifferingBatches(terms, limits) if isinstance(terms, Differing) else Batches(terms, limits)


def pace_of(terms: Terms, steps: list[Step], *, depths: bool) -> float:
    """Seconds per minibatch of one copy: the slowest stage or boundary, and with `depths` the pace they sustain."""
    if isinstance(terms, Differing):
        return differing_pace.pace_of(terms, steps, depths=depths)
    return pace.pace_of(terms, steps, depths=depths)


def fits(terms: Terms, steps: list[Step], pace_s: float) -> bool:
    """Whether every worker's memory suffices at the depths that a pace needs."""
    if isinstance(terms, Differing):
        return differing_pace.fits(terms, steps, pace_s)
    return pace.fits(terms, steps, pace_s)
