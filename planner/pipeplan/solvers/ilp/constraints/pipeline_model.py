"""The whole integer program of one pipeline. `integer_program` has the notation."""

from __future__ import annotations

from pipeplan.plan.plan import Stage
from pipeplan.solvers.ilp.constraints.boundary_model import BoundaryModel
from pipeplan.solvers.ilp.constraints.cards import Boundary
from pipeplan.solvers.ilp.constraints.charged import ChargedObjective, Charges
from pipeplan.solvers.ilp.constraints.depth import DepthConstraints
from pipeplan.solvers.ilp.constraints.executor import executor_work
from pipeplan.solvers.ilp.constraints.flush import FlushObjective
from pipeplan.solvers.ilp.constraints.memory import MemoryConstraints, limit_memory_at_depth_one
from pipeplan.solvers.ilp.constraints.stage_choices import MOST_CHOICES, StageChoices
from pipeplan.solvers.ilp.enumeration.choices import Choices
from pipeplan.solvers.ilp.facts.placement_facts import Place
from pipeplan.solvers.ilp.milp.linear_program import Variable, solution_value
from pipeplan.util.deadline import NO_DEADLINE, Deadline


class PipelineModel(BoundaryModel):
    """The whole integer program of one pipeline on one cluster, whose pace is known to lie between two bounds.

    It adds to stages and boundaries (`boundary_model`) an objective, the user's constraints, what a plan is charged
    beside the resources of one pipeline (`charged`) and, where it is `complete`, the depths with the memory that
    follows from them. Otherwise the only limit on memory is that of depth 1, which every plan satisfies. The shares
    that `refined` boundaries keep inside a component are exact; those of the others have upper bounds. With `choices`,
    every stage is one of them, where they are not too many.
    """

    def __init__(
        self,
        charges: Charges,
        floor_s: float,
        upper_s: float,
        *,
        complete: bool,
        refined: frozenset[Boundary] = frozenset(),
        choices: Choices | None = None,
        deadline: Deadline = NO_DEADLINE,
    ) -> None:
        self.charges = charges
        floor_s = min(floor_s, upper_s)
        super().__init__(charges.inner, charges.inner_pace(floor_s), upper_s * charges.scale, deadline, choices)
        self.own = executor_work(self)
        self.flush: FlushObjective | None = None
        if self.problem.options.flushes:
            self.flush = FlushObjective(self, self.minibatches or 1)
            self.carried = self.flush.times
        else:
            self.carried = self.charge_boundaries()
        self._charge({}, settled=not self._may_recompute)
        self.add_user_constraints()
        self.charged = ChargedObjective(self, charges, floor_s / upper_s, refined)
        self.depths: DepthConstraints | None = None
        recomputed: dict[Place, Variable] = {}
        if complete:
            recomputed = self._add_depths()
        elif self.problem.options.memory:
            limit_memory_at_depth_one(self)
        self.charged.charge_cores(recomputed)
        if choices is not None and len(choices) <= MOST_CHOICES:
            StageChoices(self, self.charged.cards, choices)

    @property
    def _may_recompute(self) -> bool:
        options = self.problem.options
        return self.problem.training and options.recompute and options.memory

    def _charge(self, recomputed: dict[Place, Variable], *, settled: bool) -> None:
        """Charge the time of every place, including the forward work that it computes `recomputed`, if that is
        `settled`."""
        if self.flush is None:
            self.charge_stages(recomputed)
        else:
            self.flush.charge(recomputed, settled=settled)

    def _add_depths(self) -> dict[Place, Variable]:
        """Add (8) to (11), and charge recomputation, whose work by place is the result."""
        options, recomputed = self.problem.options, dict[Place, Variable]()
        if self.problem.training:
            self.depths = DepthConstraints(self, recompute=self._may_recompute)
            recomputed = self.depths.forward_again()
            if recomputed or (self.flush is not None and self._may_recompute):
                self._charge(recomputed, settled=True)
        if options.memory:
            MemoryConstraints(self, self.depths)
        return recomputed

    def stages(self) -> list[Stage]:
        """The stages of the solution, input to output, on the workers of one copy, with depth 1 throughout."""
        recomputing = self.depths.recomputing() if self.depths else set()
        return [Stage(self.names(run), tuple(run.workers), 1, 1, run in recomputing) for run in self.chosen()]

    def pace_s(self) -> float:
        """Seconds per minibatch of the solution, by this program's own coefficients."""
        return solution_value(self.charged.pace) * self.scale_s

    @property
    def scale_s(self) -> float:
        """The unit of the objective, in seconds per minibatch of all copies."""
        return self.unit_s / self.charges.scale
