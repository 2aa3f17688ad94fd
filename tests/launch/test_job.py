"""What a job gives: minibatches, an optimiser, a count of what is right."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from pipeplan_launch import Data, Job
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job import collate

SAMPLES = TensorDataset(torch.arange(12.0).view(6, 2), torch.arange(6))


def job(**more) -> Job:
    return Job(nn.Linear(2, 3), **{"data": lambda: Data(SAMPLES), **more})


def test_inputs_come_from_the_data() -> None:
    assert torch.equal(job().example_inputs(4)[0], SAMPLES.tensors[0][:4])


def test_batches_repeat_a_small_data_set() -> None:
    batch = job().example_batch(8)
    assert batch.target.tolist() == [0, 1, 2, 3, 4, 5, 0, 1]


def test_data_sets_are_built_once() -> None:
    built = []
    one = job(data=lambda: built.append(1) or Data(SAMPLES))
    one.example_inputs(2)
    one.example_batch(3)
    assert built == [1]


def test_several_inputs() -> None:
    batch = collate([((torch.ones(2), torch.zeros(3)), 1), ((torch.ones(2), torch.zeros(3)), 0)])
    assert [tuple(one.shape) for one in batch.inputs] == [(2, 2), (2, 3)]
    assert batch.target.tolist() == [1, 0]


def test_no_targets_without_data() -> None:
    assert job(data=None, inputs=lambda n: torch.ones(n, 2)).example_batch(3).target is None


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: collate([torch.ones(2)]), "must be a pair"),
        (lambda: collate([({"x": torch.ones(2)}, 1)]), "must be a tensor or a tuple of tensors, not dict"),
        (lambda: job(data=lambda: Data([])).example_batch(1), "is empty"),
        (lambda: job(data=lambda: SAMPLES).datasets, "must return pipeplan_launch.Data, not TensorDataset"),
        (lambda: job(inputs=lambda n: [n]).example_inputs(1), "the job's `inputs` must be"),
        (lambda: job(optimizer=lambda p: None).make_optimizer([]), "must return a torch optimiser"),
        (lambda: job(data=None, inputs=lambda n: torch.ones(n, 2)).datasets, "has no data"),
    ],
)
def test_errors(call, says: str) -> None:
    with pytest.raises(LaunchError, match=says):
        call()


def test_default_optimizer() -> None:
    made = job().make_optimizer([nn.Parameter(torch.ones(1))])
    assert type(made) is torch.optim.SGD
    assert (made.defaults["lr"], made.defaults["momentum"]) == (0.01, 0.9)


def test_correct() -> None:
    scores = torch.tensor([[1.0, 2.0], [3.0, 0.0], [0.0, 1.0]])
    assert job().correct(scores, torch.tensor([1, 1, 1])) == 2
    assert job().correct(scores, torch.tensor([1.0, 1.0, 1.0])) is None
    assert job().correct((scores, scores), torch.tensor([1, 1, 1])) is None
    assert job(metric=lambda output, target: torch.tensor(7)).correct(scores, None) == 7


def test_correct_of_dense_targets_counts_samples() -> None:
    scores = torch.zeros(2, 3, 4)
    scores[:, 1] = 1.0
    target = torch.ones(2, 4, dtype=torch.int64)
    target[1, 2] = 0
    assert job().correct(scores, target) == 1
