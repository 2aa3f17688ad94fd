"""The scale of an emulation.

Bytes and rates are divided by `bytes_by`, so that a machine with two cores can carry the traffic of all cables
together. Times are multiplied by `time_by`, and rates are divided by it again, so that the executor's own time per
minibatch is negligible. All ratios of times are then as on the hardware.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeplan.simulation.scenario import Scenario, StageLoad

MOST_TRAFFIC = 1e8
"""Most bytes/s of all workers together: on two cores 16 workers reach 1.3 Gbit/s without computing."""
LEAST_BYTES_BY = 20.0
LEAST_TIME_BY = 3.0
OWN_S = 0.005
"""The executor's own time of a worker per minibatch, with its waits for a core: 4 to 6 ms where 16 workers share two
slow cores."""
OWN_SHARE = 0.02
"""Most share of it in the time of a worker that never waits."""
WAITING_SHARE = 0.25
"""Most share of it in the time for which a worker waits. Waits are uneven: a worker that is late after a short one
holds up the others, though it waits long in the mean."""
CPU_S = 0.006
"""Processor time of the executor per minibatch and stage, which the pace must exceed for all stages together."""


@dataclass(frozen=True)
class Scaling:
    """The factors of an emulation."""

    bytes_by: float
    time_by: float

    def size(self, size: float) -> int:
        """Emulated bytes of a message or of parameters."""
        return round(size / self.bytes_by)

    def rate(self, rate: float) -> float:
        """Emulated bytes/s of a link."""
        return rate / self.bytes_by / self.time_by


def scaling_for(scenario: Scenario, inflations: Sequence[float]) -> Scaling:
    """The factors for a plan. `inflations` are the stages' factors on the bytes of all-reduces (`Rings.inflation`)."""
    pace = scenario.predicted_s
    own = max(OWN_S / _spare_s(stage, pace) for stage in scenario.stages)
    if scenario.drains and scenario.accumulate:
        own = OWN_S * _passed_one_by_one(scenario) / (OWN_SHARE * scenario.accumulate * pace)
    time_by = max(LEAST_TIME_BY, own, CPU_S * len(scenario.stages) / pace)
    return Scaling(max(LEAST_BYTES_BY, _traffic(scenario, inflations) / time_by / MOST_TRAFFIC), time_by)


def _spare_s(stage: StageLoad, pace_s: float) -> float:
    """The part of a worker's time per minibatch that the executor may take: some of its waits, and a little more."""
    whole = stage.replicas * pace_s
    return WAITING_SHARE * max(0.0, whole - stage.busy_s) + OWN_SHARE * whole


def _passed_one_by_one(scenario: Scenario) -> int:
    """Minibatches of stages whose passes follow each other in a batch that drains, so that no waiting makes up for the
    executor's own time: those of a worker, and one through the stages of all other workers."""
    assert scenario.accumulate is not None
    stages = len(scenario.stages)
    most = 0
    for load in scenario.stages:
        own = sum(other.workers == load.workers for other in scenario.stages)
        most = max(most, -(-scenario.accumulate // load.replicas) * own + stages - own)
    return most


def _traffic(scenario: Scenario, inflations: Sequence[float]) -> float:
    """Bytes/s of all workers together, on the hardware."""
    per_minibatch = 0.0
    for stage, inflation, hops in zip(scenario.stages, inflations, (*scenario.hops, ()), strict=True):
        rings = 2 * (stage.replicas - 1) * stage.parameter_bytes * inflation
        per_minibatch += rings / (scenario.accumulate or stage.replicas)
        per_minibatch += sum((hop.transmit_s + hop.back_s) * hop.bandwidth for hop in hops) / max(1, len(hops))
    return per_minibatch / scenario.predicted_s
