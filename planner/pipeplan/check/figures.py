"""What a plan costs, from its lists of layers and workers, and whether that is what plan.json states."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from pipeplan.check import formulas
from pipeplan.check.document import Document
from pipeplan.check.model import Model
from pipeplan.check.rates import Rates
from pipeplan.errors import InputError
from pipeplan.files import Node
from pipeplan.units import show_size, show_time

CLOSE = 1e-9
"""Relative: sums in another order differ by far less, any change that matters by far more."""


@dataclass(frozen=True)
class Figures:
    """One stage, per minibatch of one copy of the pipeline."""

    forward_s: float
    backward_s: float
    stage_s: float
    """Compute and synchronisation."""
    boundary_s: float
    """Of the busier direction to the next stage."""
    transfer_s: float
    allreduce_s: float
    """One all-reduce of a group among the replicas of all copies."""
    received: float
    sent: float
    memory_bytes: float


def figures(document: Document, model: Model) -> tuple[Figures, ...]:
    """The figures of every stage."""
    rates = Rates.of(document.cluster)
    return tuple(_of_stage(document, model, rates, index) for index in range(len(document.stages)))


def check_pace(document: Document, model: Model, found: tuple[Figures, ...]) -> str:
    """That the stated pace is that of the slowest resource, and the depths sustain it."""
    copies = document.copies
    slowest = max(max(stage.stage_s, stage.boundary_s) for stage in found)
    for index in range(len(found) - 1):
        if not document.inference:
            sustained = depth_pace(document, found, index)
            if math.isinf(sustained):
                raise InputError(f"stage {index + 1} has too few minibatches in flight to keep any pace")
            slowest = max(slowest, sustained)
    among = copies_s(document, model)
    pace = float(formulas.together(slowest / copies, among, document.asked.overlap))
    _same(document.prediction["minibatch_s"], pace)
    _same(document.prediction["minibatches_per_s"], 1.0 / pace)
    _same(document.prediction["copies_synchronisation_s"], among)
    return f"{show_time(pace)} for each minibatch"


def check_stages(document: Document, found: tuple[Figures, ...]) -> str:
    """That every stage's stated times, bytes and versions are what its layers and workers give."""
    nodes = document.prediction["stages"].items()
    if len(nodes) != len(found):
        document.prediction["stages"].fail(f"expected {len(found)}, one for each stage, found {len(nodes)}")
    for index, (node, figure) in enumerate(zip(nodes, found, strict=True)):
        _same(node["minibatch_s"], document.pace_s)
        for key, value in (
            ("forward_s", figure.forward_s),
            ("backward_s", figure.backward_s),
            ("sync_s", figure.allreduce_s),
            ("receive_bytes", figure.received),
            ("send_bytes", figure.sent),
        ):
            _same(node[key], value)
        stated, needed = document.stages[index].versions, versions(document, index)
        if stated != needed:
            raise InputError(f"stage {index + 1} keeps {needed} versions of its weights, the plan says {stated}")
    return "times, traffic, depths and versions of every stage"


def check_memory(document: Document, found: tuple[Figures, ...]) -> str:
    """That memory is stated as it is, and suffices where it is to limit the plan."""
    for node, figure in zip(document.prediction["stages"].items(), found, strict=True):
        stated = node["memory_bytes"]
        # Written as whole bytes.
        if abs(stated.number() - figure.memory_bytes) > 1 + CLOSE * figure.memory_bytes:
            stated.fail(f"stated {show_size(stated.number())}, found {show_size(figure.memory_bytes)}")
    most, capacity = max(figure.memory_bytes for figure in found), document.cluster.device.memory_bytes
    if not document.asked.memory:
        return f"at most {show_size(most)}; the plan was to ignore the limit"
    for number, figure in enumerate(found, start=1):
        if figure.memory_bytes > capacity:
            needs, has = show_size(figure.memory_bytes), show_size(capacity)
            raise InputError(f"stage {number} needs {needs}, a device has {has}")
    return f"at most {show_size(most)} of {show_size(capacity)}"


def versions(document: Document, index: int) -> int:
    """Versions of the weights that a replica of a stage keeps: one for each minibatch in flight, one for a late update.

    An all-reduce is awaited one update later, in a pipeline of several stages.
    """
    if document.inference:
        return 1
    stage = document.stages[index]
    return stage.depth + (len(stage.workers) > 1 and len(document.stages) > 1)


def copies_s(document: Document, model: Model) -> float:
    """The whole model's gradients, all-reduced among the copies once for every m minibatches."""
    if document.copies == 1 or document.inference:
        return 0.0
    rates = Rates.of(document.cluster)
    everyone = [worker for stage in document.stages for worker in stage.workers]
    level = rates.level(min(everyone), max(everyone))
    size = float(model.parameters.sum())
    group = formulas.ring(document.copies, size, rates.allreduce[level], rates.latency_s[level])
    return float(group) / document.copies


def depth_pace(document: Document, found: tuple[Figures, ...], index: int) -> float:
    """The pace of one copy that the depth of a stage sustains: the smallest T for which the formula gives no more.

    Found by halving on the formula itself; infinite where no pace will do.
    """
    here, following = document.stages[index], document.stages[index + 1]
    copies = document.copies
    mine, theirs = len(here.workers) // copies, len(following.workers) // copies

    def sustained(pace: float) -> bool:
        demand = following.depth * theirs + formulas.wait(found[index + 1].allreduce_s, pace, theirs, copies)
        waiting = formulas.wait(found[index].allreduce_s, pace, mine, copies)
        return bool(formulas.depth(demand, waiting, found[index].transfer_s, pace, mine) <= here.depth)

    return _smallest(sustained)


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


def _of_stage(document: Document, model: Model, rates: Rates, index: int) -> Figures:
    stage, copies = document.stages[index], document.copies
    here = model.set_of(stage.layers)
    before = sum(model.set_of(other.layers) for other in document.stages[:index])
    mine = model.members([here])[0]
    forward, backward = model.crossing([before, before | here])
    speed = document.cluster.device.speed
    f = float(model.forward_s[mine].sum()) / speed
    b = float(model.backward_s[mine].sum()) / speed
    weights, replicas = float(model.parameters[mine].sum()), len(stage.workers) // copies
    busier = max(float(forward[1]), float(backward[1]))
    synchronisation = 0.0
    boundary, transfer = 0.0, 0.0
    for copy in range(copies):
        workers = document.of_copy(copy, index)
        if model.training:
            synchronisation = max(synchronisation, _allreduce(rates, workers, weights) / replicas)
        if index + 1 < len(document.stages):
            both = workers + document.of_copy(copy, index + 1)
            level = rates.level(min(both), max(both))
            boundary = max(boundary, busier / rates.message[level])
            transfer = max(transfer, busier / rates.message[level] + rates.latency_s[level])
    kept = float(model.saved[mine].sum()) + float(forward[0]) + float(forward[1])
    fixed = float(model.buffers[mine].sum()) + float(forward.sum()) + float(backward.sum())
    if model.training:
        fixed += weights * (1 + model.state_ratio + versions(document, index) + (len(stage.workers) > 1))
        fixed += stage.depth * kept
    else:
        fixed += weights
    return Figures(
        forward_s=f,
        backward_s=b,
        stage_s=float(formulas.together((f + b) / replicas, synchronisation, document.asked.overlap)),
        boundary_s=boundary,
        transfer_s=transfer,
        allreduce_s=_allreduce(rates, stage.workers, weights) if model.training else 0.0,
        received=float(forward[0]),
        sent=float(forward[1]),
        memory_bytes=fixed,
    )


def _allreduce(rates: Rates, workers: tuple[int, ...], size: float) -> float:
    if len(workers) == 1:
        return 0.0
    level = rates.level(min(workers), max(workers))
    return float(formulas.ring(len(workers), size, rates.allreduce[level], rates.latency_s[level]))


def _same(stated: Node, found: float) -> None:
    value = stated.number()
    if abs(value - found) > CLOSE * max(abs(found), abs(value)):
        stated.fail(f"stated {value!r}, found {found!r}")
