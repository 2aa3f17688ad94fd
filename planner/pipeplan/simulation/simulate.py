"""Runs the simulation of a plan and measures it, in the steady state or from one update to the next."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pipeplan.simulation.engine import TooSlow, simulate_schedule
from pipeplan.simulation.events import SimulatedEvents
from pipeplan.simulation.metrics import SimulationReport, enough_minibatches, round_length, summarise_simulation
from pipeplan.simulation.scenario import Scenario
from pipeplan.util.deadline import NO_DEADLINE, Deadline
from pipeplan_launch.plan.schedule import ActionKind

MOST_MINIBATCHES = 100_000
"""Largest number of minibatches that are simulated unless the user asks for more."""
UPDATES = 2
"""Number of updates in the short simulation of a schedule with a flush."""
MOST_ROUNDS = 2
"""Largest number of rounds that are simulated to find out whether a schedule with a flush repeats itself."""
SAME = 1e-9
"""Difference below which times are equal, as a share of the whole simulation."""
_LAST = (ActionKind.BACKWARD, ActionKind.WEIGHTS)


@dataclass(frozen=True)
class Simulated:
    """A simulated plan: its scenario, all events, and a summary."""

    scenario: Scenario
    """The plan with its times."""
    replayed: SimulatedEvents
    """Every pass and every message."""
    report: SimulationReport
    """Step time, stages and links in the steady state, with `to_json()`."""


def simulate(scenario: Scenario, minibatches: int | None = None, deadline: Deadline = NO_DEADLINE) -> Simulated:
    """Simulate `minibatches` minibatches, by default enough for a steady state.

    Raises an `InputError` if the plan's schedule comes to a deadlock, and `OutOfTime` at the deadline.
    """
    # If very many minibatches are in flight, the limit leaves no steady state. The report then says so.
    count = minibatches or min(enough_minibatches(scenario), MOST_MINIBATCHES)
    replayed = simulate_schedule(scenario, count, deadline)
    return Simulated(scenario, replayed, summarise_simulation(scenario, replayed, count))


def steady_step_s(
    scenario: Scenario, minibatches: int, deadline: Deadline = NO_DEADLINE, useful_s: float = math.inf
) -> float | None:
    """Seconds per minibatch in the steady part of a simulation of `minibatches` minibatches; None without a steady
    part.

    The result is infinite if a schedule with a flush certainly takes longer than `useful_s`. Raises the same errors as
    `simulate`.
    """
    length, rounds = round_length(scenario), 1
    while _repeats_exactly(scenario) and rounds <= MOST_ROUNDS and rounds * length < minibatches:
        try:
            time_s = _last_round_s(scenario, rounds, deadline, useful_s * length if rounds == 1 else math.inf)
        except TooSlow:
            return math.inf
        if time_s is not None:
            return time_s / length
        rounds += 1
    steady = simulate(scenario, minibatches, deadline).report.steady
    return None if steady is None else steady.step_time_s


def simulated_update_s(scenario: Scenario, deadline: Deadline = NO_DEADLINE) -> float:
    """Seconds from the end of a stage's passes for the first update to the end of its passes for the second update.

    The result is the longest time of any stage. In the steady state all stages take the same time. At the beginning,
    other stages may still catch up with a stage that waits for its all-reduce. Raises `OutOfTime` at the deadline.
    """
    assert scenario.accumulate is not None
    if _repeats_exactly(scenario) and round_length(scenario) == scenario.accumulate:
        time_s = _last_round_s(scenario, 1, deadline)
        if time_s is not None:
            return time_s
    replayed = simulate_schedule(scenario, UPDATES * scenario.accumulate, deadline)
    ends = [[0.0] * UPDATES for _ in scenario.stages]
    for done in replayed.passes:
        if done.action.kind in _LAST:
            update = done.action.index // scenario.accumulate
            ends[done.stage][update] = max(ends[done.stage][update], done.end_s)
    return max(after - before for before, after in ends)


def _repeats_exactly(scenario: Scenario) -> bool:
    """Whether a schedule with a flush runs the same actions in every round. Only their times may differ."""
    length = round_length(scenario)
    return (
        scenario.drains and bool(scenario.accumulate) and all(length % load.replicas == 0 for load in scenario.stages)
    )


def _last_round_s(scenario: Scenario, rounds: int, deadline: Deadline, limit_s: float = math.inf) -> float | None:
    """Duration of round number `rounds`, in seconds, if all further rounds take as long; else None.

    Further rounds take as long if this round ends with the pipeline in the state in which the round began. The first
    stage ends an update last, except that all-reduces of other stages may end later. So the state is the delay with
    which each other worker ends the update.
    """
    length, group = round_length(scenario), scenario.accumulate or 1
    replayed = simulate_schedule(scenario, rounds * length, deadline, limit_s)
    last = rounds * length // group - 1
    (before_s, found), (end_s, left) = (_state(scenario, replayed, update) for update in (last - length // group, last))
    same = all(abs(later_s - found.get(worker, 0.0)) <= SAME * end_s for worker, later_s in left.items())
    return end_s - before_s if same else None


def _state(scenario: Scenario, replayed: SimulatedEvents, update: int) -> tuple[float, dict[tuple[int, int], float]]:
    """(time when the first stage ends an update, delay of each worker after that time), in seconds; all 0 before the
    first update."""
    ends = {
        (done.stage, done.replica): done.end_s
        for done in replayed.actions
        if done.action.index == update and done.action.kind is ActionKind.UPDATE
    }
    # If workers have several stages, the workers of the first stage may end the update with another stage.
    home = scenario.stages[0].workers
    first_s = max((end_s for (stage, _), end_s in ends.items() if scenario.stages[stage].workers == home), default=0.0)
    return first_s, {worker: max(0.0, end_s - first_s) for worker, end_s in ends.items()}


def with_update(scenario: Scenario, minibatches: int) -> Scenario:
    """The scenario of a plan with a flush, with another number of minibatches in each update."""
    stages = tuple(replace(stage, per_update=minibatches / stage.replicas) for stage in scenario.stages)
    return replace(scenario, accumulate=minibatches, stages=stages)
