"""Finds the checkpoint that training can resume from, by manifests that are read without torch.

A run folder holds `checkpoints/<name>/manifest.json`. The manifest is written last, so a checkpoint that has one was
complete. Files of it may still be missing, if they were on the disk of a lost server.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeplan.errors import InputError
from pipeplan_launch.checkpoint.manifest import MANIFEST_NAME, read_manifest
from pipeplan_launch.errors import LaunchError


@dataclass(frozen=True)
class Checkpoint:
    """The latest complete checkpoint of a run."""

    run: Path
    folder: Path
    epoch: int
    """Counted from 0."""
    minibatch: int
    """Number of minibatches of the epoch that are done."""
    minibatches: int
    """Number of minibatches of the epoch."""
    damaged: tuple[str, ...] = ()
    """The errors of later checkpoints, which are damaged."""
    skipped: tuple[Path, ...] = ()
    """Later runs of the plan, which have no checkpoint at all, latest first."""
    chosen: bool = False
    """Whether the user named this checkpoint itself, not its run."""

    @property
    def resume_from(self) -> Path:
        """The path to resume from: the run, or this checkpoint if it is not the run's latest one or was named."""
        return self.folder if self.damaged or self.chosen else self.run

    @property
    def text(self) -> str:
        """The training progress at the checkpoint, in words."""
        return f"after {self.minibatch} of {self.minibatches} minibatches of epoch {self.epoch + 1}"

    def to_json(self) -> dict[str, Any]:
        """The part of `pipeplan replan --json` on the checkpoint."""
        return {
            "run": str(self.run),
            "folder": str(self.folder),
            "epoch": self.epoch,
            "minibatch": self.minibatch,
            "minibatches": self.minibatches,
            "damaged": list(self.damaged),
            "skipped": [str(run) for run in self.skipped],
        }


def latest_checkpoint(plan_folder: Path, named: Path | None, graph_hash: str) -> Checkpoint | None:
    """The latest complete checkpoint of the run or checkpoint `named`, or else of the latest run of the plan with one.

    Returns None if nothing was named and there is none. Raises `InputError` if `named` has no complete checkpoint, or
    if the hash of its model's graph is not `graph_hash` (empty: any graph).
    """
    damaged: list[str] = []
    for folder in _candidates(plan_folder, named):
        try:
            checkpoint, its_hash = _read(folder)
        except InputError as error:
            damaged.append(str(error))
            continue
        if graph_hash and its_hash != graph_hash:
            raise InputError(f"{folder} is of another model than the plan, or another version of it: graphs differ")
        later = [path for path in plan_folder.glob("runs/*") if path.is_dir() and path.name > checkpoint.run.name]
        empty = [path for path in sorted(later, reverse=True) if named is None and not _of_run(path)]
        return replace(checkpoint, damaged=tuple(damaged), chosen=folder == named, skipped=tuple(empty))
    if named is not None:
        why = f": {damaged[0]}" if damaged else ""
        raise InputError(f"--run: {named} has no complete checkpoint to go on from{why}")
    return None


def _candidates(plan_folder: Path, named: Path | None) -> Iterator[Path]:
    """Folders of checkpoints that have a manifest, latest first."""
    if named is not None and (named / MANIFEST_NAME).is_file():
        yield named
    elif named is not None:
        yield from _of_run(named)
    else:
        runs = {path.parents[2] for path in plan_folder.glob(f"runs/*/checkpoints/*/{MANIFEST_NAME}")}
        for run in sorted(runs, reverse=True):
            yield from _of_run(run)


def _of_run(run: Path) -> list[Path]:
    """Checkpoints of a run, latest first by the numbers in their names, as in `epoch-0003-sample-00000640`."""
    folders = [path.parent for path in run.glob(f"checkpoints/*/{MANIFEST_NAME}")]
    return sorted(
        folders, key=lambda folder: [int(number) for number in re.findall("[0-9]+", folder.name)], reverse=True
    )


def _read(folder: Path) -> tuple[Checkpoint, str]:
    """Read a checkpoint and the hash of its model's graph. Raises `InputError` if files are missing or damaged."""
    try:
        manifest = read_manifest(folder)
    except LaunchError as error:
        raise InputError(str(error)) from None
    at = manifest.position
    return Checkpoint(folder.parent.parent, folder, at.epoch, at.minibatch, at.minibatches), manifest.graph_hash
