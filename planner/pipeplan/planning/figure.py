"""The figure of a plan: the simulated time of its schedule, in seconds per microbatch.

Plans are compared, chosen and printed by this figure. The solvers' formulas are a lower bound of the figure, and
replace it if a simulation takes too long. A plan that divides the weights has the time of its recurrence instead
(`cost/sharded_data_parallel.py`). The number of simulated microbatches depends on the plan alone, and the result is
cached. So a plan has the same figure wherever it appears.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from pipeplan.cost.evaluate import Evaluation
from pipeplan.errors import InputError
from pipeplan.plan.plan import Plan
from pipeplan.problem.problem import Problem
from pipeplan.simulation.from_plan import scenario_of_plan
from pipeplan.simulation.metrics import enough_minibatches, round_length
from pipeplan.simulation.scenario import Scenario
from pipeplan.simulation.simulate import UPDATES, simulated_update_s, steady_step_s, with_update
from pipeplan.util.deadline import Deadline, OutOfTime

TOLERANCE = 0.03
"""Relative tolerance. A plan that is simpler or has newer gradients is taken if it is slower by at most this share."""


USUAL_PASSES = 1_000
"""Number of passes up to which a simulation is as long as that of `pipeplan simulate`. A pass takes one microbatch
through one stage, forward or backward. With shared cards a thousand passes take 0.1 to 0.6 seconds."""
MOST_PASSES = 4_000
"""Largest number of passes of one simulation of the steady state. A plan that needs more passes is simulated for two
updates."""
MOST_PASSES_OF_UPDATES = 48_000
"""Largest number of passes when two updates are simulated, which takes one to two seconds. A larger plan is not
simulated: its figure comes from the formulas."""
LEAST_TURNS = 5
"""Smallest length of a simulation, as a multiple of the microbatches in flight."""
LEAST_FLUSHES = 3
"""Smallest number of updates before and after the steady part of a simulation with a flush."""
LEAST_UPDATE = 2
"""Smallest length of a shortened update, as a multiple of the microbatches in flight."""
TOO_FEW = "too few microbatches for a steady state"
REMEMBERED = 512
"""Number of simulations in the cache."""


@dataclass(frozen=True)
class Figure:
    """The step time of a plan, simulated and by the formulas."""

    formula_s: float
    """Seconds per microbatch by the formulas: a lower bound."""
    simulated_s: float | None = None
    """Simulated seconds per microbatch; None if the plan was not simulated."""
    minibatches: int = 0
    """Number of microbatches that were simulated."""
    note: str = ""
    """Why the plan was not simulated; empty if it was simulated, or if no simulation was asked for."""

    @property
    def step_s(self) -> float:
        """The step time in seconds per microbatch: the simulated time, but at least the time of the formulas.

        A simulation may be faster than the formulas, but replays of plans without a flush never were
        (docs/evidence/replay.md).
        """
        return self.formula_s if self.simulated_s is None else max(self.simulated_s, self.formula_s)

    @property
    def ratio(self) -> float | None:
        """Simulated time divided by the time of the formulas; None if there was no simulation."""
        return None if self.simulated_s is None or self.formula_s <= 0 else self.simulated_s / self.formula_s


@dataclass(frozen=True)
class FiguredPlan:
    """A plan with its cost and its figure."""

    plan: Plan
    score: Evaluation
    figure: Figure

    @property
    def step_s(self) -> float:
        """Seconds per microbatch, by the figure."""
        return self.figure.step_s


def figured(
    plan: Plan, score: Evaluation, problem: Problem, deadline: Deadline, *, simulates: bool = True
) -> FiguredPlan:
    """A plan with its figure.

    The figure comes from the formulas if `simulates` is False or a simulation takes too long.
    """
    return FiguredPlan(
        plan, score, figure_of(plan, score, problem, deadline) if simulates else Figure(score.step_time_s)
    )


def figure_of(plan: Plan, score: Evaluation, problem: Problem, deadline: Deadline) -> Figure:
    """The figure of a plan with this score. The note of the figure says why the plan was not simulated."""
    if problem.options.sharding.divides_weights:
        return Figure(score.step_time_s, note="a recurrence over the units of the model")
    key = problem, plan
    known = _REMEMBERED.get(key)
    if known is not None:
        return known
    scenario = scenario_of_plan(plan, problem, score)
    count = affordable(scenario, plan)
    lengths = () if count is not None else lengths_of_updates(scenario, plan)
    if count is None and not lengths:
        return Figure(score.step_time_s, note="the plan is too large to simulate")
    try:
        if count is None:
            known = Figure(score.step_time_s, by_updates_s(scenario, lengths, deadline), UPDATES * sum(lengths))
        else:
            step_s = steady_step_s(scenario, count, deadline)
            known = Figure(score.step_time_s, step_s, count, "" if step_s is not None else TOO_FEW)
    except OutOfTime:
        return Figure(score.step_time_s, note="no time was left to simulate it")
    except InputError as error:
        return Figure(score.step_time_s, note=str(error))
    _REMEMBERED[key] = known
    while len(_REMEMBERED) > REMEMBERED:
        _REMEMBERED.popitem(last=False)
    return known


def quick_step_s(plan: Plan, score: Evaluation, problem: Problem, deadline: Deadline) -> float:
    """An estimate of a plan's figure, in seconds per microbatch, from a simulation of two updates.

    The result is the figure itself if it is known or takes no longer to simulate, as for plans without a flush.
    """
    if problem.options.flushes and (problem, plan) not in _REMEMBERED:
        scenario = scenario_of_plan(plan, problem, score)
        if affordable(scenario, plan) is not None:
            try:
                return max(simulated_update_s(scenario, deadline) / (scenario.accumulate or 1), score.step_time_s)
            except (OutOfTime, InputError):
                return score.step_time_s
    return figured(plan, score, problem, deadline).step_s


_REMEMBERED: OrderedDict[tuple[Problem, Plan], Figure] = OrderedDict()


def affordable(scenario: Scenario, plan: Plan) -> int | None:
    """Number of microbatches to simulate: the number of `pipeplan simulate`, limited by `USUAL_PASSES`.

    The result is None if a steady state takes more than `MOST_PASSES` passes. The result depends on the plan alone.
    """
    count, length, group = enough_minibatches(scenario), round_length(scenario), scenario.accumulate
    if scenario.drains and group:
        # The updates at the start are followed by a whole round; there are fewer of them if the round is long.
        until_last = max((LEAST_FLUSHES - 1) * group + length, min(LEAST_FLUSHES * group + length, 2 * length))
        least = until_last + group
    else:
        least = LEAST_TURNS * scenario.in_flight + 2 * length
    least = min(count, least)
    passes = (1 if plan.inference else 2) * len(plan.stages)
    if passes * least > MOST_PASSES:
        return None
    return min(count, max(least, USUAL_PASSES // passes))


def lengths_of_updates(scenario: Scenario, plan: Plan) -> tuple[int, ...]:
    """Lengths, in microbatches, of the updates to simulate in order to estimate an update of a large plan with a flush.

    Once the pipeline is full, the schedule repeats after each round, whose length all replica counts divide. So two
    short updates show the time of every further round, if their lengths and the plan's differ by whole rounds. If the
    two together are not shorter than the plan's update, only the length of the plan's update is returned. The result is
    empty if the simulation needs more than `MOST_PASSES_OF_UPDATES` passes.
    """
    group = scenario.accumulate
    if not (scenario.drains and group):
        return ()
    if scenario.stages[0].shares:
        return (group,) if group <= MOST_PASSES_OF_UPDATES // (2 * UPDATES) else ()
    turn = math.lcm(*(stage.replicas for stage in scenario.stages)) * (len(plan.devices) if plan.virtual else 1)
    least = LEAST_UPDATE * scenario.in_flight
    short = least + (group - least) % turn
    longer = short + turn * math.ceil(scenario.in_flight / turn)
    most = MOST_PASSES_OF_UPDATES // (2 * len(plan.stages) * UPDATES)
    if short + longer < group and not (plan.virtual and group <= most):
        return (short, longer) if short + longer <= most else ()
    return (group,) if group <= most else ()


def by_updates_s(scenario: Scenario, lengths: Sequence[int], deadline: Deadline) -> float:
    """Seconds per microbatch of a plan with a flush, from simulations of updates of these lengths."""
    group, times = scenario.accumulate or 1, [simulated_update_s(with_update(scenario, n), deadline) for n in lengths]
    if len(lengths) == 1:
        return times[0] / group
    # Stages before the slowest stage run ahead until their depth is used up.
    slowest_s = max((stage.forward_s + stage.backward_s) / stage.replicas for stage in scenario.stages)
    further_s = max((times[1] - times[0]) / (lengths[1] - lengths[0]), slowest_s)
    return (times[1] + further_s * (group - lengths[1])) / group
