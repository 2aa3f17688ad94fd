"""The result of a replay. All times are seconds on the plan's own hardware, not of the emulation."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pipeplan.replay.scaling import Scaling

FORMAT, VERSION = "pipeplan-replay", 1


@dataclass(frozen=True)
class ReplayedStage:
    """Mean times of one stage, in seconds per minibatch of one of its replicas."""

    replicas: int
    predicted_s: float
    """Predicted forward and backward pass, and share of the optimiser's step."""
    forward_s: float
    backward_s: float
    update_s: float
    sync_s: float
    wait_s: float
    send_s: float

    @property
    def computing_s(self) -> float:
        """Measured forward and backward pass, and share of the optimiser's step."""
        return self.forward_s + self.backward_s + self.update_s

    def busy(self, pace_s: float) -> float:
        """Share of time for which its replicas compute."""
        return self.computing_s / (self.replicas * pace_s)

    def predicted_busy(self, pace_s: float) -> float:
        """Predicted share of time for which its replicas compute, at the plan's pace."""
        return self.predicted_s / (self.replicas * pace_s)


@dataclass(frozen=True)
class LinkUse:
    """The traffic of one cable, in its busier direction."""

    name: str
    rate: float
    """Bytes/s."""
    direction: str
    """`out` of the part that the cable joins to the others, or `in`."""
    bytes_per_minibatch: float
    """Bytes on the plan's hardware."""
    busy: float
    """Carried share of its capacity."""
    predicted_bytes: float = 0.0
    """Predicted bytes in this direction. Bytes of all-reduces with another efficiency are converted to bytes of
    messages that take as long."""
    predicted_busy: float = 0.0
    """Predicted busy time as a share of the predicted pace."""


@dataclass(frozen=True)
class ReplayResult:
    """The result of a replay. Paces are seconds per minibatch."""

    config: str
    predicted_s: float
    """Pace by the planner."""
    simulated_s: float | None
    """Pace by the simulation of the same schedule; None without a steady state."""
    measured_s: float
    spread: float
    """Relative standard error of the measured pace, from parts of the run."""
    minibatches: int
    """Number of measured minibatches."""
    scaling: Scaling
    stages: tuple[ReplayedStage, ...]
    links: tuple[LinkUse, ...]
    seconds: float
    """Duration of the replay, including its start and end."""
    cores_busy: float | None = None
    """Share of the time for which this machine's cores were busy, with all programs."""
    unshaped: tuple[str, ...] = ()
    """Levels of the cluster whose links are not shaped."""
    cause: str = ""
    """The main cause of the difference, in a sentence."""

    @property
    def error(self) -> float:
        """Measured over predicted pace, less 1: above 0 the plan is slower than predicted."""
        return self.measured_s / self.predicted_s - 1

    def to_json(self) -> dict[str, Any]:
        """The JSON document, with derived figures."""
        stages = [
            asdict(one) | {"busy": one.busy(self.measured_s), "predicted_busy": one.predicted_busy(self.predicted_s)}
            for one in self.stages
        ]
        return {"format": FORMAT, "version": VERSION} | asdict(self) | {"stages": stages, "error": self.error}
