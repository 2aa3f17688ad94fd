"""A run that stale gradients have broken is noticed once, and one that learns is not."""

from __future__ import annotations

import pytest

from pipeplan_launch.telemetry.progress import UPDATES, LearningWatch


def said(losses: list[float], minibatches: int = 1, step: int = 1) -> list[str]:
    lines: list[str] = []
    watch = LearningWatch(minibatches, "gradients of stage 0 are 2 updates old", lines.append)
    for loss in losses:
        watch(step, loss)
    return lines


@pytest.mark.parametrize("after", [2.3, 2.4])
def test_a_loss_that_stays_where_it_began_is_noticed_once(after: float) -> None:
    (line,) = said([2.3] + [after] * 3 * UPDATES)
    assert line.startswith(f"warning: after {UPDATES} updates the loss is {after:g}, not below its first value, 2.3: ")
    assert "stage 0 are 2 updates old; try --flush-epochs 1, --correction ef or a lower learning rate" in line


def test_a_run_that_learns_or_is_too_short_is_left_alone() -> None:
    assert not said([2.3] + [2.2] * 3 * UPDATES)
    assert not said([2.3] * (UPDATES - 1))
    assert not said([2.3] + [9.0] * (UPDATES - 30) + [2.2] * UPDATES), "what counts is the end"


def test_updates_are_counted_and_not_minibatches() -> None:
    assert not said([2.3] * UPDATES, minibatches=4)
    assert said([2.3] * 4 * UPDATES, minibatches=4)
    assert said([2.3] * 2 * UPDATES, minibatches=4, step=2), "one of two replicas sees every second minibatch"
