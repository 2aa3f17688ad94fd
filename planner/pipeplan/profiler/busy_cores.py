"""Keeps all cores of the machine busy with copies of the measuring process, while times under load are measured.

Workers that share a machine slow each other down through caches, memory bandwidth and clock frequency. The slowdown is
larger for layers that move much memory than for layers that compute much. So the load is the same model: this process
is forked once for each further core, and every copy runs the passes that are measured here. The copies are suspended
while times without load are measured. So both kinds of measurement can alternate, and a machine that becomes slower
affects both.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import warnings
from collections.abc import Callable
from typing import NoReturn

import torch
from torch import nn

from pipeplan.util.units import show_size
from pipeplan_launch.telemetry.memory import free_bytes, resident_bytes

PR_SET_PDEATHSIG = 1  # from sys/prctl.h


class BusyCores:
    """Context with copies of this process that run `keep_busy` repeatedly between `start` and `stop`.

    `processes` counts this process too. `lost`: whether a copy has ended, so that the load was lower than intended.
    """

    def __init__(self, processes: int, model: nn.Module, keep_busy: Callable[[], None]) -> None:
        self.processes = processes
        self.lost = False
        self._model, self._keep_busy = model, keep_busy
        self._copies: list[int] = []

    def __enter__(self) -> BusyCores:
        for _ in range(self.processes - 1):
            self._copies.append(self._fork())
        self._await_stop()
        return self

    def __exit__(self, *exception: object) -> None:
        for copy in self._copies:
            os.kill(copy, signal.SIGKILL)
            os.waitpid(copy, 0)

    def start(self) -> None:
        """Let the copies run."""
        for copy in self._copies:
            os.kill(copy, signal.SIGCONT)

    def stop(self) -> None:
        """Suspend the copies, and return when all are suspended."""
        for copy in self._copies:
            os.kill(copy, signal.SIGSTOP)
        self._await_stop()

    def _await_stop(self) -> None:
        for copy in tuple(self._copies):
            _, status = os.waitpid(copy, os.WUNTRACED)
            if not os.WIFSTOPPED(status):
                self._copies.remove(copy)
                self.lost = True

    def _fork(self) -> int:
        parent = os.getpid()
        with warnings.catch_warnings():
            # Python warns of forks while other threads may hold locks. A copy only computes, on one thread.
            warnings.simplefilter("ignore", DeprecationWarning)
            copy = os.fork()
        return copy or self._run_copy(parent)

    def _run_copy(self, parent: int) -> NoReturn:
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            end_with_parent(parent)
            os.kill(os.getpid(), signal.SIGSTOP)
            # A fork shares memory until it is written, but workers have separate memory for the weights.
            for tensor in (*self._model.parameters(), *self._model.buffers()):
                tensor.data.copy_(tensor.data.clone())
            while True:
                self._keep_busy()
        finally:
            os._exit(1)


def load_obstacle(processes: int) -> str:
    """The reason why this machine cannot measure under the load of `processes`, as a phrase; empty if it can."""
    if not hasattr(os, "fork"):
        return "this system cannot copy a process"
    if torch.cuda.is_available():
        return "a process that uses CUDA cannot be copied"
    free, needed = free_bytes(), (processes - 1) * resident_bytes()
    if free is not None and needed > free:
        return f"{processes - 1} copies of the process need {show_size(needed)}, and {show_size(free)} are free"
    return ""


def end_with_parent(parent: int) -> None:
    """Make the kernel end this process when its parent ends (only on Linux)."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    except (AttributeError, OSError):
        return
    if os.getppid() != parent:
        sys.exit(1)
