"""Data that differs between readings is refused; random numbers of the seeded generators are none."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, default_collate

from pipeplan_launch import Data
from pipeplan_launch.elastic.consistency_check import Fingerprint, check_agreement
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.runtime.data import Batches, MinibatchSizes, check_order, data_fingerprint, minibatch_fingerprint

SIZES = MinibatchSizes(16, 4, dynamic=True, training=True)
Sample = Callable[[int], float]


class Samples(Dataset[Any]):
    """16 samples, whose values a function gives."""

    def __init__(self, value: Sample = float) -> None:
        self.value = value

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor([self.value(index)]), index % 3


def own_generators() -> dict[str, Sample]:
    torchs, numpys, pythons = torch.Generator(), numpy.random.default_rng(1), random.Random(1)
    count, stored = itertools.count(), torch.zeros(16)
    return {
        "torch": lambda index: torch.rand((), generator=torchs).item(),
        "numpy": lambda index: numpys.random(),
        "python": lambda index: pythons.random(),
        "seeded by the system": lambda index: numpy.random.default_rng().random(),
        "a counter of reads": lambda index: float(next(count)),
        "a stored tensor that is changed": lambda index: stored[index].add_(1).item(),
    }


@pytest.mark.parametrize("name", own_generators())
def test_a_data_set_that_differs_at_each_reading_is_refused(name: str) -> None:
    dataset = Samples(own_generators()[name])
    with pytest.raises(LaunchError, match=r"^training sample 0 differs at each reading: it may depend on its index"):
        data_fingerprint("training", dataset, 0)


def test_random_numbers_of_the_global_generators_are_the_same_at_each_reading() -> None:
    dataset = Samples(lambda index: index + random.random() + numpy.random.rand() + torch.rand(()).item())
    data = Data(dataset, collate=lambda samples: [default_collate(samples)[0] + torch.rand(()), torch.zeros(4)])
    first, second = (
        [data_fingerprint("training", dataset, 0), minibatch_fingerprint("training", dataset, SIZES, data, 0)]
        for _ in range(2)
    )
    assert first == second
    assert [len(marks) for marks in first] == [4, 1]


def test_a_sample_that_is_rarely_random_is_found_in_the_first_minibatch() -> None:
    generator = random.Random(0)
    dataset = Samples(lambda index: generator.random() if index % 8 == 3 else float(index))
    data_fingerprint("training", dataset, 0)
    data = Data(dataset, order=lambda epoch: range(16))
    with pytest.raises(LaunchError, match=r"^minibatch 0 of the training data differs at each reading"):
        minibatch_fingerprint("training", dataset, SIZES, data, 0)


def test_a_collate_with_random_numbers_of_its_own_is_refused() -> None:
    generator, data_set = random.Random(0), TensorDataset(torch.zeros(16, 1), torch.zeros(16))

    def noisy(samples: list[Any]) -> Any:
        inputs, targets = default_collate(samples)
        return inputs + generator.random(), targets

    with pytest.raises(LaunchError, match=r"^minibatch 0 of the training data differs at each reading"):
        minibatch_fingerprint("training", data_set, SIZES, Data(data_set, collate=noisy), 0)


def test_a_data_set_whose_length_changes_is_refused() -> None:
    class Shrinking(Samples):
        count = 16

        def __len__(self) -> int:
            return self.count

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            self.count = 12
            return super().__getitem__(index)

    dataset = Shrinking()
    with pytest.raises(LaunchError, match="has 16 samples at first and 12 after some were read: its length must stay"):
        data_fingerprint("training", dataset, 0)
    with pytest.raises(LaunchError, match="has 12 samples in epoch 3, and had 16 at the start"):
        Batches(dataset, SIZES, 0, 3)


def test_an_order_that_differs_each_time_is_refused() -> None:
    own = random.Random(0)
    check_order(Data(Samples()), 0)
    check_order(Data(Samples(), order=lambda epoch: random.sample(range(16), 16)), 0)
    with pytest.raises(LaunchError, match="`order` differs each time for epoch 0: let it depend on the epoch alone"):
        check_order(Data(Samples(), order=lambda epoch: own.sample(range(16), 16)), 0)


def test_processes_that_prefetch_read_the_same() -> None:
    for value, refused in ((float, False), (lambda index: float(os.getpid()), True)):
        data = Data(Samples(value), processes=1)
        check = partial(minibatch_fingerprint, "training", data.train, SIZES, data, 0)
        if refused:
            with pytest.raises(LaunchError, match="differs between a worker and the processes that prefetch for it"):
                check()
        else:
            assert len(check()) == 1


def test_workers_that_kept_other_random_samples_do_not_start() -> None:
    def kept() -> Samples:
        known: dict[int, float] = {}
        return Samples(lambda index: known.setdefault(index, random.random()))

    marks = [data_fingerprint("training", kept(), 0, reader) for reader in range(2)]
    with pytest.raises(LaunchError, match=r"sample 0 is not the same at ranks 0 and 1.*must not keep random samples"):
        check_agreement([Fingerprint(rank, rank, one) for rank, one in enumerate(marks)])
    with pytest.raises(LaunchError, match="minibatch 0 of the test data is not the same at ranks 0 and 2"):
        check_agreement(
            [Fingerprint(rank, rank, read={"minibatch 0 of the test data": "ab"[rank > 1]}) for rank in range(3)]
        )
