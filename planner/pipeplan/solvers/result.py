"""What every solver returns."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pipeplan.plan import Plan


class Status(StrEnum):
    """How far a solver got."""

    OPTIMAL = "optimal"
    """No plan in the searched space is better."""
    FEASIBLE = "feasible"
    """A plan, and a bound that it does not meet."""
    INFEASIBLE = "infeasible"
    """Proven: no plan satisfies the constraints."""
    TIME_LIMIT = "time limit"
    """The limit came before any plan."""


@dataclass(frozen=True)
class Result:
    """A plan with what is known about it."""

    solver: str
    status: Status
    plan: Plan | None
    objective_s: float
    """Seconds per minibatch by the solver's own arithmetic (infinite without a plan)."""
    bound_s: float
    """No plan in the searched space is faster than this."""
    seconds: float
    """Time spent."""
    note: str = ""
    size: tuple[int, int] | None = None
    """Variables and rows of the largest integer program that was asked."""
    interrupted: bool = False
    """Whether Ctrl-C ended it."""
    effort: float = 0.0
    """What a search took, as `limits.Effort` counts it."""

    @property
    def gap(self) -> float:
        """How far the plan can be from the best, relative."""
        if self.plan is None or self.objective_s == 0:
            return 0.0 if self.plan is not None else float("inf")
        return max(0.0, 1.0 - self.bound_s / self.objective_s)
