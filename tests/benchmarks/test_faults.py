"""A run in which workers are killed, at random moments and many of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from faults import plan_mnist, soak


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes as Linux shows them")
@pytest.mark.parametrize("stages", [2, 3])
def test_twenty_kills_change_nothing(stages: int, tmp_path: Path) -> None:
    result = soak(plan_mnist(tmp_path, 3, stages), tmp_path, kills=20, seed=1)
    assert result.right, result
