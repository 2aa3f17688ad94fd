"""The verdict on a plan in one sentence that begins with its status: what is proven, by whom, or how large the gap is.

`pipeplan solve` states the verdict, and `pipeplan check` derives it again from the figures in plan.json. Nothing here
computes a cost: the pace and the bound, both with everything charged, are given.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipeplan.util.units import show_time

TOLERANCE = 1e-6
"""Relative. A plan is optimal where the bound comes this close to its pace."""
OPTIMAL, FEASIBLE, INFEASIBLE = "optimal", "feasible", "infeasible"
"""Statuses of an answer; a solver may also have met its time limit."""
CARDS, CORES, WAIT = "shared network cards", "shared cores", "the wait for the update"
SHARED = "what workers share"
"""Charges that a solver may leave out (docs/cost-model.md)."""


@dataclass(frozen=True)
class SolverAnswer:
    """The answer of one solver. Times are in seconds per minibatch."""

    solver: str
    status: str
    minibatch_s: float
    """Pace of its plan by its own arithmetic; infinite without a plan."""
    bound_s: float
    """Lower bound on the pace of every plan that it was asked about; infinite where it shows that there is none."""
    note: str = ""
    charged: bool = False
    """Whether these figures include what the workers share and the wait of plain data parallelism."""

    @property
    def why_unproven(self) -> str:
        """A clause that says why the solver did not prove its plan optimal."""
        if not math.isfinite(self.minibatch_s):
            reason = self.note or "it found no plan within the time limit"
            return f"{reason}; its bound is {show_time(self.bound_s)}" if 0 < self.bound_s < math.inf else reason
        stopped = f"it stopped at a gap of {_percent(gap_of(self.minibatch_s, self.bound_s))}"
        return f"{stopped}, and {self.note}" if self.note else stopped


@dataclass(frozen=True)
class ProofState:
    """All that decides the verdict on a plan. Times are in seconds per minibatch, with everything charged."""

    pace_s: float
    bound_s: float
    """Lower bound on the pace of every plan of the searched space."""
    answers: tuple[SolverAnswer, ...]
    slowed_by: str = ""
    """`CARDS`, `CORES` or `WAIT`: what makes the plan slower than with every resource to itself; empty for nothing."""
    cores_s: float = 0.0
    """The pace that keeps all cores that workers share busy, which no plan beats; 0 where none are shared."""
    contention: bool = True
    """Whether what workers share was to be charged."""

    @property
    def gap(self) -> float:
        """Upper bound on how much faster, as a fraction of the pace, another plan of the searched space could be."""
        return gap_of(self.pace_s, self.bound_s)

    @property
    def status(self) -> str:
        """`optimal` where the gap is at most `TOLERANCE`, else `feasible`."""
        return OPTIMAL if self.gap <= TOLERANCE else FEASIBLE

    @property
    def provers(self) -> tuple[str, ...]:
        """The solvers whose own bound reaches the pace with everything charged."""
        return tuple(answer.solver for answer in self.answers if self._reaches(answer.bound_s))

    @property
    def proven(self) -> bool:
        """Whether the plan is optimal by two solvers, or by a reason that needs none."""
        return self.status == OPTIMAL and (len(self.provers) > 1 or bool(self._reason_without_solver))

    @property
    def text(self) -> str:
        """The verdict as one sentence."""
        return self._optimal_text() if self.status == OPTIMAL else self._feasible_text()

    def _reaches(self, bound_s: float) -> bool:
        return bound_s >= self.pace_s * (1 - TOLERANCE)

    @property
    def _charged(self) -> str:
        return "with everything charged" if self.contention else "with no contention charged, as was asked"

    @property
    def _reason_without_solver(self) -> str:
        """Why no plan is faster, where that takes no search; empty where it does."""
        busy = self.cores_s > 0 and self._reaches(self.cores_s)
        return "the cores that the workers share are never idle" if busy else ""

    def _optimal_text(self) -> str:
        by = "proven optimal" if self.proven else f"optimal by {names(self.provers)}" if self.provers else OPTIMAL
        head = f"{by} {self._charged}: no plan of the searched space is faster"
        if len(self.provers) < 2 and self._reason_without_solver:
            return f"{head}; {self._reason_without_solver}"
        return f"{head}; {self._agreement() if len(self.provers) > 1 else self._unconfirmed()}"

    def _agreement(self) -> str:
        """How closely the solvers that prove the plan agree."""
        agreeing = [answer for answer in self.answers if answer.solver in self.provers]
        paces = [answer.minibatch_s for answer in agreeing]
        if not all(map(math.isfinite, paces)):
            return f"{names(self.provers)} agree"
        return f"{names(self.provers)} agree to {max((max(paces) - min(paces)) / min(paces), 1e-12):.0e} relative"

    def _unconfirmed(self) -> str:
        """Why no second solver confirms a plan that at most one proves."""
        others = [answer for answer in self.answers if answer.solver not in self.provers]
        if not others:
            return "no second solver was asked"
        other = others[0]
        if other.status == OPTIMAL and self.slowed_by and not other.charged:
            shown = f"its bound is {show_time(other.bound_s)}"
            return f"{other.solver} does not charge {self.slowed_by}, and {shown}"
        return f"{other.solver} did not confirm it: {other.why_unproven}"

    def _feasible_text(self) -> str:
        if not self.bound_s > 0:
            return f"{FEASIBLE}, with no bound: how much faster another plan could be is not known{self._closing()}"
        gap = _percent(self.gap)
        head = f"{FEASIBLE}, gap {gap}: {self._charged}, no plan of the searched space is more than {gap} faster"
        strongest = [one.solver for one in self.answers if one.bound_s >= self.bound_s * (1 - TOLERANCE)]
        by = f"; {names(strongest)} proved the bound of {show_time(self.bound_s)}" if strongest else ""
        return head + by + self._closing()

    def _closing(self) -> str:
        """The clause that says what would close the gap, and what would not."""
        unfinished = [answer for answer in self.answers if answer.status not in (OPTIMAL, INFEASIBLE)]
        # A plan that shares nothing may be the answer where the solvers' own plan is slower once sharing is charged.
        uncharged = self.slowed_by or (SHARED if self.contention else "")
        if any(answer.charged for answer in self.answers):
            uncharged = ""
        if not unfinished:
            return f"; no solver charges {uncharged}, so a longer search would not close the gap" if uncharged else ""
        stopped = "; ".join(f"{answer.solver}: {answer.why_unproven}" for answer in unfinished)
        if any("requested gap" in answer.note for answer in unfinished):
            return f"; a smaller --gap may close it ({stopped})"
        if uncharged:
            return f"; a longer search (--time-limit) may narrow it, but no solver charges {uncharged} ({stopped})"
        return f"; a longer search (--time-limit) may close it ({stopped})"


def search_text(pace_s: float, bound_s: float, simulated: float | None) -> str:
    """The verdict on a plan that a search has found, whose workers run several stages each.

    `bound_s` holds for all plans of its schedule; `simulated` is the simulated pace over the predicted one, or None.
    """
    longer = max(0.0, pace_s / bound_s - 1) if bound_s else 0.0
    text = (
        f"Not proven optimal: a search; the plan takes {longer:.1%} longer than a bound on all plans of this schedule, "
        "in which nobody waits"
    )
    if simulated is not None:
        text += f", and its simulation {simulated - 1:+.1%} of the prediction"
    return text + "."


def simplest_text(fastest: ProofState, pace_s: float, within: float) -> str:
    """The verdict on a simpler plan of this pace that was taken in place of the fastest one."""
    slower = _percent(pace_s / fastest.pace_s - 1)
    head = f"{slower} slower than the fastest plan, as the simplest within {within * 100:.3g}% of it"
    return f"{head}; the fastest (--simplest 0) is {fastest.text}"


def simulated_text(fastest: ProofState, pace_s: float) -> str:
    """The verdict on a plan of this pace by the formulas that was taken because its stated pace is shorter."""
    slower = _percent(pace_s / fastest.pace_s - 1)
    head = f"by the formulas {slower} slower than the fastest plan, and taken as it is faster in the simulation"
    return f"{head}; the fastest by the formulas (--no-simulation) is {fastest.text}"


def gap_of(pace_s: float, bound_s: float) -> float:
    """How much faster than a pace, as a fraction of it, a plan at the bound would be; 0 where the bound is no lower."""
    return max(0.0, 1.0 - bound_s / pace_s) if pace_s > 0 else 0.0


def names(solvers: tuple[str, ...] | list[str]) -> str:
    """Names of solvers as part of a sentence."""
    return " and ".join(solvers)


def _percent(share: float) -> str:
    """A share in percent, with the digits that tell it from 0."""
    return f"{share:.2%}" if share >= 1e-4 or share == 0 else f"{share * 100:.1e}%"
