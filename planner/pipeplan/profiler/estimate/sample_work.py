"""Counts the FLOPs of one sample, and reads from the job how many tokens it has and how many samples an epoch has."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from pipeplan.profile_data.layers import SampleFlops, SampleWork
from pipeplan.profiler.estimate.flops import WorkCounts, count_work
from pipeplan.profiler.passes import training_loss
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.job import Job
from pipeplan_launch.tracing.export import quiet
from pipeplan_launch.tracing.trace import TracedModel


def sample_work(job: Job, counts: WorkCounts | None, minibatch: int) -> SampleWork:
    """The work of a sample, from the counts of a minibatch; without FLOPs if some are not counted."""
    flops = () if counts is None or counts.uncounted else _flops_by_kind(counts, minibatch)
    return SampleWork(flops, job.tokens_per_sample, _epoch_samples(job))


def counted_work(job: Job, traced: TracedModel, minibatch: int) -> SampleWork:
    """The work of a sample of a measured model, whose FLOPs are counted on tensors without data."""
    try:
        batch = job.example_batch(minibatch)
        with quiet():
            counts = count_work(traced, batch, training_loss(job, batch))
    except Exception:  # a model that runs need not run on tensors without data; then its FLOPs are not known
        counts = None
    return sample_work(job, counts, minibatch)


def _flops_by_kind(counts: WorkCounts, minibatch: int) -> tuple[SampleFlops, ...]:
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for direction, by_layer in enumerate((counts.forward, counts.backward)):
        for works in by_layer.values():
            for work in works:
                if work.flops:
                    sums[work.kind, work.arithmetic][direction] += work.flops
    return tuple(
        SampleFlops(kind, arithmetic, forward / minibatch, backward / minibatch)
        for (kind, arithmetic), (forward, backward) in sorted(sums.items())
    )


def _epoch_samples(job: Job) -> int:
    """Training samples of an epoch; 0 if the job has no data, or does not say how many there are."""
    if job.data is None:
        return 0
    try:
        train: Any = job.datasets.train
        return len(train) if job.datasets.order is None else len(job.datasets.order(0))
    except (LaunchError, TypeError):
        return 0
