"""The division of the difference between predicted and measured step times, on runs whose parts were put there."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from toy_workers import stage_contents, write_plan

from pipeplan_launch.plan.stage_files import load_plan
from pipeplan_launch.telemetry.difference import difference, difference_lines
from pipeplan_launch.telemetry.recorder import SUMMED_FIELDS, SteadyState
from pipeplan_launch.telemetry.summary import WorkerReport, summarise

PAIRS = ("forward_s", "backward_s", "update_s", "sync_s")
OWN = ("load_s", "send_s", "other_s")


def run(predicted_s: float, measured_s: float, stages: Sequence[dict[str, Any]], cores: float = 0) -> dict[str, Any]:
    """A summary; a stage has `predicted` and `measured` times, those that are not given 0 or as predicted."""
    entries = []
    for rank, stage in enumerate(stages):
        before = dict.fromkeys(PAIRS, 0.0) | stage["predicted"]
        after = before | dict.fromkeys(OWN, 0.0) | stage["measured"]
        own = {name: after[name] for name in OWN} | {"wait_s": 0.0, "cpu_s": stage.get("cpu_s", 0.0)}
        own |= {"core_wait_s": stage.get("core_wait_s", 0.0), "others_wait_s": stage.get("others_wait_s", 0.0)}
        pairs = {name: {"predicted": before[name], "measured": after[name]} for name in PAIRS}
        more = {"workers": [rank], "versions": 1, "cores": cores, "boundary_s": stage.get("boundary_s", 0.0)}
        entries.append(pairs | more | {"measured": own})
    shared = {"schedule": "1f1b-stashing", "accumulate": None, "server_sizes": [len(stages)], "profile": "measured"}
    step_time = {"predicted": predicted_s, "measured": measured_s}
    return shared | {"device": "cpu", "emulated": False, "minibatch_s": step_time, "stages": entries}


def test_every_part_is_found() -> None:
    """One stage: 4 ms of layers, 2 of handing over, 3 of other programs, 1 of all-reduces, 5 in which it waits."""
    stage = {
        "predicted": {"forward_s": 0.010, "backward_s": 0.020},
        "measured": {"forward_s": 0.012, "backward_s": 0.025, "send_s": 0.002, "sync_s": 0.001},
        "others_wait_s": 0.003,
    }
    found = difference(run(0.030, 0.045, [stage]))
    assert sum(found.values()) == pytest.approx(0.015)
    assert found["programs"] == pytest.approx(0.003)
    assert found["network"] == pytest.approx(0.001)
    assert found["machine"] + found["executor"] == pytest.approx(0.006)
    assert found["waiting"] == pytest.approx(0.005)


def test_parts_are_the_mean_over_all_orders() -> None:
    """Of two stages one was made slower by sending, the other by computing: either alone explains the difference."""
    first = {"predicted": {"forward_s": 0.010}, "measured": {"send_s": 0.004}}
    second = {"predicted": {"forward_s": 0.010}, "measured": {"forward_s": 0.014}}
    found = difference(run(0.010, 0.014, [first, second]))
    assert found["machine"] == found["executor"] == pytest.approx(0.002)
    times = {"machine": 0.014, "executor": 0.014}
    orders = [[times[one] for one in order] for order in itertools.permutations(times)]
    assert statistics.fmean(order[0] - 0.010 for order in orders) / 2 == pytest.approx(found["machine"])


def test_an_extrapolated_size_is_not_blamed_on_other_programs() -> None:
    """The layers take twice the time that was extrapolated; the workers wait for each other, and nobody else runs."""
    stages = [
        {"predicted": {"forward_s": 0.005}, "measured": {"forward_s": 0.010}, "core_wait_s": 0.00365} for _ in range(2)
    ]
    found = difference(run(0.005, 0.010, stages))
    assert found["programs"] == 0
    assert found["machine"] == pytest.approx(0.005)


def test_a_full_link_counts_as_the_network() -> None:
    stage = {"predicted": {"forward_s": 0.010}, "measured": {}, "boundary_s": 0.020}
    last = {"predicted": {"forward_s": 0.010}, "measured": {}}
    found = difference(run(0.020, 0.030, [stage, last]))
    assert found["network"] == pytest.approx(0.010)


def test_five_lines_at_most_say_it() -> None:
    stage = {
        "predicted": {"forward_s": 0.010},
        "measured": {"forward_s": 0.020, "send_s": 0.010, "sync_s": 0.010},
        "others_wait_s": 0.010,
    }
    lines = difference_lines(run(0.010, 0.100, [stage]))
    assert len(lines) == 5
    assert lines[0] == "90 ms more than predicted for each minibatch, of which"
    assert lines[1].startswith("  +60 ms  waiting")
    assert difference_lines(run(0.010, 0.0102, [stage])) == []


@pytest.mark.parametrize(("others", "share"), [(0.0, 0.0), (0.1, 0.5), (0.4, 1.0)])
def test_workers_that_wait_for_each_other_are_told_from_other_programs(
    tmp_path: Path, others: float, share: float
) -> None:
    """Each of two workers waits 0.1 s a second for a core; other programs use so many cores."""
    plan = load_plan(write_plan(tmp_path, stage_contents([1, 1])))
    seconds = dict.fromkeys(SUMMED_FIELDS, 0.0) | {"forward_s": 1.0, "core_wait_s": 0.2}
    steady = SteadyState(100, seconds, span_s=2.0, intervals=100, cores="0,1", watched_s=4.0, own_cpu_s=3.0)
    steady.cores_busy_s = 6.0 + 4.0 * others
    summary = summarise(plan, [WorkerReport(rank, rank, 0, steady, 2**20) for rank in range(2)])
    for stage in summary["stages"]:
        assert stage["measured"]["others_wait_s"] == pytest.approx(0.002 * share)
