"""Who else measures at the same time: nobody, or other processes that start and end their timed passes together."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Protocol


class Company(Protocol):
    """Those that a process measures together with, itself included."""

    processes: int

    def start(self) -> None:
        """Wait until all are about to begin their timed passes."""

    def finish(self, go_on: Callable[[], None]) -> None:
        """Having measured enough, call `go_on` again and again until all have: the others' load stays what it was."""


class Alone:
    """One process, which waits for nobody."""

    processes = 1

    def start(self) -> None:
        """There is nobody to wait for."""

    def finish(self, go_on: Callable[[], None]) -> None:
        """There is nobody whose load to keep up."""


class Member:
    """One of several, which meet through the process that started them (`pipeplan.profiler.together`)."""

    HERE, GO = "here", "go"

    def __init__(self, connection: Connection, processes: int) -> None:
        self._connection, self.processes = connection, processes

    def start(self) -> None:
        """Say that it is here, and wait for the others."""
        self._connection.send(self.HERE)
        self._take()

    def finish(self, go_on: Callable[[], None]) -> None:
        """Say that it is here, and keep the core busy until the others are."""
        self._connection.send(self.HERE)
        while not self._connection.poll():
            go_on()
        self._take()

    def _take(self) -> None:
        word = self._connection.recv()
        assert word == self.GO, word
