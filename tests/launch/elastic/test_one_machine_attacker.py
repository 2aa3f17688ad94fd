"""A run on one machine beside an attacker who reaches it over a cable: nothing listens, so nothing is read or run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import attacker
import pytest
from launch_scripts import SLOW_JOB, render
from network_namespaces import OWN_NAMESPACES
from toy_workers import stage_contents, write_plan


def _namespaces_work() -> bool:
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    made = "mount -t tmpfs none /run && mkdir /run/netns && ip netns add one"
    return (
        subprocess.run([*OWN_NAMESPACES, "--mount-proc", "sh", "-c", made], capture_output=True, check=False).returncode
        == 0
    )


@pytest.mark.slow
@pytest.mark.skipif(not _namespaces_work(), reason="needs unshare, ip, and network namespaces for all users")
def test_an_attacker_on_the_network_finds_no_door(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(SLOW_JOB)
    contents = stage_contents([1, 1], minibatch=4)
    for content in contents:
        content["model"] = {"ref": f"{tmp_path / 'job.py'}:job", "graph_hash": None}
        content["layers"] = [["0", "1"], ["2", "loss"]][content["stage"]]
    script = render(write_plan(tmp_path / "plan", contents))
    options = ["--epochs", "100000", "--checkpoint-minibatches", "7", "--log-every", "0"]
    command = [
        *OWN_NAMESPACES,
        "--mount-proc",
        sys.executable,
        attacker.__file__,
        str(script),
        str(tmp_path / "run"),
        *options,
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=os.environ | {"TMPDIR": str(tmp_path)}
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    # The control port shows that the attacker reaches the machine at all.
    assert found["open"] == [attacker.CONTROL_PORT]
    assert (found["attack"], found["status"]) == (0, 0)
    log = Path(f"{tmp_path / 'run'}.log").read_text()
    assert "stopped after " in log
    assert "was lost" not in log
