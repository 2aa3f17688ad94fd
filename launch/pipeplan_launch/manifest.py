"""The manifest of a checkpoint, `manifest.json`. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeplan_launch.files import write_json

FORMAT = "pipeplan-checkpoint"
VERSION = 2
NAME = "manifest.json"
MODEL = "model."
"""Prefix of the names of parameters and buffers among the names of tensors."""


@dataclass(frozen=True)
class Position:
    """Progress of training."""

    epoch: int
    """The epoch, counted from 0."""
    minibatch: int
    """Number of finished minibatches of the epoch."""
    minibatches: int
    """Number of minibatches in the epoch."""

    @property
    def whole(self) -> bool:
        """Whether the epoch's training is finished; its evaluation may not be."""
        return self.minibatch == self.minibatches

    def __str__(self) -> str:
        return f"epoch {self.epoch + 1}" if self.whole else f"epoch {self.epoch + 1}, minibatch {self.minibatch}"


@dataclass
class History:
    """Losses and results of training so far."""

    results: list[dict[str, Any]] = field(default_factory=list)
    """Results of the finished epochs, as in summary.json."""
    loss_sum: float = 0.0
    """Sum of the losses of the present epoch's finished minibatches."""
    losses: int = 0
    """Number of losses in that sum."""

    @property
    def loss(self) -> float | None:
        """Mean loss of the present epoch's minibatches, or None before the first."""
        return self.loss_sum / self.losses if self.losses else None


@dataclass(frozen=True)
class SavedTensor:
    """Location, type and shape of a saved tensor."""

    dtype: str
    """Torch's name of the type, such as `float32`."""
    shape: tuple[int, ...]
    file: str
    offset: int
    """Bytes from the start of the file to the tensor's archive."""
    size: int
    """Bytes of the archive."""
    crc32: int
    """Checksum of the tensor's own bytes, in C order."""


@dataclass(frozen=True)
class Manifest:
    """A checkpoint without its tensors."""

    folder: Path
    position: Position
    history: History
    minibatch_samples: int
    """Samples in a full minibatch."""
    samples: int
    """Samples in the training data."""
    seed: int
    plan: str
    model_ref: str
    graph_hash: str
    stages: tuple[tuple[str, ...], ...]
    """Layers of each stage of the plan that wrote the checkpoint."""
    state_dict: dict[str, str]
    """For every name in the model's state_dict, the name of the saved tensor: tied parameters are saved once."""
    optimizer: dict[str, Any]
    """`groups` and `state`, in the form that `optimizers` writes."""
    tensors: dict[str, SavedTensor]
    files: dict[str, int]
    """Size in bytes of every file beside the manifest."""

    @property
    def finished(self) -> int:
        """Number of epochs that are trained and evaluated."""
        return len(self.history.results)

    def as_json(self) -> dict[str, Any]:
        """The content of manifest.json."""
        at, loss = self.position, self.history.loss_sum
        return {
            "format": FORMAT,
            "version": VERSION,
            "epoch": at.epoch,
            "minibatch": at.minibatch,
            "minibatches": at.minibatches,
            "minibatch_samples": self.minibatch_samples,
            "samples": self.samples,
            "seed": self.seed,
            "plan": self.plan,
            "model": {"ref": self.model_ref, "graph_hash": self.graph_hash},
            "stages": [{"layers": list(layers)} for layers in self.stages],
            "history": {
                "results": self.history.results,
                "loss_sum": loss if math.isfinite(loss) else None,
                "losses": self.history.losses,
            },
            "files": self.files,
            "state_dict": self.state_dict,
            "optimizer": self.optimizer,
            "tensors": {
                name: {
                    "dtype": tensor.dtype,
                    "shape": list(tensor.shape),
                    "file": tensor.file,
                    "offset": tensor.offset,
                    "bytes": tensor.size,
                    "crc32": tensor.crc32,
                }
                for name, tensor in self.tensors.items()
            },
        }

    def write(self, folder: Path) -> None:
        """Write the manifest into a folder. An older manifest stays until the new one is complete."""
        write_json(folder / NAME, self.as_json())
