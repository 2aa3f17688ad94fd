"""The outcome of a solve: the plan, what is proven about it, and what it is compared with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pipeplan.cost.evaluate import Evaluation
from pipeplan.cost.throughput import RunSize, Throughput, throughput_of
from pipeplan.plan.plan import Plan
from pipeplan.planning.baselines import Baseline
from pipeplan.planning.choose_synchrony import SynchronyChoice
from pipeplan.planning.outcome_views import outcome_html, outcome_lines, stage_rows
from pipeplan.planning.simplest import Simplification
from pipeplan.planning.stated.pace import NOT_SIMULATED, PlanSimulation
from pipeplan.planning.verdict import TOLERANCE, Verdict
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp.certificate import Certificate
from pipeplan.solvers.result import Result, Status

NO_CERTIFICATE = Certificate(None, "no certificate was requested")


@dataclass(frozen=True, repr=False)
class Outcome:
    """A solved problem: its best plan, what is proven about the plan, and the baselines."""

    problem: Problem
    plan: Plan
    evaluation: Evaluation
    results: tuple[Result, ...]
    verdict: Verdict
    baselines: tuple[Baseline, ...]
    phases_s: dict[str, float]
    """Wall-clock seconds by phase."""
    bound_s: float = 0.0
    """Lower bound on the pace of every plan of the searched space with everything charged, in seconds per minibatch."""
    certificate: Certificate = NO_CERTIFICATE
    simulation: PlanSimulation = NOT_SIMULATED
    """The simulation of the plan's schedule, beside the prediction."""
    synchrony: SynchronyChoice | None = None
    """The choice between synchronous and asynchronous plans, if it was left to pipeplan."""
    simplification: Simplification | None = None
    """The fastest plan, if a simpler one was taken."""
    run_size: RunSize = field(default_factory=RunSize)
    """The size of the training run, as far as the user states it."""

    def __repr__(self) -> str:
        return "\n".join(outcome_lines(self))

    def _repr_html_(self) -> str:
        return outcome_html(self)

    def rows(self) -> list[dict[str, Any]]:
        """A row for each stage, with its layers, workers and costs in seconds and bytes: rows for a data frame."""
        return stage_rows(self)

    @property
    def objective_s(self) -> float:
        """The plan's pace by the formulas, which solvers minimise and prove, in seconds per minibatch."""
        return self.evaluation.pace_s

    @property
    def predicted_s(self) -> float:
        """The pace to expect, in seconds per minibatch: simulated where that differs from `objective_s`."""
        return self.simulation.pace_s(self.objective_s)

    @property
    def throughput(self) -> Throughput:
        """The pace to expect in the units of a training run."""
        problem = self.problem
        return throughput_of(self.plan, problem.profile, problem.cluster, self.predicted_s, self.run_size)

    @property
    def gap(self) -> float:
        """Upper bound on how much faster, as a fraction of the pace, a better plan could be."""
        return max(0.0, 1.0 - self.bound_s / self.objective_s) if self.objective_s > 0 else 0.0

    @property
    def status(self) -> Status:
        """`optimal` where the gap is at most 1e-6, else `feasible`."""
        return Status.OPTIMAL if self.gap <= TOLERANCE else Status.FEASIBLE
