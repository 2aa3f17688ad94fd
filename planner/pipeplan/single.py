"""Plans of one stage, tried one by one: how their buckets of gradients overlap is nothing that a solver expresses.

The solvers minimise what plain data parallelism would take if its forward pass hid the all-reduce, which is a bound on
what it takes (`awaited`). Where a plan of one stage is theirs, the answer is the better of the best plan of several
stages, which they find once more with plans of one stage left out, and the best of these, of which there are few.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from pipeplan.awaited import waits
from pipeplan.evaluate import AWAITED, Evaluation, evaluate
from pipeplan.grid import sizes
from pipeplan.plan import Plan, Stage, data_parallel
from pipeplan.problem import Problem
from pipeplan.solvers.pipeline import spaces

TOLERANCE = 1e-9
"""Relative. Less is no gain."""


def binds(plan: Plan, score: Evaluation) -> bool:
    """Whether a plan is one of those, and its wait slows it."""
    return waits(plan) and score.bound == AWAITED


def without(problem: Problem) -> Problem:
    """The problem for plans of several stages."""
    return replace(problem, options=replace(problem.options, several=True))


def allows_several(problem: Problem) -> bool:
    """Whether any plan of several stages may be asked for."""
    options = problem.options
    most = min(options.stages or 2, options.max_stages or 2, options.max_workers or 2, problem.cluster.workers)
    return most > 1 and len(problem.units) > 1


def best(problem: Problem) -> tuple[Plan, Evaluation] | None:
    """The fastest plan of one stage that fits, of the fewest workers among equals; None where none does."""
    found: tuple[Plan, Evaluation] | None = None
    for plan in _plans(problem):
        score = evaluate(plan, problem)
        if score.fits and (found is None or score.pace_s < found[1].pace_s * (1 - TOLERANCE)):
            found = plan, score
    return found


def _plans(problem: Problem) -> Iterator[Plan]:
    """All of them; where equal servers make no difference only those that begin with the first worker."""
    options, total = problem.options, problem.cluster.workers
    if options.stages not in (None, 1) or any(number != 1 for _, number in options.pins):
        return
    plain = data_parallel(problem.layer_names, 1, inference=options.inference, schedule=options.schedule)
    again = (False, True) if options.recompute and options.memory else (False,)
    for workers, copies in itertools.chain(_runs(problem), _copied(problem)):
        if len(workers) <= (options.max_workers or total):
            for recompute in again:
                stage: Stage = replace(plain.stages[0], workers=workers, recompute=recompute)
                yield replace(plain, stages=(stage,), copies=copies)


def _runs(problem: Problem) -> Iterator[tuple[tuple[int, ...], int]]:
    """Consecutive workers."""
    total = problem.cluster.workers
    most = min(problem.options.max_replicas or total, total)
    for count in sizes(problem.cluster) if problem.options.grid else range(1, total + 1):
        if count > most:
            break
        for first in range(1 if problem.cluster.uniform or problem.options.grid else total - count + 1):
            yield tuple(range(first, first + count)), 1


def _copied(problem: Problem) -> Iterator[tuple[tuple[int, ...], int]]:
    """A stage in each component of a level. That is no more than consecutive workers do, but where the replicas of one
    copy are limited."""
    options, cluster = problem.options, problem.cluster
    if options.grid or options.max_replicas is None or options.max_replicas >= cluster.workers:
        return
    for space in spaces(problem)[1:]:
        size = cluster.span(space.level)
        for count in range(1, min(options.max_replicas, size) + 1):
            yield tuple(copy * size + worker for worker in range(count) for copy in range(space.copies)), space.copies
