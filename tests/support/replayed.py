"""The result of a replay whose figures are chosen by hand."""

from __future__ import annotations

from pipeplan.replay.outcome import LinkUse, ReplayedStage, ReplayResult
from pipeplan.replay.scaling import Scaling

FAST = ReplayedStage(1, 0.050, 0.02, 0.03, 0.0, 0.0, 0.05, 0.0)
STAGE = ReplayedStage(2, 0.200, 0.08, 0.12, 0.0, 0.0, 0.0, 0.0)
LINK = LinkUse("server 1", 1e9, "in", 5e7, 0.5, 5e7, 0.5)
REPLAYED = ReplayResult(
    "2-1", 0.1, 0.1, 0.12, 0.001, 100, Scaling(100, 3), (STAGE, FAST), (LINK,), 20.0, cores_busy=0.5
)
"""Two replicas that need 0.2 s each set the pace of 0.1 s; 0.12 s were measured."""
