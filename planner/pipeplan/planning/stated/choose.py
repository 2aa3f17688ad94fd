"""Simulates the plan of a solve and its runners-up, and chooses by their stated paces.

The cost model adds up averages; a simulation of the executor's schedule (`pipeplan.simulation`) also has the waits of
single messages. Among plans that are equally fast by the formulas the simulation decides. A plan that is slower by the
formulas is taken where its stated pace is shorter by a few percent; what is proven stays with the formulas.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from pipeplan.cost import depths
from pipeplan.cost.evaluate import Evaluation, evaluate
from pipeplan.plan.plan import Plan
from pipeplan.plan.schedules import FLUSHING, GPIPE
from pipeplan.plan.updates import MOST_STALE, Updates
from pipeplan.planning.baselines import satisfies_options
from pipeplan.planning.simplest import SimplerPlan
from pipeplan.planning.stated.pace import (
    MOST_PASSES,
    TELLING,
    PlanSimulation,
    SimulatedPlan,
    least_possible_s,
    simulated,
)
from pipeplan.problem.problem import Problem
from pipeplan.util.deadline import Deadline

DEEPER = {1: "one more in flight", 2: "two more in flight", 4: "four more in flight"}
"""More minibatches in flight that are tried where the simulation is slower than the formulas, with names of the plans;
where one more changes nothing, no more are tried."""
NEAR = 0.05
"""Relative. Plans whose predicted pace is this much longer than the best one are simulated too."""
EQUAL = 1e-9
"""Relative. Predicted paces that differ by less are equal."""
ALIKE = 0.01
"""Relative. Simulated paces that differ by less are equal."""
FLUSH_SLACK = 0.25
"""Relative. The formulas of a flush charge all-reduces whose buckets leave before it ends: plans of one stage are up to
a fifth faster."""
MOST_RIVALS = 8
OWN_PLAN = "the solvers' plan"


@dataclass(frozen=True)
class Rival:
    """A plan that may be as fast as the solvers' plan, before its simulation."""

    name: str
    """A few words that say what the plan is."""
    plan: Plan
    deeper: int = 0
    """`SimulatedPlan.deeper`."""


def choose_by_simulation(
    problem: Problem,
    plan: Plan,
    score: Evaluation,
    others: Iterable[Rival],
    simpler: SimplerPlan | None,
    deadline: Deadline,
) -> tuple[Plan, Evaluation, PlanSimulation]:
    """The plan, or one with the same predicted pace that is faster in the simulation, or that has fewer workers.

    A `simpler` plan is taken instead, unless the simulation finds it slower than its share allows, and in place of
    either a plan that is slower by the formulas, if its stated pace is shorter by `TELLING` and its gradients are not
    too old.

    `others` are plans that may be nearly as fast. The same plan with one worker fewer at a stage, and with more
    minibatches in flight at each stage, is tried as well. Returns the plan with its score and its simulation.
    """
    own = simulated(OWN_PLAN, plan, score, problem, deadline)
    if own.simulated_s is None:
        taken = (plan, score) if simpler is None else (simpler.plan, simpler.score)
        return *taken, PlanSimulation(note=own.note)
    found = _rivals_simulated(problem, own, others, simpler, deadline)
    known = [(one, one.simulated_s) for one in found if one.simulated_s is not None]
    tied = [(one, pace) for one, pace in known if one.predicted_s <= own.predicted_s * (1 + EQUAL)]
    least = min(pace for _, pace in tied)
    best = _of_fewest_workers(tied, least)
    best = _with_reserve(best, found)
    if simpler is not None:
        best = _unless_slower(found[1], best, simpler.within)
    best = _or_faster_as_stated(best, found)
    slower = tuple(one for one, _ in known if one is not best)
    return best.plan, best.score, PlanSimulation.of(best, slower, _shallower_s(best, found))


def _of_fewest_workers(tied: Sequence[tuple[SimulatedPlan, float]], least_s: float) -> SimulatedPlan:
    """The fastest of some plans with their simulated paces, or one that uses fewer workers and is hardly slower."""
    best = min((one for one, pace in tied if pace <= least_s * (1 + ALIKE)), key=lambda one: one.plan.busy)
    fewer = [one for one, pace in tied if one.plan.busy < best.plan.busy and pace <= least_s * (1 + TELLING)]
    return min(fewer, key=lambda one: (one.plan.busy, one.stated_s), default=best)


def stated_plan_s(problem: Problem, plan: Plan, score: Evaluation, deadline: Deadline) -> float:
    """The pace that an answer with this plan states, in seconds per minibatch: at the depths that it would have."""
    _, answered, told = choose_by_simulation(problem, plan, score, [], None, deadline)
    return told.pace_s(answered.pace_s)


def _rivals_simulated(
    problem: Problem,
    own: SimulatedPlan,
    others: Iterable[Rival],
    simpler: SimplerPlan | None,
    deadline: Deadline,
) -> list[SimulatedPlan]:
    """The plan, the simpler one if there is one, and rivals, as far as a limit on all their passes allows."""
    rivals = [] if simpler is None else [(Rival("the simplest plan", simpler.plan), simpler.score)]
    known_plans = {own.plan, *(rival.plan for rival, _ in rivals)}
    near = [*_near(problem, own, others), *_near(problem, own, _neighbours(problem, own))]
    # The plan that is taken is stated to be at most so slow: simulated alike twice, and confirmed within as much.
    slowest_s = max(own.stated_s, own.predicted_s) * (1 + ALIKE) ** 3 * (1 + (simpler.within if simpler else 0.0))
    for rival, score in near:
        tied = score.pace_s <= own.predicted_s * (1 + EQUAL)
        may_win = tied or least_possible_s(rival.plan, score, problem) * (1 + TELLING) < slowest_s
        if may_win and rival.plan not in known_plans:
            rivals.append((rival, score))
    found, passes = [own], MOST_PASSES
    for rival, score in rivals[:MOST_RIVALS]:
        if rival.deeper and _depth_is_enough(found):
            passes -= own.passes  # so that the same rivals follow
            continue
        one = simulated(rival.name, rival.plan, score, problem, deadline, passes)
        found.append(replace(one, deeper=rival.deeper))
        passes -= found[-1].passes
    return found


def _depth_is_enough(found: Sequence[SimulatedPlan]) -> bool:
    """Whether one more minibatch in flight was tried, and changed nothing."""
    deeper = [one.simulated_s for one in found if one.deeper]
    return bool(deeper) and deeper[-1] is not None and deeper[-1] == found[0].simulated_s


def _or_faster_as_stated(best: SimulatedPlan, found: Sequence[SimulatedPlan]) -> SimulatedPlan:
    """The best plan, or a rival whose stated pace is shorter by more than `TELLING`, though not by the formulas.

    Its gradients may be no older than most models learn from, unless the best plan's are.
    """
    stated_s = PlanSimulation.of(best, (), _shallower_s(best, found)).pace_s(best.predicted_s)
    oldest = max(MOST_STALE, _oldest(best.plan))
    rivals = [
        one
        for one in found
        if one.simulated_s is not None
        and one.stated_s * (1 + TELLING) < stated_s
        and one.predicted_s > best.predicted_s * (1 + EQUAL)
        and _oldest(one.plan) <= oldest
    ]
    return min(rivals, key=lambda one: one.stated_s, default=best)


def _oldest(plan: Plan) -> int:
    """The age of the oldest gradients of a plan, in updates."""
    return 0 if plan.inference else max(Updates.of(plan, 1).stale_by)


def _depths_tried(found: Sequence[SimulatedPlan]) -> list[SimulatedPlan]:
    """The first plan that was simulated, and it with more minibatches in flight, from the shallowest to the deepest."""
    return sorted((one for one in found if one is found[0] or one.deeper), key=lambda one: one.deeper)


def _with_reserve(best: SimulatedPlan, found: Sequence[SimulatedPlan]) -> SimulatedPlan:
    """A plan that was made deeper, or the next deeper one if it is simulated alike: replays need more than suffices."""
    tried = _depths_tried(found)
    place = next((number for number, one in enumerate(tried) if one is best), 0)
    if not place or place + 1 == len(tried):
        return best
    deeper = tried[place + 1]
    alike = deeper.simulated_s is not None and deeper.simulated_s <= (best.simulated_s or 0.0) * (1 + ALIKE)
    return deeper if alike and deeper.predicted_s <= best.predicted_s * (1 + EQUAL) else best


def _shallower_s(best: SimulatedPlan, found: Sequence[SimulatedPlan]) -> float | None:
    """The simulated pace of the next shallower plan of those that were tried; None where the plan was not deepened."""
    tried = _depths_tried(found)
    place = next((number for number, one in enumerate(tried) if one is best), 0)
    return tried[place - 1].simulated_s if place else None


def _unless_slower(simplest: SimulatedPlan, best: SimulatedPlan, within: float) -> SimulatedPlan:
    """The simplest plan, or the best one where the simulation finds the simplest one slower by more than a share."""
    if simplest.simulated_s is None or best.simulated_s is None:
        return simplest
    return best if simplest.simulated_s > best.simulated_s * (1 + within) else simplest


def _near(problem: Problem, own: SimulatedPlan, others: Iterable[Rival]) -> list[tuple[Rival, Evaluation]]:
    """The different plans of `others` that satisfy the options and may be as fast in a simulation, best first.

    Their predicted pace is within `NEAR` of the plan's, or no longer than the plan's simulated pace; with a flush
    `FLUSH_SLACK` is added, by which a simulation may be faster.
    """
    seen, found = {own.plan}, []
    limit = max(own.predicted_s * (1 + NEAR), own.simulated_s or 0.0)
    limit *= 1 + FLUSH_SLACK * (own.plan.schedule in FLUSHING)
    for rival in others:
        if rival.plan in seen or not satisfies_options(rival.plan, problem):
            continue
        seen.add(rival.plan)
        score = evaluate(rival.plan, problem)
        if score.pace_s <= limit and (score.fits or not problem.options.memory):
            found.append((rival, score))
    return sorted(found, key=lambda entry: entry[1].pace_s)


def _neighbours(problem: Problem, own: SimulatedPlan) -> Iterator[Rival]:
    """The plan with more minibatches in flight, if its simulation is slow, and with one worker fewer at a stage."""
    plan, stages = own.plan, own.plan.stages
    if (own.ratio or 0.0) > 1 + TELLING:  # gradients become older with it, which a gain of less is not worth
        yield from _deeper(plan)
    if plan.copies > 1 or problem.options.grid:
        return
    for index, stage in enumerate(stages):
        if stage.replicas > 1:
            fewer = replace(stage, workers=stage.workers[:-1])
            smaller = replace(plan, stages=(*stages[:index], fewer, *stages[index + 1 :]))
            yield Rival("a worker fewer", depths.assign_depths(smaller, problem, own.predicted_s))


def _deeper(plan: Plan) -> Iterator[Rival]:
    """The plan with more minibatches in flight at every stage but the last.

    Gradients that most models learn from do not become older than that.
    """
    stages = plan.stages
    if len(stages) == 1 or plan.inference or plan.virtual or plan.schedule == GPIPE:
        return
    oldest = _oldest(plan)
    for more, name in DEEPER.items():
        deeper = [replace(stage, depth=stage.depth + more) for stage in stages[:-1]]
        found = _with_versions(replace(plan, stages=(*deeper, stages[-1])))
        if oldest > MOST_STALE or _oldest(found) <= MOST_STALE:
            yield Rival(name, found, more)


def _with_versions(plan: Plan) -> Plan:
    stages = [replace(stage, versions=plan.versions(index)) for index, stage in enumerate(plan.stages)]
    return replace(plan, stages=tuple(stages))
