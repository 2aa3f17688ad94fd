"""Files that others write: manifests of checkpoints as the executor does, without torch, and a profile of PipeDream."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeplan_launch.checkpoint.manifest import History, Manifest, Model, Position, StageLayers


def write_manifest(folder: Path, position: Position, **fields: Any) -> None:
    """Write the manifest of a checkpoint into its folder. `fields` replace those of a small run."""
    results = [{"epoch": number + 1, "loss": 0.5} for number in range(position.epoch)]
    usual: dict[str, Any] = {
        "history": History(results, 1.5, 3),
        "minibatch_samples": 8,
        "samples": 72,
        "seed": 0,
        "plan": "sha256:plan",
        "model": Model("model.py:build", "sha256:abc"),
        "stages": (StageLayers(("a",)), StageLayers(("b",))),
        "state_dict": {"a.weight": "a.weight"},
        "optimizer": {
            "groups": [{"kind": "SGD", "names": ["a.weight"], "settings": {"lr": 0.1}}],
            "state": {"a.weight": {"momentum_buffer": None}},
        },
        "tensors": {},
        "files": {},
    }
    Manifest(folder=folder, **asdict(position), **usual | fields).write(folder)


PIPEDREAM = (
    "node2 -- Conv2d(3, 8) -- forward_compute_time=2.000, backward_compute_time=4.000, "
    "activation_size=100.000, parameter_size=64.000\n"
    "node1 -- Input0 -- forward_compute_time=9.000, backward_compute_time=0.000, "
    "activation_size=10.0, parameter_size=0.000\n"
    "node3 -- ReLU(inplace) -- forward_compute_time=1.000, backward_compute_time=1.5, "
    "activation_size=[60.0; 40.0], parameter_size=0.000 -- stage_id=3\n"
    "node4 -- __getitem__(0) -- forward_compute_time=0.000, backward_compute_time=0.000, "
    "activation_size=60.0, parameter_size=0.000\n"
    "\tnode1 -- node2\n\tnode2 -- node3\n\tnode3 -- node4\n"
)
