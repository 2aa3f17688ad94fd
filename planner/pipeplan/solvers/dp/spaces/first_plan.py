"""A plan and a bound for a large problem within a second, before the search for the best plan has any.

The plan is the best one to within a tenth on a few of the cuts, of one pipeline on the whole cluster. The bound is all
work on all workers. The search for the best plan does not use either, so its result does not depend on them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pipeplan.plan.plan import Plan
from pipeplan.problem.cuts import Cuts
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp.budget import SearchEffort
from pipeplan.solvers.dp.cuts.selected_cuts import cheap_cuts
from pipeplan.solvers.dp.pipelines.pipeline_searches import PipelineSearches
from pipeplan.solvers.dp.spaces.results import plan_of
from pipeplan.solvers.plan_space import plan_spaces

LARGE = 5_000
"""From this product of cuts and workers on, a first plan is looked for."""
_CUTS, _GAP, _MOST_EFFORT = 12, 0.1, 200_000
# An effort of 200,000 rows takes half a second.


@dataclass
class MonotoneReport:
    """Passes a bound and the pace of the best plan on where one of them is better than before; neither gets worse."""

    tell: Callable[[float, float], None]
    bound_s: float = 0.0
    best_s: float = float("inf")

    def __call__(self, bound_s: float, best_s: float) -> None:
        """Report a bound on all plans, and the pace of a plan; 0 and infinity where there is none."""
        bound_s = max(self.bound_s, bound_s if bound_s < float("inf") else 0.0)
        best_s = min(self.best_s, best_s)
        if (bound_s, best_s) != (self.bound_s, self.best_s):
            self.bound_s, self.best_s = bound_s, best_s
            self.tell(bound_s, best_s)


@dataclass(frozen=True)
class FirstPlan:
    """A plan that is found soon, and its pace in seconds per minibatch."""

    plan: Plan
    pace_s: float
    charged: bool
    """Whether everything is charged that workers share."""


def first_plan(
    problem: Problem, cuts: Cuts, deadline: float | None, price: Callable[[Plan], float] | None = None
) -> FirstPlan | None:
    """A plan of a large problem; None where it is small, or none is found so soon.

    `price` is the pace of a plan with everything charged; where that is asked for, there is no plan without it.
    """
    if problem.options.contention and price is None:
        return None
    if problem.options.grid or len(cuts.ideals) * problem.cluster.workers < LARGE:
        return None
    space, few = plan_spaces(problem)[0], cuts.only(cheap_cuts(cuts, _CUTS))
    found = PipelineSearches(problem, few, deadline, _GAP, effort=SearchEffort(_MOST_EFFORT)).best()
    if found.interrupted:
        raise KeyboardInterrupt
    if found.best is None:
        return None
    pace_s = space.pace(problem, found.high)
    plan = plan_of(problem, space, found.best.stages(), pace_s)
    if problem.options.contention and price is not None:
        return FirstPlan(plan, price(plan), charged=True)
    return FirstPlan(plan, pace_s, charged=False)
