"""The runs of workers that a stage may be on, without those that some best plan does without.

A run is r workers from s, and the idle ones behind it up to e, so that the next run starts at e + 1: the runs of a plan
cover the workers without a gap. Where all servers are alike not every idle worker is worth considering. Let the run π
start in a server behind workers of that server which are idle. Moved towards them, within the server, it starts in the
same component of every level as before, and ends no later: the components that hold it, it and the run before, it and
the run behind, are of no higher level. So only the last workers of a server are ever idle. With at most two levels
idle servers may change places with those behind them: then they are at the end of the cluster as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from pipeplan.cluster_data import Cluster
from pipeplan.grid import Shape


@dataclass(frozen=True)
class Run:
    """`replicas` workers from `start`; those behind, up to and with `end`, stay idle."""

    start: int
    replicas: int
    end: int

    @property
    def last(self) -> int:
        """The last worker in use."""
        return self.start + self.replicas - 1

    @property
    def workers(self) -> range:
        """Those in use."""
        return range(self.start, self.start + self.replicas)

    def covers(self, worker: int) -> bool:
        """Whether no other run may have a worker."""
        return self.start <= worker <= self.end


@dataclass(frozen=True)
class Runs:
    """All runs of a cluster with at most so many replicas, and where the first may start."""

    cluster: Cluster
    most: int
    shapes: tuple[Shape, ...] | None = None
    """Where a uniform grid is looked for, those that it may have."""

    def of_shape(self, shape: Shape) -> tuple[Run, ...]:
        """The runs of a uniform grid; all workers behind it are idle."""
        ends = [*range(shape.replicas, shape.workers, shape.replicas), self.cluster.workers]
        return tuple(Run(stage * shape.replicas, shape.replicas, end - 1) for stage, end in enumerate(ends))

    @cached_property
    def all(self) -> tuple[Run, ...]:
        """By start, replicas and end."""
        if self.shapes is not None:
            runs = {run for shape in self.shapes if shape.replicas <= self.most for run in self.of_shape(shape)}
            return tuple(sorted(runs, key=lambda run: (run.start, run.replicas, run.end)))
        total = self.cluster.workers
        return tuple(
            Run(start, count, end)
            for start in range(total)
            for count in range(1, min(self.most, total - start) + 1)
            for end in self._ends(start + count - 1)
        )

    @cached_property
    def firsts(self) -> tuple[int, ...]:
        """Workers before which all may be idle."""
        if self.shapes is not None:
            return (0,)
        if not self.cluster.uniform:
            return tuple(range(self.cluster.workers))
        if len(self.cluster.levels) <= 2:
            return (0,)
        return tuple(self.cluster.starts(1))[:-1]

    def final(self, run: Run) -> bool:
        """Whether nothing is behind a run."""
        return run.end == self.cluster.workers - 1

    def _ends(self, last: int) -> list[int]:
        total = self.cluster.workers
        if not self.cluster.uniform:
            return list(range(last, total))
        edges = [first - 1 for first in self.cluster.starts(1) if first - 1 >= last]
        kept = edges[:1] if len(self.cluster.levels) <= 2 else edges
        return sorted({last, *kept, total - 1})
