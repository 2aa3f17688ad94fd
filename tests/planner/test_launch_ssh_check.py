"""launch-ssh.sh with a stand-in for ssh, which is a shell here: what hosts are asked before they train."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from test_render import outcome

from pipeplan.cluster_data import Cluster, Level
from pipeplan.problem import Problem
from pipeplan.rendering import launch_files
from pipeplan.rendering.launchers import LAUNCHERS
from pipeplan.rendering.plan_folder import write_plan
from pipeplan.solving import Settings, solve

# What a host is told, then why it cannot take part.
TELLING = """#!/bin/bash
printf '%s\\n' "$NODE_RANK" "$MASTER_PORT" "${PYTHON-}" >"$0.$NODE_RANK"
echo 'error: here it ends' >&2
exit 2
"""


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """Of two servers, with the script, a stand-in for ssh, and a launch.sh that only tells."""
    small, folder = outcome().problem, tmp_path / "a plan"
    levels = (Level("server", 1, 100.0), Level("cluster", 2, 10.0))
    problem = Problem(small.profile, Cluster("two", small.cluster.device, levels))
    write_plan(solve(problem, Settings()), folder)
    kind = LAUNCHERS["ssh"]
    launch_files.write(folder / kind.file_name, launch_files.text(folder, kind, {}), kind, force=True)
    (folder / "launch.sh").write_text(TELLING)
    (tmp_path / "ssh").write_text('#!/bin/bash\nexec bash -c "${!#}"\n')
    for script in (folder / "launch.sh", tmp_path / "ssh"):
        script.chmod(0o755)
    (tmp_path / "hosts").write_text("a python=~/b/python\nb python=/c/python\n")
    return folder


def begun(plan: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [plan / "launch-ssh.sh", "--hosts", "hosts", "--ssh", "./ssh", *options],
        cwd=plan.parent,
        env={"PATH": "/usr/bin:/bin", "HOME": "/home/me", "TMPDIR": str(plan.parent)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def lives(number: int) -> bool:
    """Whether a process has not ended; of an orphan that has, nobody may have asked how."""
    try:
        os.kill(number, 0)
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except FileNotFoundError:
        return not Path("/proc/self").exists()


def test_hosts_are_asked_with_a_port_that_anybody_may_open(plan: Path) -> None:
    for options, port in (((), None), (("--port", "31234"), "31234")):
        _, errors = begun(plan, *options).communicate(timeout=60)
        assert errors == "error: here it ends\n"
        first, second = ((plan / f"launch.sh.{number}").read_text().splitlines() for number in range(2))
        assert (first[0], second[0]) == ("0", "1")
        assert first[1] == port if port else 1024 <= int(first[1]) < 1 << 16
        assert (first[2], second[2]) == ("/home/me/b/python", "/c/python")


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_nothing_that_asks_outlives_the_script(plan: Path, sent: signal.Signals) -> None:
    (plan.parent / "ssh").write_text("#!/bin/bash\necho $$ >>asking\nsleep 100 & wait\n")
    ran, asking = begun(plan), plan.parent / "asking"
    deadline = time.monotonic() + 60
    while not asking.exists() or asking.read_text().count("\n") < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    ran.send_signal(sent)
    _, errors = ran.communicate(timeout=60)
    assert (ran.returncode, errors) == (130, "")
    while any(lives(int(number)) for number in asking.read_text().split()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not list(plan.parent.glob("tmp.*"))
