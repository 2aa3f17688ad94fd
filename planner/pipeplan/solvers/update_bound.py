"""A lower bound on the step time of every plan of 1f1b-flush and zb-h1, found in about a second.

The search for the best plan distinguishes states by the position of their workers, and takes long if there are many
cuts. This bound relaxes the problem until a state is only a cut. The fewest workers for the layers behind cut I, with
which an update can stay within a limit T, follow from the fewest workers need'(I → J) of one stage:

    need(I) = min over J ⊃ I of need'(I → J) + need(J)          from the output end, where need is 0

A stage I → J needs the fewest replicas that satisfy all of these conditions (symbols of docs/cost-model.md):

    passes      n p + e ≤ T
    filling     E + A(I) + x(I) + n p − (p − f) / 2 ≤ T          the first minibatch comes from the first stage
    messages    f + n (a(J) + a'(I)) / B + e ≤ T                 one card carries messages and the exchange in turn
    memory      fixed + d · (bytes of one minibatch) ≤ capacity  d = min(n, 1 + ⌈workers behind / r⌉)

E is the exchange of the first stage, and A(I) the forward passes of the layers before cut I. The bound joins r replicas
by the fastest links that any r workers may have. On unequal devices, a stage has a class of workers with a smallest
speed. Workers are counted by their speeds, so one number describes the workers that are left.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from pipeplan.cluster_data.cluster import Cluster
from pipeplan.cluster_data.links import Links
from pipeplan.cost import formulas
from pipeplan.cost.stage_table import StageTable
from pipeplan.problem.cuts import Cuts, Floats, Ints
from pipeplan.problem.problem import Problem
from pipeplan.solvers.cut_groups import CutGroups
from pipeplan.util.deadline import NO_DEADLINE, Deadline

GRID = 2
"""Number of grid steps in the slowest speed: on unequal devices, sums of workers' speeds are rounded down to
this grid."""
SLACK = 1 + 1e-9
AT_ONCE = 16
"""Number of groups of cuts between deadline checks."""
STEPS = 4
"""Number of iterations towards the fewest replicas of a stage. Each iteration gives a lower bound."""


@dataclass(frozen=True)
class WorkerClass:
    """The workers of at least a given speed. A stage whose slowest worker has this speed uses no other workers."""

    speed: float
    capacity: float
    """Largest memory of the slowest workers of the class, in bytes."""
    price: Floats
    """Sum of the speeds of the slowest 0, 1, 2, … of these workers; infinite for more workers than there are."""

    def price_of(self, replicas: Floats) -> Floats:
        """Smallest sum of speeds of `replicas` workers of the class."""
        return np.asarray(self.price[np.minimum(replicas, len(self.price) - 1).astype(np.intp)])

    @staticmethod
    def all_of(problem: Problem) -> list[WorkerClass]:
        """The classes of a problem's cluster, the fastest first."""
        cluster, most = problem.cluster, problem.most_replicas
        speeds = np.sort([device.speed for device in cluster.devices])
        found = []
        for speed in sorted(set(speeds.tolist()), reverse=True):
            own = [worker for worker, device in enumerate(cluster.devices) if device.speed == speed]
            capacity = max(problem.capacity_of([worker]) for worker in own)
            price = np.full(cluster.workers + 2, np.inf)
            fast_enough = speeds[speeds >= speed][:most]
            price[: len(fast_enough) + 1] = np.concatenate([[0.0], np.cumsum(fast_enough)])
            found.append(WorkerClass(speed, capacity, price))
        return found


@dataclass(frozen=True)
class FastestLinks:
    """The fastest links that any workers of the cluster may have."""

    ring_bandwidth: Floats
    """Bandwidth of a ring in bytes/s, by its number of members."""
    ring_latency_s: Floats
    port: float
    """Rate of all messages that one worker sends, in bytes/s."""
    latency_s: float

    @staticmethod
    def of(cluster: Cluster) -> FastestLinks:
        """The fastest links of a cluster."""
        links, workers = Links.of(cluster), cluster.workers
        bandwidth, latency = np.full(workers + 2, np.inf), np.zeros(workers + 2)
        spans = [
            0,
            *(int(np.diff(cluster.starts(level)).max()) for level in range(1, len(cluster.levels))),
            workers + 1,
        ]
        for level, (below, span) in enumerate(zip([1, *spans[1:]], spans[1:], strict=False), start=1):
            rates = links.rates[level]
            bandwidth[below + 1 : span + 1] = rates.allreduce.max()
            latency[below + 1 : span + 1] = rates.latency.min() * cluster.exchange_rings
        ports = [_port(links, worker) for worker in ([0] if cluster.uniform else range(workers))]
        return FastestLinks(bandwidth, latency, max(ports), float(latency[2]) / cluster.exchange_rings)


def _port(links: Links, worker: int) -> float:
    """Rate of messages that a worker sends, in bytes/s: the rate of its port, or of a slower card used by it alone."""
    cluster, rate = links.cluster, np.inf
    for level in range(len(cluster.levels)):
        starts = cluster.starts(level)
        component = cluster.component(level, worker)
        if starts[component + 1] - starts[component] == 1:
            rate = min(rate, links.card(level, worker)[0])
    return float(rate)


@dataclass(frozen=True, eq=False)
class GroupStages(StageTable):
    """Lower bounds on the figures of stages from every group of cuts (rows) to every group (columns)."""

    problem: Problem
    groups: CutGroups
    recompute: bool

    def inside(self, name: str) -> Floats:
        return self.groups.inside(name)

    @cached_property
    def received(self) -> Floats:
        return self.groups.crossing[:, None]

    @cached_property
    def sent(self) -> Floats:
        return self.groups.crossing[None, :]

    @cached_property
    def around(self) -> Floats:
        around = self.groups.crossing + self.groups.returned
        return np.asarray(around[None, :] + around[:, None])

    @property
    def state_ratio(self) -> float:
        return self.problem.state_ratio - self.problem.divided_ratio


@dataclass(frozen=True)
class Stages:
    """All stages of one class, with or without recomputation, as matrices over the groups of cuts at their ends."""

    kind: WorkerClass
    passes: Floats
    """Seconds of both passes of one minibatch."""
    tail: Floats
    """The part of the last passes that fills the time while earlier stages drain, in seconds."""
    replicas: Floats
    """Lower bound on the number of replicas that suffice."""
    depth: Floats
    """Upper bound on the minibatches in flight that fit in memory."""


@dataclass
class UpdateBound:
    """The bound for one problem.

    The problem's options give the minibatches of an update. Times are seconds per update.
    """

    problem: Problem
    cuts: Cuts
    splits: bool = True
    """Whether gradients of weights may be deferred, as under zb-h1."""

    @cached_property
    def minibatches(self) -> int:
        """M, the number of minibatches of an update."""
        assert self.problem.options.accumulate is not None
        return self.problem.options.accumulate

    @cached_property
    def groups(self) -> CutGroups:
        """The cuts, grouped if there are many."""
        return CutGroups.of(self.cuts)

    @cached_property
    def links(self) -> FastestLinks:
        """The fastest links of the cluster."""
        return FastestLinks.of(self.problem.cluster)

    @cached_property
    def classes(self) -> list[WorkerClass]:
        """The classes of workers."""
        return WorkerClass.all_of(self.problem)

    @cached_property
    def budget(self) -> float:
        """Sum of the speeds of all workers that may be used."""
        speeds = np.sort([device.speed for device in self.problem.cluster.devices])[::-1]
        return float(speeds[: self.problem.options.max_workers].sum())

    @cached_property
    def floor_s(self) -> float:
        """Lower bound on the time of an update: all workers compute without pause."""
        return self.minibatches * self.problem.work_s / self.budget

    # -- stages, as matrices from a group (row) to a later one (column) --

    @cached_property
    def inside(self) -> dict[str, Floats]:
        """Lower bounds on every total of a stage, and an upper bound on its backward pass."""
        found = {name: self.groups.inside(name) for name in self.groups.least}
        # With recomputation the backward pass takes as long as both passes.
        found["backward"] = self.groups.most_inside("work")
        return found

    def exchange_s(self, replicas: Floats | Ints, speed: float, pick: Any = ...) -> Floats:
        """Seconds of the exposed exchange of stages with `replicas` replicas, and of the optimiser's step."""
        inside, options = self.inside, self.problem.options
        counts = np.minimum(replicas, len(self.links.ring_bandwidth) - 1).astype(np.intp)
        rates = self.links.ring_bandwidth[counts], self.links.ring_latency_s[counts]
        ring = formulas.ring_allreduce_time(counts, inside["parameters"][pick], *rates)
        hidden = self.problem.hidden_share
        backward = np.inf if self.problem.cluster.executor else inside["backward"][pick] / speed
        exposed = formulas.flush_exposed(ring, backward, hidden)
        return np.asarray(exposed + inside["update"][pick] / speed * (options.accumulate or 1))

    @cached_property
    def messages(self) -> Floats:
        """Seconds for which the messages of one minibatch keep the port of a stage's worker busy."""
        if not self.problem.options.contention:
            return np.zeros((len(self.groups.crossing),) * 2)
        return (self.groups.crossing[None, :] + self.groups.returned[:, None]) / self.links.port

    @cached_property
    def ahead_s(self) -> Floats:
        """For each group of cuts, seconds of the first minibatch's passes through the layers before it."""
        return np.asarray(self.groups.least["forward" if self.splits else "work"] / self.classes[0].speed)

    @cached_property
    def way_s(self) -> Floats:
        """For each group of cuts, seconds that one minibatch's transfers across the boundary add."""
        way = (self.groups.crossing + self.groups.returned) / self.links.port + 2 * self.links.latency_s
        return np.asarray(way / (1 + self.splits))

    def _passes(self, kind: WorkerClass, recompute: bool) -> tuple[Floats, Floats]:
        """Seconds of both passes of one minibatch, and of their part that fills the time while earlier stages drain."""
        forward = self.inside["forward"] / kind.speed
        passes = self.inside["work"] / kind.speed + recompute * forward
        return passes, (passes - forward) / 2 * self.splits

    def replicas(self, limit_s: float, kind: WorkerClass, *, recompute: bool) -> Floats:
        """Lower bound on the replicas of stages within a limit; infinite if no number suffices."""
        forward, (passes, tail) = self.inside["forward"] / kind.speed, self._passes(kind, recompute)
        filled = (limit_s * SLACK - self.ahead_s - self.way_s)[:, None] + tail
        filled[0] = np.inf
        found = np.ones_like(passes)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            for _ in range(STEPS):
                rest = limit_s * SLACK - self.exchange_s(found, kind.speed)
                rounds = np.minimum(np.minimum(rest, filled) / passes, (rest - forward) / self.messages)
                rounds = np.floor(np.nan_to_num(rounds, nan=0.0, posinf=1e9) * SLACK)
                more = np.maximum(found, np.where(rounds < 1, np.inf, np.ceil(self.minibatches / rounds)))
                if np.array_equal(more, found):
                    break
                found = more
        return found

    # -- memory --

    def deepest(self, replicas: Floats, kind: WorkerClass, *, recompute: bool) -> Floats:
        """Upper bound on the minibatches in flight that fit in memory; below 1 if not even one fits."""
        stages = GroupStages(self.problem, self.groups, recompute)
        fixed = stages.kept_bytes + stages.version_bytes + formulas.replica_memory(stages.parameters, replicas)
        each = stages.each_bytes
        with np.errstate(divide="ignore", invalid="ignore"):
            depth = np.floor((kind.capacity - fixed) / each * SLACK)
        return np.where(fixed > kind.capacity * SLACK, 0.0, np.where(each > 0, depth, np.inf))

    # -- the question for a limit --

    def may_fit(self, limit_s: float, deadline: Deadline = NO_DEADLINE) -> bool:
        """Whether an update may take at most `limit_s` seconds. Raises `OutOfTime` at the deadline."""
        if limit_s < self.floor_s:
            return False
        stages = self._stages(limit_s)
        behind = self._behind(stages, deadline)
        if not np.isfinite(behind[1:]).any():
            return False
        return self._reaches_the_end(limit_s, stages, behind, deadline)

    def _stages(self, limit_s: float) -> list[Stages]:
        """The stages of every class, with and without recomputation."""
        found = []
        for kind in self.classes:
            for recompute in (False, True) if self.problem.options.recompute else (False,):
                replicas = self.replicas(limit_s, kind, recompute=recompute)
                depth = self.deepest(replicas, kind, recompute=recompute)
                passes, tail = self._passes(kind, recompute)
                found.append(Stages(kind, passes, tail, np.where(depth < 1, np.inf, replicas), depth))
                if bool((depth >= min(self.minibatches, 1 + self.problem.cluster.workers)).all()):
                    break
        return found

    def _for_memory(self, depth: Floats, behind: Floats) -> Floats:
        """Lower bound on the replicas whose depth fits in memory, given the sum of the speeds of the workers behind
        them."""
        workers = np.ceil(behind / self.classes[0].speed / SLACK)
        with np.errstate(divide="ignore", invalid="ignore"):
            fewest = np.minimum(workers / (depth - 1), self.minibatches / depth)
        return np.ceil(np.nan_to_num(fewest, nan=0.0) / SLACK)

    def _behind(self, stages: list[Stages], deadline: Deadline) -> Floats:
        """For every group of cuts, the smallest sum of speeds of workers for the layers behind it.

        The replicas in `stages` are raised to the number that their depth needs.
        """
        last = len(self.groups.crossing) - 1
        needs = np.zeros(last + 1)
        for begin in range(last - 1, -1, -1):
            if begin % AT_ONCE == 0:
                deadline.check()
            behind, least = needs[begin + 1 :], np.inf
            for one in stages:
                own = np.maximum(
                    one.replicas[begin, begin + 1 :], self._for_memory(one.depth[begin, begin + 1 :], behind)
                )
                one.replicas[begin, begin + 1 :] = own
                least = min(least, float((behind + one.kind.price_of(own)).min()))
            needs[begin] = least
        return needs

    def _reaches_the_end(self, limit_s: float, stages: list[Stages], behind: Floats, deadline: Deadline) -> bool:
        """Whether stages from the first layer to the last fit in the limit with all workers.

        A state is a group of cuts with the sum of the speeds of the workers before it, rounded down to a grid. For each
        state, only the smallest delay of the stages behind it counts.
        """
        last = len(self.groups.crossing) - 1
        grid = min(kind.speed for kind in self.classes) / (1 if len(self.classes) == 1 else GRID)
        places = int(self.budget * SLACK / grid) + 1
        delay = np.full((last + 1, places), np.inf)
        self._place_first(limit_s, delay, grid)
        room = np.minimum((self.budget * SLACK - behind) / grid, places - 1)
        for begin in range(1, last):
            if begin % AT_ONCE == 0:
                deadline.check()
            used = np.flatnonzero(np.isfinite(delay[begin]))
            used = used[used <= room[begin]]
            # Workers that do not shorten the delay are idle.
            used = used[delay[begin, used] < np.minimum.accumulate(np.concatenate([[np.inf], delay[begin, used]]))[:-1]]
            if not len(used):
                continue
            before_s = delay[begin, used] + self.way_s[begin]
            ends = slice(begin + 1, None)
            for one in stages:
                passes, tail = one.passes[begin, ends], one.tail[begin, ends]
                own = one.replicas[begin, ends]
                with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
                    spare = limit_s * SLACK - (before_s + self.ahead_s[begin])[:, None] + tail
                    rounds = np.floor(np.nan_to_num(spare / passes, nan=0.0, posinf=1e9) * SLACK)
                    count = np.where(rounds < 1, np.inf, np.maximum(np.ceil(self.minibatches / rounds), own))
                price = np.floor(one.kind.price_of(count) / grid * SLACK)
                at = used[:, None] + price
                row, column = np.nonzero(at <= room[ends])
                after_s = before_s[row]
                if not self.splits:
                    members = count[row, column]
                    exchange = self.exchange_s(members, one.kind.speed, (begin, column + begin + 1))
                    after_s = np.maximum(after_s, exchange - self.ahead_s[begin])
                np.minimum.at(delay, (column + begin + 1, at[row, column].astype(np.intp)), after_s)
            if np.isfinite(delay[last]).any():
                return True
        return bool(np.isfinite(delay[last]).any())

    def _place_first(self, limit_s: float, delay: Floats, grid: float) -> None:
        """Enter the first stages into the states. A stage with all layers is left out, because it is no pipeline."""
        counts = np.arange(1, self.problem.most_replicas + 1)[:, None]
        for kind in self.classes:
            exchange = self.exchange_s(counts, kind.speed, np.s_[:1, :])
            busy = np.maximum(
                formulas.flush_busy(self.inside["work"][:1] / kind.speed, self.minibatches, counts),
                self.inside["forward"][:1] / kind.speed + np.ceil(self.minibatches / counts) * self.messages[:1],
            )
            places = np.floor(kind.price[counts[:, 0]] / grid * SLACK)
            allowed = (exchange + busy <= limit_s * SLACK) & (places < delay.shape[1])[:, None]
            allowed[:, 0] = allowed[:, -1] = False
            row, column = np.nonzero(allowed)
            np.minimum.at(delay, (column, places[row].astype(np.intp)), exchange[row, column])
