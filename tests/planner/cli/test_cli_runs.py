"""`pipeplan simulate`, its traces with a run beside the prediction, and `pipeplan calibrate`."""

from __future__ import annotations

import json
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commandline import Run, check_refusals, refused, run_once
from runs import GIB, chain, cluster, summary_of, write_run

from pipeplan.cluster_data import cluster_toml
from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cluster_data.cluster_toml import write_cluster
from pipeplan.profile_data.layers import Layer, Provenance, Tensor
from pipeplan.profile_data.profile import Profile


@pytest.fixture
def planned(run: Run) -> Path:
    """A folder with a plan of several stages."""
    profile = Profile(
        layers=(Layer("a", 1.0, 2.0, 100, 10), Layer("b", 1.5, 3.0, 10**12, 4)),
        tensors=(Tensor("x", "a", ("b",), 10**9, 10**9),),
        minibatch=4,
        model_name="small",
    )
    profile.save(Path("profile.json"))
    given = ("--cluster", "A", "--servers", "2", "--ignore-memory", "--schedule", "1f1b-stashing")
    assert run_once(run, "solve", *given, "--solver", "dp").code == 0
    return Path("plan")


def test_it_tells_the_step_time_and_draws_the_workers(run: Run, planned: Path) -> None:
    done = run("simulate", "plan")
    assert done.code == 0, done.err
    assert "in the steady state, 1.000 of the predicted" in " ".join(done.out.split())
    for mark in ("Fill ", "Links busy", "F0", "B0=", "computing", "peak"):
        assert mark in done.out
    workers = sum(len(stage["workers"]) for stage in json.loads((planned / "plan.json").read_text())["plan"]["stages"])
    assert sum(line.startswith("w") for line in done.out.splitlines()) == workers
    assert "too few for a steady state" in run("simulate", "plan", "--microbatches", "1").out
    assert json.loads(run("simulate", "plan", "--microbatches", "1", "--json").out)["steady"] is None


def test_json_and_a_trace(run: Run, planned: Path) -> None:
    done = run("simulate", "plan", "--json", "--trace", "made/trace.json", "--microbatches", "300")
    report = json.loads(done.out)
    assert (report["format"], report["version"], report["minibatches"]) == ("pipeplan-simulation", 1, 300)
    assert report["ratio"] == pytest.approx(1.0, rel=0.01)
    assert all(stage["peak_in_flight"] <= stage["depth"] for stage in report["stages"])
    assert json.loads(Path("made/trace.json").read_text())["traceEvents"]
    assert run("simulate", "plan", "--trace", "made/trace.json").code == 0
    line = refused(run, "simulate", "plan", "--trace", "plan/plan.json")
    assert line.startswith("plan/plan.json exists and is not a trace: give another file with --trace")


def test_a_damaged_plan_is_one_line(run: Run, planned: Path) -> None:
    path = planned / "plan.json"
    whole = path.read_text()
    for old, new, expected in (
        ('"version": 1', '"version": 2', "plan.json is version 2 of pipeplan-plan; this pipeplan reads up to 1"),
        ('"copies": 1', '"copies": 0', "copies: expected at least 1"),
    ):
        assert old in whole
        path.write_text(whole.replace(old, new, 1))
        assert expected in refused(run, "simulate", "plan")
    path.write_text(whole)
    Path("empty").mkdir()
    refusals = {"empty": "empty has no plan.json", "profile.json": "is not a folder"}
    refusals |= dict.fromkeys(("plan --microbatches 0", "plan --microbatches many"), "")
    check_refusals(run, {f"simulate {line}": said for line, said in refusals.items()})
    (planned / "stages" / "stage-0.json").unlink()
    assert "stages/stage-0.json is missing" in refused(run, "simulate", "plan")


FORWARD_S, BACKWARD_S, UPDATE_S, MOVE_S = 1.0, 2.0, 0.5, 0.25
"""Of both stages, but the update of the first alone, and what lies between them."""
COUNT = 12
Rows = Sequence[tuple[str, int, float, float]]


@pytest.fixture
def traced(run: Run) -> Path:
    """A plan of two stages, 1-1, by which every time is a multiple of a quarter of a second."""
    levels = (Level("server", 1, 32.0), Level("cluster", 2, 32.0))
    write_cluster(Cluster("two", Device("x", "cpu", 9 * GIB), levels), Path("two.toml"))
    chain([(FORWARD_S, BACKWARD_S, UPDATE_S), (FORWARD_S, BACKWARD_S, 0.0)]).save(Path("profile.json"))
    done = run_once(run, "solve", "--cluster", "two.toml", "--solver", "dp", "--schedule", "1f1b-stashing")
    assert done.code == 0, done.err
    assert json.loads(Path("plan/plan.json").read_text())["plan"]["config"] == "1-1"
    return Path("plan")


def _write_run(plan: Path, rows: Sequence[Rows], name: str = "20260131T120000Z", digest: str = "") -> Path:
    folder = plan / "runs" / name
    (folder / "timeline").mkdir(parents=True)
    own = json.loads((plan / "stages" / "stage-0.json").read_text())["plan"]
    common = {"version": 1, "plan": digest or own}
    step_time = {"predicted": 3.5, "measured": 7.0, "ratio": 2.0}
    summary = {"format": "pipeplan-summary", "minibatch_s": step_time} | common
    summary |= {"includes_fill": False, "steady_minibatches": 5, "stages": []}
    (folder / "summary.json").write_text(json.dumps(summary))
    for rank, intervals in enumerate(rows):
        head = {"format": "pipeplan-timeline", "rank": rank, "stage": rank, "replica": 0, "epoch": 1, "first": 0}
        head |= {"epoch_minibatches": COUNT, "minibatches": COUNT, "intervals": intervals} | common
        (folder / "timeline" / f"rank-{rank}.json").write_text(json.dumps(head))
    return folder


def _sequential(times: float) -> list[Rows]:
    """A run that has one minibatch in the pipeline at a time, so many times as slow as predicted."""
    first: list[tuple[str, int, float, float]] = []
    second: list[tuple[str, int, float, float]] = []
    now = 0.0
    for minibatch in range(COUNT):
        ends = [now]
        for seconds in (FORWARD_S, MOVE_S, FORWARD_S, BACKWARD_S, MOVE_S, BACKWARD_S, UPDATE_S):
            ends.append(ends[-1] + seconds * times)
        first += [("forward", minibatch, now, ends[1]), ("wait", minibatch, ends[1], ends[5])]
        first += [("backward", minibatch, ends[5], ends[6]), ("update", minibatch, ends[6], ends[7])]
        second += [("wait", minibatch, now, ends[2]), ("forward", minibatch, ends[2], ends[3])]
        second += [("backward", minibatch, ends[3], ends[4]), ("update", minibatch, ends[4], ends[4])]
        now = ends[7]
    return [first, second]


def _events(path: str) -> list[dict[str, Any]]:
    """A trace's events, with what the Trace Event Format asks of them checked."""
    events: list[dict[str, Any]] = json.loads(Path(path).read_text())["traceEvents"]
    ends: dict[tuple[int, int], int] = defaultdict(int)
    assert [event["ts"] for event in events] == sorted(event["ts"] for event in events)
    for event in events:
        assert isinstance(event["name"], str)
        assert event["ph"] in "MXCsf"
        if event["ph"] in "sf":  # arrows
            assert isinstance(event["id"], str)
            continue
        assert isinstance(event["args"], dict)
        assert all(isinstance(event[key], int) for key in ("pid", "tid"))
        if event["ph"] == "X":
            assert isinstance(event["cat"], str)
            start, lasts = round(event["ts"] * 1000), round(event["dur"] * 1000)
            row = event["pid"], event["tid"]
            assert lasts >= 0
            assert start >= ends[row], f"{event} begins before what is in its thread is over"
            ends[row] = start + lasts
    return events


def _bars(events: Sequence[dict[str, Any]], process: int) -> list[tuple[Any, ...]]:
    return [
        (event["name"], event["cat"], event["tid"], event["ts"] / 1e6, event["dur"] / 1e6)
        for event in events
        if event["ph"] == "X" and event["pid"] == process and event["cat"] != "wait"
    ]


def _processes(events: Sequence[dict[str, Any]]) -> dict[str, int]:
    return {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}


def test_predicted_and_measured_have_one_shape_and_one_zero(run: Run, traced: Path) -> None:
    _write_run(traced, _sequential(2.0))
    done = run("simulate", "--run", "latest", "--trace", "trace.json")
    assert done.code == 0, done.err
    assert "trace.json" in done.err
    events = _events("trace.json")
    processes = _processes(events)
    assert processes == {
        "server 0, predicted": 1,
        "server 1, predicted": 2,
        "links, predicted": 3,
        "server 0, measured": 11,
        "server 1, measured": 12,
    }
    for server in (1, 2):
        predicted, measured = _bars(events, server), _bars(events, 10 + server)
        assert {bar[:3] for bar in predicted} == {bar[:3] for bar in measured}
        assert len(predicted) == len(measured) == 3 * COUNT
    threads = {(e["pid"] % 10, e["tid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    assert {each for each in threads if each[0] < 3} == {(1, 1, "worker 0, stage 1"), (2, 3, "worker 1, stage 2")}
    assert _bars(events, 1)[0] == ("F0", "forward", 1, 0.0, FORWARD_S)
    assert _bars(events, 11)[0] == ("F0", "forward", 1, 0.0, 2 * FORWARD_S)
    arguments = {e["cat"]: set(e["args"]) for e in events if e["ph"] == "X" and e["pid"] in (1, 2, 11, 12)}
    assert arguments["forward"] == arguments["backward"] == {"stage", "minibatch"}
    assert arguments["update"] == {"stage", "group"}


def test_the_replay_is_drawn_as_the_schedule_has_it(run: Run, traced: Path) -> None:
    """The first backward pass of stage 1 by hand: two passes there, the link each way, and the step at its end."""
    assert run("simulate", "--trace", "trace.json").code == 0
    events = _events("trace.json")
    bars = {bar[:2]: bar[3:] for bar in _bars(events, 1)}
    begins = FORWARD_S + MOVE_S + FORWARD_S + BACKWARD_S + MOVE_S
    assert bars["B0", "backward"] == (begins, BACKWARD_S)
    assert bars["U0", "update"] == (begins + BACKWARD_S, UPDATE_S)
    waits = [e for e in events if e["ph"] == "X" and e["pid"] == 2 and e["cat"] == "wait"]
    assert (waits[0]["name"], waits[0]["ts"], waits[0]["dur"]) == ("wait for F0", 0.0, 1e6 * (FORWARD_S + MOVE_S))
    counted = [e["args"]["minibatches"] for e in events if e["name"] == "in flight on worker 1"]
    assert set(counted) == {0, 1}
    assert {e["name"] for e in events if e["ph"] == "C"} >= {"memory of worker 0", "memory of worker 1"}


def test_only_so_many_microbatches_and_a_wait_is_named_after_what_follows(run: Run, traced: Path) -> None:
    folder = _write_run(traced, _sequential(1.0))
    for of_run, processes in ([], (1, 2)), (["--run", str(folder)], (1, 2, 11, 12)):
        assert run("simulate", "--trace", "trace.json", "--microbatches", "5", *of_run).code == 0
        events = _events("trace.json")
        for process in processes:
            assert {bar[0] for bar in _bars(events, process)} == {f"{kind}{n}" for kind in "FBU" for n in range(5)}
    kinds = (("forward", 0), ("wait", 0), ("backward", 0), ("wait", 0), ("update", 0), ("wait", 1))
    first = [(kind, number, float(at), at + 1.0) for at, (kind, number) in enumerate(kinds)]
    _write_run(traced, [first, [("all-reduce", 0, 0.5, 4.0)]], "20260201T000000Z")
    assert run("simulate", "--run", "latest", "--trace", "trace.json").code == 0
    events = [event for event in _events("trace.json") if event.get("pid", 0) > 10]
    waits = [(e["name"], e["args"]) for e in events if e["ph"] == "X" and e["cat"] == "wait"]
    assert waits == [("wait for B0", {"stage": 1, "minibatch": 0}), ("wait for U0", {"stage": 1, "group": 0})]
    (sums,) = (e for e in events if e["ph"] == "X" and e["cat"] == "all-reduce")
    assert (sums["name"], sums["tid"], sums["args"]) == ("R0", 4, {"stage": 2, "group": 0})


TRACED = "simulate --trace trace.json --run latest "
TRACES_REFUSED = {
    "simulate --run latest": "give --trace FILE",
    TRACED + "nowhere": "nowhere does not exist",
    TRACED + "plan": "plan has no run that came to its end",
    TRACED + "plan --run elsewhere": "elsewhere does not exist",
    TRACED + "plan --trace .": "is a folder",
}
DAMAGED_RUNS = (
    ("summary.json", '"pipeplan-summary"', '"x"', "summary.json is not a pipeplan-summary file"),
    ("timeline/rank-1.json", "]", "", "rank-1.json is not valid JSON"),
    ("timeline/rank-1.json", '"forward", 0, ', '"forward", ', "intervals[1]: expected a list of 4, found 3 values"),
    ("timeline/rank-1.json", '"forward", 0, ', '"run", 0, ', "intervals[1]: kind: expected 'forward' or"),
    ("timeline/rank-1.json", '"forward", 0, 1.25', '"forward", 0, 1e9', "[1]: the end, 2.25 s, is before"),
    ("timeline/rank-1.json", '"epoch": 1', '"epoch": 2', "has files of different epochs"),
    ("timeline/rank-1.json", '"stage": 1', '"stage": 0', "its worker 1 has another stage"),
    ("timeline/rank-1.json", '"minibatches": 12', '"minibatches": 13', "are more than an epoch of 12 has"),
)


def test_a_trace_of_a_run_that_is_wrong_is_one_line(run: Run, traced: Path) -> None:
    check_refusals(run, TRACES_REFUSED)
    folder = _write_run(traced, _sequential(1.0))
    for file, old, new, said in DAMAGED_RUNS:
        whole = (folder / file).read_text()
        (folder / file).write_text(whole.replace(old, new, 1))
        assert said in refused(run, *TRACED.split()), said
        (folder / file).write_text(whole)
    _write_run(traced, _sequential(1.0), "20260201T000000Z", "sha256:other")
    assert "is a run of another plan than plan has now" in refused(run, *TRACED.split())
    _write_run(traced, [], "20260202T000000Z")
    assert "has no timelines" in refused(run, *TRACED.split())


SOLVED = ("--max-replicas", "1", "--schedule", "1f1b-stashing")


@pytest.fixture
def plan_folder(run: Run, tmp_path: Path) -> Path:
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


def test_solving_again_predicts_what_was_measured(run: Run, plan_folder: Path, tmp_path: Path) -> None:
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


def test_of_several_runs_of_a_plan_the_median_counts(run: Run, plan_folder: Path) -> None:
    names = [f"plan/runs/{name}" for name in ("one", "two", "three")]
    for name, step_time_s, factor in zip(names, (0.8, 4.0, 0.9), (1.0, 5.0, 1.1), strict=True):
        stages = [{what: factor * value for what, value in one.items()} for one in MEASURED]
        write_run(plan_folder, Path(name).name, summary_of(plan_folder, step_time_s, stages))
    (found,) = json.loads(run("calibrate", *names, "--json", "--no-write").out)["runs"]
    assert (found["run"], found["measured_s"]) == ("one and 2 more", 0.9)
    assert found["calibrated_s"] == pytest.approx(0.9)
    alone = json.loads(run("calibrate", names[2], "--json", "--no-write").out)
    assert json.loads(run("calibrate", *names, "--json", "--no-write").out)["slack"] == pytest.approx(alone["slack"])


def test_json_has_all_that_was_found_and_nothing_need_be_written(run: Run, plan_folder: Path, tmp_path: Path) -> None:
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


def test_nothing_is_replaced_unasked(run: Run, plan_folder: Path, tmp_path: Path) -> None:
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
    "is not in the folder of its plan: name that folder with --plan": "plan/plan.json",
}


def test_what_cannot_be_used_is_refused_in_a_line(run: Run, plan_folder: Path, tmp_path: Path) -> None:
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


def test_runs_of_other_models_and_clusters_are_refused(run: Run, plan_folder: Path, tmp_path: Path) -> None:
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
