"""Cuts a model into stages for workers that run several stages each.

The cuts are places in the order of the problem's units, so stages are consecutive units. A dynamic program finds the
cuts that make the longest stage as short as possible. From there, cuts are moved as long as the estimated time of a
batch falls. `cost.virtual_stages` gives the estimate, without the time of messages and all-reduces.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pipeplan.cost.virtual_stages import PLACEMENTS
from pipeplan.plan.schedules import ZERO_BUBBLE_V
from pipeplan.problem.problem import Problem

Places = tuple[int, ...]
"""For every stage except the last, the number of units up to its end."""
MOST_CUTS = 64
"""Largest number of lists of cuts that are all tried for a shape."""
MOST_SWEEPS = 20
MOST_UNITS = 1500
"""Largest number of units for which the dynamic program runs. With more, the search begins with equal work."""


@dataclass(frozen=True)
class VirtualShape:
    """The shape of a pipeline whose workers run several stages each."""

    schedule: str
    devices: int
    """Number of positions in the pipeline."""
    chunks: int
    """Number of stages of each position."""
    replicas: int
    """Number of workers at each position."""

    @property
    def stages(self) -> int:
        """Number of stages of the pipeline."""
        return self.devices * self.chunks


def batch_estimate(problem: Problem, shape: VirtualShape, minibatches: int) -> Callable[[Sequence[int]], float]:
    """A function that estimates the time of a batch for cuts at given places, in seconds.

    Each replica has `minibatches` minibatches of an update."""
    forward = np.cumsum([0.0, *(unit.forward_s for unit in problem.units)])
    both = np.cumsum([0.0, *(unit.forward_s + unit.backward_s for unit in problem.units)])
    placement = PLACEMENTS[shape.schedule]
    device_of = np.array([placement.device_of(stage, shape.devices) for stage in range(shape.stages)])
    first = forward if shape.schedule == ZERO_BUBBLE_V else both

    def estimate(places: Sequence[int]) -> float:
        ends = np.array([0, *places, len(problem.units)])
        work = np.bincount(device_of, np.diff(both[ends]), shape.devices)
        return float((minibatches * work + first[ends[: shape.devices]]).max())

    return estimate


def quick_estimate_s(problem: Problem, shape: VirtualShape, minibatches: int) -> float:
    """The estimated time of a batch with stages of equal work; infinite if the model has too few units."""
    if shape.stages > len(problem.units):
        return float("inf")
    times = np.array([unit.forward_s + unit.backward_s for unit in problem.units])
    return batch_estimate(problem, shape, minibatches)(_equal_work(times, shape.stages))


def all_cuts(problem: Problem, shape: VirtualShape) -> list[Places]:
    """All lists of places to cut for a shape; [] if there are more than `MOST_CUTS`."""
    units = len(problem.units)
    if shape.stages > units or math.comb(units - 1, shape.stages - 1) > MOST_CUTS:
        return []
    least, most = pinned_places(problem, shape.stages)
    return [
        places
        for places in itertools.combinations(range(1, units), shape.stages - 1)
        if all(low <= at <= high for low, at, high in zip(least, places, most, strict=True))
    ]


def cuts_to_try(problem: Problem, shape: VirtualShape, minibatches: int) -> list[Places]:
    """Distinct lists of good places to cut for a shape; empty if the model has fewer units than the shape stages."""
    count, units = shape.stages, len(problem.units)
    if count > units:
        return []
    times = np.array([unit.forward_s + unit.backward_s for unit in problem.units])
    least, most = pinned_places(problem, count)
    if any(one > other for one, other in zip(least, most, strict=True)):
        return []
    estimate = batch_estimate(problem, shape, minibatches)
    starts = [_equal_work(times, count)]
    if units <= MOST_UNITS:
        starts.append(_shortest_longest(times, count))
    clipped = [tuple(int(place) for place in np.clip(places, least, most)) for places in starts]
    starts = [places for places in clipped if all(one < other for one, other in pairwise((0, *places, units)))]
    allowed = least, most
    return list(dict.fromkeys([*starts, *(_descended(places, units, estimate, allowed) for places in starts)]))


def pinned_places(problem: Problem, stages: int) -> tuple[list[int], list[int]]:
    """(first places, last places) that the user's pins allow, with an entry for every cut."""
    units = len(problem.units)
    least = list(range(1, stages))
    most = [units - stages + number for number in range(1, stages)]
    unit_of = {name: index for index, unit in enumerate(problem.units) for name in unit.layers}
    for layer, number in problem.options.pins:
        unit = unit_of[layer]
        for cut in range(stages - 1):
            if cut >= number - 1:  # the cut comes after the layer's stage
                least[cut] = max(least[cut], unit + 1 + cut - (number - 1))
            else:
                most[cut] = min(most[cut], unit - (number - 2 - cut))
    return least, most


def _equal_work(times: NDArray[np.float64], count: int) -> Places:
    """Cuts after equal shares of the work, with at least one unit in every stage."""
    sums, places = np.cumsum(times), list[int]()
    for stage in range(1, count):
        wanted = int(np.searchsorted(sums, sums[-1] * stage / count)) + 1
        least = places[-1] + 1 if places else 1
        places.append(min(max(wanted, least), len(times) - (count - stage)))
    return tuple(places)


def _shortest_longest(times: NDArray[np.float64], count: int) -> Places:
    """The cuts that make the longest stage as short as possible, by a dynamic program over (stages, units)."""
    units, sums = len(times), np.cumsum([0.0, *times])
    best = sums.copy()
    choices: list[NDArray[np.intp]] = []
    for stage in range(2, count + 1):
        following, chosen = np.full(units + 1, np.inf), np.zeros(units + 1, dtype=np.intp)
        for end in range(stage, units + 1):
            cut = np.arange(stage - 1, end)
            longest = np.maximum(best[cut], sums[end] - sums[cut])
            at = int(longest.argmin())
            following[end], chosen[end] = longest[at], cut[at]
        best, choices = following, [*choices, chosen]
    places, end = [], units
    for chosen in reversed(choices):
        end = int(chosen[end])
        places.append(end)
    return tuple(reversed(places))


def _descended(
    places: Places,
    units: int,
    estimate: Callable[[Sequence[int]], float],
    allowed: tuple[Sequence[int], Sequence[int]],
) -> Places:
    """The places after moves that shorten the batch: moves of single cuts, and of all cuts from one cut on."""
    best, best_s = list(places), estimate(places)
    for _ in range(MOST_SWEEPS):
        before_s = best_s
        for index in range(len(best)):
            for move in (-4, -2, -1, 1, 2, 4):
                for moved in (
                    [*best[:index], best[index] + move, *best[index + 1 :]],
                    [*best[:index], *(place + move for place in best[index:])],
                ):
                    inside = all(low <= at <= high for low, at, high in zip(allowed[0], moved, allowed[1], strict=True))
                    if inside and all(one < other for one, other in pairwise((0, *moved, units))):
                        found_s = estimate(moved)
                        if found_s < best_s * (1 - 1e-12):
                            best, best_s = moved, found_s
        if best_s >= before_s:
            break
    return tuple(best)
