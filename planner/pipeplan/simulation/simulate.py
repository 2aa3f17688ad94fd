"""Runs the simulation of a plan, and measures it: in the steady state, or from one update to the next."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pipeplan.simulation.engine import simulate_schedule
from pipeplan.simulation.events import SimulatedEvents
from pipeplan.simulation.metrics import SimulationReport, enough_minibatches, summarise_simulation
from pipeplan.simulation.scenario import Scenario
from pipeplan.util.deadline import NO_DEADLINE, Deadline
from pipeplan_launch.plan.schedule import ActionKind

MOST_MINIBATCHES = 100_000
"""Largest number of minibatches that are simulated unless the user asks for more."""
UPDATES = 2
"""Updates that the short simulation of a schedule with a flush covers."""
_LAST = (ActionKind.BACKWARD, ActionKind.WEIGHTS)


@dataclass(frozen=True)
class Simulated:
    """A simulated plan: its scenario, all events, and a summary."""

    scenario: Scenario
    """The plan with its times."""
    replayed: SimulatedEvents
    """Every pass and every message."""
    report: SimulationReport
    """Pace, stages and links in the steady state, with `to_json()`."""


def simulate(scenario: Scenario, minibatches: int | None = None, deadline: Deadline = NO_DEADLINE) -> Simulated:
    """Simulate `minibatches` minibatches, by default enough for a steady state.

    Raises an `InputError` where the plan's schedule comes to a deadlock, and `OutOfTime` at the deadline.
    """
    # Where very many minibatches are in flight, this limit leaves no steady state, and the report says so.
    count = minibatches or min(enough_minibatches(scenario), MOST_MINIBATCHES)
    replayed = simulate_schedule(scenario, count, deadline)
    return Simulated(scenario, replayed, summarise_simulation(scenario, replayed, count))


def simulated_update_s(scenario: Scenario, deadline: Deadline = NO_DEADLINE) -> float:
    """Seconds from the end of a stage's passes of the first update to those of the second. Raises `OutOfTime`.

    It is the longest time of any stage. In the steady state all stages take the same time; at the beginning a stage
    that waits for its all-reduce may still be caught up with by others.
    """
    assert scenario.accumulate is not None
    replayed = simulate_schedule(scenario, UPDATES * scenario.accumulate, deadline)
    ends = [[0.0] * UPDATES for _ in scenario.stages]
    for done in replayed.passes:
        if done.action.kind in _LAST:
            update = done.action.index // scenario.accumulate
            ends[done.stage][update] = max(ends[done.stage][update], done.end_s)
    return max(after - before for before, after in ends)


def with_update(scenario: Scenario, minibatches: int) -> Scenario:
    """The scenario of a plan with a flush, with another number of minibatches in each update."""
    stages = tuple(replace(stage, per_update=minibatches / stage.replicas) for stage in scenario.stages)
    return replace(scenario, accumulate=minibatches, stages=stages)
