"""Checkpoints for tests, made in this process alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from pipeplan_launch.checkpoint import checkpoint, tensor_store
from pipeplan_launch.checkpoint.manifest import MODEL_PREFIX, History, Manifest, Model, Position, StageLayers
from pipeplan_launch.files import with_checksum

NOTHING: dict[str, Any] = {"groups": [], "state": {}}
MIDDLE = Position(0, 4, 10)


def save(
    run: Path,
    tensors: Mapping[str, Tensor],
    position: Position = MIDDLE,
    *,
    optimizer: dict[str, Any] = NOTHING,
    state_dict: Mapping[str, str] | None = None,
    minibatch_samples: int = 2,
    samples: int = 20,
    history: History | None = None,
    model_ref: str = "toy",
) -> Path:
    """Write a checkpoint into a run folder, as one worker that holds everything would; returns its folder."""
    folder = checkpoint.begin_checkpoint(run)
    written = tensor_store.write_tensors(folder, tensors)
    manifest = Manifest(
        folder=folder,
        **asdict(position),
        history=history or History(),
        minibatch_samples=minibatch_samples,
        samples=samples,
        seed=7,
        plan="sha256:plan",
        model=Model(model_ref, "sha256:toy"),
        stages=(StageLayers(("layer0",)), StageLayers(("layer1",))),
        state_dict=dict(state_dict or {}),
        optimizer=optimizer,
        tensors=written,
        files={path.name: path.stat().st_size for path in sorted(folder.iterdir())},
    )
    return checkpoint.commit_checkpoint(run, manifest)


def rewrite(path: Path, content: dict[str, Any]) -> None:
    """Write another content into a manifest, with a checksum that fits."""
    path.write_text(with_checksum(content, indent=2))


def model_of(manifest: Manifest) -> dict[str, Tensor]:
    """The parameters and buffers of a checkpoint, by the model's names."""
    found = tensor_store.load_tensors(manifest, [name for name in manifest.tensors if name.startswith(MODEL_PREFIX)])
    return {name.removeprefix(MODEL_PREFIX): value for name, value in found.items()}


def latest(run: Path) -> Manifest:
    """The last checkpoint of a run, which has one."""
    manifest = checkpoint.latest_checkpoint(run)
    assert manifest is not None
    return manifest


def marks(run: Path) -> dict[str, Any]:
    """All that a run's last checkpoint says, where two are equal if all their tensors are, bit by bit."""
    manifest = latest(run)
    content = manifest.as_json()
    for key in ("plan", "stages", "files"):
        del content[key]
    content["tensors"] = {name: (one.dtype, one.shape, one.crc32) for name, one in sorted(manifest.tensors.items())}
    return content
