"""The verdict on a plan in one sentence: how much faster another plan could be, and who proved it.

`pipeplan solve` states the verdict, and `pipeplan check` derives it again from the figures in plan.json. Nothing here
computes a cost: the step time and the bound, both with everything charged, are given.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipeplan.util.units import show_time

TOLERANCE = 1e-6
"""Relative. Times that differ by less are equal."""
OPTIMAL, FEASIBLE, INFEASIBLE = "optimal", "feasible", "infeasible"
"""Statuses of an answer; a solver may also have met its time limit."""


@dataclass(frozen=True)
class SolverAnswer:
    """The answer of one solver. Times are in seconds per minibatch."""

    solver: str
    status: str
    minibatch_s: float
    """Time of its plan by the formulas; infinite without a plan."""
    bound_s: float
    """Lower bound on the time of every plan that it was asked about; infinite where it shows that there is none."""
    note: str = ""
    charged: bool = False
    """Whether these figures include what the workers share and the wait of plain data parallelism."""

    @property
    def why_unproven(self) -> str:
        """A clause that says why the solver did not confirm the bound."""
        if not math.isfinite(self.minibatch_s):
            reason = self.note or "it found no plan within the time limit"
            return f"{reason}; its bound is {show_time(self.bound_s)}" if 0 < self.bound_s < math.inf else reason
        stopped = f"its bound is {show_time(self.bound_s)}"
        return f"{stopped}, and {self.note}" if self.note else stopped


@dataclass(frozen=True)
class ProofState:
    """All that decides the verdict on a plan. Times are in seconds per minibatch, with everything charged."""

    step_s: float
    """The plan's figure, its simulated step time."""
    bound_s: float
    """Lower bound on the step time of every plan of the searched space."""
    answers: tuple[SolverAnswer, ...]
    cores_s: float = 0.0
    """The step time that keeps all cores that workers share busy, which no plan beats; 0 where none are shared."""

    @property
    def gap(self) -> float:
        """Upper bound on how much faster another plan of the searched space could be: step time over bound, minus 1."""
        return gap_of(self.step_s, self.bound_s)

    @property
    def status(self) -> str:
        """`optimal` where the gap is at most `TOLERANCE`, else `feasible`."""
        return OPTIMAL if self.gap <= TOLERANCE else FEASIBLE

    @property
    def provers(self) -> tuple[str, ...]:
        """The solvers whose own bound is as high as the stated one."""
        return tuple(answer.solver for answer in self.answers if answer.bound_s >= self.bound_s * (1 - TOLERANCE))

    @property
    def proven(self) -> bool:
        """Whether two solvers show the bound, or a reason that needs none."""
        return self.bound_s > 0 and (len(self.provers) > 1 or self._cores_are_busy)

    @property
    def _cores_are_busy(self) -> bool:
        """Whether the bound is the time that the shared cores need for the work."""
        return self.cores_s > 0 and self.cores_s >= self.bound_s * (1 - TOLERANCE)

    @property
    def text(self) -> str:
        """The verdict as one sentence."""
        if not self.bound_s > 0:
            return "not proven: how much faster another plan could be is not known"
        faster = "faster" if self.status == OPTIMAL else f"more than {percent(self.gap)} faster"
        head = f"{'proven' if self.proven else 'not confirmed'}: no plan of the searched space is {faster}"
        return f"{head}; {self._reason}"

    @property
    def _reason(self) -> str:
        """Who shows the bound, and why a solver does not confirm it."""
        if len(self.provers) < 2 and self._cores_are_busy:
            return "the cores that the workers share are never idle at the bound"
        others = [answer for answer in self.answers if answer.solver not in self.provers]
        if len(self.provers) > 1:
            return f"{names(self.provers)} agree on the bound"
        shown = f"{names(self.provers)} shows the bound" if self.provers else "the bound is weaker than a solver's"
        if not others:
            return f"{shown}, and no second solver was asked"
        return f"{shown}, and {others[0].solver} does not confirm it: {others[0].why_unproven}"


def search_text(step_s: float, bound_s: float) -> str:
    """The verdict on a plan that a search has found, whose workers run several stages each.

    `bound_s` holds for all plans of its schedule.
    """
    longer = gap_of(step_s, bound_s) if bound_s else 0.0
    return (
        f"not proven: a search found the plan; it takes {longer:.1%} longer than a bound on all plans of this "
        "schedule, in which nobody waits"
    )


def gap_of(step_s: float, bound_s: float) -> float:
    """How much longer than the bound a step takes, relative, so that no plan is faster by more; at least 0."""
    return max(0.0, step_s / bound_s - 1.0) if bound_s > 0 else math.inf


def names(solvers: tuple[str, ...] | list[str]) -> str:
    """Names of solvers as part of a sentence."""
    return " and ".join(solvers)


def percent(share: float) -> str:
    """A share in percent, with the digits that tell it from 0."""
    return f"{share:.1%}" if share >= 1e-3 or share == 0 else f"{share * 100:.1g}%"
