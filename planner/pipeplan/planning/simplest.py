"""The simplest plan that is nearly as fast as the fastest one.

Data parallelism is simpler than a uniform grid, which has the same number of replicas in every stage, and that is
simpler than a plan with unequal replicas. Of two plans of the same kind the one with fewer stages is simpler, and of
two placements the one that keeps servers whole (`keep_whole`). The DP
alone searches for them, because a plan that is not the fastest has no proof of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pipeplan.cost.evaluate import Evaluation, evaluate
from pipeplan.cost.stage_times import grid_shape_of
from pipeplan.plan.plan import Plan
from pipeplan.planning.baselines import FASTEST, Baseline, satisfies_options, uniform_grid
from pipeplan.planning.fast import MANY_CUTS, USEFUL, ScoredPlan, best_plan
from pipeplan.planning.keep_whole import kept_whole
from pipeplan.problem.cuts import Cuts
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.util.deadline import NO_DEADLINE, Deadline, OutOfTime

WITHIN = 0.02
"""A simpler plan may be slower than the fastest one by this share of its pace."""
LEAST_GAIN = 0.05
"""A pipeline that gains less than this over data parallelism is not worth its trouble."""


@dataclass(frozen=True)
class SimplerPlan:
    """A plan that is simpler than the fastest one, and nearly as fast."""

    plan: Plan
    score: Evaluation
    within: float
    """The share of the fastest plan's pace by which it may be slower."""


@dataclass(frozen=True)
class Simplification:
    """The fastest plan of a solve by the formulas, in whose place another was taken."""

    fastest: Plan
    fastest_score: Evaluation
    within: float | None
    """The share of the fastest plan's pace by which the other may be slower, as it is simpler; None where the other was
    taken because its stated pace is shorter."""
    kind: str
    """A description of the plan that was taken, in a few words."""

    @property
    def baseline(self) -> Baseline:
        """The fastest plan as one that the plan that was taken is compared with."""
        return Baseline(FASTEST, self.fastest_score.pace_s, self.fastest.config, "", self.fastest)

    def to_json(self) -> dict[str, object]:
        """The field `simplest` of plan.json; the fastest plan is the last of its baselines."""
        return {"kind": self.kind, "within": self.within}


def kind_of(plan: Plan, problem: Problem) -> str:
    """A description of a plan in a few words."""
    stages = len(plan.stages)
    if stages == 1:
        return "data parallelism" if plan.copies == 1 else "data parallelism with a hierarchical all-reduce"
    return f"a uniform grid of {stages} stages" if grid_shape_of(plan, problem.cluster) else f"{stages} stages"


def find_simpler(
    problem: Problem, cuts: Cuts, plan: Plan, score: Evaluation, within: float, deadline: Deadline
) -> SimplerPlan | None:
    """The simplest plan within the share `within` of the pace of the fastest `plan`, or None if that is the simplest.

    Data parallelism is taken up to `LEAST_GAIN`, if that is more. What there is no time to search before the deadline
    is left out. The plan's stages are moved to keep servers whole.
    """
    simpler = _simpler_kind(problem, cuts, plan, score, within, deadline)
    share, taken = (within, plan) if simpler is None else (simpler.within, simpler.plan)
    moved, moved_score = kept_whole(taken, problem, score.pace_s * (1 + share))
    return simpler if moved == taken else SimplerPlan(moved, moved_score, share)


def _simpler_kind(
    problem: Problem, cuts: Cuts, plan: Plan, score: Evaluation, within: float, deadline: Deadline
) -> SimplerPlan | None:
    """The best plan of the simplest kind within its share of the fastest pace, or None if that is the fastest plan."""
    if len(plan.stages) == 1 and plan.copies == 1:
        return None
    fastest_s = score.pace_s
    gap = within / 4 if len(cuts.ideals) > MANY_CUTS else 0.0
    search = _FewerStages(problem, cuts, gap, deadline)
    for candidate, share in search.candidates(plan, within, fastest_s):
        if _simplicity(candidate, problem) >= _simplicity(plan, problem):
            return None
        found = evaluate(candidate, problem)
        if found.pace_s <= fastest_s * (1 + share) and (found.fits or not problem.options.memory):
            return SimplerPlan(candidate, found, share)
    return None


def simplest_plan(problem: Problem, cuts: Cuts, fastest: ScoredPlan, deadline: Deadline = NO_DEADLINE) -> ScoredPlan:
    """The plan that a solve with its default choices would take, given the fastest one."""
    simpler = find_simpler(problem, cuts, fastest.plan, evaluate(fastest.plan, problem), WITHIN, deadline)
    return fastest if simpler is None else ScoredPlan(simpler.plan, simpler.score.pace_s)


def _simplicity(plan: Plan, problem: Problem) -> tuple[bool, bool, int, int]:
    """A key that is less for simpler plans."""
    stages = len(plan.stages)
    return stages > 1, stages > 1 and grid_shape_of(plan, problem.cluster) is None, stages, plan.copies


@dataclass(frozen=True)
class _FewerStages:
    """Searches for nearly fastest plans of each kind."""

    problem: Problem
    cuts: Cuts
    gap: float
    """Searches may stop at plans within this share of the best, relative."""
    deadline: Deadline

    def candidates(self, plan: Plan, within: float, fastest_s: float) -> Iterator[tuple[Plan, float]]:
        """Plans that may be within a share of the pace `fastest_s`, and the share; the simplest kind first."""
        options = self.problem.options
        if options.stages in (None, 1) and all(stage == 1 for _, stage in options.pins):
            share = max(within, LEAST_GAIN)
            parallel = replace(options, stages=1, max_stages=None, allow_copies=False)
            alone = self._best(parallel, fastest_s * (1 + share))
            if alone is not None:
                yield alone, share
        limit = fastest_s * (1 + within)
        grid = self._grid(limit)
        if grid is not None and satisfies_options(grid, self.problem) and self._pace(grid) <= limit:
            shaped = replace(options, grid=True, allow_copies=False)
            yield self._with_fewest_stages(shaped, grid, limit), within
        yield self._with_fewest_stages(options, plan, limit), within

    def _grid(self, limit_s: float) -> Plan | None:
        """The fastest uniform grid, if it is within the limit and found in time."""
        if self.problem.options.grid:
            return None
        try:
            return uniform_grid(self.problem, self.cuts, self.deadline.share(0.3), limit_s * USEFUL, near=True).plan
        except OutOfTime:
            return None

    def _with_fewest_stages(self, options: Options, plan: Plan, limit: float) -> Plan:
        """The fastest plan with the fewest stages of those within the limit; `plan` is one of them."""
        if options.stages is not None:
            return plan
        # Mostly few stages less are enough, so the steps downwards are small at first.
        low, high, step = 0, len(plan.stages), 1
        while high - low > 1:
            middle = max(low + 1, high - step)
            found = self._best(replace(options, max_stages=middle), limit)
            if found is not None and self._pace(found) <= limit:
                plan, high, step = found, len(found.stages), 2 * step
            else:
                low, step = middle, max(1, (high - middle) // 2)
        return plan

    def _best(self, options: Options, limit_s: float) -> Plan | None:
        """The best plan under these options, or None where there is none, or none is found in time.

        Where it is slower than the limit, it may be any plan.
        """
        problem, useful_s = replace(self.problem, options=options), limit_s * USEFUL
        try:
            best = best_plan(problem, self.cuts, self.deadline.share(0.5), self.gap, useful_s, near=True)
        except OutOfTime:
            return None
        return None if best is None else best.plan

    def _pace(self, plan: Plan) -> float:
        return evaluate(plan, self.problem).pace_s
