"""Which tensors belong to a job's loss, and what a call of it does to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import state_jobs
import torch
from odd_jobs import Net, free_parameter
from state_jobs import CLASSES, Centres
from torch import Tensor, nn

from pipeplan_launch import Job
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.loss import loss_state

CRITERION = Centres()


def by_a_helper(output: Tensor, target: Tensor) -> Tensor:
    return CRITERION(output, target)


class Around(nn.Module):
    """A loss that holds the model as well."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.scale = model, nn.Parameter(torch.ones(CLASSES))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return (output * self.scale).mean()


def names_of(loss: Any, model: nn.Module | None = None) -> list[str]:
    state = loss_state(loss, model or Net())
    return [] if state is None else [*state.parameters(), *state.buffers()]


OWN = ["loss.centres", "loss.mean", "loss.calls"]


def two_of_one_name() -> Callable[[Tensor, Tensor], Tensor]:
    inner = [Centres()]
    criterion = Centres()
    later = lambda output, target: inner[0](output, target)  # noqa: E731
    return lambda output, target: criterion(output, target) + later(output, target)


@pytest.mark.parametrize(
    ("loss", "names"),
    [
        (nn.functional.cross_entropy, []),
        (nn.CrossEntropyLoss(), []),
        (nn.CrossEntropyLoss(torch.ones(CLASSES)), ["loss.weight"]),
        (Centres(), OWN),
        (by_a_helper, OWN),
        (lambda output, target: by_a_helper(output, target), OWN),
        (state_jobs.Plain(), OWN),
        (None, []),
    ],
)
def test_where_tensors_are_found(loss: Any, names: list[str]) -> None:
    assert names_of(loss) == names


def test_several_modules_have_names_of_their_own() -> None:
    names = names_of(two_of_one_name())
    assert len(names) == len(set(names)) == 6
    assert all(name.startswith("loss.") for name in names)


def test_the_models_own_tensors_are_not_the_losss() -> None:
    model = Net()
    assert names_of(Around(model), model) == ["loss.scale"]
    assert names_of(model.judge, model) == []
    assert names_of(model, model) == []


def test_a_tensor_of_the_same_name_is_refused() -> None:
    model = nn.Module()
    model.loss = Centres()
    with pytest.raises(LaunchError, match=r"both the model and the job's loss have a tensor .* 'loss.centres': rename"):
        loss_state(Centres(), model)


def test_a_trained_tensor_in_no_module_is_refused() -> None:
    job = free_parameter()
    with pytest.raises(LaunchError, match="uses a tensor that is to be trained, 'scale', and that is in no module"):
        loss_state(job.loss, job.model)


def test_a_call_takes_other_tensors_and_leaves_its_own() -> None:
    centres = Centres()
    state = loss_state(centres, Net())
    assert state is not None
    output, target = torch.randn(4, CLASSES, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    before = {name: value.clone() for name, value in centres.state_dict().items()}
    weights = {"loss.centres": torch.zeros(CLASSES, CLASSES, dtype=torch.float64, requires_grad=True)}
    other = state.call({**weights, **{n: b.clone() for n, b in state.buffers().items()}}, output, target)
    other.backward()
    assert weights["loss.centres"].grad is not None
    assert centres.centres.grad is None
    assert all(torch.equal(value, before[name]) for name, value in centres.state_dict().items())
    state.evaluate(output, target)
    assert all(torch.equal(value, before[name]) for name, value in centres.state_dict().items())
    assert centres.training
    state.call(weights, output, target)
    assert int(state.buffers()["loss.calls"]) == 1, "in training the loss writes to its buffers"


def test_a_worker_without_the_loss_frees_its_memory() -> None:
    model = Net()
    own, around = Centres(), Around(model)
    for loss in (own, around):
        state = loss_state(loss, model)
        assert state is not None
        state.release()
    assert all(one.is_meta for one in (own.centres, own.mean, own.calls))
    assert not any(parameter.is_meta for parameter in around.parameters()), "the model may still be in use"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (torch.optim.LBFGS, "cannot be LBFGS, whose step calls a closure"),
        (torch.optim.SparseAdam, "cannot be SparseAdam, because gradients between replicas are dense"),
    ],
)
def test_optimisers_that_no_stage_can_step_are_refused(make: Any, says: str) -> None:
    job = Job(nn.Linear(2, 2), inputs=lambda n: torch.ones(n, 2), optimizer=make)
    with pytest.raises(LaunchError, match=says):
        job.make_optimizer([nn.Parameter(torch.ones(2))])
