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

    @property
    def computing_s(self) -> float:
        """Forward and backward pass, and the optimiser."""
        return self.forward_s + self.backward_s + self.update_s

    def busy(self, pace_s: float) -> float:
        """Share of its replicas' time that is computing."""
        return self.computing_s / (self.replicas * pace_s)

    def predicted_busy(self, pace_s: float) -> float:
        """The same, by the plan and its pace."""
        return self.predicted_s / (self.replicas * pace_s)


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
    predicted_bytes: float = 0.0
    """In this direction: of a cable with another efficiency for all-reduces, so many bytes of messages take as long."""
    predicted_busy: float = 0.0
    """Share of the predicted pace."""


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
    cores_busy: float | None = None
    """Share of the time that the cores of this machine were, with whatever else runs here."""
    unshaped: tuple[str, ...] = ()
    """Levels of the cluster whose links are as fast as this machine is."""
    cause: str = ""
    """Where the difference comes from, in a sentence."""

    @property
    def error(self) -> float:
        """Predicted over replayed minibatches a second, less one: above 0 the plan is slower than predicted."""
        return self.measured_s / self.predicted_s - 1

    def to_json(self) -> dict[str, Any]:
        """All of it, and the derived figures."""
        stages = [
            asdict(one) | {"busy": one.busy(self.measured_s), "predicted_busy": one.predicted_busy(self.predicted_s)}
            for one in self.stages
        ]
        return {"format": FORMAT, "version": VERSION} | asdict(self) | {"stages": stages, "error": self.error}
