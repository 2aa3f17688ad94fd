"""The manifest of a checkpoint, `manifest.json`. It is JSON, so that reading it runs no code. Torch-free."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from msgspec import Meta, Struct

from pipeplan_launch.errors import DamagedCheckpoint, LaunchError
from pipeplan_launch.files import explain_errors, finite, is_unchanged, read_file, with_checksum, write_atomically
from pipeplan_launch.typed_document import Amount, Finite, Natural, Positive, Text, decode, parse_json

CHECKPOINT_FORMAT: Literal["pipeplan-checkpoint"] = "pipeplan-checkpoint"
CHECKPOINT_VERSION: Literal[4] = 4
MANIFEST_NAME = "manifest.json"
MODEL_PREFIX = "model."
"""Prefix of the tensor names of parameters and buffers."""


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
    def epoch_trained(self) -> bool:
        """Whether the epoch's training is finished, with or without its evaluation."""
        return self.minibatch == self.minibatches

    def __str__(self) -> str:
        return (
            f"epoch {self.epoch + 1}" if self.epoch_trained else f"epoch {self.epoch + 1}, minibatch {self.minibatch}"
        )


@dataclass
class History:
    """Losses and results of training so far."""

    results: list[dict[str, Any]] = field(default_factory=list)
    """Results of the finished epochs, as in summary.json."""
    loss_sum: float = 0.0
    """Sum of the losses of the present epoch's finished minibatches."""
    losses: float = 0
    """Number of losses in `loss_sum`, or the sum of their weights if the job has a `loss_weight`."""

    @property
    def is_finite(self) -> bool:
        """Whether the losses of the present epoch were finite; those of the last epoch if the present one has none
        yet.
        """
        if self.losses:
            return math.isfinite(self.loss_sum)
        return not self.results or self.results[-1].get("loss") is not None

    @property
    def loss(self) -> float | None:
        """Mean loss of the present epoch's minibatches, or None before the first."""
        return self.loss_sum / self.losses if self.losses else None


Checksum = Annotated[int, Meta(ge=0, le=2**32 - 1)]


@dataclass(frozen=True)
class SavedTensor:
    """Location, type and shape of a saved tensor."""

    dtype: Text
    """Torch's name of the type, such as `float32`."""
    shape: tuple[Natural, ...]
    file: Text
    crc32: Checksum
    """Checksum of the tensor's own bytes, in C order."""


class OptimizerGroup(TypedDict):
    """One parameter group of the optimiser."""

    kind: str
    names: list[str]
    settings: dict[str, Any]


class OptimizerFields(TypedDict):
    """The optimiser, in the form that `optimizer_state.optimizer_state` writes."""

    groups: list[OptimizerGroup]
    state: dict[str, dict[str, Any]]
    correction: NotRequired[dict[str, Any]]
    """The number of past steps that are kept for each parameter, if the run corrects steps."""


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
    optimizer: OptimizerFields
    tensors: dict[str, SavedTensor]
    frozen: dict[str, int]
    """CRC-32 of the frozen weights that are not saved, because the job builds them with the same values."""
    files: dict[str, int]
    """Size in bytes of every file of the checkpoint except the manifest."""

    @property
    def finished(self) -> int:
        """Number of epochs that are trained and evaluated."""
        return len(self.history.results)

    def as_json(self) -> dict[str, Any]:
        """The content of manifest.json."""
        return {
            "format": CHECKPOINT_FORMAT,
            "version": CHECKPOINT_VERSION,
            **asdict(self.position),
            "minibatch_samples": self.minibatch_samples,
            "samples": self.samples,
            "seed": self.seed,
            "plan": self.plan,
            "model": {"ref": self.model_ref, "graph_hash": self.graph_hash},
            "stages": [{"layers": list(layers)} for layers in self.stages],
            "history": asdict(self.history),
            "files": self.files,
            "state_dict": self.state_dict,
            "optimizer": self.optimizer,
            "tensors": {name: asdict(tensor) for name, tensor in self.tensors.items()},
            "frozen": self.frozen,
        }

    def write(self, folder: Path) -> None:
        """Write the manifest into a folder. An older manifest stays until the new one is complete."""
        raw = with_checksum(finite(self.as_json()), indent=2).encode()
        write_atomically(folder / MANIFEST_NAME, lambda file: file.write(raw))


class _Model(Struct):
    ref: Text
    graph_hash: Text


class _StageLayers(Struct):
    layers: Annotated[tuple[str, ...], Meta(min_length=1)]


class _HistoryFields(Struct):
    results: list[dict[str, Any]]
    losses: Natural | Amount
    loss_sum: Finite | None = None
    """Sum of the losses, which may be negative; null if it was not finite."""


class ManifestFile(Struct, kw_only=True):
    """A manifest.json."""

    format: Literal["pipeplan-checkpoint"]
    version: Literal[4]
    checksum: str
    epoch: Natural
    minibatch: Natural
    minibatches: Positive
    minibatch_samples: Positive
    samples: Positive
    seed: Natural
    plan: Text
    model: _Model
    stages: Annotated[tuple[_StageLayers, ...], Meta(min_length=1)]
    history: _HistoryFields
    files: dict[str, Natural]
    state_dict: dict[str, str]
    optimizer: OptimizerFields
    tensors: dict[str, SavedTensor]
    frozen: dict[str, Checksum] = {}

    def manifest(self, folder: Path) -> Manifest:
        """The manifest of the checkpoint in a folder."""
        loss = math.nan if self.history.loss_sum is None else self.history.loss_sum
        return Manifest(
            folder=folder,
            position=Position(self.epoch, self.minibatch, self.minibatches),
            history=History(self.history.results, loss, self.history.losses),
            minibatch_samples=self.minibatch_samples,
            samples=self.samples,
            seed=self.seed,
            plan=self.plan,
            model_ref=self.model.ref,
            graph_hash=self.model.graph_hash,
            stages=tuple(stage.layers for stage in self.stages),
            state_dict=self.state_dict,
            optimizer=self.optimizer,
            tensors=self.tensors,
            frozen=self.frozen,
            files=self.files,
        )


def read_manifest(folder: Path) -> Manifest:
    """Read and check a checkpoint's manifest and the sizes of its files.

    Raises `LaunchError`, or its subclass `DamagedCheckpoint` if the manifest or the files have changed since they were
    written.
    """
    path = folder / MANIFEST_NAME
    try:
        raw = read_file(path)
        content = parse_json(raw)
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict) or content.get("format") != CHECKPOINT_FORMAT:
        raise DamagedCheckpoint(f"{path} is not the manifest of a checkpoint")
    version = decode(content.get("version"), Positive, f"{path}: version")
    if version != CHECKPOINT_VERSION:
        cure = "upgrade pipeplan" if version > CHECKPOINT_VERSION else "it was written by an older pipeplan: train anew"
        raise LaunchError(
            f"{path} is of version {version}, and this pipeplan reads version {CHECKPOINT_VERSION}: {cure}"
        )
    if not is_unchanged(raw):
        raise DamagedCheckpoint(f"{path} is not as it was written (its checksum differs): it was damaged or edited")
    manifest = decode(content, ManifestFile, str(path)).manifest(folder)
    _check(manifest, str(path))
    _check_files(manifest)
    return manifest


def _check(manifest: Manifest, where: str) -> None:
    """Raise `LaunchError` if fields contradict each other."""
    position, results, files = manifest.position, manifest.history.results, manifest.files
    if position.minibatch > position.minibatches:
        raise LaunchError(f"{where}: minibatch: expected at most {position.minibatches}, found {position.minibatch}")
    if [result.get("epoch") for result in results] != list(range(1, len(results) + 1)):
        raise LaunchError(f"{where}: history: results: they must be of the epochs from 1 on")
    if manifest.finished > position.epoch + position.epoch_trained:
        raise LaunchError(f"{where}: it has the results of {manifest.finished} epochs but ends earlier: it was damaged")
    for name in files:
        if Path(name).name != name:
            raise LaunchError(f"{where}: files: {name!r} is not the name of a file beside it")
    for name, tensor in manifest.tensors.items():
        # An element takes at least one bit, so no shape can ask for more memory than the file's size justifies.
        if math.prod(tensor.shape) > 8 * files.get(tensor.file, -1):
            raise LaunchError(f"{where}: tensors: {name!r} does not fit into the file that it names")


def _check_files(manifest: Manifest) -> None:
    for name, size in manifest.files.items():
        path = manifest.folder / name
        with explain_errors(path, "reading"):
            actual = path.stat().st_size if path.is_file() else None
        if actual != size:
            raise DamagedCheckpoint(
                f"{path} is missing or not of the {size} bytes that {MANIFEST_NAME} says: it was damaged"
            )
