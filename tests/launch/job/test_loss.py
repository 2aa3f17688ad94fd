"""The loss of a job: its value and name, its weight in means, and its own parameters and buffers."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import state_jobs
import torch
from feature_workers import cut_before, run, traced
from state_jobs import CLASSES, Centres, Net
from torch import Tensor, nn

from pipeplan_launch import Job, load_job
from pipeplan_launch.comm.gradient_exchange import choose_exchange
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.loss import checked_loss, loss_number, loss_state, loss_text, weight_of
from pipeplan_launch.plan.run_options import Compression, GradientAveraging


def test_a_loss_has_the_name_that_its_author_gave_it() -> None:
    def own(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return output.sum() + target.sum()

    assert loss_text(nn.functional.cross_entropy) == "the job's loss (cross_entropy)"
    assert loss_text(nn.MSELoss()) == "the job's loss (MSELoss)"
    assert loss_text(own) == "the job's loss (own)"
    assert loss_text(functools.partial(own, target=torch.zeros(1))) == "the job's loss (own)"
    line = own.__code__.co_firstlineno + 8
    assert loss_text(lambda output, target: output) == f"the job's loss (lambda of {__file__}:{line})"


def test_a_loss_is_one_real_number() -> None:
    for value, found in (
        (torch.zeros(8), "one of shape (8,): take the mean, as with reduction='mean'"),
        (torch.zeros(0), "one of shape (0,)"),
        (torch.zeros((), dtype=torch.complex64), "torch.complex64"),
        ((torch.zeros(()), 1), "a value of type tuple"),
        (None, "a value of type NoneType"),
    ):
        for check in (checked_loss, loss_number):
            with pytest.raises(LaunchError) as caught:
                check(nn.MSELoss(), value)
            assert str(caught.value).endswith(f"the mean over the minibatch, not {found}")
    assert loss_number(nn.MSELoss(), torch.tensor([3.0])) == 3.0
    assert loss_number(nn.MSELoss(), 2) == 2.0, "nothing is trained"
    with pytest.raises(LaunchError, match="not a value of type float"):
        checked_loss(nn.MSELoss(), 2.0)


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


def test_where_tensors_are_found() -> None:
    for loss, names in (
        (nn.functional.cross_entropy, []),
        (nn.CrossEntropyLoss(), []),
        (nn.CrossEntropyLoss(torch.ones(CLASSES)), ["loss.weight"]),
        (Centres(), OWN),
        (by_a_helper, OWN),
        (lambda output, target: by_a_helper(output, target), OWN),
        (state_jobs.Plain(), OWN),
        (None, []),
    ):
        assert names_of(loss) == names
    several = names_of(two_of_one_name())
    assert len(several) == len(set(several)) == 6
    assert all(name.startswith("loss.") for name in several)
    model = Net()
    assert names_of(Around(model), model) == ["loss.scale"], "the model's own tensors are not the loss's"
    assert names_of(model.judge, model) == []
    assert names_of(model, model) == []


def test_a_tensor_of_the_same_name_is_refused() -> None:
    model = nn.Module()
    model.loss = Centres()
    with pytest.raises(LaunchError, match=r"both the model and the job's loss have a tensor .* 'loss.centres': rename"):
        loss_state(Centres(), model)


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


def test_losses_are_reported_as_means_over_valid_targets(tmp_path: Path) -> None:
    """Of both replicas together, as on the whole data at once; the weights do not change."""
    reference = f"{state_jobs.__file__}:padded"
    plan = {"schedule": "1f1b-flush", "accumulate": 2}
    folder = run(tmp_path, reference, cut_before(traced(reference), "last"), [1, 2], "--epochs", "1", **plan)
    job = load_job(reference, 0)
    (epoch,) = json.loads((folder / "summary.json").read_text())["epochs"]
    for name, samples in (("loss", job.datasets.train), ("test_loss", job.datasets.test)):
        assert job.loss is not None
        inputs, target = samples.tensors  # type: ignore[union-attr]
        assert epoch[name] == pytest.approx(job.loss(job.model(inputs), target).item(), rel=1e-12), name
    lines = [json.loads(line) for path in folder.glob("metrics/*.jsonl") for line in path.read_text().splitlines()]
    losses = [line["loss"] for line in lines if line.get("loss") is not None]
    assert losses.count(0.0) == 1, "one minibatch has no valid target"
    assert len(losses) == 7


def test_a_weight_is_a_number_of_at_least_0() -> None:
    for returned in (2, 0, 1.5, torch.tensor(2), torch.tensor([1.5]), torch.tensor(True)):
        assert weight_of(lambda _, value=returned: value, None) == float(returned)
    for returned, says in (
        (torch.ones(2), r"must return one number, such as a count of targets, not a tensor of shape \(2,\)"),
        ("3", "must return one number, .*, not str"),
        (-1, "must return a number of at least 0, not -1"),
        (torch.tensor(float("nan")), "must return a number of at least 0, not nan"),
    ):
        with pytest.raises(LaunchError, match=f"the job's loss_weight {says}"):
            weight_of(lambda _, value=returned: value, torch.ones(3))
    with pytest.raises(LaunchError, match="a job's loss_weight must be a function of the target: write loss_weight="):
        Job(torch.nn.Linear(2, 2), inputs=lambda n: torch.ones(n, 2), loss_weight=3)  # type: ignore[arg-type]


def test_an_exchange_that_holds_gradients_back_is_refused() -> None:
    given: Any = object()
    for averaging, option in (
        (GradientAveraging(compression=Compression("powersgd")), "--compress powersgd"),
        (GradientAveraging(significance=0.01), "--significance"),
    ):
        with pytest.raises(LaunchError, match=f"{option} holds parts of gradients back .* loss_weight: run with --com"):
            choose_exchange(averaging, given, 0, 0, given, given, weighted=True)
