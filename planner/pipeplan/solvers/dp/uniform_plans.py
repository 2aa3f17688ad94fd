"""The real pace of a pipeline on a uniform cluster, and whether it fits in memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pipeplan.cost import formulas
from pipeplan.plan import schedules
from pipeplan.plan.schedules import VERTICAL
from pipeplan.problem.cuts import Ints
from pipeplan.solvers.dp.budget import SLACK, Step
from pipeplan.solvers.dp.stage_costs import CostTerms, InputStage, StageTerms


def uniform_pace(terms: CostTerms, steps: list[Step], *, depths: bool) -> float:
    """Seconds per minibatch of one copy: the slowest stage or boundary, and with `depths` the pace they sustain."""
    times = [stage_terms_of(terms, step) for step in steps]
    paces = [_stage_s(terms, step, stage) for step, stage in zip(steps, times, strict=True)]
    following: Step | None = None
    groups = [_allreduce_s(terms, step, stage) for step, stage in zip(steps, times, strict=True)]
    for index in range(len(steps) - 1, -1, -1):
        step = steps[index]
        if following is not None:
            level = boundary_level(terms, step, following)
            paces.append(_boundary_s(terms, step, following, level))
            if depths and terms.training:
                paces.append(_depth_s(terms, step, following, level, groups[index : index + 2]))
        if depths and terms.accumulate is not None:
            paces.append(terms.buffered_pace(step.depth, step.replicas, groups[index]))
        following = step
    return max(paces)


def depths_of(terms: CostTerms, steps: list[Step], pace_s: float) -> list[int]:
    """The depths that sustain a pace, input to output; all 1 for inference."""
    depths: list[int] = []
    behind = 0.0
    for index in range(len(steps) - 1, -1, -1):
        step = steps[index]
        wait = float(
            stage_terms_of(terms, step).wait(_ONE, np.array([float(step.replicas)]), span_of(terms, step), pace_s)[0]
        )
        depth = 1
        if depths and terms.training:
            level = boundary_level(terms, step, steps[index + 1])
            transfer = float(terms.transfer_s[step.end][level])
            depth = int(formulas.in_flight_depth(behind, wait, transfer, pace_s, step.replicas))
        behind = float(formulas.in_flight_behind(depth, step.replicas, wait))
        depths.insert(0, depth)
    return depths


def uniform_fits(terms: CostTerms, steps: list[Step], pace_s: float) -> bool:
    """Whether every worker's memory suffices at the depths that a pace needs."""
    depths = depths_of(terms, steps, pace_s)
    if terms.training and terms.schedule == VERTICAL:
        lag = int(schedules.update_lag(steps[0].replicas * terms.problem.copies, len(steps) == 1))
        terms = replace(terms, first=InputStage(steps[0].replicas, depths[0] + lag))
    for step, depth in zip(steps, depths, strict=True):
        deepest = stage_terms_of(terms, step).max_depth_of(_ONE, np.array([float(step.replicas)]))
        if depth > deepest[0]:
            return False
        if terms.accumulate is not None:
            allreduce = _allreduce_s(terms, step, stage_terms_of(terms, step))
            if terms.buffered_pace(depth, step.replicas, allreduce) > pace_s * (1 + SLACK):
                return False
    return True


_ONE = np.zeros(1, dtype=np.intp)


def stage_terms_of(terms: CostTerms, step: Step) -> StageTerms:
    """The terms of one stage, as arrays of length 1."""
    return terms.stage(step.end, np.array([step.start]), recompute=step.recompute)


def span_of(terms: CostTerms, step: Step) -> Ints:
    """The level that a stage spans, as an array of length 1."""
    return _ONE + _span(terms, step)


def _span(terms: CostTerms, step: Step) -> int:
    return int(terms.layout.between(np.array(step.first), np.array(step.first + step.replicas - 1)))


def boundary_level(terms: CostTerms, step: Step, following: Step) -> int:
    """The level of the smallest component that holds both stages."""
    last = following.first + following.replicas - 1
    return int(terms.layout.between(np.array(step.first), np.array(last)))


def _allreduce_s(terms: CostTerms, step: Step, stage: StageTerms) -> float:
    level = _span(terms, step)
    bandwidth, latency = terms.links.allreduce_bandwidth[level], terms.links.allreduce_latency[level]
    if not terms.training:
        return 0.0
    return float(formulas.ring_allreduce_time(step.replicas, float(stage.parameters[0]), bandwidth, latency))


def _stage_s(terms: CostTerms, step: Step, stage: StageTerms) -> float:
    compute = formulas.compute_time(float(stage.work_s[0]), step.replicas, terms.speed)
    synchronisation = _allreduce_s(terms, step, stage) / (terms.accumulate or step.replicas)
    return float(formulas.overlapped(compute, synchronisation, stage.overlap))


def _boundary_s(terms: CostTerms, step: Step, following: Step, level: int) -> float:
    links = min(step.replicas, following.replicas) if terms.parallel else 1
    return float(terms.boundary_s[step.end][level]) / links


def _depth_s(terms: CostTerms, step: Step, following: Step, level: int, groups: list[float]) -> float:
    """The pace that a stage's depth sustains."""
    transfer = float(terms.transfer_s[step.end][level])
    in_flight, copies = float(following.depth * following.replicas), terms.problem.copies
    if terms.accumulate is not None:
        groups = []
    elif copies > 1:
        # With copies the waits are whole minibatches at any pace.
        counts = (step.replicas, following.replicas)
        in_flight += sum(float(formulas.group_wait(0.0, 1.0, count, copies)) for count in counts)
        groups = []
    return formulas.depth_limited_pace(step.depth, step.replicas, in_flight, transfer, groups)
