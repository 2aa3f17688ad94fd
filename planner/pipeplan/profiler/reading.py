"""Measures how long a worker takes to read the samples of a minibatch from the job's data."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from pipeplan.profiler.clock import Clock, median
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.job import Job
from pipeplan_launch.runtime.data import Batches, minibatch_sizes

MOST_READS, MOST_S = 30, 0.5
"""Minibatches to read, unless reading has taken so many seconds before."""


def reading_s(job: Job, minibatch: int, clock: Clock, between: Callable[[], object]) -> float:
    """Median time of reading a minibatch of shuffled training samples as a worker does, in seconds.

    `between` is called before each reading, for what training leaves in the caches. The result is 0 where the job has
    no data, where other processes read it (`Data.processes`), and where it has too few samples for a minibatch.
    """
    if job.data is None or job.datasets.processes:
        return 0.0
    try:
        sizes = minibatch_sizes(job.datasets.train, minibatch, dynamic=False, training=True)
    except LaunchError:
        return 0.0
    batches = Batches(job.datasets.train, sizes, seed=0, epoch=0, reading=job.datasets)
    taken: list[Callable[[], float]] = []
    began = time.perf_counter()
    for number in range(MOST_READS):
        between()
        taken.append(clock.measure(partial(_read, batches, number % sizes.count)))
        if time.perf_counter() - began > MOST_S:
            break
    clock.settle()
    return median([one() for one in taken])


def _read(batches: Batches, minibatch: int) -> None:
    batches.load(minibatch)
