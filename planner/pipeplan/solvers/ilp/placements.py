"""The candidate placements of a stage, without those that some best plan does not need.

A placement is r workers from s, together with the idle workers behind them up to e, so the next placement starts at e +
1 and the placements of a plan cover the workers without a gap. If all servers are alike, not every idle worker is worth
considering. Suppose that a placement π starts in a server behind idle workers of the same server. Moved towards them
within the server, π starts in the same component of every level as before and ends no later. So the components that
hold π, π with the placement before it, and π with the placement behind it are of no higher level, and only the last
workers of a server need ever be idle. With at most two levels, idle servers may change places with those behind them
until they are at the end of the cluster, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from pipeplan.cluster_data.cluster import Cluster
from pipeplan.problem.grid_shapes import GridShape


@dataclass(frozen=True)
class Placement:
    """`replicas` workers from `start`; the workers behind them, up to and including `end`, stay idle."""

    start: int
    replicas: int
    end: int

    @property
    def last(self) -> int:
        """The last busy worker."""
        return self.start + self.replicas - 1

    @property
    def workers(self) -> range:
        """The busy workers."""
        return range(self.start, self.start + self.replicas)

    def covers(self, worker: int) -> bool:
        """Whether no other placement may have `worker`."""
        return self.start <= worker <= self.end


@dataclass(frozen=True)
class PlacementSet:
    """All candidate placements on a cluster with at most `most` replicas, and where the first may start."""

    cluster: Cluster
    most: int
    shapes: tuple[GridShape, ...] | None = None
    """The shapes of a uniform grid, if one is searched for; else None."""

    def of_shape(self, shape: GridShape) -> tuple[Placement, ...]:
        """The placements of a uniform grid; all workers behind it are idle."""
        ends = [*range(shape.replicas, shape.workers, shape.replicas), self.cluster.workers]
        return tuple(Placement(stage * shape.replicas, shape.replicas, end - 1) for stage, end in enumerate(ends))

    @cached_property
    def all(self) -> tuple[Placement, ...]:
        """All placements, by start, replicas and end."""
        if self.shapes is not None:
            placements = {
                placement for shape in self.shapes if shape.replicas <= self.most for placement in self.of_shape(shape)
            }
            return tuple(sorted(placements, key=lambda placement: (placement.start, placement.replicas, placement.end)))
        total = self.cluster.workers
        return tuple(
            Placement(start, count, end)
            for start in range(total)
            for count in range(1, min(self.most, total - start) + 1)
            for end in self._ends(start + count - 1)
        )

    @cached_property
    def firsts(self) -> tuple[int, ...]:
        """The workers at which the first placement may start; all before it are idle."""
        if self.shapes is not None:
            return (0,)
        if not self.cluster.uniform:
            return tuple(range(self.cluster.workers))
        if len(self.cluster.levels) <= 2:
            return (0,)
        return tuple(self.cluster.starts(1))[:-1]

    def final(self, placement: Placement) -> bool:
        """Whether no placement follows this one."""
        return placement.end == self.cluster.workers - 1

    def _ends(self, last: int) -> list[int]:
        """The last idle workers to consider behind a placement whose last busy worker is `last`."""
        total = self.cluster.workers
        if not self.cluster.uniform:
            return list(range(last, total))
        edges = [first - 1 for first in self.cluster.starts(1) if first - 1 >= last]
        kept = edges[:1] if len(self.cluster.levels) <= 2 else edges
        return sorted({last, *kept, total - 1})
