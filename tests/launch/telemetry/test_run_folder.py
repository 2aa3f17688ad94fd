"""Who may use a run folder: one launch at a time, and a new run where there was none; and the memory of a worker."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.user_code import user_code_errors
from pipeplan_launch.telemetry import run_folder
from pipeplan_launch.telemetry.memory import grow_gpu_memory

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
    for version, given, found in (
        ("2.13.0+cu130", {}, {newer: "expandable_segments:True"}),
        ("2.8.0", {}, {older: "expandable_segments:True"}),
        ("2.13.0", {older: "backend:native"}, {older: "backend:native"}),
        ("2.8.0", {newer: ""}, {newer: ""}),
    ):
        environment = dict(given)
        grow_gpu_memory(environment, version)
        assert environment == found
