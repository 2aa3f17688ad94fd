"""States the pace of a plan: simulates it where that is affordable, and compares the result with the formulas.

A plan is simulated for the same number of minibatches wherever its pace is asked for, and remembered, so that a choice,
a comparison and the answer name the same number for it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from pipeplan.cost.evaluate import Evaluation
from pipeplan.errors import InputError
from pipeplan.plan.plan import Plan
from pipeplan.plan.schedules import FLUSHING
from pipeplan.problem.problem import Problem
from pipeplan.simulation.from_plan import scenario_of_plan
from pipeplan.simulation.metrics import enough_minibatches, round_length
from pipeplan.simulation.scenario import Scenario
from pipeplan.simulation.simulate import simulate
from pipeplan.util.deadline import Deadline, OutOfTime

CONFIRMED = 0.01
"""Relative. A simulation that differs from the formulas by less confirms them; otherwise it is the pace that an
answer states."""
TELLING = 0.03
"""Relative. Differences between two simulations that decide; deeper plans are tried where a simulation is so much
slower than the formulas."""
USUAL_PASSES = 1_000
"""Passes of minibatches through stages, forward and backward, up to which a plan is simulated for as many minibatches
as `pipeplan simulate` does. With shared cards a thousand of them take 0.1 to 0.6 seconds."""
MOST_PASSES = 4_000
"""The most passes of one plan; a plan that needs more for a steady state is not simulated."""
LEAST_TURNS = 5
"""The least length of a simulation, as a multiple of the minibatches in flight; a shorter one has no steady state."""
LEAST_FLUSHES = 3
"""The least number of updates before and after the steady part of a simulation with a flush: each begins drained."""
REMEMBERED = 64
"""The most plans whose simulations are remembered."""


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
    deeper: int = 0
    """Minibatches that every stage but the last has more in flight than in the solvers' plan, which was made deeper."""

    @property
    def predicted_s(self) -> float:
        """The pace by the formulas, in seconds per minibatch."""
        return self.score.pace_s

    @property
    def ratio(self) -> float | None:
        """Simulated pace over that of the formulas: above 1 the simulation is slower."""
        return None if self.simulated_s is None or self.predicted_s <= 0 else self.simulated_s / self.predicted_s

    @property
    def stated_s(self) -> float:
        """The pace that is stated for the plan, in seconds per minibatch."""
        return PlanSimulation.of(self).pace_s(self.predicted_s)

    @property
    def passes(self) -> int:
        """Passes that its simulation took."""
        return passes_of(self.plan, self.minibatches)


@dataclass(frozen=True)
class PlanSimulation:
    """The simulated pace of a plan, and of plans that are predicted to be nearly as fast."""

    simulated_s: float | None = None
    """Seconds per minibatch of the plan; None where it was not simulated."""
    ratio: float | None = None
    """Simulated pace over that of the formulas."""
    minibatches: int = 0
    """Minibatches that were simulated."""
    note: str = ""
    """Why the plan was not simulated; empty if it was, or if nobody asked for it."""
    rivals: tuple[SimulatedPlan, ...] = ()
    """Other plans that were simulated because they may be as fast."""
    shallower_s: float | None = None
    """The simulated pace of the next shallower plan that was tried, where the plan was made deeper; else None."""
    least_s: float = 0.0
    """The shortest pace that is stated, in seconds per minibatch (`least_stated_s`)."""

    @classmethod
    def of(
        cls, one: SimulatedPlan, rivals: Sequence[SimulatedPlan] = (), shallower_s: float | None = None
    ) -> PlanSimulation:
        """The record that an answer keeps of a simulated plan and its rivals."""
        least_s = 0.0 if one.simulated_s is None else least_stated_s(one.plan, one.score)
        return cls(one.simulated_s, one.ratio, one.minibatches, one.note, tuple(rivals), shallower_s, least_s)

    @property
    def stated_s(self) -> float | None:
        """The pace by the simulation, in seconds per minibatch; None where the plan was not simulated.

        Replays gain less from depth than simulations (docs/replay.md), so that of the next shallower plan counts.
        """
        return None if self.simulated_s is None else max(self.simulated_s, self.shallower_s or 0.0, self.least_s)

    @property
    def stated_ratio(self) -> float | None:
        """The pace by the simulation over that of the formulas; None where it is not known."""
        if self.ratio is None or not self.simulated_s or self.stated_s is None:
            return None
        return self.ratio * self.stated_s / self.simulated_s

    @property
    def differs(self) -> bool:
        """Whether the pace by the simulation differs from the formulas by more than a simulation confirms."""
        return self.stated_ratio is not None and abs(self.stated_ratio - 1.0) > CONFIRMED

    def pace_s(self, predicted_s: float) -> float:
        """The pace that is stated for a plan with this one by the formulas, in seconds per minibatch."""
        return predicted_s if self.stated_s is None or not self.differs else self.stated_s

    @property
    def faster(self) -> tuple[SimulatedPlan, ...]:
        """The rivals whose simulation is faster than the plan's by more than a few percent, fastest first."""
        own = self.stated_s
        if own is None:
            return ()
        found = [rival for rival in self.rivals if (rival.simulated_s or own) * (1 + TELLING) < own]
        return tuple(sorted(found, key=lambda rival: rival.simulated_s or 0.0))


NOT_SIMULATED, STOPPED = PlanSimulation(), PlanSimulation(note="Ctrl-C came before")


def least_stated_s(plan: Plan, score: Evaluation) -> float:
    """The pace of the formulas for one pipeline without a flush, and 0 for other plans.

    Messages of several replicas at once may make a simulation faster than the formulas, but no replay of such a plan
    was. Formulas of copies and of a flush charge more than the executor needs.
    """
    return score.pace_s if plan.copies == 1 and plan.schedule not in FLUSHING else 0.0


def least_possible_s(plan: Plan, score: Evaluation, problem: Problem) -> float:
    """A pace that is not undercut by what a simulation of a plan would make its answer state, in seconds per minibatch.

    Without a flush it is that of the formulas. With one, a replica of a stage computes its part of the minibatches of
    an update, after the first of them went forward through the stages before and before the last one goes back there.
    """
    if plan.copies > 1 or plan.virtual or plan.schedule not in FLUSHING:
        return least_stated_s(plan, score)
    scenario = scenario_of_plan(plan, problem, score)
    if scenario.accumulate is None or any(load.weights_s for load in scenario.stages):
        return 0.0
    before_s = least_s = 0.0
    for load in scenario.stages:
        work_s = load.forward_s + load.backward_s
        least_s = max(least_s, before_s + math.ceil(scenario.accumulate / load.replicas) * work_s)
        before_s += work_s
    return least_s / scenario.accumulate


def simulated(
    name: str, plan: Plan, score: Evaluation, problem: Problem, deadline: Deadline, passes: int = MOST_PASSES
) -> SimulatedPlan:
    """A plan with its simulated pace, or with the reason why it has none, such as that it takes more than `passes`."""
    known = _REMEMBERED.get((problem, plan))
    if known is None:
        scenario = scenario_of_plan(plan, problem, score)
        count = affordable(scenario, plan, passes)
        if count is None:
            return SimulatedPlan(name, plan, score, None, "a simulation of a plan of this size takes long")
        try:
            report = simulate(scenario, count, deadline).report
        except OutOfTime:
            return SimulatedPlan(name, plan, score, None, "there was no time left")
        except InputError as error:
            return SimulatedPlan(name, plan, score, None, str(error))
        known = (None if report.steady is None else report.steady.pace_s), count
        _remember((problem, plan), known)
    pace_s, count = known
    note = "" if pace_s is not None else "too few minibatches for a steady state"
    return SimulatedPlan(name, plan, score, pace_s, note, count)


_Key = tuple[Problem, Plan]
_REMEMBERED: OrderedDict[_Key, tuple[float | None, int]] = OrderedDict()
"""The simulated pace of the plans that were simulated last, and the number of their minibatches."""


def _remember(key: _Key, known: tuple[float | None, int]) -> None:
    _REMEMBERED[key] = known
    while len(_REMEMBERED) > REMEMBERED:
        _REMEMBERED.popitem(last=False)


def affordable(scenario: Scenario, plan: Plan, most: int) -> int | None:
    """The minibatches to simulate: as many as `pipeplan simulate` does, or as the usual passes allow.

    None if those of a steady state take more than `most` passes. The number depends on the plan alone.
    """
    count, length, group = enough_minibatches(scenario), round_length(scenario), scenario.accumulate
    if scenario.drains and group:
        # A whole round is left behind the updates at the start, of which there are fewer where half of all is less.
        until_last = max((LEAST_FLUSHES - 1) * group + length, min(LEAST_FLUSHES * group + length, 2 * length))
        least = until_last + group
    else:
        least = LEAST_TURNS * scenario.in_flight + 2 * length
    least = min(count, least)
    if passes_of(plan, least) > most:
        return None
    return min(count, max(least, USUAL_PASSES // passes_of(plan, 1)))


def passes_of(plan: Plan, minibatches: int) -> int:
    """The passes that so many minibatches make through the stages of a plan."""
    return (1 if plan.inference else 2) * len(plan.stages) * minibatches
