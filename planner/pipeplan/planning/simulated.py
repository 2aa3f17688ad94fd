"""Simulates the plan of a solve and its runners-up, and chooses by the simulation among plans that are equally fast.

The cost model adds up averages; a simulation of the executor's schedule (`pipeplan.simulation`) also has the waits of
single messages. A simulation proves nothing about other plans, so it decides only where the predicted paces are equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from pipeplan.cost import depths
from pipeplan.cost.evaluate import Evaluation, evaluate
from pipeplan.errors import InputError
from pipeplan.plan.plan import Plan
from pipeplan.plan.schedules import FLUSHING, GPIPE
from pipeplan.plan.updates import MOST_STALE, Updates
from pipeplan.planning.baselines import satisfies_options
from pipeplan.planning.simplest import SimplerPlan
from pipeplan.problem.problem import Problem
from pipeplan.simulation.from_plan import scenario_of_plan
from pipeplan.simulation.metrics import enough_minibatches, round_length
from pipeplan.simulation.scenario import Scenario
from pipeplan.simulation.simulate import simulate
from pipeplan.util.deadline import Deadline, OutOfTime

TELLING = 0.03
"""Relative. Differences between two simulations that are told; deeper plans are tried where a simulation is so much
slower than the formulas."""
CONFIRMED = 0.01
"""Relative. A simulation that differs from the formulas by less confirms them; otherwise it is the pace that an
answer states."""
DEEPER = (1, 2, 4)
"""More minibatches in flight that are tried where the simulation is slower than the formulas."""
NUMBERS = {1: "one", 2: "two", 4: "four"}
NEAR = 0.05
"""Relative. Plans whose predicted pace is this much longer than the best one are simulated too."""
EQUAL = 1e-9
"""Relative. Predicted paces that differ by less are equal."""
ALIKE = 0.01
"""Relative. Simulated paces that differ by less are equal."""
MOST_RIVALS = 6
MOST_PASSES = 4_000
"""Passes of minibatches through stages, forward and backward, that are simulated for the plan, and as many for all of
its rivals. With shared cards a thousand of them take 0.1 to 0.6 seconds."""
LEAST_TURNS = 5
"""The least length of a simulation, as a multiple of the minibatches in flight; a shorter one has no steady state."""


@dataclass(frozen=True)
class SimulatedPlan:
    """A plan with its predicted and its simulated pace, in seconds per minibatch."""

    name: str
    """A few words that say what the plan is."""
    plan: Plan
    score: Evaluation
    simulated_s: float | None
    """None where it was not simulated."""
    note: str = ""
    """Why it was not."""
    minibatches: int = 0
    """Minibatches that were simulated."""

    @property
    def predicted_s(self) -> float:
        """The predicted pace, in seconds per minibatch."""
        return self.score.pace_s

    @property
    def ratio(self) -> float | None:
        """Simulated pace over predicted pace: above 1 the simulation is slower."""
        return None if self.simulated_s is None or self.predicted_s <= 0 else self.simulated_s / self.predicted_s

    @property
    def differs(self) -> bool:
        """Whether the simulation differs from the prediction by more than it confirms."""
        return self.ratio is not None and abs(self.ratio - 1.0) > CONFIRMED


@dataclass(frozen=True)
class PlanSimulation:
    """The simulated pace of a plan, and of plans that are predicted to be nearly as fast."""

    simulated_s: float | None = None
    """Seconds per minibatch of the plan; None where it was not simulated."""
    ratio: float | None = None
    """Simulated pace over predicted pace."""
    minibatches: int = 0
    """Minibatches that were simulated."""
    note: str = ""
    """Why the plan was not simulated; empty if it was, or if nobody asked for it."""
    rivals: tuple[SimulatedPlan, ...] = ()
    """Other plans that were simulated because they may be as fast."""
    shallower_s: float | None = None
    """The simulated pace of the next shallower plan that was tried, where the plan was made deeper; else None."""
    least_s: float = 0.0
    """The shortest pace that is stated, in seconds per minibatch (`_least_stated_s`)."""

    @property
    def stated_s(self) -> float | None:
        """The pace that an answer states, in seconds per minibatch; None where the plan was not simulated.

        Replays gain less from depth than simulations (docs/replay.md), so that of the next shallower plan counts.
        """
        return None if self.simulated_s is None else max(self.simulated_s, self.shallower_s or 0.0, self.least_s)

    @property
    def stated_ratio(self) -> float | None:
        """The stated over the predicted pace; None where it is not known."""
        if self.ratio is None or not self.simulated_s or self.stated_s is None:
            return None
        return self.ratio * self.stated_s / self.simulated_s

    @property
    def differs(self) -> bool:
        """Whether the stated pace differs from the prediction by more than a simulation confirms."""
        return self.stated_ratio is not None and abs(self.stated_ratio - 1.0) > CONFIRMED

    @property
    def faster(self) -> tuple[SimulatedPlan, ...]:
        """The rivals whose simulation is faster than the plan's by more than a few percent, fastest first."""
        own = self.simulated_s
        if own is None:
            return ()
        found = [rival for rival in self.rivals if (rival.simulated_s or own) * (1 + TELLING) < own]
        return tuple(sorted(found, key=lambda rival: rival.simulated_s or 0.0))


NOT_SIMULATED, STOPPED = PlanSimulation(), PlanSimulation(note="Ctrl-C came before")


def choose_by_simulation(
    problem: Problem,
    plan: Plan,
    score: Evaluation,
    others: Iterable[tuple[str, Plan]],
    simpler: SimplerPlan | None,
    deadline: Deadline,
) -> tuple[Plan, Evaluation, PlanSimulation]:
    """The plan, or one with the same predicted pace that is faster in the simulation, or that has fewer workers.

    A `simpler` plan is taken instead, unless the simulation finds it slower than its share allows.

    `others` are plans by name that may be nearly as fast. The same plan with one worker fewer at a stage, and with more
    minibatches in flight at each stage, is tried as well. Returns the plan with its score and its simulation.
    """
    own = _simulated("the solvers' plan", plan, score, problem, MOST_PASSES, deadline)
    if own.simulated_s is None:
        taken = (plan, score) if simpler is None else (simpler.plan, simpler.score)
        return *taken, PlanSimulation(note=own.note)
    rivals = [] if simpler is None else [("the simplest plan", simpler.plan, simpler.score)]
    known_plans = {own.plan, *(rival for _, rival, _ in rivals)}
    near = [*_near(problem, own, others), *_near(problem, own, _neighbours(problem, own))]
    rivals += [entry for entry in near if entry[1] not in known_plans]
    found, passes = [own], MOST_PASSES
    for name, rival, rival_score in rivals[:MOST_RIVALS]:
        found.append(_simulated(name, rival, rival_score, problem, passes, deadline, briefly=True))
        passes -= _passes(rival, found[-1].minibatches)
    known = [(one, one.simulated_s) for one in found if one.simulated_s is not None]
    tied = [(one, pace) for one, pace in known if one.predicted_s <= own.predicted_s * (1 + EQUAL)]
    least = min(pace for _, pace in tied)
    best = min((one for one, pace in tied if pace <= least * (1 + ALIKE)), key=lambda one: one.plan.busy)
    best = _with_reserve(best, found)
    if simpler is not None:
        best = _unless_slower(found[1], best, simpler.within)
    slower = tuple(one for one, _ in known if one is not best)
    shallower_s, least_s = _shallower_s(best, found), _least_stated_s(best)
    told = PlanSimulation(best.simulated_s, best.ratio, best.minibatches, "", slower, shallower_s, least_s)
    return best.plan, best.score, told


def _least_stated_s(best: SimulatedPlan) -> float:
    """The pace of the formulas for one pipeline without a flush, and 0 for other plans.

    Messages of several replicas at once may make a simulation faster than the formulas, but no replay of such a plan
    was. Formulas of copies and of a flush charge more than the executor needs.
    """
    one = best.plan.copies == 1 and best.plan.schedule not in FLUSHING
    return best.predicted_s if one else 0.0


def _depths_tried(found: Sequence[SimulatedPlan]) -> list[SimulatedPlan]:
    """The first plan that was simulated, and it with more minibatches in flight, from the shallowest to the deepest."""
    by_name = {one.name: one for one in found}
    return [found[0], *(by_name[name] for name in map(_name_of_deeper, DEEPER) if name in by_name)]


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


def _near(
    problem: Problem, own: SimulatedPlan, others: Iterable[tuple[str, Plan]]
) -> list[tuple[str, Plan, Evaluation]]:
    """The different plans of `others` that satisfy the options and may be as fast in a simulation, best first.

    Their predicted pace is within `NEAR` of the plan's, or no longer than the plan's simulated pace.
    """
    seen, found = {own.plan}, []
    limit = max(own.predicted_s * (1 + NEAR), own.simulated_s or 0.0)
    for name, plan in others:
        if plan in seen or not satisfies_options(plan, problem):
            continue
        seen.add(plan)
        score = evaluate(plan, problem)
        if score.pace_s <= limit and (score.fits or not problem.options.memory):
            found.append((name, plan, score))
    return sorted(found, key=lambda entry: entry[2].pace_s)


def _neighbours(problem: Problem, own: SimulatedPlan) -> Iterator[tuple[str, Plan]]:
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
            yield "a worker fewer", depths.assign_depths(smaller, problem, own.predicted_s)


def _deeper(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """The plan with more minibatches in flight at every stage but the last.

    Gradients that most models learn from do not become older than that.
    """
    stages = plan.stages
    if len(stages) == 1 or plan.inference or plan.virtual or plan.schedule == GPIPE:
        return
    oldest = max(Updates.of(plan, 1).stale_by)
    for more in DEEPER:
        deeper = [replace(stage, depth=stage.depth + more) for stage in stages[:-1]]
        found = _with_versions(replace(plan, stages=(*deeper, stages[-1])))
        if oldest > MOST_STALE or max(Updates.of(found, 1).stale_by) <= MOST_STALE:
            yield _name_of_deeper(more), found


def _name_of_deeper(more: int) -> str:
    return f"{NUMBERS[more]} more in flight"


def _with_versions(plan: Plan) -> Plan:
    stages = [replace(stage, versions=plan.versions(index)) for index, stage in enumerate(plan.stages)]
    return replace(plan, stages=tuple(stages))


def _simulated(
    name: str,
    plan: Plan,
    score: Evaluation,
    problem: Problem,
    passes: int,
    deadline: Deadline,
    *,
    briefly: bool = False,
) -> SimulatedPlan:
    """A plan with its simulated pace, or with the reason why it has none; `briefly` simulates no more than it takes."""
    scenario = scenario_of_plan(plan, problem, score)
    count = _affordable(scenario, plan, 0 if briefly else passes, passes)
    if count is None:
        return SimulatedPlan(name, plan, score, None, "a simulation of a plan of this size takes long")
    try:
        report = simulate(scenario, count, deadline).report
    except OutOfTime:
        return SimulatedPlan(name, plan, score, None, "there was no time left")
    except InputError as error:
        return SimulatedPlan(name, plan, score, None, str(error))
    pace = None if report.steady is None else report.steady.pace_s
    note = "" if pace is not None else "too few minibatches for a steady state"
    return SimulatedPlan(name, plan, score, pace, note, count)


def _affordable(scenario: Scenario, plan: Plan, usual: int, most: int) -> int | None:
    """The minibatches to simulate: as many as `pipeplan simulate` does if that takes at most `usual` passes, or fewer.

    None if even these take more than `most` passes.
    """
    count = enough_minibatches(scenario)
    if _passes(plan, count) <= usual:
        return count
    least = min(count, LEAST_TURNS * scenario.in_flight + 2 * round_length(scenario))
    return least if _passes(plan, least) <= most else None


def _passes(plan: Plan, minibatches: int) -> int:
    return (1 if plan.inference else 2) * len(plan.stages) * minibatches
