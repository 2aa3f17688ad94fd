"""What the dynamic program is asked for: a problem, what ends the search for its best plan, and who is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pipeplan.plan.plan import Plan
from pipeplan.problem.cuts import Cuts
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp.budget import SearchEffort


def tell_nobody(bound_s: float, best_s: float) -> None:
    """The report of a search that nobody watches."""


@dataclass(frozen=True)
class SearchTask:
    """One search for the best plan of a problem. All paces are in seconds per minibatch."""

    problem: Problem
    cuts: Cuts
    deadline: float | None = None
    """When to stop, by `time.perf_counter`."""
    gap: float = 0.0
    """Relative distance of the best plan from the bound at which the search may stop."""
    effort: SearchEffort = field(default_factory=SearchEffort)
    report: Callable[[float, float], None] = tell_nobody
    """Is called with the bound and the pace of the best plan as they change; infinite while there is no plan."""
    price: Callable[[Plan], float] | None = None
    """The pace of a plan with everything charged, by the evaluator, or None."""
    useful_s: float = float("inf")
    """Plans with at least this pace are of no use."""
    above_s: float = 0.0
    """All plans have at least this pace."""
    near: bool = False
    """Whether the best plan is probably just fast enough to be of use, or not quite."""
