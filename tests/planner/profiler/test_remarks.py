"""Remarks of a profile: properties that a job may lack, and a model that is not all in its layers."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from state_jobs import REFUSED, REMARKED, SOUND
from torch import Tensor, nn

from pipeplan.profile_data.layers import Layer, Size
from pipeplan.profiler.remarks import layer_sum_remarks, promise_remarks, tie_remarks, unread_parameter_remarks
from pipeplan_launch import Job
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.tracing.trace import trace_job


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.unused(x)
        return self.used(x)


def test_parameters_that_no_output_depends_on_are_named() -> None:
    def remarks(model: nn.Module) -> list[str]:
        return unread_parameter_remarks(trace_job(Job(model, inputs=lambda n: torch.randn(n, 2)), 3))

    (said,) = remarks(Half())
    assert said.endswith("unused.weight, unused.bias")
    assert not remarks(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("whole", "says"), [((1.0, 2.0), []), ((0.8, 2.0), ["1.25 of it forward"]), ((1.0, 2.5), ["0.80 of it backward"])]
)
def test_layers_that_do_not_add_up(whole: tuple[float, float], says: list[str]) -> None:
    layers = (Layer("a", 0.25, 0.5, 0, 0), Layer("b", 0.75, 1.5, 0, 0))
    said = layer_sum_remarks(Size(1, layers, (), *whole))
    assert len(said) == len(says)
    assert all(part in said[0] for part in says)
    assert not layer_sum_remarks(Size(1, layers, ()))


class Tied(nn.Module):
    """An embedding whose weight is that of the last layer, around another layer."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.words, self.middle, self.head = nn.Embedding(5, 2), nn.Linear(2, 2), nn.Linear(2, 5, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.middle(self.words(ids)).relu())


def test_tied_weights_are_named_with_what_they_mean_for_cuts() -> None:
    def remarks(*, tied: bool) -> list[str]:
        return tie_remarks(trace_job(Job(Tied(tied=tied), inputs=lambda n: torch.zeros(n, 3, dtype=torch.long)), 3))

    (said,) = remarks(tied=True)
    assert said == (
        "'words' and 'head' have the weights words.weight = head.weight in common and stay in one stage with the "
        "2 layers between them; 1 layer can be in other stages; under a synchronous schedule (1f1b-flush, "
        "gpipe) they may be in several stages, each with a copy of the weights"
    )
    assert not remarks(tied=False)


def remarks(make: Callable[[], Job]) -> list[str]:
    torch.manual_seed(0)
    job = make()
    return promise_remarks(job, trace_job(job, 16), job.example_batch(16))


def test_what_one_process_would_do_otherwise_is_refused_or_said() -> None:
    for make, says in REFUSED.values():
        with pytest.raises(LaunchError, match=says):
            remarks(make)
    for name, make in SOUND.items():
        assert remarks(make) == [], name
    for make, says in REMARKED.values():
        (remark,) = remarks(make)
        assert re.search(says, remark)


def test_the_model_and_the_generators_are_left_as_they_were() -> None:
    job = SOUND["plain"]()
    job.model.last = torch.nn.Sequential(torch.nn.BatchNorm1d(8), torch.nn.Dropout(), torch.nn.Linear(8, 3))
    traced, batch = trace_job(job, 16), job.example_batch(16)
    before = {name: value.clone() for name, value in job.model.state_dict().items()}
    random = torch.get_rng_state()
    promise_remarks(job, traced, batch)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in job.model.state_dict().items())
