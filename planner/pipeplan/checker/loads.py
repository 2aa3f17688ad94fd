"""The loads of resources and the parts of a batch, in the words of plan.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipeplan.checker.figures import ROUNDING


class Load(NamedTuple):
    """The time for which a resource is busy, in seconds, and what plan.json calls the resource."""

    seconds: float
    name: str


def busiest(loads: Sequence[Load]) -> frozenset[str]:
    """The names of the resources that are busy longest, up to rounding."""
    longest = max((load.seconds for load in loads), default=0.0)
    return frozenset(load.name for load in loads if load.seconds >= longest * (1 - ROUNDING))


@dataclass(frozen=True)
class BatchParts:
    """The parts of the time from one update to the next under a flush, in seconds.

    The field names are those of the JSON object `batch` in plan.json.
    """

    minibatches: int
    """Minibatches per update in one copy."""
    work_s: float
    """Passes of the first minibatch, from the stage that waits for its update to the slowest resource."""
    transfers_s: float
    """Transfers of the first minibatch between these stages."""
    steady_s: float
    """Time that the other minibatches add at this resource."""
    exposed_s: float
    """Time from the stage's last backward pass to the end of its update."""
    bound: str
    """The name of the resource in plan.json."""
    order_s: float = 0.0
    """Waiting that the order of the passes causes, where workers run several stages."""

    @property
    def total_s(self) -> float:
        """The sum of all parts."""
        return self.work_s + self.transfers_s + self.steady_s + self.exposed_s + self.order_s


def boundary_name(index: int) -> str:
    """The name in plan.json of the traffic behind the stage with this index."""
    return f"traffic from stage {index + 1} to stage {index + 2}"
