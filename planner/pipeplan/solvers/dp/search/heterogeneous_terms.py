"""The terms of the cost model for all candidate placements, used if servers differ or boundaries have several links."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from pipeplan.cost import formulas
from pipeplan.problem.cuts import Flags, Floats, Ints
from pipeplan.problem.problem import joins_copies
from pipeplan.solvers.dp.search.cost_terms import CostTerms
from pipeplan.solvers.dp.search.stage_terms import StageTerms
from pipeplan.solvers.dp.search.topology import PlacementTable, least, levels_between

# The vertical-sync search runs once for each input stage, on the same placements.
placements_of, levels_of = lru_cache(maxsize=4)(PlacementTable.of), lru_cache(maxsize=4)(levels_between)


@dataclass(frozen=True)
class HeterogeneousTerms(CostTerms):
    """The terms of the cost model on a heterogeneous cluster. The terms do not depend on the threshold."""

    @cached_property
    def runs(self) -> PlacementTable:
        """The candidate placements of a stage."""
        return placements_of(self.problem.cluster, self.most_replicas)

    @cached_property
    def usable(self) -> Flags:
        """Whether each candidate placement uses only workers that stages may use."""
        table, barred = self.runs, np.zeros(self.problem.cluster.workers + 1, dtype=np.intp)
        barred[[worker + 1 for worker in self.problem.unused]] = 1
        count = np.cumsum(barred)
        return np.asarray(count[table.end] == count[table.first])

    def ring(self, runs: Ints | int) -> tuple[Floats, Floats]:
        """Bandwidth and latency of the rings of stages on placements, in one copy or, with a flush, in all copies."""
        if joins_copies(self.problem):
            bandwidth, latency = self.group_rates
            return bandwidth[runs], latency[runs]
        return self.runs.allreduce_bandwidth[runs], self.runs.allreduce_latency[runs]

    @cached_property
    def group_rates(self) -> tuple[Floats, Floats]:
        """Bandwidth and latency of a ring among the replicas in all copies, for each placement."""
        table, ways = self.runs, self.problem.copy_ways
        if self.problem.copies == 1:
            return table.allreduce_bandwidth, table.allreduce_latency
        each = ways.bandwidth, ways.latency_s
        bandwidth, latency = (np.broadcast_to(np.array(rates), self.workers) for rates in each)
        return least(bandwidth, table.first, table.end), -least(-latency, table.first, table.end)

    @cached_property
    def between(self) -> Ints:
        """The level of the smallest component that contains two workers, for all pairs of workers."""
        return levels_of(self.problem.cluster)

    def rates_between(self, joined: Ints, ways: Ints, others: Ints) -> tuple[Floats, Floats]:
        """Bandwidth and latency of messages between placements of two classes, given the level that joins them;
        elementwise."""
        message, latency = self.runs.message, self.runs.latency
        bandwidth = np.minimum(message[joined, ways], message[joined, others])
        return bandwidth, np.maximum(latency[joined, ways], latency[joined, others])

    @cached_property
    def speed_before(self) -> Floats:
        """For each worker 0 … D, the sum of the speeds of all workers before it."""
        return np.concatenate([[0.0], np.cumsum([device.speed for device in self.problem.cluster.devices])])

    @property
    def speed(self) -> float:
        """Speed of the slowest device, which gives an upper bound on every stage time."""
        return min(device.speed for device in self.problem.cluster.devices)

    @cached_property
    def fastest(self) -> float:
        """Speed of the fastest device."""
        return max(device.speed for device in self.problem.cluster.devices)

    @cached_property
    def least_transfer_s(self) -> Floats:
        """The shortest one-way time of a minibatch between any two placements, for each cut."""
        table, crossing = self.runs, np.maximum(self.cuts.sent, self.cuts.returned)
        return np.asarray(formulas.transfer_time(crossing, table.message[1:].max(), table.latency[1:].min()))

    def stage_s(self, stage: StageTerms, runs: Ints) -> tuple[Floats, Floats]:
        """(seconds per minibatch of each stage on the placement of the same index, seconds of one all-reduce of each
        stage)."""
        table, replicas = self.runs, self.runs.replicas[runs]
        compute = formulas.compute_time(stage.work_s, replicas, table.speed[runs])
        if not self.training:
            return compute, np.zeros(compute.shape)
        group = formulas.ring_allreduce_time(
            replicas, stage.parameters, table.allreduce_bandwidth[runs], table.allreduce_latency[runs]
        )
        return formulas.overlapped(compute, group / (self.accumulate or replicas), self.problem.options.overlap), group
