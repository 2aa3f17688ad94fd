"""A worker's own part of a checkpoint: writing its stage, and taking it back."""

from __future__ import annotations

from pathlib import Path

from pipeplan_launch import checkpoint
from pipeplan_launch.checkpoint import Manifest
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.optimizers import load_optimizer, optimizer_state
from pipeplan_launch.setup import Stage


def save(stage: Stage, run: Path, epoch: int) -> None:
    """Write this stage's file of the checkpoint after so many epochs."""
    place, training = stage.place, stage.training
    assert training is not None
    checkpoint.save_stage(
        checkpoint.epoch_folder(run, epoch),
        place.stage,
        place.program.parameters_by_name(),
        place.program.buffers_by_name(),
        optimizer_state(training.optimizer, training.trained),
    )


def restore(stage: Stage, run: Path) -> Manifest:
    """Load this stage from the run's latest checkpoint. Raises `LaunchError` if it is of another model or plan."""
    place, training = stage.place, stage.training
    assert training is not None
    manifest = checkpoint.latest(run)
    if manifest is None:
        raise LaunchError(f"rank {place.rank} does not see the checkpoints in {run}")
    checkpoint.check_fits(manifest, place.plan, stage.graph_hash)
    path = manifest.stage_file(place.stage)
    state = checkpoint.read_stage(path)
    checkpoint.load_tensors(place.program.parameters_by_name(), state["parameters"], str(path))
    checkpoint.load_tensors(place.program.buffers_by_name(), state["buffers"], str(path))
    load_optimizer(training.optimizer, training.trained, state["optimizer"], str(path))
    return manifest
