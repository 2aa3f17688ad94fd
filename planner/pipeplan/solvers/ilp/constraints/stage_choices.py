"""Constraints (26) to (28) of the integer program: stages as whole sets of layers. `integer_program` has the notation.

The other constraints know a stage as a sum over layers, so that the relaxation may put a part of every layer anywhere.
Here a stage is a choice (`choices` has which). Choices are few where U is close to the optimum.

    v[I,J,π] ≥ 0     a stage with the layers of J that are not in I is on π
    i[I,p] ≥ 0       worker p is idle, and the layers of I are on the workers before it
    S[I,p] ≥ 0       the layers of I are those whose stage starts at p or before

(26) As many v and i enter a pair of a set and a worker as leave it; one begins with no layers at the first worker.
(27) S[J,p] = S[J,p-1] + the v at p that end at J - those that begin at J. Z[l,p] is the sum of S over the sets with l.
(28) The shares of work and parameters, the bytes over every cut, and those before and behind every place are sums over
     v or S.

The variables y, o and Z decide all of these, so that none of them has to be an integer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from pipeplan.solvers.ilp.constraints.cards import CardConstraints
from pipeplan.solvers.ilp.constraints.placement_model import PlacementModel
from pipeplan.solvers.ilp.enumeration.choices import Choices
from pipeplan.solvers.ilp.enumeration.closed_sets import Floats
from pipeplan.solvers.ilp.facts.placement_facts import Place
from pipeplan.solvers.ilp.milp.linear_program import NEGLIGIBLE, THOUSANDTHS, Term, Variable, negate_terms

MOST_CHOICES = 60_000
"""The most choices for which constraints are added: a program with more takes longer to solve than they save."""


class StageChoices:
    """Constraints (26) to (28) of a model."""

    def __init__(self, model: PlacementModel, cards: CardConstraints | None, choices: Choices) -> None:
        self.model, self.sets, self.choices = model, choices.sets, choices
        self.at_place: dict[Place, list[int]] = defaultdict(list)
        for number, place in enumerate(choices.stages.place.tolist()):
            self.at_place[choices.places[place]].append(number)
        self.taken = [model.program.number(f"v_{number}", 0, 1) for number in range(len(choices))]
        for place in [place for place in self.at_place if place not in model.at]:
            # No plan needs idle workers where they would have to be behind it.
            model.program.equal([(self.taken[number], 1.0) for number in self.at_place.pop(place)])
        for place in model.at:
            numbers = self.at_place[place]
            model.program.equal([*((self.taken[number], 1.0) for number in numbers), *model.selected(place, -1.0)])
        self._chain()
        self.reached = self._reach()
        self._share()
        if cards is not None and cards.cards:
            self._load(cards)

    def _sum_of(self, numbers: Iterable[int], amounts: Floats) -> list[Term]:
        """The terms of a sum over choices, of amounts that are given for all of them."""
        return [(self.taken[number], float(amounts[number])) for number in numbers if amounts[number]]

    # -- constraint (26) --

    def _chain(self) -> None:
        """Add (26), and as many idle workers as the placements leave."""
        model, count = self.model, len(self.sets)
        balance: dict[tuple[int, int], list[Term]] = defaultdict(list)
        begin, end = self.choices.stages.begin.tolist(), self.choices.stages.end.tolist()
        for number, index in enumerate(self.choices.stages.place.tolist()):
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
        model, count = self.model, len(self.sets)
        starting: dict[tuple[int, int], list[Term]] = defaultdict(list)
        begin, end = self.choices.stages.begin.tolist(), self.choices.stages.end.tolist()
        for number, index in enumerate(self.choices.stages.place.tolist()):
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
            counted = [THOUSANDTHS * amount for amount in amounts]
            sums = self.sets.sums(amount if amount > NEGLIGIBLE else 0.0 for amount in counted)
            self._equal_sums(share, sums[self.choices.stages.end] - sums[self.choices.stages.begin])
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
            behind, before = crossing[self.choices.stages.end], crossing[self.choices.stages.begin]
            flows: dict[Place, list[Term]] = defaultdict(list)
            for placement, variable in cards.behind[way].items():
                flows[placement.start, placement.replicas].append((variable, -1.0))
            for place, numbers in self.at_place.items():
                self.model.program.equal([*self._sum_of(numbers, behind), *flows[place]])
            for place, variable in cards.before[way].items():
                numbers = self.at_place[place]
                self.model.program.equal([*self._sum_of(numbers, before), (variable, -1.0)])
