"""Manifests of checkpoints, as the executor writes them, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pipeplan_launch.checkpoint.manifest import History, Manifest, Position, SavedTensor


def write_manifest(
    folder: Path,
    position: Position,
    *,
    graph_hash: str = "sha256:abc",
    files: Mapping[str, int] = {},
    tensors: Mapping[str, SavedTensor] = {},
) -> None:
    """Write the manifest of a checkpoint into its folder."""
    results = [{"epoch": number + 1, "loss": 0.5} for number in range(position.epoch)]
    Manifest(
        folder=folder,
        position=position,
        history=History(results, 1.5, 3),
        minibatch_samples=8,
        samples=72,
        seed=0,
        plan="sha256:plan",
        model_ref="model.py:build",
        graph_hash=graph_hash,
        stages=(("a",), ("b",)),
        state_dict={"a.weight": "a.weight"},
        optimizer={
            "groups": [{"kind": "SGD", "names": ["a.weight"], "settings": {"lr": 0.1}}],
            "state": {"a.weight": {"momentum_buffer": None}},
        },
        tensors=dict(tensors),
        files=dict(files),
    ).write(folder)
