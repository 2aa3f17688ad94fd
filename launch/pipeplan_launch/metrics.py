"""What one worker measures: times of every minibatch, as JSON lines in the run folder, and its steady state."""

from __future__ import annotations

import json
import math
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pipeplan_launch.corewait import CoreWait
from pipeplan_launch.files import explain_errors
from pipeplan_launch.memory import resident_bytes

MEMORY_EVERY_S = 1.0  # asking the system for it takes as long as all else that a line does
LINES_AT_ONCE = 16
_ENCODE = json.JSONEncoder(check_circular=False).encode
TIMES = ("load_s", "wait_s", "forward_s", "backward_s", "sync_s", "update_s", "send_s")
SUMS = (*TIMES, "cpu_s", "core_wait_s")


class Lap:
    """A stopwatch: every call returns the seconds since the one before."""

    def __init__(self) -> None:
        self.start_s = self.end_s = time.perf_counter()
        """Between them is what the last call returned."""

    def __call__(self) -> float:
        self.start_s, self.end_s = self.end_s, time.perf_counter()
        return self.end_s - self.start_s


@dataclass
class Step:
    """One minibatch on one worker, in seconds of wall time."""

    epoch: int
    minibatch: int
    load_s: float = 0.0
    """Reading samples."""
    wait_s: float = 0.0
    """Waiting for activations and gradients from other stages."""
    forward_s: float = 0.0
    backward_s: float = 0.0
    sync_s: float = 0.0
    """Starting and awaiting the all-reduce of the minibatch's group."""
    update_s: float = 0.0
    """The optimiser, and copying the weights that older minibatches still need."""
    send_s: float = 0.0
    """Handing tensors to the transport."""
    cpu_s: float = 0.0
    """Computing by all threads of this process since the minibatch before was finished."""
    core_wait_s: float = 0.0
    """Waiting for a core since then, by this thread: it is in the times above."""
    loss: float | None = None
    """At the last stage."""
    samples: int = 0
    done_s: float = 0.0
    """When it was finished, by this worker's clock."""


@dataclass
class Steady:
    """Sums over the minibatches of the steady state, as they are told to the worker that prints the summary."""

    minibatches: int = 0
    """Minibatches counted, on this worker."""
    seconds: dict[str, float] | None = None
    """Sum of each of `SUMS`."""
    span_s: float = 0.0
    """Time from the first counted minibatch to the last, over the epochs."""
    intervals: int = 0
    """Minibatches of the whole pipeline that were finished in that time."""
    includes_fill: bool = False
    """The epochs were too short to leave the pipeline's fill out."""

    @property
    def pace_s(self) -> float | None:
        """Seconds between two minibatches of the pipeline."""
        return self.span_s / self.intervals if self.intervals else None


class Recorder:
    """Collects the steps of one worker.

    The steady state is what is left of every epoch without its first `skip` minibatches: those that are in the pipeline
    when its first one is finished. The drain does not slow the last stage, where the pace is read.
    """

    def __init__(self, path: Path | None, rank: int, stage: int, replica: int, stride: int, skip: int) -> None:
        """`path`: the file for the JSON lines, None for none. `stride`: from one of this worker's minibatches to its
        next, so the stage's replicas. `skip`: minibatches of the pipeline left out of the steady state.
        """
        self.stride = stride
        self._identity = {"rank": rank, "stage": stage, "replica": replica}
        self._skip = skip
        self._open: dict[int, Step] = {}
        self._epoch: list[Step] = []
        self._lines: list[tuple[Step, float, float | None, int]] = []
        """Steps whose lines are to be written: when they were finished, the pace then, and the memory."""
        self._memory = (-math.inf, 0)
        """When the memory was last asked for, and what it was."""
        self._file: IO[str] | None = None
        self._path = path
        if path is not None:
            with explain_errors(path, "opening"):
                self._file = path.open("a", encoding="utf-8")
        self.steady = Steady(seconds=dict.fromkeys(SUMS, 0.0))
        self._computed_s = time.process_time()
        self._core_wait = CoreWait()
        self._waited_s = self._core_wait.total_s()

    def begin(self, epoch: int, minibatch: int) -> Step:
        """A minibatch starts here."""
        self._open[minibatch] = step = Step(epoch, minibatch)
        return step

    def of(self, minibatch: int) -> Step:
        """The step of a minibatch that has begun."""
        return self._open[minibatch]

    def end(self, minibatch: int) -> Step:
        """A minibatch is finished: write its line."""
        step = self._open.pop(minibatch)
        step.done_s = time.perf_counter()
        before, self._computed_s = self._computed_s, time.process_time()
        step.cpu_s = self._computed_s - before
        before, self._waited_s = self._waited_s, self._core_wait.total_s()
        step.core_wait_s = max(0.0, self._waited_s - before)
        self._epoch.append(step)
        self._note(step)
        return step

    def end_epoch(self, first: int = 0) -> list[Step]:
        """The segment that began with minibatch `first` is drained: add it to the steady state. Returns its steps."""
        steps, self._epoch = self._epoch, []
        counted = [step for step in steps if step.minibatch >= first + self._skip]
        if len(counted) < 2:
            counted = steps[1:] if len(steps) > 2 else steps
            self.steady.includes_fill = True
        seconds = self.steady.seconds or {}
        for name in seconds:
            seconds[name] += sum(getattr(step, name) for step in counted)
        self.steady.minibatches += len(counted)
        if len(counted) > 1:
            self.steady.span_s += counted[-1].done_s - counted[0].done_s
            self.steady.intervals += counted[-1].minibatch - counted[0].minibatch
        self._write()
        return steps

    def pace_s(self, steps: int = 50) -> float | None:
        """Seconds between the pipeline's minibatches, over the epoch's last few; None before there are two."""
        recent = self._epoch[-steps:]
        if len(recent) < 2:
            return None
        return (recent[-1].done_s - recent[0].done_s) / (recent[-1].minibatch - recent[0].minibatch)

    def close(self) -> None:
        """Write what is left, and close the file."""
        self._core_wait.close()
        self._write()
        if self._file is not None:
            with self._explained():
                self._file.close()

    def _note(self, step: Step) -> None:
        if self._file is None:
            return
        pace = self.pace_s()
        self._lines.append((step, time.time(), 1 / pace if pace else None, self._resident(step.done_s)))
        if len(self._lines) == LINES_AT_ONCE:
            self._write()

    def _write(self) -> None:
        """All at once: once a model has computed, code that runs seldom is no longer in the processor's caches."""
        steps, self._lines = self._lines, []
        if self._file is None:
            return
        lines = []
        for step, time_s, pace, resident in steps:
            line: dict[str, Any] = {"time_s": time_s, **self._identity, **vars(step)}
            for name in SUMS:
                line[name] = round(line[name], 7)
            del line["done_s"]
            line["loss"] = _rounded(step.loss)
            line["minibatches_per_s"] = _rounded(pace)
            line["memory_bytes"] = resident
            lines.append(_ENCODE(line) + "\n")
        with self._explained():
            self._file.write("".join(lines))
            self._file.flush()

    def _explained(self) -> AbstractContextManager[None]:
        assert self._path is not None
        return explain_errors(self._path, "writing")

    def _resident(self, now_s: float) -> int:
        asked, resident = self._memory
        if now_s - asked >= MEMORY_EVERY_S:
            resident = resident_bytes()
            self._memory = (now_s, resident)
        return resident


def _rounded(value: float | None) -> float | None:
    """Seven digits are enough; JSON has no NaN or infinity."""
    return float(f"{value:.7g}") if value is not None and math.isfinite(value) else None
