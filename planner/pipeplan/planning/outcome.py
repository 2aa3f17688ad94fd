"""The outcome of a solve: the plan, what is proven about it, and what it is compared with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pipeplan.cost.evaluate import Evaluation
from pipeplan.cost.throughput import RunSize, Throughput, throughput_of
from pipeplan.plan.plan import Plan
from pipeplan.planning.baselines import Baseline
from pipeplan.planning.choose import Choice
from pipeplan.planning.figure import Figure
from pipeplan.planning.outcome_views import outcome_html, outcome_lines, stage_rows
from pipeplan.planning.verdict import TOLERANCE, Verdict, gap_of
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
    """Lower bound on the step time of every plan of the searched space, in seconds per minibatch."""
    certificate: Certificate = NO_CERTIFICATE
    figure: Figure = field(default_factory=lambda: Figure(0.0))
    """The plan's figure: its simulated step time, beside that of the formulas."""
    choice: Choice | None = None
    """The candidates that the plan was chosen among, if the choice was left to pipeplan."""
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
        """The plan's time by the formulas, which solvers minimise, in seconds per minibatch: a lower bound."""
        return self.evaluation.pace_s

    @property
    def predicted_s(self) -> float:
        """The plan's figure: its simulated step time, in seconds per minibatch."""
        return max(self.figure.step_s, self.objective_s)

    @property
    def throughput(self) -> Throughput:
        """The pace to expect in the units of a training run."""
        problem = self.problem
        return throughput_of(self.plan, problem.profile, problem.cluster, self.predicted_s, self.run_size)

    @property
    def gap(self) -> float:
        """Upper bound on how much faster a better plan could be: the step time over the bound, minus 1.

        Infinite where the bound is 0.
        """
        return gap_of(self.predicted_s, self.bound_s)

    @property
    def status(self) -> Status:
        """`optimal` where the gap is at most 1e-6, else `feasible`."""
        return Status.OPTIMAL if self.gap <= TOLERANCE else Status.FEASIBLE
