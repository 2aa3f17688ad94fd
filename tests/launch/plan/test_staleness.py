"""Delays of stages, and which options on old gradients a plan allows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from toy_workers import stage_contents, write_plan

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.plan.launch_plan import LaunchPlan
from pipeplan_launch.plan.run_options import (
    StalenessOptions,
    check_staleness_options,
    staleness_text,
    update_delay,
)
from pipeplan_launch.plan.schedule import SCHEDULES, StageShape
from pipeplan_launch.plan.stage_files import load_plan


@pytest.mark.parametrize(
    ("schedule", "replicas", "depths", "expected"),
    [
        ("1f1b-stashing", (1, 1, 1), (3, 2, 1), [2, 1, 0]),
        ("1f1b-stashing", (2, 1), (2, 1), [2, 0]),
        ("1f1b-stashing", (1, 2), (3, 1), [2, 1]),
        ("1f1b-stashing", (2,), (1,), [0]),
        ("vertical-sync", (1, 1, 1), (3, 2, 1), [2, 2, 2]),
        ("vertical-sync", (2, 1), (2, 1), [2, 5]),
        ("2bw", (1, 1, 1), (3, 2, 1), [1, 1, 1]),
        ("2bw", (1,), (1,), [1]),
        ("1f1b-flush", (1, 1, 1), (3, 2, 1), [0, 0, 0]),
    ],
)
def test_the_delay_of_every_stage(
    schedule: str, replicas: Sequence[int], depths: Sequence[int], expected: list[int]
) -> None:
    pipeline = [StageShape(count, depth, 4) for count, depth in zip(replicas, depths, strict=True)]
    assert [update_delay(SCHEDULES[schedule], pipeline, stage) for stage in range(len(pipeline))] == expected


def plan_of(folder: Path, replicas: Sequence[int], **fields: Any) -> LaunchPlan:
    return load_plan(write_plan(folder, stage_contents(replicas, **fields)))


@pytest.mark.parametrize(
    ("replicas", "fields", "options", "message"),
    [
        ([2], {}, StalenessOptions("ef"), r"this plan \(1f1b-stashing\) has none"),
        ([1, 1], {"schedule": "gpipe", "accumulate": 2}, StalenessOptions("ef"), r"this plan \(gpipe\) has none"),
        ([1, 1], {"schedule": "1f1b-flush", "accumulate": 2}, StalenessOptions(flush_epochs=1), "is 1f1b-flush"),
        ([1, 1], {}, StalenessOptions(force=True), "--force-correction goes with"),
        ([1, 1], {"mode": "inference"}, StalenessOptions("ef"), "has none"),
    ],
)
def test_options_that_have_nothing_to_act_on(
    tmp_path: Path, replicas: list[int], fields: dict[str, Any], options: StalenessOptions, message: str
) -> None:
    plan = plan_of(tmp_path, replicas, **fields)
    check_staleness_options(StalenessOptions(), plan)
    with pytest.raises(LaunchError, match=message):
        check_staleness_options(options, plan)


def test_what_is_said_of_staleness(tmp_path: Path) -> None:
    plan = plan_of(tmp_path / "stale", [1, 1, 1])
    assert staleness_text(plan) == "gradients of stage 0 are 2 updates old under 1f1b-stashing"
    assert staleness_text(plan_of(tmp_path / "alone", [2])) is None


def test_a_plan_that_says_something_else_is_refused(tmp_path: Path) -> None:
    contents = stage_contents([1, 1])
    for content in contents:
        content["schedule"] = content["schedule"] | {"correction": "better"}
    with pytest.raises(LaunchError, match="correction"):
        load_plan(write_plan(tmp_path, contents))
