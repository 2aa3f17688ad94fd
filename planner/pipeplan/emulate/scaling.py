"""By how much an emulation differs from what it stands for.

Bytes and rates are divided by `bytes_by`, so that what crosses all cables together fits a machine of two cores; times
are stretched by `time_by`, and rates divided by as much again, so that what the executor itself takes for a minibatch
does not count. Then every ratio of times is as it is on the hardware.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeplan.simulation.scenario import Load, Scenario

MOST_TRAFFIC = 1e8
"""Bytes/s that all workers together send: on two cores 16 of them manage 1.3 Gbit/s, computing nothing."""
LEAST_BYTES_BY = 20.0
LEAST_TIME_BY = 3.0
OWN_S = 0.002
"""What the executor itself takes of a worker's time for a minibatch."""
OWN_SHARE = 0.02
"""What of the time of a worker that never waits it may be."""
CPU_S = 0.003
"""Processor time of the executor for a minibatch at one stage; no more than so much of the pace is to go into it."""


@dataclass(frozen=True)
class Scaling:
    """What to divide by, and to multiply with."""

    bytes_by: float
    time_by: float

    def size(self, size: float) -> int:
        """Bytes of a message or of parameters."""
        return round(size / self.bytes_by)

    def rate(self, rate: float) -> float:
        """Bytes/s of a link."""
        return rate / self.bytes_by / self.time_by


def scaling_for(scenario: Scenario, inflations: Sequence[float]) -> Scaling:
    """What suits a plan; `inflations`: by how much more each stage's all-reduce carries than its parameters."""
    pace = scenario.predicted_s
    spare = min(_spare_s(stage, pace) for stage in scenario.stages)
    time_by = max(LEAST_TIME_BY, OWN_S / spare, CPU_S * len(scenario.stages) / pace)
    return Scaling(max(LEAST_BYTES_BY, _traffic(scenario, inflations) / time_by / MOST_TRAFFIC), time_by)


def _spare_s(stage: Load, pace_s: float) -> float:
    """What of a worker's time for a minibatch the executor may take: what it would wait, and a little."""
    whole = stage.replicas * pace_s
    return max(0.0, whole - stage.forward_s - stage.backward_s) + OWN_SHARE * whole


def _traffic(scenario: Scenario, inflations: Sequence[float]) -> float:
    """Bytes/s that all workers together send, on the hardware."""
    each = 0.0
    for stage, inflation, hops in zip(scenario.stages, inflations, (*scenario.hops, ()), strict=True):
        rings = 2 * (stage.replicas - 1) * stage.parameter_bytes * inflation
        each += rings / (scenario.accumulate or stage.replicas)
        each += sum((hop.transmit_s + hop.back_s) * hop.bandwidth for hop in hops) / max(1, len(hops))
    return each / scenario.predicted_s
