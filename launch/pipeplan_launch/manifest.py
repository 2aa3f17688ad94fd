"""What a checkpoint says of itself, in `manifest.json`. Torch-free."""

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
"""Before the name of a parameter or buffer, among the names of tensors."""


@dataclass(frozen=True)
class Position:
    """How far training has come."""

    epoch: int
    """Counted from 0."""
    minibatch: int
    """So many minibatches of the epoch are done."""
    minibatches: int
    """Minibatches of the epoch, all in all."""

    @property
    def whole(self) -> bool:
        """Whether the epoch's training is done; its evaluation may not be."""
        return self.minibatch == self.minibatches

    def __str__(self) -> str:
        return f"epoch {self.epoch + 1}" if self.whole else f"epoch {self.epoch + 1}, minibatch {self.minibatch}"


@dataclass
class History:
    """What training has shown so far."""

    results: list[dict[str, Any]] = field(default_factory=list)
    """Of the epochs that are finished, as summary.json lists them."""
    loss_sum: float = 0.0
    """Over the minibatches done of the epoch that is under way."""
    losses: int = 0
    """How many minibatches that is the sum of."""

    @property
    def loss(self) -> float | None:
        """Mean over the minibatches of the epoch under way."""
        return self.loss_sum / self.losses if self.losses else None


@dataclass(frozen=True)
class SavedTensor:
    """Where a tensor is, and what it is."""

    dtype: str
    """As in torch: `float32`."""
    shape: tuple[int, ...]
    file: str
    offset: int
    """Bytes from the beginning of the file to the tensor's archive."""
    size: int
    """Bytes of the archive."""
    crc32: int
    """Of the tensor's own bytes, in C order."""


@dataclass(frozen=True)
class Manifest:
    """A checkpoint, without its tensors."""

    folder: Path
    position: Position
    history: History
    minibatch_samples: int
    """Of a full minibatch."""
    samples: int
    """Of the training data."""
    seed: int
    plan: str
    model_ref: str
    graph_hash: str
    stages: tuple[tuple[str, ...], ...]
    """Layers of each stage of the plan that wrote it."""
    state_dict: dict[str, str]
    """For every name in the model's state_dict, the tensor's name here: tied parameters are kept once."""
    optimizer: dict[str, Any]
    """`groups` and `state`, as `optimizers` writes them."""
    tensors: dict[str, SavedTensor]
    files: dict[str, int]
    """Bytes of every file beside the manifest."""

    @property
    def finished(self) -> int:
        """Epochs that need nothing more."""
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
                    "dtype": one.dtype,
                    "shape": list(one.shape),
                    "file": one.file,
                    "offset": one.offset,
                    "bytes": one.size,
                    "crc32": one.crc32,
                }
                for name, one in self.tensors.items()
            },
        }

    def write(self, folder: Path) -> None:
        """Write it into a folder: whatever was there before stays until it is complete."""
        write_json(folder / NAME, self.as_json())
