"""What a report is read from, the plan and its options, and what it is written as."""

from __future__ import annotations

import json
from typing import Any

import pytest
from reported import Document, branching, changed, report_of, small_cluster, source_of
from repository import ROOT

from pipeplan.errors import InputError
from pipeplan.problem.options import Options
from pipeplan.report.build import report_page, script_safe_json
from pipeplan.report.source import ReportSource


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


def test_damaged_plans_are_refused(straight: ReportSource) -> None:
    damages: dict[str, tuple[Any, str]] = {
        "prediction.minibatch_s": (0.0, "more than 0"),
        "options.pins": ([[]], "pins.0.: expected a list of 2, found 0 values"),
        "options.together": ([3], "together.0.: expected a list"),
        "options.no_cut_after": ([1], "expected text"),
        "options.max_stages": (2.5, "expected a whole number"),
        "options.memory": ("no", "expected true or false"),
    }
    for name, (value, complaint) in damages.items():
        with pytest.raises(InputError, match=complaint):
            changed(straight, {name: value})
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
