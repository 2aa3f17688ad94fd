"""Runs a PuLP program on an open solver and reads what PuLP's wrapper does not report: the proven bound."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import pulp

from pipeplan.errors import InputError

NAMES = {"highs": "HiGHS", "cbc": "CBC"}

# Tighter than the solvers' defaults (1e-6), because the verdict compares objectives to 1e-6.
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Answer:
    """How a run ended. Values are in the variables of the program."""

    found: bool
    """Whether the variables hold an integer solution."""
    proven: bool
    """Whether the solution is optimal to the gap asked for, or infeasibility is proven."""
    bound: float
    """No solution has a smaller objective; infinite where infeasible."""


def run(program: pulp.LpProblem, solver: str, seconds: float | None, gap: float) -> Answer:
    """Minimise; a time limit is no error."""
    if solver == "highs":
        return _highs(program, seconds, gap)
    if solver == "cbc":
        return _cbc(program, seconds, gap)
    raise InputError(f"there is no solver {solver!r}; there are: {', '.join(NAMES)}")


def _highs(program: pulp.LpProblem, seconds: float | None, gap: float) -> Answer:
    answer = _highs_once(program, seconds, gap, presolve="on")
    if answer.proven and not answer.found:
        # HiGHS 1.15's presolve calls some programs infeasible that are not: that verdict must hold without it too.
        return _highs_once(program, seconds, gap, presolve="off")
    return answer


def _highs_once(program: pulp.LpProblem, seconds: float | None, gap: float, presolve: str) -> Answer:
    solver: Any = pulp.getSolver(
        "HiGHS",
        msg=False,
        timeLimit=seconds,
        gapRel=gap,
        gapAbs=0.0,
        presolve=presolve,
        mip_feasibility_tolerance=_TOLERANCE,
        primal_feasibility_tolerance=_TOLERANCE,
    )
    program.solve(solver)
    model: Any = program.solverModel
    info, status = model.getInfo(), model.modelStatusToString(model.getModelStatus())
    if status == "Infeasible":
        return Answer(found=False, proven=True, bound=math.inf)
    found = info.primal_solution_status == 2  # kSolutionStatusFeasible
    # Before the root is solved the bound is minus infinity; no pace is below 0.
    return Answer(found=found, proven=status == "Optimal", bound=max(0.0, float(info.mip_dual_bound)))


def _cbc(program: pulp.LpProblem, seconds: float | None, gap: float) -> Answer:
    options = ["primalTolerance", str(_TOLERANCE), "integerTolerance", str(_TOLERANCE)]
    solver: Any = pulp.getSolver("PULP_CBC_CMD", msg=False, timeLimit=seconds, gapRel=gap, options=options)
    began = time.perf_counter()
    program.solve(solver)
    # PuLP reads "infeasible" from CBC's files also where CBC ran out of time before it found anything.
    in_time = seconds is None or time.perf_counter() - began < seconds
    if program.status == pulp.LpStatusInfeasible:
        return Answer(found=False, proven=in_time, bound=math.inf if in_time else 0.0)
    found = program.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)
    proven = program.sol_status == pulp.LpSolutionOptimal
    # CBC's command line does not hand its bound back; a proven optimum is its own bound.
    objective: Any = program.objective
    bound = float(objective.value()) if proven else 0.0
    return Answer(found=found, proven=proven, bound=bound)
