"""What a minibatch takes where workers are on other servers than planned, or links slower. Torch-free.

The formulas are those of the cost model (docs/cost-model.md), with the rates replaced, as far as the predictions of the
stage files tell their terms. A pace is the planned one or, if that is more, the longest of these:

    stage       (f + b + u + exposed') / r,   exposed' = exposed + max(0, s' - max(s, f + b + u))
    boundary    boundary · v / v'
    depth       (2 · t' + Σ a') / ((d - 1) r - d₂ r₂ + |a'|),   t' = bytes / v' + latency,
                for any of the all-reduces a' of this stage and the next; accumulating, a' / (accumulate - d r + 1)
    card        busy · (v / v' of the best link that it was seen with)

r replicas; f, b, u, exposed and boundary as predicted; s the all-reduces of a minibatch on a replica: one, or
r / accumulate of one; v rates, t transfers, d depths, those with ' as found. Plain data parallelism waits for its
all-reduce, behind the backward pass at best: exposed' = max(exposed · s' / s, s' - b). Where a pipeline drains before
its updates, what the sum of its passes, transfers, steady part and exposed all-reduces grows by is added to the pace.

What the plan does not tell, such as who shares a card inside a server, is left as it was. Copies of a pipeline are
taken as replicas, as the executor reduces their gradients: in one ring.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from pipeplan_launch.config import LaunchPlan, Prediction
from pipeplan_launch.placement.levels import Levels
from pipeplan_launch.placement.reality import Reality

ALMOST = 1e-6
"""Minibatches in flight beyond those of the next stage that are none but for rounding."""


@dataclass(frozen=True)
class _Boundary:
    """Between a stage and the next: planned and as found."""

    sent_bytes: float
    returned_bytes: float
    rate: float
    rate_now: float
    latency_s: float
    links: float
    """Messages that go at once, at this rate each, as the plan charges them."""

    def busy_s(self, now: bool) -> float:
        """How long a minibatch keeps the busier direction busy."""
        return max(self.sent_bytes, self.returned_bytes) / (self.rate_now if now else self.rate)

    def trip_s(self, now: bool) -> float:
        """There and back."""
        return (self.sent_bytes + self.returned_bytes) / (self.rate_now if now else self.rate) + 2 * self.latency_s


def pace_s(plan: LaunchPlan, reality: Reality) -> float | None:
    """Seconds a minibatch; None where the stage files do not tell enough."""
    levels, predictions = plan.links, plan.predictions
    needed = ("minibatch_s", "forward_s", "backward_s", "update_s")
    if levels is None or any(getattr(one, name) is None for one in predictions for name in needed):
        return None
    planned = predictions[0].minibatch_s or 0.0
    boundaries = [_boundary(plan, levels, reality, stage) for stage in range(len(plan.pipeline) - 1)]
    rings = [(one.sync_s or 0.0, reality.ring_s(stage)) for stage, one in enumerate(predictions)]
    if plan.schedule.flushes and plan.accumulate:
        longer = _batch_s(plan, boundaries, rings, True) - _batch_s(plan, boundaries, rings, False)
        return max(planned + max(0.0, longer) / plan.accumulate, reality.cards_s())
    return max(
        planned,
        reality.cards_s(),
        *(_stage_s(plan, stage, *ring) for stage, ring in enumerate(rings)),
        *(one.busy_s(True) / one.links for one in boundaries),
        *(_depth_s(plan, stage, one, rings) for stage, one in enumerate(boundaries)),
        *(_buffered_s(plan, stage, *ring, planned) for stage, ring in enumerate(rings)),
    )


def _boundary(plan: LaunchPlan, levels: Levels, reality: Reality, stage: int) -> _Boundary:
    prediction = plan.predictions[stage]
    rate, latency_s = levels.message(plan.pipeline[stage].workers + plan.pipeline[stage + 1].workers)
    sent, returned = prediction.send_bytes or 0.0, prediction.receive_gradient_bytes or 0.0
    alone, planned = max(sent, returned) / rate, prediction.boundary_s
    links = alone / planned if alone and planned else 1.0
    return _Boundary(sent, returned, rate, min(rate, reality.message_rate(stage)), latency_s, links)


def _stage_s(plan: LaunchPlan, stage: int, ring_s: float, ring_now_s: float) -> float:
    prediction, replicas = plan.predictions[stage], len(plan.pipeline[stage].workers)
    work = _work_s(prediction)
    exposed = prediction.exposed_s or 0.0
    share = replicas / plan.accumulate if plan.accumulate else 1.0
    planned, now = ring_s * share, ring_now_s * share
    if len(plan.pipeline) == 1 and not plan.accumulate:
        if planned:
            exposed = max(exposed * now / planned, now - (prediction.backward_s or 0.0))
    else:
        exposed += max(0.0, now - max(planned, work))
    return (work + exposed) / replicas


def _depth_s(plan: LaunchPlan, stage: int, boundary: _Boundary, rings: list[tuple[float, float]]) -> float:
    """The pace that the depth of a stage sustains: what is in flight beyond the next stage covers the way there and
    back, and the all-reduces that are awaited, each less a minibatch."""
    if plan.mode != "training":
        return 0.0
    here, there = plan.shapes[stage], plan.shapes[stage + 1]
    slack = (here.depth - 1) * here.replicas - there.depth * there.replicas
    if slack < ALMOST:
        return 0.0
    transfer_s = max(boundary.sent_bytes, boundary.returned_bytes) / boundary.rate_now + boundary.latency_s
    waits = [] if plan.accumulate else [ring[1] for ring in rings[stage : stage + 2]]
    subsets = [some for count in range(len(waits) + 1) for some in itertools.combinations(waits, count)]
    return max((2 * transfer_s + sum(some)) / (slack + len(some)) for some in subsets)


def _buffered_s(plan: LaunchPlan, stage: int, ring_s: float, ring_now_s: float, planned_s: float) -> float:
    """The pace at which two versions of the weights suffice, where updates are of several minibatches; 0 for copies of
    a pipeline, which the stage files do not tell from replicas: theirs is another one, so that it does not even hold
    for what is planned."""
    shape = plan.shapes[stage]
    spare = (plan.accumulate or 0) - shape.depth * shape.replicas
    if not plan.accumulate or spare < 0 or ring_s / (spare + 1) > planned_s * (1 + ALMOST):
        return 0.0
    return ring_now_s / (spare + 1)


def _batch_s(plan: LaunchPlan, boundaries: list[_Boundary], rings: list[tuple[float, float]], now: bool) -> float:
    """From one update to the next of a pipeline that drains before it."""
    minibatches = plan.accumulate or 1
    counts = [math.ceil(minibatches / len(stage.workers)) - 1 for stage in plan.pipeline]
    works = [_work_s(one) for one in plan.predictions]
    if plan.schedule.name == "gpipe":
        ways = [
            ([one.forward_s or 0.0 for one in plan.predictions], [one.sent_bytes for one in boundaries]),
            (
                [(one.backward_s or 0.0) + (one.update_s or 0.0) for one in plan.predictions],
                [one.returned_bytes for one in boundaries],
            ),
        ]
    else:
        ways = [(works, [max(one.sent_bytes, one.returned_bytes) for one in boundaries])]
    steady = 0.0
    for passes, sizes in ways:
        messages = [
            (minibatches - one.links) / one.links * size / (one.rate_now if now else one.rate)
            for one, size in zip(boundaries, sizes, strict=True)
        ]
        steady += max(*(count * one for count, one in zip(counts, passes, strict=True)), *messages, 0.0)
    exposed = max(ring[now] - sum(works[:stage]) for stage, ring in enumerate(rings))
    return sum(works) + sum(one.trip_s(now) for one in boundaries) + steady + max(0.0, exposed)


def _work_s(prediction: Prediction) -> float:
    return (prediction.forward_s or 0.0) + (prediction.backward_s or 0.0) + (prediction.update_s or 0.0)
