"""Which samples make which minibatch: every sample once, the same for every worker, nothing dropped unsaid."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from pipeplan_launch.batches import Batches, sizes_of
from pipeplan_launch.errors import LaunchError


class Numbers(Dataset[Any]):
    """Samples that are their own index, with a random number as augmentation would draw."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[torch.Tensor, float]:
        return torch.tensor([float(index), torch.rand(()).item()]), random.random()


def seen(batches: Batches) -> list[list[int]]:
    return [batches.load(i).inputs[0][:, 0].int().tolist() for i in range(batches.sizes.count)]


def test_every_sample_once_in_an_order_of_the_epoch() -> None:
    sizes = sizes_of(Numbers(), 4, dynamic=True, training=True)
    first, again, second = (seen(Batches(Numbers(), sizes, 1, epoch)) for epoch in (0, 0, 1))
    assert [len(batch) for batch in first] == [4, 4, 2]
    assert sorted(index for batch in first for index in batch) == list(range(10))
    assert first == again
    assert first != second
    assert first != seen(Batches(Numbers(), sizes, 2, 0))
    assert sizes.note is None


def test_a_fixed_size_drops_the_rest_in_training_and_says_so() -> None:
    sizes = sizes_of(Numbers(), 4, dynamic=False, training=True)
    assert (sizes.count, sizes.run(1), sizes.real(1)) == (2, 4, 4)
    assert "the last 2 of 10 samples are left out" in (sizes.note or "")


def test_a_fixed_size_fills_the_last_minibatch_in_evaluation() -> None:
    sizes = sizes_of(Numbers(), 4, dynamic=False, training=False)
    assert (sizes.count, sizes.run(2), sizes.real(2)) == (3, 4, 2)
    assert seen(Batches(Numbers(), sizes, 0, 0))[2] == [8, 9, 9, 9]


def test_augmentation_is_the_same_wherever_a_minibatch_is_read() -> None:
    sizes = sizes_of(Numbers(), 4, dynamic=True, training=True)
    one, other = Batches(Numbers(), sizes, 1, 0), Batches(Numbers(), sizes, 1, 0)
    other.load(0)
    torch.rand(3)
    assert torch.equal(one.load(1).inputs[0], other.load(1).inputs[0])
    assert torch.equal(one.load(1).target, other.load(1).target)


def test_tensors_are_read_as_samples_would_be() -> None:
    data = TensorDataset(torch.arange(10.0)[:, None], torch.arange(10))
    sizes = sizes_of(data, 3, dynamic=True, training=True)
    batches = Batches(data, sizes, 4, 2)
    for minibatch in range(sizes.count):
        batch = batches.load(minibatch)
        assert torch.equal(batch.inputs[0][:, 0].long(), batch.target)


def test_a_limit_and_too_few_samples() -> None:
    assert sizes_of(Numbers(), 4, dynamic=True, training=True, limit=1).count == 1
    with pytest.raises(LaunchError, match="10 samples, too few for one minibatch of 16"):
        sizes_of(Numbers(), 16, dynamic=False, training=True)
    with pytest.raises(LaunchError, match="map-style"):
        sizes_of(iter([]), 4, dynamic=True, training=True)
