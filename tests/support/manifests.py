"""Manifests of checkpoints, as the executor writes them, without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeplan_launch.checkpoint.manifest import History, Manifest, Position


def write_manifest(folder: Path, position: Position, **fields: Any) -> None:
    """Write the manifest of a checkpoint into its folder. `fields` replace those of a small run."""
    results = [{"epoch": number + 1, "loss": 0.5} for number in range(position.epoch)]
    usual: dict[str, Any] = {
        "history": History(results, 1.5, 3),
        "minibatch_samples": 8,
        "samples": 72,
        "seed": 0,
        "plan": "sha256:plan",
        "model_ref": "model.py:build",
        "graph_hash": "sha256:abc",
        "stages": (("a",), ("b",)),
        "state_dict": {"a.weight": "a.weight"},
        "optimizer": {
            "groups": [{"kind": "SGD", "names": ["a.weight"], "settings": {"lr": 0.1}}],
            "state": {"a.weight": {"momentum_buffer": None}},
        },
        "tensors": {},
        "files": {},
    }
    Manifest(folder=folder, position=position, **usual | fields).write(folder)
