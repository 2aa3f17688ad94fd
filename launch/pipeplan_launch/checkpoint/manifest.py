"""The manifest of a checkpoint, `manifest.json`. It is JSON, so that reading it runs no code. Torch-free."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeplan_launch.checked_json import is_unchanged, with_checksum
from pipeplan_launch.errors import DamagedCheckpoint, LaunchError
from pipeplan_launch.files import explain_errors, finite, read_file, write_atomically
from pipeplan_launch.plan import json_fields

CHECKPOINT_FORMAT = "pipeplan-checkpoint"
CHECKPOINT_VERSION = 3
MANIFEST_NAME = "manifest.json"
MODEL_PREFIX = "model."
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
    def epoch_trained(self) -> bool:
        """Whether the epoch's training is finished; its evaluation may not be."""
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
    losses: int = 0
    """Number of losses in that sum."""

    @property
    def is_finite(self) -> bool:
        """Whether the losses of the present epoch, or of the last one if the present one has none yet, were finite."""
        if self.losses:
            return math.isfinite(self.loss_sum)
        return not self.results or self.results[-1].get("loss") is not None

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
    """`groups` and `state`, in the form that `optimizer_state.optimizer_state` writes, and `correction`, the number of
    steps kept for each parameter, if a run corrects them."""
    tensors: dict[str, SavedTensor]
    files: dict[str, int]
    """Size in bytes of every file beside the manifest."""

    @property
    def finished(self) -> int:
        """Number of epochs that are trained and evaluated."""
        return len(self.history.results)

    def as_json(self) -> dict[str, Any]:
        """The content of manifest.json."""
        position, loss = self.position, self.history.loss_sum
        return {
            "format": CHECKPOINT_FORMAT,
            "version": CHECKPOINT_VERSION,
            "epoch": position.epoch,
            "minibatch": position.minibatch,
            "minibatches": position.minibatches,
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
        raw = with_checksum(finite(self.as_json()), indent=2).encode()
        write_atomically(folder / MANIFEST_NAME, lambda file: file.write(raw))


def read_manifest(folder: Path) -> Manifest:
    """Read and check a checkpoint's manifest, and the sizes of its files.

    Raises `LaunchError`, which is a `DamagedCheckpoint` if the manifest or the files are not as they were written.
    """
    path = folder / MANIFEST_NAME
    try:
        raw = read_file(path)
        content = json.loads(raw)
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {error}") from error
    where = str(path)
    if not isinstance(content, dict) or content.get("format") != CHECKPOINT_FORMAT:
        raise DamagedCheckpoint(f"{path} is not the manifest of a checkpoint")
    version = json_fields.integer(content, "version", where, least=1)
    if version != CHECKPOINT_VERSION:
        cure = "upgrade pipeplan" if version > CHECKPOINT_VERSION else "it was written by an older pipeplan: train anew"
        raise LaunchError(
            f"{path} is of version {version}, and this pipeplan reads version {CHECKPOINT_VERSION}: {cure}"
        )
    if not is_unchanged(raw):
        raise DamagedCheckpoint(f"{path} is not as it was written (its checksum differs): it was damaged or edited")
    manifest = _manifest(folder, content, where)
    _check_files(manifest)
    return manifest


def _manifest(folder: Path, content: dict[str, Any], where: str) -> Manifest:
    model = json_fields.mapping(content, "model", where)
    files = {
        _file_name(name, where): json_fields.integer({name: size}, name, where, least=0)
        for name, size in json_fields.mapping(content, "files", where).items()
    }
    tensors = json_fields.mapping(content, "tensors", where)
    manifest = Manifest(
        folder=folder,
        position=_position(content, where),
        history=_history(json_fields.mapping(content, "history", where), where),
        minibatch_samples=json_fields.integer(content, "minibatch_samples", where, least=1),
        samples=json_fields.integer(content, "samples", where, least=1),
        seed=json_fields.integer(content, "seed", where, least=0),
        plan=json_fields.text(content, "plan", where),
        model_ref=json_fields.text(model, "ref", where),
        graph_hash=json_fields.text(model, "graph_hash", where),
        stages=tuple(_layers(stage, where) for stage in json_fields.listing(content, "stages", where)),
        state_dict=_names(json_fields.mapping(content, "state_dict", where), where),
        optimizer=_optimizer(json_fields.mapping(content, "optimizer", where), where),
        tensors={name: _tensor(name, tensor, files, where) for name, tensor in tensors.items()},
        files=files,
    )
    if manifest.finished > manifest.position.epoch + manifest.position.epoch_trained:
        raise LaunchError(f"{where}: it has the results of {manifest.finished} epochs but ends earlier: it was damaged")
    return manifest


def _position(content: dict[str, Any], where: str) -> Position:
    minibatches = json_fields.integer(content, "minibatches", where, least=1)
    minibatch = json_fields.integer(content, "minibatch", where, least=0, most=minibatches)
    return Position(json_fields.integer(content, "epoch", where, least=0), minibatch, minibatches)


def _history(content: dict[str, Any], where: str) -> History:
    results = content.get("results")
    if not isinstance(results, list) or not all(isinstance(result, dict) for result in results):
        raise LaunchError(f"{where}: 'results' must be a list of objects")
    if [result.get("epoch") for result in results] != list(range(1, len(results) + 1)):
        raise LaunchError(f"{where}: 'results' must list the epochs from 1 on")
    total = content.get("loss_sum")  # negative for some losses, null if it was not finite
    if total is not None and (not isinstance(total, int | float) or isinstance(total, bool)):
        raise LaunchError(f"{where}: 'loss_sum' must be a number or null")
    losses = json_fields.integer(content, "losses", where, least=0)
    return History(results, math.nan if total is None else float(total), losses)


def _layers(stage: Any, where: str) -> tuple[str, ...]:
    if not isinstance(stage, dict):
        raise LaunchError(f"{where}: every entry of 'stages' must be an object")
    return json_fields.names(stage, "layers", where)


def _names(content: Mapping[str, Any], where: str) -> dict[str, str]:
    if not all(isinstance(name, str) for name in content.values()):
        raise LaunchError(f"{where}: 'state_dict' must hold names")
    return dict(content)


def _optimizer(content: dict[str, Any], where: str) -> dict[str, Any]:
    groups, state = content.get("groups"), content.get("state")
    if not isinstance(state, dict) or not all(isinstance(entry, dict) for entry in state.values()):
        raise LaunchError(f"{where}: the optimiser's 'state' must hold an object for each parameter")
    if not isinstance(groups, list) or not all(_is_group(group) for group in groups):
        raise LaunchError(f"{where}: the optimiser's 'groups' must hold 'kind', 'names' and 'settings'")
    correction = content.get("correction", {})
    if not isinstance(correction, dict):
        raise LaunchError(f"{where}: the optimiser's 'correction' must be an object")
    return {"groups": groups, "state": state} | ({"correction": correction} if correction else {})


def _is_group(group: Any) -> bool:
    return (
        isinstance(group, dict)
        and isinstance(group.get("kind"), str)
        and isinstance(group.get("settings"), dict)
        and isinstance(group.get("names"), list)
        and all(isinstance(name, str) for name in group["names"])
    )


def _tensor(name: str, content: Any, files: Mapping[str, int], where: str) -> SavedTensor:
    if not isinstance(content, dict):
        raise LaunchError(f"{where}: tensor {name!r} must be an object")
    shape = content.get("shape")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise LaunchError(f"{where}: the shape of tensor {name!r} must be a list of whole numbers")
    tensor = SavedTensor(
        json_fields.text(content, "dtype", where),
        tuple(shape),
        json_fields.text(content, "file", where),
        json_fields.integer(content, "offset", where, least=0),
        json_fields.integer(content, "bytes", where, least=0),
        json_fields.integer(content, "crc32", where, least=0, most=2**32 - 1),
    )
    # An element takes at least one bit, so no shape can ask for more memory than the file's size justifies.
    if tensor.offset + tensor.size > files.get(tensor.file, -1) or math.prod(shape) > 8 * tensor.size:
        raise LaunchError(f"{where}: tensor {name!r} does not fit into the file that it names")
    return tensor


def _file_name(name: str, where: str) -> str:
    if Path(name).name != name:
        raise LaunchError(f"{where}: {name!r} is not the name of a file beside it")
    return name


def _check_files(manifest: Manifest) -> None:
    for name, size in manifest.files.items():
        path = manifest.folder / name
        with explain_errors(path, "reading"):
            actual = path.stat().st_size if path.is_file() else None
        if actual != size:
            raise DamagedCheckpoint(
                f"{path} is missing or not of the {size} bytes that {MANIFEST_NAME} says: it was damaged"
            )
