"""Runs the simulation of a plan, and measures it."""

from __future__ import annotations

from dataclasses import dataclass

from pipeplan.simulation.engine import simulate_schedule
from pipeplan.simulation.events import SimulatedEvents
from pipeplan.simulation.metrics import SimulationReport, enough_minibatches, summarise_simulation
from pipeplan.simulation.scenario import Scenario
from pipeplan.util.deadline import NO_DEADLINE, Deadline

MOST_MINIBATCHES = 100_000
"""Largest number of minibatches that are simulated unless the user asks for more."""


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
