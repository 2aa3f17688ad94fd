"""The checkpoint that training can go on from: what a manifest says, read without torch.

A run's folder holds `checkpoints/<name>/manifest.json`; the manifest is written last, so that a checkpoint is complete
if it has one.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeplan.errors import InputError
from pipeplan.files import read_document

FORMAT, VERSION = "pipeplan-checkpoint", 2
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Checkpoint:
    """The latest complete checkpoint of a run."""

    run: Path
    folder: Path
    epoch: int
    """From 0."""
    minibatch: int
    """How many of the epoch's minibatches are done."""
    minibatches: int
    """Of the epoch."""

    @property
    def text(self) -> str:
        """How far it is, for people."""
        return f"after {self.minibatch} of {self.minibatches} minibatches of epoch {self.epoch + 1}"

    def to_json(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self) | {"run": str(self.run), "folder": str(self.folder)}


def latest(plan_folder: Path, run: Path | None, graph_hash: str) -> Checkpoint | None:
    """The latest complete checkpoint of `run`, else of the plan's latest run that has one; None if there is none.

    Raises `InputError` where `run` was named and has none, where a manifest cannot be read, or where the run is of a
    model with another graph than `graph_hash` (empty: any will do).
    """
    if run is not None:
        return _of_run(_run_named(run), graph_hash)
    folder = plan_folder / "runs"
    with_one = sorted(path for path in folder.iterdir() if _manifests(path)) if folder.is_dir() else []
    return _of_run(with_one[-1], graph_hash) if with_one else None


def _run_named(path: Path) -> Path:
    """The run's folder, where it or one of its checkpoints was named."""
    run = path.parent.parent if (path / MANIFEST).is_file() else path
    if not _manifests(run):
        raise InputError(f"--run: {path} has no complete checkpoint to go on from")
    return run


def _manifests(run: Path) -> list[Path]:
    return list((run / "checkpoints").glob(f"*/{MANIFEST}"))


def _of_run(run: Path, graph_hash: str) -> Checkpoint:
    read = [(read_document(path, FORMAT, VERSION), path) for path in _manifests(run)]
    root, path = max(read, key=lambda one: (one[0]["epoch"].integer(), one[0]["minibatch"].integer()))
    its = root["model"].get("graph_hash")
    if graph_hash and its is not None and its.text() != graph_hash:
        raise InputError(f"{path} is of another model than the plan, or another version of it: their graphs differ")
    return Checkpoint(
        run, path.parent, root["epoch"].integer(), root["minibatch"].integer(), root["minibatches"].integer()
    )
