"""The step time of one pipeline that was found, or the time of its batch, and whether it fits in memory.

`placed_steps` puts the steps on their workers, with the speeds and links that decide both.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeplan.cost import formulas
from pipeplan.plan import schedules
from pipeplan.plan.schedules import VERTICAL
from pipeplan.solvers.dp.budget import SLACK, Step
from pipeplan.solvers.dp.search.batch_limit import BatchLimit, Placed
from pipeplan.solvers.dp.search.cost_terms import CostTerms
from pipeplan.solvers.dp.search.heterogeneous_terms import HeterogeneousTerms
from pipeplan.solvers.dp.search.stage_terms import StageTerms


@dataclass(frozen=True)
class PlacedStep:
    """One step of a pipeline on its workers, and the link to the step behind it."""

    step: Step
    stage: StageTerms
    """The terms of this one stage, as arrays of length 1."""
    speed: float
    """Speed of the slowest worker."""
    memory_bytes: float
    """Memory of the smallest worker."""
    allreduce_s: float
    """One all-reduce among the replicas of one copy, or with a flush of all copies."""
    bandwidth: float = float("inf")
    """Bytes/s of messages to the step behind; infinite for the last step."""
    latency_s: float = 0.0
    links: int = 1
    """Messages to the step behind that are sent at the same time."""

    @property
    def transfer_s(self) -> float:
        """The time of one message to the step behind."""
        busier = self.stage.terms.busier(self.step.end)
        return float(formulas.transfer_time(busier, self.bandwidth, self.latency_s))

    @property
    def busy_s(self) -> float:
        """The time that a minibatch keeps the boundary behind busy."""
        return float(formulas.boundary_time(self.stage.terms.busier(self.step.end), self.bandwidth, self.links))

    @property
    def stage_s(self) -> float:
        """Seconds per minibatch: compute and synchronisation."""
        terms, replicas = self.stage.terms, self.step.replicas
        compute = formulas.compute_time(float(self.stage.work_s[0]), replicas, self.speed)
        synchronisation = self.allreduce_s / (terms.accumulate or replicas)
        return float(formulas.overlapped(compute, synchronisation, terms.problem.options.overlap))

    def holds(self, depth: float, versions: int = 1) -> bool:
        """Whether so many minibatches in flight fit in memory, with `versions` versions of the weights that are kept
        in any case."""
        fixed, growing = (float(part[0]) for part in self.stage.memory(replicated=self.step.replicas > 1))
        fixed += float(formulas.version_memory(self.stage.parameters[0], versions - 1))
        fixed -= float(self.stage.divided_bytes(self.stage.parameters[0], self.step.replicas))
        return fixed + growing * depth <= self.memory_bytes * (1 + 1e-12)


def placed_steps(terms: CostTerms, steps: Sequence[Step]) -> list[PlacedStep]:
    """The steps of a pipeline on their workers, input to output."""
    pairs = itertools.zip_longest(steps, steps[1:])
    if isinstance(terms, HeterogeneousTerms):
        return [_on_placement(terms, step, following) for step, following in pairs]
    return [_on_equal_workers(terms, step, following) for step, following in pairs]


def _stage(terms: CostTerms, step: Step) -> StageTerms:
    return StageTerms.of(terms, step.end, np.array([step.start]), recompute=step.recompute)


def _allreduce_s(stage: StageTerms, replicas: int, bandwidth: float, latency_s: float) -> float:
    if not stage.terms.training:
        return 0.0
    members = stage.terms.members(replicas)
    return float(formulas.ring_allreduce_time(members, float(stage.parameters[0]), bandwidth, latency_s))


def _on_equal_workers(terms: CostTerms, step: Step, following: Step | None) -> PlacedStep:
    stage, links = _stage(terms, step), terms.links
    span = _level(terms, step, step)
    bandwidth, latency_s = terms.ring_of(np.array(span))
    rates = float(bandwidth), float(latency_s)
    hop = float("inf"), 0.0
    if following is not None:
        level = _level(terms, step, following)
        hop = float(links.sendrecv_bandwidth[level]), float(links.sendrecv_latency[level])
    allreduce = _allreduce_s(stage, step.replicas, *rates)
    return PlacedStep(step, stage, terms.speed, terms.problem.capacity, allreduce, *hop)


def _level(terms: CostTerms, step: Step, following: Step) -> int:
    """The level of the smallest component that holds two steps."""
    last = following.first + following.replicas - 1
    return int(terms.layout.between(np.array(step.first), np.array(last)))


def _on_placement(terms: HeterogeneousTerms, step: Step, following: Step | None) -> PlacedStep:
    stage, table = _stage(terms, step), terms.runs
    run = table.index(step.first, step.first + step.replicas)
    ring_bandwidth, ring_latency_s = terms.ring(run)
    rates = float(ring_bandwidth), float(ring_latency_s)
    hop: tuple[float, float] = (float("inf"), 0.0)
    links = 1
    if following is not None:
        end = following.first + following.replicas
        joined = terms.between[step.first, end - 1]
        ways = table.ways[[run]], table.ways[[table.index(following.first, end)]]
        bandwidth, latency = terms.rates_between(joined, *ways)
        hop = float(bandwidth[0]), float(latency[0])
        links = min(step.replicas, following.replicas) if terms.parallel else 1
    allreduce = _allreduce_s(stage, step.replicas, *rates)
    return PlacedStep(step, stage, float(table.speed[run]), float(table.memory[run]), allreduce, *hop, links)


def steady_step_time(terms: CostTerms, steps: Sequence[Step], *, depths: bool) -> float:
    """Seconds per minibatch of one copy: the slowest stage or boundary, and with `depths` the step time they
    sustain.
    """
    placed, copies = placed_steps(terms, steps), terms.problem.copies
    step_times = [time for one in placed for time in (one.stage_s, one.busy_s)]
    if not (depths and terms.training):
        return max(step_times)
    if terms.accumulate is not None:
        step_times += [terms.buffered_step_time(one.step.depth, one.step.replicas, one.allreduce_s) for one in placed]
    for one, following in itertools.pairwise(placed):
        in_flight, groups = float(following.step.depth * following.step.replicas), []
        if terms.accumulate is None and copies > 1:
            # With copies the waits are whole minibatches at any step time.
            counts = one.step.replicas, following.step.replicas
            in_flight += sum(float(formulas.group_wait(0.0, 1.0, count, copies)) for count in counts)
        elif terms.accumulate is None:
            groups = [one.allreduce_s, following.allreduce_s]
        step = one.step
        step_times.append(
            formulas.depth_limited_step_time(step.depth, step.replicas, in_flight, one.transfer_s, groups)
        )
    return max(step_times)


def steady_fits(terms: CostTerms, steps: Sequence[Step], step_time_s: float) -> bool:
    """Whether every worker's memory suffices at the depths that a step time needs."""
    placed, copies = placed_steps(terms, steps), terms.problem.copies
    depths = _depths(terms, placed, step_time_s)
    first = steps[0].replicas
    delay = depths[0] + int(schedules.update_lag(first * copies, len(steps) == 1))
    for one, depth in zip(placed, depths, strict=True):
        replicas, versions = one.step.replicas, 1
        if terms.schedule == VERTICAL and terms.training:
            versions = int(schedules.vertical_versions(delay, first, replicas))
        if not one.holds(depth, versions):
            return False
        if terms.accumulate is not None and terms.training:
            needed = terms.buffered_step_time(depth, replicas, one.allreduce_s)
            if needed > step_time_s * (1 + SLACK):
                return False
    return True


def _depths(terms: CostTerms, placed: Sequence[PlacedStep], step_time_s: float) -> list[int]:
    """The depths that sustain a step time, input to output; all 1 for inference."""
    behind, depths = 0.0, list[int]()
    for one in reversed(placed):
        replicas, wait, depth = one.step.replicas, 0.0, 1
        if terms.accumulate is None and terms.training:
            wait = float(formulas.group_wait(one.allreduce_s, step_time_s, replicas, terms.problem.copies))
        if terms.training and not one.stage.is_last:
            depth = int(formulas.in_flight_depth(behind, wait, one.transfer_s, step_time_s, replicas))
        behind = float(formulas.in_flight_behind(depth, replicas, wait))
        depths.insert(0, depth)
    return depths


def batch_s(terms: CostTerms, steps: Sequence[Step]) -> float:
    """Seconds from one update to the next."""
    batch = BatchLimit(terms, math.inf)
    times = np.zeros((1, 2))
    for one in reversed(placed_steps(terms, steps)):
        replicas, hop = np.array([one.step.replicas]), (one.bandwidth, one.latency_s, one.links)
        placed = Placed(one.stage, replicas, one.speed, np.array([one.allreduce_s]), *hop)
        times = batch.in_front(times, placed)
    return float(times[0, 1])


def batch_fits(terms: CostTerms, steps: Sequence[Step]) -> bool:
    """Whether every worker's memory suffices at the depths of the schedule."""
    batch, behind = BatchLimit(terms, math.inf), 0.0
    for one in reversed(placed_steps(terms, steps)):
        depth, replicas = 1.0, one.step.replicas
        if batch.holds_all or not one.stage.is_last:
            depth = float(batch.depth(np.asarray(behind), replicas))
        if not one.holds(depth):
            return False
        behind = depth * replicas
    return True
