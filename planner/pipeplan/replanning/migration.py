"""The changes for every layer and every worker when a new plan replaces an old one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

from pipeplan.plan.plan import Plan
from pipeplan.plan.updates import minibatches_of_update
from pipeplan.profile_data.layers import Layer
from pipeplan.profile_data.profile import Profile
from pipeplan.replanning.remaining_cluster import RemainingCluster


@dataclass(frozen=True)
class WorkerChange:
    """The changes for one worker of the new plan."""

    number: int
    server: int
    was: int | None
    """The worker's index in the old plan; None if it is unknown."""
    stages: tuple[int, ...]
    """Stages of the worker, counted from 0: several under schedules with virtual stages, none if it is idle."""
    stages_was: tuple[int, ...]
    """Stages of the worker in the old plan; empty if it was idle or is unknown."""
    taken: tuple[str, ...]
    """Layers that the worker holds only in the new plan."""
    read_bytes: int
    """Bytes of weights, buffers and optimiser state that the worker reads from a checkpoint."""


@dataclass(frozen=True)
class LayerShift:
    """Consecutive layers that move from a common old stage to a common new stage."""

    layers: tuple[str, ...]
    stage_was: int
    """The old stage, counted from 0."""
    stage: int


@dataclass(frozen=True)
class BatchChange:
    """Consecutive layers whose updates average the same number of samples."""

    layers: tuple[str, ...]
    minibatches_was: int
    """Number of minibatches whose gradients an update averaged in the old plan."""
    minibatches: int
    samples_was: int
    samples: int

    @property
    def rate(self) -> float:
        """The factor that the linear scaling rule applies to the old learning rate."""
        return self.samples / self.samples_was


@dataclass(frozen=True)
class PlanChanges:
    """The changes from an old plan to a new plan of the same model."""

    workers: tuple[WorkerChange, ...]
    shifts: tuple[LayerShift, ...]
    """The shifts of all layers, in the order of the new plan."""
    batches: tuple[BatchChange, ...]
    """The batch changes of all layers with parameters; empty for inference, which has no updates."""

    @property
    def read_bytes(self) -> int:
        """Bytes that all workers together read from a checkpoint."""
        return sum(worker.read_bytes for worker in self.workers)

    @property
    def restaged(self) -> int:
        """Number of layers that change their stage."""
        return sum(len(shift.layers) for shift in self.shifts if shift.stage != shift.stage_was)

    @property
    def rebatched(self) -> tuple[BatchChange, ...]:
        """The layers whose updates average more or fewer samples than before."""
        return tuple(batch for batch in self.batches if batch.samples != batch.samples_was)


def plan_changes(
    old: Plan, new: Plan, remaining: RemainingCluster, profile: Profile, minibatch_was: int
) -> PlanChanges:
    """The changes from `old` to `new`, on the workers of `remaining`. The workers' old indices may be unknown."""
    layers = {layer.name: layer for layer in profile.layers}
    return PlanChanges(
        workers=tuple(_workers(old, new, remaining, layers, profile.optimizer_state_ratio)),
        shifts=tuple(_shifts(old, new)),
        batches=() if new.inference else tuple(_batches(old, new, profile, minibatch_was)),
    )


def _workers(
    old: Plan, new: Plan, remaining: RemainingCluster, layers: Mapping[str, Layer], ratio: float
) -> Iterator[WorkerChange]:
    ratio = 0.0 if new.inference else ratio
    state_bytes = {
        name: layer.parameter_bytes + layer.buffer_bytes + round(ratio * layer.parameter_bytes)
        for name, layer in layers.items()
    }
    for number in range(remaining.cluster.workers):
        was = remaining.workers[number] if remaining.workers else None
        stages, stages_was = _stages_of(new, number), () if was is None else _stages_of(old, was)
        names = [name for stage in stages for name in new.stages[stage].layers]
        held_before = {name for stage in stages_was for name in old.stages[stage].layers}
        yield WorkerChange(
            number=number,
            server=remaining.cluster.server_of(number),
            was=was,
            stages=stages,
            stages_was=stages_was,
            taken=tuple(name for name in names if name not in held_before),
            read_bytes=sum(state_bytes[name] for name in names),
        )


def _stages_of(plan: Plan, worker: int) -> tuple[int, ...]:
    return tuple(index for index, stage in enumerate(plan.stages) if worker in stage.workers)


def _shifts(old: Plan, new: Plan) -> Iterator[LayerShift]:
    stage_was = {name: index for index, stage in enumerate(old.stages) for name in stage.layers}
    for index, stage in enumerate(new.stages):
        for was, names in groupby(stage.layers, lambda name: stage_was[name]):
            yield LayerShift(tuple(names), was, index)


def _batches(old: Plan, new: Plan, profile: Profile, minibatch_was: int) -> Iterator[BatchChange]:
    was, now = (
        {name: minibatches_of_update(plan, index) for index, stage in enumerate(plan.stages) for name in stage.layers}
        for plan in (old, new)
    )
    trained = {layer.name for layer in profile.layers if layer.parameter_bytes}
    for counts, names in groupby((name for name in now if name in trained), lambda name: (was[name], now[name])):
        yield BatchChange(tuple(names), *counts, counts[0] * minibatch_was, counts[1] * profile.minibatch)
