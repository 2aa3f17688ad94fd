"""Forged step times, bounds, gaps and verdicts: each is refused, however well the other figures agree with it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
from forgeries import Case, Document, case_of

from pipeplan.checker.verdict_words import ProofState, SolverAnswer
from pipeplan.checker.verify import CheckedPlan, check_readable_plan
from pipeplan.cluster_data.cluster import Cluster
from pipeplan.cluster_data.cluster_document import cluster_from_json
from pipeplan.cost.throughput import RunSize, throughput_of
from pipeplan.plan.plan import Plan
from pipeplan.util.files import Node

SIMULATED = ("both", "cards", "bound", "flush", "buffered", "single solver")
"""Plans of several stages."""


def _cluster(document: Document) -> Cluster:
    return cluster_from_json(Node(document["cluster"], "cluster"))


def _checked(document: Document, case: Case) -> CheckedPlan:
    return check_readable_plan(Node(document, "plan.json"), case.profile)


def _consistent(document: Document, case: Case) -> Document:
    """The document with all that follows from its step time, its bound and its record of solvers."""
    step_s, simulated_s = document["stated"]["minibatch_s"], document["simulation"]["minibatch_s"]
    document["stated"] |= {"minibatches_per_s": 1 / step_s, "simulated": simulated_s is not None}
    formula_s = document["prediction"]["minibatch_s"]
    document["simulation"]["ratio"] = None if simulated_s is None else simulated_s / formula_s
    plan = Plan.from_json(Node(document["plan"], "plan"))
    made = throughput_of(plan, case.profile, _cluster(document), step_s, RunSize())
    document["throughput"] = made.to_json()
    answers = tuple(
        SolverAnswer(one["solver"], one["status"], one["minibatch_s"], one["bound_s"], one["note"], one["charged"])
        for one in document["verdict"]["solvers"]
    )
    state = ProofState(step_s, document["bound_s"], answers)
    document |= {"gap": state.gap, "status": state.status}
    document["verdict"] |= {"proven": state.proven, "text": state.text}
    return document


def _forged(name: str, change: Callable[[Document], object]) -> tuple[Document, Case]:
    case = case_of(name)
    document = copy.deepcopy(case.document)
    change(document)
    return _consistent(document, case), case


@pytest.mark.parametrize("name", SIMULATED)
def test_what_follows_from_honest_figures_passes(name: str) -> None:
    document, case = _forged(name, lambda document: None)
    assert document == case.document
    assert _checked(document, case).wrong is None


@pytest.mark.parametrize("name", SIMULATED)
@pytest.mark.parametrize("simulated", [0.9, None])
def test_a_step_time_below_the_formulas_is_refused(name: str, simulated: float | None) -> None:
    """A shorter simulation alone does not lower the step time, which is at least that of the formulas."""

    def change(document: Document) -> None:
        formula_s = document["prediction"]["minibatch_s"]
        document["simulation"]["minibatch_s"] = None if simulated is None else formula_s * simulated
        document["stated"]["minibatch_s"] = formula_s * 0.9
        document["bound_s"] = min(document["bound_s"], formula_s * 0.9)

    wrong = _checked(*_forged(name, change)).wrong
    assert wrong is not None
    assert wrong.what == "step time"
    assert "stated: minibatch_s" in wrong.text


@pytest.mark.parametrize("factor", [0.99, 1.01])
@pytest.mark.parametrize("name", SIMULATED)
def test_a_step_time_other_than_the_simulated_one_is_refused(name: str, factor: float) -> None:
    def change(document: Document) -> None:
        document["stated"]["minibatch_s"] *= factor

    wrong = _checked(*_forged(name, change)).wrong
    assert wrong is not None
    assert wrong.what == "step time"


@pytest.mark.parametrize("name", SIMULATED)
def test_a_simulation_that_is_denied_or_invented_is_refused(name: str) -> None:
    document, case = _forged(name, lambda document: None)
    document["stated"]["simulated"] ^= True
    found = _checked(document, case).wrong
    assert found is not None
    assert "stated: simulated" in found.text


@pytest.mark.parametrize("name", ["bound", "flush"])
def test_the_gap_is_the_step_time_over_the_bound(name: str) -> None:
    """The relative distance from the step time to the bound, which is smaller, is refused."""
    document, case = _forged(name, lambda document: document.update(bound_s=document["bound_s"] * 0.8))
    assert _checked(document, case).wrong is None
    assert document["gap"] >= 0.25 - 1e-9
    document["gap"] = 1 - document["bound_s"] / document["stated"]["minibatch_s"]
    wrong = _checked(document, case).wrong
    assert wrong is not None
    assert wrong.text.startswith("plan.json: gap: stated")


@pytest.mark.parametrize("gap", [None, 0.0, -1.0, "0"])
def test_a_bound_above_zero_has_a_gap(gap: object) -> None:
    document, case = _forged("both", lambda document: document.update(bound_s=document["bound_s"] * 0.8))
    document["gap"] = gap
    assert _checked(document, case).wrong is not None


def test_a_bound_of_zero_has_no_gap() -> None:
    document, case = _forged("not certified", lambda document: document.update(bound_s=0.0))
    assert _checked(document | {"gap": None}, case).wrong is None
    for gap in (0.0, 1.0):
        assert _checked(document | {"gap": gap}, case).wrong is not None


@pytest.mark.parametrize("name", ["single solver", "cards", "buffered", "flush"])
def test_one_solver_proves_nothing(name: str) -> None:
    document, case = _forged(name, lambda document: None)
    assert not document["verdict"]["proven"]
    document["verdict"]["proven"] = True
    assert "proven: stated True" in str(_checked(document, case).wrong)
    document["verdict"]["text"] = document["verdict"]["text"].replace("not confirmed:", "proven:")
    assert "proven: stated True" in str(_checked(document, case).wrong)


def test_a_second_solver_whose_bound_is_lower_confirms_nothing() -> None:
    def change(document: Document) -> None:
        second = document["verdict"]["solvers"][1]
        second |= {"status": "feasible", "bound_s": second["bound_s"] * 0.9}
        second["gap"] = 1 - second["bound_s"] / second["minibatch_s"]

    document, case = _forged("both", change)
    assert _checked(document, case).wrong is None
    assert not document["verdict"]["proven"]
    document["verdict"] |= {"proven": True, "text": case.document["verdict"]["text"]}
    assert "proven: stated True" in str(_checked(document, case).wrong)


@pytest.mark.parametrize("name", SIMULATED)
def test_a_bound_above_the_step_time_is_refused(name: str) -> None:
    def change(document: Document) -> None:
        document["bound_s"] = document["stated"]["minibatch_s"] * 1.01

    document, case = _forged(name, change)
    assert _checked(document, case).wrong is not None
    wrong = _checked(document | {"certificate": None}, case).wrong
    assert wrong is not None
    assert wrong.what == "verdict"
    assert "but this plan takes" in wrong.text


@pytest.mark.parametrize("name", ["flush", "bound"])
def test_a_bound_that_no_solver_shows_is_refused(name: str) -> None:
    """A bound between those of the solvers and the step time would make the gap smaller."""

    def change(document: Document) -> None:
        document["simulation"]["minibatch_s"] = document["prediction"]["minibatch_s"] * 1.5
        document["stated"]["minibatch_s"] = document["simulation"]["minibatch_s"]
        document["bound_s"] *= 1.01

    document, case = _forged(name, change)
    assert _checked(document, case).wrong is not None
    wrong = _checked(document | {"certificate": None}, case).wrong
    assert wrong is not None
    assert "the record of the solvers gives" in wrong.text


@pytest.mark.parametrize("name", SIMULATED)
def test_a_throughput_of_another_step_time_is_refused(name: str) -> None:
    document, case = _forged(name, lambda document: None)
    plan = Plan.from_json(Node(document["plan"], "plan"))
    faster_s = document["stated"]["minibatch_s"] * 0.9
    document["throughput"] = throughput_of(plan, case.profile, _cluster(document), faster_s, RunSize()).to_json()
    wrong = _checked(document, case).wrong
    assert wrong is not None
    assert wrong.what == "run"


def test_a_plan_outside_the_searched_space_may_not_call_its_verdict_proven() -> None:
    """Also where its status, for a gap that is not closed, is only `feasible`."""
    case = case_of("not certified")
    document = copy.deepcopy(case.document)
    last = max(worker for stage in document["plan"]["stages"] for worker in stage["workers"])
    for stage in document["plan"]["stages"]:
        stage["workers"] = sorted(last - worker for worker in stage["workers"])
    document["bound_s"] *= 0.5
    forged = _consistent(document, case)
    assert (forged["status"], forged["verdict"]["proven"]) == ("feasible", True)
    wrong = _checked(forged, case).wrong
    assert wrong is not None
    assert "the plan lies outside the searched space" in wrong.text
