"""The spaces of plans that both solvers search: pipelines on one component of the cluster, copied to equal components.

In the first space, stages are on consecutive workers of the whole cluster and may straddle servers (15-1 on 4×4). In
the other spaces, a whole pipeline lies inside a component of some level, and equal components behind it hold copies.
Such a space is like the first space on a smaller cluster, plus an all-reduce among the copies whose size depends only
on the model.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pipeplan.cluster_data.cluster import Cluster
from pipeplan.cluster_data.links import Links
from pipeplan.cost import formulas
from pipeplan.cost.ddp_overlap import ddp_step_time_s, waits_for_allreduce
from pipeplan.cost.stage_times import stage_times
from pipeplan.plan.plan import Plan, Stage
from pipeplan.plan.schedules import ACCUMULATING
from pipeplan.problem.problem import CopyWays, Problem

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class PlanSpace:
    """Pipelines inside one component of `level`, with a copy in each of `copies` consecutive components."""

    level: int
    copies: int
    first: int = 0
    """The component of `level`, counted from 0, that holds the first copy."""
    unused: frozenset[int] = frozenset()
    """Workers of one component, counted from its first, that no stage uses, because they would slow down the all-reduce
    among the copies."""

    def inner(self, problem: Problem) -> Problem:
        """The problem of one copy, on one component of the cluster."""
        cluster = problem.cluster if self.copies == 1 else problem.cluster.inner(self.level, self.first)
        within = problem.within(cluster, self.copies, self._allreduce(problem))
        return replace(within, unused=self.unused, copy_ways=self._copy_ways(problem))

    def _copy_ways(self, problem: Problem) -> CopyWays:
        """The links between the copies."""
        if self.copies == 1:
            return CopyWays()
        bandwidth, latency = self.rates_among_copies(problem.cluster)
        return CopyWays(tuple(bandwidth.tolist()), tuple((latency * problem.cluster.exchange_rings).tolist()))

    def rates_among_copies(self, cluster: Cluster) -> tuple[Floats, Floats]:
        """Bandwidth of rings and latency between equal places of all copies; one entry if all places are equal."""
        workers = self.workers(cluster)
        ways = Links.of(cluster).ways[cluster.level_between(workers[0], workers[-1])]
        if cluster.uniform:
            return ways.allreduce, ways.latency
        mine = slice(workers.start, workers.stop)
        bandwidth, latency = (rate[mine].reshape(self.copies, -1) for rate in (ways.allreduce, ways.latency))
        return bandwidth.min(axis=0), latency.max(axis=0)

    def step_time(self, problem: Problem, inner_s: float) -> float:
        """The step time of all copies together, if one copy takes `inner_s` for each of its minibatches.

        With a flush, `inner_s` is the time from one update to the next.
        """
        if problem.options.flushes and problem.options.accumulate is not None:
            return inner_s / problem.options.accumulate
        return float(formulas.overlapped(inner_s / self.copies, self.synchronisation(problem), problem.options.overlap))

    def inner_step_time(self, problem: Problem, step_time_s: float) -> float | None:
        """The step time of one copy if all copies together have the given step time; None if no step time is slow
        enough.

        This function is the inverse of `step_time`. With a flush, the result is the time from one update to the next.
        """
        if problem.options.flushes and problem.options.accumulate is not None:
            return step_time_s * problem.options.accumulate
        overlap, reduce_s = problem.options.overlap, self.synchronisation(problem)
        if reduce_s > step_time_s:
            return None
        longer = step_time_s - (1.0 - overlap) * reduce_s
        if longer >= reduce_s:
            return longer * self.copies
        return (step_time_s - reduce_s) / (1.0 - overlap) * self.copies

    def floor(self, problem: Problem) -> float:
        """Lower bound on the step time in this space, in seconds per minibatch.

        The bound is the step time if all workers of the space share all work equally (`step_time`).
        """
        options, machines = problem.options, problem.cluster.inner(self.level, self.first)
        inner_s = problem.work_s / machines.total_speed
        if options.flushes and options.accumulate is not None:
            # Each worker has at least its share of the minibatches.
            inner_s = float(formulas.rounds(options.accumulate, self.copies)) * inner_s
        return self.step_time(problem, inner_s)

    def synchronisation(self, problem: Problem) -> float:
        """Time of the gradient all-reduce among the copies, in seconds per minibatch.

        This time is a lower bound on the step time.
        """
        if problem.options.schedule in ACCUMULATING and problem.options.accumulate is not None:
            return float(formulas.buffered_synchronisation(self._allreduce(problem), problem.options.accumulate))
        return self._allreduce(problem) / self.copies

    def workers(self, cluster: Cluster) -> range:
        """The workers of all components that hold a copy."""
        starts = cluster.starts(self.level)
        return range(starts[self.first], starts[self.first + self.copies])

    def card_rate(self, cluster: Cluster) -> float:
        """Rate of the slowest card that every ring among the copies crosses, in bytes/s of all-reduces."""
        workers, links = self.workers(cluster), Links.of(cluster)
        crossed = range(self.level, cluster.level_between(workers[0], workers[-1]))
        firsts = cluster.starts(self.level)[self.first : self.first + self.copies]
        return min((links.card(level, first)[1] for level in crossed for first in firsts), default=float("inf"))

    def _allreduce(self, problem: Problem) -> float:
        """Seconds of one all-reduce of all gradients among the copies; 0 for a single copy."""
        if self.copies == 1 or not problem.training:
            return 0.0
        used = {*range(len(self.workers(problem.cluster)) // self.copies)} - self.unused
        # Even if each copy is on one worker, the copies meet at the level that joins their components.
        rate = self._copy_ways(problem).among(used)
        return float(formulas.ring_allreduce_time(self.copies, problem.parameter_bytes, *rate))

    def single_stage_s(self, problem: Problem, workers: Sequence[int], *, recompute: bool) -> float:
        """Seconds per minibatch of plain data parallelism on some workers, whose forward pass waits for the update.

        The result is 0 under schedules where the forward pass does not wait.
        """
        options, stage = problem.options, Stage(problem.layer_names, tuple(workers), 1, 1, recompute)
        plan = replace(self.plan(problem, [stage]), schedule=options.schedule, accumulate=options.accumulate)
        if not waits_for_allreduce(plan):
            return 0.0
        links = Links.of(problem.cluster)
        return ddp_step_time_s(plan, problem, links, stage_times(plan, problem, links, 0).pass_s)

    def plan(self, problem: Problem, pipeline: Sequence[Stage]) -> Plan:
        """The plan of all copies, from the stages of one copy; `depths.assign_depths` sets its weight versions."""
        firsts = problem.cluster.starts(self.level)[self.first : self.first + self.copies]
        stages = []
        for stage in pipeline:
            # Workers of the copies alternate, so that round robin over a stage's workers sends minibatch i to copy i
            # mod m.
            workers = [first + worker for worker in stage.workers for first in firsts]
            stages.append(replace(stage, workers=tuple(workers)))
        return Plan(tuple(stages), self.copies, problem.options.inference)


def plan_spaces(problem: Problem) -> list[PlanSpace]:
    """All spaces of plans: the whole cluster first, then copies in the components of each lower level, largest first.

    Within each level, the spaces with the most copies come first. All copies are equal, so their components must be
    equal, too. Spaces that leave a copy without a worker, or under 2BW without a minibatch, are left out.
    """
    cluster, options = problem.cluster, problem.options
    spaces, size = [PlanSpace(len(cluster.levels), 1)], cluster.workers
    if options.grid or not options.allow_copies:
        return spaces
    most = options.max_workers or cluster.workers
    if options.schedule == "2bw" and problem.training and options.accumulate is not None:
        most = min(most, options.accumulate)
    for level in range(len(cluster.levels) - 1, 0, -1):
        # A level that joins one component has the same components as the level below it.
        if cluster.span(level) < size:
            size = cluster.span(level)
            found = [space for space in _copied(cluster, level) if space.copies <= most]
            enough = max(2, options.stages or 1)
            spaces += [space for space in found if len(space.workers(cluster)) >= enough * space.copies]
    return spaces


def _copied(cluster: Cluster, level: int) -> list[PlanSpace]:
    """The spaces of copies in components of a level."""
    if cluster.uniform:
        count = cluster.workers // cluster.span(level)
        return [PlanSpace(level, copies) for copies in range(count, 1, -1)]
    found: dict[int, list[PlanSpace]] = {}
    links = Links.of(cluster)
    for first, stop in _runs(cluster, level):
        starts = _starts(cluster, links, level, range(first, stop))
        for copies in range(2, stop - first + 1):
            rates: list[tuple[float, ...]] = []
            for start in starts:
                if start + copies > stop:
                    break
                space = PlanSpace(level, copies, start)
                mine = _rates(space, cluster, links)
                if not any(all(a >= b for a, b in zip(other, mine, strict=True)) for other in rates):
                    rates.append(mine)
                    found.setdefault(copies, []).append(space)
    spaces = [space for copies in sorted(found, reverse=True) for space in found[copies]]
    return [chosen for space in spaces for chosen in (_by_links(space, cluster) if level > 1 else [space])]


def _by_links(space: PlanSpace, cluster: Cluster) -> Iterator[PlanSpace]:
    """The space, and the spaces in which stages use only workers with faster links to the other copies.

    The all-reduce among the copies is as slow as the slowest link of a used worker. There is one space for each
    possible pair of its bandwidth and latency.
    """
    bandwidth, latency = space.rates_among_copies(cluster)
    found = set()
    for least, longest in itertools.product(np.unique(bandwidth), np.unique(latency)[::-1]):
        slow = (bandwidth < least) | (latency > longest)
        if not slow.all():
            found.add(frozenset(np.flatnonzero(slow).tolist()))
    for unused in sorted(found, key=lambda one: (len(one), sorted(one))):
        yield replace(space, unused=unused)


def _runs(cluster: Cluster, level: int) -> Iterator[tuple[int, int]]:
    """(first, one past the last) of the longest runs of consecutive components of a level that are equal."""
    count, first = len(cluster.starts(level)) - 1, 0
    for component in range(1, count + 1):
        if component == count or not cluster.alike(level, first, component):
            yield first, component
            first = component


def _starts(cluster: Cluster, links: Links, level: int, run: range) -> list[int]:
    """The components of a run where the first copy may be.

    A component is left out if it has the same card as the previous one and both are in one component of the next level.
    All copies may then begin one component earlier, where the links between them are no slower.
    """
    firsts, above = cluster.starts(level), set(cluster.starts(level + 1))
    return [
        one
        for one in run
        if one == run[0] or firsts[one] in above or links.card(level, firsts[one]) != links.card(level, firsts[one - 1])
    ]


def _rates(space: PlanSpace, cluster: Cluster, links: Links) -> tuple[float, ...]:
    """Rates that compare runs with the same number of components. More is better for each rate."""
    workers = space.workers(cluster)
    bandwidth, latency = links.allreduce_among(workers)
    firsts = cluster.starts(space.level)[space.first : space.first + space.copies]
    cards = [min(links.card(space.level, first)[way] for first in firsts) for way in (0, 1)]
    between = cluster.level_between(workers[0], workers[-1])
    return bandwidth, -latency, -between, *cards
