"""Running a stream of actions on one worker: a table from the kind of action to what does it.

An engine runs drained segments (an epoch or a part of one, or a pass over the test data): nothing is in flight before
or after. Within a segment, schedules, replicas and versions of the weights count minibatches from 0, the *index*; data,
random numbers, messages and metrics go by the epoch's own *number* of the minibatch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from pipeplan_launch.batches import Batches
from pipeplan_launch.config import LaunchPlan
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.interrupt import check_interrupt
from pipeplan_launch.job import Batch, Job
from pipeplan_launch.metrics import Lap, Recorder, Step
from pipeplan_launch.program import CutTensor, Program
from pipeplan_launch.schedule import Action, Kind, Schedule, own_minibatches
from pipeplan_launch.slots import Wire
from pipeplan_launch.timeline import Timeline
from pipeplan_launch.transport import Direction, Transport
from pipeplan_launch.usercode import user_code

Handler = Callable[[int], None]
"""Does an action, given its index."""
Limit = Callable[[int], int | None]
"""Asked before the forward of a minibatch, by its index, and before the all-reduce of a group, by that of its first:
None to go on, else where the segment ends, that index or before. All workers of a segment must be told the same end."""
WINDOW = 2  # receives of activations posted ahead: one in use, one under way; each costs a minibatch's memory


@dataclass(frozen=True)
class Place:
    """Which worker this is, and what it runs."""

    plan: LaunchPlan
    stage: int
    replica: int
    rank: int
    device: torch.device
    program: Program
    job: Job
    """With its model taken out: a worker keeps its own stage only."""
    seed: int = 0

    @property
    def is_first(self) -> bool:
        """Whether activations come from nowhere."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage computes the loss."""
        return self.stage == len(self.plan.pipeline) - 1

    @property
    def recomputes(self) -> bool:
        """Whether this stage runs forward again for backward, and keeps no more than its input in between."""
        return self.plan.pipeline[self.stage].recompute

    @property
    def replicas(self) -> int:
        """Replicas of this stage."""
        return len(self.plan.pipeline[self.stage].workers)

    def peer(self, stage: int, index: int) -> int:
        """Rank of the replica of a stage that runs a minibatch of the segment."""
        workers = self.plan.pipeline[stage].workers
        return workers[index % len(workers)]


@dataclass(frozen=True)
class Segment:
    """A drained run over some minibatches of an epoch."""

    epoch: int
    batches: Batches
    first: int = 0
    """The number of its first minibatch."""
    end: int | None = None
    """The number after its last; None: the end of the epoch."""

    @property
    def count(self) -> int:
        """Minibatches in it."""
        return (self.batches.sizes.count if self.end is None else self.end) - self.first

    def number(self, index: int) -> int:
        """What the epoch calls the minibatch with this index in the segment."""
        return self.first + index


class Engine:
    """What training and forward-only runs share: dispatch, posted receives, reading samples, reporting progress."""

    schedule: Schedule

    def __init__(
        self,
        place: Place,
        schedule: Schedule,
        transport: Transport,
        recorder: Recorder,
        handlers: Mapping[Kind, Handler],
    ) -> None:
        """Raises `LaunchError` if the schedule has actions without a handler."""
        unknown = sorted(kind.value for kind in schedule.kinds - handlers.keys())
        if unknown:
            raise LaunchError(
                f"this executor cannot run schedule {schedule.name!r}: no handler for {', '.join(unknown)}"
            )
        self.schedule = schedule
        self.place = place
        self.transport = transport
        self.recorder = recorder
        self.timeline = Timeline(place.plan.plan, place.rank, place.stage, place.replica)
        self.on_minibatch: Callable[[Step], None] | None = None
        """Called after each of this worker's minibatches."""
        self.limit: Limit = _no_limit
        """Whoever may have to end a segment early sets this."""
        self._handlers = handlers
        self._segment: Segment | None = None
        self._count = 0
        self._to_post: Sequence[int] = ()
        self._wires: dict[tuple[str, int], Wire] = {}

    def run(self, segment: Segment) -> int:
        """Run this worker's share of a segment; returns the segment's minibatches, fewer where `limit` ended it."""
        place = self.place
        self.transport.open()
        self._segment, self._count = segment, segment.count
        self._to_post = () if place.is_first else own_minibatches(place.replica, place.replicas, self._count)
        for _ in range(WINDOW):
            self._post_next()
        with segment.batches.ahead(self._to_read()):
            for action in self._actions():
                check_interrupt()
                self._handlers[action.kind](action.index)
            self.transport.drain()
        return self._count

    @property
    def segment(self) -> Segment:
        """The segment being run."""
        assert self._segment is not None
        return self._segment

    @property
    def count(self) -> int:
        """Minibatches in the segment being run; fewer once `limit` has ended it."""
        return self._count

    def take_activations(self, index: int) -> list[Tensor]:
        """What the previous stage sends for this minibatch; posts the next receive."""
        if self.place.is_first:
            return []
        received = self.transport.take(Direction.ACTIVATIONS, self.segment.number(index))
        self._post_next()
        return received

    def send_activations(self, index: int, outputs: Sequence[Tensor]) -> None:
        """Send a minibatch on to the next stage."""
        destination = self.place.peer(self.place.stage + 1, index)
        self.transport.send(Direction.ACTIVATIONS, self.segment.number(index), destination, outputs)

    def settle_activations(self, index: int) -> None:
        """Wait until a minibatch has left for the next stage, if it was sent."""
        self.transport.settle(Direction.ACTIVATIONS, self.segment.number(index))

    def wires(self, tensors: Sequence[CutTensor], index: int) -> list[Wire]:
        """Shapes of the tensors that cross a cut, for this minibatch's size."""
        size = self.size(index)
        return [self._wire(tensor, size) for tensor in tensors]

    def size(self, index: int) -> int:
        """Samples that the model runs on in this minibatch."""
        return self.segment.batches.sizes.run(self.segment.number(index))

    def read(self, index: int) -> tuple[list[Tensor], Any]:
        """(this stage's model inputs, target at the last stage), from the data set, where the stage needs it."""
        wanted = self.place.program.model_inputs
        if not wanted and not self.place.is_last:
            return [], None
        with self.calling("reading the job's data", index):
            batch: Batch = self.segment.batches.load(self.segment.number(index))
        self.place.job.check_names(batch)
        inputs = [batch.inputs[index].to(self.place.device) for index in wanted]
        target = to_device(batch.target, self.place.device) if self.place.is_last else None
        return inputs, target

    def _to_read(self) -> list[int]:
        """The minibatches that this worker will read, in their order, by number."""
        place = self.place
        if not place.program.model_inputs and not place.is_last:
            return []
        return [self.segment.number(index) for index in own_minibatches(place.replica, place.replicas, self._count)]

    def calling(self, what: str, index: int) -> AbstractContextManager[None]:
        """Around what the user wrote: an error becomes one line that names `what`, this stage and the minibatch."""
        number = self.segment.number(index)
        return user_code(f"{what} at stage {self.place.stage} (rank {self.place.rank}), minibatch {number},")

    def begin_step(self, index: int) -> Step:
        """A minibatch begins on this worker."""
        number = self.segment.number(index)
        step = self.recorder.begin(self.segment.epoch, number)
        step.samples = self.segment.batches.sizes.real(number)
        return step

    def step_of(self, index: int) -> Step:
        """What is noted of a minibatch that has begun and is not finished."""
        return self.recorder.of(self.segment.number(index))

    def note(self, kind: str, index: int, lap: Lap, *, even_brief: bool = True) -> None:
        """Record that the stopwatch's last lap was spent on a minibatch."""
        self.timeline.note(kind, self.segment.number(index), lap, even_brief=even_brief)

    def begin_timeline(self, epoch: int, first: int, count: int, met_s: float) -> None:
        """An epoch of `count` minibatches begins, or goes on, with minibatch `first`; all workers met at `met_s`."""
        self.timeline.begin(epoch, first, count, met_s)

    def finish_step(self, index: int) -> None:
        """A minibatch is done with on this worker."""
        step = self.recorder.end(self.segment.number(index))
        if self.on_minibatch is not None:
            self.on_minibatch(step)

    def _actions(self) -> Iterator[Action]:
        """The schedule's stream. Where `limit` ends the segment, it goes on as that of a segment that ends there."""
        done: dict[Kind, int] = {}  # a worker's actions of one kind come in the order of their indices
        for action in self._stream():
            end = self._end_before(action)
            if end is not None:
                self._count = end
                break
            yield action
            done[action.kind] = action.index
        else:
            return
        for action in self._stream():
            if action.index > done.get(action.kind, -1):
                yield action

    def _end_before(self, action: Action) -> int | None:
        """Where the segment ends if that is before this action, as far as the action can begin something beyond it.

        A replica joins the all-reduce of a group in which it has no minibatch: what counts is the group's first.
        """
        if action.kind is Kind.FORWARD:
            return self.limit(action.index)
        if action.kind is Kind.REDUCE:
            return self.limit(action.index * self.schedule.group_size(self.place.plan.shapes[self.place.stage]))
        return None

    def _stream(self) -> Iterator[Action]:
        place = self.place
        return self.schedule.stream(place.plan.shapes, place.stage, place.replica, self._count)

    def _wire(self, tensor: CutTensor, size: int) -> Wire:
        """Remembered, because evaluating a symbolic shape takes longer than sending a small tensor."""
        wire = self._wires.get((tensor.name, size))
        if wire is None:
            wire = self._wires[tensor.name, size] = Wire(tuple(tensor.shape(size)), tensor.dtype)
        return wire

    def _post_next(self) -> None:
        if self._to_post:
            index, self._to_post = self._to_post[0], self._to_post[1:]
            source = self.place.peer(self.place.stage - 1, index)
            wires = self.wires(self.place.program.receives, index)
            self.transport.post(Direction.ACTIVATIONS, self.segment.number(index), source, wires)


def _no_limit(_: int) -> int | None:
    return None


def to_device(value: Any, device: torch.device) -> Any:
    """Move the tensors of a nested structure."""
    return map_tensors(value, lambda tensor: tensor.to(device))


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply `change` to the tensors in nested tuples, lists, dicts and what torch's pytree knows besides, such as a
    registered dataclass; other values stay."""
    return tree_map_only(Tensor, change, value)
