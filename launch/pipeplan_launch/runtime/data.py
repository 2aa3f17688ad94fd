"""The assignment of samples to minibatches, and reading them. Every worker computes the same assignment on its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.job import Batch, Data, collate_samples
from pipeplan_launch.job.seeds import RandomState, mix_seed, seed_everything, seed_loading
from pipeplan_launch.job.user_code import user_code_errors
from pipeplan_launch.runtime.prefetch import Prefetcher


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
        self._prefetcher: Prefetcher | None = None
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
        """Context in which these minibatches are loaded in this order. Prefetches them if the job's data asks for
        that.
        """
        if not self._processes or not minibatches:
            yield
            return
        self._prefetcher = Prefetcher(self._read, minibatches, min(self._processes, len(minibatches)))
        try:
            yield
        finally:
            self._prefetcher.close()
            self._prefetcher = None

    def load(self, minibatch: int, *, inputs: bool = True, target: bool = True) -> Batch:
        """Load a minibatch. Its inputs or its target may be left out if they are not asked for."""
        batch = self._prefetcher.take(minibatch) if self._prefetcher is not None else None
        return self._read(minibatch, inputs, target) if batch is None else batch

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
    """The user's own order of an epoch's samples. Random numbers that it draws follow from (seed, epoch)."""
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
