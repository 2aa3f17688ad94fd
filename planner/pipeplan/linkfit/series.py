"""What was measured of one pair or group of workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeplan.linkfit.fit import Fit, Point, fit
from pipeplan.linkfit.levels import Nesting

MESSAGE, TOGETHER, RING = "message", "together", "ring"
"""A pair exchanges messages, both ways at once, while nobody else does; or several pairs do; or a group reduces."""


@dataclass(frozen=True)
class Series:
    """Times of one operation over sizes."""

    kind: str
    level: int
    """Number of the level in the nesting, from 0."""
    ranks: tuple[int, ...]
    """The two that exchange messages, or the group that reduces."""
    way: str
    """What carried it: `shared memory`, `Gloo`, `NCCL`."""
    samples: tuple[tuple[int, float], ...]
    """(bytes, median seconds)."""

    @property
    def points(self) -> list[Point]:
        """For a fit."""
        if self.kind == RING:
            return [Point.ring(len(self.ranks), size, seconds) for size, seconds in self.samples]
        return [Point.message(size, seconds) for size, seconds in self.samples]


def fit_all(series: Sequence[Series], latency_s: float | None = None) -> Fit:
    """One latency and bandwidth for several series, or with that latency one bandwidth."""
    return fit([point for one in series for point in one.points], latency_s)


def cards(series: Sequence[Series], nesting: Nesting, level: int) -> dict[tuple[int, int], Fit]:
    """What pairs of components of a level reach with all their workers, by the numbers of the components.

    The time of a size is that of the slowest pair of workers, its bytes those of all pairs: what one component sends.
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
