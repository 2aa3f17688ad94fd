"""Constraint (11) of the integer program: the memory of every worker. `integer_program` has the notation.

Sizes are in thousandths of the largest memory of a device. Memory that grows with the depth has a share for every
choice of placement and depth, as a sum over layers has one for every place: a sum times a choice, without a product.
"""

from __future__ import annotations

from collections.abc import Callable

from pipeplan.cost import formulas
from pipeplan.plan.schedules import TRAITS, VERTICAL
from pipeplan.problem.problem import Problem
from pipeplan.solvers.ilp.constraints.depth import DepthChoice, DepthConstraints
from pipeplan.solvers.ilp.constraints.placement_model import PlacementModel
from pipeplan.solvers.ilp.constraints.vertical_versions import VerticalVersions
from pipeplan.solvers.ilp.facts.placements import Placement
from pipeplan.solvers.ilp.milp.linear_program import NEGLIGIBLE, THOUSANDTHS, Term, Variable, scale_terms


def memory_unit(problem: Problem) -> float:
    """The unit of sizes, in bytes."""
    return max(device.usable_bytes for device in problem.cluster.devices) / THOUSANDTHS


def limit_memory_at_depth_one(model: PlacementModel) -> None:
    """Add the part of (11) that holds at every depth: what a stage needs with one minibatch in flight."""
    problem, options = model.problem, model.problem.options
    # Where replicas divide the state, any part of it may be on another worker.
    ratio = problem.state_ratio - problem.divided_ratio
    versions = max(1, TRAITS[options.schedule].versions) if problem.training else 0
    unit = memory_unit(problem)
    copied = float(
        formulas.fixed_memory(1.0, 0.0, 0.0, ratio, problem.training)
        + formulas.version_memory(1.0, versions, options.copies_per_version)
    )
    sizes = [
        float(
            formulas.fixed_memory(block.parameters, block.buffers, 0.0, ratio, problem.training)
            + formulas.version_memory(block.parameters, versions, options.copies_per_version)
            + block.saved
        )
        / unit
        for block in model.layers.blocks
    ]
    for worker in range(model.workers):
        placements = [placement for placement in model.placements.all if placement.start == worker]
        room = [(model.used[placement], -problem.capacity_of(placement.workers) / unit) for placement in placements]
        model.program.at_most([*model.sum_at(worker, sizes), *model.shared.bytes_at(worker, copied / unit), *room])


class MemoryConstraints:
    """The memory limits of a model, by choice of depth for training, and by placement alone for inference."""

    def __init__(self, model: PlacementModel, depths: DepthConstraints | None) -> None:
        self.model = model
        self.depths = depths
        self.training = model.problem.training
        self.unit = memory_unit(model.problem)
        schedule = model.problem.options.schedule
        self.copies_per_version = model.problem.options.copies_per_version
        self.versions = TRAITS[schedule].versions if self.training else 0
        self.stashes = self.copies_per_version if self.training and not self.versions else 0
        self.recompute = any(choice.recompute for choice in depths.chosen) if depths else False
        self.total = sum(block.parameters for block in model.layers.blocks) / self.unit
        self.fixed = [self._fixed(index) for index in range(len(model.layers))]
        self.parameters = [block.parameters / self.unit for block in model.layers.blocks]
        self.saved = [block.saved / self.unit for block in model.layers.blocks]
        self.workspace = [block.workspace / self.unit for block in model.layers.blocks]
        self.crossing = [
            self._per_cut([tensor.sent for tensor in model.layers.tensors]),
            self._per_cut([tensor.sent + tensor.returned for tensor in model.layers.tensors]),
        ]
        self.older: VerticalVersions | None = None
        if schedule == VERTICAL and depths is not None:
            self.older = VerticalVersions(model, depths)
        for worker in range(model.workers):
            self._limit(worker)
            if depths is not None:
                self._exclude(worker, depths)

    def _fixed(self, index: int) -> float:
        block = self.model.layers.blocks[index]
        return self._fixed_of(block.parameters, block.buffers)

    def _fixed_of(self, parameters: float, buffers: float) -> float:
        """Memory that these bytes take at every depth."""
        size = formulas.fixed_memory(parameters, buffers, 0.0, self.model.problem.state_ratio, self.training)
        versions = formulas.version_memory(parameters, self.versions, self.copies_per_version)
        return float(size + versions) / self.unit

    def _per_cut(self, sizes: list[float]) -> list[list[Term]]:
        """The terms of the bytes that cross every cut; none for the cut behind the last worker."""
        model = self.model
        cuts = [
            [(model.crossing[k, cut], size / self.unit) for k, size in enumerate(sizes) if size]
            for cut in range(model.workers - 1)
        ]
        return [*cuts, []]

    def _limit(self, worker: int) -> None:
        """Add (11) for the stage that starts at `worker`."""
        model = self.model
        placements = [placement for placement in model.placements.all if placement.start == worker]
        sent, both = self.crossing
        before = worker - 1 if worker else model.workers - 1
        terms = [
            *model.sum_at(worker, self.fixed),
            *model.shared.bytes_at(worker, self._fixed_of(1.0, 0.0)),
            (self._where_used(f"u_{worker}", [*both[before], *both[worker]], placements), 1.0),
        ]
        if self.older is not None:
            capacity = {(one.start, one.replicas): self._capacity(one) for one in placements}
            copied = [size * self.copies_per_version for size in self.parameters]
            terms += self.older.memory(worker, copied, capacity)
        terms += self._largest_workspace(worker)
        if self.depths is not None:
            terms += self._replication(placements)
            if self.recompute:
                weights = [w * self.stashes for w in self.parameters]
                versions = model.sum_at(worker, weights) if self.stashes else []
                terms += self._growing("i", placements, worker, versions, sent[before], lambda choice: choice.depth)
                saved = model.sum_at(worker, self.saved)
                terms += self._growing("s", placements, worker, saved, sent[worker], _once_if_recomputed)
            else:
                sizes = [w * self.stashes + s for w, s in zip(self.parameters, self.saved, strict=True)]
                crossing = [*sent[before], *sent[worker]]
                every = model.sum_at(worker, sizes)
                terms += self._growing("i", placements, worker, every, crossing, lambda choice: choice.depth)
        self.model.program.at_most(
            [*terms, *((model.used[placement], -self._capacity(placement)) for placement in placements)]
        )

    def _largest_workspace(self, worker: int) -> list[Term]:
        """A variable that is at least the workspace of every block whose stage starts at `worker`."""
        needed = [(block, size) for block, size in enumerate(self.workspace) if size > NEGLIGIBLE]
        if not needed:
            return []
        program = self.model.program
        largest = program.number(f"workspace_{worker}")
        for block, size in needed:
            if starts := self.model.starts(block, worker):
                program.at_most([*scale_terms(starts, size), (largest, -1.0)])
        return [(largest, 1.0)]

    def _exclude(self, worker: int, depths: DepthConstraints) -> None:
        """Exclude depths at which a single block is too large: implied, but not for fractions of blocks and depths."""
        model = self.model
        choices = [
            choice
            for placement in model.placements.all
            if placement.start == worker
            for choice in depths.by_placement[placement]
        ]
        for block in range(len(model.layers)):
            fitting = [
                choice for choice in choices if self._alone_at(block, choice) <= self._capacity(choice.placement)
            ]
            if len(fitting) < len(choices):
                terms = [(depths.chosen[choice], -1.0) for choice in fitting]
                model.program.at_most([*model.starts(block, worker), *terms])

    def _alone_at(self, block: int, choice: DepthChoice) -> float:
        """The memory that one block needs at a depth, whatever else the stage holds."""
        versions = choice.depth * self.parameters[block] * self.stashes
        saved = (1 if choice.recompute else choice.depth) * self.saved[block]
        everyone = choice.placement.replicas * self.model.problem.copies
        divided = float(formulas.divided_state(1.0, everyone, self.model.problem.divided_ratio))
        size = self.fixed[block] + versions + saved + self.workspace[block]
        return size + self.parameters[block] * ((everyone > 1) - divided)

    def _capacity(self, placement: Placement) -> float:
        return self.model.problem.capacity_of(placement.workers) / self.unit

    def _where_used(self, name: str, terms: list[Term], placements: list[Placement]) -> Variable:
        """A variable that is at least the sum of the terms if one of the placements is in use."""
        total = sum(factor for _, factor in terms)
        program = self.model.program
        variable = program.number(name)
        if total > 0:
            program.at_most([*terms, (variable, -1.0), *self.model.in_use(placements, total)], total)
        return variable

    def _growing(
        self,
        name: str,
        placements: list[Placement],
        worker: int,
        sizes: list[Term],
        crossing: list[Term],
        times: Callable[[DepthChoice], int],
    ) -> list[Term]:
        """The terms of what a stage holds `times` over, by its choice of depth."""
        assert self.depths is not None
        program, shares = self.model.program, []
        for placement in placements:
            for choice in self.depths.by_placement[placement]:
                many = times(choice)
                share = program.number(
                    f"{name}_{placement.start}_{placement.replicas}_{placement.end}_{choice.depth}_{choice.recompute}"
                )
                program.at_most([(share, 1.0), (self.depths.chosen[choice], -self._capacity(placement) / many)])
                shares.append((share, float(many)))
        crossed = self._where_used(f"{name}x_{worker}", crossing, placements)
        program.at_most([*sizes, (crossed, 1.0), *((share, -1.0) for share, _ in shares)])
        return shares

    def _replication(self, placements: list[Placement]) -> list[Term]:
        """The terms of what replicas add: buckets, and a weight version for the late update of a stage that is not the
        only one."""
        model, terms = self.model, []
        for place in {(placement.start, placement.replicas) for placement in placements}:
            everyone = place[1] * model.problem.copies
            if everyone == 1:
                continue
            late = self.stashes
            divided = float(formulas.divided_state(1.0, everyone, model.problem.divided_ratio))
            terms.append((model.parameters[place], self.total * (1.0 + late - divided) / THOUSANDTHS))
            if late:
                terms += [
                    (self._alone(placement), -self.total * late)
                    for placement in placements
                    if placement.replicas == place[1] and self._last(placement)
                ]
        return terms

    def _last(self, placement: Placement) -> bool:
        return self.model.placements.final(placement) and placement.start in self.model.placements.firsts

    def _alone(self, placement: Placement) -> Variable:
        """A variable that may be 1 only if the placement holds the only stage."""
        model = self.model
        if placement.start == 0:
            return model.used[placement]
        alone = model.program.number(f"alone_{placement.start}_{placement.replicas}", 0, 1)
        model.program.at_most([(alone, 1.0), (model.used[placement], -1.0)])
        model.program.at_most([(alone, 1.0), (model.opening[placement.start], -1.0)])
        return alone


def _once_if_recomputed(choice: DepthChoice) -> int:
    return 1 if choice.recompute else choice.depth
