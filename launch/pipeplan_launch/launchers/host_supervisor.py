"""`python -m pipeplan_launch.launchers.host_supervisor GRACE LAUNCH_SH …`: runs launch.sh on one host of several.

`launchers.ssh` starts it on every host, over ssh.

Requests come as lines on standard input: `stop` (SIGTERM) and `kill` (SIGKILL). Any other line is a sign of life. The
script that started this process counts as gone at the end of the input, or after a minute without a line. Training then
has GRACE seconds to end at a checkpoint. So no worker outlives the script, or the connection to the script.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from types import FrameType

SILENCE_S = 60.0
LAST_S = 5.0
"""Time between the last SIGTERM and SIGKILL."""
LAST_OUTPUT_S = 5.0


class HostSupervisor:
    """Runs a command for a script at the other end of a pipe."""

    def __init__(self, command: Sequence[str], grace_s: float, silence_s: float = SILENCE_S) -> None:
        self._grace_s, self._silence_s = grace_s, silence_s
        self._ended = threading.Event()
        self._abandoned = threading.Event()
        # The command inherits that SIGHUP and SIGPIPE are ignored.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            restore_signals=False,
        )

    def run(self, requests: int = 0, output: int = 1, errors: int = 2) -> int:
        """Wait until the command ends; returns its exit status as in a shell. The arguments are file descriptors."""
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        relays = [
            threading.Thread(target=self._relay, args=(source.fileno(), target), daemon=True)
            for source, target in ((self._process.stdout, output), (self._process.stderr, errors))
        ]
        for thread in (*relays, threading.Thread(target=self._follow_requests, args=(requests,), daemon=True)):
            thread.start()
        status = self._process.wait()
        self._ended.set()
        for relay in relays:
            relay.join(LAST_OUTPUT_S)
        return 128 - status if status < 0 else status

    def stop(self) -> None:
        """Ask the command to end."""
        self._send(signal.SIGTERM)

    def _follow_requests(self, requests: int) -> None:
        for request in self._requests(requests):
            if request == b"stop":
                self.stop()
            elif request == b"kill":
                self._send(signal.SIGKILL)
        self._abandoned.set()
        self.stop()
        if not self._ended.wait(self._grace_s):
            self.stop()
            if not self._ended.wait(LAST_S):
                self._send(signal.SIGKILL)

    def _requests(self, source: int) -> Iterator[bytes]:
        """Lines from a descriptor, until its end or until it has been silent for too long."""
        pending = b""
        while select.select([source], [], [], self._silence_s)[0]:
            chunk = os.read(source, 4096)
            if not chunk:
                return
            *lines, pending = (pending + chunk).split(b"\n")
            yield from lines

    def _send(self, number: int) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    def _relay(self, source: int, target: int) -> None:
        """Relay output. Output that nobody reads is dropped, so that workers can write until their last checkpoint."""
        unread = False
        while chunk := os.read(source, select.PIPE_BUF):
            while not unread and not self._abandoned.is_set():
                if select.select([], [target], [], 1.0)[1]:  # there is room for PIPE_BUF bytes
                    try:
                        _write_fully(target, chunk)
                    except OSError:
                        unread = True
                    break


def _write_fully(target: int, data: bytes) -> None:
    while data:
        data = data[os.write(target, data) :]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status of launch.sh, 128 and more for the signal that ended it."""
    grace, *command = sys.argv[1:] if arguments is None else arguments
    for number in (signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    supervisor = HostSupervisor(command, float(grace))

    def stop(_number: int, _frame: FrameType | None) -> None:
        supervisor.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    return supervisor.run()


if __name__ == "__main__":
    sys.exit(main())
