"""Scores plans of one stage one by one, because no solver expresses how their gradient buckets overlap.

For a plan of one stage the solvers minimise the time that plain data parallelism would take if its forward pass hid the
all-reduce, which is a lower bound on its real pace (`pipeplan.cost.ddp_overlap`). If the solvers return such a plan,
the answer is the better of two: the best plan of several stages, which the solvers find in a second run without plans
of one stage, and the best plan of one stage, of which there are few.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from pipeplan.cost.ddp_overlap import waits_for_allreduce
from pipeplan.cost.evaluate import WAITS_FOR_UPDATE, Evaluation, evaluate
from pipeplan.plan.plan import Plan, Stage, data_parallel
from pipeplan.problem.grid_shapes import grid_sizes
from pipeplan.problem.problem import Problem
from pipeplan.solvers.plan_space import plan_spaces

TOLERANCE = 1e-9
"""Relative. A smaller difference in pace is no gain."""


def is_bound_by_allreduce(plan: Plan, score: Evaluation) -> bool:
    """Whether the plan has one stage and its pace is bound by the exposed all-reduce."""
    return waits_for_allreduce(plan) and score.bound == WAITS_FOR_UPDATE


def without_single_stage(problem: Problem) -> Problem:
    """The problem restricted to plans of two or more stages."""
    return replace(problem, options=replace(problem.options, several=True))


def allows_several(problem: Problem) -> bool:
    """Whether the options, the cluster and the model allow a plan of two or more stages."""
    options = problem.options
    most = min(options.stages or 2, options.max_stages or 2, options.max_workers or 2, problem.cluster.workers)
    return most > 1 and len(problem.units) > 1


def best_single_stage(problem: Problem) -> tuple[Plan, Evaluation] | None:
    """The fastest plan of one stage that fits in memory, with its score; among equals the one with the fewest workers.

    Returns None where no such plan fits.
    """
    plans, scores = list(_single_stage_plans(problem)), dict[int, Evaluation]()
    least, speed = float("inf"), max(device.speed for device in set(problem.cluster.devices))
    # The most workers first: what all their computing exceeds alone needs no score.
    for number, plan in sorted(enumerate(plans), key=lambda entry: -entry[1].busy):
        if problem.work_s / (speed * plan.busy) <= least * (1 + TOLERANCE):
            score = evaluate(plan, problem)
            if score.fits:
                scores[number], least = score, min(least, score.pace_s)
    fastest: tuple[Plan, Evaluation] | None = None
    for number, score in sorted(scores.items()):
        if fastest is None or score.pace_s < fastest[1].pace_s * (1 - TOLERANCE):
            fastest = plans[number], score
    return fastest


def _single_stage_plans(problem: Problem) -> Iterator[Plan]:
    """All plans of one stage. On equal servers only placements from the first worker on: the others cost the same."""
    options, total = problem.options, problem.cluster.workers
    if options.stages not in (None, 1) or any(number != 1 for _, number in options.pins):
        return
    plain = data_parallel(problem.layer_names, 1, inference=options.inference, schedule=options.schedule)
    recompute_choices = (False, True) if options.recompute and options.memory else (False,)
    for workers, copies in itertools.chain(_consecutive_placements(problem), _copied_placements(problem)):
        if len(workers) <= (options.max_workers or total):
            for recompute in recompute_choices:
                stage: Stage = replace(plain.stages[0], workers=workers, recompute=recompute)
                yield replace(plain, stages=(stage,), copies=copies)


def _consecutive_placements(problem: Problem) -> Iterator[tuple[tuple[int, ...], int]]:
    """Placements on consecutive workers, each with 1 as the number of copies."""
    total = problem.cluster.workers
    most = min(problem.options.max_replicas or total, total)
    for count in grid_sizes(problem.cluster) if problem.options.grid else range(1, total + 1):
        if count > most:
            break
        for first in range(1 if problem.cluster.uniform or problem.options.grid else total - count + 1):
            yield tuple(range(first, first + count)), 1


def _copied_placements(problem: Problem) -> Iterator[tuple[tuple[int, ...], int]]:
    """Placements with the same workers in each component of a level, with the number of copies.

    They reach more workers than consecutive placements only where the replicas of one copy are limited.
    """
    options, cluster = problem.options, problem.cluster
    if options.grid or options.max_replicas is None or options.max_replicas >= cluster.workers:
        return
    for space in plan_spaces(problem)[1:]:
        size = cluster.span(space.level)
        for count in range(1, min(options.max_replicas, size) + 1):
            yield tuple(copy * size + worker for worker in range(count) for copy in range(space.copies)), space.copies
