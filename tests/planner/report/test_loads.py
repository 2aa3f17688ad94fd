"""The loads in a report, and a run beside what was predicted of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from reported import Document, branching, report_of, rows, small_cluster, source_of, write_run

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.problem.options import Options
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.report.build import build_report
from pipeplan.report.document import INTERVAL_KINDS
from pipeplan.report.source import ReportSource
from pipeplan.run_data import run_folder as runs


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


def test_with_a_flush_the_parts_add_up() -> None:
    found = source_of(branching(4), small_cluster(), Options(schedule="1f1b-flush", accumulate=2, stages=2))
    loads = report_of(found)["loads"]
    parts = [load for load in loads if load["part"]]
    assert loads[: len(parts)] == parts
    assert sum(load["share"] for load in parts) == pytest.approx(1, rel=1e-4)
    assert "traffic from stage 1 to stage 2" in [load["name"] for load in loads[len(parts) :]]
    assert found.root.value["prediction"]["bound_by"] == "filling and draining the pipeline"
    assert [load["name"] for load in loads if load["binds"]] == [
        "the first microbatch's passes: filling and draining",
        "its transfers",
    ]


def test_the_wait_of_plain_data_parallelism_binds() -> None:
    """Three layers on four workers: backward takes 1 s for c, 1 for b and 4 for a; 5.5 s of the all-reduce are left.

    Their buckets of 2, 30 and 8 MiB travel for 0.5, 7.5 and 2 s: c's from 1 to 1.5, b's from 2 to 9.5, a's to 11.5.
    """
    mib, huge = 2**20, 10**9
    layers = (
        Layer("a", 1.0, 4.0, 8 * mib, 0),
        Layer("b", 1.0, 1.0, 30 * mib, 0),
        Layer("c", 1.0, 1.0, 2 * mib, 0, update_s=1.0),
    )
    tensors = (Tensor("x", "a", ("b",), huge, huge), Tensor("y", "b", ("c",), huge, huge))
    cluster = Cluster("t", Device("d", "cuda", 2**40), (Level("server", 4, 6.0 * mib),))
    found = source_of(Profile(layers, tensors, 1), cluster)
    assert found.plan.config == "4"
    told = report_of(found)
    first, *others = told["loads"]
    assert first["name"] == "gradient synchronisation of stage 1, for which the next forward pass waits"
    assert first["seconds"] == pytest.approx((3 + 6 + 1 + 5.5) / 4, rel=1e-5)
    assert (first["share"], first["binds"]) == (1, True)
    assert [one["name"] for one in others] == ["compute of stage 1", "port of worker 0, outgoing"]
    assert not any(one["binds"] for one in others)


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
