"""What a replay comes to. All times are the plan's own, seconds as on its hardware, not the emulation's."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pipeplan.emulate.scaling import Scaling

FORMAT, VERSION = "pipeplan-replay", 1


@dataclass(frozen=True)
class StageTimes:
    """One stage, per minibatch of one of its replicas, mean over them. Seconds."""

    replicas: int
    predicted_s: float
    """Forward and backward pass, and the optimiser's share."""
    forward_s: float
    backward_s: float
    update_s: float
    sync_s: float
    wait_s: float
    send_s: float

    def busy(self, pace_s: float) -> float:
        """Share of its replicas' time that is computing."""
        return (self.forward_s + self.backward_s + self.update_s) / (self.replicas * pace_s)


@dataclass(frozen=True)
class LinkUse:
    """One cable, in the busier of its directions."""

    name: str
    rate: float
    """Bytes/s."""
    direction: str
    """`out` of what it joins, or `in`."""
    bytes_per_minibatch: float
    """As on the hardware."""
    busy: float
    """Share of what it could have carried."""


@dataclass(frozen=True)
class Replayed:
    """A replay of a plan."""

    config: str
    predicted_s: float
    """Seconds a minibatch, by the planner."""
    simulated_s: float | None
    """By the simulation of the same schedule."""
    measured_s: float
    spread: float
    """Standard error of the measured pace, as a share of it, from parts of the run."""
    minibatches: int
    """That were measured."""
    scaling: Scaling
    stages: tuple[StageTimes, ...]
    links: tuple[LinkUse, ...]
    seconds: float
    """How long the replay took, its start and end included."""
    cause: str = ""
    """Where the difference comes from, in a sentence."""

    @property
    def error(self) -> float:
        """Predicted over replayed minibatches a second, less one: above 0 the plan is slower than predicted."""
        return self.measured_s / self.predicted_s - 1

    def to_json(self) -> dict[str, Any]:
        """All of it, and the derived figures."""
        stages = [asdict(one) | {"busy": one.busy(self.measured_s)} for one in self.stages]
        return {"format": FORMAT, "version": VERSION} | asdict(self) | {"stages": stages, "error": self.error}
