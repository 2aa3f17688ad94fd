"""Prefetching minibatches in separate processes while the stage computes, by torch's own `DataLoader`.

Random augmentation is seeded by the minibatch and not by the process, so results do not depend on the number of
processes.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from pipeplan_launch.elastic.signals import STOPPING, die_with_parent
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.job import Batch
from pipeplan_launch.job.user_code import describe_error

ReadMinibatch = Callable[[int], Batch]


@dataclass(frozen=True)
class _Failed:
    """An exception in the user's code, as one line, because the exception itself may not be picklable."""

    message: str


class _Minibatches(Dataset[Batch | _Failed]):
    """The minibatches as a data set, which reads each on access."""

    def __init__(self, read: ReadMinibatch) -> None:
        self._read = read

    def __getitem__(self, minibatch: int) -> Batch | _Failed:
        try:
            return self._read(minibatch)
        except Exception as error:
            return _Failed(describe_error(error))


class Prefetcher:
    """Prefetches minibatches in the order in which they are needed, each in one of several processes."""

    def __init__(self, read: ReadMinibatch, minibatches: Sequence[int], processes: int) -> None:
        self._expected = list(reversed(minibatches))
        loader = DataLoader(
            _Minibatches(read),
            batch_size=None,
            sampler=minibatches,
            num_workers=processes,
            collate_fn=_unchanged,
            worker_init_fn=_start_process,
            generator=torch.Generator(),  # otherwise the loader would draw from the generator that dropout uses
            multiprocessing_context="fork",
        )
        self._batches: Iterator[Batch | _Failed] | None = iter(loader)

    def take(self, minibatch: int) -> Batch | None:
        """The minibatch if it is the next in order; None for any other, such as one that is read a second time."""
        if self._batches is None or not self._expected or self._expected[-1] != minibatch:
            return None
        self._expected.pop()
        batch = next(self._batches)
        if isinstance(batch, _Failed):
            raise LaunchError(f"reading the job's data for minibatch {minibatch} failed: {batch.message}")
        return batch

    def close(self) -> None:
        """End the processes."""
        self._batches = None  # torch ends them with the iterator


def _unchanged(batch: Any) -> Any:
    return batch


def _start_process(_number: int) -> None:
    """Set up a prefetch process: the worker handles stop signals while it still reads, and the process dies with the
    worker.
    """
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    die_with_parent(None if parent is None else parent.pid)
