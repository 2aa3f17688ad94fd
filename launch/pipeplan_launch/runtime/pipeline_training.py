"""Training of one stage of a pipeline: passes with each minibatch's weight version, and messages between stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeplan_launch.comm.gradient_allreduce import GradientReducer
from pipeplan_launch.comm.gradient_exchange import choose_exchange
from pipeplan_launch.comm.ordered_transport import AnyTransport, OrderedTransport
from pipeplan_launch.job.pass_conditions import seed_forward
from pipeplan_launch.plan.communication_order import Direction
from pipeplan_launch.plan.run_options import (
    AS_PLANNED,
    EXACT_AVERAGING,
    FLUSH_SCHEDULE,
    GradientAveraging,
    StalenessOptions,
    flushed_shapes,
)
from pipeplan_launch.plan.schedule import ActionKind, replica_of
from pipeplan_launch.runtime.backward_passes import (
    ForwardConditions,
    SplitBackward,
    gradient_receive_posted,
    preserved_random_state,
    saving_no_tensors,
)
from pipeplan_launch.runtime.engine import Segment, StageContext
from pipeplan_launch.runtime.stage_optimizer import StageOptimizer
from pipeplan_launch.runtime.training import TrainingEngine
from pipeplan_launch.runtime.weight_stash import InFlightMinibatch
from pipeplan_launch.telemetry.recorder import Recorder, Stopwatch
from pipeplan_launch.telemetry.run_folder import BACKWARD, FORWARD, WAIT, WEIGHTS


class PipelineTraining(TrainingEngine):
    """Runs the training schedule of a pipeline on one replica of one stage, with each minibatch's weight version."""

    def __init__(
        self,
        place: StageContext,
        transport: AnyTransport,
        recorder: Recorder,
        group: dist.ProcessGroup | None,
        averaging: GradientAveraging = EXACT_AVERAGING,
        flush: dist.ProcessGroup | None = None,
        staleness: StalenessOptions = AS_PLANNED,
    ) -> None:
        """`group`: the replicas of this stage, None if there is only one. `averaging`: options for averaging gradients.
        `flush`: all workers of all stages, if the schedule flushes. `staleness`: options for old gradients.
        """
        passes = {
            ActionKind.FORWARD: self._forward,
            ActionKind.BACKWARD: self._backward,
            ActionKind.WEIGHTS: self._differentiate_weights,
        }
        self._flush_epochs = staleness.flush_epochs
        shards = group if averaging.shards_optimizer else None
        super().__init__(
            place,
            transport,
            recorder,
            {**passes, ActionKind.REDUCE: self._start_allreduce},
            group,
            StageOptimizer(place, flush, staleness, shards),
        )
        self._choose_schedule(0)
        weighted = place.job.loss_weight is not None
        exchange = choose_exchange(averaging, place.plan, place.stage, place.rank, group, self.optimizer, weighted)
        self._streams = transport.streams if isinstance(transport, OrderedTransport) else None
        own = {name: parameter for name, parameter in self.trained.items() if name not in place.program.shared}
        self._bucket_bytes = place.plan.emulated[place.stage].bucket_bytes if place.plan.emulated else None
        self._reducer = GradientReducer(own, group, exchange, self._streams, bucket_bytes=self._bucket_bytes)
        self._shared: dict[tuple[int, ...], GradientReducer] = {}
        """The reducer for each set of stages that share parameters with this stage."""
        self._in_flight: dict[int, InFlightMinibatch] = {}
        self._split: dict[int, SplitBackward] = {}
        """The rest of the backward pass, for each minibatch whose weight gradients are not computed yet."""
        self._deferred: set[int] = set()
        """Minibatches whose gradients are collected by action W."""
        self._posts_late = place.recomputes and self.schedule.virtual is None
        """Whether a gradient's receive is posted after the previous gradient was taken, not in the minibatch's own
        forward."""
        self._latest_received: dict[int, int] = {}
        """Latest minibatch received from each replica of the previous stage."""
        self._unsettled: list[int] = []
        """Minibatches whose gradients may still be on their way to the previous stage."""

    def share(self, groups: Mapping[tuple[int, ...], dist.ProcessGroup]) -> None:
        """Sum the gradients of parameters that several stages share.

        `groups` has a process group for every set of stages that share parameters, also for sets without this stage.
        """
        self.sharing_stages = sorted(groups)
        for stages in sorted({*self.place.program.shared.values()}):
            names = sorted(name for name in self.trained if self.place.program.shared.get(name) == stages)
            if names:  # sorted, because the buckets must be the same in all stages of the set
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

    def _choose_schedule(self, epoch: int) -> None:
        """Use the plan's schedule, or a schedule that flushes in the first epochs if the options ask for it."""
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
        program = self.place.program
        state = {**program.buffers_by_name(), **program.changing_state()}  # the latter: e.g. a momentum encoder
        self.agree_on_buffers(list(state.values()))

    # A step: receive, forward, send; receive gradients, backward, send them; reduce; update (`update_stages`).

    def _forward(self, index: int) -> None:
        place = self.place
        step, lap = self.begin_step(index), Stopwatch()
        received = self.take_activations(index)
        step.wait_s += lap()
        self.note(WAIT, index, lap, keep_brief=False)
        if not place.is_first:
            self._latest_received[replica_of(index, len(place.plan.pipeline[place.stage - 1].workers))] = index
        self._in_flight[index] = minibatch = InFlightMinibatch(received, *self.read(index))
        step.load_s += lap()
        for tensor, boundary in zip(received, place.program.receives, strict=True):
            tensor.requires_grad_(boundary.requires_grad)
        self._versions.acquire(index, self._version(index), self._version(index + place.replicas))
        seed_forward(place.seed, self.segment.epoch, self.segment.number(index), place.stage)
        target = minibatch.target
        if place.recomputes:
            outputs = self._compute_without_saving(index, minibatch)
        else:
            outputs = minibatch.outputs = self._compute(index, minibatch)
        if place.is_last:
            step.weight = self._weigh(index, target)
            step.loss = outputs[0].item() if step.weight else 0.0
        step.forward_s += lap()
        self.note(FORWARD, index, lap)
        if not place.is_last:
            if not self._posts_late or index < place.replicas:
                self._post_gradient_receive(index)
            if place.recomputes:  # keep at most one output, which the transport holds until it has left
                self.settle_activations(index - place.replicas)
            self.send_activations(index, outputs)
        step.send_s += lap()

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
            pairs = []  # a mean over no targets has no gradient, and may be NaN
        splits = self._splits and not self.weights_follow
        if pairs and splits:
            self._differentiate_inputs(index, pairs, state.received)
        elif pairs:
            with self._gradients_to_reducer(index), self.calling("the model's backward", index):
                torch.autograd.backward([root for root, _ in pairs], [gradient for _, gradient in pairs])
        step.backward_s += lap()
        self.note(BACKWARD, index, lap)
        if not place.is_first:  # before anything else, because the previous stage may be waiting
            self._send_gradients(index, state.received)
        step.send_s += lap()
        if splits:
            self._deferred.add(index)
        else:
            self._collect_gradients(index)
        step.backward_s += lap()
        self.note(BACKWARD, index, lap, keep_brief=False)
        if not self.schedule.splits:
            self._finish_backward(index)

    def _differentiate_weights(self, index: int) -> None:
        """Run the rest of a backward pass, if the first part did not do all of it."""
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

    def averaged_gradients(self) -> dict[str, Tensor]:
        """Wait for the mean of the present group's gradients; returns it by parameter name."""
        averaged = self._reducer.finish()
        if self._group is not None:
            self.begun_s = self._reducer.begun_s
        for reducer in self._shared.values():
            averaged = {**averaged, **reducer.finish()}
        return averaged

    # Parts of a step.

    def _version(self, index: int) -> int:
        """The weight version of a minibatch in the schedule, as the number of updates since the job began."""
        return self._updates_before + self.schedule.version(self.shapes, self.place.stage, index)

    def _compute(
        self,
        index: int,
        minibatch: InFlightMinibatch,
        state: Mapping[str, Tensor] | None = None,
        saving: AbstractContextManager[object] | None = None,
    ) -> Sequence[Tensor]:
        """The stage's outputs, or the loss at the last stage. `state` replaces buffers of the stage."""
        place = self.place
        weights = {**self._versions.leaves_of(index), **(state or {})}
        with self.calling("the model's forward", index), saving or nullcontext():
            result: Any = place.program.call(weights, minibatch.received, minibatch.inputs, self.size(index))
        if place.is_last:
            result = (self._loss(index, weights, result, minibatch.target, minibatch.received),)
        outputs: Sequence[Tensor] = result
        return outputs

    def _compute_without_saving(self, index: int, minibatch: InFlightMinibatch) -> Sequence[Tensor]:
        """The stage's outputs, which backward computes again."""
        minibatch.conditions = ForwardConditions.now(self.place.program, self.place.device)
        writes = minibatch.write_counts
        outputs = self._compute(index, minibatch, saving=saving_no_tensors())
        if minibatch.write_counts != writes:
            minibatch.inputs, minibatch.target, minibatch.is_read_again = (), None, True
        return [output.detach() for output in outputs]

    def _compute_again(
        self, index: int, minibatch: InFlightMinibatch, conditions: ForwardConditions
    ) -> Sequence[Tensor]:
        """Run the forward pass again with the same weights, keeping the tensors that backward needs. Returns the
        outputs.
        """
        with preserved_random_state(self.place.device):
            if minibatch.is_read_again:
                minibatch.inputs, minibatch.target = self.read(index)
            with conditions.restored() as buffers:
                return self._compute(index, minibatch, buffers)

    def _post_gradient_receive(self, index: int) -> None:
        """Post the receive of a minibatch's gradients before its activations leave. So gradients never wait for the
        receive.

        A stage that recomputes posts the receive later (`gradient_receive_posted`).
        """
        layout = self.gradient_layout(index)
        source = self.place.peer(self.place.stage + 1, index)
        self.transport.post(Direction.GRADIENTS, self.segment.number(index), source, layout)

    def _differentiate_inputs(
        self, index: int, pairs: Sequence[tuple[Tensor, Tensor]], received: Sequence[Tensor]
    ) -> None:
        """The part of a backward pass that the previous stage waits for."""
        roots, gradients = [root for root, _ in pairs], [gradient for _, gradient in pairs]
        if self.transport.in_order and not self.place.is_last:
            # The second part runs later, when the memory of the received gradients may have been overwritten.
            gradients = [gradient.clone() for gradient in gradients]
        inputs = [tensor for tensor in received if tensor.requires_grad]
        with self.calling("the model's backward", index):
            split = SplitBackward(roots, inputs, self._versions.leaves_of(index).values())
            split.inputs(gradients)
        self._split[index] = split

    def _collect_gradients(self, index: int) -> None:
        """Take a minibatch's weight gradients from the leaves, and add them to the gradients of its group."""
        made, share = self._versions.release(index), self._share(index)
        self._weights.pop(index, None)
        for reducer in (self._reducer, *self._shared.values()):
            reducer.add(made, share)

    def _gradients_to_reducer(self, index: int) -> AbstractContextManager[None]:
        """Context around a backward pass. Gradients may leave for the other replicas before the pass ends."""
        group = index // self._group_size
        # With several stages on a worker and W, replicas may run their last passes in different orders.
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
        """Wait until the gradients up to minibatch `newest` have left. Skips gradients whose receive is not posted yet,
        because that wait could be long.
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
