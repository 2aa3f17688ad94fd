"""A worker's part of a checkpoint: writing its tensors together with the other workers, and restoring its stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from pipeplan_launch import checkpoint, optimizers, processes
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.files import explain_errors
from pipeplan_launch.manifest import MODEL, History, Manifest, Position, SavedTensor
from pipeplan_launch.manifest_reader import read_manifest
from pipeplan_launch.naming import Naming
from pipeplan_launch.processes import Groups
from pipeplan_launch.program import Program
from pipeplan_launch.setup import Stage
from pipeplan_launch.together import together

_Part = tuple[dict[str, Any] | None, dict[str, SavedTensor]]
"""A worker's part of a checkpoint: its optimiser, if it is its stage's first replica, and the locations of its
tensors."""


def save(stage: Stage, groups: Groups, run: Path, position: Position, history: History) -> Path:
    """Write a checkpoint together with all active workers; the replicas of a stage share its work. Returns its
    folder.

    Raises `LaunchError`, and leaves no half-written checkpoint.
    """
    from pipeplan_launch import storage  # importing DCP takes long, which the start of a run need not wait for

    place, training = stage.place, stage.training
    assert training is not None
    leader = place.plan.active[0]
    leads = place.rank == leader
    together(groups.active, lambda: checkpoint.begin(run) if leads else None)
    try:
        plain, moments = together(
            groups.active, lambda: optimizers.optimizer_state(training.optimizer, training.trained)
        )
        written = storage.write(run / checkpoint.PART, model_state(place.program) | moments, groups.active)
        parts = processes.collect((plain if place.replica == 0 else None, written), leader, groups.active)
        together(groups.active, lambda: _commit(stage, run, position, history, parts) if leads else None)
    except LaunchError:
        if leads:
            checkpoint.abandon(run)
        raise
    assert stage.train_sizes is not None
    return checkpoint.folder_for(run, position, stage.train_sizes.minibatch)


def _commit(stage: Stage, run: Path, position: Position, history: History, parts: Sequence[_Part]) -> None:
    """In the leading worker, once all workers have written their parts: write the manifest and move the folder to its
    place.
    """
    place, sizes, folder = stage.place, stage.train_sizes, run / checkpoint.PART
    assert sizes is not None
    with explain_errors(folder, "reading"):
        files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    manifest = Manifest(
        folder=folder,
        position=position,
        history=history,
        minibatch_samples=sizes.minibatch,
        samples=sizes.samples,
        seed=place.seed,
        plan=place.plan.plan,
        model_ref=place.plan.model_ref,
        graph_hash=stage.graph_hash,
        stages=place.plan.layers,
        state_dict=dict(_naming(place.program).state_dict),
        optimizer=optimizers.merge(optimizer for optimizer, _ in parts if optimizer is not None),
        tensors={name: tensor for _, tensors in parts for name, tensor in sorted(tensors.items())},
        files=files,
    )
    for tensor in manifest.tensors.values():
        if tensor.file not in files:
            raise LaunchError(
                f"{folder / tensor.file} cannot be seen by rank {place.rank}: the run folder must be on a file system "
                "that all workers share"
            )
    checkpoint.commit(run, manifest)


def add_result(folder: Path, history: History) -> None:
    """Add the result of an evaluation to a checkpoint's manifest; nothing else in it changes."""
    replace(read_manifest(folder), history=history).write(folder)


def restore(stage: Stage, folder: Path) -> Manifest:
    """Load this stage's part of a checkpoint, which any plan may have written. Raises `LaunchError` if it does not
    fit.
    """
    from pipeplan_launch import storage

    place, training = stage.place, stage.training
    assert training is not None
    manifest = read_manifest(folder)
    checkpoint.check_fits(manifest, place.plan.model_ref, stage.graph_hash)
    storage.read(manifest, model_state(place.program))
    optimizers.load_optimizer(
        training.optimizer,
        training.trained,
        manifest.optimizer,
        lambda names: storage.load(manifest, list(names)),
        str(folder),
        own=training.rates.keys if training.rates is not None else (),
    )
    return manifest


def load_weights(manifest: Manifest, program: Program) -> None:
    """Load a stage's parameters and buffers from a checkpoint of any plan. Raises `LaunchError`."""
    from pipeplan_launch import storage

    storage.read(manifest, model_state(program))


def model_state(program: Program) -> dict[str, Tensor]:
    """The model's tensors on this worker, under their names in a checkpoint."""
    tensors: dict[str, Tensor] = {}
    tensors |= program.parameters_by_name()
    tensors |= program.buffers_by_name()
    tensors |= _naming(program).unread
    return {MODEL + name: tensor.detach() for name, tensor in tensors.items()}


def _naming(program: Program) -> Naming:
    """The model's names, which only a program that was cut from a traced model knows."""
    naming: Mapping[str, str] | Naming | None = getattr(program, "naming", None)
    return naming if isinstance(naming, Naming) else Naming()
