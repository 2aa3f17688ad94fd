"""What every worker does, in order, as pure data: no torch here, so that the planner's simulator replays these objects.

    F3   forward of minibatch 3
    B3   backward of minibatch 3
    R3   start the all-reduce of group 3's gradients among the stage's replicas
    U3   wait for that all-reduce and update the weights

Symbols: stage s has r replicas and depth d (minibatches in flight per replica, at most). Minibatch i belongs to replica
i mod r, forward and backward, and to group g = i div r. A group gives one update; the last group may be short, and
replicas without a member of it still join its all-reduce.

One replica of a stage with d = 2, minibatches 0, 1, 2 (r = 1):

    F0 F1 | B0 R0 U0 F2 | B1 R1 U1 | B2 R2 U2
    fill  | steady      | drain

so the forward of minibatch i runs on the weights after max(0, i div r - d + 1) updates of the segment (`version_used`).
A stage with several replicas awaits the all-reduce only after its next backward, so that computing hides it:

    F0 F2 | B0 R0 F4 | B2 U0 R1 F6 | …         (replica 0 of 2)

Its weights are then one update older. A single stage, plain data parallelism, does not do so: it stays synchronous.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class Kind(StrEnum):
    """The kinds of action; an executor states which it can run, and refuses a schedule with others before it starts."""

    FORWARD = "F"
    BACKWARD = "B"
    REDUCE = "R"
    UPDATE = "U"


_ACTION = re.compile(rf"([{''.join(Kind)}])(0|[1-9][0-9]*)")


@dataclass(frozen=True, slots=True)
class Action:
    """One step of one worker. `index` is a minibatch for F and B, a group of minibatches for R and U."""

    kind: Kind
    index: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.index}"

    @staticmethod
    def parse(text: str) -> Action:
        """The inverse of str(): `Action.parse("F3")`. Raises ValueError on anything else."""
        match = _ACTION.fullmatch(text)
        if match is None:
            raise ValueError(f"not an action: {text!r} (expected one of {', '.join(Kind)} and a number, as in F3)")
        return Action(Kind(match[1]), int(match[2]))


@dataclass(frozen=True, slots=True)
class StageShape:
    """All that a schedule needs to know of a stage."""

    replicas: int
    depth: int
    """Minibatches that one replica may have between their forward and their backward."""

    def __post_init__(self) -> None:
        if self.replicas < 1 or self.depth < 1:
            raise ValueError(f"a stage needs at least one replica and depth 1 (here {self.replicas} and {self.depth})")


Stream = Callable[[Sequence[StageShape], int, int, int], Iterator[Action]]
"""(pipeline, stage, replica, minibatches) -> the actions of that replica, in order."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """A named schedule: its generator, the kinds of action that it may emit, and whether it trains."""

    name: str
    stream: Stream
    kinds: frozenset[Kind]
    trains: bool


def replica_of(minibatch: int, replicas: int) -> int:
    """Round robin: the replica that runs this minibatch, forward and backward."""
    return minibatch % replicas


def own_minibatches(replica: int, replicas: int, minibatches: int) -> range:
    """The minibatches of one replica, in order."""
    return range(replica, minibatches, replicas)


def group_count(replicas: int, minibatches: int) -> int:
    """How many updates a stage makes for so many minibatches."""
    return -(-minibatches // replicas)


def group_members(group: int, replicas: int, minibatches: int) -> range:
    """The minibatches whose gradients are averaged for one update; the last group may be short."""
    return range(group * replicas, min((group + 1) * replicas, minibatches))


def update_lag(pipeline: Sequence[StageShape], stage: int) -> int:
    """How many updates late a stage runs: 1 where replicas must agree and other stages make it asynchronous anyway."""
    return int(len(pipeline) > 1 and pipeline[stage].replicas > 1)


def version_used(minibatch: int, shape: StageShape, lag: int) -> int:
    """Updates that the stage has made, since the drained segment began, when this minibatch's forward runs."""
    return max(0, minibatch // shape.replicas - shape.depth + 1 - lag)


def one_f_one_b(pipeline: Sequence[StageShape], stage: int, replica: int, minibatches: int) -> Iterator[Action]:
    """Asynchronous 1F1B: fill with `depth` forwards, then one backward, update and forward in turn, then drain."""
    shape, lag = pipeline[stage], update_lag(pipeline, stage)
    groups = group_count(shape.replicas, minibatches)
    own = own_minibatches(replica, shape.replicas, minibatches)
    for minibatch in own[: shape.depth]:
        yield Action(Kind.FORWARD, minibatch)
    for group in range(groups):
        if group < len(own):
            yield Action(Kind.BACKWARD, own[group])
        if lag and group > 0:
            yield Action(Kind.UPDATE, group - 1)
        yield Action(Kind.REDUCE, group)
        if not lag:
            yield Action(Kind.UPDATE, group)
        if group + shape.depth < len(own):
            yield Action(Kind.FORWARD, own[group + shape.depth])
    if lag and groups:
        yield Action(Kind.UPDATE, groups - 1)


def forward_only(pipeline: Sequence[StageShape], stage: int, replica: int, minibatches: int) -> Iterator[Action]:
    """Inference and evaluation: every minibatch once, in order."""
    for minibatch in own_minibatches(replica, pipeline[stage].replicas, minibatches):
        yield Action(Kind.FORWARD, minibatch)


SCHEDULES: Mapping[str, Schedule] = MappingProxyType(
    {
        schedule.name: schedule
        for schedule in (
            Schedule("1f1b-stashing", one_f_one_b, frozenset(Kind), trains=True),
            Schedule("forward-only", forward_only, frozenset({Kind.FORWARD}), trains=False),
        )
    }
)
