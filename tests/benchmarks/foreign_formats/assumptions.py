"""Facts that a workload's format does not state, given by the user."""

from __future__ import annotations

from dataclasses import dataclass

UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6}
"""Units per second. Dividing by these is exact where multiplying by 1e-3 is not."""


@dataclass(frozen=True)
class Assumptions:
    """The minibatch size, the unit of time, and the bandwidth of the link between accelerator and host."""

    minibatch: int
    time_unit: str
    """A key of `UNITS`."""
    bandwidth: float | None = None
    """Bytes/s, for edges with the time of a transfer and without its bytes."""

    @property
    def units_per_second(self) -> float:
        """How many units of time make a second."""
        return UNITS[self.time_unit]

    @property
    def note(self) -> str:
        """A sentence for the provenance of the imported profile."""
        return f"times in {self.time_unit}, a minibatch of {self.minibatch}: given by the user and not by the file"
