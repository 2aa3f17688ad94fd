"""The verdict begins with the status, and says no more than the bound and the pace show."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from pipeplan.checker import verdict_words
from pipeplan.checker.verdict_words import ProofState, SolverAnswer

DP = SolverAnswer("DP", "optimal", 2.0, 2.0)
ILP = SolverAnswer("ILP (HiGHS)", "optimal", 2.0, 2.0)
LATE = replace(ILP, status="feasible", minibatch_s=2.5, bound_s=1.5)
NONE = replace(ILP, status="time limit", minibatch_s=math.inf, bound_s=0.0)
SLOWED = ProofState(2.5, 2.0, (DP, ILP), slowed_by=verdict_words.CARDS)


@pytest.mark.parametrize(
    ("state", "proven", "parts"),
    [
        (
            ProofState(2.0, 2.0, (DP, ILP)),
            True,
            ["proven optimal with everything charged: no plan of the searched space is faster", "agree to 1e-12"],
        ),
        (ProofState(2.0, 2.0, (DP,)), False, ["optimal by DP with", "no second solver was asked"]),
        (
            ProofState(2.0, 2.0, (DP, LATE)),
            False,
            ["optimal by DP with", "ILP (HiGHS) did not confirm it: it stopped at a gap of 40.00%"],
        ),
        (ProofState(2.0, 2.0, (DP, NONE)), False, ["did not confirm it: it found no plan within the time limit"]),
        (
            ProofState(2.0, 2.0, (DP, ILP), contention=False),
            True,
            ["proven optimal with no contention charged, as was asked: "],
        ),
        (
            SLOWED,
            False,
            [
                "feasible, gap 20.00%: with everything charged, no plan of the searched space is more than 20.00% fast",
                "DP and ILP (HiGHS) proved the bound of 2000 ms",
                "no solver charges shared network cards, so a longer search would not close the gap",
            ],
        ),
        (
            replace(SLOWED, answers=(DP, LATE)),
            False,
            ["a longer search (--time-limit) may narrow it, but no solver charges shared network cards"],
        ),
        (
            ProofState(2.5, 1.5, (replace(LATE, note="the requested gap was reached"),)),
            False,
            ["feasible, gap 40.00%", "a smaller --gap may close it"],
        ),
        (ProofState(2.5, 0.0, (NONE,)), False, ["feasible, with no bound", "a longer search (--time-limit) may"]),
        (
            ProofState(2.5, 2.5, (DP, ILP), slowed_by=verdict_words.CORES, cores_s=2.5),
            True,
            ["proven optimal", "the cores that the workers share are never idle"],
        ),
    ],
)
def test_the_verdict_begins_with_the_status_and_gives_its_ground(
    state: ProofState, proven: bool, parts: list[str]
) -> None:
    assert state.proven is proven
    assert state.text.startswith(("proven optimal", state.status))
    for part in parts:
        assert part in state.text
    assert "optimal" not in state.text.split()[0] or state.status == "optimal"


def test_a_solver_that_charges_everything_closes_the_gap_alone() -> None:
    """Where one solver charges shared cards, its bound counts; the other is not asked to confirm what it leaves out."""
    charged = replace(DP, minibatch_s=2.5, bound_s=2.5, charged=True)
    state = ProofState(2.5, 2.5, (charged, ILP), slowed_by=verdict_words.CARDS)
    assert (state.status, state.provers, state.proven) == ("optimal", ("DP",), False)
    assert state.text.startswith("optimal by DP with everything charged")
    assert "ILP (HiGHS) does not charge shared network cards, and its bound is 2000 ms" in state.text
    unfinished = replace(charged, status="feasible", bound_s=2.25, note="the search ended early")
    open_state = replace(state, bound_s=2.25, answers=(unfinished, ILP))
    assert "a longer search (--time-limit) may close it (DP: it stopped at a gap of 10.00%" in open_state.text


def test_a_small_gap_is_not_called_none() -> None:
    assert "gap 2.0e-04%" in ProofState(1.0, 1 - 2e-6, (DP,)).text
    assert ProofState(1.0, 1 - 5e-7, (replace(DP, minibatch_s=1.0, bound_s=1 - 5e-7),)).status == "optimal"
