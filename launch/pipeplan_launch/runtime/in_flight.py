"""State that a stage keeps for a minibatch between its forward and its backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pipeplan_launch.runtime.nested_tensors import map_tensors
from pipeplan_launch.runtime.recompute import ForwardConditions


@dataclass(frozen=True)
class StageInputs:
    """The inputs of a stage's forward pass for one minibatch."""

    received: Sequence[Tensor]
    """Activations from the previous stage."""
    inputs: Sequence[Tensor]
    """Model inputs read from the data set."""
    target: Any

    @property
    def write_counts(self) -> list[int]:
        """Number of writes to each tensor that was read from the data."""
        tensors: list[Tensor] = []

        def note(tensor: Tensor) -> Tensor:
            tensors.append(tensor)
            return tensor

        map_tensors((self.inputs, self.target), note)
        return [tensor._version for tensor in tensors]


@dataclass(frozen=True)
class InFlightMinibatch:
    """Inputs and outputs of a minibatch's forward pass, which its backward pass needs."""

    inputs: StageInputs
    outputs: Sequence[Tensor]
    """The outputs; empty if the stage recomputes."""
    conditions: ForwardConditions | None = None
    """The conditions of the forward pass, if the stage recomputes."""
    inputs_modified: bool = False
    """Whether the forward pass wrote to data that was read for it. Such data is not kept but read again."""
