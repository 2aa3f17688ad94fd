"""Assigns to the stages of a plan the depths that sustain a step time, and the number of weight versions they imply."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import replace

from pipeplan.cluster_data.links import Links
from pipeplan.cost import formulas
from pipeplan.cost.memory import worker_memory
from pipeplan.cost.stage_times import StageTimes, group_allreduce_time, minibatches_per_copy, stage_times
from pipeplan.cost.zero_bubble import defer_weights
from pipeplan.plan.plan import Plan
from pipeplan.plan.schedules import ACCUMULATING, FLUSHING, GPIPE, SPLITTING
from pipeplan.problem.problem import Problem

HALVINGS = 20
"""Steps of the search for the depths that fit into memory."""


def assign_depths(plan: Plan, problem: Problem, step_time_s: float) -> Plan:
    """The plan under the problem's schedule, with the smallest depths that sustain one minibatch per `step_time_s`
    seconds.

    With a flush schedule the depths follow from the slowest resource of the plan and from memory, not from
    `step_time_s`.
    """
    if plan.inference:
        return plan
    schedule = problem.options.schedule
    accumulate = problem.options.accumulate if schedule in ACCUMULATING else None
    plan = replace(plan, schedule=schedule, accumulate=accumulate)
    links = Links.of(problem.cluster)
    times = [stage_times(plan, problem, links, index) for index in range(len(plan.stages))]
    if schedule in FLUSHING:
        depths = _flush_depths(plan, problem, times)
    else:
        inner_step_time = step_time_s * plan.copies
        depths = _depths(times, inner_step_time, _waits(plan, problem, links, times, inner_step_time))
    stages = [replace(stage, depth=int(depth)) for stage, depth in zip(plan.stages, depths, strict=True)]
    plan = replace(plan, stages=tuple(stages))
    stages = [replace(stage, versions=plan.versions(index)) for index, stage in enumerate(stages)]
    plan = replace(plan, stages=tuple(stages))
    return defer_weights(plan, problem, times) if schedule in SPLITTING else plan


def _depths(times: Sequence[StageTimes], step_time_s: float, waits: Sequence[float]) -> list[float]:
    """The depths for a step time, computed from the last stage to the first."""
    depths = [1.0]
    for index in range(len(times) - 2, -1, -1):
        stage, following = times[index], times[index + 1]
        behind = formulas.in_flight_behind(depths[0], following.replicas, waits[index + 1])
        depths.insert(
            0, float(formulas.in_flight_depth(behind, waits[index], stage.transfer_s, step_time_s, stage.replicas))
        )
    return depths


def _flush_depths(plan: Plan, problem: Problem, times: Sequence[StageTimes]) -> list[float]:
    """The depths under a flush: those that hide transfers at the step time of the slowest resource, if memory allows
    them.

    Otherwise it is a slower step time for which memory suffices. No depth is below `formulas.flush_depth`, which the
    solvers make room for.
    """
    count = minibatches_per_copy(plan)
    caps = [float(formulas.rounds(count, stage.replicas)) for stage in times]
    if plan.schedule == GPIPE:
        return caps
    busy = [formulas.flush_busy(stage.pass_s, count, stage.replicas) for stage in times]
    busy += [formulas.flush_busy(max(stage.send_s, stage.return_s), count, stage.links) for stage in times[:-1]]
    away = [2 * stage.transfer_s * count / float(max(busy)) if max(busy) > 0 else float("inf") for stage in times]
    most = [_deepest(plan, problem, index, int(cap)) for index, cap in enumerate(caps)]
    low, high, share = 0.0, 1.0, 1.0
    found = _depths_of_batch(times, count, caps, [0.0] * len(times))
    for _ in range(HALVINGS):
        tried = _depths_of_batch(times, count, caps, [share * one if one else 0.0 for one in away])
        fits = all(depth <= limit for depth, limit in zip(tried, most, strict=True))
        found = tried if fits else found
        if fits and share == 1.0:
            break
        low, high = (share, high) if fits else (low, share)
        share = (low + high) / 2
    return found


def _depths_of_batch(
    times: Sequence[StageTimes], count: int, caps: Sequence[float], away: Sequence[float]
) -> list[float]:
    """The depths that cover the minibatches in flight behind each stage, and those `away` on its links."""
    depths = [1.0]
    for index in range(len(times) - 2, -1, -1):
        behind = depths[0] * times[index + 1].replicas
        depth = min(caps[index], float(formulas.flush_depth(behind + away[index], count, times[index].replicas)))
        depths.insert(0, depth)
    return depths


def _deepest(plan: Plan, problem: Problem, index: int, most: int) -> int:
    """The most minibatches in flight at a stage that fit into the memory of its workers, up to `most`."""
    capacity = problem.memory_of(plan.stages[index].workers)

    def fits(depth: int) -> bool:
        stages = list(plan.stages)
        stages[index] = replace(stages[index], depth=depth, versions=1, deferred=0)
        return worker_memory(replace(plan, stages=tuple(stages)), problem, index)[0] <= capacity

    return bisect.bisect_right(range(1, most + 1), False, key=lambda depth: not fits(depth))


def _waits(
    plan: Plan, problem: Problem, links: Links, times: Sequence[StageTimes], step_time_s: float
) -> Sequence[float]:
    """Each stage's wait for the replicas of a group, in minibatches; 0 where all stages share one update."""
    if plan.schedule in ACCUMULATING:
        return [0.0] * len(times)
    groups = [group_allreduce_time(plan, problem, links, index) for index in range(len(times))]
    return [
        float(formulas.group_wait(group, step_time_s, stage.replicas, plan.copies))
        for group, stage in zip(groups, times, strict=True)
    ]
