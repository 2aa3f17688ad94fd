"""The memory of each worker over time: weights, weight versions, and the minibatches in flight."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from pipeplan.simulation.events import Pass, SimulatedEvents
from pipeplan.simulation.scenario import Scenario
from pipeplan_launch.plan.schedule import ActionKind, own_minibatches

MemoryOverTime = dict[tuple[int, int], list[tuple[float, int]]]
"""(stage, replica) -> list of (time in seconds, bytes from then on), in order of time."""


def memory_over_time(scenario: Scenario, replayed: SimulatedEvents, minibatches: int) -> MemoryOverTime:
    """Memory of every worker over time.

    The memory is at most `StageLoad.memory_bytes`, which includes one more weight version if updates lag.
    """
    by_worker: dict[tuple[int, int], list[Pass]] = defaultdict(list)
    for done in replayed.actions:
        by_worker[done.stage, done.replica].append(done)
    return {
        worker: list(_steps(scenario, *worker, actions, minibatches)) for worker, actions in sorted(by_worker.items())
    }


def _steps(
    scenario: Scenario, stage: int, replica: int, actions: Sequence[Pass], minibatches: int
) -> Iterator[tuple[float, int]]:
    """The memory of one worker after each of its actions.

    A minibatch is held from the start of its forward to the end of its backward pass. The stage holds all weight
    versions from the oldest that a minibatch will still use to the newest.
    """
    load, shapes = scenario.stages[stage], scenario.shapes
    if not scenario.schedule.trains:
        yield 0.0, load.memory_bytes
        return
    own = own_minibatches(replica, load.replicas, minibatches, load.shares)
    in_flight = finished = updates = 0
    for _, _, action, start_s, end_s in actions:
        in_flight += action.kind is ActionKind.FORWARD
        if action.kind is ActionKind.BACKWARD:
            # Until its W, a minibatch keeps its activations, and gradients of the same size.
            in_flight, finished = in_flight + (1 if load.deferred else -1), finished + 1
        if action.kind is ActionKind.WEIGHTS and load.deferred:
            in_flight -= 2
        updates += action.kind is ActionKind.UPDATE
        oldest = scenario.schedule.version(shapes, stage, own[finished]) if finished < len(own) else updates
        versions = max(1, updates - oldest + 1)
        moment = start_s if action.kind is ActionKind.FORWARD else end_s
        yield moment, load.fixed_bytes + versions * load.parameter_bytes + in_flight * load.minibatch_bytes


def peak_memory(scenario: Scenario, steps: MemoryOverTime) -> list[int]:
    """For each stage, the peak memory of one of its workers, in bytes."""
    peaks = [load.fixed_bytes + load.parameter_bytes for load in scenario.stages]
    for (stage, _), counts in steps.items():
        peaks[stage] = max([peaks[stage], *(size for _, size in counts)])
    return peaks
