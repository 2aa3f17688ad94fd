"""Training of the user's own module under DDP or FSDP2, one minibatch of a replica at a time.

An update covers the plan's M minibatches. Minibatch i runs at replica i mod r, or the replicas have unequal shares. An
update has rounds. In each round every replica runs one forward and one backward pass, because under FSDP2 the replicas
gather weights together. Every backward pass of FSDP2 averages gradients among the workers that share the weights; the
backward pass of the last round averages the sums of all rounds among all replicas. A replica without a minibatch in the
last round, or in a short last group, runs the group's first minibatch once more with a weight of 0, instead of only
waiting. With unequal shares, which only DDP has, a replica has one round for each of its minibatches.

DDP and FSDP2 divide the sum over the replicas by r. So the loss of a minibatch is multiplied by r · share / total.
`share` is the minibatch's part of the samples, or of the job's `loss_weight`; `total` is the sum of the shares.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from pipeplan_launch.checkpoint.optimizer_state import TensorLoader
from pipeplan_launch.comm.buckets import refuse_sparse
from pipeplan_launch.comm.ordered_transport import AnyTransport
from pipeplan_launch.data_parallel.module_program import ModuleProgram, refuse_written_parameters, takes_any_size
from pipeplan_launch.data_parallel.wrapping import (
    Alone,
    Replicated,
    Sharded,
    Wrapper,
    recomputation_explained,
    recompute_blocks,
)
from pipeplan_launch.job.hooks import GradientHook, take_hooks
from pipeplan_launch.job.job import Job
from pipeplan_launch.job.loading import load_job
from pipeplan_launch.job.nested_tensors import tensors_in
from pipeplan_launch.job.pass_conditions import seed_forward
from pipeplan_launch.plan.launch_plan import SHARDED, LaunchPlan
from pipeplan_launch.plan.schedule import ActionKind, group_members
from pipeplan_launch.runtime.engine import Segment, StageContext
from pipeplan_launch.runtime.inference import ForwardEngine
from pipeplan_launch.runtime.stage_optimizer import StageOptimizer
from pipeplan_launch.runtime.stage_setup import Engines, one_garbage_collection, with_data
from pipeplan_launch.runtime.training import TrainingEngine
from pipeplan_launch.telemetry.recorder import Recorder, Stopwatch
from pipeplan_launch.telemetry.run_folder import BACKWARD, FORWARD
from pipeplan_launch.tracing.subgraph import Program

# Weights and optimiser state that FSDP2 divides among workers: conversion between whole tensors and parts, for
# checkpoints.


class DividedWeights:
    """A `runtime.optimizer_shards.DividedState` for tensors whose type shows how they are divided."""

    def __init__(self, trained: Mapping[str, nn.Parameter], index: int, count: int) -> None:
        """`trained`: the divided parameters by name. `index`: this worker's number among the `count` of the plan."""
        self._trained, self._index, self._count = trained, index, count

    def divided_state(self, _optimizer: Optimizer) -> dict[int, str]:
        """{}, because parts are known by their type."""
        return {}

    def is_divided(self, tensor: Tensor, _divided: Mapping[int, str]) -> bool:
        """Whether a tensor is divided into parts."""
        return isinstance(tensor, DTensor)

    def batches(
        self, tensors: Mapping[str, Tensor], _divided: Mapping[int, str], most_bytes: int
    ) -> Iterator[dict[str, Tensor]]:
        """Divided tensors in batches, the same on all workers. Each worker keeps about `most_bytes` of a batch.

        A larger tensor has a batch of its own.
        """
        batch: dict[str, Tensor] = {}
        size = 0
        for name in sorted(tensors):
            whole = tensors[name].numel() * tensors[name].element_size()
            if batch and size + whole > most_bytes * self._count:
                yield batch
                batch, size = {}, 0
            batch[name], size = tensors[name], size + whole
        if batch:
            yield batch

    def whole_tensors(
        self, tensors: Mapping[str, Tensor], _divided: Mapping[int, str], turn: int = 0
    ) -> dict[str, Tensor]:
        """The whole tensors that this worker keeps. All workers call this. They take turns, beginning with number
        `turn`.
        """
        kept = {}
        for number, name in enumerate(sorted(tensors)):
            tensor = tensors[name]
            assert isinstance(tensor, DTensor)
            whole = tensor.full_tensor()
            if (number + turn) % self._count == self._index:
                kept[name] = whole
        return kept

    def fill(self, part: Tensor, whole: Tensor) -> None:
        """Write this worker's part of a whole tensor."""
        assert isinstance(part, DTensor)
        part.to_local().copy_(_divided_like(whole, part).to_local())

    def loader(self, load: TensorLoader) -> TensorLoader:
        """A loader of the optimiser's saved tensors. It divides each tensor that has the shape of its parameter, one
        whole tensor at a time.
        """

        def load_parts(names: Iterable[str]) -> dict[str, Tensor]:
            return {name: self._part_of_saved(name, load([name])[name]) for name in names}

        return load_parts

    def _part_of_saved(self, name: str, tensor: Tensor) -> Tensor:
        """This worker's part of a saved tensor. Tensors of a parameter are named `optim.state.PARAMETER.KEY`."""
        parameter = self._trained.get(name.removeprefix("optim.state.").rpartition(".")[0])
        if parameter is None or tensor.shape != parameter.shape:
            return tensor
        return _divided_like(tensor, parameter)


def _divided_like(whole: Tensor, part: Tensor) -> DTensor:
    """A whole tensor, which every worker has, divided as `part` is. Nothing is sent."""
    assert isinstance(part, DTensor)
    return distribute_tensor(whole, part.device_mesh, part.placements, src_data_rank=None)


# Builds the data-parallel engine of a worker.


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

    def training(self, place: StageContext, transport: AnyTransport, recorder: Recorder) -> TrainingEngine:
        """The engine that trains the module."""
        averaging, groups = self._options.averaging, self._groups
        shards = groups.replicas if averaging.shards_optimizer else None
        return DataParallelTraining(
            place,
            transport,
            recorder,
            groups.replicas,
            groups.flush,
            self._mesh(place),
            shards,
            rounds=averaging.compression is not None,
        )

    def forward(
        self, place: StageContext, transport: AnyTransport, recorder: Recorder, training: TrainingEngine | None
    ) -> ForwardEngine:
        """The engine that evaluates the module."""
        assert isinstance(training, DataParallelTraining)
        if training.sharded_root is None:
            return ForwardEngine(place, transport, recorder)
        return ShardedEvaluation(place, transport, recorder, training.sharded_root)

    def _mesh(self, place: StageContext) -> DeviceMesh | None:
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
    """A hash of names, types and shapes. A checkpoint records it if the plan has no hash of a graph."""
    state = {**program.parameters_by_name(), **program.buffers_by_name()}
    described = [(name, str(one.dtype), list(one.shape)) for name, one in state.items()]
    return "sha256:" + hashlib.sha256(json.dumps(described).encode()).hexdigest()


class DataParallelTraining(TrainingEngine):
    """Trains one replica of the user's own module."""

    def __init__(
        self,
        place: StageContext,
        transport: AnyTransport,
        recorder: Recorder,
        group: dist.ProcessGroup | None,
        flush: dist.ProcessGroup | None,
        mesh: DeviceMesh | None,
        sharing: dist.ProcessGroup | None,
        *,
        rounds: bool,
    ) -> None:
        """`group`: the replicas, None if there is only one. `flush`: the replicas, for tensors on the CPU, if each
        holds a part of the weights. `mesh`: the arrangement of the replicas under FSDP2; None for DDP. `sharing`: the
        replicas, if they divide the optimiser. `rounds`: whether DDP sends gradients as bfloat16.

        Raises `LaunchError` for a job that this engine cannot run.
        """
        program = place.program
        assert isinstance(program, ModuleProgram)
        self._program = program
        if place.recomputes:
            recompute_blocks(program.model)
        self._wrapper, hooks = _wrapped(program, group, mesh, rounds=rounds)
        passes = {
            ActionKind.FORWARD: self._forward,
            ActionKind.BACKWARD: self._backward,
            ActionKind.REDUCE: self._complete_rounds,
        }
        optimiser = StageOptimizer(place, flush, sharing=sharing)
        super().__init__(place, transport, recorder, passes, group, optimiser, hooks)
        if mesh is not None:
            assert group is not None
            self.divided = DividedWeights(self.trained, dist.get_rank(group), dist.get_world_size(group))
        self.shapes = [replace(shape, depth=1) for shape in place.plan.shapes]  # DDP has one backward pass at a time
        self._losses: dict[int, Tensor] = {}
        self._rounds = 0
        """Number of the present group's passes that this replica has run."""
        self._share_sum = self._expected = 0.0
        """For the present group: the sum of the shares of this replica's minibatches, and the unweighted sum over all
        replicas."""
        self._written = {*program.buffers_by_name()}
        """Names of the tensors that forward passes may write: buffers, and the frozen parameters that the first pass
        writes."""
        self._frozen_sums: dict[str, complex] | None = program.frozen_sums()
        """Sums of the frozen parameters before the first pass; None after it."""

    @property
    def sharded_root(self) -> torch.nn.Module | None:
        """The module that gathers weights while it runs a function on the model; None if every replica holds all
        weights.
        """
        return self._wrapper.module if isinstance(self._wrapper, Sharded) else None

    @contextmanager
    def running(self, segment: Segment) -> Iterator[None]:
        """Context in which a segment is trained on. Afterwards the replicas agree on buffers."""
        self._updates_before = self._versions.number
        with super().running(segment):
            yield
        self.agree_on_buffers(self._written_anywhere())

    def _written_anywhere(self) -> list[Tensor]:
        """The tensors that forward passes write at some replica. Tensors of a frozen backbone are not exchanged."""
        state = self._program.changing_state()
        if self._group is None or not state:
            return []
        flags = torch.tensor([name in self._written for name in state], dtype=torch.uint8)
        with self._replica_loss_explained("buffers"):
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group)
        return [tensor for tensor, flag in zip(state.values(), flags.tolist(), strict=True) if flag]

    def _forward(self, index: int) -> None:
        step, lap = self.begin_step(index), Stopwatch()
        inputs, target = self.read(index)
        step.load_s += lap()
        step.weight = self._weigh(index, target)
        self._losses[index] = loss = self._compute(index, inputs, target, counts=step.weight > 0)
        step.loss = loss.item() if step.weight else 0.0
        if self._frozen_sums:
            present = self._program.frozen_sums().items()
            self._written |= {name for name, total in present if total != self._frozen_sums[name]}
        self._frozen_sums = None
        step.forward_s += lap()
        self.note(FORWARD, index, lap)

    def _compute(self, index: int, inputs: Sequence[Tensor], target: Any, *, counts: bool) -> Tensor:
        """The loss of a minibatch. If the minibatch does not count: a number that depends on the model, with gradients
        of 0.
        """
        program = self._program
        seed_forward(self.place.seed, self.segment.epoch, self.segment.number(index), self.place.stage)

        def run() -> Tensor:
            output = program.call({}, (), inputs, self.size(index))
            loss = self._loss(index, {}, output, target)
            return loss if counts else self._zero(output)

        with self.passing("the model's forward", index), self._exchanging(index):
            loss: Tensor = self._wrapper.module(run)
        return loss

    def _zero(self, output: Any) -> Tensor:
        """A number through which the model's output and the loss's parameters get gradients of 0."""
        own = () if self._program.loss_state is None else self._program.loss_state.parameters().values()
        parts = [(one * 0).sum().real for one in tensors_in(output) if one.requires_grad]
        parts += [one.reshape(-1)[:0].sum().real for one in own]
        return sum(parts, torch.zeros((), device=self.place.device))

    def _backward(self, index: int) -> None:
        step, lap = self.step_of(index), Stopwatch()
        share = self._share(index)
        self._weights.pop(index, None)
        self._share_sum += share
        waited_s = self._differentiate(index, self._losses.pop(index), share)
        step.backward_s += lap() - waited_s
        step.sync_s += waited_s
        self.note(BACKWARD, index, lap)
        self._finish_backward(index)

    def _differentiate(self, index: int, loss: Tensor, share: float) -> float:
        """Run the backward pass. Returns the seconds for which DDP then waits for the all-reduces of its buckets."""
        self._expected = self._update_group(index // self._group_size).total
        computed_s: list[float] = []
        if loss.requires_grad:
            if isinstance(self._wrapper, Replicated):
                # Callbacks run after all gradients, in the order of queueing, so this callback runs before DDP's.
                queue = Variable._execution_engine.queue_callback
                loss.register_hook(lambda _: queue(lambda: computed_s.append(perf_counter())))  # type: ignore[no-untyped-call]
            with self.passing("the model's backward", index), recomputation_explained(), self._exchanging(index):
                torch.autograd.backward(loss, torch.full_like(loss, share * self.place.replicas / self._expected))
        self._rounds += 1
        return perf_counter() - computed_s[0] if computed_s else 0.0

    def _complete_rounds(self, group: int) -> None:
        """Run the passes of rounds in which this replica has no minibatch."""
        index = group * self._group_size
        while self._rounds < self._rounds_of(group):
            inputs, target = self.read(index)
            with self._program.preserved(self._written):
                loss = self._compute(index, inputs, target, counts=False)
                self._differentiate(index, loss, 1.0)
        self._rounds = 0

    def _rounds_of(self, group: int) -> int:
        """Rounds of a group. A segment that is asked to end ends after a whole group.

        With unequal shares a replica has one round for each of its minibatches, and one round if it has none in a short
        last group.
        """
        if self.place.shares:
            return max(1, len(self._own_members(group)))
        return -(-len(group_members(group, self._group_size, self.segment.count)) // self.place.replicas)

    def _exchanging(self, index: int) -> AbstractContextManager[None]:
        """Context of a pass, which averages gradients among all replicas in the last round of the group."""
        return self._wrapper.exchanging(self._rounds == self._rounds_of(index // self._group_size) - 1)

    def averaged_gradients(self) -> dict[str, Tensor]:
        """The mean of the present group's gradients, by parameter name. The last backward pass has averaged them. The
        weights of the job's `loss_weight` are applied here, because they are known only now.
        """
        gradients = {name: one.grad for name, one in self.trained.items() if one.grad is not None}
        for name, gradient in gradients.items():
            refuse_sparse(name, gradient)
        if self.place.job.loss_weight is not None:
            total = torch.tensor([self._share_sum], dtype=torch.float64)
            if self._group is not None:
                dist.all_reduce(total, group=self._group)
            if not total:
                gradients = {}  # no minibatch counts, so nothing is updated
            elif gradients:
                torch._foreach_mul_(list(gradients.values()), self._expected / float(total))
        self._share_sum = 0.0
        return gradients

    def make_step(self, averaged: Mapping[str, Tensor], group: int, lap: Stopwatch) -> None:
        """Update the weights, and finish the group's last minibatch."""
        super().make_step(averaged, group, lap)
        for parameter in self.trained.values():
            parameter.grad = None


class ShardedEvaluation(ForwardEngine):
    """Evaluates a model whose weights are gathered for every pass, in which all replicas take part."""

    def __init__(self, place: StageContext, transport: AnyTransport, recorder: Recorder, root: torch.nn.Module) -> None:
        """`root`: the wrapper that gathers weights around a function of the model."""
        super().__init__(place, transport, recorder)
        self._root = root

    @contextmanager
    def running(self, segment: Segment) -> Iterator[None]:
        """Context in which passes are run. A replica without a minibatch in the last round runs the first minibatch of
        the round.
        """
        with super().running(segment):
            yield
            replicas = self.place.replicas
            first = (self.count - 1) // replicas * replicas
            if self.place.replica >= self.count - first and self.limit(first) is None:
                inputs, _ = self.read(first)
                with self.passing("the model's forward", first):
                    self._root(lambda: self.output(first, [], inputs))

    def evaluate(self, index: int, received: Sequence[Tensor], inputs: Sequence[Tensor], target: Any) -> Any:
        """The model's output. Records loss and metrics while the weights of the loss are gathered."""
        with self.passing("the model's forward", index):
            return self._root(lambda: super(ShardedEvaluation, self).evaluate(index, received, inputs, target))


def _wrapped(
    program: ModuleProgram, group: dist.ProcessGroup | None, mesh: DeviceMesh | None, *, rounds: bool
) -> tuple[Wrapper, dict[str, Mapping[int, GradientHook]]]:
    """(the module in torch's wrapper, the user's hooks on gradients, which get the mean gradient of an update)."""
    if mesh is not None:
        return Sharded(program, mesh), {}
    hooks = take_hooks(program.parameters_by_name())
    if group is None or not any(one.requires_grad for one in program.parameters_by_name().values()):
        return Alone(program.whole), hooks
    return Replicated(program.whole, group, rounds=rounds), hooks
