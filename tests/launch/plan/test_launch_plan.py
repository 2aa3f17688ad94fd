"""Reading a plan, and how old its gradients are."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from toy_workers import stage_contents, write_plan

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.files import with_checksum
from pipeplan_launch.plan.launch_plan import LaunchPlan
from pipeplan_launch.plan.run_options import (
    StalenessOptions,
    check_staleness_options,
    staleness_text,
    update_delay,
)
from pipeplan_launch.plan.schedule import SCHEDULES, StageShape
from pipeplan_launch.plan.stage_files import load_plan

Change = Callable[[list[dict[str, Any]]], object]


def test_reads_what_the_planner_writes(tmp_path: Path) -> None:
    plan = load_plan(write_plan(tmp_path, stage_contents([2, 1, 1], idle=1)))
    assert plan.written() == "2-1-1"
    assert plan.world == 5
    assert plan.active == (1, 2, 3, 4)
    assert [plan.place(rank) for rank in range(5)] == [None, (0, 0), (0, 1), (1, 0), (2, 0)]
    assert plan.layers == (("layer0",), ("layer1",), ("layer2",))
    assert plan.predictions[1].forward_s == 0.002
    assert plan.predictions[1].sync_s is None
    assert [shape.depth for shape in plan.shapes] == [2, 2, 1]


def everywhere(key: str, value: Any) -> Change:
    def change(contents: list[dict[str, Any]]) -> None:
        for content in contents:
            content[key] = value

    return change


def inside(stage: int, key: str, value: Any) -> Change:
    """Change a stage's entry of the pipeline, in all files."""

    def change(contents: list[dict[str, Any]]) -> None:
        pipeline = json.loads(json.dumps(contents[0]["pipeline"]))
        pipeline[stage][key] = value
        everywhere("pipeline", pipeline)(contents)

    return change


REFUSED: list[tuple[Change, str]] = [
    (lambda c: c[1].update(minibatch=3), "disagree on 'minibatch'"),
    (lambda c: c[2].update(plan="sha256:other"), "of different plans"),
    (lambda c: c.pop(1), "stage-1.json is missing: the plan has 3 stages"),
    (lambda c: c.pop(0), "stage-0.json is missing"),
    (lambda c: c.append(c[2] | {"stage": 3}), "stage-3.json does not belong to this plan"),
    (everywhere("version", 2), "newer than this pipeplan reads"),
    (everywhere("format", "pipeplan-plan"), "not a stage file"),
    (everywhere("minibatch", 0), "stage-0.json: minibatch: expected at least 1, found 0"),
    (everywhere("minibatch", True), "minibatch: expected a whole number, found True"),
    (everywhere("mode", "both"), "mode: expected 'training' or 'inference', found 'both'"),
    (everywhere("mode", "inference"), "does not fit mode"),
    (everywhere("schedule", {"name": "1f1b-stashin"}), "did you mean '1f1b-stashing'"),
    (everywhere("schedule", {"name": "2bw"}), "schedule '2bw' needs 'accumulate', the minibatches per update"),
    (everywhere("schedule", {"name": "gpipe", "accumulate": 0}), "accumulate: expected at least 1, found 0"),
    (everywhere("schedule", {"name": "2bw", "accumulate": 2}), "2bw needs at least as many minibatches per update"),
    (everywhere("schedule", {"name": "gpipe", "accumulate": 9}), "in flight, above depth; solve again"),
    (everywhere("model", {"ref": None, "graph_hash": None}), "nothing to run"),
    (everywhere("pipeline", []), "pipeline: expected a list that is not empty"),
    (inside(1, "workers", [0]), "worker 0 is in more than one place"),
    (inside(1, "workers", [9]), "worker 9 does not exist: 1 servers of 3 workers have workers 0 to 2"),
    (inside(1, "workers", ["a"]), "pipeline[1]: workers[0]: expected a whole number, found 'a'"),
    (inside(0, "depth", 0), "pipeline[0]: depth: expected at least 1, found 0"),
    (inside(1, "recompute", "yes"), "pipeline[1]: recompute: expected true or false, found 'yes'"),
    (lambda c: c[1].update(layers=["layer0"]), "layer 'layer0' is in more than one stage"),
    (lambda c: c[1].update(layers=[3]), "stage-1.json: layers[0]: expected text, found 3"),
    (lambda c: c[1].update(layers=["\ud800"]), "half a character (a lone surrogate)"),
    (lambda c: c[1].update(prediction={"forward_s": float("nan")}), "forward_s: expected a finite number"),
    (lambda c: c[1].update(prediction={"forward_s": 10**400}), "forward_s: expected a finite number of at most"),
    (everywhere("minibatch", 10**8), "minibatch: expected a finite number of at most 10000000, found 100000000"),
    (inside(0, "depth", 10**9), "depth: expected a finite number of at most 100000"),
    (inside(0, "versions", 10**9), "versions: expected a finite number of at most 100000"),
    (everywhere("servers", 10**400), "servers: expected a finite number of at most"),
    (everywhere("servers", 10**5), "the plan has 300000 workers; at most 100000 are possible"),
    (everywhere("schedule", {"name": "1f1b-stashing", "correction": "better"}), "correction"),
]


def test_refuses_in_one_line(tmp_path: Path) -> None:
    for number, (change, message) in enumerate(REFUSED):
        contents = stage_contents([1, 1, 1])
        change(contents)
        with pytest.raises(LaunchError) as caught:
            load_plan(write_plan(tmp_path / str(number), contents))
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


def test_refuses_depths_that_deadlock_but_not_absurd_ones(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="deadlocks"):
        load_plan(write_plan(tmp_path, stage_contents([1, 2], depth=[1, 2])))
    plan = load_plan(write_plan(tmp_path, stage_contents([2, 1], depth=[100_000, 1])))
    assert plan.pipeline[0].depth == 100_000


def test_refuses_files_that_are_no_stage_of_the_plan(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="has no stages"):
        load_plan(tmp_path)
    (tmp_path / "stages").mkdir()
    with pytest.raises(LaunchError, match="holds no stage-0"):
        load_plan(tmp_path)
    path = write_plan(tmp_path, stage_contents([1, 1])) / "stages" / "stage-1.json"
    whole = path.read_text()
    damaged = [whole[:kept] for kept in (0, 1, 40, -1)]
    damaged.append(whole.replace('"minibatch": 2', '"minibatch": ' + "9" * 5000))
    for text, message in (
        (path.with_name("stage-0.json").read_text(), "is of stage 0"),
        *((text, "stage-1.json is damaged or truncated") for text in damaged),
    ):
        path.write_text(text)
        with pytest.raises(LaunchError) as caught:
            load_plan(tmp_path)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


def test_every_flipped_bit_of_a_stage_file_is_refused_or_means_the_same(tmp_path: Path) -> None:
    """A file with a checksum. Only the checksum's own name may be damaged, since the rest is whole then."""
    contents = stage_contents([1])
    path = write_plan(tmp_path, contents) / "stages" / "stage-0.json"
    whole = with_checksum(contents[0], indent=1).encode()
    path.write_bytes(whole)
    plan = load_plan(tmp_path)
    accepted = 0
    for place in range(0, 8 * len(whole), 3):
        flipped = bytearray(whole)
        flipped[place // 8] ^= 1 << place % 8
        path.write_bytes(flipped)
        with suppress(LaunchError):
            assert load_plan(tmp_path) == plan
            accepted += 1
    assert accepted <= 8 * len('"checksum"')


def test_a_stage_that_is_no_regular_file_is_one_line(tmp_path: Path) -> None:
    path = write_plan(tmp_path, stage_contents([1])) / "stages" / "stage-0.json"
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero"), endless):
        path.unlink()
        make(path)
        with pytest.raises(LaunchError, match=r"stage-0.json cannot be read: .*(not a regular file|more than 256 MiB)"):
            load_plan(tmp_path)


def endless(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


def test_the_delay_of_every_stage() -> None:
    for schedule, replicas, depths, expected in (
        ("1f1b-stashing", (1, 1, 1), (3, 2, 1), [2, 1, 0]),
        ("1f1b-stashing", (2, 1), (2, 1), [2, 0]),
        ("1f1b-stashing", (1, 2), (3, 1), [2, 1]),
        ("1f1b-stashing", (2,), (1,), [0]),
        ("vertical-sync", (1, 1, 1), (3, 2, 1), [2, 2, 2]),
        ("vertical-sync", (2, 1), (2, 1), [2, 5]),
        ("2bw", (1, 1, 1), (3, 2, 1), [1, 1, 1]),
        ("2bw", (1,), (1,), [1]),
        ("1f1b-flush", (1, 1, 1), (3, 2, 1), [0, 0, 0]),
    ):
        pipeline = [StageShape(count, depth, 4) for count, depth in zip(replicas, depths, strict=True)]
        assert [update_delay(SCHEDULES[schedule], pipeline, stage) for stage in range(len(pipeline))] == expected


def plan_of(folder: Path, replicas: Sequence[int], **fields: Any) -> LaunchPlan:
    return load_plan(write_plan(folder, stage_contents(replicas, **fields)))


def test_options_that_have_nothing_to_act_on(tmp_path: Path) -> None:
    correction = StalenessOptions("ef")
    for number, (replicas, fields, options, message) in enumerate(
        (
            ([2], {}, correction, r"this plan \(1f1b-stashing\) has none"),
            ([1, 1], {"schedule": "gpipe", "accumulate": 2}, correction, r"this plan \(gpipe\) has none"),
            ([1, 1], {"schedule": "1f1b-flush", "accumulate": 2}, StalenessOptions(flush_epochs=1), "is 1f1b-flush"),
            ([1, 1], {}, StalenessOptions(force=True), "--force-correction goes with"),
            ([1, 1], {"mode": "inference"}, correction, "has none"),
        )
    ):
        plan = plan_of(tmp_path / str(number), replicas, **fields)
        check_staleness_options(StalenessOptions(), plan)
        with pytest.raises(LaunchError, match=message):
            check_staleness_options(options, plan)


def test_what_is_said_of_staleness(tmp_path: Path) -> None:
    plan = plan_of(tmp_path / "stale", [1, 1, 1])
    assert staleness_text(plan) == "gradients of stage 0 are 2 updates old under 1f1b-stashing"
    assert staleness_text(plan_of(tmp_path / "alone", [2])) is None
