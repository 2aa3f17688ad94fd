"""What the engine needs of a stage's part of the model: the interface that `split.StageProgram` has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class CutTensor(Protocol):
    """A tensor that crosses from one stage to the next."""

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def requires_grad(self) -> bool: ...

    def shape(self, batch: int) -> tuple[int, ...]:
        """Its shape for a minibatch of `batch` samples."""


class Program(Protocol):
    """One stage's layers, functional in their parameters."""

    @property
    def receives(self) -> Sequence[CutTensor]: ...

    @property
    def sends(self) -> Sequence[CutTensor]: ...

    @property
    def model_inputs(self) -> Sequence[int]: ...

    def parameters_by_name(self) -> Mapping[str, Tensor]: ...

    def buffers_by_name(self) -> Mapping[str, Tensor]: ...

    def changing_state(self) -> Mapping[str, Tensor]:
        """Buffers, and tensors that are constant to autograd, that a forward in training mode may write, by name."""

    def call(
        self, parameters: Mapping[str, Tensor], received: Sequence[Tensor], inputs: Sequence[Tensor], batch: int
    ) -> Any:
        """Run the stage. A tensor of `changing_state` may be among `parameters`: it is then used in its own's place."""

    def train(self, mode: bool = True) -> Any: ...

    def eval(self) -> Any: ...
