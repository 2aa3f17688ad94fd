"""The actions of every worker, in order, as pure data. Torch-free, so that the planner's simulator can replay them.

    F3   forward of minibatch 3
    B3   backward of minibatch 3; with W in the schedule only as far as the gradient of the stage's input
    W3   gradients of the weights of minibatch 3
    R3   start the all-reduce of group 3's gradients among the stage's replicas
    U3   wait for that all-reduce and update the weights

Symbols: stage s has r replicas and depth d (the most minibatches that a replica has in flight). Minibatch i belongs to
replica i mod r, forward and backward, and to a group of minibatches whose gradients are averaged for one update. The
last group may be short, and replicas without a minibatch in it still join its all-reduce.

Replicas of unequal speed may take unequal shares of a group, which add up to the group's size M. Each replica then runs
consecutive minibatches: with shares 3 and 1, replica 0 runs the first three of every four, and replica 1 the last.

    schedule        order             group size           updates in the weights that minibatch i uses
    1f1b-stashing   1F1B              r of the stage       made at this stage before its forward
    vertical-sync   1F1B              r of the stage       made at the first stage before its forward there
    2bw             1F1B              M for all stages     of all earlier groups, except the latest of them
    gpipe           F… then B…        M for all stages     of all earlier groups
    1f1b-flush      1F1B per group    M for all stages     of all earlier groups
    zb-h1           the same, with W  M for all stages     of all earlier groups
    interleaved-1f1b, zb-v            M for all stages     of all earlier groups
    forward-only    F…                -                    none

1F1B with weight stashing (PipeDream). One replica of a stage with d = 2, minibatches 0, 1, 2 (r = 1):

    F0 F1 | B0 R0 U0 F2 | B1 R1 U1 | B2 R2 U2
    fill  | steady      | drain

So the forward of minibatch i runs on the weights after max(0, i div r - d + 1) updates of the segment (`version_used`).
Vertical sync has the same order and differs only in the weights (`version_of_input`).
A stage with several replicas waits for the all-reduce only after its next backward, so that computing hides it:

    F0 F2 | B0 R0 F4 | B2 U0 R1 F6 | …         (replica 0 of 2)

The stage's weights are then one update older. A plan of one stage (plain data parallelism) stays synchronous.

2BW (Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, ICML 2021), d = 2, M = 3: group g uses the
weights of the groups up to g - 2. U0 is deferred until F6, the first action that needs it.

    F0 F1 | B0 F2 B1 F3 B2 R0 F4 B3 F5 B4 U0 F6 B5 R1 F7 …

Flush schedules, d = 2, M = 3. The pipeline drains before every update:

    gpipe        F0 F1 F2 B0 B1 B2 R0 U0 | F3 …        (needs d = 3)
    1f1b-flush   F0 F1 B0 F2 B1 B2 R0 U0 | F3 …

zb-h1 (Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241) has the passes of 1f1b-flush in the same order. A
stage defers its W's by `deferred` minibatches, so that they fill the time in which the stages before it drain. Example:
the last of three stages, deferred = 2, M = 4:

    zb-h1        F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3 R0 U0 | F4 …

Under interleaved-1f1b and zb-v a worker runs several stages (`virtual_stages`), in the order of `device_actions`.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import accumulate, chain
from types import MappingProxyType

from pipeplan_launch.plan.virtual_stages import (
    VirtualStages,
    interleaved_passes,
    looped_device,
    v_shaped_device,
    zero_bubble_v_passes,
)


class ActionKind(StrEnum):
    """The kinds of action. An executor states which kinds it can run, and refuses a schedule with others before it
    starts.
    """

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHTS = "W"
    REDUCE = "R"
    UPDATE = "U"


POSTED_RECEIVES = 2
"""Receives of activations that a worker posts in advance: one in use and one under way. Each needs memory for one
minibatch."""

_ACTION = re.compile(rf"([{''.join(ActionKind)}])(0|[1-9][0-9]*)")


@dataclass(frozen=True, slots=True)
class Action:
    """One step of one worker. `index` is a minibatch for F, B and W, and a group of minibatches for R and U."""

    kind: ActionKind
    index: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.index}"

    @staticmethod
    def parse(text: str) -> Action:
        """The inverse of str(): `Action.parse("F3")`. Raises ValueError on anything else."""
        match = _ACTION.fullmatch(text)
        if match is None:
            raise ValueError(
                f"not an action: {text!r} (expected one of {', '.join(ActionKind)} and a number, as in F3)"
            )
        return Action(ActionKind(match[1]), int(match[2]))


@dataclass(frozen=True, slots=True)
class StageShape:
    """The properties of a stage that schedules depend on."""

    replicas: int
    depth: int
    """Largest number of minibatches that one replica may have between their forward and their backward."""
    accumulate: int | None = None
    """Minibatches per update, the same at all stages. Ignored by schedules that update a stage for every round of its
    replicas."""
    deferred: int = 0
    """Largest number of minibatches whose B has run and whose W has not when the replica starts another minibatch.
    Ignored by schedules without W."""
    device: int | None = None
    """Position of the stage's workers in the pipeline, under schedules whose workers run several stages; else None."""
    shares: tuple[int, ...] = ()
    """Minibatches of an update on each replica, if they are unequal; their sum is `accumulate`."""

    def __post_init__(self) -> None:
        if self.deferred < 0:
            raise ValueError(f"a stage cannot defer {self.deferred} gradients of weights")
        if self.replicas < 1 or self.depth < 1:
            raise ValueError(f"a stage needs at least one replica and depth 1 (here {self.replicas} and {self.depth})")
        if self.accumulate is not None and self.accumulate < 1:
            raise ValueError(f"an update needs at least one minibatch, not {self.accumulate}")
        shares = self.shares
        if shares and (len(shares) != self.replicas or sum(shares) != self.accumulate or min(shares) < 1):
            raise ValueError(
                f"{self.replicas} replicas cannot share {self.accumulate} minibatches as {', '.join(map(str, shares))}"
            )


ActionStream = Callable[[Sequence[StageShape], int, int, int], Iterator[Action]]
"""(pipeline, stage, replica, minibatches) -> the actions of that replica, in order."""

VersionRule = Callable[[Sequence[StageShape], int, int], int]
"""(pipeline, stage, minibatch) -> the weight version that the minibatch's forward and backward use, as the number of
updates made since the drained segment began."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """A named schedule: its generator, the kinds of action that it emits, and the weight versions that it uses."""

    name: str
    stream: ActionStream
    kinds: frozenset[ActionKind]
    trains: bool
    version: VersionRule
    accumulates: bool = False
    """Whether an update averages `StageShape.accumulate` minibatches instead of one round of the stage's replicas."""
    virtual: VirtualStages | None = None
    """Placement and pass order for workers that run several stages; None if each worker runs one stage."""

    @property
    def splits(self) -> bool:
        """Whether gradients of the weights have an action of their own, W."""
        return ActionKind.WEIGHTS in self.kinds

    def held(self, shape: StageShape) -> int:
        """Largest number of minibatches whose activations one replica holds, from F until B, or until W if the
        schedule has one."""
        return shape.depth + shape.deferred if self.splits else shape.depth

    @property
    def flushes(self) -> bool:
        """Whether the pipeline is empty at every update, so that all stages update at one point of the schedule."""
        return self.version is version_flushed

    def group_size(self, shape: StageShape) -> int:
        """Minibatches whose gradients are averaged for one update. Raises ValueError if the schedule needs
        `accumulate` and the shape has none.
        """
        if not self.accumulates:
            return shape.replicas
        return _accumulated(shape)


def replica_of(minibatch: int, replicas: int, shares: Sequence[int] = ()) -> int:
    """The replica that runs this minibatch, forward and backward: by shares of a group, or round robin."""
    return bisect_right([*accumulate(shares)], minibatch % sum(shares)) if shares else minibatch % replicas


def own_minibatches(replica: int, replicas: int, minibatches: int, shares: Sequence[int] = ()) -> Sequence[int]:
    """The minibatches of one replica, in order."""
    if not shares:
        return range(replica, minibatches, replicas)
    groups, size = group_count(sum(shares), minibatches), sum(shares)
    own = (own_members(group, size, replica, replicas, minibatches, shares) for group in range(groups))
    return [*chain.from_iterable(own)]


def group_count(size: int, minibatches: int) -> int:
    """Number of groups, and so of updates, in this many minibatches."""
    return -(-minibatches // size)


def group_members(group: int, size: int, minibatches: int) -> range:
    """The minibatches of a group; the last group may be short."""
    return range(group * size, min((group + 1) * size, minibatches))


def own_members(
    group: int, size: int, replica: int, replicas: int, minibatches: int, shares: Sequence[int] = ()
) -> range:
    """The minibatches of a group that one replica computes, in order; empty if a short last group has none for it."""
    members = group_members(group, size, minibatches)
    if shares:
        return members[sum(shares[:replica]) : sum(shares[: replica + 1])]
    return members[(replica - members.start) % replicas :: replicas]


def _accumulated(shape: StageShape) -> int:
    if shape.accumulate is None:
        raise ValueError("this schedule needs a number of minibatches per update (StageShape.accumulate)")
    return shape.accumulate


def update_lag(pipeline: Sequence[StageShape], stage: int) -> int:
    """Number of updates by which a stage is late: 1 if it has replicas in a pipeline of several stages, otherwise 0.

    Replicas must agree on an update before it, and several stages make training asynchronous anyway.
    """
    return int(len(pipeline) > 1 and pipeline[stage].replicas > 1)


def version_used(minibatch: int, shape: StageShape, lag: int) -> int:
    """Updates that the stage has made since the drained segment began, when this minibatch's forward runs."""
    return max(0, minibatch // shape.replicas - shape.depth + 1 - lag)


def version_stashed(pipeline: Sequence[StageShape], stage: int, minibatch: int) -> int:
    """Weight stashing: the newest version at this stage when the minibatch's forward runs."""
    return version_used(minibatch, pipeline[stage], update_lag(pipeline, stage))


def version_of_input(pipeline: Sequence[StageShape], stage: int, minibatch: int) -> int:
    """Vertical sync: the newest version at this stage that includes only minibatches that the first stage's version
    includes.

    With one replica per stage, the version is the same number at every stage. Stage s has made the version in time if
    the depth of the first stage covers the minibatches in flight at s, because then

        (d_1 + lag_1 - 1) r_1 ≥ (d_s + lag_s - 1) r_s
    """
    return version_stashed(pipeline, 0, minibatch) * pipeline[0].replicas // pipeline[stage].replicas


def version_buffered(pipeline: Sequence[StageShape], stage: int, minibatch: int) -> int:
    """2BW: the updates of all groups earlier than the minibatch's group, except the latest of them."""
    return max(0, minibatch // _accumulated(pipeline[stage]) - 1)


def version_flushed(pipeline: Sequence[StageShape], stage: int, minibatch: int) -> int:
    """Flush schedules: the updates of all groups earlier than the minibatch's group, as in one process."""
    return minibatch // _accumulated(pipeline[stage])


def version_fixed(_pipeline: Sequence[StageShape], _stage: int, _minibatch: int) -> int:
    """Forward only: weights never change."""
    return 0


def one_f_one_b(pipeline: Sequence[StageShape], stage: int, replica: int, minibatches: int) -> Iterator[Action]:
    """Asynchronous 1F1B: fill with `depth` forwards, then one backward, update and forward in turn, then drain."""
    shape, lag = pipeline[stage], update_lag(pipeline, stage)
    groups = group_count(shape.replicas, minibatches)
    own = own_minibatches(replica, shape.replicas, minibatches)
    for minibatch in own[: shape.depth]:
        yield Action(ActionKind.FORWARD, minibatch)
    for group in range(groups):
        if group < len(own):
            yield Action(ActionKind.BACKWARD, own[group])
        if lag and group > 0:
            yield Action(ActionKind.UPDATE, group - 1)
        yield Action(ActionKind.REDUCE, group)
        if not lag:
            yield Action(ActionKind.UPDATE, group)
        if group + shape.depth < len(own):
            yield Action(ActionKind.FORWARD, own[group + shape.depth])
    if lag and groups:
        yield Action(ActionKind.UPDATE, groups - 1)


def double_buffered(pipeline: Sequence[StageShape], stage: int, replica: int, minibatches: int) -> Iterator[Action]:
    """2BW: asynchronous 1F1B with an all-reduce after a group's last backward, whose update is deferred until it is
    due.

    The update of group g is due before the first forward of group g + 2, so that computing hides the all-reduce and
    at most two versions are in use. Raises ValueError if a stage has more than M minibatches in flight, for which two
    versions do not suffice.
    """
    shape, size = pipeline[stage], _accumulated(pipeline[stage])
    if shape.depth * shape.replicas > size:
        raise ValueError(
            f"2bw needs at least as many minibatches per update as the stage has in flight "
            f"(here {size}, and {shape.depth} on each of {shape.replicas} replicas)"
        )
    groups, own = group_count(size, minibatches), own_minibatches(replica, shape.replicas, minibatches)
    reduced = updated = 0

    def update(until: int) -> Iterator[Action]:
        nonlocal updated
        yield from (Action(ActionKind.UPDATE, group) for group in range(updated, until))
        updated = max(updated, until)

    def reduce(until: int) -> Iterator[Action]:
        nonlocal reduced
        for group in range(reduced, until):
            yield from update(group)  # so only one all-reduce is under way at a time
            yield Action(ActionKind.REDUCE, group)
        reduced = max(reduced, until)

    for minibatch in own[: shape.depth]:
        yield Action(ActionKind.FORWARD, minibatch)
    for position, minibatch in enumerate(own):
        yield Action(ActionKind.BACKWARD, minibatch)
        # This replica has computed all its minibatches of every group before the group of its next minibatch.
        yield from reduce(own[position + 1] // size if position + 1 < len(own) else groups)
        if position + shape.depth < len(own):
            following = own[position + shape.depth]
            yield from update(following // size - 1)
            yield Action(ActionKind.FORWARD, following)
    yield from reduce(groups)
    yield from update(groups)


def flush_stream(
    pipeline: Sequence[StageShape],
    stage: int,
    replica: int,
    minibatches: int,
    *,
    fills: bool = False,
    splits: bool = False,
) -> Iterator[Action]:
    """1F1B with a flush: each group fills the pipeline, alternates backward and forward, drains it, and updates.

    `fills`: GPipe (Huang et al., NeurIPS 2019): all forwards of a group, then all its backwards in the same order. The
    depth must cover a whole group: ⌈M / r⌉.

    `splits`: ZB-H1 (Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, arXiv 2401.10241): the gradients of the
    weights come later, at the latest before the flush. The W of a minibatch runs after the B of `deferred` later
    minibatches, and before the next forward. So a replica holds the activations of at most depth + deferred
    minibatches.
    """
    deferred = pipeline[stage].deferred
    for group, own in _own_groups(pipeline[stage], replica, minibatches):
        depth = len(own) if fills else pipeline[stage].depth
        for minibatch in own[:depth]:
            yield Action(ActionKind.FORWARD, minibatch)
        for position, minibatch in enumerate(own):
            yield Action(ActionKind.BACKWARD, minibatch)
            if splits and position >= deferred:
                yield Action(ActionKind.WEIGHTS, own[position - deferred])
            if position + depth < len(own):
                yield Action(ActionKind.FORWARD, own[position + depth])
        for minibatch in own[max(0, len(own) - deferred) :] if splits else ():
            yield Action(ActionKind.WEIGHTS, minibatch)
        yield Action(ActionKind.REDUCE, group)
        yield Action(ActionKind.UPDATE, group)


def _own_groups(shape: StageShape, replica: int, minibatches: int) -> Iterator[tuple[int, Sequence[int]]]:
    """Every group of M minibatches, with the minibatches of the group that one replica computes."""
    size = _accumulated(shape)
    for group in range(group_count(size, minibatches)):
        yield group, own_members(group, size, replica, shape.replicas, minibatches, shape.shares)


def device_actions(
    schedule: Schedule,
    pipeline: Sequence[StageShape],
    device: int,
    replica: int,
    minibatches: int,
    *,
    trains: bool = True,
) -> Iterator[tuple[int, Action]]:
    """The actions of one replica of a device that runs several stages, in order, each with its stage.

    The all-reduces of the device's stages start in one order, from the last stage to the first, also on a replica that
    has no minibatch of the group. `trains`: False for the forward passes alone, in one group.
    """
    assert schedule.virtual is not None
    stages = [stage for stage, shape in enumerate(pipeline) if shape.device == device]
    shape, devices = pipeline[stages[0]], len({one.device for one in pipeline})
    groups = _own_groups(shape, replica, minibatches)
    if not trains:
        groups = iter([(0, own_minibatches(replica, shape.replicas, minibatches))])
    for group, own in groups:
        left = {stage: len(own) for stage in stages}
        unreduced = sorted(stages)
        for letter, chunk, position in schedule.virtual.passes(device, devices, len(stages), len(own)):
            kind, stage = ActionKind(letter), stages[chunk]
            if not trains and kind is not ActionKind.FORWARD:
                continue
            yield stage, Action(kind, own[position])
            left[stage] -= kind is (ActionKind.WEIGHTS if schedule.splits else ActionKind.BACKWARD)
            while trains and unreduced and not left[unreduced[-1]]:
                yield unreduced.pop(), Action(ActionKind.REDUCE, group)
        if trains:
            yield from ((stage, Action(ActionKind.REDUCE, group)) for stage in reversed(unreduced))
            yield from ((stage, Action(ActionKind.UPDATE, group)) for stage in stages)


def _stream_of_device(name: str) -> ActionStream:
    """The action stream of one stage, filtered from the actions of its device."""

    def stream(pipeline: Sequence[StageShape], stage: int, replica: int, minibatches: int) -> Iterator[Action]:
        device = pipeline[stage].device
        if device is None:
            raise ValueError(f"schedule {name} needs to know which workers run each stage (StageShape.device)")
        actions = device_actions(SCHEDULES[name], pipeline, device, replica, minibatches)
        return (action for at, action in actions if at == stage)

    return stream


def forward_only(pipeline: Sequence[StageShape], stage: int, replica: int, minibatches: int) -> Iterator[Action]:
    """Inference and evaluation: every minibatch once, in order."""
    for minibatch in own_minibatches(replica, pipeline[stage].replicas, minibatches):
        yield Action(ActionKind.FORWARD, minibatch)


_SPLIT, _FORWARD = frozenset(ActionKind), frozenset({ActionKind.FORWARD})
_TRAINING = _SPLIT - {ActionKind.WEIGHTS}


def _flushing(name: str, stream: ActionStream, kinds: frozenset[ActionKind], *virtual: VirtualStages) -> Schedule:
    return Schedule(name, stream, kinds, True, version_flushed, True, *virtual)


SCHEDULES: Mapping[str, Schedule] = MappingProxyType(
    {
        schedule.name: schedule
        for schedule in (
            Schedule("1f1b-stashing", one_f_one_b, _TRAINING, trains=True, version=version_stashed),
            Schedule("vertical-sync", one_f_one_b, _TRAINING, trains=True, version=version_of_input),
            Schedule("2bw", double_buffered, _TRAINING, trains=True, version=version_buffered, accumulates=True),
            _flushing("gpipe", partial(flush_stream, fills=True), _TRAINING),
            _flushing("1f1b-flush", flush_stream, _TRAINING),
            _flushing("zb-h1", partial(flush_stream, splits=True), _SPLIT),
            _flushing(
                "interleaved-1f1b",
                _stream_of_device("interleaved-1f1b"),
                _TRAINING,
                VirtualStages(looped_device, interleaved_passes),
            ),
            _flushing(
                "zb-v",
                _stream_of_device("zb-v"),
                _SPLIT,
                VirtualStages(v_shaped_device, zero_bubble_v_passes, most=2),
            ),
            Schedule("forward-only", forward_only, _FORWARD, trains=False, version=version_fixed),
        )
    }
)
