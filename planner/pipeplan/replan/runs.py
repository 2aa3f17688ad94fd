"""The checkpoint that training can go on from: what a manifest says, read without torch.

A run's folder holds `checkpoints/<name>/manifest.json`; the manifest is written last, so that a checkpoint is complete
if it has one. A disk that went with a server may have taken files from it all the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeplan.errors import InputError
from pipeplan.files import read_document

FORMAT, VERSION = "pipeplan-checkpoint", 2
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Checkpoint:
    """The latest whole checkpoint of a run."""

    run: Path
    folder: Path
    epoch: int
    """From 0."""
    minibatch: int
    """How many of the epoch's minibatches are done."""
    minibatches: int
    """Of the epoch."""
    damaged: tuple[str, ...] = ()
    """What is wrong with each of those that are later."""
    chosen: bool = False
    """Whether the user named it, and not its run."""

    @property
    def resume_from(self) -> Path:
        """What to resume from: the run, whose latest checkpoint may be later still, unless that is not the one."""
        return self.folder if self.damaged or self.chosen else self.run

    @property
    def text(self) -> str:
        """How far it is, for people."""
        return f"after {self.minibatch} of {self.minibatches} minibatches of epoch {self.epoch + 1}"

    def to_json(self) -> dict[str, Any]:
        """All that `pipeplan replan --json` says of it."""
        return {
            "run": str(self.run),
            "folder": str(self.folder),
            "epoch": self.epoch,
            "minibatch": self.minibatch,
            "minibatches": self.minibatches,
            "damaged": list(self.damaged),
        }


def latest(plan_folder: Path, named: Path | None, graph_hash: str) -> Checkpoint | None:
    """The latest whole checkpoint of the run, or the checkpoint, that is `named`, else of the plan's runs, the latest
    first; None if there is none.

    Raises `InputError` where something was named that has none, or where it is of a model with another graph than
    `graph_hash` (empty: any will do).
    """
    damaged: list[str] = []
    for folder in _candidates(plan_folder, named):
        try:
            checkpoint, its = _read(folder)
        except InputError as error:
            damaged.append(str(error))
            continue
        if graph_hash and its != graph_hash:
            raise InputError(f"{folder} is of another model than the plan, or another version of it: graphs differ")
        return replace(checkpoint, damaged=tuple(damaged), chosen=folder == named)
    if named is not None:
        why = f": {damaged[0]}" if damaged else ""
        raise InputError(f"--run: {named} has no complete checkpoint to go on from{why}")
    return None


def _candidates(plan_folder: Path, named: Path | None) -> Iterator[Path]:
    """Checkpoints that have a manifest, the latest first."""
    if named is not None and (named / MANIFEST).is_file():
        yield named
    elif named is not None:
        yield from _of_run(named)
    else:
        runs = {path.parents[2] for path in plan_folder.glob(f"runs/*/checkpoints/*/{MANIFEST}")}
        for run in sorted(runs, reverse=True):
            yield from _of_run(run)


def _of_run(run: Path) -> list[Path]:
    """By the numbers in their names, `epoch-0003-sample-00000640`."""
    found = [path.parent for path in run.glob(f"checkpoints/*/{MANIFEST}")]
    return sorted(found, key=lambda folder: [int(number) for number in re.findall("[0-9]+", folder.name)], reverse=True)


def _read(folder: Path) -> tuple[Checkpoint, str]:
    """A checkpoint, and the hash of its model's graph. Raises `InputError` where it is not whole."""
    root = read_document(folder / MANIFEST, FORMAT, VERSION)
    for name, size in root["files"].mapping().items():
        file = folder / Path(name).name
        if not file.is_file() or file.stat().st_size != size:
            raise InputError(f"{file} is missing, or not of the size that {MANIFEST} says")
    checkpoint = Checkpoint(
        run=folder.parent.parent,
        folder=folder,
        epoch=root["epoch"].integer(),
        minibatch=root["minibatch"].integer(),
        minibatches=root["minibatches"].integer(),
    )
    return checkpoint, root["model"]["graph_hash"].text()
