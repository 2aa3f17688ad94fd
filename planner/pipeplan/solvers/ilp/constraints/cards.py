"""Constraints (20) to (23) of the integer program: the load of every network card. `integer_program` has the notation.

`pipeplan.cost.contention` has the loads. The bytes behind a stage are linear in b, but the share of them that crosses a
card depends on the placements at both ends. A product of bytes and a placement in use is a flow: a number for every
placement that is 0 unless the placement is in use.

A boundary inside a component keeps a share of its bytes from the component's card. Where one of its two stages is
inside as a whole, the other's share is kept. Where both reach beyond the component, the share depends on the pair. It
is at most the lesser of both shares, which is the first bound. If a solution costs more than that, the boundary is
`refined`, and the program is solved again with a flow for every pair.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from pipeplan.cluster_data.cluster import Cluster
from pipeplan.cost import formulas
from pipeplan.solvers.ilp.constraints.least_crossing import WORTHWHILE, least_crossing
from pipeplan.solvers.ilp.constraints.placement_model import PlacementModel
from pipeplan.solvers.ilp.facts.placement_facts import LoadFactors, Place
from pipeplan.solvers.ilp.facts.placements import Placement
from pipeplan.solvers.ilp.milp.linear_program import NEGLIGIBLE, THOUSANDTHS, Term, Variable, negate_terms, scale_terms

FORWARD, BACKWARD = 0, 1
"""Directions of messages: activations and their gradients."""

Boundary = tuple[int, int]
"""A cut between two workers of one component, and the level of this component."""


class CardConstraints:
    """Constraints (20) to (23) of a model: every card's load is at most `charged`."""

    def __init__(
        self, model: PlacementModel, charged: Variable, factors: LoadFactors, refined: frozenset[Boundary]
    ) -> None:
        self.model = model
        self.charged = charged
        self.factors = factors
        cluster = model.problem.cluster
        self.cards = [
            (level, first, stop, *model.links.card(level, first))
            for level in range(len(cluster.levels))
            for first, stop in zip(list(cluster.starts(level))[:-1], list(cluster.starts(level))[1:], strict=True)
        ]
        self.cards = [card for card in self.cards if math.isfinite(card[3]) and self._may_matter(*card)]
        if not self.cards:
            return
        self.unit = min(card[3] for card in self.cards) * model.unit_s / THOUSANDTHS
        """The unit of flows, in bytes: what the slowest card carries within a thousandth of U."""
        tensors = model.layers.tensors
        sent, returned = [tensor.sent for tensor in tensors], [tensor.returned for tensor in tensors]
        self.alike = sent == returned
        """Whether every cut is crossed by the same bytes in both directions."""
        self.ways = {FORWARD: sent} if self.alike or not any(returned) else {FORWARD: sent, BACKWARD: returned}
        self.behind: dict[int, dict[Placement, Variable]] = {}
        self.before: dict[int, dict[Place, Variable]] = {}
        for way, sizes in self.ways.items():
            self._flow(way, sizes)
        for level, first, stop, messages, rings in self.cards:
            kept = self._kept(level, first, stop, refined)
            for outgoing in (True,) if self.alike else (True, False):
                self._charge((first, stop), (messages, rings), kept, outgoing=outgoing)

    def _may_matter(self, level: int, first: int, stop: int, messages: float, rings: float) -> bool:
        """Whether a card could be the busiest resource, even if every tensor crossed every boundary of its component.

        Coefficients that can never matter are too small for the solvers.
        """
        model, factors, copies = self.model, self.factors, self.model.problem.copies
        crossing = sum(tensor.sent + tensor.returned for tensor in model.layers.tensors) * (stop - first + 1)
        busy = crossing * factors.messages / messages
        if model.problem.training:
            busy += 2 * model.total * (factors.rings + (factors.copies if copies > 1 else 0.0)) / rings
        return busy >= (self.charged.lowBound or 0.0) * model.unit_s

    # -- constraint (20) --

    def _flow(self, way: int, sizes: list[float]) -> None:
        """Add (20): the bytes behind and before every placement in use, in one direction."""
        model, program = self.model, self.model.program
        total = sum(sizes) / self.unit
        self.behind[way] = behind = {}
        self.before[way] = before = {}
        for placement, used in model.used.items():
            if not model.placements.final(placement):
                name = f"F{way}_{placement.start}_{placement.replicas}_{placement.end}"
                behind[placement] = program.number(name)
                program.at_most([(behind[placement], 1.0), (used, -min(total, self._most(placement)))])
        for place in model.at:
            if place[0] > 0:
                before[place] = program.number(f"P{way}_{place[0]}_{place[1]}")
                program.at_most([(before[place], 1.0), *model.selected(place, -total)])
        if model.choices is not None or len(model.layers) * model.workers in WORTHWHILE:
            if model.choices is not None:
                fewest = model.choices.least_crossing(sizes, model.workers)
            else:
                fewest = least_crossing(model, sizes)
            least = [size / self.unit for size in fewest]
            for placement, variable in behind.items():
                if math.isinf(least[placement.end]):
                    program.at_most(model.in_use([placement]))
                elif least[placement.end] > NEGLIGIBLE:
                    program.at_least([(variable, 1.0), (model.used[placement], -least[placement.end])])
        for cut in range(model.workers - 1):
            covering = [placement for placement in model.covering(cut) if placement in behind]
            crossing = [(model.crossing[k, cut], size / self.unit) for k, size in enumerate(sizes) if size]
            program.equal([*((behind[placement], 1.0) for placement in covering), *negate_terms(crossing)])
            ending = [(behind[placement], 1.0) for placement in covering if placement.end == cut]
            following = [(before[place], -1.0) for place in model.places(cut + 1)]
            program.equal([*ending, *following])

    def _most(self, placement: Placement) -> float:
        """The most bytes that may be behind a placement in one direction, in units: what its boundary's link carries
        within U, and the cards of the components that the whole boundary leaves."""
        model = self.model
        cluster, links = model.problem.cluster, model.links
        level = cluster.level_between(placement.start, placement.end + 1)
        parallel = placement.replicas if model.parallel else 1
        most = model.way(placement.workers, level)[0] * parallel
        for lower in range(level):
            if cluster.component(lower, placement.start) == cluster.component(lower, placement.last):
                most = min(most, links.card(lower, placement.start)[0] / self.factors.messages)
        return most * model.unit_s / self.unit * (1 + 1e-9)

    # -- constraints (21) and (22) --

    def _kept(self, level: int, first: int, stop: int, refined: frozenset[Boundary]) -> list[Term]:
        """Add (21) and (22). Returns the terms of the bytes, both ways, that no boundary carries out of a component."""
        terms: list[Term] = []
        for cut in range(first, stop - 1):
            kept = self.model.program.number(f"k_{level}_{cut}")
            ending = [placement for placement in self.behind[FORWARD] if placement.end == cut]
            senders = {placement: _inside(placement, first, stop) for placement in ending}
            receivers = {place: _inside_place(place, first, stop) for place in self.model.places(cut + 1)}
            by_senders = [
                term for placement, share in senders.items() for term in self._both(self.behind, placement, share)
            ]
            by_receivers = [
                term for place, share in receivers.items() for term in self._both(self.before, place, share)
            ]
            self.model.program.at_most([(kept, 1.0), *negate_terms(by_senders)])
            self.model.program.at_most([(kept, 1.0), *negate_terms(by_receivers)])
            if (cut, level) in refined:
                self._refine(kept, senders, receivers, f"{level}_{cut}")
            terms.append((kept, 1.0))
        return terms

    def _refine(
        self, kept: Variable, senders: dict[Placement, float], receivers: dict[Place, float], name: str
    ) -> None:
        """Add (22): where both placements reach beyond the component, the share of the pair."""
        program = self.model.program
        open_senders = [placement for placement, share in senders.items() if 0 < share < 1]
        open_receivers = [place for place, share in receivers.items() if share < 1]
        pairs = {
            (one, other): program.number(f"x_{name}_{one.start}_{one.end}_{other[1]}")
            for one in open_senders
            for other in open_receivers
        }
        limit: list[Term] = [(kept, 1.0)]
        other_senders: list[Term] = []
        for placement, share in senders.items():
            whole = self._both(self.behind, placement, 1.0)
            if placement not in open_senders:
                other_senders += whole
                limit += scale_terms(whole, -share)
        other_receivers = [
            term for place in receivers if place not in open_receivers for term in self._both(self.before, place, 1.0)
        ]
        unpaired: list[Term] = []
        for placement in open_senders:
            rest = self._both(self.behind, placement, 1.0)
            for place in open_receivers:
                pair = pairs[placement, place]
                share = kept_share(placement, place, senders[placement], receivers[place])
                limit.append((pair, -share))
                rest.append((pair, -1.0))
            program.at_least(rest)
            unpaired += rest
            limit += scale_terms(rest, -senders[placement])
        program.at_most([*unpaired, *negate_terms(other_receivers)])
        unpaired = []
        for place in open_receivers:
            rest = self._both(self.before, place, 1.0)
            rest += [(pairs[placement, place], -1.0) for placement in open_senders]
            program.at_least(rest)
            unpaired += rest
        program.at_most([*unpaired, *negate_terms(other_senders)])
        program.at_most(limit)

    def _both(self, flows: Mapping[int, Mapping[Any, Variable]], end: Placement | Place, factor: float) -> list[Term]:
        """The terms of the bytes behind or before a placement in both directions, times a factor."""
        if not factor:
            return []
        twice = 2.0 if self.alike else 1.0
        return [(flow[end], twice * factor) for flow in flows.values()]

    # -- constraint (23) --

    def _charge(self, card: tuple[int, int], rates: tuple[float, float], kept: list[Term], *, outgoing: bool) -> None:
        """Add (23) for one direction of the card of the workers from `card[0]` to before `card[1]`."""
        model = self.model
        messages: list[Term] = negate_terms(kept)
        rings: list[Term] = []
        ahead, back = (FORWARD, BACKWARD) if outgoing else (BACKWARD, FORWARD)
        if self.alike:
            ahead = back = FORWARD
        for placement in model.used:
            share = _inside(placement, *card)
            if share and ahead in self.behind and placement in self.behind[ahead]:
                messages.append((self.behind[ahead][placement], share))
        for place in model.at:
            share = _inside_place(place, *card)
            if not share:
                continue
            if back in self.before and place in self.before[back]:
                messages.append((self.before[back][place], share))
            if model.problem.training:
                rings += self._rings(place, share)
        of_messages = self.unit * self.factors.messages / (rates[0] * model.unit_s)
        of_rings = model.total / (rates[1] * model.unit_s) / THOUSANDTHS
        terms = [*scale_terms(messages, of_messages), *scale_terms(rings, of_rings)]
        model.program.at_most([*terms, (self.charged, -1.0)])

    def _rings(self, place: Place, share: float) -> list[Term]:
        """The terms of the bytes that the all-reduces of a stage send over a card, as a share of its parameters."""
        factor = 0.0
        if share < 1:
            # The replicas inside a component follow each other, so the ring leaves it once.
            factor = float(formulas.ring_allreduce_time(place[1], 1.0, 1.0, 0.0)) * self.factors.ring(place[1])
        copies = self.model.problem.copies
        if copies > 1:
            factor += share * float(formulas.ring_allreduce_time(copies, 1.0, 1.0, 0.0)) * self.factors.copies
        return [(self.model.parameters[place], factor)] if factor else []


def _inside(placement: Placement, first: int, stop: int) -> float:
    """The share of a placement's busy workers that are among those from `first` to before `stop`."""
    return _inside_place((placement.start, placement.replicas), first, stop)


def _inside_place(place: Place, first: int, stop: int) -> float:
    return max(0, min(sum(place), stop) - max(place[0], first)) / place[1]


def kept_share(placement: Placement, place: Place, sending: float, receiving: float) -> float:
    """The share of a boundary's bytes between workers of one component.

    The component holds the last `sending` of the placement and the first `receiving` of the place, as shares of their
    workers. Minibatches go between workers whose positions are equal modulo the common divisor (`cost.contention`).
    """
    common = math.gcd(placement.replicas, place[1])
    count, first = round(sending * placement.replicas), round(receiving * place[1])
    senders, receivers = [0] * common, [0] * common
    for position in range(placement.replicas - count, placement.replicas):
        senders[position % common] += 1
    for position in range(first):
        receivers[position % common] += 1
    meeting = sum(one * other for one, other in zip(senders, receivers, strict=True))
    return meeting * common / (placement.replicas * place[1])


def refinable(placements: Sequence[Placement], cluster: Cluster) -> frozenset[Boundary]:
    """The boundaries of a solution whose two placements both reach beyond a component that holds the boundary."""
    found = set()
    for one, other in itertools.pairwise(placements):
        for level in range(1, len(cluster.levels)):
            component = cluster.component(level, one.end)
            first, stop = cluster.starts(level)[component], cluster.starts(level)[component + 1]
            if one.start < first and one.end + 1 < stop <= other.last:
                found.add((one.end, level))
    return frozenset(found)
