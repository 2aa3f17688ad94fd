"""The engine of one stage on one worker: dispatches actions to handlers, and holds the state that handlers share.

An engine runs drained segments (an epoch or a part of one, or a pass over the test data): nothing is in flight before
or after. Within a segment, schedules, replicas and weight versions count minibatches from 0, the *index*. Data,
random seeds, messages and metrics use the minibatch's *number* in the epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeplan_launch.comm.ordered_transport import AnyTransport, OrderedTransport
from pipeplan_launch.comm.p2p import MessageTensor, peer_loss_explained
from pipeplan_launch.devices.backend import backend_of
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.job import Batch, Job
from pipeplan_launch.job.loss import LossState
from pipeplan_launch.job.nested_tensors import map_tensors
from pipeplan_launch.job.user_code import user_code_errors
from pipeplan_launch.plan.communication_order import Direction
from pipeplan_launch.plan.launch_plan import LaunchPlan
from pipeplan_launch.plan.schedule import (
    POSTED_RECEIVES,
    Action,
    ActionKind,
    Schedule,
    StageShape,
    own_minibatches,
)
from pipeplan_launch.runtime.data import Batches
from pipeplan_launch.telemetry.recorder import MinibatchRecord, Recorder, Stopwatch, Timeline
from pipeplan_launch.telemetry.run_folder import recorded_name
from pipeplan_launch.tracing.subgraph import BoundaryTensor, Program

ActionHandler = Callable[[int], None]
"""Runs an action, given its index."""
SegmentLimit = Callable[[int], int | None]
"""Returns the index at which the segment ends, or None to go on. Called with the index of a minibatch before its
forward, and with the index of a group's first minibatch before the group's all-reduce. A returned end is at most that
index. All workers of a segment must get the same end."""


@dataclass(frozen=True)
class StageContext:
    """A worker's position in the plan, and the program and job that it runs."""

    plan: LaunchPlan
    stage: int
    replica: int
    rank: int
    device: torch.device
    program: Program
    job: Job
    """The job without its model, because a worker keeps only its own stage."""
    seed: int = 0

    @property
    def is_first(self) -> bool:
        """Whether this stage receives no activations."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage computes the loss."""
        return self.stage == len(self.plan.pipeline) - 1

    @property
    def recomputes(self) -> bool:
        """Whether this stage keeps only its input between forward and backward, and runs forward again before
        backward.
        """
        return self.plan.pipeline[self.stage].recompute

    @property
    def replicas(self) -> int:
        """Number of replicas of this stage."""
        return len(self.plan.pipeline[self.stage].workers)

    @property
    def shares(self) -> tuple[int, ...]:
        """Minibatches of an update on each replica of this stage, if they are unequal."""
        return self.plan.pipeline[self.stage].shares

    @property
    def is_traced(self) -> bool:
        """Whether the program was cut from a traced model."""
        return hasattr(self.program, "loss_state")

    @property
    def loss_state(self) -> LossState | None:
        """Parameters and buffers of the loss. Only a program that was cut from a traced model has any."""
        state: LossState | None = getattr(self.program, "loss_state", None)
        return state

    def loss(self, tensors: Mapping[str, Tensor], output: Any, target: Any) -> Any:
        """The job's loss in training, with these tensors by name in place of the loss's own."""
        assert self.job.loss is not None
        state = self.loss_state
        return self.job.loss(output, target) if state is None else state.call(tensors, output, target)

    def evaluation_loss(self, output: Any, target: Any) -> Any:
        """The job's loss in evaluation, which changes no state."""
        assert self.job.loss is not None
        state = self.loss_state
        return self.job.loss(output, target) if state is None else state.evaluate(output, target)

    def peer(self, stage: int, index: int) -> int:
        """Rank of the replica of a stage that runs the minibatch with this index."""
        workers = self.plan.pipeline[stage].workers
        return workers[index % len(workers)]


@dataclass(frozen=True)
class Segment:
    """A run over some minibatches of an epoch, with nothing in flight before and after it."""

    epoch: int
    batches: Batches
    first: int = 0
    """Number of the first minibatch."""
    end: int | None = None
    """Number after the last minibatch; None means the end of the epoch."""

    @property
    def count(self) -> int:
        """Number of minibatches in the segment."""
        return (self.batches.sizes.count if self.end is None else self.end) - self.first

    def number(self, index: int) -> int:
        """Converts a minibatch's index in the segment to its number in the epoch."""
        return self.first + index


class Engine:
    """Base of training and forward-only engines: dispatch, posted receives, reading samples, progress reports."""

    schedule: Schedule

    def __init__(
        self,
        place: StageContext,
        schedule: Schedule,
        transport: AnyTransport,
        recorder: Recorder,
        handlers: Mapping[ActionKind, ActionHandler],
    ) -> None:
        """Raises `LaunchError` if the schedule has actions without a handler."""
        unknown = sorted(kind.value for kind in schedule.kinds - handlers.keys())
        if unknown:
            raise LaunchError(
                f"this executor cannot run schedule {schedule.name!r}: no handler for {', '.join(unknown)}"
            )
        self.schedule = schedule
        self.shapes: Sequence[StageShape] = place.plan.shapes
        self.place = place
        self.transport = transport
        self.recorder = recorder
        name = recorded_name(place.plan, place.rank, place.stage)
        self.timeline = Timeline(place.plan.plan, place.rank, place.stage, place.replica, name)
        self.on_minibatch: Callable[[MinibatchRecord], None] | None = None
        """Called after each of this worker's minibatches."""
        self.on_progress: Callable[[], None] = lambda: None
        """Called after each action."""
        self.limit: SegmentLimit = lambda _index: None
        """Set from outside if a segment may have to end early."""
        self.sharing_stages: Collection[tuple[int, ...]] = ()
        """All sets of stages of the pipeline that share weights, for the common order."""
        self.weights_follow = False
        """Whether action W of a minibatch directly follows the B that is performed next; set from outside."""
        self._handlers = handlers
        self._segment: Segment | None = None
        self.count = 0
        """Minibatches in the segment being run; fewer after `limit` has ended the segment."""
        self._receives_to_post: Sequence[int] = ()
        self._message_tensors: dict[tuple[str, int], MessageTensor] = {}

    @contextmanager
    def running(self, segment: Segment) -> Iterator[None]:
        """Context in which the stage's actions of a segment are performed."""
        place = self.place
        if isinstance(self.transport, OrderedTransport):
            self.transport.open()
        self._segment, self.count = segment, segment.count
        self._receives_to_post = () if place.is_first else own_minibatches(place.replica, place.replicas, self.count)
        for _ in range(POSTED_RECEIVES):
            self._post_next_receive()
        with segment.batches.prefetch(self._minibatches_to_read()):
            yield
            self.transport.drain()

    def perform(self, action: Action) -> None:
        """Run one action."""
        self._handlers[action.kind](action.index)
        self.on_progress()

    @property
    def segment(self) -> Segment:
        """The segment being run."""
        assert self._segment is not None
        return self._segment

    def take_activations(self, index: int) -> list[Tensor]:
        """The activations of this minibatch from the previous stage. Posts the next receive."""
        if self.place.is_first:
            return []
        received = self.transport.take(Direction.ACTIVATIONS, self.segment.number(index))
        self._post_next_receive()
        return received

    def send_activations(self, index: int, outputs: Sequence[Tensor]) -> None:
        """Send the activations of a minibatch to the next stage."""
        destination = self.place.peer(self.place.stage + 1, index)
        self.transport.send(Direction.ACTIVATIONS, self.segment.number(index), destination, outputs)

    def settle_activations(self, index: int) -> None:
        """Wait until the activations of a minibatch have left for the next stage, if they were sent."""
        self.transport.settle(Direction.ACTIVATIONS, self.segment.number(index))

    def layout(self, tensors: Sequence[BoundaryTensor], index: int) -> list[MessageTensor]:
        """Shapes and types of the tensors that cross a cut, for this minibatch's size."""
        size, known = self.size(index), self._message_tensors
        for tensor in tensors:  # evaluating a symbolic shape takes longer than sending a small tensor
            if (tensor.name, size) not in known:
                known[tensor.name, size] = MessageTensor(tuple(tensor.shape(size)), tensor.dtype)
        return [known[tensor.name, size] for tensor in tensors]

    def gradient_layout(self, index: int) -> list[MessageTensor]:
        """Shapes and types of the message with a minibatch's gradients: with a `loss_weight` also the weight, which
        only the last stage can count.
        """
        tensors = self.layout([one for one in self.place.program.sends if one.requires_grad], index)
        weighted = bool(tensors) and self.place.job.loss_weight is not None
        return [*tensors, MessageTensor((1,), torch.float64)] if weighted else tensors

    def size(self, index: int) -> int:
        """Samples that the model runs on in this minibatch, including padding samples."""
        return self.segment.batches.sizes.padded_samples(self.segment.number(index))

    def read(self, index: int) -> tuple[list[Tensor], Any]:
        """(model inputs of this stage, target at the last stage) from the data set, where the stage needs them."""
        wanted = self.place.program.model_inputs
        if not wanted and not self.place.is_last:
            return [], None
        with self.calling("reading the job's data", index):
            batch: Batch = self.segment.batches.load(
                self.segment.number(index), inputs=bool(wanted), target=self.place.is_last
            )
        if batch.names:
            self.place.job.check_names(batch)
        inputs, target = [batch.inputs[position] for position in wanted], batch.target if self.place.is_last else None
        with backend_of(self.place.device).copying(self.place.device) as copy:
            copied: tuple[list[Tensor], Any] = map_tensors((inputs, target), copy)
        return copied

    def _minibatches_to_read(self) -> list[int]:
        """Numbers of the minibatches that this worker will read, in order."""
        place = self.place
        if not place.program.model_inputs and not place.is_last:
            return []
        # Evaluation assigns minibatches round robin, even if training has unequal shares.
        shares = place.shares if ActionKind.BACKWARD in self._handlers else ()
        own = own_minibatches(place.replica, place.replicas, self.count, shares)
        return [self.segment.number(index) for index in own]

    def calling(self, what: str, index: int) -> AbstractContextManager[None]:
        """Context for calling the user's code: an error becomes one line that names `what`, this stage and the
        minibatch.
        """
        number = self.segment.number(index)
        return user_code_errors(f"{what} at stage {self.place.stage} (rank {self.place.rank}), minibatch {number},")

    @contextmanager
    def passing(self, what: str, index: int) -> Iterator[None]:
        """`calling` for a pass in which replicas may exchange weights or gradients. A lost replica can end the pass."""
        place = self.place
        peers = [worker for worker in place.plan.pipeline[place.stage].workers if worker != place.rank]
        lost = f"stage {place.stage} (rank {place.rank}) lost ranks {peers} in a pass that they run together"
        with self.calling(what, index), peer_loss_explained(lost, *peers, only_connections=True):
            yield

    def begin_step(self, index: int) -> MinibatchRecord:
        """Start the record of a minibatch on this worker."""
        number = self.segment.number(index)
        step = self.recorder.begin(self.segment.epoch, number)
        step.samples = self.segment.batches.sizes.real_samples(number)
        return step

    def step_of(self, index: int) -> MinibatchRecord:
        """The record of a minibatch that has started and is not finished."""
        return self.recorder.started(self.segment.number(index))

    def note(self, kind: str, index: int, lap: Stopwatch, *, keep_brief: bool = True) -> None:
        """Record in the timeline that the stopwatch's last lap was spent on a minibatch."""
        self.timeline.note(kind, self.segment.number(index), lap, keep_brief=keep_brief)

    def finish_step(self, index: int) -> None:
        """Finish the record of a minibatch on this worker."""
        step = self.recorder.end(self.segment.number(index))
        if self.on_minibatch is not None:
            self.on_minibatch(step)

    def start_collective(self, stages: tuple[int, ...], group: int) -> None:
        """Start the all-reduce of a group among the replicas of these stages, at its place in the common order."""
        raise NotImplementedError

    def _post_next_receive(self) -> None:
        if self._receives_to_post:
            index, self._receives_to_post = self._receives_to_post[0], self._receives_to_post[1:]
            source = self.place.peer(self.place.stage - 1, index)
            layout = self.layout(self.place.program.receives, index)
            self.transport.post(Direction.ACTIVATIONS, self.segment.number(index), source, layout)
