"""The states at one cut that no other dominates: the scalar form of `search_states.undominated_states`."""

from __future__ import annotations

from pipeplan.problem.cuts import Floats, Ints
from pipeplan.solvers.dp.compiled.jit import compiled, entry

FIRST, LEVEL, STAGES, WORKERS, REPLICAS, DEPTH, RECOMPUTE, END, SOURCE, ORDER = range(10)
"""Rows of the numbers of states: the columns of `SearchStates`, and in the place of the last one when the array code
comes to a state."""

ALIKE, EXACT_STAGES, FEWER_STAGES = range(3)
"""Ways in which the numbers of stages of two states compare (`StateCounts`)."""


@entry
def undominated(
    numbers: Ints, demand: Floats, joins: Ints, spans: Ints, stages: int, workers: bool, front: Ints
) -> int:
    """Write the states that no other dominates to `front`, in the order of the array code. Returns how many there are.

    `stages` says how their numbers of stages compare, and `workers` whether fewer busy workers are better.
    """
    count, counting = 0, stages != ALIKE or workers
    for new in range(len(demand)):
        kept, lost = 0, False
        for place in range(count):
            old = front[place]
            alike = demand[old] == demand[new] and numbers[FIRST, old] == numbers[FIRST, new]
            if demand[old] <= demand[new] and (not alike or _goes_first(numbers, counting, old, new)):
                # No state that has lost to the new one can dominate it, so nothing has moved yet.
                lost = _dominates(numbers, joins, spans, stages, workers, old, new)
                if lost:
                    break
            may_win = demand[new] <= demand[old] and (not alike or _goes_first(numbers, counting, new, old))
            if may_win and _dominates(numbers, joins, spans, stages, workers, new, old):
                continue
            front[kept] = old
            kept += 1
        if not lost:
            front[kept] = new
            count = kept + 1
    _sort(numbers, demand, front, count)
    kept = 0
    for place in range(count):
        lost = False
        for before in range(kept):
            if demand[front[before]] <= demand[front[place]]:
                lost = lost or _dominates(numbers, joins, spans, stages, workers, front[before], front[place])
        if not lost:
            front[kept] = front[place]
            kept += 1
    return kept


@compiled
def _sort(numbers: Ints, demand: Floats, front: Ints, count: int) -> None:
    """Sort the first states of the front, the best first, by insertion, because they are few."""
    for place in range(1, count):
        one, at = front[place], place
        while at > 0 and _is_before(numbers, demand, one, front[at - 1]):
            front[at] = front[at - 1]
            at -= 1
        front[at] = one


@compiled
def _is_before(numbers: Ints, demand: Floats, one: int, other: int) -> bool:
    """Whether the first of two states is compared first."""
    if numbers[FIRST, one] != numbers[FIRST, other]:
        return bool(numbers[FIRST, one] > numbers[FIRST, other])
    if demand[one] != demand[other]:
        return bool(demand[one] < demand[other])
    return _goes_first(numbers, True, one, other)


@compiled
def _dominates(numbers: Ints, joins: Ints, spans: Ints, stages: int, workers: bool, one: int, other: int) -> bool:
    """Whether a state with no larger demand than another dominates it."""
    first, other_first = numbers[FIRST, one], numbers[FIRST, other]
    # The conditions below imply this, which is quicker.
    if first < other_first:
        return False
    more = numbers[STAGES, one] - numbers[STAGES, other]
    if (stages == EXACT_STAGES and more != 0) or (stages == FEWER_STAGES and more > 0):
        return False
    if workers and numbers[WORKERS, one] > numbers[WORKERS, other]:
        return False
    joined = max(numbers[LEVEL, other], joins[other_first])
    if numbers[LEVEL, one] > joined:
        return False
    if first % spans[joined] < other_first % spans[joined] and other_first != 0:
        return False
    for level in range(joined + 1, len(spans)):
        inner, outer = spans[level - 1], spans[level]
        if first % outer // inner < other_first % outer // inner:
            return False
    return True


@compiled
def _goes_first(numbers: Ints, counting: bool, one: int, other: int) -> bool:
    """Whether of two states with one position and demand the first is compared first."""
    if counting:
        for row in (WORKERS, STAGES, LEVEL):
            if numbers[row, one] != numbers[row, other]:
                return bool(numbers[row, one] < numbers[row, other])
    elif numbers[LEVEL, one] != numbers[LEVEL, other]:
        # The state that came first to each level is compared, at the end.
        return False
    if numbers[ORDER, one] != numbers[ORDER, other]:
        return bool(numbers[ORDER, one] < numbers[ORDER, other])
    return one < other
