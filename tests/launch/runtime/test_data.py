"""Which samples make which minibatch: every sample once, the same for every worker, nothing dropped unsaid."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from pipeplan_launch import Data, Job
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.runtime.data import Batches, minibatch_sizes, order_of_samples


class Numbers(Dataset[Any]):
    """Samples that are their own index, with a random number as augmentation would draw."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[torch.Tensor, float]:
        return torch.tensor([float(index), torch.rand(()).item()]), random.random()


def seen(batches: Batches) -> list[list[int]]:
    return [batches.load(i).inputs[0][:, 0].int().tolist() for i in range(batches.sizes.count)]


def test_every_sample_once_in_an_order_of_the_epoch() -> None:
    sizes = minibatch_sizes(Numbers(), 4, dynamic=True, training=True)
    first, again, second = (seen(Batches(Numbers(), sizes, 1, epoch)) for epoch in (0, 0, 1))
    assert [len(batch) for batch in first] == [4, 4, 2]
    assert sorted(index for batch in first for index in batch) == list(range(10))
    assert first == again
    assert first != second
    assert first != seen(Batches(Numbers(), sizes, 2, 0))
    assert sizes.note is None


def test_a_fixed_size_drops_the_rest_in_training_and_says_so() -> None:
    sizes = minibatch_sizes(Numbers(), 4, dynamic=False, training=True)
    assert (sizes.count, sizes.padded_samples(1), sizes.real_samples(1)) == (2, 4, 4)
    assert "the last 2 of 10 samples are left out" in (sizes.note or "")


def test_a_fixed_size_fills_the_last_minibatch_in_evaluation() -> None:
    sizes = minibatch_sizes(Numbers(), 4, dynamic=False, training=False)
    assert (sizes.count, sizes.padded_samples(2), sizes.real_samples(2)) == (3, 4, 2)
    assert seen(Batches(Numbers(), sizes, 0, 0))[2] == [8, 9, 9, 9]


def test_augmentation_is_the_same_wherever_a_minibatch_is_read() -> None:
    sizes = minibatch_sizes(Numbers(), 4, dynamic=True, training=True)
    one, other = Batches(Numbers(), sizes, 1, 0), Batches(Numbers(), sizes, 1, 0)
    other.load(0)
    torch.rand(3)
    assert torch.equal(one.load(1).inputs[0], other.load(1).inputs[0])
    assert torch.equal(one.load(1).target, other.load(1).target)


def test_tensors_are_read_as_samples_would_be() -> None:
    data = TensorDataset(torch.arange(10.0)[:, None], torch.arange(10))
    sizes = minibatch_sizes(data, 3, dynamic=True, training=True)
    batches = Batches(data, sizes, 4, 2)
    for minibatch in range(sizes.count):
        batch = batches.load(minibatch)
        assert torch.equal(batch.inputs[0][:, 0].long(), batch.target)


def test_a_limit_and_too_few_samples() -> None:
    assert minibatch_sizes(Numbers(), 4, dynamic=True, training=True, limit=1).count == 1
    with pytest.raises(LaunchError, match="10 samples, too few for one minibatch of 16"):
        minibatch_sizes(Numbers(), 16, dynamic=False, training=True)
    with pytest.raises(LaunchError, match="map-style"):
        minibatch_sizes(iter([]), 4, dynamic=True, training=True)


def ahead(batches: Batches, wanted: list[int]) -> list[Any]:
    with batches.prefetch(wanted):
        return [batches.load(minibatch) for minibatch in wanted]


def test_reading_ahead_reads_the_same() -> None:
    """Random augmentation too, whichever process reads; the order of random numbers here stays as it was."""
    sizes = minibatch_sizes(Numbers(), 3, dynamic=True, training=True)
    plain, several = (Batches(Numbers(), sizes, 1, 0, Data(Numbers(), processes=count)) for count in (0, 2))
    torch.manual_seed(3)
    with several.prefetch([0, 2, 3]):
        drawn = torch.rand(2)
        given = [several.load(minibatch) for minibatch in (0, 2)]
        again = several.load(2), several.load(1)
        given.append(several.load(3))
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(2))
    expected = [plain.load(minibatch) for minibatch in (0, 2, 3, 2, 1)]
    for one, other in zip([*given, *again], expected, strict=True):
        assert torch.equal(one.inputs[0], other.inputs[0])
        assert torch.equal(one.target, other.target)
    assert not multiprocessing.active_children()


class Broken(Numbers):
    def __getitem__(self, index: int) -> Any:
        raise KeyError("no such picture")


def test_what_fails_while_reading_ahead_is_one_line() -> None:
    data = Data(Broken(), processes=1)
    batches = Batches(data.train, minibatch_sizes(data.train, 4, dynamic=True, training=True), 0, 0, data)
    says = r"the job's data for minibatch 1 failed: KeyError: 'no such picture' \(.*test_data\.py:.*raise KeyError"
    with pytest.raises(LaunchError, match=says) as caught:
        ahead(batches, [1])
    assert "\n" not in str(caught.value)


class Described(Dataset[Any]):
    """Samples as dictionaries, of different lengths."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"words": torch.ones(index + 1), "label": index % 2}


def padded(samples: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    words = torch.nn.utils.rnn.pad_sequence([sample["words"] for sample in samples], batch_first=True)
    return words, torch.tensor([sample["label"] for sample in samples])


@pytest.mark.parametrize("processes", [0, 1])
def test_the_users_own_collate(processes: int) -> None:
    data = Data(Described(), collate=padded, processes=processes)
    sizes = minibatch_sizes(data.train, 4, dynamic=True, training=False)
    first, second = ahead(Batches(data.train, sizes, 0, 0, data), [0, 1])
    assert first.inputs[0].tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    assert second.target.tolist() == [0, 1]
    job = Job(torch.nn.Identity(), data=lambda: data)
    assert torch.equal(job.example_inputs(4)[0], first.inputs[0])
    with pytest.raises(LaunchError, match="the data's `collate` must return a pair"):
        ahead(Batches(data.train, sizes, 0, 0, Data(Described(), collate=len, processes=processes)), [0])


@pytest.mark.parametrize("processes", [-1, 1.5, None])
def test_a_number_of_processes_that_makes_no_sense(processes: Any) -> None:
    with pytest.raises(LaunchError, match="must be a whole number"):
        Data(Numbers(), processes=processes)


def shuffled_halves(epoch: int) -> list[int]:
    """One half of the data set, and the other in the next epoch."""
    return [2 * one + epoch % 2 for one in torch.randperm(5)]


def test_the_users_own_order() -> None:
    """The same for the same seed and epoch whatever was drawn before; what is drawn after is as it was."""
    data = Data(Numbers(), order=shuffled_halves)
    drawn = []
    for call in (lambda: None, lambda: drawn.append(sorted(order_of_samples(data, 0, 1)))):
        random.seed(1)
        torch.manual_seed(1)
        call()
        drawn.append((random.random(), torch.rand(()).item()))
    assert drawn[1] == [1, 3, 5, 7, 9]
    assert drawn[0] == drawn[2]
    sizes = minibatch_sizes(order_of_samples(data, 7, 0), 2, dynamic=True, training=True)
    assert (sizes.samples, sizes.count) == (5, 3)
    first = seen(Batches(Numbers(), sizes, 7, 2, data))
    assert first == seen(Batches(Numbers(), sizes, 7, 2, data))
    assert sorted(index for batch in first for index in batch) == [0, 2, 4, 6, 8]
    assert first not in (seen(Batches(Numbers(), sizes, 7, 0, data)), seen(Batches(Numbers(), sizes, 8, 2, data)))
    evaluated = minibatch_sizes(Numbers(), 4, dynamic=True, training=False)
    assert seen(Batches(Numbers(), evaluated, 0, 0, data))[0] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("order", "says"),
    [
        (lambda epoch: range(5 - epoch), "gives 4 samples for epoch 1, and 5 for epoch 0"),
        (lambda epoch: [0, 1, 2, 3, 10], "names sample 10 for epoch 1, but there are only 10"),
        (lambda epoch: [-1] * 5, "names sample -1"),
        (lambda epoch: None, "the data's `order` failed: TypeError"),
    ],
)
def test_an_order_that_cannot_be(order: Any, says: str) -> None:
    sizes = minibatch_sizes(range(5), 2, dynamic=True, training=True)
    with pytest.raises(LaunchError, match=says):
        Batches(Numbers(), sizes, 0, 1, Data(Numbers(), order=order))


class Slow(Numbers):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, float]:
        time.sleep(0.05)
        return super().__getitem__(index)


def test_a_request_to_stop_does_not_end_what_is_read() -> None:
    """A launcher sends it to every process that there is; the worker then still drains."""
    data = Data(Slow(), processes=2)
    batches = Batches(data.train, minibatch_sizes(data.train, 1, dynamic=True, training=False), 0, 0, data)
    with batches.prefetch(range(8)):
        batches.load(0)
        for reader in multiprocessing.active_children():
            for request in (signal.SIGTERM, signal.SIGINT):
                os.kill(reader.pid, request)
        assert [int(batches.load(minibatch).inputs[0][0, 0]) for minibatch in range(1, 8)] == list(range(1, 8))


def test_what_is_not_asked_for_is_not_read() -> None:
    images, labels = torch.arange(12.0).view(6, 2), torch.arange(6)
    sizes = minibatch_sizes(TensorDataset(images, labels), 4, dynamic=True, training=True)
    batches = Batches(TensorDataset(images, labels), sizes, 1, 0)
    whole = batches.load(1)
    assert batches.load(1, inputs=False).inputs == ()
    assert batches.load(1, target=False).target is None
    assert torch.equal(batches.load(1, inputs=False).target, whole.target)
    assert torch.equal(batches.load(1, target=False).inputs[0], whole.inputs[0])
