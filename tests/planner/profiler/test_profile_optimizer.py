"""What a job's optimiser keeps, also where it wants to know its stage."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from pipeplan.profiler.optimizer_step import optimizer_state
from pipeplan_launch import Job, StageInfo
from pipeplan_launch.errors import LaunchError


def job(optimizer) -> Job:
    return Job(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)), inputs=lambda n: torch.ones(n, 3), optimizer=optimizer)


def by_name(parameters, stage: StageInfo) -> AdamW:
    decayed = [one for name, one in stage.named_parameters if name.endswith("weight")]
    others = [one for name, one in stage.named_parameters if not name.endswith("weight")]
    return AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=1e-3)


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (by_name, ("AdamW", 2.0)),
        (lambda parameters, stage: SGD(parameters, lr=0.1 * stage.minibatches_per_update), ("SGD", 0.0)),
        (lambda parameters: SGD(parameters, lr=0.1, momentum=0.9), ("SGD", 1.0)),
        (AdamW, ("AdamW", 2.0)),
    ],
)
def test_bytes_of_state(optimizer, expected: tuple[str, float]) -> None:
    assert optimizer_state(job(optimizer)) == expected


def test_an_optimiser_that_fails_is_one_line() -> None:
    with pytest.raises(LaunchError, match=r"the job's optimizer failed: KeyError.*test_profile_optimizer\.py"):
        optimizer_state(job(lambda parameters: {}["lr"]))
