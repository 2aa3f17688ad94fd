"""Improves a plan by simulation: moves a cut, a replica or the depth as long as the figure becomes smaller.

The solvers find the plan that is best by the formulas. The plan that is fastest by the figure lies near it. A neighbour
is simulated only if its lower bound, the time by the formulas, is below the best figure so far.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pipeplan.cost import depths
from pipeplan.cost.evaluate import Evaluation, evaluate
from pipeplan.errors import InputError
from pipeplan.plan.plan import Plan, Stage
from pipeplan.plan.schedules import GPIPE
from pipeplan.planning.baselines import satisfies_options
from pipeplan.planning.figure import FiguredPlan, figured
from pipeplan.problem.problem import Problem
from pipeplan.util.deadline import Deadline

LEAST_GAIN = 1e-3
"""Relative. A neighbour replaces the plan if its figure is smaller by this share."""
MOST_SIMULATIONS = 48
MOST_PASSES = 200_000
"""The most simulations of one search, and the most passes of all of them. A limit in time would make answers depend on
the machine."""
MOST_STAGES = 16
"""Plans of more stages have many neighbours, and differences of one unit matter little there."""


def improve(start: FiguredPlan, problem: Problem, deadline: Deadline) -> FiguredPlan:
    """The best plan that hill climbing finds from a plan; the plan itself where nothing near it is faster."""
    best, tried, left, passes = start, {start.plan}, MOST_SIMULATIONS, 0
    if start.figure.simulated_s is None or start.plan.virtual:
        return start
    improved = True
    while improved and left > 0:
        improved = False
        for neighbour in neighbours(best, problem):
            if left <= 0 or passes >= MOST_PASSES or deadline.passed:
                return best
            if neighbour in tried:
                continue
            tried.add(neighbour)
            score = _score(neighbour, problem)
            if score is None or score.pace_s >= best.step_s * (1 - LEAST_GAIN):
                continue
            left -= 1
            found = figured(neighbour, score, problem, deadline)
            passes += found.figure.minibatches * problem.passes * len(neighbour.stages)
            if found.figure.simulated_s is not None and found.step_s < best.step_s * (1 - LEAST_GAIN):
                best, improved = found, True
                break
    return best


def _score(plan: Plan, problem: Problem) -> Evaluation | None:
    """The cost of a plan; None where it is no plan of the problem, or does not fit in memory."""
    try:
        if not satisfies_options(plan, problem):
            return None
        score = evaluate(plan, problem)
    except InputError:
        return None
    return score if score.fits or not problem.options.memory else None


def neighbours(found: FiguredPlan, problem: Problem) -> Iterator[Plan]:
    """The plans one move away: other depths, a replica more, less or elsewhere, a unit over a cut."""
    plan, step_s = found.plan, found.step_s
    yield from _deeper(plan, problem)
    if len(plan.stages) > MOST_STAGES:
        return
    moved = [*_other_replicas(plan, problem), *_other_cuts(plan, problem)]
    for stages in moved:
        yield depths.assign_depths(replace(plan, stages=tuple(stages)), problem, min(step_s, found.score.pace_s))


def _deeper(plan: Plan, problem: Problem) -> Iterator[Plan]:
    """The plan with one or two microbatches more in flight at every stage but the last."""
    if len(plan.stages) == 1 or plan.inference or plan.schedule == GPIPE:
        return
    for more in (1, 2):
        stages = [replace(stage, depth=stage.depth + more) for stage in plan.stages[:-1]]
        deeper = replace(plan, stages=(*stages, plan.stages[-1]))
        versions = [replace(stage, versions=deeper.versions(index)) for index, stage in enumerate(deeper.stages)]
        yield replace(deeper, stages=tuple(versions))


def _other_replicas(plan: Plan, problem: Problem) -> Iterator[list[Stage]]:
    """The stages with one replica less, one more, or one moved from one stage to another.

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
    """The plan with its stages on consecutive workers from the first one on, so that idle workers come last."""
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
    """The stages with one unit moved over one of the cuts."""
    unit_of = {name: unit.layers for unit in problem.units for name in unit.layers}
    for index in range(len(plan.stages) - 1):
        before, behind = plan.stages[index], plan.stages[index + 1]
        for giver, taker, unit in (
            (before, behind, unit_of[before.layers[-1]]),
            (behind, before, unit_of[behind.layers[0]]),
        ):
            kept = tuple(name for name in giver.layers if name not in unit)
            if not kept:
                continue
            ordered = (*unit, *taker.layers) if giver is before else (*taker.layers, *unit)
            changed = {id(giver): replace(giver, layers=kept), id(taker): replace(taker, layers=ordered)}
            yield [changed.get(id(stage), stage) for stage in plan.stages]
