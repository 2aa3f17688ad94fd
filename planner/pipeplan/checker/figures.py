"""Times, traffic and memory of the stages of a plan, from its lists of layers and workers, in seconds and bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from pipeplan.checker.data_parallel import sharded_figures, slowest_speed
from pipeplan.checker.document import DOUBLE_BUFFERED, VERTICAL, ZERO_BUBBLE, ZERO_BUBBLE_V, PlanDocument
from pipeplan.checker.formulas import (
    executor_work_s,
    gradient_exchange_s,
    shared_weight_s,
    stage_memory,
    update_wait_s,
    worker_bytes,
)
from pipeplan.checker.model import CheckedModel, Flags, Totals
from pipeplan.checker.network import FREE
from pipeplan.checker.virtual_stages import activation_bytes, stages_of


@dataclass(frozen=True)
class StageFigures:
    """Figures of one stage for one minibatch, in the slowest copy of the pipeline, in seconds and bytes."""

    replicas: int
    """Number of replicas in one copy."""
    depth: int
    forward_s: float
    backward_s: float
    """Backward time, including the repeated forward pass of a stage that recomputes."""
    update_s: float
    """Time of the optimiser's step."""
    executor_s: float
    """The executor's own work: half of it in the forward pass, half in the backward pass, or all in the only pass."""
    allreduce_s: float
    """Time of one all-reduce among the replicas of one copy."""
    group_s: float
    """Time of one all-reduce among the replicas of all copies."""
    lanes: int
    """Number of messages to the next stage that the boundary carries at once."""
    send_s: float
    """Busy time of the boundary to the next stage for the activations."""
    return_s: float
    """Busy time of the boundary to the next stage for the gradients."""
    transfer_s: float
    """Time of one message across the boundary to the next stage, latency included, in the slower direction."""
    round_trip_s: float
    """Time of one message each way across the boundary to the next stage, latency included."""
    received: float
    """Activation bytes received from the previous stage."""
    sent: float
    """Activation bytes sent to the next stage."""
    received_gradient: float
    """Gradient bytes received from the next stage."""
    sent_gradient: float
    """Gradient bytes sent to the previous stage."""
    parameters: float
    """Bytes of parameters, copies of shared weights included."""
    shared_s: tuple[float, ...]
    """The charge for exchanging the gradients of each weight that stages share; 0 if this stage does not have the
    weight."""
    minibatch_bytes: float
    """Memory for each minibatch in flight, without weight versions."""
    memory_bytes: float
    """Memory of one worker."""
    weights_s: float = 0.0
    """The part of `backward_s` for gradients of the weights in a separate pass."""

    @property
    def pass_s(self) -> float:
        """Forward pass, backward pass, optimiser's step and the executor's own work together."""
        return self.passes_s + self.update_s

    @property
    def passes_s(self) -> float:
        """Both passes and the executor's own work, without the optimiser's step."""
        return self.forward_s + self.backward_s + self.executor_s

    @property
    def halves_s(self) -> tuple[float, float]:
        """The forward and the backward pass, each with half of the executor's own work."""
        return self.forward_s + self.executor_s / 2, self.backward_s + self.executor_s / 2

    @property
    def busier_s(self) -> float:
        """Busy time of the boundary to the next stage in its busier direction."""
        return max(self.send_s, self.return_s)


def stage_figures(document: PlanDocument, model: CheckedModel) -> tuple[StageFigures, ...]:
    """The figures of every stage of a plan with a valid structure."""
    cuts = [0, *accumulate(model.set_of(stage.layers) for stage in document.stages)]
    totals = Totals.of(model, cuts)
    figures = tuple(_of_stage(document, model, totals, index) for index in range(len(document.stages)))
    workspaces = [float(totals.largest_workspace(at + 1, np.array([at]))[0]) for at in range(len(figures))]
    if document.virtual:
        held = _held_by_devices(document, figures, workspaces)
    elif document.options.divides_weights:
        return (_with_divided_weights(document, model, figures[0], workspaces[0]),)
    else:
        held = [figure.memory_bytes + size for figure, size in zip(figures, workspaces, strict=True)]
    return tuple(
        replace(figure, memory_bytes=worker_bytes(document.cluster, size))
        for figure, size in zip(figures, held, strict=True)
    )


def _with_divided_weights(
    document: PlanDocument, model: CheckedModel, figure: StageFigures, workspace: float
) -> StageFigures:
    """The figures of the only stage, whose workers each hold a part of the weights and gather the other parts."""
    own = sharded_figures(document, model)
    return replace(
        figure,
        forward_s=own.forward_s,
        backward_s=own.backward_s,
        update_s=figure.update_s / own.shards,
        allreduce_s=own.across_s,
        group_s=own.across_s,
        minibatch_bytes=own.activations,
        memory_bytes=worker_bytes(document.cluster, own.memory + workspace),
    )


def _held_by_devices(
    document: PlanDocument, figures: Sequence[StageFigures], workspaces: Sequence[float]
) -> list[float]:
    """The bytes that a worker holds, for every stage, if workers run several stages each."""
    found = [0.0] * len(figures)
    sizes = [figure.minibatch_bytes for figure in figures]
    for device in range(len(document.devices)):
        own = stages_of(document, device)
        held = sum(figures[index].memory_bytes for index in own) + activation_bytes(document, device, sizes)
        for index in own:
            found[index] = held + max(workspaces[one] for one in own)
    return found


def weight_versions(document: PlanDocument, index: int) -> int:
    """Number of weight versions that a replica of a stage keeps (docs/cost-model.md, "Versions of the weights")."""
    if document.inference or document.flushes:
        return 1
    if document.schedule == DOUBLE_BUFFERED:
        return 2
    if document.schedule == VERTICAL:
        first, replicas = (len(document.stages[number].workers) for number in (0, index))
        age = (document.stages[0].depth + _lag(document, 0)) * first  # in minibatches
        return 1 + math.ceil((age - math.gcd(first, replicas)) / replicas)
    return document.stages[index].depth + _lag(document, index)


def _lag(document: PlanDocument, index: int) -> int:
    """Update lag: 1 for a replicated stage of a pipeline, which waits for its all-reduce one update later, otherwise
    0.
    """
    return int(len(document.stages[index].workers) > 1 and len(document.stages) > 1)


def copies_allreduce_s(document: PlanDocument, model: CheckedModel) -> float:
    """Time of one all-reduce of the whole model's gradients among the copies, in seconds."""
    everyone = tuple(worker for stage in document.stages for worker in stage.workers)
    return _among(document, document.copies, everyone, float(model.parameters.sum())) if model.training else 0.0


def exposed_update_s(document: PlanDocument, model: CheckedModel, figure: StageFigures) -> float:
    """Shortest time from a stage's last backward pass to the end of its update, with a flush, in seconds."""
    if document.options.divides_weights:
        return figure.update_s * document.minibatches + sharded_figures(document, model).exposed_s
    shared, backward_s = math.fsum(figure.shared_s), figure.halves_s[1]
    return float(update_wait_s(document, model, figure.group_s, backward_s, shared, figure.update_s))


def awaited_s(figures: Sequence[StageFigures], index: int) -> float:
    """Time for which a stage synchronises its gradients: its own all-reduce, and all its exchanges of shared
    weights.
    """
    parts = [sum(each) for each in zip(*(figure.shared_s for figure in figures), strict=True)]
    mine = figures[index].shared_s
    return figures[index].group_s + math.fsum(total for total, own in zip(parts, mine, strict=True) if own)


def _of_stage(document: PlanDocument, model: CheckedModel, totals: Totals, index: int) -> StageFigures:
    """The figures of a stage. `memory_bytes` excludes the workspace and the worker's own memory."""
    network, stage, copies = document.network, document.stages[index], document.copies
    last, before = index + 1 == len(document.stages), np.array([index])
    (inside,) = model.members([model.set_of(stage.layers)])
    received, sent = totals.sent[index : index + 2].tolist()
    returned, incoming = totals.returned[index : index + 2].tolist()
    speed = slowest_speed(document, index)
    forward = float(model.forward_s[inside].sum()) / speed
    weights = float(totals.weights(index + 1, before)[0])
    replicas = len(stage.workers) // copies
    hops, lanes = [FREE], 1
    if not last:
        hops = [network.among([*document.of_copy(c, index), *document.of_copy(c, index + 1)]) for c in range(copies)]
        if document.options.boundary == "parallel":
            lanes = min(replicas, len(document.stages[index + 1].workers) // copies)
    minibatch, memory = _bytes(document, model, totals, index)
    rings = [_among(document, replicas, document.of_copy(copy, index), weights) for copy in range(copies)]
    return StageFigures(
        replicas=replicas,
        depth=stage.depth,
        forward_s=forward,
        backward_s=float(model.backward_s[inside].sum()) / speed + forward * stage.recompute,
        update_s=float(model.update_s[inside].sum()) / speed,
        executor_s=float(executor_work_s(document, totals, index + 1, before)[0]) / speed,
        allreduce_s=max(rings) * model.training,
        group_s=_among(document, len(stage.workers), stage.workers, weights) * model.training,
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
        shared_s=tuple(float(shared_weight_s(document, size[0])) for size in totals.exchanged(index + 1, before)),
        minibatch_bytes=minibatch,
        memory_bytes=memory,
        weights_s=_weights_s(document, model, inside, index) / speed,
    )


def _bytes(document: PlanDocument, model: CheckedModel, totals: Totals, index: int) -> tuple[float, float]:
    """(bytes of a stage for each minibatch in flight, bytes of all its minibatches and everything fixed).

    If workers run several stages, their minibatches are counted per worker and not here.
    """
    stage = document.stages[index]
    fixed, growing = stage_memory(
        document,
        model,
        totals,
        index + 1,
        np.array([index]),
        replicas=len(stage.workers),
        kept=weight_versions(document, index),
        each=False,
        again=stage.recompute,
    )
    minibatch = float(growing[0])
    # A minibatch that waits for W holds activations and gradients, and so does one more minibatch in B.
    held = 0 if document.virtual else stage.depth + (stage.deferred * 2 + 1 if stage.deferred else 0)
    return minibatch, float(fixed[0]) + held * minibatch


def _weights_s(document: PlanDocument, model: CheckedModel, inside: Flags, index: int) -> float:
    """Half of the backward time of a stage's layers with parameters, if the stage divides the pass; else 0."""
    stage = document.stages[index]
    divides = document.schedule == ZERO_BUBBLE and stage.deferred > 0
    divides |= document.schedule == ZERO_BUBBLE_V and not stage.recompute
    return float(model.backward_s[inside & (model.parameters > 0)].sum()) / 2 if divides else 0.0


def _among(document: PlanDocument, members: int, workers: tuple[int, ...], size: float) -> float:
    """Seconds of an exchange of `size` bytes of gradients in a ring of `members` members on these workers."""
    if members == 1:
        return 0.0
    link = document.network.among(workers)
    return float(gradient_exchange_s(document, members, size, link.allreduce, link.latency_s))
