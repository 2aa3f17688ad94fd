"""The checkpoint that training can go on from: what a manifest says, read without torch.

A run's folder holds `checkpoints/<name>/manifest.json`; the manifest is written last, so that a checkpoint is complete
if it has one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeplan.errors import InputError
from pipeplan.files import Node, read_document

FORMAT, VERSION = "pipeplan-checkpoint", 2
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Checkpoint:
    """The latest complete checkpoint of a run."""

    run: Path
    folder: Path
    epochs: int
    """Finished."""
    minibatches: int
    """Of the epoch after these."""

    @property
    def text(self) -> str:
        """How far it is, for people."""
        done = f"{self.epochs} epoch{'' if self.epochs == 1 else 's'}"
        return f"{done} and {self.minibatches} minibatches" if self.minibatches else done

    def to_json(self) -> dict[str, Any]:
        """All fields."""
        return {
            "run": str(self.run),
            "folder": str(self.folder),
            "epochs": self.epochs,
            "minibatches": self.minibatches,
        }


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
    found = [(_position(root := read_document(path, FORMAT, VERSION)), path, root) for path in _manifests(run)]
    (epochs, minibatches), path, root = max(found, key=lambda one: one[:2])
    its = root["model"].get("graph_hash")
    if graph_hash and its is not None and its.text() != graph_hash:
        raise InputError(f"{path} is of another model than the plan, or another version of it: their graphs differ")
    return Checkpoint(run, path.parent, epochs, minibatches)


def _position(root: Node) -> tuple[int, int]:
    within = root.get("minibatch")
    return root["epoch"].integer(), within.integer() if within else 0
