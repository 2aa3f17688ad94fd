"""Constraints (8) to (10) of the integer program: the minibatches in flight. `integer_program` has the notation.

The product of T and the choice of a depth is linear, because the choice is 0 or 1 and T has bounds: t[ρ,d] equals T
where a stage of depth d is on ρ, and is 0 elsewhere.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from pipeplan.cost import formulas
from pipeplan.plan.schedules import DOUBLE_BUFFERED, GPIPE
from pipeplan.solvers.ilp.constraints.boundary_model import BoundaryModel
from pipeplan.solvers.ilp.enumeration.in_flight import depth_ranges
from pipeplan.solvers.ilp.enumeration.stage_fit import StageFit
from pipeplan.solvers.ilp.facts.placement_facts import Place
from pipeplan.solvers.ilp.facts.placements import Placement
from pipeplan.solvers.ilp.milp.linear_program import (
    THOUSANDTHS,
    Term,
    Variable,
    negate_terms,
    scale_terms,
    solution_value,
)

MAXIMUM_CHOICES = 20_000
"""The most choices of a depth for a placement. A program with more of them takes too long to build."""


class TooManyChoicesError(Exception):
    """A program with depths would have more than `MAXIMUM_CHOICES` choices."""


@dataclass(frozen=True)
class DepthChoice:
    """A stage on a placement with a number of minibatches in flight, with or without recomputation."""

    placement: Placement
    depth: int
    recompute: bool = False


class DepthConstraints:
    """The depths that every stage may have, given the bounds on the pace, and the constraints on them."""

    def __init__(self, model: BoundaryModel, *, recompute: bool) -> None:
        self.model = model
        self.flushes = model.problem.options.flushes
        self.floor = 0.0 if self.flushes else model.floor
        """Lower bound on the pace in units of U. With a flush, depths do not depend on it."""
        self.copies = model.problem.copies
        self.buffered = model.problem.options.schedule == DOUBLE_BUFFERED
        self.minibatches = model.minibatches
        self.depths = self._ranges()
        if (count := sum(map(len, self.depths.values())) * (2 if recompute else 1)) > MAXIMUM_CHOICES:
            raise TooManyChoicesError(f"{count} choices of depth, placement and recomputation")
        self.chosen: dict[DepthChoice, Variable] = {}
        self.timed: dict[DepthChoice, Variable] = {}
        self.by_placement: dict[Placement, list[DepthChoice]] = defaultdict(list)
        for placement, depths in self.depths.items():
            for depth in depths:
                for recomputes in (False, True) if recompute and depth > 1 else (False,):
                    self._choice(DepthChoice(placement, depth, recomputes))
        self._choose()
        if model.workers > 1 and model.problem.options.schedule != GPIPE:
            self._sustain()

    # -- the depths that a stage can need --

    def _ranges(self) -> dict[Placement, range]:
        """For every placement, the depths that the stages behind it can ask for, from the last worker to the first."""
        model, total = self.model, self.model.workers
        least = [math.inf] * total + [0.0]
        most = [0.0] * (total + 1)
        ranges: dict[Placement, range] = {}
        chosen = self._chosen_ranges()
        if model.problem.options.schedule == GPIPE:
            return {
                placement: range(self._all(placement), self._all(placement) + 1) for placement in model.placements.all
            }
        for placement in sorted(model.placements.all, key=lambda placement: -placement.start):
            if model.placements.final(placement):
                low = high = 1
            elif math.isinf(least[placement.end + 1]):
                # None of the placements that may follow in a uniform grid is shallow enough.
                low, high = 1, 0
            else:
                low, high = self._needed(placement, least[placement.end + 1], most[placement.end + 1])
            if self.buffered and self.minibatches is not None:
                high = min(high, self.minibatches // placement.replicas)
            if place_range := chosen.get((placement.start, placement.replicas)):
                low, high = max(low, math.ceil(place_range[0])), math.floor(min(high, place_range[1]))
            ranges[placement] = range(low, high + 1)
            if low <= high:
                wait = self._longest_wait(placement)
                least[placement.start] = min(least[placement.start], low * placement.replicas)
                most[placement.start] = max(most[placement.start], high * placement.replicas + wait)
        return ranges

    def _chosen_ranges(self) -> dict[Place, tuple[float, float]]:
        """The least and the largest depth on every place, where the stages are known that plans may have."""
        model, choices = self.model, self.model.choices
        if choices is None or not model.problem.options.memory:
            return {}
        fit = StageFit(model, choices.sets, choices.table)
        return depth_ranges(fit, choices.stages, self.floor * model.unit_s)

    def _needed(self, placement: Placement, least: float, most: float) -> tuple[int, int]:
        """The least and the largest depth that a stage can need, given what is in flight behind it."""
        if self.flushes:
            low, high = (formulas.flush_depth(one, self.minibatches or 1, placement.replicas) for one in (least, most))
            return int(low), int(high)
        longest = self._longest_wait(placement) + 2 * self._longest_transfer(placement)
        behind = max(least, self._busy_behind(placement))
        low = 1 + math.ceil(behind / placement.replicas - formulas.ROUNDING)
        return low, 1 + math.ceil((most + longest) / placement.replicas)

    def _all(self, placement: Placement) -> int:
        """With a flush, all minibatches of an update that one replica takes."""
        return int(formulas.rounds(self.minibatches or 1, placement.replicas))

    def _busy_behind(self, placement: Placement) -> float:
        """Lower bound on the minibatches in flight behind a placement: the workers that must be busy there within U."""
        model = self.model
        work = sum(block.work_s for block in model.layers.blocks) / model.unit_s
        fastest = max(device.speed for device in model.problem.cluster.devices)
        return work / fastest - (placement.last + 1) - 1e-6

    def _longest_wait(self, placement: Placement) -> float:
        """Upper bound on the wait for the group, in minibatches."""
        if self.minibatches is not None:
            return 0.0
        if self.copies > 1:
            return float(formulas.group_wait(0.0, 1.0, placement.replicas, self.copies))
        model = self.model
        size = sum(block.parameters for block in model.layers.blocks)
        longest = model.allreduce((placement.start, placement.replicas), size) / (self.floor * model.unit_s) - 1.0
        return min(max(0.0, longest), placement.replicas - 1.0)

    def _longest_transfer(self, placement: Placement) -> float:
        """Upper bound on the transfer behind a placement, in minibatches.

        A boundary carries at most what takes T, or all tensors of the model; the latency comes on top.
        """
        model = self.model
        pace = self.floor * model.unit_s
        hops = [model.hops[hop] for cut, hop, links in model.level if cut == placement.end and links == 1]
        longest = 0.0
        for _, bandwidth, latency in hops:
            everything = max(sum(sizes) for sizes in model.layers.directions()) / bandwidth
            longest = max(
                longest, min(placement.replicas if model.parallel else 1.0, everything / pace) + latency / pace
            )
        return longest

    # -- constraint (8) --

    def _choice(self, choice: DepthChoice) -> None:
        """Add δ and t of a choice, with the bounds of (8) on t."""
        placement = choice.placement
        name = f"{placement.start}_{placement.replicas}_{placement.end}_{choice.depth}_{int(choice.recompute)}"
        program = self.model.program
        self.chosen[choice] = chosen = program.binary(f"d_{name}")
        self.by_placement[placement].append(choice)
        if not self.flushes:
            self.timed[choice] = timed = program.number(f"t_{name}")
            program.at_most([(timed, 1.0), (chosen, -1.0)])
            program.at_least([(timed, 1.0), (chosen, -self.floor)])

    def _choose(self) -> None:
        """Add (8): one choice for a placement in use, and t adds up to T over the placements that hold a worker."""
        model, program = self.model, self.model.program
        for placement, used in model.used.items():
            program.equal([*((self.chosen[choice], 1.0) for choice in self.by_placement[placement]), (used, -1.0)])
        for worker in range(model.workers if not self.flushes else 0):
            covering = model.covering(worker)
            times = [term for placement in covering for term in self.times(placement)]
            idle = [(model.opening[start], 1.0) for start in model.placements.firsts if start > worker]
            program.at_most([*times, (model.pace, -1.0)])
            program.at_least([*times, *idle, (model.pace, -1.0)])

    def times(self, placement: Placement, per_depth: float = 0.0, constant: float = 1.0) -> list[Term]:
        """The terms of (per_depth · d + constant) · T for a placement in use."""
        return [(self.timed[choice], per_depth * choice.depth + constant) for choice in self.by_placement[placement]]

    def counts(self, placement: Placement, per_depth: float, constant: float) -> list[Term]:
        """The terms of per_depth · d + constant for a placement in use."""
        return [(self.chosen[choice], per_depth * choice.depth + constant) for choice in self.by_placement[placement]]

    # -- constraints (9) and (10) --

    def _sustain(self) -> None:
        """Add (10) at every cut, once as it stands and once divided by T."""
        model, program = self.model, self.model.program
        waits = {placement: self._wait(placement) for placement in model.placements.all}
        fixed = waits
        if self.copies > 1 and self.minibatches is None:
            fixed = {
                placement: self.counts(placement, 0.0, self._longest_wait(placement))
                for placement in model.placements.all
            }
        for cut in range(model.workers - 1):
            ending = [placement for placement in model.placements.all if placement.end == cut]
            behind = [placement for placement in model.placements.all if placement.start == cut + 1]
            # With a flush, depths cover only the minibatches in flight behind them.
            crossing = [] if self.flushes else scale_terms(self._transfer(cut, ending), 2.0)
            if not self.flushes:
                have = [
                    term
                    for placement in ending
                    for term in self.times(placement, placement.replicas, -placement.replicas)
                ]
                need = [
                    term
                    for placement in behind
                    for term in (*self.times(placement, placement.replicas, 0.0), *waits[placement])
                ]
                need += [term for placement in ending for term in waits[placement]]
                need += crossing
                program.at_least([*have, *self._released(ending, behind), *negate_terms(need)])
            # (10) divided by T. As T ≤ 1 this is implied, but it is tighter for terms that do not depend on T.
            have = [
                term for placement in ending for term in self.counts(placement, placement.replicas, -placement.replicas)
            ]
            have += self._released(ending, behind)
            need = [
                term
                for placement in behind
                for term in (*self.counts(placement, placement.replicas, 0.0), *fixed[placement])
            ]
            need += [term for placement in ending for term in fixed[placement]]
            need += crossing
            program.at_least([*have, *negate_terms(need)])
        if self.buffered:
            self._buffer()

    def _released(self, ending: list[Placement], behind: list[Placement]) -> list[Term]:
        """The terms that exempt a boundary from (10).

        The first stage feeds nobody before it. With a flush, a stage that holds all minibatches of an update needs no
        more.
        """
        model = self.model
        most = max(
            (placement.replicas * (max(self.depths[placement], default=0) + 2.0) for placement in behind), default=0.0
        )
        most += 2.0 * (model.workers + self._latency())
        free = [(variable, most) for start, variable in model.opening.items() if behind and start == behind[0].start]
        if self.flushes:
            choices = [
                choice
                for placement in ending
                for choice in self.by_placement[placement]
                if choice.depth >= self._all(placement)
            ]
            free += [(self.chosen[choice], most) for choice in choices]
        return free

    def _latency(self) -> float:
        return float(self.model.links.sendrecv_latency.max()) / self.model.unit_s

    def _transfer(self, cut: int, ending: list[Placement]) -> list[Term]:
        """Add x[p], the one-way time of the busier direction over a cut plus the latency, where a stage ends there."""
        model, program = self.model, self.model.program
        hops = [(hop, links) for place, hop, links in model.level if place == cut]
        latency = {hop: model.hops[hop].latency_s / model.unit_s for hop, _ in hops}
        crossing = program.number(f"x_{cut}")
        most = max(links for _, links in hops) + max(latency.values())
        for direction in range(len(model.carried[(cut, *hops[0])])):
            terms: list[Term] = []
            for hop, links in hops:
                terms.append((model.carried[cut, hop, links][direction], float(links)))
                terms.append((model.level[cut, hop, links], latency[hop]))
            program.at_most([*terms, (crossing, -1.0), *model.in_use(ending, most)], most)
        return [(crossing, 1.0)]

    def _wait(self, placement: Placement) -> list[Term]:
        """Add (9), and return the terms of a stage's wait for its group, `formulas.group_wait` times T."""
        model, program, place = self.model, self.model.program, (placement.start, placement.replicas)
        if self.minibatches is not None:
            return []
        if self.copies > 1:
            return self.times(placement, 0.0, float(formulas.group_wait(0.0, 1.0, placement.replicas, self.copies)))
        if placement.replicas == 1:
            return []
        wait = program.number(f"g_{placement.start}_{placement.replicas}_{placement.end}")
        # The place's all-reduce is that of this placement only if this placement is the one in use.
        others = [
            other for other in model.placements.all if (other.start, other.replicas) == place and other != placement
        ]
        most = float(placement.replicas)
        unless = [*model.in_use(others, -most)]
        program.at_most([*model.allreduce_terms(place), *negate_terms(self.times(placement)), (wait, -1.0), *unless])
        return [(wait, 1.0)]

    def _buffer(self) -> None:
        """Add (10) for 2BW: a group's update arrives before the first forward pass that needs it
        (`formulas.buffered_pace`)."""
        model = self.model
        assert self.minibatches is not None
        among = model.problem.copies_allreduce_s / model.unit_s
        for place in model.at:
            placements = [
                placement for placement in model.placements.all if (placement.start, placement.replicas) == place
            ]
            spare = self.minibatches + 1.0 / self.copies
            room = [term for placement in placements for term in self.times(placement, -placement.replicas, spare)]
            need = [*model.allreduce_terms(place), *model.selected(place, among)]
            model.program.at_most([*need, *negate_terms(room)])

    # -- recomputation --

    def forward_again(self) -> dict[tuple[int, int], Variable]:
        """The forward work that the stage of every place does twice, in thousandths of U on the fastest device."""
        model, program = self.model, self.model.program
        if not any(choice.recompute for choice in self.chosen):
            return {}
        forward = [THOUSANDTHS * block.forward_s / model.unit_s / model.fastest for block in model.layers.blocks]
        total = sum(forward)
        again = {place: program.number(f"f_{place[0]}_{place[1]}") for place in model.at}
        once = {place: program.number(f"h_{place[0]}_{place[1]}") for place in model.at}
        for worker in range(model.workers):
            parts = [(share[place], 1.0) for share in (again, once) for place in model.places(worker)]
            program.equal([*parts, *negate_terms(model.sum_at(worker, forward))])
        for place in model.at:
            most = min(total, THOUSANDTHS * place[1] / model.slowness(place))
            chosen = [
                (variable, most)
                for choice, variable in self.chosen.items()
                if choice.recompute and (choice.placement.start, choice.placement.replicas) == place
            ]
            program.at_most([(again[place], 1.0), *negate_terms(chosen)])
            program.at_most([(once[place], 1.0), *chosen, *model.selected(place, -most)])
        return again

    def recomputing(self) -> set[Placement]:
        """The placements of the solution whose stage recomputes."""
        return {
            choice.placement
            for choice, chosen in self.chosen.items()
            if choice.recompute and solution_value(chosen) > 0.5
        }
