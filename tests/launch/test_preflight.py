"""What launch.sh asks before it starts anything."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from toy_workers import stage_contents, write_plan

from pipeplan_launch.config import LaunchPlan, load_plan
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.preflight import check


@pytest.fixture
def plan(tmp_path: Path) -> LaunchPlan:
    return load_plan(write_plan(tmp_path, stage_contents([2, 1])))


def test_cpu_workers_may_share_cores_and_it_says_so(plan: LaunchPlan) -> None:
    assert check(plan, {}, core_count=4, gpu_count=0) is None
    assert "3 workers share 2 cores" in (check(plan, {}, core_count=2, gpu_count=0) or "")


def test_too_few_gpus_names_what_does_run(plan: LaunchPlan) -> None:
    plan = replace(plan, device="cuda")
    assert check(plan, {}, core_count=4, gpu_count=3) is None
    with pytest.raises(LaunchError, match=r"3 CUDA devices, and this machine has 2; .*--cluster local --workers 2"):
        check(plan, {}, core_count=4, gpu_count=2)
    with pytest.raises(LaunchError, match=r"this machine has none; .*--workers 4"):
        check(plan, {}, core_count=4, gpu_count=0)


def test_several_servers_need_to_know_each_other(plan: LaunchPlan) -> None:
    plan = replace(plan, servers=2)
    there = {"NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    assert check(plan, there, core_count=8, gpu_count=0) is None
    with pytest.raises(LaunchError, match="not set: MASTER_PORT"):
        check(plan, there | {"MASTER_PORT": ""}, core_count=8, gpu_count=0)
    with pytest.raises(LaunchError, match="NODE_RANK is '2'"):
        check(plan, there | {"NODE_RANK": "2"}, core_count=8, gpu_count=0)


def test_the_command_says_one_line_without_torch(tmp_path: Path) -> None:
    folder = write_plan(tmp_path / "a\nb $(x)", stage_contents([1]))
    command = "import sys\nfrom pipeplan_launch.preflight import main\nstatus = main(sys.argv[1:])\n"
    command += "sys.exit(7 if 'torch' in sys.modules else status)"
    done = subprocess.run([sys.executable, "-c", command, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (folder / "stages" / "stage-0.json").write_text("{")
    done = subprocess.run([sys.executable, "-c", command, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
