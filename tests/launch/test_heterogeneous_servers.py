"""A plan for servers with different numbers of workers: its files, what preflight asks, and a run over two servers."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from launch_scripts import render
from toy_workers import stage_contents, write_plan

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.plan.launch_plan import LaunchPlan
from pipeplan_launch.plan.stage_files import load_plan
from pipeplan_launch.preflight import check_machine, workers_to_start

THERE = {"NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "PIPEPLAN_SECRET": "the same on them"}
JOB = """
import torch
from torch.nn import functional
from torch.utils.data import TensorDataset
from pipeplan_launch import Data, Job

def job():
    data = TensorDataset(torch.randn(12, 4), torch.randint(3, (12,)))
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    return Job(net, loss=functional.cross_entropy, data=lambda: Data(data, data))
"""


def _contents(**changes: Any) -> list[dict[str, Any]]:
    """Stages of 2 and 1 workers, on servers of 2 and of 1."""
    given = {"servers": 2, "workers_per_server": 2, "server_sizes": [2, 1]} | changes
    return [content | given for content in stage_contents([2, 1], minibatch=4)]


def _script(folder: Path) -> Path:
    return render(folder, servers=2, server_sizes=(2, 1), uneven=True)


@pytest.fixture
def plan(tmp_path: Path) -> LaunchPlan:
    return load_plan(write_plan(tmp_path, _contents()))


def test_every_server_has_its_own_number_of_workers(plan: LaunchPlan) -> None:
    assert plan.world == 3
    assert [plan.workers_on(server) for server in (0, 1)] == [2, 1]


@pytest.mark.parametrize("sizes", [[2], [2, 0], [3, 1], [2, True], ["2", 1], [2, 1.5]])
def test_impossible_numbers_are_refused(tmp_path: Path, sizes: list[object]) -> None:
    with pytest.raises(LaunchError, match=r"stage-0.json: server_sizes(\[[01]\])?: expected"):
        load_plan(write_plan(tmp_path, _contents(server_sizes=sizes)))


def test_a_worker_beyond_the_last_server_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="worker 2 does not exist: 2 servers of 1, 1 workers have workers 0 to 1"):
        load_plan(write_plan(tmp_path, _contents(server_sizes=[1, 1])))


def test_preflight_asks_for_the_workers_of_this_server(plan: LaunchPlan) -> None:
    assert check_machine(plan, THERE, core_count=1, gpu_count=0) is None
    assert "2 workers share 1 core" in (
        check_machine(plan, THERE | {"NODE_RANK": "0"}, core_count=1, gpu_count=0) or ""
    )
    with pytest.raises(LaunchError, match=r"spans 2 servers of 2 and 1 workers: run launch\.sh on each"):
        check_machine(plan, {}, core_count=4, gpu_count=0)
    with pytest.raises(LaunchError, match="NODE_RANK is '2'"):
        check_machine(plan, THERE | {"NODE_RANK": "2"}, core_count=4, gpu_count=0)


def test_preflight_counts_the_gpus_of_this_server(tmp_path: Path) -> None:
    plan = load_plan(write_plan(tmp_path, _contents(device="cuda")))
    assert check_machine(plan, THERE, core_count=4, gpu_count=1) is None
    with pytest.raises(LaunchError, match="needs 2 CUDA devices on server 0, and this machine has none"):
        check_machine(plan, THERE | {"NODE_RANK": "0"}, core_count=4, gpu_count=0)
    with pytest.raises(LaunchError, match="needs 2 CUDA devices on its largest server"):
        check_machine(plan, {}, core_count=4, gpu_count=0)


def test_how_many_workers_start_here(tmp_path: Path) -> None:
    """WORKERS; else the size of the server that has so many GPUs; else that of server NODE_RANK."""
    plan = load_plan(write_plan(tmp_path, _contents(device="cuda")))
    first = THERE | {"NODE_RANK": "0"}
    assert [workers_to_start(plan, first, gpus) for gpus in (1, 2, 3)] == [1, 2, 2]
    assert [workers_to_start(plan, THERE, gpus) for gpus in (0, 1, 2, 8)] == [1, 1, 2, 1]
    assert workers_to_start(plan, {}, 0) == 2
    assert workers_to_start(plan, THERE | {"WORKERS": "3"}, 1) == 3
    for wrong in ("0", "two", "-1", "4"):
        with pytest.raises(LaunchError, match="WORKERS is"):
            workers_to_start(plan, THERE | {"WORKERS": wrong}, 1)


def test_one_launch_for_every_worker(plan: LaunchPlan) -> None:
    third = THERE | {"NODE_RANK": "2", "NNODES": "3", "WORKERS": "1"}
    assert check_machine(plan, third, core_count=1, gpu_count=0) is None
    with pytest.raises(LaunchError, match="NODE_RANK is '3': it must be this server's number, 0 to 2"):
        check_machine(plan, third | {"NODE_RANK": "3"}, core_count=1, gpu_count=0)
    with pytest.raises(LaunchError, match="NNODES is 'x'"):
        check_machine(plan, third | {"NNODES": "x"}, core_count=1, gpu_count=0)
    with pytest.raises(LaunchError, match="the plan has 3 workers, and this launch alone would start 1"):
        check_machine(plan, {"NNODES": "1", "WORKERS": "1"}, core_count=1, gpu_count=0)


def test_the_script_is_clean_for_shellcheck(tmp_path: Path) -> None:
    script = _script(tmp_path)
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    if shutil.which("shellcheck"):
        done = subprocess.run(["shellcheck", script], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_two_servers_of_two_and_one_train_together(tmp_path: Path) -> None:
    """launch.sh on both, as on two machines; leading zeros in NODE_RANK are no octal number."""
    job = tmp_path / "job.py"
    job.write_text(JOB)
    layers = [["0", "1"], ["2", "loss"]]
    contents = _contents(model={"ref": f"{job}:job", "graph_hash": None})
    folder = write_plan(tmp_path / "plan", [one | {"layers": layers[one["stage"]]} for one in contents])
    script = _script(folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "PIPEPLAN_SECRET": "the same on all servers",
    }
    servers = [
        subprocess.Popen(
            [script, "--epochs", "1", "--run-dir", str(tmp_path / "run")],
            env=os.environ | shared | {"NODE_RANK": node},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in ("00", "01")
    ]
    try:
        ends = [server.communicate(timeout=240) for server in servers]
    finally:
        for server in servers:
            server.kill()
    assert [server.returncode for server in servers] == [0, 0], ends
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert len(summary["epochs"]) == 1
