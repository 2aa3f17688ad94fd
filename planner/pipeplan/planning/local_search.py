"""Local search for a plan that is faster under contention than the one the solvers found without it.

Both solvers minimise the pace that every link would allow if no other transfer shared it, which is a lower bound on the
pace of plans whose transfers share network cards. If the plan that meets the bound is slower with contention
(`pipeplan.cost.contention`), one of its neighbours may be faster. The moves are

    units     of one stage move to the next or the previous stage, from either side of the cut between them
    workers   move from one stage to another, or become idle, or idle workers join a stage or move between stages
    stages    next to each other are merged, or one is split in two

Stages stay on consecutive workers, in order, in every copy of the pipeline, which is the space that the solvers search.
In a uniform grid only units move. Among plans of equal pace the search prefers those with fewer resources that are
nearly as busy as the slowest, so that it can leave a plateau. The search is deterministic: a count bounds its effort,
not a clock.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pipeplan.cluster_data.links import Links
from pipeplan.cost import contention, depths
from pipeplan.cost.evaluate import Evaluation, evaluate
from pipeplan.cost.stage_times import grid_shape_of
from pipeplan.errors import InputError
from pipeplan.plan.plan import Plan
from pipeplan.planning.worker_orders import StageLayout, align_to_servers, is_consecutive
from pipeplan.problem.problem import Problem

TOLERANCE = 1e-9
"""Relative. A smaller difference is no gain."""
SHARPNESS = 16
"""Exponent of the sum over resources that ranks plans of equal pace (a soft maximum)."""
EFFORT = 1000
"""Effort for small plans; `_allowed` reduces it for larger ones. Computing the card loads of a plan costs 1, a full
evaluation 2 more."""
DETOUR = 1.5
"""The wandering search passes only through plans that take at most this many times the best plan's pace."""
GLANCES = 20
"""Plans that may be rejected by their compute time alone, per unit of effort."""


def improve_plan(plan: Plan, problem: Problem, effort: int = EFFORT) -> Plan:
    """The best plan found near `plan`, or `plan` itself if none is better.

    The result satisfies the constraints of the problem's options, and it fits in memory wherever `plan` does. Its
    depths sustain the pace without contention where they fit in memory, because bursts on a shared card need more
    minibatches in flight than the plan's own pace does (docs/cost-model.md). The function returns at once where
    contention does not bind, or where the cores that workers share are never idle.
    """
    score = evaluate(plan, problem)
    best_s = max(score.alone_s, contention.least_pace_of_shared_cores_s(problem))
    if score.pace_s <= best_s * (1 + TOLERANCE) or not is_consecutive(plan, problem):
        return plan
    search = _LocalSearch(plan, problem, score, _allowed(plan, problem, effort))
    layout = StageLayout.of(plan, problem)
    single_stage = StageLayout((0,) * len(layout.home), (0, sum(layout.room), 0))
    other_starts = () if problem.options.grid else (align_to_servers(layout, problem), single_stage)
    for start in (layout, *other_starts):
        search.descend(start)
    search.descend(StageLayout.of(search.best, problem), wander=True)
    return search.best


def _allowed(plan: Plan, problem: Problem, effort: int) -> int:
    """The effort for a plan of this size: less where scoring one takes longer, and none where that takes seconds."""
    size = len(plan.stages) * (len(problem.units) + 100) + problem.cluster.workers
    return effort * 500 // max(500, size)


_Rank = tuple[float, float]
"""Pace, then crowding: how many resources are nearly as busy as the slowest. Infinite crowding marks a pace that is
only a lower bound."""
_UNKNOWN = 0.0, float("inf")


class _LocalSearch:
    """Descends from layouts to local optima and keeps the best plan of all."""

    def __init__(self, plan: Plan, problem: Problem, score: Evaluation, effort: int) -> None:
        self.best, self.pace_s = plan, score.pace_s
        self._template, self._problem = plan, problem
        self._scores_left, self._glances_left = effort, effort * GLANCES
        self._must_fit = score.fits
        self._bound_s = score.alone_s
        self._links = Links.of(problem.cluster)
        cluster = problem.cluster
        fastest = max([cluster.device.speed, *(machine.device.speed for machine in cluster.machines)])
        self._work_s = np.array([unit.forward_s + unit.backward_s for unit in problem.units]) / fastest / plan.copies
        self._known: dict[StageLayout, _Rank | None] = {}

    def descend(self, layout: StageLayout, *, wander: bool = False) -> None:
        """Move to the first better neighbour until there is none or the effort is spent.

        With `wander` the search then moves to the best neighbour that it has not visited, even if it is worse.
        """
        current = self._rank(layout, float("inf"))
        taken = {layout}
        while current is not None:
            limit_s = max(current[0], self.pace_s * DETOUR) if wander else current[0]
            following: tuple[StageLayout, _Rank] | None = None
            for neighbour in layout.moved(grid=self._problem.options.grid):
                if self._spent():
                    return
                rank = None if neighbour in taken else self._rank(neighbour, limit_s)
                if rank is None:
                    continue
                if _less(rank, current):
                    following = neighbour, rank
                    break
                if wander and (following is None or _less(rank, following[1])):
                    following = neighbour, rank
            if following is None:
                return
            layout, current = following
            taken.add(layout)

    def _spent(self) -> bool:
        """Whether to stop: the effort is spent, or the best plan meets the bound, so that nothing can be faster."""
        meets_bound = self.pace_s <= self._bound_s * (1 + TOLERANCE)
        return meets_bound or self._scores_left <= 0 or self._glances_left <= 0

    def _rank(self, layout: StageLayout, limit_s: float) -> _Rank | None:
        """The rank of a layout, or None if its pace exceeds `limit_s` or it violates a constraint."""
        self._glances_left -= 1
        rank = self._known.get(layout, _UNKNOWN)
        if rank is None or rank[0] > limit_s * (1 + TOLERANCE):
            return None
        if rank[1] < float("inf"):
            return rank
        compute = np.bincount(layout.home, self._work_s) / layout.room[1::2]
        if compute.max() > limit_s * (1 + TOLERANCE):
            return None
        rank = self._known[layout] = self._scored_rank(layout, limit_s)
        return rank if rank is not None and rank[0] <= limit_s * (1 + TOLERANCE) else None

    def _scored_rank(self, layout: StageLayout, limit_s: float) -> _Rank | None:
        """The rank of a layout by its card loads and, if these stay within the limit, by its full score."""
        plan = layout.plan(self._template, self._problem)
        if not satisfies_options(plan, self._problem):
            return None
        self._scores_left -= 1
        cards = contention.card_loads(plan, self._problem, self._links)
        if (busiest_s := cards.busiest()[0]) > limit_s * (1 + TOLERANCE):
            return busiest_s, float("inf")
        self._scores_left -= 2
        scored = self._scored(plan)
        if scored is None:
            return None
        plan, score = scored
        if score.pace_s < self.pace_s * (1 - TOLERANCE):
            self.best, self.pace_s = plan, score.pace_s
        return score.pace_s, self._crowding(score, cards, plan.copies)

    def _scored(self, plan: Plan) -> tuple[Plan, Evaluation] | None:
        """The plan with depths, and its score; None if it is not a plan for the problem or does not fit in memory."""
        # Depths for the bound sustain every pace that the plan can have. Depths for its own pace need less memory, and
        # stages that are too large even then may recompute their forward passes.
        pace_s = self._bound_s
        may_recompute = self._problem.training and self._problem.options.recompute
        for attempt in range(4 if may_recompute else 2):
            plan = depths.assign_depths(plan, self._problem, pace_s)
            try:
                score = evaluate(plan, self._problem)
            except InputError:
                return None
            if score.fits or not self._must_fit:
                return plan, score
            pace_s = score.pace_s
            if attempt > 0:
                plan = _recomputing(plan, score)
        return None

    def _crowding(self, score: Evaluation, cards: contention.CardLoads, copies: int) -> float:
        times = [time / copies for stage in score.stages for time in (stage.stage_s, stage.boundary_s)]
        busy_s = np.concatenate([times, *(busy.ravel() for busy in cards.busy_s)])
        return float(((busy_s / self._bound_s) ** SHARPNESS).sum())


def _recomputing(plan: Plan, score: Evaluation) -> Plan:
    """The plan with recomputation in all stages that do not fit in memory."""
    stages = [
        replace(stage, recompute=stage.recompute or cost.memory_bytes > cost.capacity_bytes)
        for stage, cost in zip(plan.stages, score.stages, strict=True)
    ]
    return replace(plan, stages=tuple(stages))


def _less(rank: _Rank, below: _Rank) -> bool:
    if rank[0] < below[0] * (1 - TOLERANCE):
        return True
    return rank[0] <= below[0] * (1 + TOLERANCE) and rank[1] < below[1] * (1 - TOLERANCE)


def satisfies_options(plan: Plan, problem: Problem) -> bool:
    """Whether a plan satisfies the constraints of the options. Limits on replicas refer to one copy of the pipeline."""
    options, count = problem.options, len(plan.stages)
    stage_of = {name: number for number, stage in enumerate(plan.stages, start=1) for name in stage.layers}
    return (
        options.stages in (None, count)
        and count > options.several
        and count <= (options.max_stages or count)
        and plan.busy <= (options.max_workers or plan.busy)
        and all(stage.replicas // plan.copies <= (options.max_replicas or stage.replicas) for stage in plan.stages)
        and all(stage_of[name] == number for name, number in options.pins)
        and (not options.grid or grid_shape_of(plan, problem.cluster) is not None)
    )
