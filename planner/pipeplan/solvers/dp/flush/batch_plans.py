"""The real time of a pipeline's batch under a flush schedule, and whether the pipeline fits in memory."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np

from pipeplan.cost import formulas
from pipeplan.problem.cuts import Floats
from pipeplan.solvers.dp.budget import Step
from pipeplan.solvers.dp.flush.batch_limit import BatchLimit, Placed
from pipeplan.solvers.dp.heterogeneous_plans import boundary_links, step_times
from pipeplan.solvers.dp.heterogeneous_search import HeterogeneousTerms
from pipeplan.solvers.dp.stage_costs import CostTerms
from pipeplan.solvers.dp.uniform_plans import boundary_level, span_of, stage_terms_of

_ONE = np.zeros(1, dtype=np.intp)


def batch_s(terms: CostTerms, steps: list[Step], *, depths: bool) -> float:
    """Seconds from one update to the next; with `depths` as far as the depths of the steps sustain it."""
    batch = BatchLimit(terms, math.inf)
    return float(batch.total_s(_times(batch, steps, depths=depths))[0])


def batch_fits(terms: CostTerms, steps: list[Step]) -> bool:
    """Whether every worker's memory suffices at the depths that the steady part of the batch needs."""
    batch = BatchLimit(terms, math.inf)
    steady = float(_times(batch, steps, depths=False)[0, 1])
    placed, transfers = _placed(terms, steps)
    behind = 0.0
    for one, step, transfer in zip(reversed(placed), reversed(steps), reversed(transfers), strict=True):
        depth = np.ones(1)
        if batch.phases == 2:
            depth = np.array([float(formulas.rounds(batch.minibatches, step.replicas))])
        elif not one.stage.is_last:
            depth = batch.depth(np.array([behind]), np.array([transfer]), steady, step.replicas)
        if float(depth[0]) > _deepest(terms, one, step):
            return False
        behind = float(depth[0]) * step.replicas
    return True


def _times(batch: BatchLimit, steps: list[Step], *, depths: bool) -> Floats:
    """V and the bounds of a pipeline, an array with one row."""
    times, behind = batch.start(), 0.0
    limited = depths and batch.phases == 1
    placed, transfers = _placed(batch.terms, steps)
    for one, step, transfer in zip(reversed(placed), reversed(steps), reversed(transfers), strict=True):
        needed: Floats = np.zeros(1)
        if limited and not one.stage.is_last:
            needed = batch.limited_s(np.array([step.depth]), one.replicas, np.array([behind]), np.array([transfer]))
        times = batch.in_front(times, one, needed)
        behind = float(step.depth * step.replicas)
    return times


def _deepest(terms: CostTerms, placed: Placed, step: Step) -> float:
    """The most minibatches in flight that fit in the memory of every worker of a stage."""
    if not isinstance(terms, HeterogeneousTerms):
        return float(placed.stage.max_depth_of(_ONE, np.array([float(step.replicas)]))[0])
    fixed, growing = (float(part[0]) for part in placed.stage.memory(replicated=step.replicas > 1))
    memory = float(terms.runs.memory[terms.runs.index(step.first, step.first + step.replicas)]) * (1 + 1e-12)
    return -1.0 if fixed > memory else math.inf if growing == 0 else (memory - fixed) / growing


def _placed(terms: CostTerms, steps: list[Step]) -> tuple[list[Placed], list[float]]:
    """The stages of a pipeline on their workers, and the time of one message to the stage behind each."""
    if isinstance(terms, HeterogeneousTerms):
        return _placed_anywhere(terms, steps)
    placed, transfers = [], []
    for step, following in itertools.zip_longest(steps, steps[1:]):
        stage, count = stage_terms_of(terms, step), np.array([float(step.replicas)])
        one = Placed(stage, _ONE, count, terms.speed, stage.allreduce(_ONE, count, span_of(terms, step)))
        transfer = 0.0
        if following is not None:
            level, links = boundary_level(terms, step, following), terms.links
            one = replace(
                one,
                bandwidth=float(links.sendrecv_bandwidth[level]),
                latency_s=float(links.sendrecv_latency[level]),
            )
            transfer = float(terms.transfer_s[step.end][level])
        placed.append(one)
        transfers.append(transfer)
    return placed, transfers


def _placed_anywhere(terms: HeterogeneousTerms, steps: list[Step]) -> tuple[list[Placed], list[float]]:
    """The same on a heterogeneous cluster or over parallel links."""
    placed, transfers = [], []
    for stage, hop in itertools.zip_longest(step_times(terms, steps), boundary_links(terms, steps)):
        speed = terms.runs.speed[[stage.run]]
        one = Placed(stage.terms, _ONE, np.array([stage.step.replicas]), speed, np.array([stage.group_s]))
        transfer = 0.0
        if hop is not None:
            one = replace(one, bandwidth=hop.bandwidth, latency_s=hop.latency_s, links=hop.links)
            transfer = float(formulas.transfer_time(terms.busier(stage.step.end), hop.bandwidth, hop.latency_s))
        placed.append(one)
        transfers.append(transfer)
    return placed, transfers
