"""Finds the best plan with the DP alone, for callers that solve many problems: no second solver, no baselines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from pipeplan.cost import depths
from pipeplan.cost.evaluate import Evaluation, evaluate
from pipeplan.plan.plan import Plan
from pipeplan.planning.baselines import listed_plan, satisfies_options, uniform_grid
from pipeplan.problem.blocks import block_cuts
from pipeplan.problem.cuts import Cuts, Flags, enumerate_cuts
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp import dynamic_program
from pipeplan.solvers.result import Result, Status
from pipeplan.util.deadline import NO_DEADLINE, Deadline, OutOfTime

USEFUL = 1 + 1e-6
"""Factor on the step time of a known plan. Slower plans are of no use; the margin keeps the known plan itself despite
rounding."""
TOLERANCE = 1e-9
"""Relative difference below which step times count as equal."""
MANY_CUTS = 96
"""Number of cuts above which proving a plan optimal takes much longer than finding a nearly optimal plan."""

NEAR = 1.05
"""Factor on the useful step time. A plan with cuts between blocks may be slower by this factor and still have a useful
plan near it."""
NEAREST_CUTS = 12
"""Number of cuts that are searched around each cut of the best plan that cuts between blocks."""


@dataclass(frozen=True)
class ScoredPlan:
    """A plan and its step time by the evaluator, in seconds per minibatch."""

    plan: Plan
    step_time_s: float
    bound_s: float = 0.0
    """Lower bound on the step time of every plan of the problem, in seconds per minibatch; 0 if no bound was sought."""


def best_of_known(plans: Iterable[Plan], problem: Problem) -> ScoredPlan | None:
    """The fastest of some plans under this problem's schedule; None if none of them is a plan of the problem.

    The plans may have been made for another schedule."""
    best: ScoredPlan | None = None
    for known in plans:
        if not satisfies_options(known, problem):
            continue
        plan = depths.assign_depths(known, problem, problem.work_s / problem.cluster.total_speed)
        score = evaluate(plan, problem)
        if (score.fits or not problem.options.memory) and (best is None or score.step_time_s < best.step_time_s):
            best = ScoredPlan(plan, score.step_time_s)
    return best


def best_plan(
    problem: Problem,
    cuts: Cuts,
    deadline: Deadline = NO_DEADLINE,
    gap: float = 0.0,
    useful_s: float = float("inf"),
    *,
    near: bool = False,
) -> ScoredPlan | None:
    """The best plan of a problem, or the best found in time; None if no plan satisfies the constraints.

    The search may stop at a plan within the relative `gap` of the best. If no plan has a step time below `useful_s`, in
    seconds per minibatch, the result is None or any plan; `near` says that the best plan is about that fast.

    Raises `OutOfTime` if no plan is found before the deadline.
    """
    if problem.options.is_listed:
        return _listed(problem)
    result = _solved(problem, cuts, deadline, gap, useful_s, near=near)
    return _scored(result, problem, cuts)


def best_in_time(
    problem: Problem,
    maximum_cuts: int,
    deadline: Deadline,
    gap_of_many_cuts: float = 0.0,
    useful_s: float = float("inf"),
) -> tuple[ScoredPlan | None, bool]:
    """(result of `best_plan`, whether all plans were searched) of a problem whose cuts are not listed yet.

    With more than `MANY_CUTS` cuts the search may stop at a plan within the relative `gap_of_many_cuts` of the best. If
    the model has repeated blocks, only plans with cuts between blocks may then be searched.
    """
    if problem.options.is_listed:
        return _listed(problem), True
    try:
        cuts = enumerate_cuts(problem, maximum_cuts, deadline.share(0.5))
        if len(cuts.ideals) <= MANY_CUTS:
            return best_plan(problem, cuts, deadline, useful_s=useful_s), True
        several = 1 not in (problem.options.stages, problem.options.max_stages)
        if gap_of_many_cuts and several and (between := block_cuts(problem, cuts)) is not None:
            found = _in_blocks(problem, cuts, between, gap_of_many_cuts, deadline, useful_s)
            if found is not None or useful_s < float("inf"):
                return found, False
        return _or_grid(problem, cuts, gap_of_many_cuts, deadline, useful_s), True
    except OutOfTime:
        return None, False


def _in_blocks(
    problem: Problem, cuts: Cuts, between: Flags, gap: float, deadline: Deadline, useful_s: float
) -> ScoredPlan | None:
    """The best plan that cuts between blocks, improved by a search of the cuts near its own; None if no plan is found.

    Plans with cuts between blocks may be slower than `useful_s` by the factor `NEAR`, because plans that cut inside
    blocks may be faster.
    """
    coarse = replace(cuts.only(between), complete=False)
    best = _scored(_solved(problem, coarse, deadline.share(0.5), gap, useful_s * NEAR), problem, coarse)
    if best is None:
        return None
    fine = replace(cuts.only(_near_cuts(problem, cuts, between, best.plan)), complete=False)
    limit_s = min(best.step_time_s, useful_s)
    try:
        finer = _scored(_solved(problem, fine, deadline.share(0.5), gap, limit_s, near=True), problem, fine)
    except OutOfTime:
        finer = None
    return best if finer is None else min(best, finer, key=lambda one: one.step_time_s)


def _near_cuts(problem: Problem, cuts: Cuts, between: Flags, plan: Plan) -> Flags:
    """A mask of the cuts between blocks, and of the cuts closest in work to a plan's cuts."""
    mask = between.copy()
    work_s = {unit.layers[0]: unit.forward_s + unit.backward_s for unit in problem.units}
    inside_s = 0.0
    for stage in plan.stages[:-1]:
        inside_s += sum(work_s.get(name, 0.0) for name in stage.layers)
        mask[np.argsort(np.abs(cuts.work_s - inside_s), kind="stable")[:NEAREST_CUTS]] = True
    return mask


def _or_grid(problem: Problem, cuts: Cuts, gap: float, deadline: Deadline, useful_s: float) -> ScoredPlan | None:
    """The best plan, or, if there is no time to prove it, the best uniform grid if that is faster.

    A grid takes less time to find. Raises `OutOfTime` if neither is found.
    """
    best = None
    try:
        result = _solved(problem, cuts, deadline.share(0.7), gap, useful_s)
        best = _scored(result, problem, cuts)
        if result.status in (Status.OPTIMAL, Status.INFEASIBLE):
            return best
    except OutOfTime:
        if problem.options.grid:
            raise
    if not problem.options.grid and problem.options.stages is None and not problem.options.pins:
        found = uniform_grid(problem, cuts, deadline, useful_s)
        if found.plan is not None and found.step_time_s is not None and satisfies_options(found.plan, problem):
            grid = ScoredPlan(found.plan, found.step_time_s, 0.0 if best is None else best.bound_s)
            return grid if best is None else min(best, grid, key=lambda one: one.step_time_s)
    if best is None:
        raise OutOfTime
    return best


def _listed(problem: Problem) -> ScoredPlan | None:
    """The best plan of a problem whose plans are listed."""
    found = listed_plan(problem)
    return None if found is None else ScoredPlan(found[0], found[1].step_time_s, found[1].step_time_s)


def _scored(result: Result, problem: Problem, cuts: Cuts) -> ScoredPlan | None:
    """The plan of a search, with a bound if all cuts were searched."""
    if result.plan is None:
        return None
    plan, score = deepened(result.plan, problem)
    return ScoredPlan(plan, score.step_time_s, result.bound_s if cuts.complete else 0.0)


def _solved(
    problem: Problem, cuts: Cuts, deadline: Deadline, gap: float, useful_s: float, *, near: bool = False
) -> Result:
    """The result of the DP. The result's plan is None only if the DP proves that there is none."""
    result = dynamic_program.solve(problem, cuts, deadline.left_s, gap, useful_s=useful_s, near=near)
    if result.interrupted:
        raise KeyboardInterrupt
    if result.plan is None and result.status != Status.INFEASIBLE and deadline.passed:
        raise OutOfTime
    return result


def deepened(plan: Plan, problem: Problem) -> tuple[Plan, Evaluation]:
    """The plan with the depths for its step time without contention, as far as memory allows, and its score.

    Bursts on a shared card need more minibatches in flight than the plan's own step time does (docs/cost-model.md).
    """
    score = evaluate(plan, problem)
    if plan.inference or score.step_time_s <= score.alone_s * (1 + TOLERANCE):
        return plan, score
    deeper = depths.assign_depths(plan, problem, score.alone_s * (1 + 1e-12))
    deeper_score = evaluate(deeper, problem)
    fits = deeper_score.fits or not problem.options.memory
    if fits and deeper_score.step_time_s <= score.step_time_s * (1 + TOLERANCE):
        return deeper, deeper_score
    return plan, score
