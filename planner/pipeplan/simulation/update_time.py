"""The time from one update to the next, by a short simulation of a schedule that drains before every update."""

from __future__ import annotations

from pipeplan.simulation.engine import simulate_schedule
from pipeplan.simulation.metrics import exit_times
from pipeplan.simulation.scenario import Scenario
from pipeplan.util.deadline import Deadline

UPDATES = 2


def simulated_update_s(scenario: Scenario, deadline: Deadline) -> float:
    """Seconds from the end of the first update's backward passes to those of the second. Raises `OutOfTime`."""
    assert scenario.accumulate is not None
    left = exit_times(scenario, simulate_schedule(scenario, UPDATES * scenario.accumulate, deadline))
    return left[-1] - left[scenario.accumulate - 1]
