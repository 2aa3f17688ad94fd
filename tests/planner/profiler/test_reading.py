"""What a worker takes to read the samples of a minibatch, measured with the job's own data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from pipeplan.profile_data.layers import Layer
from pipeplan.profile_data.profile import Profile
from pipeplan.profiler import job_checks
from pipeplan.profiler.clock import CPUClock
from pipeplan.profiler.job_checks import reading_s
from pipeplan.profiler.options import ProfilerOptions
from pipeplan.profiler.profiler import profile_model
from pipeplan_launch.job.job import Data, Job

FAILING = """
import torch
from torch import nn
from pipeplan_launch import Data, Job

class Damaged(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        if index == 7:
            raise OSError("sample 7 is damaged")
        return torch.zeros(3), torch.zeros(2)

def build():
    return Job(nn.Linear(3, 2), loss=nn.functional.mse_loss, data=lambda: Data(Damaged()), minibatch=4)
"""


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


class Ticks:
    """A clock by which a sample takes a second to read."""

    how = "samples"

    def __init__(self, data: Counted) -> None:
        self.data = data

    def measure(self, call: Callable[[], None]) -> Callable[[], float]:
        before = len(self.data.read)
        call()
        taken = float(len(self.data.read) - before)
        return lambda: taken

    def settle(self) -> None:
        """Nothing is under way."""


def job_of(data: Data) -> Job:
    return Job(nn.Linear(1, 1), data=lambda: data)


def test_whole_minibatches_of_shuffled_samples_are_read() -> None:
    data, evictions = Counted(40), []
    assert reading_s(job_of(Data(data)), 8, Ticks(data), lambda: evictions.append(len(data.read))) == 8.0
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
    assert reading_s(job_of(Data(data)), 4, Ticks(data), lambda: None) == 4.0
    assert len(data.read) == 4


def test_a_sample_that_fails_is_remarked_and_the_model_measured(tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    path.write_text(FAILING)
    options = ProfilerOptions(repeats=1, warmup=1, halvings=0, load=False)
    found = profile_model(f"{path}:build", options)
    assert found.read_s == 0
    (said,) = [note for note in found.provenance.notes if "reading samples was not measured" in note]
    assert "sample 7 is damaged" in said


def test_reading_a_larger_minibatch_takes_longer() -> None:
    profile = Profile((Layer("l", 1.0, 1.0, 4, 4),), (), 8, read_s=0.5)
    assert profile.rescaled(24).read_s == pytest.approx(1.5)
    assert replace(profile, read_s=0.0).to_json().get("read_s") is None
