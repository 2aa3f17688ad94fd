"""The figures on learning: stale gradients follow their formula, limits settle, and a goal is on a straight line."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from delays import Stage
from learning import DELAYS, limit
from time_to_goal import Curves, Results, Run
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


def test_a_group_averages_its_minibatches() -> None:
    parameter = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    stage = Stage([parameter], SGD([parameter], lr=0.5), 0, 2)
    for scale in (1.0, 3.0):
        stage.use_stale()
        (scale * parameter).sum().backward()
        stage.after_minibatch(last=False, corrected=False, fresh=False)
    assert float(parameter.detach()) == 0.0


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


def test_between_two_epochs_the_way_to_a_goal_is_a_straight_line(tmp_path: Path) -> None:
    curves = Curves(seconds=[2.0, 4.0, 8.0], loss=[1.0, 0.6, 0.2], accuracy=[0.1, 0.2, 0.3])
    for goal, epochs, seconds, accuracy in ((1.5, 1.0, 2.0, 0.1), (0.6, 2.0, 6.0, 0.2), (0.5, 2.25, 8.0, 0.3)):
        assert (curves.epochs(goal), curves.goal_s(goal)) == (pytest.approx(epochs), pytest.approx(seconds))
        assert curves.goal_accuracy(goal) == accuracy
    assert (curves.epochs(0.1), curves.goal_s(0.1), curves.goal_accuracy(0.1)) == (None, None, None)
    file = tmp_path / "runs.jsonl"
    Results(file).add(Run("1gbit", "DDP", 3, curves))
    assert Results(file).of("1gbit", "DDP") == [curves]
    assert [Results(file).has("1gbit", "DDP", seed) for seed in (3, 4)] == [True, False]
