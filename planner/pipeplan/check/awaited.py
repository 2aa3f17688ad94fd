"""The pace of plain data parallelism, whose forward pass waits for the update: docs/cost-model.md, written anew."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from pipeplan.check import formulas
from pipeplan.check.document import Document, Stage
from pipeplan.check.figures import Figures, figures
from pipeplan.check.model import Model

FIRST, OTHERS = 1 << 20, 25 << 20
"""Bytes at which buckets of gradients close."""


def waits(document: Document) -> bool:
    """Whether plans of one stage wait for their update, by the schedule and what was asked for."""
    return not document.inference and not document.accumulates and document.asked.contention


def least_of_one_stage(document: Document, model: Model, copied: Sequence[tuple[int, int]]) -> float:
    """The least pace of all plans of one stage that satisfy the constraints and fit, on equal servers.

    `copied`: how many components of so many workers may each hold a copy of the stage.
    """
    asked, total = document.asked, document.cluster.workers
    if asked.stages not in (None, 1) or any(stage != 1 for _, stage in asked.pins):
        return math.inf
    least = math.inf
    for workers, copies in _placed(asked.max_replicas or total, total, copied):
        if len(workers) > (asked.max_workers or total):
            continue
        for recompute in (False, True) if asked.recompute and asked.memory else (False,):
            stage = Stage(model.names, workers, 1, 1, recompute)
            alone = replace(document, stages=(stage,), copies=copies)
            (figure,) = figures(alone, model)
            if not asked.memory or figure.memory_bytes <= document.cluster.device.memory_bytes:
                least = min(least, awaited_pace(alone, model, (figure,)))
    return least


def _placed(most: int, total: int, copied: Sequence[tuple[int, int]]) -> Iterator[tuple[tuple[int, ...], int]]:
    """Workers of one stage, and in how many copies: from the first on, and so many in each component."""
    for count in range(1, min(most, total) + 1):
        yield tuple(range(count)), 1
    for copies, size in copied:
        for count in range(1, min(most, size) + 1):
            yield tuple(copy * size + worker for worker in range(count) for copy in range(copies)), copies


def awaited_pace(document: Document, model: Model, found: Sequence[Figures]) -> float:
    """Seconds per minibatch; 0 where nothing waits, or the plan was asked for without."""
    if len(found) > 1 or not waits(document):
        return 0.0
    stage, workers = found[0], document.stages[0].workers
    exposed = exposed_s(document, model)
    hidden = max(0.0, stage.group_s - exposed)
    return (stage.pass_s + exposed + (1.0 - document.asked.overlap) * hidden) / len(workers)


def exposed_s(document: Document, model: Model) -> float:
    """What of the all-reduce is left when the backward pass ends."""
    workers = document.stages[0].workers
    speed = min(document.cluster.device_of(worker).speed for worker in workers)
    again = float(model.forward_s.sum()) / speed if document.stages[0].recompute else 0.0
    late = 0.0
    """When the buckets so far are through, after the end of the backward pass."""
    if len(workers) > 1:
        link = document.network.among(workers)
        late = -float(model.backward_s.sum()) / speed - again
        for size, remaining in _buckets(model):
            late = max(late, -remaining / speed) + float(
                formulas.ring(len(workers), size, link.allreduce, link.latency_s)
            )
    return max(0.0, late)


def _buckets(model: Model) -> Iterator[tuple[float, float]]:
    """Bytes of each bucket, and how long the backward pass still goes on when it is full, on a device of speed 1."""
    remaining = float(model.backward_s.sum())
    filled, limit = 0.0, FIRST
    for seconds, size in zip(model.backward_s[::-1], model.parameters[::-1], strict=True):
        remaining -= float(seconds)
        filled += float(size)
        if filled >= limit:
            yield filled, remaining
            filled, limit = 0.0, OTHERS
    if filled:
        yield filled, 0.0
