"""The schedules with a flush on servers that differ, or over parallel links: `flush` with the search of `differing`.

On devices of different speeds the passes of the first minibatch, too, depend on the plan: they are part of V.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from pipeplan import cost
from pipeplan.cuts import Flags, Floats, Ints
from pipeplan.solvers.differing import Differing, DifferingSearch, new_columns
from pipeplan.solvers.differing_pace import Hop, Placed, hops, placed
from pipeplan.solvers.flush import Batches, Bounds
from pipeplan.solvers.limits import SLACK, Step
from pipeplan.solvers.states import States
from pipeplan.solvers.terms import StageTerms


@dataclass
class DifferingBatches(Batches):
    """Batch times on one component of a cluster whose servers differ."""

    terms: Differing

    @property
    def constant_s(self) -> float:
        """Of every batch: the all-reduce among copies."""
        return self.terms.problem.copies_allreduce_s

    def search(self, bounds: Bounds) -> tuple[float, list[Step]] | None:
        """The least that adds up over stages under limits on the bounds, and a pipeline that reaches it."""
        found = DifferingFlush(self, bounds)
        steps = found.run()
        return None if steps is None else (found.added_s, steps)

    def bounds_of(self, steps: list[Step]) -> Bounds:
        """The bounds of a pipeline."""
        stages, count = placed(self.terms, steps), self.minibatches
        joints: list[Hop | None] = [*hops(self.terms, steps), None]
        steady, exposed = [0.0] * self.directions, 0.0
        for index, (stage, hop) in enumerate(zip(stages, joints, strict=True)):
            worst = [float(cost.flush_steady(time, count, stage.step.replicas)) for time in self._times(stage)]
            if hop is not None:
                ways = crossing(self, stage.step.end, hop.bandwidth)
                worst = [
                    max(mine, float(cost.flush_steady(way, count, hop.links)))
                    for mine, way in zip(worst, ways, strict=True)
                ]
                worst[0] = max(worst[0], self._limited_s(stage.step, steps[index + 1], hop))
            steady = [max(pair) for pair in zip(steady, worst, strict=True)]
            before = self.terms.cuts.work_s[stage.step.start] / self.terms.fastest
            exposed = max(exposed, float(cost.flush_exposed(stage.group_s, before)))
        return *steady, exposed

    def _times(self, stage: Placed) -> tuple[float, ...]:
        """The passes of one minibatch, one for each bound of the steady part."""
        forward, whole = passes(self.terms, stage.terms, self.terms.runs.speed[stage.run])
        times = (forward, whole - forward) if self.directions == 2 else (whole,)
        return tuple(float(time[0]) for time in times)

    def _limited_s(self, step: Step, following: Step, hop: Hop) -> float:
        """What a depth below the minibatches of a replica adds to the steady part."""
        enough = step.depth >= cost.rounds(self.minibatches, step.replicas)
        if enough or self.directions == 2 or not self.limits.memory:
            return 0.0
        transfer = float(cost.transfer_time(self.terms.busier(step.end), hop.bandwidth, hop.latency_s))
        in_flight = following.depth * following.replicas
        return (self.minibatches - 1) * cost.depth_limited_pace(step.depth, step.replicas, in_flight, transfer, ())


def passes(terms: Differing, stage: StageTerms, speed: float | Floats) -> tuple[Floats, Floats]:
    """The forward pass of one minibatch, and both passes with what is computed twice, on devices of a speed."""
    forward = terms.cuts.forward_s[stage.cut] - terms.cuts.forward_s[stage.targets]
    return forward / speed, stage.work_s / speed


def crossing(batches: Batches, cut: int, bandwidth: float | Floats) -> tuple[Floats, ...]:
    """How long one minibatch keeps one link of a boundary busy, for each bound of the steady part."""
    cuts = batches.terms.cuts
    ways = np.asarray(float(cuts.sent[cut]) / bandwidth), np.asarray(float(cuts.returned[cut]) / bandwidth)
    return ways if batches.directions == 2 else (np.maximum(*ways),)


class DifferingFlush(DifferingSearch):
    """The least that adds up over stages, under limits on the bounds."""

    def __init__(self, batches: DifferingBatches, bounds: Bounds) -> None:
        super().__init__(batches.terms, 1.0, batches.limits)
        self.batches, self.count = batches, batches.minibatches
        self.steady = tuple(bound * (1 + SLACK) for bound in bounds[:-1])
        self.exposed = bounds[-1] * (1 + SLACK)
        self.pace = cost.flush_pace(self.steady[0], self.count)
        # (ceil(M/r) - 1) · pass ≤ bound needs r ≥ M · pass / (bound + pass), and pieces need no fewer than the whole.
        work, whole = self.terms.cuts.work_s / self.terms.fastest, sum(self.steady)
        with np.errstate(divide="ignore", invalid="ignore"):
            need = np.where(work > 0, self.count * work / (whole + work), 0.0)
        self.need = np.maximum(np.ceil(need - 1e-9), 1).astype(np.intp)
        self.need[0] = 0
        self.lowest = self.need

    def start(self) -> States:
        """With nothing added up."""
        return replace(super().start(), extra=np.zeros(1))

    @property
    def counts_depths(self) -> bool:
        """GPipe holds all minibatches of a replica: its depth follows from the replicas."""
        return self.limits.memory and self.batches.directions == 1

    def _thinned(self, states: States) -> Ints:
        """Rows of each place, level and whatever else counts that need less or add up to less than any other."""
        assert states.extra is not None
        keys = self._keys(states)
        order = np.lexsort((states.extra, states.demand, *reversed(keys)))
        rank, begins = np.empty(len(states), dtype=np.intp), new_columns(keys[:, order])
        rank[np.argsort(states.extra, kind="stable")] = np.arange(len(states))
        # The running minimum of what adds up starts anew with every group, as each later one lies below all before.
        added = rank[order] - np.cumsum(begins) * len(states)
        least = np.minimum.accumulate(added)
        rows: Ints = order[np.concatenate([[True], least[1:] < least[:-1]])]
        return rows

    def _quick_boundary(self, cut: int, bandwidth: Floats, links: Ints) -> Flags:
        quick = np.ones(len(bandwidth), dtype=bool)
        for way, bound in zip(crossing(self.batches, cut, bandwidth), self.steady, strict=True):
            quick &= cost.flush_steady(way, self.count, links) <= bound
        return quick

    def _sized(self, stage: StageTerms, behind: Floats, runs: Ints, transfer: Floats) -> tuple[Floats, Floats]:
        """Depth and demand of stages (rows: cuts I) in front of states; infinite where a limit is exceeded."""
        terms, at = self.terms, self.terms.runs
        replicas = at.replicas[runs]
        forward, whole = (time.T for time in passes(terms, stage, at.speed[runs][:, None]))
        times = (forward, whole - forward) if self.batches.directions == 2 else (whole,)
        good = at.first[runs] >= self.lowest[stage.targets][:, None]
        for time, bound in zip(times, self.steady, strict=True):
            good = good & (cost.flush_steady(time, self.count, replicas) <= bound)
        before = terms.cuts.work_s[stage.targets][:, None] / terms.fastest
        good &= cost.flush_exposed(terms.stage_s(stage, runs)[1], before) <= self.exposed
        depth = np.broadcast_to(self._depth(stage, behind, replicas, transfer), good.shape)
        if self.limits.memory:
            good &= self._fits(stage, runs, depth)
        demand = depth * replicas if self.counts_depths else np.zeros(good.shape)
        return np.where(good, depth, np.inf), np.where(good, demand, np.inf)

    def _depth(self, stage: StageTerms, behind: Floats, replicas: Ints, transfer: Floats) -> Floats:
        """Minibatches in flight, by run: never more than a replica has."""
        most = np.asarray(cost.rounds(self.count, replicas), dtype=np.float64)
        if self.batches.directions == 2:
            return most
        if stage.is_last or not self.counts_depths:
            return np.ones(len(replicas))
        # No transfer takes no time, even where the pace is nothing.
        with np.errstate(divide="ignore", invalid="ignore"):
            away = np.where(transfer > 0, 2 * transfer / self.pace, 0.0)
        depth: Floats = np.minimum(most, 1 + np.ceil((behind + away) / replicas - cost.ROUNDING))
        return depth

    def _fresh(
        self,
        stage: StageTerms,
        states: States,
        rows: Ints,
        which: Ints,
        runs: Ints,
        depth: Floats,
        demand: Floats,
    ) -> Iterator[tuple[Ints, States]]:
        """Every state, with what is added up behind the stage, and its own passes and transfers."""
        assert states.extra is not None
        added = states.extra[which] + passes(self.terms, stage, self.terms.runs.speed[runs][:, None])[1].T
        if not stage.is_last:
            assert isinstance(stage.cut, int)
            bandwidth, latency, _ = self._rates(stage.cut, states, which, runs)
            both = float(self.terms.cuts.sent[stage.cut] + self.terms.cuts.returned[stage.cut])
            added = added + both / bandwidth + 2 * latency
        fresh = self._columns(stage, states, rows, which, runs)
        target, column = np.nonzero(np.isfinite(demand))
        made = States(fresh.numbers[:, column], demand[target, column], added[target, column])
        yield from self._worthwhile(stage.targets[target], made, depth[target, column])
