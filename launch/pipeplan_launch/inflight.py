"""What a stage keeps of a minibatch between its forward and its backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pipeplan_launch.engine import map_tensors
from pipeplan_launch.recompute import Conditions


@dataclass(frozen=True)
class Given:
    """What a stage computes a minibatch from."""

    received: Sequence[Tensor]
    inputs: Sequence[Tensor]
    target: Any

    @property
    def writes(self) -> list[int]:
        """How often each tensor that came from the data was written to."""
        tensors: list[Tensor] = []

        def note(tensor: Tensor) -> Tensor:
            tensors.append(tensor)
            return tensor

        map_tensors((self.inputs, self.target), note)
        return [tensor._version for tensor in tensors]


@dataclass(frozen=True)
class InFlight:
    """What the backward of a minibatch starts from and ends at."""

    given: Given
    outputs: Sequence[Tensor]
    """Empty where the stage recomputes."""
    conditions: Conditions | None = None
    """Those of the forward pass, where the stage recomputes."""
    spoilt: bool = False
    """Whether the forward pass wrote to what was read from the data: it is then not kept, but read again."""
