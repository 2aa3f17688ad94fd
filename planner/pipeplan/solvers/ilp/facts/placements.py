"""The candidate placements of a stage, without those that some best plan does not need.

A placement is r workers from s, together with the idle workers behind them up to e, so the next placement starts at e +
1 and the placements of a plan cover the workers without a gap. If all servers are alike, not every idle worker is worth
considering. Suppose that a placement π starts in a server behind idle workers of the same server. Moved towards them
within the server, π starts in the same component of every level as before and ends no later. So the components that
hold π, π with the placement before it, and π with the placement behind it are of no higher level, and only the last
workers of a server need ever be idle. With at most two levels, idle servers may change places with those behind them
until they are at the end of the cluster, too.

If servers share network cards or cores, a move changes their loads unless π is inside one server before and after. Idle
workers may then also be in front of a placement that spans servers. Idle servers still may change places.

No more workers are idle than the work and the upper bound on the pace allow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
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
    shared: bool = False
    """Whether servers are charged for what their workers share, so that it matters how many workers of a stage each
    server has."""
    most_idle: float = math.inf
    """No more workers than these may be idle."""
    unused: frozenset[int] = frozenset()
    """Workers that no stage may be on."""
    only: Mapping[tuple[int, int], frozenset[int]] | None = None
    """By the first worker and the replicas, the ends of all placements to consider, if these are known."""

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
            ordered = sorted(placements, key=lambda placement: (placement.start, placement.replicas, placement.end))
            return tuple(one for one in ordered if self._considered(one.start, one.replicas, one.end))
        return tuple(
            Placement(start, count, end)
            for start, count in self.places
            for end in self._ends(start + count - 1)
            if end - (start + count - 1) <= self.most_idle and self._considered(start, count, end)
        )

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """The first worker and the replicas of all placements, ascending."""
        if self.shapes is not None:
            return tuple(sorted({(one.start, one.replicas) for one in self.all}))
        total = self.cluster.workers
        return tuple(
            (start, count)
            for start in range(total)
            for count in range(1, min(self.most, total - start) + 1)
            if (self.only is None or (start, count) in self.only)
            and self.unused.isdisjoint(range(start, start + count))
        )

    def _considered(self, start: int, replicas: int, end: int) -> bool:
        return self.only is None or end in self.only.get((start, replicas), ())

    @cached_property
    def firsts(self) -> tuple[int, ...]:
        """The workers at which the first placement may start; all before it are idle."""
        if self.shapes is not None:
            return (0,)
        if not self.cluster.uniform:
            starts: Iterable[int] = range(self.cluster.workers)
        elif self.shared:
            starts = range(self.cluster.span(1) if self._interchangeable else self.cluster.workers)
        else:
            starts = (0,) if self._interchangeable else tuple(self.cluster.starts(1))[:-1]
        return tuple(start for start in starts if start <= self.most_idle)

    def final(self, placement: Placement) -> bool:
        """Whether no placement follows this one."""
        return placement.end == self.cluster.workers - 1

    def movable(self, worker: int) -> list[Placement]:
        """The placements from `worker` that may be moved to idle workers before it without any change of the cost.

        They are inside one server, of which `worker` is not the first. The result is empty where no candidate leaves
        such workers idle.
        """
        server = self.cluster.component(1, worker)
        tight = self.shapes is not None or (self.cluster.uniform and not self.shared)
        if tight or worker == self.cluster.starts(1)[server]:
            return []
        stop = self.cluster.starts(1)[server + 1]
        return [placement for placement in self.all if placement.start == worker and placement.last < stop]

    @property
    def _interchangeable(self) -> bool:
        """Whether all servers may change places."""
        return self.cluster.uniform and len(self.cluster.levels) <= 2

    def _ends(self, last: int) -> list[int]:
        """The last idle workers to consider behind a placement whose last busy worker is `last`."""
        total = self.cluster.workers
        if not self.cluster.uniform:
            return list(range(last, total))
        edges = [first - 1 for first in self.cluster.starts(1) if first - 1 >= last]
        if self.shared and self._interchangeable:
            # Not a whole server: the workers behind the edge of this one, and all but the last of the next.
            return sorted({*range(last, min(total - 1, edges[0] + self.cluster.span(1))), total - 1})
        if self.shared:
            return list(range(last, total))
        kept = edges[:1] if self._interchangeable else edges
        return sorted({last, *kept, total - 1})
