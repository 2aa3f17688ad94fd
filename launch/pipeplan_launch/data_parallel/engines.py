"""Builds the data-parallel engine of a worker."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pipeplan_launch.data_parallel.fake_runs import refuse_written_parameters, takes_any_size
from pipeplan_launch.data_parallel.module_program import ModuleProgram
from pipeplan_launch.data_parallel.training import DataParallelTraining, ShardedEvaluation
from pipeplan_launch.job.job import Job
from pipeplan_launch.job.loading import load_job
from pipeplan_launch.plan.launch_plan import SHARDED, LaunchPlan
from pipeplan_launch.runtime.engine import WorkerPlace
from pipeplan_launch.runtime.inference import ForwardEngine
from pipeplan_launch.runtime.stage_setup import AnyTransport, Engines, one_garbage_collection, with_data
from pipeplan_launch.runtime.training import TrainingEngine
from pipeplan_launch.telemetry.recorder import Recorder
from pipeplan_launch.tracing.stage_program import Program


class DataParallelEngines(Engines):
    """Builds the user's own module as the only stage, and the engines that run it."""

    def load(
        self, plan: LaunchPlan, stages: Sequence[int], seed: int, device: torch.device
    ) -> tuple[Job, list[Program], str, bool]:
        """(job without its model, the module as a program, graph hash, whether it runs at any batch size).

        Nothing is traced, so there is nothing to check.
        """
        with one_garbage_collection():
            job = with_data(load_job(plan.model_ref, seed), plan.minibatch)
            any_size = takes_any_size(job, plan.minibatch)
            if plan.data_parallel in SHARDED:
                refuse_written_parameters(job, plan.minibatch)
            program = ModuleProgram(job, device)
        if plan.data_parallel not in SHARDED:  # FSDP2 moves one unit at a time
            program.to_device()
        return replace(job, model=nn.Module()), [program], plan.graph_hash or _state_hash(program), any_size

    def training(self, place: WorkerPlace, transport: AnyTransport, recorder: Recorder) -> TrainingEngine:
        """The engine that trains the module."""
        averaging, groups = self._options.averaging, self._groups
        shards = groups.replicas if averaging.shards_optimizer else None
        return DataParallelTraining(
            place, transport, recorder, groups.replicas, groups.flush, self._mesh(place), shards
        )

    def forward(
        self, place: WorkerPlace, transport: AnyTransport, recorder: Recorder, training: TrainingEngine | None
    ) -> ForwardEngine:
        """The engine that evaluates the module."""
        assert isinstance(training, DataParallelTraining)
        if training.sharded_root is None:
            return ForwardEngine(place, transport, recorder)
        return ShardedEvaluation(place, transport, recorder, training.sharded_root)

    def _mesh(self, place: WorkerPlace) -> DeviceMesh | None:
        """The arrangement of the workers for FSDP2: one row, or for `hsdp` a row for each server."""
        groups, plan = self._groups, place.plan
        if plan.data_parallel not in SHARDED or groups.replicas is None:
            return None
        kind = place.device.type
        if plan.data_parallel == "fsdp":
            return DeviceMesh.from_group(groups.replicas, kind)
        rows = torch.tensor(plan.workers_by_server(place.stage))
        return DeviceMesh.from_group([*groups.mesh], kind, mesh=rows, mesh_dim_names=("replicate", "shard"))


def _state_hash(program: ModuleProgram) -> str:
    """A hash of names, types and shapes, which a checkpoint names where a plan has no hash of a graph."""
    state = {**program.parameters_by_name(), **program.buffers_by_name()}
    described = [(name, str(one.dtype), list(one.shape)) for name, one in state.items()]
    return "sha256:" + hashlib.sha256(json.dumps(described).encode()).hexdigest()
