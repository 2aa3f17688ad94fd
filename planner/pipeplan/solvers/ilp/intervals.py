"""Constraints (26) to (28) of the integer program: stages as whole sets of layers. `integer_program` has the notation.

The other constraints know a stage as a sum over layers, so that the relaxation may put a part of every layer anywhere.
Here a stage is a choice: of the set of layers behind which it begins, of the one at which it ends, and of its place.
Both sets are closed, that is, they have with every layer all layers before it. Choices that take longer than U alone,
or leave the workers before or behind them more than these can do within U, are left out. What is left is few where U is
close to the optimum, and a plan is a path through it.

    v[I,J,π] ≥ 0     a stage with the layers of J that are not in I is on π
    i[I,p] ≥ 0       worker p is idle, and the layers of I are on the workers before it
    S[I,p] ≥ 0       the layers of I are those whose stage starts at p or before

(26) As many v and i enter a pair of a set and a worker as leave it; one begins with no layers at the first worker.
(27) S[J,p] = S[J,p-1] + the v at p that end at J - those that begin at J; Z[l,p] is the sum of S over the sets with l.
(28) The shares of work and parameters, the bytes over every cut, and those before and behind every place are sums over v
     or S.

The variables y, o and Z decide all of these, so that none of them has to be an integer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeplan.solvers.ilp.cards import CardConstraints
from pipeplan.solvers.ilp.layers import LayerBlocks
from pipeplan.solvers.ilp.linear_program import NEGLIGIBLE, THOUSANDTHS, Term, Variable, negate_terms
from pipeplan.solvers.ilp.model import Place, PlacementModel

MOST_SETS = 450
"""The most closed sets of layers for which stages are told apart. A chain has one more than it has layers."""
MOST_CHOICES = 60_000
"""The most choices of two sets and a place: a program with more takes longer to solve than it saves."""

Floats = NDArray[np.float64]
# Relative slack for rounding within which a stage still keeps to U.
_SLACK = 1e-9


class ClosedSets:
    """The sets of blocks that have with every block all those before it, in an order in which subsets come first."""

    def __init__(self, layers: LayerBlocks, masks: list[int]) -> None:
        self.masks, self._layers = masks, layers
        count = len(layers)
        self.has: NDArray[np.bool_] = np.array([[mask >> block & 1 for block in range(count)] for mask in masks], bool)
        """Which blocks every set has."""

    @staticmethod
    def of(layers: LayerBlocks) -> ClosedSets | None:
        """All closed sets, or None where there are more than `MOST_SETS`."""
        before = [0] * len(layers)
        for source, target in layers.edges:
            before[target] |= 1 << source
        found, newest = {0}, {0}
        while newest and len(found) <= MOST_SETS:
            newest = {
                mask | 1 << block
                for mask in newest
                for block, needed in enumerate(before)
                if not mask >> block & 1 and needed & ~mask == 0
            }
            found |= newest
        if len(found) > MOST_SETS:
            return None
        return ClosedSets(layers, sorted(found, key=lambda mask: (mask.bit_count(), mask)))

    def sums(self, amounts: Iterable[float]) -> Floats:
        """For every set, the sum of amounts that are given by block."""
        return np.asarray(self.has @ np.array(list(amounts), dtype=np.float64))

    def crossing(self, sizes: Iterable[float]) -> Floats:
        """For every set, the bytes of the tensors, given by tensor, that leave it."""
        total = np.zeros(len(self.masks))
        for tensor, size in zip(self._layers.tensors, sizes, strict=True):
            total += size * (self.has[:, tensor.producer] & ~self.has[:, tensor.consumers].all(axis=1))
        return total

    @cached_property
    def pairs(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """All pairs of a set and a larger one that has it, by index."""
        masks = np.array(self.masks, dtype=object)
        begin, end = np.triu_indices(len(masks), k=1)
        inside = (masks[begin] & ~masks[end]) == 0
        return begin[inside], end[inside]


@dataclass(frozen=True)
class Choices:
    """Choices of a place and of the sets at which its stage begins and ends, by index."""

    places: list[Place]
    place: NDArray[np.intp]
    begin: NDArray[np.intp]
    end: NDArray[np.intp]

    def __len__(self) -> int:
        return len(self.place)


def choices_within(model: PlacementModel, sets: ClosedSets) -> Choices | None:
    """The choices that may be part of a plan within U, or None where they are more than `MOST_CHOICES`."""
    begin, end = sets.pairs
    chosen: list[tuple[Any, Any]] = []
    total = 0
    fits = _Fitting(model, sets)
    places = list(model.at)
    for place in places:
        kept = fits.at(place, begin, end)
        total += int(kept.sum())
        if total > MOST_CHOICES:
            return None
        chosen.append((begin[kept], end[kept]))
    counts = [len(one) for one, _ in chosen]
    return Choices(
        places,
        np.repeat(np.arange(len(places)), counts),
        np.concatenate([one for one, _ in chosen]),
        np.concatenate([other for _, other in chosen]),
    )


class _Fitting:
    """Which stages keep to U by themselves, by what every set of layers adds up to."""

    def __init__(self, model: PlacementModel, sets: ClosedSets) -> None:
        self.model, blocks = model, model.layers.blocks
        self.work = sets.sums(block.work_s for block in blocks)
        self.parameters = sets.sums(block.parameters for block in blocks)
        self.busier = np.maximum.reduce([sets.crossing(sizes) for sizes in model.layers.directions()])
        self.final = {(one.start, one.replicas) for one in model.placements.all if model.placements.final(one)}
        self.followed = {(one.start, one.replicas) for one in model.placements.all if not model.placements.final(one)}

    def at(self, place: Place, begin: NDArray[np.intp], end: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Which stages from one set to the other may be on a place."""
        model, (start, stop) = self.model, (place[0], sum(place))
        work, within = self.work[end] - self.work[begin], model.unit_s * (1 + _SLACK)
        last = len(self.work) - 1
        kept = np.where(end == last, place in self.final, place in self.followed)
        kept &= np.where(begin == 0, start in model.opening, start > 0)
        if model.problem.options.flushes:
            rounds = np.ceil((model.minibatches or 1) / place[1]) - 1.0
            return np.asarray(kept & (rounds * work <= (model.room_s + _SLACK * model.unit_s) * model.speed(place)))
        compute = work / (place[1] * model.speed(place))
        latency = model.synchronisation(place, 0.0)
        rate = (model.synchronisation(place, model.total) - latency) / model.total
        sync = latency + rate * (self.parameters[end] - self.parameters[begin])
        exposed = 1.0 - model.problem.options.overlap
        kept &= np.maximum(compute, sync) + exposed * np.minimum(compute, sync) <= within
        kept &= self.work[begin] <= model.doable_s(0, start) * (1 + _SLACK)
        kept &= self.work[last] - self.work[end] <= model.doable_s(stop, model.workers) * (1 + _SLACK) + 1e-15
        kept &= (begin == 0) | self._crosses(begin, start - 1, stop - 1)
        kept &= (end == last) | self._crosses(end, start, stop)
        return np.asarray(kept)

    def _crosses(self, sets: NDArray[np.intp], first: int, last: int) -> NDArray[np.bool_]:
        """Whether a boundary between stages that hold these two workers carries within U what leaves the sets."""
        model = self.model
        if last >= model.workers or first < 0 or model.parallel:
            return np.ones(len(sets), dtype=bool)
        level = model.problem.cluster.level_between(first, last)
        bandwidth = model.way(range(first, last + 1), level)[0] if model.problem.cluster.uniform else np.inf
        return np.asarray(self.busier[sets] <= bandwidth * model.unit_s * (1 + _SLACK))


class StageChoices:
    """Constraints (26) to (28) of a model."""

    def __init__(self, model: PlacementModel, cards: CardConstraints | None, sets: ClosedSets, all_of: Choices) -> None:
        self.model, self.sets, self.choices = model, sets, all_of
        self.at_place: dict[Place, list[int]] = defaultdict(list)
        for number, place in enumerate(all_of.place.tolist()):
            self.at_place[all_of.places[place]].append(number)
        self.taken = [model.program.number(f"v_{number}", 0, 1) for number in range(len(all_of))]
        for place in model.at:
            numbers = self.at_place[place]
            model.program.equal([*((self.taken[number], 1.0) for number in numbers), *model.selected(place, -1.0)])
        self._chain()
        self.reached = self._reach()
        self._share()
        if cards is not None and cards.cards:
            self._load(cards)

    @staticmethod
    def add_to(model: PlacementModel, cards: CardConstraints | None) -> StageChoices | None:
        """Add the constraints to a model, unless there are too many closed sets or choices."""
        sets = ClosedSets.of(model.layers)
        chosen = None if sets is None else choices_within(model, sets)
        return None if sets is None or chosen is None else StageChoices(model, cards, sets, chosen)

    def _sum_of(self, numbers: Iterable[int], amounts: Floats) -> list[Term]:
        """The terms of a sum over choices, of amounts that are given for all of them."""
        return [(self.taken[number], float(amounts[number])) for number in numbers if amounts[number]]

    # -- constraint (26) --

    def _chain(self) -> None:
        """Add (26), and as many idle workers as the placements leave."""
        model, count = self.model, len(self.sets.masks)
        balance: dict[tuple[int, int], list[Term]] = defaultdict(list)
        begin, end = self.choices.begin.tolist(), self.choices.end.tolist()
        for number, index in enumerate(self.choices.place.tolist()):
            place = self.choices.places[index]
            balance[begin[number], place[0]].append((self.taken[number], -1.0))
            balance[end[number], sum(place)].append((self.taken[number], 1.0))
        self.idle: dict[tuple[int, int], Variable] = {}
        for worker in range(model.workers):
            leaving = model.in_use(one for one in model.used if one.last < worker <= one.end)
            leaving += [(variable, 1.0) for start, variable in model.opening.items() if start > worker]
            if not leaving:
                continue
            for number in range(count):
                self.idle[number, worker] = variable = model.program.number(f"i_{number}_{worker}", 0, 1)
                balance[number, worker].append((variable, -1.0))
                balance[number, worker + 1].append((variable, 1.0))
            idle = [(self.idle[number, worker], -1.0) for number in range(count)]
            model.program.equal([*leaving, *idle])
        balance[0, 0].append((model.program.one, 1.0))
        balance[count - 1, model.workers].append((model.program.one, -1.0))
        for terms in balance.values():
            model.program.equal(terms)

    # -- constraint (27) --

    def _reach(self) -> dict[tuple[int, int], Variable]:
        """Add (27). Returns S by set and worker, but for the last worker, which all layers have reached."""
        model, count = self.model, len(self.sets.masks)
        starting: dict[tuple[int, int], list[Term]] = defaultdict(list)
        begin, end = self.choices.begin.tolist(), self.choices.end.tolist()
        for number, index in enumerate(self.choices.place.tolist()):
            worker = self.choices.places[index][0]
            starting[end[number], worker].append((self.taken[number], 1.0))
            starting[begin[number], worker].append((self.taken[number], -1.0))
        reached: dict[tuple[int, int], Variable] = {}
        for worker in range(model.workers - 1):
            for number in range(count):
                terms = starting[number, worker]
                if worker == 0:
                    terms = [*terms, *([(model.program.one, 1.0)] if number == 0 else [])]
                elif (number, worker - 1) in reached:
                    terms = [*terms, (reached[number, worker - 1], 1.0)]
                if terms:
                    reached[number, worker] = variable = model.program.number(f"S_{number}_{worker}", 0, 1)
                    model.program.equal([*terms, (variable, -1.0)])
            for block in range(len(model.layers)):
                having = [
                    (reached[number, worker], -1.0)
                    for number in np.flatnonzero(self.sets.has[:, block]).tolist()
                    if (number, worker) in reached
                ]
                model.program.equal([*model.started(block, worker), *having])
        return reached

    # -- constraint (28) --

    def _share(self) -> None:
        """Add (28) for work, for parameters, and for the bytes over every cut."""
        model, blocks = self.model, self.model.layers.blocks
        shares = [(model.work, [block.work_s / model.unit_s / model.fastest for block in blocks])]
        if not model.shared.weights:
            shares.append((model.parameters, [block.parameters / model.total for block in blocks]))
        for share, amounts in shares:
            sums = self.sets.sums(THOUSANDTHS * amount if amount > NEGLIGIBLE else 0.0 for amount in amounts)
            self._equal_sums(share, sums[self.choices.end] - sums[self.choices.begin])
        for sizes in model.layers.directions():
            largest, crossing = max(sizes, default=0.0), self.sets.crossing(sizes)
            for worker in range(model.workers - 1 if largest else 0):
                bytes_over = [(model.crossing[k, worker], size / largest) for k, size in enumerate(sizes) if size]
                states = [
                    (variable, float(crossing[number] / largest))
                    for (number, cut), variable in self.reached.items()
                    if cut == worker and crossing[number]
                ]
                model.program.equal([*bytes_over, *negate_terms(states)])

    def _equal_sums(self, share: dict[Place, Variable], amounts: Floats) -> None:
        for place, numbers in self.at_place.items():
            self.model.program.equal([*self._sum_of(numbers, amounts), (share[place], -1.0)])

    def _load(self, cards: CardConstraints) -> None:
        """Add (28) for the bytes before and behind every place, in the unit of the cards."""
        for way, sizes in cards.ways.items():
            crossing = self.sets.crossing(sizes) / cards.unit
            behind, before = crossing[self.choices.end], crossing[self.choices.begin]
            flows: dict[Place, list[Term]] = defaultdict(list)
            for placement, variable in cards.behind[way].items():
                flows[placement.start, placement.replicas].append((variable, -1.0))
            for place, numbers in self.at_place.items():
                self.model.program.equal([*self._sum_of(numbers, behind), *flows[place]])
            for place, variable in cards.before[way].items():
                numbers = self.at_place[place]
                self.model.program.equal([*self._sum_of(numbers, before), (variable, -1.0)])
