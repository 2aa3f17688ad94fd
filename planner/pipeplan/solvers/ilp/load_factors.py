"""The factors from bytes over a network card to the charged pace of a plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoadFactors:
    """Factors from bytes over a card, divided by its bandwidth in bytes per U, to the charged pace in units of U."""

    messages: float
    """For the messages of one minibatch."""
    rings: float
    """For an all-reduce among the r replicas of a stage, where no schedule says how often: to be divided by r."""
    shared_rings: bool
    """Whether all stages share their updates, so that `rings` is not divided by r."""
    copies: float
    """For an all-reduce among copies of the pipeline."""

    def ring(self, replicas: int) -> float:
        """The factor for an all-reduce among the replicas of a stage."""
        return self.rings if self.shared_rings else self.rings / replicas
