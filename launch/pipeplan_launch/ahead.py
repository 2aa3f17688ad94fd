"""Reading minibatches ahead, in processes of their own, while the stage computes: torch's own `DataLoader`.

Random augmentation is seeded by the minibatch and not by who reads it, so that nothing depends on their number.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.interrupt import die_with_parent
from pipeplan_launch.job import Batch
from pipeplan_launch.loading import describe

Read = Callable[[int], Batch]


@dataclass(frozen=True)
class _Failed:
    """An exception of the user's code, in one line: the exception itself may not travel between processes."""

    what: str


class _Minibatches(Dataset[Batch | _Failed]):
    def __init__(self, read: Read) -> None:
        self._read = read

    def __getitem__(self, minibatch: int) -> Batch | _Failed:
        try:
            return self._read(minibatch)
        except Exception as error:
            return _Failed(describe(error))


class Ahead:
    """Minibatches in the order in which they will be asked for, each read by one of several processes."""

    def __init__(self, read: Read, minibatches: Sequence[int], processes: int) -> None:
        self._expected = list(reversed(minibatches))
        loader = DataLoader(
            _Minibatches(read),
            batch_size=None,
            sampler=minibatches,
            num_workers=processes,
            collate_fn=_as_it_is,
            worker_init_fn=_begin,
            generator=torch.Generator(),  # else it would draw from the one that dropout draws from
            multiprocessing_context="fork",
        )
        self._made: Iterator[Batch | _Failed] | None = iter(loader)

    def take(self, minibatch: int) -> Batch | None:
        """The minibatch if it is the next one; None for any other, such as one that is read a second time."""
        if self._made is None or not self._expected or self._expected[-1] != minibatch:
            return None
        self._expected.pop()
        batch = next(self._made)
        if isinstance(batch, _Failed):
            raise LaunchError(f"reading the job's data for minibatch {minibatch} failed: {batch.what}")
        return batch

    def close(self) -> None:
        """End the processes."""
        self._made = None  # torch ends them with the iterator


def _as_it_is(batch: Any) -> Any:
    return batch


def _begin(_number: int) -> None:
    """In a new process: signals that ask a whole launch to stop are the worker's to answer, which still reads on; and
    there is no life after it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
