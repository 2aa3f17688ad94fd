"""The comparison until a goal: when it is reached, and how slow a link stands for the paper's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import table1_in_small
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


def test_an_all_reduce_over_the_link_takes_the_papers_share_of_computing(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    layers = [
        {"forward_s": 0.1, "backward_s": 0.2, "parameter_bytes": 600},
        {"forward_s": 0.1, "backward_s": 0.1, "parameter_bytes": 300},
    ]
    profile.write_text(json.dumps({"layers": layers}))
    rate = table1_in_small.link_rate(profile, 4.0)
    # Three workers send two parts of three twice: 1,200 of 900 bytes, in 4 times half a second.
    assert 1200 / rate == pytest.approx(4.0 * 0.5)
