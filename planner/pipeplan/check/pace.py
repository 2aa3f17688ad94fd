"""The pace of a plan: in the steady state that of its slowest resource, with a flush a share of the batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipeplan.check import formulas
from pipeplan.check.document import DOUBLE_BUFFERED, FLUSHING, GPIPE, Document
from pipeplan.check.figures import Figures


@dataclass(frozen=True)
class Batch:
    """The parts of the time from one update to the next, where the pipeline drains before it. Seconds."""

    minibatches: int
    """Of one copy."""
    work_s: float
    """The first minibatch, through all stages and back."""
    transfers_s: float
    steady_s: float
    """What the others add."""
    exposed_s: float
    """All-reduces that nothing hides."""
    copies_s: float

    @property
    def total_s(self) -> float:
        """Their sum."""
        return self.work_s + self.transfers_s + self.steady_s + self.exposed_s + self.copies_s


def steady_pace(document: Document, found: Sequence[Figures], among_s: float) -> float:
    """Seconds per minibatch of all copies, of an asynchronous schedule or of inference."""
    slowest = 0.0
    for index, stage in enumerate(found):
        interval = _share(document) if document.accumulates else stage.replicas
        exchange = stage.allreduce_s / interval
        slowest = max(
            slowest,
            float(formulas.together(stage.pass_s / stage.replicas, exchange, document.asked.overlap)),
            stage.busier_s / stage.lanes,
            0.0 if document.inference else _depth_pace(document, found, index, among_s),
        )
    among = among_s / update_interval(document)
    return float(formulas.together(slowest / document.copies, among, document.asked.overlap))


def batch(document: Document, found: Sequence[Figures], among_s: float) -> Batch:
    """One batch of a schedule with a flush."""
    share = _share(document)
    fastest = max(device.speed for device in document.cluster.devices)
    return Batch(
        minibatches=share,
        work_s=sum(stage.pass_s for stage in found),
        transfers_s=sum(stage.round_trip_s for stage in found),
        steady_s=max(_others(document, found, share), _limited(document, found, share)),
        exposed_s=max(max(0.0, stage.allreduce_s - stage.before_s / fastest) for stage in found),
        copies_s=among_s,
    )


def update_interval(document: Document) -> int:
    """Minibatches of all copies for each all-reduce among them."""
    return document.accumulate or 1 if document.accumulates else document.copies


def _share(document: Document) -> int:
    """M′, the minibatches of one update in one copy."""
    whole = document.accumulate or 1
    if document.schedule in FLUSHING:
        return math.ceil(whole / document.copies)
    # None where there are more copies than minibatches: then nothing satisfies the depth.
    return max(1, whole // document.copies)


def _others(document: Document, found: Sequence[Figures], share: int) -> float:
    """A, by stages and boundaries."""

    def after_first(time: float, servers: int) -> float:
        return (math.ceil(share / servers) - 1) * time

    if document.schedule == GPIPE:
        forward = [max(after_first(s.forward_s, s.replicas), after_first(s.send_s, s.lanes)) for s in found]
        behind = [(stage.backward_s + stage.update_s, stage) for stage in found]
        backward = [max(after_first(time, s.replicas), after_first(s.return_s, s.lanes)) for time, s in behind]
        return max(forward) + max(backward)
    return max(max(after_first(s.pass_s, s.replicas), after_first(s.busier_s, s.lanes)) for s in found)


def _limited(document: Document, found: Sequence[Figures], share: int) -> float:
    """A, by the depths where they are less than all minibatches of a replica."""
    longest = 0.0
    for index, stage in enumerate(found):
        if stage.depth < math.ceil(share / stage.replicas):
            if document.schedule == GPIPE:
                return math.inf
            longest = max(longest, (share - 1) * _sustained(document, found, index))
    return longest


def _depth_pace(document: Document, found: Sequence[Figures], index: int, among_s: float) -> float:
    """The pace of one copy that a depth sustains, and under 2BW that at which two versions suffice."""
    pace = _sustained(document, found, index)
    if document.schedule == DOUBLE_BUFFERED:
        stage = found[index]
        spare = (document.accumulate or 1) // document.copies - stage.depth * stage.replicas
        late = (stage.allreduce_s + among_s) / (spare + 1 / document.copies) if spare >= 0 else math.inf
        pace = max(pace, late)
    return pace


def _sustained(document: Document, found: Sequence[Figures], index: int) -> float:
    """The smallest T for which the formula of the depth gives no more than the stage has; infinite where none does."""
    if index + 1 == len(found):
        return 0.0
    mine, following = found[index : index + 2]

    def wait(stage: Figures, pace: float) -> float:
        if document.accumulates:
            return 0.0
        return float(formulas.wait(stage.group_s, pace, stage.replicas, document.copies))

    def suffices(pace: float) -> bool:
        demand = following.depth * following.replicas + wait(following, pace)
        return bool(formulas.depth(demand, wait(mine, pace), mine.transfer_s, pace, mine.replicas) <= mine.depth)

    return _smallest(suffices)


def _smallest(holds: Callable[[float], bool]) -> float:
    """The smallest positive number for which something holds that holds from there on; 0 or infinity at the ends."""
    low, high = 1e-30, 1e30
    if holds(low):
        return 0.0
    if not holds(high):
        return math.inf
    while high > low * (1 + 1e-14):
        middle = math.sqrt(low * high)
        if not low < middle < high:
            break
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
