"""The assignment of samples to minibatches, and reading them. Every worker computes the same assignment on its own."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from pipeplan_launch.elastic.consistency_check import digest
from pipeplan_launch.elastic.signals import STOPPING, die_with_parent
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.job import Batch, Data, collate_samples
from pipeplan_launch.job.pass_conditions import RandomState, mix_seed, seed_everything, seed_loading
from pipeplan_launch.job.user_code import describe_error, user_code_errors


@dataclass(frozen=True)
class MinibatchSizes:
    """Division of a data set's samples into minibatches.

    A model that takes any batch size gets a smaller last minibatch. A model traced for a single size does not:
    training leaves the last samples out, and evaluation fills up the last minibatch with padding samples that do not
    count.
    """

    samples: int
    minibatch: int
    dynamic: bool
    """Whether the model takes any batch size."""
    training: bool
    limit: int | None = None
    """Largest number of minibatches."""

    @property
    def count(self) -> int:
        """Minibatches in one pass."""
        whole, rest = divmod(self.samples, self.minibatch)
        count = whole + (1 if rest and (self.dynamic or not self.training) else 0)
        return count if self.limit is None else min(count, self.limit)

    def real_samples(self, minibatch: int) -> int:
        """Samples of the data set in this minibatch."""
        return min(self.minibatch, self.samples - minibatch * self.minibatch)

    def padded_samples(self, minibatch: int) -> int:
        """Samples that the model runs on in this minibatch, including padding samples."""
        return self.real_samples(minibatch) if self.dynamic else self.minibatch

    @property
    def note(self) -> str | None:
        """A note for the user about samples that are left out, otherwise None."""
        rest = self.samples % self.minibatch
        if self.dynamic or not rest or not self.training:
            return None
        return (
            f"the model takes minibatches of exactly {self.minibatch}: the last {rest} of {self.samples} samples "
            "are left out of every epoch"
        )


class Batches:
    """The minibatches of one pass over a data set."""

    def __init__(
        self, dataset: Dataset[Any], sizes: MinibatchSizes, seed: int, epoch: int, reading: Data | None = None
    ) -> None:
        """Training shuffles by (seed, epoch); evaluation keeps the order of the data set. `reading`: the job's data,
        which says how to collate, order and prefetch.
        """
        self.sizes = sizes
        self._dataset = dataset
        self._seed = seed
        self._epoch = epoch
        self._collate, self._processes = (None, 0) if reading is None else (reading.collate, reading.processes)
        self._prefetched: Iterator[Batch | str] | None = None
        self._expected: list[int] = []
        """Minibatches to prefetch, the next one last."""
        self._order: list[int] | range = range(sizes.samples)
        if sizes.training and reading is not None and reading.order is not None:
            self._order = order_of_samples(reading, seed, epoch)
            if len(self._order) != sizes.samples:
                raise LaunchError(
                    f"the data's `order` gives {len(self._order)} samples for epoch {epoch}, and {sizes.samples} for "
                    "epoch 0: the number must be the same for all epochs"
                )
        elif len(dataset) != sizes.samples:  # type: ignore[arg-type]
            raise LaunchError(
                f"the job's data has {len(dataset)} samples in epoch {epoch}, and had {sizes.samples} at the start: "  # type: ignore[arg-type]
                "its length must stay the same"
            )
        elif sizes.training:
            generator = torch.Generator().manual_seed(mix_seed("order", seed, epoch))
            self._order = torch.randperm(sizes.samples, generator=generator).tolist()

    def copy(self) -> Batches:
        """The same minibatches, for another reader."""
        return copy(self)

    @contextmanager
    def prefetch(self, minibatches: Sequence[int]) -> Iterator[None]:
        """Context in which these minibatches are loaded in this order. Prefetches them in processes if the job's data
        asks for that.
        """
        if not self._processes or not minibatches:
            yield
            return
        loader = DataLoader(
            _Minibatches(self._read),
            batch_size=None,
            sampler=minibatches,
            num_workers=min(self._processes, len(minibatches)),
            collate_fn=lambda batch: batch,
            worker_init_fn=_start_process,
            generator=torch.Generator(),  # otherwise the loader would draw from the generator that dropout uses
            multiprocessing_context="fork",
        )
        self._expected, self._prefetched = list(reversed(minibatches)), iter(loader)
        try:
            yield
        finally:
            self._prefetched = None  # torch ends the processes with the iterator

    def load(self, minibatch: int, *, inputs: bool = True, target: bool = True) -> Batch:
        """Load a minibatch. If `inputs` or `target` is false, that part may be missing."""
        # A minibatch that is not the next in order is read here, for example if it is read a second time.
        if self._prefetched is None or self._expected[-1:] != [minibatch]:
            return self._read(minibatch, inputs, target)
        self._expected.pop()
        batch = next(self._prefetched)
        if isinstance(batch, str):
            raise LaunchError(f"reading the job's data for minibatch {minibatch} failed: {batch}")
        return batch

    def _read(self, minibatch: int, inputs: bool = True, target: bool = True) -> Batch:
        start = minibatch * self.sizes.minibatch
        chosen = list(self._order[start : start + self.sizes.real_samples(minibatch)])
        chosen += chosen[-1:] * (self.sizes.padded_samples(minibatch) - len(chosen))
        if self._collate is None and type(self._dataset) is TensorDataset and len(self._dataset.tensors) == 2:
            rows, (examples, targets) = torch.tensor(chosen), self._dataset.tensors
            return Batch((examples[rows],) if inputs else (), targets[rows] if target else None)
        seed_loading(self._seed, self._epoch, minibatch)
        return collate_samples([self._dataset[index] for index in chosen], self._collate)


def order_of_samples(data: Data, seed: int, epoch: int) -> list[int]:
    """The user's own order of an epoch's samples. The random numbers for it are seeded by (seed, epoch)."""
    assert data.order is not None
    random_state, train = RandomState.now(torch.device("cpu")), data.train
    seed_everything(mix_seed("order", seed, epoch))
    try:
        with user_code_errors("the data's `order`"):
            order = [int(index) for index in data.order(epoch)]
    finally:
        random_state.restore()
    count = len(train)  # type: ignore[arg-type]
    wrong = next((index for index in order if not 0 <= index < count), None)
    if wrong is not None:
        raise LaunchError(f"the data's `order` names sample {wrong} for epoch {epoch}, but there are only {count}")
    return order


def minibatch_sizes(
    dataset: Any, minibatch: int, dynamic: bool, training: bool, limit: int | None = None
) -> MinibatchSizes:
    """The minibatch sizes for a map-style data set. Raises `LaunchError` if the data set gives no minibatch at all."""
    try:
        samples = len(dataset)
    except TypeError as error:
        raise LaunchError(
            f"the job's data must be map-style, with a length: {type(dataset).__name__} has none"
        ) from error
    if samples == 0:
        raise LaunchError(f"the job's {'training' if training else 'test'} data is empty")
    sizes = MinibatchSizes(samples, minibatch, dynamic, training, limit)
    if sizes.count == 0:
        raise LaunchError(
            f"the job's {'training' if training else 'test'} data has {samples} samples, too few for one minibatch of "
            f"{minibatch}: solve or profile with a smaller --microbatch"
        )
    return sizes


# Prefetching minibatches in separate processes while the stage computes, by torch's own `DataLoader`.
#
# Random augmentation is seeded by the minibatch and not by the process, so results do not depend on the number of
# processes.


class _Minibatches(Dataset[Batch | str]):
    """The minibatches as a data set that reads a minibatch on access."""

    def __init__(self, read: Callable[[int], Batch]) -> None:
        self._read = read

    def __getitem__(self, minibatch: int) -> Batch | str:
        """A minibatch. An exception in the user's code is one line, because it may not be picklable."""
        try:
            return self._read(minibatch)
        except Exception as error:
            return describe_error(error)


def _start_process(_number: int) -> None:
    """Set up a prefetch process. It ignores stop signals, which the worker handles, and dies with the worker."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    die_with_parent(None if parent is None else parent.pid)


# Checks that the job's data is the same at each reading.
#
# Stages and replicas read their samples separately: the first stage reads inputs, and the last stage reads targets.
# Data may depend only on the index of a sample and the seeded generators. Otherwise inputs would be paired with wrong
# targets, or replicas would train on different samples than the run has, without an error.

REMEDY = (
    "it may depend on its index and on the global random generators of Python, NumPy and torch, which are seeded for "
    "every minibatch; seed any other generator by the index"
)
ORDER_REMEDY = "let it depend on the epoch alone, or on the global generators, which are seeded by the epoch"


def data_fingerprint(name: str, dataset: Any, seed: int, reader: int = 0) -> dict[str, str]:
    """The length of a data set, and digests of its first, middle and last sample, by description.

    Each sample is read three times: once with random numbers of this `reader` alone, then twice with the random numbers
    of the run. The first reading makes readers differ if the data set caches samples. Raises `LaunchError` for samples
    or lengths that differ between readings, and any exception of the user's code.
    """
    count = len(dataset)
    marks = {f"the number of {name} samples": str(count)}
    for index in sorted({0, count // 2, count - 1}) if count else ():
        read: list[str] = []
        for first in (mix_seed("first reading", seed, reader), seed, seed):
            seed_loading(first, 0, index)
            read.append(digest(dataset[index]))
        marks[f"{name} sample {index}"] = read[-1]
        _refuse_different(f"{name} sample {index}", *read[1:])
    if len(dataset) != count:
        raise LaunchError(
            f"the {name} data has {count} samples at first and {len(dataset)} after some were read: its length must "
            "stay the same"
        )
    return marks


def minibatch_fingerprint(name: str, dataset: Any, sizes: MinibatchSizes, data: Data, seed: int) -> dict[str, str]:
    """Digest of the first minibatch as workers read it, by description; nothing for plain tensors.

    If processes prefetch, one of them reads the minibatch too. Raises the same errors as `data_fingerprint`.
    """
    if data.collate is None and type(dataset) is TensorDataset:
        return {}
    batches, description = Batches(dataset, sizes, seed, 0, data), f"minibatch 0 of the {name} data"
    mark = _minibatch(batches)
    _refuse_different(description, mark, _minibatch(batches))
    if data.processes:
        with batches.prefetch([0]):
            if _minibatch(batches) != mark:
                raise LaunchError(
                    f"{description} differs between a worker and the processes that prefetch for it: {REMEDY}"
                )
    return {description: mark}


def check_order(data: Data, seed: int) -> None:
    """Raise `LaunchError` if the user's own order of the samples differs when it is computed twice."""
    if data.order is not None and order_of_samples(data, seed, 0) != order_of_samples(data, seed, 0):
        raise LaunchError(f"the data's `order` differs each time for epoch 0: {ORDER_REMEDY}")


def _minibatch(batches: Batches) -> str:
    batch = batches.load(0)
    return digest([batch.inputs, batch.target])


def _refuse_different(description: str, first: str, second: str) -> None:
    if first != second:
        raise LaunchError(f"{description} differs at each reading: {REMEDY}")
