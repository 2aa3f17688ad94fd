"""`python -m pipeplan_measure.overhead FOLDER`: measures the executor's own time and memory with emulated stages.

FOLDER is an empty folder for the program's files. Importing torch takes longer than the trials, so the program prints
`ready` after the import. It begins when it reads a line from standard input, and ends if standard input is closed. Then
it prints one line of JSON: `trials`, each with its `workers`; for each worker `cpu_s` and `load_s`, the seconds of a
minibatch and of reading its samples; `cores_in_use` by all workers; `peak_bytes` of the largest worker; and `others`,
the cores that other programs used. Every trial runs the real executor on this machine. Its workers are forked from this
process after one import of torch. The stages compute matrix products, or nothing at all. Messages, weight versions,
samples and updates are real.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pipeplan_launch.devices.backend import physical_cores
from pipeplan_launch.elastic.local_workers import fork_worker, worker_variables
from pipeplan_launch.telemetry.memory import busy_s
from pipeplan_measure.small_plans import write_stage_files

SMALL_BYTES, LARGE_BYTES = 4096, 1 << 18
VERSION_BYTES = 1 << 21
EVICTING_BYTES = 1 << 22
"""Bytes that each pass of a stage without compute reads and writes, to evict the executor's data from the caches. The
pass and the update of a small model evict it too. With warm caches the executor's work would take a third less time
than in training."""
COMPUTE_S = 0.0015
"""Seconds that the products of a minibatch take, forward and backward together, if only one worker runs."""
IDLE_MINIBATCHES, BUSY_MINIBATCHES = 80, 90
WARM_UP = 0.3
PARTS = 4
SAMPLES = 32
QUIET = 0.05
"""A trial is repeated if other programs used more cores than this."""
LIMIT_S = 20.0
READY = "ready"
"""The line that the program prints when the trials can begin."""


@dataclass(frozen=True)
class Trial:
    """A pipeline of equal stages without replicas, one for each worker."""

    name: str
    workers: int
    """Number of workers, each with a stage of its own."""
    products: int = 0
    """Matrix products in a forward pass. A backward pass computes twice this number."""
    message_bytes: int = SMALL_BYTES
    parameter_bytes: int = 4
    corrected: bool = False
    """Whether updates from old gradients are corrected (`runtime.step_correction`)."""
    pipelines: int = 1
    """Number of equal pipelines that run at the same time. Only the first is measured; the others share its caches."""

    @property
    def minibatches(self) -> int:
        """Minibatches of the trial."""
        return BUSY_MINIBATCHES if self.products else IDLE_MINIBATCHES


def trials(cores: int, products: int, physical: int | None = None) -> list[Trial]:
    """The trials for a machine with `cores` processors, which are threads of `physical` cores (None: a core each)."""
    most = min(cores, MOST_WORKERS)
    counts = sorted({1, 2, min(physical or most, most), most, most + 1})
    return [
        *([Trial("alone", 1)] if cores > 1 else []),
        # A second pipeline runs at the same time. So this trial differs from a trial of two stages only in the
        # messages, and not in shared caches.
        Trial("pass", 1, pipelines=min(cores, 2)),
        Trial("message", 2),
        Trial("large", 2, message_bytes=LARGE_BYTES, parameter_bytes=VERSION_BYTES),
        Trial("corrected", 2, message_bytes=LARGE_BYTES, parameter_bytes=VERSION_BYTES, corrected=True),
        *(Trial("busy", count, products) for count in counts),
    ]


MOST_WORKERS = 8
"""Largest number of cores that are loaded at once."""


def prepare() -> None:
    """Import all that the workers need, once."""
    for name in ("torch._dynamo", "pipeplan_launch.worker"):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def run_trials(folder: Path) -> list[dict[str, Any]]:
    """Run all trials, and return their measurements. Raises `RuntimeError` if a worker fails."""
    cores = len(os.sched_getaffinity(0))
    planned = trials(cores, _calibrated(), physical_cores())
    measured = [_run(trial, folder / str(number)) for number, trial in enumerate(planned)]
    # Disturbed trials of one worker are repeated, because the other trials are compared with them. A short disturbance
    # may be over by now.
    return [
        _least([first, _run(trial, folder / f"{number}-again")])
        if first["others"] > QUIET and (trial.workers == 1 or trial.workers > cores)
        else first
        for number, (trial, first) in enumerate(zip(planned, measured, strict=True))
    ]


def _least(measured: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The smallest times of several runs of a trial, by worker, because other programs can only increase times.

    Everything else comes from the run that other programs disturbed the least.
    """
    times = {name: zip(*(one[name] for one in measured), strict=True) for name in ("cpu_s", "load_s")}
    least = {name: [min(found) for found in workers] for name, workers in times.items()}
    return {**min(measured, key=lambda one: float(one["others"])), **least}


def _calibrated() -> int:
    """The number of products in a forward pass with which a minibatch takes about `COMPUTE_S`."""
    import torch

    from pipeplan_launch.models.sleeping_stage import Products

    torch.set_num_threads(1)
    products, times = Products(), []
    for _ in range(5):
        began = time.process_time()
        products.compute(50)
        times.append((time.process_time() - began) / 50)
    return max(1, round(COMPUTE_S / 3 / min(times)))


def _run(trial: Trial, folder: Path) -> dict[str, Any]:
    from pipeplan_launch.elastic.store import serve_store

    places = [folder / str(number) for number in range(trial.pipelines)]
    for place in places:
        write_plan(trial, place)
    began, busy_before, own_before = time.monotonic(), busy_s(), _own_cpu_s()
    stores = [serve_store() for _ in places]
    workers = [
        fork_worker(partial(_work, rank, trial, place), worker_variables(rank, trial.workers, store.port))
        for place, store in zip(places, stores, strict=True)
        for rank in range(trial.workers)
    ]
    peak_bytes = _finish(workers, trial.name)
    stores.clear()
    others_s = busy_s() - busy_before - (_own_cpu_s() - own_before)
    others = max(0.0, others_s) / (time.monotonic() - began)
    measured = _measured(places[0], trial)
    kind = {"name": trial.name, "workers": trial.workers, "products": trial.products}
    return {**kind, "peak_bytes": peak_bytes, "others": others, **measured}


def _work(rank: int, trial: Trial, folder: Path) -> None:
    """Run a worker."""
    with open(os.devnull, "w") as sink:
        os.dup2(sink.fileno(), 1)
    from pipeplan_launch import __main__ as executor
    from pipeplan_launch.models.sleeping_stage import CacheEviction

    arguments = ["--epochs", "1", "--threads", "1", "--log-every", "0", "--run-dir", str(folder / "run")]
    arguments += ["--correction", "ef", "--force-correction"] if trial.corrected else []
    status = executor.main([str(folder), *arguments])
    (folder / f"eviction-{rank}").write_text(str(CacheEviction.spent_s))
    raise SystemExit(status)


def _finish(workers: Sequence[int], name: str) -> int:
    """Wait for the workers; returns the largest peak of their resident memory, in bytes."""
    peak = 0
    deadline, running = time.monotonic() + LIMIT_S, set(workers)
    failed = False
    while running and not failed and time.monotonic() < deadline:
        for pid in list(running):
            done, status, used = os.wait4(pid, os.WNOHANG)
            if done:
                peak = max(peak, used.ru_maxrss * (1 if sys.platform == "darwin" else 1024))
                running.discard(pid)
                failed |= status != 0
        time.sleep(0.01)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if running or failed:
        raise RuntimeError(f"a worker of the trial {name!r} {'failed' if failed else 'took too long'}")
    return peak


def _measured(folder: Path, trial: Trial) -> dict[str, Any]:
    """The cores that the workers used in the steady state, and the times of a minibatch on each worker.

    The processor time of a minibatch includes reading its samples, and excludes evicting the caches.
    """
    found, evicted_s = [], []
    for rank in range(trial.workers):
        lines = (folder / "run" / "metrics" / f"rank-{rank}.jsonl").read_text().splitlines()
        found.append([json.loads(line) for line in lines])
        evicted_s.append(float((folder / f"eviction-{rank}").read_text()) / trial.minibatches)
    first = round(trial.minibatches * WARM_UP)
    steady = [steps[first:] for steps in found]
    cpu_s, load_s = ([_typical([step[name] for step in steps]) for steps in steady] for name in ("cpu_s", "load_s"))
    own_s = [max(0.0, whole - evicted) for whole, evicted in zip(cpu_s, evicted_s, strict=True)]
    used_s = sum(step["cpu_s"] for steps in steady for step in steps[1:])
    in_use = used_s / (steady[-1][-1]["time_s"] - steady[-1][0]["time_s"])
    return {"cores_in_use": in_use, "cpu_s": own_s, "load_s": load_s}


def _typical(values: Sequence[float]) -> float:
    """The smallest mean of several parts, because other programs can only increase processor time."""
    size = max(1, len(values) // PARTS)
    return min(statistics.fmean(values[start : start + size]) for start in range(0, size * PARTS, size))


def write_plan(trial: Trial, folder: Path) -> None:
    """Write the stage files of a trial."""
    last = trial.workers - 1
    crossing = {"sent": trial.message_bytes, "returned": trial.message_bytes}
    pipeline = [{"workers": [rank], "depth": 1 + last - rank, "versions": 1 + last - rank} for rank in range(last + 1)]
    stages = []
    for stage in range(trial.workers):
        emulation = {
            "layers": [{"forward_s": 0.0, "backward_s": 0.0, "parameter_bytes": trial.parameter_bytes}],
            "update_s": 0.0,
            "before": crossing if stage else None,
            "after": crossing if stage < last else None,
            "minibatches": trial.minibatches * SAMPLES,
            "bucket_bytes": 1 << 20,
            "products": trial.products,
            "evicting_bytes": 0 if trial.products else EVICTING_BYTES,
        }
        one = {"minibatch": SAMPLES, "device": "cpu", "schedule": {"name": "1f1b-stashing"}}
        stages.append(one | {"layers": [f"layer{stage}"], "emulation": emulation})
    write_stage_files(folder, "trial", pipeline, stages)


def main(folder: Path) -> int:
    """Run all trials after a line on standard input, and print their measurements. Returns the exit status."""
    prepare()
    print(READY, flush=True)
    if not sys.stdin.readline():
        return 0
    try:
        print(json.dumps({"trials": run_trials(folder)}))
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _own_cpu_s() -> float:
    """Processor time of this process and of the workers that have ended, in seconds."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
