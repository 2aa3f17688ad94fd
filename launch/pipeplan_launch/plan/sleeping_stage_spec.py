"""The description of an emulated stage, read from `emulation` of its stage file. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from pipeplan_launch.typed_document import Amount, Natural, Positive

Traffic = Annotated[int, Meta(ge=0, le=2**40)]
"""Bytes for one minibatch."""


@dataclass(frozen=True)
class EmulatedLayer:
    """A part of the stage's computation, with the size of its parameters."""

    forward_s: Amount
    backward_s: Amount
    parameter_bytes: Traffic
    weights_s: Amount = 0.0
    """The part of `backward_s` that the gradients of the weights take where the schedule makes them in a pass of their
    own."""

    def __post_init__(self) -> None:
        if self.weights_s > self.backward_s:
            raise ValueError(f"{self.weights_s} s of a backward pass of {self.backward_s} s make gradients of weights")


@dataclass(frozen=True)
class CutTraffic:
    """Traffic across the cut between two stages, in bytes per minibatch."""

    sent: Traffic
    """Bytes of activations."""
    returned: Traffic
    """Bytes of gradients, at most as many as of activations."""

    def __post_init__(self) -> None:
        if self.returned > self.sent:
            raise ValueError(f"{self.returned} bytes are returned for {self.sent} that are sent")


@dataclass(frozen=True)
class EmulatedStage:
    """A stage that sleeps instead of computing, and sends and averages as many bytes as the stage it stands for."""

    layers: Annotated[tuple[EmulatedLayer, ...], Meta(min_length=1)]
    update_s: Amount
    """Time of the optimiser per update, in seconds."""
    minibatches: Positive
    """Number of minibatches of an epoch."""
    bucket_bytes: Annotated[int, Meta(ge=1, le=2**40)]
    """Size at which a bucket of gradients closes."""
    before: CutTraffic | None = None
    """Traffic with the previous stage; None for the first stage."""
    after: CutTraffic | None = None
    """Traffic with the next stage; None for the last stage."""
    products: Natural = 0
    """Matrix products that a forward pass of each layer computes beside its sleep; a backward pass twice as many."""
    evicting_bytes: Traffic = 0
    """Memory that each pass reads and writes once, so that the caches are as a model would leave them."""
