"""A worker's part of a checkpoint: writing its tensors together with the other workers, and restoring its stage."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from msgspec import structs
from torch import Tensor

from pipeplan_launch.checkpoint import checkpoint, optimizer_state, tensor_store
from pipeplan_launch.checkpoint.manifest import (
    MODEL_PREFIX,
    History,
    Manifest,
    Model,
    Position,
    SavedTensor,
    StageLayers,
    read_manifest,
)
from pipeplan_launch.checkpoint.tensor_store import frozen_checksums
from pipeplan_launch.comm.p2p import peer_loss_explained
from pipeplan_launch.elastic import process_groups
from pipeplan_launch.elastic.process_groups import FailedElsewhere, Groups, run_in_all
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.files import explain_errors
from pipeplan_launch.runtime.optimizer_shards import DividedState
from pipeplan_launch.runtime.stage_setup import WorkerStage, model_parameters
from pipeplan_launch.runtime.training import TrainingEngine
from pipeplan_launch.tracing.split import StateDictNames
from pipeplan_launch.tracing.subgraph import Program

BATCH_BYTES = 2**25
"""Bytes of a divided optimiser's state that each replica puts together before it writes them."""
_Part = tuple[tuple[str, ...], dict[str, SavedTensor], dict[str, int]]
"""A worker's part of a checkpoint: (the optimisers of its stages as JSON, from the first replica only; the files of its
tensors; the checksums of its frozen weights that are not saved)."""


def save_checkpoint(stage: WorkerStage, groups: Groups, run: Path, position: Position, history: History) -> Path:
    """Write a checkpoint together with all active workers; the replicas of a stage share the work. Returns the
    folder.

    Raises `LaunchError`, and leaves no half-written checkpoint.
    """
    place = stage.place
    leader = place.plan.active[0]
    is_leader = place.rank == leader
    run_in_all(groups.active, lambda: checkpoint.begin_checkpoint(run) if is_leader else None)
    try:
        states = [_state_of(one, groups) for one in stage.every]
        tensors = {name: tensor for state in states for name, tensor in state.tensors.items()}
        sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
        held = process_groups.gather_everywhere(sizes, groups.active, dict[str, int])
        writers, member = tensor_store.choose_writers(held), dist.get_rank(groups.active)
        mine = {name: tensor for name, tensor in tensors.items() if writers[name] == member}
        folder = run / checkpoint.PARTIAL_CHECKPOINT
        written = run_in_all(groups.active, lambda: tensor_store.write_tensors(folder, mine, member))
        written |= run_in_all(groups.active, lambda: _write_divided(states, folder, member))
        frozen = {name: crc for state in states for name, crc in state.frozen.items()}
        own = (tuple(json.dumps(state.plain) for state in states) if place.replica == 0 else (), written, frozen)
        parts = process_groups.gather_at(own, leader, groups.active, _Part)
        run_in_all(groups.active, lambda: _commit(stage, run, position, history, parts) if is_leader else None)
    except (LaunchError, FailedElsewhere):
        if is_leader:
            checkpoint.abandon_checkpoint(run)
        raise
    assert stage.train_sizes is not None
    return checkpoint.checkpoint_folder(run, position, stage.train_sizes.minibatch)


@dataclass(frozen=True)
class _StageState:
    """The content of a checkpoint for one stage."""

    training: TrainingEngine
    plain: dict[str, Any]
    """The optimiser without its tensors."""
    tensors: dict[str, Tensor]
    """The whole tensors, of the model and of the optimiser."""
    frozen: dict[str, int]
    """Checksums of the frozen weights that are as the job builds them. These weights are not saved."""
    parts: dict[str, Tensor]
    """This replica's parts of the tensors that are divided among the stage's replicas."""
    divided: dict[int, str]
    """Parameter names by the `id` of every part."""


def _state_of(stage: WorkerStage, groups: Groups) -> _StageState:
    """The state of one stage. All active workers call this."""
    training = stage.training
    assert training is not None
    plain, moments = run_in_all(
        groups.active, lambda: optimizer_state.optimizer_state(training.optimizer, training.updated)
    )
    correction, division = training.correction, training.divided
    if correction is not None:
        plain["correction"], steps = correction.saved()
        moments |= steps
    parts: dict[str, Tensor] = {}
    divided: dict[int, str] = {}
    tensors = model_state(stage.place.program) | moments
    if division is not None:
        divided = {} if training.optimizer is None else division.divided_state(training.optimizer)
        if correction is not None:
            divided |= {id(step): name for name, steps in correction.steps.items() for step in steps}
        parts = {name: tensor for name, tensor in tensors.items() if division.is_divided(tensor, divided)}
    frozen = frozen_checksums(model_parameters(stage.place.program))
    frozen = {name: crc for name, crc in frozen.items() if stage.frozen.get(name) == crc}
    whole = {name: tensor for name, tensor in tensors.items() if name not in parts and name not in frozen}
    return _StageState(training, plain, whole, frozen, parts, divided)


def _write_divided(states: Sequence[_StageState], folder: Path, member: int) -> dict[str, SavedTensor]:
    """Put divided tensors together and write them, batch by batch, so that no worker holds many whole tensors.

    The replicas of a stage share the work, and call this together. Raises `LaunchError`.
    """
    written: dict[str, SavedTensor] = {}
    failure: LaunchError | None = None
    numbers = count()
    for state in states:
        division = state.training.divided
        for batch in () if division is None else division.batches(state.parts, state.divided, BATCH_BYTES):
            assert division is not None
            number = next(numbers)
            with peer_loss_explained("a stage could not gather its optimiser's state for a checkpoint"):
                whole = division.whole_tensors(batch, state.divided, number)
            try:
                if failure is None:
                    written |= tensor_store.write_tensors(folder, whole, member, number)
            except LaunchError as error:
                failure = error  # the other replicas still need this replica's parts
            del whole
    if failure is not None:
        raise failure
    return written


def _commit(stage: WorkerStage, run: Path, position: Position, history: History, parts: Sequence[_Part]) -> None:
    """Write the manifest and move the folder to its place. The leading worker calls this once all parts are written."""
    place, sizes, folder = stage.place, stage.train_sizes, run / checkpoint.PARTIAL_CHECKPOINT
    assert sizes is not None
    tensors = {name: tensor for _, written, _ in parts for name, tensor in sorted(written.items())}
    with explain_errors(folder, "reading"):
        files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    manifest = Manifest(
        folder=folder,
        **asdict(position),
        history=history,
        minibatch_samples=sizes.minibatch,
        samples=sizes.samples,
        seed=place.seed,
        plan=place.plan.plan,
        model=Model(place.plan.model_ref, stage.graph_hash),
        stages=tuple(map(StageLayers, place.plan.layers)),
        state_dict=dict(_naming(place.program).state_dict),
        optimizer=optimizer_state.merge_optimizer_states(
            json.loads(optimizer) for optimizers, _, _ in parts for optimizer in optimizers
        ),
        tensors=tensors,
        frozen={name: crc for _, _, frozen in parts for name, crc in sorted(frozen.items())},
        files=files,
    )
    for tensor in manifest.tensors.values():
        if tensor.file not in files:
            raise LaunchError(
                f"{folder / tensor.file} cannot be seen by rank {place.rank}: the run folder must be on a file system "
                "that all workers share"
            )
    checkpoint.commit_checkpoint(run, manifest)


def add_evaluation(folder: Path, history: History) -> None:
    """Add the result of an evaluation to a checkpoint's manifest; nothing else in it changes."""
    structs.replace(read_manifest(folder), history=history).write(folder)


def restore_stages(stage: WorkerStage, folder: Path) -> Manifest:
    """Load all stages of a worker from a checkpoint. Any plan may have written the checkpoint.

    Raises `LaunchError` if the checkpoint does not fit.
    """
    manifest = read_manifest(folder)
    checkpoint.check_same_model(manifest, stage.place.plan.model_ref, stage.graph_hash)
    for one in stage.every:
        _restore_stage(one, manifest, folder)
    return manifest


def _restore_stage(stage: WorkerStage, manifest: Manifest, folder: Path) -> None:
    training = stage.training
    assert training is not None
    load_weights(manifest, stage.place.program, stage.frozen, training.divided)
    load: optimizer_state.TensorLoader = partial(tensor_store.load_tensors, manifest)
    if training.divided is not None:
        load = training.divided.loader(load)
    optimizer_state.load_optimizer(
        training.optimizer,
        training.updated,
        manifest.optimizer,
        load,
        str(folder),
        own=training.rates.keys if training.rates is not None else (),
    )
    if training.correction is not None:
        counts = manifest.optimizer.get("correction", {})
        training.correction.restore(counts, load, str(folder))


def load_weights(
    manifest: Manifest, program: Program, frozen: Mapping[str, int], division: DividedState | None = None
) -> None:
    """Load a stage's parameters and buffers from a checkpoint of any plan.

    `frozen`: checksums of the frozen weights as the job builds them. `division`: None if the state is not divided.
    Raises `LaunchError`.
    """
    state = model_state(program)
    unsaved = manifest.frozen.keys() & state.keys()
    # A weight may have changed since it was built. Divided weights have only the checksum from before the division.
    now = frozen_checksums({name: one for name, one in model_parameters(program).items() if name in unsaved})
    checkpoint.check_frozen_weights(manifest, unsaved, {**frozen, **now})
    state = {name: tensor for name, tensor in state.items() if name not in unsaved}
    optional = {MODEL_PREFIX + name for name in getattr(program, "unread", ())} - manifest.tensors.keys()
    parts = [] if division is None else [name for name, one in state.items() if division.is_divided(one, {})]
    tensor_store.fill_tensors(manifest, {name: state[name] for name in state.keys() - optional - {*parts}})
    for name in parts:  # one whole tensor at a time
        assert division is not None
        whole = torch.empty(state[name].shape, dtype=state[name].dtype)
        tensor_store.fill_tensors(manifest, {name: whole})
        division.fill(state[name], whole)


def model_state(program: Program) -> dict[str, Tensor]:
    """The model's tensors on this worker, under their names in a checkpoint."""
    tensors = {**program.buffers_by_name(), **_naming(program).unread}
    buffers = {MODEL_PREFIX + name: tensor for name, tensor in tensors.items()}
    return {name: tensor.detach() for name, tensor in (model_parameters(program) | buffers).items()}


def _naming(program: Program) -> StateDictNames:
    """The model's names, which only a program that was cut from a traced model knows."""
    naming: Mapping[str, str] | StateDictNames | None = getattr(program, "naming", None)
    return naming if isinstance(naming, StateDictNames) else StateDictNames()
