"""The time from one update to the next under the flush schedules, gpipe and 1f1b-flush.

Such a schedule drains the pipeline before every update. docs/cost-model.md, "Flush schedules", has the formula and how
far replays confirm it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeplan.cluster_data.links import Links
from pipeplan.cost import formulas
from pipeplan.cost.stage_times import (
    StageTimes,
    copies_allreduce_time,
    minibatches_per_copy,
    shared_exchange_s,
    units_of,
)
from pipeplan.plan.plan import Plan
from pipeplan.plan.schedules import GPIPE
from pipeplan.problem.problem import Problem
from pipeplan.util.typed import Amount, Positive


@dataclass(frozen=True)
class BatchTime:
    """The parts of the time from one update to the next, in seconds. Their sum is the time."""

    minibatches: Positive
    """Minibatches of one update, in one copy of the pipeline."""
    work_s: Amount
    """The first minibatch's forward and backward passes through all stages."""
    transfers_s: Amount
    """The first minibatch's transfers over all boundaries, forward and backward."""
    steady_s: Amount
    """Time that the other minibatches add, at the pace of the slowest stage or boundary."""
    exposed_s: Amount
    """Exposed all-reduce time, which neither draining nor filling hides."""
    copies_s: Amount
    """The all-reduce among copies of the pipeline."""
    bound: str
    """The resource that limits the steady part, for messages."""
    shared_weights_s: Amount = 0.0
    """The exchange of the gradients of weights that layers in several stages share."""
    order_s: float = 0.0
    """Waiting that the order of the passes causes, where workers run several stages."""

    @property
    def total_s(self) -> float:
        """Seconds from one update to the next."""
        parts = self.work_s, self.transfers_s, self.steady_s, self.exposed_s, self.copies_s, self.shared_weights_s
        return float(formulas.flush_batch(*parts)) + self.order_s

    @property
    def longest(self) -> str:
        """The part that takes longest, for messages."""
        parts = (
            (self.steady_s, self.bound),
            (self.work_s + self.transfers_s, "filling and draining the pipeline"),
            (self.exposed_s, "gradient synchronisation"),
            (self.copies_s, "synchronisation among the copies of the pipeline"),
            (self.order_s, "waiting for other stages between passes"),
            (self.shared_weights_s, "exchange of the gradients of shared weights"),
        )
        return max(parts, key=lambda part: part[0])[1]


def batch_time(
    plan: Plan, problem: Problem, links: Links, times: Sequence[StageTimes], *, depths: bool = True
) -> BatchTime:
    """The parts of one batch; without `depths` as if every stage had enough minibatches in flight."""
    count = minibatches_per_copy(plan)
    steady, bound = _steady_part(plan, times, count)
    if depths:
        steady, bound = max((steady, bound), _depth_bound(plan, times, count), key=lambda part: part[0])
    return BatchTime(
        minibatches=count,
        work_s=sum(stage.pass_s for stage in times),
        transfers_s=sum(stage.round_trip_s for stage in times),
        steady_s=steady,
        exposed_s=longest_exposed(plan, problem, times),
        copies_s=copies_allreduce_time(plan, problem, links),
        bound=bound,
        shared_weights_s=sum(shared_exchange_s(problem, stage) for stage in plan.stages),
    )


def _steady_part(plan: Plan, times: Sequence[StageTimes], count: int) -> tuple[float, str]:
    """The steady part and the resource that limits it. GPipe has a steady part in each of its two phases."""
    if plan.schedule == GPIPE:
        phases = (
            _slowest_resource(times, count, [stage.forward_s for stage in times], [stage.send_s for stage in times]),
            _slowest_resource(times, count, [stage.backward_s for stage in times], [stage.return_s for stage in times]),
        )
        return phases[0][0] + phases[1][0], max(phases, key=lambda phase: phase[0])[1]
    links = [max(stage.send_s, stage.return_s) for stage in times]
    return _slowest_resource(times, count, [stage.pass_s for stage in times], links)


def _slowest_resource(
    times: Sequence[StageTimes], count: int, passes: Sequence[float], messages: Sequence[float]
) -> tuple[float, str]:
    """The steady part of one phase, from the passes and messages of each stage, and the resource that limits it."""
    bounds = []
    for number, (stage, pass_s, message_s) in enumerate(zip(times, passes, messages, strict=True), start=1):
        bounds.append((float(formulas.flush_steady(pass_s, count, stage.replicas)), f"compute of stage {number}"))
        traffic = f"traffic from stage {number} to stage {number + 1}"
        bounds.append((float(formulas.flush_steady(message_s, count, stage.links)), traffic))
    return max(bounds, key=lambda entry: entry[0])


def _depth_bound(plan: Plan, times: Sequence[StageTimes], count: int) -> tuple[float, str]:
    """Lower bound on the steady part that follows from the stages' depths, with the stage that limits it."""
    bounds = [(0.0, "")]
    for index, stage in enumerate(times):
        if stage.depth >= formulas.rounds(count, stage.replicas):
            continue
        pace = float("inf") if plan.schedule == GPIPE else 0.0
        if plan.schedule != GPIPE and index + 1 < len(times):
            following = times[index + 1]
            in_flight = following.depth * following.replicas
            pace = formulas.depth_limited_pace(stage.depth, stage.replicas, in_flight, stage.transfer_s, ())
        bounds.append((pace * (count - 1), f"minibatches in flight at stage {index + 1}"))
    return max(bounds, key=lambda entry: entry[0])


def longest_exposed(plan: Plan, problem: Problem, times: Sequence[StageTimes]) -> float:
    """The longest exposed all-reduce of any stage. Work of earlier stages is charged at the fastest device's speed."""
    fastest = max(device.speed for device in problem.cluster.devices)
    work_before, exposed = 0.0, 0.0
    for stage, stage_times in zip(plan.stages, times, strict=True):
        own = stage_times.allreduce_s, stage_times.backward_s
        exposed = max(exposed, float(formulas.flush_exposed(*own, work_before / fastest)))
        units = [problem.units[unit] for unit in units_of(problem, stage)]
        work_before += sum(unit.forward_s + unit.backward_s for unit in units)
    return exposed
