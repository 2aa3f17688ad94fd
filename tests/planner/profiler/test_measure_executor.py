"""The executor's costs follow from its trials, and the trials run."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from pipeplan.cluster_data.machine_costs import IdleCores
from pipeplan.profiler.measure_executor import (
    ExecutorTrials,
    alone_pass_s,
    costs_of,
    fitted,
    idle_cores_of,
    throughput_of,
)
from pipeplan_launch.devices.backend import physical_cores
from pipeplan_measure.overhead import LARGE_BYTES, SMALL_BYTES, VERSION_BYTES, trials


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
