"""launch.sh on a host of a launch over ssh: it hears requests, and does not outlive its connection."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from pipeplan_launch.launchers.host_supervisor import HostSupervisor

# Ends at a "checkpoint" when it is asked to. Its output says when it can be.
TRAINING = "trap 'echo checkpoint; exit 7' TERM; echo training; while :; do sleep 0.05; done"
STUBBORN = "trap 'echo asked' TERM; echo training; while :; do sleep 0.05; done"


class Connection:
    """The pipes that ssh would hold, and a supervisor at their other end."""

    def __init__(self, program: str, grace_s: float = 30.0, silence_s: float = 30.0) -> None:
        requests, self.requests = os.pipe()
        self.output, output = os.pipe()
        self._theirs = requests, output
        supervisor = HostSupervisor(["bash", "-c", program], grace_s, silence_s)
        self.statuses: list[int] = []
        self._thread = threading.Thread(
            target=lambda: self.statuses.append(supervisor.run(requests, output, output)), daemon=True
        )
        self._thread.start()

    def read(self) -> bytes:
        return os.read(self.output, 1 << 16)

    def status(self) -> int:
        self._thread.join(60)
        (status,) = self.statuses
        return status

    def end(self) -> None:
        """End the connection, as ssh does when its other side is gone."""
        requests, self.requests = self.requests, -1
        if requests >= 0:
            os.close(requests)

    def close(self) -> None:
        """Close all descriptors but one: the supervisor may still read requests, and its number must not be reused."""
        self.end()
        for descriptor in (self.output, self._theirs[1]):
            os.close(descriptor)


@pytest.fixture
def opened() -> Iterator[list[Connection]]:
    connections: list[Connection] = []
    yield connections
    for connection in connections:
        connection.close()


def test_a_status_comes_back_and_so_does_the_output(opened: list[Connection]) -> None:
    opened.append(connection := Connection("echo out; echo error >&2; cat; exit 3"))
    assert connection.status() == 3
    assert sorted(connection.read().split()) == [b"error", b"out"]


def test_requests_are_passed_on_and_a_kill_ends_what_does_not_listen(opened: list[Connection]) -> None:
    opened.append(connection := Connection(TRAINING))
    assert connection.read() == b"training\n"
    os.write(connection.requests, b"here\nst")
    os.write(connection.requests, b"op\n")
    assert connection.status() == 7
    assert connection.read() == b"checkpoint\n"
    opened.append(stubborn := Connection(STUBBORN))
    assert stubborn.read() == b"training\n"
    os.write(stubborn.requests, b"stop\nkill\n")
    assert stubborn.status() == 128 + signal.SIGKILL


def test_the_end_of_the_connection_and_silence_ask_for_a_checkpoint(opened: list[Connection]) -> None:
    opened.append(ended := Connection(TRAINING))
    opened.append(silent := Connection(TRAINING, silence_s=0.5))
    assert ended.read() == b"training\n"
    ended.end()
    assert ended.status() == 7
    assert silent.status() == 7


def test_there_is_an_end_to_the_grace(opened: list[Connection], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeplan_launch.launchers.host_supervisor.LAST_S", 0.2)
    opened.append(connection := Connection(STUBBORN, grace_s=0.3))
    assert connection.read() == b"training\n"
    connection.end()
    assert connection.status() == 128 + signal.SIGKILL


def test_output_that_nobody_reads_holds_nothing_up(opened: list[Connection]) -> None:
    """The pipe is full when the connection ends; the last words before the checkpoint must not block."""
    wordy = "trap 'yes | head -c 300000; exit 7' TERM; yes | head -c 300000 & wait; while :; do sleep 0.05; done"
    opened.append(connection := Connection(wordy))
    assert connection.read()
    connection.end()
    assert connection.status() == 7
