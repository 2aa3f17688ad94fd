"""What a job's loss may return, and how messages name it."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.loss import checked_loss, loss_number, loss_text


def test_a_loss_has_the_name_that_its_author_gave_it() -> None:
    def own(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return output.sum() + target.sum()

    assert loss_text(nn.functional.cross_entropy) == "the job's loss (cross_entropy)"
    assert loss_text(nn.MSELoss()) == "the job's loss (MSELoss)"
    assert loss_text(own) == "the job's loss (own)"
    assert loss_text(functools.partial(own, target=torch.zeros(1))) == "the job's loss (own)"
    line = own.__code__.co_firstlineno + 8
    assert loss_text(lambda output, target: output) == f"the job's loss (lambda of {__file__}:{line})"


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (torch.zeros(8), "one of shape (8,): take the mean, as with reduction='mean'"),
        (torch.zeros(0), "one of shape (0,)"),
        (torch.zeros((), dtype=torch.complex64), "torch.complex64"),
        ((torch.zeros(()), 1), "a value of type tuple"),
        (None, "a value of type NoneType"),
    ],
)
def test_a_loss_is_one_real_number(value: object, found: str) -> None:
    says = f"the job's loss (MSELoss) must return a tensor with one number, the mean over the minibatch, not {found}"
    for check in (checked_loss, loss_number):
        with pytest.raises(LaunchError) as caught:
            check(nn.MSELoss(), value)
        assert str(caught.value) == says


def test_a_plain_number_is_a_loss_where_nothing_is_trained() -> None:
    assert loss_number(nn.MSELoss(), 2) == 2.0
    assert loss_number(nn.MSELoss(), torch.tensor([3.0])) == 3.0
    with pytest.raises(LaunchError, match="not a value of type float"):
        checked_loss(nn.MSELoss(), 2.0)
