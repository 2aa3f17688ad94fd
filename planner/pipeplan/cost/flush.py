"""Lower bound on the time from one update to the next under the flush schedules.

A flush schedule drains the pipeline before every update. docs/cost-model.md, "Flush schedules", has the formula and the
reasons for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipeplan.cluster_data.links import Links
from pipeplan.cost import formulas
from pipeplan.cost.sharded_data_parallel import sharded_passes
from pipeplan.cost.stage_times import PlanStage, StageTimes, group_allreduce_time, minibatches_per_copy, rounds_of
from pipeplan.plan.plan import Plan
from pipeplan.plan.schedules import GPIPE, SPLITTING, update_share
from pipeplan.problem.plan_file import BatchTime as BatchTime
from pipeplan.problem.problem import Problem


def batch_time(plan: Plan, problem: Problem, links: Links, times: Sequence[StageTimes]) -> BatchTime:
    """The parts of the time of one batch.

    Each pair of a stage and a resource behind it gives a lower bound. The pair with the longest time is chosen."""
    count, last = minibatches_per_copy(plan), len(times) - 1
    exposed = [exposed_s(plan, problem, links, times, index) for index in range(len(times))]
    found = []
    for begin, waited in enumerate(exposed):
        work = transfers = 0.0
        for index in range(begin, last + 1):
            stage, ahead = times[index], ahead_s(plan, times[index])
            passes = stage.pass_s - stage.update_s
            own = passes * (rounds_of(plan, problem, index, count) - 1)
            tail = tail_s(plan, stage) if index > begin else 0.0
            parts = (work + passes - tail, transfers, own, waited)
            found.append(BatchTime(count, *parts, f"compute of stage {index + 1}"))
            if index < last and not problem.options.contention:
                busy = float(formulas.flush_busy(max(stage.send_s, stage.return_s), count, stage.links))
                traffic = f"traffic from stage {index + 1} to stage {index + 2}"
                found.append(BatchTime(count, work + ahead, transfers, busy, waited, traffic))
            if begin and plan.schedule in SPLITTING:
                break
            work, transfers = work + ahead, transfers + ways_s(plan, stage)
    found += [
        BatchTime(count, 0.0, 0.0, float("inf"), 0.0, f"minibatches in flight at stage {index + 1}")
        for index in range(last)
        if _too_shallow(plan, times, index, count)
    ]
    longest = max(found, key=lambda one: one.total_s)
    if problem.options.sharding.divides_weights:
        return replace(longest, bound=sharded_passes(plan, problem, links).bound)
    return longest


def ahead_s(plan: Plan, stage: StageTimes) -> float:
    """Delay of the later stages by one minibatch's passes at a stage, while the pipeline fills and drains, in seconds.

    Under zb-h1, deferred gradients of weights fill the time of draining, so only the forward pass counts. The
    optimiser's step does not count, because every stage has its own.
    """
    return stage.forward_s if plan.schedule in SPLITTING else stage.pass_s - stage.update_s


def ways_s(plan: Plan, stage: StageTimes) -> float:
    """Delay of the later stages by one minibatch's transfers at the boundary behind a stage, in seconds; see
    `ahead_s`."""
    return stage.round_trip_s / 2 if plan.schedule in SPLITTING else stage.round_trip_s


def tail_s(plan: Plan, stage: StageTimes) -> float:
    """Upper bound on the time for the gradients of weights of the last minibatch, in seconds.

    Under zb-h1 these gradients fill the time of draining, together with the deferred gradients."""
    return (stage.backward_s - stage.update_s) / 2 if plan.schedule in SPLITTING else 0.0


def exposed_s(plan: Plan, problem: Problem, links: Links, times: Sequence[StageTimes], index: int) -> float:
    """Lower bound on the time from a stage's last backward pass before an update to its next forward pass, in seconds.

    The bound adds up the exposed part of the all-reduce among all replicas in all copies of the pipeline, the exchange
    of the gradients of shared weights with at least one other stage, and the optimiser's step.
    """
    allreduce, stage = group_allreduce_time(plan, problem, links, index), times[index]
    if problem.options.sharding.divides_weights:
        exposed = sharded_passes(plan, problem, links).exposed_s
    else:
        exposed = float(formulas.flush_exposed(allreduce, stage.backward_s - stage.update_s, problem.hidden_share))
    return exposed + 2 * PlanStage(problem, plan, index).exchange_s + stage.update_s / update_share(plan.accumulate)


def _too_shallow(plan: Plan, times: Sequence[StageTimes], index: int, count: int) -> bool:
    """Whether a stage has fewer minibatches in flight than `formulas.flush_depth`."""
    stage, following = times[index], times[index + 1]
    if plan.schedule == GPIPE:
        return stage.depth < int(formulas.rounds(count, stage.replicas))
    behind = following.depth * following.replicas
    return bool(stage.depth < formulas.flush_depth(behind, count, stage.replicas))
