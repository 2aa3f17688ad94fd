"""The best cuts for given replica counts, and the rank of such a configuration among all others.

A configuration is a list of replica counts. Its stages lie on consecutive workers from the first one on, with no idle
worker between them; workers after the last stage are idle. Without shared cards the step time of a configuration is a
maximum over stages and boundaries, so that the best cuts follow stage by stage, exactly:

    F_s(J) = min over cuts I ⊂ J of max( F_{s-1}(I), boundary(I), stage_s(I → J) )

where boundary and stage are charged at the levels that their workers span. Lists with a common beginning share F, so
that all 2^D - 1 lists for D workers can be counted, and likewise those for a copy inside each server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipeplan.cluster_data.links import Links
from pipeplan.cost import depths, formulas
from pipeplan.cost.evaluate import Evaluation, evaluate
from pipeplan.errors import InputError
from pipeplan.plan.plan import Plan, Stage
from pipeplan.problem.cuts import Cuts
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp.cut_selection import prune_cuts
from pipeplan.solvers.plan_space import PlanSpace, plan_spaces

Floats = NDArray[np.float64]

TOLERANCE = 1e-9
"""Relative difference below which two step times are equal."""
NEIGHBOURS = 150
"""Neighbouring cuts that are tried where shared cards slow down the best cuts for unshared links."""


@dataclass(frozen=True)
class Rank:
    """The rank of a configuration among all others."""

    better: int
    """Number of configurations whose best cuts are faster, without shared cards."""
    among: int
    """Number of all configurations."""

    @property
    def place(self) -> int:
        """1 for the best."""
        return self.better + 1


@dataclass
class Configurations:
    """All configurations of a problem on a uniform cluster, without a limit on memory."""

    problem: Problem
    cuts: Cuts
    within: NDArray[np.bool_]
    """Whether cut i (row) is a proper part of cut j (column)."""
    _stages: dict[tuple[int, int], Floats] = field(default_factory=dict)

    @staticmethod
    def of(problem: Problem, cuts: Cuts) -> Configurations:
        """The configurations of a problem, with the cuts that some optimal plan may need."""
        free = replace(problem, options=replace(problem.options, memory=False))
        kept = prune_cuts(free, cuts)
        within = np.zeros((len(kept.ideals),) * 2, dtype=bool)
        for index in range(len(kept.ideals)):
            within[kept.smaller(index), index] = True
        return Configurations(free, kept, within)

    def first(self, replicas: Sequence[int]) -> tuple[Plan, Evaluation]:
        """The plan with the best cuts for unshared links. `best` improves on it where cards are shared."""
        return self._scored(replicas, self._trace(replicas))

    def best(self, replicas: Sequence[int]) -> tuple[Plan, Evaluation]:
        """The plan with the best cuts for these replica counts, and its cost.

        Where shared cards slow down the best cuts for unshared links, neighbouring cuts are tried. Raises `InputError`
        where there are too few workers or too few layers.
        """
        ends = self._trace(replicas)
        plan, score = self._scored(replicas, ends)
        left = NEIGHBOURS
        while score.step_time_s > score.alone_s * (1 + TOLERANCE) and left > 0:
            better = None
            for neighbour in self._near(ends):
                left -= 1
                scored = self._scored(replicas, neighbour)
                if scored[1].step_time_s < score.step_time_s * (1 - TOLERANCE):
                    better, (plan, score) = neighbour, scored
                    break
                if left <= 0:
                    break
            if better is None:
                break
            ends = better
        return plan, score

    @cached_property
    def most_stages(self) -> int:
        """The largest number of stages of a pipeline: the length of the longest chain of nested cuts."""
        longest = np.zeros(len(self.cuts.ideals), dtype=int)
        for index in range(1, len(longest)):
            longest[index] = 1 + longest[self.within[:, index]].max()
        return int(longest[-1])

    def rank(self, step_time_s: float) -> Rank:
        """The rank of a step time among all configurations, including copies of a pipeline inside each server."""
        better = among = 0
        for space in plan_spaces(self.problem):
            inner = self.problem if space.copies == 1 else space.inner(self.problem)
            configurations = Configurations(inner, self.cuts, self.within)
            workers = inner.cluster.workers
            among += 2**workers - 1
            if space.step_time(self.problem, 0.0) < step_time_s * (1 - TOLERANCE):
                limit = step_time_s * (1 - TOLERANCE) * space.copies
                better += configurations._count(configurations._start, 0, 0, limit)
        return Rank(better, among)

    @cached_property
    def _start(self) -> Floats:
        begin = np.full(len(self.cuts.ideals), np.inf)
        begin[0] = 0.0
        return begin

    @cached_property
    def _links(self) -> Links:
        return Links.of(self.problem.cluster)

    def _stage(self, replicas: int, level: int) -> Floats:
        """The time of a stage between every two cuts: infinite where it has no layer."""
        key = replicas, level
        if key not in self._stages:
            work = self.cuts.work_s[None, :] - self.cuts.work_s[:, None]
            size = self.cuts.parameters[None, :] - self.cuts.parameters[:, None]
            rate = self._links.allreduce(level, 0)
            compute = formulas.compute_time(work, replicas, self.problem.cluster.device.speed)
            wait = (
                formulas.ring_allreduce_time(replicas, size, *rate) / replicas if replicas > 1 else np.zeros_like(work)
            )
            wait = wait if self.problem.training else np.zeros_like(work)
            both = formulas.overlapped(compute, wait, self.problem.options.overlap)
            self._stages[key] = np.where(self.within, both, np.inf)
        return self._stages[key]

    def _boundary(self, level: int) -> Floats:
        size = np.maximum(self.cuts.sent, self.cuts.returned)
        return np.asarray(formulas.boundary_time(size, self._links.sendrecv(level, 0)[0]))

    def _step(self, before: Floats, last: int, position: int, replicas: int) -> Floats:
        """F with one more stage. `last` is the first worker of the previous stage, `position` that of this one."""
        cluster = self.problem.cluster
        end = position + replicas - 1
        if position:
            before = np.maximum(before, self._boundary(cluster.level_between(last, end)))
        level = cluster.level_between(position, end)
        return np.asarray(np.maximum(before[:, None], self._stage(replicas, level)).min(axis=0))

    def _count(self, before: Floats, last: int, position: int, limit_s: float) -> int:
        """The number of configurations below a limit that continue the stages whose F is `before`."""
        count = 0
        for replicas in range(1, self.problem.cluster.workers - position + 1):
            after = self._step(before, last, position, replicas)
            count += bool(after[-1] < limit_s)
            # Further stages never make a configuration faster.
            if (after[:-1] < limit_s).any():
                count += self._count(after, position, position + replicas, limit_s)
        return count

    def _trace(self, replicas: Sequence[int]) -> list[int]:
        """The cuts at the end of every stage."""
        if sum(replicas) > self.problem.cluster.workers:
            raise InputError(f"{_text(replicas)} needs {sum(replicas)} workers, of {self.problem.cluster.workers}")
        tables, last, position = [self._start], 0, 0
        starts = []
        for count in replicas:
            tables.append(self._step(tables[-1], last, position, count))
            starts.append(position)
            last, position = position, position + count
        if not np.isfinite(tables[-1][-1]):
            raise InputError(f"{_text(replicas)} has more stages than the model has layers to cut between")
        ends = [len(self.cuts.ideals) - 1]
        for index in range(len(replicas) - 1, 0, -1):
            first, end = starts[index], starts[index] + replicas[index] - 1
            cluster = self.problem.cluster
            boundary = self._boundary(cluster.level_between(starts[index - 1], end))
            level = cluster.level_between(first, end)
            column = self._stage(replicas[index], level)[:, ends[0]]
            ends.insert(0, int(np.maximum(np.maximum(tables[index], boundary), column).argmin()))
        return ends

    def _near(self, ends: Sequence[int]) -> list[list[int]]:
        """The lists that differ in one cut, which stays between its neighbours; the nearest first."""
        moves = []
        for index in range(len(ends) - 1):
            low = ends[index - 1] if index else 0
            inside = np.flatnonzero(self.within[low] & self.within[:, ends[index + 1]])
            moves += [(abs(int(cut) - ends[index]), index, int(cut)) for cut in inside if cut != ends[index]]
        return [[*ends[:index], cut, *ends[index + 1 :]] for _, index, cut in sorted(moves)]

    def _scored(self, replicas: Sequence[int], ends: Sequence[int]) -> tuple[Plan, Evaluation]:
        stages, start, position = [], 0, 0
        for count, end in zip(replicas, ends, strict=True):
            names = tuple(n for unit in self.cuts.members(start, end) for n in self.problem.units[unit].layers)
            stages.append(Stage(names, tuple(range(position, position + count)), 1, 1))
            start, position = end, position + count
        plan = PlanSpace(len(self.problem.cluster.levels), 1).plan(self.problem, stages)
        # Depths are assigned for the step time of stages and boundaries, because contention depends on the depths.
        costs = evaluate(plan, self.problem).stages
        step_time = max(max(stage.stage_s, stage.boundary_s) for stage in costs)
        plan = depths.assign_depths(plan, self.problem, step_time * (1 + 1e-12))
        return plan, evaluate(plan, self.problem)


def _text(replicas: Sequence[int]) -> str:
    return "-".join(map(str, replicas))
