"""The real pace of a pipeline on a heterogeneous cluster, and whether it fits in memory."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from pipeplan.cost import formulas
from pipeplan.plan import schedules
from pipeplan.plan.schedules import VERTICAL
from pipeplan.solvers.dp.budget import SLACK, Step
from pipeplan.solvers.dp.heterogeneous_search import HeterogeneousTerms
from pipeplan.solvers.dp.stage_costs import StageTerms


@dataclass(frozen=True)
class StepTimes:
    """The terms and times of one step on its placement: seconds per minibatch, and of one all-reduce of its group."""

    step: Step
    terms: StageTerms
    run: int
    time_s: float
    group_s: float


def step_times(terms: HeterogeneousTerms, steps: list[Step]) -> list[StepTimes]:
    """Every step of a pipeline with its terms and times."""
    times = []
    for step in steps:
        stage = terms.stage(step.end, np.array([step.start]), recompute=step.recompute)
        run = terms.runs.index(step.first, step.first + step.replicas)
        time, group = terms.stage_s(stage, slice(run, run + 1))
        times.append(StepTimes(step, stage, run, float(time[0, 0]), float(group[0, 0])))
    return times


@dataclass(frozen=True)
class BoundaryLink:
    """The link between two stages: bandwidth in bytes/s, latency, and the number of transfers at once."""

    bandwidth: float
    latency_s: float
    links: int


def boundary_links(terms: HeterogeneousTerms, steps: list[Step]) -> list[BoundaryLink]:
    """The link of every boundary of a pipeline."""
    boundaries = []
    for step, following in itertools.pairwise(steps):
        joined = terms.between[step.first, following.first + following.replicas - 1]
        links = min(step.replicas, following.replicas) if terms.parallel else 1
        ways = (terms.runs.ways[[terms.runs.index(one.first, one.first + one.replicas)]] for one in (step, following))
        bandwidth, latency = terms.rates_between(joined, *ways)
        boundaries.append(BoundaryLink(float(bandwidth[0]), float(latency[0]), links))
    return boundaries


def _boundaries(terms: HeterogeneousTerms, steps: list[Step]) -> list[tuple[float, float]]:
    """For every boundary, how long one minibatch keeps it busy, and its one-way time."""
    times = []
    for step, hop in zip(steps, boundary_links(terms, steps), strict=False):
        size = terms.busier(step.end)
        busy = formulas.boundary_time(size, hop.bandwidth, hop.links)
        times.append((float(busy), float(formulas.transfer_time(size, hop.bandwidth, hop.latency_s))))
    return times


def heterogeneous_pace(terms: HeterogeneousTerms, steps: list[Step], *, depths: bool) -> float:
    """Seconds per minibatch of one copy: the slowest stage or boundary, and the pace that the depths sustain.

    The depths count only where `depths` asks for it, or where two weight versions must suffice.
    """
    stages, boundaries = step_times(terms, steps), _boundaries(terms, steps)
    paces = [stage.time_s for stage in stages] + [busy for busy, _ in boundaries]
    if not terms.training:
        return max(paces)
    copies = terms.problem.copies
    if terms.accumulate is not None:
        paces += [terms.buffered_pace(stage.step.depth, stage.step.replicas, stage.group_s) for stage in stages]
    if depths or terms.accumulate is not None:
        for (stage, following), (_, transfer) in zip(itertools.pairwise(stages), boundaries, strict=True):
            in_flight = float(following.step.depth * following.step.replicas)
            groups = [stage.group_s, following.group_s]
            if terms.accumulate is not None:
                groups = []
            elif copies > 1:
                # With copies the waits are whole minibatches at any pace.
                counts = (stage.step.replicas, following.step.replicas)
                in_flight += sum(float(formulas.group_wait(0.0, 1.0, count, copies)) for count in counts)
                groups = []
            paces.append(
                formulas.depth_limited_pace(stage.step.depth, stage.step.replicas, in_flight, transfer, groups)
            )
    return max(paces)


def heterogeneous_fits(terms: HeterogeneousTerms, steps: list[Step], pace_s: float) -> bool:
    """Whether every worker's memory suffices at the depths that a pace needs."""
    stages = step_times(terms, steps)
    depths = _depths(terms, steps, stages, pace_s)
    lag = int(schedules.update_lag(steps[0].replicas * terms.problem.copies, len(steps) == 1))
    for stage, depth in zip(stages, depths, strict=True):
        replicas = stage.step.replicas
        fixed, growing = (float(part[0]) for part in stage.terms.memory(replicated=replicas > 1))
        if terms.schedule == VERTICAL and terms.training:
            # One version is already included.
            versions = schedules.vertical_versions(depths[0] + lag, steps[0].replicas, replicas)
            fixed += float(formulas.version_memory(stage.terms.parameters[0], versions - 1))
        if fixed + growing * depth > terms.runs.memory[stage.run] * (1 + 1e-12):
            return False
        if terms.accumulate is not None and terms.buffered_pace(depth, replicas, stage.group_s) > pace_s * (1 + SLACK):
            return False
    return True


def _depths(terms: HeterogeneousTerms, steps: list[Step], stages: list[StepTimes], pace_s: float) -> list[int]:
    """The depths that sustain a pace, input to output; all 1 for inference."""
    boundaries, behind, depths = [*_boundaries(terms, steps), (0.0, 0.0)], 0.0, list[int]()
    for index in range(len(stages) - 1, -1, -1):
        stage, replicas = stages[index], steps[index].replicas
        wait, depth = 0.0, 1
        if terms.accumulate is None and terms.training:
            wait = float(formulas.group_wait(stage.group_s, pace_s, replicas, terms.problem.copies))
        if terms.training and index + 1 < len(stages):
            depth = int(formulas.in_flight_depth(behind, wait, boundaries[index][1], pace_s, replicas))
        behind = float(formulas.in_flight_behind(depth, replicas, wait))
        depths.insert(0, depth)
    return depths
