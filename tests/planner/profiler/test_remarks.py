"""Remarks of a profile on the job and its layers, and what a worker takes to read the samples of a minibatch."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from long_chains import Ticks
from state_jobs import REFUSED, REMARKED, SOUND
from torch import Tensor, nn
from torch.utils.data import Dataset

from pipeplan.profile_data.layers import Layer, Size
from pipeplan.profile_data.profile import Profile
from pipeplan.profiler import job_checks
from pipeplan.profiler.clock import CPUClock
from pipeplan.profiler.job_checks import reading_s
from pipeplan.profiler.remarks import layer_sum_remarks, promise_remarks, tie_remarks, unread_parameter_remarks
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.job import Data, Job
from pipeplan_launch.tracing.trace import trace_job


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.unused(x)
        return self.used(x)


class Tied(nn.Module):
    """An embedding whose weight is that of the last layer, around another layer."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.words, self.middle, self.head = nn.Embedding(5, 2), nn.Linear(2, 2), nn.Linear(2, 5, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.middle(self.words(ids)).relu())


def test_parameters_that_no_output_depends_on_are_named_and_layers_that_do_not_add_up() -> None:
    def unread(model: nn.Module) -> list[str]:
        return unread_parameter_remarks(trace_job(Job(model, inputs=lambda n: torch.randn(n, 2)), 3))

    (said,) = unread(Half())
    assert said.endswith("unused.weight, unused.bias")
    assert not unread(nn.Linear(2, 2))
    layers = (Layer("a", 0.25, 0.5, 0, 0), Layer("b", 0.75, 1.5, 0, 0))
    for whole, says in (
        ((), []),
        ((1.0, 2.0), []),
        ((0.8, 2.0), ["1.25 of it forward"]),
        ((1.0, 2.5), ["0.80 of it backward"]),
    ):
        found = layer_sum_remarks(Size(1, layers, (), *whole))
        assert len(found) == len(says)
        assert all(part in found[0] for part in says)


def test_tied_weights_are_named_with_what_they_mean_for_cuts() -> None:
    def ties(*, tied: bool) -> list[str]:
        return tie_remarks(trace_job(Job(Tied(tied=tied), inputs=lambda n: torch.zeros(n, 3, dtype=torch.long)), 3))

    assert ties(tied=False) == []
    (said,) = ties(tied=True)
    assert said == (
        "'words' and 'head' have the weights words.weight = head.weight in common and stay in one stage with the "
        "2 layers between them; 1 layer can be in other stages; under a synchronous schedule (1f1b-flush, "
        "gpipe) they may be in several stages, each with a copy of the weights"
    )


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


class Counted(Dataset[Any]):
    """Samples that note when they are read."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.read.append(index)
        return torch.zeros(1), torch.zeros(())


def ticks(data: Counted) -> Ticks:
    """A clock by which a sample takes a second to read."""
    return Ticks(lambda: len(data.read))


def job_of(data: Data) -> Job:
    return Job(nn.Linear(1, 1), data=lambda: data)


def test_whole_minibatches_of_shuffled_samples_are_read_but_slow_data_not_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data, evictions = Counted(40), []
    assert reading_s(job_of(Data(data)), 8, ticks(data), lambda: evictions.append(len(data.read))) == 8.0
    assert len(data.read) == 8 * len(evictions)
    assert evictions == sorted(evictions)
    assert sorted(data.read[:40]) == list(range(40)) != data.read[:40]
    monkeypatch.setattr(job_checks, "MOST_S", 0.0)
    data = Counted(12)
    assert reading_s(job_of(Data(data)), 4, ticks(data), lambda: None) == len(data.read) == 4


def test_nothing_is_charged_where_the_worker_reads_nothing_and_more_for_a_larger_minibatch() -> None:
    bare = Job(nn.Linear(1, 1), inputs=lambda count: torch.zeros(count, 1))
    for job in (bare, job_of(Data(Counted(40), processes=2)), job_of(Data(Counted(3)))):
        assert reading_s(job, 8, CPUClock(1), lambda: None) == 0.0
    profile = Profile((Layer("l", 1.0, 1.0, 4, 4),), (), 8, read_s=0.5)
    assert profile.rescaled(24).read_s == pytest.approx(1.5)
    assert replace(profile, read_s=0.0).to_json().get("read_s") is None
