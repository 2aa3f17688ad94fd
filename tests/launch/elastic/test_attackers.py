"""Runs on networks of their own: beside an attacker who reaches them over a cable, and with a link that is cut."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import attackers
import pytest
from launch_scripts import SLOW_JOB, render
from network_namespaces import OWN_NAMESPACES
from toy_workers import stage_contents, write_plan

COMMAND = (*OWN_NAMESPACES, "--mount-proc")


def _namespaces_work() -> bool:
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    made = "mount -t tmpfs none /run && mkdir /run/netns && ip netns add one"
    return subprocess.run([*COMMAND, "sh", "-c", made], capture_output=True, check=False).returncode == 0


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not _namespaces_work(), reason="needs unshare, ip, and network namespaces for all users"),
]


def attacked(kind: str, folder: Path, *options: str, servers: int = 2) -> Any:
    """What came of a launch of two workers on one or two servers, in namespaces of its own."""
    (folder / "job.py").write_text(SLOW_JOB)
    contents = stage_contents([1, 1], minibatch=4)
    for content in contents:
        content["model"] = {"ref": f"{folder / 'job.py'}:job", "graph_hash": None}
        content["layers"] = [["0", "1"], ["2", "loss"]][content["stage"]]
        content |= {"servers": servers, "workers_per_server": 2 // servers}
    script = render(write_plan(folder / "plan", contents), servers=servers, workers_per_server=2 // servers)
    usual = ["--epochs", "100000", "--checkpoint-minibatches", "7", "--log-every", "0"]
    done = subprocess.run(
        [
            *COMMAND,
            sys.executable,
            attackers.__file__,
            *kind.split(),
            str(script),
            str(folder / "run"),
            *options,
            *usual,
        ],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env=os.environ | {"TMPDIR": str(folder)},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def logs_of(folder: Path) -> str:
    return "".join((folder / f"run.{server}.log").read_text() for server in (0, 1))


def test_an_attacker_on_the_network_of_one_machine_finds_no_door(tmp_path: Path) -> None:
    found = attacked("one-machine", tmp_path, servers=1)
    # The control port shows that the attacker reaches the machine at all.
    assert found["open"] == [attackers.CONTROL_PORT]
    assert (found["attack"], found["status"]) == (0, 0)
    log = (tmp_path / "run.log").read_text()
    assert "stopped after " in log
    assert "was lost" not in log


def test_an_attacker_without_the_secret_gets_nowhere(tmp_path: Path) -> None:
    found = attacked("two-servers", tmp_path)
    # Server 0's only door before the workers connect to each other is the one that asks for the secret.
    assert found["early"] == {"open": [attackers.PORT], "doors": {}}
    assert attackers.PORT in found["late"]["open"]
    assert found["late"]["doors"] == {}
    assert found["joined"] == 2
    assert "the secret of this launch is not the one of server 0" in (tmp_path / "run.x.log").read_text()
    assert (found["goes_on"], found["owned"], found["statuses"]) == (True, False, [0, 0])
    assert logs_of(tmp_path).count("stopped after ") == 1
    assert "was lost" not in logs_of(tmp_path)


def test_a_link_that_is_cut_for_a_while_changes_nothing(tmp_path: Path) -> None:
    assert attacked("cut 2", tmp_path, "--timeout", "12") == [0, 0]
    assert logs_of(tmp_path).count("stopped after ") == 1
    assert "was lost" not in logs_of(tmp_path)


def test_a_link_that_is_cut_for_good_ends_both_servers(tmp_path: Path) -> None:
    assert attacked("cut 0", tmp_path, "--timeout", "8", "--restarts", "1") == [2, 2]
    assert logs_of(tmp_path).count("error: ") == 2
