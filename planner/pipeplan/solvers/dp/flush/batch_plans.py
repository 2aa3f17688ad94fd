"""The real time of a pipeline's batch under a flush schedule, and whether the pipeline fits in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pipeplan.cost import formulas
from pipeplan.problem.cuts import Floats
from pipeplan.solvers.dp.budget import Step
from pipeplan.solvers.dp.steady.placed_steps import PlacedStep, placed_steps
from pipeplan.solvers.dp.terms.batch_limit import BatchLimit, Placed
from pipeplan.solvers.dp.terms.cost_terms import CostTerms


def batch_s(terms: CostTerms, steps: Sequence[Step], *, depths: bool) -> float:
    """Seconds from one update to the next; with `depths` as far as the depths of the steps sustain it."""
    batch = BatchLimit(terms, math.inf)
    return float(batch.total_s(_times(batch, placed_steps(terms, steps), depths=depths))[0])


def batch_fits(terms: CostTerms, steps: Sequence[Step]) -> bool:
    """Whether every worker's memory suffices at the depths that the steady part of the batch needs."""
    batch, placed = BatchLimit(terms, math.inf), placed_steps(terms, steps)
    steady, behind = float(_times(batch, placed, depths=False)[0, 1]), 0.0
    for one in reversed(placed):
        depth, replicas = 1.0, one.step.replicas
        if batch.phases == 2:
            depth = float(formulas.rounds(batch.minibatches, replicas))
        elif not one.stage.is_last:
            depth = float(batch.depth(np.array([behind]), np.array([one.transfer_s]), steady, replicas)[0])
        if not one.holds(depth):
            return False
        behind = depth * replicas
    return True


def _times(batch: BatchLimit, placed: Sequence[PlacedStep], *, depths: bool) -> Floats:
    """V and the bounds of a pipeline, an array with one row."""
    times, behind, first = batch.start(), 0.0, np.zeros(1, dtype=np.intp)
    for one in reversed(placed):
        replicas, needed = np.array([one.step.replicas]), np.zeros(1)
        if depths and batch.phases == 1 and not one.stage.is_last:
            depth, transfer = np.array([float(one.step.depth)]), np.array([one.transfer_s])
            needed = batch.limited_s(depth, replicas, np.array([behind]), transfer)
        hop = one.bandwidth, one.latency_s, one.links
        times = batch.in_front(
            times, Placed(one.stage, first, replicas, one.speed, np.array([one.allreduce_s]), *hop), needed
        )
        behind = float(one.step.depth * one.step.replicas)
    return times
