"""The list of planted faults fits the code: every fault can be planted, and both packages have some."""

from __future__ import annotations

import planted_faults
from repository import ROOT


def test_every_fault_can_be_planted() -> None:
    assert planted_faults.problems(ROOT) == []
    counts = [sum(one.file.startswith(top) for one in planted_faults.FAULTS) for top in ("planner/", "launch/")]
    assert min(counts) >= 25
    assert sum(counts) >= 80
