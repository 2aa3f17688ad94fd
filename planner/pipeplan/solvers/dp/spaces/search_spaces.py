"""Searches all spaces of plans, with every shared resource to itself: one after another, or with a flush together."""

from __future__ import annotations

import itertools
from dataclasses import replace

from pipeplan.plan.schedules import ACCUMULATING, VERTICAL
from pipeplan.solvers.dp.pipelines.pipeline_searches import FoundPipeline, PipelineSearches
from pipeplan.solvers.dp.spaces.batch_spaces import BatchSpaces
from pipeplan.solvers.dp.spaces.best_so_far import BestSoFar, Region
from pipeplan.solvers.dp.spaces.search_task import SearchTask
from pipeplan.solvers.dp.threshold import BisectionResult
from pipeplan.solvers.plan_space import PlanSpace, plan_spaces
from pipeplan.util.deadline import Deadline

_VERTICAL_SHARE = 0.75
"""The share of the time left that a space of plans may take under vertical sync, if another one follows."""

MOST_UNTIMED = 100
"""So many spaces are looked into whatever the time; thousands of servers have as many as there are servers."""


def search_spaces(task: SearchTask) -> BestSoFar:
    """Search all spaces of plans, one after another."""
    problem, so_far = task.problem, BestSoFar(task)
    spaces, options = plan_spaces(problem), problem.options
    floors = {space: space.floor(problem) for space in spaces}
    # Without a memory limit the number of copies makes no difference to one of them, unless they share something.
    shares = options.max_workers is not None or (problem.training and options.schedule in ACCUMULATING)
    without_memory: dict[PlanSpace, BisectionResult[FoundPipeline]] = {}
    # Of each space, the least floor of those after it.
    others = [*itertools.accumulate(reversed(floors.values()), min, initial=float("inf"))][-2::-1]
    for number, space in enumerate(spaces):
        known = None if shares else without_memory.get(replace(space, copies=1))
        low = floors[space] if known is None else space.pace(problem, known.low)
        if so_far.excludes(low):
            so_far.regions.append(Region(space, None, low))
            continue
        if so_far.interrupted:
            so_far.stop(low)
            continue
        if number >= MOST_UNTIMED and Deadline(task.deadline).passed:
            so_far.leave(low)
            continue
        one = PipelineSearches(space.inner(problem), task.cuts, task.deadline, task.gap, effort=task.effort)
        if options.schedule == VERTICAL and number + 1 < len(spaces):
            # Its searches may take long without a plan; copies of a smaller pipeline have one sooner.
            one.deadline = Deadline(task.deadline).share(_VERTICAL_SHARE).at
        one.report = so_far.watch(space, others[number])
        one.below, one.near = _below(space, so_far), task.near and so_far.best is None
        if known is not None and known.best is not None:
            one.without_memory = replace(known)
        elif known is not None:
            one.above = known.low
        try:
            so_far.add(space, one.best(), one.memory_binds)
        except KeyboardInterrupt:
            so_far.stop(low)
        if one.found_without_memory is not None:
            without_memory[replace(space, copies=1)] = one.found_without_memory
    return so_far


def _below(space: PlanSpace, so_far: BestSoFar) -> float:
    """The pace of one copy, or with a flush the time between its updates, that a pipeline of a space has to beat."""
    if so_far.limit_s == float("inf"):
        return float("inf")
    return space.inner_pace(so_far.task.problem, so_far.limit_s) or 0.0


def search_batches(task: SearchTask) -> BestSoFar:
    """Search all spaces of plans under a flush schedule, together."""
    batches = BatchSpaces(task)
    found = batches.best()
    so_far = BestSoFar(task, finished=found.finished, interrupted=found.interrupted)
    if found.best is not None:
        space, pipeline = found.best
        so_far.best = found.high, space, pipeline
    if found.best is not None or not found.finished:
        so_far.bound = found.low
    so_far.regions = [Region(space, None, max(found.low, floor)) for space, floor in batches.floors.items()]
    return so_far
