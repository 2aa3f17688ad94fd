"""Times, traffic and memory of the stages of a plan, from its lists of layers and workers.

An independent implementation of docs/cost-model.md, which shares no code with `pipeplan.cost`. All formulas accept
scalars or NumPy arrays. Times are seconds, sizes bytes, bandwidths bytes/s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pipeplan.checker.document import (
    DOUBLE_BUFFERED,
    FLUSHING,
    VERTICAL,
    ZERO_BUBBLE,
    ZERO_BUBBLE_V,
    PlanDocument,
)
from pipeplan.checker.executor_work import executor_work_s, worker_bytes
from pipeplan.checker.model import CheckedModel, Flags
from pipeplan.checker.network import FREE, LinkRates
from pipeplan.checker.sharded import sharded_figures
from pipeplan.checker.virtual_stages import activation_bytes, stages_of

ROUNDING = 1e-9
"""A quotient that exceeds an integer by less than this counts as that integer, as in the planner."""


def ring_allreduce_s(members: Any, size: Any, bandwidth: Any, latency_s: Any) -> Any:
    """Time of one ring all-reduce: 2 (m-1)/m · size / B + 2 (m-1) α."""
    steps = 2.0 * (members - 1)
    return steps * (size / (members * bandwidth) + latency_s)


def overlapped_s(compute_s: Any, synchronisation_s: Any, overlap: float) -> Any:
    """Time of compute c and synchronisation g with overlap ω: max(c, g) + (1-ω) min(c, g)."""
    longer, shorter = np.maximum(compute_s, synchronisation_s), np.minimum(compute_s, synchronisation_s)
    return longer + (1.0 - overlap) * shorter


def group_wait(allreduce_s: Any, pace_s: float, replicas: Any, copies: int) -> Any:
    """Minibatches that pass while replicas wait for an all-reduce: max(0, G/T - 1), or r - 1/m with m copies."""
    if copies > 1:
        return replicas - 1.0 / copies
    return np.maximum(0.0, allreduce_s / pace_s - 1.0)


def in_flight_depth(demand: Any, waiting: Any, transfer_s: Any, pace_s: float, replicas: Any) -> Any:
    """In-flight depth: 1 + ⌈(demand + wait + 2 x / T) / r⌉, with demand = d′ r′ + wait′ of the next stage."""
    return 1.0 + np.ceil((demand + waiting + 2.0 * transfer_s / pace_s) / replicas - ROUNDING)


def flush_depth(following: StageFigures, minibatches: int, replicas: int, *, everything: bool) -> int:
    """The fewest minibatches in flight under a flush: enough for those behind, and no more than a replica has.

    Under GPipe a replica holds `everything` that it has.
    """
    most = math.ceil(minibatches / replicas)
    return most if everything else min(most, 1 + math.ceil(following.depth * following.replicas / replicas - ROUNDING))


@dataclass(frozen=True)
class StageFigures:
    """Figures of one stage for one minibatch, in the slowest copy of the pipeline: seconds and bytes."""

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
    """Time of one message across that boundary, latency included, in the slower direction."""
    round_trip_s: float
    """Time of one message across that boundary in each direction, latency included."""
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
    exchanged: tuple[float, ...]
    """Bytes of each weight that the stage shares with another; 0 for those that it does not."""
    minibatch_bytes: float
    """Memory for each minibatch in flight, without weight versions."""
    memory_bytes: float
    """Memory of one worker."""
    weights_s: float = 0.0
    """The part of `backward_s` that gradients of the weights take in a pass of their own."""

    @property
    def pass_s(self) -> float:
        """Forward pass, backward pass, optimiser's step and the executor's own work together."""
        return self.forward_s + self.backward_s + self.update_s + self.executor_s

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
    """The figures of every stage."""
    figures = tuple(_of_stage(document, model, index) for index in range(len(document.stages)))
    if document.options.divides_weights:
        return (_with_divided_weights(document, model, figures[0]),)
    return _with_memory_of_devices(document, model, figures) if document.virtual else figures


def _with_divided_weights(document: PlanDocument, model: CheckedModel, figure: StageFigures) -> StageFigures:
    """The figures of the only stage, whose workers hold a part of the weights each and gather the others."""
    own = sharded_figures(document, model)
    return replace(
        figure,
        forward_s=own.forward_s,
        backward_s=own.backward_s,
        update_s=figure.update_s / own.shards,
        allreduce_s=own.across_s,
        group_s=own.across_s,
        minibatch_bytes=own.activations,
        memory_bytes=worker_bytes(document.cluster, own.memory + model.workspace_of(model.everything)),
    )


def _with_memory_of_devices(
    document: PlanDocument, model: CheckedModel, figures: Sequence[StageFigures]
) -> tuple[StageFigures, ...]:
    """The figures with the memory of whole workers, which run several stages each."""
    found = list(figures)
    sizes = [figure.minibatch_bytes for figure in figures]
    for device in range(len(document.devices)):
        own = stages_of(document, device)
        held = sum(figures[index].memory_bytes for index in own) + activation_bytes(document, device, sizes)
        held += model.workspace_of(sum(model.set_of(document.stages[index].layers) for index in own))
        for index in own:
            found[index] = replace(figures[index], memory_bytes=worker_bytes(document.cluster, held))
    return tuple(found)


def weight_versions(document: PlanDocument, index: int) -> int:
    """Number of weight versions that a replica of a stage keeps (docs/cost-model.md, "Versions of the weights")."""
    if document.inference or document.schedule in FLUSHING:
        return 1
    if document.schedule == DOUBLE_BUFFERED:
        return 2
    if document.schedule == VERTICAL:
        first, replicas = (len(document.stages[number].workers) for number in (0, index))
        age = (document.stages[0].depth + _lag(document, 0)) * first  # in minibatches
        return 1 + math.ceil((age - math.gcd(first, replicas)) / replicas)
    return document.stages[index].depth + _lag(document, index)


def copies_allreduce_s(document: PlanDocument, model: CheckedModel) -> float:
    """Time of one all-reduce of the whole model's gradients among the copies, in seconds."""
    if document.copies == 1 or document.inference:
        return 0.0
    everyone = tuple(worker for stage in document.stages for worker in stage.workers)
    return _among(document, document.copies, everyone, float(model.parameters.sum()))


def exchange_s(document: PlanDocument, figure: StageFigures) -> list[float]:
    """The charge of a stage for exchanging the gradients of each weight that it shares, in seconds."""
    count = len(document.cluster.devices)
    link = document.network.among(list(range(count)))
    return [size / link.allreduce + count * link.latency_s if size else 0.0 for size in figure.exchanged]


def update_wait_s(document: PlanDocument, model: CheckedModel, figure: StageFigures) -> float:
    """Least time, with a flush, from a stage's last backward pass to the end of its update, in seconds.

    The all-reduce runs beside that pass, as far as work and it overlap, unless its stage shares weights or its replicas
    divide the optimiser's state. The exchange of shared weights has one more stage at least. The step is made whole.
    """
    overlap = document.options.overlap * (not hides_nothing(document, model))
    step = figure.update_s * (document.accumulate or 1)
    if document.options.divides_weights:
        return step + sharded_figures(document, model).exposed_s
    exposed = figure.group_s - overlap * min(figure.group_s, figure.halves_s[1])
    return exposed + 2 * math.fsum(exchange_s(document, figure)) + step


def hides_nothing(document: PlanDocument, model: CheckedModel) -> bool:
    """Whether an all-reduce begins only after the last backward pass before a flush."""
    return document.options.shard_optimizer or model.shares


def awaited_s(document: PlanDocument, figures: Sequence[StageFigures], index: int) -> float:
    """Time for which a stage synchronises its gradients: its own all-reduce, and all exchanges that it is part of."""
    charged = [exchange_s(document, figure) for figure in figures]
    parts = (sum(each) for each in zip(*charged, strict=True))
    mine = zip(parts, charged[index], strict=True)
    return figures[index].group_s + math.fsum(total for total, own in mine if own)


def _lag(document: PlanDocument, index: int) -> int:
    """Update lag: 1 for a replicated stage of a pipeline, whose all-reduce is awaited one update later, otherwise 0."""
    return int(len(document.stages[index].workers) > 1 and len(document.stages) > 1)


def _of_stage(document: PlanDocument, model: CheckedModel, index: int) -> StageFigures:
    network = document.network
    stage, copies, last = document.stages[index], document.copies, index + 1 == len(document.stages)
    stage_set = model.set_of(stage.layers)
    before = sum(model.set_of(other.layers) for other in document.stages[:index])
    (inside,) = model.members([stage_set])
    (received, sent), (returned, incoming) = (way.tolist() for way in model.crossing([before, before | stage_set]))
    speed = min(document.cluster.device_of(worker).speed for worker in stage.workers)
    forward = float(model.forward_s[inside].sum()) / speed
    backward = float(model.backward_s[inside].sum()) / speed + forward * stage.recompute
    weights = float(model.parameters[inside].sum()) + model.copied(stage_set)
    replicas = len(stage.workers) // copies
    hops, lanes = [FREE], 1
    if not last:
        hops = [network.among([*document.of_copy(c, index), *document.of_copy(c, index + 1)]) for c in range(copies)]
        if document.options.boundary == "parallel":
            lanes = min(replicas, len(document.stages[index + 1].workers) // copies)
    saved = float(model.saved[inside].sum())
    minibatch = received + (0.0 if stage.recompute else saved + sent)
    memory = float(model.buffers[inside].sum()) + received + returned + sent + incoming + weights
    if model.training:
        several = len(stage.workers) > 1
        versions = weight_versions(document, index)
        state = model.state_ratio / (len(stage.workers) if document.options.shard_optimizer else 1)
        memory += weights * (state + several + versions + (versions - 1) * model.corrects)
        memory += 0 if document.virtual else stage.depth * minibatch
        if stage.deferred and not document.virtual:
            # Its minibatches hold activations and gradients until W, and so does one more in its backward pass.
            memory += (stage.deferred * 2 + 1) * minibatch
        memory += (saved + sent) * stage.recompute
        memory += 0.0 if document.virtual else model.workspace_of(stage_set)
    crossing = received + returned + sent + incoming
    own = float(executor_work_s(document, (index > 0) + (not last), crossing, weights * (not last)))
    rings = [_allreduce(document, document.of_copy(copy, index), weights) for copy in range(copies)]
    return StageFigures(
        replicas=replicas,
        depth=stage.depth,
        forward_s=forward,
        backward_s=backward,
        update_s=float(model.update_s[inside].sum()) / speed,
        executor_s=own / speed,
        allreduce_s=max(rings) if model.training else 0.0,
        group_s=_allreduce(document, stage.workers, weights) if model.training else 0.0,
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
        exchanged=tuple(model.exchanged(stage_set)),
        minibatch_bytes=minibatch if model.training else 0.0,
        memory_bytes=memory if document.virtual else worker_bytes(document.cluster, memory),
        weights_s=_weights_s(document, model, inside, index) / speed,
    )


def _weights_s(document: PlanDocument, model: CheckedModel, inside: Flags, index: int) -> float:
    """Half of the backward pass of a stage's layers that have parameters, where it divides the pass; else 0."""
    stage = document.stages[index]
    divides = document.schedule == ZERO_BUBBLE and stage.deferred > 0
    divides |= document.schedule == ZERO_BUBBLE_V and not stage.recompute
    return float(model.backward_s[inside & (model.parameters > 0)].sum()) / 2 if divides else 0.0


def exchange_of_gradients_s(document: PlanDocument, members: int, size: float, link: LinkRates) -> float:
    """Time in which replicas have the mean of their gradients.

    Where each updates a part of the weights only, they gather these afterwards, in as many steps as a half of the ring
    all-reduce has: (m-1) · (size / (m B) + α) more.
    """
    time = float(ring_allreduce_s(members, size, link.allreduce, link.latency_s))
    if document.options.shard_optimizer:
        time += (members - 1) * (size / (members * link.allreduce) + link.latency_s)
    return time


def _allreduce(document: PlanDocument, workers: tuple[int, ...], size: float) -> float:
    return 0.0 if len(workers) == 1 else _among(document, len(workers), workers, size)


def _among(document: PlanDocument, members: int, workers: tuple[int, ...], size: float) -> float:
    return exchange_of_gradients_s(document, members, size, document.network.among(workers))
