"""Clocks and spreads, times under load, and what the executor costs by its trials."""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeplan.cluster_data.machine_costs import IdleCores
from pipeplan.profiler import passes as measured_passes
from pipeplan.profiler import profiler
from pipeplan.profiler.busy_cores import BusyCores
from pipeplan.profiler.clock import (
    BRIEF,
    MIN_JUDGED_PASSES,
    THOROUGH,
    CPUClock,
    Samples,
    interquartile_range,
    is_precise_enough,
    relative_drift,
    sample_notes,
    standard_error,
    uncertainty,
)
from pipeplan.profiler.measure_executor import (
    ExecutorTrials,
    alone_pass_s,
    costs_of,
    fitted,
    idle_cores_of,
    throughput_of,
)
from pipeplan.profiler.options import ProfilerOptions
from pipeplan.profiler.passes import Passes
from pipeplan.profiler.profiler import profile_model
from pipeplan_launch import Job
from pipeplan_launch.devices.backend import physical_cores
from pipeplan_launch.tracing.trace import trace_job
from pipeplan_measure.overhead import LARGE_BYTES, SMALL_BYTES, VERSION_BYTES, trials


def test_one_thread_is_not_charged_for_waiting() -> None:
    calls: list[int] = []

    def wait() -> None:
        calls.append(1)
        time.sleep(0.05)

    assert 0.0 <= CPUClock(1).measure(wait)() < 0.04
    assert CPUClock(2).measure(wait)() >= 0.05
    assert len(calls) == 2


def noisy(count: int, middle: float, share: float, seed: int = 0) -> list[float]:
    chance = random.Random(seed)
    return [middle * (1 + chance.gauss(0, share)) for _ in range(count)]


def samples(**layers: list[float]) -> Samples:
    return Samples(forward=dict(layers), backward={name: [0.0] * len(one) for name, one in layers.items()})


def test_spread_and_the_standard_error_is_how_far_medians_lie_apart() -> None:
    """Against the deviation of medians over many repetitions of the same measurement."""
    assert interquartile_range([1.0, 2.0, 3.0, 4.0, 5.0]) == 2.0
    assert interquartile_range([1.0]) == 0.0
    repeated = [noisy(25, 1.0, 0.1, seed) for seed in range(400)]
    apart = statistics.pstdev(sorted(times)[12] for times in repeated)
    assert statistics.mean(map(standard_error, repeated)) == pytest.approx(apart, rel=0.15)


def test_passes_go_on_until_the_spread_is_small() -> None:
    assert not is_precise_enough(samples(a=[1.0] * (MIN_JUDGED_PASSES - 1)), THOROUGH)
    assert is_precise_enough(samples(a=[1.0] * MIN_JUDGED_PASSES), THOROUGH)
    assert not is_precise_enough(samples(a=noisy(5, 1.0, 0.2)), THOROUGH)
    assert is_precise_enough(samples(a=noisy(2000, 1.0, 0.2)), THOROUGH)
    # Layers that hardly count are not waited for, unless they stand for many.
    found = samples(large=[100.0] * 9, small=noisy(9, 0.5, 0.9))
    assert is_precise_enough(found, THOROUGH)
    assert not is_precise_enough(samples(large=[1.0] * 9, small=noisy(9, 0.5, 0.9)), THOROUGH)
    found.weights = {"small": 100}
    assert uncertainty(found)[2] == "small"
    assert not is_precise_enough(found, THOROUGH)
    assert found.totals(found.forward)[0] == 100.0 + 100 * found.forward["small"][0]


def test_drift_is_told_from_chance() -> None:
    assert relative_drift([1.0] * 30) is None
    assert relative_drift(noisy(30, 1.0, 0.02)) is None
    slower = [one * (1 + 0.2 * index / 29) for index, one in enumerate(noisy(30, 1.0, 0.02))]
    assert relative_drift(slower) == pytest.approx(0.13, abs=0.03)
    assert relative_drift(list(reversed(slower))) == pytest.approx(-0.12, abs=0.03)
    assert relative_drift([1.0, 2.0, 3.0]) is None
    # A few passes that something disturbed are no drift.
    assert relative_drift([1.0] * 26 + [9.0] * 4) is None


def test_notes_say_what_remains_and_a_brief_measurement_aims_lower() -> None:
    assert sample_notes(samples(a=[1.0] * 9), THOROUGH) == ()
    wide = samples(a=noisy(9, 1.0, 0.3))
    (spread,), (brief,) = sample_notes(wide, THOROUGH), sample_notes(wide, BRIEF)
    assert "spread is larger than aimed at: after 9 passes" in spread
    assert brief.endswith("(aim: 2% and 6%, standard error)")
    (moved,) = sample_notes(samples(a=[1.0] * 100 + [1.2] * 100), THOROUGH)[:1]
    assert "the machine became 20% slower while it measured" in moved
    found = samples(a=noisy(60, 1.0, 0.1))
    assert (is_precise_enough(found, THOROUGH), is_precise_enough(found, BRIEF)) == (False, True)
    assert sample_notes(found, BRIEF) == ()


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


def _trial(name: str, in_use: float, *cpu_s: float, products: int = 0) -> dict[str, Any]:
    """A trial whose last worker reads samples for a quarter of a millisecond, which its processor time has, too."""
    kind = {"name": name, "workers": len(cpu_s), "products": products, "peak_bytes": 1000 * len(cpu_s), "others": 0.0}
    *others, last = cpu_s
    return {**kind, "cores_in_use": in_use, "cpu_s": [*others, last + READ_S], "load_s": [0.0] * len(others) + [READ_S]}


READ_S = 0.00025
TRIALS = [
    _trial("pass", 1.0, 0.001),
    _trial("message", 2.0, 0.0009, 0.0012),
    _trial("large", 2.0, 0.0009 + 0.0005 + 0.0002, 0.0012 + 0.0005),
    _trial("corrected", 2.0, 0.0009 + 0.0005 + 0.0002 + 0.0006, 0.0012 + 0.0005),
    _trial("busy", 1.0, 0.002 - READ_S, products=9),
    _trial("busy", 2.0, 0.003, 0.003 - READ_S, products=9),
    _trial("busy", 1.5, 0.002, 0.002, 0.002 - READ_S, products=9),
]


def test_costs_are_differences_between_trials() -> None:
    costs = costs_of(TRIALS, "noon")
    assert costs.sample_s == pytest.approx(0.0003), "the last stage handles samples, the first does not"
    assert costs.pass_s == pytest.approx((0.001 - 0.0003) / 2)
    assert costs.message_s == pytest.approx(0.0001)
    assert costs.message_byte_s == pytest.approx(0.0005 / (2 * (LARGE_BYTES - SMALL_BYTES)))
    assert costs.version_byte_s == pytest.approx(0.0002 / VERSION_BYTES)
    assert costs.correction_byte_s == pytest.approx(0.0006 / VERSION_BYTES)
    assert costs.worker_bytes == 2000, "of the largest worker without large messages"
    # A profile has the time of reading with the data of the job: that of the trials is left out.
    slower = [one | {"cpu_s": [*one["cpu_s"][:-1], one["cpu_s"][-1] + 1.0]} for one in TRIALS[:4]]
    slower = [one | {"load_s": [*one["load_s"][:-1], one["load_s"][-1] + 1.0]} for one in slower]
    assert costs_of(slower, "").times() == pytest.approx(costs.times())
    # A worker alone has passes of its own, which take no more than beside another one.
    assert alone_pass_s(TRIALS, costs) == alone_pass_s([*TRIALS, _trial("alone", 1.0, 0.1)], costs) == costs.pass_s
    assert alone_pass_s([*TRIALS, _trial("alone", 1.0, 0.0007)], costs) == pytest.approx((0.0007 - 0.0003) / 2)


def test_other_programs_do_not_count_but_are_told() -> None:
    """They take cores, and leave the processor time of the workers as it is."""
    slowed = [one | {"cores_in_use": one["cores_in_use"] / 3} for one in TRIALS]
    assert throughput_of(slowed, cores=2) == throughput_of(TRIALS, cores=2)
    assert costs_of(slowed, "") == costs_of(TRIALS, "")
    now = datetime(2026, 1, 1, tzinfo=UTC)
    assert not fitted({"trials": [one | {"others": 0.1} for one in TRIALS]}, now).disturbed
    busy = fitted({"trials": [*TRIALS[:-1], TRIALS[-1] | {"others": 0.6}]}, now)
    assert busy.disturbed
    assert busy.costs.disturbed, "so that a cluster with these costs says so, too"
    assert not fitted({"trials": TRIALS}, now).costs.disturbed
    # Three workers that had one core of two, because others used the other, leave half as much idle with them.
    halved = [*TRIALS[:-1], TRIALS[-1] | {"others": 1.0, "cores_in_use": 0.75}]
    assert idle_cores_of(halved, cores=2) == idle_cores_of(TRIALS, cores=2)


@pytest.mark.slow
def test_the_trials_run_on_this_machine() -> None:
    with ExecutorTrials() as started:
        found = started.measure()
    assert 1e-5 < found.costs.pass_s < 0.1
    assert found.costs.message_byte_s > 0
    assert 2**26 < found.costs.worker_bytes < 2**30
    assert all(1 <= value <= count for count, value in found.throughput.items())
    assert found.alone_pass_s is None or 1e-5 < found.alone_pass_s <= found.costs.pass_s
    assert found.idle is None or 0 <= found.idle.share < 0.75


def test_throughput_is_the_work_done_together_and_cores_are_idle_although_there_are_more_workers() -> None:
    found = throughput_of(TRIALS, cores=2)
    # Three workers do no more than the cores, although their messages are left out.
    assert found == pytest.approx({1: 1, 2: 2 * 0.002 / (0.003 - 0.0002), 3: 2})
    assert idle_cores_of(TRIALS, cores=2) == IdleCores(2, pytest.approx(0.25), pytest.approx(0.002))
    assert idle_cores_of(TRIALS, cores=3) is None, "no trial has more workers"


def test_every_machine_is_loaded_beyond_its_cores_and_threads_of_one_core_apart(tmp_path: Path) -> None:
    assert [trial.workers for trial in trials(2, 9) if trial.products] == [1, 2, 3]
    assert [trial.workers for trial in trials(8, 9, physical=4) if trial.products] == [1, 2, 4, 8, 9]
    assert max(trial.workers for trial in trials(64, 9)) == 9
    # A pass is measured beside another worker, as messages are.
    busy = {trial.name: trial.pipelines * trial.workers for trial in trials(4, 9)}
    assert (busy["pass"], busy["message"], busy["alone"]) == (2, 2, 1)
    assert all(trial.pipelines == 1 for trial in trials(1, 9)), "a single core would have to be shared"
    for processor in range(4):
        topology = tmp_path / f"cpu{processor}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{processor % 2},{processor % 2 + 2}\n")
    for processors in ({0, 1, 2, 3}, {0, 1, 3}, {7, 8}):  # nothing is known of the last two
        assert physical_cores(processors, tmp_path) == 2
