"""Reads the job's data as a worker does: whether it is the same each time, and how long a minibatch takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from pipeplan.profiler.clock import Clock, median
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.job import Job
from pipeplan_launch.runtime.data import (
    Batches,
    MinibatchSizes,
    check_order,
    data_fingerprint,
    minibatch_fingerprint,
    minibatch_sizes,
    order_of_samples,
)
from pipeplan_launch.tracing.input_shapes import check_input_shape
from pipeplan_launch.tracing.trace import TracedModel

MOST_READS, MOST_S = 30, 0.5
"""Minibatches to read, unless reading has taken so many seconds before."""
MOST_LOOKING_S = 0.1
"""Time after which no further minibatch of a data set is looked at for its shapes."""


def check_data(job: Job, traced: TracedModel, minibatch: int, seed: int) -> None:
    """Read some of the job's data twice, as a run does when it starts, and look at the shapes of its minibatches.

    Raises `LaunchError` for data with which a run would not start, or would soon end. Samples that cannot be read raise
    what the user's code raises.
    """
    if job.data is None:
        return
    data = job.datasets
    check_order(data, seed)
    for name, dataset in (("training", data.train), ("test", data.test)):
        if dataset is None or not len(dataset):  # type: ignore[arg-type]
            continue
        data_fingerprint(name, dataset, seed)
        samples: Any = dataset if name == "test" or data.order is None else order_of_samples(data, seed, 0)
        sizes = MinibatchSizes(len(samples), minibatch, traced.dynamic_batch, training=name == "training")
        if sizes.count:
            minibatch_fingerprint(name, dataset, sizes, data, seed)
            _check_shapes(Batches(dataset, sizes, seed, 0, data), traced)


def _check_shapes(batches: Batches, traced: TracedModel) -> None:
    """Raise `LaunchError` if one of a few minibatches has other shapes than those with which the model was traced."""
    began = time.perf_counter()
    for number in range(batches.sizes.count):
        for index, tensor in enumerate(batches.load(number).inputs):
            dimensions = traced.input_dimensions(index)
            check_input_shape(index, tensor.shape, dimensions, batches.sizes.padded_samples(number))
        if time.perf_counter() - began > MOST_LOOKING_S:
            break


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
