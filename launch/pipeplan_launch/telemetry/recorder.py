"""Measurements of one worker: the times of every minibatch, its steady state, and a timeline. Torch-free.

Metrics are JSON lines in the run folder. A timeline, `timeline/rank-N.json`, has the first minibatches of an epoch; its
times count from the moment when all workers met at the start of the epoch (`synchronise_workers`). The clocks of
different machines are not compared.
"""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeplan_launch.files import explain_errors, write_atomically
from pipeplan_launch.telemetry.memory import busy_s, own_cores, resident_bytes
from pipeplan_launch.telemetry.run_folder import TIMELINE_FORMAT, TIMELINE_VERSION

_PATH = "/proc/thread-self/schedstat"


def core_wait_s() -> float:
    """Run-queue wait of this thread since it started: time in which it was runnable, but had no core. 0 if unknown."""
    try:
        with open(
            _PATH, "rb"
        ) as file:  # the fields are time on a core (ns), run-queue wait (ns), number of time slices
            return int(file.read().split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):
        return 0.0


MEMORY_EVERY_S = 1.0
"""Seconds between two readings of resident memory. A reading takes as long as the rest of a metrics line."""
LINES_PER_WRITE = 16
"""Lines that are collected before they are written."""
MOST_METRICS_BYTES = 2**30
"""Size at which a file of metrics is renamed and a new file begins; one older file is kept."""
OLDER = ".old"
"""The ending that is added to the name of the older file."""
_ENCODE = json.JSONEncoder(check_circular=False).encode
TIME_FIELDS = ("load_s", "wait_s", "forward_s", "backward_s", "sync_s", "update_s", "send_s")
SUMMED_FIELDS = (*TIME_FIELDS, "cpu_s", "core_wait_s")


class Stopwatch:
    """A stopwatch: every call returns the seconds since the previous call."""

    def __init__(self) -> None:
        self.start_s = self.end_s = time.perf_counter()
        """Start and end of the last lap, on the clock of `time.perf_counter`."""

    def __call__(self) -> float:
        self.start_s, self.end_s = self.end_s, time.perf_counter()
        return self.end_s - self.start_s


@dataclass
class MinibatchRecord:
    """The record of one minibatch on one worker, in seconds of wall time unless stated otherwise."""

    epoch: int
    minibatch: int
    load_s: float = 0.0
    """Reading samples."""
    wait_s: float = 0.0
    """Waiting for activations and gradients from other stages."""
    forward_s: float = 0.0
    backward_s: float = 0.0
    sync_s: float = 0.0
    """Starting the all-reduce of the minibatch's group, and waiting for it."""
    update_s: float = 0.0
    """The optimiser step, and copying weights that older minibatches still need."""
    send_s: float = 0.0
    """Handing tensors to the transport."""
    cpu_s: float = 0.0
    """CPU time of all threads of this process since the previous minibatch was finished."""
    core_wait_s: float = 0.0
    """Run-queue wait of this thread since the previous minibatch was finished. The times above include it."""
    loss: float | None = None
    """The loss, at the last stage."""
    weight: float = 1.0
    """The weight of the loss in means over minibatches."""
    samples: int = 0
    done_s: float = 0.0
    """Time at which the minibatch was finished, on this worker's clock."""


@dataclass
class SteadyState:
    """Sums over the minibatches of the steady state. Each worker sends them to the worker that prints the summary."""

    minibatches: int = 0
    """Number of minibatches counted on this worker."""
    seconds: dict[str, float] | None = None
    """Sum of each field of `SUMMED_FIELDS`."""
    span_s: float = 0.0
    """Time from the first counted minibatch to the last, summed over the epochs."""
    intervals: int = 0
    """Minibatches that the whole pipeline finished in that time."""
    includes_fill: bool = False
    """Whether the epochs were too short to exclude the filling of the pipeline."""
    cores: str = ""
    """The cores that this worker may use."""
    watched_s: float = 0.0
    """Time, summed over the epochs, that `cores_busy_s` and `own_cpu_s` cover."""
    cores_busy_s: float = 0.0
    """Processor time that all programs used on these cores."""
    own_cpu_s: float = 0.0
    """Processor time of this worker."""

    @property
    def step_time_s(self) -> float | None:
        """Seconds between two minibatches of the pipeline."""
        return self.span_s / self.intervals if self.intervals else None


class Recorder:
    """Collects the steps of one worker.

    The steady state is every epoch without its first `skip` minibatches, which fill the pipeline. The drain is counted,
    because it does not slow the last stage, where the step time is measured.
    """

    def __init__(self, path: Path | None, rank: int, stage: int, replica: int, stride: int, skip: int) -> None:
        """`path`: the file for the JSON lines, or None. `stride`: distance between two of this worker's minibatches,
        which is the number of replicas of the stage. `skip`: minibatches of the pipeline that are excluded from the
        steady state.
        """
        self.stride = stride
        self._identity = {"rank": rank, "stage": stage, "replica": replica}
        self._skip = skip
        self._open: dict[int, MinibatchRecord] = {}
        self._epoch: list[MinibatchRecord] = []
        self._lines: list[tuple[MinibatchRecord, float, float | None, int]] = []
        """Steps whose lines are not written yet, with the time of day, throughput and resident memory at their end."""
        self._memory = (-math.inf, 0)
        """Time of the last reading of resident memory, and its result."""
        self._path = path
        if path is not None:
            with explain_errors(path, "opening"):
                path.open("a").close()
        self.steady = SteadyState(seconds=dict.fromkeys(SUMMED_FIELDS, 0.0), cores=own_cores())
        self._begun = (0.0, 0.0, 0.0)
        """When the epoch's first minibatch was finished: the time, the cores' processor time, and this worker's
        processor time."""
        self._computed_s = time.process_time()
        self._waited_s = core_wait_s()

    def begin(self, epoch: int, minibatch: int) -> MinibatchRecord:
        """Start the record of a minibatch."""
        self._open[minibatch] = step = MinibatchRecord(epoch, minibatch)
        return step

    def started(self, minibatch: int) -> MinibatchRecord:
        """The record of a minibatch that has started."""
        return self._open[minibatch]

    def end(self, minibatch: int) -> MinibatchRecord:
        """Finish the record of a minibatch, and queue its line."""
        step = self._open.pop(minibatch)
        step.done_s = time.perf_counter()
        previous, self._computed_s = self._computed_s, time.process_time()
        step.cpu_s = self._computed_s - previous
        previous, self._waited_s = self._waited_s, core_wait_s()
        step.core_wait_s = max(0.0, self._waited_s - previous)
        if not self._epoch:
            self._begun = (step.done_s, busy_s(), self._computed_s)
        self._epoch.append(step)
        self._note(step)
        return step

    def end_epoch(self, first: int = 0) -> list[MinibatchRecord]:
        """Add the drained segment that started with minibatch `first` to the steady state. Returns its steps."""
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
        if len(steps) > 1:
            begun_s, busy_before_s, computed_before_s = self._begun
            self.steady.watched_s += time.perf_counter() - begun_s
            self.steady.cores_busy_s += busy_s() - busy_before_s
            self.steady.own_cpu_s += time.process_time() - computed_before_s
        self._write()
        return steps

    def step_time_s(self, steps: int = 50) -> float | None:
        """Seconds between two minibatches of the pipeline, over the last `steps` of the epoch; None before two
        minibatches are finished.
        """
        recent = self._epoch[-steps:]
        if len(recent) < 2:
            return None
        return (recent[-1].done_s - recent[0].done_s) / (recent[-1].minibatch - recent[0].minibatch)

    def close(self) -> None:
        """Write the remaining lines."""
        self._write()

    def _note(self, step: MinibatchRecord) -> None:
        if self._path is None:
            return
        read_s, resident = self._memory
        if step.done_s - read_s >= MEMORY_EVERY_S:
            resident = resident_bytes()
            self._memory = (step.done_s, resident)
        step_time = self.step_time_s()
        self._lines.append((step, time.time(), 1 / step_time if step_time else None, resident))
        if len(self._lines) == LINES_PER_WRITE:
            self._write()

    def _write(self) -> None:
        """Write several lines at once, because every computation of the model evicts this code from the caches."""
        steps, self._lines = self._lines, []
        if self._path is None or not steps:
            return
        lines = []
        for step, time_s, step_time, resident in steps:
            line: dict[str, Any] = {"time_s": time_s, **self._identity, **vars(step)}
            for name in SUMMED_FIELDS:
                line[name] = round(line[name], 7)
            del line["done_s"]
            line["loss"] = _rounded(step.loss)
            line["minibatches_per_s"] = _rounded(step_time)
            line["memory_bytes"] = resident
            lines.append(_ENCODE(line) + "\n")
        with explain_errors(self._path, "writing"):
            with self._path.open("a", encoding="utf-8") as file:
                file.write("".join(lines))
                size = file.tell()
            if size > MOST_METRICS_BYTES:  # keep this file as the older one, in place of the previous older one
                os.replace(self._path, self._path.with_name(self._path.name + OLDER))
                self._path.touch()


def _rounded(value: float | None) -> float | None:
    """The value with seven digits, or None if it is not finite, which JSON cannot hold."""
    return float(f"{value:.7g}") if value is not None and math.isfinite(value) else None


TIMELINE_FOLDER = "timeline"
MIN_INTERVAL_S = 2e-5
"""Shorter intervals may be left out: waits for tensors that had already arrived, and short rests after a pass."""
RECORDED_MINIBATCHES = 256
"""Number of the pipeline's minibatches that are recorded, from the first of an epoch. It includes some of the steady
state of any plan.
"""


class Timeline:
    """Intervals of one worker. Nothing is recorded before an epoch is begun."""

    def __init__(self, plan: str, rank: int, stage: int, replica: int, name: str | None = None) -> None:
        """`plan`: the plan's digest. `name`: the file's name without its ending; None for `rank-N`."""
        self._name = f"rank-{rank}" if name is None else name
        self._identity = {"plan": plan, "rank": rank, "stage": stage, "replica": replica}
        self._intervals: list[tuple[str, int, float, float]] = []
        self._epoch, self._count, self._first, self._end = 0, 0, 0, 0
        """Minibatches `_first` up to `_end` of epoch `_epoch` are recorded. The epoch has `_count` minibatches."""
        self._zero_s = 0.0

    def begin(self, epoch: int, first: int, count: int, met_s: float) -> None:
        """Start an epoch of `count` minibatches at minibatch `first`; all workers met at time `met_s`."""
        self._intervals = []
        self._epoch, self._count, self._first, self._end = epoch, count, first, min(count, first + RECORDED_MINIBATCHES)
        self._zero_s = met_s

    def note(
        self,
        kind: str,
        number: int,
        lap: Stopwatch,
        *,
        first: int | None = None,
        since_s: float | None = None,
        keep_brief: bool = True,
    ) -> None:
        """Record that the stopwatch's last lap was spent on this minibatch, or on a group that starts with `first`.

        The interval begins with the lap, or at `since_s`, a reading of `time.perf_counter`.
        """
        minibatch = number if first is None else first
        if minibatch < self._end and (keep_brief or lap.end_s - lap.start_s >= MIN_INTERVAL_S):
            self._intervals.append((kind, number, lap.start_s if since_s is None else since_s, lap.end_s))

    def write(self, run: Path) -> None:
        """Write the recorded intervals into a run folder, in place of an older file. Raises `LaunchError`."""
        path = run / TIMELINE_FOLDER / f"{self._name}.json"
        with explain_errors(path, "writing"):
            path.parent.mkdir(exist_ok=True)
        head: dict[str, Any] = {"format": TIMELINE_FORMAT, "version": TIMELINE_VERSION, **self._identity}
        head |= {"epoch": self._epoch, "epoch_minibatches": self._count}
        head |= {"first": self._first, "minibatches": self._end - self._first}
        rows = [
            json.dumps([kind, number, round(start - self._zero_s, 7), round(end - self._zero_s, 7)])
            for kind, number, start, end in sorted(self._intervals, key=lambda interval: interval[2:])
        ]
        text = json.dumps(head)[:-1] + ', "intervals": [\n' + ",\n".join(rows) + "\n]}\n"
        write_atomically(path, lambda file: file.write(text.encode()), sync=False)
