"""What an epoch's line says."""

from __future__ import annotations

import pytest

from pipeplan_launch.job.callbacks import EpochResult


@pytest.mark.parametrize(
    ("judged", "test_loss", "line"),
    [
        (8.0, 0.5, "epoch 2/3  loss 1.2500  test accuracy 75.00% (6 of 8)"),
        (0.0, 0.00071, "epoch 2/3  loss 1.2500  test loss 0.0007"),
        (0.0, None, "epoch 2/3  loss 1.2500"),
    ],
    ids=["classes", "no classes", "not tested"],
)
def test_a_model_without_classes_has_its_test_loss_told(judged: float, test_loss: float | None, line: str) -> None:
    assert EpochResult(2, 1.25, 6.0, judged, test_loss).line(3, None) == line
