"""How long profiling takes, how the sum over layers compares with the whole model, and what measuring one layer of each
kind changes.

    .venv/bin/python tests/benchmarks/profiling.py [--only NAME] [--passes N]

First table: `pipeplan profile MODEL` as a user runs it: seconds from start to end, and how many of these were computed;
layers, how many of them were measured, passes, the sum over layers against the whole model (forward, backward), the
optimiser's step, peak memory. Second table: passes that measure all layers and passes that measure one of each kind, in
turn in one process: their totals by medians, one over the other; the same for the layers of at least 1% of the time
that were not measured (the median of them, and the one that is furthest off); and what a pass of each kind takes.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

import torch

from pipeplan.profiler.clock import CPUClock
from pipeplan.profiler.layer_run import LayerRun
from pipeplan.profiler.prepared_layers import DuplicateFinder
from pipeplan_launch import load_job
from pipeplan_launch.allocator import keep_freed_memory
from pipeplan_launch.tracing.trace import trace_job

JOBS = Path(__file__).with_name("profiling_jobs.py")
MODELS = {
    "resnet50, batch 16": ("resnet50", 16),
    "transformer, 29 M": (f"{JOBS}:transformer", 8),
    "24 blocks": (f"{JOBS}:deep", 4),
    "lstm": (f"{JOBS}:lstm", 16),
    "mnist": ("mnist", 32),
}
LARGE = 0.01
"""Of the time: a layer whose ratio counts."""


def profiled(ref: str, batch: int) -> list[str]:
    """One row of the first table."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        command = [sys.executable, "-m", "pipeplan", "profile", ref, "--batch", str(batch), "-o", str(path)]
        start, before = time.perf_counter(), computed_s()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        took, computed = time.perf_counter() - start, computed_s() - before
        found = json.loads(path.read_text())
    layers, whole = found["layers"], found["whole"]
    forward, backward = (sum(layer[key] for layer in layers) for key in ("forward_s", "backward_s"))
    measured = sum(not layer["like"] for layer in layers)
    return [
        f"{took:.0f}",
        f"{computed:.0f}",
        f"{len(layers)}",
        f"{measured}",
        f"{found['provenance']['repeats']}",
        f"{forward / whole['forward_s']:.3f}",
        f"{backward / whole['backward_s']:.3f}",
        f"{sum(layer['update_s'] for layer in layers) * 1e3:.2f}",
        f"{found['peak_bytes'] / 2**20:.0f}",
    ]


def computed_s() -> float:
    """Seconds that child processes have computed, up to now."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def compared(ref: str, batch: int, passes: int) -> list[str] | None:
    """One row of the second table; None where no two layers are alike."""
    keep_freed_memory()
    job = load_job(ref, 0)
    assert job.loss is not None
    job.model.train()
    clock = CPUClock(1)
    run = LayerRun(trace_job(job, batch), job.example_batch(batch), job.loss, batch, torch.device("cpu"))
    run.watcher = observer = DuplicateFinder(run.layers)
    one_pass(run, clock)
    run.watcher, alike = None, observer.classes()
    if not alike:
        return None
    times: dict[bool, dict[str, list[float]]] = {True: defaultdict(list), False: defaultdict(list)}
    took: dict[bool, list[float]] = {True: [], False: []}
    for done in range(passes + 1):
        for once in (True, False):
            run.alike = alike if once else {}
            start = time.thread_time()
            found = one_pass(run, clock)
            if done:  # the first ones warm up
                took[once].append(time.thread_time() - start)
                for name, seconds in found.items():
                    times[once][name].append(seconds)
    everything = {name: median(one) for name, one in times[False].items()}
    total = sum(everything.values())
    once_s = {name: median(times[True][alike.get(name, name)]) for name in everything}
    ratios = [once_s[name] / took_s for name, took_s in everything.items() if name in alike and took_s > LARGE * total]
    return [
        f"{len(everything) - len(alike)}/{len(everything)}",
        f"{sum(once_s.values()) / total:.3f}",
        f"{median(ratios):.3f}" if ratios else "",
        f"{max(ratios, key=lambda ratio: abs(ratio - 1)):.3f}" if ratios else "",
        f"{median(took[True]):.3f}",
        f"{median(took[False]):.3f}",
        f"{1 - median(took[True]) / median(took[False]):.0%}",
    ]


def one_pass(run: LayerRun, clock: CPUClock) -> dict[str, float]:
    """Seconds by layer, forward and backward."""
    forward, backward = run.forward(clock.measure), run.backward(clock.measure)
    run.traced.model.zero_grad(set_to_none=True)
    return {name: taken() + backward[name]() for name, taken in forward.items()}


def show(heading: list[str], rows: dict[str, list[str]]) -> None:
    """A table, its columns to the right."""
    lines = [["", *heading], *([name, *row] for name, row in rows.items())]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heading) + 1)]
    for line in lines:
        print(line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)))
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MODELS)
    parser.add_argument("--passes", type=int, default=7, help="of each kind, for the second table")
    given = parser.parse_args()
    chosen = {name: model for name, model in MODELS.items() if given.only in (None, name)}
    torch.set_num_threads(1)
    heading = ["seconds", "computed", "layers", "measured", "passes", "forward", "backward", "update ms", "peak MiB"]
    show(heading, {name: profiled(*model) for name, model in chosen.items()})
    rows = {name: compared(*model, given.passes) for name, model in chosen.items()}
    heading = ["measured", "once/all", "left out", "furthest", "pass s", "all s", "saved"]
    show(heading, {name: row for name, row in rows.items() if row is not None})


if __name__ == "__main__":
    main()
