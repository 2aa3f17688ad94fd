"""The verdict says how much faster another plan could be, and who shows that: no more than step time and bound do."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from pipeplan.checker.verdict_words import ProofState, SolverAnswer, gap_of

DP = SolverAnswer("DP", "optimal", 2.0, 2.0)
ILP = SolverAnswer("ILP (HiGHS)", "optimal", 2.0, 2.0)
LATE = replace(ILP, status="feasible", minibatch_s=2.5, bound_s=1.5)
NONE = replace(ILP, status="time limit", minibatch_s=math.inf, bound_s=0.0)


@pytest.mark.parametrize(
    ("state", "status", "proven", "text"),
    [
        (
            ProofState(2.0, 2.0, (DP, ILP)),
            "optimal",
            True,
            "proven: no plan of the searched space is faster; DP and ILP (HiGHS) agree on the bound",
        ),
        (
            ProofState(2.5, 2.0, (DP, ILP)),
            "feasible",
            True,
            "proven: no plan of the searched space is more than 25.0% faster; DP and ILP (HiGHS) agree on the bound",
        ),
        (
            ProofState(2.0, 2.0, (DP,)),
            "optimal",
            False,
            (
                "not confirmed: no plan of the searched space is faster; DP shows the bound, and no second solver was "
                "asked"
            ),
        ),
        (
            ProofState(2.0, 2.0, (DP, LATE)),
            "optimal",
            False,
            (
                "not confirmed: no plan of the searched space is faster; DP shows the bound, and ILP (HiGHS) does not "
                "confirm it: its bound is 1500 ms"
            ),
        ),
        (
            ProofState(2.5, 2.0, (DP, replace(LATE, note="the search ended early"))),
            "feasible",
            False,
            (
                "not confirmed: no plan of the searched space is more than 25.0% faster; DP shows the bound, and "
                "ILP (HiGHS) does not confirm it: its bound is 1500 ms, and the search ended early"
            ),
        ),
        (
            ProofState(2.0, 2.0, (DP, NONE)),
            "optimal",
            False,
            (
                "not confirmed: no plan of the searched space is faster; DP shows the bound, and ILP (HiGHS) does not "
                "confirm it: it found no plan within the time limit"
            ),
        ),
        (
            ProofState(2.5, 0.0, (NONE,)),
            "feasible",
            False,
            "not proven: how much faster another plan could be is not known",
        ),
        (
            ProofState(2.5, 2.5, (DP, ILP), cores_s=2.5),
            "optimal",
            True,
            (
                "proven: no plan of the searched space is faster; the cores that the workers share are never idle at "
                "the bound"
            ),
        ),
    ],
)
def test_the_verdict_gives_gap_and_ground(state: ProofState, status: str, proven: bool, text: str) -> None:
    assert (state.status, state.proven, state.text) == (status, proven, text)


def test_two_solvers_confirm_the_lower_of_their_bounds() -> None:
    """Where the stated bound is the weaker one, both show it; where it is the stronger one, one solver does."""
    weaker = ProofState(2.5, 1.5, (DP, LATE))
    assert weaker.provers == ("DP", "ILP (HiGHS)")
    assert weaker.proven
    assert not replace(weaker, bound_s=1.5 * (1 + 1e-5)).proven


@pytest.mark.parametrize(("cores_s", "proven"), [(0.0, False), (1.9, False), (2.5, True)])
def test_busy_cores_prove_only_a_bound_that_they_reach(cores_s: float, proven: bool) -> None:
    assert ProofState(2.5, 2.5, (), cores_s=cores_s).proven is proven


def test_a_small_gap_is_not_called_none() -> None:
    state = ProofState(1.0 + 2e-6, 1.0, (DP,))
    assert state.status == "feasible"
    assert "more than 0.0002% faster" in state.text
    assert replace(state, step_s=1 + 5e-7).status == "optimal"


def test_the_gap_is_how_much_longer_than_the_bound_a_step_takes() -> None:
    assert gap_of(1.2, 1.0) == pytest.approx(0.2)
    assert gap_of(1.0, 1.0 + 1e-9) == 0
    assert gap_of(1.0, 0.0) == math.inf
