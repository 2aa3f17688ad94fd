"""A small model of 1F1B, for timelines that look like real ones."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

FORWARD, BACKWARD, _, UPDATE, ALL_REDUCE = range(5)
Intervals = dict[str, list[float]]


@dataclass(frozen=True)
class Shape:
    """A pipeline: replicas, and seconds of a forward and of a backward pass, by stage."""

    replicas: tuple[int, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]

    @staticmethod
    def of(replicas: tuple[int, ...], *, inference: bool = False) -> Shape:
        forward = tuple(0.0066 * count * (1 - 0.13 * (index % 3)) for index, count in enumerate(replicas))
        return Shape(replicas, forward, tuple(0.0 if inference else 2 * one for one in forward))

    def slower(self, factor: float) -> Shape:
        return replace(
            self,
            forward_s=tuple(factor * one for one in self.forward_s),
            backward_s=tuple(factor * one for one in self.backward_s),
        )

    @property
    def stages(self) -> int:
        return len(self.replicas)

    def compute_s(self, stage: int) -> float:
        return self.forward_s[stage] + self.backward_s[stage]

    @property
    def pace_s(self) -> float:
        return max(self.compute_s(stage) / count for stage, count in enumerate(self.replicas))

    def depth(self, stage: int) -> int:
        return -(-sum(self.replicas[stage:]) // self.replicas[stage])

    def stage_of(self, worker: int) -> int:
        return next(stage for stage in range(self.stages) if worker < sum(self.replicas[: stage + 1]))


def _stream(shape: Shape, stage: int, replica: int, minibatches: int) -> list[tuple[int, int]]:
    mine = range(replica, minibatches, shape.replicas[stage])
    if not shape.backward_s[stage]:
        return [(FORWARD, number) for number in mine]
    depth = shape.depth(stage)
    actions = [(FORWARD, number) for number in mine[:depth]]
    for position, number in enumerate(mine):
        actions += [(BACKWARD, number), (UPDATE, number)]
        actions += [(FORWARD, later) for later in mine[depth + position : depth + position + 1]]
    return actions


def intervals(shape: Shape, minibatches: int, lanes: int) -> Intervals:
    """Columns of all intervals of the first `lanes` workers, as the timeline of a report has them."""
    streams = {
        (stage, replica): _stream(shape, stage, replica, minibatches)
        for stage, count in enumerate(shape.replicas)
        for replica in range(count)
    }
    done: dict[tuple[int, int, int], float] = {}
    free: dict[tuple[int, int], float] = defaultdict(float)
    next_action = dict.fromkeys(streams, 0)
    found: Intervals = {key: [] for key in ("lane", "kind", "number", "start_s", "end_s")}

    def add(lane: int, kind: int, number: int, start: float, end: float) -> None:
        if lane < lanes and end > start:
            for key, value in zip(found, (lane, kind, number, round(start, 7), round(end, 7)), strict=True):
                found[key].append(value)

    moved = True
    while moved:
        moved = False
        for (stage, replica), stream in streams.items():
            lane = sum(shape.replicas[:stage]) + replica
            while next_action[stage, replica] < len(stream):
                kind, number = stream[next_action[stage, replica]]
                ready = _ready(shape, done, kind, number, stage)
                if ready is None:
                    break
                start = max(free[stage, replica], ready)
                end = start + {FORWARD: shape.forward_s[stage], BACKWARD: shape.backward_s[stage]}.get(kind, 0.0008)
                add(lane, kind, number, start, end)
                if kind == UPDATE and shape.replicas[stage] > 1:
                    add(lane, ALL_REDUCE, number, end, end + 0.6 * shape.forward_s[stage])
                done[kind, number, stage] = free[stage, replica] = end
                next_action[stage, replica] += 1
                moved = True
    return found


def _ready(shape: Shape, done: dict[tuple[int, int, int], float], kind: int, number: int, stage: int) -> float | None:
    """When what the action needs is there; None where it is not yet known."""
    if kind == UPDATE:
        return 0.0
    if kind == FORWARD:
        return 0.0 if stage == 0 else done.get((FORWARD, number, stage - 1))
    last = stage == shape.stages - 1
    return done.get((FORWARD, number, stage) if last else (BACKWARD, number, stage + 1))
