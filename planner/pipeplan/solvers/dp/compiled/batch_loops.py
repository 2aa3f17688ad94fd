"""The states of batches at one cut: the scalar form of `flush.uniform_flush` and `flush.batch_limit`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipeplan.cost import formulas
from pipeplan.problem.cuts import Floats, Ints
from pipeplan.solvers.dp.budget import SLACK
from pipeplan.solvers.dp.compiled.batch_inputs import BatchArrays, Batches, BatchNumbers
from pipeplan.solvers.dp.compiled.bound_loops import workers_needed
from pipeplan.solvers.dp.compiled.cut_loops import (
    BOUND,
    FIRST,
    LEVEL,
    LOWEST,
    POSITION,
    ROOM,
    STAGES,
    STATE,
    WORKERS,
    Places,
    Scratch,
    Source,
    contains,
    copied_bytes,
    put_size,
)
from pipeplan.solvers.dp.compiled.front_loops import Front, Kept
from pipeplan.solvers.dp.compiled.jit import compiled
from pipeplan.solvers.dp.compiled.loop_inputs import (
    BANDWIDTH,
    FORWARD,
    LATENCY,
    RETURNED,
    SENT,
    Bounds,
    CutArrays,
    Given,
)
from pipeplan.solvers.dp.compiled.stage_loops import (
    INFINITE,
    Place,
    Sized,
    StageNumbers,
    executor_s,
    joining_level,
    max_depth,
    ring_allreduce_time,
    stage_numbers,
)

_flush_exposed = compiled(formulas.flush_exposed)


class BatchStage(NamedTuple):
    """The terms of a stage that only batches need."""

    forward_s: float
    """The forward pass of one minibatch, in seconds on a device of speed 1."""
    exchange_s: float
    """The exchange of the gradients of shared weights."""
    sent: float
    """Bytes to the stage behind; `returned` are those from it."""
    returned: float
    before_s: float
    """All passes of the layers in front of the stage."""


class TimesBehind(NamedTuple):
    """The times of the state behind a stage: a row of a table."""

    times: Floats
    row: int


@compiled
def batch_states(
    cut: int,
    given: Given,
    arrays: CutArrays,
    bounds: Bounds,
    batches: Batches,
    places: Places,
    kept: Kept,
    front: Front,
    scratch: Scratch,
) -> int:
    """Find the states at a cut. Returns how many there are."""
    batch, layers, numbers, count = batches.numbers, batches.arrays, places.numbers, 0
    for end in range(given.last, cut, -1):
        begin, close = places.begins[end], places.ends[end]
        if begin == close or not (given.chain or contains(arrays.words, end, cut)):
            continue
        copied = copied_bytes(arrays.shared_members, arrays.shared_first, arrays.shared_bytes, cut, end)
        for variant in range(given.variants):
            stage = stage_numbers(given, arrays, cut, end, variant == 1, copied)
            if given.memory and stage.deepest_alone < 1:
                continue
            more = _batch_stage(given, arrays, layers, cut, end)
            for place in range(begin, close):
                behind = TimesBehind(kept.times, kept.begins[end] + numbers[place, STATE])
                spare = _spare_s(batch, layers.work_s[end], behind)
                least = _least_replicas(batch, stage.work_s / batch.fastest, more.forward_s / batch.fastest, spare)
                need = max(_least_workers(batch, more.before_s, cut, spare), float(numbers[place, LOWEST]))
                if given.bounded:
                    need = max(need, scratch.memory_need[places.numbers[place, BOUND]])
                room = min(numbers[place, POSITION] - need, float(numbers[place, ROOM + len(arrays.spans) - 1]))
                if least > room:
                    continue
                source = Source(
                    numbers[place, STATE], numbers[place, STAGES] + 1, numbers[place, WORKERS], variant, cut, end
                )
                enough = INFINITE
                for option in range(np.searchsorted(layers.counts, least), len(layers.counts)):
                    replicas = layers.counts[option]
                    # A stage demands one minibatch for each replica and those behind it at least.
                    if replicas > room or (replicas + places.demand[place]) * (1 - formulas.ROUNDING) >= enough:
                        break
                    comparable = option > 0 and not batch.counts_depths and batch.drops_spare and batch.phases == 1
                    if comparable and _suffices(given, batch, stage, behind, layers.counts[option - 1]):
                        break
                    at = Place(
                        _level_of(numbers, place, replicas, len(arrays.spans) - 1),
                        numbers[place, POSITION],
                        0,
                        places.demand[place],
                        numbers[place, FIRST],
                        numbers[place, LEVEL],
                    )
                    count = _put_depths(
                        given, arrays, bounds, batches, stage, more, at, source, replicas, behind, front, count
                    )
                    enough = min(enough, _enough(given, arrays, batch, stage, at, end, float(replicas), behind))
    return count


@compiled
def _batch_stage(given: Given, arrays: CutArrays, layers: BatchArrays, start: int, end: int) -> BatchStage:
    totals, exchange = arrays.totals, 0.0
    for weight in range(len(layers.exchange_s)):
        held = arrays.shared_members[weight, end] - arrays.shared_members[weight, start]
        if 0 < held < arrays.shared_members[weight, given.last]:
            exchange += layers.exchange_s[weight]
    forward = totals[end, FORWARD] - totals[start, FORWARD] + executor_s(given, totals, start, end) / given.passes
    return BatchStage(forward, exchange, totals[end, SENT], totals[end, RETURNED], layers.work_s[start])


@compiled
def _spare_s(batch: BatchNumbers, work_s: float, behind: TimesBehind) -> float:
    """`BatchLimit.spare_s`."""
    left = batch.budget_s - behind.times[behind.row, 0] - work_s - behind.times[behind.row, 1 + batch.phases]
    return float(min(left, batch.steady_to_s) * (1 + SLACK))


@compiled
def _phase_s(batch: BatchNumbers, phase: int, work_s: float, forward_s: float) -> float:
    """The passes of a phase, of all passes and those forward."""
    if batch.phases == 1:
        return work_s
    return forward_s if phase == 0 else work_s - forward_s


@compiled
def _least_replicas(batch: BatchNumbers, work_s: float, forward_s: float, spare_s: float) -> float:
    """The fewest replicas that keep all phases within a steady part (`BatchLimit.least_replicas`)."""
    least = 0.0
    for phase in range(batch.phases):
        own = _phase_s(batch, phase, work_s, forward_s)
        each = spare_s / own if own > 0 else INFINITE
        rounds = 1 + np.floor(each * (1 + 1e-12))
        least = max(least, np.ceil(batch.minibatches / max(rounds, 1.0) - 1e-12))
    return INFINITE if spare_s < 0 else least


@compiled
def _least_workers(batch: BatchNumbers, work_s: float, cut: int, spare_s: float) -> float:
    """`BatchLimit.least_workers`."""
    if cut == 0:
        return 0.0
    need = batch.minibatches * work_s / (max(spare_s, 0.0) + work_s) if work_s > 0 else 0.0
    return float(max(np.ceil(need - 1e-9), 1.0))


@compiled
def _level_of(numbers: Ints, place: int, replicas: int, top: int) -> int:
    """The level that so many workers span at a place."""
    level = 0
    while level < top and numbers[place, ROOM + level] < replicas:
        level += 1
    return level


@compiled
def _steady_s(batch: BatchNumbers, pass_s: float, replicas: float) -> float:
    """`formulas.flush_steady`."""
    return float((np.ceil(batch.minibatches / replicas) - 1) * pass_s)


@compiled
def _suffices(given: Given, batch: BatchNumbers, stage: StageNumbers, behind: TimesBehind, replicas: float) -> bool:
    """`FlushSearch._suffices`."""
    steady = max(behind.times[behind.row, 1], batch.least_steady_s)
    return bool(_steady_s(batch, stage.work_s / given.speed, replicas) <= steady)


@compiled
def _depth(batch: BatchNumbers, demand: float, transfer_s: float, steady_s: float, replicas: float) -> float:
    """`BatchLimit.depth`."""
    delay, away = 2 * transfer_s * (batch.minibatches - 1), 0.0
    if delay > 0:
        away = delay / steady_s if steady_s > 0 else INFINITE
    most = np.ceil(batch.minibatches / replicas)
    return float(min(most, 1 + np.ceil((demand + away) / replicas - formulas.ROUNDING)))


@compiled
def _depths(
    given: Given,
    arrays: CutArrays,
    batch: BatchNumbers,
    stage: StageNumbers,
    at: Place,
    end: int,
    replicas: float,
) -> tuple[float, float]:
    """The depths for the longest steady part, and for the stage's own (`FlushSearch._depths`)."""
    if stage.is_last:
        return 1.0, 1.0
    transfer = arrays.transfer_s[end, joining_level(arrays.spans, at, at.end - int(replicas))]
    own = max(_steady_s(batch, stage.work_s / given.speed, replicas), batch.least_steady_s)
    least = _depth(batch, at.behind, transfer, batch.most_steady_s, replicas)
    return least, _depth(batch, at.behind, transfer, own, replicas)


@compiled
def _depths_to_try(
    given: Given,
    arrays: CutArrays,
    batch: BatchNumbers,
    stage: StageNumbers,
    at: Place,
    end: int,
    replicas: float,
    behind: TimesBehind,
) -> tuple[float, float]:
    """The least and the largest depth that may matter; the first is larger where there is none."""
    held = max_depth(given, stage, replicas) if given.memory else INFINITE
    rounds = np.ceil(batch.minibatches / replicas)
    if not batch.counts_depths:
        depth = rounds if batch.phases == 2 else 1.0
        return (depth, depth) if depth <= held else (1.0, 0.0)
    least, most = _depths(given, arrays, batch, stage, at, end, replicas)
    if least > held:
        return 1.0, 0.0
    # With one replica less at no greater depth, a stage is as quick and holds no more.
    spare = batch.drops_spare and replicas > 1
    if spare and np.ceil(batch.minibatches / (replicas - 1)) > rounds:
        spare = _suffices(given, batch, stage, behind, replicas - 1)
    if spare and _depths(given, arrays, batch, stage, at, end, replicas - 1)[1] <= least:
        return 1.0, 0.0
    return least, min(most, held)


@compiled
def _enough(
    given: Given,
    arrays: CutArrays,
    batch: BatchNumbers,
    stage: StageNumbers,
    at: Place,
    end: int,
    replicas: float,
    behind: TimesBehind,
) -> float:
    """The demand from which on a stage with more replicas loses to one with these, which leave the steady part as it
    is and have room at every depth; infinite where they do not."""
    if not (batch.counts_depths and batch.drops_spare and _suffices(given, batch, stage, behind, replicas)):
        return INFINITE
    most = _depths(given, arrays, batch, stage, at, end, replicas)[1]
    return most * replicas if most <= max_depth(given, stage, replicas) else INFINITE


@compiled
def _put_depths(
    given: Given,
    arrays: CutArrays,
    bounds: Bounds,
    batches: Batches,
    stage: StageNumbers,
    more: BatchStage,
    at: Place,
    source: Source,
    replicas: int,
    behind: TimesBehind,
    front: Front,
    count: int,
) -> int:
    """Put the states for every depth that may matter, as far as they may become a batch within the limit.

    Returns the new count.
    """
    batch, layers, start, cut = batches.numbers, batches.arrays, at.end - replicas, source.start
    least, most = _depths_to_try(given, arrays, batch, stage, at, source.end, float(replicas), behind)
    bandwidth, latency, transfer = INFINITE, 0.0, 0.0
    if not stage.is_last:
        joined = joining_level(arrays.spans, at, start)
        bandwidth, latency = layers.rates[joined, BANDWIDTH], layers.rates[joined, LATENCY]
        transfer = arrays.transfer_s[source.end, joined]
    added = stage.work_s / given.speed + more.exchange_s + (more.sent + more.returned) / bandwidth + 2 * latency
    total = behind.times[behind.row, 0] + added
    rates = arrays.rates[at.level, BANDWIDTH], arrays.rates[at.level, LATENCY]
    allreduce = ring_allreduce_time(float(replicas), stage.parameters, rates[0], rates[1])
    exposed = max(behind.times[behind.row, 1 + batch.phases], _flush_exposed(allreduce, more.before_s))
    for depth in range(int(least), int(most) + 1):
        demand = float(depth * replicas) if batch.counts_depths else 0.0
        if given.bounded and start < workers_needed(bounds, demand, cut):
            continue
        least_s = 0.0
        for phase in range(batch.phases):
            own = _phase_s(batch, phase, stage.work_s, more.forward_s) / given.speed
            if batch.phases == 1:
                way = max(more.sent / bandwidth, more.returned / bandwidth)
            else:
                way = (more.sent if phase == 0 else more.returned) / bandwidth
            steady = max(_steady_s(batch, own, float(replicas)), _steady_s(batch, way, 1.0))
            if phase == 0 and batch.counts_depths and not stage.is_last:
                steady = max(steady, _limited_s(batch, float(depth), float(replicas), at.behind, transfer))
            steady = max(behind.times[behind.row, 1 + phase], steady)
            front.times[count, 1 + phase] = steady
            in_front = max(0.0, (batch.minibatches / max(start, 1) - 1) * layers.passes_s[phase, cut])
            least_s += max(steady, in_front) if max(steady, in_front) <= batch.steady_to_s else INFINITE
        if total + layers.work_s[cut] + (least_s + exposed) <= batch.budget_s:
            front.times[count, 0], front.times[count, 1 + batch.phases] = total, exposed
            count = put_size(given, arrays, front, count, at, source, Sized(float(replicas), float(depth), demand), 0)
    return count


@compiled
def _limited_s(batch: BatchNumbers, depth: float, replicas: float, demand: float, transfer_s: float) -> float:
    """`BatchLimit.limited_s`."""
    if depth >= np.ceil(batch.minibatches / replicas):
        return 0.0
    slack = (depth - 1 + formulas.ROUNDING) * replicas - demand
    return float(2 * transfer_s * (batch.minibatches - 1) / slack) if slack > 0 else INFINITE
