"""Two servers, of which each has its own torchrun: what a fault or a request on one of them does to the other."""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from flood import flood
from launch_scripts import SLOW_JOB, render
from launching import Launch, left_nothing
from toy_workers import stage_contents, write_plan

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes as Linux shows them"),
]
SECRET = "the same on both servers"
OPTIONS = ("--epochs", "100000", "--checkpoint-minibatches", "7", "--log-every", "0")


class Servers:
    """Two launches of one run."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        (folder / "job.py").write_text(SLOW_JOB)
        contents = stage_contents([1, 1], minibatch=4)
        for content in contents:
            content["model"] = {"ref": f"{folder / 'job.py'}:job", "graph_hash": None}
            content["layers"] = [["0", "1"], ["2", "loss"]][content["stage"]]
            content |= {"servers": 2, "workers_per_server": 1}
        plan = write_plan(folder / "plan", contents)
        self.script = render(plan, servers=2, workers_per_server=1)
        self.run = folder / "run"
        self._stack = stack
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]

    def start(self, node: int, *options: str) -> Launch:
        return self._stack.enter_context(
            Launch(
                self.script,
                self.run,
                *OPTIONS,
                *options,
                NODE_RANK=str(node),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(self.port),
                GLOO_SOCKET_IFNAME="lo",
                PIPEPLAN_SECRET=SECRET,
            )
        )


@pytest.fixture
def servers(tmp_path: Path):  # type: ignore[no-untyped-def]
    with ExitStack() as stack:
        yield Servers(tmp_path, stack)


def said(launch: Launch) -> list[str]:
    return [line for line in launch.lines if not line.startswith(("note", "plan", "epoch", "Asynchronous"))]


@pytest.mark.parametrize("node", [0, 1])
def test_a_worker_that_is_killed_on_one_starts_again_on_both(servers: Servers, node: int) -> None:
    both = [servers.start(0), servers.start(1)]
    both[0].trains()
    for restart in (1, 2):
        both[node].kill(rank=node)
        both[1].until(lambda count=restart: both[1].said(f"restart {count} of 3"), "restart")  # type: ignore[misc]
        both[0].trains()
    both[1].workers()
    both[node].process.send_signal(signal.SIGTERM)  # one of them is asked, both stop
    assert [launch.wait() for launch in both] == [0, 0], [launch.lines for launch in both]
    assert all(left_nothing(launch) for launch in both)
    lines = said(both[0]) + said(both[1])
    assert sum(f"worker {node} was lost" in line for line in lines) == 2
    assert sum("stopped after" in line for line in lines) == 1
    assert len(lines) == 3


def test_a_server_that_is_lost_may_be_started_again(servers: Servers) -> None:
    first, second = servers.start(0), servers.start(1)
    first.trains()
    second.process.kill()  # its worker goes with it
    second.wait()
    time.sleep(3)  # the first server's workers start again, and wait
    second = servers.start(1)
    first.trains()
    assert second.said("worker 1 was lost")
    second.process.send_signal(signal.SIGTERM)
    assert [first.wait(), second.wait()] == [0, 0], [first.lines, second.lines]


def test_an_error_on_one_ends_both(servers: Servers) -> None:
    script = servers.script.parents[1] / "job.py"
    script.write_text(
        SLOW_JOB.replace("def __getitem__(self, index):", "def __getitem__(self, index):\n        [][index]")
    )
    both = [servers.start(0), servers.start(1)]
    began = time.monotonic()
    codes = {launch.wait() for launch in both}
    # A worker whose own data fails may be on either server, or on both at once.
    assert codes in ({2}, {1, 2}), [launch.lines for launch in both]
    assert time.monotonic() - began < 100
    (line,) = said(both[0]) + said(both[1])
    assert line.startswith("error: ")


def test_without_the_first_server_the_second_ends(servers: Servers) -> None:
    first, second = servers.start(0), servers.start(1)
    first.trains()
    second.workers()
    first.process.kill()
    assert second.wait() in (1, 2)
    assert any(line.startswith("error: ") for line in said(second)), second.lines
    assert not second.alive()


@pytest.mark.parametrize("node", [0, 1])
def test_a_server_that_is_frozen_as_a_whole_is_noticed(servers: Servers, node: int) -> None:
    """Launcher and worker: their connections stay open, and nobody answers."""
    options = ("--timeout", "6", "--restarts", "0")
    both = [servers.start(0, *options), servers.start(1, *options)]
    both[0].trains()
    frozen = [*both[node].workers().values(), both[node].process.pid]
    try:
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        other = both[1 - node]
        assert other.wait() in (1, 2), other.lines
        assert any(line.startswith("error: ") for line in said(other)), other.lines
    finally:
        for pid in frozen:
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def few_files() -> Iterator[None]:
    """What is started meanwhile may open as many files as on most machines."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("few_files")
@pytest.mark.parametrize("kind", ["idle", "idle-again"])
def test_a_flood_of_strangers_ends_no_run_and_keeps_no_server_out(servers: Servers, kind: str) -> None:
    first, second = servers.start(0), servers.start(1)
    first.trains()
    with flood(servers.port, 1200, 100, kind):
        until = time.monotonic() + 15  # longer than a connection without the secret lasts
        while time.monotonic() < until:
            first.trains()
        second.process.kill()
        second.wait()
        second = servers.start(1)
        second.until(lambda: second.said("worker 1 was lost"), "restart")
        first.trains()
        second.process.send_signal(signal.SIGTERM)
        assert [first.wait(), second.wait()] == [0, 0], [first.lines, second.lines]
    lines = said(first) + said(second)
    assert sum("was lost" in line for line in lines) == 1
    assert sum("stopped after" in line for line in lines) == 1
