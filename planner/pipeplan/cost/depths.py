"""Assigns to the stages of a plan the depths that sustain a pace, and the number of weight versions they imply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipeplan.cluster_data.links import Links
from pipeplan.cost import formulas
from pipeplan.cost.flush import batch_time
from pipeplan.cost.stage_times import StageTimes, group_allreduce_time, minibatches_per_copy, stage_times
from pipeplan.cost.zero_bubble import defer_weights
from pipeplan.plan.plan import Plan
from pipeplan.plan.schedules import ACCUMULATING, FLUSHING, GPIPE, SPLITTING
from pipeplan.problem.problem import Problem


def assign_depths(plan: Plan, problem: Problem, pace_s: float) -> Plan:
    """The plan under the problem's schedule, with the smallest depths that sustain one minibatch per `pace_s` seconds.

    With a flush schedule `pace_s` is the time from one update to the next divided by the minibatches of an update.
    """
    if plan.inference:
        return plan
    schedule = problem.options.schedule
    accumulate = problem.options.accumulate if schedule in ACCUMULATING else None
    plan = replace(plan, schedule=schedule, accumulate=accumulate)
    links = Links.of(problem.cluster)
    times = [stage_times(plan, problem, links, index) for index in range(len(plan.stages))]
    inner_pace, caps = pace_s * plan.copies, [float("inf")] * len(times)
    if schedule in FLUSHING:
        caps = [float(formulas.rounds(minibatches_per_copy(plan), stage.replicas)) for stage in times]
        inner_pace = _pace_within_batch(plan, problem, links, times, pace_s)
    depths = caps
    if schedule != GPIPE:
        depths = _depths(times, caps, inner_pace, _waits(plan, problem, links, times, inner_pace))
    stages = [replace(stage, depth=int(depth)) for stage, depth in zip(plan.stages, depths, strict=True)]
    plan = replace(plan, stages=tuple(stages))
    stages = [replace(stage, versions=plan.versions(index)) for index, stage in enumerate(stages)]
    plan = replace(plan, stages=tuple(stages))
    return defer_weights(plan, problem, times) if schedule in SPLITTING else plan


def _depths(times: Sequence[StageTimes], caps: Sequence[float], pace_s: float, waits: Sequence[float]) -> list[float]:
    """The depths for a pace, computed from the last stage to the first and limited by `caps`."""
    depths = [1.0]
    for index in range(len(times) - 2, -1, -1):
        stage, following = times[index], times[index + 1]
        behind = formulas.in_flight_behind(depths[0], following.replicas, waits[index + 1])
        depth = caps[index]
        if pace_s > 0:
            needed = formulas.in_flight_depth(behind, waits[index], stage.transfer_s, pace_s, stage.replicas)
            depth = min(depth, float(needed))
        depths.insert(0, depth)
    return depths


def _waits(plan: Plan, problem: Problem, links: Links, times: Sequence[StageTimes], pace_s: float) -> Sequence[float]:
    """Each stage's wait for the replicas of a group, in minibatches; 0 where all stages share one update."""
    if plan.schedule in ACCUMULATING:
        return [0.0] * len(times)
    groups = [group_allreduce_time(plan, problem, links, index) for index in range(len(times))]
    return [
        float(formulas.group_wait(group, pace_s, stage.replicas, plan.copies))
        for group, stage in zip(groups, times, strict=True)
    ]


def _pace_within_batch(plan: Plan, problem: Problem, links: Links, times: Sequence[StageTimes], pace_s: float) -> float:
    """The pace of the steady part of a batch that takes `pace_s` per minibatch, but at least what its stages allow."""
    assert plan.accumulate is not None
    parts = batch_time(plan, problem, links, times, depths=False)
    spare = pace_s * plan.accumulate - (parts.total_s - parts.steady_s)
    return formulas.flush_pace(max(parts.steady_s, spare), parts.minibatches)
