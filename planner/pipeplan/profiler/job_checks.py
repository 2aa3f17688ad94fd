"""Checks a job before it is measured: its data, and whether its stages train in the same way as the whole model.

If tracing loses a module's write to a buffer, the stages train differently. That module then becomes a single layer.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from pipeplan.profile_data.profile_document import LEFT_OUT, unchecked_text
from pipeplan.profiler.clock import Clock, repeated_s
from pipeplan.profiler.options import ProfilerOptions, Progress
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.job import Job
from pipeplan_launch.job.pass_conditions import RandomState
from pipeplan_launch.runtime.data import (
    Batches,
    MinibatchSizes,
    check_order,
    data_fingerprint,
    minibatch_fingerprint,
    minibatch_sizes,
    order_of_samples,
)
from pipeplan_launch.runtime.self_check.check import DifferenceFound
from pipeplan_launch.runtime.self_check.self_check import SelfCheck, self_check
from pipeplan_launch.tracing.export_fallback import enclosing_module, is_same_or_inside
from pipeplan_launch.tracing.trace import TracedModel, check_input_shape, trace_job

MOST_READS, MOST_S = 30, 0.5
"""Largest number of minibatches that are read, and the time limit in seconds."""
MOST_LOOKING_S = 0.1
"""Seconds after which no further minibatch of a data set is read to check its shapes."""


@dataclass(frozen=True)
class CheckedTraining:
    """A traced model, and the outcome of its self-check."""

    traced: TracedModel
    outcome: SelfCheck
    taken_whole: tuple[str, ...] = ()
    """Submodules that are not traced inside, because stages cut from them would train differently."""

    @property
    def remarks(self) -> list[str]:
        """The remarks of the self-check, or a remark that it was not made."""
        remarks = [unchecked_text(self.outcome.skipped)] if self.outcome.skipped else []
        if self.taken_whole:
            names = ", ".join(map(repr, self.taken_whole))
            remarks.append(f"taken whole, because their stages would train differently from the model: modules {names}")
        return [*remarks, *self.outcome.remarks]


def check_training(
    job: Job, minibatch: int, options: ProfilerOptions, free: int | None, progress: Progress
) -> CheckedTraining:
    """Trace the job's model for minibatches of this size, and compare its stages with the model alone.

    `free`: free memory in bytes, None if unknown. Raises `LaunchError` for data that a run would refuse, and for a
    difference that remains after modules are taken whole.
    """
    progress(0, 0, "tracing")
    traced = trace_job(job, minibatch, options.granularity)
    random_state = RandomState.now(torch.device("cpu"))
    try:
        check_data(job, traced, minibatch, options.seed)
    except (LaunchError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception:  # a sample that cannot be read; `reading_s` reports it
        pass
    finally:
        random_state.restore()
    if not options.self_check:
        return CheckedTraining(traced, SelfCheck(LEFT_OUT))
    progress(0, 0, "self-check")
    try:
        return CheckedTraining(traced, self_check(job, traced, seed=options.seed, free=free))
    except DifferenceFound as error:
        first = error
    whole: tuple[str, ...] = ()
    path = first.difference.path
    with suppress(LaunchError):  # the first difference says more than the reason why a module cannot be taken whole
        while path is not None:
            whole = (*(other for other in whole if not is_same_or_inside(other, path)), path)
            traced = trace_job(job, minibatch, options.granularity, whole)
            try:
                return CheckedTraining(traced, self_check(job, traced, seed=options.seed, free=free), whole)
            except DifferenceFound as error:
                path = _next_path(job, error.difference.path, whole)
    raise first


def _next_path(job: Job, path: str | None, whole: tuple[str, ...]) -> str | None:
    """The module to take whole next: `path`, or the first module around it that is not taken whole yet."""
    while path is not None and any(is_same_or_inside(path, other) for other in whole):
        path = enclosing_module(job.model, path)
    return path


def check_data(job: Job, traced: TracedModel, minibatch: int, seed: int) -> None:
    """Read some of the job's data twice, as a run does when it starts, and check the shapes of its minibatches.

    Raises `LaunchError` for data with which a run would not start, or would soon fail. If a sample cannot be read, the
    exception of the user's code is raised.
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
    """Raise `LaunchError` if one of a few minibatches does not have the shapes with which the model was traced."""
    began = time.perf_counter()
    for number in range(batches.sizes.count):
        for index, tensor in enumerate(batches.load(number).inputs):
            dimensions = traced.input_dimensions(index)
            check_input_shape(index, tensor.shape, dimensions, batches.sizes.padded_samples(number))
        if time.perf_counter() - began > MOST_LOOKING_S:
            break


def reading_s(job: Job, minibatch: int, clock: Clock, between: Callable[[], object]) -> float:
    """Median time of reading a minibatch of shuffled training samples as a worker does, in seconds.

    `between` is called before each reading, so that the caches are as in training. The result is 0 if the job has no
    data, if other processes read it (`Data.processes`), or if it has too few samples for a minibatch.
    """
    if job.data is None or job.datasets.processes:
        return 0.0
    try:
        sizes = minibatch_sizes(job.datasets.train, minibatch, dynamic=False, training=True)
    except LaunchError:
        return 0.0
    batches = Batches(job.datasets.train, sizes, seed=0, epoch=0, reading=job.datasets)
    numbers = itertools.cycle(range(sizes.count))

    def read() -> None:
        batches.load(next(numbers))

    return repeated_s(clock, read, 1, MOST_READS, MOST_S, between)
