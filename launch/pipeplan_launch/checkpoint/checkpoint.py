"""Checkpoints in a run folder: their paths, their validity, and which of them are kept.

A checkpoint is a folder. It is written next to its final path, and moved there once it is complete on disk. So an
interrupted checkpoint is never found, and the previous one stays intact.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from pipeplan_launch.checkpoint.manifest import MANIFEST_NAME, MODEL_PREFIX, Manifest, Position, read_manifest
from pipeplan_launch.errors import DamagedCheckpoint, LaunchError
from pipeplan_launch.files import explain_errors

KEPT_CHECKPOINTS = 2
"""Number of checkpoints kept: the latest, and the previous one in case the latest is damaged. The same number of
checkpoints with finite losses is also kept, even if later losses were not finite."""
GOES_BACK = "going back to the checkpoint before it"
NONE_LEFT = "name an earlier checkpoint, with --resume-from to train on, or start anew"
PARTIAL_CHECKPOINT = ".checkpoint.part"
"""Folder in a run folder in which a checkpoint is being written."""
_NAME = re.compile(r"epoch-(\d+)-sample-(\d+)")
Note = Callable[[str], None]
"""Function that shows a line to the user."""


def _say_nothing(_line: str) -> None:
    """Show nothing."""


def checkpoint_folder(run: Path, position: Position, minibatch_samples: int) -> Path:
    """Folder of a checkpoint. Its name has the epoch, counted from 1, and the number of the epoch's finished samples.
    Minibatches are not counted, because their size may change.
    """
    samples = position.minibatch * minibatch_samples
    return run / "checkpoints" / f"epoch-{position.epoch + 1:04d}-sample-{samples:08d}"


def complete_checkpoints(run: Path) -> list[Path]:
    """Folders of a run's complete checkpoints, earliest first."""
    checkpoints = []
    for path in (run / "checkpoints").glob(f"epoch-*/{MANIFEST_NAME}"):
        if match := _NAME.fullmatch(path.parent.name):
            checkpoints.append((int(match[1]), int(match[2]), path.parent))
    return [folder for _, _, folder in sorted(checkpoints)]


def latest_checkpoint(run: Path, note: Note = _say_nothing) -> Manifest | None:
    """The last complete and undamaged checkpoint of a run folder; None if there is no complete checkpoint.

    `note` is called with a line for each damaged checkpoint that is skipped. Raises `LaunchError` if all are damaged.
    """
    folders = complete_checkpoints(run)
    if not folders:
        for path in (run / "checkpoints").glob(f"epoch-*/{MANIFEST_NAME}"):
            read_manifest(path.parent)  # raises if an older pipeplan wrote it
        return None
    return _last_undamaged(folders, note)


def checkpoint_before(damaged: Path, note: Note) -> Manifest | None:
    """The last undamaged checkpoint of the same run before a damaged one; None if there is no checkpoint before it.

    `note` is called with a line for each further damaged checkpoint. Raises `LaunchError` if all are damaged.
    """
    folders = complete_checkpoints(damaged.parent.parent)
    earlier = folders[: folders.index(damaged)] if damaged in folders else []
    return _last_undamaged(earlier, note) if earlier else None


def _last_undamaged(folders: Sequence[Path], note: Note) -> Manifest:
    """The manifest of the last undamaged folder. Raises `DamagedCheckpoint` if all are damaged."""
    *earlier, last = folders
    try:
        return read_manifest(last)
    except DamagedCheckpoint as error:
        if not earlier:
            raise DamagedCheckpoint(f"{error}; {NONE_LEFT}") from error
        note(f"{error}; {GOES_BACK}")
        return _last_undamaged(earlier, note)


def find_checkpoint(path: Path, note: Note = _say_nothing) -> Manifest:
    """The checkpoint at `path`, or the last undamaged one of the run folder at `path`. Raises `LaunchError`."""
    if (path / MANIFEST_NAME).is_file():
        return _last_undamaged([path], note)
    manifest = latest_checkpoint(path, note)
    if manifest is None:
        raise LaunchError(f"{path} is neither a checkpoint nor a run folder with a complete one")
    return manifest


def begin_checkpoint(run: Path) -> Path:
    """Make an empty folder to write a checkpoint into, and remove the remains of unfinished checkpoints."""
    part = run / PARTIAL_CHECKPOINT
    with explain_errors(part, "making"):
        abandon_checkpoint(run)
        for folder in (run / "checkpoints").glob("epoch-*"):
            if not (folder / MANIFEST_NAME).exists():
                shutil.rmtree(folder, ignore_errors=True)
        part.mkdir(parents=True)
    return part


def abandon_checkpoint(run: Path) -> None:
    """Remove the files of an unfinished checkpoint."""
    shutil.rmtree(run / PARTIAL_CHECKPOINT, ignore_errors=True)


def commit_checkpoint(run: Path, manifest: Manifest) -> Path:
    """Make the checkpoint in `manifest.folder` valid, and remove old checkpoints. Returns its final folder."""
    manifest.write(manifest.folder)
    folder = checkpoint_folder(run, manifest.position, manifest.minibatch_samples)
    with explain_errors(folder, "moving a checkpoint to"):
        _sync(manifest.folder)
        folder.parent.mkdir(exist_ok=True)
        _remove(folder)
        os.rename(manifest.folder, folder)
        _sync(folder.parent)
        _sync(run)
    _remove_old(complete_checkpoints(run))
    return folder


def _remove_old(folders: Sequence[Path]) -> None:
    """Remove all checkpoints except the last `KEPT_CHECKPOINTS`, and the last `KEPT_CHECKPOINTS` with finite losses."""
    old = list(folders[:-KEPT_CHECKPOINTS])
    if not old:
        return
    finite = sum(_is_finite(folder) for folder in folders[-KEPT_CHECKPOINTS:])
    for folder in reversed(old):
        if finite < KEPT_CHECKPOINTS and _is_finite(folder):
            finite += 1
        else:
            _remove(folder)


def _is_finite(folder: Path) -> bool:
    """Whether a checkpoint is undamaged, and was written after finite losses."""
    try:
        return read_manifest(folder).history.is_finite
    except LaunchError:
        return False


def check_same_model(manifest: Manifest, model_ref: str, graph_hash: str) -> None:
    """Raises `LaunchError` if the checkpoint belongs to another model."""
    if manifest.model.graph_hash != graph_hash:
        raise LaunchError(
            f"{manifest.folder} is of another model, or another version of {model_ref!r}: its graph is "
            f"{manifest.model.graph_hash[:19]}…, the model's is {graph_hash[:19]}…; start anew without --resume"
        )


def check_frozen_weights(manifest: Manifest, names: Iterable[str], present: Mapping[str, int]) -> None:
    """Raises `LaunchError` unless frozen weights that the checkpoint does not hold have the values of its run.

    `present`: the checksums of the weights that the job builds now.
    """
    for name in names:
        if present.get(name) != manifest.frozen[name]:
            raise LaunchError(
                f"{manifest.folder} does not hold the frozen weight {name.removeprefix(MODEL_PREFIX)!r}, and the job "
                "now builds it with other values: build the model from the weights that the run began with"
            )


def _remove(folder: Path) -> None:
    (folder / MANIFEST_NAME).unlink(missing_ok=True)  # first, because a half-deleted folder must not look valid
    shutil.rmtree(folder, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Flush the directory entries of a folder to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
