"""All states at one cut: every stage that begins there, in front of every state behind it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeplan.cost import formulas
from pipeplan.problem.cuts import Floats, Ints
from pipeplan.solvers.dp.compiled import front_loops
from pipeplan.solvers.dp.compiled.jit import compiled, entry
from pipeplan.solvers.dp.compiled.loop_inputs import CutArrays, Given
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
from pipeplan.solvers.dp.replica_bounds import FEW

STATE, FIRST, LEVEL, STAGES, WORKERS, BOUND, POSITION, LOWEST, ROOM = range(9)
"""Columns of `Places.numbers`: of the state its row at its cut, p, level, stages, workers, and the row of its demand in
`WorkerBounds.table`; the end position and the lowest first worker; and from the last one on the room by level."""


class Places(NamedTuple):
    """The end positions in front of the states behind every cut, those of a cut in a row (`EndPositions`)."""

    begins: Ints
    """For every cut, the first of its places; `ends` is one past the last."""
    ends: Ints
    numbers: Ints
    demand: Floats


class Found(NamedTuple):
    """Room for states, a column for each (`front_loops`), with their demands."""

    numbers: Ints
    demand: Floats


@entry
def sized_states(
    cut: int, given: Given, arrays: CutArrays, places: Places, memory_need: Floats, found: Found, intervals: Floats
) -> int:
    """Find the states at a cut where minibatches in flight matter. Returns how many there are, for which there may be
    no room.

    `memory_need` has the least workers in front of the cut that memory needs, by place. `intervals` is overwritten.
    """
    totals, spans, rates, transfer_s = arrays.totals, arrays.spans, arrays.rates, arrays.transfer_s
    numbers, demands, need, count = places.numbers, places.demand, arrays.need[cut], 0
    for end in range(given.last, cut, -1):
        begin, close = places.begins[end], places.ends[end]
        if begin == close or not (given.chain or _contains(arrays.words, end, cut)):
            continue
        copied = _copied(arrays.shared_members, arrays.shared_first, arrays.shared_bytes, cut, end)
        for variant in range(given.variants):
            stage = stage_numbers(given, totals, cut, end, variant == 1, copied)
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
                    if least > most or least > end_at - memory_need[place]:
                        continue
                    if not stage.is_last:
                        least = max(least, covering_replicas(stage.deepest_alone, demands[place]))
                        if least > most or least > end_at - memory_need[place]:
                            continue
                    at = Place(level, end_at, most, demands[place], numbers[place, FIRST], numbers[place, LEVEL])
                    after = _put_sizes(given, stage, at, intervals, rates, spans, transfer_s[end], least, found, count)
                    _put_state(found, count, after, numbers, place, variant, end)
                    count = after
    return count


@entry
def put_places(
    behind: Ints,
    demand: Floats,
    widest: int,
    most_replicas: int,
    spans: Ints,
    places: Places,
    cut: int,
    begin: int,
    idle: bool,
) -> int:
    """Put the end positions in front of some states at a cut (`UniformSearch.end_positions`), from row `begin` on.

    `behind` has the first columns of the states; `widest` is the widest level of the cut's boundary, or -1 for the full
    cut. Without `idle`, no worker between stages is. Returns one past the last row.
    """
    numbers, top, row = places.numbers, len(spans) - 1, begin
    for state in range(len(behind)):
        first, lowest, before = behind[state, FIRST], 0, 0
        if widest >= 0:
            fits = behind[state, LEVEL] <= widest
            lowest = first // spans[widest] * spans[widest] if fits else first
        for step in range(top if idle else 1):
            # The largest level first, so that ends come in increasing order.
            level = top - 1 - step if idle else 0
            end = first // spans[level] * spans[level]
            if end <= max(lowest, before):
                continue
            before = end
            for column in range(POSITION):
                numbers[row, column] = behind[state, column]
            places.demand[row] = demand[state]
            numbers[row, POSITION], numbers[row, LOWEST] = end, lowest
            for inside in range(top + 1):
                room = end - (end - 1) // spans[inside] * spans[inside]
                numbers[row, ROOM + inside] = min(room, most_replicas)
            row += 1
    places.begins[cut], places.ends[cut] = begin, row
    return row


@compiled
def _contains(words: NDArray[np.uint64], large: int, small: int) -> bool:
    """Whether a cut contains another."""
    for word in range(words.shape[1]):  # noqa: SIM110 (compiled code has no generators)
        if words[small, word] & ~words[large, word] != 0:
            return False
    return True


@compiled
def _copied(members: Ints, first: Ints, size: Floats, start: int, end: int) -> float:
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
    intervals: Floats,
    rates: Floats,
    spans: Ints,
    transfer_s: Floats,
    least: float,
    found: Found,
    count: int,
) -> int:
    """Put the numbers of replicas, from `least` on, that may lead to undominated states. Returns the new count."""
    one = size_stage(given, stage, at, intervals, rates, spans, transfer_s, least, INFINITE)
    if one.replicas == INFINITE:
        return count
    if versions_suffice(given, stage, at, rates, one):
        count = _put_size(found, count, at, one, 0)
    if one.depth <= 2:
        return count
    # The number of further replica counts that may lower the demand: r · depth is at least r plus what it covers.
    extra = np.ceil(one.demand - at.behind - formulas.ROUNDING) - 1 - one.replicas
    if extra <= FEW:
        for step in range(1, int(min(extra, at.most - one.replicas)) + 1):
            more = one.replicas + step
            _, depth, demand = depth_at(given, stage, at, rates, spans, transfer_s, more)
            other = Sized(more, depth, demand)
            if demand < one.demand and depth <= max_depth(given, stage, more):
                is_allowed = least_allowed(intervals, at.level, more, given.only) == more
                if is_allowed and versions_suffice(given, stage, at, rates, other):
                    count = _put_size(found, count, at, other, 1)
        return count
    # At smaller depths than these, more replicas are needed than there is room for, or than lower the demand.
    enough = min(float(at.most), one.demand - at.behind) + 1e-6
    for depth in range(max(2, int(at.behind / enough)), int(one.depth)):
        more = max(covering_replicas(float(depth), at.behind), one.replicas + 1)
        if more + at.behind < one.demand and more <= at.most:
            other = size_stage(given, stage, at, intervals, rates, spans, transfer_s, more, float(depth))
            lowers = other.replicas < INFINITE and other.demand < one.demand
            if lowers and versions_suffice(given, stage, at, rates, other):
                count = _put_size(found, count, at, other, 2)
    return count


@compiled
def _put_size(found: Found, count: int, at: Place, sized: Sized, order: int) -> int:
    """Put a size of a stage. `order` says after which others at the cuts between the array code comes to it."""
    if count < len(found.demand):
        replicas = int(sized.replicas)
        found.numbers[front_loops.FIRST, count], found.numbers[front_loops.LEVEL, count] = at.end - replicas, at.level
        found.numbers[front_loops.REPLICAS, count], found.numbers[front_loops.DEPTH, count] = replicas, int(sized.depth)
        found.numbers[front_loops.ORDER, count], found.demand[count] = order, sized.demand
    return count + 1


@compiled
def _put_state(found: Found, begin: int, close: int, behind: Ints, place: int, variant: int, end: int) -> None:
    """Complete the states of some sizes of one stage at a place."""
    for column in range(begin, min(close, len(found.demand))):
        found.numbers[front_loops.STAGES, column] = behind[place, STAGES] + 1
        found.numbers[front_loops.WORKERS, column] = (
            behind[place, WORKERS] + found.numbers[front_loops.REPLICAS, column]
        )
        found.numbers[front_loops.RECOMPUTE, column], found.numbers[front_loops.END, column] = variant, end
        found.numbers[front_loops.SOURCE, column] = behind[place, STATE]
        # Cuts are gone through from the last on.
        found.numbers[front_loops.ORDER, column] += -6 * end + 3 * variant


@entry
def fewest_states(
    cut: int,
    given: Given,
    arrays: CutArrays,
    places: Places,
    found: Found,
    intervals: Floats,
    known: Floats,
    below: Floats,
) -> int:
    """Find the states at a cut where minibatches in flight do not matter, so that the fewest replicas are best.

    Returns how many there are, for which there may be no room. `known` has the fewest replicas that are fast enough, by
    the cut where the stage ends and level, with zeros where they are not known. `below` gets those of the cut before
    this one, as far as they are looked at; its first row, of which no stage has need, is overwritten.
    """
    numbers, demands, need, count = places.numbers, places.demand, arrays.need[cut], 0
    shared = arrays.shared_members, arrays.shared_first, arrays.shared_bytes
    for end in range(given.last, cut, -1):
        begin, close = places.begins[end], places.ends[end]
        if begin == close or not (given.chain or _contains(arrays.words, end, cut)):
            continue
        several = INFINITE
        if known[end, 0] == 0.0 or given.memory:
            stage = stage_numbers(given, arrays.totals, cut, end, False, _copied(*shared, cut, end))
            fill_fewest(known, end, given, arrays.rates, stage, intervals)
            several = stage.deepest_replicated
            if given.memory and stage.deepest_alone < 1:
                continue
        for place in range(begin, close):
            level, replicas = _fewest_at(known, end, numbers, place, need)
            if replicas == INFINITE or (given.memory and replicas > 1 and several < 1):
                continue
            if given.compares_cuts and _is_superfluous(
                given, arrays, intervals, below, cut, end, numbers, place, replicas
            ):
                continue
            at = Place(level, numbers[place, POSITION], 0, demands[place], 0, 0)
            _put_size(found, count, at, Sized(replicas, 1.0, 0.0), 0)
            _put_state(found, count, count + 1, numbers, place, 0, end)
            count += 1
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
    intervals: Floats,
    below: Floats,
    start: int,
    end: int,
    numbers: Ints,
    place: int,
    replicas: float,
) -> bool:
    """Whether a stage from a smaller cut needs no more replicas (`UniformSearch._drop_dominated`)."""
    for pair in range(arrays.downhill_begins[start], arrays.downhill_begins[start + 1]):
        smaller = arrays.downhill[pair]
        if not arrays.usable[smaller]:
            continue
        row = end if smaller == start - 1 else 0
        if row == 0 or below[row, 0] == 0.0:
            copied = _copied(arrays.shared_members, arrays.shared_first, arrays.shared_bytes, smaller, end)
            stage = stage_numbers(given, arrays.totals, smaller, end, False, copied)
            fill_fewest(below, row, given, arrays.rates, stage, intervals)
        if _fewest_at(below, row, numbers, place, arrays.need[smaller])[1] <= replicas:
            return True
    return False
