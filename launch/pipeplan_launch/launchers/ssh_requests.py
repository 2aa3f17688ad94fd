"""Runs short programs on all hosts at the same time: the copying and the checks that come before training."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Self

from pipeplan_launch.launchers.ssh_connection import Launch, start_ssh


@dataclass(frozen=True)
class Reply:
    """The end of one program on one host."""

    status: int
    output: str = ""
    errors: str = ""


class Abandoned(Exception):
    """The user stopped the launch while programs ran on the hosts."""


class HostRequests:
    """Runs programs on hosts. Leaving the context by an exception ends those that still run, and waits for them."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._abandoned = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abandon()

    def on_all(self, request: Callable[[int], Reply]) -> list[Reply]:
        """Call `request` with the number of every host, each in its own thread; returns the replies in that order."""
        count = len(self.launch.hosts)
        with ThreadPoolExecutor(count) as pool:
            try:
                # A signal handler may raise here, also before the last request is under way.
                pending = [pool.submit(request, number) for number in range(count)]
                wait(pending)
            except BaseException:
                self.abandon()  # before the pool waits for its threads
                raise
            return [future.result() for future in pending]

    def run(self, number: int, feed: Callable[[IO[bytes]], None]) -> Reply:
        """Run one program on one host; `feed` writes it, and its input, to the standard input of ssh."""
        # The output goes to files, because a background process of ssh (ControlPersist) may hold a pipe open.
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            process = self._start(number, output, errors)
            try:
                assert process.stdin is not None
                # A host that cannot be reached takes no input. The reason is in `errors`.
                with suppress(BrokenPipeError), process.stdin as stdin:
                    feed(stdin)
                status = process.wait()
            finally:
                with self._lock:
                    self._running.discard(process)
            return Reply(status, _content(output), _content(errors))

    def abandon(self) -> None:
        """End all programs, and ssh with all that it has started here. No further one begins."""
        with self._lock:
            self._abandoned = True
            for process in self._running:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)

    def _start(self, number: int, output: IO[bytes], errors: IO[bytes]) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._abandoned:
                raise Abandoned
            process = start_ssh(self.launch, number, output, errors)
            self._running.add(process)
            return process


def last_line(text: str) -> str:
    """The last line that is not blank."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _content(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "surrogateescape")
