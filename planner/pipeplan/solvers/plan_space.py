"""The spaces of plans that both solvers search: pipelines on one component of the cluster, copied into all components.

In the first space, stages are on consecutive workers of the whole cluster and may straddle servers (15-1 on 4×4). In
the others, a whole pipeline lies inside each component of some level and is replicated across the components. Such a
space is the first space on a smaller cluster, plus a synchronisation among the copies that depends on the model alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeplan.cluster_data.links import Links
from pipeplan.cost import formulas
from pipeplan.plan.plan import Plan, Stage
from pipeplan.plan.schedules import ACCUMULATING
from pipeplan.problem.problem import Problem


@dataclass(frozen=True)
class PlanSpace:
    """Pipelines inside one component of `level`, with a copy in each of `copies` components."""

    level: int
    copies: int

    def inner(self, problem: Problem) -> Problem:
        """The problem of one copy, on one component of the cluster."""
        return problem.within(problem.cluster.inner(self.level), self.copies, self._allreduce(problem))

    def pace(self, problem: Problem, inner_s: float) -> float:
        """The pace of all copies together, if one copy takes `inner_s` for each of its minibatches.

        With a flush `inner_s` is the time from one update to the next, including the all-reduce among copies.
        """
        if problem.options.flushes and problem.options.accumulate is not None:
            return inner_s / problem.options.accumulate
        return float(formulas.overlapped(inner_s / self.copies, self.synchronisation(problem), problem.options.overlap))

    def inner_pace(self, problem: Problem, pace_s: float) -> float | None:
        """The pace of one copy at which all copies together have the given pace; None where no pace is slow enough.

        It is the inverse of `pace` in the steady state.
        """
        overlap, reduce_s = problem.options.overlap, self.synchronisation(problem)
        if reduce_s > pace_s:
            return None
        longer = pace_s - (1.0 - overlap) * reduce_s
        if longer >= reduce_s:
            return longer * self.copies
        return (pace_s - reduce_s) / (1.0 - overlap) * self.copies

    def synchronisation(self, problem: Problem) -> float:
        """Gradient all-reduce among the copies, in seconds per minibatch: a lower bound on the pace in this space."""
        if problem.options.schedule in ACCUMULATING and problem.options.accumulate is not None:
            return float(formulas.buffered_synchronisation(self._allreduce(problem), problem.options.accumulate))
        return self._allreduce(problem) / self.copies

    def _allreduce(self, problem: Problem) -> float:
        """Seconds of one all-reduce of all gradients among the copies; 0 for a single copy."""
        if self.copies == 1 or not problem.training:
            return 0.0
        links, top = Links.of(problem.cluster), len(problem.cluster.levels)
        size = sum(unit.parameter_bytes for unit in problem.units)
        bandwidth, latency = links.allreduce_bandwidth[top], links.allreduce_latency[top]
        return float(formulas.ring_allreduce_time(self.copies, size, bandwidth, latency))

    def plan(self, problem: Problem, pipeline: Sequence[Stage]) -> Plan:
        """The plan of all copies, from the stages of one copy; `depths.assign_depths` sets its weight versions."""
        size = problem.cluster.span(self.level)
        stages = []
        for stage in pipeline:
            # Interleaved, so that minibatch i goes to copy i mod m by the plain round robin over a stage's workers.
            workers = [copy * size + worker for worker in stage.workers for copy in range(self.copies)]
            stages.append(replace(stage, workers=tuple(workers)))
        return Plan(tuple(stages), self.copies, problem.options.inference)


def plan_spaces(problem: Problem) -> list[PlanSpace]:
    """All spaces of plans: the whole cluster first, then copies in the components of each lower level, largest first.

    Copies are all alike, so the components of their level must be alike, too.
    """
    cluster = problem.cluster
    spaces = [PlanSpace(len(cluster.levels), 1)]
    if problem.options.grid or not problem.options.allow_copies:
        return spaces
    for level in range(len(cluster.levels) - 1, 0, -1):
        size = cluster.span(level)
        enough = size >= max(2, problem.options.stages or 1)
        new = size < cluster.workers and size != cluster.span(spaces[-1].level)
        if enough and new and cluster.alike(level):
            spaces.append(PlanSpace(level, cluster.workers // size))
    return spaces
