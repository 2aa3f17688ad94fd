"""The best plan and the bound of all searches so far, as one space of plans is searched after another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pipeplan.problem.grid_shapes import GridShape
from pipeplan.solvers.dp.pipelines.pipeline_searches import FoundPipeline
from pipeplan.solvers.dp.spaces.search_task import SearchTask
from pipeplan.solvers.dp.threshold import PRECISION, BisectionResult
from pipeplan.solvers.plan_space import PlanSpace


@dataclass(frozen=True)
class Region:
    """A part of the searched space: one space of plans, or one shape of a uniform grid."""

    space: PlanSpace
    shape: GridShape | None
    low_s: float
    """No plan of the region has a smaller pace, in seconds per minibatch."""


@dataclass
class BestSoFar:
    """The best plan and the bound of all searches for one task so far."""

    task: SearchTask
    best: tuple[float, PlanSpace, FoundPipeline] | None = None
    bound: float = float("inf")
    finished: bool = True
    interrupted: bool = False
    regions: list[Region] = field(default_factory=list)
    """The spaces of plans, each with its own bound."""
    memory_binds: bool = False
    """Whether the best plan would be faster without the memory limit."""

    @property
    def pace_s(self) -> float:
        """The pace of the best plan, in seconds per minibatch; infinite where there is none."""
        return self.best[0] if self.best else float("inf")

    @property
    def limit_s(self) -> float:
        """The pace that a plan has to beat, in seconds per minibatch."""
        return self.task.useful_s if self.best is None else min(self.task.useful_s, self.best[0] * (1 - PRECISION))

    def watch(self, space: PlanSpace, others_s: float) -> Callable[[float, float], None]:
        """The function that reports the search of one space; `others_s` bounds the spaces that are still to search."""
        problem = self.task.problem

        def report(low: float, high: float) -> None:
            best = min(space.pace(problem, high), self.pace_s)
            self.task.report(min(space.pace(problem, low), self.bound, others_s), best)

        return report

    def excludes(self, bound_s: float) -> bool:
        """Whether a space of plans with paces of at least so many seconds has none that is of use."""
        return bound_s >= self.task.useful_s or (self.best is not None and bound_s >= self.best[0])

    def stop(self, bound_s: float) -> None:
        """Leave out a space of plans whose paces are at least so many seconds, because Ctrl-C came."""
        self.interrupted = True
        self.leave(bound_s)

    def leave(self, bound_s: float) -> None:
        """Leave a space out for which there is no time, given a bound on its paces."""
        self.finished, self.bound = False, min(self.bound, bound_s)

    def add(self, space: PlanSpace, result: BisectionResult[FoundPipeline], memory_binds: bool = False) -> None:
        """Take in the result of one more search."""
        problem = self.task.problem
        if result.low < float("inf"):
            self.regions.append(Region(space, None, space.pace(problem, result.low)))
        self.finished, self.interrupted = self.finished and result.finished, self.interrupted or result.interrupted
        if result.best is not None or not result.finished:
            self.bound = min(self.bound, space.pace(problem, result.low))
        if result.best is None:
            return
        if self.best is None or space.pace(problem, result.high) < self.best[0] * (1 - PRECISION):
            self.best = space.pace(problem, result.high), space, result.best
            self.memory_binds = memory_binds
