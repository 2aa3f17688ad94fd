"""The DDP overlap model: the pace of plain data parallelism, whose forward pass waits for the update.

An independent implementation of docs/cost-model.md, "Waiting for the update".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from pipeplan.checker import figures
from pipeplan.checker.document import CheckedStage, PlanDocument
from pipeplan.checker.figures import StageFigures, stage_figures
from pipeplan.checker.model import CheckedModel

FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20
"""Sizes at which the first and every later bucket of gradients closes, as in torch's DDP."""


def waits_for_update(document: PlanDocument) -> bool:
    """Whether plans of one stage are charged with the wait for their update, by the schedule and the options."""
    return not document.inference and not document.accumulates and document.options.contention


def least_single_stage_pace(document: PlanDocument, model: CheckedModel, copied: Sequence[tuple[int, int]]) -> float:
    """The least pace of all plans of one stage that satisfy the constraints and fit in memory, in a uniform cluster.

    `copied` lists (components, workers in each) for every level whose components may each hold a copy of the stage.
    The result is infinite where there is no such plan.
    """
    options, total = document.options, document.cluster.workers
    if options.stages not in (None, 1) or any(stage != 1 for _, stage in options.pins):
        return math.inf
    least = math.inf
    for workers, copies in _placements(options.max_replicas or total, total, copied):
        if len(workers) > (options.max_workers or total):
            continue
        for recompute in (False, True) if options.recompute and options.memory else (False,):
            stage = CheckedStage(model.names, workers, 1, 1, recompute)
            alone = replace(document, stages=(stage,), copies=copies)
            (figure,) = stage_figures(alone, model)
            if not options.memory or figure.memory_bytes <= document.cluster.device.memory_bytes:
                least = min(least, ddp_pace(alone, model, (figure,)))
    return least


def _placements(
    max_replicas: int, total: int, copied: Sequence[tuple[int, int]]
) -> Iterator[tuple[tuple[int, ...], int]]:
    """(workers of one stage, copies): the first workers of the cluster, and the first workers of each component."""
    for count in range(1, min(max_replicas, total) + 1):
        yield tuple(range(count)), 1
    for copies, size in copied:
        for count in range(1, min(max_replicas, size) + 1):
            yield tuple(copy * size + worker for worker in range(count) for copy in range(copies)), copies


def ddp_pace(document: PlanDocument, model: CheckedModel, stages: Sequence[StageFigures]) -> float:
    """Pace of a plan of one stage, seconds per minibatch; 0 for plans that this model does not apply to."""
    if len(stages) > 1 or not waits_for_update(document):
        return 0.0
    stage, workers = stages[0], document.stages[0].workers
    exposed = exposed_allreduce_s(document, model)
    hidden = max(0.0, stage.group_s - exposed)
    return (stage.pass_s + exposed + (1.0 - document.options.overlap) * hidden) / len(workers)


def exposed_allreduce_s(document: PlanDocument, model: CheckedModel) -> float:
    """Exposed all-reduce time: the part of the all-reduce that remains after the end of the backward pass, seconds."""
    workers = document.stages[0].workers
    speed = min(document.cluster.device_of(worker).speed for worker in workers)
    recompute_s = float(model.forward_s.sum()) / speed if document.stages[0].recompute else 0.0
    done_s = 0.0  # when the buckets so far are reduced, relative to the end of the backward pass
    if len(workers) > 1:
        link = document.network.among(workers)
        done_s = -float(model.backward_s.sum()) / speed - recompute_s
        for size, remaining in _buckets(model):
            done_s = max(done_s, -remaining / speed) + float(
                figures.ring_allreduce_s(len(workers), size, link.allreduce, link.latency_s)
            )
    return max(0.0, done_s)


def _buckets(model: CheckedModel) -> Iterator[tuple[float, float]]:
    """(bytes, remaining backward time when it closes) of each bucket of gradients, on a device of speed 1."""
    remaining = float(model.backward_s.sum())
    filled, limit = 0.0, FIRST_BUCKET_BYTES
    for seconds, size in zip(model.backward_s[::-1], model.parameters[::-1], strict=True):
        remaining -= float(seconds)
        filled += float(size)
        if filled >= limit:
            yield filled, remaining
            filled, limit = 0.0, BUCKET_BYTES
    if filled:
        yield filled, 0.0
