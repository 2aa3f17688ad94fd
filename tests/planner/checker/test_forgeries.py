"""Forged plan files: none that claims more than is true passes, and none makes a report say more."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from checking import NAMES, SENTINEL, Case, Document, case_of, changed, fault, findings, honest_outcome, unread
from commandline import Run
from extents import first_few

from pipeplan.checker.verify import CheckedPlan, check_readable_plan
from pipeplan.cluster_data.cluster_document import cluster_from_json
from pipeplan.cluster_data.links import Links
from pipeplan.cost.ddp_overlap import ddp_step_time_s
from pipeplan.cost.evaluate import WAITS_FOR_UPDATE, evaluate
from pipeplan.cost.stage_times import stage_times
from pipeplan.cost.throughput import RunSize, throughput_of
from pipeplan.errors import InputError
from pipeplan.explanation.time_breakdown import resource_loads
from pipeplan.plan.plan import Plan
from pipeplan.planning.outcome import verdict_of
from pipeplan.problem import plan_file
from pipeplan.problem.problem import Problem
from pipeplan.report.build import build_report
from pipeplan.report.source import read_report_source
from pipeplan.solvers.result import Result, Status
from pipeplan.util.files import Node

CLOSE = 2e-6
"""Relative: twice the tolerance of a proof."""
SIMULATED = ("both", "cards", "bound", "flush", "buffered", "single solver")
"""Plans of several stages."""
RUN = RunSize(epochs=3, dataset_size=1000, tokens_per_sample=7)
"""Of the user's own, in a file that states all that follows from it."""


def _checked(document: Document, case: Case) -> CheckedPlan:
    return check_readable_plan(Node(document, "plan.json"), case.profile)


def _fault(document: Document, case: Case) -> str:
    return fault(document, case.profile)


def _claims_no_more_than_is_true(document: Document, case: Case) -> None:
    """Assert that all figures and words of a file that passes are those of its plan and of its problem."""
    problem, plan = plan_file.plan_from_document(Node(document, "plan.json"), case.profile)
    score, honest = evaluate(plan, problem), honest_outcome(document)
    step_time = document["prediction"]["minibatch_s"]
    assert step_time == pytest.approx(score.step_time_s, rel=1e-8)
    assert score.fits
    assert document["plan"]["config"] == plan.config
    assert document["profile"]["model"] == case.profile.model_name
    _names_a_slowest_resource(document["prediction"]["bound_by"], problem, plan)
    step_s, simulated_s = document["stated"]["minibatch_s"], document["simulation"]["minibatch_s"]
    assert step_s == pytest.approx(max(score.step_time_s, simulated_s or 0.0), rel=1e-8)
    assert document["bound_s"] <= step_s * (1 + CLOSE)
    gap = max(0.0, step_s / document["bound_s"] - 1)
    assert document["gap"] == pytest.approx(gap, abs=1e-8)
    assert document["status"] == ("optimal" if gap <= 1e-6 else "feasible")
    # The DP's bound leaves out what workers share, so no certificate shows more; idle cores apart, which it includes.
    shown = _checked(document, case).shown
    if shown is not None:
        assert shown.bound_s <= honest.bound_s * (1 + CLOSE)
        assert document["status"] != "optimal" or document["bound_s"] <= honest.bound_s * (1 + CLOSE)


def _names_a_slowest_resource(name: str, problem: Problem, plan: Plan) -> None:
    score, links = evaluate(plan, problem), Links.of(problem.cluster)
    loads = {load.name: load.seconds for load in resource_loads(plan, problem, score)}
    loads[WAITS_FOR_UPDATE] = ddp_step_time_s(plan, problem, links, stage_times(plan, problem, links, 0).pass_s)
    assert name == score.bound or loads[name] == pytest.approx(score.step_time_s, rel=1e-8)


def _report_says_no_more(document: Document, case: Case) -> None:
    """Assert that a report, and the clause of `explain`, claim a proof only where the honest solvers have one."""
    try:
        told = build_report(read_report_source(Node(document, "plan.json"), case.profile)).to_json()
    except InputError:
        return  # Reports demand fields that a check has defaults for.
    checked, honest, step_s = _checked(document, case), honest_outcome(document), document["stated"]["minibatch_s"]
    true_gap, section = max(0.0, step_s / honest.bound_s - 1), told["certificate"]
    rows = told.pop("comparisons")
    assert SENTINEL not in json.dumps(told) + checked.proof
    if section["proven"] or "space is faster" in checked.proof:
        assert true_gap <= CLOSE
        assert checked.shown.optimal
    elif section["gap"] is not None:
        assert section["gap"] >= true_gap - CLOSE
    else:
        assert "not shown" in checked.proof
    for row in rows[1:]:
        assert "not shown" in row["remark"]


def _is_read(document: Document) -> bool:
    """Whether the planner reads a file; of what it refuses, it says nothing."""
    try:
        plan_file.PlanFile.of(Node(document, "plan.json"))
    except InputError:
        return False
    return True


def _tried(case: Case, operations: int, seeds: range) -> Iterator[bool]:
    """Whether each forged file passes the check; asserts that those that do claim no more than is true."""
    for seed in seeds:
        forged = case.forged(operations, seed)
        passes = not _fault(forged, case) and _is_read(forged)
        yield passes
        if passes:
            _claims_no_more_than_is_true(forged, case)
            _report_says_no_more(forged, case)


def test_honest_files_pass_and_hold_every_kind_of_claim() -> None:
    shown = {}
    for case in map(case_of, NAMES):
        assert _fault(case.document, case) == "", case.name
        _claims_no_more_than_is_true(case.document, case)
        _report_says_no_more(case.document, case)
        shown[case.name] = _checked(case.document, case).shown
    optimal = {name for name, bound in shown.items() if bound is not None and bound.optimal}
    assert optimal >= {"both", "cores", "one stage", "inference", "cards"}
    assert "bound" not in optimal
    assert {name for name, bound in shown.items() if bound is None} == {"not certified"}
    assert case_of("flush").document["prediction"]["batch"] is not None


@pytest.mark.parametrize("operations", [1, 3])
@pytest.mark.parametrize("seeds", first_few(range(253), 3))
def test_no_forged_file_claims_more_than_is_true(operations: int, seeds: range) -> None:
    passed = [found for case in map(case_of, NAMES) for found in _tried(case, operations, seeds)]
    assert len(passed) == len(seeds) * len(NAMES)
    assert sum(passed) < len(passed) / 2


@pytest.mark.parametrize("name", ["both", "bound", "not certified"])
def test_what_no_check_reads_is_not_repeated(name: str) -> None:
    """All texts of a file that no check reads call it proven."""
    case = case_of(name)
    forged = changed(case.document, lambda _: None)
    texts = [(holder, key) for holder, key in unread(forged) if isinstance(holder[key], str)]
    assert len(texts) >= 4
    for holder, key in texts:
        holder[key] = SENTINEL
    assert _fault(forged, case) == ""
    _report_says_no_more(forged, case)


@pytest.mark.parametrize("name", ["bound", "flush", "not certified", "both"])
def test_claims_that_agree_with_each_other_are_not_shown_by_that(name: str) -> None:
    """All that a forger can make consistent: a bound at the step time, in the record of the solvers as well."""
    case = case_of(name)
    forged = changed(case.document, lambda _: None)
    step_time = forged["prediction"]["minibatch_s"] * (1.0 if name == "bound" else 0.999)
    forged |= {"bound_s": step_time, "gap": 0.0, "status": "optimal"}
    forged["prediction"] |= {"minibatch_s": step_time, "minibatches_per_s": 1 / step_time}
    forged["stated"] |= {"minibatch_s": step_time, "minibatches_per_s": 1 / step_time, "simulated": False}
    forged["simulation"] |= {"minibatch_s": None, "ratio": None}
    for solver in forged["verdict"]["solvers"]:
        solver |= {"bound_s": step_time, "minibatch_s": step_time, "gap": 0.0, "status": "optimal"}
    forged["verdict"]["proven"] = True
    checked = _checked(forged, case)
    assert checked.wrong is not None
    assert checked.shown is None
    assert "nothing that it claims to be proven is shown" in checked.proof


def _consistent(document: Document, case: Case, run: RunSize | None = None) -> Document:
    """The document with all that follows from its step time, its bound and its record of solvers."""
    step_s, simulated_s = document["stated"]["minibatch_s"], document["simulation"]["minibatch_s"]
    document["stated"] |= {"minibatches_per_s": 1 / step_s, "simulated": simulated_s is not None}
    formula_s = document["prediction"]["minibatch_s"]
    document["simulation"]["ratio"] = None if simulated_s is None else simulated_s / formula_s
    plan = Plan.from_json(Node(document["plan"], "plan"))
    cluster = cluster_from_json(Node(document["cluster"], "cluster"))
    document["throughput"] = throughput_of(plan, case.profile, cluster, step_s, run or RunSize()).to_json()
    results = [
        Result(one["solver"], Status(one["status"]), None, one["minibatch_s"], one["bound_s"], 0.0, one["note"])
        for one in document["verdict"]["solvers"]
    ]
    verdict = verdict_of(step_s, document["bound_s"], results)
    gap = max(0.0, step_s / document["bound_s"] - 1) if document["bound_s"] else None
    document |= {"gap": gap, "status": "optimal" if gap is not None and gap <= 1e-6 else "feasible"}
    document["verdict"] |= {"proven": verdict.proven, "text": verdict.text}
    return document


def _forged(name: str, change: Callable[[Document], object] = lambda _: None) -> tuple[Document, Case]:
    case = case_of(name)
    return _consistent(changed(case.document, change), case), case


def _times(stated: float, simulated: float | None, bound: float = 1.0) -> Callable[[Document], None]:
    """A change to so many times the step time by the formulas; the bound by so much, and not above the step time."""

    def change(document: Document) -> None:
        formula_s = document["prediction"]["minibatch_s"]
        document["simulation"]["minibatch_s"] = None if simulated is None else formula_s * simulated
        document["stated"]["minibatch_s"] = formula_s * stated
        document["bound_s"] = min(document["bound_s"] * bound, formula_s * stated)

    return change


def test_a_step_time_below_the_formulas_or_other_than_the_simulated_one_is_refused() -> None:
    for name in SIMULATED:
        document, case = _forged(name)
        assert document == case.document, "this is what follows from honest figures"
        for change in (
            _times(0.9, 0.9),
            _times(0.9, None),
            lambda d: d["stated"].update(minibatch_s=d["stated"]["minibatch_s"] * 0.99),
            lambda d: d["stated"].update(minibatch_s=d["stated"]["minibatch_s"] * 1.01),
        ):
            assert _fault(*_forged(name, change)).startswith("step time: wrong, plan.json: stated: minibatch_s"), name
        document["stated"]["simulated"] ^= True
        assert "stated: simulated" in _fault(document, case)
        assert _fault(document | {"stated": {"minibatch_s": 0.0, "minibatches_per_s": 1.0}}, case)


def test_the_gap_is_the_step_time_over_the_bound() -> None:
    """The relative distance from the step time to the bound, which is smaller, is refused, as is any other."""
    for name in ("bound", "flush", "both"):
        document, case = _forged(name, lambda d: d.update(bound_s=d["bound_s"] * 0.8))
        distance = 1 - document["bound_s"] / document["stated"]["minibatch_s"]
        if name != "both":
            assert _fault(document, case) == ""
            assert document["gap"] >= 0.25 - 1e-9
            assert "plan.json: gap: stated" in _fault(document | {"gap": distance}, case)
        for gap in (None, 0.0, -1.0, "0"):
            assert _fault(document | {"gap": gap}, case)
    document, case = _forged("not certified", lambda d: d.update(bound_s=0.0))
    assert _fault(document | {"gap": None}, case) == "", "without a bound there is none"
    for gap in (0.0, 1.0):
        assert _fault(document | {"gap": gap}, case)


def _weaker(document: Document) -> None:
    second = document["verdict"]["solvers"][1]
    second |= {"status": "feasible", "bound_s": second["bound_s"] * 0.9}


def test_one_solver_proves_nothing_nor_a_second_one_with_a_lower_bound() -> None:
    unchanged: Callable[[Document], object] = lambda _: None  # noqa: E731
    for name in ("single solver", "cards", "buffered", "flush", "both"):
        document, case = _forged(name, _weaker if name == "both" else unchanged)
        assert _fault(document, case) == ""
        assert not document["verdict"]["proven"]
        document["verdict"]["proven"] = True
        assert "proven: stated True" in _fault(document, case)
        twice = changed(document, lambda d: d["verdict"]["solvers"].append(d["verdict"]["solvers"][0]))
        assert "proven: stated True" in _fault(twice, case), "the same solver is no second one"
    step_s = case.document["prediction"]["minibatch_s"]
    for bound_s in (step_s * 1.01, None):  # a solver's bound that excludes the plan
        excluding = changed(case.document, lambda d: d["verdict"]["solvers"][1].update(bound_s=bound_s))  # noqa: B023
        assert _fault(excluding, case)


@pytest.mark.parametrize(("solver", "passes"), [("relaxation", True), ("ILP (HiGHS)", False)])
def test_only_a_relaxation_bounds_times_above_those_of_the_formulas(solver: str, passes: bool) -> None:
    def change(document: Document) -> None:
        _times(1.5, 1.5)(document)
        higher_s = document["prediction"]["minibatch_s"] * 1.2
        first = document["verdict"]["solvers"][0]
        document["verdict"]["solvers"].append(first | {"solver": solver, "bound_s": higher_s})

    assert (_fault(*_forged("flush", change)) == "") is passes


def test_a_bound_above_the_step_time_the_solvers_or_the_certificate_is_refused() -> None:
    for name in SIMULATED:
        document, case = _forged(name, lambda d: d.update(bound_s=d["stated"]["minibatch_s"] * 1.01))
        assert _fault(document, case)
        assert "but this plan takes" in _fault(document | {"certificate": None}, case)
    for name in ("flush", "bound"):  # a bound between those of the solvers and the step time makes the gap smaller
        document, case = _forged(name, _times(1.5, 1.5, bound=1.01))
        assert _fault(document, case)
        assert "no solver's bound is as high" in _fault(document | {"certificate": None}, case)
    case = case_of("cards")
    document = changed(case.document, lambda d: d.update(certificate=case_of("bound").document["certificate"]))
    assert document["certificate"]["bound_s"] < document["bound_s"] * (1 - 1e-3)
    assert "the certificate shows" in findings(document, case.profile)["optimality"].text
    for factor in (1.0 + 1e-5, 1.5):
        bound_s = case.document["certificate"]["bound_s"] * factor
        forged = changed(case.document, lambda d: d["certificate"].update(bound_s=bound_s))  # noqa: B023
        assert "it shows only" in findings(forged, case.profile)["optimality"].text


def test_a_plan_outside_the_searched_space_may_not_call_its_verdict_proven() -> None:
    """Also where its status, for a gap that is not closed, is only `feasible`."""

    def change(document: Document) -> None:
        stages = document["plan"]["stages"]
        last = max(worker for stage in stages for worker in stage["workers"])
        for stage in stages:
            stage["workers"] = sorted(last - worker for worker in stage["workers"])
        document["bound_s"] *= 0.5

    forged, case = _forged("not certified", change)
    assert (forged["status"], forged["verdict"]["proven"]) == ("feasible", True)
    assert "the plan lies outside the searched space" in _fault(forged, case)


def test_every_figure_of_a_run_is_derived_again() -> None:
    def price(document: Document) -> None:
        cluster = replace(cluster_from_json(Node(document["cluster"], "cluster")), server_price=2.5)
        document["cluster"] = cluster.to_json() | {"digest": cluster.digest()}

    for name in ("both", "flush", "buffered", "one stage"):
        case = case_of(name)
        honest = _consistent(changed(case.document, price), case, RUN)
        assert _fault(honest, case) == ""
        stated = {key: value for key, value in honest["throughput"].items() if isinstance(value, int | float)}
        assert {"samples_per_s", "tokens_per_s", "epoch_s", "run_s"} <= set(stated)
        for key, value in stated.items():
            for other in (value * 2, value * 1.001 if isinstance(value, float) else value + 1, None):
                forged = honest | {"throughput": honest["throughput"] | {key: other}}
                assert _fault(forged, case).split(":")[0] in ("run", "document"), (key, other)
        faster_s = honest["stated"]["minibatch_s"] * 0.9
        other = _consistent(changed(honest, lambda d: d["stated"].update(minibatch_s=faster_s)), case)  # noqa: B023
        assert _fault(honest | {"throughput": other["throughput"]}, case).startswith("run: ")


def test_figures_of_a_run_that_nothing_shows_and_other_ages_of_gradients_are_refused() -> None:
    for case in map(case_of, ("both", "flush", "buffered")):
        for key in ("peak_share", "price_per_million_samples", "epoch_s", "run_price", "tokens_per_s"):
            assert case.document["throughput"][key] is None
            forged = case.document | {"throughput": case.document["throughput"] | {key: 0.9}}
            assert _fault(forged, case).startswith("run: ")
        updates = case.document["updates"]
        for key in ("stale_by", "samples"):
            for index in range(len(updates[key])):
                other = [value + (at == index) for at, value in enumerate(updates[key])]
                assert _fault(case.document | {"updates": updates | {key: other}}, case).startswith("run: ")
        assert _fault(case.document | {"updates": updates | {"synchronous": not updates["synchronous"]}}, case)


def test_commands_say_what_is_shown_and_require_a_proof(run: Run) -> None:
    def write(document: Document, case: Case) -> None:
        case.profile.save("profile.json")
        Path("plan.json").write_text(json.dumps(document))

    words = ("explain", "plan.json", "--profile", "profile.json", "--samples", "0")
    case, required = case_of("both"), ("check", "plan.json", "--require-proof")
    write(case.document | {"certificate": None, "certificate_note": SENTINEL}, case)
    checked, explained = run("check", "plan.json"), run(*words)
    assert (checked.code, explained.code) == (0, 0)
    assert SENTINEL not in checked.out + checked.err + explained.out + explained.err
    assert "optimality: stated, not shown: plan.json has no certificate" in checked.out
    assert "how much faster another plan may be is stated, not shown" in " ".join(explained.out.split())
    refused = run(*required)
    why = "error: plan.json is not shown to be optimal: plan.json has no certificate\n"
    assert (refused.code, refused.err) == (2, why)
    write(case.document, case)
    assert "Proof: no plan of the searched space is faster" in run(*words).out
    assert run(*required).code == 0
    # A proof can be required up to a gap.
    case = case_of("bound")
    write(case.document, case)
    assert run("check", "plan.json").code == 0
    refused = run(*required)
    assert refused.code == 2
    assert "no plan of the searched space takes less than" in refused.err
    share = case.document["stated"]["minibatch_s"] / case.document["certificate"]["bound_s"] - 1
    assert run(*required, "--within", f"{share * 100 + 0.01}%").code == 0
    assert run(*required, "--within", f"{share * 50}%").code == 2
    assert "goes with --require-proof" in run("check", "plan.json", "--within", "1%").err
