"""The comparison until a goal: when it is reached."""

from __future__ import annotations

from pathlib import Path

import pytest
from goals import Curves, Results, Run

CURVES = Curves(seconds=[2.0, 4.0, 8.0], loss=[1.0, 0.6, 0.2], accuracy=[0.1, 0.2, 0.3])


@pytest.mark.parametrize(
    ("goal", "epochs", "seconds", "accuracy"),
    [(1.5, 1.0, 2.0, 0.1), (0.6, 2.0, 6.0, 0.2), (0.5, 2.25, 8.0, 0.3), (0.1, None, None, None)],
)
def test_between_two_epochs_the_way_to_a_goal_is_a_straight_line(
    goal: float, epochs: float | None, seconds: float | None, accuracy: float | None
) -> None:
    assert CURVES.epochs(goal) == (None if epochs is None else pytest.approx(epochs))
    assert CURVES.goal_s(goal) == (None if seconds is None else pytest.approx(seconds))
    assert CURVES.goal_accuracy(goal) == accuracy


def test_a_file_keeps_its_runs(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    Results(file).add(Run("1gbit", "DDP", 3, CURVES))
    again = Results(file)
    assert again.of("1gbit", "DDP") == [CURVES]
    assert again.has("1gbit", "DDP", 3)
    assert not again.has("1gbit", "DDP", 4)
