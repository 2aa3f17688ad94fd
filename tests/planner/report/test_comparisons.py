"""The figures in a report: other plans, loads, a run beside its prediction, and what is proven."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from checking import case_of
from reported import Document, branching, changed, report_of, rows, small_cluster, source_of, write_run
from repository import ROOT

from pipeplan.errors import InputError
from pipeplan.problem.options import Options
from pipeplan.report.build import build_report, report_page, script_safe_json
from pipeplan.report.comparisons import certificate_section
from pipeplan.report.document import INTERVAL_KINDS
from pipeplan.report.source import ReportSource, read_report_source
from pipeplan.run_data import run_folder as runs
from pipeplan.util.files import Node


def test_baselines_are_those_of_the_plan(source: ReportSource, document: Document) -> None:
    this, *others = document["comparisons"]
    assert (this["config"], this["gain"]) == ("15-1, 1f1b-stashing", 1)
    said = {one["name"].removeprefix("best "): one for one in source.root.value["baselines"]}
    assert {one["name"] for one in others} == set(said)
    for one in others:
        assert one["minibatch_s"] == pytest.approx(said[one["name"]]["minibatch_s"], rel=1e-5)
        assert one["gain"] == pytest.approx(one["minibatch_s"] / source.step_time_s, rel=1e-4)


def test_a_plan_is_shown_to_be_the_fastest_by_its_certificate_alone() -> None:
    for solver in ("dp", "both"):
        plain = source_of(branching(4), small_cluster(), solver=solver)
        bare = report_of(plain)
        assert not bare["certificate"]["proven"]
        assert bare["certificate"]["gap"] is None
        certified = report_of(source_of(branching(4), small_cluster(), solver=solver, certify=True))
        assert certified["certificate"]["proven"]
        assert any("verifies this without the solvers" in text for text in certified["certificate"]["sentences"])


def test_what_the_file_claims_is_not_repeated_as_shown(straight: ReportSource) -> None:
    claims = {"verdict.proven": True, "verdict.text": "proven optimal by an oracle", "gap": 0.0, "status": "optimal"}
    claims |= {"bound_s": straight.step_time_s, "certificate_note": "an oracle said so"}
    told = report_of(changed(straight, claims))
    assert (told["certificate"]["proven"], told["certificate"]["gap"]) == (False, None)
    assert "oracle" not in json.dumps(told)
    assert any("`pipeplan check` finds plan.json wrong (verdict)" in note for note in told["notes"])

    remarks = {one["name"]: one["remark"] for one in report_of(straight)["comparisons"]}
    assert remarks["data parallelism"] == "stated, not shown"
    assert remarks["uniform grid"] == "stated to be the best; stated, not shown"


def test_a_plan_that_a_faster_one_may_beat_is_not_called_the_fastest() -> None:
    """Its certificate shows a bound, but this is lower than its step time."""
    case = case_of("bound")
    told = report_of(read_report_source(Node(case.document, "plan.json"), case.profile))
    gap = case.document["stated"]["minibatch_s"] / case.document["certificate"]["bound_s"] - 1
    assert gap > 0.2
    assert not told["certificate"]["proven"]
    assert told["certificate"]["gap"] == pytest.approx(gap, rel=1e-4)


def test_rivals_are_those_of_the_answer_at_its_own_batch(straight: ReportSource) -> None:
    """Each has the time of as many samples as a microbatch of the plan, whatever its own microbatch is."""
    own = {"config": straight.plan.config, "schedule": straight.plan.schedule, "minibatch": straight.microbatch}
    rate = straight.microbatch / straight.stated.step_s
    ddp = {"kind": "DDP", "config": "4", "schedule": "1f1b-flush", "minibatch": 8, "data_parallel": "ddp", "workers": 4}
    grid = {"kind": "uniform pipeline", "config": "2-2", "schedule": "1f1b-flush", "minibatch": 4, "workers": 4}
    old = grid | {"kind": "old gradients", "schedule": "2bw", "updates": {"stale_by": [1, 0]}}
    choice = {
        "rivals": [
            own | {"kind": "pipeline", "workers": straight.plan.busy, "samples_per_s": rate},
            ddp | {"samples_per_s": rate / 2},
            grid | {"samples_per_s": rate / 4, "allowed": False},
        ],
        "stale": old | {"samples_per_s": rate * 2},
    }
    told = report_of(changed(straight, {"choice": choice}))
    found = [(one["name"], one["config"], one["gain"], one["remark"]) for one in told["comparisons"]]
    assert found == [
        ("this plan", straight.name, 1, ""),
        ("DDP", "", 2, "4 workers, microbatch 8"),
        ("uniform pipeline", "2-2, 1f1b-flush", 4, "4 workers, microbatch 4; excluded by the constraints"),
        ("old gradients", "2-2, 2bw", 0.5, "4 workers, microbatch 4; gradients 1 update old"),
    ]
    assert "stated, not shown" in " ".join(told["words"]["comparisons"])


def test_a_gap_that_the_answer_states_wider_than_its_certificate_is_the_one_of_the_page() -> None:
    """The certificate is about one microbatch size and schedule, the answer about all of them."""
    certified = source_of(branching(4), small_cluster(), certify=True)
    assert report_of(certified)["certificate"]["proven"]
    told = changed(certified, {"gap": 0.25, "bound_s": certified.stated.step_s / 1.25})
    certificate = certificate_section(replace(told, checked=certified.checked))
    assert (certificate["proven"], certificate["gap"]) == (False, 0.25)
    assert any("none is more than 25.0% faster" in text for text in certificate["sentences"])


def test_every_option_is_read_back() -> None:
    options = Options(
        overlap=0.5,
        memory=False,
        max_replicas=3,
        allow_copies=False,
        recompute=False,
        contention=False,
        boundary="parallel",
        max_stages=3,
        max_workers=3,
        pins=(("l0", 1),),
        together=(("l2", "l3"),),
        no_cut_after=("l4",),
    )
    found = source_of(branching(), small_cluster(), options)
    assert found.problem.options == options


def test_a_plan_that_has_no_steady_state_is_refused() -> None:
    gpipe = source_of(branching(4), small_cluster(), Options(schedule="gpipe", accumulate=4, max_replicas=1))
    with pytest.raises(InputError, match="allow no steady state"):
        changed(gpipe, {"plan.accumulate": 80})


def test_what_the_plan_says_and_the_cost_model_does_not_is_told(straight: ReportSource) -> None:
    stated = straight.root["prediction"]["minibatch_s"].number()
    notes = report_of(changed(straight, {"prediction.minibatch_s": 1.5 * stated}))["notes"]
    assert any("solve again" in note for note in notes)


def test_the_document_survives_the_page(source: ReportSource) -> None:
    hostile = "</script><script>alert(1)</script>\u2028<!-- & \"'\\"
    told = report_of(changed(source, {"profile.model": hostile}))
    text = script_safe_json(told)
    assert json.loads(text) == told
    assert not set(text) & set("<>&\u2028\u2029")
    whole = report_page(told)
    assert whole.count(text) == 1
    assert "<script>alert" not in whole


def test_every_field_of_the_document_is_described(document: Document) -> None:
    page = (ROOT / "docs" / "report.md").read_text(encoding="utf-8")
    text = page.split("## The document")[1]
    names = {name for name in document if name != "words"}
    for part in ("made", "prediction", "timeline", "graph", "certificate"):
        names |= document[part].keys()
    for part in ("stages", "loads", "memory", "comparisons", "placement"):
        names |= document[part][0].keys()
    names |= document["graph"]["nodes"].keys()
    names |= document["timeline"]["predicted"].keys()
    assert not {name for name in names if f"`{name}`" not in text}


def test_the_step_time_is_the_plans_and_its_slowest_resource_has_all_of_it(
    source: ReportSource, document: Document
) -> None:
    said = document["prediction"]
    assert said["minibatch_s"] == pytest.approx(source.step_time_s, rel=1e-5)
    assert said["samples_per_s"] == pytest.approx(64 / source.step_time_s, rel=1e-5)
    loads = document["loads"]
    first = loads[0]
    assert first["name"] == said["bound_by"]
    assert first["binds"] is True
    assert first["share"] == pytest.approx(1, rel=1e-5)
    seconds = [load["seconds"] for load in loads]
    assert seconds == sorted(seconds, reverse=True)


def test_a_run_stands_beside_the_prediction(straight: ReportSource, tmp_path: Path) -> None:
    run = runs.read_run(write_run(tmp_path / "run", straight))
    told = build_report(straight, run).to_json()
    assert told["measured"]["ratio"] == 1.25
    assert told["measured"]["minibatch_s"] == pytest.approx(1.25 * straight.step_time_s, rel=1e-5)
    assert told["measured"]["stages"][0]["load_s"] == 0.002
    assert told["measured"]["stages"][0]["send_s"] is None
    stages = straight.scenario.stages
    assert [one["measured_peak_bytes"] for one in told["memory"]] == [
        round(1.25 * stage.memory_bytes) for stage in stages
    ]
    seen = rows(told["timeline"]["measured"])
    lanes = told["timeline"]["lanes"]
    for lane, worker in enumerate(lanes["worker"]):
        mine = [one for one in seen if one[0] == lane]
        assert [INTERVAL_KINDS[one[1]] for one in mine].count("forward") == 6, f"worker {worker}"
    assert told["timeline"]["minibatches"] == 6, "as many are predicted as were recorded"
    assert any("stage 0 computes for longer" in sentence for sentence in told["words"]["measured"])
    assert any("80% of the predicted throughput" in sentence for sentence in told["words"]["measured"])


def test_how_busy_an_all_reduce_was_is_its_share_of_what_was_recorded(tmp_path: Path) -> None:
    wide = source_of(branching(), small_cluster())
    assert max(stage.replicas for stage in wide.plan.stages) > 1
    told = build_report(wide, runs.read_run(write_run(tmp_path / "run", wide))).to_json()
    rings = [load for load in told["loads"] if load["measured_busy"] is not None]
    longest = max(stage.forward_s for stage in wide.scenario.stages)
    for ring in rings:
        stage = wide.scenario.stages[int(ring["name"].split()[-1]) - 1]
        assert ring["measured_busy"] == pytest.approx(3 * stage.forward_s / (6 * longest), rel=1e-4)
    assert rings
