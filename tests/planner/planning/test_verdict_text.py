"""The verdict says how much faster another plan could be, and who shows that: no more than step time and bound do."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from pipeplan.planning.outcome import gap_of, verdict_of
from pipeplan.solvers.result import Result, Status

DP = Result("DP", Status.OPTIMAL, None, 2.0, 2.0, 0.0)
ILP = replace(DP, solver="ILP (HiGHS)")
LATE = replace(ILP, status=Status.FEASIBLE, objective_s=2.5, bound_s=1.5)
NONE = replace(ILP, status=Status.TIME_LIMIT, objective_s=math.inf, bound_s=0.0)
FASTER = "no plan of the searched space is"


def test_the_verdict_gives_gap_and_ground() -> None:
    """By step time, bound, and the answers of the solvers."""
    refuses = "DP shows the bound, and ILP (HiGHS) does not confirm it:"
    for step_s, bound_s, results, text in (
        (2.0, 2.0, (DP, ILP), f"proven: {FASTER} faster; DP and ILP (HiGHS) agree on the bound"),
        (2.5, 2.0, (DP, ILP), f"proven: {FASTER} more than 25.0% faster; DP and ILP (HiGHS) agree on the bound"),
        (2.0, 2.0, (DP,), f"not confirmed: {FASTER} faster; DP shows the bound, and no second solver was asked"),
        (2.0, 2.0, (DP, LATE), f"not confirmed: {FASTER} faster; {refuses} its bound is 1500 ms"),
        (
            *(2.5, 2.0, (DP, replace(LATE, note="it ended early"))),
            f"not confirmed: {FASTER} more than 25.0% faster; {refuses} its bound is 1500 ms, and it ended early",
        ),
        (
            *(2.0, 2.0, (DP, NONE)),
            f"not confirmed: {FASTER} faster; {refuses} it found no plan within the time limit",
        ),
        (2.5, 0.0, (NONE,), "not proven: how much faster another plan could be is not known"),
        (1 + 2e-6, 1.0, (), f"not confirmed: {FASTER} more than 0.0002% faster; the bound is weaker than a solver's, "),
    ):
        verdict = verdict_of(step_s, bound_s, results)
        assert verdict.text.startswith(text), text
        assert verdict.proven is text.startswith("proven")
    cores = verdict_of(2.5, 2.5, (DP, ILP), cores_s=2.5)
    assert cores.proven
    assert cores.text == f"proven: {FASTER} faster; the cores that the workers share are never idle at the bound"


def test_two_solvers_confirm_the_lower_of_their_bounds() -> None:
    """Where the stated bound is the weaker one, both show it; where it is the stronger one, one solver does."""
    weaker = verdict_of(2.5, 1.5, (DP, LATE))
    assert weaker.provers == ("DP", "ILP (HiGHS)")
    assert weaker.proven
    assert not verdict_of(2.5, 1.5 * (1 + 1e-5), (DP, LATE)).proven


def test_busy_cores_prove_only_a_bound_that_they_reach() -> None:
    for cores_s, proven in ((0.0, False), (1.9, False), (2.5, True)):
        assert verdict_of(2.5, 2.5, (), cores_s=cores_s).proven is proven


def test_the_gap_is_how_much_longer_than_the_bound_a_step_takes() -> None:
    assert gap_of(1.2, 1.0) == pytest.approx(0.2)
    assert gap_of(1.0, 1.0 + 1e-9) == 0
    assert gap_of(1.0, 0.0) == math.inf
