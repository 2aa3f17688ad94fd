"""Which samples make which minibatch: every sample once, the same for every worker and at every reading."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset, default_collate

from pipeplan_launch import Data, Job
from pipeplan_launch.elastic.consistency_check import Fingerprint, check_agreement
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.runtime import data as reading
from pipeplan_launch.runtime.data import Batches, data_fingerprint, minibatch_fingerprint, minibatch_sizes


class Samples(Dataset[Any]):
    """Samples of which a function gives the value, and whose target is a random number as augmentation draws it."""

    def __init__(self, value: Callable[[int], Any] = float, count: int = 10) -> None:
        self.value, self.count = value, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([self.value(index), torch.rand(()).item()]), random.random()


def seen(batches: Batches) -> list[list[int]]:
    return [batches.load(i).inputs[0][:, 0].int().tolist() for i in range(batches.sizes.count)]


def ahead(batches: Batches, wanted: list[int]) -> list[Any]:
    with batches.prefetch(wanted):
        return [batches.load(minibatch) for minibatch in wanted]


def test_every_sample_once_in_an_order_of_the_epoch() -> None:
    sizes = minibatch_sizes(Samples(), 4, dynamic=True, training=True)
    first, again, second = (seen(Batches(Samples(), sizes, 1, epoch)) for epoch in (0, 0, 1))
    assert [len(batch) for batch in first] == [4, 4, 2]
    assert sorted(itertools.chain(*first)) == list(range(10))
    assert first == again
    assert first not in (second, seen(Batches(Samples(), sizes, 2, 0)))
    assert sizes.note is None


def test_a_fixed_size_drops_the_rest_in_training_and_fills_it_up_in_evaluation() -> None:
    sizes = minibatch_sizes(Samples(), 4, dynamic=False, training=True)
    assert (sizes.count, sizes.padded_samples(1), sizes.real_samples(1)) == (2, 4, 4)
    assert "the last 2 of 10 samples are left out" in (sizes.note or "")
    sizes = minibatch_sizes(Samples(), 4, dynamic=False, training=False)
    assert (sizes.count, sizes.padded_samples(2), sizes.real_samples(2)) == (3, 4, 2)
    assert seen(Batches(Samples(), sizes, 0, 0))[2] == [8, 9, 9, 9]
    assert minibatch_sizes(Samples(), 4, dynamic=True, training=True, limit=1).count == 1


def test_tensors_are_read_as_samples_would_be_and_only_where_they_are_asked_for() -> None:
    data = TensorDataset(torch.arange(10.0)[:, None], torch.arange(10))
    batches = Batches(data, minibatch_sizes(data, 3, dynamic=True, training=True), 4, 2)
    for minibatch in range(4):
        batch, bare = batches.load(minibatch), batches.load(minibatch, inputs=False)
        untold = batches.load(minibatch, target=False)
        assert torch.equal(batch.inputs[0][:, 0].long(), batch.target)
        assert (bare.inputs, untold.target) == ((), None)
        assert torch.equal(bare.target, batch.target)
        assert torch.equal(untold.inputs[0], batch.inputs[0])


def test_reading_ahead_reads_the_same() -> None:
    """Random augmentation too, whichever process reads; the order of random numbers here stays as it was."""
    sizes = minibatch_sizes(Samples(), 3, dynamic=True, training=True)
    plain, several = (Batches(Samples(), sizes, 1, 0, Data(Samples(), processes=count)) for count in (0, 2))
    torch.manual_seed(3)
    with several.prefetch([0, 2, 3]):
        drawn = torch.rand(2)
        given = [several.load(minibatch) for minibatch in (0, 2, 2, 1, 3)]
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(2))
    for one, other in zip(given, map(plain.load, (0, 2, 2, 1, 3)), strict=True):
        assert torch.equal(one.inputs[0], other.inputs[0])
        assert torch.equal(one.target, other.target)
    assert not multiprocessing.active_children()


def raise_key_error(index: int) -> Any:
    raise KeyError("no such picture")


def test_what_fails_while_reading_ahead_is_one_line() -> None:
    data = Data(Samples(raise_key_error), processes=1)
    batches = Batches(data.train, minibatch_sizes(data.train, 4, dynamic=True, training=True), 0, 0, data)
    says = r"the job's data for minibatch 1 failed: KeyError: 'no such picture' \(.*test_data\.py:.*raise KeyError"
    with pytest.raises(LaunchError, match=says) as caught:
        ahead(batches, [1])
    assert "\n" not in str(caught.value)


def padded(samples: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    words = torch.nn.utils.rnn.pad_sequence([torch.ones(sample + 1) for sample in samples], batch_first=True)
    return words, torch.tensor(samples) % 2


def test_the_users_own_collate() -> None:
    """Of samples with different lengths."""
    samples: Any = list(range(6))
    for processes in (0, 1):
        data = Data(samples, collate=padded, processes=processes)
        sizes = minibatch_sizes(samples, 4, dynamic=True, training=False)
        first, second = ahead(Batches(samples, sizes, 0, 0, data), [0, 1])
        assert first.inputs[0].tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
        assert second.target.tolist() == [0, 1]
        with pytest.raises(LaunchError, match="the data's `collate` must return a pair"):
            ahead(Batches(samples, sizes, 0, 0, Data(samples, collate=len, processes=processes)), [0])
    job = Job(torch.nn.Identity(), data=lambda: Data(samples, collate=padded))
    assert torch.equal(job.example_inputs(4)[0], first.inputs[0])


def test_the_users_own_order() -> None:
    """The same for the same seed and epoch whatever was drawn before; what is drawn after is as it was."""
    # One half of the data set, and the other in the next epoch.
    data = Data(Samples(), order=lambda epoch: [2 * one + epoch % 2 for one in torch.randperm(5)])
    drawn = []
    for call in (lambda: None, lambda: drawn.append(sorted(reading.order_of_samples(data, 0, 1)))):
        random.seed(1)
        torch.manual_seed(1)
        call()
        drawn.append((random.random(), torch.rand(()).item()))
    assert drawn[1] == [1, 3, 5, 7, 9]
    assert drawn[0] == drawn[2]
    sizes = minibatch_sizes(reading.order_of_samples(data, 7, 0), 2, dynamic=True, training=True)
    assert (sizes.samples, sizes.count) == (5, 3)
    first, again, other_epoch, other_seed = (
        seen(Batches(Samples(), sizes, seed, epoch, data)) for seed, epoch in ((7, 2), (7, 2), (7, 0), (8, 2))
    )
    assert first == again
    assert sorted(itertools.chain(*first)) == [0, 2, 4, 6, 8]
    assert first not in (other_epoch, other_seed)
    evaluated = minibatch_sizes(Samples(), 4, dynamic=True, training=False)
    assert seen(Batches(Samples(), evaluated, 0, 0, data))[0] == [0, 1, 2, 3]


def test_what_cannot_be_is_refused() -> None:
    sizes = minibatch_sizes(range(5), 2, dynamic=True, training=True)
    orders: list[tuple[Any, str]] = [
        (lambda epoch: range(5 - epoch), "gives 4 samples for epoch 1, and 5 for epoch 0"),
        (lambda epoch: [0, 1, 2, 3, 10], "names sample 10 for epoch 1, but there are only 10"),
        (lambda epoch: [-1] * 5, "names sample -1"),
        (lambda epoch: None, "the data's `order` failed: TypeError"),
    ]
    for call, says in (
        (lambda: minibatch_sizes(Samples(), 16, dynamic=False, training=True), "10 samples, too few for one minibatch"),
        (lambda: minibatch_sizes(iter([]), 4, dynamic=True, training=True), "map-style"),
        *((partial(Data, Samples(), processes=one), "must be a whole number") for one in (-1, 1.5, None)),
        *((partial(Batches, Samples(), sizes, 0, 1, Data(Samples(), order=one)), says) for one, says in orders),
    ):
        with pytest.raises(LaunchError, match=says):
            call()


def slow(index: int) -> float:
    time.sleep(0.05)
    return float(index)


def test_a_request_to_stop_does_not_end_what_is_read() -> None:
    """A launcher sends it to every process that there is; the worker then still drains."""
    data = Data(Samples(slow), processes=2)
    batches = Batches(data.train, minibatch_sizes(data.train, 1, dynamic=True, training=False), 0, 0, data)
    with batches.prefetch(range(8)):
        batches.load(0)
        for reader in multiprocessing.active_children():
            for request in (signal.SIGTERM, signal.SIGINT):
                os.kill(reader.pid, request)
        assert [int(batches.load(minibatch).inputs[0][0, 0]) for minibatch in range(1, 8)] == list(range(1, 8))


SIZES = reading.MinibatchSizes(16, 4, dynamic=True, training=True)


def test_data_that_differs_at_each_reading_is_refused() -> None:
    """Also a sample that is random now and then, a collate with random numbers of its own, and another process."""
    own, torchs, count, stored = random.Random(0), torch.Generator(), itertools.count(), torch.zeros(16)
    for value in (
        lambda index: torch.rand((), generator=torchs).item(),
        lambda index: numpy.random.default_rng().random(),
        lambda index: float(next(count)),
        lambda index: stored[index].add_(1).item(),
    ):
        with pytest.raises(LaunchError, match=r"^training sample 0 differs at each reading: it may depend on its inde"):
            data_fingerprint("training", Samples(value, 16), 0)
    rare = Samples(lambda index: own.random() if index % 8 == 3 else float(index), 16)
    data_fingerprint("training", rare, 0)
    noisy = lambda samples: [default_collate(samples)[0] + own.random(), torch.zeros(4)]  # noqa: E731
    first = r"^minibatch 0 of the training data differs at each reading"
    for data, says in (
        (Data(rare, order=lambda epoch: range(16)), first),
        (Data(Samples(count=16), collate=noisy), first),
        (
            Data(Samples(lambda index: float(os.getpid()), 16), processes=1),
            "differs between a worker and the processes",
        ),
    ):
        with pytest.raises(LaunchError, match=says):
            minibatch_fingerprint("training", data.train, SIZES, data, 0)
    for order in (None, lambda epoch: random.sample(range(10), 10)):
        reading.check_order(Data(Samples(), order=order), 0)
    with pytest.raises(LaunchError, match="`order` differs each time for epoch 0: let it depend on the epoch alone"):
        reading.check_order(Data(Samples(), order=lambda epoch: own.sample(range(10), 10)), 0)


def test_random_numbers_of_the_global_generators_are_the_same_at_each_reading() -> None:
    dataset = Samples(lambda index: index + random.random() + numpy.random.rand(), 16)
    collate = lambda samples: [default_collate(samples)[0] + torch.rand(()), torch.zeros(4)]  # noqa: E731
    data = Data(dataset, collate=collate, processes=1)
    first, second = (
        [data_fingerprint("training", dataset, 0), minibatch_fingerprint("training", dataset, SIZES, data, 0)]
        for _ in range(2)
    )
    assert first == second
    assert [len(marks) for marks in first] == [4, 1]


def test_a_data_set_whose_length_changes_is_refused() -> None:
    dataset = Samples(lambda index: setattr(dataset, "count", 12) or float(index), 16)  # type: ignore[func-returns-value]
    with pytest.raises(LaunchError, match="has 16 samples at first and 12 after some were read: its length must stay"):
        data_fingerprint("training", dataset, 0)
    with pytest.raises(LaunchError, match="has 12 samples in epoch 3, and had 16 at the start"):
        Batches(dataset, SIZES, 0, 3)


def test_workers_that_kept_other_random_samples_do_not_start() -> None:
    def kept() -> Samples:
        known: dict[int, float] = {}
        return Samples(lambda index: known.setdefault(index, random.random()), 16)

    marks = [data_fingerprint("training", kept(), 0, reader) for reader in range(2)]
    with pytest.raises(LaunchError, match=r"sample 0 is not the same at ranks 0 and 1.*must not keep random samples"):
        check_agreement([Fingerprint(rank, rank, one) for rank, one in enumerate(marks)])
    mark = "minibatch 0 of the test data"
    with pytest.raises(LaunchError, match=f"{mark} is not the same at ranks 0 and 2"):
        check_agreement([Fingerprint(rank, rank, read={mark: "ab"[rank > 1]}) for rank in range(3)])
