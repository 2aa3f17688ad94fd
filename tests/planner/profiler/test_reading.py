"""What a worker takes to read the samples of a minibatch, measured with the job's own data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from long_chains import Ticks
from torch import nn
from torch.utils.data import Dataset

from pipeplan.profile_data.layers import Layer
from pipeplan.profile_data.profile import Profile
from pipeplan.profiler import job_checks
from pipeplan.profiler.clock import CPUClock
from pipeplan.profiler.job_checks import reading_s
from pipeplan_launch.job.job import Data, Job


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


def test_whole_minibatches_of_shuffled_samples_are_read() -> None:
    data, evictions = Counted(40), []
    assert reading_s(job_of(Data(data)), 8, ticks(data), lambda: evictions.append(len(data.read))) == 8.0
    assert len(data.read) == 8 * len(evictions)
    assert evictions == sorted(evictions)
    assert sorted(data.read[:40]) == list(range(40)) != data.read[:40]


@pytest.mark.parametrize("data", [None, Data(Counted(40), processes=2), Data(Counted(3))])
def test_nothing_is_charged_where_the_worker_reads_nothing(data: Data | None) -> None:
    job = Job(nn.Linear(1, 1), inputs=lambda count: torch.zeros(count, 1)) if data is None else job_of(data)
    assert reading_s(job, 8, CPUClock(1), lambda: None) == 0.0


def test_slow_data_is_not_read_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_checks, "MOST_S", 0.0)
    data = Counted(12)
    assert reading_s(job_of(Data(data)), 4, ticks(data), lambda: None) == 4.0
    assert len(data.read) == 4


def test_reading_a_larger_minibatch_takes_longer() -> None:
    profile = Profile((Layer("l", 1.0, 1.0, 4, 4),), (), 8, read_s=0.5)
    assert profile.rescaled(24).read_s == pytest.approx(1.5)
    assert replace(profile, read_s=0.0).to_json().get("read_s") is None
