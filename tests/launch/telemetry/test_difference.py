"""The difference between a run and its prediction: its parts and its cause, on runs whose cause was put there."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from toy_workers import stage_contents, write_plan

from pipeplan_launch.plan.stage_files import load_plan
from pipeplan_launch.telemetry.difference import difference, difference_lines, first_cause
from pipeplan_launch.telemetry.recorder import SUMMED_FIELDS, SteadyState
from pipeplan_launch.telemetry.summary import WorkerReport, summarise

PAIRS = ("forward_s", "backward_s", "update_s", "sync_s")
OWN = ("load_s", "send_s", "other_s")
FORWARD = {"forward_s": 0.010, "backward_s": 0.020}


def stage(workers: list[int], predicted: dict[str, float], measured: dict[str, float], **more: Any) -> dict[str, Any]:
    """One stage of a summary; times that are not given are 0, measured ones as predicted."""
    before = dict.fromkeys(PAIRS, 0.0) | predicted
    after = before | dict.fromkeys(OWN, 0.0) | measured
    pairs = {name: {"predicted": before[name], "measured": after[name]} for name in PAIRS}
    own = {name: after[name] for name in OWN} | {"wait_s": 0.0, "core_wait_s": more.pop("core_wait_s", 0.0)}
    own |= {"cpu_s": more.pop("cpu_s", sum(after.values())), "others_wait_s": more.pop("others_wait_s", 0.0)}
    return {"workers": workers, "versions": 1, "cores": 0, "boundary_s": 0.0, "measured": own} | pairs | more


def summary(predicted_s: Any, measured_s: Any, *stages: dict[str, Any], **more: Any) -> dict[str, Any]:
    step_time = {"predicted": predicted_s, "measured": measured_s}
    shared = {"schedule": "1f1b-stashing", "accumulate": None, "server_sizes": [8], "profile": "measured"}
    shared |= {"device": "cpu", "emulated": False}
    return shared | {"minibatch_s": step_time, "stages": list(stages)} | more


def cause_of(*arguments: Any, **more: Any) -> tuple[str, int | None, float]:
    """(kind, stage, share that it explains) of the first cause."""
    cause = first_cause(summary(*arguments, **more))
    assert cause is not None
    assert f"{cause.explains:.0%}" in cause.text or cause.kind in ("waiting", "link")
    return cause.kind, cause.stage, pytest.approx(cause.explains)


def test_the_parts_of_a_difference() -> None:
    """One stage: 4 ms of layers, 2 of handing over, 3 of other programs, 1 of all-reduces, 5 in which it waits.

    Of two stages one was made slower by sending, the other by computing: parts are the mean over all orders. And
    layers that take twice the time that was extrapolated, while workers wait for each other, are no other programs.
    """
    slower = {"forward_s": 0.012, "backward_s": 0.025, "send_s": 0.002, "sync_s": 0.001}
    found = difference(summary(0.030, 0.045, stage([0], FORWARD, slower, others_wait_s=0.003)))
    assert found["machine"] + found["executor"] == pytest.approx(0.006)
    assert (found["programs"], found["network"], found["waiting"]) == pytest.approx((0.003, 0.001, 0.005))
    assert sum(found.values()) == pytest.approx(0.015)
    first = stage([0], {"forward_s": 0.010}, {"send_s": 0.004})
    second = stage([1], {"forward_s": 0.010}, {"forward_s": 0.014})
    found = difference(summary(0.010, 0.014, first, second))
    assert found["machine"] == found["executor"] == pytest.approx(0.002)
    stages = [stage([one], {"forward_s": 0.005}, {"forward_s": 0.010}, core_wait_s=0.00365) for one in range(2)]
    found = difference(summary(0.005, 0.010, *stages))
    assert (found["programs"], found["machine"]) == pytest.approx((0, 0.005))


def test_five_lines_at_most_say_it() -> None:
    measured = {"forward_s": 0.020, "send_s": 0.010, "sync_s": 0.010}
    slow = stage([0], {"forward_s": 0.010}, measured, others_wait_s=0.010)
    lines = difference_lines(summary(0.010, 0.100, slow))
    assert len(lines) == 5
    assert lines[0] == "90 ms more than predicted for each minibatch, of which"
    assert lines[1].startswith("  +60 ms  waiting")
    assert difference_lines(summary(0.010, 0.0102, slow)) == []


GOOD = stage([0], FORWARD, {})


def test_the_first_cause() -> None:
    """What the prediction leaves out, waiting for each other or for a link, and a run faster than predicted."""
    kinds = {"update_s": "update", "sync_s": "all-reduce", "load_s": "reading of samples"}
    kinds |= {"send_s": "handing over of tensors", "other_s": "executor itself"}
    for term, kind in kinds.items():
        assert cause_of(0.030, 0.042, stage([0], FORWARD, {term: 0.012}, versions=3)) == (kind, 0, 1.0)
    last = stage([1], FORWARD, {"backward_s": 0.021})
    assert cause_of(0.030, 0.040, GOOD, last) == ("waiting", None, 0.9)
    full = stage([0], FORWARD, {}, boundary_s=0.050)
    assert cause_of(0.050, 0.080, full, stage([1], FORWARD, {})) == ("link", 0, 1.0)
    assert difference(summary(0.050, 0.080, full, stage([1], FORWARD, {})))["network"] == pytest.approx(0.030)
    fast = stage([1], {"forward_s": 0.010, "backward_s": 0.050}, {"backward_s": 0.030})
    assert cause_of(0.060, 0.040, GOOD, fast) == ("backward", 1, 1.0)
    # Two replicas share what a stage has to do, 25 ms a minibatch of the pipeline; the second stage's 30 ms bind.
    first = stage([0, 1], {"forward_s": 0.020, "backward_s": 0.020}, {"backward_s": 0.030})
    assert cause_of(0.020, 0.030, first, stage([2], {"forward_s": 0.020}, {"forward_s": 0.030}))[:2] == ("forward", 1)
    # A calibrated prediction has the handing over of tensors in its passes.
    one = stage([0], {"forward_s": 0.015, "backward_s": 0.030}, {"forward_s": 0.01, "backward_s": 0.02, "send_s": 0.02})
    assert cause_of(0.045, 0.050, one, profile="calibrated") == ("passes", 0, 1.0)
    # A GPU computes while its host reads the next samples: where the host waited says nothing.
    late = stage([0], {"forward_s": 0.01, "backward_s": 0.02}, {"backward_s": 0.005, "load_s": 0.025})
    assert cause_of(0.030, 0.040, late, device="cuda") == ("passes", 0, 1.0)
    # With a flush, four minibatches an update, and two stages of 30 ms: 5 passes in 4 step times. One stage takes
    # 40 ms: 40 + 30 + 3 · 40.
    slow = stage([1], FORWARD, {"backward_s": 0.030})
    assert cause_of(5 * 0.030 / 4, 0.190 / 4, GOOD, slow, schedule="gpipe", accumulate=4) == ("backward", 1, 1.0)
    # An update after four minibatches takes four times its share of a minibatch: 5 · 30 + 4 · 3.
    slow = stage([1], FORWARD, {"update_s": 0.003})
    assert cause_of(0.150 / 4, 0.162 / 4, GOOD, slow, schedule="gpipe", accumulate=4) == ("update", 1, 1.0)
    # Two replicas on one core take turns, so that the stage's 30 ms are not halved.
    both = stage([0, 1], FORWARD, {"forward_s": 0.020}, cores=1)
    assert cause_of(0.030, 0.040, both) == ("forward", 0, 1.0)


def test_a_worker_whose_core_others_use_is_told_from_a_wrong_profile() -> None:
    """All that is slower by the clock is waiting for a core. Waiting for a core that workers share is no work."""
    slow = stage([0], FORWARD, {"forward_s": 0.02, "backward_s": 0.04}, others_wait_s=0.030)
    assert cause_of(0.030, 0.060, slow) == ("core", 0, 1.0)
    for other, kind in (({"device": "cuda"}, "passes"), ({"emulated": True}, "backward")):
        assert cause_of(0.030, 0.060, slow, **other)[0] == kind
    wall = {"forward_s": 0.015, "backward_s": 0.030}
    stages = [stage([worker], FORWARD, wall, cpu_s=0.030, cores=2) for worker in range(2)]
    last = stage([2], FORWARD, {"forward_s": 0.013, "backward_s": 0.026, "update_s": 0.013}, cpu_s=0.040, cores=2)
    assert cause_of(0.045, 0.050, *stages, last)[:2] == ("update", 2)


def test_the_sentence_of_a_cause_has_its_figures() -> None:
    slow = stage([1], {"forward_s": 0.009, "backward_s": 0.031}, {"backward_s": 0.041})
    cause = first_cause(summary(0.040, 0.050, GOOD, slow))
    assert cause is not None
    assert cause.text == (
        "stage 1's backward takes 1.32 times the predicted time (41 ms, predicted 31 ms): its layers were profiled "
        "under another load; `pipeplan calibrate` predicts by what was measured (this alone explains 100% of the "
        "difference)"
    )
    both = stage([0], FORWARD, {"forward_s": 0.0125, "backward_s": 0.0625}, others_wait_s=0.015)
    cause = first_cause(summary(0.030, 0.075, both, profile="modelled"))
    assert cause is not None
    assert cause.kind == "backward"
    assert "(50 ms without waiting for a core, predicted 20 ms)" in cause.text
    assert "its profile is an estimate, not measured" in cause.text


def test_what_is_as_predicted_or_not_known_has_no_cause() -> None:
    """A stage that does not bind may be off."""
    idle = stage([1], {"forward_s": 0.001}, {"forward_s": 0.009})
    assert first_cause(summary(0.030, 0.0308, GOOD, idle)) is None
    for before, after in ((None, 0.01), (0.01, None)):
        unknown = GOOD | {"forward_s": {"predicted": before, "measured": after}}
        assert first_cause(summary(0.030, 0.060, unknown)) is None
        assert first_cause(summary(before and 0.030, after and 0.030, GOOD)) is None


def test_a_term_that_alone_was_made_slower_is_found() -> None:
    """Of random stages the slowest gets one slower term; the step time then follows by the formula of the cost
    model.
    """
    for seed in range(20):
        rng = random.Random(seed)
        replicas = [rng.randint(1, 3) for _ in range(rng.randint(1, 4))]
        times = [{name: rng.uniform(0.001, 0.02) for name in ("forward_s", "backward_s", "update_s")} for _ in replicas]
        each = [sum(one.values()) / count for one, count in zip(times, replicas, strict=True)]
        slowest = max(range(len(each)), key=lambda index: each[index])
        term = rng.choice([*PAIRS, *OWN])
        added = rng.uniform(0.2, 1.0) * each[slowest] * replicas[slowest]
        stages, first = [], 0
        for index, (one, count) in enumerate(zip(times, replicas, strict=True)):
            measured = {term: one.get(term, 0.0) + added} if index == slowest else {}
            stages.append(stage(list(range(first, first + count)), one, measured))
            first += count
        kind, at, explained = cause_of(each[slowest], each[slowest] + added / replicas[slowest], *stages)
        assert (at, explained) == (slowest, 1.0)
        assert kind in {"forward_s": "forward", "backward_s": "backward", "update_s": "update"}.get(term, kind)


def test_workers_that_wait_for_each_other_are_told_from_other_programs(tmp_path: Path) -> None:
    """Each of two workers waits 0.1 s a second for a core; other programs use so many cores."""
    plan = load_plan(write_plan(tmp_path, stage_contents([1, 1])))
    seconds = dict.fromkeys(SUMMED_FIELDS, 0.0) | {"forward_s": 1.0, "core_wait_s": 0.2}
    for others, share in ((0.0, 0.0), (0.1, 0.5), (0.4, 1.0)):
        steady = SteadyState(100, seconds, span_s=2.0, intervals=100, cores="0,1", watched_s=4.0, own_cpu_s=3.0)
        steady.cores_busy_s = 6.0 + 4.0 * others
        found = summarise(plan, [WorkerReport(rank, rank, 0, steady, 2**20) for rank in range(2)])
        for one in found["stages"]:
            assert one["measured"]["others_wait_s"] == pytest.approx(0.002 * share)


JOB = """
import time
import torch
from torch.nn import functional
from torch.utils.data import TensorDataset
from pipeplan_launch import Data, Job

def loss(output, target):
    time.sleep(0.05)
    return functional.cross_entropy(output, target)

def job():
    inner = torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64)
    net = torch.nn.Sequential(*inner, torch.nn.Linear(64, 3))
    data = TensorDataset(torch.randn(160, 64), torch.arange(160) % 3)
    return Job(net, loss=loss, data=lambda: Data(data, data), minibatch=4)
"""


def pipeplan(folder: Path, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pipeplan", *arguments], cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


def launch(folder: Path, plan: str, run: str) -> tuple[dict[str, Any], str]:
    """The summary, and what was printed."""
    command = [f"./{plan}/launch.sh", "--epochs", "2", "--evaluate-every", "2", "--run-dir", f"{plan}/runs/{run}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / plan / "runs" / run / "summary.json").read_text()), done.stdout


@pytest.mark.slow
def test_the_loop_finds_what_sleeps_and_predicts_it(tmp_path: Path) -> None:
    """Sleeping takes no time of a processor, so that the profile knows nothing of it; the second prediction does."""
    (tmp_path / "job.py").write_text(JOB)
    pipeplan(tmp_path, "profile", "job.py:job", "--repeats", "3", "-o", "profile.json")
    shape = ("--stages", "2", "--max-replicas", "1")
    pipeplan(tmp_path, "solve", "profile.json", "--cluster", "local", "--workers", "2", *shape)
    summary, table = launch(tmp_path, "plan", "first")
    assert summary["minibatch_s"]["measured"] > 0.05
    assert (summary["cause"]["kind"], summary["cause"]["stage"]) == ("forward", 1)
    assert summary["cause"]["explains"] > 0.5
    assert f"first cause: {summary['cause']['text']}" in table
    assert "waiting" in table.splitlines()[1]
    pipeplan(tmp_path, "calibrate", "plan", "--profile", "profile.json")
    pipeplan(tmp_path, "solve", "calibrated.json", "--cluster", "calibrated.toml", *shape, "-o", "plan-2")
    again, _ = launch(tmp_path, "plan-2", "second")
    assert again["profile"] == "calibrated"
    assert 0.7 < again["minibatch_s"]["ratio"] < 1.4
