"""Neither open files nor memory of a run grow, in a short version of the benchmark."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults import plan_mnist
from growth import grows, measure


@pytest.mark.slow
def test_open_files_and_memory_do_not_grow(tmp_path: Path) -> None:
    uses = measure(plan_mnist(tmp_path, 2, 2), tmp_path / "run", minibatches=2400, samples=6)
    assert not grows(uses), uses
