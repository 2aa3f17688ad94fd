"""Real launches on several servers that are told apart by name, or by a network: who becomes which worker, and what
is said of it."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import network_namespaces as requirements
import pytest
from launching import JOB, Launch, render
from network_namespaces import OWN_NAMESPACES
from toy_workers import stage_contents, write_plan

from pipeplan.errors import InputError
from pipeplan_launch.rank_mapping.host_identity import SERVER_VARIABLE

pytestmark = pytest.mark.slow
LAYERS = {1: [["0", "1", "2", "loss"]], 2: [["0", "1"], ["2", "loss"]]}
NOTING = JOB.replace("import torch\n", "import os, pathlib\nimport torch\n", 1).replace(
    "def job():\n",
    "def job():\n    pathlib.Path(__file__).with_name('worker-' + os.environ['RANK']).write_text(os.environ['WHO'])\n",
)
"""Notes on which server every worker is."""


def plan_of(folder: Path, sizes: Sequence[int], replicas: Sequence[int], **changes: Any) -> Path:
    """A plan folder with its launch.sh, for servers of these sizes."""
    folder.mkdir(exist_ok=True)
    (folder / "job.py").write_text(NOTING)
    contents = stage_contents(list(replicas), minibatch=4)
    uneven = len(set(sizes)) > 1
    for content in contents:
        content["model"] = {"ref": f"{folder / 'job.py'}:job", "graph_hash": None}
        content["layers"] = LAYERS[len(replicas)][content["stage"]]
        content |= {"servers": len(sizes), "workers_per_server": max(sizes)} | changes
        if uneven:
            content["server_sizes"] = list(sizes)
    plan = write_plan(folder / "plan", contents)
    render(plan, servers=len(sizes), workers_per_server=max(sizes), server_sizes=tuple(sizes), uneven=uneven)
    return plan


def launch(plan: Path, run: Path, environments: Sequence[dict[str, str]], *options: str) -> str:
    """Run launch.sh once for each environment, all at the same time, to a good end. What all of them said."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    shared |= {"GLOO_SOCKET_IFNAME": "lo", "PIPEPLAN_SECRET": "the same on all servers"}
    with ExitStack() as stack:
        every = [
            stack.enter_context(Launch(plan / "launch.sh", run, "--log-every", "0", *options, **shared, **one))
            for one in environments
        ]
        assert [one.wait() for one in every] == [0] * len(every), [one.lines for one in every]
        return "\n".join(line for one in every for line in one.lines)


def node(number: int, workers: int, server: str) -> dict[str, str]:
    place = {"NODE_RANK": str(number), "WORKERS": str(workers)}
    return place | {SERVER_VARIABLE: server, "WHO": f"{server}/{number}"}


def who(folder: Path) -> list[str]:
    """Where each worker was, in the order of the plan."""
    return [path.read_text() for path in sorted(folder.glob("worker-*"))]


def losses(run: Path) -> list[float]:
    """Of the epochs, bit by bit."""
    return [epoch["loss"] for epoch in json.loads((run / "summary.json").read_text())["epochs"]]


def test_servers_are_known_by_their_size_whatever_their_numbers(tmp_path: Path) -> None:
    """A server of two and one of one, in both orders; the second goes on from the first's checkpoint."""
    plan, run, whole = plan_of(tmp_path, [2, 1], [2, 1]), tmp_path / "run", tmp_path / "whole"
    for (large, small), folder, options in (
        ((0, 1), whole, ["--epochs", "2"]),
        ((0, 1), run, ["--epochs", "1"]),
        ((1, 0), run, ["--epochs", "2", "--resume"]),
    ):
        launch(plan, folder, [node(large, 2, "large"), node(small, 1, "small")], *options)
        assert who(tmp_path) == [f"large/{large}", f"large/{large}", f"small/{small}"]
    assert losses(run) == losses(whole)


@pytest.mark.parametrize("victim", ["2", "0"])
def test_who_is_lost_is_named_by_the_plan_and_training_goes_on(tmp_path: Path, victim: str) -> None:
    """Worker 0 is on launch 1, and worker 2 on launch 0, with the common store. Either dies once."""
    plan, run = plan_of(tmp_path, [2, 1], [2, 1]), tmp_path / "run"
    job = tmp_path / "job.py"
    dies = f"""
    mark = pathlib.Path(__file__).with_name('died')
    if os.environ['RANK'] == {victim!r} and not mark.exists():
        mark.write_text('')
        os.kill(os.getpid(), 9)
    data = TensorDataset"""
    job.write_text(job.read_text().replace("\n    data = TensorDataset", dies))
    said = launch(plan, run, [node(0, 1, "small"), node(1, 2, "large")], "--epochs", "1")
    assert who(tmp_path) == ["large/1", "large/1", "small/0"]
    assert f"worker {victim} was lost; restart 1 of 3" in said
    assert len(list(tmp_path.glob("run*"))) == 1, "the restart went on in the same run folder"
    assert len(list((run / "metrics").iterdir())) == 3


LINK = {"name": "cluster", "span": 2, "sendrecv": 1.25e8, "allreduce": 1.25e8, "latency_s": 0.0, "cards_s": 0.008}
SENDS = {"minibatch_s": 0.02, "forward_s": 0.008, "backward_s": 0.012, "boundary_s": 0.008, "parameter_bytes": 4}
SENDS |= dict.fromkeys(("send_bytes", "receive_gradient_bytes"), 1_000_000)
SENDS |= dict.fromkeys(("update_s", "sync_s", "exposed_s"), 0.0)
ONE_EACH = """
import os, sys
import torch, pipeplan_launch.worker
from pipeplan_launch.__main__ import main
from network_namespaces import Network, NetworkNode

rate, *arguments = sys.argv[1:]
network = Network(NetworkNode(below=(NetworkNode(rate, workers=1), NetworkNode(rate, workers=1))))
pids = network.start(lambda: sys.exit(main(arguments)), 29411)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid, _ in pids))
"""


def test_a_slow_link_between_networks_is_said_before_training(tmp_path: Path) -> None:
    """One worker on each of two servers, whose cable carries 20 Mbit/s where the plan was made for 1 Gbit/s."""
    try:
        requirements.check_requirements()
    except InputError as error:
        pytest.skip(str(error))
    plan = plan_of(tmp_path, [1, 1], [1, 1], links=[LINK], prediction=SENDS)
    (tmp_path / "one_each.py").write_text(ONE_EACH)
    environment = os.environ | {"WHO": "", "PYTHONPATH": str(Path(requirements.__file__).parent)}
    found = []
    for number, options in enumerate(([], ["--probe", "0"])):
        command = [*OWN_NAMESPACES, sys.executable, tmp_path / "one_each.py", "20mbit", plan]
        command += ["--run-dir", tmp_path / str(number), "--epochs", "1", *options]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        found.append([line for line in done.stderr.splitlines() if line.startswith("note: ")])
    (line,), none = found
    assert none == []
    match = re.fullmatch(
        r"note: the link between (.+) \(1\) and \1 \(2\): planned 1 Gbit/s, measured ([\d.]+) Mbit/s, (\d+) times .*",
        line,
    )
    assert match, line
    assert 10 < float(match[2]) <= 21
    assert float(match[3]) == pytest.approx(1e3 / float(match[2]), rel=0.02)
