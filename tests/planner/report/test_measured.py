"""A run in a report, beside what was predicted of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from reported import branching, rows, small_cluster, source_of, write_run

from pipeplan.report.build import build_report
from pipeplan.report.document import INTERVAL_KINDS
from pipeplan.report.source import ReportSource
from pipeplan.run_data import run_folder as runs


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


def test_a_run_without_timelines_still_has_its_table(straight: ReportSource, tmp_path: Path) -> None:
    told = build_report(straight, runs.read_run(write_run(tmp_path / "run", straight, timelines=False))).to_json()
    assert told["timeline"]["measured"] is None
    assert any("recorded no timeline" in sentence for sentence in told["words"]["measured"])


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
