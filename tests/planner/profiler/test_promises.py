"""What a pipeline promises and a job may break, found on one minibatch."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from odd_jobs import REFUSED, REMARKED, SOUND

from pipeplan.profiler.remarks import promise_remarks
from pipeplan_launch import Job
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.tracing.trace import trace_job


def remarks(make: Callable[[], Job]) -> list[str]:
    torch.manual_seed(0)
    job = make()
    return promise_remarks(job, trace_job(job, 16), job.example_batch(16))


@pytest.mark.parametrize("name", REFUSED)
def test_hidden_state_is_refused(name: str) -> None:
    make, says = REFUSED[name]
    with pytest.raises(LaunchError, match=says):
        remarks(make)


@pytest.mark.parametrize("name", SOUND)
def test_about_sound_jobs_nothing_is_said(name: str) -> None:
    assert remarks(SOUND[name]) == []


@pytest.mark.parametrize("name", REMARKED)
def test_what_one_process_would_do_otherwise_is_said(name: str) -> None:
    make, says = REMARKED[name]
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
