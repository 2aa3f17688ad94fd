"""The manifest of a checkpoint, `manifest.json`. It is JSON, so that reading it runs no code. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from msgspec import Meta, Struct, structs, to_builtins

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


class History(Struct):
    """Losses and results of training so far."""

    results: list[dict[str, Any]] = []
    """Results of the finished epochs, as in summary.json."""
    loss_sum: Finite | None = 0.0
    """Sum of the losses of the present epoch's finished minibatches; null in a manifest if it was not finite."""
    losses: Natural | Amount = 0
    """Number of losses in `loss_sum`, or the sum of their weights if the job has a `loss_weight`."""

    def add(self, total: float, weight: float) -> None:
        """Add losses, given by their sum and the sum of their weights."""
        self.loss_sum = math.nan if self.loss_sum is None else self.loss_sum + total
        self.losses += int(weight) if weight.is_integer() else weight

    @property
    def is_finite(self) -> bool:
        """Whether the losses of the present epoch were finite; before its first loss, those of the last epoch."""
        if self.losses:
            return self.loss_sum is not None and math.isfinite(self.loss_sum)
        return not self.results or self.results[-1].get("loss") is not None

    @property
    def loss(self) -> float | None:
        """Mean loss of the present epoch's minibatches, or None before the first."""
        return (math.nan if self.loss_sum is None else self.loss_sum) / self.losses if self.losses else None


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


class Model(Struct):
    """The model of a checkpoint."""

    ref: Text
    graph_hash: Text


class StageLayers(Struct):
    """One stage of the plan that wrote the checkpoint."""

    layers: Annotated[tuple[str, ...], Meta(min_length=1)]


class ManifestFile(Struct, kw_only=True):
    """A manifest.json."""

    format: Literal["pipeplan-checkpoint"] = CHECKPOINT_FORMAT
    version: Literal[4] = CHECKPOINT_VERSION
    checksum: str = ""
    epoch: Natural
    minibatch: Natural
    minibatches: Positive
    minibatch_samples: Positive
    """Samples in a full minibatch."""
    samples: Positive
    """Samples in the training data."""
    seed: Natural
    plan: Text
    model: Model
    stages: Annotated[tuple[StageLayers, ...], Meta(min_length=1)]
    history: History
    files: dict[str, Natural]
    """Size in bytes of every file of the checkpoint except the manifest."""
    state_dict: dict[str, str]
    """For every name in the model's state_dict, the name of the saved tensor: tied parameters are saved once."""
    optimizer: OptimizerFields
    tensors: dict[str, SavedTensor]
    frozen: dict[str, Checksum] = {}
    """CRC-32 of the frozen weights that are not saved, because the job builds them with the same values."""


class Manifest(ManifestFile, kw_only=True):
    """A checkpoint without its tensors."""

    folder: Path

    @property
    def position(self) -> Position:
        """Progress of training."""
        return Position(self.epoch, self.minibatch, self.minibatches)

    @property
    def finished(self) -> int:
        """Number of epochs that are trained and evaluated."""
        return len(self.history.results)

    def as_json(self) -> dict[str, Any]:
        """The content of manifest.json."""
        return {name: to_builtins(getattr(self, name)) for name in ManifestFile.__struct_fields__}

    def write(self, folder: Path) -> None:
        """Write the manifest into a folder. An older manifest stays until the new one is complete."""
        raw = with_checksum(finite(self.as_json()), indent=2).encode()
        write_atomically(folder / MANIFEST_NAME, lambda file: file.write(raw))


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
    manifest = Manifest(folder=folder, **structs.asdict(decode(content, ManifestFile, str(path))))
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
