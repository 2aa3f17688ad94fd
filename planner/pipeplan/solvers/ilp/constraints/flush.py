"""The objective of the integer program under the flush schedules, gpipe and 1f1b-flush.

`integer_program` has the notation. These constraints replace (4) and (7), with the terms of docs/cost-model.md, "Flush
schedules". T is the time from one update to the next in units of U, X the transfers of the first minibatch, A the
steady part and E the exposed all-reduce.

(12) T is the work of all stages + X + A + E + the all-reduce among copies + what (20) charges. The work is the sum of
     the shares c and of the work that is done twice. In gpipe A is the sum of two variables, one for forward and one
     for backward passes.
(13) A ≥ (n(r) - 1) · c[π], and A ≥ (n(k) - 1) · e[p,n] for a boundary with k links.
(14) X is the sum over the cuts of x[p], where x[p] is at least e[p,n] of both directions plus two latencies if a
     placement ends at p.
(15) E is at least the all-reduce of π less its backward pass and the work of all layers whose stage starts before π.
"""

from __future__ import annotations

from functools import cached_property

from pipeplan.cost import formulas
from pipeplan.plan.schedules import TRAITS
from pipeplan.solvers.ilp.constraints.boundary_model import BoundaryModel
from pipeplan.solvers.ilp.facts.placement_facts import Place
from pipeplan.solvers.ilp.milp.linear_program import THOUSANDTHS, Term, Variable, negate_terms, scale_terms


class FlushObjective:
    """Constraints (13) to (15) of a model, and the variables of its objective."""

    def __init__(self, model: BoundaryModel, minibatches: int) -> None:
        self.model = model
        self.minibatches = minibatches
        self.phases = TRAITS[model.problem.options.schedule].phases
        program = model.program
        self.room = model.room_s / model.unit_s
        """The part of U that the first minibatch's way through all stages leaves."""
        self.steady = [program.number(f"A_{phase}", 0, self.room) for phase in range(self.phases)]
        self.exposed = program.number("E", 0, self.room)
        forward = [block.forward_s / model.unit_s / model.fastest for block in model.layers.blocks]
        self.forward = model.share("f", forward)
        self.times = self._carry()

    @cached_property
    def _work(self) -> list[float]:
        """The work of every block on the fastest device, in units of U."""
        model = self.model
        fastest = max(device.speed for device in model.problem.cluster.devices)
        return [block.work_s / fastest / model.unit_s for block in model.layers.blocks]

    @property
    def cycle(self) -> list[Term]:
        """The terms of the pace within a batch; all are 0 if nothing follows the first minibatch."""
        return scale_terms([(part, 1.0) for part in self.steady], 1.0 / max(1, self.minibatches - 1))

    def charge(self, again: dict[Place, Variable]) -> None:
        """Add (12), (15), and (13) for stages, with the forward work that each place does `again`."""
        model, program = self.model, self.model.program
        work: list[Term] = []
        for place in model.at:
            factor = model.slowness(place) / THOUSANDTHS
            rounds = float(formulas.rounds(self.minibatches, place[1])) - 1.0
            whole = [(part, factor) for part in model.work_parts(place, again)]
            work += whole
            # This is implied, but not for fractions of a stage.
            program.at_most([*scale_terms(whole, rounds), *model.selected(place, -self.room)])
            both = self._passes(place, factor, whole)
            for part, passes in zip(self.steady, both if self.phases == 2 else [whole], strict=True):
                program.at_most([*scale_terms(passes, rounds), (part, -1.0)])
            if place[1] > 1:
                self._expose(place, both[1])
        among = model.problem.copies_allreduce_s / model.unit_s
        parts = [*work, *self._transfers, *((part, 1.0) for part in self.steady), (self.exposed, 1.0)]
        parts += model.shared.exchange(range(model.workers), model.unit_s)
        program.at_most([*parts, (program.one, among), (model.pace, -1.0)])

    def _passes(self, place: Place, factor: float, whole: list[Term]) -> list[list[Term]]:
        """The forward and the backward time of one minibatch at a place."""
        forward = [(self.forward[place], factor)]
        if place in self.model.own:
            forward.append((self.model.own[place], factor / 2))
        return [forward, [*whole, *negate_terms(forward)]]

    def _carry(self) -> dict[tuple[int, int, int], list[Variable]]:
        """Add (13) and (14) for boundaries. Returns e, for one minibatch, by (cut, hop, links) and direction."""
        model, program = self.model, self.model.program
        carried: dict[tuple[int, int, int], list[Variable]] = {}
        self._transfers: list[Term] = []
        tensors = model.layers.tensors
        directions = [[tensor.sent for tensor in tensors], [tensor.returned for tensor in tensors]]
        for cut in range(model.workers - 1):
            mine = [key for key in model.level if key[0] == cut]
            for key in mine:
                carried[key] = [program.number(f"e_{cut}_{key[1]}_{key[2]}_{way}", 0, 1) for way in range(2)]
                # A includes all minibatches but the first, which X includes.
                rounds = float(formulas.rounds(self.minibatches, key[2]))
                both = [(time, rounds if self.phases == 2 else 1.0) for time in carried[key]]
                program.at_most([*both, (model.level[key], -self.room)])
                for time in carried[key]:
                    program.at_most([(time, rounds), (model.level[key], -self.room)])
            rates = {key: model.hops[key[1]].bandwidth for key in mine}
            slowest = min(rates.values())
            for way, sizes in enumerate(directions):
                crossing = [
                    (model.crossing[k, cut], size / (slowest * model.unit_s)) for k, size in enumerate(sizes) if size
                ]
                program.equal([*crossing, *((carried[key][way], -rate / slowest) for key, rate in rates.items())])
                follow = {key: float(formulas.rounds(self.minibatches, key[2])) - 1.0 for key in mine}
                part = self.steady[way if self.phases == 2 else 0]
                program.at_most([*((carried[key][way], follow[key]) for key in mine), (part, -1.0)])
            self._transfers.append((self._round_trip(cut, {key: carried[key] for key in mine}), 1.0))
        return carried

    def _round_trip(self, cut: int, carried: dict[tuple[int, int, int], list[Variable]]) -> Variable:
        """Add x[p] of (14): the transfers over a cut, both ways, where a stage ends at it."""
        model, program = self.model, self.model.program
        ending = [placement for placement in model.placements.all if placement.end == cut]
        latency = {key: 2 * model.hops[key[1]].latency_s / model.unit_s for key in carried}
        terms: list[Term] = []
        for key, ways in carried.items():
            terms += [(ways[0], 1.0), (ways[1], 1.0), (model.level[key], latency[key])]
        round_trip, most = program.number(f"X_{cut}"), 2.0 + max(latency.values())
        program.at_most([*terms, (round_trip, -1.0), *model.in_use(ending, most)], most)
        return round_trip

    def _expose(self, place: Place, backward: list[Term]) -> None:
        """Add (15) for a place. Work before it is charged at the fastest device's speed."""
        model = self.model
        before = [
            term
            for block, one in enumerate(self._work)
            for term in scale_terms(model.started(block, place[0] - 1), one)
        ]
        hidden = negate_terms([*backward, *before])
        model.program.at_most([*model.allreduce_terms(place), *hidden, (self.exposed, -1.0)])
