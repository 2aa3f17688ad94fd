"""The fastest batch of a uniform grid without a memory limit: branch and bound (`flush`) with a search that goes over
all pairs of cuts, stage by stage."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeplan import cost
from pipeplan.cuts import Flags, Floats
from pipeplan.grid import Shape
from pipeplan.solvers import flush
from pipeplan.solvers.flush import Batches, Bounds
from pipeplan.solvers.grids import Grids, steps_of
from pipeplan.solvers.limits import SLACK, Effort, Step, limits_of
from pipeplan.solvers.machines import batches
from pipeplan.solvers.terms import Terms


@dataclass
class GridBatches:
    """Batch times of one shape; `batches` scores the pipelines found."""

    grids: Grids
    shape: Shape
    batches: Batches

    @property
    def terms(self) -> Terms:
        """The terms of the cost model without a memory limit."""
        return self.batches.terms

    @property
    def minibatches(self) -> int:
        """Minibatches of one update."""
        return self.batches.minibatches

    @property
    def directions(self) -> int:
        """The number of bounds on the steady part."""
        return self.batches.directions

    @property
    def constant_s(self) -> float:
        """The part that all batches have in common, in seconds."""
        return self.batches.constant_s

    def bounds_of(self, steps: list[Step]) -> Bounds:
        """The bounds that a pipeline meets."""
        return self.batches.bounds_of(steps)

    def search(self, bounds: Bounds) -> tuple[float, list[Step]] | None:
        """The least sum over stages under limits on the bounds, with a pipeline that reaches it, or None."""
        self.batches.limits.step(self.grids.rows(self.shape))
        limits = tuple(bound * (1 + SLACK) for bound in bounds)
        allowed: dict[tuple[float, ...], Floats] = {}
        values, choices = np.zeros(0), []
        for stage, key in enumerate(self._keys):
            if key not in allowed:
                allowed[key] = np.where(self._within(key, limits), self._added[key], np.inf)
            if stage == 0:
                values = allowed[key][0]
                continue
            through = (values + self._crossed(stage, limits))[:, None] + allowed[key]
            choices.append(through.argmin(axis=0))
            values = through.min(axis=0)
        added = float(values[-1])
        return (added, steps_of(self.shape, choices)) if np.isfinite(added) else None

    @cached_property
    def _keys(self) -> list[tuple[float, ...]]:
        return [self.grids.stage(self.shape, stage) for stage in range(self.shape.stages)]

    @cached_property
    def _added(self) -> dict[tuple[float, ...], Floats]:
        """A stage's part of the sum that depends on the plan: its own passes where devices differ, else 0."""
        work = self.grids.between(self.terms.cuts.work_s)
        uniform = self.terms.problem.cluster.uniform and not self.terms.parallel
        return {key: np.zeros_like(work) if uniform else work / key[1] for key in self._keys}

    @cached_property
    def _bounded(self) -> dict[tuple[float, ...], list[Floats]]:
        """For every kind of stage, the times that each of the bounds limits."""
        cuts, bounded = self.terms.cuts, {}
        forward, both = self.grids.between(cuts.forward_s), self.grids.between(cuts.work_s)
        passes = (forward, both - forward) if self.directions == 2 else (both,)
        for key in self._keys:
            replicas, speed, *rate = key
            times = [cost.flush_steady(time / speed, self.minibatches, int(replicas)) for time in passes]
            bounded[key] = [*times, self.grids.exposed_s(self.grids.allreduce_s(replicas, *rate))]
        return bounded

    def _within(self, key: tuple[float, ...], limits: Bounds) -> Flags:
        good = self.grids.nested
        for times, limit in zip(self._bounded[key], limits, strict=True):
            good = good & (times <= limit)
        return good

    def _crossed(self, stage: int, limits: Bounds) -> Floats:
        """The transfers both ways over the boundary before a stage, by cut; infinite where a bound is exceeded."""
        cuts, (bandwidth, latency_s, links) = self.terms.cuts, self.grids.hop(self.shape, stage)
        ways = cuts.sent / bandwidth, cuts.returned / bandwidth
        steady = ways if self.directions == 2 else (np.maximum(*ways),)
        good = np.ones(len(cuts.ideals), dtype=bool)
        for way, limit in zip(steady, limits[:-1], strict=True):
            good &= cost.flush_steady(way, self.minibatches, links) <= limit
        return np.where(good, ways[0] + ways[1] + 2 * latency_s, np.inf)


def batch(grids: Grids, shape: Shape, deadline: float | None, effort: Effort) -> flush.Answer:
    """The fastest batch of a shape that is found before the deadline and within the effort."""
    limits = limits_of(grids.terms.problem, memory=False, deadline=deadline, shape=shape, effort=effort)
    return flush.best(GridBatches(grids, shape, batches(grids.terms, limits)))
