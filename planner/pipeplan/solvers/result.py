"""The result that every solver returns."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pipeplan.plan.plan import Plan


class Status(StrEnum):
    """Outcome of a solver's run."""

    OPTIMAL = "optimal"
    """Proven: no plan in the searched space is better."""
    FEASIBLE = "feasible"
    """The solver found a plan, and a bound that the plan does not meet."""
    INFEASIBLE = "infeasible"
    """Proven: no plan satisfies the constraints, or no such plan is as fast as was asked for."""
    TIME_LIMIT = "time limit"
    """The time limit came before any plan was found."""


@dataclass(frozen=True)
class Result:
    """A solver's plan and bound, and how it found them."""

    solver: str
    status: Status
    plan: Plan | None
    objective_s: float
    """Step time of the plan by the solver's own arithmetic, in seconds per minibatch; infinite without a plan."""
    bound_s: float
    """Lower bound, in seconds per minibatch, on every plan in the searched space."""
    seconds: float
    """Wall-clock time of the solver, in seconds."""
    note: str = ""
    size: tuple[int, int] | None = None
    """(variables, rows) of the largest integer program that was solved."""
    interrupted: bool = False
    """Whether Ctrl-C ended the solver."""
    charged: bool = False
    """Whether the solver minimised `Evaluation.step_time_s`, including contention as the options say. Otherwise it
    minimised `Evaluation.alone_s`.
    """

    @property
    def gap(self) -> float:
        """Upper bound on how much faster another plan could be, as a fraction; infinite without a plan."""
        if self.plan is None or self.objective_s == 0:
            return 0.0 if self.plan is not None else float("inf")
        return max(0.0, 1.0 - self.bound_s / self.objective_s)
