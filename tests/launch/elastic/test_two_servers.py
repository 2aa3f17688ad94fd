"""Two servers, each with its own torchrun: what a fault, a request, an attacker or a cut link on one does to both."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attackers
import pytest
from flood import flood
from launching import SLOW_JOB, Launch, free_port, left_nothing, script_of
from listening import why_impossible
from network_namespaces import OWN_NAMESPACES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes as Linux shows them"),
]
OPTIONS = ("--epochs", "100000", "--checkpoint-minibatches", "7", "--log-every", "0")
Start = Callable[..., Launch]


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def start(tmp_path: Path, port: int) -> Iterator[Start]:
    """Starts the launch of a server, 0 or 1, of one run."""
    script = script_of(tmp_path, SLOW_JOB, servers=2, workers_per_server=1)
    with ExitStack() as stack:

        def launch(node: int, *options: str) -> Launch:
            variables = {
                "NODE_RANK": str(node),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": "lo",
                "PIPEPLAN_SECRET": "the same on both servers",
            }
            return stack.enter_context(Launch(script, tmp_path / "run", *OPTIONS, *options, **variables))

        yield launch


def said(*launches: Launch) -> list[str]:
    lines = [line for launch in launches for line in launch.lines]
    return [line for line in lines if not line.startswith(("note", "plan", "epoch", "Asynchronous"))]


@pytest.mark.parametrize("node", [0, 1])
def test_a_worker_that_is_killed_on_one_starts_again_on_both(start: Start, node: int) -> None:
    both = [start(0), start(1)]
    both[0].trains()
    for restart in (1, 2):
        both[node].kill(rank=node)
        both[1].until(lambda count=restart: both[1].said(f"restart {count} of 3"), "restart")  # type: ignore[misc]
        both[0].trains()
    both[1].workers()
    both[node].process.send_signal(signal.SIGTERM)  # one of them is asked, both stop
    assert [launch.wait() for launch in both] == [0, 0], [launch.lines for launch in both]
    assert all(left_nothing(launch) for launch in both)
    lines = said(*both)
    assert sum(f"worker {node} was lost" in line for line in lines) == 2
    assert sum("stopped after" in line for line in lines) == 1
    assert len(lines) == 3


def test_an_error_on_one_ends_both(start: Start, tmp_path: Path) -> None:
    reads = "def __getitem__(self, index):"
    (tmp_path / "job.py").write_text(SLOW_JOB.replace(reads, f"{reads}\n        [][index]"))
    both = [start(0), start(1)]
    began = time.monotonic()
    # A worker whose own data fails may be on either server, or on both at once.
    assert {launch.wait() for launch in both} in ({2}, {1, 2}), [launch.lines for launch in both]
    assert time.monotonic() - began < 100
    (line,) = said(*both)
    assert line.startswith("error: ")


def test_without_the_first_server_the_second_ends(start: Start) -> None:
    first, second = start(0), start(1)
    first.trains()
    second.workers()
    first.process.kill()
    assert second.wait() in (1, 2)
    assert any(line.startswith("error: ") for line in said(second)), second.lines
    assert not second.alive()


@pytest.mark.parametrize("node", [0, 1])
def test_a_server_that_is_frozen_as_a_whole_is_noticed(start: Start, node: int) -> None:
    """Launcher and worker: their connections stay open, and nobody answers."""
    both = [start(server, "--timeout", "6", "--restarts", "0") for server in (0, 1)]
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
def test_a_flood_of_strangers_ends_no_run_and_keeps_no_server_out(start: Start, port: int, kind: str) -> None:
    first, second = start(0), start(1)
    first.trains()
    with flood(port, 1200, 100, kind):
        until = time.monotonic() + 15  # longer than a connection without the secret lasts
        while time.monotonic() < until:
            first.trains()
        second.process.kill()
        second.wait()
        second = start(1)
        second.until(lambda: second.said("worker 1 was lost"), "restart")
        first.trains()
        second.process.send_signal(signal.SIGTERM)
        assert [first.wait(), second.wait()] == [0, 0], [first.lines, second.lines]
    lines = said(first, second)
    assert sum("was lost" in line for line in lines) == 1
    assert sum("stopped after" in line for line in lines) == 1


# On networks of their own: beside an attacker who reaches them over a cable, and with a link that is cut.

COMMAND = (*OWN_NAMESPACES, "--mount-proc")


in_namespaces = pytest.mark.skipif(bool(why_impossible()), reason=why_impossible() or "possible")


def run_script(kind: str, folder: Path, *words: str) -> Any:
    """What a script prints that launches a plan of two workers on two servers, in namespaces of its own."""
    script = script_of(folder, SLOW_JOB, servers=2, workers_per_server=1)
    done = subprocess.run(
        [
            *COMMAND,
            sys.executable,
            attackers.__file__,
            *kind.split(),
            str(script),
            str(folder / "run"),
            *words,
            *OPTIONS,
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


@in_namespaces
def test_an_attacker_without_the_secret_gets_nowhere(tmp_path: Path) -> None:
    found = run_script("two-servers", tmp_path)
    # Server 0's only door before the workers connect to each other is the one that asks for the secret.
    assert found["early"] == {"open": [attackers.PORT], "doors": {}}
    assert attackers.PORT in found["late"]["open"]
    assert found["late"]["doors"] == {}
    assert found["joined"] == 2
    assert "the secret of this launch is not the one of server 0" in (tmp_path / "run.x.log").read_text()
    assert (found["goes_on"], found["owned"], found["statuses"]) == (True, False, [0, 0])
    assert logs_of(tmp_path).count("stopped after ") == 1
    assert "was lost" not in logs_of(tmp_path)


@in_namespaces
def test_a_link_that_is_cut_for_a_while_changes_nothing(tmp_path: Path) -> None:
    assert run_script("cut 2", tmp_path, "--timeout", "12") == [0, 0]
    assert logs_of(tmp_path).count("stopped after ") == 1
    assert "was lost" not in logs_of(tmp_path)


@in_namespaces
def test_a_link_that_is_cut_for_good_ends_both_servers(tmp_path: Path) -> None:
    assert run_script("cut 0", tmp_path, "--timeout", "8", "--restarts", "1") == [2, 2]
    assert logs_of(tmp_path).count("error: ") == 2
