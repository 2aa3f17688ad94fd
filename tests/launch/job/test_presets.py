"""Presets of job files: NAdam as its authors set it, and a rate that starts lower where gradients are older."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD

from pipeplan_launch import Job, StageInfo, nesterov_for_stashing, rate_by_delay
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.runtime.stage_optimizer import LearningRates


@pytest.mark.parametrize("delay", [0, 1, 2, 8])
@pytest.mark.parametrize("group", [1, 2, 4])
def test_the_rate_by_delay_is_the_published_one_whatever_an_update_covers(delay: int, group: int) -> None:
    scheduler = rate_by_delay(16)
    job = Job(nn.Linear(2, 2), inputs=lambda n: torch.ones(n, 2), scheduler=scheduler, scheduler_interval="minibatch")
    optimizer = SGD([nn.Parameter(torch.ones(2))], lr=0.3)
    rates = LearningRates(job, optimizer, StageInfo(delay=delay))
    for minibatch in range(0, 24, group):
        expected = 0.3 if delay == 0 else 0.3 / delay ** (1 - min(minibatch / 16, 1))
        assert rates.current == pytest.approx(expected, rel=1e-12)
        optimizer.step()
        rates.after_update(group)


def test_the_recipe_has_the_published_settings() -> None:
    (group,) = nesterov_for_stashing(weight_decay=0.1)([nn.Parameter(torch.ones(2))]).param_groups
    assert (group["lr"], group["betas"], group["momentum_decay"]) == (3e-4, (0.99, 0.999), 0.004)
    assert (group["decoupled_weight_decay"], group["weight_decay"]) == (True, 0.1)


@pytest.mark.parametrize("steps", [0, -1, 2.5, True, None])
def test_a_number_of_steps_that_is_none_is_refused(steps: object) -> None:
    with pytest.raises(LaunchError, match="rate_by_delay needs a number of steps of at least 1, not"):
        rate_by_delay(steps)  # type: ignore[arg-type]
