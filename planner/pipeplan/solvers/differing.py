"""The search of `search` on servers that differ, where no place in the cluster stands for another: all runs are tried.

Of the states at a cut, one is kept for each first worker and level, that of the least demand; neither are different
workers compared, nor is there a shortcut to the replicas that suffice. So the effort grows with the square of the
number of workers. The rest of the search is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeplan import cost
from pipeplan.cuts import Floats, Ints
from pipeplan.links import Links
from pipeplan.solvers.runs import Runs, levels_between
from pipeplan.solvers.search import Limits, Search
from pipeplan.solvers.states import Flags, States
from pipeplan.solvers.terms import StageTerms, Terms


@dataclass(frozen=True)
class Differing(Terms):
    """A problem on a cluster whose servers differ. Independent of the threshold."""

    @cached_property
    def runs(self) -> Runs:
        """Where stages may be."""
        return Runs.of(self.problem.cluster, self.most_replicas)

    @cached_property
    def between(self) -> Ints:
        """The level of the smallest component that holds two workers."""
        return levels_between(self.problem.cluster)

    @cached_property
    def message(self) -> tuple[Floats, Floats]:
        """Bandwidth and latency in the component of a level (rows) that holds a worker (columns)."""
        cluster = self.problem.cluster
        rates = [Links.of(cluster).over_workers(level) for level in range(len(cluster.levels) + 1)]
        return np.array([rate.sendrecv for rate in rates]), np.array([rate.latency for rate in rates])

    @cached_property
    def speed_before(self) -> Floats:
        """The speeds of all workers before each worker 0 … D together."""
        return np.concatenate([[0.0], np.cumsum([device.speed for device in self.problem.cluster.devices])])

    @property
    def speed(self) -> float:
        """Of the slowest device: what takes longest takes no longer on any other."""
        return min(device.speed for device in self.problem.cluster.devices)

    @cached_property
    def fastest(self) -> float:
        """Speed of the fastest device."""
        return max(device.speed for device in self.problem.cluster.devices)

    @cached_property
    def floor(self) -> float:
        """No pipeline is faster: all work on all workers, the costliest unit on as many of the fastest as may be."""
        most = max(unit.forward_s + unit.backward_s for unit in self.problem.units)
        alone = most / (max(1, self.most_replicas) * self.fastest)
        return max(self.problem.work_s / self.problem.cluster.total_speed, alone)

    def stage_s(self, stage: StageTerms, runs: Ints | slice) -> tuple[Floats, Floats]:
        """Seconds per minibatch of stages (rows: cuts I) on runs (columns), and of one all-reduce."""
        at = self.runs
        replicas = at.replicas[runs]
        compute = cost.compute_time(stage.work_s[:, None], replicas, at.speed[runs])
        if not self.training:
            return compute, np.zeros(compute.shape)
        group = cost.ring_allreduce_time(
            replicas, stage.parameters[:, None], at.allreduce_bandwidth[runs], at.allreduce_latency[runs]
        )
        return cost.overlapped(compute, group / (self.accumulate or replicas), stage.overlap), group

    def boundary(self, cut: int, joined: Ints, first: Ints, links: Ints) -> tuple[Floats, Floats]:
        """Busy and one-way time of the boundary at a cut, in the component of a level that holds a worker."""
        busier = max(float(self.cuts.sent[cut]), float(self.cuts.returned[cut]))
        bandwidth, latency = (table[joined, first] for table in self.message)
        return cost.boundary_time(busier, bandwidth, links), cost.transfer_time(busier, bandwidth, latency)


class DifferingSearch(Search):
    """One threshold on servers that differ."""

    terms: Differing

    def __init__(self, terms: Differing, threshold: float, limits: Limits) -> None:
        self.terms, self.limits = terms, limits
        self.threshold, self.within = threshold, threshold * (1 + 1e-12)
        self.last = len(terms.cuts.ideals) - 1
        self.kept: dict[int, States] = {}
        # No cut can be reached with less speed left in front than its work needs, or with no worker left for it.
        speed = terms.cuts.work_s / self.within * (1 - 1e-9)
        self.lowest = np.maximum(np.searchsorted(terms.speed_before, speed), 1).astype(np.intp)
        self.need = np.maximum(np.ceil(speed / terms.fastest), 1).astype(np.intp)
        self.lowest[0] = self.need[0] = 0

    def _undominated(self, found: States) -> States:
        """The least demand of each place, level and whatever else counts."""
        keys = self._keys(found)
        order = np.lexsort((found.demand, *reversed(keys)))
        return found.take(order[_new(keys[:, order])])

    def _keys(self, states: States) -> Ints:
        """What tells states apart, as rows."""
        counting = self.limits.counting
        rows = [states.first, states.level]
        rows += [states.replicas] if self.terms.parallel else []
        rows += [states.stages] if counting.stages or counting.exact_stages else []
        rows += [states.workers] if counting.workers else []
        return np.stack(rows)

    def _extend(self, cut: int, states: States) -> Iterator[tuple[Ints, States]]:
        """Every state that a stage in front of these leads to, with the cuts that they are at."""
        states, rows = self._open(states)
        targets = self.terms.cuts.smaller(cut)
        if not len(states) or not len(targets):
            return
        ends, states, rows = self._spread(cut, states, rows)
        which, runs = self.terms.runs.with_ends(ends)
        if not len(runs):
            return
        transfer, allowed = self._joined(cut, states, which, runs)
        which, runs, transfer = which[allowed], runs[allowed], transfer[allowed]
        if not len(runs):
            return
        for recompute in (False, True) if self.limits.recompute else (False,):
            stage = self.terms.stage(cut, targets, recompute=recompute)
            depth, demand = self._sized(stage, states.demand[which], runs, transfer)
            yield from self._fresh(cut, targets, states, rows, which, runs, depth, demand, recompute)

    def _spread(self, cut: int, states: States, rows: Ints) -> tuple[Ints, States, Ints]:
        """The states with idle workers before them: where the stage in front ends, states by what joins them, rows."""
        first = states.first
        which = np.repeat(np.arange(len(first)), first)
        ends = np.arange(len(which)) - np.repeat(np.cumsum(first) - first, first) + 1
        spread, rows = states.take(which), rows[which]
        if cut != self.last:
            spread.numbers[1] = np.maximum(spread.level, self.terms.between[ends, spread.first])
        spread.numbers[0] = ends
        keys = self._keys(spread)
        order = np.lexsort((spread.demand, *reversed(keys)))
        kept = order[_new(keys[:, order])]
        return ends[kept], spread.take(kept), rows[kept]

    def _joined(self, cut: int, states: States, which: Ints, runs: Ints) -> tuple[Floats, Flags]:
        """One-way time from a run to the state behind it, and whether the boundary is quick enough."""
        at, allowed = self.terms.runs, np.ones(len(runs), dtype=bool)
        transfer = np.zeros(len(runs))
        if cut != self.last:
            first, behind = at.first[runs], np.minimum(states.first[which], self.terms.workers - 1)
            joined = np.maximum(self.terms.between[first, behind], states.level[which])
            links = np.ones(len(runs), dtype=np.intp)
            if self.terms.parallel:
                links = np.minimum(at.replicas[runs], states.replicas[which])
            busy, transfer = self.terms.boundary(cut, joined, first, links)
            allowed = busy <= self.within
        if self.limits.max_workers is not None:
            allowed = allowed & (states.workers[which] + at.replicas[runs] <= self.limits.max_workers)
        return transfer, allowed

    def _sized(self, stage: StageTerms, behind: Floats, runs: Ints, transfer: Floats) -> tuple[Floats, Floats]:
        """Depth and demand of stages (rows: cuts I) in front of states; infinite where one is too slow or too large."""
        terms, at = self.terms, self.terms.runs
        replicas = at.replicas[runs]
        time, group = terms.stage_s(stage, runs)
        good = (time <= self.within) & (at.first[runs] >= self.lowest[stage.targets][:, None])
        depth, wait = np.ones(time.shape), np.zeros(time.shape)
        counted = terms.training and (self.limits.memory or terms.accumulate is not None)
        if counted and terms.accumulate is None:
            wait = np.broadcast_to(cost.group_wait(group, self.threshold, replicas, terms.problem.copies), time.shape)
        if counted and not stage.is_last:
            depth = cost.in_flight_depth(behind, wait, transfer, self.threshold, replicas)
        if counted and terms.accumulate is not None:
            good &= self._in_time(depth, replicas, group)
        if self.limits.memory:
            (alone, growing), (shared, _) = (stage.memory(replicated=replicated) for replicated in (False, True))
            fixed = np.where(replicas > 1, shared[:, None], alone[:, None])
            good &= fixed + growing[:, None] * depth <= at.memory[runs] * (1 + 1e-12)
        depth = np.where(good, depth, np.inf)
        demand = cost.in_flight_behind(depth, replicas, wait) if counted else np.where(good, 0.0, np.inf)
        return depth, demand

    def _in_time(self, depth: Floats, replicas: Ints, group: Floats) -> Flags:
        """Whether two versions of the weights suffice (`cost.buffered_pace`)."""
        accumulate, copies = self.terms.accumulate, self.terms.problem.copies
        assert accumulate is not None
        spare = accumulate - depth * replicas
        reduce = group + self.terms.problem.copies_allreduce_s
        in_time: Flags = (spare >= 0) & (reduce <= self.within * (np.maximum(spare, 0) + 1 / copies))
        return in_time

    def _fresh(
        self,
        cut: int,
        targets: Ints,
        states: States,
        rows: Ints,
        which: Ints,
        runs: Ints,
        depth: Floats,
        demand: Floats,
        recompute: bool,
    ) -> Iterator[tuple[Ints, States]]:
        """Of all that lead to the same place from the same cut, the state of least demand."""
        at = self.terms.runs
        columns = {
            "first": at.first[runs],
            "level": at.span[runs],
            "stages": states.stages[which] + 1,
            "workers": states.workers[which] + at.replicas[runs],
            "replicas": at.replicas[runs],
            "depth": np.ones(len(runs), dtype=np.intp),
            "recompute": np.full(len(runs), int(recompute)),
            "end": np.full(len(runs), cut),
            "source": rows[which],
        }
        fresh = States.of(columns, np.zeros(len(runs)))
        keys = self._keys(fresh)
        order = np.lexsort(tuple(reversed(keys)))
        begins = np.flatnonzero(_new(keys[:, order]))
        sorted_demand = demand[:, order]
        least = np.minimum.reduceat(sorted_demand, begins, axis=1)
        # The first that has the least demand, in each group.
        counts = np.diff([*begins, len(order)])
        place = np.where(sorted_demand == np.repeat(least, counts, axis=1), np.arange(len(order)), len(order))
        target, group = np.nonzero(np.isfinite(least))
        if not len(target):
            return
        chosen = order[np.minimum.reduceat(place, begins, axis=1)[target, group]]
        made = States(fresh.numbers[:, chosen], least[target, group])
        made.numbers[5] = depth[target, chosen]
        good = self._worth(targets[target], made.workers, made.stages)
        if good.any():
            yield targets[target][good], made.take(good)


def _new(keys: Ints) -> Flags:
    """Which columns differ from the one before."""
    changed = np.ones(keys.shape[1], dtype=bool)
    changed[1:] = (np.diff(keys, axis=1) != 0).any(axis=0)
    return changed
