"""Training: forward, backward, averaging and update of one stage, with the weights that each minibatch is owed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeplan_launch.engine import Engine, Place, Segment
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.metrics import Lap, Recorder
from pipeplan_launch.program import CutTensor
from pipeplan_launch.reduce import GradientReducer, average_buffers
from pipeplan_launch.schedule import Kind, group_members
from pipeplan_launch.seeds import seed_forward
from pipeplan_launch.stash import WeightVersions
from pipeplan_launch.transport import Direction, Transport, explained
from pipeplan_launch.usercode import user_code


@dataclass(frozen=True)
class _InFlight:
    """What the backward of a minibatch starts from and ends at."""

    received: Sequence[Tensor]
    outputs: Sequence[Tensor]


class TrainingEngine(Engine):
    """Runs a training schedule on one replica of one stage."""

    def __init__(self, place: Place, transport: Transport, recorder: Recorder, group: dist.ProcessGroup | None) -> None:
        """`group`: the replicas of this stage, None where there is only one."""
        handlers = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.REDUCE: self._reduce,
            Kind.UPDATE: self._update,
        }
        super().__init__(place, place.plan.schedule, transport, recorder, handlers)
        if place.is_last and place.job.loss is None:
            raise LaunchError(f"{place.plan.model_ref!r} has no loss to train with: return Job(model, loss=...)")
        parameters = place.program.parameters_by_name()
        self.trained: dict[str, nn.Parameter] = _trainable(parameters)
        self.optimizer: Optimizer | None = None
        if self.trained:
            with user_code("the job's optimizer"):
                self.optimizer = place.job.make_optimizer(list(self.trained.values()))
        self._versions = WeightVersions(parameters)
        self._reducer = GradientReducer(self.trained, group)
        self._group = group
        self._in_flight: dict[int, _InFlight] = {}

    def run(self, segment: Segment) -> None:
        """Train on a segment; afterwards the stage's replicas agree on everything."""
        super().run(segment)
        if self._group is not None:
            with self._with_replicas("buffers"):
                average_buffers(list(self.place.program.buffers_by_name().values()), self._group)

    def _forward(self, minibatch: int) -> None:
        place = self.place
        step, lap = self.recorder.begin(self.segment.epoch, minibatch), Lap()
        step.samples = self.segment.batches.sizes.real(minibatch)
        received = self.take_activations(minibatch)
        step.wait_s += lap()
        inputs, target = self.read(minibatch)
        step.load_s += lap()
        for tensor, cut in zip(received, place.program.receives, strict=True):
            tensor.requires_grad_(cut.requires_grad)
        weights = self._versions.acquire(minibatch)
        seed_forward(place.seed, self.segment.epoch, minibatch, place.stage)
        with self.calling("the model's forward", minibatch):
            result = place.program.call(weights, received, inputs, self.segment.batches.sizes.run(minibatch))
        if place.is_last:
            assert place.job.loss is not None
            with self.calling("the job's loss", minibatch):
                loss = _scalar(place.job.loss(result, target))
            step.loss = loss.item()
            result = (loss,)
        step.forward_s += lap()
        self._in_flight[minibatch] = _InFlight(received, result)
        if not place.is_last:
            self._post_gradients(minibatch)
            self.send_activations(minibatch, result)
        step.send_s += lap()

    def _post_gradients(self, minibatch: int) -> None:
        """Before the activations leave: the next stage's gradients then always find their receive posted."""
        wires = self.wires(_differentiable(self.place.program.sends), minibatch)
        source = self.place.peer(self.place.stage + 1, minibatch)
        self.transport.post(Direction.GRADIENTS, minibatch, source, wires)

    def _backward(self, minibatch: int) -> None:
        place = self.place
        step, lap = self.recorder.of(minibatch), Lap()
        state = self._in_flight.pop(minibatch)
        roots, gradients = list(state.outputs), [torch.ones_like(state.outputs[0])] if place.is_last else []
        if not place.is_last:
            gradients = self.transport.take(Direction.GRADIENTS, minibatch)
            roots = [out for out, cut in zip(state.outputs, place.program.sends, strict=True) if cut.requires_grad]
            self.transport.settle(Direction.ACTIVATIONS, minibatch)
        step.wait_s += lap()
        pairs = [(root, gradient) for root, gradient in zip(roots, gradients, strict=True) if root.requires_grad]
        if pairs:
            with self.calling("the model's backward", minibatch):
                torch.autograd.backward([root for root, _ in pairs], [gradient for _, gradient in pairs])
        self._reducer.add(self._versions.release(minibatch))
        step.backward_s += lap()
        if not place.is_first:
            self._send_gradients(minibatch, state.received)
        step.send_s += lap()

    def _send_gradients(self, minibatch: int, received: Sequence[Tensor]) -> None:
        gradients = [
            torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for tensor, cut in zip(received, self.place.program.receives, strict=True)
            if cut.requires_grad
        ]
        # Its receive was posted before the forward came here, so waiting for an older one cannot block for long.
        self.transport.settle(Direction.GRADIENTS, minibatch - 2 * self.place.replicas)
        destination = self.place.peer(self.place.stage - 1, minibatch)
        self.transport.send(Direction.GRADIENTS, minibatch, destination, gradients)

    def _reduce(self, group: int) -> None:
        lap = Lap()
        with self._with_replicas(f"gradients of group {group}"):
            self._reducer.start()
        own = self._own_of(group)
        if own is not None:
            self.recorder.of(own).sync_s += lap()

    def _update(self, group: int) -> None:
        lap = Lap()
        own = self._own_of(group)
        members = group_members(group, self.place.replicas, self.segment.batches.sizes.count)
        with self._with_replicas(f"gradients of group {group}"):
            averaged = self._reducer.finish(len(members))
        synchronised = lap()
        changed = []
        for name, gradient in averaged.items():
            parameter = self.trained[name]
            parameter.grad = gradient
            changed.append(parameter)
        if self.optimizer is not None:
            with self.calling("the optimizer's step", members[0] if own is None else own):
                self._versions.update(changed, self.optimizer.step)
        for parameter in changed:
            parameter.grad = None
        if own is not None:
            step = self.recorder.of(own)
            step.sync_s += synchronised
            step.update_s += lap()
            self.finish_step(own)

    def _with_replicas(self, what: str) -> AbstractContextManager[None]:
        place = self.place
        others = [worker for worker in place.plan.pipeline[place.stage].workers if worker != place.rank]
        return explained(f"stage {place.stage} (rank {place.rank}) could not average the {what} with ranks {others}")

    def _own_of(self, group: int) -> int | None:
        """This replica's minibatch of a group; None in a short last group that has none."""
        minibatch = group * self.place.replicas + self.place.replica
        return minibatch if minibatch < self.segment.batches.sizes.count else None


def _trainable(parameters: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    """The parameters that training changes, a tied one under its first name only."""
    seen: set[int] = set()
    result: dict[str, nn.Parameter] = {}
    for name, parameter in parameters.items():
        if isinstance(parameter, nn.Parameter) and parameter.requires_grad and id(parameter) not in seen:
            seen.add(id(parameter))
            result[name] = parameter
    return result


def _differentiable(tensors: Sequence[CutTensor]) -> list[CutTensor]:
    return [tensor for tensor in tensors if tensor.requires_grad]


def _scalar(loss: object) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise LaunchError(
            f"the job's loss must return a tensor with one number, the mean over the minibatch, not {shape}"
        )
    return loss
