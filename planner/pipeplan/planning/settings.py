"""The settings of a solve, the division of its time, and the progress that it reports while it runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class SolveProgress:
    """The state of a solve. Step times are in seconds per minibatch, with everything charged."""

    phase: str = ""
    """The present phase: `cuts`, `DP`, `ILP`, `certificate`, `baselines`, or another short text."""
    best_s: float | None = None
    """The step time of the best plan so far; None while there is none."""
    bound_s: float | None = None
    """Lower bound on the step time of every plan; None while there is none."""
    began: float = 0.0
    """When the solve began, by `time.perf_counter`."""

    @staticmethod
    def started() -> SolveProgress:
        """The state of a solve that begins now."""
        return SolveProgress(began=time.perf_counter())

    @property
    def gap(self) -> float | None:
        """Upper bound on how much faster a better plan could be, as a fraction; None while plan or bound is unknown."""
        if not self.best_s or self.bound_s is None:
            return None
        return max(0.0, 1.0 - self.bound_s / self.best_s)

    @property
    def seconds(self) -> float:
        """Wall-clock seconds since the solve began."""
        return time.perf_counter() - self.began


Report = Callable[[SolveProgress], None]
"""A function that is called whenever the phase, the best plan or the bound changes, in the thread of the solve."""


class ProgressTracker:
    """Keeps the state of a solve, and reports every change of it."""

    def __init__(self, report: Report | None = None) -> None:
        self._report = report
        self._state = SolveProgress.started()

    def phase(self, name: str) -> None:
        """Report that a phase begins."""
        self._change(phase=name)

    def narrowed(self, bound_s: float, best_s: float) -> None:
        """Report a solver's lower bound and the step time of its best plan, infinite while the solver has no plan."""
        known = (self._state.best_s or float("inf"), self._state.bound_s or 0.0)
        best, bound = min(known[0], best_s), max(known[1], bound_s)
        self._change(best_s=best if best < float("inf") else None, bound_s=bound if 0 < bound < float("inf") else None)

    def _change(self, **fields: object) -> None:
        if self._report is None:
            return
        state = replace(self._state, **fields)  # type: ignore[arg-type]
        if state != self._state:
            self._state = state
            self._report(state)


MAXIMUM_CUTS = 50_000
"""Most cuts that the DP searches. For a graph with more cuts it searches a selection; the ILP sees the whole graph."""

SHARES = {
    "choice": 0.7,
    "cuts": 0.5,
    "first": 0.5,
    "last": 0.8,
    "certificate": 0.5,
    "baselines": 0.4,
    "simulation": 1.0,
    "diagnosis": 1.0,
}
"""Share of the remaining time that each phase may take: the choice of a schedule and a microbatch size, the cuts, the
first of two solvers, the last or only solver, the certificate, the best uniform pipeline, the simulation. Later phases
may use the time that a phase does not need. If there is no plan, the diagnosis may use the time after the solvers."""


@dataclass(frozen=True)
class Settings:
    """The solvers to run and their limits."""

    solver: str = "both"
    """The solvers to run: `dp`, `ilp` or `both`."""
    time_limit_s: float | None = 60.0
    """Seconds for the whole solve, from the cuts to the baselines; None for no limit. docs/proof.md says how they are
    divided."""
    confirm_s: float | None = 4.0
    """Seconds for the ILP to confirm a plan that the DP has proven optimal; None for all the time that is left."""
    gap: float = 0.0
    """Relative gap at which a solver may stop before it has proven its plan optimal."""
    maximum_cuts: int = MAXIMUM_CUTS
    certify: bool = True
    """Whether to record a certificate that `pipeplan check` can verify."""
    simulate: bool = True
    """Whether the figure of a plan is its simulated time; otherwise plans are compared by the formulas."""
    simplify: bool = False
    """Whether to take the simplest plan within the tolerance of the fastest (`candidates.py`), as the commands do."""
    compare: bool = True
    """Whether to search for the best uniform pipeline even if the plan is proven optimal by the formulas. The uniform
    pipeline is shown, and taken if its figure is better. This search may take longer than the search for the plan."""
