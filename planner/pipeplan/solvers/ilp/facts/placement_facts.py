"""The facts about a pipeline within an upper bound on its pace, before any program.

That is: its blocks of layers, the candidate placements, and what their workers can do.

`integer_program` has the notation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeplan.cluster_data.links import Links
from pipeplan.cost import formulas
from pipeplan.plan.schedules import ACCUMULATING
from pipeplan.problem.grid_shapes import grid_shapes
from pipeplan.problem.problem import Problem
from pipeplan.solvers.ilp.facts.layers import LayerBlocks
from pipeplan.solvers.ilp.facts.placements import PlacementSet

Place = tuple[int, int]
"""First worker and number of workers of a stage, without regard to the idle workers behind them."""

# Relative rounding error within which a bound still holds.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class LoadFactors:
    """Factors from bytes over a card, divided by its bandwidth in bytes per U, to the charged pace in units of U."""

    messages: float
    """For the messages of one minibatch."""
    rings: float
    """For an all-reduce among the r replicas of a stage, where no schedule says how often: to be divided by r."""
    shared_rings: bool
    """Whether all stages share their updates, so that `rings` is not divided by r."""
    copies: float
    """For an all-reduce among copies of the pipeline."""

    def ring(self, replicas: int) -> float:
        """The factor for an all-reduce among the replicas of a stage."""
        return self.rings if self.shared_rings else self.rings / replicas


class PlacementFacts:
    """One pipeline on one cluster that takes at most `upper_s` seconds per minibatch, or with a flush per update."""

    def __init__(self, problem: Problem, upper_s: float, only: Mapping[Place, frozenset[int]] | None = None) -> None:
        """`only` has the places of all stages to consider, with the last idle workers behind them, if these are
        known."""
        self.problem = problem
        self.unit_s = upper_s
        self.links = Links.of(problem.cluster)
        self.workers = problem.cluster.workers
        self.fastest = max(device.speed for device in problem.cluster.devices)
        self.parallel = problem.options.boundary == "parallel"
        self.minibatches = minibatches_per_update(problem)
        """Minibatches of one update in one copy, if all stages share their updates; else None."""
        self.layers = LayerBlocks(problem, self._largest_transfer())
        self.total = max(1.0, sum(block.parameters for block in self.layers.blocks))
        """Bytes of the parameters of the whole model."""
        self.most_executor_s = most_executor_work_s(problem)
        self.grids = tuple(grid_shapes(problem)) if problem.options.grid else None
        shared = problem.options.contention and len(problem.cluster.starts(1)) > 2
        self.placements = PlacementSet(
            problem.cluster, self._most_replicas(), self.grids, shared, self._most_idle(), problem.unused, only
        )

    def speed(self, place: Place) -> float:
        """Speed of the slowest worker of a place."""
        return self.problem.cluster.speed_of(range(place[0], sum(place)))

    def slowness(self, place: Place) -> float:
        """The time of work at a place as a multiple of its time on the fastest device."""
        return self.fastest / self.speed(place)

    def way(self, workers: Sequence[int], level: int) -> tuple[float, float]:
        """Bandwidth of messages and latency on the ways of workers up to a level."""
        ways = self.links.ways[level]
        mine = [0] if self.problem.cluster.uniform else list(workers)
        return float(ways.sendrecv[mine].min()), float(ways.latency[mine].max())

    def allreduce(self, place: Place, size: float) -> float:
        """Seconds to all-reduce `size` bytes among the workers of a place, with a flush in all copies."""
        problem = self.problem
        if not problem.training:
            return 0.0
        if problem.options.flushes and problem.copies > 1:
            ways = problem.copy_ways
            mine = range(place[0], sum(place)) if len(ways.bandwidth) > 1 else (0,)
            slowest = min(ways.bandwidth[one] for one in mine), max(ways.latency_s[one] for one in mine)
            return float(formulas.ring_allreduce_time(place[1] * problem.copies, size, *slowest))
        rate = self.links.allreduce_among(range(place[0], sum(place)))
        return float(formulas.ring_allreduce_time(place[1], size, *rate))

    def synchronisation(self, place: Place, size: float) -> float:
        """Synchronisation of `size` bytes among the workers of a place, in seconds per minibatch."""
        allreduce = self.allreduce(place, size)
        if self.minibatches is not None:
            return float(formulas.buffered_synchronisation(allreduce, self.minibatches))
        return allreduce / place[1]

    def doable_s(self, start: int, stop: int) -> float:
        """The work on one minibatch, in seconds at speed 1, that workers can do within U; with a flush they do it for
        all minibatches of an update."""
        rounds = float(self.minibatches or 1) if self.problem.options.flushes else 1.0
        return self.unit_s * (1 + _ROUNDING) * self._speeds(start, stop) / rounds

    def _most_replicas(self) -> int:
        two_versions = None if self.problem.options.flushes else self.minibatches
        bounds = (self.problem.options.max_replicas, two_versions, self.workers)
        return min(bound for bound in bounds if bound is not None)

    def _most_idle(self) -> float:
        """Upper bound on the idle workers: within U the busy ones must do all the work."""
        cluster = self.problem.cluster
        slowest = min(device.speed for device in cluster.devices)
        spare = cluster.total_speed * (1.0 - self.problem.work_s / self.doable_s(0, self.workers))
        return max(0.0, math.floor(spare / slowest + _ROUNDING))

    def _largest_transfer(self) -> float:
        """Bytes that a boundary can carry within U over the fastest links, as many as it may have."""
        upper = self.unit_s * (max(1, min(self._most_replicas(), self.workers // 2)) if self.parallel else 1)
        if self.problem.options.flushes:
            # The transfers of one minibatch take at most T, or twice as long where half of them count.
            upper = 2 * self.unit_s
        rates = [float(rate) for level in self.links.ways for rate in level.sendrecv if math.isfinite(rate)]
        return upper * (1 + _ROUNDING) * max(rates, default=math.inf)

    def conceivable(self, index: int, place: Place) -> bool:
        """Whether a block can be at a place within U: its own time, and the work of all blocks before and behind it."""
        block, layers = self.layers.blocks[index], self.layers
        limit = self.unit_s * (1 + _ROUNDING)
        if self.minibatches is not None and self.problem.options.flushes:
            return float(formulas.rounds(self.minibatches, place[1])) * block.work_s <= limit * self.speed(place)
        start, stop = place[0], sum(place)
        return (
            block.work_s <= limit * place[1] * self.speed(place)
            and self.synchronisation(place, block.parameters) <= limit
            and block.work_s + layers.before_s[index] <= limit * self._speeds(0, stop)
            and block.work_s + layers.after_s[index] <= limit * self._speeds(start, self.workers)
        )

    def _speeds(self, start: int, stop: int) -> float:
        cluster = self.problem.cluster
        if cluster.uniform:
            return (stop - start) * cluster.device.speed
        return math.fsum(cluster.devices[worker].speed for worker in range(start, stop))


def minibatches_per_update(problem: Problem) -> int | None:
    """Minibatches of one update in one copy of the pipeline, if all stages share their updates; else None."""
    options = problem.options
    if not problem.training or options.schedule not in ACCUMULATING or options.accumulate is None:
        return None
    if options.flushes:
        return int(formulas.rounds(options.accumulate, problem.copies))
    return options.accumulate // problem.copies


def most_executor_work_s(problem: Problem) -> float:
    """Upper bound on the executor's work at any stage, in seconds per minibatch on the slowest device."""
    costs, speed = problem.executor_costs, min(device.speed for device in problem.cluster.devices)
    traffic = sum(flow.bytes + flow.gradient_bytes for flow in problem.flows)
    copied = problem.parameter_bytes * problem.copied_share
    middle_s = formulas.executor_time(costs, problem.passes, 2, 2 * traffic, copied, problem.options.update_share)
    return float(middle_s + costs.samples_s) / speed
