"""A pipeline on one component of the cluster, and its repetition in every component: what both solvers search.

There are two spaces of plans: stages on consecutive workers of the whole cluster, which may straddle servers (15-1 on
4×4), and a whole pipeline inside each component of some level, replicated across them. The second is the first on a
smaller cluster, followed by a synchronisation among the copies that depends on the model alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeplan import cost
from pipeplan.links import Links
from pipeplan.plan import ACCUMULATING, Plan, Stage
from pipeplan.problem import Problem


@dataclass(frozen=True)
class Space:
    """Pipelines inside one component of `level`, copied into all components."""

    level: int
    copies: int

    def inner(self, problem: Problem) -> Problem:
        """The problem that one copy solves."""
        return problem.within(problem.cluster.inner(self.level), self.copies, self._allreduce(problem))

    def pace(self, problem: Problem, inner_s: float) -> float:
        """The pace of all copies together, when one copy takes `inner_s` for each of its minibatches.

        With a flush `inner_s` is the time from one update to the next, the all-reduce among copies included.
        """
        if problem.options.flushes and problem.options.accumulate is not None:
            return inner_s / problem.options.accumulate
        return float(cost.overlapped(inner_s / self.copies, self.synchronisation(problem), problem.options.overlap))

    def synchronisation(self, problem: Problem) -> float:
        """Gradient all-reduce among the copies, per minibatch: a bound on the pace that no inner plan changes."""
        if problem.options.schedule in ACCUMULATING and problem.options.accumulate is not None:
            return float(cost.buffered_synchronisation(self._allreduce(problem), problem.options.accumulate))
        return self._allreduce(problem) / self.copies

    def _allreduce(self, problem: Problem) -> float:
        """One all-reduce of all gradients among the copies (0 for one)."""
        if self.copies == 1 or not problem.training:
            return 0.0
        links, top = Links.of(problem.cluster), len(problem.cluster.levels)
        size = sum(unit.parameter_bytes for unit in problem.units)
        bandwidth, latency = links.allreduce_bandwidth[top], links.allreduce_latency[top]
        return float(cost.ring_allreduce_time(self.copies, size, bandwidth, latency))

    def plan(self, problem: Problem, pipeline: Sequence[Stage]) -> Plan:
        """The plan of all copies, from the segments of one; `depths.assign` gives it versions of the weights."""
        size = problem.cluster.span(self.level)
        stages = []
        for stage in pipeline:
            # Interleaved, so that minibatch i goes to copy i mod m by the plain round robin over a stage's workers.
            workers = [copy * size + worker for worker in stage.workers for copy in range(self.copies)]
            stages.append(replace(stage, workers=tuple(workers)))
        return Plan(tuple(stages), self.copies, problem.options.inference)


def spaces(problem: Problem) -> list[Space]:
    """Both spaces of plans: the whole cluster, then copies in the components of each lower level, largest first.

    Copies are all alike, and so must the components be.
    """
    cluster = problem.cluster
    found = [Space(len(cluster.levels), 1)]
    if problem.options.grid or not problem.options.allow_copies:
        return found
    for level in range(len(cluster.levels) - 1, 0, -1):
        size = cluster.span(level)
        enough = size >= max(2, problem.options.stages or 1)
        new = size < cluster.workers and size != cluster.span(found[-1].level)
        if enough and new and cluster.alike(level):
            found.append(Space(level, cluster.workers // size))
    return found
