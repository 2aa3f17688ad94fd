"""Constraints (1) to (5), (16) and (17) of the integer program: stages on placements.

`integer_program` has the notation. Times are in units of the upper bound U, so every T lies in [0, 1] and one tolerance
serves all instances.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from pipeplan.problem.grid_shapes import GridShape
from pipeplan.problem.problem import Problem
from pipeplan.solvers.ilp.constraints.shared_weights import SharedCopies
from pipeplan.solvers.ilp.enumeration.choices import Choices
from pipeplan.solvers.ilp.facts.placement_facts import Place, PlacementFacts
from pipeplan.solvers.ilp.facts.placements import Placement
from pipeplan.solvers.ilp.milp.linear_program import (
    NEGLIGIBLE,
    THOUSANDTHS,
    LinearProgram,
    Term,
    Variable,
    negate_terms,
    scale_terms,
    solution_value,
)
from pipeplan.util.deadline import Deadline

# The bounds of a variable are either equal, or farther apart than the solver's rounding.
ROOM = 1e-7


class PlacementModel(PlacementFacts):
    """The placement of one pipeline's stages on one cluster, whose pace is known to lie between two bounds.

    `charge_stages` adds what stages contribute to the objective of the schedules without a flush.
    """

    def __init__(
        self, problem: Problem, floor_s: float, upper_s: float, deadline: Deadline, choices: Choices | None
    ) -> None:
        super().__init__(problem, upper_s, None if choices is None else choices.used)
        self.choices = choices
        """The only stages that plans may have, where these are known."""
        self._decided = None if choices is None else choices.decided(self.workers)
        self.program = LinearProgram(deadline)
        self.floor = 1.0 if floor_s >= upper_s else floor_s / upper_s * (1 - ROOM)
        self.pace = self.program.number("T", self.floor, 1)
        self.opening = {start: self.program.binary(f"o_{start}") for start in self.placements.firsts}
        self.used = {
            placement: self.program.binary(f"y_{placement.start}_{placement.replicas}_{placement.end}")
            for placement in self.placements.all
        }
        self.at: dict[Place, list[Variable]] = defaultdict(list)
        for placement, variable in self.used.items():
            self.at[placement.start, placement.replicas].append(variable)
        self._started = {
            (block, worker): self.program.binary(f"z_{block}_{worker}")
            for block in range(len(self.layers))
            for worker in range(self.workers - 1)
            if self._decided is None or not (self._decided[0][block, worker] or self._decided[1][block, worker])
        }
        self._chain()
        if self.grids is not None:
            self._grid(self.grids)
        self._order()
        self._place()
        self.work = self.share("c", [block.work_s / self.unit_s / self.fastest for block in self.layers.blocks])
        """Shares c, in thousandths of U on the fastest device."""
        self.shared = SharedCopies(self.program, problem, self.layers, self.starts)
        self.parameters = self.share(
            "w",
            [block.parameters / self.total for block in self.layers.blocks],
            lambda worker: self.shared.bytes_at(worker, THOUSANDTHS / self.total),
        )
        """Shares w, in thousandths of the whole model's parameters."""
        self.crossing = self._cross()
        self.own: dict[Place, Variable] = {}
        """The executor's own work x at every place, in the units of `work`; `pipeline_model` fills it in."""

    # -- building blocks --

    def started(self, block: int, worker: int) -> list[Term]:
        """The terms of Z[l,p]: whether the block's stage starts at `worker` or before."""
        if worker < 0:
            return []
        if worker >= self.workers - 1:
            return [(self.program.one, 1.0)]
        if (block, worker) in self._started:
            return [(self._started[block, worker], 1.0)]
        assert self._decided is not None
        return [(self.program.one, 1.0)] if self._decided[0][block, worker] else []

    def starts(self, block: int, worker: int) -> list[Term]:
        """The terms of z[l,p]: whether the block's stage starts at `worker`."""
        return [*self.started(block, worker), *negate_terms(self.started(block, worker - 1))]

    def undecided(self, block: int, worker: int) -> bool:
        """Whether choices leave open that the block's stage starts at `worker` or before."""
        return (block, worker) in self._started

    def _same(self, block: int, worker: int, other: int, following: int) -> bool:
        """Whether it is decided that two blocks' stages both start by two workers, or that neither does."""
        if self.undecided(block, worker) or self.undecided(other, following):
            return False
        return len(self.started(block, worker)) == len(self.started(other, following))

    def sum_at(self, worker: int, amounts: Iterable[float]) -> list[Term]:
        """The terms of the sum of the amounts, given by block, over the blocks whose stage starts at `worker`."""
        return [
            term
            for block, amount in enumerate(amounts)
            if amount > NEGLIGIBLE
            for term in scale_terms(self.starts(block, worker), amount)
        ]

    def in_use(self, placements: Iterable[Placement], factor: float = 1.0) -> list[Term]:
        """The terms of the number of these placements that hold a stage."""
        return [(self.used[placement], factor) for placement in placements]

    def selected(self, place: Place, factor: float = 1.0) -> list[Term]:
        """The terms of whether a stage is on the workers of a place."""
        return [(variable, factor) for variable in self.at[place]]

    def places(self, worker: int) -> list[Place]:
        """All places that start at `worker`."""
        return [place for place in self.at if place[0] == worker]

    def covering(self, worker: int) -> list[Placement]:
        """The placements that hold `worker`, of which one is in use at most."""
        return [placement for placement in self.placements.all if placement.covers(worker)]

    def allreduce_terms(self, place: Place) -> list[Term]:
        """The terms of the all-reduce of a place, in units of U."""
        latency = self.allreduce(place, 0.0)
        rate = (self.allreduce(place, self.total) - latency) / self.unit_s / THOUSANDTHS
        return [(self.parameters[place], rate), *self.selected(place, latency / self.unit_s)]

    # -- constraint (1) --

    def _chain(self) -> None:
        """Add (1)."""
        # The workers before the first placement are idle.
        self.program.equal([(variable, 1.0) for variable in self.opening.values()], 1.0)
        for worker in range(self.workers):
            starting = self.in_use(placement for placement in self.placements.all if placement.start == worker)
            ended = self.in_use((placement for placement in self.placements.all if placement.end == worker - 1), -1.0)
            first = [(self.opening[worker], -1.0)] if worker in self.opening else []
            self.program.equal([*starting, *ended, *first])
            # A placement that could be moved to the idle workers before it follows none.
            movable = self.in_use(self.placements.movable(worker))
            tight = [placement for placement in self.placements.all if placement.end == placement.last == worker - 1]
            if movable:
                self.program.at_most([*movable, *self.in_use(tight, -1.0)])

    def _grid(self, grids: Iterable[GridShape]) -> None:
        """Add (16): one shape is chosen, and with it its placements."""
        chosen = {
            shape: self.program.binary(f"q_{shape.stages}_{shape.replicas}")
            for shape in grids
            if shape.replicas <= self.placements.most
        }
        self.program.equal([(variable, 1.0) for variable in chosen.values()], 1.0)
        for placement, used in self.used.items():
            users = [
                (variable, -1.0) for shape, variable in chosen.items() if placement in self.placements.of_shape(shape)
            ]
            self.program.equal([(used, 1.0), *users])

    # -- constraint (2) --

    def _order(self) -> None:
        """Add (2)."""
        for block in range(len(self.layers)):
            for worker in range(1, self.workers - 1):
                if self._same(block, worker - 1, block, worker):
                    continue
                self.program.at_most([*self.started(block, worker - 1), *negate_terms(self.started(block, worker))])
        for source, target in self.layers.edges:
            for worker in range(self.workers - 1):
                if self._same(target, worker, source, worker):
                    continue
                self.program.at_most([*self.started(target, worker), *negate_terms(self.started(source, worker))])

    # -- constraint (3) --

    def _place(self) -> None:
        """Add (3)."""
        for worker in range(self.workers):
            places = self.places(worker)
            for block in range(len(self.layers)):
                if self._same(block, worker - 1, block, worker):
                    continue  # Its stage starts elsewhere.
                fitting = [term for place in places if self.conceivable(block, place) for term in self.selected(place)]
                self.program.at_most([*self.starts(block, worker), *negate_terms(fitting)])
            everything = self.sum_at(worker, [1.0] * len(self.layers))
            self.program.at_most(
                [*(term for place in places for term in self.selected(place)), *negate_terms(everything)]
            )

    # -- constraint (4) --

    def share(
        self, name: str, amounts: list[float], more: Callable[[int], list[Term]] | None = None
    ) -> dict[Place, Variable]:
        """Add shares of the amounts, given by block: for each place, their sum over the stage that is there.

        The shares stand for the product of a sum over layers and the choice of replicas. `more` gives further terms of
        the sum, in thousandths, for the stage that starts at a worker.
        """
        amounts = [THOUSANDTHS * amount for amount in amounts]
        shares = {place: self.program.number(f"{name}_{place[0]}_{place[1]}") for place in self.at}
        total = sum(amounts)
        for worker in range(self.workers):
            parts = [(shares[place], 1.0) for place in self.places(worker)]
            terms = [*self.sum_at(worker, amounts), *(more(worker) if more else [])]
            self.program.equal([*parts, *negate_terms(terms)])
        for place, share in shares.items():
            self.program.at_most([(share, 1.0), *self.selected(place, -total)])
        return shares

    def work_parts(self, place: Place, again: dict[Place, Variable]) -> list[Variable]:
        """The parts of the work at a place: its layers, the forward work done `again`, and the executor's own."""
        return [self.work[place], *(part[place] for part in (again, self.own) if place in part)]

    def charge_stages(self, again: dict[Place, Variable]) -> None:
        """Add (4): charge the time of every place, including the forward work that it computes `again`."""
        exposed = 1.0 - self.problem.options.overlap
        for of_compute, of_sync in {(1.0, exposed), (exposed, 1.0), (1.0, 0.0)}:
            # A worker has one stage at most, so the times of all places that hold it may be added up.
            by_worker: list[list[Term]] = [[] for _ in range(self.workers)]
            for place in self.at:
                latency = self.synchronisation(place, 0.0)
                compute = self.slowness(place) / place[1] / THOUSANDTHS
                rate = (self.synchronisation(place, self.total) - latency) / self.unit_s / THOUSANDTHS
                work = self.work_parts(place, again)
                terms = [
                    *((part, of_compute * compute) for part in work),
                    (self.parameters[place], of_sync * rate),
                    *self.selected(place, of_sync * latency / self.unit_s),
                ]
                self.program.at_most([*terms, *self.selected(place, -1.0)])
                for worker in range(place[0], sum(place)):
                    by_worker[worker] += terms
            for terms in by_worker:
                self.program.at_most([*terms, (self.pace, -1.0)])

    # -- constraint (5) --

    def _cross(self) -> dict[tuple[int, int], Variable]:
        """Add (5). Returns b[k,p] by tensor and cut."""
        variables = {}
        for number, tensor in enumerate(self.layers.tensors):
            for worker in range(self.workers - 1):
                variable = variables[number, worker] = self.program.number(f"b_{number}_{worker}", 0, 1)
                for consumer in tensor.consumers:
                    if self._same(tensor.producer, worker, consumer, worker):
                        continue
                    producer, consumer_started = self.started(tensor.producer, worker), self.started(consumer, worker)
                    self.program.at_most([*producer, *negate_terms(consumer_started), (variable, -1.0)])
        return variables

    # -- constraint (17) --

    def add_user_constraints(self) -> None:
        """Add (17)."""
        options, everything = self.problem.options, self.in_use(self.placements.all)
        if options.stages is not None:
            self.program.equal(everything, float(options.stages))
        if options.max_stages is not None:
            self.program.at_most(everything, float(options.max_stages))
        if options.max_workers is not None:
            busy = [(variable, float(placement.replicas)) for placement, variable in self.used.items()]
            self.program.at_most(busy, float(options.max_workers // self.problem.copies))
        for name, number in options.pins:
            self._pin(self.layers.home[name], number)

    def _pin(self, block: int, number: int) -> None:
        """Add the part of (17) that pins a block to stage `number`: Z[l,p] = [so many stages start by p]."""
        for worker in range(self.workers):
            count = self.in_use(placement for placement in self.placements.all if placement.start <= worker)
            started = self.started(block, worker)
            self.program.at_least([*count, *scale_terms(started, -float(number))])
            self.program.at_most([*count, *scale_terms(started, number - 1.0 - self.workers)], number - 1.0)

    # -- reading the solution --

    def chosen(self) -> list[Placement]:
        """The placements in use, in order."""
        return sorted(
            (placement for placement, used in self.used.items() if solution_value(used) > 0.5),
            key=lambda placement: placement.start,
        )

    def names(self, placement: Placement) -> tuple[str, ...]:
        """The layers of the stage on a placement of the solution, in the profile's order."""
        blocks = [
            index
            for index in range(len(self.layers))
            if sum(solution_value(variable) * factor for variable, factor in self.starts(index, placement.start)) > 0.5
        ]
        names = {name for index in blocks for name in self.layers.blocks[index].layers}
        return tuple(layer.name for layer in self.problem.profile.layers if layer.name in names)
