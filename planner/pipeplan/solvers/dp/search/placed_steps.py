"""The step time or batch time of one pipeline that was found, and whether it fits in memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeplan.cost import formulas
from pipeplan.cost.depths import depths_for, sustained_s
from pipeplan.cost.stage_times import StageTimes
from pipeplan.plan import schedules
from pipeplan.plan.schedules import VERTICAL
from pipeplan.solvers.dp.budget import SLACK, Step
from pipeplan.solvers.dp.search.batch_limit import BatchLimit, Placed
from pipeplan.solvers.dp.search.cost_terms import CostTerms
from pipeplan.solvers.dp.search.stage_terms import StageTerms


@dataclass(frozen=True)
class PlacedStep:
    """One step of a pipeline on its workers, and the link to the step behind it."""

    stage: StageTerms
    """The figures of this one stage, as arrays of length 1."""
    times: StageTimes
    """Times of the stage. Under a flush, the all-reduce is that among all copies."""
    speed: float
    """Speed of the slowest worker."""
    capacity: float
    """Bytes that a stage may use on the worker with the least memory."""
    hop: tuple[float, float]
    """(bandwidth, latency) of messages to the step behind; infinite and 0 for the last step."""

    @staticmethod
    def of(terms: CostTerms, step: Step, following: Step | None) -> PlacedStep:
        """A step on its workers; `following` is the step behind it, None for the last step."""
        problem, run = terms.problem, range(step.first, step.first + step.replicas)
        stage = StageTerms.of(terms, step.end, np.array([step.start]), recompute=step.recompute)
        speed, links, rates = problem.cluster.speed_of(run), 1, []
        if following is not None:
            behind = range(following.first, following.first + following.replicas)
            rates = [terms.links.sendrecv_among([*run, *behind])]
            links = min(len(run), len(behind)) if terms.parallel else 1
        size, reduce_s = float(stage.parameters[0]), 0.0
        if terms.training:
            members, ring = terms.members(len(run)), terms.ring_among(run)
            reduce_s = float(formulas.ring_allreduce_time(members, size, *ring))
        forward, both, update = (float(one[0]) / speed for one in (stage.forward_s, stage.work_s, stage.update_s))
        times = StageTimes.of(
            len(run),
            float(len(run)),
            step.depth,
            (forward, both - forward, update, float(np.sum(stage.executor_s)) / speed),
            (reduce_s, terms.accumulate or len(run)),
            problem.options.overlap,
            links,
            (float(terms.cuts.sent[step.end]), float(terms.cuts.returned[step.end])),
            rates,
        )
        return PlacedStep(stage, times, speed, problem.capacity_of(run), rates[0] if rates else (math.inf, 0.0))

    def holds(self, depth: float, versions: int = 1) -> bool:
        """Whether `depth` minibatches in flight fit in memory, together with `versions` versions of the weights."""
        replicas = np.array([self.times.replicas])
        fixed = self.stage.fixed_bytes(replicas) + formulas.version_memory(self.stage.parameters, versions - 1)
        return bool(fixed[0] + self.stage.growing_bytes[0] * depth <= self.capacity * (1 + SLACK))


def placed_steps(terms: CostTerms, steps: Sequence[Step]) -> list[PlacedStep]:
    """The steps of a pipeline on their workers, input to output."""
    return [PlacedStep.of(terms, *pair) for pair in itertools.zip_longest(steps, steps[1:])]


def steady_step_time(terms: CostTerms, steps: Sequence[Step], *, depths: bool) -> float:
    """Seconds per minibatch of one copy, by the slowest stage or boundary, and with `depths` also by the depths."""
    problem, times = terms.problem, [one.times for one in placed_steps(terms, steps)]
    found = [time for one in times for time in (one.stage_s, one.boundary_s)]
    if depths and terms.training:
        shared = problem.copies, terms.accumulate, problem.copies_allreduce_s
        found += [sustained_s(times, index, *shared) for index in range(len(times))]
    return max(found)


def steady_fits(terms: CostTerms, steps: Sequence[Step], step_time_s: float) -> bool:
    """Whether every worker's memory suffices at the depths that a step time needs."""
    placed, problem, shared = placed_steps(terms, steps), terms.problem, terms.accumulate
    if not terms.training:
        return all(one.holds(1) for one in placed)
    depths = depths_for([one.times for one in placed], step_time_s, problem.copies, common_update=shared is not None)
    first = steps[0].replicas
    delay = int(depths[0]) + int(schedules.update_lag(first * problem.copies, len(steps) == 1))
    for one, depth in zip(placed, depths, strict=True):
        replicas, versions = one.times.replicas, 1
        if terms.schedule == VERTICAL:
            versions = int(schedules.vertical_versions(delay, first, replicas))
        if not one.holds(depth, versions):
            return False
        if shared is not None:
            reduce_s = one.times.allreduce_s + problem.copies_allreduce_s
            needed = formulas.buffered_step_time(int(depth), replicas, reduce_s, shared, problem.copies)
            if needed > step_time_s * (1 + SLACK):
                return False
    return True


def batch_s(terms: CostTerms, steps: Sequence[Step]) -> float:
    """Seconds from one update to the next."""
    batch, times = BatchLimit(terms, math.inf), np.zeros((1, 2))
    for one in reversed(placed_steps(terms, steps)):
        reduce_s, replicas = np.array([one.times.allreduce_s]), np.array([one.times.replicas])
        times = batch.in_front(times, Placed(one.stage, replicas, one.speed, reduce_s, *one.hop, one.times.links))
    return float(times[0, 1])


def batch_fits(terms: CostTerms, steps: Sequence[Step]) -> bool:
    """Whether every worker's memory suffices at the depths of the schedule."""
    batch, behind = BatchLimit(terms, math.inf), 0.0
    for one in reversed(placed_steps(terms, steps)):
        depth, replicas = 1.0, one.times.replicas
        if batch.holds_all or not one.stage.is_last:
            depth = float(batch.depth(np.asarray(behind), replicas))
        if not one.holds(depth):
            return False
        behind = depth * replicas
    return True
