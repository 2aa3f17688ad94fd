"""Two servers beside an attacker on their network who does not know the launch's secret: nothing joins, is read or run,
and no key of the store is seen, changed or removed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import attacker_of_servers
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


@pytest.mark.slow
@pytest.mark.skipif(not _namespaces_work(), reason="needs unshare, ip, and network namespaces for all users")
def test_an_attacker_without_the_secret_gets_nowhere(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(SLOW_JOB)
    contents = stage_contents([1, 1], minibatch=4)
    for content in contents:
        content["model"] = {"ref": f"{tmp_path / 'job.py'}:job", "graph_hash": None}
        content["layers"] = [["0", "1"], ["2", "loss"]][content["stage"]]
        content |= {"servers": 2, "workers_per_server": 1}
    script = render(write_plan(tmp_path / "plan", contents), servers=2, workers_per_server=1)
    run = tmp_path / "run"
    options = ["--epochs", "100000", "--checkpoint-minibatches", "7", "--log-every", "0"]
    done = subprocess.run(
        [*COMMAND, sys.executable, attacker_of_servers.__file__, str(script), str(run), *options],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    # Server 0's only door before the workers connect to each other is the one that asks for the secret.
    assert found["early"] == {"open": [attacker_of_servers.PORT], "doors": {}}
    assert attacker_of_servers.PORT in found["late"]["open"]
    assert found["late"]["doors"] == {}
    assert found["joined"] == 2
    assert "the secret of this launch is not the one of server 0" in Path(f"{run}.x.log").read_text()
    assert (found["goes_on"], found["owned"], found["statuses"]) == (True, False, [0, 0])
    logs = "".join(Path(f"{run}.{server}.log").read_text() for server in (0, 1))
    assert logs.count("stopped after ") == 1
    assert "was lost" not in logs
