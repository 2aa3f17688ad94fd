"""The executor's engine and its ordered transport, with recording stubs for torch.distributed and for streams.

One rank after another runs a whole segment in this process: what it hands over is recorded, and nothing is sent.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from order_rules import Step
from torch import Tensor
from toy_workers import Cut

from pipeplan_launch.comm import ordered_transport
from pipeplan_launch.comm.ordered_transport import EdgeGroups, OrderedTransport
from pipeplan_launch.plan.communication_order import Direction
from pipeplan_launch.plan.launch_plan import LaunchPlan, StagePlacement
from pipeplan_launch.plan.schedule import ActionKind, Schedule, StageShape
from pipeplan_launch.runtime.action_stream import run_stages
from pipeplan_launch.runtime.data import Batches, MinibatchSizes
from pipeplan_launch.runtime.engine import Engine, Segment

WIDTHS = (6, 3)
CUT = [Cut("in", WIDTHS[0], torch.float32), Cut("whole", WIDTHS[1], torch.float32, requires_grad=False)]


class Hazard(AssertionError):
    """The transport would corrupt data on a device."""


@dataclass
class Device:
    """What one rank hands to its device, and what has happened to its memory."""

    rank: int
    steps: list[Step] = field(default_factory=list)
    posted: list[tuple[Any, ...]] = field(default_factory=list)
    """(operation, group, shape, dtype) of every call."""
    threads: set[int] = field(default_factory=set)
    handed: int = 0
    """Operations handed to the computing stream."""
    marks: tuple[int, ...] | None = None
    """What the stream that is current waits for; None in the computing stream."""
    waited: set[int] = field(default_factory=set)
    readers: list[tuple[int, int, int]] = field(default_factory=list)
    """(begin, end, number of the operation) of everything that computing has read."""
    receiving: list[tuple[int, int, Work]] = field(default_factory=list)
    """(begin, end, work) of receives that computing has not waited for."""
    sending: list[tuple[int, int, Work]] = field(default_factory=list)
    """(begin, end, work) of sends that computing has not waited for."""

    def read(self, tensors: Sequence[Tensor]) -> None:
        """Computing reads tensors now."""
        self.handed += 1
        for tensor in tensors:
            begin, end = _range(tensor)
            if any(low < end and begin < high for low, high, _ in self.receiving):
                raise Hazard(f"rank {self.rank} reads a message that it has not waited for")
            self.readers.append((begin, end, self.handed))

    def written_by(self, work: Work, tensor: Tensor) -> None:
        """A receive that is posted now will write a tensor."""
        begin, end = _range(tensor)
        mark = max(self.marks or (), default=0) if self.marks is not None else self.handed
        late = [number for low, high, number in self.readers if low < end and begin < high and number > mark]
        if late:
            raise Hazard(f"rank {self.rank} writes a slot that operation {late[0]} still reads")
        if any(low < end and begin < high for low, high, _ in self.sending):
            raise Hazard(f"rank {self.rank} writes a slot that is being sent on")
        self.receiving.append((begin, end, work))


def _range(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


class Work:
    """An operation on its way."""

    def __init__(self, device: Device, tensor: Tensor, keeps: bool) -> None:
        self._device = device
        self._tensor = None if keeps else weakref.ref(tensor)

    def wait(self) -> None:
        if self._tensor is not None and self._tensor() is None:
            raise Hazard(f"rank {self._device.rank} freed a tensor before it had left")
        self._device.receiving = [one for one in self._device.receiving if one[2] is not self]
        self._device.sending = [one for one in self._device.sending if one[2] is not self]


class RecordingStreams:
    """Streams whose marks are the number of operations handed to computing."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def mark(self) -> int:
        return self._device.handed

    @contextmanager
    def beside(self, lane: int, *after: int) -> Iterator[None]:
        self._device.marks = after
        yield
        self._device.marks = None


class Recorded(Engine):
    """The engine, whose actions take and send messages as training does, and compute nothing."""

    def __init__(self, plan: Any, device: Device, schedule: Schedule, transport: OrderedTransport) -> None:
        stage, replica = plan.place(device.rank)
        last = len(plan.pipeline) - 1
        program = SimpleNamespace(
            model_inputs=(),
            receives=CUT if stage else [],
            sends=CUT if stage < last else [],
        )
        place = SimpleNamespace(
            job=SimpleNamespace(loss_weight=None),
            plan=plan,
            rank=device.rank,
            stage=stage,
            replica=replica,
            replicas=len(plan.pipeline[stage].workers),
            program=program,
            is_first=stage == 0,
            is_last=False,
            peer=lambda other, index: plan.pipeline[other].workers[index % len(plan.pipeline[other].workers)],
        )
        self.device, self.stage, self.last = device, stage, last
        handlers: dict[ActionKind, Callable[[int], None]] = {
            ActionKind.FORWARD: self._forward,
            ActionKind.BACKWARD: self._backward,
            ActionKind.WEIGHTS: self._weights,
            ActionKind.REDUCE: lambda index: self._compute(f"R{index}"),
            ActionKind.UPDATE: lambda index: self._compute(f"U{index}"),
        }
        super().__init__(place, schedule, transport, None, handlers)  # type: ignore[arg-type]
        self.kept: dict[int, list[Tensor]] = {}

    def _compute(self, label: str) -> None:
        self.device.handed += 1
        self.device.steps.append(Step(label, (self.device.rank,)))

    def _forward(self, index: int) -> None:
        received = self.take_activations(index)
        self.device.read(received)
        self._compute(f"F{index}")
        if self.schedule.trains:
            self.kept[index] = received
        if self.stage < self.last:
            passed_on = received[1:]  # as a tensor that skips this stage
            made = [
                torch.zeros(self.size(index), WIDTHS[0]),
                *(passed_on or [torch.zeros(self.size(index), WIDTHS[1])]),
            ]
            self.send_activations(index, made)

    def _backward(self, index: int) -> None:
        number = self.segment.number(index)
        gradients = self.transport.take(Direction.GRADIENTS, number) if self.stage < self.last else []
        received = self.kept[index] if self.schedule.splits else self.kept.pop(index)
        self.device.read([*received, *gradients])
        self._compute(f"B{index}")
        if self.stage:
            destination = self.place.peer(self.stage - 1, index)
            self.transport.send(Direction.GRADIENTS, number, destination, [torch.zeros(self.size(index), WIDTHS[0])])

    def _weights(self, index: int) -> None:
        self.device.read(self.kept.pop(index))
        self._compute(f"W{index}")

    def start_collective(self, stages: tuple[int, ...], group: int) -> None:
        ranks = [rank for stage in stages for rank in self.place.plan.pipeline[stage].workers]
        self.device.steps.append(Step(f"all-reduce of {group} at {stages}", tuple(ranks)))


class Stub:
    """`torch.distributed` as the edge groups see it, for one rank after another."""

    def __init__(self) -> None:
        self.device = Device(-1)
        self.made: list[tuple[int, ...]] = []
        self.counts: dict[tuple[int, int, int], int] = {}

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ordered_transport.dist, "new_group", self.new_group)
        monkeypatch.setattr(ordered_transport.dist, "isend", self.isend)
        monkeypatch.setattr(ordered_transport.dist, "irecv", self.irecv)
        for name in ("send_object_list", "recv_object_list", "broadcast_object_list", "all_gather_object"):
            monkeypatch.setattr(dist, name, _refused)

    def new_group(self, ranks: list[int], **_: Any) -> tuple[int, ...]:
        self.made.append(tuple(ranks))
        return (len(self.made), *ranks)

    def isend(self, tensor: Tensor, destination: int, group: Any) -> Work:
        return self._note("send", tensor, self.device.rank, destination, group)

    def irecv(self, tensor: Tensor, source: int, group: Any) -> Work:
        return self._note("receive", tensor, source, self.device.rank, group)

    def _note(self, what: str, tensor: Tensor, source: int, destination: int, group: Any) -> Work:
        device = self.device
        assert tensor.is_contiguous()
        assert tensor.numel()
        device.threads.add(threading.get_ident())
        device.posted.append((what, source, destination, group, tuple(tensor.shape), tensor.dtype))
        number = self.counts[device.rank, source, destination] = (
            self.counts.get((device.rank, source, destination), 0) + 1
        )
        device.steps.append(Step(f"tensor {number} from {source} to {destination}", (source, destination)))
        work = Work(device, tensor, keeps=what == "receive")
        if what == "receive":
            device.written_by(work, tensor)
        else:
            device.sending.append((*_range(tensor), work))
        return work


def _refused(*_: object, **__: object) -> None:
    raise AssertionError("an object would be pickled")


def plan_of(schedule: Schedule, shapes: Sequence[StageShape]) -> LaunchPlan:
    """A plan with ranks in the order of stages."""
    placements, first = [], 0
    for shape in shapes:
        placements.append(StagePlacement(tuple(range(first, first + shape.replicas)), shape.depth, shape.depth))
        first += shape.replicas
    return LaunchPlan(
        plan="",
        mode="training" if schedule.trains else "inference",
        model_ref="",
        graph_hash=None,
        minibatch=2,
        device="cpu",
        servers=1,
        workers_per_server=first,
        schedule=schedule,
        pipeline=tuple(placements),
        layers=(),
        predictions=(),
        accumulate=shapes[0].accumulate,
    )


def record(
    monkeypatch: pytest.MonkeyPatch,
    schedule: Schedule,
    shapes: Sequence[StageShape],
    counts: Sequence[int],
    *,
    end: int | None = None,
    kind: type[OrderedTransport] = OrderedTransport,
) -> tuple[list[Device], list[list[tuple[int, ...]]]]:
    """(what each rank's device is given in segments of so many minibatches, the groups that each rank makes).

    `end`: the minibatch before which every segment ends early. The last minibatch is half as large.
    """
    plan, devices, groups_made = plan_of(schedule, shapes), [], []
    stub = Stub()
    stub.install(monkeypatch)
    for rank in plan.active:
        device = stub.device = Device(rank)
        stub.made = []
        groups: EdgeGroups = ordered_transport.make_edge_groups(plan, "gloo", None)  # type: ignore[arg-type]
        groups_made.append(stub.made)
        stage, _ = plan.place(rank) or (0, 0)
        transport = kind(stage, rank, torch.device("cpu"), groups, lambda: None)
        transport.streams = RecordingStreams(device)  # type: ignore[assignment]
        transport._is_open = True
        engine = Recorded(plan, device, schedule, transport)
        if end is not None:
            engine.limit = lambda index: end if index >= end else None
        for count in counts:
            samples: Any = range(2 * count - 1)
            sizes = MinibatchSizes(2 * count - 1, 2, dynamic=True, training=False)
            run_stages([engine], Segment(0, Batches(samples, sizes, seed=0, epoch=0)))
        devices.append(device)
    return devices, groups_made
