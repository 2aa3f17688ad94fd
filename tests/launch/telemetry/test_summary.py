"""What a run says and keeps: metrics, table and summary, warnings, its folder, and the memory of a worker."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from toy_workers import stage_contents, write_plan

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.callbacks import EpochResult
from pipeplan_launch.job.user_code import user_code_errors
from pipeplan_launch.plan.stage_files import load_plan
from pipeplan_launch.telemetry import recorder as metrics
from pipeplan_launch.telemetry import run_folder
from pipeplan_launch.telemetry.memory import grow_gpu_memory
from pipeplan_launch.telemetry.progress import UPDATES, LearningWatch
from pipeplan_launch.telemetry.recorder import Recorder, SteadyState
from pipeplan_launch.telemetry.summary import WorkerReport, covers_epochs, summarise, summary_table


def test_the_fill_of_every_segment_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One replica of two: minibatches 0, 2, 4 …; the first three of the pipeline do not count."""
    now = 0.0
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now)
    recorder = Recorder(tmp_path / "rank-1.jsonl", 1, 0, 0, 2, skip=3)
    for first in (0, 10):
        for minibatch in range(first, first + 10, 2):
            step = recorder.begin(0, minibatch)
            step.forward_s = 100.0 if minibatch - first < 3 else 1.0
            now += 50.0 if minibatch - first < 3 else 4.0
            recorder.end(minibatch)
        assert [step.minibatch for step in recorder.end_epoch(first)] == list(range(first, first + 10, 2))
    recorder.close()
    assert (recorder.steady.minibatches, recorder.steady.step_time_s) == (6, 2.0)
    assert recorder.steady.seconds is not None
    assert recorder.steady.seconds["forward_s"] == 6.0
    assert not recorder.steady.includes_fill
    lines = [json.loads(line) for line in (tmp_path / "rank-1.jsonl").read_text().splitlines()]
    assert [line["minibatch"] for line in lines[:5]] == [0, 2, 4, 6, 8]
    names = {"rank", "stage", "replica", "epoch", "loss", "wait_s", "memory_bytes", "minibatches_per_s"}
    assert names <= lines[0].keys()
    short = Recorder(None, 0, 0, 0, 1, skip=5)
    for minibatch in range(2):
        short.begin(0, minibatch)
        short.end(minibatch)
    short.end_epoch()
    assert short.steady.includes_fill, "epochs that are short count the fill, and say so"
    assert short.steady.minibatches == 2


def test_waiting_for_a_core_is_the_kernels_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    account = tmp_path / "schedstat"
    account.write_text("5000000000 1000000000 7\n")
    monkeypatch.setattr(metrics, "_PATH", str(account))
    recorder = Recorder(None, 0, 0, 0, 1, skip=0)
    for waited in (1_250_000_000, 1_750_000_000):
        account.write_text(f"5000000000 {waited} 8\n")
        recorder.begin(0, waited)
        assert recorder.end(waited).core_wait_s == pytest.approx(0.25 if waited < 1.5e9 else 0.5)
    account.write_text("nothing known")
    assert metrics.core_wait_s() == 0.0
    account.unlink()
    assert metrics.core_wait_s() == 0.0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a disk that is always full")
def test_a_full_disk_is_one_line() -> None:
    recorder = Recorder(Path("/dev/full"), 0, 0, 0, 1, skip=3)
    recorder.begin(0, 0)
    recorder.end(0)
    with pytest.raises(LaunchError, match="writing /dev/full failed: No space left on device"):
        recorder.end_epoch()


def test_metrics_have_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two files at most, and the same lines go when the run goes on from an earlier place."""
    monkeypatch.setattr(metrics, "MOST_METRICS_BYTES", 10_000)
    (tmp_path / "metrics").mkdir()
    path = tmp_path / "metrics" / "rank-0.jsonl"
    writing = Recorder(path, 0, 0, 0, 1, 0)
    for minibatch in range(200):
        writing.begin(0, minibatch)
        writing.end(minibatch)
    writing.close()
    older = path.with_name("rank-0.jsonl.old")
    assert sorted(path.parent.iterdir()) == [path, older]
    assert path.stat().st_size < 20_000
    assert older.stat().st_size < 20_000
    found = [json.loads(line)["minibatch"] for one in (older, path) for line in one.read_text().splitlines()]
    assert found == list(range(found[0], 200))
    run_folder.reopen_run(tmp_path, 0, found[0] + 2)
    found = [json.loads(line)["minibatch"] for one in (older, path) for line in one.read_text().splitlines()]
    assert found == [found[0], found[0] + 1]


def test_a_summary_covers_the_epochs_that_it_has(tmp_path: Path) -> None:
    assert not covers_epochs(tmp_path, 0)
    for text in ("", "[]", "{}", '{"epochs": 3}', "[" * 100_000):
        (tmp_path / "summary.json").write_text(text)
        assert not covers_epochs(tmp_path, 1)
    plan = load_plan(write_plan(tmp_path, stage_contents([1])))
    report = WorkerReport(0, 0, 0, SteadyState(), 0)
    (tmp_path / "summary.json").write_text(json.dumps(summarise(plan, [report]) | {"epochs": [{}, {}]}))
    assert [covers_epochs(tmp_path, epochs) for epochs in (1, 2, 3)] == [True, True, False]


def reported(plan: Any, *workers: tuple[int, int, int, dict[str, float], float, int]) -> Any:
    """The summary of four minibatches of workers: rank, stage, replica, seconds, and the span of so many intervals."""
    reports = []
    for rank, stage, replica, seconds, span_s, intervals in workers:
        steady = SteadyState(4, dict.fromkeys(metrics.SUMMED_FIELDS, 0.0) | seconds, span_s=span_s, intervals=intervals)
        reports.append(WorkerReport(rank, stage, replica, steady, 2**20))
    return summarise(plan, reports)


def test_predicted_beside_measured(tmp_path: Path) -> None:
    plan = load_plan(write_plan(tmp_path, stage_contents([2, 1])))
    times = ((0, 0, 0, 0.012), (1, 0, 1, 0.02), (2, 1, 0, 0.004))
    summary = reported(plan, *((rank, stage, at, {"forward_s": s}, 1.0, 50) for rank, stage, at, s in times))
    assert summary["minibatch_s"] == {"predicted": 0.01, "measured": 0.02, "ratio": 2.0}
    assert summary["stages"][0]["forward_s"] == {"predicted": 0.002, "measured": 0.004, "ratio": 2.0}
    assert summary["stages"][0]["sync_s"]["predicted"] is None
    lines = summary_table(summary).splitlines()
    assert "0-1" in lines[2]
    assert "2 -> 4" in lines[2]
    assert lines[-1].startswith("first cause: the executor's own work at stage 0 takes 36 ms a minibatch")
    assert lines[4].startswith("throughput: measured 50.00 minibatches/s (100 samples/s), predicted 100.00: 50%")
    assert lines[5] == "10 ms more than predicted for each minibatch, of which"
    assert lines[6].startswith("  +10 ms  the executor")


def test_the_table_has_waiting_beside_its_prediction(tmp_path: Path) -> None:
    contents = stage_contents([2, 1])
    contents[1]["prediction"] = contents[1]["prediction"] | {"wait_s": 0.0031, "exposed_s": 0.0009, "sync_s": 0.005}
    plan = load_plan(write_plan(tmp_path, contents))
    summary = reported(plan, (2, 1, 0, {"forward_s": 0.008, "wait_s": 0.05}, 0.5, 50))
    assert summary["stages"][0]["wait_s"] == {"predicted": None, "measured": None, "ratio": None}
    last = summary["stages"][1]
    assert last["wait_s"] == {"predicted": 0.0031, "measured": 0.0125, "ratio": pytest.approx(0.0125 / 0.0031)}
    assert last["sync_s"]["predicted"] == 0.0009
    lines = summary_table(summary).splitlines()
    assert " ".join(lines[1].split()) == "stage workers forward backward update sync waiting memory MiB load send other"
    assert "3.1 -> 12.5" in lines[3]
    assert lines[-1] == "as predicted, within 3%"
    plan = load_plan(write_plan(tmp_path / "inference", stage_contents([1], mode="inference")))
    lines = summary_table(reported(plan, (0, 0, 0, {"forward_s": 0.08}, 0.8, 40))).splitlines()
    assert " ".join(lines[1].split()) == "stage workers forward waiting memory MiB load send other"
    assert lines[-1].startswith("first cause: stage 0's forward takes 10.00 times the predicted time (20 ms")


def test_a_model_without_classes_has_its_test_loss_told() -> None:
    for judged, test_loss, told in (
        (8.0, 0.5, "  test accuracy 75.00% (6 of 8)"),
        (0.0, 0.00071, "  test loss 0.0007"),
        (0.0, None, ""),
    ):
        assert EpochResult(2, 1.25, 6.0, judged, test_loss).line(3, None) == f"epoch 2/3  loss 1.2500{told}"


def said(losses: list[float], minibatches: int = 1, step: int = 1) -> list[str]:
    lines: list[str] = []
    watch = LearningWatch(minibatches, "gradients of stage 0 are 2 updates old", lines.append)
    for loss in losses:
        watch(step, loss)
    return lines


def test_a_loss_that_stays_where_it_began_is_noticed_once() -> None:
    """Counted in updates, and not in minibatches."""
    for after in (2.3, 2.4):
        (line,) = said([2.3] + [after] * 3 * UPDATES)
        assert line.startswith(
            f"warning: after {UPDATES} updates the loss is {after:g}, not below its first value, 2.3"
        )
        assert "stage 0 are 2 updates old; try --flush-epochs 1, --correction ef or a lower learning rate" in line
    assert not said([2.3] + [2.2] * 3 * UPDATES)
    assert not said([2.3] * (UPDATES - 1))
    assert not said([2.3] + [9.0] * (UPDATES - 30) + [2.2] * UPDATES), "what counts is the end"
    assert not said([2.3] * UPDATES, minibatches=4)
    assert said([2.3] * 4 * UPDATES, minibatches=4)
    assert said([2.3] * 2 * UPDATES, minibatches=4, step=2), "one of two replicas sees every second minibatch"


HOLD = "import sys; from pathlib import Path; from pipeplan_launch.telemetry import run_folder\n"
HOLD += "run_folder.lock_run(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"


def test_a_run_belongs_to_one_launch_until_that_has_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(LaunchError, match="in use by another launch"):
            run_folder.lock_run(tmp_path, patience_s=0.0)
        other.kill()
    run_folder.lock_run(tmp_path)


def test_a_start_that_failed_leaves_the_folder_for_the_next(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_folder.new_run(tmp_path, run)
    assert run_folder.claim_error(run, "the job is wrong")
    assert run_folder.new_run(tmp_path, run) == run
    assert not run_folder.has_failed(run)
    (run / "metrics" / "rank-0.jsonl").write_text("{}\n")
    with pytest.raises(LaunchError, match="ended before its first checkpoint: choose another --run-dir"):
        run_folder.new_run(tmp_path, run)
    (run / "checkpoints" / "epoch-0001").mkdir(parents=True)
    (run / "checkpoints" / "epoch-0001" / "manifest.json").write_text("{}")
    with pytest.raises(LaunchError, match="already holds a run: add --resume"):
        run_folder.new_run(tmp_path, run)


def test_a_job_that_ends_the_process_is_named() -> None:
    with pytest.raises(LaunchError, match=r"the job's loss failed: SystemExit: 5"), user_code_errors("the job's loss"):
        raise SystemExit(5)


CODE = """
import resource, torch
from pipeplan_launch.telemetry.memory import keep_freed_memory
assert keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(16 * 2**20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
counts = [faults() for _ in range(40)]
assert counts[-1] < 100 < counts[0], counts
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told")
def test_large_blocks_are_kept() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True)


def test_segments_of_gpus_grow_unless_the_user_says_otherwise() -> None:
    newer, older = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
    for given, found in (
        ({}, {newer: "expandable_segments:True"}),
        ({older: "backend:native"}, {older: "backend:native"}),
        ({newer: ""}, {newer: ""}),
    ):
        environment = dict(given)
        grow_gpu_memory(environment)
        assert environment == found
