"""Checkpoints in a run folder: where they are, when they count, and which of them are kept.

A checkpoint is a folder. It is filled beside its place, and moved there when all of it is on disk: one that was
interrupted is never found, and the one before it is still whole.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.files import explain_errors
from pipeplan_launch.manifest import NAME, Manifest, Position
from pipeplan_launch.manifest_reader import read_manifest

KEPT = 2  # the latest and, in case its disk is not, the one before
PART = ".checkpoint.part"
"""The folder in a run folder where a checkpoint is being written."""
_NAME = re.compile(r"epoch-(\d+)-sample-(\d+)")


def folder_for(run: Path, position: Position, minibatch_samples: int) -> Path:
    """Where a checkpoint goes. Epochs count from 1 here, and samples tell the order when minibatches change."""
    samples = position.minibatch * minibatch_samples
    return run / "checkpoints" / f"epoch-{position.epoch + 1:04d}-sample-{samples:08d}"


def complete(run: Path) -> list[Path]:
    """The complete checkpoints of a run, the earliest first."""
    found = []
    for path in (run / "checkpoints").glob(f"epoch-*/{NAME}"):
        if match := _NAME.fullmatch(path.parent.name):
            found.append((int(match[1]), int(match[2]), path.parent))
    return [folder for _, _, folder in sorted(found)]


def latest(run: Path) -> Manifest | None:
    """The last complete checkpoint of a run folder, None if there is none. Raises `LaunchError` if it is damaged."""
    found = complete(run)
    if not found:
        for path in (run / "checkpoints").glob(f"epoch-*/{NAME}"):
            read_manifest(path.parent)  # says that an older pipeplan wrote it
        return None
    try:
        return read_manifest(found[-1])
    except LaunchError as error:
        if len(found) == 1:
            raise
        raise LaunchError(f"{error}; the checkpoint before is {found[-2]}, for --resume-from") from error


def at(path: Path) -> Manifest:
    """The checkpoint that `path` is, or the last of the run folder that it is. Raises `LaunchError`."""
    if (path / NAME).is_file():
        return read_manifest(path)
    manifest = latest(path)
    if manifest is None:
        raise LaunchError(f"{path} is neither a checkpoint nor a run folder with a complete one")
    return manifest


def begin(run: Path) -> Path:
    """An empty folder to write a checkpoint into; what was half written or half removed before is removed."""
    part = run / PART
    with explain_errors(part, "making"):
        abandon(run)
        for folder in (run / "checkpoints").glob("epoch-*"):
            if not (folder / NAME).exists():
                shutil.rmtree(folder, ignore_errors=True)
        part.mkdir(parents=True)
    return part


def abandon(run: Path) -> None:
    """Remove what has been written of a checkpoint that is not to be."""
    shutil.rmtree(run / PART, ignore_errors=True)


def commit(run: Path, manifest: Manifest) -> Path:
    """Make the checkpoint valid that was written into `manifest.folder`, then remove all but the latest.

    Returns where it is.
    """
    manifest.write(manifest.folder)
    place = folder_for(run, manifest.position, manifest.minibatch_samples)
    with explain_errors(place, "moving a checkpoint to"):
        _sync(manifest.folder)
        place.parent.mkdir(exist_ok=True)
        _remove(place)
        os.rename(manifest.folder, place)
        _sync(place.parent)
        _sync(run)
    for old in complete(run)[:-KEPT]:
        _remove(old)
    return place


def check_fits(manifest: Manifest, model_ref: str, graph_hash: str) -> None:
    """Raises `LaunchError` if the checkpoint is of another model."""
    if manifest.graph_hash != graph_hash:
        raise LaunchError(
            f"{manifest.folder} is of another model, or another version of {model_ref!r}: its graph is "
            f"{manifest.graph_hash[:19]}…, the model's is {graph_hash[:19]}…; start anew without --resume"
        )


def _remove(folder: Path) -> None:
    (folder / NAME).unlink(missing_ok=True)  # first: a folder half deleted must not look valid
    shutil.rmtree(folder, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Have the names in a folder on disk, too."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
