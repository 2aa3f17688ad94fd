"""Given replica counts with the best cuts for them, and how many replica counts there are that would be faster.

A configuration is a list of replica counts. Its stages lie on consecutive workers from the first one on, with no idle
worker between them; those after the last are idle. For such a list the pace with every link alone is a maximum over
stages and boundaries, so that the best cuts follow stage by stage, exactly:

    F_s(J) = min over cuts I ⊂ J of max( F_{s-1}(I), boundary(I), stage_s(I → J) )

where boundary and stage are charged at the levels that their workers span. All lists that begin alike share F, so that
all of them can be counted: 2^D - 1 for D workers, and as many for a copy inside each server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipeplan import cost
from pipeplan.cuts import Cuts
from pipeplan.errors import InputError
from pipeplan.evaluate import Evaluation, evaluate
from pipeplan.links import Links
from pipeplan.plan import Plan, Stage
from pipeplan.problem import Problem
from pipeplan.solvers import depths
from pipeplan.solvers.pipeline import Space, spaces
from pipeplan.solvers.reduce import reduced

Floats = NDArray[np.float64]

TOLERANCE = 1e-9
"""Relative: paces closer than this are equal."""
TRIES = 150
"""Cuts that are tried where what shares a card makes the best ones for links alone slower."""


@dataclass(frozen=True)
class Rank:
    """How a configuration compares with all others."""

    better: int
    """Configurations whose best cuts are faster, every link alone."""
    among: int
    """Configurations in all."""

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
        """Without the cuts that cannot matter."""
        free = replace(problem, options=replace(problem.options, memory=False))
        kept = reduced(free, cuts)
        within = np.zeros((len(kept.ideals),) * 2, dtype=bool)
        for index in range(len(kept.ideals)):
            within[kept.smaller(index), index] = True
        return Configurations(free, kept, within)

    def first(self, replicas: Sequence[int]) -> tuple[Plan, Evaluation]:
        """The plan whose cuts are the best for links alone; `best` tries others where cards are shared."""
        return self._scored(replicas, self._trace(replicas))

    def best(self, replicas: Sequence[int]) -> tuple[Plan, Evaluation]:
        """The plan with the best cuts for these replica counts, and what it costs.

        Where the best cuts for links alone are slower with shared cards, others near them are tried. Raises an
        `InputError` where there are not so many workers, or not so many layers.
        """
        ends = self._trace(replicas)
        plan, score = self._scored(replicas, ends)
        left = TRIES
        while score.pace_s > score.alone_s * (1 + TOLERANCE) and left > 0:
            found = None
            for other in self._near(ends):
                left -= 1
                tried = self._scored(replicas, other)
                if tried[1].pace_s < score.pace_s * (1 - TOLERANCE):
                    found, (plan, score) = other, tried
                    break
                if left <= 0:
                    break
            if found is None:
                break
            ends = found
        return plan, score

    @cached_property
    def most_stages(self) -> int:
        """No pipeline has more stages than this: the cuts that lie in one another."""
        longest = np.zeros(len(self.cuts.ideals), dtype=int)
        for index in range(1, len(longest)):
            longest[index] = 1 + longest[self.within[:, index]].max()
        return int(longest[-1])

    def rank(self, pace_s: float) -> Rank:
        """How many configurations, copies of a pipeline inside each server among them, are faster than a pace."""
        better = among = 0
        for space in spaces(self.problem):
            inner = self.problem if space.copies == 1 else space.inner(self.problem)
            one = Configurations(inner, self.cuts, self.within)
            workers = inner.cluster.workers
            among += 2**workers - 1
            if space.pace(self.problem, 0.0) < pace_s * (1 - TOLERANCE):
                limit = pace_s * (1 - TOLERANCE) * space.copies
                better += one._count(one._start, 0, 0, limit)
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
        """The time of a stage between every two cuts, infinite where it has no layer."""
        key = replicas, level
        if key not in self._stages:
            work = self.cuts.work_s[None, :] - self.cuts.work_s[:, None]
            size = self.cuts.parameters[None, :] - self.cuts.parameters[:, None]
            rate = self._links.allreduce(level, 0)
            compute = cost.compute_time(work, replicas, self.problem.cluster.device.speed)
            wait = cost.synchronisation_time(replicas, size, *rate) if replicas > 1 else np.zeros_like(work)
            wait = wait if self.problem.training else np.zeros_like(work)
            both = cost.overlapped(compute, wait, self.problem.options.overlap)
            self._stages[key] = np.where(self.within, both, np.inf)
        return self._stages[key]

    def _boundary(self, level: int) -> Floats:
        size = np.maximum(self.cuts.sent, self.cuts.returned)
        return np.asarray(cost.boundary_time(size, self._links.sendrecv(level, 0)[0]))

    def _step(self, before: Floats, last: int, position: int, replicas: int) -> Floats:
        """F of one stage more; `last` is the first worker of the stage before, `position` that of this one."""
        cluster = self.problem.cluster
        end = position + replicas - 1
        if position:
            before = np.maximum(before, self._boundary(cluster.level_between(last, end)))
        level = cluster.level_between(position, end)
        return np.asarray(np.maximum(before[:, None], self._stage(replicas, level)).min(axis=0))

    def _count(self, before: Floats, last: int, position: int, limit_s: float) -> int:
        """Configurations that begin with what led here, and keep below a limit."""
        found = 0
        for replicas in range(1, self.problem.cluster.workers - position + 1):
            after = self._step(before, last, position, replicas)
            found += bool(after[-1] < limit_s)
            # No stage more makes it faster: what no cut has left below the limit ends here.
            if (after[:-1] < limit_s).any():
                found += self._count(after, position, position + replicas, limit_s)
        return found

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
        """The same with one cut elsewhere between its neighbours, the nearest first."""
        found = []
        for index in range(len(ends) - 1):
            low = ends[index - 1] if index else 0
            inside = np.flatnonzero(self.within[low] & self.within[:, ends[index + 1]])
            found += [(abs(int(cut) - ends[index]), index, int(cut)) for cut in inside if cut != ends[index]]
        return [[*ends[:index], cut, *ends[index + 1 :]] for _, index, cut in sorted(found)]

    def _scored(self, replicas: Sequence[int], ends: Sequence[int]) -> tuple[Plan, Evaluation]:
        stages, start, position = [], 0, 0
        for count, end in zip(replicas, ends, strict=True):
            names = tuple(n for unit in self.cuts.members(start, end) for n in self.problem.units[unit].layers)
            stages.append(Stage(names, tuple(range(position, position + count)), 1, 1))
            start, position = end, position + count
        plan = Space(len(self.problem.cluster.levels), 1).plan(self.problem, stages)
        # Depths for the pace of stages and boundaries: what a depth limits is not known before there is one.
        costs = evaluate(plan, self.problem).stages
        pace = max(max(stage.stage_s, stage.boundary_s) for stage in costs)
        plan = depths.assign(plan, self.problem, pace * (1 + 1e-12))
        return plan, evaluate(plan, self.problem)


def _text(replicas: Sequence[int]) -> str:
    return "-".join(map(str, replicas))
