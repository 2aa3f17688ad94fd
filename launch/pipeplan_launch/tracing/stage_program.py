"""The interface of a stage's part of the model that the engine needs; `split.StageProgram` implements it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class BoundaryTensor(Protocol):
    """A tensor that crosses from one stage to the next."""

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def requires_grad(self) -> bool: ...

    def shape(self, batch: int) -> tuple[int, ...]:
        """Shape for a minibatch of `batch` samples."""


class Program(Protocol):
    """One stage's layers as a function of their parameters."""

    @property
    def receives(self) -> Sequence[BoundaryTensor]: ...

    @property
    def sends(self) -> Sequence[BoundaryTensor]: ...

    @property
    def model_inputs(self) -> Sequence[int]: ...

    def parameters_by_name(self) -> Mapping[str, Tensor]: ...

    def buffers_by_name(self) -> Mapping[str, Tensor]: ...

    @property
    def shared(self) -> Mapping[str, tuple[int, ...]]:
        """For every parameter of which other stages have a copy too, all stages that have one, in order."""

    def changing_state(self) -> Mapping[str, Tensor]:
        """Buffers, and tensors that are constants to autograd, that a forward in training mode may write, by name."""

    def call(
        self, parameters: Mapping[str, Tensor], received: Sequence[Tensor], inputs: Sequence[Tensor], batch: int
    ) -> Any:
        """Run the stage. If a tensor of `changing_state` is among `parameters`, it replaces the program's own."""

    def train(self, mode: bool = True) -> Any: ...

    def eval(self) -> Any: ...
