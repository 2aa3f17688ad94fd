"""One stage between two cuts: its memory, and the replicas and depths with which it keeps a threshold.

This is the scalar form of `stage_terms` and `stage_sizing`, with the formulas of `cost.formulas`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipeplan.cost import formulas
from pipeplan.plan import schedules
from pipeplan.problem.cuts import Floats, Ints
from pipeplan.solvers.dp.budget import SLACK
from pipeplan.solvers.dp.compiled.jit import compiled
from pipeplan.solvers.dp.compiled.loop_inputs import (
    BANDWIDTH,
    BUFFERS,
    FORWARD,
    LATENCY,
    PARAMETERS,
    RETURNED,
    SAVED,
    SENT,
    WORK,
    CutArrays,
    Given,
)
from pipeplan.solvers.dp.compiled.replica_loops import fill_intervals, least_allowed

INFINITE = float("inf")
_ROUNDING = formulas.ROUNDING

in_flight_behind = compiled(formulas.in_flight_behind)
_divided_state = compiled(formulas.divided_state)
_executor_time = compiled(formulas.executor_time)
_fixed_memory = compiled(formulas.fixed_memory)
_group_wait = compiled(formulas.group_wait)
_replica_memory = compiled(formulas.replica_memory)
ring_allreduce_time = compiled(formulas.ring_allreduce_time)
_version_memory = compiled(formulas.version_memory)
_vertical_versions = compiled(schedules.vertical_versions)


class StageNumbers(NamedTuple):
    """The terms of one stage."""

    is_last: bool
    work_s: float
    """Compute of one minibatch with the executor's own work, in seconds on a device of speed 1."""
    parameters: float
    alone_bytes: float
    """Memory of a worker without other replicas that does not depend on the depth; the next one is that with them."""
    replicated_bytes: float
    growing_bytes: float
    """Memory for each minibatch in flight."""
    deepest_alone: float
    """The most minibatches in flight that fit in memory, or a bound on them; the next one is that with replicas."""
    deepest_replicated: float


class Place(NamedTuple):
    """Where the workers of a stage end, and the state behind it."""

    level: int
    """The level that the workers span."""
    end: int
    most: int
    """The most replicas for which there is room."""
    behind: float
    """The demand of the state, its first worker and the level that its first stage spans."""
    next_first: int
    next_level: int


class Sized(NamedTuple):
    """The replicas of a stage, infinite where none suffice, with its depth and what it demands of the one before."""

    replicas: float
    depth: float
    demand: float


@compiled
def stage_numbers(
    given: Given, arrays: CutArrays, start: int, end: int, recompute: bool, copied: float
) -> StageNumbers:
    """The terms of a stage from one cut to another, with so many bytes of `copied` shared weights."""
    is_last, totals = end == given.last, arrays.totals
    parameters = totals[end, PARAMETERS] - totals[start, PARAMETERS] + copied
    alone, growing = _memory(given, totals, start, end, parameters, recompute)
    if given.training and len(arrays.workspace_sizes) > 0:
        alone = alone + _workspace(arrays, start, end)
    replicated = alone
    if given.training:
        late = 0 if is_last and start == 0 else 1
        replicated = alone + _replica_memory(parameters, 2, late * given.stashes)
    if given.copies > 1:
        alone = replicated
    divided = _divided_state(parameters, given.most_replicas * given.copies, given.divided_ratio)
    return StageNumbers(
        is_last,
        _work_s(given, totals, start, end, recompute),
        parameters,
        alone,
        replicated,
        growing,
        _within_capacity(given, alone - divided, growing),
        _within_capacity(given, replicated - divided, growing),
    )


@compiled
def _workspace(arrays: CutArrays, start: int, end: int) -> float:
    """`Workspaces.between`."""
    if len(arrays.workspace_ranges) > 0:
        row, length = 0, end - start
        while 2 << row <= length:
            row += 1
        return float(max(arrays.workspace_ranges[row, start], arrays.workspace_ranges[row, end - (1 << row)]))
    for size in range(len(arrays.workspace_sizes)):
        for word in range(arrays.words.shape[1]):
            if arrays.words[end, word] & ~arrays.words[start, word] & arrays.workspace_masks[size, word] != 0:
                return float(arrays.workspace_sizes[size])
    return 0.0


@compiled
def _crossing(totals: Floats, start: int, end: int) -> float:
    """Bytes across both cuts in both directions."""
    return float((totals[end, SENT] + totals[end, RETURNED]) + (totals[start, SENT] + totals[start, RETURNED]))


@compiled
def _work_s(given: Given, totals: Floats, start: int, end: int, recompute: bool) -> float:
    work = totals[end, WORK] - totals[start, WORK]
    if recompute:
        work = work + (totals[end, FORWARD] - totals[start, FORWARD])
    return float(work + executor_s(given, totals, start, end))


@compiled
def executor_s(given: Given, totals: Floats, start: int, end: int) -> float:
    """The executor's own work at a stage (`CostTerms.executor_s`)."""
    is_last = end == given.last
    boundaries = (1 if start > 0 else 0) + (0 if is_last else 1)
    copied = (0.0 if is_last else totals[end, PARAMETERS] - totals[start, PARAMETERS]) * given.copied_share
    crossing = _crossing(totals, start, end)
    # The numbers have the times of `ExecutorCosts` by their names.
    return float(
        _executor_time(given, given.passes, boundaries, crossing, copied, given.steps)  # type: ignore[arg-type]
    )


@compiled
def _memory(
    given: Given, totals: Floats, start: int, end: int, parameters: float, recompute: bool
) -> tuple[float, float]:
    """Bytes of a worker without replicas that do not depend on the depth, and those for each minibatch in flight."""
    buffers = totals[end, BUFFERS] - totals[start, BUFFERS]
    around = _crossing(totals, start, end)
    fixed = float(_fixed_memory(parameters, buffers, around, given.state_ratio, given.training))
    if not given.training:
        return fixed, 0.0
    held = totals[end, SAVED] - totals[start, SAVED] + totals[end, SENT]
    # `formulas.recompute_memory` and `formulas.memory_per_depth` in numbers: both choose between arrays.
    once, each = (held, 0.0) if recompute else (0.0, held)
    versions = _version_memory(parameters, given.constant_versions, given.copies_per_version)
    return fixed + once + versions, parameters * given.stashes + totals[start, SENT] + each


@compiled
def _within_capacity(given: Given, fixed: float, growing: float) -> float:
    """The most minibatches in flight that fit in memory."""
    if fixed > given.capacity:
        return 0.0
    return INFINITE if growing == 0 else float(np.floor((given.capacity - fixed) / growing * (1 + 1e-12)))


@compiled
def max_depth(given: Given, stage: StageNumbers, replicas: float) -> float:
    """The most minibatches in flight that fit in memory with so many replicas."""
    if given.divided_ratio == 0.0 and given.first_replicas == 0:
        return stage.deepest_replicated if replicas > 1 else stage.deepest_alone
    fixed = stage.replicated_bytes if replicas > 1 else stage.alone_bytes
    fixed = fixed - _divided_state(stage.parameters, replicas * given.copies, given.divided_ratio)
    if given.first_replicas > 0:
        versions = _vertical_versions(given.first_delay, given.first_replicas, int(replicas))
        # One version is already included.
        fixed = fixed + _version_memory(stage.parameters, versions - 1, 1)
    return _within_capacity(given, fixed, stage.growing_bytes)


@compiled
def fill_levels(intervals: Floats, given: Given, rates: Floats, stage: StageNumbers) -> None:
    """Write the numbers of replicas that keep the stage within the threshold, by level."""
    size, share = (stage.parameters, 1.0) if given.training else (0.0, 0.0)
    work = stage.work_s / given.speed
    for level in range(len(rates)):
        transmit, latency = size / rates[level, BANDWIDTH], rates[level, LATENCY] * share
        fill_intervals(intervals, level, work, transmit, latency, given.within, given.overlap, given.accumulate)


@compiled
def fill_fewest(fewest: Floats, row: int, given: Given, rates: Floats, stage: StageNumbers, intervals: Floats) -> None:
    """Write the fewest replicas that keep the stage within the threshold to a row, by level."""
    fill_levels(intervals, given, rates, stage)
    for level in range(len(rates)):
        fewest[row, level] = least_allowed(intervals, level, 1.0, given.only)


@compiled
def covering_replicas(depth: float, cover: float) -> float:
    """The fewest replicas with which a depth covers the minibatches in flight behind."""
    return float(np.ceil(cover / (depth - 1) - _ROUNDING)) if depth > 1 else INFINITE


@compiled
def joining_level(spans: Ints, at: Place, start: int) -> int:
    """The level of the component that holds a stage which begins at a worker, and the next stage."""
    joined = 0
    while joined < len(spans) - 1 and start // spans[joined] != at.next_first // spans[joined]:
        joined += 1
    return int(max(joined, at.next_level))


@compiled
def depth_at(
    given: Given, stage: StageNumbers, at: Place, rates: Floats, spans: Ints, transfer_s: Floats, replicas: float
) -> tuple[float, float, float]:
    """The minibatches that a stage with so many replicas must cover, beyond one for each, its depth and its demand.

    The transfer is at the level of the component that holds the stage and the next one.
    """
    wait = 0.0
    if given.accumulate == 0:
        bandwidth, latency = rates[at.level, BANDWIDTH], rates[at.level, LATENCY]
        allreduce = 0.0 if given.copies > 1 else ring_allreduce_time(replicas, stage.parameters, bandwidth, latency)
        wait = float(_group_wait(allreduce, given.threshold, replicas, given.copies))
    cover = float(at.behind + wait + 2 * transfer_s[joining_level(spans, at, at.end - int(replicas))] / given.threshold)
    depth = 1.0 if stage.is_last else float(1 + np.ceil(cover / replicas - _ROUNDING))
    return cover, depth, float(in_flight_behind(depth, replicas, wait))


@compiled
def _replicas_for_versions(given: Given, stage: StageNumbers, replicas: float, cover: float) -> float:
    """`StageTerms.replicas_for_versions`."""
    divided = _divided_state(stage.parameters, given.most_replicas * given.copies, given.divided_ratio)
    room = given.capacity * (1 + SLACK) - (stage.replicated_bytes - divided) - stage.growing_bytes
    if room <= 0:
        return INFINITE
    version, older = _version_memory(stage.parameters, 1, 1), (given.first_delay - 1) * given.first_replicas
    behind = 0.0 if stage.is_last else cover
    deeper, versions = np.ceil(behind / replicas - _ROUNDING), np.ceil(older / replicas)
    surely = max(behind - _ROUNDING * given.most_replicas, 0.0)
    together = float(np.ceil((version * older + stage.growing_bytes * surely) / room - _ROUNDING))
    if stage.growing_bytes * deeper + version * versions <= room:
        return together
    fewer = np.ceil(behind / (deeper - 1 + _ROUNDING)) if deeper > 1 else INFINITE
    if versions > 1:
        fewer = min(fewer, np.ceil(older / (versions - 1)))
    return float(max(together, fewer))


@compiled
def size_stage(
    given: Given,
    stage: StageNumbers,
    at: Place,
    intervals: Floats,
    rates: Floats,
    spans: Ints,
    transfer_s: Floats,
    replicas: float,
    deepest: float,
) -> Sized:
    """The fewest replicas, from `replicas` on, for which a depth of `deepest` suffices (`StageSizing._size`).

    `transfer_s` has the times of messages to the next stage, by level.
    """
    count = replicas
    while True:
        count = least_allowed(intervals, at.level, count, given.only)
        if count > at.most:
            return Sized(INFINITE, 1.0, 0.0)
        cover, depth, demand = depth_at(given, stage, at, rates, spans, transfer_s, count)
        most = min(deepest, max_depth(given, stage, count))
        if depth <= most:
            return Sized(count, depth, demand)
        if given.divided_ratio != 0.0 or given.first_replicas > 0:
            # More replicas also have room for more minibatches, or keep fewer versions.
            more = covering_replicas(stage.deepest_replicated, cover) if stage.deepest_replicated > 1 else 0.0
            if given.first_replicas > 0:
                more = max(more, _replicas_for_versions(given, stage, count, cover))
        else:
            more = covering_replicas(most, cover) if most >= 1 else INFINITE
        count = max(more, count + 1)


@compiled
def versions_suffice(given: Given, stage: StageNumbers, at: Place, rates: Floats, sized: Sized) -> bool:
    """Whether two weight versions suffice, for the schedule that keeps no more (`formulas.buffered_pace`)."""
    if given.accumulate == 0:
        return True
    spare = given.accumulate - sized.demand
    bandwidth, latency = rates[at.level, BANDWIDTH], rates[at.level, LATENCY]
    allreduce = ring_allreduce_time(sized.replicas, stage.parameters, bandwidth, latency) + given.copies_allreduce_s
    return bool(spare >= 0 and allreduce <= given.within * (spare + 1 / given.copies))
