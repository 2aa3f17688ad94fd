"""The objective of the integer program under the flush schedules.

`integer_program` has the notation. These constraints replace (4) and (7), with the terms of docs/cost-model.md, "Flush
schedules". T is the time from one update to the next in units of U, V[p] the longest path from worker p on: from the
first pass of a stage that starts there, or of the next one. a[π] is the time by which a stage on π delays the stages
behind it, c[π] its passes without the optimiser's step.

(12) V[p] ≥ V[p+1] + the sum of a[π] over the places π that start at p + x[p], and V[p] ≥ n(r) · c[π]. Under zb-h1 a[π]
     is the forward pass, x[p] counts half, and half of a backward pass is taken off the work.
(13) Where no cards are charged, V[p] ≥ a[π] + n(k) · e[p,n] for the places π that start at p, if a stage ends at p.
(14) x[p] is at least e[p,n] of both directions plus two latencies if a placement ends at p.
(15) T ≥ w[π] + V[p] for a place that starts at p, where w[π] is the time of its update: what its last backward pass
     does not hide of its all-reduce, twice what (20) charges, and the optimiser's step. Under zb-h1 only if it is the
     first stage; for others T ≥ w[π] + n(r) · c[π].
"""

from __future__ import annotations

from pipeplan.cost import formulas
from pipeplan.plan.schedules import TRAITS
from pipeplan.solvers.ilp.constraints.boundary_model import BoundaryModel
from pipeplan.solvers.ilp.facts.placement_facts import Place
from pipeplan.solvers.ilp.milp.linear_program import THOUSANDTHS, Term, Variable, negate_terms, scale_terms

Key = tuple[int, int, int]
"""A cut, its hop and its links."""


class FlushObjective:
    """Constraints (12) to (15) of a model, and the variables of its objective."""

    def __init__(self, model: BoundaryModel, minibatches: int) -> None:
        self.model = model
        self.minibatches = minibatches
        self.splits = TRAITS[model.problem.options.schedule].splits
        self.path = [model.program.number(f"V_{worker}", 0, 1) for worker in range(model.workers)]
        blocks, unit = model.layers.blocks, model.unit_s * model.fastest
        self.forward = model.share("f", [block.forward_s / unit for block in blocks])
        self.step = model.share("u", [block.update_s / unit for block in blocks]) if self._makes_steps else {}
        self.transfers: list[Variable] = []
        self.times = self._carry()

    @property
    def _makes_steps(self) -> bool:
        return any(block.update_s for block in self.model.layers.blocks)

    def charge(self, again: dict[Place, Variable], *, settled: bool) -> None:
        """Add (12), (13) and (15), with the forward work that each place does `again`.

        Unless that is `settled`, stages may come to recompute, and more may hide their all-reduces.
        """
        model, program = self.model, self.model.program
        ahead: list[list[Term]] = [[] for _ in range(model.workers)]
        for place in model.at:
            forward, backward = self._passes(place, again)
            own = scale_terms([*forward, *backward], float(formulas.rounds(self.minibatches, place[1])))
            mine = forward if self.splits else [*forward, *backward]
            ahead[place[0]] += mine
            program.at_most([*own, *model.selected(place, -1.0)])
            tail = scale_terms(backward, -0.5) if self.splits else []
            program.at_most([*own, *tail, (self.path[place[0]], -1.0)])
            self._wait(place, backward if settled else [*backward, *forward], own, mine)
        share = 0.5 if self.splits else 1.0
        for worker, terms in enumerate(ahead):
            behind = [] if worker + 1 == model.workers else [(self.path[worker + 1], 1.0)]
            behind += [] if worker + 1 == model.workers else [(self.transfers[worker], share)]
            program.at_most([*terms, *behind, (self.path[worker], -1.0)])
            for messages in self._messages(worker):
                program.at_most([*terms, *messages, (self.path[worker], -1.0)])
        program.at_most([(self.path[0], 1.0), (model.pace, -1.0)])

    def _passes(self, place: Place, again: dict[Place, Variable]) -> tuple[list[Term], list[Term]]:
        """The forward and the backward time of one minibatch at a place, without the optimiser's step."""
        model, factor = self.model, self.model.slowness(place) / THOUSANDTHS
        forward = [(self.forward[place], factor)]
        if place in model.own:
            forward.append((model.own[place], factor / 2))
        whole = [(part, factor) for part in model.work_parts(place, again)]
        if self.step:
            whole.append((self.step[place], -factor))
        return forward, [*whole, *negate_terms(forward)]

    def _wait(self, place: Place, backward: list[Term], own: list[Term], ahead: list[Term]) -> None:
        """Add (15) for a place, once with the all-reduce as long as its share that is never hidden."""
        model, program, problem = self.model, self.model.program, self.model.problem
        hidden, group = problem.hidden_share, model.allreduce_terms(place)
        rest = scale_terms(model.shared.exchange([place[0]], model.unit_s), 2.0)
        if self.step:
            factor = model.slowness(place) / THOUSANDTHS / problem.options.update_share
            rest.append((self.step[place], factor))
        waits = [[*scale_terms(group, 1.0 - hidden), *rest], [*group, *scale_terms(backward, -hidden), *rest]]
        for wait in waits:
            if not self.splits:
                program.at_most([*wait, (self.path[place[0]], 1.0), (model.pace, -1.0)])
                continue
            program.at_most([*wait, *own, (model.pace, -1.0)])
            if place[0] in model.opening:
                first = [*model.selected(place, 1.0), (model.opening[place[0]], 1.0)]
                program.at_most([*wait, (self.path[place[0]], 1.0), (model.pace, -1.0), *first], 2.0)
            for placement in model.placements.all if not problem.options.contention else ():
                if (placement.start, placement.replicas) == place and placement.end + 1 < model.workers:
                    for messages in self._messages(placement.end):
                        used = model.in_use([placement], 2.0)
                        program.at_most([*wait, *ahead, *messages, (model.pace, -1.0), *used], 2.0)

    def _messages(self, cut: int) -> list[list[Term]]:
        """The terms of n(k) · e[p,n] of either direction; none where cards are charged, or behind the last worker."""
        if self.model.problem.options.contention or cut + 1 == self.model.workers:
            return []
        mine = {key: ways for key, ways in self.times.items() if key[0] == cut}
        rounds = {key: float(formulas.rounds(self.minibatches, key[2])) for key in mine}
        return [[(ways[way], rounds[key]) for key, ways in mine.items()] for way in range(2)]

    def _carry(self) -> dict[Key, list[Variable]]:
        """Add (14). Returns e, for one minibatch, by (cut, hop, links) and direction."""
        model, program = self.model, self.model.program
        carried: dict[Key, list[Variable]] = {}
        tensors = model.layers.tensors
        directions = [[tensor.sent for tensor in tensors], [tensor.returned for tensor in tensors]]
        for cut in range(model.workers - 1):
            mine = [key for key in model.level if key[0] == cut]
            for key in mine:
                carried[key] = [program.number(f"e_{cut}_{key[1]}_{key[2]}_{way}", 0, 2) for way in range(2)]
                # The transfers of one minibatch are a part of T, or a half of them under zb-h1.
                both = [(time, 0.5 if self.splits else 1.0) for time in carried[key]]
                program.at_most([*both, (model.level[key], -1.0)])
            rates = {key: model.hops[key[1]].bandwidth for key in mine}
            slowest = min(rates.values())
            for way, sizes in enumerate(directions):
                crossing = [
                    (model.crossing[k, cut], size / (slowest * model.unit_s)) for k, size in enumerate(sizes) if size
                ]
                program.equal([*crossing, *((carried[key][way], -rate / slowest) for key, rate in rates.items())])
            self.transfers.append(self._round_trip(cut, {key: carried[key] for key in mine}))
        return carried

    def _round_trip(self, cut: int, carried: dict[Key, list[Variable]]) -> Variable:
        """Add x[p] of (14): the transfers over a cut, both ways, where a stage ends at it."""
        model, program = self.model, self.model.program
        ending = [placement for placement in model.placements.all if placement.end == cut]
        latency = {key: 2 * model.hops[key[1]].latency_s / model.unit_s for key in carried}
        terms: list[Term] = []
        for key, ways in carried.items():
            terms += [(ways[0], 1.0), (ways[1], 1.0), (model.level[key], latency[key])]
        round_trip, most = program.number(f"X_{cut}"), 4.0 + max(latency.values())
        program.at_most([*terms, (round_trip, -1.0), *model.in_use(ending, most)], most)
        return round_trip
