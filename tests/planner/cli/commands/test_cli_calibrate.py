"""What `pipeplan calibrate` reads, writes and refuses."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commandline import Run as Call
from commandline import check_refusals, refused
from runs import chain, cluster, summary_of, write_run

from pipeplan.cluster_data import cluster_toml
from pipeplan.profile_data.layers import Provenance
from pipeplan.profile_data.profile import Profile

SOLVED = ("--max-replicas", "1", "--schedule", "1f1b-stashing")


@pytest.fixture
def plan_folder(run: Call, tmp_path: Path) -> Path:
    """A plan of a small chain on two workers, solved in an empty folder, with its profile above it."""
    profile = chain([(0.1, 0.2, 0.01), (0.1, 0.1, 0.01), (0.1, 0.2, 0.01)])
    replace(profile, provenance=Provenance(notes=("kept",), how="stopwatch")).save(tmp_path / "profile.json")
    cluster_toml.write_cluster(cluster(2, bandwidth=1e9), tmp_path / "here.toml")
    # Not with `run_once`: the digest of a profile holds the path of its model.
    ran = run("solve", "profile.json", "--cluster", "here.toml", *SOLVED)
    assert ran.code == 0, ran.err
    return tmp_path / "plan"


MEASURED = ({"forward_s": 0.25, "backward_s": 0.5, "update_s": 0.03}, {"forward_s": 0.3, "backward_s": 0.3})


def a_run(plan_folder: Path, name: str = "one", step_time_s: float = 0.8, **more: Any) -> Path:
    return write_run(plan_folder, name, summary_of(plan_folder, step_time_s, MEASURED, **more))


def test_solving_again_predicts_what_was_measured(run: Call, plan_folder: Path, tmp_path: Path) -> None:
    a_run(plan_folder)
    before = (tmp_path / "profile.json").read_bytes()
    ran = run("calibrate", "plan/runs/one")
    assert ran.code == 0, ran.err
    assert "solve again with: pipeplan solve calibrated.json --cluster calibrated.toml" in ran.err
    assert (tmp_path / "profile.json").read_bytes() == before
    stages = json.loads((plan_folder / "plan.json").read_text())["plan"]["stages"]
    pins = [f"{stage['layers'][0]}={number}" for number, stage in enumerate(stages, 1)]
    pins.append(f"{stages[0]['layers'][-1]}=1")
    again = run(
        *("solve", "calibrated.json", "--cluster", "calibrated.toml", *SOLVED, "--json", "-o", "plan-2"),
        *(part for pin in pins for part in ("--pin", pin)),
    )
    assert json.loads(again.out)["prediction"]["minibatch_s"] == pytest.approx(0.8)
    stage = json.loads((tmp_path / "plan-2" / "stages" / "stage-0.json").read_text())
    assert stage["profile"] == "calibrated"
    assert run("calibrate", "plan", "-o", "c2.json").code == 0
    origin = Profile.load(tmp_path / "c2.json").provenance
    assert (origin.kind, origin.notes[0]) == ("calibrated", "kept")
    assert "proportion to a profile that was measured (stopwatch)" in origin.how
    assert sum("run one, stage " in note for note in origin.notes) == 2
    assert cluster_toml.load_cluster(str(tmp_path / "c2.toml")).levels[0].source == "nominal"
    assert "calibrated by runs on" in " ".join(run("profile", "show", "c2.json").out.split())


def test_of_several_runs_of_a_plan_the_median_counts(run: Call, plan_folder: Path) -> None:
    names = [f"plan/runs/{name}" for name in ("one", "two", "three")]
    for name, step_time_s, factor in zip(names, (0.8, 4.0, 0.9), (1.0, 5.0, 1.1), strict=True):
        stages = [{what: factor * value for what, value in one.items()} for one in MEASURED]
        write_run(plan_folder, Path(name).name, summary_of(plan_folder, step_time_s, stages))
    (found,) = json.loads(run("calibrate", *names, "--json", "--no-write").out)["runs"]
    assert (found["run"], found["measured_s"]) == ("one and 2 more", 0.9)
    assert found["calibrated_s"] == pytest.approx(0.9)
    alone = json.loads(run("calibrate", names[2], "--json", "--no-write").out)
    assert json.loads(run("calibrate", *names, "--json", "--no-write").out)["slack"] == pytest.approx(alone["slack"])


def test_json_has_all_that_was_found_and_nothing_need_be_written(run: Call, plan_folder: Path, tmp_path: Path) -> None:
    a_run(plan_folder)
    ran = run("calibrate", "plan", "--json", "--no-write")
    assert (ran.code, (tmp_path / "calibrated.json").exists()) == (0, False)
    found = json.loads(ran.out)
    assert (found["format"], found["version"]) == ("pipeplan-calibration", 1)
    assert (found["runs"][0]["measured_s"], found["stages"][0]["layers"][0]) == (0.8, "l0")
    assert found["runs"][0]["calibrated_s"] == pytest.approx(0.8)
    assert {one["operation"] for one in found["links"]} == {"all-reduce", "send/recv"}
    ran = run("calibrate", "plan", "-o", ".", "--no-write")
    assert (ran.code, "measured 1.25, calibrated 1.25" in " ".join(ran.out.split())) == (0, True), ran.err
    # A run that was disturbed, or in which workers mostly waited, is called so.
    slow = [MEASURED[0] | {"core_wait_s": 0.078}, MEASURED[1]]
    write_run(plan_folder, "two", summary_of(plan_folder, 1.56, slow))
    said = run("calibrate", "plan/runs/two", "--no-write").err
    assert re.search(r"note: a worker of run two waited for a core \d+% of its time: other programs", said)
    assert "note: for 50% of the time no stage was busy" in said


def test_nothing_is_replaced_unasked(run: Call, plan_folder: Path, tmp_path: Path) -> None:
    """And only what was calibrated before, however it is asked for."""
    a_run(plan_folder)
    assert run("calibrate", "plan").code == 0
    options = {
        "": "calibrated.json exists: give another file",
        "-o calibrated.js": "calibrated.toml exists: give another file",
        "-o profile.json --force": "profile.json is a profile that plans are",
        "-o here.json --force": "here.toml was not written by `pipeplan cal",
        "-o same.toml": "cannot both be same.toml",
        "-o .": "is a folder",
    }
    check_refusals(run, {f"calibrate plan {line}": said for line, said in options.items()})
    assert run("calibrate", "plan", "--force").code == 0


UNMEASURED = {"predicted": 1.0, "measured": None, "ratio": None}
SUMMARIES: dict[str, dict[str, Any]] = {
    "too few minibatches to measure a step time (3 after the fill": {"steady_minibatches": 3},
    "too few minibatches": {"includes_fill": True},
    "too few minibatches to": {"minibatch_s": UNMEASURED},
    "the measured step time is zero": {"minibatch_s": UNMEASURED | {"measured": 0.0}},
    "is a run of emulated stages": {"emulated": True},
    "is a run of another plan than": {"plan": "sha256:another"},
}
"""Fields of a summary that cannot be used, by the complaint."""
STAGES: dict[str, Callable[[list[dict[str, Any]]], object]] = {
    "measured 1 stages, and": lambda stages: stages.pop(),
    "measured no time at all": lambda stages: stages[1]["backward_s"].update(measured=0.0),
    "of an older version": lambda stages: stages[0]["measured"].pop("cpu_s"),
}
GONE = {
    "has no summary.json": "plan/runs/one/summary.json",
    "name it with --profile": "profile.json",
    "is not in the folder of its plan: name that with --plan": "plan/plan.json",
}


def test_what_cannot_be_used_is_refused_in_a_line(run: Call, plan_folder: Path, tmp_path: Path) -> None:
    assert "nothing does not exist" in refused(run, "calibrate", "nothing")
    for complaint in (*SUMMARIES, *STAGES, *GONE):
        shutil.rmtree(plan_folder / "runs", ignore_errors=True)
        path = a_run(plan_folder, **SUMMARIES.get(complaint, {})) / "summary.json"
        summary = json.loads(path.read_text())
        STAGES.get(complaint, id)(summary["stages"])
        path.write_text(json.dumps(summary))
        if complaint in GONE:
            (tmp_path / GONE[complaint]).unlink()
        assert complaint in refused(run, "calibrate", "plan/runs/one"), complaint


def test_runs_of_other_models_and_clusters_are_refused(run: Call, plan_folder: Path, tmp_path: Path) -> None:
    a_run(plan_folder)
    cluster_toml.write_cluster(cluster(3, bandwidth=1e9), tmp_path / "three.toml")
    assert run("solve", "profile.json", "--cluster", "three.toml", *SOLVED, "-o", "wide").code == 0
    chain([(0.1, 0.2, 0.0), (0.1, 0.2, 0.0)]).save(tmp_path / "two.json")
    assert run("solve", "two.json", "--cluster", "here.toml", *SOLVED, "-o", "short").code == 0
    for folder in ("wide", "short"):
        stages = len(list((tmp_path / folder / "stages").iterdir()))
        write_run(tmp_path / folder, "one", summary_of(tmp_path / folder, 0.8, [MEASURED[0]] * stages))
    assert "is for another cluster than" in run("calibrate", "plan", "wide").err
    assert "is a plan of another model than" in run("calibrate", "plan", "short").err
