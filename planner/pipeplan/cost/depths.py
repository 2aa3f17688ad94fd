"""Depths of the stages of a plan: the depths that sustain a step time, and the step time that given depths sustain.

The depths determine the weight versions, and under zb-h1 how many gradients of weights each stage defers
(docs/cost-model.md, "In-flight depth" and "Zero bubble").
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import replace

from pipeplan.cluster_data.links import Links
from pipeplan.cost import formulas
from pipeplan.cost.stage_times import LayerTotals, StageTimes, minibatches_per_copy, stage_times, worker_memory
from pipeplan.plan.plan import Plan, Stage
from pipeplan.plan.schedules import ACCUMULATING, FLUSHING, GPIPE, SPLITTING
from pipeplan.problem.problem import Problem

THERE_AND_BACK = 2
"""Number of transfers of a minibatch at the boundary behind a stage, during which the minibatch is at no stage."""
AWAY = 2 * THERE_AND_BACK
"""Number of such transfers if each one waits for another minibatch's transfer on the same links. Under zb-h1, so many
minibatches in flight would leave no memory for deferred gradients of weights."""
HALVINGS = 20
"""Number of steps of the search for depths that fit into memory."""


def assign_depths(plan: Plan, problem: Problem, step_time_s: float, away: float | None = None) -> Plan:
    """The plan under the problem's schedule, with the smallest depths that sustain one minibatch per `step_time_s`
    seconds.

    With a flush schedule the depths follow from the slowest resource of the plan, from memory, and from the number of
    transfers during which a minibatch is `away` from the stages (None: `THERE_AND_BACK` under zb-h1, else `AWAY`), not
    from `step_time_s`.
    """
    if plan.inference:
        return plan
    schedule = problem.options.schedule
    accumulate = problem.options.accumulate if schedule in ACCUMULATING else None
    plan = replace(plan, schedule=schedule, accumulate=accumulate)
    links = Links.of(problem.cluster)
    times = [stage_times(plan, problem, links, index) for index in range(len(plan.stages))]
    if schedule in FLUSHING:
        usual = THERE_AND_BACK if schedule in SPLITTING else AWAY
        depths = _flush_depths(plan, problem, times, usual if away is None else away)
    else:
        common = schedule in ACCUMULATING
        depths = depths_for(times, step_time_s * plan.copies, plan.copies, common_update=common)
    stages = [replace(stage, depth=int(depth)) for stage, depth in zip(plan.stages, depths, strict=True)]
    plan = replace(plan, stages=tuple(stages))
    stages = [replace(stage, versions=plan.versions(index)) for index, stage in enumerate(stages)]
    plan = replace(plan, stages=tuple(stages))
    return defer_weights(plan, problem, times) if schedule in SPLITTING else plan


def depths_for(times: Sequence[StageTimes], step_time_s: float, copies: int, *, common_update: bool) -> list[float]:
    """The depths that sustain a step time of one copy, computed from the last stage to the first.

    If all stages share one update (`common_update`), no stage waits for the replicas of its group.
    """
    waits = [
        0.0 if common_update else float(formulas.group_wait(one.allreduce_s, step_time_s, one.replicas, copies))
        for one in times
    ]
    depths = [1.0]
    for index in range(len(times) - 2, -1, -1):
        stage, following = times[index], times[index + 1]
        behind = formulas.in_flight_behind(depths[0], following.replicas, waits[index + 1])
        depths.insert(
            0, float(formulas.in_flight_depth(behind, waits[index], stage.transfer_s, step_time_s, stage.replicas))
        )
    return depths


def sustained_s(
    times: Sequence[StageTimes], index: int, copies: int, minibatches: int | None, copies_allreduce_s: float
) -> float:
    """Step time of one copy that the depth of a stage sustains.

    `minibatches` is the number of minibatches per update in one copy where all stages share the update (2BW), else
    None.
    """
    stage, step_time = times[index], 0.0
    if minibatches is not None:
        reduce_s = stage.allreduce_s + copies_allreduce_s
        step_time = formulas.buffered_step_time(stage.depth, stage.replicas, reduce_s, minibatches, copies)
    if index + 1 == len(times):
        return step_time
    following = times[index + 1]
    in_flight, groups = float(following.depth * following.replicas), []
    if minibatches is None and copies > 1:
        # With several copies a wait is a number of minibatches, and does not depend on the step time.
        counts = (stage.replicas, following.replicas)
        in_flight += sum(float(formulas.group_wait(0.0, 1.0, count, copies)) for count in counts)
    elif minibatches is None:
        groups = [stage.allreduce_s, following.allreduce_s]
    limited = formulas.depth_limited_step_time(stage.depth, stage.replicas, in_flight, stage.transfer_s, groups)
    return max(step_time, limited)


def _flush_depths(plan: Plan, problem: Problem, times: Sequence[StageTimes], transfers: float) -> list[float]:
    """The depths under a flush.

    The depths hide transfers at the step time of the slowest resource if memory allows it, otherwise at a slower step
    time. No depth is below `formulas.flush_depth`, for which the solvers reserve memory.
    """
    count = minibatches_per_copy(plan)
    caps = [float(formulas.rounds(count, stage.replicas)) for stage in times]
    if plan.schedule == GPIPE:
        return caps
    busy = [formulas.flush_busy(stage.pass_s, count, stage.replicas) for stage in times]
    busy += [formulas.flush_busy(max(stage.send_s, stage.return_s), count, stage.links) for stage in times[:-1]]
    away = [
        transfers * stage.transfer_s * count / float(max(busy)) if max(busy) > 0 else float("inf") for stage in times
    ]
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
    """The depths that cover the minibatches in flight behind each stage and the `away` minibatches on its links."""
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


# -- zero bubble --


def weights_s(plan: Plan, problem: Problem, index: int) -> float:
    """The part of a stage's backward pass that action W takes, in seconds; 0 where the stage defers nothing.

    A profile does not measure this time. The estimate is half of the backward pass of layers that have parameters.
    """
    stage = plan.stages[index]
    splits = not stage.recompute if plan.virtual else stage.deferred
    return _weight_gradients_s(problem, stage) if splits and plan.schedule in SPLITTING else 0.0


def defer_weights(plan: Plan, problem: Problem, times: Sequence[StageTimes]) -> Plan:
    """The plan in which every stage defers enough gradients of weights to fill the time while the stages before it
    drain.

    A stage holds no more minibatches than the first stage under 1F1B, and no more than fit into its memory. A stage
    that recomputes defers nothing, because deferring would keep the activations that recomputation drops.
    """
    assert plan.accumulate is not None
    first, draining_s = plan.stages[0], 0.0
    for index, time in enumerate(times):
        stage = plan.stages[index]
        pass_s, most = _weight_gradients_s(problem, stage), 0
        if pass_s > 0 and not stage.recompute:
            held = -(-min(first.depth * first.replicas, plan.accumulate) // stage.replicas)
            most = max(0, min(held - stage.depth, int(draining_s / pass_s + formulas.ROUNDING)))
        plan = _with_most_deferred(plan, problem, index, most)
        draining_s += time.backward_s - time.update_s + time.round_trip_s / 2
        draining_s -= weights_s(plan, problem, index)
    return plan


def _with_most_deferred(plan: Plan, problem: Problem, index: int, most: int) -> Plan:
    """The plan in which a stage defers at most `most` gradients, and no more than fit into its memory."""
    capacity = problem.memory_of(plan.stages[index].workers)
    for deferred in range(most, -1, -1):
        changed = replace(plan.stages[index], deferred=deferred)
        plan = replace(plan, stages=(*plan.stages[:index], changed, *plan.stages[index + 1 :]))
        if worker_memory(plan, problem, index)[0] <= capacity:
            break
    return plan


def _weight_gradients_s(problem: Problem, stage: Stage) -> float:
    backward_s = LayerTotals.of(problem, stage.layers).weights_backward_s
    return backward_s / 2 / problem.cluster.speed_of(stage.workers)
