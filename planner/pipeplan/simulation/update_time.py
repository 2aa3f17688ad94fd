"""The time from one update to the next, by a short simulation of a schedule that drains before every update."""

from __future__ import annotations

from dataclasses import replace

from pipeplan.simulation.engine import simulate_schedule
from pipeplan.simulation.scenario import Scenario
from pipeplan.util.deadline import NO_DEADLINE, Deadline
from pipeplan_launch.plan.schedule import ActionKind

UPDATES = 2
_LAST = (ActionKind.BACKWARD, ActionKind.WEIGHTS)


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
