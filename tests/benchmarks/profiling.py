"""What measuring one layer of each kind changes in a profile, and how long profiling takes.

    .venv/bin/python tests/benchmarks/profiling.py [--only NAME] [--passes N]

Passes that measure all layers and passes that measure one of each kind take turns in one process. The table has the
layers measured, the total of the second kind over that of the first, the same for the layers of at least 1% of the time
that were not measured (the median of them, and the one that is furthest off), and CPU seconds of a pass of each kind.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from statistics import median

import torch
from jobs import JOBS
from rich.console import Console
from rich.table import Table

from pipeplan.profiler.clock import CPUClock
from pipeplan.profiler.layer_run import LayerRun
from pipeplan.profiler.prepared_layers import DuplicateFinder
from pipeplan_launch import load_job
from pipeplan_launch.telemetry.memory import keep_freed_memory
from pipeplan_launch.tracing.trace import trace_job

MODELS = {"resnet50": ("resnet50", 16), "6 blocks": (f"{JOBS}:transformer", 8), "24 blocks": (f"{JOBS}:deep", 4)}
LARGE = 0.01
"""Of the time: a layer whose ratio counts."""


def compared(ref: str, batch: int, passes: int) -> list[str]:
    """One row of the table."""
    job = load_job(ref, 0)
    assert job.loss is not None
    job.model.train()
    clock = CPUClock(1)
    run = LayerRun(trace_job(job, batch), job.example_batch(batch), job.loss, batch, torch.device("cpu"))
    run.watcher = observer = DuplicateFinder(run.layers)
    one_pass(run, clock)
    run.watcher, alike = None, observer.classes()
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
    ratios = [once_s[name] / all_s for name, all_s in everything.items() if name in alike and all_s > LARGE * total]
    least_s, most_s = median(took[True]), median(took[False])
    return [
        f"{len(everything) - len(alike)} of {len(everything)}",
        f"{sum(once_s.values()) / total:.3f}",
        f"{median(ratios):.3f}" if ratios else "",
        f"{max(ratios, key=lambda ratio: abs(ratio - 1)):.3f}" if ratios else "",
        *(f"{least_s:.3f}", f"{most_s:.3f}", f"{1 - least_s / most_s:.0%}"),
    ]


def one_pass(run: LayerRun, clock: CPUClock) -> dict[str, float]:
    """Seconds by layer, forward and backward."""
    forward, backward = run.forward(clock.measure), run.backward(clock.measure)
    run.traced.model.zero_grad(set_to_none=True)
    return {name: taken() + backward[name]() for name, taken in forward.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MODELS)
    parser.add_argument("--passes", type=int, default=7, help="of each kind")
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    table = Table("", "layers measured", "once / all", "left out", "furthest", "pass s", "all s", "saved")
    for name, model in MODELS.items():
        if given.only in (None, name):
            table.add_row(name, *compared(*model, given.passes))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
