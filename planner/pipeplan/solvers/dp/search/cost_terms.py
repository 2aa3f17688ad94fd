"""The terms of the cost model for one problem, as arrays over its cuts: rates, times of boundaries, and bounds.

Searches under vertical sync assume an input stage: either with known replicas and depth (`InputStage`), or any input
stage (`AnyInputStage`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np

from pipeplan.cluster_data.links import Links
from pipeplan.cost import formulas
from pipeplan.cost.stage_table import LayersAlone, shared_in_cuts
from pipeplan.plan.schedules import STASHING, TRAITS
from pipeplan.problem.between_cuts import SharedInCuts
from pipeplan.problem.cuts import Cuts, Flags, Floats, Ints
from pipeplan.problem.grid_shapes import GridShape
from pipeplan.problem.problem import Problem, joins_copies
from pipeplan.solvers.dp.budget import SLACK
from pipeplan.solvers.dp.search.topology import ComponentLayout


@dataclass(frozen=True)
class InputStage:
    """An assumed input stage: its replicas in one copy, and `delay`, the sum of its depth and lag."""

    replicas: int
    delay: int


@dataclass(frozen=True)
class CostTerms:
    """The terms of the cost model for a problem on a uniform cluster, as arrays over its cuts.

    The terms do not depend on the threshold.
    """

    problem: Problem
    cuts: Cuts
    first: InputStage | None = None
    """The assumed input stage under vertical sync, which determines every stage's versions; else None."""

    @cached_property
    def stashing(self) -> Self:
        """The terms of the same problem with weight stashing."""
        return replace(self, problem=replace(self.problem, options=replace(self.problem.options, schedule=STASHING)))

    @cached_property
    def layout(self) -> ComponentLayout:
        """The components of the cluster."""
        return ComponentLayout.of(self.problem.cluster)

    @cached_property
    def links(self) -> Links:
        """The rates of the cluster's levels."""
        return Links.of(self.problem.cluster)

    @cached_property
    def shared(self) -> SharedInCuts | None:
        """The copies and exchanges of shared weights; None if no weights are shared."""
        return shared_in_cuts(self.problem, self.cuts.ideals)

    @property
    def workers(self) -> int:
        """D, the number of workers."""
        return self.problem.cluster.workers

    @property
    def speed(self) -> float:
        """Speed of every device."""
        return self.problem.cluster.device.speed

    @property
    def fastest(self) -> float:
        """Speed of the fastest device."""
        return self.speed

    @property
    def training(self) -> bool:
        """Whether there is a backward pass."""
        return self.problem.training

    @property
    def schedule(self) -> str:
        """The schedule for training."""
        return self.problem.options.schedule

    @property
    def accumulate(self) -> int | None:
        """Minibatches per synchronisation in one copy; None if a stage synchronises once per group of its replicas."""
        return self.problem.minibatches_in_flight

    def ring_of(self, level: Ints) -> tuple[Floats | float, Floats | float]:
        """Bandwidth and latency of the ring of stages whose workers in one copy span a level."""
        if joins_copies(self.problem):
            return self.problem.copy_ways.among(range(1))
        return self.links.allreduce_bandwidth[level], self.links.allreduce_latency[level]

    def ring_among(self, run: range) -> tuple[float, float]:
        """Bandwidth and latency of the ring of a stage on these workers of one copy."""
        if joins_copies(self.problem):
            return self.problem.copy_ways.among(run)
        return self.links.allreduce_among(run)

    def members(self, replicas: Any) -> Any:
        """Number of members of the ring of stages with `replicas` replicas in a copy."""
        return replicas * self.problem.copies if joins_copies(self.problem) else replicas

    @property
    def constant_versions(self) -> int:
        """Number of weight versions of a stage that do not depend on its depth."""
        return TRAITS[self.schedule].versions

    @property
    def stashes(self) -> int:
        """Number of copies of the weights for each minibatch in flight."""
        return self.problem.options.copies_per_version if self.constant_versions == 0 else 0

    @property
    def parallel(self) -> bool:
        """Whether a boundary uses as many links as the smaller of its stages has replicas."""
        return self.problem.options.boundary == "parallel"

    @cached_property
    def floor(self) -> float:
        """Lower bound on the step time.

        The bound is the larger of all work on all usable workers, and the costliest unit on the fastest workers that it
        may have.
        """
        most = max(unit.forward_s + unit.backward_s for unit in self.problem.units)
        alone = most / max(1, self.most_replicas) / self.fastest
        return max(self.problem.work_s / self.problem.speed_in_use, alone)

    def has_minibatches_for(self, shape: GridShape) -> bool:
        """Whether the minibatches of an update suffice for those in flight in a uniform grid; True if that does not
        matter.

        A replica has two more minibatches in flight than a replica of the next stage, or one more if messages take no
        time.
        """
        if self.accumulate is None:
            return True
        between = self.least_transfer_s[1:-1].min(initial=np.inf)
        more = 2 if 2 * between > self.most * self.accumulate * formulas.ROUNDING else 1
        return shape.replicas * (1 + more * (shape.stages - 1)) <= self.accumulate

    @cached_property
    def least_transfer_s(self) -> Floats:
        """The shortest one-way time of a minibatch over any level, for each cut."""
        return np.asarray(self.transfer_s[:, 1:].min(axis=1))

    def workers_for_memory(self, targets: Ints, demand: Floats) -> Floats:
        """The fewest workers that stages in front of cuts (rows) need for their memory, given the demands (columns).

        A stage of r replicas needs `fixed + depth · growing` ≤ capacity, and a depth of at least 1 + demand / r. So
        r · capacity ≥ fixed + growing + growing · demand. Both terms add up over stages, and demands only grow.
        """
        capacity = self.problem.capacity
        if not np.isfinite(capacity):
            return np.zeros((len(targets), len(demand)))
        once, each = (memory[targets, None] for memory in self.least_memory)
        return np.asarray(np.ceil((once + each * demand) / capacity - 1e-9))

    @cached_property
    def least_memory(self) -> tuple[Floats, Floats]:
        """Lower bounds on the memory of all layers before a cut: (bytes with one minibatch in flight, bytes for each
        further one)."""
        layers = self.layers_alone(self.cuts, recompute=self.problem.options.recompute)
        return self.memory_of_layers(layers)

    def layers_alone(self, sums: Any, *, recompute: bool) -> LayersAlone:
        """Layers on the workers of one copy, which together hold the layers' state (`LayersAlone.sums`)."""
        return LayersAlone(self.problem, sums, self.problem.copy_state_ratio, recompute)

    def memory_of_layers(self, layers: LayersAlone) -> tuple[Floats, Floats]:
        """Lower bounds on the memory of layers: (bytes with one minibatch in flight, bytes for each further one)."""
        each = layers.each_bytes + layers.version_bytes * (self.constant_versions == 0) * self.training
        kept = layers.kept_bytes + layers.version_bytes * self.constant_versions * self.training
        return np.asarray(kept + each), np.asarray(each)

    @cached_property
    def most(self) -> float:
        """A step time so large that it excludes no plan.

        At this step time, transfers and waits together take at most one minibatch.
        """
        options = self.problem.options
        counts = np.arange(1, self.workers + 1)
        bandwidth, latency = self.links.allreduce_bandwidth[-1], self.links.allreduce_latency[-1]
        size = float(self.cuts.parameters[-1]) if self.training else 0.0
        allreduce = (
            float(formulas.ring_allreduce_time(counts, size, bandwidth, latency).max())
            + self.problem.copies_allreduce_s
        )
        forward = self.cuts.forward_s[-1] if options.recompute else 0.0
        work = (self.cuts.work_s[-1] + forward) / self.speed
        work += self._most_executor_s / self.speed
        return float(work + (2 + self.problem.copies) * (allreduce + self.transfer_s.max()) + 1e-9)

    @property
    def _most_executor_s(self) -> float:
        """Upper bound on the executor's own work at any stage."""
        cuts, problem, costs = self.cuts, self.problem, self.problem.executor_costs
        crossing, copied = 2 * float((cuts.sent + cuts.returned).max()), cuts.parameters[-1] * problem.copied_share
        steps = problem.options.update_share
        return float(formulas.executor_time(costs, problem.passes, 2, crossing, copied, steps) + costs.samples_s)

    @cached_property
    def boundary_s(self) -> Floats:
        """Time for which a minibatch keeps the link busy in the busier direction, by cut and level."""
        return np.asarray(formulas.boundary_time(self._busier, self.links.sendrecv_bandwidth))

    @cached_property
    def transfer_s(self) -> Floats:
        """One-way time of a minibatch, by cut and level."""
        links = self.links
        return np.asarray(formulas.transfer_time(self._busier, links.sendrecv_bandwidth, links.sendrecv_latency))

    def busier(self, cut: int) -> float:
        """Bytes across a cut in the busier direction."""
        return max(float(self.cuts.sent[cut]), float(self.cuts.returned[cut]))

    @property
    def _busier(self) -> Floats:
        busier: Floats = np.maximum(self.cuts.sent, self.cuts.returned)[:, None]
        return busier

    @cached_property
    def most_replicas(self) -> int:
        """The most replicas of any stage."""
        return self.problem.most_replicas

    @cached_property
    def pinned(self) -> tuple[tuple[int, int], ...]:
        """The pinned units, with their stages counted from 1."""
        home = {name: index for index, unit in enumerate(self.problem.units) for name in unit.layers}
        return tuple(sorted({(home[layer], stage) for layer, stage in self.problem.options.pins}))

    def respects_pins(self, targets: Ints, before: Ints) -> Flags:
        """Whether cuts with `before` stages in front of them contain exactly the pinned units that belong to these
        stages."""
        respected = np.ones(len(targets), dtype=bool)
        for unit, stage in self.pinned:
            word, bit = divmod(unit, 64)
            inside = (self.cuts.words[targets, word] >> np.uint64(bit)) & np.uint64(1) == 1
            respected &= inside == (stage <= before)
        return respected


@dataclass(frozen=True)
class AnyInputStage(InputStage):
    """Lower bound on the weight versions that an input stage causes, in pipelines with several stages.

    The bound is stated as an input stage with one replica and `delay`. The real input stage may have any number of
    replicas.

    With an input stage of r_1 replicas, a stage of r replicas keeps 1 + ceil(((d_1 + lag_1) r_1 - gcd(r_1, r)) / r)
    versions. The gcd is at most r_1, and the lag is 1 unless r_1 is 1. So the number is at least the number for one
    replica and the delay d_1 r_1 + 1, or d_1 if r_1 is 1.
    """

    @staticmethod
    def delays(copies: int, depth: Ints, replicas: Ints) -> Ints:
        """The delays of input stages with these depths and replicas."""
        return depth * replicas + (replicas * copies > 1)

    def delay_with(self, replicas: int, copies: int) -> int:
        """Lower bound on depth plus lag of an input stage with `replicas` replicas, if this bound holds."""
        late = int(replicas * copies > 1)
        return math.ceil((self.delay - late) / replicas) + late

    @staticmethod
    def of(copies: int, depth: int, replicas: int) -> AnyInputStage:
        """The bound for all input stages whose delay is at least that of the given one."""
        return AnyInputStage(1, int(AnyInputStage.delays(copies, np.array(depth), np.array(replicas))))

    @staticmethod
    def within(terms: CostTerms, step_time_s: float) -> AnyInputStage:
        """The bound for all pipelines with at most this step time, in seconds per minibatch of one copy.

        Such pipelines have at least N = work / (speed · step time) workers. The product d r of a stage covers all
        workers from it on, so d_1 r_1 is at least N.
        """
        return AnyInputStage(1, _busy_workers(terms, step_time_s) + (terms.problem.copies > 1))

    @staticmethod
    def least_delay(terms: CostTerms, step_time_s: float, replicas: int) -> int:
        """Lower bound on depth plus lag of an input stage with `replicas` replicas.

        The stage of a pipeline with only one stage has depth 1 and no lag.
        """
        return math.ceil(_busy_workers(terms, step_time_s) / replicas)


def _busy_workers(terms: CostTerms, step_time_s: float) -> int:
    """The fewest workers that a pipeline within a step time needs for its work."""
    return max(1, math.ceil(terms.problem.work_s / (terms.fastest * step_time_s * (1 + SLACK)) - 1e-9))
