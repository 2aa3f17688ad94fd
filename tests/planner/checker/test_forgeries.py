"""Forged plan files: none that claims more than is true is shown to be proven, and none makes a report say more."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from commandline import Run
from forgeries import NAMES, SENTINEL, Case, Document, case_of, honest_outcome

from pipeplan.checker.verify import CheckedPlan, check_readable_plan
from pipeplan.cluster_data.cluster_document import cluster_from_json
from pipeplan.cluster_data.links import Links
from pipeplan.cost.ddp_overlap import ddp_pace_s
from pipeplan.cost.evaluate import WAITS_FOR_UPDATE, evaluate
from pipeplan.cost.stage_times import stage_times
from pipeplan.cost.throughput import RunSize, throughput_of
from pipeplan.errors import InputError
from pipeplan.explanation.time_breakdown import resource_loads
from pipeplan.plan.plan import Plan
from pipeplan.problem import plan_file
from pipeplan.problem.problem import Problem
from pipeplan.report.build import build_report
from pipeplan.report.source import read_report_source
from pipeplan.util.files import Node

CLOSE = 2e-6
"""Relative: twice the tolerance of a proof."""


def _optimal(checked: CheckedPlan) -> bool:
    """Whether the certificate shows that no plan of the searched space is faster."""
    return checked.shown is not None and checked.shown.optimal


def _checked(document: Document, case: Case) -> CheckedPlan:
    return check_readable_plan(Node(document, "plan.json"), case.profile)


def _claims_no_more_than_is_true(document: Document, case: Case) -> None:
    """Assert that all figures and words of a file that passes are those of its plan and of its problem."""
    problem, plan = plan_file.plan_from_document(Node(document, "plan.json"), case.profile)
    score, honest = evaluate(plan, problem), honest_outcome(document)
    pace = document["prediction"]["minibatch_s"]
    assert pace == pytest.approx(score.pace_s, rel=1e-8)
    assert score.fits
    assert document["plan"]["config"] == plan.config
    assert document["profile"]["model"] == case.profile.model_name
    _names_a_slowest_resource(document["prediction"]["bound_by"], problem, plan)
    step_s, simulated_s = document["stated"]["minibatch_s"], document["simulation"]["minibatch_s"]
    assert step_s == pytest.approx(max(score.pace_s, simulated_s or 0.0), rel=1e-8)
    assert document["bound_s"] <= step_s * (1 + CLOSE)
    gap = max(0.0, step_s / document["bound_s"] - 1)
    assert document["gap"] == pytest.approx(gap, abs=1e-8)
    assert document["status"] == ("optimal" if gap <= 1e-6 else "feasible")
    text = document["verdict"]["text"]
    assert ("is faster" in text) is (document["status"] == "optimal")
    assert document["verdict"]["proven"] is text.startswith("proven:")
    assert SENTINEL not in text
    # The DP's bound leaves out what workers share, so no certificate shows more; idle cores apart, which it includes.
    shown = _checked(document, case).shown
    if shown is not None:
        assert shown.bound_s <= honest.bound_s * (1 + CLOSE)
        assert document["status"] != "optimal" or document["bound_s"] <= honest.bound_s * (1 + CLOSE)


def _names_a_slowest_resource(name: str, problem: Problem, plan: Plan) -> None:
    score = evaluate(plan, problem)
    loads = {load.name: load.seconds for load in resource_loads(plan, problem, score)}
    loads[WAITS_FOR_UPDATE] = ddp_pace_s(plan, problem, Links.of(problem.cluster), _pass_s(plan, problem))
    assert name == score.bound or loads[name] == pytest.approx(score.pace_s, rel=1e-8)


def _pass_s(plan: Plan, problem: Problem) -> float:
    return stage_times(plan, problem, Links.of(problem.cluster), 0).pass_s


def _report_says_no_more(document: Document, case: Case, checked: CheckedPlan) -> None:
    """Assert that a report, and the clause of `explain`, claim a proof only where the honest solvers have one."""
    try:
        told = build_report(read_report_source(Node(document, "plan.json"), case.profile)).to_json()
    except InputError:
        return  # Reports demand fields that a check has defaults for.
    honest, step_s = honest_outcome(document), document["stated"]["minibatch_s"]
    true_gap = max(0.0, step_s / honest.bound_s - 1)
    section = told["certificate"]
    assert SENTINEL not in json.dumps(told)
    assert SENTINEL not in checked.proof
    if section["proven"] or "space is faster" in checked.proof:
        assert true_gap <= CLOSE
        assert _optimal(checked)
    elif section["gap"] is not None:
        assert section["gap"] >= true_gap - CLOSE
    else:
        assert "not shown" in checked.proof
    for row in told["comparisons"][1:]:
        assert row["name"] == "runner-up" or "not shown" in row["remark"]


def _tried(case: Case, operations: int, seeds: range) -> Iterator[bool]:
    """Whether each forged file passes the check; asserts that those that do claim no more than is true."""
    for seed in seeds:
        forged = case.forged(operations, seed)
        checked = _checked(forged, case)
        yield checked.wrong is None
        if checked.wrong is None:
            _with_defaults(forged)
            _claims_no_more_than_is_true(forged, case)
            _report_says_no_more(forged, case, checked)


def _with_defaults(document: Document) -> None:
    """Add what a file may leave out, so that the planner's own reader takes it."""
    for stage in document["plan"]["stages"]:
        stage.setdefault("recompute", False)


@pytest.mark.parametrize("name", NAMES)
def test_an_honest_file_passes(name: str) -> None:
    case = case_of(name)
    checked = _checked(case.document, case)
    assert checked.wrong is None, checked.wrong
    _claims_no_more_than_is_true(case.document, case)
    _report_says_no_more(case.document, case, checked)


def test_the_cases_hold_every_kind_of_claim() -> None:
    shown = {case.name: _checked(case.document, case) for case in map(case_of, NAMES)}
    optimal = {name for name, found in shown.items() if _optimal(found)}
    assert optimal >= {"both", "cores", "one stage", "inference"}
    assert _optimal(shown["cards"])
    assert shown["bound"].shown is not None
    assert not _optimal(shown["bound"])
    assert shown["flush"].shown is not None
    assert shown["two phases"].shown is not None
    assert {name for name, found in shown.items() if found.shown is None} == {"not certified"}
    documents = {case.name: case.document for case in map(case_of, NAMES)}
    assert documents["flush"]["prediction"]["batch"] is not None


@pytest.mark.parametrize("operations", [1, 3])
def test_a_forged_file_claims_no_more_than_is_true(operations: int) -> None:
    passed = [found for case in map(case_of, NAMES) for found in _tried(case, operations, range(3))]
    assert len(passed) == 3 * len(NAMES)
    assert sum(passed) < len(passed) / 2


@pytest.mark.slow
@pytest.mark.parametrize("operations", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_no_forged_file_claims_more_than_is_true(name: str, operations: int) -> None:
    case = case_of(name)
    passed = list(_tried(case, operations, range(1000, 1250)))
    assert 0 < sum(passed) < 125 or operations == 3


@pytest.mark.parametrize("name", ["bound", "flush", "not certified", "both"])
def test_claims_that_agree_with_each_other_are_not_shown_by_that(name: str) -> None:
    """All that a forger can make consistent: a bound at the pace, in the record of the solvers as well."""
    case = case_of(name)
    forged = copy.deepcopy(case.document)
    pace = forged["prediction"]["minibatch_s"] * (1.0 if name == "bound" else 0.999)
    forged |= {"bound_s": pace, "gap": 0.0, "status": "optimal"}
    forged["prediction"] |= {"minibatch_s": pace, "minibatches_per_s": 1 / pace}
    forged["stated"] |= {"minibatch_s": pace, "minibatches_per_s": 1 / pace, "simulated": False}
    forged["simulation"] |= {"minibatch_s": None, "ratio": None}
    for solver in forged["verdict"]["solvers"]:
        solver |= {"bound_s": pace, "minibatch_s": pace, "gap": 0.0, "status": "optimal"}
    forged["verdict"] |= {
        "proven": True,
        "text": "proven: no plan of the searched space is faster; DP and ILP (HiGHS) agree on the bound",
    }
    checked = _checked(forged, case)
    assert checked.wrong is not None
    assert checked.shown is None
    assert "nothing that it claims to be proven is shown" in checked.proof


def test_a_bound_beyond_the_certificate_is_refused() -> None:
    case = case_of("cards")
    document = copy.deepcopy(case.document)
    document["certificate"] = case_of("bound").document["certificate"]
    assert document["certificate"]["bound_s"] < document["bound_s"] * (1 - 1e-3)
    found = {result.what: result for result in _checked(document, case).results}
    assert found["optimality"].holds is False
    assert "the certificate shows" in found["optimality"].text


def test_a_claim_without_a_certificate_is_stated_and_not_shown(run: Run) -> None:
    case = case_of("not certified")
    case.profile.save("profile.json")
    Path("plan.json").write_text(json.dumps(case.document))
    done = run("check", "plan.json")
    assert done.code == 0
    assert "optimality: stated, not shown: plan.json has no certificate" in done.out
    refused = run("check", "plan.json", "--require-proof")
    assert refused.code == 2
    assert refused.err == "error: plan.json is not shown to be optimal: plan.json has no certificate\n"


def test_a_bound_that_a_certificate_does_not_show_is_refused() -> None:
    for bound in (1.0 + 1e-5, 1.5):
        case = case_of("cards")
        document = copy.deepcopy(case.document)
        document["certificate"]["bound_s"] *= bound
        found = {result.what: result for result in _checked(document, case).results}
        assert found["optimality"].holds is False
        assert "it shows only" in found["optimality"].text


def test_proof_can_be_required_up_to_a_gap(run: Run) -> None:
    case = case_of("bound")
    case.profile.save("profile.json")
    Path("plan.json").write_text(json.dumps(case.document))
    assert run("check", "plan.json").code == 0
    refused = run("check", "plan.json", "--require-proof")
    assert refused.code == 2
    assert "no plan of the searched space takes less than" in refused.err
    share = case.document["stated"]["minibatch_s"] / case.document["certificate"]["bound_s"] - 1
    assert run("check", "plan.json", "--require-proof", "--within", f"{share * 100 + 0.01}%").code == 0
    assert run("check", "plan.json", "--require-proof", "--within", f"{share * 50}%").code == 2
    assert "goes with --require-proof" in run("check", "plan.json", "--within", "1%").err


def test_explain_and_check_say_what_is_shown(run: Run) -> None:
    case = case_of("both")
    case.profile.save("profile.json")
    forged = copy.deepcopy(case.document)
    forged["certificate"] = None
    forged["certificate_note"] = SENTINEL
    Path("plan.json").write_text(json.dumps(forged))
    words = ("explain", "plan.json", "--profile", "profile.json", "--samples", "0")
    checked, explained = run("check", "plan.json"), run(*words)
    for told in (checked, explained):
        assert told.code == 0
        assert SENTINEL not in told.out + told.err
    assert "how much faster another plan may be is stated, not shown" in " ".join(explained.out.split())
    Path("plan.json").write_text(json.dumps(case.document))
    assert "Proof: no plan of the searched space is faster" in run(*words).out
    assert run("check", "plan.json", "--require-proof").code == 0


RUN = RunSize(epochs=3, dataset_size=1000, tokens_per_sample=7)
"""Of the user's own, in a file that states all that follows from it."""


def _with_run(name: str) -> tuple[Document, Case]:
    case = case_of(name)
    document = copy.deepcopy(case.document)
    priced = cluster_from_json(Node(document["cluster"], "cluster"))
    priced = replace(priced, server_price=2.5)
    document["cluster"] = priced.to_json() | {"digest": priced.digest()}
    plan = Plan.from_json(Node(document["plan"], "plan"))
    stated_s = document["stated"]["minibatch_s"]
    document["throughput"] = throughput_of(plan, case.profile, priced, stated_s, RUN).to_json()
    return document, case


@pytest.mark.parametrize("name", ["both", "flush", "buffered", "one stage"])
def test_every_figure_of_a_run_is_derived_again(name: str) -> None:
    honest, case = _with_run(name)
    assert _checked(honest, case).wrong is None
    stated = {key: value for key, value in honest["throughput"].items() if isinstance(value, int | float)}
    assert {"samples_per_s", "tokens_per_s", "epoch_s", "run_s"} <= set(stated)
    for key, value in stated.items():
        for other in (value * 2, value * 1.001 if isinstance(value, float) else value + 1, None):
            forged = copy.deepcopy(honest)
            forged["throughput"][key] = other
            wrong = _checked(forged, case).wrong
            assert wrong is not None, (key, other)
            assert wrong.what in ("run", "document")


@pytest.mark.parametrize("key", ["peak_share", "price_per_million_samples", "epoch_s", "run_price", "tokens_per_s"])
def test_a_figure_of_a_run_that_nothing_shows_is_refused(key: str) -> None:
    case = case_of("both")
    forged = copy.deepcopy(case.document)
    assert forged["throughput"][key] is None
    forged["throughput"][key] = 0.9
    wrong = _checked(forged, case).wrong
    assert wrong is not None
    assert wrong.what == "run"


@pytest.mark.parametrize("name", ["both", "flush", "buffered"])
def test_ages_of_gradients_and_samples_of_an_update_are_derived_again(name: str) -> None:
    case = case_of(name)
    for key in ("stale_by", "samples"):
        for index in range(len(case.document["updates"][key])):
            forged = copy.deepcopy(case.document)
            forged["updates"][key][index] += 1
            wrong = _checked(forged, case).wrong
            assert wrong is not None
            assert wrong.what == "run"
    forged = copy.deepcopy(case.document)
    forged["updates"]["synchronous"] ^= True
    assert _checked(forged, case).wrong is not None
