"""The emulation of stale gradients applies the formula: by hand, on a parabola."""

from __future__ import annotations

import pytest
import torch
from delays import Stage
from torch import nn
from torch.optim import SGD


def iterate(age: int, corrected: bool, updates: int, rate: float = 0.25) -> list[float]:
    """x after each update of x ← x − rate · x(t − age), corrected or not; before a stale x exists, the first one."""
    parameter = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    stage = Stage([parameter], SGD([parameter], lr=rate), age, 1)
    values = []
    for _ in range(updates):
        stage.use_stale()
        (parameter.square().sum() / 2).backward()
        stage.after_minibatch(last=False, corrected=corrected, fresh=False)
        values.append(float(parameter.detach()))
    return values


@pytest.mark.parametrize("age", [0, 1, 2, 5])
@pytest.mark.parametrize("corrected", [False, True])
def test_a_stage_applies_the_formula(age: int, corrected: bool) -> None:
    xs, steps = [1.0], list[float]()
    for update in range(12):
        steps.append(-0.25 * xs[max(0, update - age)])
        correction = steps[-1] - steps[-1 - age] if corrected and age and update >= age else 0.0
        xs.append(xs[-1] + steps[-1] + correction)
    assert iterate(age, corrected, 12) == pytest.approx(xs[1:], rel=1e-12)


def test_a_group_averages_its_minibatches() -> None:
    parameter = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    stage = Stage([parameter], SGD([parameter], lr=0.5), 0, 2)
    for scale in (1.0, 3.0):
        stage.use_stale()
        (scale * parameter).sum().backward()
        stage.after_minibatch(last=False, corrected=False, fresh=False)
    assert float(parameter.detach()) == 0.0
