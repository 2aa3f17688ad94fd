"""The DDP overlap model: the pace of plain data parallelism, whose forward pass waits for the update.

An independent implementation of docs/cost-model.md, "Waiting for the update".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeplan.checker import figures
from pipeplan.checker.document import PlanDocument
from pipeplan.checker.figures import StageFigures
from pipeplan.checker.model import CheckedModel
from pipeplan.checker.sharded import sharded_figures

FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20
"""Sizes at which the first and every later bucket of gradients closes, as in torch's DDP."""


def waits_for_update(document: PlanDocument) -> bool:
    """Whether plans of one stage are charged with the wait for their update, by the schedule and the options."""
    return not document.inference and not document.accumulates and document.options.contention


def ddp_pace(document: PlanDocument, model: CheckedModel, stages: Sequence[StageFigures]) -> float:
    """Pace of a plan of one stage, seconds per minibatch; 0 for plans that this model does not apply to."""
    if len(stages) > 1 or not waits_for_update(document):
        return 0.0
    stage, workers = stages[0], document.stages[0].workers
    exposed = exposed_allreduce_s(document, model)
    hidden = max(0.0, stage.group_s - exposed)
    return (stage.pass_s + exposed + (1.0 - document.options.overlap) * hidden) / len(workers)


def exposed_allreduce_s(document: PlanDocument, model: CheckedModel, index: int = 0) -> float:
    """Exposed all-reduce time of a stage that sends buckets during a backward pass: what is left after it, seconds."""
    if document.options.divides_weights:
        return sharded_figures(document, model).exposed_s
    stage = document.stages[index]
    workers, own = stage.workers, model.set_of(stage.layers)
    layers = [layer for layer in range(len(model.backward_s)) if own >> layer & 1]
    speed = min(document.cluster.device_of(worker).speed for worker in workers)
    recompute_s = float(model.forward_s[layers].sum()) / speed if stage.recompute else 0.0
    done_s = 0.0  # when the buckets so far are reduced, relative to the end of the backward pass
    if len(workers) > 1:
        link = document.network.among(workers)
        done_s = -float(model.backward_s[layers].sum()) / speed - recompute_s
        for size, remaining in _buckets(model, layers):
            took_s = figures.exchange_of_gradients_s(document, len(workers), size, link)
            done_s = max(done_s, -remaining / speed) + took_s
    return max(0.0, done_s)


def _buckets(model: CheckedModel, layers: Sequence[int]) -> Iterator[tuple[float, float]]:
    """(bytes, remaining backward time when it closes) of each bucket of gradients, on a device of speed 1."""
    remaining = float(model.backward_s[layers].sum())
    filled, limit = 0.0, FIRST_BUCKET_BYTES
    for layer in reversed(layers):
        remaining -= float(model.backward_s[layer])
        filled += float(model.parameters[layer])
        if filled >= limit:
            yield filled, remaining
            filled, limit = 0.0, BUCKET_BYTES
    if filled:
        yield filled, 0.0
