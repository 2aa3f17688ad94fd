"""A replay in simulated time, with what was measured in it."""

from __future__ import annotations

from dataclasses import dataclass

from pipeplan.simulation.engine import Replayed, replay
from pipeplan.simulation.report import Report, enough_minibatches, measure
from pipeplan.simulation.scenario import Scenario

MOST_MINIBATCHES = 100_000


@dataclass(frozen=True)
class Simulated:
    """What was replayed, every pass and message of it, and its summary."""

    scenario: Scenario
    replayed: Replayed
    report: Report
    """Pace, stages and links in the steady state; `to_json()` for tools."""


def simulate(scenario: Scenario, minibatches: int | None = None) -> Simulated:
    """Replay so many minibatches; by default enough for a steady state."""
    # With very many in flight that is too few for a steady state, and the report says so.
    count = minibatches or min(enough_minibatches(scenario), MOST_MINIBATCHES)
    replayed = replay(scenario, count)
    return Simulated(scenario, replayed, measure(scenario, replayed, count))
