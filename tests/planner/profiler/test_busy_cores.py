"""Times under load: copies of the process run only while they are wanted, and both kinds of passes take turns."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeplan.profiler import passes as measured_passes
from pipeplan.profiler import profiler
from pipeplan.profiler.busy_cores import BusyCores
from pipeplan.profiler.clock import CPUClock, Samples
from pipeplan.profiler.options import ProfilerOptions
from pipeplan.profiler.passes import Passes
from pipeplan.profiler.profiler import profile_model
from pipeplan_launch import Job
from pipeplan_launch.tracing.trace import trace_job

JOB = """
import torch
from pipeplan_launch import Job


def make():
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    return Job(model, inputs=lambda n: torch.ones(n, 16), minibatch=4)
"""


def appends(path: Path) -> Callable[[], None]:
    def call() -> None:
        with path.open("a") as file:
            file.write(".")
        time.sleep(0.001)

    return call


class TwoSpeeds:
    """A load of two processes under which everything takes twice as long; it notes when it is started.

    The first `unsteady` passes under it vary.
    """

    processes = 2

    def __init__(self, unsteady: int = 0) -> None:
        self.running, self.starts, self.unsteady = False, 0, unsteady

    def start(self) -> None:
        self.running, self.starts = True, self.starts + 1

    def stop(self) -> None:
        self.running = False


class Numbered(Passes):
    """Passes over nothing, each of which takes half a turn by a clock of its own."""

    def __init__(self, load: TwoSpeeds, clock: list[float]) -> None:
        self._load, self._now = load, clock
        self.kinds: list[bool] = []
        job = Job(nn.Linear(1, 1), inputs=lambda n: torch.ones(n, 1))
        run: Any = type("Run", (), {"weights": {}, "device": "cpu", "traced": trace_job(job, 2)})()
        super().__init__(job, run, CPUClock(1), lambda done, total, what: None)  # type: ignore[arg-type]

    def run_both(self, samples: Samples | None) -> None:
        self._now[0] += measured_passes.TURN_S / 2
        if samples is not None:
            self.kinds.append(self._load.running)
            varies = samples.passes % 2 if samples.passes < self._load.unsteady and self._load.running else 0
            samples.forward["a"].append(varies + (2.0 if self._load.running else 1.0))
            samples.backward["a"].append(4.0 if self._load.running else 2.0)


def test_copies_run_between_start_and_stop_and_one_that_ends_is_noticed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    with BusyCores(3, nn.Linear(2, 2), appends(log)) as load:
        assert log.stat().st_size == 0, "they wait for the start"
        for _ in range(2):
            before, end = log.stat().st_size, time.monotonic() + 60
            load.start()
            while log.stat().st_size == before:
                assert time.monotonic() < end
                time.sleep(0.005)
            load.stop()
            stopped = log.stat().st_size
            time.sleep(0.05)
            assert log.stat().st_size == stopped
        copies = list(load._copies)
        assert (len(copies), load.lost) == (2, False)
    for copy in copies:
        with pytest.raises(ProcessLookupError):
            os.kill(copy, 0)
    with BusyCores(2, nn.Linear(2, 2), lambda: os._exit(3)) as load:
        load.start()
        os.waitid(os.P_PID, load._copies[0], os.WEXITED | os.WNOWAIT)
        load.stop()
        assert load.lost


def test_passes_alone_and_under_load_take_turns_until_there_are_enough_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(measured_passes, "TURN_S", 0.25)  # sums of it are exact
    monkeypatch.setattr(measured_passes.time, "perf_counter", lambda: clock[0])
    load = TwoSpeeds()
    made = Numbered(load, clock)
    alone, loaded = made.measure(5, load=load)
    assert loaded is not None
    assert (alone.forward["a"], loaded.forward["a"]) == ([1.0] * 5, [2.0] * 5)
    assert made.kinds == [False, False, True, True, False, False, True, True, False, True]
    assert (load.starts, load.running) == (3, False)
    # A machine that becomes slower must not slow down one kind only.
    load = TwoSpeeds(unsteady=9)
    alone, loaded = Numbered(load, clock).measure(None, load=load)
    assert loaded is not None
    assert loaded.passes > 9, "the first passes under load are imprecise"
    assert alone.passes == loaded.passes
    load = TwoSpeeds()
    assert (Numbered(load, clock).measure(4)[1], load.starts) == (None, 0), "without a load there is one kind"
    for changed in ({"threads": 2}, {"device": "cuda"}, {"load": False}):
        assert profiler.load_processes(ProfilerOptions(**{"load": True, **changed})) == 0  # type: ignore[arg-type]


def test_a_profile_has_both_or_leaves_out_times_under_less_load_than_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job.py").write_text(JOB)
    monkeypatch.setattr(profiler, "load_processes", lambda options: 2 if options.load else 0)
    model = f"{tmp_path}/job.py:make"
    found = profile_model(model, ProfilerOptions(repeats=3, load=True, halvings=1))
    assert found.provenance.load_processes == 2
    assert "3 passes while 2 processes ran the same" in found.provenance.how
    for size in found.all_sizes:
        assert all(layer.loaded_forward_s > 0 for layer in size.layers if "Linear" in layer.op)
    # What a step takes beyond its fixed cost may be too little to be told from none.
    assert all((layer.loaded_update_s > 0) is (layer.update_s > 0) for layer in found.layers)

    def loses_all(self: BusyCores) -> None:
        for copy in self._copies:
            os.kill(copy, signal.SIGKILL)

    memory = "pipeplan.profiler.busy_cores.free_bytes"
    for target, changed, said in ((memory, lambda: 1 << 20, "1 MiB are free"), (None, loses_all, "has ended")):
        with monkeypatch.context() as patched:
            patched.setattr(*([target, changed] if target else [BusyCores, "start", changed]))
            found = profile_model(model, ProfilerOptions(repeats=3, load=True))
        assert found.provenance.load_processes == 0
        assert any(said in note for note in found.provenance.notes)
