"""Random segments, and rules for the one order of their nodes, worked out anew from the schedules' streams.

Devices do one thing at a time, and transfers need both ends. Every device has one queue. A step is (label, devices): a
computation has one device, a transfer two, an all-reduce all replicas of a stage. A step happens when it is at the head
of the queues of all its devices, and then leaves them.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from schedule_rules import NAMES, check_stream, pipelines, recipe, streams_of

from pipeplan_launch.plan.communication_order import Collective, Computation, Direction, Node, Transfer
from pipeplan_launch.plan.schedule import SCHEDULES, Schedule, StageShape

Device = Hashable


@dataclass(frozen=True)
class Step:
    """Something that one or more devices do together."""

    label: str
    devices: tuple[Device, ...]

    @property
    def is_shared(self) -> bool:
        return len(self.devices) > 1


Queues = dict[Device, list[Step]]


def queues_of(order: Iterable[Step]) -> Queues:
    """What each device is handed: its own steps, in the common order."""
    queues: Queues = {}
    for step in order:
        for device in step.devices:
            queues.setdefault(device, []).append(step)
    return queues


def stuck_devices(queues: Mapping[Device, Sequence[Step]]) -> dict[Device, Step]:
    """The devices that wait for ever, and the step at the head of their queues; {} if all finish."""
    left = {device: deque(steps) for device, steps in queues.items()}
    look_at = deque(left)
    while look_at:
        device = look_at.popleft()
        while left[device]:
            step = left[device][0]
            if not all(left[other] and left[other][0] == step for other in step.devices):
                break
            for other in step.devices:
                left[other].popleft()
            look_at.extend(other for other in step.devices if other != device)
    return {device: steps[0] for device, steps in left.items() if steps}


@dataclass(frozen=True)
class Drained:
    """A segment: what runs, how many minibatches it was meant to have, and before which one it ends."""

    schedule: Schedule
    pipeline: Sequence[StageShape]
    count: int
    end: int
    shared: Sequence[tuple[int, ...]] = ()
    """Sets of stages that share weights."""

    @property
    def replicas(self) -> list[int]:
        return [shape.replicas for shape in self.pipeline]

    def __str__(self) -> str:
        shapes = [(one.replicas, one.depth, one.accumulate) for one in self.pipeline]
        ties = f", tied {list(self.shared)}" if self.shared else ""
        return f"{self.schedule.name} {shapes}, {self.end} of {self.count}{ties}"


def random_run(seed: int) -> list[Drained]:
    """A run of some segments: training that may end early, and evaluation in between."""
    draw = random.Random(seed)
    stages = draw.randint(2, 6)
    replicas = [draw.randint(1, 5) for _ in range(stages)]
    schedule = SCHEDULES[draw.choice([name for name in NAMES if SCHEDULES[name].trains])]
    pipeline = draw.choice(list(pipelines(schedule, replicas, [draw.randint(0, 2) for _ in replicas])))
    shared = []
    if schedule.flushes and draw.random() < 0.6:
        sizes = [draw.randint(2, stages) for _ in range(draw.randint(1, 2))]
        shared = sorted({tuple(sorted(draw.sample(range(stages), size))) for size in sizes})
    run = []
    for _ in range(draw.randint(1, 3)):
        count = draw.randint(1, 3 * max(shape.replicas * shape.depth for shape in pipeline))
        end = draw.randint(1, count) if draw.random() < 0.4 else count
        run.append(Drained(schedule, pipeline, count, end, shared))
        if draw.random() < 0.5:
            tests = draw.randint(1, 12)
            run.append(Drained(SCHEDULES["forward-only"], pipeline, tests, tests))
    return run


def as_steps(nodes: Iterable[Node], replicas: Sequence[int] = (), segment: int = 0) -> list[Step]:
    """The nodes as steps of devices that do one thing at a time. `replicas` of every stage."""
    return [Step(f"{segment} {_label(node)}", _devices(node, replicas)) for node in nodes]


def _devices(node: Node, replicas: Sequence[int]) -> tuple[Device, ...]:
    if isinstance(node, Computation):
        return (node.place,)
    if isinstance(node, Transfer):
        return (node.source, node.destination)
    return tuple((stage, replica) for stage in node.stages for replica in range(replicas[stage]))


def _label(node: Node) -> str:
    if isinstance(node, Computation):
        return f"{node.action} at {node.place}"
    if isinstance(node, Transfer):
        return f"{node.direction.name.lower()} of {node.minibatch} from {node.source} to {node.destination}"
    return f"all-reduce of {node.group} at {', '.join(map(str, node.stages))}"


def check_nodes(nodes: Sequence[Node], drained: Drained) -> None:
    """Every node once, none before what it waits for, and no slot written before its last reader is done."""
    _check_complete(nodes, drained)
    position = {_label(node): number for number, node in enumerate(nodes)}
    assert len(position) == len(nodes)
    trains, pipeline = drained.schedule.trains, drained.pipeline

    def at(kind: str, stage: int, minibatch: int) -> int:
        return position[f"{kind}{minibatch} at {(stage, minibatch % pipeline[stage].replicas)}"]

    for node in nodes:
        here = position[_label(node)]
        if isinstance(node, Transfer):
            kind = "F" if node.direction is Direction.ACTIVATIONS else "B"
            source, destination, m = node.source[0], node.destination[0], node.minibatch
            assert at(kind, source, m) < here < at(kind, destination, m)
            shape = pipeline[destination]
            depth = shape.depth + shape.deferred if trains else 1
            slots = depth + 1 if node.direction is Direction.ACTIVATIONS else 2
            before = m - slots * pipeline[destination].replicas
            if before >= 0:
                kept = drained.schedule.splits and node.direction is Direction.ACTIVATIONS
                assert at("W" if kept else "B" if trains else "F", destination, before) < here
                leaving = [
                    other
                    for other in nodes
                    if isinstance(other, Transfer)
                    and (other.direction, other.minibatch, other.source[0]) == (node.direction, before, destination)
                ]
                assert all(position[_label(other)] < here for other in leaving)
        elif isinstance(node, Collective):
            for stage in node.stages:
                for replica in range(pipeline[stage].replicas):
                    assert position[f"R{node.group} at {(stage, replica)}"] < here
                    assert here < position[f"U{node.group} at {(stage, replica)}"]


def _check_complete(nodes: Sequence[Node], drained: Drained) -> None:
    schedule, pipeline, end = drained.schedule, drained.pipeline, drained.end
    for place, stream in streams_of(schedule, pipeline, end).items():
        done = [node.action for node in nodes if isinstance(node, Computation) and node.place == place]
        assert sorted(map(str, done)) == sorted(map(str, stream))
        assert done == stream or end < drained.count  # 2BW's updates may come earlier than in a segment of that length
        check_stream(done, recipe(schedule, pipeline), *place, end)
    expected = Counter()
    for one, other in itertools.pairwise(range(len(pipeline))):
        for m in range(end):
            ends = (one, m % pipeline[one].replicas), (other, m % pipeline[other].replicas)
            expected[_label(Transfer(Direction.ACTIVATIONS, m, *ends))] += 1
            if schedule.trains:
                expected[_label(Transfer(Direction.GRADIENTS, m, *reversed(ends)))] += 1
    if schedule.trains:
        formula = recipe(schedule, pipeline)
        for stage, shape in enumerate(pipeline):
            groups = {formula.group_of(stage, m) for m in range(end)}
            sets = [(stage,)] if shape.replicas > 1 else []
            sets += [stages for stages in drained.shared if stages[0] == stage]
            expected.update(_label(Collective(stages, group)) for stages in sets for group in groups)
    assert Counter(_label(node) for node in nodes if not isinstance(node, Computation)) == expected
