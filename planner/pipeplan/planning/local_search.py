"""Searches plans by simulation: hill climbing from the best plan known, and from listed plans.

The solvers find the plan that is best by the formulas. The plan that is fastest by the figure lies near it, or has
another number of stages or workers. A plan is simulated only if its time by the formulas, a lower bound, is below the
best figure so far. The first simulation covers two updates. A full simulation takes five times as long, and follows
only if the plan seems to be faster.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from pipeplan.cost import depths
from pipeplan.cost.evaluate import Evaluation, evaluate
from pipeplan.errors import InputError
from pipeplan.plan.plan import Plan, Stage
from pipeplan.plan.schedules import GPIPE, SPLITTING
from pipeplan.planning.baselines import satisfies_options
from pipeplan.planning.figure import Figure, FiguredPlan, figured, quick_step_s
from pipeplan.planning.listed_plans import in_turns, listed_plans, uniform_plans
from pipeplan.problem.problem import Problem
from pipeplan.util.deadline import NO_DEADLINE, Deadline

LEAST_GAIN = 1e-3
"""Relative gain that a neighbour's figure needs in order to replace the plan."""
MOST_PASSES = 200_000
"""Largest number of passes of all simulations of one search. A time limit instead would make answers depend on the
machine."""
MOST_STAGES = 16
"""Largest number of stages for which cuts are moved. Larger plans have many neighbours, and moving one unit gains
little."""
MISSED = 0.08
"""Margin by which the steady state may be faster than the first two updates."""
MOST_FULL = 4
"""Largest number of full simulations among the neighbours of a plan."""
LEAST_SCORED, MOST_SCORED, SCORED_UNITS = 100, 200, 20_000
"""Number of listed plans that are scored by the formulas: `SCORED_UNITS` divided by the units of the model, between the
other two numbers."""
MOST_LISTED, MOST_STARTS, MOST_CLIMBS = 48, 6, 3
"""Largest numbers of listed plans that are simulated for two updates, improved by simulations of two updates, and
improved by their figures."""
MORE_LISTED, MORE_PASSES = 120, 20_000
"""Largest number of listed plans that are simulated for two updates while all simulations have had fewer passes."""
FAR_MOVES, MOST_FAR = (1, 2, 4), 4
"""Numbers of units that are moved over a cut at once in plans of at most `MOST_FAR` stages; one unit in other plans."""


@dataclass
class PlanSearch:
    """A search among the plans of a problem, by the figure."""

    problem: Problem
    deadline: Deadline = NO_DEADLINE
    found: dict[Plan, FiguredPlan] = field(default_factory=dict)
    """The plans that were fully simulated since the search began."""
    _quick: dict[Plan, float] = field(default_factory=dict)
    _scores: dict[Plan, Evaluation | None] = field(default_factory=dict)
    _passes: int = 0

    def begun(self, deadline: Deadline) -> PlanSearch:
        """This search, restarted with a new deadline.

        Times of plans that were simulated before are kept.
        """
        self.deadline, self.found, self._passes = deadline, {}, 0
        return self

    def climb(self, start: FiguredPlan) -> FiguredPlan:
        """The best plan that hill climbing from a plan finds; the plan itself if no plan near it is faster."""
        if start.figure.simulated_s is None or start.plan.virtual:
            return start
        best = start
        while not self._over:
            limit_s = best.step_s * (1 - LEAST_GAIN)
            scored = self._scored(neighbours(best, self.problem), limit_s)
            simulated = self._simulated(scored, limit_s, MOST_FULL)
            following = next((one for one in simulated if one.step_s < limit_s), None)
            if following is None:
                break
            best = following
        return best

    def listed(self, limit_s: float) -> FiguredPlan | None:
        """The best plan near the listed plans; None if no listed plan is below `limit_s` by the formulas."""
        scored = max(LEAST_SCORED, min(MOST_SCORED, SCORED_UNITS // len(self.problem.units)))
        return self._near(itertools.islice(listed_plans(self.problem, limit_s), scored), limit_s)

    def uniform(self, limit_s: float) -> FiguredPlan | None:
        """The best plan near uniform pipelines on servers that differ; None if no such pipeline is below `limit_s`."""
        return self._near(uniform_plans(self.problem), limit_s)

    def like(self, plan: Plan) -> FiguredPlan | None:
        """The best plan near the stages of `plan`, which has another schedule; None if these stages do not fit."""
        deep = with_depths(plan, self.problem)
        if deep is None or self.deadline.passed:
            return None
        start = figured(*deep, self.problem, self.deadline)
        self.found[start.plan] = start
        return self.climb(start)

    def _near(self, plans: Iterable[Plan], limit_s: float) -> FiguredPlan | None:
        scored = list[tuple[Plan, Evaluation]]()
        for plan in plans:
            if self.deadline.passed:
                break
            deep = with_depths(plan, self.problem)
            scored += [] if deep is None or deep[1].step_time_s >= limit_s else [deep]
        scored.sort(key=lambda one: one[1].step_time_s)
        shapes = [_shape_of(plan) for plan, _ in scored]
        quick = list[FiguredPlan]()
        for number in in_turns(shapes)[:MORE_LISTED]:
            if self._over or (len(quick) >= MOST_LISTED and self._passes >= MORE_PASSES):
                break
            quick.append(self._quickly(*scored[number]))
        quick.sort(key=lambda one: one.step_s)
        # Plans of one shape lead to the same result, so only the best plan of every shape is improved.
        starts = {_shape_of(one.plan): one for one in reversed(quick)}
        ends = sorted(
            map(self._quick_climb, sorted(starts.values(), key=lambda one: one.step_s)[:MOST_STARTS]),
            key=lambda one: one.step_s,
        )
        full = self._simulated([(one.plan, one.score) for one in ends], limit_s, MOST_CLIMBS)
        return min((self.climb(one) for one in list(full)), key=lambda one: one.step_s, default=None)

    def _quick_climb(self, start: FiguredPlan) -> FiguredPlan:
        """The best plan that hill climbing finds by simulating only the first two updates."""
        best = start
        while not self._over:
            limit_s = best.step_s * (1 - LEAST_GAIN)
            near = [self._quickly(*one) for one in self._scored(neighbours(best, self.problem), limit_s)]
            following = min(near, key=lambda one: one.step_s, default=best)
            if following.step_s >= limit_s:
                break
            best = following
        return best

    def _quickly(self, plan: Plan, score: Evaluation) -> FiguredPlan:
        """The plan with its figure, which is simulated for the first two updates only."""
        return FiguredPlan(plan, score, Figure(score.step_time_s, self._quick_s(plan, score)))

    @property
    def _over(self) -> bool:
        return self._passes >= MOST_PASSES or self.deadline.passed

    def _scored(self, plans: Iterable[Plan], limit_s: float) -> list[tuple[Plan, Evaluation]]:
        """The plans of the problem that fit in memory and are below a limit by the formulas, with their scores."""
        found = []
        for plan in plans:
            if plan not in self._scores:
                self._scores[plan] = _score(plan, self.problem)
            score = None if plan in self.found else self._scores[plan]
            if score is not None and score.step_time_s < limit_s:
                found.append((plan, score))
        return found

    def _simulated(self, scored: Sequence[tuple[Plan, Evaluation]], limit_s: float, most: int) -> Iterator[FiguredPlan]:
        """The few plans that are fastest in their first two updates, with their figures, fastest first."""
        quick = []
        for number, (plan, score) in enumerate(scored):
            if not self._over:
                quick.append((self._quick_s(plan, score), number))
        for quick_s, number in sorted(quick)[:most]:
            if self._over or quick_s >= limit_s * (1 + MISSED):
                return
            plan, score = scored[number]
            found = self.found[plan] = figured(plan, score, self.problem, self.deadline)
            self._passes += found.figure.minibatches * self.problem.passes * len(plan.stages)
            if found.figure.simulated_s is not None:
                yield found

    def _quick_s(self, plan: Plan, score: Evaluation) -> float:
        if plan not in self._quick:
            self._quick[plan] = quick_step_s(plan, score, self.problem, self.deadline)
            self._passes += 2 * (plan.accumulate or 0) * self.problem.passes * len(plan.stages)
        return self._quick[plan]


def _shape_of(plan: Plan) -> tuple[int, int, int]:
    """(copies, stages of a copy, busy workers)."""
    return plan.copies, len(plan.stages), plan.busy


def improve(start: FiguredPlan, problem: Problem, deadline: Deadline) -> FiguredPlan:
    """The best plan that hill climbing from a plan finds; the plan itself if no plan near it is faster."""
    return PlanSearch(problem, deadline).climb(start)


def _score(plan: Plan, problem: Problem, *, fits: bool = True) -> Evaluation | None:
    """The cost of a plan; None if it is not a plan of the problem, or if `fits` is True and it does not fit in
    memory."""
    try:
        if not satisfies_options(plan, problem):
            return None
        score = evaluate(plan, problem)
    except InputError:
        return None
    return score if score.fits or not (fits and problem.options.memory) else None


def with_depths(plan: Plan, problem: Problem) -> tuple[Plan, Evaluation] | None:
    """The plan under the problem's schedule, with its depths, and with recomputation in the stages that need it.

    The result is None if this is no plan of the problem, or if it does not fit in memory.
    """
    plan = replace(plan, schedule=problem.options.schedule, accumulate=problem.options.accumulate)
    for _ in range(len(plan.stages) + 1):
        try:
            deep = depths.assign_depths(plan, problem, 0.0)
        except InputError:
            return None
        if (score := _score(deep, problem, fits=False)) is None:
            return None
        costs = zip(deep.stages, score.stages, strict=True)
        over = [cost.memory_bytes > cost.capacity_bytes and not stage.recompute for stage, cost in costs]
        if score.fits or not problem.options.memory:
            return deep, score
        if not problem.options.recompute or not any(over):
            return None
        again = (replace(one, recompute=one.recompute or more) for one, more in zip(plan.stages, over, strict=True))
        plan = replace(plan, stages=tuple(again))
    return None


def neighbours(found: FiguredPlan, problem: Problem) -> Iterator[Plan]:
    """The plans that differ by one move: other depths, a replica added, removed or moved, a unit moved over a cut."""
    plan, step_s = found.plan, found.step_s
    yield from _other_depths(plan, problem, step_s)
    if len(plan.stages) > MOST_STAGES:
        return
    moved = [*_other_replicas(plan, problem), *_other_cuts(plan, problem)]
    for stages in moved:
        yield depths.assign_depths(replace(plan, stages=tuple(stages)), problem, min(step_s, found.score.step_time_s))


def _other_depths(plan: Plan, problem: Problem, step_s: float) -> Iterator[Plan]:
    """The plan with one or two more microbatches in flight at every stage except the last, or under zb-h1 with as many
    or as few as are useful."""
    if len(plan.stages) == 1 or plan.inference or plan.schedule == GPIPE:
        return
    for more in (1, 2):
        stages = [replace(stage, depth=stage.depth + more) for stage in plan.stages[:-1]]
        deeper = replace(plan, stages=(*stages, plan.stages[-1]))
        versions = [replace(stage, versions=deeper.versions(index)) for index, stage in enumerate(deeper.stages)]
        yield replace(deeper, stages=tuple(versions))
    if plan.schedule in SPLITTING:
        for away in (0, depths.AWAY):
            yield depths.assign_depths(plan, problem, step_s, away)


def _other_replicas(plan: Plan, problem: Problem) -> Iterator[list[Stage]]:
    """The stages with one replica removed, added, or moved from one stage to another.

    Copies of a pipeline, grids and servers that differ keep the placement that the search has found.
    """
    if plan.copies > 1 or problem.options.grid or not problem.cluster.uniform:
        return
    counts = [stage.replicas for stage in plan.stages]
    idle = problem.cluster.workers - plan.busy
    for give in (*range(len(counts)), None):
        for take in (None, *range(len(counts))):
            if give == take or (give is None and not idle) or (give is not None and counts[give] == 1):
                continue
            changed = list(counts)
            if give is not None:
                changed[give] -= 1
            if take is not None:
                changed[take] += 1
            yield _placed(plan.stages, changed)


def compact(plan: Plan, problem: Problem) -> Plan:
    """The plan with its stages on consecutive workers from the first worker on, so that idle workers come last."""
    if plan.copies > 1 or plan.virtual or problem.options.grid or not problem.cluster.uniform:
        return plan
    return replace(plan, stages=tuple(_placed(plan.stages, [stage.replicas for stage in plan.stages])))


def _placed(stages: Sequence[Stage], counts: Sequence[int]) -> list[Stage]:
    """The stages on consecutive workers, with these numbers of replicas."""
    first, placed = 0, []
    for stage, count in zip(stages, counts, strict=True):
        placed.append(replace(stage, workers=tuple(range(first, first + count))))
        first += count
    return placed


def _other_cuts(plan: Plan, problem: Problem) -> Iterator[list[Stage]]:
    """The stages with one unit, or a few units, moved over one of the cuts."""
    unit_of = {name: unit.layers for unit in problem.units for name in unit.layers}
    for index in range(len(plan.stages) - 1):
        before, behind = plan.stages[index], plan.stages[index + 1]
        for count in FAR_MOVES if len(plan.stages) <= MOST_FAR else (1,):
            for giver, taker in ((before, behind), (behind, before)):
                moved: tuple[str, ...] = ()
                kept = giver.layers
                for _ in range(count):
                    unit = unit_of[kept[-1 if giver is before else 0]]
                    moved = (*unit, *moved) if giver is before else (*moved, *unit)
                    kept = tuple(name for name in kept if name not in unit)
                    if not kept:
                        break
                if not kept:
                    continue
                ordered = (*moved, *taker.layers) if giver is before else (*taker.layers, *moved)
                changed = {id(giver): replace(giver, layers=kept), id(taker): replace(taker, layers=ordered)}
                yield [changed.get(id(stage), stage) for stage in plan.stages]
