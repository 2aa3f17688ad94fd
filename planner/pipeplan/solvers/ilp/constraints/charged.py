"""Constraints (18) and (19) of the integer program: the pace of all copies together, with what plans are charged beside
the resources of one pipeline. `integer_program` has the notation.

The charged pace is that of `pipeplan.cost.evaluate`: the synchronisation among copies, the wait of plain data
parallelism for its update (`cost.ddp_overlap`), shared cores and shared network cards (`cost.contention`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from pipeplan.cluster_data.links import Links
from pipeplan.cost import formulas
from pipeplan.cost.ddp_overlap import ddp_pace_s
from pipeplan.cost.stage_times import executor_work_s
from pipeplan.plan.plan import Stage
from pipeplan.plan.schedules import ACCUMULATING
from pipeplan.problem.problem import Problem
from pipeplan.solvers.ilp.constraints.cards import Boundary, CardConstraints
from pipeplan.solvers.ilp.constraints.placement_model import ROOM, PlacementModel
from pipeplan.solvers.ilp.facts.placement_facts import LoadFactors, Place
from pipeplan.solvers.ilp.milp.linear_program import THOUSANDTHS, Term, Variable
from pipeplan.solvers.plan_space import PlanSpace


@dataclass(frozen=True)
class Charges:
    """How one space of plans of a problem is charged."""

    problem: Problem
    """The whole problem, of which the integer program has one copy's part."""
    space: PlanSpace

    @cached_property
    def inner(self) -> Problem:
        """The problem of one copy."""
        return self.space.inner(self.problem)

    @property
    def accumulate(self) -> int | None:
        """Minibatches per update of all copies together, if all stages share their updates; else None."""
        options = self.problem.options
        shared = self.problem.training and options.schedule in ACCUMULATING
        return options.accumulate if shared else None

    @property
    def scale(self) -> int:
        """The pace of all copies in seconds times this number is T: the pace of one copy, or with a flush the time from
        one update to the next, except for what only this module charges."""
        if self.problem.options.flushes and self.accumulate is not None:
            return self.accumulate
        return self.space.copies

    def inner_pace(self, pace_s: float) -> float:
        """The largest T, in seconds, with which all copies together keep a pace in seconds per minibatch.

        A larger T never needs more memory, so a best plan may be assumed to have no smaller one.
        """
        if self.space.copies == 1 or self.problem.options.flushes:
            return pace_s * self.scale
        among, exposed = self.space.synchronisation(self.problem), 1.0 - self.problem.options.overlap
        most = pace_s - exposed * among
        if exposed:
            most = min(most, (pace_s - among) / exposed)
        least = self.problem.work_s / self.problem.cluster.total_speed
        return max(least, most) * self.scale

    def least_pace_s(self) -> float:
        """Lower bound on the pace of every plan in the space, by what does not depend on the plan.

        These are the all-reduce among the copies, and its load on the cards of components that hold whole copies.
        """
        if self.problem.options.flushes:
            return 0.0
        least = self.space.synchronisation(self.problem)
        copies, cluster = self.space.copies, self.problem.cluster
        if copies == 1 or not self.problem.training or not self.problem.options.contention:
            return least
        size = self.problem.parameter_bytes
        rate, interval = self.space.card_rate(cluster), self.accumulate or copies
        return max(least, float(formulas.ring_allreduce_time(copies, size, rate, 0.0)) / interval)

    def factors(self) -> LoadFactors:
        """The factors from loads to the charged pace."""
        scale, copies, shared = float(self.scale), self.space.copies, self.accumulate
        # With a flush, T has what no pass hides of an all-reduce.
        rings = 0.0 if self.problem.options.flushes else scale / (shared or copies)
        return LoadFactors(messages=scale / copies, rings=rings, shared_rings=shared is not None, copies=rings)


class ChargedObjective:
    """Constraints (18) to (23) of a model, and its objective: the charged pace in units of U."""

    def __init__(self, model: PlacementModel, charges: Charges, floor: float, refined: frozenset[Boundary]) -> None:
        self.model = model
        self.charges = charges
        self.pace = model.program.number("C", 1.0 if floor >= 1 else floor * (1 - ROOM), 1)
        model.program.minimise([(self.pace, 1.0)])
        self.cards: CardConstraints | None = None
        self._join_copies()
        if charges.problem.options.contention:
            if charges.accumulate is None:
                self._wait()
            self.cards = CardConstraints(model, self.pace, charges.factors(), refined)

    def _join_copies(self) -> None:
        """Add (18): T, or T and the synchronisation among the copies, as `formulas.overlapped` joins them."""
        program, problem = self.model.program, self.charges.problem
        if self.charges.space.copies == 1 or problem.options.flushes:
            program.at_most([(self.model.pace, 1.0), (self.pace, -1.0)])
            return
        among = self.charges.space.synchronisation(problem) * self.charges.scale / self.model.unit_s
        exposed = 1.0 - problem.options.overlap
        for of_pace, of_copies in {(1.0, exposed), (exposed, 1.0)}:
            program.at_most([(self.model.pace, of_pace), (program.one, of_copies * among), (self.pace, -1.0)])

    def _wait(self) -> None:
        """Add (19): a stage that is the only one waits for its all-reduce."""
        model, (problem, space) = self.model, (self.charges.problem, self.charges.space)
        for placement, used in model.used.items():
            if not model.placements.final(placement) or placement.start not in model.opening:
                continue
            stage = Stage(problem.layer_names, tuple(placement.workers), 1, 1)
            plan = space.plan(problem, [stage])
            own_s = executor_work_s(plan, problem, 0)
            work_s = (problem.work_s + own_s) / problem.cluster.speed_of(plan.stages[0].workers)
            wait_s = ddp_pace_s(plan, problem, Links.of(problem.cluster), work_s)
            wait = wait_s * self.charges.scale / model.unit_s
            alone = [(used, 1.0), (model.opening[placement.start], 1.0)]
            if wait > 1 + formulas.ROUNDING:
                model.program.at_most(alone, 1.0)
            elif wait:
                terms = [(variable, wait * factor) for variable, factor in alone]
                model.program.at_most([*terms, (self.pace, -1.0)], wait)

    def charge_cores(self, again: dict[Place, Variable]) -> None:
        """Add (24): the cores of every server whose workers share them, with the forward work done `again`."""
        cluster, model = self.charges.problem.cluster, self.model
        if not self.charges.problem.options.contention:
            return
        rows: set[tuple[tuple[float, ...], float]] = set()
        for first, stop, cores in cluster.shared_cores:
            inside = tuple(
                sum(first <= worker < stop for worker in self._workers(place)) / len(self._workers(place))
                for place in model.at
            )
            if (inside, cores) in rows:
                continue
            rows.add((inside, cores))
            terms: list[Term] = []
            for place, share in zip(model.at, inside, strict=True):
                if share:
                    terms += [(variable, factor * share / cores) for variable, factor in self._core_time(place, again)]
            model.program.at_most([*terms, (self.pace, -1.0)])

    def _workers(self, place: Place) -> list[int]:
        """The workers of a stage on a place in all copies."""
        cluster, space = self.charges.problem.cluster, self.charges.space
        firsts = cluster.starts(space.level)[space.first : space.first + space.copies]
        return [first + worker for worker in range(place[0], sum(place)) for first in firsts]

    def _core_time(self, place: Place, again: dict[Place, Variable]) -> list[Term]:
        """The terms of `formulas.core_time` of all replicas of a stage, in units of U and of the charged pace."""
        model, charges = self.model, self.charges
        problem, workers = charges.problem, self._workers(place)
        work = [(part, charges.scale * model.slowness(place) / THOUSANDTHS) for part in model.work_parts(place, again)]
        exposed = 1.0 - problem.options.overlap
        if len(workers) == 1 or not problem.training or not exposed or problem.options.flushes:
            return work
        rate = Links.of(problem.cluster).allreduce_among(workers)
        latency, whole = (float(formulas.ring_allreduce_time(len(workers), size, *rate)) for size in (0.0, model.total))
        # Every replica is exposed to the all-reduce, once for so many minibatches.
        interval = charges.accumulate or len(workers)
        factor = exposed * charges.scale * len(workers) / interval / model.unit_s
        return [
            *work,
            (model.parameters[place], factor * (whole - latency) / THOUSANDTHS),
            *model.selected(place, factor * latency),
        ]
