"""The search itself: the states of one cut after another, from the last cut on."""

from __future__ import annotations

from pipeplan.problem.cuts import Ints
from pipeplan.solvers.dp.compiled import front_loops
from pipeplan.solvers.dp.compiled.batch_inputs import Batches
from pipeplan.solvers.dp.compiled.batch_loops import batch_states
from pipeplan.solvers.dp.compiled.bound_loops import bounds_row, workers_needed
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
    fewest_states,
    sized_states,
)
from pipeplan.solvers.dp.compiled.front_loops import Front, Kept, sort_front, sorted_front
from pipeplan.solvers.dp.compiled.jit import compiled, entry
from pipeplan.solvers.dp.compiled.loop_inputs import Bounds, CutArrays, Given

DONE, PAUSED, FULL_FRONT, FULL, UNBOUNDED = range(5)
"""Why `search_cuts` returns: it is through, it has done enough for one call, the front or one of the tables needs more
room, or demands of the front have no bounds yet."""

CUT, STATES, PLACES, FRONT = range(4)
"""Entries of the progress: the cut that is next, the states and the places so far, and the states of that cut, which is
negative until they are found."""

_PAIRS = 200_000
"""Pairs of a cut and a place in a call, which take some hundredths of a second."""


@entry
def search_cuts(
    given: Given,
    arrays: CutArrays,
    bounds: Bounds,
    places: Places,
    kept: Kept,
    front: Front,
    scratch: Scratch,
    counts_depths: bool,
    progress: Ints,
) -> int:
    """Go on with a search in the steady state from where it is. Returns why it ends."""
    return _search(given, arrays, bounds, places, kept, front, scratch, counts_depths, None, progress)


@entry
def search_batches(
    given: Given,
    arrays: CutArrays,
    bounds: Bounds,
    places: Places,
    kept: Kept,
    front: Front,
    scratch: Scratch,
    batches: Batches,
    progress: Ints,
) -> int:
    """Go on with a search for the fastest batch from where it is. Returns why it ends."""
    return _search(given, arrays, bounds, places, kept, front, scratch, True, batches, progress)


@compiled
def _search(
    given: Given,
    arrays: CutArrays,
    bounds: Bounds,
    places: Places,
    kept: Kept,
    front: Front,
    scratch: Scratch,
    counts_depths: bool,
    batches: Batches | None,
    progress: Ints,
) -> int:
    """Go on with a search; code for batches is compiled only where there are any."""
    pairs = 0
    while progress[CUT] >= 0:
        cut = progress[CUT]
        if progress[FRONT] < 0:
            pairs += progress[PLACES] + len(arrays.need) - cut
            progress[FRONT] = _front(cut, given, arrays, bounds, places, kept, front, scratch, counts_depths, batches)
            if progress[FRONT] < 0:
                return FULL_FRONT
        count = progress[FRONT]
        if given.bounded and not _is_bounded(front, count, bounds):
            return UNBOUNDED
        if progress[STATES] + count > len(kept.demand):
            return FULL
        if progress[PLACES] + count * len(arrays.spans) > len(places.demand):
            return FULL
        _keep(cut, count, given, arrays, bounds, kept, front, progress)
        _put_places(cut, given, arrays, bounds, places, kept, progress)
        progress[CUT], progress[FRONT] = cut - 1, -1
        # A single cut may have thousands of states of batches, so that time may be short after every cut.
        if pairs > _PAIRS or front.times.shape[1] > 0:
            return PAUSED
    return DONE


@compiled
def _front(
    cut: int,
    given: Given,
    arrays: CutArrays,
    bounds: Bounds,
    places: Places,
    kept: Kept,
    front: Front,
    scratch: Scratch,
    counts_depths: bool,
    batches: Batches | None,
) -> int:
    """Find the states at a cut. Returns how many there are, or -1 if there is no room for them."""
    if cut == given.last:
        # The state behind everything.
        for column in range(front_loops.ORDER + 1):
            front.numbers[0, column] = 0
        front.numbers[0, front_loops.FIRST], front.demand[0] = given.workers, 0.0
        front.times[0] = 0.0
        if batches is not None:
            front.times[0, 1] = batches.numbers.steady_from_s
        return 1
    if not arrays.usable[cut]:
        # The fewest replicas of stages that begin at the cut behind say nothing about those of the cut before.
        scratch.fewest[1 - cut % 2, :, 0] = 0.0
        return 0
    if counts_depths:
        for row in range(len(bounds.table)):
            scratch.memory_need[row] = bounds.table[row, cut]
    if batches is None:
        if counts_depths:
            count = sized_states(cut, given, arrays, places, front, scratch)
        else:
            count = fewest_states(cut, given, arrays, places, front, scratch)
    else:
        count = batch_states(cut, given, arrays, bounds, batches, places, kept, front, scratch)
    if count == len(front.demand) - 1:
        return -1
    if cut == 0 and given.first_is_any:
        sort_front(front, count, False, True)
        return count
    return sorted_front(front, count, given, arrays.joins, arrays.spans)


@compiled
def _is_bounded(front: Front, count: int, bounds: Bounds) -> bool:
    """Whether the bounds for all demands are known."""
    for state in range(count):  # noqa: SIM110 (compiled code has no generators)
        if bounds_row(bounds, front.demand[state]) < 0:
            return False
    return True


@compiled
def _keep(
    cut: int, count: int, given: Given, arrays: CutArrays, bounds: Bounds, kept: Kept, front: Front, progress: Ints
) -> None:
    """Keep the states of a cut that may still become a pipeline.

    None of the others dominates one of these, so nothing is lost by dropping them this late.
    """
    row = progress[STATES]
    kept.begins[cut] = row
    for state in range(count):
        if cut == given.last or _may_complete(cut, given, arrays, bounds, front, state):
            for column in range(front_loops.ORDER):
                kept.numbers[row, column] = front.numbers[state, column]
            kept.demand[row] = front.demand[state]
            for column in range(front.times.shape[1]):
                kept.times[row, column] = front.times[state, column]
            row += 1
    kept.ends[cut] = progress[STATES] = row


@compiled
def _may_complete(cut: int, given: Given, arrays: CutArrays, bounds: Bounds, front: Front, state: int) -> bool:
    """Whether a state may still become a pipeline (`UniformSearch.completable`)."""
    stages, workers = front.numbers[state, front_loops.STAGES], front.numbers[state, front_loops.WORKERS]
    if front.demand[state] > arrays.most_demand[cut]:
        return False
    if 0 < given.most_workers < workers + arrays.need[cut]:
        return False
    if 0 < given.most_stages < stages + (1 if cut > 0 else 0):
        return False
    if arrays.pinned.shape[1] > 0 and not arrays.pinned[cut, given.most_stages - stages]:
        return False
    first = front.numbers[state, front_loops.FIRST]
    return not given.bounded or first >= workers_needed(bounds, front.demand[state], cut)


@compiled
def _put_places(
    cut: int, given: Given, arrays: CutArrays, bounds: Bounds, places: Places, kept: Kept, progress: Ints
) -> None:
    """Put the end positions in front of the states at a cut (`UniformSearch.end_positions`)."""
    numbers, spans, row, widest = places.numbers, arrays.spans, progress[PLACES], arrays.widest[cut]
    places.begins[cut], places.last[cut] = row, 0
    for state in range(kept.begins[cut], kept.ends[cut]):
        first, level = kept.numbers[state, front_loops.FIRST], kept.numbers[state, front_loops.LEVEL]
        stages, workers = kept.numbers[state, front_loops.STAGES], kept.numbers[state, front_loops.WORKERS]
        if (given.most_stages > 0 and stages >= given.most_stages) or (0 < given.most_workers <= workers):
            continue
        lowest, before = 0, 0
        if widest >= 0:
            lowest = first // spans[widest] * spans[widest] if level <= widest else first
        for step in range(len(spans) - 1 if given.idle else 1):
            # The largest level first, so that ends come in increasing order.
            inside = len(spans) - 2 - step if given.idle else 0
            end = first // spans[inside] * spans[inside]
            if end <= max(lowest, before):
                continue
            before = end
            numbers[row, STATE], numbers[row, FIRST], numbers[row, LEVEL] = state - kept.begins[cut], first, level
            numbers[row, STAGES], numbers[row, WORKERS] = stages, workers
            numbers[row, BOUND] = bounds_row(bounds, kept.demand[state]) if given.bounded else 0
            numbers[row, POSITION], numbers[row, LOWEST] = end, lowest
            for span in range(len(spans)):
                numbers[row, ROOM + span] = min(end - (end - 1) // spans[span] * spans[span], given.most_replicas)
            places.demand[row] = kept.demand[state]
            places.last[cut] = max(places.last[cut], end)
            row += 1
    places.ends[cut] = progress[PLACES] = row
