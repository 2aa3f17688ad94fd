"""The figures on learning: stale gradients follow their formula, and limits settle."""

from __future__ import annotations

import math

import pytest
import torch
from delays import Stage
from learning import DELAYS, limit
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


def test_a_stage_applies_the_formula() -> None:
    for age in (0, 1, 2, 5):
        for corrected in (False, True):
            xs, steps = [1.0], list[float]()
            for update in range(12):
                steps.append(-0.25 * xs[max(0, update - age)])
                correction = steps[-1] - steps[-1 - age] if corrected and age and update >= age else 0.0
                xs.append(xs[-1] + steps[-1] + correction)
            assert iterate(age, corrected, 12) == pytest.approx(xs[1:], rel=1e-12)


def settles(step: float, delay: int, momentum: float) -> bool:
    """Whether SGD on x²/2 with stale gradients comes to its lowest point, or goes ever farther away."""
    xs, velocity = [1.0] * (delay + 1), 0.0
    for _ in range(10_000):
        velocity = momentum * velocity + xs[-1 - delay]
        xs.append(xs[-1] - step * velocity)
        size = max(abs(x) for x in xs[-50:])
        if not 1e-6 < size < 1e6:
            return size <= 1e-6
    raise AssertionError("neither")


def test_limits_are_the_published_ones_and_sgd_settles_below_them() -> None:
    for delay in DELAYS:
        assert limit(delay, 0.0) == pytest.approx(2 * math.sin(math.pi / (4 * delay + 2)), rel=1e-6)
    for delay in (0, 1, 2, 4):
        for momentum in (0.0, 0.5, 0.9):
            edge = limit(delay, momentum)
            assert settles(0.9 * edge, delay, momentum)
            assert not settles(1.1 * edge, delay, momentum)
