"""Measured times of one pair or group of workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeplan.linkfit.fit import Fit, Point, fit
from pipeplan.linkfit.levels import Nesting

MESSAGE, TOGETHER, RING = "message", "together", "ring"
"""Kinds of measurements: one pair exchanges messages in both directions, several pairs do so at once, or a group runs
an all-reduce."""


@dataclass(frozen=True)
class Series:
    """Times of one operation for several sizes."""

    kind: str
    level: int
    """Index of the level in the nesting."""
    ranks: tuple[int, ...]
    """The pair that exchanges messages, or the group of the all-reduce."""
    way: str
    """Transport: `shared memory`, `Gloo` or `NCCL`."""
    samples: tuple[tuple[int, float], ...]
    """(bytes, median seconds)."""

    @property
    def points(self) -> list[Point]:
        """The samples as points for a fit."""
        if self.kind == RING:
            return [Point.ring(len(self.ranks), size, seconds) for size, seconds in self.samples]
        return [Point.message(size, seconds) for size, seconds in self.samples]


def fit_all(series: Sequence[Series], latency_s: float | None = None) -> Fit:
    """Fit one latency and bandwidth to several series, or only a bandwidth if a latency is given."""
    return fit([point for one in series for point in one.points], latency_s)


def cards(series: Sequence[Series], nesting: Nesting, level: int) -> dict[tuple[int, int], Fit]:
    """Fits for pairs of components of a level whose workers all send at once, by the numbers of the components.

    The time of a size is that of the slowest pair of workers, and its bytes are those of all pairs together.
    """
    home = {rank: number for number, ranks in enumerate(nesting.below(level)) for rank in ranks}
    teams: dict[tuple[int, int], list[Series]] = {}
    for one in series:
        if (one.kind, one.level) == (TOGETHER, level):
            first, last = sorted(home[rank] for rank in one.ranks)
            teams.setdefault((first, last), []).append(one)
    found = {}
    for pair, members in teams.items():
        times: dict[int, list[float]] = {}
        for member in members:
            for size, seconds in member.samples:
                times.setdefault(size, []).append(seconds)
        points = [Point.message(size * len(each), max(each)) for size, each in times.items()]
        found[pair] = fit(points)
    return found
