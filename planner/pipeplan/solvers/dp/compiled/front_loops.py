"""The states at one cut that no other dominates: the scalar form of `search_states.undominated_states`.

They are collected one after another. A state that is dominated by one of those so far is dropped, and otherwise takes
the place of those that it dominates, so that only few states are kept at any time.
"""

from __future__ import annotations

from typing import NamedTuple

from pipeplan.problem.cuts import Floats, Ints
from pipeplan.solvers.dp.compiled.jit import compiled
from pipeplan.solvers.dp.compiled.loop_inputs import EXACT_STAGES, FEWER_STAGES, Given

FIRST, LEVEL, STAGES, WORKERS, REPLICAS, DEPTH, RECOMPUTE, END, SOURCE, ORDER = range(10)
"""Columns of the numbers of states: those of `SearchStates`, and in the place of the last one when the array code comes
to a state."""


class Front(NamedTuple):
    """Room for the states of a cut, a row for each; the row behind the last one is free for one more."""

    numbers: Ints
    demand: Floats
    times: Floats
    """`SearchStates.times`, without columns where no batches are searched for."""


class Kept(NamedTuple):
    """The states of all cuts so far, those of a cut in a row."""

    begins: Ints
    """For every cut, its first state; `ends` is one past the last."""
    ends: Ints
    numbers: Ints
    demand: Floats
    times: Floats


@compiled
def is_beaten(
    front: Front,
    count: int,
    given: Given,
    spans: Ints,
    level: int,
    first: int,
    demand: float,
    stages: int,
    workers: int,
) -> bool:
    """Whether one of so many states dominates all that lie within a component and are no better than the given numbers.

    These states span the `level`, begin at `first` or before it within the same component, and are all different from
    the one that dominates them. At the edge of their component they may join others at a higher level. What this asks
    of a dominating state follows from what is asked here.
    """
    joined = max(level, 1)
    for one in range(count):
        here = front.numbers[one, FIRST]
        is_better = front.demand[one] < demand or (front.demand[one] == demand and here > first)
        if is_better and here >= first and front.numbers[one, LEVEL] <= joined:
            fewer = _counts_no_more(given, front.numbers[one, STAGES], front.numbers[one, WORKERS], stages, workers)
            if fewer and _has_room(spans, joined, here, first):
                return True
    return False


@compiled
def put_state(front: Front, count: int, given: Given, joins: Ints, spans: Ints) -> int:
    """Take in the state in the row behind so many others, if none dominates it. Returns the new count.

    A front that is full takes in no more.
    """
    numbers, demand, new = front.numbers, front.demand, count
    if count == len(demand) - 1:
        return count
    counting, levels = _is_counting(given), _is_counting(given) or front.times.shape[1] > 0
    for old in range(count):
        if demand[old] <= demand[new]:
            goes_first = not _is_alike(front, old, new) or _goes_first(numbers, counting, levels, old, new)
            if goes_first and _dominates(front, given, joins, spans, old, new):
                return count
    kept = 0
    for old in range(count):
        if demand[new] <= demand[old]:
            goes_first = not _is_alike(front, old, new) or _goes_first(numbers, counting, levels, new, old)
            if goes_first and _dominates(front, given, joins, spans, new, old):
                continue
        _move(front, old, kept)
        kept += 1
    _move(front, new, kept)
    return kept + 1


@compiled
def put_least_delay(front: Front, count: int, copies: int) -> int:
    """Take in the state in the row behind so many others, if its input stage has no more delay than theirs.

    Those that have more are dropped; returns the new count (`AnyInputStage.delays`).
    """
    new, other = _delay(front, count, copies), _delay(front, 0, copies)
    if count == len(front.demand) - 1 or (count > 0 and new > other):
        return count
    to = 0 if count > 0 and new < other else count
    _move(front, count, to)
    return to + 1


@compiled
def _delay(front: Front, row: int, copies: int) -> int:
    replicas = front.numbers[row, REPLICAS]
    return int(front.numbers[row, DEPTH] * replicas + (1 if replicas * copies > 1 else 0))


@compiled
def sorted_front(front: Front, count: int, given: Given, joins: Ints, spans: Ints) -> int:
    """Sort the states, the best first, and drop those that one before them dominates. Returns the new count."""
    demand, kept = front.demand, 0
    counting = _is_counting(given) or front.times.shape[1] == 0
    sort_front(front, count, counting, False)
    for place in range(count):
        lost = False
        for before in range(kept):
            if demand[before] <= demand[place]:
                lost = lost or _dominates(front, given, joins, spans, before, place)
        if not lost:
            _move(front, place, kept)
            kept += 1
    return kept


@compiled
def sort_front(front: Front, count: int, counting: bool, as_found: bool) -> None:
    """Sort the states, the best first, or in the order in which the array code comes to them."""
    free = count
    # By insertion, because they are few.
    for place in range(1, count):
        at = place
        while at > 0 and _is_before(front, counting, as_found, place, at - 1):
            at -= 1
        if at < place:
            _move(front, place, free)
            for row in range(place, at, -1):
                _move(front, row - 1, row)
            _move(front, free, at)


@compiled
def _is_counting(given: Given) -> bool:
    """Whether states differ in more than their position, their demand and their times (`StateCounts.any`)."""
    return bool(given.compared_stages != 0 or given.counts_workers)


@compiled
def _move(front: Front, row: int, to: int) -> None:
    if row != to:
        for column in range(ORDER + 1):
            front.numbers[to, column] = front.numbers[row, column]
        front.demand[to] = front.demand[row]
        for column in range(front.times.shape[1]):
            front.times[to, column] = front.times[row, column]


@compiled
def _is_alike(front: Front, one: int, other: int) -> bool:
    for column in range(front.times.shape[1]):
        if front.times[one, column] != front.times[other, column]:
            return False
    return bool(front.demand[one] == front.demand[other] and front.numbers[one, FIRST] == front.numbers[other, FIRST])


@compiled
def _is_before(front: Front, counting: bool, as_found: bool, one: int, other: int) -> bool:
    """Whether the first of two states is compared first; it has the later row."""
    numbers, demand = front.numbers, front.demand
    if as_found:
        return bool(numbers[one, ORDER] < numbers[other, ORDER])
    if numbers[one, FIRST] != numbers[other, FIRST]:
        return bool(numbers[one, FIRST] > numbers[other, FIRST])
    if demand[one] != demand[other]:
        return bool(demand[one] < demand[other])
    if front.times.shape[1] > 0:
        if front.times[one, 0] != front.times[other, 0]:
            return bool(front.times[one, 0] < front.times[other, 0])
        total, other_total = 0.0, 0.0
        for column in range(front.times.shape[1]):
            total, other_total = total + front.times[one, column], other_total + front.times[other, column]
        if total != other_total:
            return bool(total < other_total)
    return _goes_first(numbers, counting, True, one, other)


@compiled
def _goes_first(numbers: Ints, counting: bool, levels: bool, one: int, other: int) -> bool:
    """Whether of two states with one position, one demand and equal times the first is compared first."""
    if counting:
        for column in (WORKERS, STAGES):
            if numbers[one, column] != numbers[other, column]:
                return bool(numbers[one, column] < numbers[other, column])
    if numbers[one, LEVEL] != numbers[other, LEVEL]:
        # In the steady state the one that came first to each level is compared, at the end.
        return bool(levels and numbers[one, LEVEL] < numbers[other, LEVEL])
    if numbers[one, ORDER] != numbers[other, ORDER]:
        return bool(numbers[one, ORDER] < numbers[other, ORDER])
    return one < other


@compiled
def _dominates(front: Front, given: Given, joins: Ints, spans: Ints, one: int, other: int) -> bool:
    """Whether a state with no larger demand than another dominates it."""
    numbers, first, other_first = front.numbers, front.numbers[one, FIRST], front.numbers[other, FIRST]
    # The conditions below imply this, which is quicker.
    if first < other_first:
        return False
    if front.times.shape[1] > 0 and not _is_no_later(front.times, one, other):
        return False
    stages, workers = numbers[other, STAGES], numbers[other, WORKERS]
    if not _counts_no_more(given, numbers[one, STAGES], numbers[one, WORKERS], stages, workers):
        return False
    joined = max(numbers[other, LEVEL], joins[other_first])
    return numbers[one, LEVEL] <= joined and _has_room(spans, joined, first, other_first)


@compiled
def _is_no_later(times: Floats, one: int, other: int) -> bool:
    """Whether a batch takes no longer, whatever is put in front of two states (`search_states.no_later`)."""
    total = times[one, 0]
    for bound in range(1, times.shape[1]):
        if total > times[other, 0]:
            return False
        total += max(times[one, bound] - times[other, bound], 0.0)
    return bool(total <= times[other, 0])


@compiled
def _counts_no_more(given: Given, stages: int, workers: int, other_stages: int, other_workers: int) -> bool:
    """Whether a state with so many stages and busy workers may dominate one with others."""
    if given.compared_stages == EXACT_STAGES and stages != other_stages:
        return False
    if given.compared_stages == FEWER_STAGES and stages > other_stages:
        return False
    return not given.counts_workers or workers <= other_workers


@compiled
def _has_room(spans: Ints, joined: int, first: int, other_first: int) -> bool:
    """Whether a position has no less room in its component than another, and the components no smaller numbers."""
    if first % spans[joined] < other_first % spans[joined] and other_first != 0:
        return False
    for level in range(joined + 1, len(spans)):
        inner, outer = spans[level - 1], spans[level]
        if first % outer // inner < other_first % outer // inner:
            return False
    return True
