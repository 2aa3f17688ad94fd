"""The real time of a pipeline's batch under a flush schedule, and whether the pipeline fits in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pipeplan.solvers.dp.budget import Step
from pipeplan.solvers.dp.steady.placed_steps import placed_steps
from pipeplan.solvers.dp.terms.batch_limit import BatchLimit, Placed
from pipeplan.solvers.dp.terms.cost_terms import CostTerms


def batch_s(terms: CostTerms, steps: Sequence[Step]) -> float:
    """Seconds from one update to the next."""
    batch, first = BatchLimit(terms, math.inf), np.zeros(1, dtype=np.intp)
    times = np.zeros((1, 2))
    for one in reversed(placed_steps(terms, steps)):
        replicas, hop = np.array([one.step.replicas]), (one.bandwidth, one.latency_s, one.links)
        placed = Placed(one.stage, first, replicas, one.speed, np.array([one.allreduce_s]), *hop)
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
