"""A plan that the solvers found without contention, made better with it: a local search that the evaluator scores.

Both solvers minimise what every link would take alone, which is a bound on what plans take that share network cards.
Where the plan that meets the bound does not keep it with contention (`pipeplan.contention`), its neighbours may:

    units     of one stage go to its neighbour, from either side of the cut between them
    workers   go from one stage to another, or are left idle, or idle ones are put to use or elsewhere between stages
    stages    next to each other become one

Stages stay on consecutive workers, in order, in every copy of the pipeline: the space that the solvers search. Of
plans equally fast the search prefers those with fewer resources near that pace, so that it can leave a plateau. It is
deterministic, and its effort is bounded by a count, not by a clock.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from pipeplan import contention
from pipeplan.errors import InputError
from pipeplan.evaluate import Evaluation, evaluate
from pipeplan.links import Links
from pipeplan.plan import Plan, Stage
from pipeplan.problem import Problem
from pipeplan.solvers import depths

TOLERANCE = 1e-9
"""Relative. Less is no gain."""
STEPS = (1, 2, 4, 8)
"""Units that change their stage at once, and workers."""
SHARPNESS = 16
"""Exponent of the sum over resources that tells plans of one pace apart."""
EFFORT = 1000
"""For small plans; `_allowed` gives larger ones less. Adding up the loads of a plan takes 1, scoring it 2 more."""
DETOUR = 1.5
"""How much slower than the best a plan may be to be gone through."""
GLANCES = 20
"""For each of them, so many plans may be dismissed by their compute time alone."""


def improve(plan: Plan, problem: Problem, effort: int = EFFORT) -> Plan:
    """The best plan found near `plan`, with depths for its pace; `plan` itself where nothing better was found.

    It returns at once where contention does not bind. The result satisfies the constraints of the problem's options
    and fits in memory wherever `plan` does.
    """
    score = evaluate(plan, problem)
    if score.pace_s <= score.alone_s * (1 + TOLERANCE) or not _consecutive(plan, problem):
        return plan
    search = _Search(plan, problem, score, _allowed(plan, problem, effort))
    here = _Layout.of(plan, problem)
    alone = _Layout((0,) * len(here.home), (0, sum(here.room), 0))
    for start in (here, _aligned(here, problem), alone):
        search.descend(start)
    search.descend(_Layout.of(search.best, problem), wander=True)
    return search.best


def _allowed(plan: Plan, problem: Problem, effort: int) -> int:
    """The effort for a plan of this size: less where scoring one takes longer, and none where it takes seconds."""
    size = len(plan.stages) * (len(problem.units) + 100) + problem.cluster.workers
    return effort * 500 // max(500, size)


_Rank = tuple[float, float]
"""Pace, then crowding: how many resources are near it; infinite where the pace is only known to be no less."""
_UNKNOWN = 0.0, float("inf")


@dataclass(frozen=True)
class _Layout:
    """A pipeline in one copy, as the moves see it."""

    home: tuple[int, ...]
    """The stage of every unit; units are in a topological order."""
    room: tuple[int, ...]
    """Workers left to right: idle before stage 0, of stage 0, idle before stage 1, … idle after the last."""

    @staticmethod
    def of(plan: Plan, problem: Problem) -> _Layout:
        """The layout of a plan on consecutive workers."""
        stage_of = {name: index for index, stage in enumerate(plan.stages) for name in stage.layers}
        room, end = [], 0
        for workers in plan.copy(0):
            room += [workers[0] - end, len(workers)]
            end = workers[-1] + 1
        home = tuple(stage_of[unit.layers[0]] for unit in problem.units)
        return _Layout(home, (*room, problem.cluster.workers // plan.copies - end))

    def moved(self) -> Iterator[_Layout]:
        """All neighbours, those that move least first."""
        for step in STEPS:
            yield from self._units_moved(step)
            yield from self._workers_moved(step)
        yield from self._merged()
        yield from self._split()
        for step in STEPS:
            for other in self._units_moved(step):
                yield from other._workers_moved(1)

    def _units_moved(self, step: int) -> Iterator[_Layout]:
        stages = len(self.room) // 2
        members: list[list[int]] = [[] for _ in range(stages)]
        for unit, stage in enumerate(self.home):
            members[stage].append(unit)
        for stage, target in [pair for s in range(stages - 1) for pair in ((s, s + 1), (s + 1, s))]:
            if len(members[stage]) <= step:
                continue
            # In topological order the last units of a stage are read by one another and later stages alone.
            gone = set(members[stage][-step:] if target > stage else members[stage][:step])
            yield replace(self, home=tuple(target if unit in gone else at for unit, at in enumerate(self.home)))

    def _workers_moved(self, step: int) -> Iterator[_Layout]:
        for source, target in itertools.permutations(range(len(self.room)), 2):
            if self.room[source] - step < source % 2:
                continue
            room = list(self.room)
            room[source] -= step
            room[target] += step
            yield replace(self, room=tuple(room))

    def _merged(self) -> Iterator[_Layout]:
        for stage in range(len(self.room) // 2 - 1):
            at = 2 * stage + 1
            room = (*self.room[:at], sum(self.room[at : at + 3]), *self.room[at + 3 :])
            yield _Layout(tuple(one - (one > stage) for one in self.home), room)

    def _split(self) -> Iterator[_Layout]:
        for stage in range(len(self.room) // 2):
            at, members = 2 * stage + 1, [unit for unit, home in enumerate(self.home) if home == stage]
            for count, left in itertools.product(range(1, len(members)), range(1, self.room[at])):
                first = set(members[:count])
                home = tuple(one + (one >= stage and unit not in first) for unit, one in enumerate(self.home))
                yield _Layout(home, (*self.room[:at], left, 0, self.room[at] - left, *self.room[at + 1 :]))


def _consecutive(plan: Plan, problem: Problem) -> bool:
    """Whether the plan is one of those that the moves know: copies at equal distances, stages in order in each."""
    size, first = problem.cluster.workers // plan.copies, plan.copy(0)
    flat = [worker for workers in first for worker in workers]
    runs = all(workers[-1] - workers[0] + 1 == len(workers) for workers in first)
    alike = all(
        plan.copy(copy) == tuple(tuple(worker + copy * size for worker in workers) for workers in first)
        for copy in range(1, plan.copies)
    )
    return runs and flat == sorted(flat) and max(flat) < size and alike


def _aligned(layout: _Layout, problem: Problem) -> _Layout:
    """Idle workers inserted, as far as there are, so that no stage lies on two servers that has room in one."""
    room, position = list(layout.room), 0
    for index in range(0, len(room) - 1, 2):
        replicas = room[index + 1]
        first = position + room[index]
        following = next(
            (start for start in problem.cluster.starts(problem.cluster.server_level) if start > first), first
        )
        if first + replicas > following and replicas <= problem.cluster.workers_per_server:
            shift = min(following - first, room[-1])
            room[index] += shift
            room[-1] -= shift
        position += room[index] + replicas
    return replace(layout, room=tuple(room))


class _Search:
    """Descends from layouts to local optima, and keeps the best plan of all."""

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
        self._known: dict[_Layout, _Rank | None] = {}

    def descend(self, layout: _Layout, *, wander: bool = False) -> None:
        """Take the first neighbour that is better until there is none, or no effort is left.

        With `wander` the best neighbour is then taken that was not taken before, though it is worse.
        """
        here = self._rank(layout, float("inf"))
        taken = {layout}
        while here is not None:
            limit_s = max(here[0], self.pace_s * DETOUR) if wander else here[0]
            following: tuple[_Layout, _Rank] | None = None
            for neighbour in layout.moved():
                if self._spent():
                    return
                rank = None if neighbour in taken else self._rank(neighbour, limit_s)
                if rank is None:
                    continue
                if _less(rank, here):
                    following = neighbour, rank
                    break
                if wander and (following is None or _less(rank, following[1])):
                    following = neighbour, rank
            if following is None:
                return
            layout, here = following
            taken.add(layout)

    def _spent(self) -> bool:
        """Whether to stop: no effort left, or the bound met, which nothing can beat."""
        met = self.pace_s <= self._bound_s * (1 + TOLERANCE)
        return met or self._scores_left <= 0 or self._glances_left <= 0

    def _rank(self, layout: _Layout, limit_s: float) -> _Rank | None:
        """What a layout is to be compared by, or None where it takes longer than a limit or is not allowed."""
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

    def _scored_rank(self, layout: _Layout, limit_s: float) -> _Rank | None:
        plan = self._plan(layout)
        if not _permitted(plan, self._problem):
            return None
        self._scores_left -= 1
        cards = contention.loads(plan, self._problem, self._links)
        if (busiest_s := cards.busiest()[0]) > limit_s * (1 + TOLERANCE):
            return busiest_s, float("inf")
        self._scores_left -= 2
        found = self._scored(plan)
        if found is None:
            return None
        plan, score = found
        if score.pace_s < self.pace_s * (1 - TOLERANCE):
            self.best, self.pace_s = plan, score.pace_s
        return score.pace_s, self._crowding(score, cards, plan.copies)

    def _plan(self, layout: _Layout) -> Plan:
        template, problem = self._template, self._problem
        size, names = problem.cluster.workers // template.copies, [unit.layers for unit in problem.units]
        stages, position = [], 0
        for index, (idle, replicas) in enumerate(zip(layout.room[:-1:2], layout.room[1::2], strict=True)):
            position += idle
            layers = tuple(name for unit, at in enumerate(layout.home) if at == index for name in names[unit])
            run = range(position, position + replicas)
            workers = tuple(copy * size + worker for worker in run for copy in range(template.copies))
            stages.append(Stage(layers, workers, 1, 1))
            position += replicas
        return replace(template, stages=tuple(stages))

    def _scored(self, plan: Plan) -> tuple[Plan, Evaluation] | None:
        """The plan with its depths, and its score; None where it is no plan or does not fit."""
        # Depths for the bound sustain every pace that a plan can have; those for its own pace need less memory, and
        # stages that are too large even so may compute their forward passes again.
        pace_s = self._bound_s
        may_recompute = self._problem.training and self._problem.options.recompute
        for attempt in range(4 if may_recompute else 2):
            plan = depths.assign(plan, self._problem, pace_s)
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

    def _crowding(self, score: Evaluation, cards: contention.Cards, copies: int) -> float:
        times = [time / copies for stage in score.stages for time in (stage.stage_s, stage.boundary_s)]
        everything = np.concatenate([times, *(busy.ravel() for busy in cards.busy_s)])
        return float(((everything / self._bound_s) ** SHARPNESS).sum())


def _recomputing(plan: Plan, score: Evaluation) -> Plan:
    """The plan with recomputation in all stages that do not fit."""
    stages = [
        replace(stage, recompute=stage.recompute or cost.memory_bytes > cost.capacity_bytes)
        for stage, cost in zip(plan.stages, score.stages, strict=True)
    ]
    return replace(plan, stages=tuple(stages))


def _less(rank: _Rank, below: _Rank) -> bool:
    if rank[0] < below[0] * (1 - TOLERANCE):
        return True
    return rank[0] <= below[0] * (1 + TOLERANCE) and rank[1] < below[1] * (1 - TOLERANCE)


def _permitted(plan: Plan, problem: Problem) -> bool:
    """Whether a plan keeps the constraints of the options; numbers of replicas are those of one copy."""
    asked, count = problem.options, len(plan.stages)
    stage_of = {name: number for number, stage in enumerate(plan.stages, start=1) for name in stage.layers}
    return (
        asked.stages in (None, count)
        and count <= (asked.max_stages or count)
        and plan.busy <= (asked.max_workers or plan.busy)
        and all(stage.replicas // plan.copies <= (asked.max_replicas or stage.replicas) for stage in plan.stages)
        and all(stage_of[name] == number for name, number in asked.pins)
    )
