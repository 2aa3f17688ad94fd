"""What the page on learning says of stale gradients follows from iterating them."""

from __future__ import annotations

import math

import pytest
from learning import DELAYS, limit


@pytest.mark.parametrize("delay", DELAYS)
def test_without_momentum_the_limit_is_the_published_one(delay: int) -> None:
    assert limit(delay, 0.0) == pytest.approx(2 * math.sin(math.pi / (4 * delay + 2)), rel=1e-6)


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


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("delay", [0, 1, 2, 4])
def test_below_the_limit_it_settles_and_above_it_leaves(delay: int, momentum: float) -> None:
    edge = limit(delay, momentum)
    assert settles(0.9 * edge, delay, momentum)
    assert not settles(1.1 * edge, delay, momentum)
