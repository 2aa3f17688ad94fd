"""The states at one cut that no other dominates: every stage that begins there, in front of every state behind it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeplan.cost import formulas
from pipeplan.problem.cuts import Floats, Ints
from pipeplan.solvers.dp.compiled import front_loops
from pipeplan.solvers.dp.compiled.front_loops import Front, is_beaten, put_least_delay, put_state
from pipeplan.solvers.dp.compiled.jit import compiled
from pipeplan.solvers.dp.compiled.loop_inputs import BANDWIDTH, PARAMETERS, WORK, CutArrays, Given
from pipeplan.solvers.dp.compiled.replica_loops import least_allowed
from pipeplan.solvers.dp.compiled.stage_loops import (
    INFINITE,
    Place,
    Sized,
    StageNumbers,
    covering_replicas,
    depth_at,
    fill_fewest,
    fill_levels,
    max_depth,
    size_stage,
    stage_numbers,
    versions_suffice,
)
from pipeplan.solvers.dp.states.stage_sizing import FEW

STATE, FIRST, LEVEL, STAGES, WORKERS, BOUND, POSITION, LOWEST, ROOM = range(9)
"""Columns of `Places.numbers`: of the state its row at its cut, p, level, stages, workers, and the row of its demand in
`Bounds.table`; the end position and the lowest first worker; and from the last one on the room by level."""

_SLACK = 1e-6
"""Relative slack of `_may_fit`, far above rounding."""


class Places(NamedTuple):
    """The end positions in front of the states behind every cut, those of a cut in a row (`EndPositions`)."""

    begins: Ints
    """For every cut, the first of its places; `ends` is one past the last, `last` the last end position."""
    ends: Ints
    last: Ints
    numbers: Ints
    demand: Floats


class Scratch(NamedTuple):
    """Arrays that loops overwrite."""

    intervals: Floats
    """The intervals of replica counts that `fill_intervals` writes, by level."""
    memory_need: Floats
    """By row of `Bounds.table`, the least workers in front of the present cut."""
    fewest: Floats
    """The fewest replicas, by the cut where the stage ends and level, with zeros where they are not known: of stages
    that begin at cuts with an even number, then of those at others."""


class Source(NamedTuple):
    """The figures that a new state takes from the state behind it, besides its place."""

    state: int
    """The row of that state at its cut."""
    stages: int
    """Stages behind the new state's cut, its own included; `workers` are those of that state."""
    workers: int
    variant: int
    """Whether the stage recomputes its forward pass."""
    start: int
    """The cut where the stage begins."""
    end: int
    """The cut where the stage ends."""


@compiled
def may_fit(given: Given, arrays: CutArrays, start: int, end: int, last: int) -> bool:
    """Whether a stage may have few enough replicas to end at a worker up to `last`; a quick test that most fail.

    A stage on r > 1 replicas that synchronise once per group takes at least 2 (r-1)/r² · w/B, so r > 2w/(BT) - 2.
    """
    totals, room = arrays.totals, (last - arrays.need[start]) * (1 + _SLACK)
    least = (totals[end, WORK] - totals[start, WORK]) / (given.speed * given.within)
    if least > room:
        return False
    if least <= 1 or given.accumulate > 0 or not given.training:
        return True
    sending = 2 * (totals[end, PARAMETERS] - totals[start, PARAMETERS]) / given.within
    for level in range(1, len(arrays.spans)):
        most = min(room, arrays.spans[level] * (1 + _SLACK))
        if least <= most and sending / arrays.rates[level, BANDWIDTH] - 2 <= most:
            return True
    return False


@compiled
def sized_states(cut: int, given: Given, arrays: CutArrays, places: Places, front: Front, scratch: Scratch) -> int:
    """Find the states at a cut where minibatches in flight matter. Returns how many there are."""
    spans, rates = arrays.spans, arrays.rates
    numbers, demands, intervals = places.numbers, places.demand, scratch.intervals
    need, count = arrays.need[cut], 0
    for end in range(given.last, cut, -1):
        begin, close = places.begins[end], places.ends[end]
        if begin == close or not may_fit(given, arrays, cut, end, places.last[end]):
            continue
        if not (given.chain or contains(arrays.words, end, cut)):
            continue
        copied = copied_bytes(arrays.shared_members, arrays.shared_first, arrays.shared_bytes, cut, end)
        for variant in range(given.variants):
            stage = stage_numbers(given, arrays, cut, end, variant == 1, copied)
            if given.memory and stage.deepest_alone < 1:
                continue
            fill_levels(intervals, given, rates, stage)
            for level in range(len(spans)):
                fewest = least_allowed(intervals, level, 1.0, given.only)
                for place in range(begin, close):
                    end_at, room = numbers[place, POSITION], numbers[place, ROOM + level]
                    inside = numbers[place, ROOM + level - 1] if level > 0 else 0
                    most = min(room, end_at - max(need, numbers[place, LOWEST]))
                    least = max(fewest, inside + 1.0)
                    if least > most:
                        continue
                    if not stage.is_last:
                        least = max(least, covering_replicas(stage.deepest_alone, demands[place]))
                    if least > most or least > end_at - _memory_need(cut, given, arrays, places, scratch, place):
                        continue
                    if least > arrays.most_demand[cut] - demands[place]:
                        continue
                    if cut == 0 and given.first_is_exact:
                        if least_allowed(intervals, level, least, given.only) > min(most, given.first_replicas):
                            continue
                        least = float(given.first_replicas)
                    # Whatever the depth is, it covers the minibatches in flight behind.
                    demand = (demands[place] + least) * (1 - formulas.ROUNDING)
                    stages, workers = numbers[place, STAGES] + 1, numbers[place, WORKERS] + int(least)
                    first = end_at - int(least)
                    beaten = is_beaten(front, count, given, spans, level, first, demand, stages, workers)
                    if beaten and not (cut == 0 and given.first_is_any):
                        continue
                    at = Place(level, end_at, most, demands[place], numbers[place, FIRST], numbers[place, LEVEL])
                    source = Source(numbers[place, STATE], stages, numbers[place, WORKERS], variant, cut, end)
                    count = _put_sizes(given, stage, at, source, arrays, intervals, least, front, count)
    return count


@compiled
def _memory_need(cut: int, given: Given, arrays: CutArrays, places: Places, scratch: Scratch, place: int) -> float:
    """The least workers in front of a cut that memory needs."""
    if given.bounded:
        return float(scratch.memory_need[places.numbers[place, BOUND]])
    once, each = arrays.least_memory[cut, 0], arrays.least_memory[cut, 1]
    return float(np.ceil((once + each * places.demand[place]) / given.capacity - 1e-9))


@compiled
def contains(words: NDArray[np.uint64], large: int, small: int) -> bool:
    """Whether a cut contains another."""
    for word in range(words.shape[1]):  # noqa: SIM110 (compiled code has no generators)
        if words[small, word] & ~words[large, word] != 0:
            return False
    return True


@compiled
def copied_bytes(members: Ints, first: Ints, size: Floats, start: int, end: int) -> float:
    """`SharedInCuts.copied`."""
    copied = 0.0
    for weight in range(len(size)):
        if first[weight, end] == first[weight, start] and members[weight, end] > members[weight, start]:
            copied += size[weight]
    return copied


@compiled
def _put_sizes(
    given: Given,
    stage: StageNumbers,
    at: Place,
    source: Source,
    arrays: CutArrays,
    intervals: Floats,
    least: float,
    front: Front,
    count: int,
) -> int:
    """Put the numbers of replicas, from `least` on, that may lead to undominated states. Returns the new count."""
    rates, spans, transfer_s = arrays.rates, arrays.spans, arrays.transfer_s[source.end]
    one = size_stage(given, stage, at, intervals, rates, spans, transfer_s, least, INFINITE)
    if one.replicas == INFINITE:
        return count
    if source.start == 0 and given.first_is_exact and one.replicas != given.first_replicas:
        return count
    if versions_suffice(given, stage, at, rates, one):
        count = put_size(given, arrays, front, count, at, source, one, 0)
    if source.start == 0 and given.first_is_exact:
        return count
    # More replicas help only if the demand falls, which takes a smaller depth: go on to the next count that may do so.
    extra = np.ceil(one.demand - at.behind - formulas.ROUNDING) - 1 - one.replicas
    order = 1 if extra <= FEW else 2
    replicas, cover, smaller = one.replicas, at.behind, min(one.depth - 1, stage.deepest_replicated)
    while smaller >= 2:
        covering = covering_replicas(smaller, cover * (1 - formulas.ROUNDING))
        replicas = least_allowed(intervals, at.level, max(replicas + 1, covering), given.only)
        if replicas > at.most or replicas + at.behind >= one.demand:
            break
        cover, depth, demand = depth_at(given, stage, at, rates, spans, transfer_s, replicas)
        fits = depth <= max_depth(given, stage, replicas)
        if fits and demand < one.demand and versions_suffice(given, stage, at, rates, Sized(replicas, depth, demand)):
            count = put_size(given, arrays, front, count, at, source, Sized(replicas, depth, demand), order)
        # A depth that does not fit yet may fit with more replicas, which divide the optimiser's state or keep fewer
        # versions.
        smaller = min(smaller, depth - 1 if fits else depth)
    return count


@compiled
def put_size(
    given: Given, arrays: CutArrays, front: Front, count: int, at: Place, source: Source, sized: Sized, order: int
) -> int:
    """Put a size of a stage. `order` says after which others at the cuts between the array code comes to it."""
    numbers, replicas = front.numbers, int(sized.replicas)
    numbers[count, front_loops.FIRST], numbers[count, front_loops.LEVEL] = at.end - replicas, at.level
    numbers[count, front_loops.REPLICAS], numbers[count, front_loops.DEPTH] = replicas, int(sized.depth)
    numbers[count, front_loops.STAGES], numbers[count, front_loops.WORKERS] = source.stages, source.workers + replicas
    numbers[count, front_loops.RECOMPUTE], numbers[count, front_loops.END] = source.variant, source.end
    numbers[count, front_loops.SOURCE] = source.state
    # Cuts are gone through from the last on.
    numbers[count, front_loops.ORDER] = order - 6 * source.end + 3 * source.variant
    front.demand[count] = sized.demand
    if source.start == 0 and given.first_is_any:
        return put_least_delay(front, count, given.copies)
    return put_state(front, count, given, arrays.joins, arrays.spans)


@compiled
def fewest_states(cut: int, given: Given, arrays: CutArrays, places: Places, front: Front, scratch: Scratch) -> int:
    """Find the states at a cut where minibatches in flight do not matter, so that the fewest replicas are best.

    Returns how many there are.
    """
    numbers, demands, need, count = places.numbers, places.demand, arrays.need[cut], 0
    shared = arrays.shared_members, arrays.shared_first, arrays.shared_bytes
    known, below = scratch.fewest[cut % 2], scratch.fewest[1 - cut % 2]
    for end in range(cut, given.last + 1):
        below[end, 0] = 0.0
    for end in range(given.last, cut, -1):
        begin, close = places.begins[end], places.ends[end]
        if begin == close or not may_fit(given, arrays, cut, end, places.last[end]):
            continue
        if not (given.chain or contains(arrays.words, end, cut)):
            continue
        several = INFINITE
        if known[end, 0] == 0.0 or given.memory:
            stage = stage_numbers(given, arrays, cut, end, False, copied_bytes(*shared, cut, end))
            fill_fewest(known, end, given, arrays.rates, stage, scratch.intervals)
            several = stage.deepest_replicated
            if given.memory and stage.deepest_alone < 1:
                continue
        for place in range(begin, close):
            level, replicas = _fewest_at(known, end, numbers, place, need)
            if replicas == INFINITE or (given.memory and replicas > 1 and several < 1):
                continue
            stages, workers = numbers[place, STAGES] + 1, numbers[place, WORKERS]
            first, busy = numbers[place, POSITION] - int(replicas), workers + int(replicas)
            if is_beaten(front, count, given, arrays.spans, level, first, 0.0, stages, busy):
                continue
            if given.compares_cuts and _is_superfluous(given, arrays, scratch, cut, end, numbers, place, replicas):
                continue
            at = Place(level, numbers[place, POSITION], 0, demands[place], 0, 0)
            source = Source(numbers[place, STATE], stages, workers, 0, cut, end)
            count = put_size(given, arrays, front, count, at, source, Sized(replicas, 1.0, 0.0), 0)
    return count


@compiled
def _fewest_at(fewest: Floats, row: int, numbers: Ints, place: int, need: int) -> tuple[int, float]:
    """The level and the fewest replicas of a stage at a place; infinite where there is no room.

    A lower level never needs more replicas, so the lowest level that has room decides.
    """
    for level in range(fewest.shape[1]):
        if fewest[row, level] <= numbers[place, ROOM + level]:
            fits = fewest[row, level] <= numbers[place, POSITION] - max(need, numbers[place, LOWEST])
            return level, fewest[row, level] if fits else INFINITE
    return 0, INFINITE


@compiled
def _is_superfluous(
    given: Given,
    arrays: CutArrays,
    scratch: Scratch,
    start: int,
    end: int,
    numbers: Ints,
    place: int,
    replicas: float,
) -> bool:
    """Whether a stage from a smaller cut needs no more replicas (`UniformSearch._drop_dominated`)."""
    below = scratch.fewest[1 - start % 2]
    for pair in range(arrays.downhill_begins[start], arrays.downhill_begins[start + 1]):
        smaller = arrays.downhill[pair]
        if not arrays.usable[smaller]:
            continue
        # The search of the cut before this one reads these rows when its turn comes; no stage needs the first row.
        row = end if smaller == start - 1 else 0
        if row == 0 or below[row, 0] == 0.0:
            copied = copied_bytes(arrays.shared_members, arrays.shared_first, arrays.shared_bytes, smaller, end)
            stage = stage_numbers(given, arrays, smaller, end, False, copied)
            fill_fewest(below, row, given, arrays.rates, stage, scratch.intervals)
        if _fewest_at(below, row, numbers, place, arrays.need[smaller])[1] <= replicas:
            return True
    return False
