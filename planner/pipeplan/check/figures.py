"""What the stages of a plan take and hold, from its lists of layers and workers: docs/cost-model.md, written anew."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipeplan.check import formulas
from pipeplan.check.document import DOUBLE_BUFFERED, FLUSHING, VERTICAL, Document
from pipeplan.check.model import Model
from pipeplan.check.network import FREE, Network


@dataclass(frozen=True)
class Figures:
    """One stage, for one minibatch, in the slowest copy of the pipeline: seconds and bytes."""

    replicas: int
    """In one copy."""
    depth: int
    forward_s: float
    backward_s: float
    """With the forward pass that a stage which recomputes runs again."""
    update_s: float
    """The optimiser's step."""
    allreduce_s: float
    """One all-reduce among the replicas of one copy."""
    group_s: float
    """Among those of all copies."""
    lanes: int
    """Messages to the next stage at once."""
    send_s: float
    """How long a minibatch keeps the boundary to the next stage busy."""
    return_s: float
    """Its gradient, likewise."""
    transfer_s: float
    """From one stage to the next, the slower way."""
    round_trip_s: float
    """There and back."""
    received: float
    sent: float
    received_gradient: float
    sent_gradient: float
    parameters: float
    minibatch_bytes: float
    """Memory for each minibatch in flight, versions of the weights apart."""
    memory_bytes: float
    before_s: float
    """Forward and backward of all layers before the stage, on a worker of speed 1."""

    @property
    def pass_s(self) -> float:
        """Forward and backward and the optimiser's step."""
        return self.forward_s + self.backward_s + self.update_s

    @property
    def busier_s(self) -> float:
        """Of the two ways across the boundary."""
        return max(self.send_s, self.return_s)


def figures(document: Document, model: Model) -> tuple[Figures, ...]:
    """The figures of every stage."""
    return tuple(_of_stage(document, model, index) for index in range(len(document.stages)))


def versions(document: Document, index: int) -> int:
    """Versions of the weights that a replica of a stage keeps."""
    if document.inference or document.schedule in FLUSHING:
        return 1
    if document.schedule == DOUBLE_BUFFERED:
        return 2
    if document.schedule == VERTICAL:
        first, mine = (len(document.stages[number].workers) for number in (0, index))
        old = (document.stages[0].depth + _lag(document, 0)) * first
        return 1 + math.ceil((old - math.gcd(first, mine)) / mine)
    return document.stages[index].depth + _lag(document, index)


def among_copies_s(document: Document, model: Model) -> float:
    """One all-reduce of the whole model's gradients among the copies."""
    if document.copies == 1 or document.inference:
        return 0.0
    link = document.network.among([worker for stage in document.stages for worker in stage.workers])
    return float(formulas.ring(document.copies, float(model.parameters.sum()), link.allreduce, link.latency_s))


def _lag(document: Document, index: int) -> int:
    """An all-reduce is awaited one update later, in a pipeline of several stages."""
    return int(len(document.stages[index].workers) > 1 and len(document.stages) > 1)


def _of_stage(document: Document, model: Model, index: int) -> Figures:
    network = document.network
    stage, copies, last = document.stages[index], document.copies, index + 1 == len(document.stages)
    here = model.set_of(stage.layers)
    before = sum(model.set_of(other.layers) for other in document.stages[:index])
    mine, earlier = model.members([here, before])
    (received, sent), (returned, incoming) = (way.tolist() for way in model.crossing([before, before | here]))
    speed = min(document.cluster.device_of(worker).speed for worker in stage.workers)
    forward = float(model.forward_s[mine].sum()) / speed
    backward = float(model.backward_s[mine].sum()) / speed + forward * stage.recompute
    weights, replicas = float(model.parameters[mine].sum()), len(stage.workers) // copies
    hops, lanes = [FREE], 1
    if not last:
        hops = [network.among([*document.of_copy(c, index), *document.of_copy(c, index + 1)]) for c in range(copies)]
        if document.asked.boundary == "parallel":
            lanes = min(replicas, len(document.stages[index + 1].workers) // copies)
    saved = float(model.saved[mine].sum())
    minibatch = received + (0.0 if stage.recompute else saved + sent)
    memory = float(model.buffers[mine].sum()) + received + returned + sent + incoming + weights
    if model.training:
        several = len(stage.workers) > 1
        memory += weights * (model.state_ratio + several + versions(document, index)) + stage.depth * minibatch
        memory += (saved + sent) * stage.recompute
    rings = [_allreduce(network, document.of_copy(copy, index), weights) for copy in range(copies)]
    return Figures(
        replicas=replicas,
        depth=stage.depth,
        forward_s=forward,
        backward_s=backward,
        update_s=float(model.update_s[mine].sum()) / speed,
        allreduce_s=max(rings) if model.training else 0.0,
        group_s=_allreduce(network, stage.workers, weights) if model.training else 0.0,
        lanes=lanes,
        send_s=max(sent / hop.message for hop in hops),
        return_s=max(incoming / hop.message for hop in hops),
        transfer_s=max(max(sent, incoming) / hop.message + hop.latency_s for hop in hops),
        round_trip_s=max((sent + incoming) / hop.message + 2 * hop.latency_s for hop in hops),
        received=received,
        sent=sent,
        received_gradient=incoming,
        sent_gradient=returned,
        parameters=weights,
        minibatch_bytes=minibatch if model.training else 0.0,
        memory_bytes=memory,
        before_s=float((model.forward_s + model.backward_s + model.update_s)[earlier].sum()),
    )


def _allreduce(network: Network, workers: tuple[int, ...], size: float) -> float:
    if len(workers) == 1:
        return 0.0
    link = network.among(workers)
    return float(formulas.ring(len(workers), size, link.allreduce, link.latency_s))
