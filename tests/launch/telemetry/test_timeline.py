"""What a run records of when its workers did what: against its own metrics, and laid over the replay of its plan."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from extents import slow_but_for
from toy_workers import Toy, depths, run_plan, stage_contents, write_plan

from pipeplan.run_data.run_folder import MeasuredRun, read_run
from pipeplan.simulation.engine import simulate_schedule
from pipeplan.simulation.perfetto import overlaid_document
from pipeplan.simulation.scenario import Scenario, StageBoundary, StageLoad
from pipeplan_launch.files import write_json
from pipeplan_launch.plan.schedule import SCHEDULES
from pipeplan_launch.telemetry.recorder import RECORDED_MINIBATCHES, Stopwatch, Timeline
from pipeplan_launch.telemetry.run_folder import BACKWARD, FORWARD, KINDS, UPDATE

MINIBATCHES = 10


def _ran(folder: Path, *arguments: str, **contents: Any) -> MeasuredRun:
    """A run of the toy, with 10 minibatches an epoch unless told otherwise."""
    files = stage_contents(**contents)
    write_plan(folder, files)
    world = sum(len(stage["workers"]) for stage in files[0]["pipeline"])
    run = folder / "run"
    toy = Toy(samples=2 * MINIBATCHES, test_samples=2 * MINIBATCHES)
    ended = run_plan(folder, ["--run-dir", str(run), "--epochs", "2", *arguments], toy, world)
    assert ended.statuses == [0] * world, ended.errors
    return read_run(run)


def _scenario(replicas: list[int], schedule: str, accumulate: int | None, depth: list[int] | None = None) -> Scenario:
    loads, worker = [], 0
    for count, deep in zip(replicas, depth or depths(replicas), strict=True):
        workers = tuple(range(worker, worker + count))
        loads.append(StageLoad(workers, deep, 1e-3, 2e-3, 1e-3 if count > 1 else 0.0, update_share=0.1))
        worker += count
    hops = tuple((StageBoundary(1e-4, 1e-4),) for _ in replicas[1:])
    return Scenario("x", tuple(loads), hops, SCHEDULES[schedule], 1.0, 1.0, workers_per_server=2, accumulate=accumulate)


def _has_causes_before_effects(run: MeasuredRun) -> None:
    """A pass begins when that of the stage before, or after, is done: workers of one machine have one clock."""
    done: dict[tuple[str, int, int], float] = {}
    begun: dict[tuple[str, int, int], float] = {}
    for timeline in run.recorded.values():
        for one in timeline.intervals:
            begun.setdefault((one.kind, timeline.stage, one.number), one.start_s)
            done.setdefault((one.kind, timeline.stage, one.number), one.end_s)
    for (kind, stage, number), start_s in begun.items():
        assert start_s >= 0
        before = {FORWARD: stage - 1, BACKWARD: stage + 1}.get(kind, stage)
        if before != stage:
            assert start_s >= done.get((kind, before, number), 0.0)


def _shape(document: dict[str, Any], name: str) -> set[tuple[str, str, int, int]]:
    """(name, category, process, thread) of what the workers did, processes counted from the lowest one."""
    events = document["traceEvents"]
    ours = {e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"].endswith(f", {name}")}
    servers = {e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"].startswith("server")}
    lowest = min(ours & servers)
    return {
        (event["name"], event["cat"], event["pid"] - lowest, event["tid"])
        for event in events
        if event["ph"] == "X" and event["pid"] in ours & servers
    }


PLANS: list[Any] = [
    ([2, 1], "1f1b-stashing", None),
    ([2, 1, 1], "vertical-sync", None),
    ([2, 1], "2bw", 4),
    ([1, 1, 1], "1f1b-flush", 5),
    ([2, 1], "gpipe", 4),
    ([1, 2], "forward-only", None),
]


@pytest.mark.parametrize("plan", slow_but_for(PLANS[:1], PLANS), ids=str)
def test_a_run_records_what_its_metrics_say_and_has_the_shape_of_its_replay(tmp_path: Path, plan: Any) -> None:
    replicas, schedule, accumulate = plan
    if schedule == "forward-only":
        run = _ran(tmp_path, replicas=replicas, mode="inference")
        left_out, kinds = {"wait", "update", "all-reduce"}, {"forward"}
    else:
        run = _ran(tmp_path, replicas=replicas, schedule=schedule, accumulate=accumulate)
        left_out, kinds = {"wait"}, {"forward", "backward", "update", "all-reduce"}
        assert list(run.recorded) == list(range(sum(replicas)))
        for rank, timeline in run.recorded.items():
            assert (timeline.epoch, timeline.first, timeline.minibatches) == (1, 0, MINIBATCHES)
            _is_as_in_the_metrics(run, rank, timeline)
        _has_causes_before_effects(run)
    depth = [-(-(accumulate or 1) // r) for r in replicas] if schedule == "gpipe" else None
    document = overlaid_document(_scenario(replicas, schedule, accumulate, depth), run)
    # Who waits, and for what, is what may differ.
    measured, predicted = (
        {each for each in _shape(document, name) if each[1] not in left_out} for name in ("measured", "predicted")
    )
    assert measured == predicted
    assert {each[1] for each in measured} == kinds - (set() if max(replicas) > 1 else {"all-reduce"})


def _is_as_in_the_metrics(run: MeasuredRun, rank: int, timeline: Any) -> None:
    found = map(json.loads, (run.folder / "metrics" / f"rank-{rank}.jsonl").read_text().splitlines())
    lines = {line["minibatch"]: line for line in found if line["epoch"] == 1}
    spent: dict[tuple[str, int], float] = defaultdict(float)
    for one in timeline.intervals:
        assert one.kind in KINDS
        spent[one.kind, one.number] += one.duration_s
    assert {number for kind, number in spent if kind == FORWARD} == lines.keys()
    for number, line in lines.items():
        assert spent[FORWARD, number] == pytest.approx(line["forward_s"], abs=1e-6)
        # What is left to do after a pass may be too brief to be recorded.
        assert spent[BACKWARD, number] == pytest.approx(line["backward_s"], abs=3e-5)
    # A replica without a minibatch in a short last group updates too, which no line of the metrics holds.
    updates = sum(line["update_s"] for line in lines.values())
    assert sum(seconds for (kind, _), seconds in spent.items() if kind == UPDATE) >= updates - 1e-5


@pytest.mark.slow
def test_segments_of_an_epoch_are_one_timeline(tmp_path: Path) -> None:
    run = _ran(tmp_path, "--checkpoint-minibatches", "3", replicas=[2, 1])
    for timeline in run.recorded.values():
        theirs = [one for one in timeline.intervals if one.kind == FORWARD]
        # Every segment begins with the first replica's turn.
        own = [n for n in range(MINIBATCHES) if timeline.stage == 1 or n % 3 % 2 == timeline.replica]
        assert [one.number for one in theirs] == own
        assert all(one.end_s <= other.start_s for one, other in pairwise(theirs))
        updates = [one.number for one in timeline.intervals if one.kind == UPDATE]
        assert updates == list(range(2 + 2 + 2 + 1 if timeline.stage == 0 else MINIBATCHES))


def _lap(start_s: float, end_s: float) -> Stopwatch:
    lap = Stopwatch()
    lap.start_s, lap.end_s = start_s, end_s
    return lap


def _recorded(run: Path, timeline: Timeline) -> Any:
    timeline.write(run)
    return json.loads((run / "timeline" / "rank-3.json").read_text())


def test_only_the_first_minibatches_are_recorded_and_only_once_begun(tmp_path: Path) -> None:
    timeline = Timeline("sha256:plan", 3, 1, 0)
    timeline.note("forward", 0, _lap(0.0, 1.0))
    assert _recorded(tmp_path, timeline)["intervals"] == []
    zero = 7.0
    timeline.begin(4, 100, 1000, zero)
    for minibatch in (100, 99 + RECORDED_MINIBATCHES, 100 + RECORDED_MINIBATCHES):
        timeline.note("forward", minibatch, _lap(zero + 1, zero + 2))
    timeline.note("wait", 101, _lap(zero, zero + 1e-5), keep_brief=False)
    timeline.note("all-reduce", 50, _lap(zero + 2, zero + 3), first=100, since_s=zero + 0.5)
    timeline.note("update", 178, _lap(zero + 2, zero + 3), first=100 + RECORDED_MINIBATCHES)
    assert _recorded(tmp_path, timeline) == {
        "format": "pipeplan-timeline",
        "version": 1,
        "plan": "sha256:plan",
        "rank": 3,
        "stage": 1,
        "replica": 0,
        "epoch": 4,
        "epoch_minibatches": 1000,
        "first": 100,
        "minibatches": RECORDED_MINIBATCHES,
        "intervals": [["all-reduce", 50, 0.5, 3.0], ["forward", 100, 1.0, 2.0], ["forward", 355, 1.0, 2.0]],
    }


def _summary(folder: Path) -> Path:
    folder.mkdir()
    head = {"format": "pipeplan-summary", "version": 1, "plan": "sha256:plan", "minibatch_s": {}}
    write_json(folder / "summary.json", head | {"includes_fill": False, "steady_minibatches": 0, "stages": []})
    return folder


def test_what_was_written_is_read_and_what_another_plan_left_is_not(tmp_path: Path) -> None:
    run, timeline = _summary(tmp_path / "run"), Timeline("sha256:plan", 3, 1, 0)
    timeline.begin(0, 0, 5, 7.0)
    timeline.note("backward", 2, _lap(7.25, 7.75))
    timeline.write(run)
    Timeline("sha256:before", 0, 0, 0).write(run)
    found = read_run(run)
    assert list(found.timelines) == [3]
    (interval,) = found.timelines[3]
    assert (interval.kind, interval.number, interval.start_s, interval.end_s) == ("backward", 2, 0.25, 0.75)
    assert (found.recorded[3].stage, found.recorded[3].epoch_minibatches) == (1, 5)


def test_a_replay_of_the_same_plan_has_as_many_minibatches_as_were_recorded(tmp_path: Path) -> None:
    run, scenario = _summary(tmp_path / "run"), _scenario([1, 1], "1f1b-stashing", None)
    for rank in (0, 1):
        timeline = Timeline("sha256:plan", rank, rank, 0)
        timeline.begin(0, 40, 1000, 0.0)
        for minibatch in range(40, 40 + RECORDED_MINIBATCHES):
            timeline.note("forward", minibatch, _lap(minibatch, minibatch + 0.5))
        timeline.write(run)
    events = overlaid_document(scenario, read_run(run))["traceEvents"]
    forwards = [e for e in events if e["ph"] == "X" and e["cat"] == "forward" and e["args"]["stage"] == 2]
    by_process = defaultdict(set)
    for event in forwards:
        by_process[event["pid"]].add(event["args"]["minibatch"])
    assert list(by_process.values()) == [set(range(40, 40 + RECORDED_MINIBATCHES))] * 2
    # Nothing drains at their end, as the epoch goes on.
    ends = [e["ts"] + e["dur"] for e in events if e["ph"] == "X" and e["cat"] == "backward" and e["pid"] < 10]
    assert max(ends) < 1e6 * simulate_schedule(scenario, RECORDED_MINIBATCHES + 3).end_s
