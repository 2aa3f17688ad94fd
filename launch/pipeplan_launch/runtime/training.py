"""Training of one stage: forward, backward, gradient averaging and update, with each minibatch's weight version."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeplan_launch.comm.buckets import UpdateGroup
from pipeplan_launch.comm.gradient_allreduce import GradientReducer, average_buffers
from pipeplan_launch.comm.gradient_exchange import choose_exchange
from pipeplan_launch.comm.ordered_transport import OrderedTransport
from pipeplan_launch.comm.p2p import Transport, peer_loss_explained
from pipeplan_launch.comm.stage_transport import StageTransport
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.autocast import autocast
from pipeplan_launch.job.hidden_state import check_loss
from pipeplan_launch.job.hooks import hooked_gradients
from pipeplan_launch.job.loss_value import checked_loss, constant_loss_message, loss_text
from pipeplan_launch.job.loss_weight import weight_of
from pipeplan_launch.job.seeds import seed_forward
from pipeplan_launch.plan.averaging_options import EXACT_AVERAGING, GradientAveraging
from pipeplan_launch.plan.one_order import Direction
from pipeplan_launch.plan.schedule import ActionKind, group_count, group_members, own_members, replica_of
from pipeplan_launch.plan.staleness import AS_PLANNED, FLUSH_SCHEDULE, StalenessOptions, flushed_shapes
from pipeplan_launch.runtime.engine import Engine, Segment, WorkerPlace
from pipeplan_launch.runtime.in_flight import InFlightMinibatch, StageInputs
from pipeplan_launch.runtime.nested_tensors import bytes_of_tensors
from pipeplan_launch.runtime.recompute import (
    ForwardConditions,
    gradient_receive_posted,
    preserved_random_state,
    saving_no_tensors,
)
from pipeplan_launch.runtime.split_backward import SplitBackward
from pipeplan_launch.runtime.stage_optimizer import StageOptimizer
from pipeplan_launch.telemetry.recorder import Recorder, Stopwatch
from pipeplan_launch.telemetry.run_documents import ALL_REDUCE, BACKWARD, FORWARD, UPDATE, WAIT, WEIGHTS

MOST_CHECKED_BYTES = 1 << 26
"""Bytes of the model's output beyond which the loss is not checked, as its copies might not fit: `profile` does it."""


class TrainingEngine(Engine):
    """Runs a training schedule on one replica of one stage."""

    def __init__(
        self,
        place: WorkerPlace,
        transport: Transport | StageTransport | OrderedTransport,
        recorder: Recorder,
        group: dist.ProcessGroup | None,
        averaging: GradientAveraging = EXACT_AVERAGING,
        flush: dist.ProcessGroup | None = None,
        staleness: StalenessOptions = AS_PLANNED,
    ) -> None:
        """`group`: the replicas of this stage, None if there is only one. `averaging`: how they average gradients.
        `flush`: all workers of all stages, if the schedule flushes. `staleness`: what is done about old gradients.
        """
        passes = {
            ActionKind.FORWARD: self._forward,
            ActionKind.BACKWARD: self._backward,
            ActionKind.WEIGHTS: self._differentiate_weights,
        }
        groups = {ActionKind.REDUCE: self._start_allreduce, ActionKind.UPDATE: self._update}
        super().__init__(place, place.plan.schedule, transport, recorder, {**passes, **groups})
        if place.is_last and place.job.loss is None:
            raise LaunchError(f"{place.plan.model_ref!r} has no loss to train with: return Job(model, loss=...)")
        self._flush_epochs = staleness.flush_epochs
        self._optimiser = StageOptimizer(place, flush, staleness, group if averaging.shards_optimizer else None)
        self.shards, self.updated = self._optimiser.shards, self._optimiser.updated
        self.correction = self._optimiser.correction
        self.trained, self.optimizer = self._optimiser.trained, self._optimiser.optimizer
        self.rates = self._optimiser.rates
        self._choose_schedule(0)
        self._versions = self._optimiser.versions
        weighted = place.job.loss_weight is not None
        exchange = choose_exchange(averaging, place.plan, place.stage, place.rank, group, self.optimizer, weighted)
        self._streams = transport.streams if isinstance(transport, OrderedTransport) else None
        own = {name: parameter for name, parameter in self.trained.items() if name not in place.program.shared}
        self._bucket_bytes = place.plan.emulated[place.stage].bucket_bytes if place.plan.emulated else None
        self._reducer = GradientReducer(own, group, exchange, self._streams, bucket_bytes=self._bucket_bytes)
        self._shared: dict[tuple[int, ...], GradientReducer] = {}
        """The reducer for each set of stages that share parameters with this one."""
        self._group = group
        self._updates_before = 0
        """Updates made before the segment."""
        self._timeline_offset = 0
        """Offset from a number of updates to the timeline's group number."""
        self._in_flight: dict[int, InFlightMinibatch] = {}
        self._split: dict[int, SplitBackward] = {}
        """The rest of the backward passes of minibatches whose gradients of the weights are still to come."""
        self._checks_loss = place.is_last and place.replica == 0 and place.is_traced
        """Whether the first call of the loss checks that it has no state that training would not see."""
        self._weights: dict[int, float] = {}
        """The weights of minibatches whose gradients are not collected yet, by the job's `loss_weight`."""
        self._deferred: set[int] = set()
        """Minibatches whose gradients are collected by action W."""
        self._posts_late = place.recomputes and self.schedule.virtual is None
        """Whether the receive of a gradient is posted when the one before it is taken, and not with the forward."""
        self._latest_received: dict[int, int] = {}
        """Latest minibatch received from each replica of the previous stage."""
        self._unsettled: list[int] = []
        """Minibatches whose gradients may still be on their way to the previous stage."""

    def share(self, groups: Mapping[tuple[int, ...], dist.ProcessGroup]) -> None:
        """Sum the gradients of parameters of which several stages have copies, over process groups by stages.

        `groups` has all sets of stages of the pipeline that share parameters, also those without this stage.
        """
        self.sharing_stages = sorted(groups)
        for stages in sorted({*self.place.program.shared.values()}):
            names = sorted(name for name in self.trained if self.place.program.shared.get(name) == stages)
            if names:  # in an order that does not depend on the stage, as the buckets must be the same in all
                parameters = {name: self.trained[name] for name in names}
                self._shared[stages] = GradientReducer(
                    parameters,
                    groups[stages],
                    streams=self._streams,
                    stages=len(stages),
                    bucket_bytes=self._bucket_bytes,
                )

    def begin_timeline(self, epoch: int, first: int, count: int, met_s: float) -> None:
        """Start an epoch, and its timeline. Segments of the epoch may end with short groups."""
        self._choose_schedule(epoch)
        super().begin_timeline(epoch, first, count, met_s)
        self._timeline_offset = group_count(self._group_size, first) - self._versions.number

    def _choose_schedule(self, epoch: int) -> None:
        """The plan's schedule, or one that flushes in the first epochs, if that is asked for."""
        plan = self.place.plan
        self._fresh = epoch < self._flush_epochs
        self.schedule = FLUSH_SCHEDULE if self._fresh else plan.schedule
        self.shapes = flushed_shapes(plan) if self._fresh else plan.shapes
        shape = self.shapes[self.place.stage]
        self._group_size = self.schedule.group_size(shape)
        deferred = shape.deferred > 0 if self.schedule.virtual is None else not self.place.recomputes
        self._splits = self.schedule.splits and deferred
        """Whether the backward pass leaves the gradients of the weights to action W."""

    @contextmanager
    def running(self, segment: Segment) -> Iterator[None]:
        """Context in which a segment is trained on. Afterwards the stage's replicas agree on weights and buffers."""
        self._choose_schedule(segment.epoch)
        self._latest_received, self._unsettled = {}, []
        for reducer in (self._reducer, *self._shared.values()):
            reducer.reset()
        self._updates_before = self._versions.number
        with super().running(segment):
            yield
        if self._group is not None:
            with self._replica_loss_explained("buffers"):
                program = self.place.program
                state = {**program.buffers_by_name(), **program.changing_state()}  # and momentum encoders
                average_buffers(list(state.values()), self._group)

    def _forward(self, index: int) -> None:
        place = self.place
        step, lap = self.begin_step(index), Stopwatch()
        received = self.take_activations(index)
        step.wait_s += lap()
        self.note(WAIT, index, lap, keep_brief=False)
        if not place.is_first:
            self._latest_received[replica_of(index, len(place.plan.pipeline[place.stage - 1].workers))] = index
        stage_inputs = StageInputs(received, *self.read(index))
        step.load_s += lap()
        for tensor, boundary in zip(received, place.program.receives, strict=True):
            tensor.requires_grad_(boundary.requires_grad)
        self._versions.acquire(index, self._version(index), self._version(index + place.replicas))
        seed_forward(place.seed, self.segment.epoch, self.segment.number(index), place.stage)
        if place.recomputes:
            outputs, self._in_flight[index] = self._compute_without_saving(index, stage_inputs)
        else:
            outputs = self._compute(index, stage_inputs)
            self._in_flight[index] = InFlightMinibatch(stage_inputs, outputs)
        if place.is_last:
            step.loss, step.weight = self._weighed_loss(index, outputs[0], stage_inputs.target)
        step.forward_s += lap()
        self.note(FORWARD, index, lap)
        if not place.is_last:
            if not self._posts_late or index < place.replicas:
                self._post_gradient_receive(index)
            if place.recomputes:  # keep at most one output, which the transport holds until it has left
                self.settle_activations(index - place.replicas)
            self.send_activations(index, outputs)
        step.send_s += lap()

    def _weighed_loss(self, index: int, loss: Tensor, target: Any) -> tuple[float, float]:
        """(the loss of a minibatch, its weight in means): with a weight of 0 the loss counts nowhere, and is 0."""
        loss_weight = self.place.job.loss_weight
        if loss_weight is None:
            return loss.item(), 1.0
        with self.calling("the job's loss_weight", index):
            self._weights[index] = weight = weight_of(loss_weight, target)
        return (loss.item() if weight else 0.0), weight

    def _version(self, index: int) -> int:
        """The weight version of a minibatch in the schedule, as the number of updates since the job began."""
        return self._updates_before + self.schedule.version(self.shapes, self.place.stage, index)

    def _compute(
        self,
        index: int,
        stage_inputs: StageInputs,
        state: Mapping[str, Tensor] | None = None,
        saving: AbstractContextManager[object] | None = None,
    ) -> Sequence[Tensor]:
        """The stage's outputs, or the loss at the last stage. `state` replaces buffers of the stage."""
        place = self.place
        weights = {**self._versions.leaves_of(index), **(state or {})}
        with self.calling("the model's forward", index), saving or nullcontext():
            result: Any = place.program.call(weights, stage_inputs.received, stage_inputs.inputs, self.size(index))
        if place.is_last:
            result = (self._loss(index, weights, result, stage_inputs),)
        outputs: Sequence[Tensor] = result
        return outputs

    def _loss(self, index: int, weights: Mapping[str, Tensor], output: Any, stage_inputs: StageInputs) -> Tensor:
        """The job's loss, with those of `weights` that are its own."""
        place, target = self.place, stage_inputs.target
        assert place.job.loss is not None
        with self.calling(loss_text(place.job.loss), index), autocast(place.job.autocast, place.device):
            if self._checks_loss and bytes_of_tensors(output) <= MOST_CHECKED_BYTES:
                names = {id(one): name for name, one in place.program.parameters_by_name().items()}
                with preserved_random_state(place.device):
                    check_loss(place.job.loss, place.loss_state, output, target, names)
            self._checks_loss = False
            loss = checked_loss(place.job.loss, place.loss(weights, output, target))
        if not loss.requires_grad and (self.trained or any(one.requires_grad for one in stage_inputs.received)):
            raise LaunchError(constant_loss_message(place.job.loss))
        return loss

    def _compute_without_saving(
        self, index: int, stage_inputs: StageInputs
    ) -> tuple[Sequence[Tensor], InFlightMinibatch]:
        """(outputs of the stage, the state from which backward computes them again)."""
        conditions = ForwardConditions.now(self.place.program, self.place.device)
        writes = stage_inputs.write_counts
        outputs = self._compute(index, stage_inputs, saving=saving_no_tensors())
        inputs_modified = stage_inputs.write_counts != writes
        kept = StageInputs(stage_inputs.received, (), None) if inputs_modified else stage_inputs
        return [output.detach() for output in outputs], InFlightMinibatch(kept, (), conditions, inputs_modified)

    def _compute_again(self, index: int, state: InFlightMinibatch, conditions: ForwardConditions) -> Sequence[Tensor]:
        """The outputs of the forward pass again, with the same weights, and with the tensors that backward needs."""
        with preserved_random_state(self.place.device):
            stage_inputs = (
                StageInputs(state.inputs.received, *self.read(index)) if state.inputs_modified else state.inputs
            )
            with conditions.restored() as buffers:
                return self._compute(index, stage_inputs, buffers)

    def _post_gradient_receive(self, index: int) -> None:
        """Post the receive of a minibatch's gradients before its activations leave, so that they always find it
        posted.

        A stage that recomputes posts it later (`gradient_receive_posted`).
        """
        layout = self.gradient_layout(index)
        source = self.place.peer(self.place.stage + 1, index)
        self.transport.post(Direction.GRADIENTS, self.segment.number(index), source, layout)

    def _backward(self, index: int) -> None:
        place = self.place
        step, lap = self.step_of(index), Stopwatch()
        state = self._in_flight.pop(index)
        outputs = state.outputs
        if state.conditions is not None:
            # Recomputation needs nothing from the next stage, so it runs before waiting for the gradient.
            outputs = self._compute_again(index, state, state.conditions)
            step.backward_s += lap()
            self.note(BACKWARD, index, lap)
        roots, gradients = list(outputs), [torch.ones_like(outputs[0])] if place.is_last else []
        if not place.is_last:
            gradients = self.transport.take(Direction.GRADIENTS, self.segment.number(index))
            if gradients and place.job.loss_weight is not None:
                self._weights[index] = float(gradients.pop())
            following = index + place.replicas
            if self._posts_late and following < self.count:
                self._post_gradient_receive(following)
            roots = [out for out, boundary in zip(outputs, place.program.sends, strict=True) if boundary.requires_grad]
            self.settle_activations(index)
        step.wait_s += lap()
        self.note(WAIT, index, lap, keep_brief=False)
        pairs = [(root, gradient) for root, gradient in zip(roots, gradients, strict=True) if root.requires_grad]
        if self._weights.get(index) == 0:
            pairs = []  # a mean over no targets has no gradient, and may be no number
        splits = self._splits and not self.weights_follow
        if pairs and splits:
            self._differentiate_inputs(index, pairs, state.inputs.received)
        elif pairs:
            with self._gradients_to_reducer(index), self.calling("the model's backward", index):
                torch.autograd.backward([root for root, _ in pairs], [gradient for _, gradient in pairs])
        step.backward_s += lap()
        self.note(BACKWARD, index, lap)
        if not place.is_first:  # before anything else, because the previous stage may be waiting
            self._send_gradients(index, state.inputs.received)
        step.send_s += lap()
        if splits:
            self._deferred.add(index)
        else:
            self._collect_gradients(index)
        step.backward_s += lap()
        self.note(BACKWARD, index, lap, keep_brief=False)
        if not self.schedule.splits:
            self._finish_backward(index)

    def _differentiate_inputs(
        self, index: int, pairs: Sequence[tuple[Tensor, Tensor]], received: Sequence[Tensor]
    ) -> None:
        """The part of a backward pass that the previous stage waits for."""
        roots, gradients = [root for root, _ in pairs], [gradient for _, gradient in pairs]
        if self.transport.in_order and not self.place.is_last:
            # The second part reads the received gradients when their memory may have been written again.
            gradients = [gradient.clone() for gradient in gradients]
        inputs = [tensor for tensor in received if tensor.requires_grad]
        with self.calling("the model's backward", index):
            split = SplitBackward(roots, inputs, self._versions.leaves_of(index).values())
            split.inputs(gradients)
        self._split[index] = split

    def _differentiate_weights(self, index: int) -> None:
        """The rest of a backward pass; nothing where the first part did all of it."""
        step, lap = self.step_of(index), Stopwatch()
        split = self._split.pop(index, None)
        if split is not None:
            with self.calling("the model's backward", index):
                split.weights()
        if index in self._deferred:
            self._deferred.discard(index)
            self._collect_gradients(index)
        step.backward_s += lap()
        self.note(WEIGHTS, index, lap, keep_brief=False)
        self._finish_backward(index)

    def _collect_gradients(self, index: int) -> None:
        """Take the gradients of a minibatch's weights from the leaves, and add them to those of its group."""
        made, share = self._versions.release(index), self._share(index)
        self._weights.pop(index, None)
        for reducer in (self._reducer, *self._shared.values()):
            reducer.add(made, share)

    def _finish_backward(self, index: int) -> None:
        if index != self._own_members(index // self._group_size)[-1]:
            self.finish_step(index)  # the update finishes the group's last minibatch

    def _gradients_to_reducer(self, index: int) -> AbstractContextManager[None]:
        """Context around a backward pass, whose gradients may leave for the other replicas before it ends."""
        group = index // self._group_size
        # Where a worker's stages split, their last passes may come in another order on another replica.
        at_once = self.schedule.virtual is None or not self.schedule.splits
        final = self._update_group(group) if at_once and index == self._own_members(group)[-1] else None
        return self._reducer.backward(self._versions.leaves_of(index), self._share(index), final)

    def _send_gradients(self, index: int, received: Sequence[Tensor]) -> None:
        gradients = [
            torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for tensor, boundary in zip(received, self.place.program.receives, strict=True)
            if boundary.requires_grad
        ]
        if gradients and index in self._weights:
            gradients.append(torch.tensor([self._weights[index]], dtype=torch.float64, device=self.place.device))
        self._settle_gradients(index - 2 * self.place.replicas)
        self._unsettled.append(index)
        destination = self.place.peer(self.place.stage - 1, index)
        self.transport.send(Direction.GRADIENTS, self.segment.number(index), destination, gradients)

    def _settle_gradients(self, newest: int) -> None:
        """Wait until gradients up to minibatch `newest` have left, if their receive is posted, so that the wait is
        short.
        """
        previous = self.place.plan.pipeline[self.place.stage - 1]
        replicas = len(previous.workers)
        for index in [minibatch for minibatch in self._unsettled if minibatch <= newest]:
            latest = self._latest_received[replica_of(index, replicas)]
            # The receive was posted before the activations came here, unless the previous stage recomputes.
            at_once = not previous.recompute or self.schedule.virtual is not None
            if at_once or gradient_receive_posted(index, latest, replicas, previous.depth):
                self.transport.settle(Direction.GRADIENTS, self.segment.number(index))
                self._unsettled.remove(index)

    def _start_allreduce(self, group: int) -> None:
        lap = Stopwatch()
        with self._replica_loss_explained(f"gradients of group {group}"):
            for reducer in (self._reducer, *self._shared.values()):
                reducer.start(self._update_group(group))
        own = self._own_members(group)
        if own:
            self.step_of(own[-1]).sync_s += lap()

    def start_collective(self, stages: tuple[int, ...], group: int) -> None:
        """Start the all-reduce of the gradients that action R has collected, among the replicas of these stages."""
        reducer = self._reducer if stages == (self.place.stage,) else self._shared.get(stages)
        if reducer is not None:  # shared weights may all be frozen
            with self._replica_loss_explained(f"gradients of group {group}"):
                reducer.launch()

    def _update(self, group: int) -> None:
        update_stages([self], group)

    def wait_for_gradients(self, group: int, lap: Stopwatch) -> dict[str, Tensor]:
        """The averaged gradients of a group, by parameter name, once its all-reduce is done, as the hooks of their
        parameters return them.
        """
        with self._replica_loss_explained(f"gradients of group {group}"):
            averaged = self._reducer.finish()
            for reducer in self._shared.values():
                averaged = {**averaged, **reducer.finish()}
        synchronised = lap()
        self._note_allreduce(group, lap)
        own = self._own_members(group)
        if own:
            self.step_of(own[-1]).sync_s += synchronised
        with self.calling("a hook on a parameter", own[-1] if own else group * self._group_size):
            return hooked_gradients(averaged, self.trained)

    def clip(self, averaged: Mapping[str, Tensor]) -> None:
        """Clip the gradients of an update, of all stages of this worker, in place."""
        with peer_loss_explained(
            f"stage {self.place.stage} (rank {self.place.rank}) could not learn the gradients' norm"
        ):
            self._optimiser.clip(averaged)

    def make_step(self, averaged: Mapping[str, Tensor], group: int, lap: Stopwatch) -> None:
        """Update the weights, and finish the group's last minibatch."""
        own = self._own_members(group)
        with self.calling("the optimizer's step", own[-1] if own else group * self._group_size):
            self._optimiser.step(averaged, fresh=self._fresh)
        updated = lap()
        self.timeline.note_group(UPDATE, *self._timeline_numbers(group), lap)
        if own:
            self.step_of(own[-1]).update_s += updated
            self.finish_step(own[-1])
        if self.rates is not None:
            self.rates.after_update(len(group_members(group, self._group_size, self.count)))

    def _note_allreduce(self, group: int, lap: Stopwatch) -> None:
        """Record that the stopwatch's last lap was a wait for a group's all-reduce, which has finished."""
        numbers = self._timeline_numbers(group)
        self.timeline.note_group(WAIT, *numbers, lap, keep_brief=False)
        if self._group is not None:
            self.timeline.note_group(ALL_REDUCE, *numbers, lap, since_s=self._reducer.begun_s)

    def _timeline_numbers(self, group: int) -> tuple[int, int]:
        """(number of a group in the timeline, number of its first minibatch in the epoch)."""
        return self._timeline_offset + self._updates_before + group, self.segment.number(group * self._group_size)

    def _update_group(self, group: int) -> UpdateGroup:
        """The group as the reducer takes it. It is the same in all replicas, even if some do not know yet that the
        segment ends early.
        """
        size, count, sizes = self._group_size, self.segment.count, self.segment.batches.sizes
        earlier = self.segment.epoch * group_count(size, sizes.count) + group_count(size, self.segment.first)
        total = sum(self._sample_share(index) for index in group_members(group, size, count))
        return UpdateGroup(total, earlier + group, ends_segment=group == group_count(size, count) - 1)

    def _share(self, index: int) -> float:
        """Weight of a minibatch in the mean of its group, of this stage once its gradients have come."""
        share = self._sample_share(index)
        return share if self._group_size == 1 else self._weights.get(index, share)

    def _sample_share(self, index: int) -> float:
        """Samples of a minibatch, in whole minibatches: 1, or less for a short last one."""
        sizes = self.segment.batches.sizes
        return sizes.real_samples(self.segment.number(index)) / sizes.minibatch

    def _own_members(self, group: int) -> range:
        """This replica's minibatches of a group; empty if a short last group has none for it."""
        return own_members(group, self._group_size, self.place.replica, self.place.replicas, self.count)

    def _replica_loss_explained(self, what: str) -> AbstractContextManager[None]:
        place = self.place
        stages = {place.stage}.union(*place.program.shared.values())
        workers = [worker for stage in sorted(stages) for worker in place.plan.pipeline[stage].workers]
        peers = [worker for worker in workers if worker != place.rank]
        return peer_loss_explained(
            f"stage {place.stage} (rank {place.rank}) could not average the {what} with ranks {peers}", *peers
        )


def update_stages(engines: Sequence[TrainingEngine], group: int) -> None:
    """Update the weights of all stages of a worker, whose engines these are."""
    lap = Stopwatch()
    averaged = [engine.wait_for_gradients(group, lap) for engine in engines]
    engines[-1].clip({name: gradient for one in averaged for name, gradient in one.items()})
    for engine, gradients in zip(engines, averaged, strict=True):
        engine.make_step(gradients, group, lap)
