"""Plans of one stage: the buckets of DDP, and the gathered weights of FSDP and HSDP.

An independent implementation of docs/cost-model.md, "Waiting for the update" and "Divided weights". For divided
weights, it adds up the times of one worker's passes and exchanges in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeplan.checker.document import FLUSH, FULLY_SHARDED, PlanDocument
from pipeplan.checker.formulas import gradient_exchange_s, overlapped_s
from pipeplan.checker.model import CheckedModel
from pipeplan.checker.network import LinkRates
from pipeplan.errors import InputError

FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20
"""Sizes at which the first and every later bucket of gradients closes, as in torch's DDP."""
EXCHANGING = "gathering weights and reducing gradients"
"""Name of the bound of a plan whose network is busy for a longer time than its workers."""


def waits_for_update(document: PlanDocument) -> bool:
    """Whether a plan of one stage is charged with the wait for its update, according to schedule and options."""
    return not document.inference and not document.accumulates and document.options.contention


def ddp_step_time(document: PlanDocument, model: CheckedModel, pass_s: float, group_s: float) -> float:
    """Step time of a plan of one stage, in seconds per minibatch; 0 for a plan to which this model does not apply.

    `pass_s`: time of all passes of a minibatch. `group_s`: time of one all-reduce.
    """
    if len(document.stages) > 1 or not waits_for_update(document):
        return 0.0
    exposed = exposed_allreduce_s(document, model)
    hidden = max(0.0, group_s - exposed)
    return (pass_s + exposed + (1.0 - document.options.overlap) * hidden) / len(document.stages[0].workers)


def exposed_allreduce_s(document: PlanDocument, model: CheckedModel, index: int = 0) -> float:
    """Exposed all-reduce time of a stage that sends buckets during a backward pass: the part after the pass, in
    seconds.
    """
    if document.options.divides_weights:
        return sharded_figures(document, model).exposed_s
    stage = document.stages[index]
    workers, own = stage.workers, model.set_of(stage.layers)
    if len(workers) == 1:
        return 0.0
    layers = [layer for layer in range(len(model.backward_s)) if own >> layer & 1]
    speed, link = slowest_speed(document, index), document.network.among(workers)
    if stage.shares:  # replicas end together, and the fastest replica has the shortest last pass to hide the all-reduce
        speed = max(document.cluster.device_of(worker).speed for worker in workers)
    recompute_s = float(model.forward_s[layers].sum()) / speed if stage.recompute else 0.0
    # Time at which the buckets so far are reduced, relative to the end of the backward pass.
    done_s = -float(model.backward_s[layers].sum()) / speed - recompute_s
    for size, remaining in _buckets(model, layers):
        took_s = float(gradient_exchange_s(document, len(workers), size, link.allreduce, link.latency_s))
        done_s = max(done_s, -remaining / speed) + took_s
    return max(0.0, done_s)


def slowest_speed(document: PlanDocument, index: int) -> float:
    """The speed of the slowest worker of a stage."""
    return min(document.cluster.device_of(worker).speed for worker in document.stages[index].workers)


def _buckets(model: CheckedModel, layers: Sequence[int]) -> Iterator[tuple[float, float]]:
    """(bytes, remaining backward time at its closing) of each bucket of gradients, on a device of speed 1."""
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


@dataclass(frozen=True)
class ShardedFigures:
    """Figures of one microbatch, and of the exchanges of one update, in seconds and bytes."""

    shards: int
    """Number of workers that hold the weights together."""
    forward_s: float
    backward_s: float
    """The backward pass with its reduce-scatters."""
    exposed_s: float
    """Time that all-reduces across servers add to the last backward pass of an update."""
    across_s: float
    """Time of all these all-reduces of an update."""
    activations: float
    memory: float
    """Memory of a worker without workspace, in bytes."""
    bound: str


@dataclass(frozen=True)
class _Unit:
    """A unit's times and bytes; the root has no passes."""

    forward_s: float
    backward_s: float
    weights: float
    """Bytes of weights that the unit gathers."""
    gradients: float
    """Bytes of gradients that the unit reduces: the gradients of trained weights."""
    saved: float
    wrapped: bool


def sharded_figures(document: PlanDocument, model: CheckedModel) -> ShardedFigures:
    """The figures of a plan of one stage. Raises an `InputError` if its workers cannot divide the weights."""
    groups = _groups(document)
    units = [_unit(document, model, *place) for place in model.units]
    trained, frozen = float(model.parameters.sum()), float(model.frozen.sum())
    rest = trained + frozen - sum(unit.weights for unit in units)
    rest_gradients = trained - sum(unit.gradients for unit in units)
    inside = [document.network.among(group) for group in groups]
    ring = LinkRates(0.0, min(one.allreduce for one in inside), max(one.latency_s for one in inside))
    across = document.network.among([group[0] for group in groups])

    def exchange_s(members: int, size: float, link: LinkRates) -> float:
        return (members - 1) * (size / members / link.allreduce + link.latency_s) if size else 0.0

    gathers = [exchange_s(len(groups[0]), unit.weights, ring) for unit in units]
    scatters = [exchange_s(len(groups[0]), unit.gradients, ring) for unit in units]
    spread = [2 * exchange_s(len(groups), unit.gradients, across) for unit in units]
    root_s, root_scatter_s = (exchange_s(len(groups[0]), size, ring) for size in (rest, rest_gradients))
    root_spread_s = 2 * exchange_s(len(groups), rest_gradients, across)
    overlap = document.options.overlap
    forward_s = root_s + gathers[0]
    for unit, exchanged_s in zip(units, [*gathers[1:], 0.0], strict=True):
        forward_s += float(overlapped_s(unit.forward_s, exchanged_s, overlap))
    backward_s, done_s = root_s + gathers[-1], 0.0
    for place in range(len(units) - 1, -1, -1):
        scattered_s = 0.0
        if place + 1 < len(units):
            scattered_s = scatters[place + 1]
            done_s = max(done_s, backward_s + scattered_s) + spread[place + 1]
        exchanged_s = scattered_s + (gathers[place - 1] if place else 0.0)
        backward_s += float(overlapped_s(units[place].backward_s, exchanged_s, overlap))
    for scatter_s, spread_s in ((scatters[0], spread[0]), (root_scatter_s, root_spread_s)):
        backward_s += scatter_s
        done_s = max(done_s, backward_s) + spread_s
    late_s, spread_all_s = max(0.0, done_s - backward_s), sum(spread) + root_spread_s
    busy_s = sum(unit.forward_s + unit.backward_s for unit in units)
    activations = _activations(document, model, units)
    exchanging_s = 2 * (sum(gathers) + root_s) + sum(scatters) + root_scatter_s
    near = _whole_bytes(model, units, rest, rest_gradients)
    divided = (trained * (2 + model.state_ratio) + frozen) / len(groups[0])
    return ShardedFigures(
        shards=len(groups[0]),
        forward_s=forward_s,
        backward_s=backward_s,
        exposed_s=late_s + (spread_all_s - late_s) * (1 - overlap),
        across_s=spread_all_s,
        activations=max(activations),
        memory=divided + float(model.buffers.sum()) - frozen + max(map(sum, zip(activations, near, strict=True))),
        bound=EXCHANGING if exchanging_s > busy_s else "compute of stage 1",
    )


def _groups(document: PlanDocument) -> list[list[int]]:
    """The groups of workers that hold the weights once: one group of all workers, or one for each server."""
    workers, cluster = document.stages[0].workers, document.cluster
    servers = {
        worker: 0 if document.options.sharding == FULLY_SHARDED else cluster.server_of(worker) for worker in workers
    }
    groups = [[worker for worker in workers if servers[worker] == server] for server in dict.fromkeys(servers.values())]
    if len({len(group) for group in groups}) > 1 or len(workers) < 2 or len(document.stages) > 1:
        raise InputError("the weights are not divided among equally many workers of one stage")
    if document.schedule != FLUSH:
        raise InputError(f"the weights are divided under {FLUSH} only, not {document.schedule}")
    if document.minibatches % len(workers):
        raise InputError("workers that divide the weights need equally many of the microbatches")
    return groups


def _unit(document: PlanDocument, model: CheckedModel, start: int, stop: int, wrapped: bool) -> _Unit:
    speed = slowest_speed(document, 0)
    forward_s, backward_s = (float(times[start:stop].sum()) / speed for times in (model.forward_s, model.backward_s))
    if wrapped and document.stages[0].recompute:
        backward_s += forward_s
    gradients = float(model.parameters[start:stop].sum()) if wrapped else 0.0
    weights = gradients + (float(model.frozen[start:stop].sum()) if wrapped else 0.0)
    return _Unit(forward_s, backward_s, weights, gradients, float(model.saved[start:stop].sum()), wrapped)


def _whole_bytes(model: CheckedModel, units: Sequence[_Unit], root: float, root_gradients: float) -> Iterator[float]:
    """Bytes of gathered weights and of gradients that are not divided yet, while each unit runs backward."""
    for place, (start, _, _) in enumerate(model.units):
        near = [unit.weights for unit in units[max(0, place - 1) : place + 1]]
        near += [unit.gradients for unit in units[place : place + 2]]
        begun = sum(float(model.parameters[first:stop].sum()) for first, stop, own in model.units[place:] if not own)
        begun += sum(size for sharers, _, size in model.ties if sharers >> start)
        yield root + sum(near) + min(root_gradients, begun)


def _activations(document: PlanDocument, model: CheckedModel, units: Sequence[_Unit]) -> list[float]:
    """Bytes of a microbatch that a worker keeps while each unit runs backward, for the units up to this unit.

    With recomputation, it keeps the tensors that units read from other units, and the saved bytes of this unit and of
    units that are not wrapped.
    """
    again = document.stages[0].recompute
    inside = [(1 << stop) - (1 << start) for start, stop, _ in model.units]
    home = {layer: held for held in inside for layer in range(len(model.names)) if held >> layer & 1}
    read = sum(edge.bytes for edge in model.edges if edge.readers & ~home[edge.producer]) if again else 0.0
    found, left = [], read
    for unit in units:
        found.append(left + unit.saved)
        left += 0.0 if again and unit.wrapped else unit.saved
    return found
