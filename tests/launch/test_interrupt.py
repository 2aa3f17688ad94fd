"""Workers do not outlive what started them."""

from __future__ import annotations

import subprocess
import sys

import pytest

CHILD = "from pipeplan_launch.interrupt import die_with_parent as d; print(d(), flush=True); input()"
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent is gone")
def test_a_worker_dies_with_its_launcher() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "True\n"
        parent.kill()
        # The child holds the pipe's other end: its end is the pipe's.
        assert parent.stdout.read() == ""
