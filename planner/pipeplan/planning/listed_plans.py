"""Lists pipelines of a problem whose lower bound is below a limit, with every number of stages, workers and copies.

The dynamic program finds the plan that is best by the formulas. The plan that is fastest by the figure may have another
number of stages or workers, so a local search may not reach it. For a small problem all plans are listed. For a large
problem, plans with few stages and cuts at equal shares of the work are listed.

A stage lies on consecutive workers. The first of these is the next free worker, or the first worker of the next server
if the stage then lies on fewer servers.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence

from pipeplan.cluster_data.links import Links
from pipeplan.cost import formulas
from pipeplan.plan.plan import Plan, Stage
from pipeplan.plan.schedules import SPLITTING
from pipeplan.problem.problem import Problem
from pipeplan.solvers.plan_space import PlanSpace, plan_spaces

MOST_PLACES = 12
"""Largest number of places between units at which plans are cut."""
HALVINGS = 30
"""Number of steps of the search for stages of nearly equal time."""
MOST_STEPS = 20_000
"""Largest number of stage placements that one listing tries. Plans with few stages come first."""


Parts = tuple[tuple[int, range], ...]
"""The stages of a plan, as pairs (place where the stage ends, its workers)."""


def listed_plans(problem: Problem, limit_s: float) -> Iterator[Plan]:
    """Plans of a problem with a flush that may take less than `limit_s` seconds per microbatch.

    First comes a plan for each number of stages and workers, then a second for each, and so on: first those whose
    stages have equally many replicas, then those with the lowest bound. The plans have no depths yet.
    """
    listings = [_Listing(problem, space, limit_s) for space in plan_spaces(problem) if not space.unused]
    found = [(*one, listing) for listing in listings for one in listing.plans()]
    found.sort(key=lambda one: (len({len(workers) for _, workers in one[2]}), *one[:2]))
    for number in in_turns([shape for _, shape, _, _ in found]):
        _, _, parts, listing = found[number]
        yield listing.plan(parts)


def in_turns(shapes: Sequence[Hashable]) -> list[int]:
    """Indices of entries, in turns by shape: the first entry of every shape, then the second of each, and so on."""
    seen, turns = Counter[Hashable](), list[tuple[int, int]]()
    for number, shape in enumerate(shapes):
        turns.append((seen[shape], number))
        seen[shape] += 1
    return [number for _, number in sorted(turns)]


class _Listing:
    """The listing of one space of plans."""

    def __init__(self, problem: Problem, space: PlanSpace, limit_s: float) -> None:
        self.problem, self.space, inner = problem, space, space.inner(problem)
        options, self.cluster = problem.options, inner.cluster
        accumulate = options.accumulate or 1
        self.limit_s, self.accumulate = limit_s * accumulate, accumulate
        self.count = int(formulas.rounds(accumulate, space.copies))
        workers = min(self.cluster.workers, (options.max_workers or problem.cluster.workers) // space.copies)
        self.workers, self.most_replicas = workers, min(options.max_replicas or workers, self.count, workers)
        self.fastest = max(device.speed for device in self.cluster.devices)
        self.places = _places(problem)
        work = _work(problem)
        forward = [0.0, *itertools.accumulate(unit.forward_s for unit in problem.units)]
        self.work = [work[place] / self.fastest for place in self.places]
        self.forward = [forward[place] / self.fastest for place in self.places]
        # Under zb-h1, workers compute deferred weight gradients while the pipeline drains.
        self.splits = options.schedule in SPLITTING
        self.ahead = self.forward if self.splits else self.work
        parameters = [0, *itertools.accumulate(unit.parameter_bytes for unit in problem.units)]
        self.parameters = [parameters[place] for place in self.places]
        self.links, self.hidden_share = Links.of(self.cluster), problem.hidden_share
        self.rounds = [0.0, *(float(formulas.rounds(self.count, one)) for one in range(1, workers + 1))]
        self.left = MOST_STEPS
        self._starts_of: dict[tuple[int, int], list[int]] = {}
        self._rate_of: dict[tuple[int, int], tuple[float, float]] = {}

    def plans(self) -> Iterator[tuple[float, tuple[int, int], Parts]]:
        """(bound, (busy workers, stages), parts) of each plan, few stages first, until the steps are used up."""
        options = self.problem.options
        least = 2 if options.schedule in SPLITTING else 1
        most = min(options.max_stages or self.workers, self.workers, len(self.places) - 1)
        for stages in range(least, most + 1):
            if options.stages in (None, stages):
                yield from self._from(0, 0, stages, 0.0, 0.0, ())

    def _from(
        self, place: int, worker: int, stages: int, bound_s: float, first_s: float, before: Parts
    ) -> Iterator[tuple[float, tuple[int, int], Parts]]:
        """The plans that begin with the stages `before`, and have `stages` more from a place and a worker on.

        The stages `before` give `bound_s`, a lower bound on the time of an update. `first_s` is the exposed all-reduce
        time of the first stage.
        """
        last = len(self.places) - 1
        if stages == 0:
            busy = self.space.copies * sum(len(workers) for _, workers in before)
            yield bound_s / self.accumulate, (busy, len(before)), before
            return
        ends = range(place + 1, last - stages + 2) if stages > 1 else (last,)
        for end in ends:
            alone_s, begun_s = self.work[end] - self.work[place], self.ahead[place]
            backward_s = alone_s - self.forward[end] + self.forward[place]
            if place and self.splits:  # zb-h1 computes weight gradients while the pipeline drains
                begun_s -= backward_s / 2
            behind_s = (self.work[last] - self.work[end]) * self.count
            for replicas in range(min(self.most_replicas, self.workers - worker - stages + 1), 0, -1):
                own_s = self.rounds[replicas] * alone_s
                if max(begun_s + own_s, own_s, bound_s) >= self.limit_s or self.left <= 0:
                    break
                for start in self._starts(worker, replicas):
                    behind = self.workers - start - replicas
                    if behind < stages - 1 or (stages > 1 and behind_s / behind >= self.limit_s):
                        continue
                    self.left -= 1
                    # A stage begins when its own all-reduce has ended, and when the first minibatch arrives.
                    exposed_s = self._exposed_s(place, end, start, replicas, backward_s)
                    passed_s = max(bound_s, own_s + exposed_s, begun_s + own_s + (first_s if place else exposed_s))
                    if passed_s >= self.limit_s:
                        continue
                    stage = end, range(start, start + replicas)
                    after = end, start + replicas, stages - 1, passed_s, first_s if place else exposed_s
                    yield from self._from(*after, (*before, stage))

    def _exposed_s(self, place: int, end: int, start: int, replicas: int, backward_s: float) -> float:
        """Lower bound on the exposed all-reduce time of a stage, in seconds per update."""
        if replicas == 1:
            return 0.0
        where = start, start + replicas - 1
        if where not in self._rate_of:
            self._rate_of[where] = self.links.allreduce_among(where)
        size = self.parameters[end] - self.parameters[place]
        allreduce_s = float(formulas.ring_allreduce_time(replicas, size, *self._rate_of[where]))
        return allreduce_s - self.hidden_share * min(allreduce_s, backward_s)

    def _starts(self, worker: int, replicas: int) -> list[int]:
        """Possible first workers of a stage: the given worker, and the first worker of the next server if the stage
        then lies on fewer servers."""
        if (worker, replicas) not in self._starts_of:
            cluster, found = self.cluster, [worker]
            following = next((start for start in cluster.starts(1) if start > worker), cluster.workers)
            if worker not in cluster.starts(1) and following + replicas <= self.workers:
                here = cluster.server_of(worker + replicas - 1) - cluster.server_of(worker)
                if cluster.server_of(following + replicas - 1) - cluster.server_of(following) < here:
                    found.append(following)
            self._starts_of[worker, replicas] = found
        return self._starts_of[worker, replicas]

    def plan(self, parts: Parts) -> Plan:
        """The plan of the whole problem with these stages."""
        first, stages = 0, list[Stage]()
        for end, workers in parts:
            units = self.problem.units[self.places[first] : self.places[end]]
            stages.append(Stage(tuple(name for unit in units for name in unit.layers), tuple(workers), 1, 1))
            first = end
        return self.space.plan(self.problem, stages)


def _places(problem: Problem) -> list[int]:
    """Places where a stage may begin or end: place i lies behind the first i units.

    If there are many places, only the place with the least traffic near each equal share of the work is chosen.
    """
    count = len(problem.units)
    if count <= MOST_PLACES + 1:
        return list(range(count + 1))
    crossing = [0.0] * (count + 1)
    for flow in problem.flows:
        for place in range(flow.producer + 1, flow.consumers[-1] + 1):
            crossing[place] += flow.bytes + flow.gradient_bytes
    work = _work(problem)
    share = work[-1] / (MOST_PLACES + 1)
    chosen = {
        min(near, key=lambda place: (crossing[place], abs(work[place] - part * share)))
        for part in range(1, MOST_PLACES + 1)
        if (near := [place for place in range(1, count) if abs(work[place] - part * share) <= share / 2])
    }
    return [0, *sorted(chosen), count]


def _work(problem: Problem) -> list[float]:
    """For each place, the time of one microbatch in all units before it, in seconds, without the optimiser's step."""
    passes = (unit.forward_s + unit.backward_s - unit.update_s for unit in problem.units)
    return [0.0, *itertools.accumulate(passes)]


def uniform_plans(problem: Problem) -> Iterator[Plan]:
    """Uniform pipelines on servers that differ: all stages on equal devices have the same number of replicas.

    Stages take nearly equal time at their devices' speeds, and fit their memory. The plans have no depths yet.
    """
    cluster, options = problem.cluster, problem.options
    most = options.max_workers or cluster.workers
    for shape in _uniform_shapes(problem):
        if sum(map(len, shape)) > most or options.stages not in (None, len(shape)):
            continue
        for recomputes in (False, True):
            ends = _balanced(problem, shape, recomputes=recomputes)
            if ends is not None:
                stages, first = list[Stage](), 0
                for end, workers in zip(ends, shape, strict=True):
                    names = tuple(name for unit in problem.units[first:end] for name in unit.layers)
                    stages.append(Stage(names, tuple(workers), 1, 1, recomputes))
                    first = end
                yield Plan(tuple(stages))
                break


def _uniform_shapes(problem: Problem) -> Iterator[list[range]]:
    """The workers of the stages of uniform pipelines. Devices of one kind may be left idle."""
    cluster, count = problem.cluster, problem.options.accumulate or 1
    if len(set(cluster.devices)) == 1:
        return
    ways, first = list[list[list[range]]](), 0
    for _, run in itertools.groupby(cluster.devices):
        size = len(list(run))
        most = problem.options.max_replicas or size
        each = [one for one in range(1, min(size, most) + 1) if size % one == 0 and count % one == 0]
        ways.append([[], *([range(at, at + one) for at in range(first, first + size, one)] for one in each)])
        first += size
    for chosen in itertools.product(*ways):
        stages = [workers for run in chosen for workers in run]
        if 0 < len(stages) <= min(len(problem.units), problem.options.max_stages or len(stages)):
            yield stages


def _balanced(problem: Problem, shape: Sequence[range], *, recomputes: bool) -> list[int] | None:
    """Where each stage ends, as a number of units, such that the slowest stage is as fast as possible.

    A bisection finds the time of the slowest stage. The result is None if nothing fits in memory."""
    count, cluster = problem.options.accumulate or 1, problem.cluster
    times = [unit.forward_s * (1 + recomputes) + unit.backward_s - unit.update_s for unit in problem.units]
    state = [unit.parameter_bytes * (2 + problem.state_ratio) + unit.buffer_bytes for unit in problem.units]
    rates = [count / float(formulas.rounds(count, len(workers))) * cluster.speed_of(workers) for workers in shape]
    capacities = [problem.memory_of(workers) if problem.options.memory else float("inf") for workers in shape]

    def ends_for(limit_s: float) -> list[int] | None:
        ends, unit = list[int](), 0
        for number, (rate, capacity) in enumerate(zip(rates, capacities, strict=True)):
            held = 0 if recomputes else min(len(shape) - number, count)
            work_s = memory = 0.0
            first, last = unit, len(times) - (len(shape) - number - 1)
            while unit < last:
                work_s += times[unit] / rate
                memory += state[unit] + held * problem.units[unit].saved_bytes
                if work_s > limit_s or memory > capacity:
                    break
                unit += 1
            if unit == first:
                return None
            ends.append(unit)
        return ends if unit == len(times) else None

    high = sum(times) / min(rates)
    best, low = ends_for(high), 0.0
    for _ in range(HALVINGS if best else 0):
        tried = (low + high) / 2
        found = ends_for(tried)
        best, low, high = (best, tried, high) if found is None else (found, low, tried)
    return best
