"""Layers that the user pins to stages."""

from __future__ import annotations

import itertools

from pipeplan.problem.problem import Problem


def contradicting_pins(problem: Problem) -> str:
    """A clause that names two pins of which no plan can satisfy both, ending in a semicolon; empty if there are none.

    They put one layer, or layers that must share a stage, into two stages, or a layer before one that it reads from.
    """
    unit_of = {name: number for number, unit in enumerate(problem.units) for name in unit.layers}
    readers: dict[int, set[int]] = {}
    for producer, consumer in problem.edges:
        readers.setdefault(producer, set()).add(consumer)
    for (first, stage), (second, other) in itertools.permutations(problem.options.pins, 2):
        if first == second and stage < other:
            return f"{first!r} is pinned to stage {stage} and also to stage {other}; "
        if first != second and unit_of[first] == unit_of[second] and stage < other:
            same = f"{second!r}, which must be in the same stage"
            return f"{first!r} is pinned to stage {stage} and {same}, to stage {other}; "
        if stage < other and _leads_to(unit_of[second], unit_of[first], readers):
            return f"{first!r} is pinned to stage {stage} and {second!r}, which comes before it, to stage {other}; "
    return ""


def _leads_to(start: int, end: int, readers: dict[int, set[int]]) -> bool:
    """Whether there is a path of at least one edge from one unit to another."""
    waiting, seen = [start], {start}
    while waiting:
        for unit in readers.get(waiting.pop(), ()):
            if unit == end:
                return True
            if unit not in seen:
                seen.add(unit)
                waiting.append(unit)
    return False
